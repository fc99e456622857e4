//! What a job's config is resolved with besides its file: flags, model and ranks.

use serde_json::{Map, Value};
use zeroth_config::checked::CheckedConfig;
use zeroth_config::resolve::{
    Flags, ModelFacts, ResolveError, ResolveRequest, Resolved, fill_steps, resolve,
};
use zeroth_model::{ModelConfig, hidden_size_for_auto};

use super::request::JobRequest;

/// Flags, model and ranks of a job, which resolve its config.
#[derive(Debug)]
pub(super) struct ConfigContext {
    flags: Flags,
    facts: ModelFacts,
    ranks: u64,
}

impl ConfigContext {
    /// Of a request for a model with this config.json.
    pub(super) fn new(
        request: &JobRequest,
        model: &ModelConfig,
        map: &Map<String, Value>,
        ranks: u64,
    ) -> Self {
        let mut flags = request.flags.clone();
        if request.precision_of_model {
            flags.precision = model.dtype;
        }
        let facts = ModelFacts { hidden_size: hidden_size_for_auto(map), blocks: Some(model.blocks()) };
        Self { flags, facts, ranks }
    }

    /// Of a number of parameters instead of a model: no buffers are counted, so the size of "auto" buckets does not matter.
    pub(super) fn without_model(request: &JobRequest, ranks: u64) -> Self {
        let facts = ModelFacts { hidden_size: Some(0), blocks: None };
        Self { flags: request.flags.clone(), facts, ranks }
    }

    /// Every value of the config, but for those that wait for the number of steps.
    pub(super) fn resolve(&self, checked: &CheckedConfig) -> Result<Resolved, ResolveError> {
        resolve(&self.request(checked))
    }

    /// Fills in what waits for the number of steps.
    pub(super) fn fill_steps(
        &self,
        checked: &CheckedConfig,
        steps: u64,
        resolved: &mut Resolved,
    ) -> Result<(), ResolveError> {
        fill_steps(&self.request(checked), steps, resolved)
    }

    fn request<'a>(&'a self, checked: &'a CheckedConfig) -> ResolveRequest<'a> {
        let (Self { flags, facts, ranks }, file) = (self, &checked.report.values);
        ResolveRequest { file, flags, ranks: *ranks, model: Some(*facts), steps: None }
    }
}
