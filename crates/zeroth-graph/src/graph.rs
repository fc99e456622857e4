//! The graph: units with their parameters, values, and nodes in the order they run.

use crate::{GraphError, Op, Value, ValueInfo};

/// A unit, by its place in the order in which a forward first needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub(crate) u32);

/// A parameter, by its place in the table of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub(crate) u32);

impl UnitId {
    /// The unit at this place of the table of units.
    pub const fn at(index: usize) -> Self {
        Self(index as u32)
    }

    /// Its place in the table of units.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl ParamId {
    /// Its place in the table of parameters.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A parameter as a unit declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamSpec {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape; a linear's weight is [out, in].
    pub shape: Vec<u64>,
    /// Whether it is trained. What is not lies in the unit's frozen flat.
    pub trainable: bool,
}

/// A parameter of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// What was declared.
    pub spec: ParamSpec,
    /// The unit that holds it.
    pub unit: UnitId,
}

/// A piece of the model that is gathered, computed and released together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Its name in messages, traces and plans.
    pub name: String,
    /// Its parameters, in the order of its flats.
    pub params: Vec<ParamId>,
}

/// One op with its operands.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// The unit it belongs to. It may read parameters of others: a tied head reads the embedding's unit.
    pub unit: UnitId,
    /// What it reads, in the order of the op's documentation.
    pub inputs: Vec<Value>,
    /// The parameters it reads.
    pub params: Vec<ParamId>,
    /// What it writes.
    pub outputs: Vec<Value>,
}

/// The angles of a model's rotations: a token at position p turns pair i of each head by p · `frequencies[i]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rotary {
    /// One for each pair of a head's elements; empty where nothing is rotated.
    pub frequencies: Vec<f64>,
    /// What the rotated elements are scaled with.
    pub scale: f64,
    /// How longer sequences turn slower, where they do.
    pub dynamic: Option<DynamicScaling>,
}

/// Rotations that slow down with the length of a sequence (dynamic scaling).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicScaling {
    /// The base of the frequencies.
    pub theta: f64,
    /// How much slower.
    pub factor: f64,
    /// Sequences up to this length are not slowed down.
    pub max_positions: u64,
}

impl Rotary {
    /// The frequencies of a sequence of this length, which alone decides them: not what it is packed with.
    pub fn frequencies_at(&self, length: u64) -> impl Iterator<Item = f64> {
        let dim = 2.0 * self.frequencies.len() as f64;
        let slowed = self.dynamic.filter(|stretch| length > stretch.max_positions).map(|stretch| {
            let DynamicScaling { theta, factor, max_positions } = stretch;
            let longer = length as f64 / max_positions as f64;
            theta * (factor * longer - (factor - 1.0)).powf(dim / (dim - 2.0))
        });
        self.frequencies.iter().enumerate().map(move |(pair, frequency)| {
            slowed.map_or(*frequency, |theta| theta.powf(-2.0 * pair as f64 / dim))
        })
    }
}

/// A model's forward over one micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    /// Units, in the order in which forward first needs them.
    pub units: Vec<Unit>,
    /// Parameters of all units.
    pub params: Vec<Param>,
    /// Values, by [`Value`].
    pub values: Vec<ValueInfo>,
    /// Values that come from the data.
    pub inputs: Vec<Value>,
    /// Ops, in the order they run. The last is the head_loss.
    pub nodes: Vec<Node>,
    /// The angles of its rotations.
    pub rotary: Rotary,
}

impl Param {
    /// Its elements.
    pub fn elements(&self) -> u64 {
        self.spec.shape.iter().product()
    }
}

impl Graph {
    /// A value's shape and kind.
    pub fn info(&self, value: Value) -> ValueInfo {
        self.values[value.index()]
    }

    /// A parameter.
    pub fn param(&self, param: ParamId) -> &Param {
        &self.params[param.index()]
    }

    /// Elements of a unit's trainable (or frozen) flat, without padding.
    pub fn flat_elements(&self, unit: UnitId, trainable: bool) -> u64 {
        let params = self.units[unit.index()].params.iter().map(|id| self.param(*id));
        params.filter(|param| param.spec.trainable == trainable).map(Param::elements).sum()
    }

    /// The units whose parameters a node reads, each once, in the order of its parameters.
    pub fn units_of(&self, params: &[ParamId]) -> Vec<UnitId> {
        let mut units: Vec<UnitId> = Vec::new();
        for unit in params.iter().map(|id| self.param(*id).unit) {
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
        units
    }

    /// The name of a node's unit, for messages.
    pub(crate) fn unit_name(&self, unit: UnitId) -> &str {
        &self.units[unit.index()].name
    }

    /// The head_loss, whose gradient all others follow from.
    pub(crate) fn loss_node(&self) -> Result<usize, GraphError> {
        self.nodes.iter().position(|node| node.op == Op::HeadLoss).ok_or(GraphError::NoLoss)
    }
}
