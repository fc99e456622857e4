//! A model of 20,000 parameters, as one with experts has them, compiles: no pass compares every parameter, value or
//! buffer with every other. `cargo test -p zeroth-program --test it many_parameters:: -- --nocapture` prints the times.

#![allow(clippy::print_stdout, reason = "the times are for the reader")]

use std::time::Instant;

use zeroth_base::DType;
use zeroth_cpu::CpuTarget;
use zeroth_graph::{Builder, Graph, ParamSpec, Role};
use zeroth_kernel::Tier;
use zeroth_program::{BufferId, Compiled, Gather, Recompute, Settings, Types};

const BLOCKS: u64 = 50;
/// Gated layers of a block, of four parameters each.
const LAYERS: u64 = 100;
const HIDDEN: u64 = 64;
const TOKENS: u64 = 32;

fn model() -> Graph {
    let param = |name: String, shape: &[u64]| ParamSpec {
        name,
        shape: shape.to_vec(),
        trainable: true,
        quantized: false,
    };
    let mut b = Builder::new(&[TOKENS]);
    b.unit("embedding", Role::Embedding, vec![param("embed".to_owned(), &[100, HIDDEN])]).unwrap();
    let (ids, table) = (b.ids(), b.param("embed").unwrap());
    let mut branch = b.embedding(ids, table).unwrap();
    let mut sum = branch;
    for block in 0..BLOCKS {
        let name = |layer: u64, part: &str| format!("layers.{block}.experts.{layer}.{part}");
        let params = (0..LAYERS).flat_map(|layer| {
            let square = |part: &str| param(name(layer, part), &[HIDDEN, HIDDEN]);
            [square("gate"), square("up"), square("down"), param(name(layer, "norm"), &[HIDDEN])]
        });
        b.unit(format!("block {block}"), Role::Block(block), params.collect()).unwrap();
        for layer in 0..LAYERS {
            let [gate, up, down, norm] =
                ["gate", "up", "down", "norm"].map(|part| b.param(&name(layer, part)).unwrap());
            let normed;
            (sum, normed) = b.add_rms_norm(sum, branch, norm, 1e-6).unwrap();
            let (gate, up) = (b.linear(normed, gate, None).unwrap(), b.linear(normed, up, None).unwrap());
            let activated = b.swiglu(gate, up).unwrap();
            branch = b.linear(activated, down, None).unwrap();
        }
    }
    b.unit("head", Role::Head, vec![param("norm".to_owned(), &[HIDDEN])]).unwrap();
    let norm = b.param("norm").unwrap();
    let (_, normed) = b.add_rms_norm(sum, branch, norm, 1e-6).unwrap();
    b.head_loss(normed, table).unwrap();
    b.finish().unwrap()
}

/// Every parameter's gradient is reduced and updated, and buffers that live at once are apart.
fn assert_complete(compiled: &Compiled, settings: &Settings) {
    compiled.program.check(settings.max_live).unwrap();
    let slots: usize = compiled.program.layout.flats.iter().map(|flat| flat.slots.len()).sum();
    assert_eq!(slots, compiled.graph.params.len());
    for section in &compiled.memory.sections {
        let mut spans: Vec<_> = section
            .buffers
            .iter()
            .filter(|placed| placed.buffer.tier == Tier::Device && placed.lifetime.contains(&1000))
            .filter(|placed| !matches!(placed.buffer.id, BufferId::Gathered { .. }))
            .map(|placed| placed.at..placed.at + placed.buffer.bytes)
            .collect();
        spans.sort_by_key(|span| span.start);
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start), "{:?}", section.kind);
    }
}

#[test]
fn twenty_thousand_parameters_compile() {
    let types = Types { compute: DType::Bf16, communication: DType::Bf16 };
    let stage3 = Settings { stage: 3, types, max_live: u64::MAX / 4, ..Settings::inference(DType::Bf16) };
    let copies =
        Settings { gather: Some(Gather::Copy), overlap: true, prefetch: 1 << 20, max_reuse: 0, ..stage3 };
    let block = Recompute::Block { blocks: None, checkpoints: None, offloaded: false };
    for (name, settings) in [
        ("stage 2", Settings { stage: 2, ..stage3 }),
        ("stage 3", stage3),
        ("stage 3, gathered copies, overlapped", copies),
        (
            "stage 3, small parameters persistent",
            Settings { persistence: 1 << 20, model_persistence: u64::MAX, ..copies },
        ),
        ("stage 3, norms recomputed", Settings { recompute: Recompute::NormSwiGlu, ..stage3 }),
        ("stage 3, blocks recomputed, accumulated", Settings { recompute: block, accumulation: 4, ..copies }),
    ] {
        let begun = Instant::now();
        let graph = model();
        assert!(graph.params.len() > 20_000);
        let compiled = Compiled::new(graph, 2, &settings, &CpuTarget { threads: 1 }, vec![TOKENS]).unwrap();
        println!("{name}: {} ms", begun.elapsed().as_millis());
        assert_complete(&compiled, &settings);
    }
}
