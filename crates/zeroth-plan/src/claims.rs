//! Claims about ZeRO (from the ZeRO-3 guide, the ZeRO-2 guide and the ZeRO primer), and the number of GPUs from which
//! each holds.
//!
//! Everything is computed from the closed form, model states only, with and without fp32 master weights.

use crate::advice::BY_GPU;
use crate::deepspeed::{self, Cluster};
use crate::format::gpus;
use crate::state_bytes::{StateBytes, smallest_count, usual_adapters};
use crate::{PlanRequest, States, TrainType, volume_in_parameters};
use serde::Serialize;
use zeroth_base::{format_bytes, format_count};

/// A claim and where it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Claim {
    pub claim: String,
    pub source: &'static str,
    /// What `holds_from` counts.
    pub counted_in: CountedIn,
    /// With fp32 master weights: 16 bytes per trained parameter.
    pub master: ClaimRange,
    /// Without: 12 bytes.
    pub plain: ClaimRange,
    /// Further remarks.
    pub note: String,
}

/// The count from which a claim holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClaimRange {
    /// The smallest count; `None` if it never holds.
    pub holds_from: Option<u64>,
    /// The limit for large counts.
    pub limit: String,
}

/// The unit of a claim's count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CountedIn {
    /// GPUs, one rank each.
    Gpus,
    /// Micro-batches of one optimizer step.
    MicroBatches,
}

const B: u64 = 1_000_000_000;
const GB: u64 = 1_000_000_000;

/// Qwen3-30B-A3B, counted from its config.
const QWEN3_30B_A3B: u64 = 30_532_122_624;

/// All claims, in the order of the documents.
pub fn claims() -> Vec<Claim> {
    let mut claims = Vec::new();
    for (stage, factor) in [(1, 4), (2, 8), (3, 64)] {
        claims.push(saving(
            "the ZeRO-2 and ZeRO-3 guides",
            format!("ZeRO-{stage} saves {factor}x"),
            stage,
            factor,
        ));
    }
    for (stage, factor, percent) in [(1, 4, "25%"), (2, 8, "12.5%"), (3, 64, "1.56%")] {
        let claim = format!("ZeRO-{stage} needs {percent} of the memory (1/{factor})");
        claims.push(saving("the ZeRO-3 guide", claim, stage, factor));
    }
    for (stage, factor) in [(1, 4), (2, 8), (3, 16)] {
        let mut claim =
            saving("the ZeRO primer", format!("ZeRO-{stage} saves about {factor}x"), stage, factor);
        let on_3 = |stage| StateBytes::of(States::Plain, 8 * B, stage, TrainType::Full).times(3) as f64;
        let really = on_3(0) / on_3(stage);
        claim.note =
            format!("on its picture's 3 GPUs (8B, no master copy) it is {really:.2}x; {}", claim.note);
        claims.push(claim);
    }
    claims.extend([(0, 96), (1, 45), (2, 32), (3, 19)].map(|(stage, gb)| table_row(stage, gb)));
    for row in BY_GPU {
        let what = format!("{} of {}", row.says, format_count(row.params));
        claims.push(on_gpu(&what, row.gpu_memory, row.params, row.stage, row.train_type));
    }
    claims.extend(cases());
    claims.push(communication_grows());
    claims
}

fn both(holding: impl Fn(States) -> ClaimRange) -> (ClaimRange, ClaimRange) {
    (holding(States::Master), holding(States::Plain))
}

/// Whether a stage's saving is at least `twice / 2`, in integers: the factors are reached exactly or not at all.
fn saves(ranks: u64, states: States, stage: u8, twice: u64) -> bool {
    let total = |stage| StateBytes::of(states, 8 * B, stage, TrainType::Full).times(ranks);
    2 * total(0) >= u128::from(twice) * total(stage)
}

fn saving(source: &'static str, claim: String, stage: u8, factor: u64) -> Claim {
    let (master, plain) = both(|states| {
        let each = states.bytes_per_parameter(1, 1);
        let limit = match stage {
            1 => format!("{}x", each.total() / (each.parameters + each.gradients)),
            2 => format!("{}x", each.total() / each.parameters),
            _ => "none".to_owned(),
        };
        ClaimRange { holds_from: smallest_count(|ranks| saves(ranks, states, stage, 2 * factor)), limit }
    });
    let rounds = |states| match smallest_count(|ranks| saves(ranks, states, stage, 2 * factor - 1)) {
        Some(count) => format!("rounds to {factor}x from {} on", gpus(count)),
        None => format!("never rounds to {factor}x"),
    };
    let note =
        format!("with a master copy it {}, without it {}", rounds(States::Master), rounds(States::Plain));
    Claim { claim, source, counted_in: CountedIn::Gpus, master, plain, note }
}

/// The primer's table for 8B on 5 GPUs, in whole GB.
fn table_row(stage: u8, gb: u64) -> Claim {
    let name = if stage == 0 { "no ZeRO".to_owned() } else { format!("ZeRO-{stage}") };
    let split = |states| StateBytes::of(states, 8 * B, stage, TrainType::Full);
    let (master, plain) = both(|states| ClaimRange {
        // It rounds to the table's figure or less.
        holds_from: smallest_count(|ranks| split(states).is_within(ranks, gb * GB + GB / 2 - 1)),
        limit: split(states).limit(),
    });
    let (exactly, with_master) = (split(States::Plain).on(5), split(States::Master).on(5));
    Claim {
        claim: format!("8B on 5 GPUs, {name}: {gb} GB a GPU"),
        source: "the ZeRO primer",
        counted_in: CountedIn::Gpus,
        master,
        plain,
        note: format!("{exactly} on 5 GPUs; with a master copy {with_master}"),
    }
}

fn on_gpu(what: &str, gpu_memory: u64, params: u64, stage: u8, train_type: TrainType) -> Claim {
    let (master, plain) = both(|states| {
        let split = StateBytes::of(states, params, stage, train_type);
        ClaimRange {
            holds_from: smallest_count(|ranks| split.is_within(ranks, gpu_memory)),
            limit: split.limit(),
        }
    });
    let note = match train_type {
        TrainType::Full => "states only: activations and buffers come on top".to_owned(),
        TrainType::Lora => {
            format!("states only, LoRA counted as {} parameters", format_count(usual_adapters(params)))
        }
    };
    let claim = format!("{what} fits {} GPUs", format_bytes(gpu_memory));
    Claim { claim, source: "the ZeRO primer", counted_in: CountedIn::Gpus, master, plain, note }
}

/// The primer's two cases, both on 5 GPUs of 44 GB.
fn cases() -> [Claim; 3] {
    let gpu_memory = 44 * GB;
    let mut zero2 = on_gpu("ZeRO-2, all parameters of 8B", gpu_memory, 8 * B, 2, TrainType::Full);
    let on_5 = |states| StateBytes::of(states, 8 * B, 2, TrainType::Full).on(5);
    let estimated = deepspeed::zero2(8 * B, Cluster { gpus_per_node: 5, nodes: 1 }, false).gpu_bytes;
    zero2.note = format!(
        "its case 1 says that 5 are not enough, its table that they are: {} with a master copy and {} without fit, \
         before activations; {} as DeepSpeed estimates do not",
        on_5(States::Master),
        on_5(States::Plain),
        format_bytes(estimated)
    );
    let zero3 = on_gpu("ZeRO-3, all parameters of 8B", gpu_memory, 8 * B, 3, TrainType::Full);
    let mut lora = on_gpu("ZeRO-2 + LoRA of Qwen3-30B-A3B", gpu_memory, QWEN3_30B_A3B, 2, TrainType::Lora);
    lora.note = format!(
        "its case 2 says that 5 are enough, but DeepSpeed's ZeRO-2 keeps all 16-bit weights on every GPU, {} alone; \
         frozen weights that are sharded at stage 2 too (`zeroth.frozen`) take {} on each of 5, and by the compiled step \
         of `zeroth plan` they are",
        format_bytes(2 * QWEN3_30B_A3B),
        format_bytes((2 * QWEN3_30B_A3B).div_ceil(5))
    );
    [zero2, zero3, lora]
}

/// "ZeRO-1 < ZeRO-2 < ZeRO-3" in bytes sent.
fn communication_grows() -> Claim {
    let volume = |accumulation, stage| {
        volume_in_parameters(&PlanRequest { accumulation, ..PlanRequest::new(8 * B, 5) }, stage)
    };
    let grows = |k| volume(k, 1) < volume(k, 2) && volume(k, 2) < volume(k, 3);
    let (master, plain) =
        both(|_| ClaimRange { holds_from: smallest_count(grows), limit: "2 : k+1 : 3k".to_owned() });
    Claim {
        claim: "communication: ZeRO-1 < ZeRO-2 < ZeRO-3".into(),
        source: "the ZeRO primer",
        counted_in: CountedIn::MicroBatches,
        master,
        plain,
        note: format!(
            "without accumulation ZeRO-1 sends as much as ZeRO-2: {}Ψ and {}Ψ, ZeRO-3 {}Ψ; with 16 micro-batches {}Ψ, \
             {}Ψ and {}Ψ. ZeRO-3 has no all-gather after the update",
            volume(1, 1),
            volume(1, 2),
            volume(1, 3),
            volume(16, 1),
            volume(16, 2),
            volume(16, 3)
        ),
    }
}
