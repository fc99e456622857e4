//! A checkpoint that is there: opened with proof that it is whole, and read by ranges on any number of ranks.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use zeroth_base::DType;
use zeroth_engine::State;
use zeroth_model::{ParameterTable, read_header, stored_to_f32};

use super::bounds::{check, check_folder};
use super::complete::{Places, Tensors};
use super::error::{CheckpointError, reading};
use super::manifest::{FORMAT_VERSION, FileEntry, Manifest};
use super::state::state_name;
use super::sums::{MANIFEST, SUMS, manifest_sum, sha256, sums_text};

/// Bytes that are read at a time before they are converted.
const STAGING: usize = 1 << 20;
/// Bytes of a manifest: those of the largest model tables that are read have some hundred MB.
const LARGEST_MANIFEST: u64 = 1 << 30;
/// Differences to another model that are named.
const NAMED: usize = 3;

/// A checkpoint, open. Reading needs no `&mut`: many threads may.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    identity: String,
    files: Vec<(PathBuf, File)>,
    places: Places,
}

/// A range of a parameter's elements in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) file: usize,
    /// Its first byte in the file.
    pub(super) begin: u64,
    pub(super) dtype: DType,
}

impl Checkpoint {
    /// Opens a folder `step-N`: reads the manifest and its checksum, all lengths and all headers, and proves that every
    /// element of every state is there once. The bytes themselves are for [`Checkpoint::verify`].
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let (manifest, identity) = read_manifest(folder)?;
        let mut files = Vec::new();
        let mut tensors = Tensors::of(folder, &manifest)?;
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
        let places = tensors.prove_whole()?;
        Ok(Self { folder: folder.to_owned(), manifest, identity, files, places })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it is.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What tells it from all others: the SHA-256 of its manifest, which lists those of its files.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The folder with the model's config and tokenizer files.
    pub fn model(&self) -> PathBuf {
        self.folder.join(super::commit::MODEL)
    }

    /// Whether it holds a state.
    pub fn has(&self, state: State) -> bool {
        self.manifest.states.contains(&state)
    }

    /// Reads a range of a parameter's elements in a state as f32, from whichever files hold them.
    pub fn read_f32(
        &self,
        state: State,
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
            self.read_place(place, part.start, target, &mut staging)?;
            at = part.end;
        }
        Ok(())
    }

    fn read_place(
        &self,
        place: &Place,
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

    /// Refuses the checkpoint of another model, naming the first differences.
    pub fn fits_model(&self, model_type: &str, table: &ParameterTable) -> Result<(), CheckpointError> {
        let saved = &self.manifest.model;
        let mut differences = Vec::new();
        let held: HashMap<&str, &[u64]> =
            saved.parameters.iter().map(|entry| (entry.name.as_str(), entry.shape.as_slice())).collect();
        for parameter in table.iter() {
            match held.get(parameter.name.as_str()) {
                None => differences.push(format!("it lacks `{}`", parameter.name)),
                Some(shape) if *shape != parameter.shape => differences.push(format!(
                    "`{}` has shape {shape:?} in it and {:?} in the model",
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
            differences.push("their parameters are alike, their model_type is not".to_owned());
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
            asked: named(model_type, table.total()),
            differences,
        })
    }
}

/// Whether a listed file holds tensors: those directly in the folder do.
fn is_part(name: &str) -> bool {
    !name.contains('/') && Path::new(name).extension().is_some_and(|extension| extension == "safetensors")
}

/// Reads the manifest, and checks it and SHA256SUMS against each other. Its own SHA-256 comes with it.
pub(super) fn read_manifest(folder: &Path) -> Result<(Manifest, String), CheckpointError> {
    /// Enough to know whether the rest can be understood.
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
    let changed = || broken(format!("it and {SUMS} beside it do not agree, so one of them has changed"));
    let sums_path = folder.join(SUMS);
    let sums = read_at_most(&sums_path).map_err(reading(&sums_path))?;
    // Before anything in it is believed, its version too.
    let identity = sha256(&bytes);
    if manifest_sum(&sums).is_some_and(|expected| expected != identity.as_bytes()) {
        return Err(changed());
    }
    let head: Head = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    if head.format_version != FORMAT_VERSION {
        let (found, known) = (head.format_version, FORMAT_VERSION);
        return Err(CheckpointError::Version { path, found, known, written_by: head.zeroth_version });
    }
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    if sums != sums_text(&bytes, &manifest.files).as_bytes() {
        return Err(changed());
    }
    // Names are joined to the folder: none may lead out of it.
    let is_inside =
        |name: &str| Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if let Some(outside) = manifest.files.iter().find(|file| !is_inside(&file.name)) {
        return Err(broken(format!("it lists `{}`, which is not inside its folder", outside.name)));
    }
    check(&manifest).and_then(|()| check_folder(folder, &manifest)).map_err(broken)?;
    Ok((manifest, identity))
}

/// A manifest's bytes; one that is larger than any is an error and takes no memory.
fn read_at_most(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    file.take(LARGEST_MANIFEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST_MANIFEST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 1 GiB"));
    }
    Ok(bytes)
}

/// Checks that a file is there and as long as it was.
pub(super) fn check_length(path: &Path, entry: &FileEntry) -> Result<(), CheckpointError> {
    let found = fs::metadata(path).map_err(reading(path))?.len();
    if found == entry.bytes {
        Ok(())
    } else {
        Err(CheckpointError::Size { path: path.to_owned(), expected: entry.bytes, found })
    }
}
