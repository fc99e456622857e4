//! Hosts of a test: made by the script `hosts`, removed when they are dropped, and by a watcher when this process ends.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU8, Ordering};

/// Some hosts, numbered from 1.
pub(crate) struct Hosts {
    name: String,
}

/// Tells the hosts of one process apart.
static NUMBER: AtomicU8 = AtomicU8::new(b'a');

fn script() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/hosts/hosts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

impl Hosts {
    /// Makes hosts for tests of these parts (`mpich`, `openmpi`, `slurm`, `ssh`); `None` with a line where one is missing.
    pub(crate) fn up(count: usize, parts: &[&str]) -> Option<Self> {
        let needed = Command::new(script()).args(["needs", "net"]).args(parts).output().unwrap();
        if !needed.status.success() {
            println!("skipped: {}", text(&needed.stdout));
            return None;
        }
        let letter = char::from(NUMBER.fetch_add(1, Ordering::Relaxed));
        // At most 9 characters: a process id has 7 digits at most.
        let hosts = Self { name: format!("t{}{letter}", std::process::id()) };
        let owner = std::process::id().to_string();
        hosts.run("up", &[&count.to_string(), "--while", &owner]);
        Some(hosts)
    }

    /// A command of the script about these hosts.
    pub(crate) fn command(&self, action: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(script());
        command.args([action, &self.name]).args(arguments);
        command
    }

    /// Runs a command of the script and returns what it printed.
    pub(crate) fn run(&self, action: &str, arguments: &[&str]) -> String {
        let ended = self.command(action, arguments).output().unwrap();
        assert!(ended.status.success(), "hosts {action} {arguments:?}: {}", text(&ended.stderr));
        text(&ended.stdout)
    }

    /// Runs a shell command on a host.
    pub(crate) fn shell(&self, host: usize, line: &str) -> Output {
        self.command("exec", &[&host.to_string(), "sh", "-c", line]).output().unwrap()
    }

    /// Its name on the network.
    pub(crate) fn host_name(&self, host: usize) -> String {
        format!("zth-{}-{host}", self.name)
    }

    /// Plugs or pulls a host's cable.
    #[allow(dead_code, reason = "only some of the test targets with hosts pull cables")]
    pub(crate) fn set_link(&self, host: usize, up: bool) {
        self.run("link", &[&host.to_string(), if up { "up" } else { "down" }]);
    }

    /// Bytes that a host has received and sent.
    pub(crate) fn bytes(&self, host: usize) -> [u64; 2] {
        let said = self.run("bytes", &[&host.to_string()]);
        let (received, sent) = said.split_once(' ').unwrap();
        [received, sent].map(|bytes| bytes.parse().unwrap())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // The watcher removes what this does not.
        let _ = self.command("down", &[]).output();
    }
}
