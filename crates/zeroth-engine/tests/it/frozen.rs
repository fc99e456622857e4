//! Models of which some parameters are frozen: every program trains them to the same bits, backward computes the gradients of
//! the trained parameters alone, and a frozen parameter takes nothing but its weights. `golden.rs` compares the half-frozen
//! models with PyTorch, and LoRA adapters over frozen models with PEFT.

mod distillation;
mod nf4;

use zeroth_base::DType;
use zeroth_kernel::{Kernel, Tier};
use zeroth_program::{
    Binding, BufferId, Category, Compiled, FrozenPlacement, Gather, Lowering, Offload, Recompute, Settings,
    Storage, Types, Work, plan_memory,
};

use crate::job::{BF16, F32, Golden, Outcome, ROOMY, Setup, is_full};

/// A model with frozen matrices in nf4.
pub(crate) fn model_in_nf4() -> Golden {
    nf4::quantized(nf4::model())
}

/// A distillation, and the same with its teacher in nf4.
pub(crate) fn dense_and_nf4_teachers() -> [Golden; 2] {
    [false, true].map(distillation::golden)
}

const HALF_FROZEN: [&str; 2] = ["qwen3-half-frozen", "llama-biases-half-frozen"];

const OPTIMIZER: Offload = Offload { optimizer: Some(1.0), sub_group_size: 4096, ..Offload::NOTHING };
const BOTH: Offload = Offload { parameters: Some(u64::MAX), ..OPTIMIZER };
const BLOCK: Recompute = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };

/// (ranks, accumulation, micro-batch): batches of golden runs.
const SPLITS: [(u64, u64, u64); 6] = [(1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 4, 2), (3, 1, 4), (5, 4, 1)];

/// Stages 0 to 3 with and without offload and recomputation, with frozen parameters sharded and not; with sharded parameters on
/// several ranks also with gathered copies.
fn programs(ranks: u64, accumulation: u64, micro_batch: u64, types: Types) -> Vec<Setup> {
    let mut all = Vec::new();
    for stage in 0..=3 {
        for offload in [Offload::NOTHING, OPTIMIZER, BOTH] {
            // Of each pair of placement and recomputation one at a time.
            for (frozen, recompute) in [
                (FrozenPlacement::ByStage, Recompute::Nothing),
                (FrozenPlacement::ByStage, BLOCK),
                (FrozenPlacement::Sharded, BLOCK),
                (FrozenPlacement::Whole, Recompute::Nothing),
            ] {
                let overlap = recompute == BLOCK;
                let base = Settings { stage, accumulation, types, offload, recompute, overlap, ..ROOMY };
                let settings = Settings { frozen, ..base };
                let setup = Setup { ranks, micro_batch, settings, steps: 3, sizes: 3, ..Setup::default() };
                // Where it is not another program, by-stage placement has it already.
                if frozen != FrozenPlacement::ByStage && (frozen == FrozenPlacement::Sharded) == (stage == 3)
                {
                    continue;
                }
                all.push(setup);
                if (stage == 3 || frozen == FrozenPlacement::Sharded) && ranks > 1 {
                    let settings = Settings { gather: Some(Gather::Copy), persistence: 30, ..settings };
                    all.push(Setup { settings, ..setup });
                }
            }
        }
    }
    all
}

fn assert_same(expected: &Outcome, found: &Outcome, what: &str) {
    let bits = |weights: &[Vec<f32>]| weights.iter().flatten().map(|w| w.to_bits()).collect::<Vec<_>>();
    let numbers = |outcome: &Outcome| -> Vec<_> {
        outcome.records.iter().map(|record| [record.loss, record.norm].map(f64::to_bits)).collect()
    };
    assert_eq!(numbers(found), numbers(expected), "{what}");
    assert!(bits(&found.gradients) == bits(&expected.gradients), "{what}: gradients differ");
    assert!(bits(&found.weights) == bits(&expected.weights), "{what}: weights differ");
}

/// Every fifth program of each split, others for the next; all of them with `ZEROTH_FULL=1`.
fn every_program_trains_to_the_same_bits(types: Types) {
    let is_full = is_full();
    let splits = HALF_FROZEN.into_iter().flat_map(|name| SPLITS.map(|split| (name, split)));
    for (number, (name, (ranks, accumulation, micro_batch))) in splits.enumerate() {
        let golden = Golden::named(name);
        let setups = programs(ranks, accumulation, micro_batch, types);
        // Stages 0 and 1 accumulate before they reduce, stages 2 and 3 after.
        let (late, early): (Vec<Setup>, Vec<Setup>) =
            setups.iter().partition(|setup| accumulation == 1 || setup.settings.stage < 2);
        for setups in [late, early].into_iter().filter(|setups| !setups.is_empty()) {
            let expected = golden.train(&setups[0]);
            for (at, setup) in setups.iter().enumerate().filter(|(at, _)| is_full || (at + number) % 5 == 0) {
                // The chaos executor runs instructions in any order that their waits allow.
                let chaos = (at % 2 == 1).then_some(500 + at as u64);
                let setup = Setup { chaos, ..*setup };
                assert_same(&expected, &golden.train(&setup), &format!("{name} {setup:?}"));
            }
        }
    }
}

#[test]
fn every_program_of_half_frozen_models_trains_to_the_same_bits_in_f32() {
    every_program_trains_to_the_same_bits(F32);
}

#[test]
fn every_program_of_half_frozen_models_trains_to_the_same_bits_in_bf16() {
    every_program_trains_to_the_same_bits(BF16);
}

/// Programs of a model with adapters: those above, and every policy of recomputation.
fn adapter_programs((ranks, accumulation, micro_batch): (u64, u64, u64), types: Types) -> Vec<Setup> {
    let mut all = programs(ranks, accumulation, micro_batch, types);
    let blocks = Recompute::Block { blocks: Some(1), checkpoints: Some(1), offloaded: false };
    for (at, recompute) in [Recompute::NormSwiGlu, Recompute::Attention, blocks].into_iter().enumerate() {
        for stage in 0..=3u8 {
            let offload = [Offload::NOTHING, OPTIMIZER, BOTH][(at + usize::from(stage)) % 3];
            let settings = Settings { stage, accumulation, types, offload, recompute, ..ROOMY };
            all.push(Setup { ranks, micro_batch, settings, steps: 3, sizes: 3, ..Setup::default() });
        }
    }
    all
}

/// Every fourth program of one model for each split, others for the next; all of them with `ZEROTH_FULL=1`.
#[test]
fn every_program_of_adapters_trains_to_the_same_bits() {
    let is_full = is_full();
    let models = [
        ("qwen3-tied-all", 0.1, BF16),
        ("llama-biases-tied-all-rslora", 0.1, F32),
        ("qwen2-yarn-tied-qv", 0.0, BF16),
    ];
    // The batches of golden LoRA runs.
    let splits = SPLITS.into_iter().filter(|(ranks, a, m)| ranks * a * m != 16);
    let cases = splits.enumerate().flat_map(|(number, split)| {
        let of_split = models.into_iter().enumerate().filter(move |(at, _)| is_full || *at == number % 3);
        of_split.map(move |(_, model)| (number, model, split))
    });
    for (number, (name, dropout, types), split) in cases {
        let golden = Golden::lora(name, dropout);
        let setups = adapter_programs(split, types);
        // Stages 0 and 1 accumulate before they reduce, stages 2 and 3 after.
        let (late, early): (Vec<Setup>, Vec<Setup>) =
            setups.iter().partition(|setup| split.1 == 1 || setup.settings.stage < 2);
        for setups in [late, early].into_iter().filter(|setups| !setups.is_empty()) {
            let expected = golden.train(&setups[0]);
            for (at, setup) in
                setups.iter().enumerate().filter(|(at, _)| is_full || (at + number).is_multiple_of(4))
            {
                let chaos = (at % 2 == 1).then_some(900 + at as u64);
                let setup = Setup { chaos, ..*setup };
                assert_same(&expected, &golden.train(&setup), &format!("{name} {setup:?}"));
            }
        }
    }
}

#[test]
fn dropout_of_adapters_acts_in_training_and_not_in_evaluation() {
    let setup = Setup { micro_batch: 4, steps: 1, ..Setup::default() };
    let [plain, masked] = [0.0, 0.1].map(|dropout| Golden::lora("qwen3-tied-all", dropout));
    assert_ne!(plain.train(&setup).records[0].loss, masked.train(&setup).records[0].loss);
    let [expected, found] = [&plain, &masked].map(|golden| {
        let compiled = golden.compile(&setup);
        let mut engine = golden.engine(&compiled, 1, None);
        golden.with_batch(4, |batch| engine.evaluate(batch)).unwrap()
    });
    assert_eq!(found.to_bits(), expected.to_bits());
}

#[test]
fn masked_inputs_and_sums_of_adapters_take_no_memory_of_their_own() {
    let [plain, masked] = [0.0, 0.1].map(|dropout| Golden::lora("qwen3-tied-all", dropout));
    let block = Recompute::Block { blocks: None, checkpoints: None, offloaded: false };
    for recompute in [Recompute::Nothing, Recompute::NormSwiGlu, Recompute::Attention, block] {
        let setup = Setup { micro_batch: 4, settings: Settings { recompute, ..ROOMY }, ..Setup::default() };
        let [plain, masked] = [&plain, &masked].map(|golden| golden.compile(&setup));
        let rows = plain.graph.streams[0].rows;
        // One masked input at a time, the gradient through its mask, and the keys of the rows. Where blocks are recomputed,
        // also what the inner matrices made of masked inputs: seven of rank 4 in each of two blocks.
        let kept = if recompute == block { 2 * 7 * 4 } else { 0 };
        let widest = plain.graph.values.iter().map(|value| value.width).max().unwrap();
        let most = rows * (4 * (2 * widest + kept) + 16) + 4096;
        let [before, after] =
            [&plain, &masked].map(|compiled| compiled.memory.peak(Tier::Device, Category::Activations));
        assert!(after <= before + most, "{recompute:?}: {after}, and {before} without dropout");
        let is_sum = |node: &&zeroth_graph::Node| matches!(node.op, zeroth_graph::Op::LinearAdd { .. });
        let sums: Vec<usize> =
            masked.graph.nodes.iter().filter(is_sum).map(|node| node.outputs[0].index()).collect();
        assert_eq!(sums.len(), 14);
        let placed = masked.memory.sections.iter().flat_map(|section| &section.buffers);
        let mut values = placed.filter_map(|placed| placed.buffer.id.value());
        assert_eq!(values.find(|value| sums.contains(value)), None, "{recompute:?}");
    }
}

/// The golden model with only the parameters trained whose names end with one of `trained`.
fn training_only(name: &str, trained: &[&str]) -> Golden {
    let mut golden = Golden::named(name);
    let is_trained = |name: &str| trained.iter().any(|end| name.ends_with(end));
    let names = golden.table.iter().map(|parameter| parameter.name.clone());
    golden.frozen = names.filter(|name| !is_trained(name)).collect();
    golden
}

/// Cases in which a gradient has no destination: nothing is trained below an op, or its own weight is frozen.
const TRAINED: [&[&str]; 7] = [
    &["layers.0.self_attn.q_norm.weight"],
    &["layers.0.self_attn.k_norm.weight", "layers.1.self_attn.v_proj.weight"],
    &["layers.0.input_layernorm.weight"],
    &["layers.1.post_attention_layernorm.weight"],
    &["model.norm.weight"],
    &["lm_head.weight"],
    &["embed_tokens.weight"],
];

#[test]
fn the_gradients_of_any_trained_parameters_are_those_of_the_reference() {
    for trained in TRAINED {
        let golden = training_only("qwen3-half-frozen", trained);
        for (types, near) in [(F32, 2e-5), (BF16, 4e-2)] {
            let (loss, gradients) = golden.reference(4, types.compute);
            for (ranks, micro_batch) in [(1, 4), (2, 2)] {
                let settings = Settings { types, ..ROOMY };
                let outcome =
                    golden.train(&Setup { ranks, micro_batch, settings, steps: 1, ..Setup::default() });
                let what = format!("{trained:?}, {types:?}, {ranks} ranks");
                assert!((outcome.records[0].loss - loss).abs() < near * loss, "{what}");
                for ((parameter, found), expected) in
                    golden.table.iter().zip(&outcome.gradients).zip(&gradients)
                {
                    assert_eq!(found.len(), expected.len(), "{what} {}", parameter.name);
                    assert_eq!(found.is_empty(), golden.is_frozen(&parameter.name), "{what}");
                    let apart = length(found.iter().zip(expected).map(|(a, b)| f64::from(*a) - b));
                    let norm = length(expected.iter().copied());
                    assert!(apart <= near * norm, "{what} {}: {apart} of {norm}", parameter.name);
                }
            }
        }
    }
}

fn length(elements: impl Iterator<Item = f64>) -> f64 {
    elements.map(|x| x * x).sum::<f64>().sqrt()
}

/// Every kernel of a micro-batch on rank 0.
fn kernels(golden: &Golden) -> Vec<Kernel> {
    let compiled = golden.compile(&Setup { micro_batch: 4, ..Setup::default() });
    let Compiled { program, graph, backward, target, .. } = &compiled;
    let span = |id| compiled.span(0, id);
    let scratch = |at| compiled.find(0, BufferId::Scratch(at));
    let binding = Binding { rank: 0, seed: 0, decayed: &|_| true };
    let rows = compiled.row_sizes.iter().next().unwrap();
    let lowering = Lowering::new(program, graph, backward, *target);
    let work = lowering.lower(&program.sections[0], &span, &scratch, binding, rows);
    let launches = work.into_iter().flat_map(|work| match work {
        Work::Launches(launches) => launches,
        Work::Nothing | Work::Collective(..) => Vec::new(),
    });
    launches.map(|launch| launch.kernel).collect()
}

#[test]
fn gradients_that_no_one_needs_are_not_computed() {
    let count = |golden: &Golden, is: fn(&Kernel) -> bool| kernels(golden).iter().filter(|k| is(k)).count();
    let of_weight = |kernel: &Kernel| match kernel {
        Kernel::LinearDw { .. } | Kernel::EmbeddingBackward { .. } => true,
        Kernel::HeadLossBackward { dw, .. } => dw.is_some(),
        Kernel::RmsNormBackward { dw, .. } | Kernel::HeadNormRopeBackward { dw, .. } => dw.is_some(),
        _ => false,
    };
    let of_input = |kernel: &Kernel| match kernel {
        Kernel::LinearDx { .. } | Kernel::AttentionBackward { .. } => true,
        Kernel::HeadLossBackward { dx, .. } => dx.is_some(),
        Kernel::RmsNormBackward { dh, .. } | Kernel::HeadNormRopeBackward { dh, .. } => dh.is_some(),
        _ => false,
    };
    // Of each of two blocks seven linears and four norms; the embedding, the last norm and the head.
    let whole = training_only("qwen3-half-frozen", &["weight"]);
    assert_eq!(count(&whole, of_weight), 2 * (7 + 4) + 3);
    // Of each block seven linears, attention and four norms; the last norm and the head.
    assert_eq!(count(&whole, of_input), 2 * (7 + 1 + 4) + 2);
    // Below the last norm nothing is trained: the head computes dx, and the norm dw.
    let last_norm = training_only("qwen3-half-frozen", &["model.norm.weight"]);
    assert_eq!((count(&last_norm, of_weight), count(&last_norm, of_input)), (1, 1));
    let head = training_only("qwen3-half-frozen", &["lm_head.weight"]);
    assert_eq!((count(&head, of_weight), count(&head, of_input)), (1, 0));
    // Two matrices of seven adapters in each of two blocks. Of inputs: of the inner width of each; of each adapter and its
    // base, except for q, k and v of the first block; attention and the norms of q and k; two norms of the second block and
    // one of the first; the last norm and the head.
    let adapters = Golden::lora("qwen3-tied-all", 0.0);
    assert_eq!(count(&adapters, of_weight), 2 * 2 * 7);
    assert_eq!(count(&adapters, of_input), 2 * 7 + 2 * (2 * 7 - 3) + 2 * (1 + 2) + 3 + 2);
}

#[test]
fn frozen_parameters_take_nothing_but_their_weights() {
    let golden = Golden::named("qwen3-half-frozen");
    for (types, stage, ranks) in [F32, BF16]
        .into_iter()
        .flat_map(|types| (0..=3).flat_map(move |stage| [1, 2, 5].map(|ranks| (types, stage, ranks))))
    {
        let settings = Settings { stage, types, ..ROOMY };
        let compiled = golden.compile(&Setup { ranks, settings, ..Setup::default() });
        let (program, what) = (&compiled.program, format!("{types:?}, stage {stage}, {ranks} ranks"));
        let (trained, frozen): (Vec<usize>, Vec<usize>) =
            (0..program.layout.flats.len()).partition(|flat| program.is_trained(*flat));
        // Of the embedding and both blocks.
        assert_eq!(frozen.len(), 3, "{what}");
        let instructions = || program.sections.iter().flat_map(|section| &section.instructions);
        for instruction in instructions() {
            let is_frozen = |flat: &usize| frozen.contains(flat);
            let of_weights = ["all_gather", "release"].contains(&instruction.action.name());
            let is_of_frozen = instruction.action.flat().as_ref().is_some_and(is_frozen);
            assert!(of_weights || !is_of_frozen, "{what}: {instruction:?}");
            assert!(!instruction.accumulates_into.iter().any(is_frozen), "{what}: {instruction:?}");
        }
        // 8 bytes of moments, and of master weights the low-order 2 or none.
        let updated: u64 = trained.iter().map(|flat| program.update_capacity(*flat)).sum();
        let master = if types == BF16 { 2 } else { 0 };
        let peak = |category| compiled.memory.peak(Tier::Device, category);
        assert_eq!(peak(Category::Optimizer), (8 + master) * updated, "{what}");
        let is_gradient = |id: &BufferId| match id {
            BufferId::Grad(flat) | BufferId::CommGrad(flat) | BufferId::ReducedGrad(flat) => {
                frozen.contains(flat)
            }
            _ => false,
        };
        let placed = compiled.memory.sections.iter().flat_map(|section| &section.buffers);
        let mut ids = placed.chain(&compiled.memory.static_buffers).map(|placed| placed.buffer.id);
        assert_eq!(ids.find(is_gradient), None, "{what}");
    }
}

#[test]
fn frozen_flats_are_placed_apart_from_trained_ones() {
    use FrozenPlacement::{ByStage, Sharded, Whole};
    let golden = Golden::named("qwen3-half-frozen");
    for (stage, frozen, sharded) in [
        (1, ByStage, [false, false]),
        (3, ByStage, [true, true]),
        (0, Sharded, [false, true]),
        (2, Sharded, [false, true]),
        (3, Whole, [true, false]),
        (2, Whole, [false, false]),
    ] {
        let (what, ranks) = (format!("stage {stage}, {frozen:?}"), 2);
        let settings = Settings { stage, frozen, gather: Some(Gather::Copy), ..ROOMY };
        let compiled = golden.compile(&Setup { ranks, settings, ..Setup::default() });
        let program = &compiled.program;
        let mut weights = 0;
        for (flat, laid) in program.layout.flats.iter().enumerate() {
            let expected = sharded[usize::from(!program.is_trained(flat))];
            assert_eq!(program.is_sharded(flat), expected, "{what}");
            weights += 4 * if expected { laid.shard_capacity(ranks) } else { laid.padded() };
            let is_gathered = |section: &zeroth_program::Section| {
                section
                    .instructions
                    .iter()
                    .any(|i| matches!(i.action, zeroth_program::Action::AllGather(of, _) if of == flat))
            };
            assert_eq!(is_gathered(&program.sections[0]), expected, "{what}");
        }
        assert_eq!(compiled.memory.peak(Tier::Device, Category::Parameters), weights, "{what}");
    }
}

#[test]
fn buffers_of_a_flat_have_the_size_of_its_storage() {
    let golden = Golden::named("qwen3-half-frozen");
    let compiled = golden.compile(&Setup { settings: Settings { stage: 0, ..ROOMY }, ..Setup::default() });
    let Compiled { mut program, graph, backward, row_sizes, target, memory, .. } = compiled;
    let frozen = (0..program.layout.flats.len()).find(|flat| !program.is_trained(*flat)).unwrap();
    program.layout.flats[frozen].storage = Storage::Dense(DType::Bf16);
    // Placed, not run: kernels read weights in the compute dtype.
    let expected =
        memory.peak(Tier::Device, Category::Parameters) - 2 * program.layout.flats[frozen].padded();
    let memory = plan_memory(&program, &graph, &backward, target, &row_sizes);
    assert_eq!(memory.peak(Tier::Device, Category::Parameters), expected);
}
