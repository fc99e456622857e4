//! Automatic differentiation: backward is derived node by node, from the loss to the first op.
//!
//! [`Deriver::node`] defines what each op's gradient reads and writes. The gradient of a value with several uses is the sum of
//! their contributions, in the order of backward; a linear accumulates into it directly. Gradients of parameters are
//! accumulated in the unit's flat gradient buffer, in f32.

use crate::{GatedActivation, Graph, GraphError, Kind, Node, Op, ParamId, UnitId, Value, ValueInfo};

/// The op of a backward node, with its operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradOp {
    /// `x`, `labels` (and the weight) give the loss `[1]` and the gradient of `x`; accumulates the weight's gradient. The
    /// head's forward and backward are one op, slice by slice.
    HeadLoss,
    /// `dy` (and the weight) give `dy · w`.
    LinearInput,
    /// `x` and `dy`: accumulates `dyᵀ · x` in the weight's gradient and the sum over rows in the bias's.
    LinearParams,
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
    /// `q`, `k`, `v`, `o`, `lse`, `do` give `dq`, `dk`, `dv`.
    Attention(Op),
    /// `gate`, `up`, `dy` give `dgate`, `dup`.
    GatedActivation(GatedActivation),
    /// `dy` gives `dx` through the same mask.
    Dropout(Op),
    /// `ids` and `dx`: accumulates rows in the table's gradient.
    Embedding,
    /// Two gradients of one value give their sum.
    Sum,
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
    /// The losses, each `[1]`; what is trained is their sum.
    pub losses: Vec<Value>,
    /// For each parameter of the graph, the first node that accumulates its gradient.
    pub first_producers: Vec<Option<usize>>,
}

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
            deriver.node(index, node);
        }
        let losses: Vec<Value> = self.losses().map(|index| self.nodes[index].outputs[0]).collect();
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

/// A value's gradient so far. A shared one is also the gradient of another value, so it must not be added to.
#[derive(Debug, Clone, Copy)]
struct Gradient {
    value: Value,
    shared: bool,
}

struct Deriver<'a> {
    graph: &'a Graph,
    needed: Vec<bool>,
    values: Vec<ValueInfo>,
    /// For each value of the graph, its gradient.
    gradients: Vec<Option<Gradient>>,
    nodes: Vec<GradNode>,
}

impl Deriver<'_> {
    /// Appends the gradient of one forward node.
    fn node(&mut self, index: usize, node: &Node) {
        let gradient = |deriver: &Self, place: usize| {
            deriver.gradients[node.outputs[place].index()].map(|gradient| gradient.value)
        };
        match node.op {
            Op::HeadLoss => {
                let (x, labels, loss) = (node.inputs[0], node.inputs[1], node.outputs[0]);
                let dx = self.needed[x.index()].then(|| self.fresh(x));
                let outputs =
                    [Some(loss), dx].into_iter().flatten().map(|value| (value, GradWrite::Write)).collect();
                self.push(index, GradOp::HeadLoss, vec![x, labels], node.params.clone(), outputs, true);
                if let Some(dx) = dx {
                    self.contribute(index, x, dx);
                }
            }
            Op::Linear => {
                let Some(dy) = gradient(self, 0) else { return };
                let x = node.inputs[0];
                self.push(index, GradOp::LinearParams, vec![x, dy], Vec::new(), Vec::new(), true);
                if !self.needed[x.index()] {
                    return;
                }
                let weight = vec![node.params[0]];
                // A linear accumulates into an existing gradient: q, k and v share one norm.
                if let Some(Gradient { value, shared: false }) = self.gradients[x.index()] {
                    let outputs = vec![(value, GradWrite::Add)];
                    self.push(index, GradOp::LinearInput, vec![dy], weight, outputs, false);
                } else {
                    let dx = self.fresh(x);
                    let outputs = vec![(dx, GradWrite::Write)];
                    self.push(index, GradOp::LinearInput, vec![dy], weight, outputs, false);
                    self.contribute(index, x, dx);
                }
            }
            Op::RmsNorm { .. } => {
                let Some(dy) = gradient(self, 0) else { return };
                let (x, rstd) = (node.inputs[0], node.outputs[1]);
                let mut inputs = vec![x, rstd, dy];
                inputs.extend(self.gradients[x.index()].map(|earlier| earlier.value));
                // Without trainable parameters before it, only the weight's gradient is computed.
                let dx = self.needed[x.index()].then(|| self.fresh(x));
                let outputs = dx.map(|dx| (dx, GradWrite::Write)).into_iter().collect();
                self.push(index, GradOp::RmsNorm(node.op), inputs, node.params.clone(), outputs, true);
                // It includes the earlier gradient, so it replaces it.
                self.gradients[x.index()] = dx.map(|value| Gradient { value, shared: false });
            }
            Op::AddRmsNorm { .. } => self.add_rms_norm(index, node),
            Op::HeadNormRope { .. } => {
                let Some(dy) = gradient(self, 0) else { return };
                let (x, positions, rstd) = (node.inputs[0], node.inputs[1], node.outputs[1]);
                let dx = self.needed[x.index()].then(|| self.fresh(x));
                let outputs = dx.map(|dx| (dx, GradWrite::Write)).into_iter().collect();
                let inputs = vec![x, rstd, dy, positions];
                self.push(index, GradOp::HeadNormRope(node.op), inputs, node.params.clone(), outputs, true);
                if let Some(dx) = dx {
                    self.contribute(index, x, dx);
                }
            }
            Op::Rope { .. } => {
                let Some(dy) = gradient(self, 0) else { return };
                self.one_to_one(index, node, GradOp::Rope(node.op), vec![dy, node.inputs[1]]);
            }
            Op::Dropout { .. } => {
                let Some(dy) = gradient(self, 0) else { return };
                self.one_to_one(index, node, GradOp::Dropout(node.op), vec![dy]);
            }
            Op::Attention { .. } => {
                let Some(dy) = gradient(self, 0) else { return };
                let mut inputs = node.inputs.clone();
                inputs.extend([node.outputs[0], node.outputs[1], dy]);
                self.many(index, node, GradOp::Attention(node.op), inputs);
            }
            Op::GatedActivation(activation) => {
                let Some(dy) = gradient(self, 0) else { return };
                let inputs = vec![node.inputs[0], node.inputs[1], dy];
                self.many(index, node, GradOp::GatedActivation(activation), inputs);
            }
            Op::Embedding => {
                let Some(dx) = gradient(self, 0) else { return };
                let inputs = vec![node.inputs[0], dx];
                self.push(index, GradOp::Embedding, inputs, Vec::new(), Vec::new(), true);
            }
        }
    }

    /// The sum's gradient is that of both summands: one value serves both and is shared.
    fn add_rms_norm(&mut self, index: usize, node: &Node) {
        let (sum, normed, rstd) = (node.outputs[0], node.outputs[1], node.outputs[2]);
        let of =
            |deriver: &Self, value: Value| deriver.gradients[value.index()].map(|gradient| gradient.value);
        let Some(dy) = of(self, normed) else {
            // Only the sum is used: its gradient passes through.
            if let Some(dh) = of(self, sum) {
                self.share(index, node, dh);
            }
            return;
        };
        let mut inputs = vec![sum, rstd, dy];
        inputs.extend(of(self, sum));
        let needed = node.inputs.iter().any(|input| self.needed[input.index()]);
        let gradient = needed.then(|| self.fresh(sum));
        let outputs = gradient.map(|gradient| (gradient, GradWrite::Write)).into_iter().collect();
        self.push(index, GradOp::AddRmsNorm(node.op), inputs, node.params.clone(), outputs, true);
        if let Some(gradient) = gradient {
            self.share(index, node, gradient);
        }
    }

    fn share(&mut self, index: usize, node: &Node, gradient: Value) {
        for input in &node.inputs {
            self.contribute(index, *input, gradient);
            if let Some(given) = &mut self.gradients[input.index()] {
                given.shared |= given.value == gradient;
            }
        }
    }

    fn one_to_one(&mut self, index: usize, node: &Node, op: GradOp, inputs: Vec<Value>) {
        let x = node.inputs[0];
        if !self.needed[x.index()] {
            return;
        }
        let dx = self.fresh(x);
        self.push(index, op, inputs, Vec::new(), vec![(dx, GradWrite::Write)], false);
        self.contribute(index, x, dx);
    }

    /// An op with a gradient for each input, computed together.
    fn many(&mut self, index: usize, node: &Node, op: GradOp, inputs: Vec<Value>) {
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
    fn fresh(&mut self, like: Value) -> Value {
        let info = ValueInfo { kind: Kind::Activation, ..self.values[like.index()] };
        self.values.push(info);
        Value(self.values.len() as u32 - 1)
    }

    /// `gradient` is one contribution to the gradient of `value`; the second and later ones are summed.
    fn contribute(&mut self, index: usize, value: Value, gradient: Value) {
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

    fn push(
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
