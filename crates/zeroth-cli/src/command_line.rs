//! From the arguments of the process to a command.

use std::ffi::OsString;

use clap::{Command, FromArgMatches};
use zeroth::comm::local::is_launched;

use crate::cli::{Cli, DeviceArg};
use crate::flag_names::Subcommand;
use crate::parse_errors::{self, ParseFailure, name_of};
use crate::{normalize_args, run_file};

/// A command line that was read.
#[derive(Debug)]
pub(crate) struct CommandRead {
    pub(crate) cli: Cli,
    /// What the user should know about it.
    pub(crate) notes: Vec<String>,
}

/// Reads a command line, with the run file that it names.
pub(crate) fn read(
    root: &Command,
    typed: impl Iterator<Item = OsString>,
) -> Result<CommandRead, ParseFailure> {
    let refuse = |errors| ParseFailure::Errors { errors, command: None };
    let typed = normalize_args::texts(typed).map_err(|message| refuse(vec![message]))?;
    let refusal =
        normalize_args::unsupported_command(&typed).or_else(|| normalize_args::foreign_command(root, &typed));
    if let Some(refusal) = refusal {
        return Err(refuse(vec![refusal]));
    }
    // Ranks have the launcher's arguments, run file included.
    let is_rank = is_launched();
    let typed = if is_rank { typed } else { run_file::expand(root, typed).map_err(refuse)? };
    run_file::keep(&typed);
    let matches = parse_errors::parse(root, &typed)?;
    let cli = Cli::from_arg_matches(&matches).map_err(|error| ParseFailure::Clap(Box::new(error)))?;
    let notes = if is_rank { Vec::new() } else { repeated(&Subcommand::find(root, &typed), &typed) };
    Ok(CommandRead { cli, notes })
}

/// A command line of `train` for ranks on several hosts.
#[derive(Debug)]
pub(crate) struct TrainCommand {
    /// Its arguments without the program. Ranks read the run file among them themselves.
    pub(crate) arguments: Vec<String>,
    /// Whether it trains on CPUs.
    pub(crate) is_cpu: bool,
}

impl TrainCommand {
    /// Whether it says what to resume from.
    pub(crate) fn resumes(&self) -> bool {
        self.arguments.iter().any(|word| word == "--resume" || word.starts_with("--resume="))
    }
}

/// Checks a command of `launch` before any host is asked to run it.
pub(crate) fn read_train(root: &Command, typed: &[String]) -> Result<TrainCommand, ParseFailure> {
    let refuse = |errors| ParseFailure::Errors { errors, command: None };
    if typed.first().is_none_or(|word| word != "train") {
        let found = typed.first().map_or("nothing", String::as_str);
        return Err(refuse(vec![format!("`zeroth launch` starts `train`: found {found} behind --")]));
    }
    let all = std::iter::once("zeroth".to_owned()).chain(typed.iter().cloned()).collect();
    let all = run_file::expand(root, all).map_err(refuse)?;
    let matches = parse_errors::parse(root, &all)?;
    let cli = Cli::from_arg_matches(&matches).map_err(|error| ParseFailure::Clap(Box::new(error)))?;
    let is_cpu = match &cli.command {
        crate::cli::Command::Train(train) => train.device == Some(DeviceArg::Cpu),
        _ => false,
    };
    Ok(TrainCommand { arguments: typed.to_vec(), is_cpu })
}

/// Notes on flags with several values that are given twice: someone may expect that they add up.
fn repeated(subcommand: &Subcommand<'_>, typed: &[String]) -> Vec<String> {
    let mut seen: Vec<(&str, usize)> = Vec::new();
    for token in typed.iter().take_while(|token| *token != "--") {
        let Some(flag) = name_of(token).and_then(|name| subcommand.list_flag(&name.replace('_', "-"))) else {
            continue;
        };
        match seen.iter_mut().find(|(other, _)| *other == flag) {
            Some((_, times)) => *times += 1,
            None => seen.push((flag, 1)),
        }
    }
    let several = seen.into_iter().filter(|(_, times)| *times > 1);
    let note = |(flag, times)| {
        format!(
            "--{flag} is given {times} times, and the last counts: several values stand behind one --{flag}"
        )
    };
    several.map(note).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::{self, RecvTimeoutError};
    use std::thread;
    use std::time::{Duration, Instant};

    use clap::Arg;

    use super::*;
    use crate::flag_names::spellings;

    /// CPU time after which a command line counts as endless. Others take milliseconds.
    const MOST_CPU: Duration = Duration::from_secs(1);
    /// The same for one that waits instead: a busy machine takes its time.
    const MOST: Duration = Duration::from_mins(1);

    /// Words that are neither commands nor flags: values that some flags take, and values that none does.
    const VALUES: [&str; 32] = [
        "text",
        "json",
        "xml",
        "true",
        "false",
        "True",
        "0",
        "1",
        "-1",
        "-5",
        "-1e-3",
        "1e999",
        "8B",
        "44GB",
        "zero2",
        "zero5",
        "auto",
        "cpu",
        "lora",
        "cosine",
        "x",
        "no-such-file.jsonl",
        "q_proj",
        "a=b",
        "{}",
        "",
        "-",
        "--",
        "-o",
        "-h",
        "-x",
        "ü",
    ];

    fn argument_words(argument: &Arg, into: &mut Vec<String>) {
        for name in spellings(argument) {
            into.push(format!("--{}", name.replace('-', "_")));
            into.push(format!("--{name}=x"));
            into.push(format!("--{name}"));
        }
        into.extend(argument.get_possible_values().iter().map(|value| value.get_name().to_owned()));
    }

    /// The commands, and every word that may stand around them: commands, flags in both spellings, with and without a
    /// slip, values.
    fn words(root: &Command) -> (Vec<Vec<String>>, Vec<String>) {
        let (mut commands, mut others) = (Vec::new(), VALUES.map(str::to_owned).to_vec());
        let mut all = vec![(root, Vec::new())];
        while let Some((command, path)) = all.pop() {
            for argument in command.get_arguments() {
                argument_words(argument, &mut others);
            }
            for below in command.get_subcommands() {
                let path = [&path[..], &[below.get_name().to_owned()]].concat();
                others.push(below.get_name().to_owned());
                commands.push(path.clone());
                all.push((below, path));
            }
        }
        let slips: Vec<String> =
            others.iter().filter_map(|word| Some(word.strip_suffix('s')?.to_owned())).collect();
        others.extend(slips);
        (commands, others)
    }

    /// SplitMix64.
    struct Chance(u64);

    impl Chance {
        fn below(&mut self, count: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % count as u64) as usize
        }
    }

    /// A random command line: mostly a command with words around it.
    fn line(index: u64, commands: &[Vec<String>], others: &[String]) -> Vec<String> {
        let mut chance = Chance(index.wrapping_mul(0xd134_2543_de82_ef95));
        let mut line = vec!["zeroth".to_owned()];
        match chance.below(6) {
            0 => line.extend(["--format", "xml"].map(str::to_owned)),
            1 => line.push(["--format", "--format=xml", "--format=json"][chance.below(3)].to_owned()),
            2 => line.push(others[chance.below(others.len())].clone()),
            _ => {}
        }
        if chance.below(4) > 0 {
            line.extend_from_slice(&commands[chance.below(commands.len())]);
        }
        for _ in 0..chance.below(9) {
            line.push(others[chance.below(others.len())].clone());
        }
        line
    }

    /// The CPU time of a thread, by the kernel's accounts.
    fn cpu_time(thread: &str) -> Duration {
        let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap_or_default();
        let nanoseconds = text.split(' ').next().and_then(|first| first.parse().ok());
        Duration::from_nanos(nanoseconds.unwrap_or(0))
    }

    #[test]
    fn every_command_line_ends() {
        let count: u64 = if std::env::var_os("ZEROTH_FULL").is_some() { 100_000 } else { 2_000 };
        let (sender, lines) = mpsc::channel();
        let worker = thread::Builder::new().stack_size(8 << 20).spawn(move || {
            let root = crate::flag_rules::command();
            let (commands, others) = words(&root);
            assert!(commands.len() > 20 && others.len() > 500, "{} words", others.len());
            let thread = fs::read_link("/proc/thread-self").unwrap().display().to_string();
            let mut read = 0;
            for index in 0..count {
                let line = line(index, &commands, &others);
                if sender.send((thread.clone(), line.clone())).is_err() {
                    return read;
                }
                read += u64::from(super::read(&root, line.into_iter().map(OsString::from)).is_ok());
            }
            read
        });
        // The channel closes when the last one has ended.
        let mut line = None;
        let (mut begin, mut cpu_before) = (Instant::now(), Duration::ZERO);
        loop {
            match lines.recv_timeout(Duration::from_millis(100)) {
                Ok((thread, next)) => {
                    (begin, cpu_before) = (Instant::now(), Duration::MAX);
                    line = Some((thread, next));
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let Some((thread, line)) = &line else { continue };
                    let cpu = cpu_time(thread);
                    cpu_before = cpu_before.min(cpu);
                    let (cpu, time) = (cpu.saturating_sub(cpu_before), begin.elapsed());
                    assert!(cpu < MOST_CPU && time < MOST, "no end after {time:?}, {cpu:?} of CPU: {line:?}");
                }
            }
        }
        let read = worker.unwrap().join().unwrap();
        // Some are right, so that both ways are tried.
        assert!(read > 0 && read < count, "{read} of {count} are commands");
    }
}
