//! The intermediate representation: sections of instructions over flats and values.

use std::ops::Range;

use zeroth_base::Axis;
use zeroth_graph::ParamId;
use zeroth_kernel::Queue;

use super::Operands;

/// A part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    /// Which part.
    pub kind: SectionKind,
    /// Its instructions, in program order.
    pub instructions: Vec<Instruction>,
}

/// The kinds of sections. Micro-batches differ only in how gradients accumulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionKind {
    /// The only micro-batch of a step without accumulation.
    Only,
    /// The first of several micro-batches.
    First,
    /// A micro-batch between the first and the last.
    Middle,
    /// The last of several.
    Last,
    /// The optimizer step.
    Update,
    /// Evaluation: a micro-batch's loss without gradients; not part of a step.
    Eval,
    /// Next-token logits of whole sequences. With a cache it stores their keys and values (prefill).
    Logits,
    /// The encoder of an encoder-decoder. It stores the keys and values of cross attention.
    Encode,
    /// Next-token logits of new tokens, which attend to cached keys and values.
    Decode,
    /// The most probable next tokens at every token, for a cache of a teacher.
    TopLogProbs,
}

/// An instruction: an action, its queue, the flats it reads or accumulates into, and its operands.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// What it does.
    pub action: Action,
    /// The queue (stream) it runs on.
    pub queue: Queue,
    /// Flats whose parameters it reads, as indices into the layout.
    pub reads: Vec<usize>,
    /// Flats whose gradients it accumulates into.
    pub accumulates_into: Vec<usize>,
    /// The buffers it reads and writes. The last pass sets them; before it they are empty.
    pub operands: Operands,
}

/// The operation of an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Action {
    /// Zeroes this rank's report: loss and gradient statistics.
    ZeroLoss,
    /// Runs a forward node, given by its index in the graph.
    Forward(usize),
    /// Computes the logits of the last token of each of the first `sequences` sequences.
    Logits {
        /// The `head_loss` node it replaces.
        node: usize,
        /// The number of sequences.
        sequences: u64,
    },
    /// Computes the log-probabilities of the `k` most probable next tokens at every token.
    TopLogProbs {
        /// The `head_loss` node it replaces.
        node: usize,
        /// The number of tokens.
        k: u64,
    },
    /// Computes what evaluation has in place of the loss of a node, such as the cross-entropy of a student without its teacher.
    EvaluateLoss(usize),
    /// Stores the keys and values of an attention node in its cache.
    StoreKv(usize),
    /// Runs an attention node whose rows attend to cached keys and values, their own included.
    CachedAttention(usize),
    /// Runs a backward node.
    Backward(usize),
    /// Recomputes a forward node for backward. With `from_sum`, a residual add whose sum was kept only recomputes the
    /// norm.
    Recompute {
        node: usize,
        /// Whether the residual sum was kept.
        from_sum: bool,
    },
    /// Copies an activation to host memory.
    OffloadActivation(usize),
    /// Copies an activation back to the device.
    ReloadActivation(usize),
    /// All-gathers a flat's parameters into a buffer of its own: what the ranks along the axis hold. With zero-copy
    /// gathers it only waits until every rank's shard is complete.
    AllGather(usize, Axis),
    /// Unpacks a parameter from nf4 to the compute dtype, for the next op that reads it.
    Unpack(ParamId),
    /// Frees a gathered flat.
    Release(usize),
    /// Zeroes the parts of a flat's gradient that ops accumulate into, and its padding.
    ZeroGrad(usize),
    /// Casts the f32 parts of a flat's gradient to the communication dtype and keeps the result for the update: the
    /// whole reduction on one rank without accumulation.
    KeepGrad(usize),
    /// Casts the f32 parts of a flat's gradient to the communication dtype, next to the parts produced in it.
    CastGrad(usize),
    /// Packs each rank's part of a cast chunk contiguously.
    PackGrad(Chunk),
    /// Casts a chunk of a flat's f32 gradient to the communication dtype, packed by rank.
    CastAndPackGrad(Chunk),
    /// Sends each rank along the axis its part of a chunk (all-to-all): in a group of several, the parts of its rail.
    AllToAll(Chunk, Axis),
    /// Sums the received parts of a chunk in the order of the axis, in f32. Before the last level these are partial sums.
    SumRanks(Chunk, Accumulate, Axis),
    /// Reduce-scatters a chunk in one step: sums the parts in rank order, in f32, straight from the ranks' memory.
    ReduceScatter(Chunk, Accumulate, Axis),
    /// All-gathers a flat's reduced gradient (stage 0, where every rank updates everything).
    AllGatherGrad(usize, Axis),
    /// Computes the squared norm of this rank's shard of a flat's gradient.
    GradSquares(usize),
    /// All-gathers the ranks' reports: loss and squared norms.
    AllGatherReports(Axis),
    /// Computes the global gradient norm and the clip factor, and decides whether the step is applied.
    Control,
    /// Copies a chunk's reduced gradient to host memory, where the update reads it.
    OffloadGrad(Chunk, Accumulate),
    /// Copies a piece of this rank's parameters from pageable memory to a staging buffer.
    StageShard(Chunk),
    /// Copies a piece of this rank's parameters from host memory into the flat being gathered.
    UploadShard(Chunk),
    /// Loads the optimizer states of a sub-group to the device, with its gradient where that is in host memory.
    LoadStates(Chunk),
    /// Runs the optimizer over a sub-group of this rank's part of a flat.
    Update(Chunk),
    /// Stores a sub-group's optimizer states back to host memory.
    StoreStates(Chunk),
    /// Writes a sub-group's updated parameters back to their tier, where that differs from the update's.
    WriteBack(Chunk),
    /// All-gathers a chunk of what the ranks along the axis have updated, in place. Its range is within what each of
    /// them has.
    AllGatherWeights(Chunk, Axis),
    /// Broadcasts what one of them has updated.
    BroadcastWeights {
        flat: usize,
        /// Its number along the axis.
        root: usize,
        axis: Axis,
    },
}

/// A part of a flat, as a range within every rank's shard: what one collective moves. Of [`Action::AllGatherWeights`] and
/// [`Action::StageShard`] it is a range within what a rank holds, which may be a group shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Chunk {
    pub flat: usize,
    pub range: Range<u64>,
}

/// What an action operates on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Subject<'a> {
    /// A node of the graph.
    Node(usize),
    /// A node of its backward.
    GradNode(usize),
    Value(usize),
    /// A parameter.
    Param(ParamId),
    Flat(usize),
    /// A part of a flat.
    Chunk(&'a Chunk),
    /// The step's loss, reports and control.
    Step,
}

/// How a reduced gradient is combined with its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulate {
    /// Overwrites it: the first micro-batch of a step.
    Overwrite,
    /// Adds to it: later micro-batches.
    Add,
}

/// The form in which the update reads gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientStorage {
    /// The whole flat in f32, as backward produced it.
    FlatF32,
    /// The whole flat in the communication dtype: one rank, no accumulation.
    FlatComm,
    /// A shard in the accumulation dtype.
    Shard,
}

impl Action {
    /// The opcode, as in dumps, messages and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::ZeroLoss => "zero_loss",
            Self::Forward(_) => "forward",
            Self::Logits { .. } => "logits",
            Self::TopLogProbs { .. } => "top_log_probs",
            Self::EvaluateLoss(_) => "evaluate_loss",
            Self::StoreKv(_) => "store_kv",
            Self::CachedAttention(_) => "cached_attention",
            Self::Backward(_) => "backward",
            Self::Recompute { .. } => "recompute",
            Self::OffloadActivation(_) => "offload_activation",
            Self::ReloadActivation(_) => "reload_activation",
            Self::AllGather(..) => "all_gather",
            Self::Unpack(_) => "unpack",
            Self::Release(_) => "release",
            Self::ZeroGrad(_) => "zero_grad",
            Self::KeepGrad(_) => "keep_grad",
            Self::CastGrad(_) => "cast_grad",
            Self::PackGrad(_) => "pack_grad",
            Self::CastAndPackGrad(_) => "cast_and_pack_grad",
            Self::AllToAll(..) => "all_to_all",
            Self::SumRanks(..) => "sum_ranks",
            Self::ReduceScatter(..) => "reduce_scatter",
            Self::AllGatherGrad(..) => "all_gather_grad",
            Self::GradSquares(_) => "grad_squares",
            Self::AllGatherReports(_) => "all_gather_reports",
            Self::Control => "control",
            Self::OffloadGrad(..) => "offload_grad",
            Self::StageShard(_) => "stage_shard",
            Self::UploadShard(_) => "upload_shard",
            Self::LoadStates(_) => "load_states",
            Self::Update(_) => "update",
            Self::StoreStates(_) => "store_states",
            Self::WriteBack(_) => "write_back",
            Self::AllGatherWeights(..) => "all_gather_weights",
            Self::BroadcastWeights { .. } => "broadcast_weights",
        }
    }

    /// The axis of a collective; `None` of other actions.
    pub const fn collective_axis(&self) -> Option<Axis> {
        match self {
            Self::AllGather(_, axis)
            | Self::AllToAll(_, axis)
            | Self::ReduceScatter(.., axis)
            | Self::AllGatherGrad(_, axis)
            | Self::AllGatherReports(axis)
            | Self::AllGatherWeights(_, axis)
            | Self::BroadcastWeights { axis, .. } => Some(*axis),
            _ => None,
        }
    }

    /// Whether it is a collective.
    pub const fn is_collective(&self) -> bool {
        self.collective_axis().is_some()
    }

    /// What it operates on.
    pub const fn subject(&self) -> Subject<'_> {
        match self {
            Self::PackGrad(chunk)
            | Self::CastAndPackGrad(chunk)
            | Self::AllToAll(chunk, _)
            | Self::SumRanks(chunk, ..)
            | Self::ReduceScatter(chunk, ..)
            | Self::OffloadGrad(chunk, _)
            | Self::StageShard(chunk)
            | Self::UploadShard(chunk)
            | Self::LoadStates(chunk)
            | Self::Update(chunk)
            | Self::StoreStates(chunk)
            | Self::AllGatherWeights(chunk, _)
            | Self::WriteBack(chunk) => Subject::Chunk(chunk),
            Self::AllGather(flat, _)
            | Self::Release(flat)
            | Self::ZeroGrad(flat)
            | Self::KeepGrad(flat)
            | Self::CastGrad(flat)
            | Self::AllGatherGrad(flat, _)
            | Self::GradSquares(flat)
            | Self::BroadcastWeights { flat, .. } => Subject::Flat(*flat),
            Self::Forward(node)
            | Self::Logits { node, .. }
            | Self::TopLogProbs { node, .. }
            | Self::EvaluateLoss(node)
            | Self::StoreKv(node)
            | Self::CachedAttention(node)
            | Self::Recompute { node, .. } => Subject::Node(*node),
            Self::Backward(node) => Subject::GradNode(*node),
            Self::OffloadActivation(value) | Self::ReloadActivation(value) => Subject::Value(*value),
            Self::Unpack(param) => Subject::Param(*param),
            Self::ZeroLoss | Self::AllGatherReports(_) | Self::Control => Subject::Step,
        }
    }

    /// The chunk it operates on, if any.
    pub const fn chunk(&self) -> Option<&Chunk> {
        if let Subject::Chunk(chunk) = self.subject() { Some(chunk) } else { None }
    }

    /// The flat it operates on, or whose chunk, if any.
    pub const fn flat(&self) -> Option<usize> {
        match self.subject() {
            Subject::Flat(flat) => Some(flat),
            Subject::Chunk(chunk) => Some(chunk.flat),
            Subject::Node(_)
            | Subject::GradNode(_)
            | Subject::Value(_)
            | Subject::Param(_)
            | Subject::Step => None,
        }
    }
}

impl Instruction {
    pub(crate) fn new(action: Action) -> Self {
        Self {
            action,
            queue: Queue::Compute,
            reads: Vec::new(),
            accumulates_into: Vec::new(),
            operands: Operands::default(),
        }
    }
}

impl Section {
    /// Whether it is a training micro-batch.
    pub fn is_micro_batch(&self) -> bool {
        self.kind.is_micro_batch()
    }
}

impl SectionKind {
    /// Its name in dumps.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::First => "first",
            Self::Middle => "middle",
            Self::Last => "last",
            Self::Update => "update",
            Self::Eval => "eval",
            Self::Logits => "logits",
            Self::Encode => "encode",
            Self::Decode => "decode",
            Self::TopLogProbs => "top_log_probs",
        }
    }

    /// Whether it is a micro-batch of a step: forward and backward.
    pub const fn is_micro_batch(self) -> bool {
        matches!(self, Self::Only | Self::First | Self::Middle | Self::Last)
    }

    /// Whether it is a step's first micro-batch.
    pub(super) const fn is_first(self) -> bool {
        matches!(self, Self::Only | Self::First)
    }

    /// Whether it is a step's last micro-batch.
    pub const fn is_last(self) -> bool {
        matches!(self, Self::Only | Self::Last)
    }
}
