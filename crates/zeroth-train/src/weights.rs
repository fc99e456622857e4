//! Where a job's weights come from: files of its folder, or, with config.json alone, the seed.

use std::path::Path;

use rayon::prelude::*;
use zeroth_engine::{Engine, RunError};
use zeroth_model::{
    ModelConfig, Parameter, ParameterTable, WeightFiles, WeightsError, fill_new, has_weights,
};

use crate::loading::Loading;

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
    /// The folder's weights, or new ones where it has none. Weights that are there and cannot be read are an error.
    pub fn open(
        folder: &Path,
        model: &ModelConfig,
        table: &ParameterTable,
        seed: u64,
    ) -> Result<Self, WeightsError> {
        if has_weights(folder)? {
            WeightFiles::open(folder, table).map(Self::Files)
        } else {
            Ok(Self::New { seed, deviation: model.initializer_range as f32 })
        }
    }

    /// What is worth knowing about them, a sentence each.
    pub fn notes(&self) -> Vec<String> {
        match self {
            Self::Files(files) => files.warnings().iter().map(ToString::to_string).collect(),
            Self::New { seed, .. } => {
                vec![format!("the model folder has no weights: new weights from seed {seed}")]
            }
        }
    }

    /// Loads what a rank holds, and only that. `tell` is called with about how many elements of how many are there.
    pub fn load(
        &self,
        table: &ParameterTable,
        engine: &mut Engine<'_>,
        names: &[String],
        tell: &mut dyn FnMut(u64, u64),
    ) -> Result<(), RunError> {
        let mut loading = Loading::new(table, names, 1, tell);
        let found: Vec<&Parameter> =
            names.iter().filter_map(|name| table.iter().find(|parameter| parameter.name == *name)).collect();
        engine.load(&mut |param, range, elements| {
            let (parameter, end) = (found[param.index()], range.end);
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
            loading.loaded(param.index(), end);
            Ok(())
        })
    }
}
