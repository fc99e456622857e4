//! Whether a process of this machine lives, by /proc.

use std::fs;

/// What /proc says about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessLiveness {
    Alive,
    Stopped,
    Gone,
}

/// What process ids are relative to: the boot and the pid namespace, as status.json has it.
pub(crate) fn machine() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// The state of a process; with its start time, a pid that is used again is another process.
pub(crate) fn state(pid: u32, started: Option<u64>) -> ProcessLiveness {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return ProcessLiveness::Gone };
    // The program's name in parentheses may contain anything.
    let Some((_, fields)) = text.rsplit_once(')') else { return ProcessLiveness::Gone };
    let mut fields = fields.split_whitespace();
    let state = fields.next().unwrap_or("X");
    let found: Option<u64> = fields.nth(18).and_then(|field| field.parse().ok());
    if started.is_some() && found != started {
        return ProcessLiveness::Gone;
    }
    match state {
        "Z" | "X" => ProcessLiveness::Gone,
        "T" | "t" => ProcessLiveness::Stopped,
        _ => ProcessLiveness::Alive,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_alive_then_stopped_then_gone() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(state(child.id(), None), ProcessLiveness::Alive);
        assert_eq!(state(child.id(), Some(1)), ProcessLiveness::Gone, "another process had that pid");
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        while state(child.id(), None) != ProcessLiveness::Stopped {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        while state(child.id(), None) != ProcessLiveness::Gone {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
