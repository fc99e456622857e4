//! Finds the weight files of a model folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Component, Path};

use serde_json::Value;

use super::error::WeightsError;
use super::{INDEX, ONE_FILE, header};

/// The largest index file in bytes, the same as the limit of a header.
const LARGEST_INDEX: u64 = 100_000_000;
/// Extensions of weight files in other formats.
const OTHER_FORMATS: [&str; 10] = [
    ".bin",
    ".bin.index.json",
    ".pth",
    ".pt",
    ".ckpt",
    ".gguf",
    ".h5",
    ".h5.index.json",
    ".msgpack",
    ".msgpack.index.json",
];
/// Prefixes of files that trainers write beside weights, with the same extensions.
const NO_WEIGHTS: [&str; 5] = ["training_args", "optimizer", "scheduler", "rng_state", "scaler"];

/// The weight files of a folder.
pub(super) struct FolderFiles {
    /// The file names, sorted.
    pub(super) names: Vec<String>,
    /// The index, from tensor name to file name.
    pub(super) index: Option<BTreeMap<String, String>>,
}

impl FolderFiles {
    /// Finds the weight files. A single file takes precedence over an index, as in transformers.
    pub(super) fn of(folder: &Path) -> Result<Self, WeightsError> {
        // A file that cannot be checked may exist; opening it reports the reason.
        if !matches!(folder.join(ONE_FILE).try_exists(), Ok(false)) {
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
                let folder = folder.to_owned();
                let found = names_in(&folder)?.into_iter().filter(|name| is_weights(name)).collect();
                return Err(WeightsError::NoWeights { folder, found });
            }
            Err(error) => return Err(broken(format!("it cannot be read: {error}"))),
        };
        let index = parse_index(&bytes).map_err(broken)?;
        let names: BTreeSet<&String> = index.values().collect();
        Ok(Self { names: names.into_iter().cloned().collect(), index: Some(index) })
    }
}

/// Whether a model folder has weights to open.
///
/// A folder without weights is for training new ones. Weights in another format and incomplete downloads are errors,
/// because such a folder is not meant for new weights.
pub fn has_weights(folder: &Path) -> Result<bool, WeightsError> {
    let names = names_in(folder)?;
    let (ours, others): (Vec<String>, Vec<String>) =
        names.into_iter().filter(|name| is_weights(name)).partition(|name| is_safetensors(name));
    let weights = if ours.is_empty() { &others } else { &ours };
    for name in weights {
        // Snapshots in the Hub's cache, and copies of them, contain symlinks to blobs, which may be missing.
        if let Ok(target) = fs::read_link(folder.join(name))
            && matches!(folder.join(name).try_exists(), Ok(false))
        {
            let (folder, link) = (folder.to_owned(), name.clone());
            return Err(WeightsError::DanglingLink { folder, link, target });
        }
    }
    if !ours.is_empty() {
        return Ok(true);
    }
    if !others.is_empty() {
        return Err(WeightsError::OtherFormat { folder: folder.to_owned(), found: others });
    }
    match cached_model(folder) {
        Some(cached) => {
            let unfinished = unfinished_blobs(cached)?;
            Err(WeightsError::NotDownloaded { folder: folder.to_owned(), unfinished })
        }
        None => Ok(false),
    }
}

/// The names in a folder, sorted.
fn names_in(folder: &Path) -> Result<Vec<String>, WeightsError> {
    let unreadable = |source| WeightsError::Folder { folder: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        names.push(entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn is_safetensors(name: &str) -> bool {
    [".safetensors", ".safetensors.index.json"].iter().any(|end| name.ends_with(end))
}

fn is_weights(name: &str) -> bool {
    let is_other = OTHER_FORMATS.iter().any(|end| name.ends_with(end));
    is_safetensors(name) || is_other && !NO_WEIGHTS.iter().any(|begin| name.starts_with(begin))
}

/// The model's folder in the Hub's cache, if this is a snapshot: `models--owner--name/snapshots/revision`.
fn cached_model(folder: &Path) -> Option<&Path> {
    let snapshots = folder.parent().filter(|parent| parent.file_name().is_some_and(|n| n == "snapshots"))?;
    let model = snapshots.parent()?;
    model.file_name()?.to_str()?.starts_with("models--").then_some(model)
}

/// The number of incomplete downloads.
fn unfinished_blobs(cached: &Path) -> Result<usize, WeightsError> {
    let blobs = cached.join("blobs");
    match names_in(&blobs) {
        Ok(names) => Ok(names.iter().filter(|name| name.ends_with(".incomplete")).count()),
        Err(WeightsError::Folder { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

fn read_at_most(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

/// Parses the `weight_map` of an index file, or returns what is wrong with it.
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
        // An untrusted index must not refer to files outside its folder.
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

/// Whether the weights in a model folder include a tensor of this name.
///
/// `None` if there are no weights or they cannot be read; loading them reports the reason.
pub(crate) fn weights_include(folder: &Path, name: &str) -> Option<bool> {
    let files = FolderFiles::of(folder).ok()?;
    if let Some(index) = files.index {
        return Some(index.contains_key(name));
    }
    let file = File::open(folder.join(ONE_FILE)).ok()?;
    let tensors = header::read(&file).ok()?.ok()?;
    Some(tensors.iter().any(|tensor| tensor.name == name))
}
