//! A reference interpreter: every op and its gradient in f64, element by element.
//!
//! It is slow and simple. Tests check it against finite differences and PyTorch, and kernels and executors against it. The
//! functions are those of the ops' files.

pub mod finite_differences;
mod interpreter;

pub(crate) use interpreter::Gradients;
pub use interpreter::{Data, Interpreter};

use crate::op;
pub use crate::op::{
    Attention, Routed, TeacherRows, activation, activation_backward, attention, attention_backward,
    balance_loss, combine_rows, distill_loss, embedding, embedding_backward, gated_activation,
    gated_activation_backward, gated_rows, gated_rows_backward, gather_rows, grouped_linear,
    grouped_linear_backward, head_loss, linear, linear_backward, position_bias, position_bias_backward,
    rms_norm, rms_norm_backward, rope, route, route_backward,
};
use crate::{Backward, GradWrite};

impl Interpreter<'_> {
    /// The loss, by forward alone.
    pub fn loss(&mut self) -> f64 {
        for index in 0..self.graph.nodes.len() {
            self.run_forward(index);
        }
        self.weighted_loss()
    }

    /// The sum of the parts of the loss that was computed last, each times its weight.
    fn weighted_loss(&self) -> f64 {
        let parts = self.graph.loss_parts.iter().zip(self.loss_parts());
        parts.map(|(part, loss)| part.weight * loss).sum()
    }

    /// The parts of the loss that was computed last.
    pub fn loss_parts(&self) -> Vec<f64> {
        let mut parts = vec![0.0; self.graph.loss_parts.len()];
        for node in &self.graph.nodes {
            for (part, loss) in node.op.loss_parts().zip(&node.outputs) {
                parts[part] += self.value(*loss)[0];
            }
        }
        parts
    }

    /// The loss and all gradients, by forward without its losses and then backward.
    pub fn train(&mut self, backward: &Backward) -> f64 {
        for index in 0..self.graph.nodes.len() {
            if !self.graph.nodes[index].op.is_loss() {
                self.run_forward(index);
            }
        }
        for index in 0..backward.nodes.len() {
            self.run_backward(backward, index);
        }
        self.weighted_loss()
    }

    /// Runs one node of forward.
    pub fn run_forward(&mut self, node: usize) {
        let node = &self.graph.nodes[node];
        for (value, output) in node.outputs.iter().zip(op::forward(self, node)) {
            self.values[value.index()] = output;
        }
    }

    /// Runs one node of backward.
    pub fn run_backward(&mut self, backward: &Backward, node: usize) {
        self.values.resize(backward.values.len(), Vec::new());
        let gradients = &backward.values[self.widths.len()..];
        self.widths.extend(gradients.iter().map(|info| info.width as usize));
        let node = &backward.nodes[node];
        let Gradients { values, params } = op::backward(self, node, &self.graph.nodes[node.of]);
        for (param, gradient) in params.into_iter().filter(|(param, _)| node.accumulates_into.contains(param))
        {
            self.gradients[param.index()].iter_mut().zip(gradient).for_each(|(sum, add)| *sum += add);
        }
        for ((value, write), output) in node.outputs.iter().zip(values) {
            let there = &mut self.values[value.index()];
            match write {
                GradWrite::Write => *there = output,
                GradWrite::Add => there.iter_mut().zip(output).for_each(|(sum, add)| *sum += add),
            }
        }
    }
}
