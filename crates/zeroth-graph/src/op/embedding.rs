//! Embedding lookup.

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Kind, Node, Op, ParamId, Value, ValueInfo};

impl Builder {
    /// Embedding lookup. Ids that are `k` wide give `k` rows for each of theirs.
    pub fn embedding(&mut self, ids: Value, table: ParamId) -> Result<Value, GraphError> {
        let [_, width] = self.param_shape(Op::Embedding, table, "the table")?;
        self.expect_kind(Op::Embedding, ids, Kind::Index)?;
        let ids_info = self.info(ids);
        let rows = ids_info.rows.times(ids_info.width);
        let output = ValueInfo { rows, width, kind: Kind::Activation };
        self.push(Op::Embedding, &[ids], &[table], &[output]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dx) = deriver.gradient(node.outputs[0]) else { return };
    deriver.push(index, GradOp::Embedding, vec![node.inputs[0], dx], Vec::new(), Vec::new(), true);
}

/// Rows [T, width] of a table [V, width]; zeros for a negative id.
pub fn embedding(ids: &[i64], table: &[f64], width: usize) -> Vec<f64> {
    let row = |id: &i64| match usize::try_from(*id) {
        Ok(id) => table[id * width..][..width].to_vec(),
        Err(_) => vec![0.0; width],
    };
    ids.iter().flat_map(row).collect()
}

/// The gradient of a table of this many elements.
pub fn embedding_backward(ids: &[i64], dy: &[f64], elements: usize) -> Vec<f64> {
    let (mut dtable, width) = (vec![0.0; elements], dy.len() / ids.len().max(1));
    for (row, id) in ids.iter().enumerate() {
        if let Ok(id) = usize::try_from(*id) {
            for i in 0..width {
                dtable[id * width + i] += dy[row * width + i];
            }
        }
    }
    dtable
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    let (table, width) = (interpreter.param(node.params[0]), interpreter.width(node.outputs[0]));
    vec![embedding(&interpreter.indices(node.inputs[0]), table, width)]
}

pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node) -> Gradients {
    let (ids, table) = (interpreter.indices(node.inputs[0]), of.params[0]);
    let gradient =
        embedding_backward(&ids, interpreter.value(node.inputs[1]), interpreter.param(table).len());
    Gradients { values: Vec::new(), params: vec![(table, gradient)] }
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradient_of_a_table_that_two_lookups_share() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("head", &[VOCAB, 4])])).unwrap();
        let (ids, labels) = (b.stream(0).ids, b.stream(0).labels);
        let (table, head) = (b.param("table").unwrap(), b.param("head").unwrap());
        let (x, y) = (b.embedding(ids, table).unwrap(), b.embedding(labels, table).unwrap());
        let x = b.swiglu(x, y).unwrap();
        b.head_loss(x, head).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None);
    }
}
