//! What backward consists of, and what the file of an op derives its gradient with.

use crate::{ActivationFn, Graph, Kind, Node, Op, ParamId, PositionBuckets, UnitId, Value, ValueInfo};

/// The op of a backward node, with its operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradOp {
    /// `x`, `labels` (and the weight) give the loss `[1]` and the gradient of `x`; accumulates the weight's gradient. Gradients
    /// are those of the loss times the weight of its part. The head's forward and backward are one op, slice by slice.
    HeadLoss,
    /// `x`, `labels`, and the teacher's `x` or its cached `ids` and `log_probs` (and both weights) give the losses `[1]` of
    /// cross-entropy and distillation and the gradient of `x`; accumulates the gradient of the student's weight. Gradients are those of
    /// both losses, each times the weight of its part.
    DistillLoss,
    /// `dy` (and the weight) give `dy · w`.
    LinearInput,
    /// `x` and `dy`: accumulates `dyᵀ · x` in the weight's gradient and the sum over rows in the bias's.
    LinearParams,
    /// `dy` (and the weight) give `scale · dy · w`.
    LinearAddInput {
        /// The factor of the product.
        scale: f64,
    },
    /// `u` and `dy`: accumulates `scale · dyᵀ · u` in the weight's gradient.
    LinearAddParams {
        /// The factor of the product.
        scale: f64,
    },
    /// `logits`, `experts` and `weights`, then the gradient of the weights and that of the balance where they are operands, give the
    /// gradient of `logits`.
    Route {
        /// Whether the gradient of the weights is an operand.
        weights: bool,
        /// Whether that of the balance is.
        balance: bool,
    },
    /// `dy` [T, H], `order` and `offsets` give the gradient of the rows of the slots: that of `CombineRows`.
    GatherRows,
    /// `dy` [T · k, H], `places` and `offsets` give the sum of each token's rows: the gradient of `GatherRows`.
    CombineRows,
    /// `dy` and `offsets` (and the weight) give `dy · w[e]`.
    GroupedLinearInput,
    /// `x`, `dy` and `offsets`: accumulates `dyᵀ · x` over the rows of each expert in the weight's gradient.
    GroupedLinearParams,
    /// `dy` and `offsets` (and the weight) give `scale · dy · w[e]`.
    GroupedLinearAddInput {
        /// The factor of the product.
        scale: f64,
    },
    /// `u`, `dy` and `offsets`: accumulates `scale · dyᵀ · u` over the rows of each expert in the weight's gradient.
    GroupedLinearAddParams {
        /// The factor of the product.
        scale: f64,
    },
    /// `gate_up`, `dy`, `weights`, `order` and `offsets` give the gradient of `gate_up`, and of `weights` where it is computed.
    GatedRows(ActivationFn),
    /// `balance` and `labels` give the loss `[1]` and the gradient of `balance`, times the weight of its part.
    BalanceLoss,
    /// `x`, `rstd`, `dy`, optionally the gradient of `x` from later uses (and the weight) give the gradient of `x`, with that
    /// one added; accumulates the weight's gradient.
    RmsNorm(Op),
    /// The same for the sum `h` of a residual add: its gradient is that of both summands.
    AddRmsNorm(Op),
    /// `x`, `rstd`, `dy` and `positions` (and the weight) give the gradient of `x`; accumulates the weight's gradient. `dy` is
    /// rotated back and rounded before the norm's gradient.
    HeadNormRope(Op),
    /// `dy` and `positions` give `dy` rotated back.
    Rope(Op),
    /// `q`, `k`, `v`, the biases where it has any, `o`, `lse`, `do` give `dq`, `dk`, `dv`, and the gradient of the biases where it
    /// is computed. Attentions with the same biases add to one gradient, in the order of backward.
    Attention(Op),
    /// `dtable`: accumulates the sums of the distances of each bucket in the table's gradient.
    PositionBias(PositionBuckets),
    /// `x` and `dy` give `dy · f'(x)`.
    Activation(ActivationFn),
    /// `dy` gives `factor · dy`.
    Scale {
        /// The factor.
        factor: f64,
    },
    /// `gate`, `up`, `dy` give `dgate`, `dup`.
    GatedActivation(ActivationFn),
    /// `dy` gives `dx` through the same mask.
    Dropout(Op),
    /// `ids` and `dx`: accumulates rows in the table's gradient.
    Embedding,
    /// Two gradients of one value give their sum.
    Sum,
}

impl GradOp {
    /// The factor of the product that it is.
    pub const fn scale(self) -> f64 {
        match self {
            Self::LinearAddInput { scale }
            | Self::LinearAddParams { scale }
            | Self::GroupedLinearAddInput { scale }
            | Self::GroupedLinearAddParams { scale } => scale,
            Self::Scale { factor } => factor,
            Self::HeadLoss
            | Self::DistillLoss
            | Self::LinearInput
            | Self::LinearParams
            | Self::Route { .. }
            | Self::GatherRows
            | Self::CombineRows
            | Self::GroupedLinearInput
            | Self::GroupedLinearParams
            | Self::GatedRows(_)
            | Self::BalanceLoss
            | Self::RmsNorm(_)
            | Self::AddRmsNorm(_)
            | Self::HeadNormRope(_)
            | Self::Rope(_)
            | Self::Attention(_)
            | Self::PositionBias(_)
            | Self::Activation(_)
            | Self::GatedActivation(_)
            | Self::Dropout(_)
            | Self::Embedding
            | Self::Sum => 1.0,
        }
    }
}

/// How a gradient is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradWrite {
    /// Overwrites the buffer.
    Write,
    /// Adds to the buffer.
    Add,
}

/// A node of backward.
#[derive(Debug, Clone, PartialEq)]
pub struct GradNode {
    /// The op.
    pub op: GradOp,
    /// The unit of the forward op it belongs to.
    pub unit: UnitId,
    /// The index in [`Graph::nodes`] of its forward op.
    pub of: usize,
    /// Its operands, in the order documented at the op.
    pub inputs: Vec<Value>,
    /// The parameters it reads.
    pub params: Vec<ParamId>,
    /// Its results.
    pub outputs: Vec<(Value, GradWrite)>,
    /// The parameters whose gradients it accumulates.
    pub accumulates_into: Vec<ParamId>,
}

/// A model's backward.
#[derive(Debug, Clone, PartialEq)]
pub struct Backward {
    /// Values of forward and backward: those of the graph keep their indices, gradients follow.
    pub values: Vec<ValueInfo>,
    /// Nodes, in execution order. The node of a loss replaces the graph's: it computes the loss too.
    pub nodes: Vec<GradNode>,
    /// The losses, each `[1]`; what is trained is the weighted sum of their parts.
    pub losses: Vec<Value>,
    /// For each parameter of the graph, the first node that accumulates its gradient.
    pub first_producers: Vec<Option<usize>>,
}

/// A value's gradient so far. A shared one is also the gradient of another value, so it must not be added to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gradient {
    pub(crate) value: Value,
    pub(crate) shared: bool,
}

pub(crate) struct Deriver<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) needed: Vec<bool>,
    pub(crate) values: Vec<ValueInfo>,
    /// For each value of the graph, its gradient.
    pub(crate) gradients: Vec<Option<Gradient>>,
    pub(crate) nodes: Vec<GradNode>,
}

impl Deriver<'_> {
    /// Whether a value's gradient is computed.
    pub(crate) fn needs(&self, value: Value) -> bool {
        self.needed[value.index()]
    }

    /// A value's gradient so far.
    pub(crate) fn gradient(&self, value: Value) -> Option<Value> {
        self.gradients[value.index()].map(|gradient| gradient.value)
    }

    /// Contributes one gradient to all inputs of a node.
    pub(crate) fn share(&mut self, index: usize, node: &Node, gradient: Value) {
        for input in &node.inputs {
            self.contribute(index, *input, gradient);
            if let Some(given) = &mut self.gradients[input.index()] {
                given.shared |= given.value == gradient;
            }
        }
    }

    pub(crate) fn one_to_one(&mut self, index: usize, node: &Node, op: GradOp, inputs: Vec<Value>) {
        let x = node.inputs[0];
        if !self.needed[x.index()] {
            return;
        }
        let dx = self.fresh(x);
        self.push(index, op, inputs, Vec::new(), vec![(dx, GradWrite::Write)], false);
        self.contribute(index, x, dx);
    }

    /// An op with a gradient for each input, computed together.
    pub(crate) fn many(&mut self, index: usize, node: &Node, op: GradOp, inputs: Vec<Value>) {
        if !node.inputs.iter().any(|input| self.needed[input.index()]) {
            return;
        }
        let gradients: Vec<Value> = node.inputs.iter().map(|input| self.fresh(*input)).collect();
        let outputs = gradients.iter().map(|gradient| (*gradient, GradWrite::Write)).collect();
        self.push(index, op, inputs, Vec::new(), outputs, false);
        for (input, gradient) in node.inputs.iter().zip(gradients) {
            self.contribute(index, *input, gradient);
        }
    }

    /// A new value of the shape of another.
    pub(crate) fn fresh(&mut self, like: Value) -> Value {
        let info = ValueInfo { kind: Kind::Activation, ..self.values[like.index()] };
        self.values.push(info);
        Value(self.values.len() as u32 - 1)
    }

    /// A new f32 value of the shape of another.
    pub(crate) fn fresh_statistic(&mut self, like: Value) -> Value {
        let info = ValueInfo { kind: Kind::Statistic, ..self.values[like.index()] };
        self.values.push(info);
        Value(self.values.len() as u32 - 1)
    }

    /// `gradient` is one contribution to the gradient of `value`; the second and later ones are summed.
    pub(crate) fn contribute(&mut self, index: usize, value: Value, gradient: Value) {
        if !self.needed[value.index()] {
            return;
        }
        let sum = match self.gradients[value.index()] {
            None => gradient,
            Some(earlier) => {
                let sum = self.fresh(value);
                let inputs = vec![earlier.value, gradient];
                self.push(index, GradOp::Sum, inputs, Vec::new(), vec![(sum, GradWrite::Write)], false);
                sum
            }
        };
        self.gradients[value.index()] = Some(Gradient { value: sum, shared: false });
    }

    pub(crate) fn push(
        &mut self,
        of: usize,
        op: GradOp,
        inputs: Vec<Value>,
        params: Vec<ParamId>,
        outputs: Vec<(Value, GradWrite)>,
        trains_params: bool,
    ) {
        let node = &self.graph.nodes[of];
        let trainable = |id: &ParamId| self.graph.param(*id).spec.trainable;
        let accumulates_into: Vec<ParamId> =
            if trains_params { node.params.iter().copied().filter(trainable).collect() } else { Vec::new() };
        // Nothing to compute: a frozen linear's weight.
        if outputs.is_empty() && accumulates_into.is_empty() {
            return;
        }
        self.nodes.push(GradNode { op, unit: node.unit, of, inputs, params, outputs, accumulates_into });
    }
}
