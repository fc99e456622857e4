//! Initial weights: from the model folder's files, or random ones where it has only a config.json.

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use zeroth_engine::{Engine, RunError};
use zeroth_model::{
    ModelConfig, Parameter, ParameterTable, WeightFiles, WeightsError, fill_new, has_weights,
};

use super::load_progress::LoadProgress;
use crate::distill::{TeacherLoad, read_teacher};

/// Elements initialised per task.
pub(crate) const AT_ONCE: usize = 1 << 14;

/// The source of initial weights.
#[allow(missing_docs, reason = "names say what they are")]
pub enum InitialWeights {
    Files(WeightFiles),
    /// Random initialisation.
    Random {
        seed: u64,
        /// The model, which says how they are drawn.
        model: Box<ModelConfig>,
    },
}

impl InitialWeights {
    /// Opens the folder's weights, or falls back to random ones if there are none. Unreadable weights are an error.
    pub fn open(
        folder: &Path,
        model: &ModelConfig,
        table: &ParameterTable,
        seed: u64,
    ) -> Result<Self, WeightsError> {
        if has_weights(folder)? {
            WeightFiles::open(folder, table).map(Self::Files)
        } else {
            Ok(Self::Random { seed, model: Box::new(model.clone()) })
        }
    }

    /// Notes about the weights, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        match self {
            Self::Files(files) => files.warnings().iter().map(ToString::to_string).collect(),
            Self::Random { seed, .. } => {
                vec![format!("the model folder has no weights: initialised randomly with seed {seed}")]
            }
        }
    }

    /// Loads this rank's shard, and that of the teacher. `report` is called with loaded and total elements.
    pub(crate) fn load(
        &self,
        table: &ParameterTable,
        engine: &mut Engine<'_>,
        names: &[String],
        teacher: &mut Option<TeacherLoad<'_>>,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<(), RunError> {
        let mut progress = LoadProgress::new(engine.compiled(), 1, report);
        let known = table.by_name();
        let found: Vec<Option<&Parameter>> =
            names.iter().map(|name| known.get(name.as_str()).copied()).collect();
        engine.load(&mut |param, range, elements| {
            let (place, end) = (param.index(), range.end);
            if !read_teacher(teacher, place, &range, elements)?
                && let Some(parameter) = found[place]
            {
                self.read(parameter, range, elements)?;
            }
            progress.loaded(place, end);
            Ok(())
        })
    }

    /// A range of a parameter's elements.
    pub(crate) fn read(
        &self,
        parameter: &Parameter,
        range: Range<u64>,
        elements: &mut [f32],
    ) -> Result<(), WeightsError> {
        match self {
            Self::Files(files) => files.read_f32(&parameter.name, range, elements)?,
            // Counter-based random numbers: the result does not depend on the number of threads.
            Self::Random { seed, model } => {
                let new = model.new_values(parameter);
                elements.par_chunks_mut(AT_ONCE).enumerate().for_each(|(place, part)| {
                    let first = range.start + (place * AT_ONCE) as u64;
                    let range = first..first + part.len() as u64;
                    fill_new(*seed, new, parameter, range, part);
                });
            }
        }
        Ok(())
    }
}
