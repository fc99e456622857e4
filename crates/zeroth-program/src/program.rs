//! A compiled training step: its sections, the layout they work on, and what follows from both.

use std::ops::Range;

use zeroth_base::{Axis, DType};
use zeroth_graph::{LossPart, ParamId};
use zeroth_kernel::{MasterForm, Optimizer, ReportLayout, Tier};

use super::ir::{Accumulate, Action, GradientStorage, Instruction, Section, SectionKind};
use super::{BufferId, GradProducers, RouterCounts, Types, World};
use crate::memory::shared_buffers::SharedBuffers;
use crate::{FlatKind, Layout, Storage};

/// A compiled training step. Every rank runs the same program.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
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
    /// `zero_hpz_partition_size`: partitioned parameters are sharded within each group only.
    pub hpz: bool,
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

impl Program {
    /// The ranks it was compiled for.
    pub const fn world(&self) -> World {
        self.layout.world
    }

    /// The sorted indices of the flats that hold these parameters.
    pub(crate) fn flats_of(layout: &Layout, params: &[ParamId]) -> Vec<usize> {
        let mut flats: Vec<usize> = params.iter().map(|param| layout.place(*param).0).collect();
        flats.sort_unstable();
        flats.dedup();
        flats
    }

    /// Whether there are parameters that are sharded across ranks or offloaded, and so limits on what is gathered.
    pub fn shards_parameters(&self) -> bool {
        let is_away = |residency: &Residency| self.layout.ranks() > 1 || residency.weights.is_offloaded();
        let is_partitioned = self.residency.iter().any(|residency| residency.is_partitioned);
        is_partitioned && self.residency.iter().any(is_away)
    }

    /// Whether a flat's parameters are sharded across ranks or offloaded. It must then be gathered before it is read.
    pub fn is_sharded(&self, flat: usize) -> bool {
        let residency = self.residency[flat];
        let is_away = self.layout.ranks() > 1 || residency.weights.is_offloaded();
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

    /// Whether a flat's parameters are sharded within each group only, so that they cross no rail to be gathered.
    pub fn is_sharded_in_groups(&self, flat: usize) -> bool {
        self.hpz && self.layout.world.has_two_levels() && self.is_sharded(flat)
    }

    /// The elements of a flat whose parameters a rank holds at all times.
    pub fn held_range(&self, flat: usize, rank: u64) -> Range<u64> {
        if self.stays_gathered(flat) {
            0..self.layout.flats[flat].padded()
        } else if self.is_sharded_in_groups(flat) {
            self.layout.group_shard(flat, rank)
        } else {
            self.layout.shard(flat, rank)
        }
    }

    /// Elements that every rank reserves for them.
    pub fn held_capacity(&self, flat: usize) -> u64 {
        let (laid, world) = (&self.layout.flats[flat], self.layout.world);
        if self.stays_gathered(flat) {
            laid.padded()
        } else if self.is_sharded_in_groups(flat) {
            laid.group_shard_capacity(world)
        } else {
            laid.shard_capacity(world.ranks)
        }
    }

    /// Whether a level of a reduction leaves partial sums, which cross a rail.
    pub fn sums_partially(&self, axis: Axis) -> bool {
        axis != self.layout.world.last_level()
    }

    /// Whether micro-batches add up in partial sums of the group, which cross the rail once a step.
    pub fn accumulates_partial_sums(&self) -> bool {
        self.hpz && self.layout.world.has_two_levels() && self.stage >= 2 && self.accumulation > 1
    }

    /// The dtype of partial sums of a group.
    pub(super) fn partial_sum_type(&self) -> DType {
        if self.accumulates_partial_sums() { self.grad_accum_dtype } else { DType::F32 }
    }

    /// The dtype of what a level of a reduction adds up.
    pub(super) fn summand_type(&self, axis: Axis) -> DType {
        if self.layout.world.has_two_levels() && axis == Axis::Rail {
            self.partial_sum_type()
        } else {
            self.types.communication
        }
    }

    /// The most elements of a chunk of `length` elements that one rank along an axis gets of each: of its own shard, or of all of its
    /// rail.
    pub(super) fn part_capacity(&self, length: u64, axis: Axis) -> u64 {
        match axis {
            Axis::Group => length * self.layout.world.groups(),
            Axis::Rail => length,
        }
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
        let alone = self.layout.ranks() == 1 && self.accumulation == 1;
        match self.types.communication {
            DType::F32 if alone => GradientStorage::FlatF32,
            _ if alone => GradientStorage::FlatComm,
            _ if self.stage < 2 => GradientStorage::FlatF32,
            _ => GradientStorage::Shard,
        }
    }

    /// A flat's fully reduced gradient: its buffer, its dtype, and the flat element it starts at.
    pub fn reduced_gradient(&self, flat: usize, rank: u64) -> (BufferId, DType, u64) {
        let shard = self.layout.shard(flat, rank).start;
        match (self.gradient_storage(), self.residency[flat].gradients.is_offloaded()) {
            (GradientStorage::FlatF32, false) => (BufferId::Grad(flat), DType::F32, 0),
            (GradientStorage::FlatF32, true) => (BufferId::ReducedGrad(flat), DType::F32, shard),
            (GradientStorage::FlatComm, _) => (BufferId::ReducedGrad(flat), self.types.communication, 0),
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

    /// Whether a reduction in one step completes a gradient: nothing is added to it afterwards.
    pub(super) fn completes(&self, kind: SectionKind, flat: usize, addition: Accumulate) -> bool {
        kind.is_last()
            && !self.layout.world.has_two_levels()
            && (!self.residency[flat].gradients.is_offloaded() || addition == Accumulate::Overwrite)
    }

    /// Whether gradients need a cast or a reduction. On one rank in f32 they need neither.
    pub(super) fn reduces(&self) -> bool {
        self.gradient_storage() != GradientStorage::FlatF32
            || self.layout.ranks() > 1
            || self.types.communication != DType::F32
    }

    /// The elements of a flat that a rank updates.
    pub fn update_range(&self, flat: usize, rank: u64) -> Range<u64> {
        if self.shards_optimizer() {
            self.layout.shard(flat, rank)
        } else {
            0..self.layout.flats[flat].padded()
        }
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
        if self.shards_optimizer() { flat.shard_capacity(self.layout.ranks()) } else { flat.padded() }
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
            SectionKind::Only | SectionKind::First | SectionKind::Last | SectionKind::Update => 1,
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
}
