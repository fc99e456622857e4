//! A training job: everything that all ranks must agree on, as data.

mod best_policy;
pub mod from_config;
mod interval;
mod lora;
mod objective;

use std::borrow::Cow;
use std::path::PathBuf;

use zeroth_base::DType;
use zeroth_config::resolve::Choice;
use zeroth_graph::Param;
use zeroth_kernel::{Recipe, Target};
use zeroth_model::{ModelConfig, ParameterKind, ParameterTable};
use zeroth_plan::{
    BatchShape, Budget, DataSize, Detail, Freedom, Misfit, Overhead, Processes, RowSizes, Sizing, SizingError,
};
use zeroth_program::Compiled;
use zeroth_program::Settings;
use zeroth_program::StreamSizes;

pub use self::best_policy::{BestMetric, BestPolicy};
pub use self::interval::{Interval, RunSteps};
pub use self::lora::{LoraJob, adapted_modules, adapter_table, base_table, describe as describe_lora};
pub use self::objective::JobObjective;
use crate::checkpoint::ModelFiles;
use crate::data::{Batches, SampleOrder, largest_of};
use crate::distill::{Distillation, TeacherCache};
use crate::schedule::Schedule;
use zeroth_data::{DecoderStart, Samples};

/// Bytes per sample in the data index, per target of a pair, and per packed sample or pack.
const SAMPLE: u64 = 12;
const TARGET: u64 = 8;
const PACKED: u64 = 8;

/// What is trained, on which data, and with which settings.
#[derive(Debug)]
#[allow(missing_docs, reason = "names say what they are")]
pub struct Job {
    /// The model folder, with its weights.
    pub folder: PathBuf,
    /// Its config and tokenizer files.
    pub files: ModelFiles,
    /// The model's config.
    pub model: ModelConfig,
    pub table: ParameterTable,
    /// The training data.
    pub samples: Samples,
    /// The first inputs of an encoder-decoder's decoder.
    pub decoder_start: Option<DecoderStart>,
    pub order: SampleOrder,
    /// The batch decomposition.
    pub shape: BatchShape,
    /// Steps of the run.
    pub steps: u64,
    /// Row counts that micro-batches are padded to.
    pub row_sizes: StreamSizes,
    /// Settings of the compiler passes.
    pub settings: Settings,
    /// Optimizer hyperparameters.
    pub recipe: Recipe,
    /// The learning-rate schedule.
    pub schedule: Schedule,
    /// Whether weight decay also applies to norms and biases.
    pub decays_all: bool,
    /// Seed of all random numbers but those of the data.
    pub seed: u64,
    /// Seed of the order of the samples, and of those that are held out.
    pub data_seed: u64,
    /// Evaluation data and interval.
    pub evaluation: Option<Evaluation>,
    /// The adapters, where LoRA is trained; they are in the table.
    pub lora: Option<LoraJob>,
    /// What is trained for.
    pub objective: JobObjective,
    /// The dtype of the exported weights; that of the run if it is not given.
    pub save_dtype: Option<DType>,
}

/// Evaluation settings.
#[derive(Debug)]
pub struct Evaluation {
    /// The data.
    pub samples: Samples,
    /// When an evaluation is due.
    pub interval: Interval,
    /// Samples per micro-batch of a rank; those of training if not given.
    pub micro_batch: Option<u64>,
    /// How evaluations are compared, if they are.
    pub best: Option<BestPolicy>,
}

impl Evaluation {
    /// The batch decomposition of an evaluation beside training with `shape`.
    pub(crate) fn shape(&self, shape: BatchShape) -> BatchShape {
        let micro_batch = self.micro_batch.unwrap_or(shape.micro_batch).min(self.samples.count().get());
        BatchShape { micro_batch, accumulation: 1, ..shape }
    }

    /// Tokens of the largest micro-batch of each stream, the last and shorter one included.
    ///
    /// Exact up to 20 million samples; beyond that it is bounded by the longest sample.
    fn largest_micro_batch(&self, shape: BatchShape) -> [u64; 2] {
        const WALKED: u64 = 20_000_000;
        let (micro_batch, count) = (self.shape(shape).micro_batch, self.samples.count().get());
        if count > WALKED {
            return self.samples.longest_streams().map(|longest| micro_batch * longest);
        }
        largest_of(&self.samples, 0..count, micro_batch, count.div_ceil(micro_batch))
    }
}

impl Job {
    /// Compiles one optimizer step, with the placement of every buffer.
    pub fn compile(&self, target: &'static dyn Target) -> Result<Compiled, SizingError> {
        self.sizing(target, &|_| self.largest_micro_batch(self.shape)).compile()
    }

    /// Compiles a program that fits the budget. The chosen settings become the job's.
    pub fn fit(
        &mut self,
        target: &'static dyn Target,
        budget: Budget,
        freedom: Freedom,
    ) -> Result<Result<(Compiled, Vec<Choice>), Misfit>, SizingError> {
        let largest = |shape| self.largest_micro_batch(shape);
        let mut sizing = self.sizing(target, &largest);
        let fitted = sizing.fit(budget, freedom)?;
        let (settings, shape, row_sizes) = (sizing.settings, sizing.shape, sizing.row_sizes);
        (self.settings, self.shape, self.row_sizes) = (settings, shape, row_sizes);
        Ok(fitted)
    }

    fn sizing<'a>(
        &'a self,
        target: &'static dyn Target,
        largest_micro_batch: &'a dyn Fn(BatchShape) -> [u64; 2],
    ) -> Sizing<'a> {
        Sizing {
            model: &self.model,
            table: &self.table,
            objective: self.objective.of_model(),
            target,
            shape: self.shape,
            settings: self.settings,
            row_sizes: self.row_sizes.clone(),
            largest_micro_batch,
            data: self.data_size(),
            detail: Detail::Run,
        }
    }

    /// Chooses the row counts for the largest micro-batch of training and evaluation.
    pub fn size_rows(&mut self) {
        self.row_sizes = RowSizes::of_streams(self.largest_micro_batch(self.shape));
    }

    /// Tokens of the largest micro-batch of training and evaluation under a batch decomposition, of each stream.
    fn largest_micro_batch(&self, shape: BatchShape) -> [u64; 2] {
        let trained = Batches::new(&self.samples, self.order, shape).largest_micro_batch(0, self.steps);
        let evaluated = self.evaluation.as_ref().map_or([0; 2], |found| found.largest_micro_batch(shape));
        [0, 1].map(|stream| trained[stream].max(evaluated[stream]))
    }

    /// Host memory of a rank outside its arenas.
    pub fn overhead(&self, compiled: &Compiled, processes: Processes) -> Overhead {
        Overhead::of(self.data_size(), compiled, processes)
    }

    fn data_size(&self) -> DataSize {
        let all = [Some(&self.samples), self.evaluation.as_ref().map(|evaluation| &evaluation.samples)];
        let mut size = DataSize::default();
        for samples in all.into_iter().flatten() {
            let totals = samples.totals();
            let packed = if totals.packs > 0 { PACKED * (totals.samples + totals.packs) } else { 0 };
            let target = if samples.is_paired() { TARGET } else { 0 };
            size.index += (SAMPLE + target + samples.part_bytes()) * totals.samples + packed;
            size.tokens += totals.tokens;
        }
        size
    }

    /// The steps of the run and the length of its epochs.
    pub fn run_steps(&self) -> RunSteps {
        RunSteps { total: self.steps, samples: self.samples.count(), train_batch: self.shape.train_batch() }
    }

    /// The parameters that checkpoints and the exported model hold: the adapters of LoRA, else all.
    pub fn saved_table(&self) -> Cow<'_, ParameterTable> {
        match &self.lora {
            Some(_) => Cow::Owned(adapter_table(&self.table)),
            None => Cow::Borrowed(&self.table),
        }
    }

    /// The training data, split into micro-batches.
    pub fn batches(&self) -> Batches<'_> {
        Batches::new(&self.samples, self.order, self.shape)
            .with_decoder_start(self.decoder_start)
            .with_cache(self.teacher_cache())
    }

    /// The cache of the teacher, where there is one.
    fn teacher_cache(&self) -> Option<&TeacherCache> {
        self.objective.distillation().and_then(Distillation::cache)
    }

    /// For each parameter of the graph, whether weight decay applies to it: to matrices, and to norms and biases only
    /// with [`Self::decays_all`].
    pub(crate) fn decays(&self, compiled: &Compiled) -> Vec<bool> {
        let known = self.table.by_name();
        let decays = |param: &Param| {
            let kind = known.get(param.spec.name.as_str()).map(|found| found.kind);
            self.decays_all || kind.is_none_or(ParameterKind::decays)
        };
        compiled.graph.params.iter().map(decays).collect()
    }
}
