//! The profile of a machine: a file with its identity, the version, and the benchmark results of every part.
//!
//! Measuring a part again replaces its results and keeps the others. The file's name follows from the machine, and its
//! contents are checked, so that a file of another machine or format is never used.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use zeroth_base::{DType, PublishError, counted, publish};

use super::{BenchResult, F32, Rate, TILES};
use crate::{Gpus, Machine};
use zeroth_cpu::Isa;

/// The format of the file.
const VERSION: u32 = 1;

/// A part of the benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BenchPart {
    /// Matmuls, attention, head and memory-bound kernels.
    Kernels,
    /// The optimizer.
    Optimizer,
    /// Collectives of local ranks.
    Collectives,
    /// A folder's disk.
    Disk,
    /// A whole training step.
    Step,
}

impl BenchPart {
    /// All parts, in the order they are measured.
    pub const ALL: [Self; 5] = [Self::Kernels, Self::Optimizer, Self::Collectives, Self::Disk, Self::Step];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernels => "kernels",
            Self::Optimizer => "optimizer",
            Self::Collectives => "collectives",
            Self::Disk => "disk",
            Self::Step => "step",
        }
    }
}

/// The identity of a machine, as far as speed goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Identity {
    /// The CPU's name.
    #[serde(rename = "processor")]
    pub cpu: String,
    /// Useful threads.
    pub threads: u32,
    /// Physical cores among them.
    pub cores: Option<u32>,
    /// Memory in whole GiB: the exact size differs from boot to boot.
    pub memory_gib: u64,
    /// The ISA of the kernels: amx, avx512, avx2, neon or portable.
    #[serde(rename = "path")]
    pub isa: String,
    pub gpus: Vec<String>,
}

impl Identity {
    /// The identity of a probed machine, with the ISA that `ZEROTH_CPU` selects.
    pub fn of(machine: &Machine) -> Self {
        let gpus = match &machine.gpus {
            Gpus::Found { devices, .. } => devices.iter().map(|gpu| gpu.name.clone()).collect(),
            _ => Vec::new(),
        };
        Self {
            cpu: machine.cpu.model.clone().unwrap_or_else(|| "unknown".to_owned()),
            threads: machine.cpu.threads,
            cores: machine.cpu.cores,
            memory_gib: machine.host_memory_total().unwrap_or(0).div_ceil(1 << 30),
            isa: Isa::chosen().unwrap_or_else(|_| Isa::detect()).name().to_owned(),
            gpus,
        }
    }

    /// The name of this machine's file, distinct for machines that share a home folder.
    pub fn file_name(&self) -> String {
        let words = format!(
            "{}|{}|{:?}|{}|{}|{}",
            self.cpu,
            self.threads,
            self.cores,
            self.memory_gib,
            self.isa,
            self.gpus.join("|")
        );
        // FNV-1a.
        let hash = words.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        format!("{hash:016x}.json")
    }
}

/// One part of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct ProfilePart {
    /// The version of zeroth that measured.
    pub zeroth: String,
    /// Time of the measurement, in seconds since 1970.
    pub measured_at: u64,
    /// Whether it was measured with --quick.
    pub quick: bool,
    pub lines: Vec<BenchResult>,
}

/// The benchmark results of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Profile {
    /// The format of the file.
    pub version: u32,
    pub machine: Identity,
    pub parts: BTreeMap<BenchPart, ProfilePart>,
}

/// A profile cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum ProfileError {
    #[error("cannot read the machine's profile {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is no profile of format {VERSION}: {problem}; `zeroth bench` writes a new one", path.display())]
    Format { path: PathBuf, problem: String },
    #[error(
        "{} is the profile of another machine ({found}); this one is {here}: `zeroth bench` measures it", path.display()
    )]
    Other { path: PathBuf, found: String, here: String },
    #[error(transparent)]
    Write(#[from] PublishError),
}

impl Profile {
    /// An empty profile.
    pub fn new(machine: Identity) -> Self {
        Self { version: VERSION, machine, parts: BTreeMap::new() }
    }

    /// Replaces the results of a part.
    pub fn put(&mut self, part: BenchPart, quick: bool, lines: Vec<BenchResult>) {
        let zeroth = env!("CARGO_PKG_VERSION").to_owned();
        let measured_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.parts.insert(part, ProfilePart { zeroth, measured_at, quick, lines });
    }

    /// Reads the profile of this machine; `None` where there is no file.
    pub fn read(path: &Path, here: &Identity) -> Result<Option<Self>, ProfileError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ProfileError::Read { path: path.to_owned(), source }),
        };
        let format = |problem: String| ProfileError::Format { path: path.to_owned(), problem };
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| format(error.to_string()))?;
        let version = &value["version"];
        if *version != VERSION {
            return Err(format(format!("its `version` is {version}")));
        }
        let profile: Self = serde_json::from_value(value).map_err(|error| format(error.to_string()))?;
        if profile.machine != *here {
            let words = |machine: &Identity| {
                format!(
                    "{}, {}, {} GiB, {}",
                    machine.cpu,
                    counted(u64::from(machine.threads), "thread"),
                    machine.memory_gib,
                    machine.isa
                )
            };
            let (found, here) = (words(&profile.machine), words(here));
            return Err(ProfileError::Other { path: path.to_owned(), found, here });
        }
        Ok(Some(profile))
    }

    /// Writes the file atomically, and creates its folder.
    pub fn write(&self, path: &Path) -> Result<(), ProfileError> {
        let failed = |source| PublishError { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let text = serde_json::to_string_pretty(self).map_err(|error| failed(error.into()))?;
        Ok(publish(path, format!("{text}\n").as_bytes())?)
    }

    /// The rate of a kernel benchmark.
    pub fn rate(&self, name: &str, threads: usize) -> Option<Rate> {
        let lines = &self.parts.get(&BenchPart::Kernels)?.lines;
        let line = lines.iter().find(|line| line.name == name && line.threads == threads)?;
        Some(Rate { best: line.best, median: line.median })
    }

    /// Peak FLOP/s of `threads` threads at a dtype: the peak loop measured on as many threads, or else on one, multiplied.
    pub fn peak_flops(&self, dtype: DType, threads: usize) -> Option<f64> {
        let tiles = self.machine.isa == Isa::Amx.name() && dtype == DType::Bf16;
        let limit = if tiles { TILES } else { F32 };
        let together = self.rate(limit, threads).map(|rate| rate.best);
        let gflops = together.or_else(|| Some(self.rate(limit, 1)?.best * threads as f64))?;
        Some(1e9 * gflops)
    }
}

#[cfg(test)]
mod tests {
    use super::super::RateUnit;
    use super::*;

    fn here() -> Identity {
        Identity {
            cpu: "A CPU".to_owned(),
            threads: 2,
            cores: Some(2),
            memory_gib: 24,
            isa: "amx".to_owned(),
            gpus: Vec::new(),
        }
    }

    fn measured() -> Profile {
        let rate = Rate { best: 2350.1, median: 1.0 / 3.0 };
        let lines = vec![
            BenchResult::new(TILES, 1, RateUnit::Gflops, rate, None),
            BenchResult::new(
                F32,
                1,
                RateUnit::Gflops,
                Rate { best: 170.0, median: 160.0 },
                Some((TILES, rate)),
            ),
            BenchResult::new(F32, 2, RateUnit::Gflops, Rate { best: 300.0, median: 290.0 }, None),
        ];
        let mut profile = Profile::new(here());
        profile.put(BenchPart::Kernels, true, lines);
        profile
    }

    #[test]
    fn a_profile_round_trips_and_parts_are_replaced_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machines").join(here().file_name());
        assert_eq!(Profile::read(&path, &here()).unwrap(), None);
        let mut written = measured();
        written.write(&path).unwrap();
        assert_eq!(Profile::read(&path, &here()).unwrap(), Some(written.clone()));
        // Another part joins, and the first stays.
        written.put(BenchPart::Disk, false, Vec::new());
        written.write(&path).unwrap();
        assert_eq!(Profile::read(&path, &here()).unwrap(), Some(written));
    }

    #[test]
    fn profiles_of_other_machines_and_formats_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        measured().write(&path).unwrap();
        let other = Identity { isa: "avx2".to_owned(), ..here() };
        assert_ne!(other.file_name(), here().file_name());
        let message = Profile::read(&path, &other).unwrap_err().to_string();
        assert!(message.contains("another machine") && message.contains("avx2"), "{message}");
        for (text, phrase) in
            [("{\"version\": 9}", "is 9"), ("[]", "null"), ("{", "EOF"), ("{\"version\": 1}", "missing")]
        {
            std::fs::write(&path, text).unwrap();
            let message = Profile::read(&path, &here()).unwrap_err().to_string();
            assert!(message.contains(phrase) && message.contains("zeroth bench"), "{message}");
        }
    }

    #[test]
    fn a_missing_peak_is_extrapolated_from_one_thread() {
        let profile = measured();
        assert_eq!(profile.peak_flops(DType::Bf16, 2), Some(2.0 * 2350.1e9));
        assert_eq!(profile.peak_flops(DType::F32, 2), Some(300e9));
        assert_eq!(Profile::new(here()).peak_flops(DType::F32, 1), None);
    }
}
