//! Opens a checkpoint, with proof that it is complete, and reads arbitrary element ranges from it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use zeroth_engine::StateKind;
use zeroth_model::{ParameterTable, read_header, stored_to_f32};

use super::bounds::{check, check_folder};
use super::checksums::{MANIFEST, SUMS, checksums_text, manifest_checksum, sha256};
use super::completeness::{CompletenessCheck, StoredRange, StoredRanges};
use super::error::{CheckpointError, reading};
use super::file_names::MODEL;
use super::manifest::{FORMAT_VERSION, FileEntry, Manifest};
use super::state::state_name;

/// Read buffer size in bytes.
const STAGING: usize = 1 << 20;
/// Largest accepted manifest in bytes. Those of the largest supported models have some hundred MB.
const LARGEST_MANIFEST: u64 = 1 << 30;
/// Differences to another model that are listed.
const NAMED: usize = 3;

/// An open checkpoint. Reading takes `&self`, so threads can share it.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    identity: String,
    files: Vec<(PathBuf, File)>,
    places: StoredRanges,
}

impl Checkpoint {
    /// Opens a `step-N` folder: reads the manifest and its checksum, checks all file lengths and headers, and proves
    /// that every element of every state is stored exactly once. [`Checkpoint::verify`] checks the bytes.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (manifest, identity) = read_manifest(folder)?;
        let mut files = Vec::new();
        let mut tensors = CompletenessCheck::of(folder, &manifest)?;
        for entry in &manifest.files {
            let path = folder.join(&entry.name);
            check_length(&path, entry)?;
            if is_part(&entry.name) {
                let file = File::open(&path).map_err(reading(&path))?;
                let header = read_header(&file).map_err(reading(&path))?;
                let header =
                    header.map_err(|source| CheckpointError::Header { path: path.clone(), source })?;
                tensors.add(files.len(), &path, header)?;
                files.push((path, file));
            }
        }
        let places = tensors.prove_complete()?;
        Ok(Self { folder: folder.to_owned(), manifest, identity, files, places })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its metadata.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its unique id: the SHA-256 of its manifest, which lists the checksums of its files.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The folder with the model's config and tokenizer files.
    pub fn model(&self) -> PathBuf {
        self.folder.join(MODEL)
    }

    /// Whether it has a state.
    pub fn has(&self, state: StateKind) -> bool {
        self.manifest.states.contains(&state)
    }

    /// Reads a range of a parameter's elements in a state as f32, from however many files hold it.
    pub fn read_f32(
        &self,
        state: StateKind,
        parameter: &str,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let Some(places) = self.places.of(state, parameter) else {
            return Err(CheckpointError::NoState {
                folder: self.folder.clone(),
                state: state_name(state).unwrap_or("gradient").to_owned(),
                parameter: parameter.to_owned(),
                optimizer: self.manifest.optimizer.clone(),
            });
        };
        let (Range { start, end }, room) = (elements, out.len() as u64);
        let held = places.last().map_or(0, |last| last.end);
        if end > held || end.checked_sub(start) != Some(room) {
            let parameter = parameter.to_owned();
            return Err(CheckpointError::Range { parameter, start, end, room, elements: held });
        }
        let mut staging = vec![0; STAGING.min(out.len() * 4)];
        let mut at = start;
        let from = places.partition_point(|place| place.end <= start);
        for place in places[from..].iter().take_while(|place| place.first < end) {
            let part = at..place.end.min(end);
            let target = &mut out[(part.start - start) as usize..(part.end - start) as usize];
            self.read_range(place, part.start, target, &mut staging)?;
            at = part.end;
        }
        Ok(())
    }

    fn read_range(
        &self,
        place: &StoredRange,
        element: u64,
        out: &mut [f32],
        staging: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (path, file) = &self.files[place.file];
        let size = place.dtype.bytes() as usize;
        let mut at = place.begin + (element - place.first) * size as u64;
        for part in out.chunks_mut(STAGING / 4) {
            let bytes = &mut staging[..part.len() * size];
            file.read_exact_at(bytes, at).map_err(reading(path))?;
            stored_to_f32(place.dtype, bytes, part);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Rejects a checkpoint of another model, naming the first differences.
    pub fn check_model(&self, model_type: &str, table: &ParameterTable) -> Result<(), CheckpointError> {
        let saved = &self.manifest.model;
        let mut differences = Vec::new();
        let held: HashMap<&str, &[u64]> =
            saved.parameters.iter().map(|entry| (entry.name.as_str(), entry.shape.as_slice())).collect();
        for parameter in table.iter() {
            match held.get(parameter.name.as_str()) {
                None => differences.push(format!("it lacks `{}`", parameter.name)),
                Some(shape) if *shape != parameter.shape => differences.push(format!(
                    "`{}` has shape {shape:?} in the checkpoint and {:?} in the model",
                    parameter.name, parameter.shape
                )),
                Some(_) => {}
            }
        }
        let wanted: HashSet<&str> = table.iter().map(|parameter| parameter.name.as_str()).collect();
        for entry in &saved.parameters {
            if !wanted.contains(entry.name.as_str()) {
                differences.push(format!("the model has no `{}`", entry.name));
            }
        }
        if differences.is_empty() && saved.model_type != model_type {
            differences.push("the parameters match, model_type does not".to_owned());
        }
        if differences.is_empty() {
            return Ok(());
        }
        let more = differences.len().saturating_sub(NAMED);
        differences.truncate(NAMED);
        if more > 0 {
            differences.push(format!("and {more} more"));
        }
        let named = |model_type: &str, total: u64| {
            format!("{model_type} with {} parameters", zeroth_base::format_count(total))
        };
        Err(CheckpointError::AnotherModel {
            folder: self.folder.clone(),
            saved: named(&saved.model_type, saved.total),
            given: named(model_type, table.total()),
            differences,
        })
    }
}

/// Whether a listed file is a rank's safetensors file: those are directly in the folder.
fn is_part(name: &str) -> bool {
    !name.contains('/') && Path::new(name).extension().is_some_and(|extension| extension == "safetensors")
}

/// Reads the manifest and checks it against SHA256SUMS. Returns it with its own SHA-256.
pub(super) fn read_manifest(folder: &Path) -> Result<(Manifest, String), CheckpointError> {
    /// The fields needed to decide whether this version can read the rest.
    #[derive(Deserialize)]
    struct Head {
        format_version: u64,
        #[serde(default)]
        zeroth_version: Option<String>,
    }
    let path = folder.join(MANIFEST);
    let bytes = read_at_most(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            CheckpointError::NotACheckpoint { folder: folder.to_owned() }
        }
        _ => reading(&path)(source),
    })?;
    let broken = |problem: String| CheckpointError::Manifest { path: path.clone(), problem };
    let changed = || broken(format!("it does not match {SUMS}, so one of them has changed"));
    let sums_path = folder.join(SUMS);
    let sums = read_at_most(&sums_path).map_err(reading(&sums_path))?;
    // Check the checksum before trusting any field, the version included.
    let identity = sha256(&bytes);
    if manifest_checksum(&sums).is_some_and(|expected| expected != identity.as_bytes()) {
        return Err(changed());
    }
    let head: Head = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    if head.format_version != FORMAT_VERSION {
        let (found, known) = (head.format_version, FORMAT_VERSION);
        return Err(CheckpointError::Version { path, found, known, written_by: head.zeroth_version });
    }
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    if sums != checksums_text(&bytes, &manifest.files).as_bytes() {
        return Err(changed());
    }
    // Names are joined to the folder, so none may escape it.
    let is_inside =
        |name: &str| Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if let Some(outside) = manifest.files.iter().find(|file| !is_inside(&file.name)) {
        return Err(broken(format!("it lists `{}`, which is outside its folder", outside.name)));
    }
    check(&manifest).and_then(|()| check_folder(folder, &manifest)).map_err(broken)?;
    Ok((manifest, identity))
}

/// Reads a manifest, bounded so that an oversized file cannot exhaust memory.
fn read_at_most(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    file.take(LARGEST_MANIFEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST_MANIFEST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 1 GiB"));
    }
    Ok(bytes)
}

/// Checks that a file exists and has the recorded length.
pub(super) fn check_length(path: &Path, entry: &FileEntry) -> Result<(), CheckpointError> {
    let found = fs::metadata(path).map_err(reading(path))?.len();
    if found == entry.bytes {
        Ok(())
    } else {
        Err(CheckpointError::Size { path: path.to_owned(), expected: entry.bytes, found })
    }
}
