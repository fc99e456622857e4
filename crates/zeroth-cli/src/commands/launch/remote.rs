//! Starts the ranks of all hosts over ssh, and starts the job again on the hosts that are left.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use anyhow::Context as _;
use zeroth::comm::launch::{
    ExitReason, HostExit, OutputLine, OutputStream, RankCommand, RankOutput, RemoteHost, run_on_hosts,
};

use super::job::JobLayout;
use super::signals::PassedSignals;
use super::{opening, report};
use crate::command_line::TrainCommand;
use crate::exit::Exit;
use crate::launch_args::LaunchArgs;
use crate::output;

/// How long a host may take to answer before it counts as lost.
const ANSWER_SECONDS: u64 = 10;

pub(super) fn run(arguments: &LaunchArgs, layout: JobLayout, command: &TrainCommand) -> anyhow::Result<Exit> {
    let (sender, commands) = mpsc::channel();
    let signals = PassedSignals::pass_on(sender)?;
    let mut job = RemoteJob { arguments, layout, command: command.arguments.clone(), restarts: 0 };
    loop {
        let ends = job.run(&commands)?;
        report_ends(&ends, signals.stop().is_some());
        let died = ends.iter().any(|end| end.is_unreachable() || end.how == exited(Exit::RankDied));
        if !died || signals.stop().is_some() || job.restarts >= arguments.max_restarts {
            return Ok(exit_of(&ends, &signals));
        }
        job.keep_hosts_that_answer(&ends)?;
        job.restarts += 1;
        // A rank that was killed before its first checkpoint starts anew.
        if !command.resumes() && job.restarts == 1 {
            job.command.extend(["--resume", "auto"].map(str::to_owned));
        }
        output::note(&format!("restarting ({} of {})", job.restarts, arguments.max_restarts));
    }
}

/// A job and the hosts that it has left.
struct RemoteJob<'a> {
    arguments: &'a LaunchArgs,
    layout: JobLayout,
    command: Vec<String>,
    restarts: u64,
}

impl RemoteJob<'_> {
    /// Runs it until it has ended on all hosts.
    fn run(&self, commands: &Receiver<RankCommand>) -> anyhow::Result<Vec<HostExit>> {
        let opening = serde_json::to_string(&opening(&self.layout, self.restarts)?)?;
        let folder = std::env::current_dir().context("cannot find the working directory")?;
        let program = std::env::current_exe().context("cannot find this program's file")?;
        let hosts: Vec<RemoteHost> = (0..self.layout.hosts.len())
            .map(|number| {
                let name = self.layout.hosts[number].name.clone();
                let remote = self.remote_command(number, &folder, &program)?;
                let command = self.shell(&name, remote);
                anyhow::Ok(RemoteHost { name, command, opening: opening.clone() })
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(run_on_hosts(&hosts, &output_of(&self.layout), commands)?)
    }

    /// What a host's shell runs. Everything secret goes to its standard input.
    fn remote_command(&self, host: usize, folder: &Path, program: &Path) -> anyhow::Result<String> {
        let (address, port) = &self.layout.master;
        let numbers = [self.layout.hosts.len(), host].map(|number| number.to_string());
        let port = port.to_string();
        let own: [&str; 12] = [
            "launch",
            "--no-ssh",
            "--token-from-stdin",
            "--nnodes",
            &numbers[0],
            "--node-rank",
            &numbers[1],
            "--master-addr",
            address,
            "--master-port",
            &port,
            "--",
        ];
        let path = |path: &Path| {
            path.to_str().map(quoted).with_context(|| format!("{} is not UTF-8: rename it", path.display()))
        };
        let words = own.into_iter().chain(self.command.iter().map(String::as_str)).map(quoted);
        let words: Vec<String> = words.collect();
        Ok(format!("cd {} && exec {} {}", path(folder)?, path(program)?, words.join(" ")))
    }

    /// ssh to a host.
    fn shell(&self, host: &str, remote: String) -> Vec<OsString> {
        let mut words: Vec<String> = ["ssh", "-T", "-o", "BatchMode=yes"].map(str::to_owned).into();
        // A host that is gone is noticed within 15 s.
        words.extend(["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"].map(str::to_owned));
        words.extend(["-o".to_owned(), format!("ConnectTimeout={ANSWER_SECONDS}")]);
        if let Some(port) = self.arguments.ssh_port {
            words.extend(["-p".to_owned(), port.to_string()]);
        }
        let further = self.arguments.launcher_args.iter();
        words.extend(further.flat_map(|text| text.split_whitespace()).map(str::to_owned));
        words.extend([host.to_owned(), remote]);
        words.into_iter().map(OsString::from).collect()
    }

    /// Drops hosts that were lost and do not answer any more.
    fn keep_hosts_that_answer(&mut self, ends: &[HostExit]) -> anyhow::Result<()> {
        let mut left = Vec::new();
        for (host, end) in self.layout.hosts.iter().zip(ends) {
            if end.is_unreachable() && !self.answers(&host.name) {
                output::note(&format!("note: host {} does not answer: going on without it", host.name));
            } else {
                left.push(host.clone());
            }
        }
        let Some(first) = left.first() else { anyhow::bail!("no host answers any more") };
        // Ranks meet on the first host.
        if first.name != self.layout.hosts[0].name {
            self.layout.master.0.clone_from(&first.name);
        }
        self.layout.hosts = left;
        Ok(())
    }

    fn answers(&self, host: &str) -> bool {
        let words = self.shell(host, "true".to_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

/// Lines of hosts as they come: their launchers have put host and rank before them. ssh's own have neither.
fn output_of(layout: &JobLayout) -> RankOutput {
    let names: Vec<String> = layout.hosts.iter().map(|host| host.name.clone()).collect();
    RankOutput::Lines(Arc::new(move |line: OutputLine| match line.stream {
        OutputStream::Out => output::stream(&format!("{}\n", line.text)),
        // Rank 0, on the first host, prints for all.
        OutputStream::Err if line.rank == 0 || line.text.starts_with('[') => output::problem(&line.text),
        OutputStream::Err => output::problem(&format!("[{}] {}", names[line.rank], line.text)),
    }))
}

/// A word that sh reads as it is.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

const fn exited(exit: Exit) -> ExitReason {
    ExitReason::Exited { code: exit as i32 }
}

/// Names hosts whose connection was lost: nobody there could say it.
fn report_ends(ends: &[HostExit], is_stopped: bool) {
    let lost = ends.iter().filter(|end| end.is_unreachable() && !is_stopped);
    report(lost.map(|end| match end.how {
        ExitReason::Exited { .. } => format!(
            "host {}: ssh could not connect, or lost the connection: try `ssh {} true`; ranks there end by themselves",
            end.name, end.name
        ),
        how => format!("host {}: ssh ended: {how}; ranks there end by themselves", end.name),
    }));
}

/// The exit code of one host, if all agree.
fn exit_of(ends: &[HostExit], signals: &PassedSignals) -> Exit {
    let codes: Vec<Option<Exit>> = ends
        .iter()
        .map(|end| match end.how {
            ExitReason::Exited { code } => Exit::of_process(code),
            _ => None,
        })
        .collect();
    let common =
        codes.first().copied().flatten().filter(|first| codes.iter().all(|code| *code == Some(*first)));
    match (common, signals.stop()) {
        (Some(Exit::Done), _) => Exit::Done,
        (_, Some(stop)) if !codes.contains(&Some(Exit::RankDied)) => Exit::after(stop),
        (Some(Exit::RankDied) | None, _) => Exit::Failed,
        (Some(exit), _) => exit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_reach_a_remote_shell_as_they_are() {
        for word in ["", "a b", "it's", "$(sh)", "`sh`", "a\nb", "\\", "!x", "*", "--data=a;b"] {
            let echoed =
                Command::new("/bin/sh").args(["-c", &format!("printf %s {}", quoted(word))]).output();
            assert_eq!(String::from_utf8(echoed.unwrap().stdout).unwrap(), word);
        }
    }
}
