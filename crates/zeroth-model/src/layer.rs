//! The blocks of a model, resolved: what its `config.json` and its family say, by block. The parameter table, the forward,
//! plans and FLOPs walk them.

use zeroth_base::ActivationFn;
use zeroth_graph::NormOptions;

use crate::rope::Rope;
use crate::table::{Parameter, ParameterKind, ParameterRole, ParameterUnit, StoredPart, UnitName};

/// A block: its parts in the order of execution. Experts can only be the last.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The parts.
    pub parts: Vec<Sublayer>,
}

/// A part of a block: the residual stream is normed, and a branch computed from it is added to the stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Sublayer {
    /// The norm.
    pub norm: NormModule,
    /// What is computed from the normed stream.
    pub branch: Branch,
}

/// What a part of a block computes.
#[derive(Debug, Clone, PartialEq)]
pub enum Branch {
    /// Attention.
    Attention(Box<AttentionModule>),
    /// A dense feed-forward part.
    FeedForward(FeedForwardModule),
    /// A mixture of experts.
    Experts(ExpertsModule),
}

/// A norm.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct NormModule {
    pub name: String,
    /// The elements that are normed together.
    pub width: u64,
    pub options: NormOptions,
}

/// A linear map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct LinearModule {
    pub name: String,
    /// Which of a block's it is.
    pub role: ParameterRole,
    pub out: u64,
    pub input: u64,
    /// Whether it has a bias.
    pub bias: bool,
}

/// An attention.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionModule {
    /// Queries.
    pub q: LinearModule,
    /// Keys.
    pub k: LinearModule,
    /// Values.
    pub v: LinearModule,
    /// The output.
    pub o: LinearModule,
    /// The norms of each head of q and of k, before they are rotated.
    pub head_norms: Option<[NormModule; 2]>,
    /// Heads of q.
    pub heads: u64,
    /// Heads of keys and values; each serves `heads / kv_heads` heads.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Scores are divided by the root of this: of the head's width, or of 1 where the weights of q have the factor (T5).
    pub score_width: u64,
    /// Positions back that a token attends to; `None` is all of them.
    pub window: Option<u64>,
    /// Whether a token attends to earlier ones only.
    pub causal: bool,
    /// Whether keys and values are those of the encoder's output.
    pub reads_encoder: bool,
    /// How it knows where a token stands; `None` if it does not.
    pub positions: Option<Positions>,
}

/// A dense feed-forward part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedForwardModule {
    /// The map whose activation is multiplied with `up`; `None` without a gate, where that of `up` is taken.
    pub gate: Option<LinearModule>,
    /// The map to the inner width.
    pub up: LinearModule,
    /// The map back.
    pub down: LinearModule,
    /// The function between them.
    pub activation: ActivationFn,
}

/// A mixture of experts. Parameters have the names of transformers 5, where an expert's gate and up are one; a folder may
/// hold a tensor for each matrix of each expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsModule {
    /// The scores of the experts.
    pub router: LinearModule,
    /// The module of the router in a folder per expert.
    pub stored_router: String,
    /// The module of all experts.
    pub name: String,
    /// The module of the numbered experts in a folder per expert.
    pub stored_name: String,
    /// An expert's gate, up and down projections there.
    pub projections: [&'static str; 3],
    /// Experts.
    pub count: u64,
    /// How many of them a token goes to.
    pub per_token: u64,
    /// Inner width of one expert.
    pub width: u64,
    /// Whether the weights of a token's experts are scaled to sum to one.
    pub normalized: bool,
    /// The function between their matrices.
    pub activation: ActivationFn,
}

/// The names that transformers has for activations.
pub(crate) const ACTIVATION_WORDS: [(&str, ActivationFn); 6] = [
    ("silu", ActivationFn::Silu),
    ("swish", ActivationFn::Silu),
    ("relu", ActivationFn::Relu),
    ("gelu", ActivationFn::Gelu),
    ("gelu_new", ActivationFn::GeluTanh),
    ("gelu_pytorch_tanh", ActivationFn::GeluTanh),
];

/// How attention knows where a token stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Queries and keys are rotated.
    Rope(Rope),
    /// A learned bias for each head and bucket of distances (T5).
    Relative {
        /// Rows of the table.
        buckets: u64,
        /// All larger distances share the last bucket.
        max_distance: u64,
    },
}

impl LinearModule {
    /// A map of this shape, [out, in].
    pub(crate) const fn new(name: String, role: ParameterRole, [out, input]: [u64; 2], bias: bool) -> Self {
        Self { name, role, out, input, bias }
    }
}

impl Layer {
    /// Its attention to its own tokens.
    pub fn attention(&self) -> Option<&AttentionModule> {
        self.attentions().find(|attention| !attention.reads_encoder)
    }

    /// All of its attentions.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionModule> {
        self.parts.iter().filter_map(|part| match &part.branch {
            Branch::Attention(attention) => Some(attention.as_ref()),
            Branch::FeedForward(_) | Branch::Experts(_) => None,
        })
    }

    /// Its dense feed-forward part.
    pub fn feed_forward(&self) -> Option<&FeedForwardModule> {
        self.parts.iter().find_map(|part| match &part.branch {
            Branch::FeedForward(feed_forward) => Some(feed_forward),
            Branch::Attention(_) | Branch::Experts(_) => None,
        })
    }

    /// Its experts.
    pub fn experts(&self) -> Option<&ExpertsModule> {
        self.parts.iter().find_map(|part| match &part.branch {
            Branch::Experts(experts) => Some(experts),
            Branch::Attention(_) | Branch::FeedForward(_) => None,
        })
    }

    /// The unit of its parameters, without those of experts.
    pub(crate) fn unit(&self, name: UnitName) -> ParameterUnit {
        let mut unit = ParameterUnit::new(name);
        for part in &self.parts {
            unit.push_norm(&part.norm);
            match &part.branch {
                Branch::Attention(attention) => attention.push_to(&mut unit),
                Branch::FeedForward(feed_forward) => {
                    for linear in feed_forward.gate.iter().chain([&feed_forward.up, &feed_forward.down]) {
                        unit.push_linear(linear);
                    }
                }
                Branch::Experts(experts) => unit.push(experts.router_parameter()),
            }
        }
        unit
    }
}

impl ParameterUnit {
    pub(crate) fn push_norm(&mut self, norm: &NormModule) {
        self.push(Parameter::new(format!("{}.weight", norm.name), vec![norm.width], ParameterKind::Norm));
    }

    /// Adds the matrix [out, in] of a block's linear map, and its bias.
    pub(crate) fn push_linear(&mut self, linear: &LinearModule) {
        let LinearModule { name, role, out, input, bias } = linear;
        let weight = Parameter::new(format!("{name}.weight"), vec![*out, *input], ParameterKind::Linear);
        self.push(Parameter { role: Some(*role), ..weight });
        if *bias {
            let bias = Parameter::new(format!("{name}.bias"), vec![*out], ParameterKind::Bias);
            self.push(Parameter { role: Some(*role), ..bias });
        }
    }
}

impl AttentionModule {
    /// The factor of its scores.
    pub(crate) fn scale(&self) -> f64 {
        (self.score_width as f64).powf(-0.5)
    }

    fn push_to(&self, unit: &mut ParameterUnit) {
        for linear in [&self.q, &self.k, &self.v] {
            unit.push_linear(linear);
        }
        for norm in self.head_norms.iter().flatten() {
            unit.push_norm(norm);
        }
        unit.push_linear(&self.o);
    }
}

impl ExpertsModule {
    /// The parameter of gate and up.
    pub(crate) fn gate_up(&self) -> String {
        format!("{}.gate_up_proj", self.name)
    }

    /// The parameter of what they end with.
    pub(crate) fn down(&self) -> String {
        format!("{}.down_proj", self.name)
    }

    fn router_parameter(&self) -> Parameter {
        let LinearModule { name, role, out, input, .. } = &self.router;
        let shape = vec![*out, *input];
        let parts = if self.stored_router == *name {
            Vec::new()
        } else {
            vec![StoredPart::whole(format!("{}.weight", self.stored_router), shape.clone())]
        };
        let router = Parameter::new(format!("{name}.weight"), shape, ParameterKind::Router);
        Parameter { role: Some(*role), parts, ..router }
    }

    /// The unit of the experts: one parameter for what goes in, with gate and up of an expert behind each other, and one for
    /// what comes out. The parts are the tensors of a folder per expert.
    pub(crate) fn unit(&self, name: UnitName) -> ParameterUnit {
        let (count, width, hidden) = (self.count, self.width, self.router.input);
        let [gate, up, down] = self.projections;
        let parameter = |name, role, [out, input]: [u64; 2], projections: &[&str]| {
            // Each projection has an equal share of the rows.
            let shape = vec![out / projections.len() as u64, input];
            let part = |(expert, projection): (u64, &&str)| {
                let name = format!("{}.{expert}.{projection}.weight", self.stored_name);
                StoredPart::whole(name, shape.clone())
            };
            let parts = (0..count).flat_map(|expert| projections.iter().map(move |name| (expert, name)));
            let experts = Parameter::new(name, vec![count, out, input], ParameterKind::Expert);
            Parameter { role: Some(role), parts: parts.map(part).collect(), ..experts }
        };
        let (into, from) = (ParameterRole::FeedForwardInput, ParameterRole::FeedForwardOutput);
        let mut unit = ParameterUnit::new(name);
        unit.push(parameter(self.gate_up(), into, [2 * width, hidden], &[gate, up]));
        unit.push(parameter(self.down(), from, [hidden, width], &[down]));
        unit
    }
}
