//! Which process a lock or an unfinished file belongs to, and whether it is gone.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

/// A file of another machine that nobody has written to for this long belongs to no process any more.
const SILENT: Duration = Duration::from_hours(1);

/// A process on one of the machines that share a file system, written as `HOST-BOOT-PID-START`.
///
/// Process ids are reused, so the start time tells two processes apart; start times repeat after a boot, so the boot does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessOwner {
    /// A hash of the machine's name, and the begin of its boot id; earlier versions wrote neither.
    machine: Option<[u32; 2]>,
    pid: u32,
    /// Clock ticks from the boot to the start of the process.
    start: Option<u64>,
}

impl ProcessOwner {
    /// This process.
    pub fn own() -> Self {
        static OWN: OnceLock<ProcessOwner> = OnceLock::new();
        let find = || {
            let pid = std::process::id();
            Self { machine: Some(machine()), pid, start: Some(process_start(pid).unwrap_or(0)) }
        };
        OWN.get_or_init(find).clone()
    }

    /// The process `pid` of this machine, if it is alive.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { machine: Some(machine()), pid, start: Some(process_start(pid)?) })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it is alive on this machine. Containers of one machine have names of their own, and share its boot.
    pub fn is_alive(&self) -> bool {
        let [_, boot] = machine();
        if self.machine.is_some_and(|[_, found]| found != boot) {
            return false;
        }
        let is_same = |found| self.start.is_none_or(|start| start == found);
        process_start(self.pid).is_some_and(is_same)
    }

    /// Whether it has left the file at `path` behind. Nobody can look into another machine: there the time of the last write
    /// tells. The caller holds the lock of the folder.
    pub fn has_abandoned(&self, path: &Path) -> bool {
        let here = machine();
        if self.machine.is_none_or(|[host, boot]| host == here[0] || boot == here[1]) {
            // Without a start time it may be an earlier process with the id of this one.
            return !self.is_alive() || (self.start.is_none() && self.pid == std::process::id());
        }
        let modified = fs::symlink_metadata(path).and_then(|found| found.modified()).ok();
        modified.and_then(|at| at.elapsed().ok()).is_some_and(|age| age > SILENT)
    }
}

impl fmt::Display for ProcessOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some([host, boot]) = self.machine {
            write!(f, "{host:08x}-{boot:08x}-")?;
        }
        write!(f, "{}", self.pid)?;
        self.start.map_or(Ok(()), |start| write!(f, "-{start}"))
    }
}

/// A text that names no process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not of the form HOST-BOOT-PID-START, nor PID")]
pub struct NoProcessOwner;

impl FromStr for ProcessOwner {
    type Err = NoProcessOwner;

    fn from_str(text: &str) -> Result<Self, NoProcessOwner> {
        let parts: Vec<&str> = text.split('-').collect();
        let hex = |part: &str| {
            let is_one = part.len() == 8 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_one.then(|| u32::from_str_radix(part, 16).ok()).flatten()
        };
        let parsed = match parts[..] {
            [pid] => digits(pid).map(|pid| Self { machine: None, pid, start: None }),
            [host, boot, pid, start] => hex(host).zip(hex(boot)).and_then(|(host, boot)| {
                Some(Self { machine: Some([host, boot]), pid: digits(pid)?, start: Some(digits(start)?) })
            }),
            _ => None,
        };
        parsed.ok_or(NoProcessOwner)
    }
}

/// A number without a sign.
fn digits<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Start time of the process `pid` in clock ticks since the boot, if it is alive.
pub fn process_start(pid: u32) -> Option<u64> {
    let fields = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The parenthesised name may contain anything; after it, field 1 is the state and field 20 the start time.
    let mut fields = fields.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?.parse().ok()?;
    // A zombie has exited but was not reaped yet.
    (state != "Z" && state != "X").then_some(start)
}

/// A hash of this machine's name (FNV-1a), and the begin of its boot id.
fn machine() -> [u32; 2] {
    static MACHINE: OnceLock<[u32; 2]> = OnceLock::new();
    *MACHINE.get_or_init(|| {
        let read = |name: &str| fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
        let hash = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        let host = read("hostname").trim().as_bytes().iter().fold(0x811c_9dc5, hash);
        let boot = read("random/boot_id");
        [host, boot.get(..8).and_then(|begin| u32::from_str_radix(begin, 16).ok()).unwrap_or(0)]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_written_and_read() {
        let own = ProcessOwner::own();
        assert_eq!(own.to_string().parse(), Ok(own.clone()));
        assert!(own.is_alive());
        assert_eq!("12".parse(), Ok(ProcessOwner { machine: None, pid: 12, start: None }));
        for other in ["", "-", "+1", "1-2", "mine", "99999999999", "1-2-3-4", "00000001-00000002-+3-4"] {
            assert_eq!(other.parse::<ProcessOwner>(), Err(NoProcessOwner), "{other}");
        }
    }

    #[test]
    fn reused_ids_and_other_boots_are_not_the_same_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "x").unwrap();
        let own = ProcessOwner::own();
        assert!(!own.has_abandoned(&path));
        let [host, boot] = machine();
        for gone in [
            ProcessOwner { start: own.start.map(|start| start + 1), ..own.clone() },
            ProcessOwner { machine: Some([host, boot ^ 1]), ..own.clone() },
            // Of an earlier version, whose process had this id.
            ProcessOwner { machine: None, start: None, ..own.clone() },
        ] {
            assert!(gone.has_abandoned(&path), "{gone}");
        }
        // Of another container of this machine.
        let beside = ProcessOwner { machine: Some([host ^ 1, boot]), ..own.clone() };
        assert!(beside.is_alive() && !beside.has_abandoned(&path));
        let gone = ProcessOwner { start: own.start.map(|start| start + 1), ..beside };
        assert!(gone.has_abandoned(&path));
        // Of another machine: by the time of the last write.
        let there = ProcessOwner { machine: Some([host ^ 1, boot ^ 1]), ..own };
        assert!(!there.is_alive() && !there.has_abandoned(&path));
        let before = std::time::SystemTime::now() - 2 * SILENT;
        fs::File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        assert!(there.has_abandoned(&path));
    }
}
