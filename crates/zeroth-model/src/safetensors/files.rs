//! The weights of a model folder, matched with the model's parameter table and read by ranges of elements.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use half::bf16;
use zeroth_base::{DType, nearest};

use super::convert;
use super::error::{WeightProblem, WeightsError};
use super::folder_files::FolderFiles;
use super::header::{self, StoredTensor};
use crate::{Parameter, ParameterTable};

/// Bytes that are read at a time before they are converted.
const STAGING: usize = 1 << 20;

/// Looking for near names compares every name with every other: only for as many as are shown.
const NEAR_NAMES: usize = 20;

/// The weight files of a model, open, with the place of every parameter. Reading needs no `&mut`: many threads may.
#[derive(Debug)]
pub struct WeightFiles {
    files: Vec<(PathBuf, File)>,
    /// Of every parameter of the table, by name.
    places: HashMap<String, TensorLocation>,
    warnings: Vec<WeightWarning>,
}

/// The file and the bytes of a parameter.
#[derive(Debug, Clone, Copy)]
struct TensorLocation {
    file: usize,
    /// Its first byte in the file.
    begin: u64,
    dtype: DType,
    elements: u64,
}

/// Something in the files that the model does not need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightWarning {
    /// A tensor that the table does not know.
    Unknown {
        /// Its name.
        name: String,
        /// The file it lies in.
        file: String,
    },
    /// A parameter that modules share lies there once for each of them, with equal values.
    StoredTwice {
        /// The parameter.
        name: String,
        /// The other name.
        alias: String,
    },
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
    /// Opens the weights in a folder and finds every parameter of the table, or says all that is wrong. Reads headers
    /// only, save where a tied parameter is stored twice: then both are compared.
    pub fn open(folder: &Path, table: &ParameterTable) -> Result<Self, WeightsError> {
        let listed = FolderFiles::of(folder)?;
        let mut stored = Stored::read(folder, &listed.names);
        let mut problems = std::mem::take(&mut stored.problems);
        let excused = stored.check_index(listed.index.as_ref(), &mut problems);

        let used: BTreeSet<&str> = table.iter().flat_map(Parameter::names).collect();
        let strangers: Vec<&Found> =
            stored.tensors.values().filter(|found| !used.contains(found.tensor.name.as_str())).collect();
        let mut warnings: Vec<WeightWarning> = strangers
            .iter()
            .map(|found| WeightWarning::Unknown {
                name: found.tensor.name.clone(),
                file: stored.file_name(found.file),
            })
            .collect();

        let mut places = HashMap::new();
        for parameter in table.iter() {
            let mut found = parameter.names().filter_map(|name| stored.tensors.get(name));
            let Some(first) = found.next() else {
                if !excused.all && !parameter.names().any(|name| excused.names.contains(name)) {
                    let names = strangers.iter().map(|found| found.tensor.name.as_str());
                    let near = (problems.len() < NEAR_NAMES).then(|| nearest(&parameter.name, names));
                    let near = near.flatten().map(str::to_owned);
                    problems.push(WeightProblem::Missing { name: parameter.name.clone(), near });
                }
                continue;
            };
            match stored.place(parameter, first) {
                Ok(place) => {
                    places.insert(parameter.name.clone(), place);
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

    /// Warnings about tensors that the model does not have.
    pub fn warnings(&self) -> &[WeightWarning] {
        &self.warnings
    }

    /// The type a parameter is stored in.
    pub fn dtype(&self, parameter: &str) -> Result<DType, WeightsError> {
        self.place(parameter).map(|place| place.dtype)
    }

    /// Reads a range of a parameter's elements as f32. Only their bytes are read.
    pub fn read_f32(
        &self,
        parameter: &str,
        elements: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), WeightsError> {
        self.read(parameter, elements, out, convert::to_f32)
    }

    /// Reads a range of a parameter's elements as bf16, rounded to the nearest.
    pub fn read_bf16(
        &self,
        parameter: &str,
        elements: Range<u64>,
        out: &mut [bf16],
    ) -> Result<(), WeightsError> {
        self.read(parameter, elements, out, convert::to_bf16)
    }

    fn read<T>(
        &self,
        parameter: &str,
        elements: Range<u64>,
        out: &mut [T],
        convert: impl Fn(DType, &[u8], &mut [T]),
    ) -> Result<(), WeightsError> {
        let place = self.place(parameter)?;
        let (Range { start, end }, buffer) = (elements, out.len() as u64);
        if end > place.elements || end.checked_sub(start) != Some(buffer) {
            let (name, elements) = (parameter.to_owned(), place.elements);
            return Err(WeightsError::Range { name, start, end, buffer, elements });
        }
        let size = place.dtype.bytes() as usize;
        let mut staging = vec![0; STAGING.min(out.len() * size)];
        let mut at = place.begin + start * size as u64;
        for part in out.chunks_mut(STAGING / size) {
            let bytes = &mut staging[..part.len() * size];
            let (path, file) = &self.files[place.file];
            read_exact(file, path, parameter, bytes, at)?;
            convert(place.dtype, bytes, part);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn place(&self, parameter: &str) -> Result<&TensorLocation, WeightsError> {
        self.places.get(parameter).ok_or_else(|| {
            // Sorted: the answer must not depend on the order of a hash table.
            let names: BTreeSet<&str> = self.places.keys().map(String::as_str).collect();
            let near = nearest(parameter, names).map(str::to_owned);
            WeightsError::NoSuchParameter { name: parameter.to_owned(), near }
        })
    }
}

/// All tensors of all files, before the table is asked.
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

/// Tensors whose absence follows from a problem that is reported already.
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

    /// Compares the index with what the files hold.
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

    /// The place of a parameter, if what was found can be it.
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

    /// Whether two tensors hold the same bytes.
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
