//! Ranks as processes of this machine: started, followed, asked to end, started again when one dies, and their end explained.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use zeroth::comm::LostReason;
use zeroth::comm::launch::{
    ExitReason, Launch, Output as RankOutput, OutputLine, OutputStream, Report, sealed,
};
use zeroth::kernel::Tier;

use super::told::{TOLD, Told};
use super::{Begun, finish, resume};
use crate::before_first_step::FINISHING;
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output;
use crate::signals::Signals;
use crate::terminal::{TERMINAL, show_passed};

/// Bytes of shared memory through which each rank sends: large messages go in pieces of half of it.
pub(super) const REGION: usize = 8 << 20;

/// Starts the ranks, and again from the newest good checkpoint when one dies, as often as was allowed.
pub(super) fn many(arguments: &TrainArgs, begun: &Begun, signals: &Signals) -> anyhow::Result<Exit> {
    let mut told = begun.asked.told.clone();
    let mut restarts = 0;
    if let Some(before) = signals.before_first_step() {
        before.launch();
    }
    loop {
        let report = once(begun, &told, signals)?;
        if report.before_first_step
            && let (Some(before), Some(asked)) = (signals.before_first_step(), signals.asked())
        {
            before.stop(asked);
        }
        if report.success() || report.stopped_on_request() {
            if let (Some(path), true) = (&arguments.trace, report.success()) {
                finish::joined_trace(path, begun.folder.root(), begun.asked.ranks as usize)?;
            }
            return Ok(end(&report, signals));
        }
        // Where all ranks ended by themselves with the same exit code, rank 0 has said why.
        let agreed =
            |code: Exit| report.ranks.iter().all(|end| end.how == ExitReason::Exited { code: code as i32 });
        // A rank was told to end, and all of them have saved and ended with it.
        if agreed(Exit::Terminated) {
            return Ok(Exit::Terminated);
        }
        let left = report.lost.as_ref().is_none_or(|lost| lost.reason == LostReason::Left);
        let is_said = left && (agreed(Exit::Failed) || agreed(Exit::Wrong) || agreed(Exit::DoesNotFit));
        if !is_said {
            output::error(report.to_string().trim_end());
        }
        // What a rank finds wrong it would find again; a rank that died may live the next time.
        let died = report.ranks.iter().any(|end| matches!(end.how, ExitReason::Killed { .. }));
        if signals.asked().is_some() || !died || restarts >= arguments.max_restarts {
            return Ok(if agreed(Exit::Wrong) { Exit::Wrong } else { Exit::Failed });
        }
        restarts += 1;
        let mut notes = Vec::new();
        let newest = match resume::newest_or_none(begun.folder.root(), &mut notes) {
            Ok(newest) => newest,
            Err(error) => {
                output::error(&format!("{error:#}"));
                return Ok(Exit::Failed);
            }
        };
        for note in notes {
            output::note(&format!("note: {note}"));
        }
        let from = newest.as_ref().map_or_else(
            || "step 0, there is no checkpoint yet".to_owned(),
            |checkpoint| format!("step {}", checkpoint.manifest().step),
        );
        output::note(&format!("starting again ({restarts} of {}) from {from}", arguments.max_restarts));
        // Without a checkpoint of its own, a run goes back to where it came from.
        if let Some(checkpoint) = newest {
            told.resume = Some(checkpoint.folder().to_owned());
        }
    }
}

/// The exit code of a run that did not fail.
fn end(report: &Report, signals: &Signals) -> Exit {
    let stopped = report.ranks.iter().any(|end| end.how != ExitReason::Exited { code: 0 });
    match signals.asked() {
        Some(asked) if stopped => Exit::after(asked),
        _ => Exit::Done,
    }
}

/// Starts the ranks and follows them to their end.
fn once(begun: &Begun, told: &Told, signals: &Signals) -> anyhow::Result<Report> {
    let Begun { asked, compiled, folder, .. } = begun;
    let logs: Vec<File> = (0..asked.ranks)
        .map(|rank| {
            let path = folder.log(rank)?;
            anyhow::Ok(File::options().create(true).append(true).open(path)?)
        })
        .collect::<anyhow::Result<_>>()?;
    let on_terminal = std::io::stderr().is_terminal();
    let lines = move |line: OutputLine| {
        // A bar is no line for a log.
        if show_passed(&line.text) {
            return;
        }
        let _ = writeln!(&logs[line.rank], "{}", line.text);
        // Rank 0 speaks for all; what the others say is a problem, and carries their number.
        match (line.rank, line.stream) {
            (0, OutputStream::Err) if !line.text.starts_with("error:") => output::note(&line.text),
            _ => output::problem(&line.to_string()),
        }
    };
    let files = asked.inputs.files.memory().try_clone()?;
    let told = Told { inputs: Some(asked.inputs.hand_over(&files)), ..told.clone() }.to_text()?;
    let told = sealed(|file| file.write_all(told.as_bytes()))?;
    let arenas = compiled.memory.arena(Tier::Device) + compiled.memory.arena(Tier::Host);
    let report = Launch::of_this_program(asked.ranks as usize, REGION)
        .arguments(std::env::args_os().skip(1))
        .variable(TOLD, told.as_raw_fd().to_string())
        .inherit(told)
        .inherit(files)
        .variable(TERMINAL, if on_terminal { "1" } else { "0" })
        .output(RankOutput::Lines(Arc::new(lines)))
        .request_stop_when(signals.flag())
        .on_stop_request(|| output::note(FINISHING))
        .ends_before_first_step()
        .planned(arenas + asked.overhead(compiled).total)
        .run()?;
    Ok(report)
}
