//! Errors between ranks, with the rank, the step and the operation by name.

use std::fmt;
use std::io;

use crate::op_name::{LastOp, OpName};

/// A collective that failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum CommError {
    #[error(transparent)]
    RankLost(#[from] Box<RankLost>),
    #[error("{kind} in {op}: {given} {what} given, its counts ask for {needed}")]
    Operands { op: OpName, kind: &'static str, what: &'static str, given: usize, needed: usize },
    #[error("{kind} in {op}: there is no root {root} among {world} rank(s), numbered from 0")]
    Root { op: OpName, kind: &'static str, root: usize, world: usize },
    #[error(
        "{op} was waited for before a collective that was started earlier; wait in the order of the calls"
    )]
    OutOfOrder {
        /// The collective that was waited for too early.
        op: OpName,
    },
    #[error("{op} moves {bytes} bytes of this host over the control connection, which takes at most {most}")]
    TooLong { op: OpName, bytes: usize, most: usize },
    #[error(
        "{op} was given up by this rank before it was complete: its communicator cannot be used any more"
    )]
    Abandoned { op: OpName },
    #[error("{op}: {call} failed: {reason}")]
    Library {
        op: OpName,
        /// What was called.
        call: &'static str,
        /// The library, and what it says.
        reason: String,
    },
}

/// Why a rank was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostReason {
    /// Its process ended.
    Dead,
    /// Its process is alive, but its heartbeat stopped.
    Stopped {
        /// How long a waiting rank observed it.
        seconds: u32,
    },
    /// It left the job while others needed it.
    Left,
    /// It dropped a collective without waiting.
    GaveUp,
    /// It never joined.
    NeverJoined {
        /// How long it was waited for.
        seconds: u32,
    },
    /// It is in a different collective than the rank that waits for it.
    Differs {
        /// The rank that noticed.
        from: usize,
    },
    /// Nothing was heard of its host.
    HostSilent {
        /// For how long.
        seconds: u32,
    },
    /// Its host sent what no host of this job sends.
    BadFrame,
}

impl LostReason {
    /// A number for the kind, never 0, and one for its detail.
    pub(crate) fn to_numbers(self) -> (u8, u32) {
        match self {
            Self::Dead => (1, 0),
            Self::Stopped { seconds } => (2, seconds),
            Self::Left => (3, 0),
            Self::GaveUp => (4, 0),
            Self::NeverJoined { seconds } => (5, seconds),
            Self::Differs { from } => (6, from as u32),
            Self::HostSilent { seconds } => (7, seconds),
            Self::BadFrame => (8, 0),
        }
    }

    /// The reason of two numbers.
    pub(crate) fn of_numbers(kind: u8, detail: u32) -> Option<Self> {
        Some(match kind {
            1 => Self::Dead,
            2 => Self::Stopped { seconds: detail },
            3 => Self::Left,
            4 => Self::GaveUp,
            5 => Self::NeverJoined { seconds: detail },
            6 => Self::Differs { from: detail as usize },
            7 => Self::HostSilent { seconds: detail },
            8 => Self::BadFrame,
            _ => return None,
        })
    }
}

/// A lost rank, and the rank that noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RankLost {
    /// The rank that is lost.
    pub rank: usize,
    pub host: String,
    /// Its process id; 0 if it never joined.
    pub pid: u32,
    pub reason: LostReason,
    /// Its last collective; `None` before its first.
    pub last: Option<LastOp>,
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
            LostReason::Dead => write!(f, " is dead: its process ended without leaving the job")?,
            LostReason::Stopped { seconds } => write!(
                f,
                " is stopped: its heartbeat has not moved for {seconds} s (resume a stopped process with \
                 `kill -CONT {}`; give a starved one processor time)",
                self.pid
            )?,
            LostReason::Left => write!(f, " left the job while other ranks still needed it")?,
            LostReason::GaveUp => write!(f, " gave up a collective it had started")?,
            LostReason::NeverJoined { seconds } => write!(f, " did not join the job within {seconds} s")?,
            LostReason::Differs { from } => write!(f, " is in another collective than rank {from}")?,
            LostReason::HostSilent { seconds } => write!(
                f,
                " is lost: its host has not responded for {seconds} s (its process is stopped, the host is down, or the \
                 network between the hosts is)"
            )?,
            LostReason::BadFrame => {
                write!(
                    f,
                    " is lost: its host sent a message that is not of this job on the control connection"
                )?;
            }
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

/// A job's segment could not be created or joined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum JoinError {
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(
        "a job of {world} rank(s) with {region} bytes each: ranks must be 1 to {most}, and the whole must fit the \
         address space"
    )]
    Size {
        world: usize,
        region: usize,
        /// The maximum number of ranks on one machine.
        most: usize,
    },
    #[error("the file handed over is not the segment of a job of this version: {why}")]
    NotASegment { why: String },
    #[error("the job token does not match the segment's: this rank belongs to another job")]
    Token,
    #[error("rank {rank} does not exist in a job of {world} rank(s), numbered from 0")]
    Rank { rank: usize, world: usize },
    #[error(
        "{world} rank(s) cannot be groups of {group}: groups have at least one rank, and all the same number"
    )]
    Groups { world: usize, group: usize },
    #[error("rank {rank} has been taken by process {pid}; each rank joins once")]
    Taken { rank: usize, pid: u32 },
    #[error("environment variable {name} {problem}; ranks are started by a launcher that sets it")]
    Environment { name: &'static str, problem: String },
}

impl JoinError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }
}
