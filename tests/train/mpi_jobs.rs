//! Jobs of CPU ranks on several hosts, which MPI's launchers start: namespaces on this machine.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::running::Running;
use super::{cache, golden, metrics, text};
use crate::namespaces::Hosts;

/// The launchers of both libraries, as parts that a test needs.
pub(super) const LAUNCHERS: [&str; 2] = ["mpich", "openmpi"];

/// A job hangs if it takes longer.
const LIMIT: Duration = Duration::from_mins(2);

/// `zeroth train` of a model on the CPU, on its rows in file order.
pub(super) fn arguments(model: &Path, data: &Path, output: &Path, more: &[&str]) -> Vec<String> {
    let fixed = ["train", "--device", "cpu", "--shuffle", "false", "--threads-per-rank", "1"];
    let places = ["--model", text(model), "--data", text(data), "--output", text(output)];
    fixed.iter().chain(&places).chain(more).map(|word| (*word).to_owned()).collect()
}

/// The same of a golden model.
pub(super) fn of_golden(model: &str, output: &Path, more: &[&str]) -> Vec<String> {
    let folder = golden(model);
    arguments(&folder, &folder.join("data.jsonl"), output, more)
}

/// The command of a job. `slots` are the ranks of each host, such as "2,2"; those of srun are its own flags.
pub(super) fn command(hosts: &Hosts, launcher: &str, slots: &str, arguments: &[String]) -> Command {
    command_of(hosts, launcher, slots, env!("CARGO_BIN_EXE_zeroth"), arguments)
}

/// The same of a program that starts `zeroth`, whose path is its first argument.
pub(super) fn command_of(
    hosts: &Hosts,
    launcher: &str,
    slots: &str,
    program: &str,
    arguments: &[String],
) -> Command {
    let words: Vec<&str> =
        slots.split_whitespace().chain([program]).chain(arguments.iter().map(String::as_str)).collect();
    let mut command = hosts.command(launcher, &words);
    command.env("ZEROTH_CACHE", cache()).stdin(Stdio::null());
    // As the script does for MPICH's own launcher: hosts of one machine would use its shared memory.
    command.env("UCX_TLS", "tcp,self").env("UCX_NET_DEVICES", "eth0");
    command
}

/// Runs a job to its end, and returns what it said.
pub(super) fn run(folder: &Path, command: Command) -> String {
    let mut running = Running::spawn(folder, command);
    let (status, _) = running.end(LIMIT);
    let said = running.said();
    assert!(status.is_some_and(|status| status.success()), "{status:?}: {said}");
    said
}

/// What a run has computed, bit for bit: losses and norms as written, and a file of its model.
pub(super) fn outcome(run: &Path, file: &str) -> (Vec<String>, Vec<u8>) {
    let numbers = |line: &serde_json::Value| {
        ["loss", "grad_norm", "aux_loss"].map(|name| format!("{name} {}", line[name])).join(", ")
    };
    (metrics(run).iter().map(numbers).collect(), std::fs::read(run.join("model").join(file)).unwrap())
}
