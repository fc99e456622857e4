//! `bench`: measures this machine against its limits, and saves the result as its profile.

mod bench_run;
mod measure;
mod show;

use anyhow::{bail, ensure};
use zeroth::cpu::Isa;
use zeroth::machine::bench::{BenchPart, Identity, Profile};
use zeroth::machine::probe;

use bench_run::{BenchFindings, BenchRun};

use super::machine_profile;
use crate::bench_args::BenchArgs;
use crate::exit::Exit;
use crate::output::{self, Output};

pub(super) fn run(arguments: &BenchArgs, output: &Output) -> anyhow::Result<Exit> {
    let bench = resolve(arguments)?;
    let identity = Identity::of(&bench.machine);
    let place = if arguments.no_save {
        None
    } else {
        Some(machine_profile::place(arguments.profile.as_ref(), &identity)?)
    };
    let mut found = BenchFindings {
        machine: identity,
        quick: arguments.quick,
        rounds: bench.rounds,
        parts: Vec::new(),
        step: None,
    };
    for part in &bench.parts {
        let lines = match measure::part(&bench, *part, &mut found.step) {
            Ok(lines) => lines,
            Err(measure::Stopped { exit, message }) => {
                output::error(&message);
                return Ok(exit);
            }
        };
        if !output.is_json() {
            output::stream(&show::part(*part, &lines, found.parts.is_empty(), output));
        }
        found.parts.push((*part, lines));
    }
    let saved = place.as_deref().map(|path| save(path, &found)).transpose()?;
    if output.is_json() {
        output::json(&show::json(&found, place.as_deref()))?;
    } else {
        output::text(&show::end(&found, place.as_deref()));
    }
    saved.flatten().iter().for_each(|note| output::note(note));
    Ok(Exit::Done)
}

/// Resolves the arguments; all errors are reported before the first burst.
fn resolve(arguments: &BenchArgs) -> anyhow::Result<BenchRun<'_>> {
    Isa::chosen()?;
    let machine = probe();
    let mut parts: Vec<BenchPart> = arguments.parts.iter().map(|part| BenchPart::from(*part)).collect();
    if arguments.ranks == 1 && parts.contains(&BenchPart::Collectives) {
        bail!("collectives need at least 2 ranks: raise --ranks");
    }
    if parts.is_empty() {
        parts = BenchPart::ALL
            .into_iter()
            .filter(|part| arguments.ranks > 1 || *part != BenchPart::Collectives)
            .collect();
    }
    parts.sort_unstable();
    parts.dedup();
    if parts.contains(&BenchPart::Disk) {
        let dir = &arguments.dir;
        ensure!(dir.is_dir(), "--dir {} is not a folder: give one on the disk to measure", dir.display());
    }
    let threads = arguments.threads.unwrap_or(u64::from(machine.cpu.threads)) as usize;
    let rounds = arguments.rounds.unwrap_or(if arguments.quick { 3 } else { 20 }) as usize;
    Ok(BenchRun { arguments, machine, parts, threads, rounds })
}

/// Merges the results into the machine's profile. Returns a note if an invalid profile was replaced.
fn save(path: &std::path::Path, found: &BenchFindings) -> anyhow::Result<Option<String>> {
    let (mut profile, note) = match Profile::read(path, &found.machine) {
        Ok(profile) => (profile.unwrap_or_else(|| Profile::new(found.machine.clone())), None),
        Err(error) => (Profile::new(found.machine.clone()), Some(format!("note: replaced: {error}"))),
    };
    for (part, lines) in &found.parts {
        profile.put(*part, found.quick, lines.clone());
    }
    profile.write(path)?;
    Ok(note)
}
