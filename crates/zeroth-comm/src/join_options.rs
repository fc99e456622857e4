//! Options of a rank that joins a job, and the warnings it asks for.

use std::sync::Arc;
use std::time::Duration;

use crate::op_name::{LastOp, OpName};

/// Called with a warning on the waiting thread.
pub(crate) type OnSlow = dyn Fn(&SlowRank) + Send + Sync;

/// JoinOptions of a rank.
#[derive(Clone)]
pub struct JoinOptions {
    pub(crate) threads: usize,
    pub(crate) group: Option<usize>,
    pub(crate) timing: Timing,
    pub(crate) on_slow: Option<Arc<OnSlow>>,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self { threads: 1, group: None, timing: Timing::default(), on_slow: None }
    }
}

impl JoinOptions {
    /// Compute threads per rank. Waits spin only where ranks × threads fit the CPUs.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Ranks of a group, in a mesh of several groups: [`crate::Comm::mesh`] then has both axes. The groups are those of all
    /// ranks that join: equal, in rank order.
    #[must_use]
    pub fn group(mut self, group: usize) -> Self {
        self.group = Some(group);
        self
    }

    /// Sets the timeouts.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Called on the waiting thread when a live rank has been waited for long.
    #[must_use]
    pub fn on_slow(mut self, warn: impl Fn(&SlowRank) + Send + Sync + 'static) -> Self {
        self.on_slow = Some(Arc::new(warn));
        self
    }
}

/// Timeouts. Tests shorten the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Timing {
    pub heartbeat: Duration,
    /// A rank whose heartbeat has not moved for this long is noted: it may be stopped.
    pub silent: Duration,
    /// A rank whose heartbeat has not moved for this long is lost.
    pub lost: Duration,
    /// The interval of warnings during a long wait.
    pub slow: Duration,
    /// The time for a rank to join.
    pub join: Duration,
    /// A host of which nothing was heard for this long is lost.
    pub host_silence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(250),
            silent: Duration::from_secs(3),
            lost: Duration::from_secs(30),
            slow: Duration::from_secs(30),
            join: Duration::from_mins(1),
            host_silence: Duration::from_secs(5),
        }
    }
}

/// A warning: a rank has been waited for long.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct SlowRank {
    /// The rank being waited for.
    pub rank: usize,
    /// Set where it shows no sign of life.
    pub silence: Option<Silence>,
    /// Its current or last collective; `None` before its first.
    pub last: Option<LastOp>,
    pub waiting_in: OpName,
    pub seconds: u64,
}

/// A rank without a heartbeat: stopped, or starved of CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Silence {
    pub pid: u32,
    /// Seconds of silence after which the job ends.
    pub limit: u64,
}

impl std::fmt::Display for SlowRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(Silence { pid, limit }) = self.silence {
            let Self { rank, waiting_in, seconds, .. } = self;
            return write!(
                f,
                "{waiting_in} waits for rank {rank} (pid {pid}), which has not responded for {seconds} s; if it is stopped, \
                 `kill -CONT {pid}` continues it. After {limit} s the run ends without a save"
            );
        }
        write!(f, "{} has waited {} s for rank {}", self.waiting_in, self.seconds, self.rank)?;
        match &self.last {
            Some(last) => write!(f, ", which lives and is {last}"),
            None => write!(f, ", which has not been in a collective yet"),
        }
    }
}
