//! Launches ranks as processes on this machine, restarts them when one dies, and explains failures.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use zeroth::comm::LostReason;
use zeroth::comm::launch::{
    ExitReason, LaunchReport, OutputLine, OutputStream, RankLauncher, RankOutput, sealed,
};
use zeroth::job::{HANDOFF_VARIABLE, LauncherHandoff, REGION, ResumePoint, newest_resumable_or_none};

use super::live::LiveStatus;
use super::prepared_run::PreparedRun;
use super::summary;
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output;
use crate::run_file;
use crate::signals::Signals;
use crate::startup_signals::STOP_ACKNOWLEDGEMENT;
use crate::terminal::{TERMINAL, show_passed};

/// Launches the ranks, restarting from the newest valid checkpoint when one dies, up to --max-restarts times.
pub(super) fn many(
    arguments: &TrainArgs,
    run: &PreparedRun,
    signals: &Signals,
    status: &LiveStatus,
) -> anyhow::Result<Exit> {
    let mut handoff = run.resolved_job.handoff.clone();
    let mut restarts = 0;
    if let Some(before) = signals.startup() {
        before.launch();
    }
    loop {
        let report = once(run, &handoff, signals, status)?;
        if report.before_first_step
            && let (Some(before), Some(signal)) = (signals.startup(), signals.stop_requested())
        {
            before.stop(signal);
        }
        if report.success() || report.stopped_on_request() {
            if let (Some(path), true) = (&arguments.trace, report.success()) {
                summary::join_traces(path, run.folder.root(), run.resolved_job.ranks as usize)?;
            }
            return Ok(exit_of(&report, signals));
        }
        // If all ranks exited with the same code, rank 0 has printed why.
        let agreed =
            |code: Exit| report.ranks.iter().all(|end| end.how == ExitReason::Exited { code: code as i32 });
        // A rank received SIGTERM or SIGXCPU, and all of them have saved and exited.
        for exit in [Exit::Terminated, Exit::CpuTime] {
            if agreed(exit) {
                return Ok(exit);
            }
        }
        let left = report.lost.as_ref().is_none_or(|lost| lost.reason == LostReason::Left);
        let is_explained = left && (agreed(Exit::Failed) || agreed(Exit::Wrong) || agreed(Exit::DoesNotFit));
        status.ranks_lost(&report);
        if !is_explained {
            output::error(report.to_string().trim_end());
        }
        // An error would recur; a rank that was killed may survive the next time.
        let died = report.ranks.iter().any(|end| matches!(end.how, ExitReason::Killed { .. }));
        if signals.stop_requested().is_some() || !died || restarts >= arguments.max_restarts {
            return Ok(if agreed(Exit::Wrong) { Exit::Wrong } else { Exit::Failed });
        }
        restarts += 1;
        let mut notes = Vec::new();
        let newest = match newest_resumable_or_none(run.folder.root(), &mut notes) {
            Ok(newest) => newest,
            Err(error) => {
                output::error(&format!("{:#}", anyhow::Error::from(error)));
                return Ok(Exit::Failed);
            }
        };
        for note in notes {
            output::note(&format!("note: {note}"));
        }
        let from = newest.as_ref().map_or_else(
            || "step 0, as there is no checkpoint yet".to_owned(),
            |checkpoint| format!("step {}", checkpoint.manifest().step),
        );
        output::note(&format!("restarting ({restarts} of {}) from {from}", arguments.max_restarts));
        status.restarted(newest.as_ref());
        // Without a checkpoint of its own, a run restarts from where it was resumed.
        if let Some(checkpoint) = newest {
            handoff.resume = Some(ResumePoint::of(&checkpoint));
        }
    }
}

/// The exit code of a run that did not fail.
fn exit_of(report: &LaunchReport, signals: &Signals) -> Exit {
    let stopped = report.ranks.iter().any(|end| end.how != ExitReason::Exited { code: 0 });
    match signals.stop_requested() {
        Some(signal) if stopped => Exit::after(signal),
        _ => Exit::Done,
    }
}

/// Launches the ranks and waits for them.
fn once(
    run: &PreparedRun,
    handoff: &LauncherHandoff,
    signals: &Signals,
    status: &LiveStatus,
) -> anyhow::Result<LaunchReport> {
    let PreparedRun { resolved_job, compiled, folder, .. } = run;
    let logs: Vec<File> = (0..resolved_job.ranks)
        .map(|rank| {
            let path = folder.log(rank)?;
            anyhow::Ok(File::options().create(true).append(true).open(path)?)
        })
        .collect::<anyhow::Result<_>>()?;
    let on_terminal = std::io::stderr().is_terminal();
    let lines = move |line: OutputLine| {
        // Progress bars are not logged.
        if show_passed(&line.text) {
            return;
        }
        let _ = writeln!(&logs[line.rank], "{}", line.text);
        // Rank 0 prints for all; output of the others is an error, prefixed with their rank.
        match (line.rank, line.stream) {
            (0, OutputStream::Err) if !line.text.starts_with("error:") => output::note(&line.text),
            _ => output::problem(&line.to_string()),
        }
    };
    let files = resolved_job.inputs.files.memory().try_clone()?;
    let handoff = LauncherHandoff { inputs: Some(resolved_job.inputs.for_ranks(&files)), ..handoff.clone() }
        .to_text()?;
    let handoff = sealed(|file| file.write_all(handoff.as_bytes()))?;
    let arenas = compiled.memory.arenas().sum();
    let report = RankLauncher::of_this_program(resolved_job.ranks as usize, REGION)
        .arguments(run_file::for_ranks())
        .variable(HANDOFF_VARIABLE, handoff.as_raw_fd().to_string())
        .inherit(handoff)
        .inherit(files)
        .variable(TERMINAL, if on_terminal { "1" } else { "0" })
        .output(RankOutput::Lines(Arc::new(lines)))
        .request_stop_when(signals.flag())
        .request_save_when(signals.save_flag())
        .on_stop_request(|| output::note(STOP_ACKNOWLEDGEMENT))
        .ends_before_first_step()
        .on_job(status.observe_with())
        .planned(arenas + resolved_job.overhead(compiled).total)
        .run()?;
    Ok(report)
}
