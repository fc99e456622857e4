//! Buffers: their ids, categories and sizes.

use std::fmt;

use zeroth_kernel::{Moment, Tier};

/// The alignment of what is packed into one buffer of the device.
pub(crate) const ALIGNMENT: u64 = Tier::Device.alignment();

/// The purpose of a buffer, as memory reports group it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// Parameters held at all times.
    Parameters,
    /// Gradients kept until the update.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Values of forward and backward, and the input data.
    Activations,
    /// Gathered flats, gradients of one unit, chunks in transfer, scratch.
    Buffers,
}

/// Identifies a buffer by its contents. Numbers are indices of values, flats, or instructions of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names say it")]
pub enum BufferId {
    /// A flat's parameters as this rank holds them: the whole flat or its shard.
    Weights(usize),
    /// A flat's gradient in f32. Where it does not persist, only the parameters that accumulate in f32, packed.
    Grad(usize),
    /// A flat's gradient in the communication dtype, in flat order.
    CommGrad(usize),
    /// Rows of a tied head's gradient, in f32, one per token of the micro-batch, to which the embedding's gradient is
    /// added.
    WaitingRows,
    /// A flat's gradient summed over the group, and over micro-batches, of the group shard: chunk by chunk, the parts of
    /// the rail's ranks one after the other.
    PartialGrad(usize),
    /// A flat's reduced gradient as the update reads it, where that is not the f32 flat.
    ReducedGrad(usize),
    /// Master weights of this rank's part of a flat, or their low-order bits.
    Master(usize),
    /// A moment of this rank's part of a flat.
    Moment(Moment, usize),
    /// A value of forward or backward.
    Value(usize),
    /// A recomputed value of forward.
    Recomputed(usize),
    /// An activation offloaded to host memory.
    Offloaded(usize),
    /// A reloaded activation.
    Reloaded(usize),
    /// Sequence start offsets of a stream.
    Starts(usize),
    /// The sample and position of every token of a stream, for dropout.
    Keys(usize),
    /// Cosines of a rotary embedding.
    Cosines {
        /// The stream whose positions they are of.
        stream: usize,
        /// The rotary embedding.
        rotary: usize,
    },
    /// Sines of a rotary embedding.
    Sines {
        /// The stream whose positions they are of.
        stream: usize,
        /// The rotary embedding.
        rotary: usize,
    },
    /// Hyperparameters that are constant over the run.
    Recipe,
    /// Per-step input from the host: learning rates, loss weight.
    Input,
    /// This rank's loss and squared gradient norms.
    Report,
    /// All ranks' reports.
    Reports,
    /// The step's decision: loss scale, clip factor, whether to apply.
    Control,
    /// The step record that the host reads.
    Record,
    /// Next-token logits that the host reads.
    Logits,
    /// The most probable next tokens at every token, which the host reads: ids.
    TopIds,
    /// Their log-probabilities.
    TopLogProbs,
    /// The cache rows of every token's sequence.
    CacheRanges,
    /// The cache rows of the source of every token's sequence, for cross attention.
    SourceRanges,
    /// Cached keys of an attention node, after the rotary embedding.
    CachedKeys(usize),
    /// Cached values of an attention node.
    CachedValues(usize),
    /// A gathered copy of a flat.
    Gathered {
        flat: usize,
        /// The n-th gathered copy in this section.
        copy: usize,
    },
    /// A parameter unpacked from nf4 by an instruction, in the compute dtype.
    Unpacked(usize),
    /// A chunk reduced by an instruction, on its way to host memory.
    ReducedChunk(usize),
    /// A piece of parameters in a staging buffer.
    StagedShard(usize),
    /// The updated parameters of a sub-group.
    UpdatedWeights(usize),
    /// The optimizer states of a sub-group on the device.
    SubGroup(usize),
    /// A token for a sub-group's states in host memory: it has no memory and only orders loads and stores.
    HostStateToken {
        flat: usize,
        /// The sub-group's first element within this rank's part.
        first: u64,
    },
    /// A chunk cast and packed by an instruction, ready to send.
    SendChunk(usize),
    /// The parts of a chunk received by an all-to-all.
    RecvChunk(usize),
    /// A group's sums of a chunk, computed by an instruction: the parts of the rail's ranks one after the other.
    PartialSums(usize),
    /// An instruction's scratch.
    Scratch(usize),
}

impl BufferId {
    /// The value of forward or backward that it holds for compute.
    pub const fn value(self) -> Option<usize> {
        match self {
            Self::Value(value) | Self::Recomputed(value) | Self::Reloaded(value) => Some(value),
            _ => None,
        }
    }
}

impl fmt::Display for BufferId {
    /// Its name in dumps and traces. `%` is the instruction that writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weights(flat) => write!(f, "weights{flat}"),
            Self::Grad(flat) => write!(f, "grad{flat}"),
            Self::CommGrad(flat) => write!(f, "comm_grad{flat}"),
            Self::WaitingRows => f.write_str("waiting_rows"),
            Self::PartialGrad(flat) => write!(f, "partial_grad{flat}"),
            Self::ReducedGrad(flat) => write!(f, "reduced_grad{flat}"),
            Self::Master(flat) => write!(f, "master{flat}"),
            Self::Moment(moment, flat) => write!(f, "{}_moment{flat}", moment.name()),
            Self::Value(value) => write!(f, "v{value}"),
            Self::Recomputed(value) => write!(f, "recomputed_v{value}"),
            Self::Offloaded(value) => write!(f, "offloaded_v{value}"),
            Self::Reloaded(value) => write!(f, "reloaded_v{value}"),
            Self::Starts(stream) => write!(f, "starts{stream}"),
            Self::Keys(stream) => write!(f, "keys{stream}"),
            Self::Cosines { stream, rotary } => write!(f, "cos{stream}.{rotary}"),
            Self::Sines { stream, rotary } => write!(f, "sin{stream}.{rotary}"),
            Self::Recipe => f.write_str("recipe"),
            Self::Input => f.write_str("input"),
            Self::Report => f.write_str("report"),
            Self::Reports => f.write_str("reports"),
            Self::Control => f.write_str("control"),
            Self::Record => f.write_str("record"),
            Self::Logits => f.write_str("logits"),
            Self::TopIds => f.write_str("top_ids"),
            Self::TopLogProbs => f.write_str("top_log_probs"),
            Self::CacheRanges => f.write_str("cache_ranges"),
            Self::SourceRanges => f.write_str("source_ranges"),
            Self::CachedKeys(node) => write!(f, "cached_keys{node}"),
            Self::CachedValues(node) => write!(f, "cached_values{node}"),
            Self::Gathered { flat, copy } => write!(f, "gathered{flat}.{copy}"),
            Self::Unpacked(at) => write!(f, "unpacked%{at}"),
            Self::ReducedChunk(at) => write!(f, "reduced_chunk%{at}"),
            Self::StagedShard(at) => write!(f, "staged_shard%{at}"),
            Self::UpdatedWeights(at) => write!(f, "updated_weights%{at}"),
            Self::SubGroup(at) => write!(f, "sub_group%{at}"),
            Self::HostStateToken { flat, first } => write!(f, "host_states{flat}[{first}..]"),
            Self::SendChunk(at) => write!(f, "send_chunk%{at}"),
            Self::RecvChunk(at) => write!(f, "recv_chunk%{at}"),
            Self::PartialSums(at) => write!(f, "partial_sums%{at}"),
            Self::Scratch(at) => write!(f, "scratch%{at}"),
        }
    }
}

/// A buffer: its id, category, tier and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// What it holds.
    pub id: BufferId,
    /// What it is for.
    pub category: Category,
    /// Its memory tier.
    pub tier: Tier,
    /// Its size in bytes, rounded up to the alignment.
    pub bytes: u64,
}
