//! Which process a lock or an unfinished file belongs to, and whether it is gone.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::signs_of_life::is_silent;

/// A process on one of the hosts that share a file system, written as `BOOT-NAMESPACE-PID-START`.
///
/// A process id means something to processes of the same pid namespace of the same boot alone: they look into /proc. All others
/// wait for a sign of life. Process ids are reused, so the start time tells two processes apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessOwner {
    /// Where its id counts; earlier versions did not write it.
    space: Option<PidSpace>,
    pid: u32,
    /// Clock ticks from the boot to the start of the process.
    start: Option<u64>,
}

/// What process ids are relative to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PidSpace {
    /// The begin of the kernel's boot id.
    boot: u32,
    /// A hash of the whole boot id and the pid namespace: containers of one machine share its boot.
    namespace: u32,
}

impl ProcessOwner {
    /// This process.
    pub fn own() -> Self {
        static OWN: OnceLock<ProcessOwner> = OnceLock::new();
        let find = || {
            let pid = std::process::id();
            Self { space: Some(PidSpace::own()), pid, start: Some(process_start(pid).unwrap_or(0)) }
        };
        OWN.get_or_init(find).clone()
    }

    /// The process `pid` of this host, if it is alive.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { space: Some(PidSpace::own()), pid, start: Some(process_start(pid)?) })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether its id is one of those that this process can look up. It is not for processes of other hosts, of other
    /// containers of this machine, and of earlier boots.
    pub fn is_here(&self) -> bool {
        self.space == Some(PidSpace::own())
    }

    /// Whether it is alive, as far as this process can look it up.
    pub fn is_alive(&self) -> bool {
        let is_same = |found| self.start.is_none_or(|start| start == found);
        self.is_here() && process_start(self.pid).is_some_and(is_same)
    }

    /// Whether it has left the file or folder at `path` behind. Nobody can look into another host: there a missing sign of life
    /// tells, and a first call never does. The caller holds the lock of the folder.
    pub fn has_abandoned(&self, path: &Path) -> bool {
        if self.is_here() { !self.is_alive() } else { is_silent(path) }
    }
}

impl fmt::Display for ProcessOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(PidSpace { boot, namespace }) = self.space {
            write!(f, "{boot:08x}-{namespace:08x}-")?;
        }
        write!(f, "{}", self.pid)?;
        self.start.map_or(Ok(()), |start| write!(f, "-{start}"))
    }
}

/// A text that names no process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not of the form BOOT-NAMESPACE-PID-START, nor PID")]
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
            [pid] => digits(pid).map(|pid| Self { space: None, pid, start: None }),
            [boot, namespace, pid, start] => hex(boot).zip(hex(namespace)).and_then(|(boot, namespace)| {
                let space = Some(PidSpace { boot, namespace });
                Some(Self { space, pid: digits(pid)?, start: Some(digits(start)?) })
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

/// This host's name, as messages show it: that of the container, if this is one.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

impl PidSpace {
    fn own() -> Self {
        static OWN: OnceLock<PidSpace> = OnceLock::new();
        *OWN.get_or_init(|| {
            let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
            let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
            // In a pid namespace without a /proc of its own, /proc has other processes.
            let listed = fs::read_link("/proc/self").unwrap_or_default();
            let is_listed = listed.to_str() == Some(&std::process::id().to_string());
            let parts = [boot.as_bytes(), namespace.as_os_str().as_encoded_bytes(), &[u8::from(is_listed)]];
            // FNV-1a.
            let hash = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
            Self {
                boot: boot.get(..8).and_then(|begin| u32::from_str_radix(begin, 16).ok()).unwrap_or(0),
                namespace: parts.concat().iter().fold(0x811c_9dc5, hash),
            }
        })
    }
}

/// A process of this host that has ended.
#[cfg(test)]
pub(crate) fn ended_process() -> ProcessOwner {
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let owner = ProcessOwner::of(child.id()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    owner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_written_and_read() {
        let own = ProcessOwner::own();
        assert_eq!(own.to_string().parse(), Ok(own.clone()));
        assert!(own.is_here() && own.is_alive());
        assert_eq!("12".parse(), Ok(ProcessOwner { space: None, pid: 12, start: None }));
        for other in ["", "-", "+1", "1-2", "mine", "99999999999", "1-2-3-4", "00000001-00000002-+3-4"] {
            assert_eq!(other.parse::<ProcessOwner>(), Err(NoProcessOwner), "{other}");
        }
    }

    #[test]
    fn only_processes_of_this_boot_and_namespace_are_looked_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "x").unwrap();
        let own = ProcessOwner::own();
        assert!(!own.has_abandoned(&path));
        // A reused id.
        let gone = ProcessOwner { start: own.start.map(|start| start + 1), ..own.clone() };
        assert!(gone.is_here() && gone.has_abandoned(&path), "{gone}");
        // With the id and the start time of this process, in another container, on another host, and of an earlier version.
        let PidSpace { boot, namespace } = PidSpace::own();
        for space in [
            Some(PidSpace { boot, namespace: namespace ^ 1 }),
            Some(PidSpace { boot: boot ^ 1, namespace }),
            None,
        ] {
            for pid in [own.pid, 4_194_304] {
                let there = ProcessOwner { space, pid, start: own.start };
                assert!(!there.is_here() && !there.is_alive() && !there.has_abandoned(&path), "{there}");
                assert_ne!(there.to_string(), own.to_string());
            }
        }
    }
}
