//! Loads a teacher's weights beside the student's, and hashes them for its identity.

use std::collections::HashMap;
use std::ops::Range;

use zeroth_engine::{Engine, StateKind};
use zeroth_model::{Parameter, TEACHER_PREFIX, WeightsError};

use super::TeacherModel;
use super::error::TeacherError;
use crate::checkpoint::BaseEntry;
use crate::trainer::TrainError;
use crate::weights::{BaseHash, InitialWeights, name_key, overlaps, sample_of};

/// The weights of a teacher, opened.
pub struct TeacherWeights<'a> {
    teacher: &'a TeacherModel,
    weights: InitialWeights,
}

impl<'a> TeacherWeights<'a> {
    /// Opens the weights; only headers are read.
    pub fn open(teacher: &'a TeacherModel, seed: u64) -> Result<Self, TeacherError> {
        let weights = InitialWeights::open(&teacher.folder, &teacher.config, &teacher.table, seed)?;
        if matches!(weights, InitialWeights::Random { .. }) && !teacher.random {
            return Err(TeacherError::NoWeights { name: teacher.name.clone() });
        }
        Ok(Self { teacher, weights })
    }

    /// Notes about the weights, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        match &self.weights {
            InitialWeights::Files(_) => {
                self.weights.notes().into_iter().map(|note| format!("--teacher: {note}")).collect()
            }
            InitialWeights::Random { seed, .. } => {
                vec![format!("--teacher {} has no weights: drawn with seed {seed}", self.teacher.name)]
            }
        }
    }

    /// The hash of the first elements of each tensor.
    pub fn sample(&self) -> Result<String, WeightsError> {
        sample_of(&self.teacher.table, &|parameter, range, out| self.weights.read(parameter, range, out))
    }

    /// A range of a parameter's elements.
    pub(super) fn read(
        &self,
        parameter: &Parameter,
        range: Range<u64>,
        elements: &mut [f32],
    ) -> Result<(), WeightsError> {
        self.weights.read(parameter, range, elements)
    }
}

/// Reads a range of a parameter, if there is a teacher and the parameter is its own.
pub(crate) fn read_teacher(
    teacher: &mut Option<TeacherLoad<'_>>,
    param: usize,
    range: &Range<u64>,
    elements: &mut [f32],
) -> Result<bool, WeightsError> {
    match teacher {
        Some(teacher) => teacher.read(param, range, elements),
        None => Ok(false),
    }
}

/// A teacher's weights on the way into an engine.
pub(crate) struct TeacherLoad<'a> {
    weights: TeacherWeights<'a>,
    /// For each parameter of the program, that of the teacher and its key in the hash.
    params: Vec<Option<(&'a Parameter, u64)>>,
    /// Elements that this rank hashes: where weights are whole on every rank, each reads all of them.
    owned: HashMap<usize, Vec<Range<u64>>>,
    hash: BaseHash,
}

impl<'a> TeacherLoad<'a> {
    /// `names` are those of the program's parameters; the teacher's begin with `prefix`.
    pub(crate) fn new(
        weights: TeacherWeights<'a>,
        engine: &Engine<'_>,
        names: &[String],
        prefix: &str,
    ) -> Self {
        let known = weights.teacher.table.by_name();
        let of_teacher = |name: &String| {
            let own = name.strip_prefix(prefix)?;
            known.get(own).map(|parameter| (*parameter, name_key(own)))
        };
        let mut owned: HashMap<usize, Vec<Range<u64>>> = HashMap::new();
        for (param, range, _) in engine.owned(StateKind::Weights) {
            owned.entry(param.index()).or_default().push(range);
        }
        let params = names.iter().map(of_teacher).collect();
        Self { weights, params, owned, hash: BaseHash::default() }
    }

    /// As [`Self::new`] beside a student.
    pub(crate) fn beside_student(weights: TeacherWeights<'a>, engine: &Engine<'_>, names: &[String]) -> Self {
        Self::new(weights, engine, names, TEACHER_PREFIX)
    }

    /// Reads a range of a parameter, if it is the teacher's.
    pub(crate) fn read(
        &mut self,
        param: usize,
        range: &Range<u64>,
        elements: &mut [f32],
    ) -> Result<bool, WeightsError> {
        let Some((parameter, key)) = self.params[param] else { return Ok(false) };
        self.weights.read(parameter, range.clone(), elements)?;
        let own = self.owned.get(&param).map_or(&[][..], Vec::as_slice);
        for part in overlaps(range, own) {
            let places = (part.start - range.start) as usize..(part.end - range.start) as usize;
            self.hash.add(key, part.start, &elements[places]);
        }
        Ok(true)
    }

    /// The teacher's identity, once all ranks have loaded it. Collective.
    pub(crate) fn finish(self, engine: &Engine<'_>) -> Result<BaseEntry, TrainError> {
        let all = engine.all_gather(0, "identity of the teacher", &self.hash)?;
        let hash = all.into_iter().fold(BaseHash::default(), BaseHash::and);
        let teacher = self.weights.teacher;
        debug_assert_eq!(hash.elements(), teacher.table.total(), "every element is hashed once");
        Ok(BaseEntry {
            name: teacher.name.clone(),
            total: teacher.table.total(),
            hash: hash.text(),
            sample: self.weights.sample()?,
        })
    }
}
