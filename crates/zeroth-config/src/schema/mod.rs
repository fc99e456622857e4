//! The schema: one table with every key. `check`, `explain`, the JSON Schema, `docs/config.md` and the typed values that
//! passes read ([`Values`]) all come from it.
//!
//! Compatible with DeepSpeed 0.19.6. A section's keys are one file; [`keys`] is all of them in the order in which
//! the page shows them.

#[macro_use]
mod field;

mod activation;
mod batch;
mod bounds;
mod build_key;
mod conditions;
mod key;
mod lr_scheduler_kwargs;
mod offload;
mod optimizer;
mod precision;
mod recompute;
mod reporting;
mod scheduler;
mod support;
mod without_effect;
mod zero;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::Value;

use crate::view::Switch;

pub use activation::{
    ActivationCheckpointing, DecayedParameters, FrozenPlacement, Gather, HF_SCHEDULES, UpdatedBy, Zeroth,
};
pub use batch::TopLevel;
pub use bounds::Bounds;
pub use key::{AutoRule, Condition, DefaultValue, Derivation, Effect, Key, KeyType, ReadBy};
pub use lr_scheduler_kwargs::{CurveType, LrSchedulerKwargs};
pub use offload::{OffloadDevice, OffloadOptimizer, OffloadParam};
pub use optimizer::{FOREIGN_OPTIMIZERS, OptimizerParams};
pub use precision::{Bf16, DataTypes, Fp16};
pub use recompute::Recompute;
pub use reporting::{Checkpoint, CsvMonitor, FlopsProfiler, Tensorboard};
pub use scheduler::{FOREIGN_SCHEDULERS, SCHEDULERS, Scheduler, SchedulerType, WarmupType};
pub use support::Support;
pub use zero::Zero;

const SECTIONS: &[&[Key]] = &[
    batch::KEYS,
    zero::KEYS,
    offload::PARAM_KEYS,
    offload::OPTIMIZER_KEYS,
    offload::AIO_KEYS,
    precision::FP16_KEYS,
    precision::BF16_KEYS,
    precision::DATA_TYPES_KEYS,
    precision::AUTOCAST_KEYS,
    optimizer::KEYS,
    scheduler::KEYS,
    activation::KEYS,
    activation::ZEROTH_KEYS,
    lr_scheduler_kwargs::KEYS,
    reporting::TENSORBOARD_KEYS,
    reporting::CSV_MONITOR_KEYS,
    reporting::SERVICE_KEYS,
    reporting::FLOPS_PROFILER_KEYS,
    reporting::COMMS_LOGGER_KEYS,
    reporting::CHECKPOINT_KEYS,
    without_effect::KEYS,
];

/// Declares the struct that holds the typed values of all sections.
macro_rules! values {
    ($( $section:ident: $type:ty ),* $(,)?) => {
        /// The values that passes and the trainer read, typed, by section: `values.zero.stage`.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Values {
            $(
                #[doc = concat!("The section `", stringify!($section), "`.")]
                pub $section: $type,
            )*
        }

        impl Values {
            /// Reads all sections; `value` finds the resolved value of a path.
            pub(crate) fn read<'a>(value: &impl Fn(&str) -> Option<&'a Value>) -> Self {
                Self { $( $section: <$type>::read(value) ),* }
            }
        }
    };
}

values! {
    top_level: TopLevel,
    zero: Zero,
    offload_param: OffloadParam,
    offload_optimizer: OffloadOptimizer,
    fp16: Fp16,
    bf16: Bf16,
    data_types: DataTypes,
    optimizer: OptimizerParams,
    scheduler: Scheduler,
    activation_checkpointing: ActivationCheckpointing,
    zeroth: Zeroth,
    lr_scheduler_kwargs: LrSchedulerKwargs,
    tensorboard: Tensorboard,
    csv_monitor: CsvMonitor,
    flops_profiler: FlopsProfiler,
    checkpoint: Checkpoint,
}

/// Every key, in the order of `docs/config.md`.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    SECTIONS.iter().flat_map(|section| section.iter())
}

/// The keys that a file may spell as `path`, whose parent sections are canonical. More than one where optimizer or
/// scheduler types have a parameter of the same name.
pub fn find(path: &str) -> impl Iterator<Item = &'static Key> {
    index().get(path).into_iter().flatten().copied()
}

/// Whether a file may spell a key so.
pub(crate) fn has(path: &str) -> bool {
    index().contains_key(path)
}

/// The state of a boolean key that a file leaves out: its default, or open where the command line decides.
pub(crate) fn absent_switch(path: &str) -> Switch {
    match find(path).next().map(|key| (key.auto, key.default)) {
        Some((None, DefaultValue::Bool(true))) => Switch::On,
        Some((None, DefaultValue::Bool(false))) => Switch::Off,
        _ => Switch::Open,
    }
}

/// The key that turns a section on: its `enabled` or its `device`.
pub fn switch_of(section: &Key) -> Option<&'static Key> {
    ["enabled", "device"].iter().find_map(|name| find(&format!("{}.{name}", section.path)).next())
}

/// Every spelling of a key: its canonical path, its other names, its other paths.
pub fn spellings(key: &Key) -> impl Iterator<Item = String> {
    let (parent, path) = (key.parent(), key.path);
    let join = move |name: &str| if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
    std::iter::once(path.to_owned())
        .chain(key.other_names.iter().map(move |name| join(name)))
        .chain(key.other_paths.iter().map(|location| (*location).to_owned()))
}

/// The names that may be suggested inside a section (`""` is the top level): of all its keys, other names included,
/// but of none that is refused there.
pub fn names_in(section: &str) -> impl Iterator<Item = &'static str> {
    keys()
        .filter(move |key| key.parent() == section && !matches!(key.effect, Effect::Refused(_)))
        .flat_map(|key| std::iter::once(key.name()).chain(key.other_names.iter().copied()))
        .chain(keys().flat_map(|key| key.other_paths.iter().copied()).filter_map(move |location| {
            let (parent, name) = location.rsplit_once('.').unwrap_or(("", location));
            (parent == section).then_some(name)
        }))
}

fn index() -> &'static BTreeMap<String, Vec<&'static Key>> {
    static INDEX: OnceLock<BTreeMap<String, Vec<&'static Key>>> = OnceLock::new();
    INDEX.get_or_init(|| {
        let mut index: BTreeMap<String, Vec<&'static Key>> = BTreeMap::new();
        for key in keys() {
            for spelling in spellings(key) {
                index.entry(spelling).or_default().push(key);
            }
        }
        index
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_says_what_it_does_and_lies_in_a_section_of_the_table() {
        for key in keys() {
            assert!(!key.does.is_empty(), "{} has no sentence", key.path);
            assert!(key.does.ends_with('.'), "{}: a sentence ends with a full stop", key.path);
            if !key.parent().is_empty() {
                let parent =
                    find(key.parent()).next().unwrap_or_else(|| panic!("{} has no section", key.path));
                assert_eq!(parent.kind, KeyType::Section, "{}", key.path);
            }
        }
    }

    #[test]
    fn a_key_that_works_has_a_reader_and_advice() {
        for key in keys() {
            let works = matches!(key.effect, Effect::Works | Effect::WhileEnabled);
            assert!(!works || key.reader != ReadBy::Nobody, "{} works, but who reads it?", key.path);
            if works && key.kind != KeyType::Section {
                assert!(!key.set.is_empty(), "{}: what should it be set to?", key.path);
            }
        }
    }

    #[test]
    fn only_typed_parameters_share_a_spelling() {
        for (spelling, keys) in index() {
            let mut types: Vec<&str> = keys.iter().flat_map(|key| key.types).copied().collect();
            types.sort_unstable();
            let count = types.len();
            types.dedup();
            assert_eq!(count, types.len(), "{spelling} is ambiguous for a type");
            assert!(
                keys.len() == 1 || keys.iter().all(|key| !key.types.is_empty()),
                "{spelling} stands twice"
            );
        }
    }

    #[test]
    fn defaults_are_within_their_own_bounds() {
        for key in keys() {
            let number = match key.default {
                DefaultValue::Int(value) => value as f64,
                DefaultValue::Float(value) => value,
                _ => continue,
            };
            assert!(key.bounds.allow(number), "{}: its default {number} is out of bounds", key.path);
        }
    }

    #[test]
    fn the_documented_count_of_keys_is_complete() {
        // Every key of reference DeepSpeed 0.19.6 that a file of ours can hold; a removal must be meant.
        assert!(keys().count() >= 230, "{}", keys().count());
    }
}
