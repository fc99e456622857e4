//! Lowering of distillation: its loss, and a teacher's most probable tokens.

use zeroth_graph::{GradNode, Node, Op, TeacherKind};
use zeroth_kernel::{Control, DivergenceSpec, Kernel, TeacherSpans};

use super::At;
use crate::BufferId;

impl At<'_> {
    /// The loss with its gradients: the outputs of its node are both losses, then the gradient of x.
    pub(super) fn distill_loss(&self, node: &GradNode, of: &Node) -> Kernel {
        let Op::DistillLoss { ce_part, kd_part, spec, teacher } = of.op else {
            unreachable!("the gradient of a distillation loss")
        };
        let (dims, weight) = (self.head_dims(node.params[0], node.inputs[0]), node.params[0]);
        let teacher = match teacher {
            TeacherKind::Hidden => {
                let (x, weight) = (node.inputs[2], node.params[1]);
                let [vocab, hidden] = self.shape(weight);
                let row_stride = self.row_stride(hidden);
                TeacherSpans::Hidden { hidden, vocab, row_stride, x: self.value(x), w: self.param(weight) }
            }
            TeacherKind::TopK { vocab, tail } => TeacherSpans::TopK {
                k: self.width(node.inputs[2]),
                vocab: vocab as usize,
                tail,
                ids: self.value(node.inputs[2]),
                log_probs: self.value(node.inputs[3]),
            },
        };
        Kernel::DistillLossBackward {
            dims,
            distillation: DivergenceSpec {
                beta: spec.beta as f32,
                temperature: spec.temperature as f32,
                squared: spec.squared,
            },
            teacher,
            x: self.value(node.inputs[0]),
            w: self.param(weight),
            labels: self.value(node.inputs[1]),
            losses: [ce_part, kd_part].map(|part| self.loss(part)),
            loss_weights: [ce_part, kd_part].map(|part| self.loss_weight(part)),
            control: self.whole(BufferId::Control, size_of::<Control>() as u64),
            dx: node.outputs.get(2).map(|(dx, _)| self.value(*dx)),
            dw: self.head_dw(node, weight, dims.hidden),
        }
    }

    /// The most probable tokens of every row.
    pub(super) fn top_log_probs(&self, head: &Node, k: u64) -> Kernel {
        let (x, weight) = (head.inputs[0], head.params[0]);
        let count = self.rows(x) * k;
        Kernel::TopLogProbs {
            dims: self.head_dims(weight, x),
            k: k as usize,
            temperature: self.program().temperature as f32,
            x: self.value(x),
            w: self.param(weight),
            ids: self.part(BufferId::TopIds, 0, count, 4),
            log_probs: self.part(BufferId::TopLogProbs, 0, count, 4),
        }
    }
}
