//! Programs for inference: what a decoded token costs, and what the cache takes.

use serde_json::json;
use zeroth_base::DType;
use zeroth_cpu::CpuTarget;
use zeroth_cuda::CudaTarget;
use zeroth_kernel::{Kernel, LinearDims, LogitsDims, Span, Target, Tier};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};
use zeroth_program::{
    Action, Binding, BufferId, CachedTokens, Category, Compiled, Lowering, SectionKind, StreamSizes, Work,
};

const CPU: &dyn Target = &CpuTarget { threads: 2 };
const LAYERS: u64 = 3;
const HIDDEN: u64 = 48;
const HEADS: u64 = 6;
const KV_HEADS: u64 = 2;
const HEAD_DIM: u64 = 10;
const MLP: u64 = 112;
const VOCAB: u64 = 301;

fn compiled(prompt: u64, cached_tokens: u64, target: &'static dyn Target, run: DType) -> Compiled {
    let config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP, "vocab_size": VOCAB,
        "tie_word_embeddings": true, "max_position_embeddings": 100_000,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_tokens(prompt)).unwrap();
    Compiled::inference(graph, run, 4, cached_tokens, target, vec![prompt]).unwrap()
}

/// The kernels of the decode section for a row count.
fn decode_kernels(compiled: &Compiled, rows: u64) -> Vec<Kernel> {
    let section = compiled.program.decode().unwrap();
    let spans = compiled.spans(section);
    let (span, scratch) = (|id: BufferId| spans[&id], |at| spans.get(&BufferId::Scratch(at)).copied());
    let lowering = Lowering::new(&compiled.program, &compiled.graph, &compiled.backward, compiled.target);
    let binding = Binding { rank: 0, seed: 0, decayed: &|_| false };
    let works = lowering.lower(&compiled.program.sections[section], &span, &scratch, binding, &[rows]);
    let launches = works.into_iter().flat_map(|work| match work {
        Work::Launches(launches) => launches,
        Work::Nothing => Vec::new(),
        Work::Collective(_, collective) => unreachable!("{collective:?} on one rank"),
    });
    launches.map(|launch| launch.kernel).collect()
}

/// Multiply-adds of the matmuls of a kernel.
fn multiply_adds(kernel: &Kernel) -> usize {
    match kernel {
        Kernel::Linear { dims: LinearDims { rows, inputs, outputs, .. }, .. } => rows * inputs * outputs,
        Kernel::Logits { dims: LogitsDims { sequences, hidden, vocab, .. }, .. } => {
            sequences * hidden * vocab
        }
        _ => 0,
    }
}

#[test]
fn a_decoded_token_costs_the_same_after_any_prefix_except_in_attention() {
    let weights = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * MLP;
    let expected = |rows: u64| (rows * LAYERS * weights + 4 * HIDDEN * VOCAB) as usize;
    // A short prompt, a long one, and a long continuation of a short one.
    let programs = [(16, 40), (16, 8000), (4096, 8000)].map(|(prompt, cached_tokens)| {
        (compiled(prompt, cached_tokens, CPU, DType::F32), prompt, cached_tokens)
    });
    for (compiled, prompt, cached_tokens) in &programs {
        assert_eq!(compiled.decode_sizes, vec![1, 2, 4].into());
        for rows in [1, 2, 4] {
            let kernels = decode_kernels(compiled, rows);
            let total: usize = kernels.iter().map(multiply_adds).sum();
            assert_eq!(total, expected(rows), "{prompt} {cached_tokens}");
            for kernel in &kernels {
                // Every operand but the cache and the weights has one row per sequence.
                let [most, found] = match kernel {
                    Kernel::Linear { dims, .. } => [rows, dims.rows as u64],
                    Kernel::Embedding { rows: found, .. } => [rows, *found as u64],
                    Kernel::RmsNorm { dims, .. } | Kernel::AddRmsNorm { dims, .. } => {
                        [rows, dims.rows as u64]
                    }
                    Kernel::Rope { dims, .. } => [rows, dims.rows as u64],
                    Kernel::GatedActivation { y, .. } => [rows * MLP * 4, y.bytes],
                    Kernel::StoreRows { dims, .. } => [rows, dims.rows as u64],
                    Kernel::CachedAttention { dims, .. } => [rows, dims.rows as u64],
                    Kernel::Logits { dims, .. } => [rows, dims.rows as u64],
                    other => unreachable!("{} in a decode section", other.name()),
                };
                assert_eq!(found, most, "{}", kernel.name());
            }
            let attentions =
                kernels.iter().filter(|kernel| matches!(kernel, Kernel::CachedAttention { .. })).count();
            assert_eq!(attentions as u64, LAYERS);
        }
    }
}

#[test]
fn the_cache_has_a_row_of_keys_and_values_per_layer_and_token() {
    for (run, bytes) in [(DType::F32, 4), (DType::Bf16, 2)] {
        for cached_tokens in [64, 6400] {
            let compiled = compiled(16, cached_tokens, &CudaTarget, run);
            let expected = LAYERS * 2 * KV_HEADS * HEAD_DIM * cached_tokens * bytes;
            assert_eq!(compiled.cache_bytes(), expected, "{run} {cached_tokens}");
            assert_eq!(compiled.decode_sizes, vec![16].into(), "a tile of rows on GPUs");
            let placed = &compiled.memory.static_buffers;
            assert!(placed.iter().filter(|placed| is_cache(placed.buffer.id)).all(|placed| {
                placed.buffer.category == Category::Activations && placed.buffer.tier == Tier::Device
            }));
            assert!(compiled.memory.peak(Tier::Device, Category::Activations) >= expected);
        }
    }
}

const fn is_cache(id: BufferId) -> bool {
    matches!(id, BufferId::CachedKeys(_) | BufferId::CachedValues(_))
}

#[test]
fn every_layer_has_a_cache_of_its_own_that_both_sections_use() {
    let compiled = compiled(16, 64, CPU, DType::F32);
    let kinds: Vec<SectionKind> = compiled.program.sections.iter().map(|section| section.kind).collect();
    assert_eq!(kinds, [SectionKind::Logits, SectionKind::Decode]);
    let stores = |section: usize| -> Vec<Span> {
        let instructions = &compiled.program.sections[section].instructions;
        let nodes = instructions.iter().filter_map(|instruction| match instruction.action {
            Action::StoreKv(node) => Some(node),
            _ => None,
        });
        nodes
            .flat_map(|node| [BufferId::CachedKeys(node), BufferId::CachedValues(node)])
            .map(|id| compiled.span(section, id))
            .collect()
    };
    let spans = stores(0);
    assert_eq!(spans.len() as u64, 2 * LAYERS);
    assert_eq!(spans, stores(1));
    let apart = |(at, span): (usize, &Span)| spans[at + 1..].iter().all(|other| !span.overlaps(*other));
    assert!(spans.iter().enumerate().all(apart));
    let without = Compiled::inference(compiled.graph.clone(), DType::F32, 4, 0, CPU, vec![16]).unwrap();
    assert_eq!((without.program.sections.len(), without.cache_bytes()), (1, 0));
    assert!(without.decode_sizes.is_empty());
}

/// A model with three encoder blocks and two decoder blocks.
fn encoder_decoder(cached: CachedTokens, target: &'static dyn Target) -> Compiled {
    let config = json!({
        "model_type": "t5", "d_model": HIDDEN, "d_kv": HEAD_DIM, "num_heads": HEADS, "d_ff": MLP,
        "num_layers": LAYERS, "num_decoder_layers": 2, "vocab_size": VOCAB, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20, "feed_forward_proj": "relu", "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
        "tie_word_embeddings": true,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_pairs(32, 8)).unwrap();
    let sizes = StreamSizes::of_streams(vec![vec![16, 8], vec![32, 8]]);
    Compiled::inference(graph, DType::F32, 4, cached, target, sizes).unwrap()
}

#[test]
fn an_encoder_runs_once_and_its_decoder_reads_what_it_left() {
    let compiled = encoder_decoder(CachedTokens { tokens: 40, source_tokens: 25 }, &CudaTarget);
    let kinds: Vec<SectionKind> = compiled.program.sections.iter().map(|section| section.kind).collect();
    assert_eq!(kinds, [SectionKind::Encode, SectionKind::Decode]);
    // Buffers begin and end on 256 bytes.
    let bytes = [40, 25].map(|rows| (rows * HEADS * HEAD_DIM * 4).next_multiple_of(256));
    assert_eq!(compiled.cache_bytes(), 2 * 2 * bytes.iter().sum::<u64>());
    let count = |section: usize, is: &dyn Fn(&Action) -> bool| {
        let instructions = &compiled.program.sections[section].instructions;
        instructions.iter().filter(|instruction| is(&instruction.action)).count() as u64
    };
    let is_op = |action: &Action, name: &str| matches!(action, Action::Forward(node) if compiled.graph.nodes[*node].op.name() == name);
    // q, k, v, o and two of the feed-forward; keys and values of cross attention.
    assert_eq!(count(0, &|action| is_op(action, "linear")), 6 * LAYERS + 2 * 2);
    // q, k, v and o, q and o of cross attention, and the feed-forward.
    assert_eq!(count(1, &|action| is_op(action, "linear")), 2 * (4 + 2 + 2));
    let actions = |section| {
        [
            count(section, &|action| is_op(action, "attention")),
            count(section, &|action| matches!(action, Action::StoreKv(_))),
            count(section, &|action| matches!(action, Action::CachedAttention(_))),
            count(section, &|action| is_op(action, "position_bias")),
            count(section, &|action| is_op(action, "dropout")),
            count(section, &|action| matches!(action, Action::Logits { .. })),
        ]
    };
    assert_eq!([actions(0), actions(1)], [[LAYERS, 2, 0, 1, 0, 0], [0, 2, 4, 1, 0, 1]]);
}

#[test]
fn a_decoder_takes_as_many_tokens_as_its_stream_has_rows() {
    let cached = CachedTokens { tokens: 40, source_tokens: 25 };
    let sizes: Vec<Vec<u64>> =
        encoder_decoder(cached, CPU).decode_sizes.iter().map(<[u64]>::to_vec).collect();
    assert_eq!(sizes, [[16, 1], [16, 2], [16, 4], [16, 8]]);
    let without = encoder_decoder(CachedTokens::default(), CPU);
    let kinds: Vec<SectionKind> = without.program.sections.iter().map(|section| section.kind).collect();
    assert_eq!((kinds, without.cache_bytes()), (vec![SectionKind::Logits], 0));
}
