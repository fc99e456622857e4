//! Ranks as processes of this machine: started, followed, asked to end, started again when one dies, and their end explained.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::sync::Arc;

use anyhow::Context;
use zeroth::comm::Lost;
use zeroth::comm::launch::{How, Launch, Line, Output as RankOutput, Report, Stream};
use zeroth::device::Tier;

use super::told::{TOLD, Told};
use super::{Begun, finish, follow, resume};
use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output;
use crate::signals::Signals;

/// Bytes of shared memory through which each rank sends: large messages go in pieces of half of it.
pub(super) const REGION: usize = 8 << 20;

/// Starts the ranks, and again from the newest good checkpoint when one dies, as often as was allowed.
pub(super) fn many(arguments: &TrainArgs, begun: &Begun, signals: &Signals) -> anyhow::Result<Exit> {
    let mut told = begun.asked.told.clone();
    let mut restarts = 0;
    loop {
        let report = once(begun, &told, signals)?;
        if report.success() || report.stopped_as_asked() {
            if let (Some(path), true) = (&arguments.trace, report.success()) {
                finish::joined_trace(path, begun.folder.root(), begun.asked.ranks as usize)?;
            }
            return Ok(end(&report, signals));
        }
        // Where all ranks ended by themselves with the same exit code, rank 0 has said why.
        let agreed = |code: Exit| report.ranks.iter().all(|end| end.how == How::Exited { code: code as i32 });
        let left = report.lost.as_ref().is_none_or(|lost| lost.reason == Lost::Left);
        let is_said = left && (agreed(Exit::Failed) || agreed(Exit::Wrong) || agreed(Exit::DoesNotFit));
        if !is_said {
            output::error(report.to_string().trim_end());
        }
        // What a rank finds wrong it would find again; a rank that died may live the next time.
        let died = report.ranks.iter().any(|end| matches!(end.how, How::Killed { .. }));
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
    let stopped = report.ranks.iter().any(|end| end.how != How::Exited { code: 0 });
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
    let lines = move |line: Line| {
        // A line that takes the place of the last one is no line for a log.
        if let Some(passing) = line.text.strip_prefix(follow::PASSING) {
            output::over(passing);
            return;
        }
        let _ = writeln!(&logs[line.rank], "{}", line.text);
        // Rank 0 speaks for all; what the others say is a problem, and carries their number.
        match (line.rank, line.stream) {
            (0, Stream::Err) if !line.text.starts_with("error:") => output::note(&line.text),
            _ => output::problem(&line.to_string()),
        }
    };
    let program = std::env::current_exe().context("this program cannot find itself to start ranks")?;
    let arenas = compiled.memory.arena(Tier::Device) + compiled.memory.arena(Tier::Host);
    let report = Launch::new(program, asked.ranks as usize, REGION)
        .arguments(std::env::args_os().skip(1))
        .variable(TOLD, told.to_text()?)
        .variable(follow::TERMINAL, if on_terminal { "1" } else { "0" })
        .output(RankOutput::Lines(Arc::new(lines)))
        .ask_when(signals.flag())
        .on_ask(|| output::note("finishing the step and saving; once more Ctrl-C stops at once"))
        .planned(arenas + asked.overhead(compiled).total)
        .run()?;
    Ok(report)
}
