//! A scaled matmul added to a value: the outer matrix of a LoRA adapter.

use super::linear::{linear, linear_backward};
use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, ParamId, Value};

impl Builder {
    /// `base + scale · u · wᵀ`.
    pub fn linear_add(
        &mut self,
        base: Value,
        u: Value,
        weight: ParamId,
        scale: f64,
    ) -> Result<Value, GraphError> {
        let op = Op::LinearAdd { scale };
        if !scale.is_finite() {
            return Err(self.shape_error(op, "the scale", "a finite number", scale.to_string()));
        }
        let [out, inner] = self.param_shape(op, weight, "the weight")?;
        self.expect_width(op, u, inner)?;
        self.expect_width(op, base, out)?;
        self.expect_rows(op, u, base)?;
        self.push(op, &[base, u], &[weight], &[self.activation_like(base, out)]).map(|outputs| outputs[0])
    }
}

/// The gradient of `base` is that of the result: one value serves both.
pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node, scale: f64) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let [base, u] = [node.inputs[0], node.inputs[1]];
    deriver.push(index, GradOp::LinearAddParams { scale }, vec![u, dy], Vec::new(), Vec::new(), true);
    if deriver.needs(u) {
        let du = deriver.fresh(u);
        let outputs = vec![(du, GradWrite::Write)];
        let op = GradOp::LinearAddInput { scale };
        deriver.push(index, op, vec![dy], node.params.clone(), outputs, false);
        deriver.contribute(index, u, du);
    }
    deriver.contribute(index, base, dy);
    if let Some(given) = &mut deriver.gradients[base.index()] {
        given.shared |= given.value == dy;
    }
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, scale: f64) -> Vec<Vec<f64>> {
    let [base, u] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    let product = linear(u, interpreter.param(node.params[0]), None, interpreter.width(node.inputs[1]));
    vec![base.iter().zip(product).map(|(base, product)| base + scale * product).collect()]
}

pub(super) fn backward_input(interpreter: &Interpreter<'_>, node: &GradNode, scale: f64) -> Gradients {
    let (dy, w) = (interpreter.value(node.inputs[0]), interpreter.param(node.params[0]));
    let inner = w.len() / interpreter.width(node.inputs[0]);
    let u = vec![0.0; dy.len() / interpreter.width(node.inputs[0]) * inner];
    let [du, ..] = linear_backward(&u, w, dy, inner);
    Gradients::of_values(vec![du.into_iter().map(|du| scale * du).collect()])
}

pub(super) fn backward_params(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    of: &Node,
    scale: f64,
) -> Gradients {
    let [u, dy] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    let [_, dw, _] =
        linear_backward(u, interpreter.param(of.params[0]), dy, interpreter.width(node.inputs[0]));
    let dw = dw.into_iter().map(|dw| scale * dw).collect();
    Gradients { values: Vec::new(), params: vec![(of.params[0], dw)] }
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, GraphError, ParamSpec, Role};

    /// A linear of `trained` parameters with an adapter of rank 2 between a table and a head.
    fn adapted(scale: f64, trained: impl Fn(&str) -> bool) -> Result<crate::Graph, GraphError> {
        let mut b = Builder::new(&[DATA_ROWS]);
        let params = specs(&[
            ("table", &[VOCAB, 4]),
            ("w", &[3, 4]),
            ("a", &[2, 4]),
            ("b", &[3, 2]),
            ("head", &[VOCAB, 3]),
        ]);
        let freeze = |spec: ParamSpec| ParamSpec { trainable: trained(&spec.name), ..spec };
        b.unit("all", Role::Other, params.into_iter().map(freeze).collect())?;
        let [table, w, inner, outer, head] =
            ["table", "w", "a", "b", "head"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table)?;
        let base = b.linear(x, w, None)?;
        let u = b.linear(x, inner, None)?;
        let y = b.linear_add(base, u, outer, scale)?;
        b.head_loss(y, head)?;
        b.finish()
    }

    #[test]
    fn gradients_of_base_adapter_and_input() {
        for scale in [1.0, -0.375, 8.0] {
            assert_eq!(mismatch(&adapted(scale, |_| true).unwrap(), &[data()], &[]), None, "{scale}");
        }
    }

    #[test]
    fn over_a_frozen_base_only_the_adapter_has_gradients() {
        let graph = adapted(0.5, |name| name == "a" || name == "b").unwrap();
        assert_eq!(mismatch(&graph, &[data()], &[]), None);
        let backward = graph.backward().unwrap();
        let names: Vec<&str> = backward
            .nodes
            .iter()
            .flat_map(|node| &node.accumulates_into)
            .map(|param| graph.param(*param).spec.name.as_str())
            .collect();
        assert_eq!(names, ["b", "a"]);
        // Nothing before the adapter is trained, so no gradient reaches the embedding's rows.
        assert_eq!(backward.nodes.len(), 4, "head, B, u, A");
    }

    #[test]
    fn a_scale_that_is_no_number_is_refused() {
        let refusal = adapted(f64::NAN, |_| true).unwrap_err().to_string();
        assert!(refusal.contains("scale"), "{refusal}");
    }
}
