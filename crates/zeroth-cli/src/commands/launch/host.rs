//! Starts and watches the ranks of this host.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::sync::Arc;
use std::sync::mpsc;

use anyhow::Context as _;
use zeroth::comm::launch::{
    ExitReason, HostLauncher, HostReport, OutputLine, OutputStream, RankOutput, pass_on_commands,
};

use super::job::{JOB_TOKEN, JobLayout, JobOpening};
use super::report;
use super::signals::PassedSignals;
use crate::command_line::TrainCommand;
use crate::exit::Exit;
use crate::launch_args::LaunchArgs;
use crate::output;

/// The longest first line of standard input.
const LONGEST_OPENING: u64 = 16 << 20;

/// As typed on every host: `--no-ssh`.
pub(super) fn run(arguments: &LaunchArgs, layout: JobLayout, command: &TrainCommand) -> anyhow::Result<Exit> {
    let Some(host) = arguments.node_rank else {
        anyhow::bail!("--no-ssh needs --node-rank: the number of this host, from 0");
    };
    check_host(host, &layout)?;
    let opening = JobOpening {
        token: std::env::var(JOB_TOKEN).ok(),
        variables: std::collections::BTreeMap::new(),
        layout,
        restarts: 0,
    };
    let (sender, commands) = mpsc::channel();
    // Kept until all ranks have ended: once nobody can send, they are alone.
    let _held = sender.clone();
    let signals = PassedSignals::pass_on(sender)?;
    let report = launcher(&opening, host, &command.arguments).run(&commands)?;
    print_deaths(&opening, host, &report);
    Ok(match signals.stop() {
        // Those that were done anyway ended well.
        Some(stop) if report.killed().next().is_none() && report.common_code() != Some(0) => {
            Exit::after(stop)
        }
        _ => exit_of(&report),
    })
}

/// As started by `launch` on another host, which controls it by standard input.
pub(super) fn run_opened(arguments: &LaunchArgs) -> anyhow::Result<Exit> {
    let mut input = BufReader::new(io::stdin());
    let mut line = String::new();
    input.by_ref().take(LONGEST_OPENING).read_line(&mut line).context("cannot read from the launcher")?;
    let opening: JobOpening = serde_json::from_str(&line).context(
        "standard input is not that of `zeroth launch` of this version: install one version on all hosts",
    )?;
    let host = arguments.node_rank.unwrap_or(0);
    check_host(host, &opening.layout)?;
    let (sender, commands) = mpsc::channel();
    std::thread::Builder::new()
        .name("commands".to_owned())
        .spawn(move || pass_on_commands(input, &sender))
        .context("cannot start a thread that reads from the launcher")?;
    // SIGHUP comes if sshd ends with the connection, and its standard input with it.
    let (ignored, _kept) = mpsc::channel();
    let _signals = PassedSignals::pass_on(ignored)?;
    let report = launcher(&opening, host, &arguments.command).run(&commands)?;
    print_deaths(&opening, host, &report);
    Ok(if report.killed().next().is_some() { Exit::RankDied } else { exit_of(&report) })
}

/// The exit code of all ranks of a host.
fn exit_of(report: &HostReport) -> Exit {
    report.common_code().and_then(Exit::of_process).unwrap_or(Exit::Failed)
}

fn check_host(host: usize, layout: &JobLayout) -> anyhow::Result<()> {
    let hosts = layout.hosts.len();
    if host >= hosts {
        anyhow::bail!(
            "--node-rank is {host}, but there {}: hosts are numbered from 0",
            match hosts {
                1 => "is 1 host".to_owned(),
                _ => format!("are {hosts} hosts"),
            }
        );
    }
    Ok(())
}

/// The launcher of a host's ranks, which prints what they print.
fn launcher(opening: &JobOpening, host: usize, command: &[String]) -> HostLauncher {
    let name = opening.layout.hosts[host].name.clone();
    let print = move |line: OutputLine| match (line.rank, line.stream) {
        // Rank 0 prints for all, results included.
        (0, OutputStream::Out) => output::stream(&format!("{}\n", line.text)),
        (0, OutputStream::Err) => output::note(&line.text),
        _ => output::problem(&format!("[{name} rank {}] {}", line.rank, line.text)),
    };
    let world = opening.layout.world().to_string();
    HostLauncher::of_this_program(opening.layout.first(host), opening.rank_variables(host))
        .arguments(command)
        .arguments(["--ranks", &world])
        .output(RankOutput::Lines(Arc::new(print)))
}

/// Names ranks that ended without a word: killed, or by a code that no command ends with.
fn print_deaths(opening: &JobOpening, host: usize, found: &HostReport) {
    let name = &opening.layout.hosts[host].name;
    let is_silent = |how: ExitReason| match how {
        ExitReason::Exited { code } => Exit::of_process(code).is_none(),
        ExitReason::Killed { .. } | ExitReason::Unknown => true,
    };
    let silent = found.ranks.iter().filter(|end| is_silent(end.how) && !end.by_launcher);
    report(silent.map(|end| format!("host {name}: {end}")));
}
