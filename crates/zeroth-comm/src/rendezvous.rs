//! Rendezvous of ranks that another launcher started on one machine, or on one host of several: its lowest rank, the leader,
//! has the part of rank 0 then, and has its message from the coordinator ([`crate::hosts`]).
//!
//! Rank 0 opens a Unix socket at once ([`Coordinator::open`]), before it reads the data; the others connect and wait
//! ([`request_join`]). When rank 0 knows everything that ranks must agree on, it creates the job's segment and sends it to
//! each, with the token and a message ([`Coordinator::begin`]), or cancels the job with a reason ([`Coordinator::refuse`]).
//! Then each rank joins as if our own launcher had started it.
//!
//! - The socket has the job's name, in a folder private to the user: `zeroth` in `$XDG_RUNTIME_DIR`, else `zeroth-UID` in the
//!   folder for temporary files. Ranks in containers that share neither time out.
//! - Both sides check that the peer has the same user. Nothing listens on a network.
//! - Connections without a join request are closed after some seconds.
//! - A rank 0 that dies closes the connections of waiting ranks, which end at once. If it dies before it opens the socket,
//!   the others end by their timeout, or earlier by their launcher, as with mpirun, srun and torchrun.
//!
//! ```no_run
//! use zeroth_comm::environment::LaunchedRank;
//! use zeroth_comm::JoinOptions;
//! use zeroth_comm::rendezvous::{Coordinator, WaitPolicy, request_join};
//!
//! let launched = LaunchedRank::of_this_process()?.expect("started by mpirun");
//! let policy = WaitPolicy::default().tell(|waiting| eprintln!("{waiting}"));
//! let place = launched.place;
//! let comm = if place.rank == 0 {
//!     let coordinator = Coordinator::open(&launched.job, place.world, policy)?;
//!     // … read the data, decide …
//!     coordinator.begin(8 << 20, b"what rank 0 decided", &JoinOptions::default())?
//! } else {
//!     let admission = request_join(&launched.job, place.rank, place.world, &policy)?;
//!     // … follow what admission.message() says …
//!     admission.join(&JoinOptions::default())?
//! };
//! # drop(comm);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod coordinator;
mod peer;
mod socket;
mod wire;

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{JoinError, RankLost};
use crate::hosts::TokenError;
use crate::place::{Place, PlaceError};

pub use coordinator::Coordinator;
pub(crate) use peer::request_join_on_host;
pub use peer::{Admission, request_join};

/// Polling interval.
const LOOK: Duration = Duration::from_millis(20);
/// Timeout of a small message on an open connection.
const SPEAK: Duration = Duration::from_secs(5);

/// A rendezvous that failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum RendezvousError {
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(
        "cannot use the folder {} for the sockets of jobs: {source}; set XDG_RUNTIME_DIR to a folder of your own",
        path.display()
    )]
    Folder { path: PathBuf, source: io::Error },
    #[error(
        "the socket {name} is taken: a process that was started as rank 0 of the same job runs already; end it, or start \
         this job under another name"
    )]
    NameTaken { name: String },
    #[error(
        "process {pid} at the socket {name} belongs to user {uid}, not to this one; it is not of this job"
    )]
    OtherUser { pid: i32, uid: u32, name: String },
    #[error(
        "rank {rank} has waited {} s for rank {leader} of the job at the socket {name}; see the messages of rank {leader}, and \
         start all ranks of a host with the same XDG_RUNTIME_DIR and folder for temporary files",
        waited.as_secs()
    )]
    NoRank0 {
        rank: usize,
        /// The lowest rank of this host.
        leader: usize,
        waited: Duration,
        name: String,
    },
    #[error("{} did not join within {} s{}", ranks(missing), waited.as_secs(), rejected(refused))]
    Missing { missing: Vec<usize>, waited: Duration, refused: Vec<String> },
    #[error("rank {leader} ended before the job began; see its messages")]
    Rank0Gone {
        /// The lowest rank of this host.
        leader: usize,
    },
    #[error("rank 0 has cancelled the job: {reason}")]
    Refused { reason: String },
    #[error("rank {rank} is rejected: {reason}")]
    Rejected { rank: usize, reason: String },
    #[error("the peer at the socket {name} sent a message that is not of this version: {why}")]
    Malformed { name: String, why: String },
    #[error("a message of {bytes} bytes for the ranks is more than {most}")]
    MessageSize { bytes: usize, most: usize },
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error(
        "rank 0 cannot be met by other hosts at {address}: {source}; give an address of this host that the others reach, and a \
         free port"
    )]
    Listen { address: String, source: io::Error },
    #[error(
        "rank {rank} has waited {} s for rank 0 at {address}: {seen}; see the messages of rank 0, and check that its host is \
         reached at this address, through every firewall between them, and that all hosts have the same token",
        waited.as_secs()
    )]
    NoCoordinator { rank: usize, waited: Duration, address: String, seen: String },
    #[error(
        "ranks run on several hosts, and nothing says where they meet rank 0: set MASTER_ADDR and MASTER_PORT"
    )]
    NoAddress,
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error("the hosts of this job do not fit each other: {reason}")]
    Hosts { reason: String },
    #[error(transparent)]
    Lost(Box<RankLost>),
    #[error("rank {rank} has waited {} s for rank 0 to begin the job; see the messages of rank 0", waited.as_secs())]
    NoBegin { rank: usize, waited: Duration },
}

impl RendezvousError {
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// As in `rank 3`, or `ranks 1, 2, 8 to 15`.
fn ranks(missing: &[usize]) -> String {
    let runs = missing.chunk_by(|before, after| before + 1 == *after).map(|run| match run {
        [first, .., last] if run.len() > 2 => format!("{first} to {last}"),
        few => few.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    });
    let numbers: Vec<String> = runs.collect();
    format!("{} {}", if missing.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

fn rejected(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("; rejected: {}", refused.join("; ")) }
}

/// The ranks being waited for, and the time waited.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Waiting {
    /// The rank that waits.
    pub rank: usize,
    /// The ranks it waits for.
    pub missing: Vec<usize>,
    pub seconds: u64,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} is waiting for {} ({} s)", self.rank, ranks(&self.missing), self.seconds)
    }
}

/// How long ranks wait for each other, and how they report it.
#[derive(Clone)]
pub struct WaitPolicy {
    pub(crate) rank0: Duration,
    peers: Duration,
    pub(crate) hosts: Duration,
    first: Duration,
    tell: Arc<dyn Fn(&Waiting) + Send + Sync>,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self {
            rank0: Duration::from_mins(30),
            peers: Duration::from_mins(2),
            hosts: Duration::from_mins(1),
            first: Duration::from_secs(10),
            tell: Arc::new(|_| ()),
        }
    }
}

impl WaitPolicy {
    /// How long the others wait for rank 0, which reads the data first. Default: 30 minutes.
    #[must_use]
    pub fn rank0_timeout(mut self, timeout: Duration) -> Self {
        self.rank0 = timeout;
        self
    }

    /// How long rank 0 waits for the others once it is ready. Default: 2 minutes.
    #[must_use]
    pub fn peers_timeout(mut self, timeout: Duration) -> Self {
        self.peers = timeout;
        self
    }

    /// How long hosts wait for each other to connect. Default: a minute.
    #[must_use]
    pub fn hosts_timeout(mut self, timeout: Duration) -> Self {
        self.hosts = timeout;
        self
    }

    /// Waits for ranks no longer than for hosts.
    pub(crate) fn peers_as_hosts(self) -> Self {
        Self { peers: self.peers.min(self.hosts), ..self }
    }

    /// Called after 10 s of waiting and at doubling intervals, on the waiting thread.
    #[must_use]
    pub fn tell(mut self, tell: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        self.tell = Arc::new(tell);
        self
    }
}

/// Rejects a peer of another user, who may have access to the folder by mistake.
fn same_user(stream: &UnixStream, name: &str) -> Result<(), RendezvousError> {
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|errno| RendezvousError::System {
        what: "ask who is at the job's socket",
        source: errno.into(),
    })?;
    if peer.uid == rustix::process::geteuid() {
        return Ok(());
    }
    let (pid, uid) = (peer.pid.as_raw_nonzero().get(), peer.uid.as_raw());
    Err(RendezvousError::OtherUser { pid, uid, name: name.to_owned() })
}

/// The name of the socket of a host's ranks: two hosts of a job may share a folder for temporary files.
fn name_on_host(job: &str, place: Place) -> String {
    if place.is_one_host() { job.to_owned() } else { format!("{job}-from-{}", place.first()) }
}

/// Reports waiting after a first delay, then at doubling intervals.
pub(crate) struct WaitReporter<'a> {
    policy: &'a WaitPolicy,
    next: Duration,
}

impl<'a> WaitReporter<'a> {
    pub(crate) fn new(policy: &'a WaitPolicy) -> Self {
        Self { policy, next: policy.first }
    }

    /// Sleeps for a moment.
    fn wait(&mut self, waited: Duration, rank: usize, missing: Vec<usize>) {
        self.report(waited, rank, missing);
        std::thread::sleep(LOOK);
    }

    pub(crate) fn report(&mut self, waited: Duration, rank: usize, missing: Vec<usize>) {
        if waited >= self.next {
            self.next = waited * 2;
            (self.policy.tell)(&Waiting { rank, missing, seconds: waited.as_secs() });
        }
    }
}

#[cfg(test)]
mod tests;
