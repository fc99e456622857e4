//! Rows of golden data, and the micro-batches that they are packed into.

use serde_json::Value;
use zeroth_engine::{Feed, MicroBatches, RunError, StreamBatch, StreamRows};
use zeroth_kernel::RowKey;
use zeroth_model::ModelConfig;

use super::Golden;

pub(crate) struct Row {
    /// The source, of a row of an encoder-decoder.
    pub(super) source: Option<Vec<i32>>,
    pub(super) ids: Vec<i32>,
    /// Shifted: what each token should predict.
    pub(super) labels: Vec<i32>,
}

/// Rows end to end.
#[derive(Default)]
pub(super) struct Packed {
    pub(super) ids: Vec<i32>,
    pub(super) labels: Vec<i32>,
    pub(super) positions: Vec<i32>,
    pub(super) starts: Vec<u32>,
    pub(super) keys: Vec<RowKey>,
}

impl Golden {
    pub(super) fn packed(&self, first: u64, count: u64) -> Packed {
        self.packed_of(first, count, |row| (&row.ids, &row.labels))
    }

    /// The streams of a micro-batch: those of a source, where the model has an encoder, and of a target.
    pub(super) fn streams(&self, first: u64, count: u64) -> Vec<Packed> {
        let target = self.packed(first, count);
        if self.rows[0].source.is_none() {
            return vec![target];
        }
        let longest = self.rows.iter().filter_map(|row| row.source.as_ref()).map(Vec::len).max();
        let ignored = vec![-100; longest.unwrap()];
        let source = self.packed_of(first, count, |row| {
            let source = row.source.as_deref().unwrap();
            (source, &ignored[..source.len()])
        });
        vec![source, target]
    }

    fn packed_of<'r>(
        &'r self,
        first: u64,
        count: u64,
        of: impl Fn(&'r Row) -> (&'r [i32], &'r [i32]),
    ) -> Packed {
        let mut packed = Packed::default();
        for place in first..first + count {
            let (ids, labels) = of(&self.rows[place as usize % self.rows.len()]);
            packed.starts.push(packed.ids.len() as u32);
            packed.positions.extend(0..ids.len() as i32);
            let epoch = (place / self.rows.len() as u64) as u32;
            let key = |position| RowKey { sample: place % self.rows.len() as u64, position, epoch };
            packed.keys.extend((0..ids.len() as u32).map(key));
            packed.ids.extend(ids);
            packed.labels.extend(labels);
        }
        packed.starts.push(packed.ids.len() as u32);
        packed
    }
}

/// Pairs of a source and a target.
pub(super) struct PairBatches<'a>(pub(super) std::slice::Iter<'a, Vec<Packed>>);

impl MicroBatches for PairBatches<'_> {
    type Error = RunError;

    fn next(&mut self, feed: Feed<'_>) -> Result<(), RunError> {
        let [source, target] = &self.0.next().unwrap()[..] else { panic!("a pair has two streams") };
        feed(&StreamBatch { streams: &[source.view(), target.view()], inputs: &[] })
    }
}

impl Packed {
    pub(super) fn view(&self) -> StreamRows<'_> {
        let Self { ids, labels, positions, starts, keys } = self;
        StreamRows { ids, labels, positions, starts, keys }
    }
}

impl Row {
    /// Replaces tokens that a vocabulary of `most` does not have.
    pub(crate) fn clamp(&mut self, most: i32) {
        for number in self.ids.iter_mut().chain(&mut self.labels) {
            *number = (*number).min(most - 1);
        }
    }

    pub(super) fn read(line: &str, config: &ModelConfig) -> Self {
        let row: Value = serde_json::from_str(line).unwrap();
        let numbers = |key: &str| -> Vec<i32> {
            row[key].as_array().unwrap().iter().map(|n| n.as_i64().unwrap() as i32).collect()
        };
        let (ids, labels) = (numbers("input_ids"), numbers("labels"));
        let Some(target) = config.target_tokens else {
            // The shift by one: a token predicts the next one's label, and the last predicts nothing.
            let labels = labels.into_iter().skip(1).chain([-100]).collect();
            return Self { source: None, ids, labels };
        };
        // The decoder's input is the label before, as `_shift_right` of transformers has it.
        let [start, padding] = [target.start, target.pad.unwrap()].map(|id| id as i32);
        let shifted =
            labels[..labels.len() - 1].iter().map(|label| if *label < 0 { padding } else { *label });
        Self { source: Some(ids), ids: [start].into_iter().chain(shifted).collect(), labels }
    }
}
