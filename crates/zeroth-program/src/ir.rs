//! The words of the program: instructions over flats and values, in sections.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_graph::ParamId;
use zeroth_kernel::{MasterForm, Optimizer, Queue, Tier};

use super::{Content, Givers, Types};
use crate::{FlatKind, Layout};

/// What a rank does in one step. Every rank runs the same program.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Where every element lives.
    pub layout: Layout,
    /// The sections, in the order they run; [`SectionKind::Middle`] runs as often as accumulation asks.
    pub sections: Vec<Section>,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// `zero_optimization.stage`: what is cut across ranks.
    pub stage: u8,
    /// The types numbers are stored in.
    pub types: Types,
    /// The type in which shards of gradients add up, over ranks and micro-batches (stages 2 and 3).
    pub sums: DType,
    /// How weights are changed.
    pub optimizer: Optimizer,
    /// The type of its moments.
    pub moments: DType,
    /// Whether moments in 16 bits are rounded by chance.
    pub stochastic_rounding: bool,
    /// For each parameter of the graph, who gives its gradient.
    pub givers: Vec<Givers>,
    /// Where each flat's parts live.
    pub held: Vec<Held>,
    /// Whether an exchange gives each rank its part only.
    pub reduce_scatter: bool,
    /// Where states pass through the device: bytes that they have there for themselves, behind what micro-batches use.
    pub window: Option<u64>,
    /// Whether ranks read each other's shards of parameters in place instead of gathering copies.
    pub zero_copy_gather: bool,
}

/// Where a flat's parts live between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Parameters.
    pub weights: Tier,
    /// Gradients that wait for the update.
    pub gradients: Tier,
    /// Master weights and moments.
    pub states: Tier,
    /// Where the update runs: where states live, or on the device, which they then pass through.
    pub updates: Tier,
}

/// A part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    /// Which part.
    pub kind: SectionKind,
    /// What it does, in order.
    pub instructions: Vec<Instruction>,
}

/// The parts of a step. Micro-batches differ only in how gradients land.
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
    /// The optimizer.
    Update,
    /// A micro-batch's loss without gradients; no part of a step.
    Eval,
    /// Next-token logits: all that a program for inference does.
    Logits,
}

/// One instruction: what it does, where it runs, and the flats whose parameters it reads or whose gradients it adds to.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// What it does.
    pub action: Action,
    /// The line of work it belongs to.
    pub queue: Queue,
    /// Flats whose parameters it reads, by their place in the layout.
    pub reads: Vec<usize>,
    /// Flats whose gradients it adds to.
    pub lands: Vec<usize>,
}

/// What an instruction does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Sets the sum of the losses to zero.
    ClearLoss,
    /// A node of forward, by its place in the graph.
    Forward(usize),
    /// The head without its loss: logits of the last token of each of the first so many sequences.
    Logits {
        /// The head_loss it stands for, by its place in the graph.
        node: usize,
        /// How many sequences have logits.
        sequences: u64,
    },
    /// A node of backward.
    Backward(usize),
    /// A node of forward once more, for what backward reads of it. A residual add whose sum was kept only norms the sum.
    Recompute {
        /// The node.
        node: usize,
        /// Whether the sum is there.
        from_sum: bool,
    },
    /// Puts a value away in host memory.
    Park(usize),
    /// Brings it back.
    Fetch(usize),
    /// Brings all shards of a flat's parameters together, in a buffer of its own; where they are read in place, waits until
    /// every rank's is complete.
    Gather(usize),
    /// Lets a gathered flat go.
    Release(usize),
    /// Sets to zero what of a flat's gradient is added to, and its padding.
    Clear(usize),
    /// Rounds what of a flat's gradient landed in f32 to the communication type, beside what landed in it, and keeps it so:
    /// alone and without accumulation that is all there is to do.
    Keep(usize),
    /// Rounds what of a flat's gradient landed in f32 to the communication type, beside what landed in it.
    RoundRest(usize),
    /// Puts the ranks' parts of a chunk that is rounded end to end.
    Pack(Chunk),
    /// Rounds a chunk of a flat's gradient that landed in f32 to the communication type, a part for each rank end to end.
    Round(Chunk),
    /// Sends each rank its part of a chunk.
    Exchange(Chunk),
    /// Adds the ranks' parts of a chunk, in rank order, in f32.
    Add(Chunk, Addition),
    /// Both at once: adds the ranks' parts of a chunk as it reads them in their memory, in rank order, in f32.
    Reduce(Chunk, Addition),
    /// Brings the sums of all shards of a flat's gradient together (stage 0, where every rank updates all).
    GatherGradient(usize),
    /// The sum of squares of what this rank reduced of a flat's gradient.
    Squares(usize),
    /// Every rank's loss and sums of squares to every rank.
    Reports,
    /// The norm of all gradients, the clip factor, and whether the step counts.
    Control,
    /// Puts the sums of a chunk where the update finds them, in host memory.
    SaveGradient(Chunk, Addition),
    /// Copies a piece of this rank's parameters from pageable memory to staging.
    Stage(Chunk),
    /// Copies a piece of this rank's parameters from host memory to its place in the flat that is being gathered.
    Bring(Chunk),
    /// Brings the states of a tile to the device, with its gradient where that is not there.
    Load(Chunk),
    /// The optimizer over a tile of what this rank updates of a flat.
    Update(Chunk),
    /// Takes a tile's states back to where they live.
    Store(Chunk),
    /// Puts a tile of updated parameters where they live, when that is not where they were updated.
    PutBack(Chunk),
    /// Brings a chunk of the updated shards of a flat that stays gathered together, in place.
    GatherWeights(Chunk),
    /// Sends one rank's updated shard of such a flat to all.
    SpreadWeights {
        /// The flat.
        flat: usize,
        /// The rank.
        root: usize,
    },
}

/// A part of a flat that one collective moves, as a range within every rank's shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The flat.
    pub flat: usize,
    /// The range.
    pub range: Range<u64>,
}

/// How a sum of ranks meets what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addition {
    /// It takes its place: the first micro-batch of a step.
    Write,
    /// It is added: the later ones.
    Add,
}

/// Where a step's gradients are when the update reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientHome {
    /// In the f32 flat in which they landed.
    Landed,
    /// Whole, in the communication type: one rank, no accumulation.
    Rounded,
    /// In f32 shards.
    Shard,
}

impl Action {
    /// Its name in messages and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::ClearLoss => "clear loss",
            Self::Forward(_) => "forward",
            Self::Logits { .. } => "logits",
            Self::Backward(_) => "backward",
            Self::Recompute { .. } => "recompute",
            Self::Park(_) => "park",
            Self::Fetch(_) => "fetch",
            Self::Gather(_) => "gather",
            Self::Release(_) => "release",
            Self::Clear(_) => "clear gradient",
            Self::Keep(_) => "keep gradient",
            Self::RoundRest(_) => "round the rest",
            Self::Pack(_) => "pack",
            Self::Round(_) => "round",
            Self::Exchange(_) => "exchange",
            Self::Add(..) => "add",
            Self::Reduce(..) => "reduce",
            Self::GatherGradient(_) => "gather gradient",
            Self::Squares(_) => "squares",
            Self::Reports => "reports",
            Self::Control => "control",
            Self::SaveGradient(..) => "save gradient",
            Self::Stage(_) => "stage",
            Self::Bring(_) => "bring",
            Self::Load(_) => "load states",
            Self::Update(_) => "update",
            Self::Store(_) => "store states",
            Self::PutBack(_) => "put back",
            Self::GatherWeights(_) => "gather weights",
            Self::SpreadWeights { .. } => "spread weights",
        }
    }

    /// Whether ranks meet in it.
    pub const fn is_collective(&self) -> bool {
        matches!(
            self,
            Self::Gather(_)
                | Self::Exchange(_)
                | Self::Reduce(..)
                | Self::GatherGradient(_)
                | Self::Reports
                | Self::GatherWeights(_)
                | Self::SpreadWeights { .. }
        )
    }

    /// The flat it is about, for those that are about one.
    pub const fn flat(&self) -> Option<usize> {
        match self {
            Self::Gather(flat)
            | Self::Release(flat)
            | Self::Clear(flat)
            | Self::Keep(flat)
            | Self::RoundRest(flat)
            | Self::GatherGradient(flat)
            | Self::Squares(flat)
            | Self::SpreadWeights { flat, .. } => Some(*flat),
            Self::Pack(chunk)
            | Self::Round(chunk)
            | Self::Exchange(chunk)
            | Self::Add(chunk, _)
            | Self::Reduce(chunk, _)
            | Self::SaveGradient(chunk, _)
            | Self::Stage(chunk)
            | Self::Bring(chunk)
            | Self::Load(chunk)
            | Self::Update(chunk)
            | Self::Store(chunk)
            | Self::GatherWeights(chunk)
            | Self::PutBack(chunk) => Some(chunk.flat),
            Self::ClearLoss
            | Self::Forward(_)
            | Self::Logits { .. }
            | Self::Backward(_)
            | Self::Recompute { .. }
            | Self::Park(_)
            | Self::Fetch(_)
            | Self::Reports
            | Self::Control => None,
        }
    }
}

impl Instruction {
    pub(crate) fn new(action: Action) -> Self {
        Self { action, queue: Queue::Compute, reads: Vec::new(), lands: Vec::new() }
    }
}

impl Section {
    /// Whether it runs a micro-batch of training.
    pub fn is_micro_batch(&self) -> bool {
        !matches!(self.kind, SectionKind::Update | SectionKind::Eval | SectionKind::Logits)
    }
}

impl SectionKind {
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
    /// The flats that parameters lie in, each once, in order.
    pub(crate) fn flats_of(layout: &Layout, params: &[ParamId]) -> Vec<usize> {
        let mut flats: Vec<usize> = params.iter().map(|param| layout.place(*param).0).collect();
        flats.sort_unstable();
        flats.dedup();
        flats
    }

    /// Whether parameters come and go: cut over ranks, or kept in host memory. Then flats that do not stay gathered must be
    /// gathered before they are read.
    pub fn cuts_parameters(&self) -> bool {
        let is_away = self.held.iter().any(|held| held.weights == Tier::Host);
        self.stage >= 3 && (self.layout.ranks > 1 || is_away)
    }

    /// Whether a rank updates its own shard only.
    pub const fn cuts_optimizer(&self) -> bool {
        self.stage >= 1
    }

    /// Whether a flat is whole on every rank all the time.
    pub fn stays_gathered(&self, flat: usize) -> bool {
        let is_whole_here = self.layout.ranks == 1 && self.held[flat].weights == Tier::Device;
        !self.cuts_parameters() || self.layout.flats[flat].kind == FlatKind::Persistent || is_whole_here
    }

    /// Whether a flat that is cut is read in place: what lives in host memory is copied to the device first.
    pub fn is_viewed(&self, flat: usize) -> bool {
        self.zero_copy_gather && !self.stays_gathered(flat) && self.held[flat].weights == Tier::Device
    }

    /// Whether a flat has gradients.
    pub fn is_trained(&self, flat: usize) -> bool {
        !matches!(self.layout.flats[flat].kind, FlatKind::Frozen(_))
    }

    /// Where gradients are when the update reads them.
    pub fn gradient_home(&self) -> GradientHome {
        let alone = self.layout.ranks == 1 && self.accumulation == 1;
        match self.types.communication {
            DType::F32 if alone => GradientHome::Landed,
            _ if alone => GradientHome::Rounded,
            _ if self.stage < 2 => GradientHome::Landed,
            _ => GradientHome::Shard,
        }
    }

    /// Where a flat's gradient is when it is complete: its buffer, its type, and the element of the flat it begins with.
    pub fn complete_gradient(&self, flat: usize, rank: u64) -> (Content, DType, u64) {
        let shard = self.layout.flats[flat].shard(rank, self.layout.ranks).start;
        match (self.gradient_home(), self.held[flat].gradients) {
            (GradientHome::Landed, Tier::Device) => (Content::Gradient(flat), DType::F32, 0),
            (GradientHome::Rounded, _) => (Content::Kept(flat), self.types.communication, 0),
            (GradientHome::Landed, Tier::Host) => (Content::Kept(flat), DType::F32, shard),
            (GradientHome::Shard, _) => (Content::Kept(flat), self.sums, shard),
        }
    }

    /// The type of a sum over ranks on its way to host memory: what takes the place there is rounded here, so that its
    /// squares are those of what is kept; what is added to something there is rounded with that.
    pub(super) const fn summed_type(&self, addition: Addition) -> DType {
        match addition {
            Addition::Write => self.sums,
            Addition::Add => DType::F32,
        }
    }

    /// Whether a sum over ranks is a gradient's last: nothing is added to it any more.
    pub(super) fn completes(&self, kind: SectionKind, flat: usize, addition: Addition) -> bool {
        kind.is_last() && (self.held[flat].gradients == Tier::Device || addition == Addition::Write)
    }

    /// Whether a gradient that landed needs rounding or company: alone in f32 it is complete.
    pub(super) fn reduces(&self) -> bool {
        self.gradient_home() != GradientHome::Landed
            || self.layout.ranks > 1
            || self.types.communication != DType::F32
    }

    /// The elements of a flat that a rank updates.
    pub fn updated(&self, flat: usize, rank: u64) -> Range<u64> {
        let flat = &self.layout.flats[flat];
        if self.cuts_optimizer() { flat.shard(rank, self.layout.ranks) } else { 0..flat.padded() }
    }

    /// Whether a flat's master weights are apart from the weights computed with.
    pub fn has_master(&self, flat: usize) -> bool {
        let held = self.held[flat];
        self.is_trained(flat) && (self.types.run != DType::F32 || held.weights != held.states)
    }

    /// How a flat's master weights are stored: beside weights in bf16 that are updated in the same place, as what these
    /// lack. What passes through a device, or lies elsewhere than its weights, is whole.
    pub fn master_form(&self, flat: usize) -> MasterForm {
        let held = self.held[flat];
        let is_together = [held.weights, held.states, held.updates] == [Tier::Device; 3];
        if self.types.run == DType::Bf16 && is_together { MasterForm::LowBits } else { MasterForm::F32 }
    }

    /// Whether a flat's states pass through the device for their update.
    pub fn streams(&self, flat: usize) -> bool {
        self.held[flat].states != self.held[flat].updates
    }

    /// Elements that every rank reserves for what it updates of a flat.
    pub fn updated_capacity(&self, flat: usize) -> u64 {
        let flat = &self.layout.flats[flat];
        if self.cuts_optimizer() { flat.shard_capacity(self.layout.ranks) } else { flat.padded() }
    }

    /// The sections of micro-batches.
    pub fn micro_batches(&self) -> impl Iterator<Item = &Section> {
        self.sections.iter().filter(|section| section.is_micro_batch())
    }

    /// The sections as they run in one step, by their places, the middle one repeated.
    pub fn in_order(&self) -> impl Iterator<Item = usize> + '_ {
        self.sections.iter().enumerate().flat_map(|(place, section)| {
            let times = match section.kind {
                SectionKind::Middle => self.accumulation.saturating_sub(2),
                SectionKind::Eval | SectionKind::Logits => 0,
                _ => 1,
            };
            std::iter::repeat_n(place, times as usize)
        })
    }

    /// The section that computes a loss alone.
    pub fn eval(&self) -> Option<usize> {
        self.sections.iter().position(|section| section.kind == SectionKind::Eval)
    }

    /// The section that gives next-token logits, and for how many sequences.
    pub fn logits(&self) -> Option<(usize, u64)> {
        self.sections.iter().enumerate().find_map(|(place, section)| {
            section.instructions.iter().find_map(|instruction| match instruction.action {
                Action::Logits { sequences, .. } => Some((place, sequences)),
                _ => None,
            })
        })
    }

    /// A number that ranks with the same collectives in the same order share (FNV-1a over the list).
    pub fn agreement(&self) -> u64 {
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
