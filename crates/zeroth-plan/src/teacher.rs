//! The teacher of a planned job, and the changes of it that fit a budget.

use zeroth_graph::DistillSpec;
use zeroth_kernel::ByTier;
use zeroth_model::{Distilled, ModelConfig, Objective, ParameterTable, TeacherForward};
use zeroth_program::TeacherPlacement;

use crate::budget::Budget;
use crate::sizing::{Sizing, SizingError};

/// The tokens of a cache that is suggested.
const CACHED: u64 = 20;

/// What a planned model is distilled from.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTeacher {
    /// The divergence.
    pub spec: DistillSpec,
    /// Its share of the loss.
    pub alpha: f64,
    /// Where the teacher's distributions come from.
    pub source: PlannedSource,
    /// Where its parameters are; `None`: where each preset has frozen ones.
    pub placement: Option<TeacherPlacement>,
}

/// Where the distributions of a planned teacher come from.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum PlannedSource {
    /// The teacher itself.
    Weights {
        config: Box<ModelConfig>,
        /// Its parameter table, which says what is kept in nf4.
        table: ParameterTable,
    },
    Cache {
        /// Tokens kept at every token.
        k: u64,
        /// The teacher's vocabulary.
        vocab: u64,
        /// Whether the missing mass is one more bucket.
        tail: bool,
    },
}

impl PlannedTeacher {
    /// What a model is trained for with this teacher.
    pub fn objective(&self) -> Objective<'_> {
        let teacher = match &self.source {
            PlannedSource::Weights { config, table } => TeacherForward::Weights { config, table },
            PlannedSource::Cache { k, vocab, tail } => {
                TeacherForward::TopK { k: *k, vocab: *vocab, tail: *tail }
            }
        };
        Objective::Distillation(Distilled { teacher, spec: self.spec, alpha: self.alpha })
    }
}

impl Sizing<'_> {
    /// Single changes of the teacher that fit, each with the device and host bytes of a rank.
    pub(crate) fn teacher_remedies(&self, budget: Budget) -> Result<Vec<(String, ByTier<u64>)>, SizingError> {
        let Objective::Distillation(distilled) = self.objective else { return Ok(Vec::new()) };
        let TeacherForward::Weights { config, table } = distilled.teacher else { return Ok(Vec::new()) };
        let mut quantized = table.clone();
        quantized.units.iter_mut().flat_map(|unit| &mut unit.parameters).for_each(|p| p.trained = false);
        quantized.quantize();
        let from = |teacher| {
            let objective = Objective::Distillation(Distilled { teacher, ..distilled });
            Sizing { objective, ..self.clone() }
        };
        let mut changes = Vec::new();
        if table.iter().all(|parameter| !parameter.quantized) {
            let teacher = TeacherForward::Weights { config, table: &quantized };
            changes.push(("--teacher-quantize nf4", from(teacher)));
        }
        if !self.settings.teacher.offloaded {
            let mut sizing = self.clone();
            sizing.settings.teacher = TeacherPlacement { sharded: true, offloaded: true };
            changes.push(("--teacher-deepspeed zero3_offload", sizing));
        }
        let vocab = config.vocab;
        let cached = TeacherForward::TopK { k: CACHED.min(vocab), vocab, tail: true };
        changes.push(("--kd-cache, of `zeroth distill cache`", from(cached)));
        let mut fitting = Vec::new();
        for (name, sizing) in changes {
            let compiled = sizing.compile()?;
            if budget.shortfall(sizing.data, &compiled).is_none() {
                fitting.push((name.to_owned(), budget.needed(sizing.data, &compiled)));
            }
        }
        Ok(fitting)
    }
}
