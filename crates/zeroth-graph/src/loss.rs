//! What passes, staging and evaluation know of a loss: the op says it here once, and nothing else names an op of a loss.

use std::borrow::Cow;

use crate::{Graph, Group, LossPart, Node, Op};

/// What the op of a loss reads and gives. Its first operand is what it judges, such as a hidden state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossInfo {
    /// The part of the model's loss that each result belongs to: indices in [`Graph::loss_parts`].
    pub(crate) parts: [Option<usize>; 2],
    /// The place of the labels among its operands.
    pub labels: usize,
    /// Where its first parameter is a head, which projects the first operand to a vocabulary: the logits of a slice.
    pub head: Option<SliceLogits>,
    /// An operand of token ids besides the labels: its place, and the vocabulary that they are of.
    pub ids: Option<(usize, u64)>,
    /// What evaluation computes instead; `None` where it computes the same.
    pub evaluated: Option<EvaluatedLoss>,
}

/// The logits that a head computes for a slice of its rows at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceLogits {
    /// Those of its head, in the compute dtype.
    Compute,
    /// In f32, and beside them those of a second head, where that is a parameter of the node.
    F32,
}

/// A simpler loss over the first operands of another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvaluatedLoss {
    /// Its op, whose parts count with weight 1, and all others of the loss it replaces with weight 0.
    pub op: Op,
    /// Its operands.
    pub inputs: usize,
    /// Its parameters.
    pub params: usize,
    /// Its results.
    pub outputs: usize,
}

impl LossInfo {
    /// The parts of the model's loss that its results belong to, one each.
    pub fn parts(self) -> impl Iterator<Item = usize> {
        self.parts.into_iter().flatten()
    }
}

impl Op {
    /// Whether its result is a loss, which is not an operand of any op.
    pub const fn is_loss(self) -> bool {
        self.loss().is_some()
    }

    /// The parts of the model's loss that its results belong to, one each, as indices in [`Graph::loss_parts`].
    pub fn loss_parts(self) -> impl Iterator<Item = usize> {
        self.loss().into_iter().flat_map(LossInfo::parts)
    }
}

impl Node {
    /// What evaluation runs in its place: itself, or a simpler loss over its first operands.
    pub fn evaluated(&self) -> Cow<'_, Self> {
        let Some(EvaluatedLoss { op, inputs, params, outputs }) =
            self.op.loss().and_then(|loss| loss.evaluated)
        else {
            return Cow::Borrowed(self);
        };
        Cow::Owned(Self {
            op,
            inputs: self.inputs[..inputs].to_vec(),
            params: self.params[..params].to_vec(),
            outputs: self.outputs[..outputs].to_vec(),
            ..*self
        })
    }
}

impl Graph {
    /// The nodes that compute a loss, as indices. A part of the model's loss is the sum of those that belong to it.
    pub fn losses(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|index| self.nodes[*index].op.is_loss())
    }

    /// The nodes that project to a vocabulary. The first parameter is the projection of the model that is trained.
    pub fn heads(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.op.loss().is_some_and(|loss| loss.head.is_some()))
    }

    /// The nodes that evaluation runs, as indices, each as [`Node::evaluated`]: all of the model, and of a teacher what an evaluated
    /// loss follows from.
    pub fn evaluated_nodes(&self) -> Vec<usize> {
        let mut is_read = vec![false; self.values.len()];
        let mut nodes = Vec::new();
        for (index, node) in self.nodes.iter().enumerate().rev() {
            let is_run =
                node.group == Group::Model || node.outputs.iter().any(|output| is_read[output.index()]);
            if is_run {
                node.evaluated().inputs.iter().for_each(|input| is_read[input.index()] = true);
                nodes.push(index);
            }
        }
        nodes.reverse();
        nodes
    }

    /// The graph of evaluation. Values, parameters, units and parts of the loss keep their indices; inputs that only a trained loss
    /// reads are gone. Where every loss is evaluated as it is trained, it is this graph.
    pub fn evaluated(&self) -> Cow<'_, Self> {
        if self.losses().all(|node| matches!(self.nodes[node].evaluated(), Cow::Borrowed(_))) {
            return Cow::Borrowed(self);
        }
        let mut graph = self.clone();
        let nodes =
            self.evaluated_nodes().into_iter().map(|index| self.nodes[index].evaluated().into_owned());
        graph.nodes = nodes.collect();
        for node in self.losses().map(|index| &self.nodes[index]) {
            let Some(evaluated) = node.op.loss().and_then(|loss| loss.evaluated) else { continue };
            let not_read = &node.inputs[evaluated.inputs..];
            graph.inputs.retain(|input| !not_read.contains(input));
            node.op.loss_parts().for_each(|part| graph.loss_parts[part].weight = 0.0);
            let parts = evaluated.op.loss_parts();
            parts.for_each(|part| graph.loss_parts[part].weight = LossPart::CROSS_ENTROPY.weight);
        }
        Cow::Owned(graph)
    }
}
