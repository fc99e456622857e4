//! A training job: everything that all ranks must agree on, as data.

use std::path::PathBuf;

use zeroth_graph::Param;
use zeroth_kernel::Recipe;
use zeroth_model::{Batch, ForwardError, ModelConfig, ParameterKind, ParameterTable, forward};
use zeroth_program::Settings;
use zeroth_program::Target;
use zeroth_program::{CompileError, Compiled};

use crate::{BatchShape, Batches, ModelFiles, RowSizes, SampleOrder, Schedule};
use zeroth_data::Samples;

/// What is trained, on which data, and with which settings.
#[derive(Debug)]
pub struct Job {
    /// The model folder, with its weights.
    pub folder: PathBuf,
    /// Its config and tokenizer files.
    pub files: ModelFiles,
    /// The model's config.
    pub model: ModelConfig,
    /// Its parameter table.
    pub table: ParameterTable,
    /// The training data.
    pub samples: Samples,
    /// The sample order.
    pub order: SampleOrder,
    /// The batch decomposition.
    pub shape: BatchShape,
    /// Steps of the run.
    pub steps: u64,
    /// Row counts that micro-batches are padded to.
    pub row_sizes: Vec<u64>,
    /// Settings of the compiler passes.
    pub settings: Settings,
    /// Optimizer hyperparameters.
    pub recipe: Recipe,
    /// The learning-rate schedule.
    pub schedule: Schedule,
    /// Whether weight decay also applies to norms and biases.
    pub decays_all: bool,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Evaluation data and interval.
    pub evaluation: Option<Evaluation>,
}

/// Evaluation settings.
#[derive(Debug)]
pub struct Evaluation {
    /// The data.
    pub samples: Samples,
    /// Steps between evaluations; one always follows the last step.
    pub every: u64,
}

/// An error compiling a job.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The model uses ops that are not implemented.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// Compilation failed.
    #[error(transparent)]
    Compile(#[from] CompileError),
}

impl Job {
    /// Compiles one optimizer step, with the placement of every buffer.
    pub fn compile(&self, target: Target) -> Result<Compiled, JobError> {
        let tokens = self.row_sizes.last().copied().unwrap_or(0);
        let graph = forward(&self.model, &self.table, Batch { tokens })?;
        Ok(Compiled::new(graph, self.shape.ranks, &self.settings, target, self.row_sizes.clone())?)
    }

    /// Chooses the row counts for the largest micro-batch of training and evaluation.
    pub fn size_rows(&mut self) {
        let mut largest = self.batches().largest_micro_batch(0, self.steps);
        if let Some(Evaluation { samples, .. }) = &self.evaluation {
            let batches = Batches::new(samples, SampleOrder::new(samples.count(), None), self.shape);
            let rounds = samples.count().get().div_ceil(self.shape.train_batch().max(1));
            largest = largest.max(batches.largest_micro_batch(0, rounds));
        }
        self.row_sizes = RowSizes::new(largest).all().iter().map(|size| *size as u64).collect();
    }

    /// The training data, split into micro-batches.
    pub fn batches(&self) -> Batches<'_> {
        Batches::new(&self.samples, self.order, self.shape)
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
