//! Lowering of the model's ops and their gradients.

use zeroth_base::DType;
use zeroth_graph::{GradNode, GradOp, GradWrite, Node, Op, ParamId, Value};
use zeroth_kernel::{
    EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, RmsNormDims, RopeDims,
};
use zeroth_kernel::{HeadLossDw, Kernel, TiedRowsIn, TiedRowsOut};

use super::{At, Span};
use crate::BufferId;

impl At<'_> {
    /// The row stride of activations of a width, in elements.
    pub(super) fn row_stride(&self, width: usize) -> usize {
        self.source.target.row_stride(width as u64, self.program().types.compute) as usize
    }

    fn norm_dims(&self, op: Op, x: Value) -> RmsNormDims {
        let (rows, width) = (self.rows(x) as usize, self.width(x));
        let row_stride = self.row_stride(width);
        let dims = |eps: f64, clamp| RmsNormDims { rows, width, row_stride, eps: eps as f32, clamp };
        match op {
            Op::RmsNorm { eps } => dims(eps, false),
            // Only f16 has sums that it cannot hold.
            Op::AddRmsNorm { eps, clamp } => dims(eps, clamp && self.program().types.compute == DType::F16),
            other => unreachable!("{} is no norm", other.name()),
        }
    }

    /// `x` is an operand or a result: all have the same rows.
    fn linear_dims(&self, weight: ParamId, x: Value) -> LinearDims {
        let [outputs, inputs] = self.shape(weight);
        let [x_stride, y_stride] = [inputs, outputs].map(|width| self.row_stride(width));
        LinearDims { rows: self.rows(x) as usize, inputs, outputs, x_stride, y_stride }
    }

    /// The sequence starts of this instruction's stream, where it reads them.
    pub(super) fn starts(&self) -> Option<Span> {
        let stream = self.operands().find_map(|id| match id {
            BufferId::Starts(stream) => Some(stream),
            _ => None,
        })?;
        Some(self.starts_of(stream))
    }

    /// The sequence starts of a stream.
    pub(super) fn starts_of(&self, stream: usize) -> Span {
        self.part(BufferId::Starts(stream), 0, self.source.graph.streams[stream].rows + 2, 4)
    }

    /// The sequence starts of an op over sequences.
    fn sequence_starts(&self) -> Span {
        self.starts().expect("an op over sequences reads their starts")
    }

    fn rope_dims(&self, heads: u64, rotary: usize, x: Value) -> RopeDims {
        let head_dim = self.width(x) / heads as usize;
        let rotated = 2 * self.source.graph.rotaries[rotary].frequencies.len();
        let row_stride = self.row_stride(self.width(x));
        RopeDims { rows: self.rows(x) as usize, heads: heads as usize, head_dim, rotated, row_stride }
    }

    /// Cosines and sines of a rotary embedding at these positions.
    fn angles(&self, rotary: usize, positions: Value) -> [Span; 2] {
        let pairs = self.source.graph.rotaries[rotary].frequencies.len() as u64;
        let stream = self.operands().find_map(|id| match id {
            BufferId::Cosines { stream, .. } => Some(stream),
            _ => None,
        });
        let stream = stream.expect("a rope reads cosines and sines");
        [BufferId::Cosines { stream, rotary }, BufferId::Sines { stream, rotary }]
            .map(|id| self.part(id, 0, self.rows(positions) * pairs, 4))
    }

    fn rope(&self, op: Op, [x, positions]: [Value; 2], y: Value, back: bool) -> Kernel {
        let Op::Rope { heads, rotary } = op else { unreachable!("rope's own kernel") };
        let ([cos, sin], dims) = (self.angles(rotary, positions), self.rope_dims(heads, rotary, x));
        Kernel::Rope { dims, cos, sin, x: self.value(x), y: self.value(y), back }
    }

    fn head_norm_rope_dims(&self, op: Op, x: Value) -> HeadNormRopeDims {
        let Op::HeadNormRope { heads, eps, rotary } = op else { unreachable!("its own dims") };
        HeadNormRopeDims { rope: self.rope_dims(heads, rotary, x), eps: eps as f32 }
    }

    fn dropout(&self, op: Op, x: Value, y: Value) -> Kernel {
        let Op::Dropout { probability, salt } = op else { unreachable!("dropout's own kernel") };
        let keys = self.operands().find_map(|id| matches!(id, BufferId::Keys(_)).then_some(id));
        let keys = keys.expect("dropout reads the keys of its rows");
        Kernel::Dropout {
            probability: probability as f32,
            seed: self.binding.seed,
            op: salt,
            width: self.width(x),
            row_stride: self.row_stride(self.width(x)),
            keys: self.part(keys, 0, self.rows(x), 16),
            x: self.value(x),
            y: self.value(y),
        }
    }

    pub(super) fn head_dims(&self, weight: ParamId, x: Value) -> HeadLossDims {
        let [vocab, hidden] = self.shape(weight);
        HeadLossDims { rows: self.rows(x) as usize, hidden, vocab, row_stride: self.row_stride(hidden) }
    }

    pub(super) fn forward(&self, node: &Node) -> Vec<Kernel> {
        let (input, output) =
            (|place: usize| self.value(node.inputs[place]), |place: usize| self.value(node.outputs[place]));
        let kernel = match node.op {
            Op::Embedding => {
                let [vocab, width] = self.shape(node.params[0]);
                Kernel::Embedding {
                    dims: EmbeddingDims { vocab, width, row_stride: self.row_stride(width) },
                    rows: self.rows(node.outputs[0]) as usize,
                    ids: input(0),
                    table: self.param(node.params[0]),
                    y: output(0),
                }
            }
            Op::Linear => Kernel::Linear {
                dims: self.linear_dims(node.params[0], node.inputs[0]),
                x: input(0),
                w: self.param(node.params[0]),
                bias: node.params.get(1).map(|bias| self.param(*bias)),
                y: output(0),
            },
            Op::LinearAdd { scale } => {
                let add = Kernel::LinearAdd {
                    dims: self.linear_dims(node.params[0], node.inputs[1]),
                    scale: scale as f32,
                    x: input(1),
                    w: self.param(node.params[0]),
                    y: output(0),
                };
                return self.after_copy(input(0), output(0), add);
            }
            Op::HeadNormRope { rotary, .. } => {
                let [cos, sin] = self.angles(rotary, node.inputs[1]);
                Kernel::HeadNormRope {
                    dims: self.head_norm_rope_dims(node.op, node.inputs[0]),
                    x: input(0),
                    w: self.param(node.params[0]),
                    cos,
                    sin,
                    y: output(0),
                    rstd: output(1),
                }
            }
            Op::RmsNorm { .. } => Kernel::RmsNorm {
                dims: self.norm_dims(node.op, node.inputs[0]),
                x: input(0),
                w: self.param(node.params[0]),
                y: output(0),
                rstd: output(1),
            },
            Op::AddRmsNorm { .. } => Kernel::AddRmsNorm {
                dims: self.norm_dims(node.op, node.inputs[0]),
                residual: input(0),
                x: input(1),
                w: self.param(node.params[0]),
                h: output(0),
                y: output(1),
                rstd: output(2),
            },
            Op::Rope { .. } => self.rope(node.op, [node.inputs[0], node.inputs[1]], node.outputs[0], false),
            Op::PositionBias(_) => self.position_bias(node),
            Op::Attention(_) => self.attention(node),
            Op::Activation(activation) => Kernel::Activation { activation, x: input(0), y: output(0) },
            Op::Scale { factor } => Kernel::Scale { factor: factor as f32, x: input(0), y: output(0) },
            Op::GatedActivation(activation) => {
                Kernel::GatedActivation { activation, gate: input(0), up: input(1), y: output(0) }
            }
            Op::Dropout { .. } => self.dropout(node.op, node.inputs[0], node.outputs[0]),
            Op::Route { .. }
            | Op::GatherRows
            | Op::CombineRows
            | Op::GroupedLinear
            | Op::GroupedLinearAdd { .. }
            | Op::GatedRows(_)
            | Op::BalanceLoss { .. } => return self.forward_of_experts(node),
            Op::HeadLoss { part } => self.head_loss(node, part),
            // Training computes it with its gradient, evaluation its cross-entropy alone.
            Op::DistillLoss { .. } => unreachable!("a distillation loss is no op of forward"),
        };
        vec![kernel]
    }

    /// The cross-entropy of a head.
    pub(super) fn head_loss(&self, node: &Node, part: usize) -> Kernel {
        Kernel::HeadLoss {
            dims: self.head_dims(node.params[0], node.inputs[0]),
            x: self.value(node.inputs[0]),
            w: self.param(node.params[0]),
            labels: self.value(node.inputs[1]),
            loss: self.loss(part),
        }
    }

    /// The head on the last token of each sequence.
    pub(super) fn logits(&self, head: &Node, sequences: u64) -> Kernel {
        let [vocab, hidden] = self.shape(head.params[0]);
        let rows = self.rows(head.inputs[0]) as usize;
        let row_stride = self.row_stride(hidden);
        let dims = LogitsDims { rows, sequences: sequences as usize, hidden, vocab, row_stride };
        Kernel::Logits {
            dims,
            starts: self.sequence_starts(),
            x: self.value(head.inputs[0]),
            w: self.param(head.params[0]),
            logits: self.part(BufferId::Logits, 0, sequences * vocab as u64, 4),
        }
    }

    /// The norm of a residual sum that was kept.
    pub(super) fn norm_of_sum(&self, node: &Node) -> Kernel {
        let output = |place: usize| self.value(node.outputs[place]);
        Kernel::RmsNorm {
            dims: self.norm_dims(node.op, node.outputs[0]),
            x: output(0),
            w: self.param(node.params[0]),
            y: output(1),
            rstd: output(2),
        }
    }

    /// How a matmul writes a weight's gradient: overwriting, accumulating, or casting.
    pub(super) fn grad_store(&self, node: &GradNode, weight: ParamId) -> zeroth_kernel::GradStore {
        let program = self.program();
        if program.producers_cast(self.section.kind, weight) {
            let found_inf = self.found_inf(program.layout.place(weight).0);
            return zeroth_kernel::GradStore::Round { to: program.types.communication, found_inf };
        }
        if self.adds(node, weight) { zeroth_kernel::GradStore::Add } else { zeroth_kernel::GradStore::Write }
    }

    /// The rows of a gradient that the head leaves to an embedding, and their token ids.
    fn waiting(&self, node: &GradNode, width: usize) -> Option<TiedRowsOut> {
        let tokens = self.program().waiting_tokens(self.source.backward, self.section.kind, node)?;
        let count = self.rows(tokens) * self.width(tokens) as u64;
        let rows = self.part(BufferId::WaitingRows, 0, count * width as u64, 4);
        Some(TiedRowsOut { ids: self.value(tokens), rows })
    }

    /// Where and how a head writes the gradient of its weight; `None` where that is frozen.
    pub(super) fn head_dw(&self, node: &GradNode, weight: ParamId, hidden: usize) -> Option<HeadLossDw> {
        self.grad_destination(node, weight).map(|to| HeadLossDw {
            to,
            store: self.grad_store(node, weight),
            tied_rows: self.waiting(node, hidden),
        })
    }

    pub(super) fn backward(&self, node: &GradNode) -> Vec<Kernel> {
        let input = |place: usize| self.value(node.inputs[place]);
        let output = |place: usize| self.value(node.outputs[place].0);
        let of = &self.source.graph.nodes[node.of];
        let kernel = match node.op {
            GradOp::HeadLoss => {
                let (dims, weight) = (self.head_dims(node.params[0], node.inputs[0]), node.params[0]);
                let part = of.op.loss_parts().next().expect("the op of a loss");
                Kernel::HeadLossBackward {
                    dims,
                    x: input(0),
                    w: self.param(weight),
                    labels: input(1),
                    loss: self.loss(part),
                    loss_weight: self.loss_weight(part),
                    control: self.whole(BufferId::Control, size_of::<zeroth_kernel::Control>() as u64),
                    dx: node.outputs.get(1).map(|(dx, _)| self.value(*dx)),
                    dw: self.head_dw(node, weight, dims.hidden),
                }
            }
            GradOp::DistillLoss => self.distill_loss(node, of),
            GradOp::LinearInput | GradOp::LinearAddInput { .. } => Kernel::LinearDx {
                dims: self.linear_dims(node.params[0], node.inputs[0]),
                scale: node.op.scale() as f32,
                dy: input(0),
                w: self.param(node.params[0]),
                dx: output(0),
                add: node.outputs[0].1 == GradWrite::Add,
            },
            GradOp::LinearParams | GradOp::LinearAddParams { .. } => {
                let dims = self.linear_dims(of.params[0], node.inputs[0]);
                let is_trained = |param: &&ParamId| node.accumulates_into.contains(*param);
                let weight = of.params.first().filter(is_trained).map(|weight| Kernel::LinearDw {
                    dims,
                    scale: node.op.scale() as f32,
                    dy: input(1),
                    x: input(0),
                    dw: self.gradient(*weight),
                    store: self.grad_store(node, *weight),
                });
                let bias = of.params.get(1).filter(is_trained).map(|bias| Kernel::LinearDb {
                    dims,
                    dy: input(1),
                    db: self.gradient(*bias),
                });
                return weight.into_iter().chain(bias).collect();
            }
            GradOp::Route { .. }
            | GradOp::GatherRows
            | GradOp::CombineRows
            | GradOp::GroupedLinearInput
            | GradOp::GroupedLinearParams
            | GradOp::GroupedLinearAddInput { .. }
            | GradOp::GroupedLinearAddParams { .. }
            | GradOp::GatedRows(_)
            | GradOp::BalanceLoss => self.backward_of_experts(node, of),
            GradOp::HeadNormRope(op) => {
                let [cos, sin] = self.angles(op.rotary().expect("it rotates"), node.inputs[3]);
                Kernel::HeadNormRopeBackward {
                    dims: self.head_norm_rope_dims(op, node.inputs[0]),
                    dy: input(2),
                    h: input(0),
                    rstd: input(1),
                    w: self.param(node.params[0]),
                    cos,
                    sin,
                    dh: node.outputs.first().map(|(dh, _)| self.value(*dh)),
                    dw: self.grad_destination(node, node.params[0]),
                }
            }
            GradOp::RmsNorm(op) | GradOp::AddRmsNorm(op) => Kernel::RmsNormBackward {
                dims: self.norm_dims(op, node.inputs[0]),
                h: input(0),
                rstd: input(1),
                dy: input(2),
                residual: node.inputs.get(3).map(|residual| self.value(*residual)),
                w: self.param(node.params[0]),
                dh: node.outputs.first().map(|(dh, _)| self.value(*dh)),
                dw: self.grad_destination(node, node.params[0]),
            },
            GradOp::Rope(op) => self.rope(op, [node.inputs[0], node.inputs[1]], node.outputs[0].0, true),
            GradOp::PositionBias(_) => self.position_bias_backward(node, of),
            GradOp::Attention(_) => self.attention_backward(node, of),
            GradOp::Activation(activation) => {
                Kernel::ActivationBackward { activation, x: input(0), dy: input(1), dx: output(0) }
            }
            GradOp::Scale { factor } => Kernel::Scale { factor: factor as f32, x: input(0), y: output(0) },
            GradOp::GatedActivation(activation) => Kernel::GatedActivationBackward {
                activation,
                gate: input(0),
                up: input(1),
                dy: input(2),
                dgate: output(0),
                dup: output(1),
            },
            GradOp::Dropout(op) => self.dropout(op, node.inputs[0], node.outputs[0].0),
            GradOp::Embedding => {
                let (table, [vocab, width]) = (of.params[0], self.shape(of.params[0]));
                let flat = self.program().layout.place(table).0;
                let tied_rows =
                    |own: TiedRowsOut| TiedRowsIn { rows: own.rows, found_inf: self.found_inf(flat) };
                Kernel::EmbeddingBackward {
                    dims: EmbeddingDims { vocab, width, row_stride: self.row_stride(width) },
                    rows: self.rows(node.inputs[1]) as usize,
                    ids: input(0),
                    dy: input(1),
                    dtable: self.gradient(table),
                    tied_rows: self.waiting(node, width).map(tied_rows),
                }
            }
            GradOp::Sum => Kernel::Sum { a: input(0), b: input(1), y: output(0) },
        };
        vec![kernel]
    }
}
