//! The routing of tokens to experts: softmax, the largest k, and a stable sort of the pairs by expert.

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Kind, Node, Op, Rows, Value, ValueInfo};

/// The results of a route: which rows the ops of experts read, and how much each counts. A slot is a pair of a token and one of
/// its k experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Routing {
    /// The experts of each token [T, k].
    pub experts: Value,
    /// Their weights [T, k].
    pub weights: Value,
    /// The slot at each sorted place `[T · k]`.
    pub order: Value,
    /// The sorted place of each slot [T, k].
    pub places: Value,
    /// The first place of each expert, then the number of routed slots `[E + 1]`.
    pub offsets: Value,
    /// What [`Builder::balance_loss`] reads, summed over layers so far.
    pub balance: Option<Value>,
}

/// What an auxiliary loss needs of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalanceSums {
    /// Nothing: there is no such loss.
    None,
    /// The sums of the first layer.
    First,
    /// The sums of an earlier layer and of this.
    After(Value),
}

impl Builder {
    /// Routes each token to the `k` experts with its largest `logits` [T, E].
    pub fn route(
        &mut self,
        logits: Value,
        k: u64,
        normalized: bool,
        balance: BalanceSums,
    ) -> Result<Routing, GraphError> {
        let op = Op::Route { k, normalized, balance: balance != BalanceSums::None };
        self.stream_of(op, logits)?;
        self.expect_kind(op, logits, Kind::Activation)?;
        let ValueInfo { rows, width: experts, .. } = self.info(logits);
        if k == 0 || k > experts {
            let expected = format!("at least 1 and at most {experts}");
            return Err(self.shape_error(op, "the experts of a token", &expected, k.to_string()));
        }
        let index = |rows, width| ValueInfo { rows, width, kind: Kind::Index };
        let sums = ValueInfo { rows: Rows::Fixed(2), width: experts, kind: Kind::Statistic };
        let mut inputs = vec![logits];
        let mut outputs = vec![
            index(rows, k),
            ValueInfo { rows, width: k, kind: Kind::Statistic },
            index(rows.times(k), 1),
            index(rows, k),
            index(Rows::Fixed(1), experts + 1),
        ];
        if let BalanceSums::After(before) = balance {
            let found = self.info(before);
            if found != sums {
                return Err(self.shape_error(
                    op,
                    "the sums before",
                    &format!("{sums:?}"),
                    format!("{found:?}"),
                ));
            }
            inputs.push(before);
        }
        if balance != BalanceSums::None {
            outputs.push(sums);
        }
        let outputs = self.push(op, &inputs, &[], &outputs)?;
        let [experts, weights, order, places, offsets] = [0, 1, 2, 3, 4].map(|place| outputs[place]);
        Ok(Routing { experts, weights, order, places, offsets, balance: outputs.get(5).copied() })
    }

    /// Expects rows of experts: k for each token of a routing.
    pub(crate) fn expect_slots(&self, op: Op, value: Value, routing: &Routing) -> Result<(), GraphError> {
        self.expect_kind(op, value, Kind::Activation)?;
        self.expect_rows(op, value, routing.order)
    }

    /// Expects a weight with a matrix for each expert of a routing; returns its sides [out, in].
    pub(crate) fn expert_sides(
        &self,
        op: Op,
        weight: crate::ParamId,
        routing: &Routing,
    ) -> Result<[u64; 2], GraphError> {
        let [experts, out, inner] = self.param_shape(op, weight, "the weight")?;
        self.expect(op, "the weight's experts", self.info(routing.offsets).width - 1, experts)?;
        Ok([out, inner])
    }
}

/// Gradients come through the weights, and through the sums of an auxiliary loss, which those of the layers before share.
pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let (logits, experts, weights) = (node.inputs[0], node.outputs[0], node.outputs[1]);
    let dweights = deriver.gradient(weights);
    let slopes = node.outputs.get(5).and_then(|balance| deriver.gradient(*balance));
    if let (Some(before), Some(slopes)) = (node.inputs.get(1), slopes) {
        deriver.contribute(index, *before, slopes);
        if let Some(given) = &mut deriver.gradients[before.index()] {
            given.shared |= given.value == slopes;
        }
    }
    if (dweights.is_none() && slopes.is_none()) || !deriver.needs(logits) {
        return;
    }
    let op = GradOp::Route { weights: dweights.is_some(), balance: slopes.is_some() };
    let inputs = [Some(logits), Some(experts), Some(weights), dweights, slopes];
    let dlogits = deriver.fresh(logits);
    let outputs = vec![(dlogits, GradWrite::Write)];
    deriver.push(index, op, inputs.into_iter().flatten().collect(), Vec::new(), outputs, false);
    deriver.contribute(index, logits, dlogits);
}

/// The results of [`route`].
#[derive(Debug, Clone, PartialEq)]
pub struct Routed {
    /// The experts of each row [rows, k]; the number of experts for padding.
    pub experts: Vec<usize>,
    /// Their weights [rows, k].
    pub weights: Vec<f64>,
    /// The slot at each sorted place.
    pub order: Vec<usize>,
    /// The sorted place of each slot.
    pub places: Vec<usize>,
    /// The first place of each expert, then the number of routed slots.
    pub offsets: Vec<usize>,
    /// Tokens of each expert, then its sum of probabilities.
    pub balance: Vec<f64>,
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exps: Vec<f64> = logits.iter().map(|logit| (logit - greatest).exp()).collect();
    let sum: f64 = exps.iter().sum();
    exps.into_iter().map(|exp| exp / sum).collect()
}

/// Routes rows of logits; those from `routed` on are padding.
pub fn route(logits: &[f64], count: usize, k: usize, normalized: bool, routed: usize) -> Routed {
    let rows = logits.len() / count;
    let (mut experts, mut weights) = (vec![count; rows * k], vec![0.0; rows * k]);
    let mut balance = vec![0.0; 2 * count];
    for (row, logits) in logits.chunks_exact(count).enumerate().take(routed) {
        let probabilities = softmax(logits);
        let mut ranked: Vec<usize> = (0..count).collect();
        ranked.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b)));
        let sum: f64 = ranked[..k].iter().map(|expert| probabilities[*expert]).sum();
        for (j, expert) in ranked[..k].iter().enumerate() {
            experts[row * k + j] = *expert;
            weights[row * k + j] = probabilities[*expert] / if normalized { sum } else { 1.0 };
            balance[*expert] += 1.0;
        }
        balance[count..].iter_mut().zip(&probabilities).for_each(|(sum, p)| *sum += p);
    }
    let mut order: Vec<usize> = (0..rows * k).collect();
    order.sort_by_key(|slot| experts[*slot]);
    let mut places = vec![0; rows * k];
    order.iter().enumerate().for_each(|(place, slot)| places[*slot] = place);
    let before = |expert: usize| order.partition_point(|slot| experts[*slot] < expert);
    let offsets = (0..=count).map(before).collect();
    Routed { experts, weights, order, places, offsets, balance }
}

/// dlogits of [`route`], given the gradient of its weights and of each probability's sum.
pub fn route_backward(
    logits: &[f64],
    count: usize,
    routed: &Routed,
    normalized: bool,
    dweights: &[f64],
    slopes: &[f64],
) -> Vec<f64> {
    let mut dlogits = vec![0.0; logits.len()];
    let k = routed.experts.len() / (logits.len() / count);
    for (row, (logits, dlogits)) in
        logits.chunks_exact(count).zip(dlogits.chunks_exact_mut(count)).enumerate()
    {
        let slots = row * k..(row + 1) * k;
        let (experts, weights) = (&routed.experts[slots.clone()], &routed.weights[slots.clone()]);
        if experts[0] == count {
            continue;
        }
        let (probabilities, dweights) = (softmax(logits), &dweights[slots]);
        let mut dp = slopes.to_vec();
        let sum: f64 = experts.iter().map(|expert| probabilities[*expert]).sum();
        let mean: f64 = weights.iter().zip(dweights).map(|(weight, dw)| weight * dw).sum();
        for (expert, dw) in experts.iter().zip(dweights) {
            dp[*expert] += if normalized { (dw - mean) / sum } else { *dw };
        }
        let mean: f64 = probabilities.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for ((dlogit, p), dp) in dlogits.iter_mut().zip(&probabilities).zip(&dp) {
            *dlogit = p * (dp - mean);
        }
    }
    dlogits
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, k: u64, normalized: bool) -> Vec<Vec<f64>> {
    let (logits, count) = (interpreter.value(node.inputs[0]), interpreter.width(node.inputs[0]));
    let mut routed = route(logits, count, k as usize, normalized, logits.len() / count);
    if let Some(before) = node.inputs.get(1) {
        routed.balance.iter_mut().zip(interpreter.value(*before)).for_each(|(sum, before)| *sum += before);
    }
    let numbers = |indices: &[usize]| indices.iter().map(|index| *index as f64).collect();
    let Routed { experts, weights, order, places, offsets, balance } = routed;
    let results =
        vec![numbers(&experts), weights, numbers(&order), numbers(&places), numbers(&offsets), balance];
    results.into_iter().take(node.outputs.len()).collect()
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    [has_dweights, has_slopes]: [bool; 2],
    k: u64,
    normalized: bool,
) -> Gradients {
    let (logits, count) = (interpreter.value(node.inputs[0]), interpreter.width(node.inputs[0]));
    let routed = route(logits, count, k as usize, normalized, logits.len() / count);
    let zeros = vec![0.0; routed.weights.len().max(count)];
    let dweights = if has_dweights { interpreter.value(node.inputs[3]) } else { &zeros };
    let last = node.inputs[node.inputs.len() - 1];
    let slopes = if has_slopes { &interpreter.value(last)[count..] } else { &zeros[..count] };
    let dlogits = route_backward(logits, count, &routed, normalized, dweights, slopes);
    Gradients::of_values(vec![dlogits])
}

#[cfg(test)]
mod tests {
    use super::{BalanceSums, route, route_backward};
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{ActivationFn, Builder, Graph, GraphError, ParamSpec, Role};

    const EXPERTS: u64 = 3;

    /// Layers of experts (width 2, with adapters of rank 2) between a table and a head.
    fn mixture(
        layers: u64,
        k: u64,
        normalized: bool,
        balance: bool,
        trained: impl Fn(&str) -> bool,
    ) -> Result<Graph, GraphError> {
        let mut b = Builder::new(&[DATA_ROWS]);
        let table: Vec<ParamSpec> = specs(&[("table", &[VOCAB, 4]), ("head", &[VOCAB, 4])]);
        let freeze = |spec: ParamSpec| ParamSpec { trainable: trained(&spec.name), ..spec };
        b.unit("ends", Role::Other, table.into_iter().map(freeze).collect())?;
        let [table, head] = ["table", "head"].map(|name| b.param(name).unwrap());
        let mut x = b.embedding(b.ids(), table)?;
        let mut sums = if balance { BalanceSums::First } else { BalanceSums::None };
        for layer in 0..layers {
            let name = |part: &str| format!("{part}.{layer}");
            let [router, gate_up, down, inner, outer] = ["router", "gate_up", "down", "a", "b"].map(name);
            let params = specs(&[
                (&router, &[EXPERTS, 4]),
                (&gate_up, &[EXPERTS, 4, 4]),
                (&down, &[EXPERTS, 4, 2]),
                (&inner, &[EXPERTS, 2, 4]),
                (&outer, &[EXPERTS, 4, 2]),
            ]);
            b.unit(name("layer"), Role::Block(layer), params.into_iter().map(freeze).collect())?;
            let [router, gate_up, down, inner, outer] =
                [router, gate_up, down, inner, outer].map(|name| b.param(&name).unwrap());
            let logits = b.linear(x, router, None)?;
            let routing = b.route(logits, k, normalized, sums)?;
            if let Some(balance) = routing.balance {
                sums = BalanceSums::After(balance);
            }
            let rows = b.gather_rows(x, &routing)?;
            let base = b.grouped_linear(rows, gate_up, &routing)?;
            let u = b.grouped_linear(rows, inner, &routing)?;
            let projected = b.grouped_linear_add(base, u, outer, 0.5, &routing)?;
            let gated = b.gated_rows(ActivationFn::Silu, projected, &routing)?;
            let y = b.grouped_linear(gated, down, &routing)?;
            x = b.combine_rows(y, &routing)?;
        }
        b.head_loss(x, head)?;
        if let BalanceSums::After(balance) = sums {
            b.set_loss_part("aux_loss", 0.75);
            b.balance_loss(balance, layers)?;
        }
        b.finish()
    }

    #[test]
    fn gradients_of_router_experts_and_adapters() {
        for (k, normalized) in [(1, false), (2, false), (2, true), (3, true)] {
            let graph = mixture(1, k, normalized, false, |_| true).unwrap();
            assert_eq!(mismatch(&graph, &[data()], &[]), None, "k {k}, normalized {normalized}");
        }
    }

    #[test]
    fn gradients_of_an_auxiliary_loss_over_layers() {
        for layers in [1, 3] {
            let graph = mixture(layers, 2, true, true, |_| true).unwrap();
            assert_eq!(mismatch(&graph, &[data()], &[]), None, "{layers} layers");
        }
    }

    #[test]
    fn gradients_of_adapters_over_frozen_experts() {
        let graph = mixture(2, 2, true, false, |name| name.starts_with(['a', 'b'])).unwrap();
        assert_eq!(mismatch(&graph, &[data()], &[]), None);
        let backward = graph.backward().unwrap();
        assert!(backward.nodes.iter().all(|node| node.accumulates_into.len() < 2));
    }

    #[test]
    fn slots_are_sorted_by_expert_and_then_by_token() {
        // Three experts, two of each of three rows, the last row padding; equal logits go to the lowest index.
        let logits = [0.0, 2.0, 1.0, 3.0, 3.0, 3.0, 9.0, 9.0, 9.0];
        let routed = route(&logits, 3, 2, true, 2);
        assert_eq!(routed.experts, [1, 2, 0, 1, 3, 3]);
        assert_eq!(routed.order, [2, 0, 3, 1, 4, 5]);
        assert_eq!(routed.places, [1, 3, 0, 2, 4, 5]);
        assert_eq!(routed.offsets, [0, 1, 3, 4]);
        assert_eq!(routed.weights[2..], [0.5, 0.5, 0.0, 0.0]);
        assert_eq!(routed.balance[..3], [1.0, 2.0, 1.0]);
        let dlogits = route_backward(&logits, 3, &routed, true, &[1.0; 6], &[0.0; 3]);
        assert_eq!(dlogits[6..], [0.0; 3], "padding has no gradient");
    }

    #[test]
    fn more_experts_of_a_token_than_there_are_is_refused() {
        for k in [0, 4] {
            let refusal = mixture(1, k, false, false, |_| true).unwrap_err().to_string();
            assert!(refusal.contains("at least 1 and at most 3"), "{refusal}");
        }
    }
}
