//! An encoder-decoder with everything that T5 has: shared position biases, cross attention, dropout, and a tied head with a factor. It
//! trains as the f64 reference does, and to the same bits in every program.

use std::sync::Mutex;

use zeroth_base::PositionBuckets;
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, JoinOptions};
use zeroth_cpu::{CpuDevice, CpuTarget};
use zeroth_engine::{Engine, Feed, MicroBatches, RankSetup, RunError, StateKind, StreamBatch, StreamRows};
use zeroth_graph::reference::Interpreter;
use zeroth_graph::{ActivationFn, AttentionOptions, Builder, Graph, ParamId, Role, Value};
use zeroth_kernel::{Recipe, RowKey, Target};
use zeroth_program::{Action, Compiled, Gather, GradProducers, Offload, Recompute, Settings};

use super::{Batch, HIDDEN, VOCAB, assert_trains_everywhere, numbers, settings, sizes, specs, with_view};
use crate::job::{BF16, F32, is_full};

const HEADS: u64 = 2;
/// Elements of all heads.
const INNER: u64 = 6;
const WIDTH: u64 = 10;
const BLOCKS: u64 = 2;
const CPU: &dyn Target = &CpuTarget { threads: 1 };

/// A stack of blocks: its residual sum and its newest branch.
struct Stack<'b> {
    b: &'b mut Builder,
    sum: Option<Value>,
    branch: Value,
    dropout: f64,
}

impl Stack<'_> {
    fn param(&self, name: &str) -> ParamId {
        self.b.param(name).unwrap()
    }

    fn norm(&mut self, name: &str) -> Value {
        let weight = self.param(name);
        let Some(before) = self.sum else {
            self.sum = Some(self.branch);
            return self.b.rms_norm(self.branch, weight, 1e-6).unwrap();
        };
        let (after, normed) = self.b.add_rms_norm(before, self.branch, weight, 1e-6).unwrap();
        self.sum = Some(after);
        normed
    }

    fn dropped(&mut self, x: Value) -> Value {
        self.b.dropout(x, self.dropout).unwrap()
    }

    /// Attention of `x` to `keys`, as the next branch.
    fn attend(&mut self, name: &str, x: Value, keys: Value, bias: Option<Value>, causal: bool) {
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|part| self.param(&format!("{name}.{part}")));
        let qkv = [(x, q), (keys, k), (keys, v)].map(|(x, weight)| self.b.linear(x, weight, None).unwrap());
        let options = AttentionOptions {
            heads: HEADS,
            kv_heads: HEADS,
            window: None,
            scale: 1.0,
            causal,
            dropout: self.dropout,
        };
        let attended = self.b.attention_with(qkv, bias, options).unwrap();
        let out = self.b.linear(attended, o, None).unwrap();
        self.branch = self.dropped(out);
    }

    fn feed_forward(&mut self, name: &str) {
        let x = self.norm(&format!("{name}.ff.norm"));
        let [wi, wo] = ["wi", "wo"].map(|part| self.param(&format!("{name}.ff.{part}")));
        let wide = self.b.linear(x, wi, None).unwrap();
        let activated = self.b.activation(ActivationFn::Relu, wide).unwrap();
        let activated = self.dropped(activated);
        let out = self.b.linear(activated, wo, None).unwrap();
        self.branch = self.dropped(out);
    }
}

/// Begins the unit of a block.
fn block(b: &mut Builder, name: &str, index: u64, attentions: &[&str]) {
    let mut params: Vec<(String, Vec<u64>)> = Vec::new();
    for attention in attentions {
        let part = |part: &str| format!("{name}.{attention}.{part}");
        params.push((part("norm"), vec![HIDDEN]));
        params.extend(["q", "k", "v"].map(|projection| (part(projection), vec![INNER, HIDDEN])));
        params.push((part("o"), vec![HIDDEN, INNER]));
    }
    params.push((format!("{name}.ff.norm"), vec![HIDDEN]));
    params.push((format!("{name}.ff.wi"), vec![WIDTH, HIDDEN]));
    params.push((format!("{name}.ff.wo"), vec![HIDDEN, WIDTH]));
    let params: Vec<(&str, &[u64])> = params.iter().map(|(name, shape)| (&name[..], &shape[..])).collect();
    b.unit(name, Role::Block(index), specs(&params)).unwrap();
}

fn position_bias(b: &mut Builder, name: &str, buckets: PositionBuckets) -> Value {
    b.unit(name, Role::Other, specs(&[(name, &[buckets.buckets, HEADS])])).unwrap();
    let weight = b.param(name).unwrap();
    b.position_bias(weight, buckets).unwrap()
}

fn encoder_decoder(dropout: f64) -> Graph {
    let mut b = Builder::new(&[12, 9]);
    b.unit("shared", Role::Embedding, specs(&[("shared", &[VOCAB, HIDDEN])])).unwrap();
    let shared = b.param("shared").unwrap();
    let embedded = |b: &mut Builder, stream: usize| {
        let x = b.embedding(b.stream(stream).ids, shared).unwrap();
        b.dropout(x, dropout).unwrap()
    };
    let branch = embedded(&mut b, 0);
    let buckets = PositionBuckets { buckets: 8, max_distance: 4, bidirectional: true };
    let bias = position_bias(&mut b, "encoder positions", buckets);
    let mut stack = Stack { b: &mut b, sum: None, branch, dropout };
    for index in 0..BLOCKS {
        let name = format!("encoder {index}");
        block(stack.b, &name, index, &["self"]);
        let x = stack.norm(&format!("{name}.self.norm"));
        stack.attend(&format!("{name}.self"), x, x, Some(bias), false);
        stack.feed_forward(&name);
    }
    stack.b.unit("encoder norm", Role::Other, specs(&[("encoder norm", &[HIDDEN])])).unwrap();
    let normed = stack.norm("encoder norm");
    let encoded = stack.dropped(normed);

    let branch = embedded(&mut b, 1);
    let buckets = PositionBuckets { buckets: 5, max_distance: 3, bidirectional: false };
    let bias = position_bias(&mut b, "decoder positions", buckets);
    let mut stack = Stack { b: &mut b, sum: None, branch, dropout };
    for index in 0..BLOCKS {
        let name = format!("decoder {index}");
        block(stack.b, &name, BLOCKS + index, &["self", "cross"]);
        let x = stack.norm(&format!("{name}.self.norm"));
        stack.attend(&format!("{name}.self"), x, x, Some(bias), true);
        let x = stack.norm(&format!("{name}.cross.norm"));
        stack.attend(&format!("{name}.cross"), x, encoded, None, false);
        stack.feed_forward(&name);
    }
    stack.b.unit("head", Role::Head, specs(&[("head norm", &[HIDDEN])])).unwrap();
    let normed = stack.norm("head norm");
    let normed = stack.dropped(normed);
    let scaled = b.scale(normed, (HIDDEN as f64).powf(-0.5)).unwrap();
    let labels = b.stream(1).labels;
    b.head_loss_of(scaled, labels, shared).unwrap();
    b.finish().unwrap()
}

#[test]
fn an_encoder_decoder_trains_as_the_reference_does() {
    assert_trains_everywhere(&encoder_decoder(0.0));
}

#[test]
fn an_evaluation_drops_nothing() {
    let graph = encoder_decoder(0.1);
    let weights = graph.params.iter().enumerate().map(|(salt, param)| numbers(param.elements(), salt));
    let weights = weights.map(|numbers| numbers.into_iter().map(f64::from).collect()).collect();
    let batch = Batch::new(&graph, 1);
    let without = encoder_decoder(0.0);
    let expected = Interpreter::new(&without, &batch.streams, weights).loss();
    let compiled = Compiled::new(graph, 1, &settings(0), CPU, sizes()).unwrap();
    let mut engine = engine(&compiled, None);
    let found = with_view(&batch, |batch| engine.evaluate_streams(batch).unwrap());
    assert!((found - expected).abs() < 1e-5 * expected, "{found}, {expected}");
}

/// The ranks of a micro-batch and its number give it the lengths of its pairs: source and target.
const LENGTHS: [&[[usize; 2]]; 5] =
    [&[[3, 2], [5, 4], [1, 1]], &[[6, 0], [2, 5]], &[], &[[0, 3], [7, 1], [4, 4]], &[[12, 9]]];

/// Pairs of a micro-batch.
struct Pairs {
    streams: [Stream; 2],
}

#[derive(Default)]
struct Stream {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    starts: Vec<u32>,
    keys: Vec<RowKey>,
}

impl Stream {
    fn new(lengths: impl Iterator<Item = usize>, salt: usize) -> Self {
        let mut stream = Self { starts: vec![0], ..Self::default() };
        for (sequence, length) in lengths.enumerate() {
            let sample = (10 * salt + sequence) as u64;
            for position in 0..length {
                let at = stream.ids.len() + 3 * salt;
                stream.ids.push((at * 7 % VOCAB as usize) as i32);
                stream.labels.push(if at % 4 == 1 { -100 } else { (at * 5 % VOCAB as usize) as i32 });
                stream.positions.push(position as i32);
                stream.keys.push(RowKey { sample, position: position as u32, epoch: 0 });
            }
            stream.starts.push(stream.ids.len() as u32);
        }
        stream
    }

    fn view(&self) -> StreamRows<'_> {
        let Self { ids, labels, positions, starts, keys } = self;
        StreamRows { ids, labels, positions, starts, keys }
    }
}

impl Pairs {
    fn new(number: usize) -> Self {
        let lengths = LENGTHS[number % LENGTHS.len()];
        let stream = |place: usize| Stream::new(lengths.iter().map(|pair| pair[place]), number);
        Self { streams: [stream(0), stream(1)] }
    }

    fn trained(&self) -> u64 {
        self.streams[1].labels.iter().filter(|label| **label >= 0).count() as u64
    }
}

/// Micro-batches as the trainer gives them.
struct PairBatches<'a>(std::slice::Iter<'a, Pairs>);

impl MicroBatches for PairBatches<'_> {
    type Error = RunError;

    fn next(&mut self, feed: Feed<'_>) -> Result<(), RunError> {
        let Pairs { streams: [source, target] } = self.0.next().unwrap();
        feed(&StreamBatch { streams: &[source.view(), target.view()], inputs: &[] })
    }
}

/// The bits of every step's loss and of the final weights.
#[derive(Default, PartialEq)]
struct Bits {
    losses: Vec<u64>,
    weights: Vec<Vec<u32>>,
}

fn engine(compiled: &Compiled, comm: Option<Box<dyn Comm>>) -> Engine<'_> {
    let memory = &compiled.memory;
    let device = Box::new(CpuDevice::new(1, memory.arenas()).unwrap());
    let recipe = Recipe { momentum: 0.0, weight_decay: [0.0, 0.0], max_norm: 0.0, ..Recipe::default() };
    let parts = RankSetup { comm, device, recipe, decayed: &|_| false, seed: 5 };
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

fn trained_bits(graph: &Graph, ranks: usize, settings: &Settings, chaos: Option<u64>) -> Bits {
    let guard = if chaos.is_some() { 256 } else { 0 };
    let compiled = Compiled::guarded(graph.clone(), ranks as u64, settings, CPU, sizes(), guard).unwrap();
    compiled.program.check(settings.max_live).unwrap();
    let empty = graph.params.iter().map(|param| vec![0; param.elements() as usize]).collect();
    let found = Mutex::new(Bits { losses: Vec::new(), weights: empty });
    let run = |comm: Option<Box<dyn Comm>>| {
        let mut engine = engine(&compiled, comm);
        if let Some(seed) = chaos {
            engine.enable_chaos(seed + engine.rank());
        }
        let (accumulation, rank) = (settings.accumulation as usize, engine.rank() as usize);
        for step in 0..2 {
            let all: Vec<Pairs> = (0..ranks * accumulation)
                .map(|number| Pairs::new(step * (ranks * accumulation + 1) + number))
                .collect();
            let trained: u64 = all.iter().map(Pairs::trained).sum();
            let own = &all[rank * accumulation..][..accumulation];
            engine.step_from(&mut PairBatches(own.iter()), trained, step as u64, &[0.1]).unwrap();
            let loss = engine.record().unwrap().head.loss;
            assert!(loss.is_finite());
            if rank == 0 {
                found.lock().unwrap().losses.push(loss.to_bits());
            }
        }
        engine
            .read(StateKind::Weights, &mut |param, range, elements| {
                let to = &mut found.lock().unwrap().weights[param.index()];
                let bits = elements.iter().map(|element| element.to_bits());
                to[range.start as usize..range.end as usize]
                    .iter_mut()
                    .zip(bits)
                    .for_each(|(to, bits)| *to = bits);
                Ok(())
            })
            .unwrap();
    };
    if ranks == 1 {
        run(None);
    } else {
        let job = LocalJob::create(ranks, 1 << 16).unwrap();
        std::thread::scope(|scope| {
            for number in 0..ranks {
                let comm = job.join(number, &JoinOptions::default()).unwrap();
                let run = &run;
                scope.spawn(move || run(Some(comm)));
            }
        });
    }
    found.into_inner().unwrap()
}

const RECOMPUTE: [Recompute; 7] = [
    Recompute::Nothing,
    Recompute::NormSwiGlu,
    Recompute::Attention,
    Recompute::Block { blocks: None, checkpoints: None, offloaded: true },
    // Runs of blocks of the encoder and of the decoder.
    Recompute::Block { blocks: None, checkpoints: Some(1), offloaded: false },
    Recompute::Block { blocks: Some(3), checkpoints: Some(2), offloaded: true },
    Recompute::Block { blocks: Some(1), checkpoints: None, offloaded: false },
];

const OFFLOAD: [Offload; 3] = [
    Offload::NOTHING,
    Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), sub_group_size: 2048, ..Offload::NOTHING },
    Offload { optimizer: Some(0.5), ..Offload::NOTHING },
];

/// Every policy of recomputation at one stage for each number of ranks, others for the next; all with `ZEROTH_FULL=1`.
#[test]
fn every_program_of_an_encoder_decoder_gives_the_same_bits() {
    let is_full = is_full();
    let graph = encoder_decoder(0.1);
    let huge = u64::MAX / 4;
    for (place, ranks) in [1, 2, 3, 5].into_iter().enumerate() {
        // With accumulation, stages 2 and 3 reduce every micro-batch.
        for (accumulation, stages, types) in [(1, 0..=3u8, BF16), (2, 0..=1, F32), (2, 2..=3, BF16)] {
            let plain = Settings { types, accumulation, ..settings(*stages.start()) };
            let expected = trained_bits(&graph, ranks, &plain, None);
            let turns = RECOMPUTE.into_iter().enumerate().flat_map(|(turn, recompute)| {
                stages.clone().enumerate().map(move |(at, stage)| (turn, recompute, at, stage))
            });
            for (turn, recompute, at, stage) in turns {
                let number = place + turn + at;
                let is_due = at == (turn / 2 + place) % stages.clone().count();
                if is_full || (place + turn).is_multiple_of(2) && is_due {
                    let base = Settings { stage, recompute, ..plain };
                    let copied =
                        Settings { gather: Some(Gather::Copy), prefetch: huge, overlap: true, ..base };
                    let moved = Settings {
                        offload: OFFLOAD[number % OFFLOAD.len()],
                        max_live: 700,
                        reduce_bucket: 600,
                        ..copied
                    };
                    let settings = if number.is_multiple_of(2) { base } else { moved };
                    for chaos in [None, Some(number as u64)] {
                        let found = trained_bits(&graph, ranks, &settings, chaos);
                        assert!(found == expected, "{ranks} ranks, chaos {chaos:?}, {settings:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn dropout_of_an_encoder_decoder_changes_what_it_learns() {
    let [with, without] =
        [0.1, 0.0].map(|dropout| trained_bits(&encoder_decoder(dropout), 1, &settings(0), None));
    assert!(with.losses != without.losses);
}

#[test]
fn a_table_of_two_embeddings_and_a_head_accumulates_in_f32() {
    let graph = encoder_decoder(0.0);
    let compiled = Compiled::new(graph, 2, &Settings { types: BF16, ..settings(2) }, CPU, sizes()).unwrap();
    // The head rounds nothing: both embeddings add to what it writes.
    assert_eq!(compiled.program.grad_producers[0], GradProducers::MatmulFirst);
}

#[test]
fn what_several_blocks_read_is_neither_recomputed_nor_offloaded() {
    let graph = encoder_decoder(0.1);
    let norm =
        graph.nodes.iter().position(|node| graph.units[node.unit.index()].name == "encoder norm").unwrap();
    let encoded = graph.nodes[norm + 1].outputs[0].index();
    for recompute in RECOMPUTE {
        let settings = Settings { recompute, ..settings(3) };
        let compiled = Compiled::new(graph.clone(), 2, &settings, CPU, sizes()).unwrap();
        let actions =
            || compiled.program.sections[0].instructions.iter().map(|instruction| &instruction.action);
        let of_encoded = |action: &Action| match action {
            Action::Recompute { node, .. } => *node == norm || *node == norm + 1,
            Action::OffloadActivation(value) => *value == encoded,
            _ => false,
        };
        assert!(!actions().any(of_encoded), "{recompute:?}");
        let recomputed = actions().filter(|action| matches!(action, Action::Recompute { .. })).count();
        assert_eq!(recomputed > 0, recompute != Recompute::Nothing, "{recompute:?}");
    }
}

#[test]
fn targets_without_a_source_are_named() {
    let compiled = Compiled::new(encoder_decoder(0.0), 1, &settings(0), CPU, sizes()).unwrap();
    let mut engine = engine(&compiled, None);
    let [one, three] = [Pairs::new(4), Pairs::new(0)];
    let streams = [one.streams[0].view(), three.streams[1].view()];
    let error = engine.evaluate_streams(&StreamBatch { streams: &streams, inputs: &[] }).unwrap_err();
    let expected =
        "a micro-batch has 3 target sequence(s) and 1 source(s): each target has a source of its own";
    assert_eq!(error.to_string(), expected);
}
