//! Values that share the buffer of another value, so that nothing is allocated for them.
//!
//! A `linear_add`, and a `grouped_linear_add`, adds to its base in place where nothing else reads the base. Without gradients dropout is the identity:
//! it is not run, and its output is its input.

use zeroth_graph::{Graph, Op, UnitId};

use crate::SectionKind;

/// For each value of the graph, the value whose buffer holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedBuffers {
    in_training: Vec<usize>,
    without_gradients: Vec<usize>,
}

impl SharedBuffers {
    pub(crate) fn find(graph: &Graph) -> Self {
        let mut uses = vec![0; graph.values.len()];
        for input in graph.nodes.iter().flat_map(|node| &node.inputs) {
            uses[input.index()] += 1;
        }
        // The unit of the linear that computes a value: recomputation drops values unit by unit.
        let mut linears: Vec<Option<UnitId>> = vec![None; graph.values.len()];
        let own: Vec<usize> = (0..graph.values.len()).collect();
        let mut shared = Self { in_training: own.clone(), without_gradients: own };
        for node in &graph.nodes {
            let holders = [&mut shared.in_training, &mut shared.without_gradients];
            match node.op {
                Op::Linear | Op::GroupedLinear => linears[node.outputs[0].index()] = Some(node.unit),
                Op::LinearAdd { .. } | Op::GroupedLinearAdd { .. } => {
                    let base = node.inputs[0].index();
                    // No gradient reads the output of a linear.
                    let is_last_reader = uses[base] == 1 && linears[base] == Some(node.unit);
                    for holders in holders.into_iter().filter(|_| is_last_reader) {
                        holders[node.outputs[0].index()] = holders[base];
                    }
                }
                Op::Dropout { .. } => {
                    let holders = &mut shared.without_gradients;
                    holders[node.outputs[0].index()] = holders[node.inputs[0].index()];
                }
                _ => {}
            }
        }
        shared
    }

    /// The value whose buffer holds a value of forward or backward. Gradients have their own.
    pub(crate) fn holder(&self, kind: SectionKind, value: usize) -> usize {
        let holders = if kind.is_micro_batch() { &self.in_training } else { &self.without_gradients };
        holders.get(value).copied().unwrap_or(value)
    }
}
