//! A rank's phase and step, published for observers outside of the training loop: two words, written between steps.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What a rank is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RankPhase {
    /// Resolving, allocating, joining.
    #[default]
    Starting,
    /// Loading weights and optimizer state.
    Loading,
    /// Running steps.
    Training,
    /// Running an evaluation.
    Evaluating,
    /// Writing a checkpoint or the model.
    Saving,
}

impl RankPhase {
    const ALL: [Self; 5] = [Self::Starting, Self::Loading, Self::Training, Self::Evaluating, Self::Saving];

    /// The phase of a number, as `self as u8` gives it.
    pub(crate) fn of_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Its name in status files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Training => "training",
            Self::Evaluating => "evaluating",
            Self::Saving => "saving",
        }
    }
}

/// Zeroed bytes are valid: starting, at step 0.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct ProgressWords {
    phase: AtomicU32,
    step: AtomicU64,
}

impl ProgressWords {
    /// Relaxed: shown to people only.
    pub(crate) fn get(&self) -> (RankPhase, u64) {
        let phase = self.phase.load(Ordering::Relaxed) as usize;
        (RankPhase::ALL.get(phase).copied().unwrap_or_default(), self.step.load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, phase: RankPhase, step: Option<u64>) {
        self.phase.store(phase as u32, Ordering::Relaxed);
        if let Some(step) = step {
            self.step.store(step, Ordering::Relaxed);
        }
    }
}
