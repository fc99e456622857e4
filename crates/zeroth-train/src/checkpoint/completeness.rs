//! Proves that a checkpoint is complete: every element of every state is stored exactly once.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use zeroth_base::DType;
use zeroth_engine::StateKind;
use zeroth_model::TensorEntry;

use super::error::CheckpointError;
use super::manifest::{Manifest, ParameterEntry};
use super::state::{parse_tensor_name, state_name};

/// A stored range of a parameter's elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredRange {
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) file: usize,
    /// Offset of the first byte in the file.
    pub(super) begin: u64,
    pub(super) dtype: DType,
}

/// Location of every element: for each state, the stored ranges of each parameter in order.
#[derive(Debug)]
pub(super) struct StoredRanges(BTreeMap<&'static str, HashMap<String, Vec<StoredRange>>>);

impl StoredRanges {
    /// The stored ranges of a parameter in a state.
    pub(super) fn of(&self, state: StateKind, parameter: &str) -> Option<&[StoredRange]> {
        self.0.get(state_name(state)?)?.get(parameter).map(Vec::as_slice)
    }
}

/// The tensors of all files, collected for the completeness proof.
pub(super) struct CompletenessCheck<'a> {
    folder: PathBuf,
    parameters: &'a [ParameterEntry],
    /// Parameters by name, with their element count.
    known: HashMap<&'a str, (&'a ParameterEntry, u64)>,
    places: BTreeMap<&'static str, HashMap<String, Vec<StoredRange>>>,
}

impl<'a> CompletenessCheck<'a> {
    /// Starts with no tensors, for the states and parameters that the manifest lists.
    pub(super) fn of(folder: &Path, manifest: &'a Manifest) -> Result<Self, CheckpointError> {
        let broken =
            |problem: String| CheckpointError::Manifest { path: folder.join("manifest.json"), problem };
        let mut known = HashMap::new();
        for entry in &manifest.model.parameters {
            let elements = entry.elements().ok_or_else(|| {
                broken(format!("`{}` has a shape whose element count overflows 64 bits", entry.name))
            })?;
            if known.insert(entry.name.as_str(), (entry, elements)).is_some() {
                return Err(broken(format!("it lists `{}` twice", entry.name)));
            }
        }
        if !manifest.states.contains(&StateKind::Weights) {
            return Err(broken("it lists no weights".to_owned()));
        }
        let states = manifest.states.iter().filter_map(|state| state_name(*state));
        Ok(Self {
            folder: folder.to_owned(),
            parameters: &manifest.model.parameters,
            known,
            places: states.map(|state| (state, HashMap::new())).collect(),
        })
    }

    /// Adds the tensors of one file.
    pub(super) fn add(
        &mut self,
        file: usize,
        path: &Path,
        tensors: Vec<TensorEntry>,
    ) -> Result<(), CheckpointError> {
        for tensor in tensors {
            self.add_one(file, &tensor).map_err(|problem| CheckpointError::Tensor {
                path: path.to_owned(),
                tensor: tensor.name.clone(),
                problem,
            })?;
        }
        Ok(())
    }

    fn add_one(&mut self, file: usize, tensor: &TensorEntry) -> Result<(), String> {
        let (state, parameter, first) =
            parse_tensor_name(&tensor.name).ok_or_else(|| "is not named STATE/PARAMETER@FIRST".to_owned())?;
        let places = state_name(state).and_then(|state| self.places.get_mut(state));
        let places = places.ok_or_else(|| "belongs to a state that the manifest does not list".to_owned())?;
        let known = self.known.get(parameter).filter(|(entry, _)| entry.has(state));
        let (_, elements) = known.ok_or_else(|| {
            "belongs to a parameter that the manifest does not list with this state".to_owned()
        })?;
        let dtype = tensor.dtype.ok_or_else(|| "has an unsupported dtype".to_owned())?;
        let [count] = tensor.shape[..] else { return Err("is not one-dimensional".to_owned()) };
        let end = first.checked_add(count).filter(|end| end <= elements);
        let end = end.ok_or_else(|| format!("goes beyond the {elements} elements of its parameter"))?;
        let place = StoredRange { first, end, file, begin: tensor.bytes.start, dtype };
        places.entry(parameter.to_owned()).or_default().push(place);
        Ok(())
    }

    /// Checks that every element is stored exactly once; the error names the first that is not.
    pub(super) fn prove_complete(mut self) -> Result<StoredRanges, CheckpointError> {
        for (state, places) in &mut self.places {
            let state = *state;
            for entry in self.parameters {
                let of_this = super::state::state_from_name(state).is_some_and(|state| entry.has(state));
                let Some((_, elements)) = self.known.get(entry.name.as_str()).filter(|_| of_this) else {
                    continue;
                };
                let wrong = |first: u64, end: u64, twice: bool| CheckpointError::Incomplete {
                    folder: self.folder.clone(),
                    state,
                    parameter: entry.name.clone(),
                    first,
                    end,
                    twice,
                };
                let ranges = places.entry(entry.name.clone()).or_default();
                ranges.sort_by_key(|place| (place.first, place.end));
                let mut at = 0;
                for place in ranges.iter() {
                    if place.first < at {
                        return Err(wrong(place.first, at.min(place.end), true));
                    }
                    if place.first > at {
                        return Err(wrong(at, place.first, false));
                    }
                    at = place.end;
                }
                if at < *elements {
                    return Err(wrong(at, *elements, false));
                }
            }
        }
        Ok(StoredRanges(self.places))
    }
}
