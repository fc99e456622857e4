//! Opens an adapter folder and checks it against a base model.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use zeroth_base::{DType, nearest};

use super::config::AdapterConfig;
use super::error::{AdapterError, AdapterProblem};
use super::layout::read_range;
use super::{ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS};
use crate::lora::{Lora, LoraError, LoraTargets, lora_table};
use crate::safetensors::{WeightFiles, WeightProblem, WeightsError, read_header};
use crate::table::{Parameter, ParameterTable};

/// The number of problems that get a similar name suggested.
const NEAR_NAMES: usize = 12;

/// An open adapter whose matrices all fit a base model.
///
/// Reads take `&self`, so threads can share it.
#[derive(Debug)]
pub struct Adapter {
    config: AdapterConfig,
    lora: Lora,
    notes: Vec<String>,
    table: ParameterTable,
    files: WeightFiles,
}

/// Whether a folder is an adapter's.
pub fn is_adapter_folder(folder: &Path) -> bool {
    folder.join(ADAPTER_CONFIG).is_file()
}

impl Adapter {
    /// Opens the adapter in a folder: reads its config, resolves its targets in `base`, and checks name, shape and
    /// dtype of every tensor. All problems of the tensors are returned at once.
    pub fn open(folder: &Path, base: &ParameterTable) -> Result<Self, AdapterError> {
        let config = AdapterConfig::read(folder)?;
        let mut notes = config.notes.clone();
        let targets = |source| AdapterError::Targets { folder: folder.to_owned(), source };
        let mut lora = config.lora();
        keep_found(base, &mut lora, &mut notes);
        let table = lora_table(base, &lora).map_err(targets)?;

        let path = folder.join(ADAPTER_WEIGHTS);
        if matches!(path.try_exists(), Ok(false)) {
            let is_pickle = folder.join(ADAPTER_PICKLE).exists();
            let folder = folder.to_owned();
            return Err(if is_pickle {
                AdapterError::Pickle { folder }
            } else {
                AdapterError::NoWeights { folder }
            });
        }
        let opened = WeightFiles::open_file(&path, &table);
        let stored = stored_names(&path);
        if let Some(name) = stored.iter().find(|name| is_of_one_expert(name)) {
            return Err(AdapterError::SingleExperts { folder: folder.to_owned(), name: name.clone() });
        }
        let problems = problems(&table, &stored, opened.as_ref().err());
        match opened {
            Ok(files) if problems.is_empty() => Ok(Self { config, lora, notes, table, files }),
            Err(error) if problems.is_empty() => Err(error.into()),
            _ => Err(AdapterError::DoNotFit { folder: folder.to_owned(), problems }),
        }
    }

    /// Its `adapter_config.json`.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// Rank, scale and the targets that the base has.
    pub fn lora(&self) -> &Lora {
        &self.lora
    }

    /// Its matrices alone, as [`lora_table`] lists them.
    pub fn table(&self) -> &ParameterTable {
        &self.table
    }

    /// What was passed over, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The dtype in which a matrix is stored.
    pub fn dtype(&self, name: &str) -> Result<DType, WeightsError> {
        self.files.dtype(name)
    }

    /// Reads a range of a matrix's elements as f32, by its name in the table of [`crate::add_adapters`].
    pub fn read_f32(&self, name: &str, elements: Range<u64>, out: &mut [f32]) -> Result<(), WeightsError> {
        match self.table.iter().find(|parameter| parameter.name == name) {
            Some(parameter) => {
                let read = |range, out: &mut [f32]| self.files.read_f32(name, range, out);
                read_range(parameter, elements, out, read)
            }
            None => self.files.read_f32(name, elements, out),
        }
    }
}

/// Drops listed targets that the base does not have, with a note, if it has others: PEFT passes over them too.
fn keep_found(base: &ParameterTable, lora: &mut Lora, notes: &mut Vec<String>) {
    let LoraTargets::Named(names) = &lora.targets else { return };
    let is_found = |name: &String| {
        let one = Lora { targets: LoraTargets::Named(vec![name.clone()]), ..lora.clone() };
        !matches!(lora_table(base, &one), Err(LoraError::NotFound { .. }))
    };
    let (found, absent): (Vec<String>, Vec<String>) = names.iter().cloned().partition(is_found);
    if absent.is_empty() || found.is_empty() {
        return;
    }
    notes.push(format!("`target_modules` names modules that the model does not have: {}", absent.join(", ")));
    lora.targets = LoraTargets::Named(found);
}

/// The names of the tensors in a file; none if it cannot be read, which opening it reports.
fn stored_names(path: &Path) -> BTreeSet<String> {
    let tensors = File::open(path).ok().and_then(|file| read_header(&file).ok()?.ok());
    tensors.into_iter().flatten().map(|tensor| tensor.name).collect()
}

/// Whether it is a matrix of one expert: `mlp.experts.7.gate_proj.lora_A.weight`.
fn is_of_one_expert(name: &str) -> bool {
    let expert = name.split_once(".experts.").and_then(|(_, rest)| rest.split('.').next());
    expert.is_some_and(|expert| !expert.is_empty() && expert.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The problems of the tensors: those found by opening the file, and tensors that are no matrix of the adapter.
fn problems(
    table: &ParameterTable,
    stored: &BTreeSet<String>,
    error: Option<&WeightsError>,
) -> Vec<AdapterProblem> {
    let found = match error {
        Some(WeightsError::DoNotFit { problems, .. }) => problems.as_slice(),
        _ => &[],
    };
    let matrices = table.adapter_matrices();
    let has_other = |name: &str| {
        let pairs = matrices.values().map(|pair| pair.map(|matrix| matrix?.stored_names().next()));
        let mut others = pairs.filter_map(|[inner, outer]| match Some(name) {
            name if name == inner => outer,
            name if name == outer => inner,
            _ => None,
        });
        others.any(|other| stored.contains(other))
    };
    let mut problems: Vec<AdapterProblem> = found
        .iter()
        .map(|problem| match problem {
            WeightProblem::Missing { name, .. } => {
                AdapterProblem::Missing { name: name.clone(), has_other: has_other(name) }
            }
            WeightProblem::Shape { name, found, expected, .. } => {
                AdapterProblem::Shape { name: name.clone(), found: found.clone(), expected: expected.clone() }
            }
            // Its text alone: an I/O error cannot be cloned.
            problem => AdapterProblem::File { problem: problem.to_string() },
        })
        .collect();
    let known: BTreeSet<&str> = table.iter().flat_map(Parameter::stored_names).collect();
    let missing: Vec<&str> = known.iter().copied().filter(|name| !stored.contains(*name)).collect();
    for name in stored.iter().filter(|name| !known.contains(name.as_str())) {
        // The search compares all names.
        let near = (problems.len() < NEAR_NAMES).then(|| nearest(name, missing.iter().copied())).flatten();
        problems.push(AdapterProblem::Extra { name: name.clone(), near: near.map(str::to_owned) });
    }
    problems
}
