//! Automatic differentiation: backward is derived node by node, from the loss to the first op.
//!
//! The file of an op defines what its gradient reads and writes. The gradient of a value with several uses is the sum of their
//! contributions, in the order of backward; a linear accumulates into it directly. Gradients of parameters are
//! accumulated in the unit's flat gradient buffer, in f32.

use crate::gradient::Deriver;
use crate::{Backward, Graph, GraphError, Value, op};

impl Graph {
    /// Derives backward. Frozen parameters get no gradient, and nothing is computed for them alone.
    pub fn backward(&self) -> Result<Backward, GraphError> {
        let mut deriver = Deriver {
            graph: self,
            needed: needed(self),
            values: self.values.clone(),
            gradients: vec![None; self.values.len()],
            nodes: Vec::new(),
        };
        for (index, node) in self.nodes.iter().enumerate().rev() {
            op::derive(&mut deriver, index, node);
        }
        let losses: Vec<Value> =
            self.losses().flat_map(|index| self.nodes[index].outputs.iter().copied()).collect();
        if losses.is_empty() {
            return Err(GraphError::NoLoss);
        }
        let mut first_producers = vec![None; self.params.len()];
        for (index, node) in deriver.nodes.iter().enumerate() {
            for param in &node.accumulates_into {
                first_producers[param.index()].get_or_insert(index);
            }
        }
        Ok(Backward { values: deriver.values, nodes: deriver.nodes, losses, first_producers })
    }
}

/// For each value, whether it depends on a trainable parameter: only then its gradient is computed.
fn needed(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.values.len()];
    for node in &graph.nodes {
        let trains = node.params.iter().any(|id| graph.param(*id).spec.trainable);
        if trains || node.inputs.iter().any(|value| needed[value.index()]) {
            for output in &node.outputs {
                needed[output.index()] = true;
            }
        }
    }
    needed
}
