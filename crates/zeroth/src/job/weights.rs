//! Checks the weights that a run starts from, as far as they are known without reading all of them.

use zeroth_model::WeightsError;
use zeroth_train::checkpoint::DistillEntry;
use zeroth_train::{
    AdapterBaseError, Distillation, GivenBase, InitialWeights, LoraJob, LoraWeights, LoraWeightsError,
    ResumeError, TeacherError, TeacherWeights, check_adapter_base, check_base, check_same_distillation,
};

use super::resolved_job::ResolvedJob;

/// Weights that the run cannot start from.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum JobWeightsError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Lora(#[from] LoraWeightsError),
    #[error("--adapter")]
    Adapter(#[source] AdapterBaseError),
    #[error(transparent)]
    Resume(#[from] ResumeError),
    #[error(transparent)]
    Teacher(#[from] TeacherError),
    #[error("--teacher")]
    TeacherWeights(#[source] WeightsError),
}

impl ResolvedJob {
    /// Checks the weights of the model, its base or its teacher, and, where a run is resumed, that base, teacher and loss are
    /// those of the checkpoint. Returns notes.
    pub fn check_weights(&self) -> Result<Vec<String>, JobWeightsError> {
        let (job, checkpoint) = (&self.job, self.checkpoint.as_ref());
        let mut notes = match (&job.lora, checkpoint) {
            (Some(lora), _) => self.check_adapters(lora)?,
            // The headers against the model once, instead of on every rank.
            (None, None) => InitialWeights::open(&job.folder, &job.model, &job.table, job.seed)?.notes(),
            (None, Some(_)) => Vec::new(),
        };
        notes.extend(self.check_teacher()?);
        Ok(notes)
    }

    fn check_adapters(&self, lora: &LoraJob) -> Result<Vec<String>, JobWeightsError> {
        let (job, checkpoint) = (&self.job, self.checkpoint.as_ref());
        let weights = LoraWeights::open(job, lora, checkpoint.is_some())?;
        if let Some(checkpoint) = checkpoint {
            check_base(checkpoint, &lora.base, |saved| &saved.sample, &weights.sample()?)?;
        }
        let mut notes = weights.notes(lora);
        if let Some(adapter) = lora.adapter.as_ref().filter(|_| checkpoint.is_none()) {
            let given = GivenBase { name: &lora.base, folder: &job.folder };
            let note = check_adapter_base(adapter, given, lora.allows_other_base, || weights.sample());
            notes.extend(note.map_err(JobWeightsError::Adapter)?);
        }
        Ok(notes)
    }

    fn check_teacher(&self) -> Result<Vec<String>, JobWeightsError> {
        let job = &self.job;
        let mut entry = job.objective.distillation().map(DistillEntry::of);
        let mut notes = Vec::new();
        let model = job.objective.distillation().and_then(Distillation::model);
        if let (Some(model), Some(entry)) = (model, &mut entry) {
            let weights = TeacherWeights::open(model, job.seed)?;
            notes = weights.notes();
            entry.teacher.sample = weights.sample().map_err(JobWeightsError::TeacherWeights)?;
        }
        if let Some(checkpoint) = self.checkpoint.as_ref() {
            check_same_distillation(checkpoint, entry.as_ref())?;
        }
        Ok(notes)
    }
}
