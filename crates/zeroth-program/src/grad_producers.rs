//! Producers of parameter gradients: which backward ops write each gradient, and whether they can cast it.

use zeroth_base::DType;
use zeroth_graph::{Backward, GradNode, GradOp, Graph, SliceLogits};
use zeroth_kernel::HeadLossDims;

use super::{Settings, Types};

/// The ops that produce a parameter's gradient in a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradProducers {
    /// One matmul, all of it at once.
    Matmul,
    /// The head, except for the rows of the micro-batch's own tokens, which the embedding completes.
    HeadAndEmbedding,
    /// A matmul writes first; other ops, or later slices of the same matmul, accumulate.
    MatmulFirst,
    /// Ops that accumulate; or none.
    Accumulating,
}

impl GradProducers {
    /// Whether they can write the communication dtype: each element is complete when it is written.
    pub(super) const fn can_cast(self) -> bool {
        matches!(self, Self::Matmul | Self::HeadAndEmbedding)
    }
}

/// The producers of each parameter's gradient.
pub(super) fn grad_producers(graph: &Graph, backward: &Backward, settings: &Settings) -> Vec<GradProducers> {
    let mut all: Vec<Vec<&GradNode>> = vec![Vec::new(); graph.params.len()];
    for node in &backward.nodes {
        node.accumulates_into.iter().for_each(|param| all[param.index()].push(node));
    }
    let head_rounds = head_rounds(graph, settings);
    // The head leaves rows of its own tokens alone: it must see the tokens that the embedding looks up.
    let alike = |head: &GradNode, embedding: &GradNode| {
        let [x, ids] = [head, embedding].map(|node| graph.info(node.inputs[0]));
        x.rows == ids.rows.times(ids.width)
    };
    let head = |op: zeroth_graph::Op| op.loss().and_then(|loss| loss.head);
    let is_head = |node: &GradNode| head(graph.nodes[node.of].op).is_some();
    let of = |(place, nodes): (usize, &Vec<&GradNode>)| {
        let is_matmul = |node: &GradNode| {
            let weight = graph.nodes[node.of].params.first().map(|weight| weight.index());
            let is_dw = matches!(
                node.op,
                GradOp::LinearParams
                    | GradOp::LinearAddParams { .. }
                    | GradOp::GroupedLinearParams
                    | GradOp::GroupedLinearAddParams { .. }
            );
            is_dw && weight == Some(place)
        };
        match nodes[..] {
            [node] if is_matmul(node) => GradProducers::Matmul,
            [node] if is_head(node) && head_rounds => GradProducers::Matmul,
            [head, rows]
                if is_head(head) && rows.op == GradOp::Embedding && head_rounds && alike(head, rows) =>
            {
                GradProducers::HeadAndEmbedding
            }
            // The head may process its rows in slices.
            [first, ..] if is_matmul(first) || is_head(first) => GradProducers::MatmulFirst,
            _ => GradProducers::Accumulating,
        }
    };
    all.iter().enumerate().map(of).collect()
}

/// Whether every head can write its weight gradient in the communication dtype: that must be the dtype of its operands,
/// and the largest micro-batch, and so every other, must be one slice.
fn head_rounds(graph: &Graph, settings: &Settings) -> bool {
    let Types { compute, communication } = settings.types;
    graph.heads().all(|head| {
        let [vocab, hidden] = [0, 1].map(|place| graph.param(head.params[0]).spec.shape[place] as usize);
        let rows = graph.most_rows(graph.info(head.inputs[0]).rows) as usize;
        let is_narrow = compute == communication && compute != DType::F32;
        let dims = HeadLossDims::new(rows, hidden, vocab);
        let is_one_slice = match head.op.loss().and_then(|loss| loss.head) {
            Some(SliceLogits::F32) => {
                let second = head.params.get(1).map_or(0, |weight| graph.param(*weight).spec.shape[0]);
                dims.is_one_distill_slice(second as usize)
            }
            Some(SliceLogits::Compute) | None => dims.is_one_slice(compute),
        };
        settings.head_rounds && is_narrow && is_one_slice
    })
}
