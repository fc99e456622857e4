//! Merges adapters into the weights of their base and writes a Hugging Face folder, streamed: W + scale · B·A is computed
//! in f32 and rounded once, tensor by tensor.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use zeroth_base::{DType, ExclusiveFolder};
use zeroth_engine::StateKind;
use zeroth_model::{
    Adapter, Lora, ModelConfig, NewTensor, Parameter, ParameterTable, WeightFiles, WeightWriter,
    WeightsError, WrittenWeights, has_weights, lora_table, table,
};

use super::error::ExportError;
use super::from_checkpoint::{ExportDestination, open_destination};
use super::record::{ExportSource, exported_step, recorded_base};
use super::staged_files::StagedFiles;
use super::stream::stream;
use crate::checkpoint::{
    BaseEntry, Checkpoint, ModelFiles, enclosing_checkpoint, free_bytes, is_inside, needed_bytes,
};
use crate::weights::{BaseHash, name_key, sample_of};

/// Elements of a matrix that one task computes: they and a row of A stay in the L1 cache.
const BLOCK: usize = 1 << 12;

/// The base of adapters: a model folder with its weights located.
#[derive(Debug)]
pub struct MergeBase {
    folder: PathBuf,
    model: ModelConfig,
    table: ParameterTable,
    files: WeightFiles,
}

/// Where and how a merged model is written.
#[derive(Debug, Clone, Copy)]
pub struct MergeOutput<'a> {
    /// The folder.
    pub folder: &'a Path,
    /// Handling of a non-empty one.
    pub destination: ExportDestination,
    /// The dtype of all weights; that of the base, tensor by tensor, if it is not given.
    pub dtype: Option<DType>,
    /// Maximum size of a weight file in bytes.
    pub shard_bytes: u64,
    /// Whether the adapters may have been trained over another base.
    pub allows_other_base: bool,
}

/// Reads a range of an adapter's matrix, by its name.
type ReadMatrix<'a> = &'a dyn Fn(&str, Range<u64>, &mut [f32]) -> Result<(), ExportError>;

/// AdapterSource to merge.
struct AdapterSource<'a> {
    /// Their matrices, as [`lora_table`] lists them.
    table: &'a ParameterTable,
    lora: &'a Lora,
    read: ReadMatrix<'a>,
    /// What they are read from, and its folder.
    folder: (&'static str, &'a Path),
    /// The identity of their base, where it is known.
    base: Option<&'a BaseEntry>,
}

impl MergeBase {
    /// Reads the config of a model folder and locates its weights.
    pub fn open(folder: &Path) -> Result<Self, ExportError> {
        let model = ModelConfig::from_folder(folder)?;
        let table = table(&model);
        if !has_weights(folder)? {
            return Err(ExportError::NoBase { folder: folder.to_owned() });
        }
        let files = WeightFiles::open(folder, &table)?;
        Ok(Self { folder: folder.to_owned(), model, table, files })
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model's config.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The model's parameters.
    pub fn table(&self) -> &ParameterTable {
        &self.table
    }

    /// The dtype of the stored weights: that of the first.
    pub fn dtype(&self) -> Result<DType, ExportError> {
        let first =
            self.table.iter().next().map(|parameter| self.files.dtype(&parameter.name)).transpose()?;
        Ok(first.unwrap_or(DType::F32))
    }

    /// The hash of the first elements of each tensor.
    pub fn sample(&self) -> Result<String, WeightsError> {
        sample_of(&self.table, &|parameter, range, out| self.files.read_f32(&parameter.name, range, out))
    }

    /// Writes the model with the adapter of a folder merged. Unless the output `allows_other_base`, the base is compared with the
    /// one that was recorded with the adapter.
    pub fn merge_adapter(
        &self,
        adapter: &Adapter,
        folder: &Path,
        output: MergeOutput<'_>,
    ) -> Result<WrittenWeights, ExportError> {
        let step = exported_step(folder).unwrap_or(0);
        let base = recorded_base(folder).filter(|_| !output.allows_other_base);
        let adapters = AdapterSource {
            table: adapter.table(),
            lora: adapter.lora(),
            read: &|name, range, out| Ok(adapter.read_f32(name, range, out)?),
            folder: ("adapter", folder),
            base: base.as_ref(),
        };
        self.merge(&adapters, &ExportSource { step, checkpoint: None, end: None, base: None }, output)
    }

    /// Writes the model with the adapters of a checkpoint merged. The checkpoint must have been verified.
    pub fn merge_checkpoint(
        &self,
        checkpoint: &Checkpoint,
        output: MergeOutput<'_>,
    ) -> Result<WrittenWeights, ExportError> {
        let Some(entry) = &checkpoint.manifest().lora else {
            return Err(ExportError::NoAdapters { checkpoint: checkpoint.folder().to_owned() });
        };
        let lora = entry.lora();
        let table = lora_table(&self.table, &lora)?;
        checkpoint.check_model(self.model.family.model_type(), &table)?;
        let adapters = AdapterSource {
            table: &table,
            lora: &lora,
            read: &|name, range, out| Ok(checkpoint.read_f32(StateKind::Weights, name, range, out)?),
            folder: ("checkpoint", checkpoint.folder()),
            base: Some(&entry.base).filter(|_| !output.allows_other_base),
        };
        // What is written is a model, without a base.
        self.merge(&adapters, &ExportSource { base: None, ..ExportSource::of(checkpoint) }, output)
    }

    fn merge(
        &self,
        adapters: &AdapterSource<'_>,
        source: &ExportSource,
        output: MergeOutput<'_>,
    ) -> Result<WrittenWeights, ExportError> {
        let to = output.folder;
        for (what, input) in [("base model", self.folder.as_path()), adapters.folder] {
            if is_inside(to, input) {
                let (folder, input) = (to.to_owned(), input.to_owned());
                return Err(ExportError::InsideInput { folder, what, input });
            }
        }
        if let Some(checkpoint) = enclosing_checkpoint(to) {
            return Err(ExportError::InsideCheckpoint { folder: to.to_owned(), checkpoint });
        }
        let folder = open_destination(to, output.destination)?;
        let mut tensors = Vec::new();
        for parameter in self.table.iter() {
            tensors.extend(NewTensor::all_of(parameter, self.written_dtype(parameter, output)?));
        }
        self.refuse_small_disk(&tensors, to)?;
        self.write(adapters, source, output, folder, &tensors)
    }

    /// Streams the merged tensors into files beside the final ones, and publishes them.
    fn write(
        &self,
        adapters: &AdapterSource<'_>,
        source: &ExportSource,
        output: MergeOutput<'_>,
        folder: ExclusiveFolder,
        tensors: &[NewTensor],
    ) -> Result<WrittenWeights, ExportError> {
        let to = folder.path().to_owned();
        let dtype = output.dtype.map_or_else(|| self.dtype(), Ok)?;
        let beside = StagedFiles::of_model(&ModelFiles::read(&self.folder)?, folder, dtype)?;
        let mut writer = WeightWriter::create(&to, tensors.to_vec(), output.shard_bytes)?;
        let matrices = adapters.table.adapter_matrices();
        let mut hash = BaseHash::default();
        for parameter in self.table.iter() {
            let product = match matrices.get(parameter.name.as_str()) {
                Some([Some(a), Some(b)]) => Some(Product::read(a, b, adapters)?),
                _ => None,
            };
            let key = name_key(&parameter.name);
            let dtype = self.written_dtype(parameter, output)?;
            stream(parameter, dtype, Some(&mut writer), &mut |range, elements| {
                self.files.read_f32(&parameter.name, range.clone(), elements)?;
                if adapters.base.is_some() {
                    hash.add(key, range.start, elements);
                }
                if let Some(product) = &product {
                    product.add_to(range.start as usize, elements);
                }
                Ok(())
            })?;
        }
        // The base is read once, so another one is found out at the end, before anything is published.
        if let Some(base) = adapters.base.filter(|base| base.hash != hash.text()) {
            let (saved, given) = (base.name.clone(), self.folder.clone());
            return Err(ExportError::AnotherBase { saved, given });
        }
        beside.publish(writer, source)
    }

    fn written_dtype(&self, parameter: &Parameter, output: MergeOutput<'_>) -> Result<DType, ExportError> {
        output.dtype.map_or_else(|| Ok(self.files.dtype(&parameter.name)?), Ok)
    }

    fn refuse_small_disk(&self, tensors: &[NewTensor], to: &Path) -> Result<(), ExportError> {
        let bytes = |tensor: &NewTensor| tensor.shape.iter().product::<u64>() * tensor.dtype.bytes();
        let needed = tensors.iter().map(bytes).sum::<u64>() + needed_bytes(&self.table, &[], &self.folder);
        match free_bytes(to) {
            Ok(free) if free < needed => Err(ExportError::NoSpace { folder: to.to_owned(), needed, free }),
            // A disk that does not say what is free: writing shows.
            _ => Ok(()),
        }
    }
}

/// The product of an adapter's matrices, computed where it is added.
struct Product {
    /// [rank, in], of experts [experts, rank, in]
    a: Vec<f32>,
    /// [out, rank], of experts [experts, out, rank]
    b: Vec<f32>,
    /// Rows of the weight, of each expert.
    out: usize,
    rank: usize,
    width: usize,
    scale: f32,
}

impl Product {
    fn read(a: &Parameter, b: &Parameter, adapters: &AdapterSource<'_>) -> Result<Self, ExportError> {
        let whole = |parameter: &Parameter| -> Result<Vec<f32>, ExportError> {
            let mut elements = vec![0.0; parameter.elements() as usize];
            (adapters.read)(&parameter.name, 0..parameter.elements(), &mut elements)?;
            Ok(elements)
        };
        let [rank, width] = a.shape.last_chunk().copied().expect("an adapter's matrices have two sides");
        let [out, _] = b.shape.last_chunk().copied().expect("an adapter's matrices have two sides");
        let scale = adapters.lora.scale_of_rank(rank) as f32;
        let [out, rank, width] = [out, rank, width].map(|side: u64| side as usize);
        Ok(Self { a: whole(a)?, b: whole(b)?, out, rank, width, scale })
    }

    /// Adds scale · B·A to elements of the weight [out, in], or [experts, out, in], from element `first` on, in f32. A sum runs
    /// over the rank in order, so neither threads nor pieces change a bit.
    fn add_to(&self, first: usize, elements: &mut [f32]) {
        elements.par_chunks_mut(BLOCK).enumerate().for_each_init(
            || vec![0.0_f32; BLOCK],
            |sums, (index, mut block)| {
                let mut at = first + index * BLOCK;
                while !block.is_empty() {
                    let (row, column) = (at / self.width, at % self.width);
                    let (part, rest) = block.split_at_mut((self.width - column).min(block.len()));
                    let sums = &mut sums[..part.len()];
                    sums.fill(0.0);
                    let outer = &self.b[row * self.rank..(row + 1) * self.rank];
                    let inner = &self.a[row / self.out * self.rank * self.width..];
                    for (b, a) in outer.iter().zip(inner.chunks_exact(self.width)) {
                        for (sum, a) in sums.iter_mut().zip(&a[column..]) {
                            *sum += b * a;
                        }
                    }
                    for (weight, sum) in part.iter_mut().zip(sums) {
                        *weight += self.scale * *sum;
                    }
                    at += part.len();
                    block = rest;
                }
            },
        );
    }
}
