//! Reports of how each rank ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use zeroth_base::format_bytes;

use crate::error::RankLost;
use crate::op_name::LastOp;

/// Exit codes of a graceful stop: 128 + SIGINT or SIGTERM.
const STOPPED: [i32; 2] = [130, 143];

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum ExitReason {
    Exited {
        code: i32,
    },
    /// It was killed by a signal.
    Killed {
        signal: i32,
    },
    Unknown,
}

impl ExitReason {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exited { code },
            (None, Some(signal)) => Self::Killed { signal },
            (None, None) => Self::Unknown,
        }
    }

    /// Whether it exited with success, or stopped gracefully after a request.
    pub(super) fn is_well(self, asked: bool) -> bool {
        match self {
            Self::Exited { code: 0 } => true,
            Self::Exited { code } => asked && STOPPED.contains(&code),
            _ => false,
        }
    }
}

impl fmt::Display for ExitReason {
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

/// Details of an OOM kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The lowest limit of the control group and its ancestors; `None` where there is none: the machine was full.
    pub limit: Option<u64>,
    /// Planned host memory per rank, if known.
    pub planned: Option<u64>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the system killed it for lack of memory (")?;
        match self.limit {
            Some(limit) => write!(f, "limit of the control group: {}", format_bytes(limit))?,
            None => write!(f, "no control group limits it: the machine's memory was full")?,
        }
        match self.planned {
            Some(planned) => write!(f, ", plan: {} a rank)", format_bytes(planned)),
            None => write!(f, ")"),
        }
    }
}

/// How one rank ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RankExit {
    pub rank: usize,
    pub pid: u32,
    /// How it ended.
    pub how: ExitReason,
    /// Whether the launcher had sent it a signal.
    pub by_launcher: bool,
    /// Set if it was OOM-killed.
    pub out_of_memory: Option<OutOfMemory>,
    pub last: Option<LastOp>,
}

impl fmt::Display for RankExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (pid {}): {}", self.rank, self.pid, self.how)?;
        if self.by_launcher {
            write!(f, ", ended by the launcher")?;
        }
        if let Some(out_of_memory) = &self.out_of_memory {
            write!(f, ": {out_of_memory}")?;
        }
        match &self.last {
            Some(last) if self.how != (ExitReason::Exited { code: 0 }) => write!(f, "; it was {last}"),
            _ => Ok(()),
        }
    }
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchReport {
    /// Every rank, in order.
    pub ranks: Vec<RankExit>,
    /// The rank whose failure ended the job.
    pub first: Option<usize>,
    /// Whether a graceful stop was requested ([`super::RankLauncher::request_stop_when`]).
    pub asked: bool,
    /// Whether the launcher killed the ranks before their first step ([`super::RankLauncher::ends_before_first_step`]).
    pub before_first_step: bool,
    /// The lost rank reported to the others.
    pub lost: Option<RankLost>,
}

impl LaunchReport {
    /// Whether every rank exited with code 0.
    pub fn success(&self) -> bool {
        self.ranks.iter().all(|end| end.how == ExitReason::Exited { code: 0 })
    }

    /// Whether every rank stopped gracefully on request, at least one of them early.
    ///
    /// Ranks that were done anyway are a [`LaunchReport::success`] instead.
    pub fn stopped_on_request(&self) -> bool {
        self.ranks.iter().all(|end| !end.by_launcher && end.how.is_well(self.asked)) && !self.success()
    }
}

impl fmt::Display for LaunchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.success() {
            return write!(f, "{} rank(s) ended well", self.ranks.len());
        }
        if self.stopped_on_request() {
            return write!(f, "{} rank(s) stopped as they were asked to", self.ranks.len());
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

    fn end(rank: usize, how: ExitReason) -> RankExit {
        RankExit { rank, pid: 70, how, by_launcher: false, out_of_memory: None, last: None }
    }

    #[test]
    fn a_wait_status_becomes_a_code_or_a_signal() {
        // wait(2): the code is in bits 8 to 15, the signal in bits 0 to 6.
        assert_eq!(ExitReason::of(ExitStatus::from_raw(3 << 8)), ExitReason::Exited { code: 3 });
        assert_eq!(ExitReason::of(ExitStatus::from_raw(11)).to_string(), "killed by SIGSEGV");
        assert_eq!(ExitReason::of(ExitStatus::from_raw(40)).to_string(), "killed by signal 40");
    }

    #[test]
    fn a_report_begins_with_the_rank_that_failed_first() {
        let starved = OutOfMemory { limit: Some(64_000_000), planned: Some(200_000_000) };
        let ranks = vec![
            RankExit { by_launcher: true, ..end(0, ExitReason::Killed { signal: 15 }) },
            RankExit { out_of_memory: Some(starved), ..end(1, ExitReason::Killed { signal: 9 }) },
        ];
        let report =
            LaunchReport { ranks, first: Some(1), asked: false, before_first_step: false, lost: None };
        assert!(!report.success());
        assert_eq!(
            report.to_string(),
            "the job ended with rank 1 (pid 70): killed by SIGKILL: the system killed it for lack of memory (limit of \
             the control group: 64 MB, plan: 200 MB a rank)\n  rank 0 (pid 70): killed by SIGTERM, ended by the launcher\n"
        );
        let machine = OutOfMemory { limit: None, planned: None };
        assert!(machine.to_string().ends_with("(no control group limits it: the machine's memory was full)"));
    }

    #[test]
    fn codes_130_and_143_end_well_only_where_ranks_were_asked_and_not_ended() {
        let stopped = |codes: [i32; 2], asked: bool, by_launcher: bool| {
            let ranks = codes.iter().enumerate();
            let ranks = ranks.map(|(rank, code)| RankExit {
                by_launcher,
                ..end(rank, ExitReason::Exited { code: *code })
            });
            let report = LaunchReport {
                ranks: ranks.collect(),
                first: None,
                asked,
                before_first_step: false,
                lost: None,
            };
            report.stopped_on_request()
        };
        assert!(stopped([130, 130], true, false));
        assert!(stopped([0, 143], true, false));
        assert!(!stopped([130, 130], false, false));
        assert!(!stopped([130, 1], true, false));
        assert!(!stopped([130, 143], true, true));
        assert!(!stopped([0, 0], true, false), "they were done: a success");
    }
}
