//! The builder: a model's forward is a sequence of op calls, each of which checks its shapes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::{
    GatedActivation, Graph, GraphError, Kind, Node, Op, Param, ParamId, ParamSpec, Role, Rotary, Unit,
    UnitId, Value, ValueInfo,
};

/// Builds a model's forward.
#[derive(Debug)]
pub struct Builder {
    graph: Graph,
    names: HashMap<String, ParamId>,
    /// The index of the rotary embedding of the next ropes.
    rotary: Option<usize>,
    tokens: u64,
    unit: Option<UnitId>,
    ids: Value,
    labels: Value,
    positions: Value,
    dropouts: u32,
}

impl Builder {
    /// A forward over micro-batches of this many tokens (rows).
    pub fn new(tokens: u64) -> Self {
        let index = ValueInfo { rows: tokens, width: 1, kind: Kind::Index };
        let inputs = vec![Value(0), Value(1), Value(2)];
        let graph = Graph {
            units: Vec::new(),
            params: Vec::new(),
            values: vec![index; inputs.len()],
            inputs,
            nodes: Vec::new(),
            rotaries: Vec::new(),
        };
        Self {
            graph,
            names: HashMap::new(),
            rotary: None,
            tokens,
            unit: None,
            ids: Value(0),
            labels: Value(1),
            positions: Value(2),
            dropouts: 0,
        }
    }

    /// The tokens of the micro-batch `[T]`.
    pub fn ids(&self) -> Value {
        self.ids
    }

    /// Their labels `[T]`, already shifted; -100 is not trained.
    pub fn labels(&self) -> Value {
        self.labels
    }

    /// Their positions in their sequences `[T]`.
    pub fn positions(&self) -> Value {
        self.positions
    }

    /// Sets the rotary embedding of the ropes after this call. Equal ones are kept once.
    pub fn rotary(&mut self, rotary: Rotary) {
        let known = self.graph.rotaries.iter().position(|known| *known == rotary);
        self.rotary = Some(known.unwrap_or_else(|| {
            self.graph.rotaries.push(rotary);
            self.graph.rotaries.len() - 1
        }));
    }

    /// Begins a unit with these parameters. Later ops belong to it.
    pub fn unit(
        &mut self,
        name: impl Into<String>,
        role: Role,
        params: Vec<ParamSpec>,
    ) -> Result<UnitId, GraphError> {
        let unit = UnitId(self.graph.units.len() as u32);
        let name = name.into();
        let mut ids = Vec::with_capacity(params.len());
        for spec in params {
            let id = ParamId(self.graph.params.len() as u32);
            match self.names.entry(spec.name.clone()) {
                Entry::Vacant(place) => place.insert(id),
                Entry::Occupied(known) => {
                    let first = self.graph.param(*known.get()).unit;
                    let first = if first == unit { &name } else { self.graph.unit_name(first) };
                    let first = first.to_owned();
                    return Err(GraphError::ParamTwice { name: spec.name, first, second: name });
                }
            };
            ids.push(id);
            self.graph.params.push(Param { spec, unit });
        }
        self.graph.units.push(Unit { name, role, params: ids });
        self.unit = Some(unit);
        Ok(unit)
    }

    /// The parameter of this name, in any unit.
    pub fn param(&self, name: &str) -> Result<ParamId, GraphError> {
        self.names.get(name).copied().ok_or_else(|| GraphError::NoParam { name: name.to_owned() })
    }

    /// Embedding lookup.
    pub fn embedding(&mut self, ids: Value, table: ParamId) -> Result<Value, GraphError> {
        let [_, width] = self.param_shape(Op::Embedding, table, "the table")?;
        self.expect_kind(Op::Embedding, ids, Kind::Index)?;
        self.push(Op::Embedding, &[ids], &[table], &[self.activation(width)]).map(|outputs| outputs[0])
    }

    /// `x · wᵀ`, plus `bias` where it is given.
    pub fn linear(&mut self, x: Value, weight: ParamId, bias: Option<ParamId>) -> Result<Value, GraphError> {
        let [out, inner] = self.param_shape(Op::Linear, weight, "the weight")?;
        self.expect_width(Op::Linear, x, inner)?;
        let mut params = vec![weight];
        if let Some(bias) = bias {
            let [width] = self.param_shape(Op::Linear, bias, "the bias")?;
            self.expect(Op::Linear, "the bias's width", out, width)?;
            params.push(bias);
        }
        self.push(Op::Linear, &[x], &params, &[self.activation(out)]).map(|outputs| outputs[0])
    }

    /// RMSNorm of `x`.
    pub fn rms_norm(&mut self, x: Value, weight: ParamId, eps: f64) -> Result<Value, GraphError> {
        let op = Op::RmsNorm { eps };
        let width = self.graph.info(x).width;
        self.expect_vector(op, weight, width)?;
        self.push(op, &[x], &[weight], &[self.activation(width), self.statistic(1)]).map(|outputs| outputs[0])
    }

    /// Residual add and RMSNorm: returns the sum and its norm.
    pub fn add_rms_norm(
        &mut self,
        residual: Value,
        x: Value,
        weight: ParamId,
        eps: f64,
    ) -> Result<(Value, Value), GraphError> {
        let op = Op::AddRmsNorm { eps };
        let width = self.graph.info(residual).width;
        self.expect_width(op, x, width)?;
        self.expect_vector(op, weight, width)?;
        let outputs = [self.activation(width), self.activation(width), self.statistic(1)];
        let outputs = self.push(op, &[residual, x], &[weight], &outputs)?;
        Ok((outputs[0], outputs[1]))
    }

    /// RMSNorm of each head, then RoPE.
    pub fn head_norm_rope(
        &mut self,
        x: Value,
        weight: ParamId,
        heads: u64,
        eps: f64,
    ) -> Result<Value, GraphError> {
        let op = Op::HeadNormRope { heads, eps, rotary: self.rotary.unwrap_or(0) };
        let head_dim = self.rotated_dim(op, x, heads)?;
        self.expect_vector(op, weight, head_dim)?;
        let outputs = [self.activation(heads * head_dim), self.statistic(heads)];
        self.push(op, &[x, self.positions], &[weight], &outputs).map(|outputs| outputs[0])
    }

    /// RoPE of `x`.
    pub fn rope(&mut self, x: Value, heads: u64) -> Result<Value, GraphError> {
        let op = Op::Rope { heads, rotary: self.rotary.unwrap_or(0) };
        let head_dim = self.rotated_dim(op, x, heads)?;
        self.push(op, &[x, self.positions], &[], &[self.activation(heads * head_dim)])
            .map(|outputs| outputs[0])
    }

    /// Causal attention within each sequence.
    pub fn attention(
        &mut self,
        [q, k, v]: [Value; 3],
        heads: u64,
        kv_heads: u64,
        window: Option<u64>,
        scale: f64,
    ) -> Result<Value, GraphError> {
        let op = Op::Attention { heads, kv_heads, window, scale };
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of the {kv_heads} heads of k and v");
            return Err(self.shape_error(op, "the number of heads", &expected, heads.to_string()));
        }
        let head_dim = self.head_dim(op, q, heads)?;
        self.expect_width(op, k, kv_heads * head_dim)?;
        self.expect_width(op, v, kv_heads * head_dim)?;
        let outputs = [self.activation(heads * head_dim), self.statistic(heads)];
        self.push(op, &[q, k, v], &[], &outputs).map(|outputs| outputs[0])
    }

    /// `f(gate) · up`, f the activation.
    pub fn gated_activation(
        &mut self,
        activation: GatedActivation,
        gate: Value,
        up: Value,
    ) -> Result<Value, GraphError> {
        let (op, width) = (Op::GatedActivation(activation), self.graph.info(gate).width);
        self.expect_width(op, up, width)?;
        self.push(op, &[gate, up], &[], &[self.activation(width)]).map(|outputs| outputs[0])
    }

    /// `silu(gate) · up`.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value, GraphError> {
        self.gated_activation(GatedActivation::Silu, gate, up)
    }

    /// Dropout; no op where the probability is 0.
    pub fn dropout(&mut self, x: Value, probability: f64) -> Result<Value, GraphError> {
        if probability == 0.0 {
            return Ok(x);
        }
        let op = Op::Dropout { probability, salt: self.dropouts };
        if !(0.0..1.0).contains(&probability) {
            return Err(self.shape_error(
                op,
                "the probability",
                "at least 0 and below 1",
                probability.to_string(),
            ));
        }
        self.dropouts += 1;
        let width = self.graph.info(x).width;
        self.push(op, &[x], &[], &[self.activation(width)]).map(|outputs| outputs[0])
    }

    /// A loss. Every forward has one; of several, the sum is trained.
    pub fn head_loss(&mut self, x: Value, weight: ParamId) -> Result<Value, GraphError> {
        let [_, inner] = self.param_shape(Op::HeadLoss, weight, "the weight")?;
        self.expect_width(Op::HeadLoss, x, inner)?;
        let loss = ValueInfo { rows: 1, width: 1, kind: Kind::Statistic };
        self.push(Op::HeadLoss, &[x, self.labels], &[weight], &[loss]).map(|outputs| outputs[0])
    }

    /// The graph. Fails where it has no loss, or an op that does not reach it.
    pub fn finish(self) -> Result<Graph, GraphError> {
        let graph = self.graph;
        graph.losses().next().ok_or(GraphError::NoLoss)?;
        let mut used = vec![false; graph.values.len()];
        for input in graph.nodes.iter().flat_map(|node| &node.inputs) {
            used[input.index()] = true;
        }
        for node in graph.nodes.iter().filter(|node| !node.op.is_loss()) {
            if !node.outputs.iter().any(|output| used[output.index()]) {
                let unit = graph.unit_name(node.unit).to_owned();
                return Err(GraphError::DeadEnd { op: node.op.name(), unit });
            }
        }
        Ok(graph)
    }

    fn activation(&self, width: u64) -> ValueInfo {
        ValueInfo { rows: self.tokens, width, kind: Kind::Activation }
    }

    fn statistic(&self, width: u64) -> ValueInfo {
        ValueInfo { rows: self.tokens, width, kind: Kind::Statistic }
    }

    fn push(
        &mut self,
        op: Op,
        inputs: &[Value],
        params: &[ParamId],
        outputs: &[ValueInfo],
    ) -> Result<Vec<Value>, GraphError> {
        let unit = self.unit.ok_or(GraphError::NoUnit { op: op.name() })?;
        let from = self.graph.values.len() as u32;
        self.graph.values.extend_from_slice(outputs);
        let outputs: Vec<Value> = (from..self.graph.values.len() as u32).map(Value).collect();
        self.graph.nodes.push(Node {
            op,
            unit,
            inputs: inputs.to_vec(),
            params: params.to_vec(),
            outputs: outputs.clone(),
        });
        Ok(outputs)
    }

    fn shape_error(&self, op: Op, what: &str, expected: &str, found: String) -> GraphError {
        let unit = self.unit.map_or("", |unit| self.graph.unit_name(unit)).to_owned();
        GraphError::Shape { op: op.name(), unit, what: what.to_owned(), expected: expected.to_owned(), found }
    }

    fn expect(&self, op: Op, what: &str, expected: u64, found: u64) -> Result<(), GraphError> {
        if expected == found {
            return Ok(());
        }
        Err(self.shape_error(op, what, &expected.to_string(), found.to_string()))
    }

    fn expect_width(&self, op: Op, value: Value, width: u64) -> Result<(), GraphError> {
        self.expect_kind(op, value, Kind::Activation)?;
        self.expect(op, "an operand's width", width, self.graph.info(value).width)
    }

    fn expect_kind(&self, op: Op, value: Value, kind: Kind) -> Result<(), GraphError> {
        let found = self.graph.info(value).kind;
        if found == kind {
            return Ok(());
        }
        Err(self.shape_error(op, "an operand's kind", &format!("{kind:?}"), format!("{found:?}")))
    }

    fn expect_vector(&self, op: Op, param: ParamId, width: u64) -> Result<(), GraphError> {
        let [found] = self.param_shape(op, param, "the weight")?;
        self.expect(op, "the weight's width", width, found)
    }

    fn head_dim(&self, op: Op, x: Value, heads: u64) -> Result<u64, GraphError> {
        self.expect_kind(op, x, Kind::Activation)?;
        let width = self.graph.info(x).width;
        if heads == 0 || !width.is_multiple_of(heads) {
            let expected = format!("a multiple of {heads} heads");
            return Err(self.shape_error(op, "an operand's width", &expected, width.to_string()));
        }
        Ok(width / heads)
    }

    /// The width of a rotated head.
    fn rotated_dim(&self, op: Op, x: Value, heads: u64) -> Result<u64, GraphError> {
        let head_dim = self.head_dim(op, x, heads)?;
        if !head_dim.is_multiple_of(2) {
            return Err(self.shape_error(op, "a head's width", "even", head_dim.to_string()));
        }
        let Some(rotary) = self.rotary else {
            let unit = self.unit.map_or("", |unit| self.graph.unit_name(unit)).to_owned();
            return Err(GraphError::NoRotary { op: op.name(), unit });
        };
        let frequencies = self.graph.rotaries[rotary].frequencies.len() as u64;
        self.expect(op, "the number of rotary frequencies", head_dim / 2, frequencies)?;
        Ok(head_dim)
    }

    fn param_shape<const N: usize>(
        &self,
        op: Op,
        param: ParamId,
        what: &str,
    ) -> Result<[u64; N], GraphError> {
        let shape = &self.graph.param(param).spec.shape;
        shape.as_slice().try_into().map_err(|_| {
            self.shape_error(op, what, &format!("a tensor of {N} dimensions"), format!("{shape:?}"))
        })
    }
}
