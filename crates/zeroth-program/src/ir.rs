//! The intermediate representation: sections of instructions over flats and values.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_graph::{LossPart, ParamId};
use zeroth_kernel::{MasterForm, Optimizer, Queue, ReportLayout, Tier};

use super::shared_buffers::SharedBuffers;
use super::{BufferId, GradProducers, Operands, RouterCounts, Types, World};
use crate::{FlatKind, Layout, Storage};

/// A compiled training step. Every rank runs the same program.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// The ranks it was compiled for.
    pub world: World,
    /// The placement of every parameter element.
    pub layout: Layout,
    /// The sections in execution order; [`SectionKind::Middle`] repeats with the accumulation steps.
    pub sections: Vec<Section>,
    /// Micro-batches per step (`gradient_accumulation_steps`).
    pub accumulation: u64,
    /// The parts of the loss.
    pub losses: Vec<LossPart>,
    /// The weight of each part in an evaluation, which has no teacher.
    pub evaluated_weights: Vec<f64>,
    /// The routers whose load the steps report.
    pub routers: Vec<RouterCounts>,
    /// `zero_optimization.stage`: what is sharded across ranks.
    pub stage: u8,
    /// The dtypes of parameters, activations and communicated gradients.
    pub types: Types,
    /// The dtype in which gradient shards accumulate over ranks and micro-batches (stages 2 and 3).
    pub grad_accum_dtype: DType,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The dtype of its moments.
    pub moment_dtype: DType,
    /// Whether 16-bit moments are rounded stochastically.
    pub stochastic_rounding: bool,
    /// For each parameter of the graph, the ops that produce its gradient.
    pub grad_producers: Vec<GradProducers>,
    /// Where each flat's parts are.
    pub residency: Vec<Residency>,
    /// Whether gradients are reduce-scattered; if not, every rank receives all parts.
    pub reduce_scatter: bool,
    /// Device bytes reserved for streamed optimizer states, beyond what activations leave free; `None` where no state
    /// is streamed.
    pub update_window: Option<u64>,
    /// Whether ranks map each other's parameter shards instead of gathering copies.
    pub zero_copy_gather: bool,
    /// Tokens whose keys and values the cache of an inference program holds; 0 without a cache.
    pub cached_tokens: u64,
    /// Tokens of sources whose keys and values that of an encoder-decoder holds, for cross attention.
    pub cached_source_tokens: u64,
    /// The temperature of [`Action::TopLogProbs`].
    pub temperature: f64,
    /// Values without a buffer of their own.
    pub(crate) shared_buffers: SharedBuffers,
}

/// Where a flat's parts are between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// Whether every rank has only its shard of the parameters. On one rank, and of a persistent flat, that is all of them.
    pub is_partitioned: bool,
    /// The memory tier of parameters.
    pub weights: Tier,
    /// That of reduced gradients that the update reads.
    pub gradients: Tier,
    /// That of master weights and moments.
    pub states: Tier,
    /// Where the optimizer runs: in the tier of the states, or on the device, through which they are then streamed.
    pub updates: Tier,
}

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
    /// Computes the cross-entropy of a `distill_loss` node, without its teacher.
    CrossEntropy(usize),
    /// Stores the keys and values of an attention node in its cache.
    StoreKv(usize),
    /// Runs an attention node whose rows attend to cached keys and values, their own included.
    CachedAttention(usize),
    /// Runs a backward node.
    Backward(usize),
    /// Recomputes a forward node for backward. With `from_sum`, a residual add whose sum was kept only recomputes the
    /// norm.
    Recompute {
        /// The node.
        node: usize,
        /// Whether the residual sum was kept.
        from_sum: bool,
    },
    /// Copies an activation to host memory.
    OffloadActivation(usize),
    /// Copies an activation back to the device.
    ReloadActivation(usize),
    /// All-gathers a flat's parameters into a buffer of its own. With zero-copy gathers it only waits until every
    /// rank's shard is complete.
    AllGather(usize),
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
    /// Sends each rank its part of a chunk (all-to-all).
    AllToAll(Chunk),
    /// Sums the received parts of a chunk in rank order, in f32.
    SumRanks(Chunk, Accumulate),
    /// Reduce-scatters a chunk in one step: sums the parts in rank order, in f32, straight from the ranks' memory.
    ReduceScatter(Chunk, Accumulate),
    /// All-gathers a flat's reduced gradient (stage 0, where every rank updates everything).
    AllGatherGrad(usize),
    /// Computes the squared norm of this rank's shard of a flat's gradient.
    GradSquares(usize),
    /// All-gathers the ranks' reports: loss and squared norms.
    AllGatherReports,
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
    /// All-gathers a chunk of the updated shards of a flat that stays gathered, in place.
    AllGatherWeights(Chunk),
    /// Broadcasts one rank's updated shard of such a flat.
    BroadcastWeights {
        /// The flat.
        flat: usize,
        /// The rank.
        root: usize,
    },
}

/// A part of a flat, as a range within every rank's shard: what one collective moves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// The flat.
    pub flat: usize,
    /// The range.
    pub range: Range<u64>,
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
            Self::CrossEntropy(_) => "cross_entropy",
            Self::StoreKv(_) => "store_kv",
            Self::CachedAttention(_) => "cached_attention",
            Self::Backward(_) => "backward",
            Self::Recompute { .. } => "recompute",
            Self::OffloadActivation(_) => "offload_activation",
            Self::ReloadActivation(_) => "reload_activation",
            Self::AllGather(_) => "all_gather",
            Self::Unpack(_) => "unpack",
            Self::Release(_) => "release",
            Self::ZeroGrad(_) => "zero_grad",
            Self::KeepGrad(_) => "keep_grad",
            Self::CastGrad(_) => "cast_grad",
            Self::PackGrad(_) => "pack_grad",
            Self::CastAndPackGrad(_) => "cast_and_pack_grad",
            Self::AllToAll(_) => "all_to_all",
            Self::SumRanks(..) => "sum_ranks",
            Self::ReduceScatter(..) => "reduce_scatter",
            Self::AllGatherGrad(_) => "all_gather_grad",
            Self::GradSquares(_) => "grad_squares",
            Self::AllGatherReports => "all_gather_reports",
            Self::Control => "control",
            Self::OffloadGrad(..) => "offload_grad",
            Self::StageShard(_) => "stage_shard",
            Self::UploadShard(_) => "upload_shard",
            Self::LoadStates(_) => "load_states",
            Self::Update(_) => "update",
            Self::StoreStates(_) => "store_states",
            Self::WriteBack(_) => "write_back",
            Self::AllGatherWeights(_) => "all_gather_weights",
            Self::BroadcastWeights { .. } => "broadcast_weights",
        }
    }

    /// Whether it is a collective.
    pub const fn is_collective(&self) -> bool {
        matches!(
            self,
            Self::AllGather(_)
                | Self::AllToAll(_)
                | Self::ReduceScatter(..)
                | Self::AllGatherGrad(_)
                | Self::AllGatherReports
                | Self::AllGatherWeights(_)
                | Self::BroadcastWeights { .. }
        )
    }

    /// The chunk it operates on, if any.
    pub const fn chunk(&self) -> Option<&Chunk> {
        match self {
            Self::PackGrad(chunk)
            | Self::CastAndPackGrad(chunk)
            | Self::AllToAll(chunk)
            | Self::SumRanks(chunk, _)
            | Self::ReduceScatter(chunk, _)
            | Self::OffloadGrad(chunk, _)
            | Self::StageShard(chunk)
            | Self::UploadShard(chunk)
            | Self::LoadStates(chunk)
            | Self::Update(chunk)
            | Self::StoreStates(chunk)
            | Self::AllGatherWeights(chunk)
            | Self::WriteBack(chunk) => Some(chunk),
            _ => None,
        }
    }

    /// The flat it operates on, if any.
    pub const fn flat(&self) -> Option<usize> {
        match self {
            Self::AllGather(flat)
            | Self::Release(flat)
            | Self::ZeroGrad(flat)
            | Self::KeepGrad(flat)
            | Self::CastGrad(flat)
            | Self::AllGatherGrad(flat)
            | Self::GradSquares(flat)
            | Self::BroadcastWeights { flat, .. } => Some(*flat),
            _ => match self.chunk() {
                Some(chunk) => Some(chunk.flat),
                None => None,
            },
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

impl Program {
    /// The sorted indices of the flats that hold these parameters.
    pub(crate) fn flats_of(layout: &Layout, params: &[ParamId]) -> Vec<usize> {
        let mut flats: Vec<usize> = params.iter().map(|param| layout.place(*param).0).collect();
        flats.sort_unstable();
        flats.dedup();
        flats
    }

    /// Whether there are parameters that are sharded across ranks or offloaded, and so limits on what is gathered.
    pub fn shards_parameters(&self) -> bool {
        let is_away = |residency: &Residency| self.layout.ranks > 1 || residency.weights.is_offloaded();
        let is_partitioned = self.residency.iter().any(|residency| residency.is_partitioned);
        is_partitioned && self.residency.iter().any(is_away)
    }

    /// Whether a flat's parameters are sharded across ranks or offloaded. It must then be gathered before it is read.
    pub fn is_sharded(&self, flat: usize) -> bool {
        let residency = self.residency[flat];
        let is_away = self.layout.ranks > 1 || residency.weights.is_offloaded();
        residency.is_partitioned && is_away && self.layout.flats[flat].kind != FlatKind::Persistent
    }

    /// Whether a rank updates only its own shard (stages 1 and above).
    pub const fn shards_optimizer(&self) -> bool {
        self.stage >= 1
    }

    /// Whether every rank holds the whole flat at all times.
    pub fn stays_gathered(&self, flat: usize) -> bool {
        !self.is_sharded(flat)
    }

    /// Whether a sharded flat is mapped from the other ranks instead of copied. Offloaded parameters are copied to the
    /// device first; records of nf4 are no whole pages.
    pub fn is_viewed(&self, flat: usize) -> bool {
        let is_dense = self.layout.flats[flat].storage != Storage::Nf4;
        let is_here = !self.residency[flat].weights.is_offloaded();
        self.zero_copy_gather && is_dense && is_here && self.is_sharded(flat)
    }

    /// The layout of a rank's report.
    pub fn report(&self) -> ReportLayout {
        let counts = RouterCounts::total(&self.routers);
        ReportLayout { losses: self.losses.len(), flats: self.layout.flats.len(), counts }
    }

    /// Whether a flat has gradients.
    pub fn is_trained(&self, flat: usize) -> bool {
        !self.layout.flats[flat].is_frozen()
    }

    /// The form in which the update reads gradients.
    pub fn gradient_storage(&self) -> GradientStorage {
        let alone = self.layout.ranks == 1 && self.accumulation == 1;
        match self.types.communication {
            DType::F32 if alone => GradientStorage::FlatF32,
            _ if alone => GradientStorage::FlatComm,
            _ if self.stage < 2 => GradientStorage::FlatF32,
            _ => GradientStorage::Shard,
        }
    }

    /// A flat's fully reduced gradient: its buffer, its dtype, and the flat element it starts at.
    pub fn reduced_gradient(&self, flat: usize, rank: u64) -> (BufferId, DType, u64) {
        let shard = self.layout.flats[flat].shard(rank, self.layout.ranks).start;
        match (self.gradient_storage(), self.residency[flat].gradients) {
            (GradientStorage::FlatF32, Tier::Device) => (BufferId::Grad(flat), DType::F32, 0),
            (GradientStorage::FlatComm, _) => (BufferId::ReducedGrad(flat), self.types.communication, 0),
            (GradientStorage::FlatF32, Tier::Host) => (BufferId::ReducedGrad(flat), DType::F32, shard),
            (GradientStorage::Shard, _) => (BufferId::ReducedGrad(flat), self.grad_accum_dtype, shard),
        }
    }

    /// The dtype of a reduced chunk on its way to host memory. A chunk that overwrites is cast here, so that its norm
    /// is that of the stored value; a chunk that is added is cast after the sum.
    pub(super) const fn summed_type(&self, addition: Accumulate) -> DType {
        match addition {
            Accumulate::Overwrite => self.grad_accum_dtype,
            Accumulate::Add => DType::F32,
        }
    }

    /// Whether a reduction completes a gradient: nothing is added to it afterwards.
    pub(super) fn completes(&self, kind: SectionKind, flat: usize, addition: Accumulate) -> bool {
        kind.is_last()
            && (!self.residency[flat].gradients.is_offloaded() || addition == Accumulate::Overwrite)
    }

    /// Whether gradients need a cast or a reduction. On one rank in f32 they need neither.
    pub(super) fn reduces(&self) -> bool {
        self.gradient_storage() != GradientStorage::FlatF32
            || self.layout.ranks > 1
            || self.types.communication != DType::F32
    }

    /// The elements of a flat that a rank updates.
    pub fn update_range(&self, flat: usize, rank: u64) -> Range<u64> {
        let flat = &self.layout.flats[flat];
        if self.shards_optimizer() { flat.shard(rank, self.layout.ranks) } else { 0..flat.padded() }
    }

    /// Whether a flat has fp32 master weights apart from the parameters.
    pub fn has_master(&self, flat: usize) -> bool {
        let (residency, storage) = (self.residency[flat], self.layout.flats[flat].storage);
        self.is_trained(flat)
            && (storage != Storage::Dense(DType::F32) || residency.weights != residency.states)
    }

    /// How a flat's master weights are stored. Where bf16 weights, states and update are all on the device, only the
    /// low-order bits are stored; otherwise the whole fp32 value.
    pub fn master_form(&self, flat: usize) -> MasterForm {
        let residency = self.residency[flat];
        let is_together = [residency.weights, residency.states, residency.updates] == [Tier::Device; 3];
        let is_bf16 = self.layout.flats[flat].storage == Storage::Dense(DType::Bf16);
        if is_bf16 && is_together { MasterForm::LowBits } else { MasterForm::F32 }
    }

    /// Whether a flat's optimizer states are streamed through the device.
    pub fn is_streamed(&self, flat: usize) -> bool {
        self.residency[flat].states != self.residency[flat].updates
    }

    /// Elements that every rank allocates for the states of its part of a flat.
    pub fn update_capacity(&self, flat: usize) -> u64 {
        let flat = &self.layout.flats[flat];
        if self.shards_optimizer() { flat.shard_capacity(self.layout.ranks) } else { flat.padded() }
    }

    /// The sections of micro-batches.
    pub fn micro_batches(&self) -> impl Iterator<Item = &Section> {
        self.sections.iter().filter(|section| section.is_micro_batch())
    }

    /// How often a step runs a section of this kind.
    pub(crate) fn repetitions(&self, kind: SectionKind) -> u64 {
        match kind {
            SectionKind::Middle => self.accumulation.saturating_sub(2),
            SectionKind::Eval
            | SectionKind::Logits
            | SectionKind::Encode
            | SectionKind::Decode
            | SectionKind::TopLogProbs => 0,
            _ => 1,
        }
    }

    /// Section indices in the order of one step, the middle one repeated.
    pub fn in_order(&self) -> impl Iterator<Item = usize> + '_ {
        self.sections
            .iter()
            .enumerate()
            .flat_map(|(place, section)| std::iter::repeat_n(place, self.repetitions(section.kind) as usize))
    }

    /// The index of the evaluation section.
    pub fn eval(&self) -> Option<usize> {
        self.section(SectionKind::Eval)
    }

    /// The index of the section that computes the logits of whole sequences, and the number of sequences.
    pub fn logits(&self) -> Option<(usize, u64)> {
        Some((self.section(SectionKind::Logits)?, self.sequences()?))
    }

    /// The most sequences that an inference program computes the next-token logits of at a time.
    pub fn sequences(&self) -> Option<u64> {
        self.instructions().find_map(|instruction| match instruction.action {
            Action::Logits { sequences, .. } => Some(sequences),
            _ => None,
        })
    }

    /// Whether keys and values of an attention node are cached.
    pub(super) fn caches(&self, node: usize) -> bool {
        self.instructions().any(|instruction| instruction.action == Action::StoreKv(node))
    }

    fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.sections.iter().flat_map(|section| &section.instructions)
    }

    /// The index of the section of a kind.
    fn section(&self, kind: SectionKind) -> Option<usize> {
        self.sections.iter().position(|section| section.kind == kind)
    }

    /// The index of the section of most probable tokens and their number.
    pub fn top_log_probs(&self) -> Option<(usize, u64)> {
        self.sections.iter().enumerate().find_map(|(place, section)| {
            section.instructions.iter().find_map(|instruction| match instruction.action {
                Action::TopLogProbs { k, .. } => Some((place, k)),
                _ => None,
            })
        })
    }

    /// The index of the section of an encoder, which decoding needs.
    pub fn encode(&self) -> Option<usize> {
        self.section(SectionKind::Encode)
    }

    /// The index of the decode section.
    pub fn decode(&self) -> Option<usize> {
        self.section(SectionKind::Decode)
    }

    /// A hash of the collectives in order (FNV-1a); equal on ranks whose programs match.
    pub fn collectives_hash(&self) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |text: &str| {
            for byte in text.bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        add(&format!("{} {} {:?} {:?}", self.stage, self.accumulation, self.types, self.layout.flats));
        for section in &self.sections {
            for instruction in section.instructions.iter().filter(|i| i.action.is_collective()) {
                add(&format!("{:?} {:?}", section.kind, instruction.action));
            }
        }
        hash
    }
}
