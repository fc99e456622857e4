//! Models with two token streams, with several rows for each token, with experts, and with an encoder, train as the f64 reference does,
//! at every stage, on one rank and on two, and whatever the micro-batches are padded to.

#![allow(clippy::many_single_char_names, reason = "q, k, v")]

mod encoder_decoder;
mod experts;
mod second_forward;

use std::sync::Mutex;

use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, JoinOptions};
use zeroth_cpu::{CpuDevice, CpuTarget};
use zeroth_engine::{
    Engine, FurtherInput, LossCounts, RankSetup, RunError, StateKind, StreamBatch, StreamRows,
};
use zeroth_graph::reference::{Data, Interpreter};
use zeroth_graph::{Builder, Graph, ParamId, ParamSpec, Role, Rotary, Rows};
use zeroth_kernel::{Optimizer, Recipe};
use zeroth_program::{BufferId, CompileError, Compiled, Recompute, Settings, StreamSizes};

use crate::job::ROOMY;

const VOCAB: u64 = 11;
const HIDDEN: u64 = 8;
const STEPS: u64 = 3;
const RATE: f64 = 0.1;
/// Rows of a token in the model with several.
const TIMES: u64 = 3;

fn specs(params: &[(&str, &[u64])]) -> Vec<ParamSpec> {
    let spec = |(name, shape): &(&str, &[u64])| ParamSpec {
        name: (*name).to_owned(),
        shape: shape.to_vec(),
        trainable: true,
        quantized: false,
    };
    params.iter().map(spec).collect()
}

/// A source and a target stream: blocks that both pass, and a loss of each, which are different parts of the model's.
fn two_streams() -> Graph {
    let mut b = Builder::new(&[12, 9]);
    b.rotary(Rotary { frequencies: vec![1.0, 0.1], scale: 1.0, dynamic: None });
    b.unit("embedding", Role::Embedding, specs(&[("table", &[VOCAB, HIDDEN])])).unwrap();
    let table = b.param("table").unwrap();
    let [mut x, mut y] = [0, 1].map(|stream| b.embedding(b.stream(stream).ids, table).unwrap());
    for block in 0..2 {
        let name = |part: &str| format!("{block}.{part}");
        let square = [HIDDEN, HIDDEN];
        let params = ["q", "k", "v", "o"].map(|part| (name(part), &square[..]));
        let mut params: Vec<(&str, &[u64])> =
            params.iter().map(|(name, shape)| (name.as_str(), *shape)).collect();
        let norm = name("norm");
        params.push((&norm, &[HIDDEN]));
        b.unit(format!("block {block}"), Role::Block(block), specs(&params)).unwrap();
        let [q, k, v, o, norm] = ["q", "k", "v", "o", "norm"].map(|part| b.param(&name(part)).unwrap());
        for stream in [&mut x, &mut y] {
            let normed = b.rms_norm(*stream, norm, 1e-5).unwrap();
            let [q, k, v] = [q, k, v].map(|weight| b.linear(normed, weight, None).unwrap());
            let (q, k) = (b.rope(q, 2).unwrap(), b.rope(k, 2).unwrap());
            let attended = b.attention([q, k, v], 2, 2, None, 0.5).unwrap();
            *stream = b.linear(attended, o, None).unwrap();
        }
    }
    b.unit("head", Role::Head, specs(&[("head", &[VOCAB, HIDDEN])])).unwrap();
    let head = b.param("head").unwrap();
    // One loss with a head of its own, and one with the tied table: two parts with weights.
    b.head_loss(x, head).unwrap();
    b.set_loss_part("kd_loss", 0.3);
    b.head_loss(y, table).unwrap();
    b.finish().unwrap()
}

/// A stream of tokens, and another whose tokens have several ids and labels each. Both losses are one part.
fn several_rows() -> Graph {
    let mut b = Builder::new(&[12, 9]);
    let params = [("table", &[VOCAB, HIDDEN][..]), ("gate", &[HIDDEN, HIDDEN]), ("norm", &[HIDDEN])];
    b.unit("embedding", Role::Embedding, specs(&params)).unwrap();
    let [table, gate, norm] = ["table", "gate", "norm"].map(|name| b.param(name).unwrap());
    let (ids, labels) = (b.input(1, TIMES), b.input(1, TIMES));
    let x = b.embedding(b.ids(), table).unwrap();
    let y = b.embedding(ids, table).unwrap();
    assert_eq!(b.info(y).rows, Rows::Times(1, TIMES));
    b.unit("head", Role::Head, specs(&[("head", &[VOCAB, HIDDEN])])).unwrap();
    let head = b.param("head").unwrap();
    for (value, labels) in [(x, b.stream(0).labels), (y, labels)] {
        let linear = b.linear(value, gate, None).unwrap();
        let activated = b.swiglu(linear, value).unwrap();
        let (_, normed) = b.add_rms_norm(value, activated, norm, 1e-5).unwrap();
        b.head_loss_of(normed, labels, head).unwrap();
    }
    b.finish().unwrap()
}

/// The data of a stream on a rank at a step: two sequences, of other lengths every time.
fn stream(salt: usize, most: usize) -> Data {
    let lengths = [1 + salt % (most / 2), 2 + salt * 3 % (most / 2 - 1)];
    let tokens = lengths[0] + lengths[1];
    Data {
        ids: (0..tokens).map(|at| (at * 7 + salt * 5 + 3) % VOCAB as usize).collect(),
        labels: (0..tokens as i64)
            .map(|at| if at == 1 { -100 } else { (at * 3 + salt as i64) % VOCAB as i64 })
            .collect(),
        positions: (0..lengths[0]).chain(0..lengths[1]).collect(),
        starts: vec![0, lengths[0]],
    }
}

/// A micro-batch: the data of the streams, and the further inputs.
struct Batch {
    streams: Vec<Data>,
    inputs: Vec<Vec<i64>>,
}

impl Batch {
    fn new(graph: &Graph, salt: usize) -> Self {
        let of_stream =
            |(place, known): (usize, &zeroth_graph::Stream)| stream(salt + 4 * place, known.rows as usize);
        let streams: Vec<Data> = graph.streams.iter().enumerate().map(of_stream).collect();
        let further = graph.inputs.len() - 3 * graph.streams.len();
        let input = |place: usize| {
            let count = streams[1].ids.len() * TIMES as usize;
            (0..count).map(|at| ((at * (place + 2) + salt) % VOCAB as usize) as i64).collect()
        };
        Self { inputs: (0..further).map(input).collect(), streams }
    }

    /// Rows with a label.
    fn trained(&self) -> u64 {
        let labels = |data: &Data| data.labels.iter().filter(|label| **label >= 0).count();
        // In the model with several rows, a further input has the labels of the second stream.
        let second = self.inputs.last().map_or_else(|| labels(&self.streams[1]), Vec::len);
        (labels(&self.streams[0]) + second) as u64
    }
}

fn numbers(elements: u64, salt: usize) -> Vec<f32> {
    (0..elements).map(|i| ((i as f64 * 29.0 + salt as f64 * 71.0 + 5.0) * 0.811).sin() as f32 * 0.4).collect()
}

fn params(graph: &Graph) -> Vec<ParamId> {
    graph.units.iter().flat_map(|unit| unit.params.iter().copied()).collect()
}

/// The loss of a step, then its parts.
type Losses = Vec<f64>;

/// The losses of all steps and the final weights by the f64 reference with plain SGD.
fn expected(graph: &Graph, ranks: usize) -> (Vec<Losses>, Vec<Vec<f64>>) {
    let backward = graph.backward().unwrap();
    let elements = |(salt, param): (usize, &zeroth_graph::Param)| {
        numbers(param.elements(), salt).into_iter().map(f64::from).collect()
    };
    let mut weights: Vec<Vec<f64>> = graph.params.iter().enumerate().map(elements).collect();
    let mut losses = Vec::new();
    for step in 0..STEPS as usize {
        let batches: Vec<Batch> = (0..ranks).map(|rank| Batch::new(graph, step * ranks + rank)).collect();
        let trained: u64 = batches.iter().map(Batch::trained).sum();
        let mut machine = Interpreter::new(graph, &batches[0].streams, weights.clone());
        let mut sums = vec![0.0; 1 + graph.loss_parts.len()];
        for batch in &batches {
            machine.feed(&batch.streams);
            for (input, numbers) in graph.inputs[3 * graph.streams.len()..].iter().zip(&batch.inputs) {
                machine.set_input(*input, numbers);
            }
            sums[0] += machine.train(&backward);
            sums[1..].iter_mut().zip(machine.loss_parts()).for_each(|(sum, part)| *sum += part);
        }
        losses.push(sums.into_iter().map(|sum| sum / trained as f64).collect());
        for param in params(graph) {
            let gradient = machine.gradient(param);
            for (weight, gradient) in weights[param.index()].iter_mut().zip(gradient) {
                *weight -= RATE * gradient / trained as f64;
            }
        }
    }
    (losses, weights)
}

/// What the engine computes of the same: every rank's losses in `losses`, its part of the weights in `weights`.
fn rank(
    compiled: &Compiled,
    comm: Option<Box<dyn Comm>>,
    ranks: usize,
    found: &Mutex<(Vec<Losses>, Vec<Vec<f32>>)>,
) {
    let memory = &compiled.memory;
    let device = Box::new(CpuDevice::new(1, memory.arenas()).unwrap());
    let recipe = Recipe { momentum: 0.0, weight_decay: [0.0, 0.0], max_norm: 0.0, ..Recipe::default() };
    let mut engine =
        Engine::new(compiled, RankSetup { comm, device, recipe, decayed: &|_| false, seed: 1 }).unwrap();
    engine
        .load(&mut |param, range, elements| {
            let all = numbers(compiled.graph.param(param).elements(), param.index());
            elements.copy_from_slice(&all[range.start as usize..range.end as usize]);
            Ok(())
        })
        .unwrap();
    for step in 0..STEPS as usize {
        let all: Vec<Batch> =
            (0..ranks).map(|rank| Batch::new(&compiled.graph, step * ranks + rank)).collect();
        let trained: u64 = all.iter().map(Batch::trained).sum();
        let own = &all[engine.rank() as usize];
        with_view(own, |batch| engine.step_streams(&[*batch], trained, step as u64, &[RATE]).unwrap());
        let record = engine.record().unwrap();
        experts::assert_counts(compiled, &all, &record.counts);
        if engine.rank() == 0 {
            found.lock().unwrap().0.push([&[record.head.loss], &record.losses[..]].concat());
        }
    }
    engine
        .read(StateKind::Weights, &mut |param, range, elements| {
            found.lock().unwrap().1[param.index()][range.start as usize..range.end as usize]
                .copy_from_slice(elements);
            Ok(())
        })
        .unwrap();
}

/// The batch as the engine reads it.
fn with_view<T>(batch: &Batch, body: impl FnOnce(&StreamBatch<'_>) -> T) -> T {
    struct Stream {
        ids: Vec<i32>,
        labels: Vec<i32>,
        positions: Vec<i32>,
        starts: Vec<u32>,
    }
    let narrow = |numbers: &[usize]| numbers.iter().map(|number| *number as i32).collect::<Vec<i32>>();
    let streams: Vec<Stream> = batch
        .streams
        .iter()
        .map(|data| Stream {
            ids: narrow(&data.ids),
            labels: data.labels.iter().map(|label| *label as i32).collect(),
            positions: narrow(&data.positions),
            starts: data.starts.iter().chain([&data.ids.len()]).map(|start| *start as u32).collect(),
        })
        .collect();
    let views: Vec<StreamRows<'_>> = streams
        .iter()
        .map(|Stream { ids, labels, positions, starts }| StreamRows {
            ids,
            labels,
            positions,
            starts,
            keys: &[],
        })
        .collect();
    let inputs: Vec<Vec<i32>> =
        batch.inputs.iter().map(|numbers| numbers.iter().map(|number| *number as i32).collect()).collect();
    let inputs: Vec<FurtherInput<'_>> = inputs.iter().map(|numbers| FurtherInput::Indices(numbers)).collect();
    body(&StreamBatch { streams: &views, inputs: &inputs })
}

fn settings(stage: u8) -> Settings {
    Settings { stage, optimizer: Optimizer::Sgd, ..ROOMY }
}

fn sizes() -> StreamSizes {
    StreamSizes::of_streams(vec![vec![6, 9], vec![12, 9]])
}

fn assert_trains(graph: &Graph, settings: &Settings, ranks: usize, words: &str) {
    let target = &CpuTarget { threads: 1 };
    let compiled = Compiled::new(graph.clone(), ranks as u64, settings, target, sizes()).unwrap();
    compiled.program.check(settings.max_live).unwrap();
    let empty = graph.params.iter().map(|param| vec![f32::NAN; param.elements() as usize]).collect();
    let found = Mutex::new((Vec::new(), empty));
    if ranks == 1 {
        rank(&compiled, None, ranks, &found);
    } else {
        let job = LocalJob::create(ranks, 1 << 16).unwrap();
        std::thread::scope(|scope| {
            for number in 0..ranks {
                let comm = job.join(number, &JoinOptions::default()).unwrap();
                let (compiled, found) = (&compiled, &found);
                scope.spawn(move || rank(compiled, Some(comm), ranks, found));
            }
        });
    }
    let (losses, weights) = found.into_inner().unwrap();
    let (expected_losses, expected_weights) = expected(graph, ranks);
    assert_eq!(losses.len(), expected_losses.len());
    for (found, expected) in losses.iter().zip(&expected_losses) {
        let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-5 * expected;
        let same = found.len() == expected.len() && found.iter().zip(expected).all(is_near);
        assert!(same, "{words}: loss and parts {found:?}, {expected:?}");
    }
    for ((param, found), expected) in graph.params.iter().zip(&weights).zip(&expected_weights) {
        let apart = found.iter().zip(expected).map(|(found, expected)| (f64::from(*found) - expected).abs());
        let most = apart.fold(0.0, f64::max);
        assert!(most < 1e-5, "{words}: {} is {most} off", param.spec.name);
    }
}

fn assert_trains_everywhere(graph: &Graph) {
    for stage in 0..=3 {
        for ranks in [1, 2] {
            assert_trains(graph, &settings(stage), ranks, &format!("stage {stage}, {ranks} ranks"));
        }
    }
    let block = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };
    assert_trains(graph, &Settings { recompute: block, ..settings(3) }, 2, "recomputed and offloaded");
}

#[test]
fn two_streams_train_as_the_reference_does() {
    assert_trains_everywhere(&two_streams());
}

/// The parts of the loss of a step on one rank, and the weights after it.
fn one_step(graph: &Graph, counts: LossCounts) -> (Vec<f64>, Vec<f32>) {
    let compiled = Compiled::new(graph.clone(), 1, &settings(0), &CpuTarget { threads: 1 }, sizes()).unwrap();
    let memory = &compiled.memory;
    let device = Box::new(CpuDevice::new(1, memory.arenas()).unwrap());
    let recipe = Recipe { momentum: 0.0, weight_decay: [0.0, 0.0], max_norm: 0.0, ..Recipe::default() };
    let mut engine =
        Engine::new(&compiled, RankSetup { comm: None, device, recipe, decayed: &|_| false, seed: 1 })
            .unwrap();
    engine
        .load(&mut |param, range, elements| {
            let all = numbers(compiled.graph.param(param).elements(), param.index());
            elements.copy_from_slice(&all[range.start as usize..range.end as usize]);
            Ok(())
        })
        .unwrap();
    with_view(&Batch::new(graph, 1), |batch| engine.step_streams(&[*batch], counts, 0, &[RATE]).unwrap());
    let mut weights = Vec::new();
    let mut push = |_, _, elements: &[f32]| {
        weights.extend_from_slice(elements);
        Ok(())
    };
    engine.read(StateKind::Weights, &mut push).unwrap();
    (engine.record().unwrap().losses, weights)
}

#[test]
fn every_part_is_a_mean_over_a_count_of_its_own() {
    let graph = two_streams();
    let (parts, weights) = one_step(&graph, LossCounts::of_parts(&[10, 40]));
    let (of_tokens, _) = one_step(&graph, LossCounts::from(10));
    assert_eq!(parts[..2], [of_tokens[0], of_tokens[1] / 4.0]);
    // The same gradient: four times the count is a quarter of the weight.
    let mut weighted = graph.clone();
    weighted.loss_parts[1].weight /= 4.0;
    let (_, expected) = one_step(&weighted, LossCounts::from(10));
    assert_eq!(weights, expected);
    assert_ne!(weights, one_step(&graph, LossCounts::from(10)).1);
}

#[test]
fn an_evaluation_is_the_weighted_sum_of_the_parts() {
    let graph = two_streams();
    let weights = graph.params.iter().enumerate().map(|(salt, param)| numbers(param.elements(), salt));
    let weights = weights.map(|numbers| numbers.into_iter().map(f64::from).collect()).collect();
    let batch = Batch::new(&graph, 1);
    let expected = Interpreter::new(&graph, &batch.streams, weights).loss();
    let target = &CpuTarget { threads: 1 };
    let compiled = Compiled::new(graph.clone(), 1, &settings(0), target, sizes()).unwrap();
    let memory = &compiled.memory;
    let device = Box::new(CpuDevice::new(1, memory.arenas()).unwrap());
    let parts = RankSetup { comm: None, device, recipe: Recipe::default(), decayed: &|_| false, seed: 1 };
    let mut engine = Engine::new(&compiled, parts).unwrap();
    engine
        .load(&mut |param, range, elements| {
            let all = numbers(compiled.graph.param(param).elements(), param.index());
            elements.copy_from_slice(&all[range.start as usize..range.end as usize]);
            Ok(())
        })
        .unwrap();
    let found = with_view(&batch, |batch| engine.evaluate_streams(batch).unwrap());
    assert!((found - expected).abs() < 1e-5 * expected, "{found}, {expected}");
}

#[test]
fn a_loss_of_too_many_parts_is_refused() {
    let mut b = Builder::new(&[4]);
    b.unit("all", Role::Other, specs(&[("table", &[VOCAB, HIDDEN])])).unwrap();
    let table = b.param("table").unwrap();
    let x = b.embedding(b.ids(), table).unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        b.set_loss_part(name, 1.0);
        b.head_loss(x, table).unwrap();
    }
    let target = &CpuTarget { threads: 1 };
    let error = Compiled::new(b.finish().unwrap(), 1, &settings(0), target, vec![4]).unwrap_err().to_string();
    let expected = "the loss has 5 parts (a, b, c, d, e), and a step records at most 4: give parts with one weight one \
                    name";
    assert_eq!(error, expected);
}

#[test]
fn several_rows_of_a_token_train_as_the_reference_does() {
    assert_trains_everywhere(&several_rows());
}

#[test]
fn buffers_have_the_rows_of_their_stream() {
    let graph = several_rows();
    let compiled = Compiled::new(graph, 1, &settings(0), &CpuTarget { threads: 1 }, sizes()).unwrap();
    let bytes = |id: BufferId| compiled.span(0, id).bytes;
    let ids = compiled.graph.inputs[6];
    // 9 rows of three ids, as buffers begin and end on 256 bytes.
    assert_eq!(bytes(BufferId::Value(ids.index())), (4 * 9 * TIMES).next_multiple_of(256));
    assert_eq!([0, 1].map(|stream| bytes(BufferId::Starts(stream))), [256, 256]);
    let wide = compiled.graph.nodes.iter().find(|node| node.inputs[0] == ids).unwrap().outputs[0];
    assert_eq!(bytes(BufferId::Value(wide.index())), (4 * 9 * TIMES * HIDDEN).next_multiple_of(256));
}

#[test]
fn sizes_and_batches_that_do_not_fit_the_streams_are_named() {
    let target = &CpuTarget { threads: 1 };
    let compile =
        |sizes| Compiled::new(two_streams(), 1, &settings(0), target, StreamSizes::of_streams(sizes));
    for sizes in [vec![vec![12]], vec![vec![12, 8]], vec![vec![12, 9], vec![6, 9]], vec![]] {
        assert!(matches!(compile(sizes).unwrap_err(), CompileError::RowSizes { .. }));
    }
    let compiled = compile(vec![vec![12, 9]]).unwrap();
    let memory = &compiled.memory;
    let device = Box::new(CpuDevice::new(1, memory.arenas()).unwrap());
    let parts = RankSetup { comm: None, device, recipe: Recipe::default(), decayed: &|_| false, seed: 1 };
    let mut engine = Engine::new(&compiled, parts).unwrap();
    let batch = Batch::new(&compiled.graph, 1);
    with_view(&batch, |view| {
        let one = StreamBatch { streams: &view.streams[..1], inputs: &[] };
        let error = engine.evaluate_streams(&one).unwrap_err();
        assert_eq!(error.to_string(), "a micro-batch has 1 streams, and the model has 2");
        assert!(matches!(engine.evaluate(&view.streams[0]).unwrap_err(), RunError::Streams { .. }));
        let more = StreamBatch { streams: view.streams, inputs: &[FurtherInput::Indices(&[1])] };
        let error = engine.evaluate_streams(&more).unwrap_err();
        assert_eq!(error.to_string(), "a micro-batch has 1 further inputs, and the model has 0");
        let exchanged = StreamBatch { streams: &[view.streams[1], view.streams[0]], inputs: &[] };
        assert!(engine.evaluate_streams(&exchanged).is_ok(), "both fit");
    });
}
