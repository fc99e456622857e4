//! The base of an adapter folder: whether the model that it is used over is the one that it was trained over.

use std::ops::Range;
use std::path::Path;

use zeroth_model::{AdapterConfig, AdapterError, Parameter, ParameterTable, WeightsError, locate};

use super::base_hash::{BaseHash, name_key};
use crate::checkpoint::BaseEntry;
use crate::export::recorded_base;

/// Elements of each tensor that [`BaseEntry::sample`] covers.
const SAMPLED: u64 = 256;

/// A model that adapters are used over.
#[derive(Debug, Clone, Copy)]
pub struct GivenBase<'a> {
    /// As it was given.
    pub name: &'a str,
    /// Its folder.
    pub folder: &'a Path,
}

/// An adapter that was trained over another base.
#[derive(Debug, thiserror::Error)]
#[error(
    "{adapter} is an adapter of another base: it was trained over {trained_over} (weights {expected}), and {given} has other \
     weights ({found}). Give the base that it was trained over, or --allow-other-base to use it over this one"
)]
pub struct OtherBase {
    /// The adapter's folder.
    pub adapter: String,
    /// The base that it was trained over.
    pub trained_over: String,
    /// The hash of that base's weights.
    pub expected: String,
    /// The base that was given.
    pub given: String,
    /// The hash of its weights.
    pub found: String,
}

/// An adapter whose base is not the given one, or could not be compared with it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AdapterBaseError {
    #[error(transparent)]
    Other(#[from] OtherBase),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// Checks that a base is the one of an adapter folder: by the hash of the first weights of each tensor, where zeroth wrote the
/// adapter, else by its name. Returns what a user should know.
pub fn check_adapter_base(
    adapter: &Path,
    given: GivenBase<'_>,
    allows_other: bool,
    sample: impl FnOnce() -> Result<String, WeightsError>,
) -> Result<Option<String>, AdapterBaseError> {
    let Some(saved) = recorded_base(adapter) else {
        let named = AdapterConfig::read(adapter)?.base.filter(|named| !is_same(named, given));
        return Ok(named.map(|named| {
            format!(
                "{} names {named} as its base (base_model_name_or_path), and is used over {}: nothing says whether their \
                 weights are the same",
                adapter.display(),
                given.name
            )
        }));
    };
    match differs(adapter, given.name, &saved, |saved| &saved.sample, &sample()?) {
        Some(other) if allows_other => Ok(Some(format!(
            "--allow-other-base: {} was trained over {} (weights {}), and is used over {} (weights {})",
            other.adapter, other.trained_over, other.expected, other.given, other.found
        ))),
        Some(other) => Err(other.into()),
        None => Ok(None),
    }
}

/// How a base differs from the one that was recorded with an adapter, by one of its hashes.
pub(crate) fn differs(
    adapter: &Path,
    given: &str,
    saved: &BaseEntry,
    of: impl Fn(&BaseEntry) -> &String,
    found: &str,
) -> Option<OtherBase> {
    (of(saved) != found).then(|| OtherBase {
        adapter: adapter.display().to_string(),
        trained_over: saved.name.clone(),
        expected: of(saved).clone(),
        given: given.to_owned(),
        found: found.to_owned(),
    })
}

/// Whether a name means the given base: as text, as a path, or by the folder that it is found in.
fn is_same(named: &str, given: GivenBase<'_>) -> bool {
    let whole = |path: &Path| path.canonicalize().ok();
    let folder = whole(given.folder);
    named == given.name
        || (folder.is_some()
            && (whole(Path::new(named)) == folder
                || locate(named).ok().and_then(|found| whole(&found)) == folder))
}

/// Reads a range of a parameter.
pub(crate) type ReadParameter<'a> =
    &'a dyn Fn(&Parameter, Range<u64>, &mut [f32]) -> Result<(), WeightsError>;

/// The hash of the first elements of each tensor of a table.
pub(crate) fn sample_of(table: &ParameterTable, read: ReadParameter<'_>) -> Result<String, WeightsError> {
    let mut hash = BaseHash::default();
    for parameter in table.iter() {
        let mut elements = vec![0.0; SAMPLED.min(parameter.elements()) as usize];
        read(parameter, 0..elements.len() as u64, &mut elements)?;
        hash.add(name_key(&parameter.name), 0, &elements);
    }
    Ok(hash.text())
}
