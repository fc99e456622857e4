//! Common advice (the ZeRO primer) by model size, by GPU, and as an order of presets to try, each checked against the
//! arithmetic.

use crate::format::{gpus, pair};
use crate::row::{Row, needs};
use crate::state_bytes::{StateBytes, smallest_count, usual_adapters};
use crate::{OffloadedStates, PlanRequest, TrainType};
use serde::Serialize;
use zeroth_base::{format_bytes, format_count};

const SOURCE: &str = "the ZeRO primer";

/// Advice for a range of model sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeAdvice {
    /// The smallest number of parameters.
    pub from: u64,
    /// A description of the range.
    pub range: &'static str,
    /// The advice.
    pub says: &'static str,
    /// The corresponding preset.
    pub preset: &'static str,
    /// Why this preset, where the advice leaves a choice.
    pub why: Option<&'static str>,
}

/// Advice for a GPU size and a model size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuAdvice {
    /// Bytes of GPU memory.
    pub gpu_memory: u64,
    /// Parameters of the model.
    pub params: u64,
    /// The advice.
    pub says: &'static str,
    /// The corresponding stage.
    pub stage: u8,
    /// What is trained.
    pub train_type: TrainType,
}

/// A piece of advice and what the arithmetic says about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Advice {
    pub source: &'static str,
    pub says: String,
    /// The result of the arithmetic.
    pub arithmetic: String,
    /// Whether they agree; `None` without a budget.
    pub agrees: Option<bool>,
}

/// The presets to try in order until one fits; after the last, LoRA.
pub const TRY_ORDER: [&str; 3] = ["zero2", "zero3", "zero3_offload"];

const B: u64 = 1_000_000_000;
const GB: u64 = 1_000_000_000;

/// The advice below all ranges of [`BY_SIZE`].
const SMALLEST: SizeAdvice = SizeAdvice {
    from: 0,
    range: "below 7B",
    says: "no DeepSpeed or ZeRO-1",
    preset: "zero1",
    why: Some("it needs no more memory than none and sends the same"),
};

/// In descending order: the first whose `from` is reached applies.
const BY_SIZE: [SizeAdvice; 4] = [
    SizeAdvice {
        from: 70 * B + 1,
        range: "above 70B",
        says: "ZeRO-3 with offload",
        preset: "zero3_offload",
        why: None,
    },
    SizeAdvice { from: 30 * B, range: "between 30B and 70B", says: "ZeRO-3", preset: "zero3", why: None },
    SizeAdvice {
        from: 13 * B,
        range: "between 13B and 30B",
        says: "ZeRO-2 or ZeRO-3",
        preset: "zero3",
        why: Some("ZeRO-2 keeps 26 to 60 GB of parameters on every device, more than most have"),
    },
    SizeAdvice { from: 7 * B, range: "between 7B and 13B", says: "ZeRO-2", preset: "zero2", why: None },
];

pub(crate) const BY_GPU: [GpuAdvice; 5] = [
    GpuAdvice {
        gpu_memory: 24 * GB,
        params: 7 * B,
        says: "ZeRO-2 + LoRA",
        stage: 2,
        train_type: TrainType::Lora,
    },
    GpuAdvice {
        gpu_memory: 40 * GB,
        params: 8 * B,
        says: "ZeRO-2, all parameters",
        stage: 2,
        train_type: TrainType::Full,
    },
    GpuAdvice {
        gpu_memory: 40 * GB,
        params: 30 * B,
        says: "ZeRO-3 + LoRA",
        stage: 3,
        train_type: TrainType::Lora,
    },
    GpuAdvice {
        gpu_memory: 80 * GB,
        params: 30 * B,
        says: "ZeRO-2, all parameters",
        stage: 2,
        train_type: TrainType::Full,
    },
    GpuAdvice {
        gpu_memory: 80 * GB,
        params: 70 * B,
        says: "ZeRO-3 + LoRA",
        stage: 3,
        train_type: TrainType::Lora,
    },
];

/// The advice for a model of this size.
pub fn advice_by_size(params: u64) -> SizeAdvice {
    BY_SIZE.into_iter().find(|advice| params >= advice.from).unwrap_or(SMALLEST)
}

/// The advice for a GPU size and a model: the entry with the largest GPU that is no larger, and the nearest model size,
/// if that is within a quarter.
pub fn advice_by_gpu(gpu_memory: u64, params: u64) -> Option<&'static GpuAdvice> {
    let distance = |advice: &GpuAdvice| advice.params.abs_diff(params);
    let near = BY_GPU
        .iter()
        .filter(|advice| advice.gpu_memory <= gpu_memory && distance(advice) <= advice.params / 4);
    near.min_by_key(|advice| (u64::MAX - advice.gpu_memory, distance(advice)))
}

/// The advice for a job, each piece checked against the plan.
pub(crate) fn compared(request: &PlanRequest, rows: &[Row]) -> Vec<Advice> {
    let mut advice = vec![by_size(request, rows)];
    if let Some(gpu_memory) = request.device_memory {
        advice.extend(
            advice_by_gpu(gpu_memory, request.params).map(|row| by_gpu(request, rows, gpu_memory, row)),
        );
        // Only planned presets can be tried.
        if TRY_ORDER.iter().all(|rung| rows.iter().any(|row| row.preset == *rung)) {
            advice.push(ladder(rows));
        }
    }
    advice
}

fn by_size(request: &PlanRequest, rows: &[Row]) -> Advice {
    let size = advice_by_size(request.params);
    let row = rows.iter().find(|row| row.preset == size.preset);
    let arithmetic = match row {
        Some(row) => {
            let verdict = match row.fits {
                Some(true) => ", which fits",
                Some(false) => ", which does not fit",
                None => "",
            };
            format!("{}{verdict}", needs(request, row))
        }
        None => format!("{} is not among the planned presets", size.preset),
    };
    Advice {
        source: SOURCE,
        says: format!("{}: {}", size.range, size.says),
        arithmetic,
        agrees: row.and_then(|row| row.fits),
    }
}

fn by_gpu(request: &PlanRequest, rows: &[Row], gpu_memory: u64, advice: &GpuAdvice) -> Advice {
    let job = PlanRequest {
        train_type: advice.train_type,
        adapter_params: request.adapter_params.or_else(|| Some(usual_adapters(request.params))),
        ..request.clone()
    };
    let split = |ranks| StateBytes::of_job(&PlanRequest { ranks, ..job.clone() }, advice.stage);
    let from = smallest_count(|ranks| split(ranks).is_within(ranks, gpu_memory));
    let by_states = match from {
        Some(count) => {
            format!("by states alone it holds from {} on ({} here)", gpus(count), gpus(request.ranks))
        }
        None => format!("by states alone it never holds: {} stay on every GPU", split(request.ranks).limit()),
    };
    // A planned row counts more than the states, if it describes the same job.
    let row = rows.iter().find(|row| {
        (row.stage, row.offload, row.train_type) == (advice.stage, OffloadedStates::None, advice.train_type)
    });
    let row_fits = row.and_then(|row| row.fits);
    let arithmetic = match row {
        Some(row) => {
            let (need, have) = pair(row.device_needs(), gpu_memory);
            format!("{by_states}; with everything counted {} needs {need} of {have}", row.preset)
        }
        None => by_states,
    };
    Advice {
        source: SOURCE,
        says: format!(
            "{} GPU, {} model: {}",
            format_bytes(advice.gpu_memory),
            format_count(advice.params),
            advice.says
        ),
        arithmetic,
        agrees: Some(row_fits.unwrap_or_else(|| from.is_some_and(|count| count <= request.ranks))),
    }
}

fn ladder(rows: &[Row]) -> Advice {
    let fitting = TRY_ORDER
        .iter()
        .find(|preset| rows.iter().any(|row| row.preset == **preset && row.fits == Some(true)));
    let earlier = rows.iter().any(|row| row.preset == "zero1" && row.fits == Some(true));
    let arithmetic = match fitting {
        Some(preset) if earlier => {
            format!("{preset} is the first rung that fits, but zero1 fits already and sends no more")
        }
        Some(preset) => format!("{preset} is the first rung that fits"),
        None => "no rung fits".to_owned(),
    };
    Advice {
        source: SOURCE,
        says: "try ZeRO-2; out of memory: ZeRO-3; still: ZeRO-3 with offload; or LoRA".into(),
        arithmetic,
        agrees: Some(fitting.is_some()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_get_the_primers_presets() {
        for (params, preset) in [
            (0, "zero1"),
            (7 * B - 1, "zero1"),
            (7 * B, "zero2"),
            (13 * B - 1, "zero2"),
            (13 * B, "zero3"),
            (30 * B, "zero3"),
            (70 * B, "zero3"),
            (70 * B + 1, "zero3_offload"),
            (u64::MAX, "zero3_offload"),
        ] {
            assert_eq!(advice_by_size(params).preset, preset, "{params}");
        }
    }

    #[test]
    fn gpus_between_the_rows_get_the_next_smaller_gpus_advice() {
        let says = |gpu_memory, params| {
            advice_by_gpu(gpu_memory, params).map(|advice| (advice.gpu_memory / GB, advice.says))
        };
        assert_eq!(says(44 * GB, 8_190_735_360), Some((40, "ZeRO-2, all parameters")));
        assert_eq!(says(44 * GB, 30_532_122_624), Some((40, "ZeRO-3 + LoRA")));
        assert_eq!(says(24 * GB, 7 * B), Some((24, "ZeRO-2 + LoRA")));
        assert_eq!(says(16 * GB, 7 * B), None);
        assert_eq!(says(80 * GB, B), None);
    }
}
