//! Damaged files: read in this process by the functions that commands use, and a sample of them by the real binary. No panic, no
//! hang, no huge allocation.

mod formats;
mod guard;
pub(crate) mod mutate;
mod through_binary;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use self::formats::Format;
use self::guard::{Fault, Guard, MEMORY};
use super::cases;
use super::chance::Chance;

/// Files that hang or take too much memory, after which an audit is ended.
const STUCK: u32 = 5;

/// Reads damaged files of a format.
fn audit(format: &Format) {
    let count = cases(200, 10_000);
    let mut guard = Guard::new(format.reader.clone());
    let mut faults: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    let (mut taken, mut stuck) = (0, 0);
    for case in 0..count {
        let bytes = format.damaged(case);
        fs::write(&format.file, &bytes).unwrap();
        let fault = match guard.read(&format.file) {
            Ok(is_taken) => {
                taken += u32::from(is_taken);
                continue;
            }
            Err(Fault::Panic(said)) => {
                format!("panic: {}", without_numbers(said.lines().next().unwrap_or_default()))
            }
            Err(Fault::Memory) => format!("more than {} MiB", MEMORY >> 20),
            Err(Fault::Time) => "hang".to_owned(),
        };
        fs::write(kept(format.name, case), &bytes).unwrap();
        stuck += u32::from(!fault.starts_with("panic"));
        faults.entry(fault).or_insert((0, case)).0 += 1;
        // Each leaves a thread behind that may compute for ever.
        if stuck == STUCK {
            break;
        }
    }
    let total: u32 = faults.values().map(|(times, _)| times).sum();
    println!("{}: {count} damaged files, {taken} of them taken for good ones, {total} faults", format.name);
    // Were all refused, nothing behind the first check would have been tried; were none, nothing damaged.
    assert!((1..count).contains(&taken), "{}: {taken} of {count} taken", format.name);
    let list = faults.iter().map(|(fault, (times, case))| {
        format!("  {times} times {fault}; the first in {}", kept(format.name, *case).display())
    });
    assert!(faults.is_empty(), "{}:\n{}", format.name, list.collect::<Vec<_>>().join("\n"));
}

/// Numbers out of a message, so that alike faults count as one.
fn without_numbers(said: &str) -> String {
    let mut text: String = said.chars().map(|char| if char.is_ascii_digit() { '0' } else { char }).collect();
    while text.contains("00") {
        text = text.replace("00", "0");
    }
    text
}

/// Where the file of a case that went wrong is kept.
fn kept(format: &str, case: u32) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("damaged");
    fs::create_dir_all(&folder).unwrap();
    folder.join(format!("{}-{case}", format.replace(' ', "-")))
}

impl Format {
    /// The file of a case: a function of its number alone.
    fn damaged(&self, case: u32) -> Vec<u8> {
        let mut chance = Chance::of(self.audit, case);
        let seed = &self.seeds[chance.below(self.seeds.len())];
        (self.damage)(seed, &mut chance)
    }
}

#[test]
fn damaged_jsonl() {
    audit(&formats::jsonl());
}

#[test]
fn damaged_parquet() {
    audit(&formats::parquet());
}

#[test]
fn damaged_safetensors() {
    audit(&formats::safetensors());
}

#[test]
fn damaged_config_json() {
    audit(&formats::config_json());
}

#[test]
fn damaged_tokenizer_json() {
    audit(&formats::tokenizer_json());
}

#[test]
fn damaged_manifest() {
    audit(&formats::manifest());
}

#[test]
fn damaged_token_cache() {
    audit(&formats::token_cache());
}

#[test]
fn damaged_deepspeed_json() {
    audit(&formats::deepspeed_json());
}
