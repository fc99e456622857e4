//! Parameter tables: every parameter of a model by unit, with its name on disk, its shape and its kind.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// All parameters of a model, unit by unit, in the order a forward pass first needs the units.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterTable {
    /// The units in the order of the forward pass.
    pub units: Vec<ParameterUnit>,
    /// How tokens choose experts, where there are any.
    pub routing: Option<ExpertRouting>,
    /// How LoRA adapters act, where linear maps have some.
    pub adapters: Option<AdapterScales>,
}

/// How the LoRA adapters of a model act.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterScales {
    /// The factor of their products.
    pub scale: f64,
    /// The factor of the product of an adapter of gate and up of experts, which has twice the rank and the alpha.
    pub fused_scale: f64,
    /// The probability that an element of their input is zeroed in training.
    pub dropout: f64,
}

/// How many of a block's experts a token goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRouting {
    /// Experts of a block.
    pub experts: u64,
    /// Experts of a token.
    pub per_token: u64,
}

/// A piece of the model that is gathered, computed and released together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterUnit {
    /// Which piece of the model it is.
    pub name: UnitName,
    /// Its parameters, in the order it uses them.
    pub parameters: Vec<Parameter>,
}

/// Which piece of a model a unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnitName {
    /// The embedding, where nothing else uses it.
    Embedding,
    /// An embedding that several units use: the head too, or both stacks of an encoder-decoder.
    Tied,
    /// The position biases of all encoder blocks.
    EncoderPositions,
    /// A block of the encoder, counted from 0.
    EncoderBlock(u64),
    /// The norm after the last encoder block.
    EncoderNorm,
    /// The position biases of all decoder blocks.
    DecoderPositions,
    /// A block of the decoder (of the only stack, where there is no encoder), counted from 0. Where it has experts, all of
    /// it but these.
    Block(u64),
    /// The experts of a block.
    Experts(u64),
    /// The last norm, and the output projection unless it is tied.
    Head,
}

/// One parameter: a tensor in the model's safetensors files, or a concatenation of parts of them.
///
/// The experts of a block are such a concatenation: one tensor of this name and shape where transformers 5 wrote them
/// fused, else a part for each expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name; on disk too, where it is one tensor.
    pub name: String,
    /// Its shape; a linear's is [out, in], that of all experts of a block [experts, out, in].
    pub shape: Vec<u64>,
    /// What it is.
    pub kind: ParameterKind,
    /// Which linear map of a block it belongs to; `None` elsewhere. An adapter's is that of the map it adapts.
    pub role: Option<ParameterRole>,
    /// What it adapts, if it is a matrix of a LoRA adapter.
    pub adapts: Option<AdaptedParameter>,
    /// Other names under which a file may hold the same tensor, because modules share it.
    pub aliases: &'static [&'static str],
    /// The parts of tensors on disk that it is the concatenation of, in order. Empty where it is always one whole tensor of
    /// its own name and shape.
    pub parts: Vec<StoredPart>,
    /// Whether it is trained; a frozen one has no gradient and no optimizer state.
    pub trained: bool,
    /// Whether it is kept in nf4 while it is frozen (QLoRA): see [`ParameterTable::quantize`].
    pub quantized: bool,
}

/// Consecutive elements of a tensor on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct StoredPart {
    pub name: String,
    pub shape: Vec<u64>,
    pub elements: Range<u64>,
}

impl StoredPart {
    /// All of a tensor.
    pub(crate) fn whole(name: String, shape: Vec<u64>) -> Self {
        let elements = 0..shape.iter().product();
        Self { name, shape, elements }
    }
}

/// What a parameter is. Weight decay, LoRA and the kernels go by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParameterKind {
    /// A row for each token of the vocabulary.
    Embedding,
    /// A bias for each head and bucket of distances (T5).
    PositionBias,
    /// The matrix of a linear map inside a block.
    Linear,
    /// The matrices of a linear map of each expert, [experts, out, in].
    Expert,
    /// The linear map that scores the experts.
    Router,
    /// The output projection.
    Head,
    /// The bias of a linear map.
    Bias,
    /// The scale of a norm.
    Norm,
    /// The inner matrix of a LoRA adapter, [rank, in]; of experts [experts, rank, in].
    LoraA,
    /// The outer matrix of a LoRA adapter, [out, rank]; of experts [experts, out, rank].
    LoraB,
}

/// Which linear map of a block a parameter belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// Queries.
    Query,
    /// Keys of the block's own tokens.
    Key,
    /// Values of the block's own tokens.
    Value,
    /// Keys of the encoder's output.
    CrossKey,
    /// Values of the encoder's output.
    CrossValue,
    /// What attention ends with.
    AttentionOutput,
    /// The score of each expert.
    Router,
    /// What a feed-forward part, or an expert, begins with: gate and up.
    FeedForwardInput,
    /// What a feed-forward part, or an expert, ends with.
    FeedForwardOutput,
}

/// The parameter that a matrix of a LoRA adapter belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct AdaptedParameter {
    pub name: String,
    pub kind: ParameterKind,
}

impl AdaptedParameter {
    /// The module that its adapter is named for: experts are parameters of one module, so theirs have their own name.
    pub fn module(&self) -> &str {
        if self.kind == ParameterKind::Expert { &self.name } else { module_of(&self.name) }
    }
}

impl ParameterKind {
    /// Whether it is the matrix of a linear map, adapters not counted.
    pub const fn is_linear(self) -> bool {
        matches!(self, Self::Linear | Self::Expert | Self::Router | Self::Head)
    }

    /// Whether weight decay applies, as in Hugging Face's `Trainer`: not to biases, T5's position biases included,
    /// and not to norms.
    pub const fn decays(self) -> bool {
        !matches!(self, Self::Bias | Self::PositionBias | Self::Norm)
    }
}

impl Parameter {
    pub(crate) fn new(name: String, shape: Vec<u64>, kind: ParameterKind) -> Self {
        Self {
            name,
            shape,
            kind,
            role: None,
            adapts: None,
            aliases: &[],
            parts: Vec::new(),
            trained: true,
            quantized: false,
        }
    }

    /// Whether it is a matrix of a LoRA adapter.
    pub const fn is_adapter(&self) -> bool {
        self.adapts.is_some()
    }

    /// What it is, or what it adapts is.
    pub fn adapted_kind(&self) -> ParameterKind {
        self.adapts.as_ref().map_or(self.kind, |adapted| adapted.kind)
    }

    /// Its name and the other names it may have in a file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().copied())
    }

    /// The names of the tensors that it is written as.
    pub(crate) fn stored_names(&self) -> impl Iterator<Item = &str> {
        let own = self.parts.is_empty().then(|| self.names());
        own.into_iter().flatten().chain(self.parts.iter().map(|part| part.name.as_str()))
    }

    /// How many numbers it holds.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The module that holds it: its name without the last part.
    pub fn module(&self) -> &str {
        module_of(&self.name)
    }
}

impl ParameterUnit {
    pub(crate) fn new(name: UnitName) -> Self {
        Self { name, parameters: Vec::new() }
    }

    pub(crate) fn push(&mut self, parameter: Parameter) {
        self.parameters.push(parameter);
    }

    /// Adds the output projection [vocabulary, in].
    pub(crate) fn push_head(&mut self, module: &str, shape: [u64; 2]) {
        self.push(Parameter::new(format!("{module}.weight"), shape.to_vec(), ParameterKind::Head));
    }

    /// How many numbers its parameters hold.
    pub fn elements(&self) -> u64 {
        self.parameters.iter().map(Parameter::elements).sum()
    }
}

impl ParameterTable {
    /// All parameters, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.units.iter().flat_map(|unit| &unit.parameters)
    }

    /// Marks the frozen matrices of blocks, experts included, to be kept in nf4. Embedding, head, norms, biases, routers
    /// and adapters stay in the run's dtype.
    pub fn quantize(&mut self) {
        for parameter in self.units.iter_mut().flat_map(|unit| &mut unit.parameters) {
            let is_matrix = matches!(parameter.kind, ParameterKind::Linear | ParameterKind::Expert);
            parameter.quantized = is_matrix && !parameter.trained;
        }
    }

    /// The parameters by name.
    pub fn by_name(&self) -> HashMap<&str, &Parameter> {
        self.iter().map(|parameter| (parameter.name.as_str(), parameter)).collect()
    }

    /// The inner and the outer matrix of every LoRA adapter, by the name of what they adapt.
    pub fn adapter_matrices(&self) -> HashMap<&str, [Option<&Parameter>; 2]> {
        let mut matrices: HashMap<&str, [Option<&Parameter>; 2]> = HashMap::new();
        for matrix in self.iter() {
            if let Some(adapted) = &matrix.adapts {
                let place = usize::from(matrix.kind == ParameterKind::LoraB);
                matrices.entry(&adapted.name).or_default()[place] = Some(matrix);
            }
        }
        matrices
    }

    /// The number of parameters of the model; a tied one counts once.
    pub fn total(&self) -> u64 {
        self.units.iter().map(ParameterUnit::elements).sum()
    }

    /// The number of trained parameters.
    pub fn trained(&self) -> u64 {
        self.iter().filter(|parameter| parameter.trained).map(Parameter::elements).sum()
    }

    /// The number of parameters that one token passes: all but the experts it does not go to.
    pub fn active_per_token(&self) -> u64 {
        let Some(ExpertRouting { experts, per_token }) = self.routing else { return self.total() };
        let of_experts: u64 =
            self.iter().filter(|p| p.kind == ParameterKind::Expert).map(Parameter::elements).sum();
        // All experts of all blocks are equal, so the division leaves nothing.
        self.total() - of_experts / experts * (experts - per_token)
    }

    /// Whether an encoder reads what the decoder continues.
    pub fn has_encoder(&self) -> bool {
        self.units.iter().any(|unit| matches!(unit.name, UnitName::EncoderBlock(_)))
    }

    /// The blocks of encoder and decoder.
    pub fn blocks(&self) -> impl Iterator<Item = &ParameterUnit> {
        self.units.iter().filter(|unit| matches!(unit.name, UnitName::Block(_) | UnitName::EncoderBlock(_)))
    }

    /// The module that itself holds the most elements, those of modules inside it not counted: what DeepSpeed calls
    /// the largest layer. The modules are those on disk, a module for each matrix of an expert; fused experts of
    /// transformers 5 would count as one.
    pub fn largest_module(&self) -> Option<(&str, u64)> {
        let mut largest: Option<(&str, u64)> = None;
        let mut current = ("", 0);
        // The parameters of a module follow each other.
        for parameter in self.iter() {
            let whole = parameter.parts.is_empty().then(|| (parameter.module(), parameter.elements()));
            let parts = parameter.parts.iter();
            let parts = parts.map(|p| (module_of(&p.name), p.elements.end - p.elements.start));
            for (module, elements) in whole.into_iter().chain(parts) {
                current = (module, elements + if module == current.0 { current.1 } else { 0 });
                if largest.is_none_or(|(_, most)| current.1 > most) {
                    largest = Some(current);
                }
            }
        }
        largest
    }
}

/// A parameter's name without its last part.
pub(crate) fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

impl fmt::Display for UnitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Tied => f.write_str("tied embedding"),
            Self::EncoderPositions => f.write_str("encoder positions"),
            Self::EncoderBlock(index) => write!(f, "encoder block {index}"),
            Self::EncoderNorm => f.write_str("encoder norm"),
            Self::DecoderPositions => f.write_str("decoder positions"),
            Self::Block(index) => write!(f, "block {index}"),
            Self::Experts(index) => write!(f, "experts {index}"),
            Self::Head => f.write_str("head"),
        }
    }
}
