//! What a job trains for: the one place that lists the losses of a run.

use zeroth_model::Objective;

use crate::distill::Distillation;

/// What a job trains for.
#[derive(Debug, Default)]
pub enum JobObjective {
    /// The labels of its data.
    #[default]
    CrossEntropy,
    /// The labels, and a teacher.
    Distillation(Box<Distillation>),
}

impl JobObjective {
    /// The same, for a graph.
    pub fn of_model(&self) -> Objective<'_> {
        match self {
            Self::CrossEntropy => Objective::CrossEntropy,
            Self::Distillation(distillation) => Objective::Distillation(distillation.distilled()),
        }
    }

    /// The distillation, where it is one.
    pub const fn distillation(&self) -> Option<&Distillation> {
        match self {
            Self::CrossEntropy => None,
            Self::Distillation(distillation) => Some(distillation),
        }
    }
}

impl From<Option<Distillation>> for JobObjective {
    fn from(distillation: Option<Distillation>) -> Self {
        distillation.map_or(Self::CrossEntropy, |distillation| Self::Distillation(Box::new(distillation)))
    }
}
