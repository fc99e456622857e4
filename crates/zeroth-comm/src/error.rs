//! What can go wrong among ranks, with the rank, the step and the op by name.

use std::fmt;
use std::io;

use crate::comm::OpName;

/// A collective that did not happen.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// A rank is gone, or not in the same collective. The whole job ends: every rank gets this error.
    #[error(transparent)]
    RankLost(#[from] Box<RankLost>),
    /// Ranks hold different values of something that must be equal.
    #[error("ranks disagree in {op}: {} rank(s) differ from {common:#018x}: {}; start all ranks from the same program, config and data", differ.len(), listed(differ))]
    Disagree {
        /// The comparison.
        op: OpName,
        /// The value most ranks have.
        common: u64,
        /// The ranks with another value, and that value.
        differ: Vec<(usize, u64)>,
    },
    /// The operands of a call do not fit each other.
    #[error("{kind} in {op}: {given} {what} given, its counts ask for {needed}")]
    Operands {
        /// The call.
        op: OpName,
        /// Which collective.
        kind: &'static str,
        /// The operand.
        what: &'static str,
        /// Its size.
        given: usize,
        /// The size that would fit.
        needed: usize,
    },
    /// A root that is no rank.
    #[error("{kind} in {op}: there is no root {root} among {world} rank(s), numbered from 0")]
    Root {
        /// The call.
        op: OpName,
        /// Which collective.
        kind: &'static str,
        /// The rank asked for.
        root: usize,
        /// The number of ranks.
        world: usize,
    },
    /// Handles were not waited for in the order of their calls.
    #[error(
        "{op} was waited for before a collective that was started earlier; wait in the order of the calls"
    )]
    OutOfOrder {
        /// The collective that was waited for too early.
        op: OpName,
    },
}

fn listed(differ: &[(usize, u64)]) -> String {
    let parts: Vec<String> =
        differ.iter().map(|(rank, value)| format!("rank {rank} has {value:#018x}")).collect();
    parts.join(", ")
}

/// Why a rank does not take part any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Its process is gone.
    Dead,
    /// Its process is there, but its heartbeat has not moved.
    Stopped {
        /// For how long a waiting rank has watched it.
        seconds: u32,
    },
    /// It left the job while others still needed it.
    Left,
    /// It dropped a collective unwaited.
    GaveUp,
    /// It never came.
    NeverJoined {
        /// For how long it was waited for.
        seconds: u32,
    },
    /// It is in another collective than the rank that waits for it.
    Differs {
        /// The rank that saw it.
        from: usize,
    },
}

/// The collective that another rank was last in, as it told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpSeen {
    /// Its step.
    pub step: u64,
    /// Its name, up to 40 bytes of it.
    pub name: String,
    /// Its place in the program.
    pub index: u32,
    /// Whether the rank was still in it.
    pub inside: bool,
}

impl fmt::Display for OpSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.inside { "in" } else { "after" };
        write!(f, "{place} step {}, op {}#{}", self.step, self.name, self.index)
    }
}

/// A rank that does not take part any more, and who noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankLost {
    /// The rank that is lost.
    pub rank: usize,
    /// Its machine.
    pub host: String,
    /// Its process; 0 where it never came.
    pub pid: u32,
    /// What happened to it.
    pub reason: Lost,
    /// Where it was last: step and op. `None` before its first collective.
    pub last: Option<OpSeen>,
    /// The rank this error was returned on; `None` in a launcher's report.
    pub by: Option<usize>,
    /// The collective this rank was in.
    pub waiting_in: Option<OpName>,
}

impl std::error::Error for RankLost {}

impl fmt::Display for RankLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if self.by == Some(self.rank) {
            write!(f, " (this one)")?;
        }
        if self.pid == 0 {
            write!(f, " (host {})", self.host)?;
        } else {
            write!(f, " (host {}, pid {})", self.host, self.pid)?;
        }
        match self.reason {
            Lost::Dead => write!(f, " is dead: its process ended without leaving the job")?,
            Lost::Stopped { seconds } => write!(
                f,
                " is stopped: its heartbeat has not moved for {seconds} s (resume a stopped process with \
                 `kill -CONT {}`; give a starved one processor time)",
                self.pid
            )?,
            Lost::Left => write!(f, " left the job while other ranks still needed it")?,
            Lost::GaveUp => write!(f, " gave up a collective it had started")?,
            Lost::NeverJoined { seconds } => write!(f, " did not join the job within {seconds} s")?,
            Lost::Differs { from } => write!(f, " is in another collective than rank {from}")?,
        }
        match &self.last {
            Some(last) => write!(f, "; it was {last}")?,
            None => write!(f, "; it had not been in a collective yet")?,
        }
        match (self.by, self.waiting_in) {
            (Some(by), Some(op)) => write!(f, "; rank {by} was in {op}"),
            _ => Ok(()),
        }
    }
}

/// A job's segment could not be made or joined.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// No job of that size can be made.
    #[error(
        "a job of {world} rank(s) with {region} bytes each: ranks must be 1 to {most}, and the whole must fit the \
         address space"
    )]
    Size {
        /// Ranks asked for.
        world: usize,
        /// Bytes a rank asked for.
        region: usize,
        /// The most ranks a job on one machine can have.
        most: usize,
    },
    /// The descriptor is not a job's segment.
    #[error("the file handed over is not the segment of a job of this version: {why}")]
    NotASegment {
        /// What is wrong with it.
        why: String,
    },
    /// The token is not the job's.
    #[error("the job token does not match the segment's: this rank belongs to another job")]
    Token,
    /// There is no such rank.
    #[error("rank {rank} does not exist in a job of {world} rank(s), numbered from 0")]
    Rank {
        /// The rank asked for.
        rank: usize,
        /// The number of ranks.
        world: usize,
    },
    /// Somebody is that rank already.
    #[error("rank {rank} has been taken by process {pid}; each rank joins once")]
    Taken {
        /// The rank asked for.
        rank: usize,
        /// The process that took it.
        pid: u32,
    },
    /// The launcher's environment is missing or wrong.
    #[error("environment variable {name} {problem}; ranks are started by a launcher that sets it")]
    Environment {
        /// The variable.
        name: &'static str,
        /// What is wrong with it.
        problem: String,
    },
}

impl JoinError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }
}
