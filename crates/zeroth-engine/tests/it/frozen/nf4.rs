//! Frozen weights in nf4 train to the same bits as a base that holds the dequantised weights, and take 4.5 bits an element.

use bytemuck::Zeroable;
use half::bf16;
use zeroth_base::DType;
use zeroth_cpu::{Pool, quantize_nf4};
use zeroth_kernel::{Nf4Record, Tier};
use zeroth_program::{
    Action, BLOCK, BufferId, Category, FlatKind, FrozenPlacement, Gather, Offload, Recompute, Settings,
    Storage, Types,
};

use super::{BOTH, assert_same, programs};
use crate::job::{BF16, F32, Golden, ROOMY, Setup};

/// A model whose matrices have several records, whole and in part: 48 × 100 elements are 2.3 records. Trained are the last block's
/// down projection, and norms.
pub(super) fn model() -> Golden {
    let mut golden = Golden::synthetic(&serde_json::json!({
        "model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 100, "vocab_size": 50,
        "tie_word_embeddings": false, "max_position_embeddings": 64,
    }));
    let is_trained = |name: &str| name.contains("norm") || name.ends_with("1.mlp.down_proj.weight");
    let names = golden.table.iter().map(|parameter| parameter.name.clone());
    golden.frozen = names.filter(|name| !is_trained(name)).collect();
    golden
}

/// The model with its frozen matrices in nf4.
pub(super) fn quantized(mut golden: Golden) -> Golden {
    for parameter in golden.table.units.iter_mut().flat_map(|unit| &mut unit.parameters) {
        parameter.trained = !golden.frozen.contains(&parameter.name);
    }
    golden.table.quantize();
    golden
}

/// The model with the values of nf4 as its weights, in the run's dtype.
fn dequantized(mut golden: Golden, dtype: DType) -> Golden {
    let names: Vec<String> =
        quantized_names(&golden).into_iter().filter(|name| golden.is_frozen(name)).collect();
    for (parameter, weights) in golden.table.iter().zip(&mut golden.weights) {
        if names.contains(&parameter.name) {
            let mut records = vec![Nf4Record::zeroed(); weights.len().div_ceil(Nf4Record::ELEMENTS)];
            let pool = Pool::new(1);
            if dtype == DType::Bf16 {
                let halves: Vec<bf16> = weights.iter().map(|weight| bf16::from_f32(*weight)).collect();
                quantize_nf4(&pool, &halves, &mut records);
            } else {
                quantize_nf4(&pool, weights, &mut records);
            }
            for (place, weight) in weights.iter_mut().enumerate() {
                let value = records[place / Nf4Record::ELEMENTS].element(place % Nf4Record::ELEMENTS);
                *weight = if dtype == DType::Bf16 { bf16::from_f32(value).to_f32() } else { value };
            }
        }
    }
    golden
}

/// The matrices of blocks.
fn quantized_names(golden: &Golden) -> Vec<String> {
    let is_matrix = |name: &str| name.contains(".layers.") && name.ends_with("_proj.weight");
    golden.table.iter().map(|parameter| parameter.name.clone()).filter(|name| is_matrix(name)).collect()
}

#[test]
fn frozen_matrices_of_blocks_are_quantised() {
    for golden in [model(), Golden::named("llama-biases-half-frozen")] {
        let mut expected = quantized_names(&golden);
        expected.retain(|name| golden.is_frozen(name));
        let golden = quantized(golden);
        let marked = golden.table.iter().filter(|parameter| parameter.quantized);
        assert_eq!(marked.map(|parameter| parameter.name.clone()).collect::<Vec<_>>(), expected);
        let graph = golden.graph(7);
        let specs = graph.params.iter().map(|param| &param.spec).filter(|spec| spec.quantized);
        assert_eq!(specs.map(|spec| spec.name.clone()).collect::<Vec<_>>(), expected);
    }
}

/// Staged shards, in pieces of a record.
const PAGEABLE: Offload = Offload { pageable: true, param_buffer_size: 1, param_buffers: 2, ..BOTH };

fn the_same_bits(types: Types, name: Option<&str>) {
    let golden = || name.map_or_else(model, Golden::named);
    let (base, nf4) = (dequantized(golden(), types.compute), quantized(golden()));
    for (number, (ranks, accumulation, micro_batch)) in
        [(1, 1, 4), (2, 1, 2), (3, 1, 4)].into_iter().enumerate()
    {
        let mut setups = programs(ranks, accumulation, micro_batch, types);
        let last = *setups.last().unwrap();
        let staged = Settings { offload: PAGEABLE, overlap: true, prefetch: 5000, ..last.settings };
        let staged = Settings { stage: 3, frozen: FrozenPlacement::ByStage, ..staged };
        let expected = base.train(&Setup { steps: 2, ..setups[0] });
        setups.retain(|setup| {
            setup.settings.frozen != FrozenPlacement::ByStage || setup.settings.stage % 3 == 0
        });
        let of_this: Vec<Setup> = setups.into_iter().skip(number).step_by(4).collect();
        for (at, setup) in of_this.into_iter().chain([Setup { settings: staged, ..last }]).enumerate() {
            let chaos = (at % 2 == 1).then_some(700 + at as u64);
            let setup = Setup { chaos, steps: 2, ..setup };
            assert_same(&expected, &nf4.train(&setup), &format!("{name:?} {setup:?}"));
        }
    }
}

#[test]
fn nf4_trains_to_the_bits_of_its_dequantised_weights_in_bf16() {
    the_same_bits(BF16, None);
}

#[test]
fn nf4_trains_to_the_bits_of_its_dequantised_weights_in_f32() {
    the_same_bits(F32, Some("llama-biases-half-frozen"));
}

#[test]
fn quantised_weights_take_four_and_a_half_bits_an_element() {
    let (golden, dense) = (quantized(model()), model());
    for (stage, frozen, ranks, offload) in [
        (0, FrozenPlacement::ByStage, 1, Offload::NOTHING),
        (2, FrozenPlacement::Sharded, 2, Offload::NOTHING),
        (3, FrozenPlacement::ByStage, 3, Offload::NOTHING),
        (3, FrozenPlacement::Whole, 2, Offload::NOTHING),
        (3, FrozenPlacement::ByStage, 2, BOTH),
    ] {
        let settings = Settings { stage, frozen, types: BF16, offload, ..ROOMY };
        let setup = Setup { ranks, settings, ..Setup::default() };
        let what = format!("stage {stage}, {frozen:?}, {ranks} ranks, {offload:?}");
        let compiled = golden.compile(&setup);
        let program = &compiled.program;
        // Of the frozen matrices of a block: q 48 × 48, k and v 16 × 48, o 48 × 48, gate and up 100 × 48, down 48 × 100.
        let records = [2, 1, 1, 2, 3, 3, 3];
        let of_block = |block: usize| records.iter().take(if block == 0 { 7 } else { 6 }).sum::<u64>();
        let mut parameters = 0;
        for (flat, laid) in program.layout.flats.iter().enumerate() {
            let blocks = match laid.kind {
                FlatKind::Quantized(_) => of_block(usize::from(laid.slots.len() == 6)),
                _ => laid.blocks,
            };
            let is_quantized = matches!(laid.kind, FlatKind::Quantized(_));
            assert_eq!((laid.blocks, is_quantized), (blocks, laid.storage == Storage::Nf4), "{what}");
            let held = if program.stays_gathered(flat) { blocks } else { blocks.div_ceil(ranks) };
            // 2,048 elements of 4 bits and 32 scales of 32, or 2,048 of 16.
            let bytes = held * if is_quantized { 1024 + 128 } else { 2 * BLOCK };
            parameters += bytes.next_multiple_of(256);
            // Views need whole pages.
            assert!(!program.is_viewed(flat) || !is_quantized, "{what}");
            if program.is_viewed(flat) {
                assert_eq!(compiled.span(0, BufferId::Weights(flat)).at % 4096, 0, "{what}");
            }
        }
        let memory = &compiled.memory;
        let found: u64 = Tier::ALL.iter().map(|tier| memory.peak(*tier, Category::Parameters)).sum();
        assert_eq!(found, parameters, "{what}");
        if stage == 0 {
            // 27 records instead of blocks of bf16, and 128 bytes up to the alignment of one of the two flats.
            let before = dense.compile(&setup).memory.peak(Tier::Device, Category::Parameters);
            assert_eq!(before - found, 27 * (2 * BLOCK - 1152) - 128);
        }
    }
}

#[test]
fn one_parameter_is_unpacked_at_a_time_and_ops_never_read_records() {
    let golden = quantized(model());
    for (stage, recompute) in
        [(0, Recompute::Nothing), (3, Recompute::Block { blocks: None, checkpoints: None, offloaded: false })]
    {
        let settings = Settings { stage, recompute, types: BF16, gather: Some(Gather::View), ..ROOMY };
        let compiled = golden.compile(&Setup { ranks: 2, settings, ..Setup::default() });
        for (section, memory) in compiled.program.sections.iter().zip(&compiled.memory.sections) {
            let mut unpacked = 0;
            for placed in &memory.buffers {
                let BufferId::Unpacked(at) = placed.buffer.id else { continue };
                let Action::Unpack(param) = section.instructions[at].action else { panic!("{placed:?}") };
                unpacked += 1;
                assert_eq!(placed.lifetime, at..=at + 1, "until the next op");
                let bytes = 2 * compiled.graph.param(param).elements();
                assert_eq!(placed.buffer.bytes, bytes.next_multiple_of(256));
            }
            for (at, instruction) in section.instructions.iter().enumerate() {
                let holds_records = |id: &BufferId| match id {
                    BufferId::Weights(flat) | BufferId::Gathered { flat, .. } => {
                        compiled.program.layout.flats[*flat].storage == Storage::Nf4
                    }
                    _ => false,
                };
                let may = ["unpack", "all_gather", "upload_shard"].contains(&instruction.action.name());
                assert!(may || !instruction.operands.reads.iter().any(holds_records), "%{at}");
            }
            let name = section.kind.name();
            let forward = 13;
            // The first block has nothing trained below its own norms but its input norm, so q, k and v need no input gradient
            // there: recomputation and backward read every matrix at most once each.
            let most = match (name, recompute) {
                ("update", _) => 0,
                ("eval", _) => forward,
                (_, Recompute::Nothing) => 2 * forward + 1,
                _ => 3 * forward + 1,
            };
            assert!(unpacked <= most && (unpacked > 0) == (most > 0), "{name}: {unpacked} of {most}");
        }
    }
}
