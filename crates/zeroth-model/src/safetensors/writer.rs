//! Writes weights tensor by tensor, in pieces of any size, so that the model need not fit in memory.
//!
//! Names, shapes and dtypes are known in advance. Files have hidden names until all of them are complete and synced.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use zeroth_base::{
    DType, create_unfinished, grouped, publish_unfinished, remove_unfinished, sync_folder, unfinished_path,
};

use super::error::WeightsError;
use super::{INDEX, ONE_FILE, convert, header};
use crate::peft::ADAPTER_WEIGHTS;
use crate::{Parameter, StoredPart};

/// The size in bytes above which weights are split into shards, as in transformers 4.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// The metadata that transformers requires.
const METADATA: &[(&str, &str)] = &[("format", "pt")];

/// The number of elements that are converted at a time.
const PIECE: usize = 1 << 16;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct NewTensor {
    pub name: String,
    pub shape: Vec<u64>,
    /// The dtype in which it is stored.
    pub dtype: DType,
}

impl NewTensor {
    /// The tensors that a parameter is written as, one after the other, in this dtype: one, or a tensor for each of its
    /// parts.
    pub fn all_of(parameter: &Parameter, dtype: DType) -> Vec<Self> {
        if parameter.parts.is_empty() {
            return vec![Self { name: parameter.name.clone(), shape: parameter.shape.clone(), dtype }];
        }
        let tensor = |part: &StoredPart| Self { name: part.name.clone(), shape: part.shape.clone(), dtype };
        parameter.parts.iter().map(tensor).collect()
    }

    /// The number of its elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The size in bytes, checked for overflow when the writer is created.
    fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bytes()
    }

    fn checked_bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.bytes(), |bytes, side| bytes.checked_mul(*side))
    }
}

/// The files that a writer wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenWeights {
    /// The weight files, and the index file if there are several.
    pub files: Vec<PathBuf>,
    /// The size of the tensors in bytes, without headers.
    pub bytes: u64,
}

/// Writes weights to a folder.
///
/// Dropped before [`WeightWriter::finish`], it removes its files and leaves earlier weights in the folder untouched.
#[derive(Debug)]
pub struct WeightWriter {
    folder: PathBuf,
    tensors: Vec<NewTensor>,
    shards: Vec<Shard>,
    /// The index of the next tensor.
    tensor: usize,
    /// The number of its elements that are written.
    written: u64,
    /// The index of its shard.
    shard: usize,
    open: Option<BufWriter<File>>,
    scratch: Vec<u8>,
    /// Whether earlier weights of a model in the folder are replaced.
    replaces_model: bool,
}

#[derive(Debug)]
struct Shard {
    name: String,
    tensors: Range<usize>,
}

impl WeightWriter {
    /// Starts writing these tensors to an existing folder.
    ///
    /// They go to one file, or to shards of at most `shard_bytes` and an index file. A tensor larger than that has a
    /// separate shard.
    pub fn create(folder: &Path, tensors: Vec<NewTensor>, shard_bytes: u64) -> Result<Self, WeightsError> {
        refuse_unwritable(&tensors)?;
        let shards = cut(&tensors, shard_bytes);
        Self::of_shards(folder, tensors, shards, true)
    }

    /// Starts writing the matrices of an adapter to an existing folder, as PEFT's `adapter_model.safetensors`. Weights of a
    /// model in the folder stay.
    pub fn create_adapter(folder: &Path, tensors: Vec<NewTensor>) -> Result<Self, WeightsError> {
        refuse_unwritable(&tensors)?;
        let shard = Shard { name: ADAPTER_WEIGHTS.to_owned(), tensors: 0..tensors.len() };
        Self::of_shards(folder, tensors, vec![shard], false)
    }

    fn of_shards(
        folder: &Path,
        tensors: Vec<NewTensor>,
        shards: Vec<Shard>,
        replaces_model: bool,
    ) -> Result<Self, WeightsError> {
        let mut writer = Self {
            folder: folder.to_owned(),
            tensors,
            shards,
            tensor: 0,
            written: 0,
            shard: 0,
            open: None,
            scratch: Vec::new(),
            replaces_model,
        };
        writer.settle()?;
        Ok(writer)
    }

    /// The names of the files that it will have written.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let index = (self.shards.len() > 1).then_some(INDEX);
        self.shards.iter().map(|shard| shard.name.as_str()).chain(index)
    }

    /// Appends the next elements of a parameter, wherever they begin in the tensors of [`NewTensor::all_of`], which follow
    /// each other.
    pub fn append_parameter(&mut self, parameter: &Parameter, values: &[f32]) -> Result<(), WeightsError> {
        let mut rest = values;
        while !rest.is_empty() {
            let next = self.tensors.get(self.tensor);
            let Some(next) = next.filter(|next| parameter.stored_names().any(|name| name == next.name))
            else {
                let (name, given) = (parameter.name.clone(), rest.len() as u64);
                return Err(WeightsError::OutOfOrder { name, given, expected: self.expected() });
            };
            let (name, left) = (next.name.clone(), next.elements() - self.written);
            let (own, after) = rest.split_at(left.min(rest.len() as u64) as usize);
            self.append_f32(&name, own)?;
            rest = after;
        }
        Ok(())
    }

    /// Appends the next elements of a tensor, rounded to its stored dtype.
    ///
    /// Tensors must come in the order given to [`WeightWriter::create`].
    pub fn append_f32(&mut self, name: &str, values: &[f32]) -> Result<(), WeightsError> {
        let given = values.len() as u64;
        let next = self.tensors.get(self.tensor).filter(|next| next.name == name);
        let Some(next) = next.filter(|next| given <= next.elements() - self.written) else {
            return Err(WeightsError::OutOfOrder { name: name.to_owned(), given, expected: self.expected() });
        };
        let dtype = next.dtype;
        for piece in values.chunks(PIECE) {
            self.scratch.clear();
            convert::from_f32(dtype, piece, &mut self.scratch);
            self.write_scratch()?;
        }
        self.written += given;
        self.settle()
    }

    fn write_scratch(&mut self) -> Result<(), WeightsError> {
        let file = self.open.as_mut().expect("the file of a tensor that is not whole is open");
        file.write_all(&self.scratch)
            .map_err(|source| WeightsError::Write { path: self.unfinished(self.shard), source })
    }

    /// Advances past complete tensors and shards, syncs and closes these shards, and opens the next one.
    fn settle(&mut self) -> Result<(), WeightsError> {
        let path = self.unfinished(self.shard);
        self.settle_shard().map_err(|source| WeightsError::Write { path, source })
    }

    fn settle_shard(&mut self) -> io::Result<()> {
        while let Some(shard) = self.shards.get(self.shard) {
            if self.open.is_none() {
                let tensors = &self.tensors[shard.tensors.clone()];
                let header = header::encode(
                    METADATA,
                    tensors.iter().map(|tensor| (&*tensor.name, &*tensor.shape, tensor.dtype)),
                );
                let mut file = BufWriter::new(create_unfinished(&self.unfinished(self.shard))?);
                file.write_all(&header)?;
                self.open = Some(file);
            }
            while self.tensor < shard.tensors.end && self.written == self.tensors[self.tensor].elements() {
                self.tensor += 1;
                self.written = 0;
            }
            if self.tensor < shard.tensors.end {
                break;
            }
            if let Some(mut file) = self.open.take() {
                file.flush()?;
                file.get_ref().sync_all()?;
            }
            self.shard += 1;
        }
        Ok(())
    }

    /// Renames the files to their final names and removes earlier weights from the folder.
    ///
    /// All bytes are on disk before the first rename, so a full disk does not affect earlier weights.
    pub fn finish(mut self) -> Result<WrittenWeights, WeightsError> {
        if let Some(next) = self.tensors.get(self.tensor) {
            let (name, expected) = (next.name.clone(), self.expected());
            return Err(WeightsError::OutOfOrder { name, given: 0, expected });
        }
        let shards = std::mem::take(&mut self.shards);
        let placed = self.put_in_place(&shards);
        if placed.is_err() {
            // Drop removes the files that still have hidden names.
            self.shards = shards;
        }
        placed
    }

    /// Renames all files and removes earlier weights.
    ///
    /// Readers prefer a single file to an index. So unless shards have the names of earlier ones, the folder holds
    /// complete weights at all times: the earlier ones until the last rename, then the new ones.
    fn put_in_place(&self, shards: &[Shard]) -> Result<WrittenWeights, WeightsError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| WeightsError::Write { path, source }
        };
        let bytes = self.tensors.iter().map(NewTensor::bytes).sum();
        let mut new: Vec<&str> = shards.iter().map(|shard| shard.name.as_str()).collect();
        if shards.len() > 1 {
            let path = unfinished_path(&self.folder, INDEX);
            let index = format!("{:#}\n", self.index(shards, bytes));
            write_synced(&path, index.as_bytes()).map_err(at(&path))?;
            new.push(INDEX);
        }
        let old = if self.replaces_model {
            weight_files(&self.folder).map_err(at(&self.folder))?
        } else {
            BTreeSet::new()
        };
        let is_mixed = shards.iter().any(|shard| shards.len() > 1 && old.contains(&shard.name));
        if is_mixed && old.contains(INDEX) {
            // The earlier index would describe a mix of old and new shards until all are replaced.
            let path = self.folder.join(INDEX);
            fs::remove_file(&path).map_err(at(&path))?;
        }
        let mut files: Vec<PathBuf> = Vec::with_capacity(new.len());
        for name in &new {
            let path = self.folder.join(name);
            if let Err(error) = publish_unfinished(&unfinished_path(&self.folder, name), &path) {
                // Best effort: remove new files that do not replace earlier ones.
                for (_, path) in new.iter().zip(&files).filter(|(name, _)| !old.contains(**name)) {
                    let _ = fs::remove_file(path);
                }
                return Err(at(&path)(error));
            }
            files.push(path);
        }
        for name in old.iter().filter(|name| !new.contains(&name.as_str())) {
            let path = self.folder.join(name);
            fs::remove_file(&path).map_err(at(&path))?;
        }
        sync_folder(&self.folder).map_err(at(&self.folder))?;
        Ok(WrittenWeights { files, bytes })
    }

    fn index(&self, shards: &[Shard], bytes: u64) -> Value {
        let mut map = Map::new();
        for shard in shards {
            for tensor in &self.tensors[shard.tensors.clone()] {
                map.insert(tensor.name.clone(), shard.name.clone().into());
            }
        }
        json!({"metadata": {"total_size": bytes}, "weight_map": map})
    }

    fn unfinished(&self, shard: usize) -> PathBuf {
        let of = |shard: &Shard| unfinished_path(&self.folder, &shard.name);
        self.shards.get(shard).map_or_else(|| self.folder.clone(), of)
    }

    /// What must be appended next, for messages.
    fn expected(&self) -> String {
        match self.tensors.get(self.tensor) {
            Some(next) => {
                let left = grouped(next.elements() - self.written);
                format!("{left} of `{}` come next", next.name)
            }
            None => "all tensors are whole".to_owned(),
        }
    }
}

impl Drop for WeightWriter {
    fn drop(&mut self) {
        for shard in &self.shards {
            // Most of the files do not exist yet, or no longer.
            remove_unfinished(&unfinished_path(&self.folder, &shard.name));
        }
        remove_unfinished(&unfinished_path(&self.folder, INDEX));
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create_unfinished(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn refuse_unwritable(tensors: &[NewTensor]) -> Result<(), WeightsError> {
    let mut names = BTreeSet::new();
    let mut total = 0_u64;
    for tensor in tensors {
        let problem = if tensor.name == header::METADATA {
            Some("the format keeps that name for itself")
        } else if !names.insert(&tensor.name) {
            Some("the name is given twice")
        } else {
            let sum = tensor.checked_bytes().and_then(|bytes| total.checked_add(bytes));
            total = sum.unwrap_or(u64::MAX);
            sum.is_none().then_some("its bytes, with those before it, are more than 64 bits count")
        };
        if let Some(problem) = problem {
            return Err(WeightsError::NotWritable { name: tensor.name.clone(), problem });
        }
    }
    Ok(())
}

/// Splits tensors into shards, in order.
fn cut(tensors: &[NewTensor], shard_bytes: u64) -> Vec<Shard> {
    let mut cuts = vec![0];
    let mut bytes = 0_u64;
    for (index, tensor) in tensors.iter().enumerate() {
        if bytes > 0 && bytes.saturating_add(tensor.bytes()) > shard_bytes {
            cuts.push(index);
            bytes = 0;
        }
        bytes += tensor.bytes();
    }
    let count = cuts.len();
    cuts.push(tensors.len());
    let name = |number: usize| match count {
        1 => ONE_FILE.to_owned(),
        _ => format!("model-{number:05}-of-{count:05}.safetensors"),
    };
    cuts.windows(2)
        .enumerate()
        .map(|(index, cut)| Shard { name: name(index + 1), tensors: cut[0]..cut[1] })
        .collect()
}

/// The names of the weight files and the index file in a folder.
fn weight_files(folder: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && is_weight_file(&name)
            && !entry.file_type()?.is_dir()
        {
            names.insert(name);
        }
    }
    Ok(names)
}

/// Whether a file name is one of a weight file or an index file.
pub fn is_weight_file(name: &str) -> bool {
    name == ONE_FILE || name == INDEX || is_shard(name)
}

/// Whether a file name is `model-00001-of-00003.safetensors`, with any numbers.
fn is_shard(name: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(a, b)| digits(a) && digits(b))
}
