//! The buffers of a program: their contents, sizes, and the instructions that access them.

use crate::Target;
use zeroth_graph::{self as graph, Backward, GradNode, GradOp, Graph, Kind, Node, Op, Rows, Value};
use zeroth_kernel::{Access, Control, Recipe, StepInput, Tier};
use zeroth_kernel::{CacheRange, RowKey};

use super::sub_group::SubGroupLayout;
use super::{
    Action, Buffer, BufferId, Category, Chunk, GradientStorage, Instruction, Program, Section, SectionKind,
};

/// A program with its model and target: everything that buffer sizes and accesses follow from.
#[derive(Clone, Copy)]
pub(super) struct BufferAnalysis<'a> {
    pub(super) program: &'a Program,
    pub(super) graph: &'a Graph,
    pub(super) backward: &'a Backward,
    /// The kind of device, which decides row strides.
    pub(super) target: Target,
}

/// Rows of the smallest head's projection.
pub fn vocabulary(graph: &Graph) -> u64 {
    heads(graph).map(|head| graph.param(head.params[0]).spec.shape[0]).min().unwrap_or(0)
}

fn heads(graph: &Graph) -> impl Iterator<Item = &Node> {
    graph.losses().map(|index| &graph.nodes[index])
}

impl BufferAnalysis<'_> {
    /// The stream that gives a forward value its rows.
    pub(super) fn stream_of(&self, value: Value) -> usize {
        match self.graph.info(value).rows {
            Rows::Stream(stream) | Rows::Times(stream, _) => stream,
            Rows::Fixed(_) => unreachable!("ops that read sequences have the rows of a stream"),
        }
    }

    /// The token ids of a tied table's waiting rows, where a backward node is the head that leaves them or the
    /// embedding that completes them.
    pub(super) fn waiting_tokens(&self, kind: SectionKind, node: &GradNode) -> Option<Value> {
        let param =
            node.accumulates_into.iter().find(|param| self.program.embedding_completes(kind, **param))?;
        let completes =
            |node: &&GradNode| node.op == GradOp::Embedding && node.accumulates_into.contains(param);
        self.backward.nodes.iter().find(completes).map(|embedding| embedding.inputs[0])
    }

    fn has_dropout(&self) -> bool {
        self.graph.nodes.iter().any(|node| matches!(node.op, Op::Dropout { .. }))
    }

    /// The statically allocated buffers.
    pub(super) fn static_buffers(&self) -> Vec<Buffer> {
        let (program, layout) = (self.program, &self.program.layout);
        let home = program.gradient_storage();
        let mut all = Vec::new();
        let mut push_to = |tier, id, category, bytes| all.push(Buffer { id, category, tier, bytes });
        // Parameters are contiguous: other ranks may map them, from pages that are not private.
        for (flat, laid) in layout.flats.iter().enumerate() {
            let shard = laid.shard_capacity(layout.ranks);
            let weights = if program.stays_gathered(flat) { laid.padded() } else { shard };
            push_to(
                program.residency[flat].weights,
                BufferId::Weights(flat),
                Category::Parameters,
                laid.storage.bytes() * weights,
            );
        }
        for (flat, laid) in layout.flats.iter().enumerate().filter(|(flat, _)| program.is_trained(*flat)) {
            let (shard, residency) = (laid.shard_capacity(layout.ranks), program.residency[flat]);
            let updated = program.update_capacity(flat);
            if home == GradientStorage::FlatF32 {
                push_to(Tier::Device, BufferId::Grad(flat), Category::Gradients, 4 * laid.padded());
            }
            let kept = match (home, residency.gradients) {
                (GradientStorage::FlatF32, Tier::Device) => 0,
                (GradientStorage::FlatF32, Tier::Host) => 4 * shard,
                (GradientStorage::Shard, _) => program.grad_accum_dtype.bytes() * shard,
                (GradientStorage::FlatComm, _) => program.types.communication.bytes() * laid.padded(),
            };
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
        let (ranks, report) = (layout.ranks, program.report());
        push(BufferId::Recipe, Category::Buffers, size_of::<Recipe>() as u64);
        push(BufferId::Input, Category::Buffers, size_of::<StepInput>() as u64);
        push(BufferId::Control, Category::Buffers, size_of::<Control>() as u64);
        push(BufferId::Report, Category::Buffers, report.bytes() as u64);
        if ranks > 1 {
            push(BufferId::Reports, Category::Buffers, ranks * report.bytes() as u64);
        }
        push(BufferId::Record, Category::Buffers, report.record_bytes() as u64);
        if let Some((_, sequences)) = program.logits() {
            push(BufferId::Logits, Category::Activations, 4 * sequences * vocabulary(self.graph));
        }
        if program.cached_tokens > 0 {
            let rows: u64 = self.graph.streams.iter().map(|stream| stream.rows).sum();
            push(BufferId::CacheRanges, Category::Activations, size_of::<CacheRange>() as u64 * rows);
            for (at, node) in self.graph.nodes.iter().enumerate() {
                let Op::Attention { .. } = node.op else { continue };
                let [_, k, v] = node.inputs[..] else { unreachable!("attention reads q, k and v") };
                let bytes = |value: Value| program.cached_tokens * self.row_bytes(value.index());
                push(BufferId::CachedKeys(at), Category::Activations, bytes(k));
                push(BufferId::CachedValues(at), Category::Activations, bytes(v));
            }
        }
        all
    }

    /// The size, category and tier of a transient buffer of a section.
    pub(super) fn transient(&self, section: &Section, id: BufferId, scratch: &[u64]) -> Buffer {
        let (layout, types) = (&self.program.layout, self.program.types);
        let chunk = |at: usize| match &section.instructions[at].action {
            Action::PackGrad(chunk)
            | Action::CastAndPackGrad(chunk)
            | Action::AllToAll(chunk)
            | Action::SumRanks(chunk, _)
            | Action::ReduceScatter(chunk, _)
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
                (Category::Buffers, chunk(at) * layout.ranks * types.communication.bytes())
            }
            BufferId::RecvChunk(at) => {
                // Every rank's part for this one; without reduce-scatter, every rank's parts for all.
                let from_each = if self.program.reduce_scatter { 1 } else { layout.ranks };
                (Category::Buffers, chunk(at) * from_each * layout.ranks * types.communication.bytes())
            }
            BufferId::ReducedChunk(at) => {
                let (Action::SumRanks(_, addition) | Action::ReduceScatter(_, addition)) =
                    &section.instructions[at].action
                else {
                    unreachable!("only sums are on their way to host memory")
                };
                (Category::Buffers, self.program.summed_type(*addition).bytes() * chunk(at))
            }
            BufferId::StagedShard(at) | BufferId::UpdatedWeights(at) => {
                let flat = section.instructions[at].action.flat().expect("a chunk is of a flat");
                (Category::Buffers, chunk(at) * layout.flats[flat].storage.bytes())
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
    pub(super) fn row_bytes(&self, value: usize) -> u64 {
        let (info, run) = (self.backward.values[value], self.program.types.compute);
        match info.kind {
            Kind::Activation => self.target.row_stride(info.width, run) * run.bytes(),
            Kind::Statistic | Kind::Index => 4 * info.width,
        }
    }

    /// The buffer accesses of every instruction of a section.
    pub(super) fn touches(&self, section: &Section, scratch: &[u64]) -> Vec<Vec<(BufferId, Access)>> {
        let mut state = Simulation {
            kind: section.kind,
            stays: vec![0; self.program.layout.flats.len()],
            moving: Vec::new(),
            tiles: Vec::new(),
            current: (0..self.backward.values.len()).map(BufferId::Value).collect(),
        };
        section
            .instructions
            .iter()
            .enumerate()
            .map(|(at, instruction)| {
                let mut touched = self.touched(at, instruction, &state);
                self.go_on(at, instruction, &mut state);
                if scratch[at] > 0 {
                    touched.push((BufferId::Scratch(at), Access::Write));
                }
                touched
            })
            .collect()
    }

    /// Updates which buffers hold values, flats and chunks after an instruction.
    fn go_on(&self, at: usize, instruction: &Instruction, state: &mut Simulation) {
        match &instruction.action {
            Action::Recompute { node, from_sum } => {
                for output in &self.graph.nodes[*node].outputs[usize::from(*from_sum)..] {
                    state.current[output.index()] = BufferId::Recomputed(output.index());
                }
            }
            Action::ReloadActivation(value) => state.current[*value] = BufferId::Reloaded(*value),
            Action::Release(flat) => state.stays[*flat] += 1,
            Action::PackGrad(chunk) | Action::CastAndPackGrad(chunk) => {
                state.put(chunk, BufferId::SendChunk(at));
            }
            Action::AllToAll(chunk) => state.put(chunk, BufferId::RecvChunk(at)),
            Action::SumRanks(chunk, _) | Action::ReduceScatter(chunk, _) => {
                state.put(chunk, BufferId::ReducedChunk(at));
            }
            Action::StageShard(chunk) => state.put(chunk, BufferId::StagedShard(at)),
            Action::LoadStates(chunk) => state.tiles.push((chunk.clone(), BufferId::SubGroup(at))),
            Action::Update(chunk) => state.put(chunk, BufferId::UpdatedWeights(at)),
            _ => {}
        }
    }

    /// Buffers that a forward node and its gradient read besides their operands.
    fn beside(&self, node: &Node) -> Vec<BufferId> {
        let stream = || self.stream_of(node.inputs[0]);
        match node.op {
            Op::Rope { rotary, .. } | Op::HeadNormRope { rotary, .. } => {
                let stream = stream();
                vec![BufferId::Cosines { stream, rotary }, BufferId::Sines { stream, rotary }]
            }
            Op::Attention { .. } => vec![BufferId::Starts(stream())],
            Op::Dropout { .. } => vec![BufferId::Keys(stream())],
            _ => Vec::new(),
        }
    }

    /// The buffer an instruction reads a flat's parameters from.
    fn weights(&self, flat: usize, state: &Simulation) -> BufferId {
        if self.program.stays_gathered(flat) {
            return BufferId::Weights(flat);
        }
        BufferId::Gathered { flat, copy: state.stays[flat] }
    }

    fn touched(&self, at: usize, instruction: &Instruction, state: &Simulation) -> Vec<(BufferId, Access)> {
        use Access::{Read, Write};
        let program = self.program;
        let gradient = |chunk: &Chunk| state.gradient(chunk).unwrap_or(BufferId::CommGrad(chunk.flat));
        let on_host = |flat: usize| program.residency[flat].gradients.is_offloaded();
        let summed = |flat: usize| program.reduced_gradient(flat, 0).0;
        let value = |value: &Value| state.current[value.index()];
        match &instruction.action {
            Action::ZeroLoss => vec![(BufferId::Report, Write)],
            Action::Forward(node) => {
                let node = &self.graph.nodes[*node];
                let mut touched: Vec<_> = node.inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, state), Read)));
                if node.op.is_loss() {
                    touched.push((BufferId::Report, Write));
                } else {
                    touched.extend(node.outputs.iter().map(|output| (value(output), Write)));
                }
                touched.extend(self.beside(node).into_iter().map(|id| (id, Read)));
                touched
            }
            Action::Logits { node, .. } => {
                // It reads the last rows of x and no labels.
                let x = self.graph.nodes[*node].inputs[0];
                let mut touched = vec![(value(&x), Read), (BufferId::Starts(self.stream_of(x)), Read)];
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, state), Read)));
                touched.push((BufferId::Logits, Write));
                touched
            }
            Action::StoreKv(at) => {
                let inputs = self.graph.nodes[*at].inputs[1..].iter();
                let mut touched: Vec<_> = inputs.map(|input| (value(input), Read)).collect();
                touched.push((BufferId::CacheRanges, Read));
                touched.extend([(BufferId::CachedKeys(*at), Write), (BufferId::CachedValues(*at), Write)]);
                touched
            }
            Action::CachedAttention(at) => {
                let node = &self.graph.nodes[*at];
                let cache = [BufferId::CacheRanges, BufferId::CachedKeys(*at), BufferId::CachedValues(*at)];
                let reads = [value(&node.inputs[0])].into_iter().chain(cache);
                // Nothing reads the log-sum-exp.
                reads.map(|id| (id, Read)).chain([(value(&node.outputs[0]), Write)]).collect()
            }
            Action::Backward(node) => {
                let node = &self.backward.nodes[*node];
                let mut touched: Vec<_> = node.inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, state), Read)));
                for param in &node.accumulates_into {
                    let destination = (program.grad_buffer(state.kind, *param), Write);
                    if !touched.contains(&destination) {
                        touched.push(destination);
                    }
                }
                if node.accumulates_into.iter().any(|param| program.producers_cast(state.kind, *param)) {
                    touched.push((BufferId::Report, Write));
                }
                if let Some(tokens) = self.waiting_tokens(state.kind, node) {
                    touched.extend([(value(&tokens), Read), (BufferId::WaitingRows, Write)]);
                }
                let of = self.graph.nodes[node.of].op;
                if of.is_loss() {
                    touched.extend([(BufferId::Input, Read), (BufferId::Control, Read)]);
                    touched.push((BufferId::Report, Write));
                }
                let outputs =
                    node.outputs.iter().filter(|(output, _)| !self.backward.losses.contains(output));
                touched.extend(outputs.map(|(output, _)| (value(output), Write)));
                touched.extend(self.beside(&self.graph.nodes[node.of]).into_iter().map(|id| (id, Read)));
                touched
            }
            Action::Recompute { node, from_sum } => {
                let node = &self.graph.nodes[*node];
                let inputs = if *from_sum { &node.outputs[..1] } else { &node.inputs[..] };
                let mut touched: Vec<_> = inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, state), Read)));
                let outputs = node.outputs[usize::from(*from_sum)..].iter();
                touched.extend(outputs.map(|output| (BufferId::Recomputed(output.index()), Write)));
                touched.extend(self.beside(node).into_iter().map(|id| (id, Read)));
                touched
            }
            Action::OffloadActivation(value) => {
                vec![(BufferId::Value(*value), Read), (BufferId::Offloaded(*value), Write)]
            }
            Action::ReloadActivation(value) => {
                vec![(BufferId::Offloaded(*value), Read), (BufferId::Reloaded(*value), Write)]
            }
            Action::AllGather(flat) if program.residency[*flat].weights.is_offloaded() => {
                vec![(self.weights(*flat, state), Write)]
            }
            Action::AllGather(flat) => {
                vec![(BufferId::Weights(*flat), Read), (self.weights(*flat, state), Write)]
            }
            Action::StageShard(chunk) => {
                vec![(BufferId::Weights(chunk.flat), Read), (BufferId::StagedShard(at), Write)]
            }
            Action::UploadShard(chunk) => {
                let staged = state.find(chunk).filter(|id| matches!(id, BufferId::StagedShard(_)));
                let from = staged.unwrap_or(BufferId::Weights(chunk.flat));
                vec![(from, Read), (self.weights(chunk.flat, state), Write)]
            }
            Action::Release(_) => Vec::new(),
            Action::ZeroGrad(flat) => {
                let mut ids: Vec<BufferId> =
                    program.zeroed(state.kind, *flat).iter().map(|part| part.id).collect();
                ids.sort_unstable();
                ids.dedup();
                ids.into_iter().map(|id| (id, Write)).collect()
            }
            Action::AllGatherGrad(flat) => vec![(BufferId::Grad(*flat), Write)],
            Action::KeepGrad(flat) | Action::CastGrad(flat) => {
                let mut touched = vec![(program.comm_grad(*flat), Write), (BufferId::Report, Write)];
                if !program.uncast(state.kind, *flat).is_empty() {
                    touched.push((BufferId::Grad(*flat), Read));
                }
                touched
            }
            Action::PackGrad(chunk) => {
                vec![(BufferId::CommGrad(chunk.flat), Read), (BufferId::SendChunk(at), Write)]
            }
            Action::CastAndPackGrad(chunk) => {
                vec![
                    (BufferId::Grad(chunk.flat), Read),
                    (BufferId::SendChunk(at), Write),
                    (BufferId::Report, Write),
                ]
            }
            Action::AllToAll(chunk) => vec![(gradient(chunk), Read), (BufferId::RecvChunk(at), Write)],
            Action::SumRanks(chunk, addition) | Action::ReduceScatter(chunk, addition) => {
                let sums = match (program.gradient_storage(), on_host(chunk.flat)) {
                    (GradientStorage::FlatF32, _) => BufferId::Grad(chunk.flat),
                    (_, true) => BufferId::ReducedChunk(at),
                    (_, false) => BufferId::ReducedGrad(chunk.flat),
                };
                let mut touched = vec![(gradient(chunk), Read), (sums, Write)];
                let counts = matches!(instruction.action, Action::ReduceScatter(..))
                    && program.completes(state.kind, chunk.flat, *addition);
                touched.extend(counts.then_some((BufferId::Report, Write)));
                touched
            }
            Action::OffloadGrad(chunk, _) => {
                let from = match program.gradient_storage() {
                    GradientStorage::FlatF32 => BufferId::Grad(chunk.flat),
                    _ => gradient(chunk),
                };
                vec![(from, Read), (BufferId::ReducedGrad(chunk.flat), Write)]
            }
            Action::GradSquares(flat) => {
                // In the micro-batch the gradient is still on the device.
                let is_passing = state.kind != SectionKind::Update;
                let values = if is_passing { program.comm_grad(*flat) } else { summed(*flat) };
                vec![(values, Read), (BufferId::Report, Write)]
            }
            Action::AllGatherReports => vec![(BufferId::Report, Read), (BufferId::Reports, Write)],
            Action::Control => {
                let reports =
                    if self.program.layout.ranks > 1 { BufferId::Reports } else { BufferId::Report };
                let reads = [BufferId::Recipe, BufferId::Input, reports].map(|id| (id, Read));
                reads.into_iter().chain([(BufferId::Control, Write), (BufferId::Record, Write)]).collect()
            }
            Action::LoadStates(chunk) => {
                let living = BufferId::HostStateToken { flat: chunk.flat, first: chunk.range.start };
                let mut touched = vec![(living, Read), (BufferId::SubGroup(at), Write)];
                if on_host(chunk.flat) {
                    touched.push((summed(chunk.flat), Read));
                }
                if !program.has_master(chunk.flat) {
                    touched.push((BufferId::Weights(chunk.flat), Read));
                }
                touched
            }
            Action::StoreStates(chunk) => {
                let living = BufferId::HostStateToken { flat: chunk.flat, first: chunk.range.start };
                let mut touched = vec![(state.tile(chunk), Read), (living, Write)];
                if !program.has_master(chunk.flat) {
                    touched.push((BufferId::Weights(chunk.flat), Write));
                }
                touched
            }
            Action::Update(chunk) if program.is_streamed(chunk.flat) => {
                let flat = chunk.flat;
                let mut touched = vec![(BufferId::Control, Read), (state.tile(chunk), Write)];
                if !on_host(flat) {
                    touched.push((summed(flat), Read));
                }
                if program.has_master(flat) {
                    let here = !program.residency[flat].weights.is_offloaded();
                    touched.push((
                        if here { BufferId::Weights(flat) } else { BufferId::UpdatedWeights(at) },
                        Write,
                    ));
                }
                touched
            }
            Action::Update(chunk) => {
                let (flat, residency) = (chunk.flat, program.residency[chunk.flat]);
                let mut touched = vec![(BufferId::Control, Read), (summed(flat), Read)];
                let weights = if residency.weights == residency.updates {
                    BufferId::Weights(flat)
                } else {
                    BufferId::UpdatedWeights(at)
                };
                let moments =
                    program.optimizer.moments().iter().map(|moment| BufferId::Moment(*moment, flat));
                let master = program.has_master(flat).then_some(BufferId::Master(flat));
                touched.extend(moments.chain(master).chain([weights]).map(|id| (id, Write)));
                touched
            }
            Action::WriteBack(chunk) => {
                let updated = state.find(chunk).expect("a tile is updated before it is put back");
                vec![(updated, Read), (BufferId::Weights(chunk.flat), Write)]
            }
            Action::AllGatherWeights(Chunk { flat, .. }) | Action::BroadcastWeights { flat, .. } => {
                vec![(BufferId::Weights(*flat), Write)]
            }
        }
    }
}

/// The buffers that hold values, flats and chunks at a point of the list.
struct Simulation {
    kind: SectionKind,
    /// How often each flat was released.
    stays: Vec<usize>,
    /// Chunks in transfer and their current buffers.
    moving: Vec<(Chunk, BufferId)>,
    /// Sub-groups whose states are on the device.
    tiles: Vec<(Chunk, BufferId)>,
    /// The current buffer of each value.
    current: Vec<BufferId>,
}

impl Simulation {
    fn put(&mut self, chunk: &Chunk, id: BufferId) {
        self.moving.retain(|(other, _)| other != chunk);
        self.moving.push((chunk.clone(), id));
    }

    fn find(&self, chunk: &Chunk) -> Option<BufferId> {
        self.moving.iter().rev().find(|(other, _)| other == chunk).map(|(_, id)| *id)
    }

    /// The transfer buffer that holds a chunk of a gradient.
    fn gradient(&self, chunk: &Chunk) -> Option<BufferId> {
        self.find(chunk).filter(|id| {
            matches!(id, BufferId::SendChunk(_) | BufferId::RecvChunk(_) | BufferId::ReducedChunk(_))
        })
    }

    fn tile(&self, chunk: &Chunk) -> BufferId {
        let found = self.tiles.iter().rev().find(|(other, _)| other == chunk);
        found.expect("a tile is brought before it is updated").1
    }
}
