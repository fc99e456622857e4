//! `bench`: how near this machine comes to its limits, line by line, and the profile that keeps it.

mod measure;
pub(super) mod profile;
mod show;

use anyhow::{bail, ensure};
use zeroth::bench::StepReport;
use zeroth::cpu::Isa;
use zeroth::machine::bench::{Identity, BenchResult, Part, Profile};
use zeroth::machine::{Machine, probe};

use crate::bench_args::BenchArgs;
use crate::exit::Exit;
use crate::output::{self, Output};

/// What was asked for, with every default settled.
struct Asked<'a> {
    arguments: &'a BenchArgs,
    machine: Machine,
    parts: Vec<Part>,
    threads: usize,
    rounds: usize,
}

/// What was found.
struct Found {
    machine: Identity,
    quick: bool,
    rounds: usize,
    parts: Vec<(Part, Vec<BenchResult>)>,
    step: Option<StepReport>,
}

pub(super) fn run(arguments: &BenchArgs, output: &Output) -> anyhow::Result<Exit> {
    let asked = ask(arguments)?;
    let identity = Identity::of(&asked.machine);
    let place =
        if arguments.no_save { None } else { Some(profile::place(arguments.profile.as_ref(), &identity)?) };
    let mut found = Found {
        machine: identity,
        quick: arguments.quick,
        rounds: asked.rounds,
        parts: Vec::new(),
        step: None,
    };
    for part in &asked.parts {
        let lines = match measure::part(&asked, *part, &mut found.step) {
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

/// Settles what was typed. Whatever is wrong is said before the first burst.
fn ask(arguments: &BenchArgs) -> anyhow::Result<Asked<'_>> {
    Isa::chosen()?;
    let machine = probe();
    let mut parts: Vec<Part> = arguments.parts.iter().map(|part| Part::from(*part)).collect();
    if arguments.ranks == 1 && parts.contains(&Part::Collectives) {
        bail!("collectives are between ranks, and --ranks is 1: give it 2 or more");
    }
    if parts.is_empty() {
        parts =
            Part::ALL.into_iter().filter(|part| arguments.ranks > 1 || *part != Part::Collectives).collect();
    }
    parts.sort_unstable();
    parts.dedup();
    if parts.contains(&Part::Disk) {
        let dir = &arguments.dir;
        ensure!(dir.is_dir(), "--dir {} is no folder: name one whose disk is to be measured", dir.display());
    }
    let threads = arguments.threads.unwrap_or(u64::from(machine.cpu.threads)) as usize;
    let rounds = arguments.rounds.unwrap_or(if arguments.quick { 3 } else { 20 }) as usize;
    Ok(Asked { arguments, machine, parts, threads, rounds })
}

/// Puts what was found into the machine's profile; what it holds of other parts stays. Gives what to tell of it.
fn save(path: &std::path::Path, found: &Found) -> anyhow::Result<Option<String>> {
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
