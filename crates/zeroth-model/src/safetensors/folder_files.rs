//! Which files of a model folder hold its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Component, Path};

use serde_json::Value;

use super::error::WeightsError;
use super::{INDEX, ONE_FILE, header};

/// An index is as long as a header at most.
const LARGEST_INDEX: u64 = 100_000_000;
/// What other formats call their files: for a message.
const OTHER_FORMATS: [&str; 5] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "model.gguf"];

/// The weight files of a folder.
pub(super) struct FolderFiles {
    /// Their names, in order.
    pub(super) names: Vec<String>,
    /// The index: a tensor's name to its file.
    pub(super) index: Option<BTreeMap<String, String>>,
}

impl FolderFiles {
    /// One file goes before an index, as in transformers.
    pub(super) fn of(folder: &Path) -> Result<Self, WeightsError> {
        if folder.join(ONE_FILE).exists() {
            return Ok(Self { names: vec![ONE_FILE.to_owned()], index: None });
        }
        let path = folder.join(INDEX);
        let broken = |problem: String| WeightsError::Index { path: path.clone(), problem };
        let bytes = match read_at_most(&path, LARGEST_INDEX) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                return Err(broken("it is larger than 100 MB: this is no index of tensors".to_owned()));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let other = OTHER_FORMATS.into_iter().find(|name| folder.join(name).exists());
                let (folder, other) = (folder.to_owned(), other.map(str::to_owned));
                return Err(WeightsError::NoWeights { folder, other });
            }
            Err(error) => return Err(broken(format!("it cannot be read: {error}"))),
        };
        let index = parse_index(&bytes).map_err(broken)?;
        let names: BTreeSet<&String> = index.values().collect();
        Ok(Self { names: names.into_iter().cloned().collect(), index: Some(index) })
    }
}

fn read_at_most(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

/// The `weight_map` of an index, or what is wrong with it.
fn parse_index(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    let index: Value = serde_json::from_slice(bytes).map_err(|error| format!("it is not JSON: {error}"))?;
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err("it has no object `weight_map`, which says where each tensor lies".to_owned());
    };
    let mut files = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str() else {
            return Err(format!("`weight_map` gives `{tensor}` the file {file}: it must be a file's name"));
        };
        // An index from a stranger must not lead out of its folder.
        let mut parts = Path::new(file).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(format!(
                "`weight_map` gives `{tensor}` the file `{file}`: it must be a name in the same folder"
            ));
        }
        files.insert(tensor.clone(), file.to_owned());
    }
    if files.is_empty() {
        return Err("its `weight_map` is empty".to_owned());
    }
    Ok(files)
}

/// Whether the weights in a model folder include a tensor of that name. `None` where there are no weights, or they
/// cannot be read: whoever loads them says why.
pub(crate) fn weights_include(folder: &Path, name: &str) -> Option<bool> {
    let files = FolderFiles::of(folder).ok()?;
    if let Some(index) = files.index {
        return Some(index.contains_key(name));
    }
    let file = File::open(folder.join(ONE_FILE)).ok()?;
    let tensors = header::read(&file).ok()?.ok()?;
    Some(tensors.iter().any(|tensor| tensor.name == name))
}
