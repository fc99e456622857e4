//! Where a job's weights come from: files of its folder, or, with config.json alone, the seed.

use std::path::Path;

use rayon::prelude::*;
use zeroth_model::{
    ModelConfig, Parameter, ParameterTable, WeightFiles, WeightWarning, WeightsError, fill_new,
};
use zeroth_step::run::{Engine, RunError};

/// Elements that a thread makes at a time.
const AT_ONCE: usize = 1 << 14;

/// Weights to start from.
pub enum Weights {
    /// The folder's.
    Files(WeightFiles),
    /// New ones.
    New {
        /// What they are a function of.
        seed: u64,
        /// Their standard deviation.
        deviation: f32,
    },
}

impl Weights {
    /// The folder's weights, or new ones where it has none.
    pub fn open(
        folder: &Path,
        model: &ModelConfig,
        table: &ParameterTable,
        seed: u64,
    ) -> Result<Self, WeightsError> {
        let is_weights = |name: &str| {
            Path::new(name).extension().is_some_and(|extension| extension == "safetensors")
                || name.ends_with(".safetensors.index.json")
        };
        let has_weights = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .any(|entry| entry.file_name().to_str().is_some_and(is_weights));
        if has_weights {
            return WeightFiles::open(folder, table).map(Self::Files);
        }
        Ok(Self::New { seed, deviation: model.initializer_range as f32 })
    }

    /// What is worth knowing about the files.
    pub fn warnings(&self) -> &[WeightWarning] {
        match self {
            Self::Files(files) => files.warnings(),
            Self::New { .. } => &[],
        }
    }

    /// Loads what a rank holds, and only that.
    pub fn load(
        &self,
        table: &ParameterTable,
        engine: &mut Engine<'_>,
        names: &[String],
    ) -> Result<(), RunError> {
        let found: Vec<&Parameter> =
            names.iter().filter_map(|name| table.iter().find(|parameter| parameter.name == *name)).collect();
        engine.load(&mut |param, range, elements| {
            let parameter = found[param.index()];
            match self {
                Self::Files(files) => files.read_f32(&parameter.name, range, elements)?,
                // Each element is a function of its place: any number of threads makes the same ones.
                Self::New { seed, deviation } => {
                    elements.par_chunks_mut(AT_ONCE).enumerate().for_each(|(place, part)| {
                        let first = range.start + (place * AT_ONCE) as u64;
                        let range = first..first + part.len() as u64;
                        fill_new(*seed, *deviation, parameter, range, part);
                    });
                }
            }
            Ok(())
        })
    }
}
