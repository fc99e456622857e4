//! The graph: units with their parameters, values, and nodes in execution order.

use crate::{Op, Rows, Value, ValueInfo};

/// A unit: an index into the graph's units, in the order in which forward first needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub(crate) u32);

/// A parameter: an index into the graph's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub(crate) u32);

impl UnitId {
    /// The unit with this index.
    pub const fn at(index: usize) -> Self {
        Self(index as u32)
    }

    /// Its index in the graph's units.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl ParamId {
    /// Its index in the graph's parameters.
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
    /// Whether it is trained. Frozen parameters are in the unit's frozen flat buffer.
    pub trainable: bool,
    /// Whether it is kept in nf4, in a flat buffer of its own kind. A trained parameter never is.
    pub quantized: bool,
}

/// A parameter of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Its declaration.
    pub spec: ParamSpec,
    /// The unit that holds it.
    pub unit: UnitId,
}

/// A group of parameters that is gathered and released together, such as a transformer block (an FSDP unit).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Its name in messages, traces and plans.
    pub name: String,
    /// What it is to the model.
    pub role: Role,
    /// The model it belongs to.
    pub group: Group,
    /// Its parameters, in the order of its flat buffers.
    pub params: Vec<ParamId>,
}

/// The model of a unit or a node, where a graph has two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// The model that is trained.
    Model,
    /// The model it is distilled from. Its parameters are frozen, and it has no gradients.
    Teacher,
}

/// What a unit is to its model: passes that treat blocks apart from the rest go by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// It embeds tokens.
    Embedding,
    /// A repeated block, counted from 0.
    Block(u64),
    /// It computes a loss.
    Head,
    /// Anything else.
    Other,
}

/// One op with its operands.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The op.
    pub op: Op,
    /// The unit it belongs to. It may read parameters of other units: a tied head reads the embedding's.
    pub unit: UnitId,
    /// The model whose forward it is of. A teacher may be computed in units of the model, from their frozen parameters.
    pub group: Group,
    /// Its operands, in the order documented at the op.
    pub inputs: Vec<Value>,
    /// The parameters it reads.
    pub params: Vec<ParamId>,
    /// Its results.
    pub outputs: Vec<Value>,
}

/// A rotary embedding: at position p, pair i of each head is rotated by p · `frequencies[i]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rotary {
    /// One per pair of a head's elements.
    pub frequencies: Vec<f64>,
    /// Factor of the rotated elements.
    pub scale: f64,
    /// Dynamic NTK scaling, where the model has it.
    pub dynamic: Option<DynamicScaling>,
}

/// Dynamic NTK scaling: frequencies fall with the length of a sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicScaling {
    /// The base of the frequencies.
    pub theta: f64,
    /// The scaling factor.
    pub factor: f64,
    /// Sequences up to this length are not scaled.
    pub max_positions: u64,
}

impl Rotary {
    /// The frequencies of a sequence of this length, whatever it is packed with.
    pub fn frequencies_at(&self, length: u64) -> impl Iterator<Item = f64> {
        let dim = 2.0 * self.frequencies.len() as f64;
        let theta = self.dynamic.filter(|scaling| length > scaling.max_positions).map(|scaling| {
            let DynamicScaling { theta, factor, max_positions } = scaling;
            let longer = length as f64 / max_positions as f64;
            theta * (factor * longer - (factor - 1.0)).powf(dim / (dim - 2.0))
        });
        self.frequencies.iter().enumerate().map(move |(pair, frequency)| {
            theta.map_or(*frequency, |theta| theta.powf(-2.0 * pair as f64 / dim))
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
    /// The token streams of a micro-batch.
    pub streams: Vec<Stream>,
    /// Values that come from the dataset: those of the streams, and further ones.
    pub inputs: Vec<Value>,
    /// Nodes, in execution order.
    pub nodes: Vec<Node>,
    /// Rotary embeddings, by the index in rope ops.
    pub rotaries: Vec<Rotary>,
    /// The named parts of the loss, by the index in loss ops.
    pub loss_parts: Vec<LossPart>,
}

/// A named part of the loss. The model's loss is the sum of its parts, each times its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossPart {
    /// Its name in metrics, such as `ce_loss`.
    pub name: &'static str,
    /// Its factor.
    pub weight: f64,
}

impl LossPart {
    /// Cross-entropy, the part of losses that name no other.
    pub const CROSS_ENTROPY: Self = Self { name: "ce_loss", weight: 1.0 };
}

/// A stream of tokens, such as the source or the target of an encoder-decoder model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The most tokens of a micro-batch.
    pub rows: u64,
    /// The tokens `[T]`.
    pub ids: Value,
    /// Their labels `[T]`, already shifted; -100 is not trained.
    pub labels: Value,
    /// Their positions in their sequences `[T]`.
    pub positions: Value,
}

impl Param {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.spec.shape.iter().product()
    }
}

impl Graph {
    /// The most rows of every stream.
    pub fn stream_rows(&self) -> Vec<u64> {
        self.streams.iter().map(|stream| stream.rows).collect()
    }

    /// The most rows of a value.
    pub fn most_rows(&self, rows: Rows) -> u64 {
        rows.count(&self.stream_rows())
    }

    /// A value's shape and kind.
    pub fn info(&self, value: Value) -> ValueInfo {
        self.values[value.index()]
    }

    /// A parameter.
    pub fn param(&self, param: ParamId) -> &Param {
        &self.params[param.index()]
    }

    /// The name of a node's unit, for messages.
    pub(crate) fn unit_name(&self, unit: UnitId) -> &str {
        &self.units[unit.index()].name
    }

    /// The units of each block, in execution order. Consecutive units with the role of one block are that block: a mixture of
    /// experts is gathered apart from the attention before it.
    pub fn blocks(&self) -> impl Iterator<Item = Vec<UnitId>> {
        let mut first = 0;
        let units = self.units.chunk_by(|unit, next| unit.role == next.role).map(move |units| {
            let all = first..first + units.len();
            first = all.end;
            (units[0].role, all.map(UnitId::at).collect())
        });
        units.filter_map(|(role, units)| matches!(role, Role::Block(_)).then_some(units))
    }
}
