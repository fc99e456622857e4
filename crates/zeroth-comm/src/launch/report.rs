//! How each rank ended, for people.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::error::{OpSeen, RankLost};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// By itself.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// By a signal.
    Killed {
        /// The signal's number.
        signal: i32,
    },
    /// The system does not tell.
    Unknown,
}

impl How {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exited { code },
            (None, Some(signal)) => Self::Killed { signal },
            (None, None) => Self::Unknown,
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "exit code {code}"),
            Self::Killed { signal } => match name(*signal) {
                Some(name) => write!(f, "killed by {name}"),
                None => write!(f, "killed by signal {signal}"),
            },
            Self::Unknown => write!(f, "ended, the system does not say how"),
        }
    }
}

/// The signals that end a process, by their numbers on x86-64 and aarch64.
fn name(signal: i32) -> Option<&'static str> {
    const NAMES: [(i32, &str); 17] = [
        (1, "SIGHUP"),
        (2, "SIGINT"),
        (3, "SIGQUIT"),
        (4, "SIGILL"),
        (5, "SIGTRAP"),
        (6, "SIGABRT"),
        (7, "SIGBUS"),
        (8, "SIGFPE"),
        (9, "SIGKILL"),
        (10, "SIGUSR1"),
        (11, "SIGSEGV"),
        (12, "SIGUSR2"),
        (13, "SIGPIPE"),
        (14, "SIGALRM"),
        (15, "SIGTERM"),
        (24, "SIGXCPU"),
        (31, "SIGSYS"),
    ];
    NAMES.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name)
}

/// How one rank ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnd {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub how: How,
    /// Whether the launcher had sent it a signal, because another rank failed or the job was to stop.
    pub by_launcher: bool,
    /// Killed by the system while its control group ran out of memory.
    pub out_of_memory: bool,
    /// The collective it was last in.
    pub last: Option<OpSeen>,
}

impl fmt::Display for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}): {}", self.rank, self.pid, self.how)?;
        if self.by_launcher {
            write!(f, ", ended by the launcher")?;
        }
        if self.out_of_memory {
            write!(f, ", out of memory: its control group's limit was reached")?;
        }
        match &self.last {
            Some(last) if self.how != (How::Exited { code: 0 }) => write!(f, "; it was {last}"),
            _ => Ok(()),
        }
    }
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Every rank, in order.
    pub ranks: Vec<RankEnd>,
    /// The rank whose failure ended the job.
    pub first: Option<usize>,
    /// The rank the others were told of.
    pub lost: Option<RankLost>,
}

impl Report {
    /// Whether every rank ended by itself with exit code 0.
    pub fn success(&self) -> bool {
        self.ranks.iter().all(|end| end.how == How::Exited { code: 0 })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.success() {
            return write!(f, "{} rank(s) ended well", self.ranks.len());
        }
        if let Some(end) = self.first.and_then(|first| self.ranks.get(first)) {
            writeln!(f, "the job ended with {end}")?;
        }
        if let Some(lost) = &self.lost {
            writeln!(f, "{lost}")?;
        }
        for end in self.ranks.iter().filter(|end| Some(end.rank) != self.first) {
            writeln!(f, "  {end}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, how: How) -> RankEnd {
        RankEnd { rank, pid: 70, how, by_launcher: false, out_of_memory: false, last: None }
    }

    #[test]
    fn a_wait_status_becomes_a_code_or_a_signal() {
        // wait(2): the code is in bits 8 to 15, the signal in bits 0 to 6.
        assert_eq!(How::of(ExitStatus::from_raw(3 << 8)), How::Exited { code: 3 });
        assert_eq!(How::of(ExitStatus::from_raw(11)).to_string(), "killed by SIGSEGV");
        assert_eq!(How::of(ExitStatus::from_raw(40)).to_string(), "killed by signal 40");
    }

    #[test]
    fn a_report_begins_with_the_rank_that_failed_first() {
        let ranks = vec![
            RankEnd { by_launcher: true, ..end(0, How::Killed { signal: 15 }) },
            RankEnd { out_of_memory: true, ..end(1, How::Killed { signal: 9 }) },
        ];
        let report = Report { ranks, first: Some(1), lost: None };
        assert!(!report.success());
        assert_eq!(
            report.to_string(),
            "the job ended with rank 1 (pid 70): killed by SIGKILL, out of memory: its control group's limit was \
             reached\n  rank 0 (pid 70): killed by SIGTERM, ended by the launcher\n"
        );
    }
}
