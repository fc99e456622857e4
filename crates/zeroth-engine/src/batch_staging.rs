//! Host staging of micro-batches: data padded to a row count that the program was lowered for.

use zeroth_cpu::{Pool, RopeTable, rope_angles};
use zeroth_graph::{Graph, Kind, Node, Op, Rotary, Rows, Stream, Value};
use zeroth_kernel::{CacheRange, RowKey};
use zeroth_program::{Program, cross_streams};

use super::RunError;

/// A micro-batch of concatenated sequences: of a model's only stream, or of one of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamRows<'a> {
    /// Token ids.
    pub ids: &'a [i32],
    /// The label of each token, already shifted; negative labels are not trained.
    pub labels: &'a [i32],
    /// Their positions in their sequences.
    pub positions: &'a [i32],
    /// The start of each sequence, then the end of the last.
    pub starts: &'a [u32],
    /// The sample and position of every token; may be empty in a model without dropout.
    pub keys: &'a [RowKey],
}

impl StreamRows<'_> {
    /// Without sequences.
    pub const EMPTY: Self = Self { ids: &[], labels: &[], positions: &[], starts: &[0], keys: &[] };
}

/// A source of a step's micro-batches. The engine takes one at a time, in order, and uploads it at once, so that memory does
/// not grow with accumulation.
pub trait MicroBatches {
    /// The error of the run or of reading data.
    type Error: From<RunError>;

    /// Hands the next micro-batch to `feed`, once.
    fn next(&mut self, feed: Feed<'_>) -> Result<(), Self::Error>;
}

/// Takes a micro-batch with all streams and further inputs of the model.
pub type Feed<'a> = &'a mut dyn FnMut(&StreamBatch<'_>) -> Result<(), RunError>;

/// An input of a model besides its streams: as many numbers as tokens times its width.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FurtherInput<'a> {
    /// Integers, such as the rows of a table or labels.
    Indices(&'a [i32]),
    /// Numbers.
    Statistics(&'a [f32]),
}

/// A micro-batch of a model with several token streams, or with further inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamBatch<'a> {
    /// The micro-batch of each stream.
    pub streams: &'a [StreamRows<'a>],
    /// The further inputs, in the order of the graph's.
    pub inputs: &'a [FurtherInput<'a>],
}

/// The upload buffers of a micro-batch, allocated once and refilled.
pub(super) struct BatchStaging {
    pub(super) streams: Vec<StreamStaging>,
    pub(super) inputs: Vec<InputStaging>,
    /// The cache rows of every token's sequence; empty without a cache.
    pub(super) ranges: Vec<CacheRange>,
    /// Those of the source of every token's sequence; empty without a cache for cross attention.
    pub(super) source_ranges: Vec<CacheRange>,
    /// The streams of the queries and of the keys of cross attention, where the model has it.
    pub(super) cross: Option<[usize; 2]>,
}

impl BatchStaging {
    /// Buffers for the largest micro-batch of a program.
    pub(super) fn new(graph: &Graph, program: &Program) -> Self {
        let cached_tokens = program.cached_tokens;
        let most_rows = graph.streams.iter().map(|stream| stream.rows as usize).max().unwrap_or(0);
        let ranges = |cached: u64| vec![CacheRange::default(); if cached > 0 { most_rows } else { 0 }];
        let of_streams = |input: &Value| {
            graph.streams.iter().any(|stream| [stream.ids, stream.labels, stream.positions].contains(input))
        };
        let further = graph.inputs.iter().filter(|input| !of_streams(input));
        Self {
            streams: graph
                .streams
                .iter()
                .map(|stream| StreamStaging::new(graph, stream, cached_tokens))
                .collect(),
            inputs: further.map(|input| InputStaging::new(graph, *input)).collect(),
            ranges: ranges(cached_tokens),
            source_ranges: ranges(program.cached_source_tokens),
            cross: cross_streams(graph),
        }
    }

    /// Copies the micro-batch of every stream, padded to its rows.
    pub(super) fn fill(&mut self, streams: &[StreamRows<'_>], rows: &[u64]) -> Result<(), RunError> {
        for ((staging, batch), rows) in self.streams.iter_mut().zip(streams).zip(rows) {
            staging.fill(batch, *rows as usize)?;
        }
        Ok(())
    }

    /// Copies the cache rows of tokens and of their sources, padded to `rows` tokens.
    pub(super) fn fill_ranges(&mut self, [ranges, source_ranges]: [&[CacheRange]; 2], rows: usize) {
        let both = [(&mut self.ranges, ranges), (&mut self.source_ranges, source_ranges)];
        for (to, ranges) in both.into_iter().filter_map(|(to, ranges)| Some((to.get_mut(..rows)?, ranges))) {
            pad(to, ranges, CacheRange::default());
        }
    }

    /// Copies the further inputs of the micro-batch that was copied last. An evaluation has no teacher and none of its inputs.
    pub(super) fn fill_inputs(
        &mut self,
        inputs: &[FurtherInput<'_>],
        rows: &[u64],
        reads_teacher: bool,
    ) -> Result<(), RunError> {
        let is_read = |staging: &&mut InputStaging| reads_teacher || !staging.is_of_teacher;
        let (found, expected) = (inputs.len(), self.inputs.iter_mut().filter(is_read).count());
        if found != expected {
            return Err(RunError::Streams { what: "further inputs", found, expected });
        }
        let streams = &self.streams;
        for (staging, numbers) in self.inputs.iter_mut().filter(is_read).zip(inputs) {
            staging.fill(*numbers, streams[staging.stream].tokens, rows[staging.stream] as usize)?;
        }
        Ok(())
    }

    /// The common length of all sequences of all streams, where they fill the rows.
    pub(super) fn length(&self) -> Option<usize> {
        let first = self.streams.first()?.length;
        first.filter(|_| self.streams.iter().all(|stream| stream.length == first))
    }
}

/// A further input.
pub(super) struct InputStaging {
    pub(super) value: Value,
    /// Integers, or the bits of f32.
    pub(super) numbers: Vec<i32>,
    kind: Kind,
    /// Whether only a distillation loss reads it, as what a cache has of the teacher.
    is_of_teacher: bool,
    stream: usize,
    width: usize,
    /// Rows of the smallest table that its numbers index.
    known: u64,
    /// What pads it: the first row of a table, or a label that is not trained.
    padding: i32,
}

impl InputStaging {
    fn new(graph: &Graph, value: Value) -> Self {
        let info = graph.info(value);
        let Rows::Stream(stream) = info.rows else { unreachable!("inputs have the rows of a stream") };
        let is_label = graph
            .losses()
            .map(|node| &graph.nodes[node])
            .any(|node| node.op.loss().is_some_and(|loss| node.inputs[loss.labels] == value));
        Self {
            value,
            kind: info.kind,
            is_of_teacher: !graph.evaluated().inputs.contains(&value),
            numbers: vec![0; (graph.streams[stream].rows * info.width) as usize],
            stream,
            width: info.width as usize,
            known: known(graph, value),
            padding: if is_label { -100 } else { 0 },
        }
    }

    fn fill(&mut self, numbers: FurtherInput<'_>, tokens: usize, rows: usize) -> Result<(), RunError> {
        let numbers = match (numbers, self.kind) {
            (FurtherInput::Indices(numbers), Kind::Index) => {
                let used = numbers.iter().filter(|number| self.padding == 0 || **number >= 0);
                within("number", used, self.known)?;
                numbers
            }
            (FurtherInput::Statistics(numbers), Kind::Statistic) => bytemuck::cast_slice(numbers),
            _ => return Err(RunError::InputKind { expected: self.kind }),
        };
        let (found, expected) = (numbers.len(), tokens * self.width);
        if found != expected {
            return Err(RunError::Batch { what: "numbers of a further input", found, expected });
        }
        self.numbers.clear();
        self.numbers.extend_from_slice(numbers);
        self.numbers.resize(rows * self.width, self.padding);
        Ok(())
    }
}

/// The upload buffers of a stream.
pub(super) struct StreamStaging {
    pub(super) ids: Vec<i32>,
    pub(super) labels: Vec<i32>,
    pub(super) positions: Vec<i32>,
    /// The number of entries, then the entries.
    pub(super) starts: Vec<u32>,
    pub(super) keys: Vec<RowKey>,
    pub(super) rotaries: Vec<RotaryStaging>,
    /// Tokens of the micro-batch.
    tokens: usize,
    /// The common length of all sequences, where they fill the rows.
    length: Option<usize>,
    /// Rows of the smallest embedding table.
    known_ids: u64,
    /// Rows of the head's projection.
    known_labels: u64,
    pool: Pool,
}

/// The angles of a micro-batch for one rotary embedding.
pub(super) struct RotaryStaging {
    /// [rows, pairs].
    pub(super) cosines: Vec<f32>,
    pub(super) sines: Vec<f32>,
    rotary: Rotary,
    table: Angles,
    /// The frequencies of a sequence beyond the trained context, computed per sequence.
    stretched: RopeTable,
}

/// Cosines and sines of every position, for sequences within the trained context.
struct Angles {
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl StreamStaging {
    fn new(graph: &Graph, stream: &Stream, cached_tokens: u64) -> Self {
        // A cached sequence may be longer than the rows of a micro-batch.
        let (positions, rows) = (stream.rows.max(cached_tokens) as usize, stream.rows as usize);
        let pool = Pool::new(1);
        let rotaries = graph.rotaries.iter();
        let rotaries = rotaries.map(|rotary| RotaryStaging::new(rotary, rows, positions, &pool)).collect();
        Self {
            ids: vec![0; rows],
            labels: vec![0; rows],
            positions: vec![0; rows],
            starts: vec![0; rows + 2],
            keys: vec![RowKey { sample: 0, position: 0, epoch: 0 }; rows],
            rotaries,
            tokens: 0,
            length: None,
            known_ids: known(graph, stream.ids),
            known_labels: known(graph, stream.labels),
            pool,
        }
    }

    /// Copies a micro-batch, padded to `rows`.
    fn fill(&mut self, batch: &StreamRows<'_>, rows: usize) -> Result<(), RunError> {
        let tokens = batch.ids.len();
        let check = |what, found: usize, expected: usize| {
            if found == expected { Ok(()) } else { Err(RunError::Batch { what, found, expected }) }
        };
        check("labels", batch.labels.len(), tokens)?;
        check("positions", batch.positions.len(), tokens)?;
        check("as the end of its sequences", batch.starts.last().map_or(0, |end| *end as usize), tokens)?;
        within("token", batch.ids, self.known_ids)?;
        let trained = |label: &&i32| **label >= 0;
        within("label", batch.labels.iter().filter(trained), self.known_labels)?;
        pad(&mut self.ids[..rows], batch.ids, 0);
        pad(&mut self.labels[..rows], batch.labels, -100);
        pad(&mut self.positions[..rows], batch.positions, 0);
        let last = self.starts.len() - 1;
        check("sequences more than there is room", batch.starts.len().saturating_sub(last), 0)?;
        self.starts[0] = batch.starts.len() as u32;
        self.starts[1..=batch.starts.len()].copy_from_slice(batch.starts);
        if !batch.keys.is_empty() {
            check("keys", batch.keys.len(), tokens)?;
            pad(&mut self.keys[..rows], batch.keys, RowKey { sample: 0, position: 0, epoch: 0 });
        }
        self.tokens = tokens;
        self.length = one_length(batch.starts, rows);
        for rotary in &mut self.rotaries {
            rotary.fill(batch, &self.positions[..rows], &self.pool);
        }
        Ok(())
    }
}

impl RotaryStaging {
    fn new(rotary: &Rotary, rows: usize, positions: usize, pool: &Pool) -> Self {
        let pairs = rotary.frequencies.len();
        let zeros = || vec![0.0; positions * pairs];
        let mut table = Angles { cosines: zeros(), sines: zeros() };
        let positions: Vec<i32> = (0..positions as i32).collect();
        let mut stretched =
            RopeTable { inv_freq: Vec::with_capacity(pairs), attention_scaling: rotary.scale as f32 };
        angles(pool, rotary, &mut stretched, 0, &positions, &mut table.cosines, &mut table.sines);
        let (cosines, sines) = (vec![0.0; rows * pairs], vec![0.0; rows * pairs]);
        Self { cosines, sines, rotary: rotary.clone(), table, stretched }
    }

    /// Pairs of elements that it rotates.
    pub(super) fn pairs(&self) -> usize {
        self.rotary.frequencies.len()
    }

    /// Copies the angles of these positions, padding included.
    fn fill(&mut self, batch: &StreamRows<'_>, positions: &[i32], pool: &Pool) {
        let pairs = self.pairs();
        for (row, position) in positions.iter().enumerate() {
            let (to, from) = (row * pairs, *position as usize * pairs);
            self.cosines[to..to + pairs].copy_from_slice(&self.table.cosines[from..from + pairs]);
            self.sines[to..to + pairs].copy_from_slice(&self.table.sines[from..from + pairs]);
        }
        let Some(stretch) = self.rotary.dynamic else { return };
        for sequence in batch.starts.windows(2) {
            let (begin, end) = (sequence[0] as usize, sequence[1] as usize);
            if (end - begin) as u64 > stretch.max_positions {
                let (cosines, sines) = (
                    &mut self.cosines[begin * pairs..end * pairs],
                    &mut self.sines[begin * pairs..end * pairs],
                );
                let positions = &batch.positions[begin..end];
                let (table, length) = (&mut self.stretched, (end - begin) as u64);
                angles(pool, &self.rotary, table, length, positions, cosines, sines);
            }
        }
    }
}

/// Rows of the smallest table that an input's numbers index: those of an embedding or of a head, a cached teacher's included.
fn known(graph: &Graph, input: Value) -> u64 {
    let rows = |node: &Node| graph.param(node.params[0]).spec.shape[0];
    let indexed = |node: &Node| match node.op {
        Op::Embedding if node.inputs[0] == input => Some(rows(node)),
        op => {
            let loss = op.loss()?;
            let labelled = loss.head.is_some() && node.inputs[loss.labels] == input;
            let ids = loss.ids.filter(|(place, _)| node.inputs[*place] == input);
            if labelled { Some(rows(node)) } else { ids.map(|(_, vocabulary)| vocabulary) }
        }
    };
    graph.nodes.iter().filter_map(indexed).min().unwrap_or(u64::MAX)
}

/// Kernels index tables with these numbers, which come from files: none may be out of range.
fn within<'a>(
    what: &'static str,
    numbers: impl IntoIterator<Item = &'a i32>,
    vocabulary: u64,
) -> Result<(), RunError> {
    let is_known = |number: i32| u64::try_from(number).is_ok_and(|number| number < vocabulary);
    match numbers.into_iter().find(|number| !is_known(**number)) {
        None => Ok(()),
        Some(number) => Err(RunError::Vocabulary { what, number: *number, vocabulary }),
    }
}

fn one_length(starts: &[u32], rows: usize) -> Option<usize> {
    let length = starts.get(1)?.checked_sub(*starts.first()?)?;
    let fills = starts.last().is_some_and(|end| *end as usize == rows);
    let alike = starts.windows(2).all(|sequence| sequence[1].checked_sub(sequence[0]) == Some(length));
    (length > 0 && fills && alike).then_some(length as usize)
}

fn pad<T: Copy>(to: &mut [T], from: &[T], rest: T) {
    to[..from.len()].copy_from_slice(from);
    to[from.len()..].fill(rest);
}

fn angles(
    pool: &Pool,
    rotary: &Rotary,
    table: &mut RopeTable,
    length: u64,
    positions: &[i32],
    cosines: &mut [f32],
    sines: &mut [f32],
) {
    table.inv_freq.clear();
    table.inv_freq.extend(rotary.frequencies_at(length).map(|frequency| frequency as f32));
    if !table.inv_freq.is_empty() {
        rope_angles(pool, table, positions, cosines, sines);
    }
}

#[cfg(test)]
mod tests {
    use super::{one_length, within};

    #[test]
    fn a_token_that_the_model_does_not_have_is_named() {
        assert!(within("token", &[0, 7, 255], 256).is_ok());
        for number in [256, 1 << 30, i32::MAX, -1, i32::MIN] {
            let error = within("token", &[3, number, 4], 256).unwrap_err().to_string();
            assert!(error.contains(&format!("the token {number}, and the model has 256")), "{error}");
        }
    }

    #[test]
    fn sequences_have_one_length_where_all_are_alike_and_fill_the_rows() {
        assert_eq!(one_length(&[0, 4, 8, 12], 12), Some(4));
        assert_eq!(one_length(&[0, 7], 7), Some(7));
        assert_eq!(one_length(&[0, 4, 8, 12], 16), None, "rows of padding");
        assert_eq!(one_length(&[0, 4, 9, 12], 12), None, "other lengths");
        assert_eq!(one_length(&[0, 0], 0), None, "nothing");
        assert_eq!(one_length(&[0], 0), None, "no sequence");
    }
}
