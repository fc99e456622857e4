//! How ranks that another launcher started come together on one machine.
//!
//! Rank 0 opens a Unix socket at once ([`Host::open`]), before its long work of reading data; the others connect
//! and wait ([`attend`]). When rank 0 knows all that ranks must agree on, it makes the job's segment and hands it to each,
//! with the token and a message of its own ([`Host::begin`]); or it sends the others home with a reason ([`Host::refuse`]).
//! Then each joins, and all is as if our own launcher had started them.
//!
//! - The socket has the job's name, in a folder that only this user can open: `zeroth` in `$XDG_RUNTIME_DIR`, else
//!   `zeroth-UID` in the folder for temporary files. Ranks in containers that share neither do not meet, and end by their
//!   deadline.
//! - Both sides check that the other is of the same user. Nothing listens on a network.
//! - Whoever connects and says nothing is let go after some seconds, and never waited for.
//! - A rank 0 that dies closes the connections of those that wait, and they end at once. One that dies before it opens the
//!   socket is noticed by the deadline only; its launcher ends the others before that, as mpirun, srun and torchrun do.
//!
//! ```no_run
//! use zeroth_comm::environment::Place;
//! use zeroth_comm::local::Options;
//! use zeroth_comm::rendezvous::{Host, Patience, attend};
//!
//! let place = Place::of_this_process()?.expect("started by mpirun");
//! let patience = Patience::default().tell(|waiting| eprintln!("{waiting}"));
//! let comm = if place.rank == 0 {
//!     let host = Host::open(&place.job, place.world, patience)?;
//!     // … read the data, decide …
//!     host.begin(8 << 20, b"what rank 0 decided")?.join(0, &Options::default())?
//! } else {
//!     let invitation = attend(&place.job, place.rank, place.world, &patience)?;
//!     // … follow what invitation.message() says …
//!     invitation.join(&Options::default())?
//! };
//! # drop(comm);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod guest;
mod host;
mod socket;
mod wire;

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::JoinError;

pub use guest::{Invitation, attend};
pub use host::Host;

/// How often one looks whether the other side has come.
const LOOK: Duration = Duration::from_millis(20);
/// How long the other side may take for a few bytes once it is connected.
const SPEAK: Duration = Duration::from_secs(5);

/// Ranks that did not come together.
#[derive(Debug, thiserror::Error)]
pub enum MeetError {
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is no folder for the socket that is this user's alone.
    #[error(
        "cannot use the folder {} for the sockets of jobs: {source}; set XDG_RUNTIME_DIR to a folder of your own",
        path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// Somebody is rank 0 of that job already.
    #[error(
        "the socket {name} is taken: a process that was started as rank 0 of the same job runs already; end it, or start \
         this job under another name"
    )]
    NameTaken {
        /// The socket's name.
        name: String,
    },
    /// The process on the other side is another user's.
    #[error(
        "process {pid} at the socket {name} belongs to user {uid}, not to this one; it is not of this job"
    )]
    OtherUser {
        /// The process.
        pid: i32,
        /// Its user.
        uid: u32,
        /// The socket's name.
        name: String,
    },
    /// Rank 0 did not come.
    #[error(
        "rank {rank} has waited {} s for rank 0 of the job at the socket {name}; see what rank 0 said, and start all \
         ranks on one machine, with the same XDG_RUNTIME_DIR and folder for temporary files",
        waited.as_secs()
    )]
    NoHost {
        /// This rank.
        rank: usize,
        /// For how long it waited.
        waited: Duration,
        /// The socket's name.
        name: String,
    },
    /// Ranks did not come.
    #[error("{} did not come within {} s{}", ranks(missing), waited.as_secs(), turned_away(refused))]
    Missing {
        /// The ranks.
        missing: Vec<usize>,
        /// For how long rank 0 waited.
        waited: Duration,
        /// Who came and was sent away.
        refused: Vec<String>,
    },
    /// Rank 0 was there and is gone.
    #[error("rank 0 ended before the job began; see what it said")]
    HostGone,
    /// Rank 0 has found that the job cannot be, and told all ranks.
    #[error("rank 0 has refused the job: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// Rank 0 does not take this rank.
    #[error("rank {rank} is not let in: {reason}")]
    NotLetIn {
        /// This rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// What came over the socket is not what ranks of this version say.
    #[error("the other side of the socket {name} does not speak as ranks of this version do: {why}")]
    Garbled {
        /// The socket's name.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// This process was told to stop while it waited.
    #[error("stopped while waiting for {}", ranks(missing))]
    Stopped {
        /// The ranks it waited for.
        missing: Vec<usize>,
    },
    /// Rank 0's message is too long to send.
    #[error("a message of {bytes} bytes for the ranks is more than {most}")]
    MessageSize {
        /// Its bytes.
        bytes: usize,
        /// The most there can be.
        most: usize,
    },
    /// The job's segment could not be made or joined.
    #[error(transparent)]
    Join(#[from] JoinError),
}

impl MeetError {
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

fn ranks(missing: &[usize]) -> String {
    let numbers: Vec<String> = missing.iter().map(ToString::to_string).collect();
    format!("{} {}", if missing.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

fn turned_away(refused: &[String]) -> String {
    if refused.is_empty() { String::new() } else { format!("; turned away: {}", refused.join("; ")) }
}

/// Who is waited for, and for how long already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The rank that waits.
    pub rank: usize,
    /// The ranks it waits for.
    pub missing: Vec<usize>,
    /// For how long.
    pub seconds: u64,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} is waiting for {} ({} s)", self.rank, ranks(&self.missing), self.seconds)
    }
}

/// How long ranks wait for each other, and who is told meanwhile.
#[derive(Clone)]
pub struct Patience {
    host: Duration,
    guests: Duration,
    first: Duration,
    tell: Arc<dyn Fn(&Waiting) + Send + Sync>,
    stop: Arc<AtomicBool>,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            host: Duration::from_mins(30),
            guests: Duration::from_mins(2),
            first: Duration::from_secs(10),
            tell: Arc::new(|_| ()),
            stop: Arc::default(),
        }
    }
}

impl Patience {
    /// How long the others wait for rank 0, which reads the data first. Default: 30 minutes.
    #[must_use]
    pub fn host(mut self, most: Duration) -> Self {
        self.host = most;
        self
    }

    /// How long rank 0, once it is ready, waits for the others. Default: 2 minutes.
    #[must_use]
    pub fn guests(mut self, most: Duration) -> Self {
        self.guests = most;
        self
    }

    /// Called after 10 s of waiting, and then after each time twice as long, on the thread that waits.
    #[must_use]
    pub fn tell(mut self, tell: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        self.tell = Arc::new(tell);
        self
    }

    /// Waiting ends, with an error of its own, when this becomes true.
    #[must_use]
    pub fn stop_when(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }
}

/// Refuses a peer of another user, who could be let into the folder by mistake.
fn same_user(stream: &UnixStream, name: &str) -> Result<(), MeetError> {
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|errno| MeetError::System {
        what: "ask who is at the job's socket",
        source: errno.into(),
    })?;
    if peer.uid == rustix::process::geteuid() {
        return Ok(());
    }
    let (pid, uid) = (peer.pid.as_raw_nonzero().get(), peer.uid.as_raw());
    Err(MeetError::OtherUser { pid, uid, name: name.to_owned() })
}

/// Waiting, and when to tell of it: after the first time, and then after each twice as long.
struct Telling<'a> {
    patience: &'a Patience,
    next: Duration,
}

impl<'a> Telling<'a> {
    fn new(patience: &'a Patience) -> Self {
        Self { patience, next: patience.first }
    }

    /// A moment more of waiting, unless this process is to stop.
    fn wait(&mut self, waited: Duration, rank: usize, missing: Vec<usize>) -> Result<(), MeetError> {
        if self.patience.stop.load(Ordering::Relaxed) {
            return Err(MeetError::Stopped { missing });
        }
        if waited >= self.next {
            self.next = waited * 2;
            (self.patience.tell)(&Waiting { rank, missing, seconds: waited.as_secs() });
        }
        std::thread::sleep(LOOK);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
