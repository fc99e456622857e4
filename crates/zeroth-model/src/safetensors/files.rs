//! Opens the weights of a model folder, matches them with the parameter table, and reads ranges of elements.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use zeroth_base::{DType, nearest};

use super::convert;
use super::error::{WeightProblem, WeightsError};
use super::expert_layout::ExpertLayout;
use super::folder_files::FolderFiles;
use super::header::{self, StoredTensor};
use crate::{Parameter, ParameterTable, StoredPart};

/// The number of bytes that are read and converted at a time.
const STAGING: usize = 1 << 20;

/// The number of problems that get a similar name suggested, because the search compares all names.
const NEAR_NAMES: usize = 20;

/// The open weight files of a model, with the location of every parameter.
///
/// Reads take `&self`, so threads can share it.
#[derive(Debug)]
pub struct WeightFiles {
    files: Vec<(PathBuf, File)>,
    /// The locations of every parameter's parts, in order, by name.
    places: HashMap<String, Vec<TensorLocation>>,
    warnings: Vec<WeightWarning>,
}

/// The location of a parameter, or of a part of it, in the files.
#[derive(Debug, Clone, Copy)]
struct TensorLocation {
    file: usize,
    /// The offset of its first byte in the file.
    begin: u64,
    dtype: DType,
    elements: u64,
}

/// A tensor in the files that the model does not need.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum WeightWarning {
    /// A tensor is not a parameter of the model.
    Unknown {
        name: String,
        /// The file that contains it.
        file: String,
    },
    /// A tied parameter is stored under more than one name, with equal values.
    StoredTwice { name: String, alias: String },
}

impl fmt::Display for WeightWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { name, file } => write!(f, "`{name}` in {file} is not a parameter of the model"),
            Self::StoredTwice { name, alias } => {
                write!(f, "`{alias}` is stored beside `{name}` with the same values: one is used for both")
            }
        }
    }
}

impl WeightFiles {
    /// Opens the weights in a folder and locates every parameter of the table, or returns all problems.
    ///
    /// Only headers are read, unless a tied parameter is stored twice: then both copies are compared.
    pub fn open(folder: &Path, table: &ParameterTable) -> Result<Self, WeightsError> {
        let listed = FolderFiles::of(folder)?;
        Self::locate(folder, &listed, table)
    }

    /// Opens one file, and locates every parameter of the table in it as [`Self::open`] does.
    pub(crate) fn open_file(path: &Path, table: &ParameterTable) -> Result<Self, WeightsError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = path.parent().unwrap_or(Path::new(""));
        Self::locate(folder, &FolderFiles { names: vec![name], index: None }, table)
    }

    fn locate(folder: &Path, listed: &FolderFiles, table: &ParameterTable) -> Result<Self, WeightsError> {
        let mut stored = Stored::read(folder, &listed.names);
        let mut problems = std::mem::take(&mut stored.problems);
        let excused = stored.check_index(listed.index.as_ref(), &mut problems);

        let layout = ExpertLayout::check(table, &stored.tensors.keys().map(String::as_str).collect());
        problems.extend(layout.problems);
        let all_names = |parameter| Parameter::names(parameter).chain(Parameter::stored_names(parameter));
        let used: BTreeSet<&str> = table.iter().flat_map(all_names).collect();
        let strangers: Vec<&Found> =
            stored.tensors.values().filter(|found| !used.contains(found.tensor.name.as_str())).collect();
        let mut warnings: Vec<WeightWarning> = strangers
            .iter()
            .map(|found| WeightWarning::Unknown {
                name: found.tensor.name.clone(),
                file: stored.file_name(found.file),
            })
            .collect();

        let missing = |name: &str, problems: &mut Vec<WeightProblem>| {
            let names = strangers.iter().map(|found| found.tensor.name.as_str());
            let near = (problems.len() < NEAR_NAMES).then(|| nearest(name, names));
            let near = near.flatten().map(str::to_owned);
            problems.push(WeightProblem::Missing { name: name.to_owned(), near });
        };
        let mut places = HashMap::new();
        for parameter in table.iter() {
            let is_whole = parameter.names().any(|name| stored.tensors.contains_key(name));
            if !parameter.parts.is_empty() && !is_whole {
                let mut locations = Vec::with_capacity(parameter.parts.len());
                for part in &parameter.parts {
                    match stored.tensors.get(&part.name) {
                        Some(found) => match stored.place_part(part, found) {
                            Ok(location) => locations.push(location),
                            Err(problem) => problems.push(problem),
                        },
                        None if excused.all || excused.names.contains(&part.name) => {}
                        None if layout.too_few.iter().any(|begin| part.name.starts_with(begin)) => {}
                        None => missing(&part.name, &mut problems),
                    }
                }
                places.insert(parameter.name.clone(), locations);
                continue;
            }
            let mut found = parameter.names().filter_map(|name| stored.tensors.get(name));
            let Some(first) = found.next() else {
                if !excused.all && !parameter.names().any(|name| excused.names.contains(name)) {
                    missing(&parameter.name, &mut problems);
                }
                continue;
            };
            match stored.place(parameter, first) {
                Ok(place) => {
                    places.insert(parameter.name.clone(), vec![place]);
                }
                Err(problem) => {
                    problems.push(problem);
                    continue;
                }
            }
            for other in found {
                let (name, alias) = (first.tensor.name.clone(), other.tensor.name.clone());
                if stored.equal(first, other)? {
                    warnings.push(WeightWarning::StoredTwice { name, alias });
                } else {
                    problems.push(WeightProblem::TiedButDifferent { name, alias });
                }
            }
        }
        if problems.is_empty() {
            Ok(Self { files: stored.files, places, warnings })
        } else {
            Err(WeightsError::DoNotFit { folder: folder.to_owned(), problems })
        }
    }

    /// Warnings about tensors that the model does not need.
    pub fn warnings(&self) -> &[WeightWarning] {
        &self.warnings
    }

    /// The dtype in which a parameter, or its first part, is stored.
    pub fn dtype(&self, parameter: &str) -> Result<DType, WeightsError> {
        self.place(parameter).map(|parts| parts[0].dtype)
    }

    /// Reads a range of a parameter's elements as f32. Only their bytes are read.
    pub fn read_f32(
        &self,
        parameter: &str,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        let parts = self.place(parameter)?;
        let (Range { start, end }, buffer) = (elements, out.len() as u64);
        let total = parts.iter().map(|part| part.elements).sum();
        if end > total || end.checked_sub(start) != Some(buffer) {
            let (name, elements) = (parameter.to_owned(), total);
            return Err(WeightsError::Range { name, start, end, buffer, elements });
        }
        let mut staging = Vec::new();
        let (mut first, mut rest) = (0, out);
        for place in parts {
            if first >= end {
                break;
            }
            let here = start.max(first)..end.min(first + place.elements);
            if here.start < here.end {
                let (own, after) = rest.split_at_mut((here.end - here.start) as usize);
                rest = after;
                let size = place.dtype.bytes() as usize;
                staging.resize(STAGING.min(own.len() * size), 0);
                let mut at = place.begin + (here.start - first) * size as u64;
                for piece in own.chunks_mut(STAGING / size) {
                    let bytes = &mut staging[..piece.len() * size];
                    let (path, file) = &self.files[place.file];
                    read_exact(file, path, parameter, bytes, at)?;
                    convert::to_f32(place.dtype, bytes, piece);
                    at += bytes.len() as u64;
                }
            }
            first += place.elements;
        }
        Ok(())
    }

    fn place(&self, parameter: &str) -> Result<&Vec<TensorLocation>, WeightsError> {
        self.places.get(parameter).ok_or_else(|| {
            // Sorted, so that the suggestion does not depend on the order of the hash table.
            let names: BTreeSet<&str> = self.places.keys().map(String::as_str).collect();
            let near = nearest(parameter, names).map(str::to_owned);
            WeightsError::NoSuchParameter { name: parameter.to_owned(), near }
        })
    }
}

/// All tensors of all files, before they are matched with the table.
struct Stored {
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Found>,
    /// Names of files that could not be read.
    unreadable: BTreeSet<String>,
    problems: Vec<WeightProblem>,
}

struct Found {
    file: usize,
    tensor: StoredTensor,
}

/// Tensors that are missing because of a problem that is already reported.
struct Excused {
    all: bool,
    names: BTreeSet<String>,
}

impl Stored {
    fn read(folder: &Path, names: &[String]) -> Self {
        let mut stored = Self {
            files: Vec::new(),
            tensors: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            problems: Vec::new(),
        };
        for name in names {
            let path = folder.join(name);
            match File::open(&path).and_then(|file| Ok((header::read(&file)?, file))) {
                Ok((Ok(tensors), file)) => stored.add(path, file, tensors),
                Ok((Err(source), _)) => stored.refuse(name, WeightProblem::Broken { path, source }),
                Err(source) => stored.refuse(name, WeightProblem::Unreadable { path, source }),
            }
        }
        stored
    }

    fn add(&mut self, path: PathBuf, file: File, tensors: Vec<StoredTensor>) {
        let index = self.files.len();
        self.files.push((path, file));
        for tensor in tensors {
            if let Some(other) = self.tensors.get(&tensor.name) {
                let (first, second) = (self.file_name(other.file), self.file_name(index));
                self.problems.push(WeightProblem::InTwoFiles { name: tensor.name, first, second });
            } else {
                self.tensors.insert(tensor.name.clone(), Found { file: index, tensor });
            }
        }
    }

    fn refuse(&mut self, name: &str, problem: WeightProblem) {
        self.unreadable.insert(name.to_owned());
        self.problems.push(problem);
    }

    fn file_name(&self, file: usize) -> String {
        let name = self.files[file].0.file_name();
        name.expect("it was joined from a folder and a name").to_string_lossy().into_owned()
    }

    /// Compares the index with the contents of the files.
    fn check_index(
        &self,
        index: Option<&BTreeMap<String, String>>,
        problems: &mut Vec<WeightProblem>,
    ) -> Excused {
        let Some(index) = index else {
            return Excused { all: !self.unreadable.is_empty(), names: BTreeSet::new() };
        };
        let mut names = BTreeSet::new();
        for (name, file) in index {
            if self.unreadable.contains(file) {
                names.insert(name.clone());
            } else if self.tensors.get(name).is_none_or(|found| self.file_name(found.file) != *file) {
                names.insert(name.clone());
                problems.push(WeightProblem::NotWhereIndexed { name: name.clone(), file: file.clone() });
            }
        }
        Excused { all: false, names }
    }

    /// The location of a parameter, if the tensor has the right shape and a supported dtype.
    fn place(&self, parameter: &Parameter, found: &Found) -> Result<TensorLocation, WeightProblem> {
        let (name, file) = (found.tensor.name.clone(), self.file_name(found.file));
        if found.tensor.shape != parameter.shape {
            let expected = parameter.shape.clone();
            return Err(WeightProblem::Shape { name, file, found: found.tensor.shape.clone(), expected });
        }
        let Some(dtype) = found.tensor.kind.as_dtype() else {
            return Err(WeightProblem::Type { name, file, found: found.tensor.kind.name });
        };
        let (begin, elements) = (found.tensor.bytes.start, parameter.elements());
        Ok(TensorLocation { file: found.file, begin, dtype, elements })
    }

    /// The location of a part of a tensor, if the tensor has the right shape and a supported dtype.
    fn place_part(&self, part: &StoredPart, found: &Found) -> Result<TensorLocation, WeightProblem> {
        let (name, file) = (found.tensor.name.clone(), self.file_name(found.file));
        if found.tensor.shape != part.shape {
            let expected = part.shape.clone();
            return Err(WeightProblem::Shape { name, file, found: found.tensor.shape.clone(), expected });
        }
        let Some(dtype) = found.tensor.kind.as_dtype() else {
            return Err(WeightProblem::Type { name, file, found: found.tensor.kind.name });
        };
        let begin = found.tensor.bytes.start + part.elements.start * dtype.bytes();
        let elements = part.elements.end - part.elements.start;
        Ok(TensorLocation { file: found.file, begin, dtype, elements })
    }

    /// Whether two tensors have the same dtype, shape and bytes.
    fn equal(&self, a: &Found, b: &Found) -> Result<bool, WeightsError> {
        if a.tensor.kind != b.tensor.kind || a.tensor.shape != b.tensor.shape {
            return Ok(false);
        }
        let length = a.tensor.bytes.end - a.tensor.bytes.start;
        let mut buffers = [vec![0; STAGING], vec![0; STAGING]];
        for offset in (0..length).step_by(STAGING) {
            let part = (length - offset).min(STAGING as u64) as usize;
            for (found, buffer) in [a, b].into_iter().zip(&mut buffers) {
                let (path, file) = &self.files[found.file];
                let at = found.tensor.bytes.start + offset;
                read_exact(file, path, &found.tensor.name, &mut buffer[..part], at)?;
            }
            if buffers[0][..part] != buffers[1][..part] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn read_exact(file: &File, path: &Path, tensor: &str, bytes: &mut [u8], at: u64) -> Result<(), WeightsError> {
    file.read_exact_at(bytes, at).map_err(|source| {
        let source = match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                io::Error::new(source.kind(), "the file has become shorter since it was opened")
            }
            _ => source,
        };
        WeightsError::Read { path: path.to_owned(), tensor: tensor.to_owned(), source }
    })
}
