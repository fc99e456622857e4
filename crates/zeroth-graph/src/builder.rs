//! The builder: a model's forward is a sequence of op calls, each of which checks its shapes. The calls are in the files of the
//! ops.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::{
    Graph, GraphError, Group, Kind, LossPart, Node, Op, Param, ParamId, ParamSpec, Role, Rotary, Rows,
    Stream, Unit, UnitId, Value, ValueInfo,
};

/// Builds a model's forward.
#[derive(Debug)]
pub struct Builder {
    pub(crate) graph: Graph,
    names: HashMap<String, ParamId>,
    /// The index of the rotary embedding of the next ropes.
    pub(crate) rotary: Option<usize>,
    /// The part of the next losses.
    loss_part: LossPart,
    unit: Option<UnitId>,
    /// The model that ops belong to now.
    group: Group,
    /// Dropouts so far.
    pub(crate) dropouts: u32,
}

impl Builder {
    /// A forward over micro-batches with a token stream for each of these maximum numbers of tokens.
    pub fn new(streams: &[u64]) -> Self {
        let graph = Graph {
            units: Vec::new(),
            params: Vec::new(),
            values: Vec::new(),
            streams: Vec::new(),
            inputs: Vec::new(),
            nodes: Vec::new(),
            rotaries: Vec::new(),
            loss_parts: Vec::new(),
        };
        let mut builder = Self {
            graph,
            names: HashMap::new(),
            rotary: None,
            loss_part: LossPart::CROSS_ENTROPY,
            unit: None,
            group: Group::Model,
            dropouts: 0,
        };
        for (stream, &rows) in streams.iter().enumerate() {
            let [ids, labels, positions] = [(); 3].map(|()| builder.input(stream, 1));
            builder.graph.streams.push(Stream { rows, ids, labels, positions });
        }
        builder
    }

    /// The tokens of the first stream `[T]`.
    pub fn ids(&self) -> Value {
        self.stream(0).ids
    }

    /// A token stream.
    pub fn stream(&self, stream: usize) -> Stream {
        self.graph.streams[stream]
    }

    /// A further input [T, width] with a row for each token of a stream: 32-bit integers.
    pub fn input(&mut self, stream: usize, width: u64) -> Value {
        self.further_input(ValueInfo { rows: Rows::Stream(stream), width, kind: Kind::Index })
    }

    /// A further input [T, width] with a row for each token of a stream: f32.
    pub fn statistic_input(&mut self, stream: usize, width: u64) -> Value {
        self.further_input(ValueInfo { rows: Rows::Stream(stream), width, kind: Kind::Statistic })
    }

    fn further_input(&mut self, info: ValueInfo) -> Value {
        let input = Value(self.graph.values.len() as u32);
        self.graph.values.push(info);
        self.graph.inputs.push(input);
        input
    }

    /// Sets the rotary embedding of the ropes after this call. Equal ones are kept once.
    pub fn rotary(&mut self, rotary: Rotary) {
        let known = self.graph.rotaries.iter().position(|known| *known == rotary);
        self.rotary = Some(known.unwrap_or_else(|| {
            self.graph.rotaries.push(rotary);
            self.graph.rotaries.len() - 1
        }));
    }

    /// Sets the part that losses after this call belong to, and its weight in the model's loss. Before the first call it is
    /// [`LossPart::CROSS_ENTROPY`].
    pub fn set_loss_part(&mut self, name: &'static str, weight: f64) {
        self.loss_part = LossPart { name, weight };
    }

    /// The index of the part of a loss that is added now.
    pub(crate) fn loss_part(&mut self) -> Result<usize, GraphError> {
        self.named_loss_part(self.loss_part)
    }

    /// The index of a part of the loss.
    pub(crate) fn named_loss_part(&mut self, part: LossPart) -> Result<usize, GraphError> {
        let LossPart { name, weight } = part;
        let unit = || self.unit_name().to_owned();
        if !weight.is_finite() {
            return Err(GraphError::LossWeight { name, weight, unit: unit() });
        }
        let parts = &self.graph.loss_parts;
        if let Some(known) = parts.iter().position(|known| known.name == name) {
            let first = parts[known].weight;
            if first != weight {
                return Err(GraphError::LossWeights { name, first, second: weight, unit: unit() });
            }
            return Ok(known);
        }
        self.graph.loss_parts.push(part);
        Ok(self.graph.loss_parts.len() - 1)
    }

    /// Begins a unit with these parameters. Later ops belong to it.
    pub fn unit(
        &mut self,
        name: impl Into<String>,
        role: Role,
        params: Vec<ParamSpec>,
    ) -> Result<UnitId, GraphError> {
        self.unit_of(Group::Model, name.into(), role, params)
    }

    /// Begins a unit of the teacher, with parameters that are all frozen. Later ops belong to it.
    pub fn teacher_unit(
        &mut self,
        name: impl Into<String>,
        params: Vec<ParamSpec>,
    ) -> Result<UnitId, GraphError> {
        if let Some(trained) = params.iter().find(|param| param.trainable) {
            return Err(GraphError::TrainedTeacher { name: trained.name.clone() });
        }
        self.unit_of(Group::Teacher, name.into(), Role::Other, params)
    }

    fn unit_of(
        &mut self,
        group: Group,
        name: String,
        role: Role,
        params: Vec<ParamSpec>,
    ) -> Result<UnitId, GraphError> {
        let unit = UnitId(self.graph.units.len() as u32);
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
        self.graph.units.push(Unit { name, role, group, params: ids });
        self.enter(unit, group);
        Ok(unit)
    }

    /// Later ops belong to this unit, in the forward of this model. A teacher in a unit of the model reads its frozen parameters,
    /// which are gathered once for both.
    pub const fn enter(&mut self, unit: UnitId, group: Group) {
        (self.unit, self.group) = (Some(unit), group);
    }

    /// The parameter of this name, in any unit.
    pub fn param(&self, name: &str) -> Result<ParamId, GraphError> {
        self.names.get(name).copied().ok_or_else(|| GraphError::NoParam { name: name.to_owned() })
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

    /// A value's shape and kind.
    pub fn info(&self, value: Value) -> ValueInfo {
        self.graph.info(value)
    }

    /// An activation with the rows of another value.
    pub(crate) fn activation_like(&self, like: Value, width: u64) -> ValueInfo {
        ValueInfo { rows: self.info(like).rows, width, kind: Kind::Activation }
    }

    /// A statistic with the rows of another value.
    pub(crate) fn statistic_like(&self, like: Value, width: u64) -> ValueInfo {
        ValueInfo { rows: self.info(like).rows, width, kind: Kind::Statistic }
    }

    /// The stream of an operand that must have a row for each of its tokens.
    pub(crate) fn stream_of(&self, op: Op, value: Value) -> Result<Stream, GraphError> {
        match self.info(value).rows {
            Rows::Stream(stream) => Ok(self.stream(stream)),
            other => {
                let expected = "one row for each token of a stream";
                Err(self.shape_error(op, "an operand's rows", expected, format!("{other:?}")))
            }
        }
    }

    pub(crate) fn expect_rows(&self, op: Op, value: Value, like: Value) -> Result<(), GraphError> {
        let (found, expected) = (self.info(value).rows, self.info(like).rows);
        if found == expected {
            return Ok(());
        }
        Err(self.shape_error(op, "an operand's rows", &format!("{expected:?}"), format!("{found:?}")))
    }

    /// Expects an activation of the shape of another.
    pub(crate) fn expect_like(&self, op: Op, value: Value, like: Value) -> Result<(), GraphError> {
        self.expect_width(op, value, self.info(like).width)?;
        self.expect_rows(op, value, like)
    }

    /// The name of the current unit; empty before the first.
    pub(crate) fn unit_name(&self) -> &str {
        self.unit.map_or("", |unit| self.graph.unit_name(unit))
    }

    pub(crate) fn push(
        &mut self,
        op: Op,
        inputs: &[Value],
        params: &[ParamId],
        outputs: &[ValueInfo],
    ) -> Result<Vec<Value>, GraphError> {
        let unit = self.unit.ok_or(GraphError::NoUnit { op: op.name() })?;
        if self.group == Group::Teacher {
            let mut specs = params.iter().map(|param| &self.graph.param(*param).spec);
            if let Some(trained) = specs.find(|spec| spec.trainable) {
                return Err(GraphError::TrainedTeacher { name: trained.name.clone() });
            }
        }
        let from = self.graph.values.len() as u32;
        self.graph.values.extend_from_slice(outputs);
        let outputs: Vec<Value> = (from..self.graph.values.len() as u32).map(Value).collect();
        self.graph.nodes.push(Node {
            op,
            unit,
            group: self.group,
            inputs: inputs.to_vec(),
            params: params.to_vec(),
            outputs: outputs.clone(),
        });
        Ok(outputs)
    }

    pub(crate) fn shape_error(&self, op: Op, what: &str, expected: &str, found: String) -> GraphError {
        let unit = self.unit_name().to_owned();
        GraphError::Shape { op: op.name(), unit, what: what.to_owned(), expected: expected.to_owned(), found }
    }

    pub(crate) fn expect(&self, op: Op, what: &str, expected: u64, found: u64) -> Result<(), GraphError> {
        if expected == found {
            return Ok(());
        }
        Err(self.shape_error(op, what, &expected.to_string(), found.to_string()))
    }

    pub(crate) fn expect_width(&self, op: Op, value: Value, width: u64) -> Result<(), GraphError> {
        self.expect_kind(op, value, Kind::Activation)?;
        self.expect(op, "an operand's width", width, self.graph.info(value).width)
    }

    pub(crate) fn expect_kind(&self, op: Op, value: Value, kind: Kind) -> Result<(), GraphError> {
        let found = self.graph.info(value).kind;
        if found == kind {
            return Ok(());
        }
        Err(self.shape_error(op, "an operand's kind", &format!("{kind:?}"), format!("{found:?}")))
    }

    pub(crate) fn expect_vector(&self, op: Op, param: ParamId, width: u64) -> Result<(), GraphError> {
        let [found] = self.param_shape(op, param, "the weight")?;
        self.expect(op, "the weight's width", width, found)
    }

    pub(crate) fn head_dim(&self, op: Op, x: Value, heads: u64) -> Result<u64, GraphError> {
        self.expect_kind(op, x, Kind::Activation)?;
        let width = self.graph.info(x).width;
        if heads == 0 || !width.is_multiple_of(heads) {
            let expected = format!("a multiple of {heads} heads");
            return Err(self.shape_error(op, "an operand's width", &expected, width.to_string()));
        }
        Ok(width / heads)
    }

    pub(crate) fn param_shape<const N: usize>(
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
