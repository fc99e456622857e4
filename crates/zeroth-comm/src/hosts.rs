//! The control connection between the hosts of a job: who takes part, who lives, and what all were told. Tensors never pass
//! here in a step; where they travel between GPUs, [`ControlComm`] is for all other bytes of ranks.
//!
//! It is a star over TCP. The coordinator is a thread in the process of rank 0; the lowest rank of every other host, its leader,
//! keeps one connection to it. On one host there is neither, and nothing listens.
//!
//! - **Liveness.** Both sides beat four times a second. A connection that closes without a word is a death, at once; silence for
//!   [`Timing::host_silence`] is a stopped leader or a lost host. Ranks judge those of their own host, as on one machine, and a
//!   leader reports what they find. The coordinator alone judges other hosts, leaders judge the coordinator. The first loss wins:
//!   the coordinator tells it to all hosts, and leaders write it into their segments, where every wait finds it.
//! - **Decisions.** The first step begins, or the job is stopped before it, once for all hosts. Requests to stop and to save reach
//!   all ranks from any host.
//! - **Agreement.** Small bytes of all ranks are gathered through the leaders ([`HostLink::gather`]).
//! - **Trust.** Both sides prove that they know the job's token before anything else is said, and every frame proves it again, in
//!   its place: see `docs/security.md`. Once all hosts are there, nothing listens any more.
//! - **Clocks.** No time is sent. Each side measures silence by its own monotonic clock.
//!
//! ```no_run
//! use zeroth_comm::environment::LaunchedRank;
//! use zeroth_comm::hosts::{HostOptions, JobCoordinator, TokenSource, request_join};
//! use zeroth_comm::{JoinOptions, OpName};
//!
//! let launched = LaunchedRank::of_this_process()?.expect("started by srun");
//! let options = HostOptions::default()
//!     .token(TokenSource::of_environment()?)
//!     .address(launched.rank0.clone())
//!     .expected(launched.hosts.clone());
//! let joined = if launched.place.rank == 0 {
//!     let coordinator = JobCoordinator::open(&launched.job, launched.place, &options)?;
//!     // … read the data, decide …
//!     coordinator.begin(8 << 20, b"what rank 0 decided", &JoinOptions::default())?
//! } else {
//!     let admission = request_join(&launched.job, launched.place, &options)?;
//!     // … follow what admission.message() says …
//!     admission.join(&JoinOptions::default())?
//! };
//! // Collectives among the ranks of this host go over joined.group. Rails, and what they call while they wait:
//! let watch = joined.link.watch();
//! let settings = joined.link.gather(&*joined.group, OpName::new(0, "agreement", 0), b"my settings")?;
//! assert_eq!(settings.len(), launched.place.world);
//! // … train …
//! joined.link.leave(&*joined.group, OpName::new(100, "leave", 0))?;
//! # drop(watch);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod address;
mod chunks;
mod codec;
mod control_comm;
mod control_thread;
mod frame;
mod handshake;
mod leader;
mod link;
mod local_host;
mod mac;
mod meet;
mod message;
mod settings;
mod star;
mod token;

use std::sync::Arc;

use crate::error::CommError;
use crate::join_options::Timing;
use crate::op_name::OpName;
use crate::place::HostTable;
use crate::rendezvous::WaitPolicy;

pub use address::{PortChoice, Rank0Address};
pub use control_comm::ControlComm;
pub use link::{HostLink, JoinedHost};
pub use meet::{HostAdmission, JobCoordinator, request_join};
pub use token::{TokenError, TokenSource};

/// What a rank calls while it polls outside of its host's shared memory, with the operation that it is in: it fails once the job
/// has ended.
pub type HostWatch = Arc<dyn Fn(OpName) -> Result<(), CommError> + Send + Sync>;

/// How hosts meet. On one host none of it is needed.
#[derive(Clone, Default)]
pub struct HostOptions {
    token: Option<TokenSource>,
    address: Option<Rank0Address>,
    policy: WaitPolicy,
    timing: Timing,
    name: Option<String>,
    expected: Option<HostTable>,
}

impl HostOptions {
    /// Where the token comes from.
    #[must_use]
    pub fn token(mut self, token: Option<TokenSource>) -> Self {
        self.token = token;
        self
    }

    /// Where rank 0 is met; it listens there and nowhere else.
    #[must_use]
    pub fn address(mut self, address: Option<Rank0Address>) -> Self {
        self.address = address;
        self
    }

    /// How long ranks wait for each other.
    #[must_use]
    pub fn policy(mut self, policy: WaitPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Sets the timeouts.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// The name of this host in messages. Default: its hostname.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The hosts that are to come, where they are known: those that do not are named.
    #[must_use]
    pub fn expected(mut self, hosts: Option<HostTable>) -> Self {
        self.expected = hosts;
        self
    }
}

/// For fuzzing: any bytes, as a proven peer's frames would hold them. Returns whether they are a message.
#[doc(hidden)]
pub fn is_message(bytes: &[u8]) -> bool {
    let found = message::HostMessage::of_bytes(bytes);
    if let Some(message) = &found {
        assert_eq!(
            message::HostMessage::of_bytes(&message.to_bytes()).as_ref(),
            Some(message),
            "it reads again"
        );
    }
    found.is_some() | settings::JobSettings::of_bytes(bytes).is_some()
}

/// For fuzzing: any bytes, as a stranger would send them on a connection. Returns how many frames were believed: none.
#[doc(hidden)]
pub fn believed_frames(bytes: &[u8]) -> usize {
    let mut opener = frame::Opener::new(mac::MacKey::new(b"a key that the stranger does not know"));
    let mut from = bytes;
    std::iter::from_fn(|| opener.open(&mut from).ok()).count()
}

#[cfg(test)]
mod tests;
