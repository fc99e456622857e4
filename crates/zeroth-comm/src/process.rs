//! Processes of ranks, as `/proc` shows them.

use std::ffi::CStr;
use std::io::Write;

use rustix::fs::{Mode, OFlags};

use crate::error::JoinError;

/// The process of a rank, by /proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It has not joined.
    Absent,
    /// It runs or sleeps.
    Running,
    /// It is stopped: SIGSTOP, or a debugger.
    Stopped,
    /// It has ended.
    Ended,
}

/// A process identified by pid and start time from `/proc`. Checks do not allocate.
pub(crate) struct Process {
    started: u64,
    /// `/proc/PID/stat`, NUL-terminated: at most 22 bytes.
    stat: [u8; 32],
}

impl Process {
    pub(crate) fn new(pid: u32, started: u64) -> Self {
        let mut stat = [0; 32];
        write!(&mut stat[..], "/proc/{pid}/stat").expect("a pid has 10 digits at most");
        Self { started, stat }
    }

    /// Pid and start time of this process.
    pub(crate) fn own() -> Result<(u32, u64), JoinError> {
        let pid = std::process::id();
        let looked = Self::new(pid, 0).look();
        let (_, started) = looked.ok_or_else(|| JoinError::System {
            what: "read /proc/self/stat (is /proc mounted?)",
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Ok((pid, started))
    }

    /// Whether the process exists, is the same one, and has not ended. A zombie has ended.
    pub(crate) fn alive(&self) -> bool {
        self.look().is_some_and(|(state, started)| started == self.started && !matches!(state, b'Z' | b'X'))
    }

    /// Its state. A pid used again belongs to another process: the first has ended.
    pub(crate) fn state(&self) -> ProcessState {
        match self.look() {
            Some((state, started)) if started == self.started => match state {
                b'Z' | b'X' => ProcessState::Ended,
                b'T' | b't' => ProcessState::Stopped,
                _ => ProcessState::Running,
            },
            _ => ProcessState::Ended,
        }
    }

    fn look(&self) -> Option<(u8, u64)> {
        let path = CStr::from_bytes_until_nul(&self.stat).ok()?;
        let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut text = [0; 1024];
        let read = rustix::io::read(&file, &mut text).ok()?;
        state_and_start(&text[..read])
    }
}

/// Fields 3 and 22 of a stat file. Field 2 is the program's name in parentheses and may contain anything.
fn state_and_start(text: &[u8]) -> Option<(u8, u64)> {
    let name_end = text.iter().rposition(|byte| *byte == b')')?;
    let mut fields = text[name_end + 1..].split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let state = *fields.next()?.first()?;
    let started = std::str::from_utf8(fields.nth(18)?).ok()?.parse().ok()?;
    Some((state, started))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_and_start_are_found_behind_any_program_name() {
        // proc_pid_stat(5): state is field 3, starttime field 22.
        let after: Vec<String> = (4..=30).map(|field| field.to_string()).collect();
        let text = format!("12 (a) R (b c) S {}\n", after.join(" "));
        assert_eq!(state_and_start(text.as_bytes()), Some((b'S', 22)));
        assert_eq!(state_and_start(b"12 (sh) S 1 2"), None);
    }

    #[test]
    fn a_process_is_alive_until_it_ends_even_when_nobody_has_waited_for_it() {
        let (pid, started) = Process::own().unwrap();
        assert!(Process::new(pid, started).alive());
        assert!(!Process::new(pid, started + 1).alive(), "a pid used again is another process");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let looked = Process::new(child.id(), 0).look().unwrap();
        let process = Process::new(child.id(), looked.1);
        assert!(process.alive());
        child.kill().unwrap();
        while process.alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!process.alive());
    }
}
