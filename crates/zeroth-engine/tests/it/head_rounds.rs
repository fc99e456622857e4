//! A head that takes a micro-batch as one slice rounds the gradient of its table itself, where the device can: no f32 table
//! is there, and no bit is another.

use zeroth_base::DType;
use zeroth_cpu::CpuTarget;
use zeroth_cuda::CudaTarget;
use zeroth_kernel::{Target, Tier};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};
use zeroth_program::Compiled;
use zeroth_program::{Action, BufferId, GradProducers, SectionKind, Settings, Types};

use crate::job::{BF16, F32, Golden, ROOMY, Setup};

const F16: Types = Types { compute: DType::F16, communication: DType::F16 };
const CPU: &dyn Target = &CpuTarget { threads: 2 };
const HIDDEN: u64 = 1024;
const VOCAB: u64 = 151_936;
/// The most rows that are one slice of this vocabulary in bf16.
const SLICE: u64 = 552;

/// A step of Qwen3 0.6B with 4 of its blocks.
fn compile(tied: bool, tokens: u64, ranks: u64, settings: Settings, target: &'static dyn Target) -> Compiled {
    let config = serde_json::json!({
        "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_tokens(tokens)).unwrap();
    Compiled::new(graph, ranks, &settings, target, vec![tokens]).unwrap()
}

/// Who gives the gradient of the head's projection, and bytes of it that land in f32 in the first micro-batch.
fn head_of(compiled: &Compiled) -> (GradProducers, u64) {
    let Compiled { graph, program, memory, .. } = compiled;
    let head = graph.nodes.iter().find(|node| node.op.is_loss()).unwrap().params[0];
    let (flat, _) = program.layout.place(head);
    let all = memory.static_buffers.iter().chain(&memory.sections[0].buffers);
    let wide = all.filter(|placed| placed.buffer.id == BufferId::Grad(flat));
    (program.grad_producers[head.index()], wide.map(|placed| placed.buffer.bytes).sum())
}

/// Whether an instruction of a micro-batch clears or rounds the gradient of the flat that holds the head's projection.
fn clears_or_rounds(compiled: &Compiled) -> bool {
    let head = compiled.graph.nodes.iter().find(|node| node.op.is_loss()).unwrap().params[0];
    let (flat, _) = compiled.program.layout.place(head);
    let mut instructions = compiled.program.sections[0].instructions.iter();
    instructions
        .any(|i| [Action::ZeroGrad(flat), Action::CastGrad(flat), Action::KeepGrad(flat)].contains(&i.action))
}

#[test]
fn a_tied_table_has_no_gradient_in_f32() {
    let settings = Settings { types: BF16, ..ROOMY };
    let of = |head_rounds| compile(true, 512, 2, Settings { head_rounds, ..settings }, CPU);
    let (before, after) = (of(false), of(true));
    assert_eq!(head_of(&before), (GradProducers::MatmulFirst, 4 * VOCAB * HIDDEN));
    assert_eq!(head_of(&after), (GradProducers::HeadAndEmbedding, 0));
    assert!(clears_or_rounds(&before) && !clears_or_rounds(&after));
    // Rows of tokens wait from the first op of backward to the last.
    let section = &after.program.sections[0];
    assert_eq!(section.kind, SectionKind::Only);
    let ends = [0, after.backward.nodes.len() - 1].map(|node| {
        section
            .instructions
            .iter()
            .position(|instruction| instruction.action == Action::Backward(node))
            .unwrap()
    });
    let placed = after.memory.sections[0].buffers.iter();
    let waiting: Vec<_> = placed.filter(|placed| placed.buffer.id == BufferId::WaitingRows).collect();
    assert_eq!(waiting.len(), 1);
    assert_eq!((waiting[0].buffer.bytes, &waiting[0].accessed_by[..]), (4 * 512 * HIDDEN, &ends[..]));
    // What was 4 bytes a parameter of the table is 2, which were there beside them at the end only; a thread of the head
    // has 512 rows of the gradient in scratch.
    let [before, after] = [&before, &after].map(|compiled| compiled.memory.arena(Tier::Device));
    let (table, beside) = (2 * VOCAB * HIDDEN, (4 * 512 + 2 * 4 * 512) * HIDDEN + 4096);
    assert!(before - after + beside >= table, "{before} {after}");
}

#[test]
fn a_head_of_its_own_is_a_product_like_others() {
    let settings = Settings { types: BF16, ..ROOMY };
    let (grad_producers, wide) = head_of(&compile(false, SLICE, 2, settings, CPU));
    // The norm before it, in the same flat.
    assert!(grad_producers == GradProducers::Matmul && wide <= 4 * 2048, "{grad_producers:?}, {wide} bytes");
}

#[test]
fn all_else_adds_up_in_f32() {
    let settings = Settings { types: BF16, ..ROOMY };
    let (wide, mixed) = (F32, Types { compute: DType::Bf16, communication: DType::F32 });
    let adds = |tokens, settings, target| head_of(&compile(true, tokens, 2, settings, target)).0;
    assert_eq!(adds(SLICE, settings, CPU), GradProducers::HeadAndEmbedding);
    assert_eq!(adds(SLICE + 1, settings, CPU), GradProducers::MatmulFirst);
    assert_eq!(adds(SLICE, settings, &CudaTarget), GradProducers::MatmulFirst);
    for types in [wide, mixed] {
        assert_eq!(adds(SLICE, Settings { types, ..settings }, CPU), GradProducers::MatmulFirst);
    }
    // Exponentials of fp16 are in f32: half as many rows are a slice.
    let narrow = Settings { types: F16, ..settings };
    assert_eq!(adds(SLICE / 2, narrow, CPU), GradProducers::HeadAndEmbedding);
    assert_eq!(adds(SLICE / 2 + 1, narrow, CPU), GradProducers::MatmulFirst);
    // Over micro-batches gradients of stage 1 add up in f32, whoever gives them.
    let several = Settings { stage: 1, accumulation: 2, ..settings };
    assert_eq!(head_of(&compile(true, SLICE, 2, several, CPU)).1, 4 * VOCAB * HIDDEN);
}

#[test]
fn who_rounds_a_table_changes_no_bit() {
    for name in ["qwen3-tied", "llama-one-kv-head"] {
        let golden = Golden::named(name);
        for types in [BF16, F16] {
            for (stage, ranks, accumulation, micro_batch) in
                [(0, 1, 1, 4), (3, 1, 2, 2), (1, 2, 1, 2), (2, 2, 2, 1), (3, 3, 1, 4)]
            {
                let settings = Settings { stage, accumulation, types, ..ROOMY };
                let of = |head_rounds, chaos| {
                    let settings = Settings { head_rounds, overlap: true, prefetch: 1, ..settings };
                    golden.train(&Setup {
                        ranks,
                        micro_batch,
                        threads: 2,
                        sizes: 2,
                        steps: 3,
                        settings,
                        chaos,
                        ..Setup::default()
                    })
                };
                let (at_the_end, at_once) = (of(false, None), of(true, None));
                assert!(at_once.records.iter().all(|record| record.apply == 1));
                assert!(at_the_end == at_once, "{name}, {settings:?}, {ranks} ranks");
                assert!(at_the_end == of(true, Some(5)), "{name}, {settings:?}, {ranks} ranks, any order");
            }
        }
    }
}
