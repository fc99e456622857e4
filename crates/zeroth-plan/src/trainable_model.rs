//! What plans compile: a model that can be trained, and the devices to train it on.

use std::sync::Arc;

use zeroth_kernel::Target;
use zeroth_machine::DeviceKind;
use zeroth_model::{BatchTokens, ForwardError, ModelConfig, Objective, ParameterTable};

use crate::{PlannedTeacher, TrainType};

/// A model that can be trained, and the devices to train it on.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainableModel {
    pub(crate) config: ModelConfig,
    table: ParameterTable,
    /// The same with LoRA adapters.
    adapted: Option<ParameterTable>,
    pub(crate) device: PlanDevice,
    pub(crate) teacher: Option<PlannedTeacher>,
}

/// The devices of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanDevice {
    /// Their kind.
    pub kind: DeviceKind,
    /// CPUs that the ranks share.
    pub cpus: usize,
    /// CPU threads of a rank, if they are given.
    pub threads: Option<usize>,
}

impl TrainableModel {
    /// Refuses models whose forward is not implemented. `adapted` is the table with LoRA adapters; without it LoRA is
    /// estimated.
    pub fn new(
        config: ModelConfig,
        table: ParameterTable,
        adapted: Option<ParameterTable>,
        device: PlanDevice,
    ) -> Result<Arc<Self>, ForwardError> {
        Self::distilled(config, table, adapted, device, None)
    }

    /// As [`Self::new`], of a model that is distilled.
    pub fn distilled(
        config: ModelConfig,
        table: ParameterTable,
        adapted: Option<ParameterTable>,
        device: PlanDevice,
        teacher: Option<PlannedTeacher>,
    ) -> Result<Arc<Self>, ForwardError> {
        let model = Self { config, table, adapted, device, teacher };
        let table = model.adapted.as_ref().unwrap_or(&model.table);
        model.objective().forward(&model.config, table, BatchTokens::of_tokens(1))?;
        Ok(Arc::new(model))
    }

    pub(crate) fn objective(&self) -> Objective<'_> {
        self.teacher.as_ref().map_or(Objective::CrossEntropy, PlannedTeacher::objective)
    }

    pub(crate) fn table(&self, train_type: TrainType) -> Option<&ParameterTable> {
        match train_type {
            TrainType::Full => Some(&self.table),
            TrainType::Lora => self.adapted.as_ref(),
        }
    }

    /// The devices.
    pub fn device(&self) -> PlanDevice {
        self.device
    }

    pub(crate) fn shares_host_memory(&self) -> bool {
        self.device.kind == DeviceKind::Cpu
    }
}

impl PlanDevice {
    /// The compiler's target for each of `ranks` ranks.
    pub fn target(self, ranks: u64) -> &'static dyn Target {
        let share = (self.cpus as u64 / ranks.max(1)).max(1) as usize;
        self.kind.target(self.threads.unwrap_or(share))
    }
}
