//! The proof that a checkpoint is whole: every element of every state in exactly one place.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use zeroth_engine::State;
use zeroth_model::TensorEntry;

use super::error::CheckpointError;
use super::manifest::{Manifest, ParameterEntry};
use super::open::Place;
use super::state::{parse_tensor_name, state_name};

/// Where everything lies: for each state by name, the ranges of each parameter in order.
#[derive(Debug)]
pub(super) struct Places(BTreeMap<&'static str, HashMap<String, Vec<Place>>>);

impl Places {
    /// The ranges of a parameter in a state.
    pub(super) fn of(&self, state: State, parameter: &str) -> Option<&[Place]> {
        self.0.get(state_name(state)?)?.get(parameter).map(Vec::as_slice)
    }
}

/// The tensors of all files, on their way to the proof.
pub(super) struct Tensors<'a> {
    folder: PathBuf,
    parameters: &'a [ParameterEntry],
    /// The parameters by name, with their elements.
    known: HashMap<&'a str, (&'a ParameterEntry, u64)>,
    places: BTreeMap<&'static str, HashMap<String, Vec<Place>>>,
}

impl<'a> Tensors<'a> {
    /// None yet, of the states and parameters that the manifest lists.
    pub(super) fn of(folder: &Path, manifest: &'a Manifest) -> Result<Self, CheckpointError> {
        let broken =
            |problem: String| CheckpointError::Manifest { path: folder.join("manifest.json"), problem };
        let mut known = HashMap::new();
        for entry in &manifest.model.parameters {
            let elements = entry
                .elements()
                .ok_or_else(|| broken(format!("`{}` has more elements than 64 bits count", entry.name)))?;
            if known.insert(entry.name.as_str(), (entry, elements)).is_some() {
                return Err(broken(format!("it lists `{}` twice", entry.name)));
            }
        }
        if !manifest.states.contains(&State::Weights) {
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

    /// Adds the tensors of a file.
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
        let places = places.ok_or_else(|| "is of a state that the manifest does not list".to_owned())?;
        let known = self.known.get(parameter).filter(|(entry, _)| entry.has(state));
        let (_, elements) =
            known.ok_or_else(|| "is of a parameter that the manifest does not list so".to_owned())?;
        let dtype = tensor.dtype.ok_or_else(|| "has a type that no state has".to_owned())?;
        let [count] = tensor.shape[..] else { return Err("has not one dimension".to_owned()) };
        let end = first.checked_add(count).filter(|end| end <= elements);
        let end = end.ok_or_else(|| format!("goes beyond the {elements} elements of its parameter"))?;
        let place = Place { first, end, file, begin: tensor.bytes.start, dtype };
        places.entry(parameter.to_owned()).or_default().push(place);
        Ok(())
    }

    /// Every element once, or the first that is not.
    pub(super) fn prove_whole(mut self) -> Result<Places, CheckpointError> {
        for (state, places) in &mut self.places {
            let state = *state;
            for entry in self.parameters {
                let of_this = super::state::state_named(state).is_some_and(|state| entry.has(state));
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
        Ok(Places(self.places))
    }
}
