//! Lowering of the ops of a mixture of experts and their gradients.

use zeroth_graph::{GradNode, GradOp, GradWrite, Node, Op, ParamId, Value};
use zeroth_kernel::{
    Balance, BalanceDims, ExpertRowsDims, GatedRowsDims, GroupedLinearDims, Kernel, RouteDims,
};

use super::{At, Span};
use crate::BufferId;

impl At<'_> {
    fn route_dims(&self, op: Op, logits: Value) -> RouteDims {
        let Op::Route { k, normalized, .. } = op else { unreachable!("routing's own dims") };
        let experts = self.width(logits);
        RouteDims {
            rows: self.rows(logits) as usize,
            experts,
            k: k as usize,
            normalized,
            row_stride: self.row_stride(experts),
        }
    }

    /// The experts of a routing.
    fn experts(&self, offsets: Value) -> usize {
        self.width(offsets) - 1
    }

    /// `tokens` has a row for each token and an element for each of its experts.
    fn expert_rows_dims(&self, width: usize, tokens: Value, offsets: Value) -> ExpertRowsDims {
        ExpertRowsDims {
            rows: self.rows(tokens) as usize,
            experts: self.experts(offsets),
            k: self.width(tokens),
            width,
            row_stride: self.row_stride(width),
        }
    }

    /// `x` is an operand or a result: all have the same rows.
    fn grouped_linear_dims(&self, weight: ParamId, x: Value) -> GroupedLinearDims {
        let [experts, outputs, inputs] = self.shape(weight);
        let [x_stride, y_stride] = [inputs, outputs].map(|width| self.row_stride(width));
        GroupedLinearDims { slots: self.rows(x) as usize, experts, inputs, outputs, x_stride, y_stride }
    }

    fn gated_rows_dims(&self, gate_up: Value, weights: Value, offsets: Value) -> GatedRowsDims {
        let width = self.width(gate_up) / 2;
        GatedRowsDims {
            rows: self.rows(weights) as usize,
            experts: self.experts(offsets),
            k: self.width(weights),
            width,
            gate_up_stride: self.row_stride(2 * width),
            y_stride: self.row_stride(width),
        }
    }

    fn balance_dims(&self, op: Op, balance: Value, labels: Value) -> BalanceDims {
        let Op::BalanceLoss { layers, .. } = op else { unreachable!("the loss's own dims") };
        BalanceDims {
            rows: self.rows(labels) as usize,
            experts: self.width(balance),
            layers: layers as usize,
        }
    }

    pub(super) fn forward_of_experts(&self, node: &Node) -> Vec<Kernel> {
        let (input, output) =
            (|place: usize| self.value(node.inputs[place]), |place: usize| self.value(node.outputs[place]));
        let kernel = match node.op {
            Op::Route { .. } => Kernel::Route {
                dims: self.route_dims(node.op, node.inputs[0]),
                starts: self.starts(),
                logits: input(0),
                experts: output(0),
                weights: output(1),
                order: output(2),
                places: output(3),
                offsets: output(4),
                balance: node.outputs.get(5).map(|after| Balance {
                    before: node.inputs.get(1).map(|before| self.value(*before)),
                    after: self.value(*after),
                }),
            },
            Op::GatherRows => Kernel::GatherRows {
                dims: self.expert_rows_dims(self.width(node.inputs[0]), node.inputs[2], node.inputs[3]),
                order: input(1),
                offsets: input(3),
                x: input(0),
                y: output(0),
            },
            Op::CombineRows => Kernel::CombineRows {
                dims: self.expert_rows_dims(self.width(node.inputs[0]), node.inputs[2], node.inputs[3]),
                places: input(2),
                offsets: input(3),
                x: input(0),
                y: output(0),
            },
            Op::GroupedLinear => Kernel::GroupedLinear {
                dims: self.grouped_linear_dims(node.params[0], node.inputs[0]),
                offsets: input(1),
                x: input(0),
                w: self.param(node.params[0]),
                y: output(0),
            },
            Op::GroupedLinearAdd { scale } => {
                let add = Kernel::GroupedLinearAdd {
                    dims: self.grouped_linear_dims(node.params[0], node.inputs[1]),
                    scale: scale as f32,
                    offsets: input(2),
                    x: input(1),
                    w: self.param(node.params[0]),
                    y: output(0),
                };
                return self.after_copy(input(0), output(0), add);
            }
            Op::GatedRows(activation) => Kernel::GatedRows {
                activation,
                dims: self.gated_rows_dims(node.inputs[0], node.inputs[1], node.inputs[3]),
                order: input(2),
                offsets: input(3),
                weights: input(1),
                gate_up: input(0),
                y: output(0),
            },
            Op::BalanceLoss { part, .. } => Kernel::BalanceLoss {
                dims: self.balance_dims(node.op, node.inputs[0], node.inputs[1]),
                starts: self.starts().expect("a loss is not decoded"),
                balance: input(0),
                labels: input(1),
                loss: self.loss(part),
            },
            other => unreachable!("{} is no op of experts", other.name()),
        };
        vec![kernel]
    }

    /// A kernel that adds to `to` in place, after a copy of `from` where that is another buffer: it is read again.
    pub(super) fn after_copy(&self, from: Span, to: Span, add: Kernel) -> Vec<Kernel> {
        let dtype = self.program().types.compute;
        let copy = Kernel::Convert { from, from_type: dtype, to, to_type: dtype, found_inf: None };
        (from != to).then_some(copy).into_iter().chain([add]).collect()
    }

    /// Adds the load of a router to this rank's report, once per micro-batch: recomputation does not count again.
    pub(super) fn count_tokens(&self, at: usize) -> Option<Kernel> {
        let program = self.program();
        let router = program.routers.iter().find(|router| router.node == at)?;
        if !self.section.is_micro_batch() {
            return None;
        }
        let node = &self.source.graph.nodes[at];
        let (weights, offsets) = (node.outputs[1], node.outputs[4]);
        let first = program.report().count(router.first) as u64;
        Some(Kernel::CountTokens {
            experts: router.experts,
            slots: self.rows(weights) as usize * self.width(weights),
            offsets: self.value(offsets),
            weights: self.value(weights),
            counts: self.part(BufferId::Report, first, 4 * (router.experts as u64 + 1), 1),
        })
    }

    pub(super) fn backward_of_experts(&self, node: &GradNode, of: &Node) -> Kernel {
        let input = |place: usize| self.value(node.inputs[place]);
        let output = |place: usize| self.value(node.outputs[place].0);
        match node.op {
            GradOp::Route { weights, balance } => Kernel::RouteBackward {
                dims: self.route_dims(of.op, node.inputs[0]),
                starts: self.starts(),
                logits: input(0),
                experts: input(1),
                weights: input(2),
                dweights: weights.then(|| input(3)),
                slopes: balance.then(|| input(3 + usize::from(weights))),
                dlogits: output(0),
            },
            GradOp::GatherRows => Kernel::GatherRows {
                dims: self.expert_rows_dims(self.width(node.inputs[0]), of.inputs[2], node.inputs[2]),
                order: input(1),
                offsets: input(2),
                x: input(0),
                y: output(0),
            },
            GradOp::CombineRows => Kernel::CombineRows {
                dims: self.expert_rows_dims(self.width(node.inputs[0]), node.inputs[1], node.inputs[2]),
                places: input(1),
                offsets: input(2),
                x: input(0),
                y: output(0),
            },
            GradOp::GroupedLinearInput | GradOp::GroupedLinearAddInput { .. } => Kernel::GroupedLinearDx {
                dims: self.grouped_linear_dims(node.params[0], node.inputs[0]),
                scale: node.op.scale() as f32,
                offsets: input(1),
                dy: input(0),
                w: self.param(node.params[0]),
                dx: output(0),
                add: node.outputs[0].1 == GradWrite::Add,
            },
            GradOp::GroupedLinearParams | GradOp::GroupedLinearAddParams { .. } => Kernel::GroupedLinearDw {
                dims: self.grouped_linear_dims(of.params[0], node.inputs[0]),
                scale: node.op.scale() as f32,
                offsets: input(2),
                dy: input(1),
                x: input(0),
                dw: self.gradient(of.params[0]),
                store: self.grad_store(node, of.params[0]),
            },
            GradOp::GatedRows(activation) => Kernel::GatedRowsBackward {
                activation,
                dims: self.gated_rows_dims(node.inputs[0], node.inputs[2], node.inputs[4]),
                order: input(3),
                offsets: input(4),
                weights: input(2),
                gate_up: input(0),
                dy: input(1),
                dgate_up: output(0),
                dweights: node.outputs.get(1).map(|(dweights, _)| self.value(*dweights)),
            },
            GradOp::BalanceLoss => {
                let part = of.op.loss_parts().next().expect("the op of a loss");
                Kernel::BalanceLossBackward {
                    dims: self.balance_dims(of.op, node.inputs[0], node.inputs[1]),
                    starts: self.starts().expect("a loss is not decoded"),
                    balance: input(0),
                    labels: input(1),
                    loss: self.loss(part),
                    loss_weight: self.loss_weight(part),
                    control: self.whole(BufferId::Control, size_of::<zeroth_kernel::Control>() as u64),
                    slopes: output(1),
                }
            }
            other => unreachable!("{other:?} is no gradient of experts"),
        }
    }
}
