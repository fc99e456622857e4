//! The buffers of a program: their sizes, categories and tiers.

use zeroth_base::{Axis, DType};
use zeroth_graph::{self as graph, Backward, Graph, Kind, Node, Op};
use zeroth_kernel::{CacheRange, RowKey};
use zeroth_kernel::{Control, Recipe, StepInput, Target, Tier};

use crate::streams::{is_attention, is_cross};
use crate::sub_group::SubGroupLayout;
use crate::{Action, Buffer, BufferId, Category, Flat, GradientStorage, Program, Section, Storage};

/// A program with its model and target: everything that buffer sizes follow from.
#[derive(Clone, Copy)]
pub(crate) struct BufferAnalysis<'a> {
    pub(crate) program: &'a Program,
    pub(crate) graph: &'a Graph,
    pub(crate) backward: &'a Backward,
    /// The kind of device, which decides row strides.
    pub(crate) target: &'a dyn Target,
}

/// Rows of the smallest head's projection.
pub fn vocabulary(graph: &Graph) -> u64 {
    graph.heads().map(|head| graph.param(head.params[0]).spec.shape[0]).min().unwrap_or(0)
}

impl BufferAnalysis<'_> {
    fn has_dropout(&self) -> bool {
        let drops = |node: &Node| match node.op {
            Op::Dropout { .. } => true,
            Op::Attention(spec) => spec.dropout.is_some(),
            _ => false,
        };
        self.graph.nodes.iter().any(drops)
    }

    /// The statically allocated buffers.
    pub(crate) fn static_buffers(&self) -> Vec<Buffer> {
        let (program, layout) = (self.program, &self.program.layout);
        let home = program.gradient_storage();
        let mut all = Vec::new();
        let mut push_to = |tier, id, category, bytes| all.push(Buffer { id, category, tier, bytes });
        // Parameters are contiguous: other ranks may map them, from pages that are not private. Records of nf4, which are never
        // mapped, are no whole pages and come last.
        let is_nf4 = |(_, laid): &(usize, &Flat)| laid.storage == Storage::Nf4;
        let (nf4, dense): (Vec<_>, Vec<_>) = layout.flats.iter().enumerate().partition(is_nf4);
        for (flat, laid) in dense.into_iter().chain(nf4) {
            push_to(
                program.residency[flat].weights,
                BufferId::Weights(flat),
                Category::Parameters,
                laid.storage.bytes(program.held_capacity(flat)),
            );
        }
        for (flat, laid) in layout.flats.iter().enumerate().filter(|(flat, _)| program.is_trained(*flat)) {
            let (shard, residency) = (laid.shard_capacity(layout.ranks()), program.residency[flat]);
            let updated = program.update_capacity(flat);
            if home == GradientStorage::FlatF32 {
                push_to(Tier::Device, BufferId::Grad(flat), Category::Gradients, 4 * laid.padded());
            }
            let kept = match (home, residency.gradients.is_offloaded()) {
                (GradientStorage::FlatF32, false) => 0,
                (GradientStorage::FlatF32, true) => 4 * shard,
                (GradientStorage::Shard, _) => program.grad_accum_dtype.bytes() * shard,
                (GradientStorage::FlatComm, _) => program.types.communication.bytes() * laid.padded(),
            };
            if program.accumulates_partial_sums() {
                let bytes = program.grad_accum_dtype.bytes() * laid.group_shard_capacity(layout.world);
                push_to(Tier::Device, BufferId::PartialGrad(flat), Category::Gradients, bytes);
            }
            if kept > 0 {
                push_to(residency.gradients, BufferId::ReducedGrad(flat), Category::Gradients, kept);
            }
            if program.has_master(flat) {
                let bytes = program.master_form(flat).bytes() * updated;
                push_to(residency.states, BufferId::Master(flat), Category::Optimizer, bytes);
            }
            let moments = program.moment_dtype.bytes() * updated;
            for &moment in program.optimizer.moments() {
                push_to(residency.states, BufferId::Moment(moment, flat), Category::Optimizer, moments);
            }
        }
        let mut push = |id, category, bytes| push_to(Tier::Device, id, category, bytes);
        for input in &self.graph.inputs {
            push(BufferId::Value(input.index()), Category::Activations, self.value_bytes(input.index()));
        }
        for (stream, &graph::Stream { rows, .. }) in self.graph.streams.iter().enumerate() {
            // The number of entries, the start of every sequence, and the end of the last.
            push(BufferId::Starts(stream), Category::Activations, 4 * (rows + 2));
            if self.has_dropout() {
                push(BufferId::Keys(stream), Category::Activations, size_of::<RowKey>() as u64 * rows);
            }
            for (index, rotary) in self.graph.rotaries.iter().enumerate() {
                let angles = 4 * rows * rotary.frequencies.len() as u64;
                push(BufferId::Cosines { stream, rotary: index }, Category::Activations, angles);
                push(BufferId::Sines { stream, rotary: index }, Category::Activations, angles);
            }
        }
        let (ranks, report) = (layout.ranks(), program.report());
        push(BufferId::Recipe, Category::Buffers, size_of::<Recipe>() as u64);
        push(BufferId::Input, Category::Buffers, size_of::<StepInput>() as u64);
        push(BufferId::Control, Category::Buffers, size_of::<Control>() as u64);
        push(BufferId::Report, Category::Buffers, report.bytes() as u64);
        if ranks > 1 {
            push(BufferId::Reports, Category::Buffers, ranks * report.bytes() as u64);
        }
        push(BufferId::Record, Category::Buffers, report.record_bytes() as u64);
        if let Some(sequences) = program.sequences() {
            push(BufferId::Logits, Category::Activations, 4 * sequences * vocabulary(self.graph));
        }
        if let Some((_, k)) = program.top_log_probs() {
            let rows: u64 = self.graph.streams.iter().map(|stream| stream.rows).sum();
            push(BufferId::TopIds, Category::Activations, 4 * k * rows);
            push(BufferId::TopLogProbs, Category::Activations, 4 * k * rows);
        }
        if program.cached_tokens > 0 {
            let most = self.graph.streams.iter().map(|stream| stream.rows).max().unwrap_or(0);
            let ranges = size_of::<CacheRange>() as u64 * most;
            push(BufferId::CacheRanges, Category::Activations, ranges);
            if program.cached_source_tokens > 0 {
                push(BufferId::SourceRanges, Category::Activations, ranges);
            }
            for (at, node) in self.graph.nodes.iter().enumerate().filter(|(_, node)| is_attention(node)) {
                let rows = if is_cross(self.graph, node) {
                    program.cached_source_tokens
                } else {
                    program.cached_tokens
                };
                // An encoder has no cache.
                if program.caches(at) {
                    let bytes = |place: usize| rows * self.row_bytes(node.inputs[place].index());
                    push(BufferId::CachedKeys(at), Category::Activations, bytes(1));
                    push(BufferId::CachedValues(at), Category::Activations, bytes(2));
                }
            }
        }
        all
    }

    /// The size, category and tier of a transient buffer of a section.
    pub(crate) fn transient(&self, section: &Section, id: BufferId, scratch: &[u64]) -> Buffer {
        let (layout, types) = (&self.program.layout, self.program.types);
        let chunk = |at: usize| match &section.instructions[at].action {
            Action::PackGrad(chunk)
            | Action::CastAndPackGrad(chunk)
            | Action::AllToAll(chunk, _)
            | Action::SumRanks(chunk, ..)
            | Action::ReduceScatter(chunk, ..)
            | Action::StageShard(chunk)
            | Action::LoadStates(chunk)
            | Action::Update(chunk) => chunk.range.end - chunk.range.start,
            other => unreachable!("{other:?} moves no chunk"),
        };
        let (category, bytes) = match id {
            BufferId::Value(value)
            | BufferId::Recomputed(value)
            | BufferId::Offloaded(value)
            | BufferId::Reloaded(value) => (Category::Activations, self.value_bytes(value)),
            BufferId::Gathered { flat, .. } => (Category::Buffers, layout.flats[flat].bytes()),
            BufferId::Unpacked(at) => {
                let Action::Unpack(param) = section.instructions[at].action else {
                    unreachable!("only unpacking leaves a parameter")
                };
                (Category::Buffers, self.graph.param(param).elements() * types.compute.bytes())
            }
            BufferId::Grad(flat) => (Category::Buffers, 4 * self.program.f32_elements(section.kind, flat)),
            BufferId::CommGrad(flat) => {
                (Category::Buffers, layout.flats[flat].padded() * types.communication.bytes())
            }
            BufferId::WaitingRows => {
                // The head leaves a row for every token that the embedding looks up.
                let rows = self.graph.nodes.iter().filter(|node| node.op == Op::Embedding);
                let rows = rows.map(|node| self.graph.info(node.outputs[0]));
                let most = rows.map(|info| self.graph.most_rows(info.rows) * info.width).max();
                (Category::Buffers, 4 * most.unwrap_or(0))
            }
            BufferId::SendChunk(at) => {
                (Category::Buffers, chunk(at) * layout.ranks() * types.communication.bytes())
            }
            BufferId::RecvChunk(at) => {
                let Some(axis) = section.instructions[at].action.collective_axis() else {
                    unreachable!("only an exchange receives a chunk")
                };
                // Every rank's part for this one; without reduce-scatter, every rank's parts for all.
                let ranks = layout.world.along(axis);
                let from_each = if self.program.reduce_scatter { 1 } else { ranks };
                let part = self.program.part_capacity(chunk(at), axis);
                (Category::Buffers, part * from_each * ranks * self.program.summand_type(axis).bytes())
            }
            BufferId::PartialSums(at) => {
                let part = self.program.part_capacity(chunk(at), Axis::Group);
                (Category::Buffers, part * DType::F32.bytes())
            }
            BufferId::ReducedChunk(at) => {
                let (Action::SumRanks(_, addition, _) | Action::ReduceScatter(_, addition, _)) =
                    &section.instructions[at].action
                else {
                    unreachable!("only sums are on their way to host memory")
                };
                (Category::Buffers, self.program.summed_type(*addition).bytes() * chunk(at))
            }
            BufferId::StagedShard(at) | BufferId::UpdatedWeights(at) => {
                let flat = section.instructions[at].action.flat().expect("a chunk is of a flat");
                (Category::Buffers, layout.flats[flat].storage.bytes(chunk(at)))
            }
            BufferId::SubGroup(at) => {
                let flat = section.instructions[at].action.flat().expect("a tile is of a flat");
                (Category::Buffers, SubGroupLayout::of(self.program, flat, chunk(at)).bytes)
            }
            BufferId::HostStateToken { .. } => (Category::Buffers, 0),
            BufferId::Scratch(at) => (Category::Buffers, scratch[at]),
            other => unreachable!("{other:?} is always there"),
        };
        let tier = match id {
            BufferId::Offloaded(_) | BufferId::StagedShard(_) | BufferId::HostStateToken { .. } => Tier::Host,
            BufferId::UpdatedWeights(at) => {
                let flat = section.instructions[at].action.flat().expect("an update is about a flat");
                self.program.residency[flat].updates
            }
            _ => Tier::Device,
        };
        Buffer { id, category, tier, bytes }
    }

    fn value_bytes(&self, value: usize) -> u64 {
        self.graph.most_rows(self.backward.values[value].rows) * self.row_bytes(value)
    }

    /// The row stride of a value, in bytes.
    pub(crate) fn row_bytes(&self, value: usize) -> u64 {
        let (info, run) = (self.backward.values[value], self.program.types.compute);
        match info.kind {
            Kind::Activation => self.target.row_stride(info.width, run) * run.bytes(),
            Kind::Statistic | Kind::Index => 4 * info.width,
        }
    }
}
