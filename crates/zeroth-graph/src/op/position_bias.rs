//! Learned biases of attention by the distance between query and key.

use zeroth_base::PositionBuckets;

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Kind, Node, Op, ParamId, Rows, Value, ValueInfo};

impl Builder {
    /// The biases [heads, distances] of `weight` [buckets, heads]. Several attentions may read them: their gradients add up.
    pub fn position_bias(&mut self, weight: ParamId, buckets: PositionBuckets) -> Result<Value, GraphError> {
        let op = Op::PositionBias(buckets);
        let [rows, heads] = self.param_shape(op, weight, "the weight")?;
        self.expect(op, "the weight's buckets", buckets.buckets, rows)?;
        let PositionBuckets { buckets: count, max_distance, bidirectional } = buckets;
        let (least, exact) = if bidirectional { (4, count / 4) } else { (2, count / 2) };
        if count < least {
            let expected = format!("at least {least}");
            return Err(self.shape_error(op, "the number of buckets", &expected, count.to_string()));
        }
        if max_distance <= exact {
            let expected = format!("above {exact}, the distances with a bucket of their own");
            return Err(self.shape_error(op, "the largest distance", &expected, max_distance.to_string()));
        }
        let table = ValueInfo { rows: Rows::Fixed(heads), width: buckets.distances(), kind: Kind::Statistic };
        self.push(op, &[], &[weight], &[table]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node, buckets: PositionBuckets) {
    let Some(dtable) = deriver.gradient(node.outputs[0]) else { return };
    deriver.push(index, GradOp::PositionBias(buckets), vec![dtable], Vec::new(), Vec::new(), true);
}

/// For each entry of the table [heads, distances], that of the weight [buckets, heads] it is read from.
fn entries(buckets: PositionBuckets, heads: usize) -> impl Iterator<Item = usize> {
    let most = buckets.max_distance as i64;
    let of_head =
        move |head| (-most..=most).map(move |distance| buckets.of(distance) as usize * heads + head);
    (0..heads).flat_map(of_head)
}

/// The table [heads, distances] of `w` [buckets, heads].
pub fn position_bias(buckets: PositionBuckets, w: &[f64]) -> Vec<f64> {
    entries(buckets, w.len() / buckets.buckets as usize).map(|entry| w[entry]).collect()
}

/// dw [buckets, heads] of [`position_bias`].
pub fn position_bias_backward(buckets: PositionBuckets, dtable: &[f64]) -> Vec<f64> {
    let heads = dtable.len() / buckets.distances() as usize;
    let mut dw = vec![0.0; buckets.buckets as usize * heads];
    entries(buckets, heads).zip(dtable).for_each(|(entry, gradient)| dw[entry] += gradient);
    dw
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, buckets: PositionBuckets) -> Vec<Vec<f64>> {
    vec![position_bias(buckets, interpreter.param(node.params[0]))]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    of: &Node,
    buckets: PositionBuckets,
) -> Gradients {
    let dw = position_bias_backward(buckets, interpreter.value(node.inputs[0]));
    Gradients { values: Vec::new(), params: vec![(of.params[0], dw)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_by_head_then_distance() {
        let buckets = PositionBuckets { buckets: 4, max_distance: 3, bidirectional: true };
        let w: Vec<f64> = (0..8).map(f64::from).collect();
        // Buckets 1, 1, 1 before the query, 0 at it, 3, 3, 3 after it.
        let expected = [2., 2., 2., 0., 6., 6., 6., 3., 3., 3., 1., 7., 7., 7.];
        assert_eq!(position_bias(buckets, &w), expected);
        assert_eq!(position_bias_backward(buckets, &[1.0; 14]), [1., 1., 3., 3., 0., 0., 3., 3.]);
    }
}
