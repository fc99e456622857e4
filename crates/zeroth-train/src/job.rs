//! A training job: all that every rank must agree on before it starts, as data.

use std::path::PathBuf;

use zeroth_graph::ParamId;
use zeroth_kernel::Recipe;
use zeroth_model::{Batch, ForwardError, ModelConfig, ParameterKind, ParameterTable, forward};
use zeroth_program::Settings;
use zeroth_program::Target;
use zeroth_program::{CompileError, Compiled};

use crate::{BatchShape, Batches, ModelFiles, Order, RowSizes, Schedule};
use zeroth_data::Samples;

/// What is trained, on what, and how.
#[derive(Debug)]
pub struct Job {
    /// The model's folder, where its weights are read from.
    pub folder: PathBuf,
    /// Its small files.
    pub files: ModelFiles,
    /// The model.
    pub model: ModelConfig,
    /// Its parameters.
    pub table: ParameterTable,
    /// What it is trained on.
    pub samples: Samples,
    /// Which sample comes when.
    pub order: Order,
    /// How a step is cut.
    pub shape: BatchShape,
    /// Steps of the run.
    pub steps: u64,
    /// The numbers of rows that micro-batches are rounded up to.
    pub row_sizes: Vec<u64>,
    /// What the passes read.
    pub settings: Settings,
    /// The optimizer's numbers.
    pub recipe: Recipe,
    /// The learning rate, step by step.
    pub schedule: Schedule,
    /// Whether norms and biases are decayed too.
    pub decays_all: bool,
    /// Where all chance comes from.
    pub seed: u64,
    /// What it is measured on, and how often.
    pub evaluation: Option<Evaluation>,
}

/// Data that is not trained on.
#[derive(Debug)]
pub struct Evaluation {
    /// The data.
    pub samples: Samples,
    /// Steps from one evaluation to the next; the last step is always followed by one.
    pub every: u64,
}

/// A job that cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The model has parts whose ops are not built.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The program cannot be made.
    #[error(transparent)]
    Compile(#[from] CompileError),
}

impl Job {
    /// The step of this job as a program, with a place for every buffer.
    pub fn compile(&self, target: Target) -> Result<Compiled, JobError> {
        let tokens = self.row_sizes.last().copied().unwrap_or(0);
        let graph = forward(&self.model, &self.table, Batch { tokens })?;
        Ok(Compiled::new(graph, self.shape.ranks, &self.settings, target, self.row_sizes.clone())?)
    }

    /// Finds the numbers of rows for the largest micro-batch there is, of training and of evaluation.
    pub fn size_rows(&mut self) {
        let mut largest = self.batches().largest_micro_batch(0, self.steps);
        if let Some(Evaluation { samples, .. }) = &self.evaluation {
            let batches = Batches::new(samples, Order::new(samples.count(), None), self.shape);
            let rounds = samples.count().get().div_ceil(self.shape.train_batch().max(1));
            largest = largest.max(batches.largest_micro_batch(0, rounds));
        }
        self.row_sizes = RowSizes::new(largest).all().iter().map(|size| *size as u64).collect();
    }

    /// The data, cut into steps.
    pub fn batches(&self) -> Batches<'_> {
        Batches::new(&self.samples, self.order, self.shape)
    }

    /// Whether the optimizer decays a parameter: matrices are, norms and biases only where that is asked for.
    pub(crate) fn decays(&self, compiled: &Compiled, param: ParamId) -> bool {
        let name = &compiled.graph.param(param).spec.name;
        let kind = self.table.iter().find(|parameter| parameter.name == *name).map(|found| found.kind);
        self.decays_all || kind.is_none_or(ParameterKind::decays)
    }
}
