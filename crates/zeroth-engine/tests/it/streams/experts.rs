//! Graphs with a mixture of experts: they train as the f64 reference does whatever the routing is, and report its load.

use std::sync::Mutex;

use zeroth_base::DType;
use zeroth_comm::JoinOptions;
use zeroth_comm::local::LocalJob;
use zeroth_cpu::{CpuDevice, CpuTarget};
use zeroth_cuda::CudaTarget;
use zeroth_engine::{Engine, RankSetup, StepRecord};
use zeroth_graph::reference::Data;
use zeroth_graph::{ActivationFn, BalanceSums, Builder, Graph, Op, ParamSpec, Role, Routing, Value};
use zeroth_kernel::Recipe;
use zeroth_program::{Action, Compiled, FrozenPlacement, Gather, Offload, Recompute, Settings};

use super::{Batch, HIDDEN, VOCAB, assert_trains, assert_trains_everywhere, numbers, settings, sizes, specs};

const EXPERTS: u64 = 5;
const WIDTH: u64 = 6;
const LAYERS: u64 = 2;

/// What the experts of a graph are.
#[derive(Clone, Copy)]
struct Shape {
    k: u64,
    normalized: bool,
    /// The weight of the auxiliary loss.
    balance: Option<f64>,
    /// The rank of adapters on frozen experts.
    adapters: Option<u64>,
    quantized: bool,
}

const PLAIN: Shape = Shape { k: 2, normalized: true, balance: None, adapters: None, quantized: false };

/// Two streams that pass blocks of a norm and a router, and experts in a unit of their own.
fn graph(shape: Shape) -> Graph {
    let Shape { k, normalized, balance, adapters, quantized } = shape;
    let mut b = Builder::new(&[12, 9]);
    b.unit("embedding", Role::Embedding, specs(&[("table", &[VOCAB, HIDDEN])])).unwrap();
    let table = b.param("table").unwrap();
    // The residual sum of each stream, and its newest branch.
    let mut streams = [0, 1].map(|stream| (None, b.embedding(b.stream(stream).ids, table).unwrap()));
    let normed = |b: &mut Builder, (sum, branch): &mut (Option<Value>, Value), norm| match *sum {
        None => {
            *sum = Some(*branch);
            b.rms_norm(*branch, norm, 1e-5).unwrap()
        }
        Some(before) => {
            let (after, y) = b.add_rms_norm(before, *branch, norm, 1e-5).unwrap();
            *sum = Some(after);
            y
        }
    };
    let mut sums = if balance.is_some() { BalanceSums::First } else { BalanceSums::None };
    for block in 0..LAYERS {
        let name = |part: &str| format!("{block}.{part}");
        let router = specs(&[(&name("norm"), &[HIDDEN]), (&name("router"), &[EXPERTS, HIDDEN])]);
        b.unit(format!("block {block}"), Role::Block(block), router).unwrap();
        let [norm, router] = ["norm", "router"].map(|part| b.param(&name(part)).unwrap());
        let routings: Vec<(Value, Routing)> = (0..2)
            .map(|stream| {
                let x = normed(&mut b, &mut streams[stream], norm);
                let logits = b.linear(x, router, None).unwrap();
                // The auxiliary loss is of the first stream.
                let own = if stream == 0 { sums } else { BalanceSums::None };
                let routing = b.route(logits, k, normalized, own).unwrap();
                if let Some(after) = routing.balance {
                    sums = BalanceSums::After(after);
                }
                (x, routing)
            })
            .collect();
        let experts = [("gate_up", [EXPERTS, 2 * WIDTH, HIDDEN]), ("down", [EXPERTS, HIDDEN, WIDTH])];
        let mut params: Vec<ParamSpec> = experts
            .iter()
            .map(|(part, shape)| ParamSpec {
                trainable: adapters.is_none(),
                quantized,
                ..specs(&[(&name(part), shape)]).remove(0)
            })
            .collect();
        if let Some(rank) = adapters {
            params.extend(specs(&[
                (&name("gate_up.a"), &[EXPERTS, rank, HIDDEN]),
                (&name("gate_up.b"), &[EXPERTS, 2 * WIDTH, rank]),
                (&name("down.a"), &[EXPERTS, rank, WIDTH]),
                (&name("down.b"), &[EXPERTS, HIDDEN, rank]),
            ]));
        }
        b.unit(format!("experts {block}"), Role::Block(block), params).unwrap();
        for ((x, routing), stream) in routings.iter().zip(&mut streams) {
            let grouped = |b: &mut Builder, x: Value, part: &str| {
                let weight = b.param(&name(part)).unwrap();
                let base = b.grouped_linear(x, weight, routing).unwrap();
                if adapters.is_none() {
                    return base;
                }
                let [inner, outer] =
                    ["a", "b"].map(|side| b.param(&name(&format!("{part}.{side}"))).unwrap());
                let u = b.grouped_linear(x, inner, routing).unwrap();
                b.grouped_linear_add(base, u, outer, 0.75, routing).unwrap()
            };
            let rows = b.gather_rows(*x, routing).unwrap();
            let gate_up = grouped(&mut b, rows, "gate_up");
            let activated = b.gated_rows(ActivationFn::Silu, gate_up, routing).unwrap();
            let down = grouped(&mut b, activated, "down");
            stream.1 = b.combine_rows(down, routing).unwrap();
        }
    }
    b.unit("head", Role::Head, specs(&[("norm", &[HIDDEN]), ("head", &[VOCAB, HIDDEN])])).unwrap();
    let [norm, head] = ["norm", "head"].map(|name| b.param(name).unwrap());
    for stream in &mut streams {
        let x = normed(&mut b, stream, norm);
        b.head_loss(x, head).unwrap();
    }
    if let (Some(weight), BalanceSums::After(balance)) = (balance, sums) {
        b.set_loss_part("aux_loss", weight);
        b.balance_loss(balance, LAYERS).unwrap();
    }
    b.finish().unwrap()
}

/// Every router reports the rows of its experts over all ranks, and of padding none.
pub(crate) fn assert_counts(compiled: &Compiled, batches: &[Batch], counts: &[u32]) {
    for router in &compiled.program.routers {
        let node = &compiled.graph.nodes[router.node];
        let Op::Route { k, .. } = node.op else { panic!("a router routes: {node:?}") };
        let zeroth_graph::Rows::Stream(stream) = compiled.graph.info(node.inputs[0]).rows else {
            panic!("a router has the rows of a stream")
        };
        let tokens: usize = batches.iter().map(|batch| batch.streams[stream].ids.len()).sum();
        assert_eq!(router.rows(counts).iter().sum::<u32>() as usize, k as usize * tokens);
        assert_eq!((router.experts as u64, router.nonfinite(counts)), (EXPERTS, 0));
    }
}

#[test]
fn experts_train_as_the_reference_does() {
    assert_trains_everywhere(&graph(PLAIN));
    for k in [1, 3, EXPERTS] {
        let graph = graph(Shape { k, normalized: k != 3, ..PLAIN });
        assert_trains(&graph, &settings(3), 2, &format!("{k} experts of a token"));
    }
}

#[test]
fn an_auxiliary_loss_over_layers_trains_as_the_reference_does() {
    let graph = graph(Shape { balance: Some(0.5), normalized: false, ..PLAIN });
    assert_eq!(graph.loss_parts[1].name, "aux_loss");
    assert_trains_everywhere(&graph);
    // A recomputed router does not add to the sums a second time.
    for checkpoints in [None, Some(1)] {
        let recompute = Recompute::Block { blocks: None, checkpoints, offloaded: false };
        assert_trains(&graph, &Settings { recompute, ..settings(2) }, 3, "recomputed");
    }
}

#[test]
fn adapters_of_frozen_experts_train_as_the_reference_does() {
    let graph = graph(Shape { adapters: Some(2), ..PLAIN });
    assert_trains_everywhere(&graph);
    // The adapter adds to its base in place.
    let compiled = Compiled::new(graph, 1, &settings(0), &CpuTarget { threads: 1 }, sizes()).unwrap();
    let is_sum = |node: &&zeroth_graph::Node| matches!(node.op, Op::GroupedLinearAdd { .. });
    let sums = compiled.graph.nodes.iter().filter(is_sum).map(|node| node.outputs[0].index());
    let sums: Vec<usize> = sums.collect();
    assert_eq!(sums.len() as u64, 2 * 2 * LAYERS);
    let placed = compiled.memory.sections.iter().flat_map(|section| &section.buffers);
    assert_eq!(placed.filter_map(|placed| placed.buffer.id.value()).find(|value| sums.contains(value)), None);
}

/// Final weights and records of a graph under some settings, in bits.
fn trained(graph: &Graph, settings: &Settings, ranks: usize, chaos: Option<u64>) -> (Vec<u64>, Vec<u32>) {
    let guard = if chaos.is_some() { 256 } else { 0 };
    let target = &CpuTarget { threads: 2 };
    let compiled = Compiled::guarded(graph.clone(), ranks as u64, settings, target, sizes(), guard).unwrap();
    compiled.program.check(settings.max_live).unwrap();
    let losses = Mutex::new(Vec::new());
    let weights =
        Mutex::new(graph.params.iter().map(|param| vec![0; param.elements() as usize]).collect::<Vec<_>>());
    let rank = |comm: Option<Box<dyn zeroth_comm::Comm>>| {
        let mut engine = engine(&compiled, comm, 1e9);
        if let Some(seed) = chaos {
            engine.enable_chaos(seed + engine.rank());
        }
        for step in 0..3 {
            let all: Vec<Batch> = (0..ranks).map(|rank| Batch::new(graph, step * ranks + rank)).collect();
            let tokens: u64 = all.iter().map(Batch::trained).sum();
            let own = &all[engine.rank() as usize];
            super::with_view(own, |batch| {
                engine.step_streams(&[*batch], tokens, step as u64, &[0.1]).unwrap();
            });
            let StepRecord { head, losses: parts, counts, .. } = engine.record().unwrap();
            assert_counts(&compiled, &all, &counts);
            assert_eq!(head.apply, 1);
            if engine.rank() == 0 {
                let mut losses = losses.lock().unwrap();
                losses.extend([head.loss.to_bits(), head.norm.to_bits()]);
                losses.extend(parts.iter().map(|part| part.to_bits()));
                losses.extend(counts.iter().map(|count| u64::from(*count)));
            }
        }
        engine
            .read(zeroth_engine::StateKind::Weights, &mut |param, range, elements| {
                let to = &mut weights.lock().unwrap()[param.index()];
                let to = &mut to[range.start as usize..range.end as usize];
                to.iter_mut().zip(elements.iter()).for_each(|(to, from)| *to = from.to_bits());
                Ok(())
            })
            .unwrap();
    };
    over_ranks(ranks, &rank);
    (losses.into_inner().unwrap(), weights.into_inner().unwrap().concat())
}

fn engine(compiled: &Compiled, comm: Option<Box<dyn zeroth_comm::Comm>>, tolerated: f64) -> Engine<'_> {
    let memory = &compiled.memory;
    let device = Box::new(CpuDevice::new(1, memory.arenas()).unwrap());
    let recipe = Recipe { momentum: 0.0, tolerated: tolerated as u64, ..Recipe::default() };
    let parts = RankSetup { comm, device, recipe, decayed: &|_| false, seed: 1 };
    let mut engine = Engine::new(compiled, parts).unwrap();
    engine
        .load(&mut |param, range, elements| {
            let all = numbers(compiled.graph.param(param).elements(), param.index());
            elements.copy_from_slice(&all[range.start as usize..range.end as usize]);
            Ok(())
        })
        .unwrap();
    engine
}

fn over_ranks(ranks: usize, rank: &(dyn Fn(Option<Box<dyn zeroth_comm::Comm>>) + Sync)) {
    if ranks == 1 {
        return rank(None);
    }
    let job = LocalJob::create(ranks, 1 << 16).unwrap();
    std::thread::scope(|scope| {
        for number in 0..ranks {
            let comm = job.join(number, &JoinOptions::default()).unwrap();
            scope.spawn(move || rank(Some(comm)));
        }
    });
}

const BOTH: Offload =
    Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), sub_group_size: 2048, ..Offload::NOTHING };

/// Programs that must agree on one number of ranks.
fn programs(compute: DType, frozen: FrozenPlacement) -> Vec<Settings> {
    let block = |checkpoints, offloaded| Recompute::Block { blocks: None, checkpoints, offloaded };
    let types = zeroth_program::Types { compute, communication: compute };
    let base = Settings { types, frozen, ..settings(0) };
    let overlapped = Settings { overlap: true, prefetch: 1, gather: Some(Gather::Copy), ..base };
    vec![
        base,
        Settings { stage: 1, recompute: Recompute::NormSwiGlu, ..base },
        Settings { stage: 2, recompute: block(None, false), reduce_bucket: 700, ..base },
        Settings { stage: 3, recompute: block(Some(1), true), max_live: 0, ..overlapped },
        Settings { stage: 3, recompute: block(None, true), offload: BOTH, ..overlapped },
        Settings { stage: 3, recompute: Recompute::Attention, max_reuse: 600, persistence: 50, ..overlapped },
    ]
}

fn assert_same_bits(shape: Shape, compute: DType, ranks: usize, frozen: FrozenPlacement) {
    let graph = graph(shape);
    let programs = programs(compute, frozen);
    let expected = trained(&graph, &programs[0], ranks, None);
    for (at, settings) in programs.iter().enumerate() {
        for chaos in [None, Some(70 + at as u64)].into_iter().skip(usize::from(at == 0)) {
            let found = trained(&graph, settings, ranks, chaos);
            assert!(found == expected, "{compute}, {ranks} ranks, {frozen:?}, chaos {chaos:?}: {settings:?}");
        }
    }
}

#[test]
fn every_program_of_experts_trains_to_the_same_bits() {
    let aux = Shape { balance: Some(0.5), ..PLAIN };
    for (compute, ranks) in [(DType::Bf16, 1), (DType::F32, 3), (DType::Bf16, 2)] {
        assert_same_bits(aux, compute, ranks, FrozenPlacement::ByStage);
    }
}

#[test]
fn every_program_of_adapters_on_experts_trains_to_the_same_bits() {
    let dense = Shape { adapters: Some(2), ..PLAIN };
    let nf4 = Shape { quantized: true, ..dense };
    assert_same_bits(dense, DType::F32, 2, FrozenPlacement::Sharded);
    assert_same_bits(nf4, DType::Bf16, 3, FrozenPlacement::ByStage);
    assert_same_bits(nf4, DType::F32, 1, FrozenPlacement::Whole);
}

/// Data of one stream with these tokens as one sequence, for both streams.
fn tokens(ids: &[usize]) -> Data {
    Data {
        ids: ids.to_vec(),
        labels: ids.iter().map(|id| (*id as i64 * 3 + 1) % VOCAB as i64).collect(),
        positions: (0..ids.len()).collect(),
        starts: vec![0],
    }
}

/// Ids of a rank in a step: one token only, the same token everywhere, one per rank, few or many of all.
fn adversarial(round: u64, rank: u64, most: usize) -> Vec<usize> {
    let random = |salt: u64| {
        let mixed = (round * 31 + salt + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33
    };
    let count = 1 + random(rank + 7) as usize % most;
    match round % 5 {
        0 => vec![random(0) as usize % VOCAB as usize],
        1 => vec![random(1) as usize % VOCAB as usize; most],
        2 => vec![random(rank) as usize % VOCAB as usize; count],
        3 => (0..count).map(|at| random(at as u64 * 3 + rank) as usize % 2).collect(),
        _ => (0..count).map(|at| random(at as u64 * 5 + rank) as usize % VOCAB as usize).collect(),
    }
}

#[test]
fn no_routing_stalls_ranks_or_loses_a_token() {
    const ROUNDS: u64 = 1000;
    let graph = graph(Shape { balance: Some(0.1), ..PLAIN });
    let settings = Settings { gather: Some(Gather::Copy), overlap: true, prefetch: 1, ..settings(3) };
    let target = &CpuTarget { threads: 1 };
    let compiled = Compiled::new(graph, 3, &settings, target, sizes()).unwrap();
    let extremes = Mutex::new((u32::MAX, 0));
    over_ranks(3, &|comm| {
        let mut engine = engine(&compiled, comm, 0.0);
        for round in 0..ROUNDS {
            let batch = |rank| {
                let streams = [12, 9].map(|most| tokens(&adversarial(round, rank, most))).into();
                Batch { streams, inputs: Vec::new() }
            };
            let all = [0, 1, 2].map(batch);
            let trained: u64 = all.iter().map(Batch::trained).sum();
            let own = &all[engine.rank() as usize];
            // A rate that moves the routers, so that every token meets every expert.
            let rate = 0.02 * (round % 7) as f64;
            super::with_view(own, |batch| engine.step_streams(&[*batch], trained, round, &[rate]).unwrap());
            let StepRecord { head, counts, .. } = engine.record().unwrap();
            assert!(head.apply == 1 && head.loss.is_finite(), "round {round}: {head:?}");
            assert_counts(&compiled, &all, &counts);
            let routers = compiled.program.routers.iter();
            let empty = routers.map(|router| router.rows(&counts).iter().filter(|rows| **rows == 0).count());
            let empty = empty.max().unwrap_or(0) as u32;
            let mut extremes = extremes.lock().unwrap();
            *extremes = (extremes.0.min(empty), extremes.1.max(empty));
        }
    });
    // Routings that use every expert, and such that use only the k of one token.
    assert_eq!(extremes.into_inner().unwrap(), (0, EXPERTS as u32 - 2));
}

#[test]
fn a_router_that_is_not_finite_is_counted_and_the_step_skipped() {
    let graph = graph(PLAIN);
    let compiled = Compiled::new(graph, 2, &settings(2), &CpuTarget { threads: 1 }, sizes()).unwrap();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        over_ranks(2, &|comm| {
            let mut engine = engine(&compiled, comm, 5.0);
            engine
                .load(&mut |param, range, elements| {
                    let spec = &compiled.graph.param(param).spec;
                    let all = numbers(compiled.graph.param(param).elements(), param.index());
                    elements.copy_from_slice(&all[range.start as usize..range.end as usize]);
                    // All weights of the second block's second expert.
                    if spec.name == "1.router" {
                        let of_expert = HIDDEN..2 * HIDDEN;
                        let own = range.zip(elements).filter(|(at, _)| of_expert.contains(at));
                        own.for_each(|(_, element)| *element = value);
                    }
                    Ok(())
                })
                .unwrap();
            let all: Vec<Batch> = (0..2).map(|rank| Batch::new(&compiled.graph, rank)).collect();
            let trained: u64 = all.iter().map(Batch::trained).sum();
            let own = &all[engine.rank() as usize];
            super::with_view(own, |batch| engine.step_streams(&[*batch], trained, 0, &[0.1]).unwrap());
            let StepRecord { head, counts, .. } = engine.record().unwrap();
            assert_eq!((head.apply, head.found_inf), (0, 1), "{value}");
            let lost: Vec<u32> =
                compiled.program.routers.iter().map(|router| router.nonfinite(&counts)).collect();
            assert!(lost[..2] == [0, 0] && lost[2] > 0 && lost[3] > 0, "{value}: {lost:?}");
        });
    }
}

#[test]
fn experts_are_prefetched_during_the_block_before_where_two_blocks_may_be_gathered() {
    let graph = graph(PLAIN);
    let flat_of = |compiled: &Compiled, name: &str| {
        let param = compiled.graph.params.iter().position(|param| param.spec.name == name).unwrap();
        let unit = compiled.graph.params[param].unit.index();
        compiled.program.layout.place(compiled.graph.units[unit].params[0]).0
    };
    let base = Settings { overlap: true, gather: Some(Gather::Copy), ..settings(3) };
    let experts = EXPERTS * (3 * WIDTH * HIDDEN);
    let block = experts + HIDDEN + EXPERTS * HIDDEN;
    for (max_live, prefetch, is_early) in
        [(2 * block, block, true), (experts + block - 1, block, false), (2 * block, block - 1, false)]
    {
        let settings = Settings { max_live, prefetch, ..base };
        let compiled = Compiled::new(graph.clone(), 2, &settings, &CudaTarget, sizes()).unwrap();
        let second = flat_of(&compiled, "1.gate_up");
        let instructions = &compiled.program.sections[0].instructions;
        let gathered = instructions
            .iter()
            .position(|i| matches!(i.action, Action::AllGather(of, _) if of == second))
            .unwrap();
        let is_of_first = |action: &Action| match action {
            Action::Forward(node) => {
                let node = &compiled.graph.nodes[*node];
                node.op == Op::GroupedLinear && compiled.graph.units[node.unit.index()].name == "experts 0"
            }
            _ => false,
        };
        let last = instructions.iter().rposition(|instruction| is_of_first(&instruction.action)).unwrap();
        assert_eq!(gathered < last, is_early, "{max_live}, {prefetch}: {gathered}, {last}");
    }
}

#[test]
fn a_block_of_two_units_is_one_block_to_recomputation_and_two_to_gathering() {
    let graph = graph(PLAIN);
    let blocks: Vec<usize> = graph.blocks().map(|units| units.len()).collect();
    assert_eq!(blocks, [2, 2]);
    let recompute = Recompute::Block { blocks: Some(1), checkpoints: None, offloaded: false };
    let settings = Settings { recompute, gather: Some(Gather::Copy), ..settings(3) };
    let compiled = Compiled::new(graph, 2, &settings, &CpuTarget { threads: 1 }, sizes()).unwrap();
    let recomputed: Vec<&str> = compiled.program.sections[0]
        .instructions
        .iter()
        .filter_map(|instruction| match instruction.action {
            Action::Recompute { node, .. } => Some(&compiled.graph.nodes[node]),
            _ => None,
        })
        .filter(|node| matches!(node.op, Op::Route { .. } | Op::GroupedLinear))
        .map(|node| compiled.graph.units[node.unit.index()].name.as_str())
        .collect();
    assert!(recomputed.contains(&"block 0") && recomputed.contains(&"experts 0"), "{recomputed:?}");
    assert!(!recomputed.iter().any(|name| name.ends_with('1')), "{recomputed:?}");
    let kinds = compiled.program.layout.flats.iter().map(|flat| flat.kind);
    assert_eq!(kinds.filter(|kind| matches!(kind, zeroth_program::FlatKind::Trained(_))).count(), 6);
}
