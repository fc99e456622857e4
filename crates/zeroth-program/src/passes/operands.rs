//! `operands`: the buffers that each instruction reads and writes ([`Operands`]). The last pass: the order is final.
//!
//! Keys: none.
//!
//! It walks every section in order and follows which buffer holds a value (recomputed or reloaded ones move), a flat's
//! parameters (every gathered copy is a buffer of its own), and a chunk in transfer.

use std::collections::HashMap;

use zeroth_base::Axis;
use zeroth_graph::{Backward, Graph, Node, Op, ParamId, Value};

use crate::streams::{is_cross, stream_of};
use crate::{Action, BufferId, Chunk, GradientStorage, Instruction, Operands, Program, Section, SectionKind};

/// Sets the operands of every instruction.
pub(super) fn operands(mut program: Program, graph: &Graph, backward: &Backward) -> Program {
    let of_section = |section: &Section| -> Vec<Operands> {
        let mut walk = Walk::new(&program, graph, backward, section.kind);
        section.instructions.iter().enumerate().map(|(at, instruction)| walk.next(at, instruction)).collect()
    };
    let found: Vec<Vec<Operands>> = program.sections.iter().map(of_section).collect();
    for (section, found) in program.sections.iter_mut().zip(found) {
        for (instruction, operands) in section.instructions.iter_mut().zip(found) {
            instruction.operands = operands;
        }
    }
    program
}

/// A walk over a section: the buffers that hold values, flats and chunks at a point of its list.
struct Walk<'a> {
    program: &'a Program,
    graph: &'a Graph,
    backward: &'a Backward,
    kind: SectionKind,
    /// How often each flat was released.
    releases: Vec<usize>,
    /// Chunks in transfer.
    in_transfer: HashMap<Chunk, BufferId>,
    /// Sub-groups whose states are on the device.
    sub_groups: HashMap<Chunk, BufferId>,
    /// Unpacked parameters.
    unpacked: HashMap<ParamId, BufferId>,
    /// By value.
    values: Vec<BufferId>,
}

fn lists<const R: usize, const W: usize>(reads: [BufferId; R], writes: [BufferId; W]) -> Operands {
    Operands { reads: reads.to_vec(), writes: writes.to_vec() }
}

impl<'a> Walk<'a> {
    fn new(program: &'a Program, graph: &'a Graph, backward: &'a Backward, kind: SectionKind) -> Self {
        Self {
            program,
            graph,
            backward,
            kind,
            releases: vec![0; program.layout.flats.len()],
            in_transfer: HashMap::new(),
            sub_groups: HashMap::new(),
            unpacked: HashMap::new(),
            values: (0..backward.values.len())
                .map(|value| BufferId::Value(program.shared_buffers.holder(kind, value)))
                .collect(),
        }
    }

    /// The operands of the next instruction.
    fn next(&mut self, at: usize, instruction: &Instruction) -> Operands {
        let operands = self.operands(at, instruction);
        match &instruction.action {
            Action::Recompute { node, from_sum } => {
                for output in &self.graph.nodes[*node].outputs[usize::from(*from_sum)..] {
                    self.values[output.index()] = BufferId::Recomputed(self.holder(output.index()));
                }
            }
            Action::ReloadActivation(value) => {
                self.values[*value] = BufferId::Reloaded(self.holder(*value));
            }
            Action::Unpack(param) => _ = self.unpacked.insert(*param, BufferId::Unpacked(at)),
            Action::Release(flat) => self.releases[*flat] += 1,
            Action::PackGrad(chunk) | Action::CastAndPackGrad(chunk) => {
                self.in_transfer.insert(chunk.clone(), BufferId::SendChunk(at));
            }
            Action::AllToAll(chunk, _) => {
                self.in_transfer.insert(chunk.clone(), BufferId::RecvChunk(at));
            }
            Action::SumRanks(chunk, _, axis) | Action::ReduceScatter(chunk, _, axis) => {
                let sums = if self.program.sums_partially(*axis) {
                    self.partial_sums(at, chunk)
                } else {
                    BufferId::ReducedChunk(at)
                };
                self.in_transfer.insert(chunk.clone(), sums);
            }
            Action::StageShard(chunk) => {
                self.in_transfer.insert(chunk.clone(), BufferId::StagedShard(at));
            }
            Action::Update(chunk) => {
                self.in_transfer.insert(chunk.clone(), BufferId::UpdatedWeights(at));
            }
            Action::LoadStates(chunk) => {
                self.sub_groups.insert(chunk.clone(), BufferId::SubGroup(at));
            }
            _ => {}
        }
        operands
    }

    fn values(&self, values: &[Value]) -> impl Iterator<Item = BufferId> {
        values.iter().map(|value| self.values[value.index()])
    }

    /// The value whose buffer holds a value.
    fn holder(&self, value: usize) -> usize {
        self.program.shared_buffers.holder(self.kind, value)
    }

    /// The buffers of a forward node's inputs, without one that it updates in place.
    fn inputs<'n>(&'n self, node: &'n Node) -> impl Iterator<Item = BufferId> + 'n {
        let updated = match node.op {
            Op::LinearAdd { .. } | Op::GroupedLinearAdd { .. } => Some(self.holder(node.outputs[0].index())),
            _ => None,
        };
        let is_read = move |value: &&Value| updated != Some(self.holder(value.index()));
        node.inputs.iter().filter(is_read).map(|value| self.values[value.index()])
    }

    /// The buffer that holds a flat's parameters.
    fn weights(&self, flat: usize) -> BufferId {
        if self.program.stays_gathered(flat) {
            return BufferId::Weights(flat);
        }
        BufferId::Gathered { flat, copy: self.releases[flat] }
    }

    /// The buffers of the parameters that an instruction reads: flats, and parameters unpacked right before it.
    fn params(&self, instruction: &Instruction, params: &[ParamId]) -> impl Iterator<Item = BufferId> {
        let unpacked = params.iter().filter_map(|param| self.unpacked.get(param).copied());
        instruction.reads.iter().map(|flat| self.weights(*flat)).chain(unpacked)
    }

    /// Buffers of a stream that a forward node and its gradient read besides values and parameters.
    fn of_stream(&self, node: &Node) -> Vec<BufferId> {
        let stream = || stream_of(self.graph, node.inputs[0]);
        match node.op {
            Op::Rope { rotary, .. } | Op::HeadNormRope { rotary, .. } => {
                let stream = stream();
                vec![BufferId::Cosines { stream, rotary }, BufferId::Sines { stream, rotary }]
            }
            Op::Attention(spec) => {
                let [q, k] = [0, 1].map(|place| stream_of(self.graph, node.inputs[place]));
                let of_keys = (k != q).then_some(BufferId::Starts(k));
                // Only training drops weights.
                let drops = spec.dropout.is_some() && self.kind.is_micro_batch();
                let keys = drops.then_some(BufferId::Keys(q));
                [BufferId::Starts(q)].into_iter().chain(of_keys).chain(keys).collect()
            }
            Op::Dropout { .. } => vec![BufferId::Keys(stream())],
            // The tokens that are decoded have no starts: every row is routed.
            Op::Route { .. } if self.kind != SectionKind::Decode => vec![BufferId::Starts(stream())],
            Op::BalanceLoss { .. } => vec![BufferId::Starts(stream_of(self.graph, node.inputs[1]))],
            _ => Vec::new(),
        }
    }

    /// The buffer that holds a chunk of a gradient in the communication dtype.
    fn gradient(&self, chunk: &Chunk) -> BufferId {
        match self.in_transfer.get(chunk) {
            Some(
                id @ (BufferId::SendChunk(_)
                | BufferId::RecvChunk(_)
                | BufferId::PartialSums(_)
                | BufferId::PartialGrad(_)
                | BufferId::ReducedChunk(_)),
            ) => *id,
            _ => BufferId::CommGrad(chunk.flat),
        }
    }

    /// The buffer of a group's sums of a chunk, which an instruction computes or adds to.
    fn partial_sums(&self, at: usize, chunk: &Chunk) -> BufferId {
        if self.program.accumulates_partial_sums() {
            BufferId::PartialGrad(chunk.flat)
        } else {
            BufferId::PartialSums(at)
        }
    }

    /// The buffer of a sub-group's states on the device.
    fn sub_group(&self, chunk: &Chunk) -> BufferId {
        *self.sub_groups.get(chunk).expect("states are loaded before they are updated and stored")
    }

    fn operands(&self, at: usize, instruction: &Instruction) -> Operands {
        let program = self.program;
        match &instruction.action {
            Action::Forward(node) => self.of_forward(*node, instruction),
            Action::EvaluateLoss(node) => {
                let node = self.graph.nodes[*node].evaluated();
                let reads = self.values(&node.inputs).chain(self.params(instruction, &node.params));
                Operands { reads: reads.collect(), writes: vec![BufferId::Report] }
            }
            Action::Recompute { node, from_sum } => self.of_recompute(*node, *from_sum, instruction),
            Action::Backward(node) => self.of_gradient(*node, instruction),
            Action::Logits { node, .. } => {
                // It reads the last rows of x and no labels.
                let (x, params) = (&self.graph.nodes[*node].inputs[..1], &self.graph.nodes[*node].params);
                let starts = BufferId::Starts(stream_of(self.graph, x[0]));
                let reads = self.values(x).chain([starts]).chain(self.params(instruction, params));
                Operands { reads: reads.collect(), writes: vec![BufferId::Logits] }
            }
            Action::TopLogProbs { node, .. } => {
                let (x, params) = (&self.graph.nodes[*node].inputs[..1], &self.graph.nodes[*node].params);
                let reads = self.values(x).chain(self.params(instruction, params));
                Operands { reads: reads.collect(), writes: vec![BufferId::TopIds, BufferId::TopLogProbs] }
            }
            Action::StoreKv(node) => {
                let inputs = self.values(&self.graph.nodes[*node].inputs[1..3]);
                Operands {
                    reads: inputs.chain([BufferId::CacheRanges]).collect(),
                    writes: vec![BufferId::CachedKeys(*node), BufferId::CachedValues(*node)],
                }
            }
            Action::CachedAttention(node) => self.of_cached_attention(*node),
            Action::OffloadActivation(value) => {
                lists([self.values[*value]], [BufferId::Offloaded(self.holder(*value))])
            }
            Action::ReloadActivation(value) => {
                let holder = self.holder(*value);
                lists([BufferId::Offloaded(holder)], [BufferId::Reloaded(holder)])
            }
            // This rank's shard was uploaded into its part of the gathered flat.
            // The rail has gathered this rank's group shard there.
            Action::AllGather(flat, axis)
                if *axis == Axis::Group
                    && program.layout.world.has_two_levels()
                    && !program.is_sharded_in_groups(*flat) =>
            {
                lists([], [self.weights(*flat)])
            }
            Action::AllGather(flat, _) if program.residency[*flat].weights.is_offloaded() => {
                lists([], [self.weights(*flat)])
            }
            Action::AllGather(flat, _) => lists([BufferId::Weights(*flat)], [self.weights(*flat)]),
            Action::Unpack(param) => {
                let (flat, _) = program.layout.place(*param);
                lists([self.weights(flat)], [BufferId::Unpacked(at)])
            }
            Action::Release(_) => Operands::default(),
            Action::StageShard(chunk) => lists([BufferId::Weights(chunk.flat)], [BufferId::StagedShard(at)]),
            Action::UploadShard(chunk) => {
                let staged = self.in_transfer.get(chunk).copied();
                let staged = staged.filter(|id| matches!(id, BufferId::StagedShard(_)));
                let from = staged.unwrap_or(BufferId::Weights(chunk.flat));
                lists([from], [self.weights(chunk.flat)])
            }
            Action::ZeroLoss => lists([], [BufferId::Report]),
            Action::ZeroGrad(flat) => {
                let zeroed = program.zeroed(self.kind, *flat);
                let mut writes: Vec<BufferId> = zeroed.iter().map(|part| part.id).collect();
                writes.sort_unstable();
                writes.dedup();
                Operands { reads: Vec::new(), writes }
            }
            Action::AllGatherGrad(flat, _) => lists([], [BufferId::Grad(*flat)]),
            Action::KeepGrad(flat) | Action::CastGrad(flat) => {
                let has_f32 = !program.uncast(self.kind, *flat).is_empty();
                Operands {
                    reads: has_f32.then_some(BufferId::Grad(*flat)).into_iter().collect(),
                    writes: vec![program.comm_grad(*flat), BufferId::Report],
                }
            }
            Action::PackGrad(chunk) => lists([BufferId::CommGrad(chunk.flat)], [BufferId::SendChunk(at)]),
            Action::CastAndPackGrad(chunk) => {
                lists([BufferId::Grad(chunk.flat)], [BufferId::SendChunk(at), BufferId::Report])
            }
            Action::AllToAll(chunk, _) => lists([self.gradient(chunk)], [BufferId::RecvChunk(at)]),
            Action::SumRanks(chunk, _, axis) | Action::ReduceScatter(chunk, _, axis)
                if program.sums_partially(*axis) =>
            {
                lists([self.gradient(chunk)], [self.partial_sums(at, chunk)])
            }
            Action::SumRanks(chunk, ..) => self.of_reduction(at, chunk, false),
            // It counts: a reduce-scatter that completes a gradient computes its squared norm, too.
            Action::ReduceScatter(chunk, addition, _) => {
                self.of_reduction(at, chunk, program.completes(self.kind, chunk.flat, *addition))
            }
            Action::OffloadGrad(chunk, _) => {
                let from = match program.gradient_storage() {
                    GradientStorage::FlatF32 => BufferId::Grad(chunk.flat),
                    _ => self.gradient(chunk),
                };
                lists([from], [BufferId::ReducedGrad(chunk.flat)])
            }
            Action::GradSquares(flat) => {
                // In the micro-batch the gradient is still on the device.
                let is_update = self.kind == SectionKind::Update;
                let values =
                    if is_update { program.reduced_gradient(*flat, 0).0 } else { program.comm_grad(*flat) };
                lists([values], [BufferId::Report])
            }
            // The group has gathered its own ones there.
            Action::AllGatherReports(Axis::Rail) if program.layout.world.has_two_levels() => {
                lists([], [BufferId::Reports])
            }
            Action::AllGatherReports(_) => lists([BufferId::Report], [BufferId::Reports]),
            Action::Control => {
                let reports = if program.layout.ranks() > 1 { BufferId::Reports } else { BufferId::Report };
                lists([BufferId::Recipe, BufferId::Input, reports], [BufferId::Control, BufferId::Record])
            }
            Action::LoadStates(chunk) => self.of_load(at, chunk),
            Action::StoreStates(chunk) => self.of_store(chunk),
            Action::Update(chunk) => self.of_update(at, chunk),
            Action::WriteBack(chunk) => {
                let updated = self.in_transfer.get(chunk).copied();
                let updated = updated.expect("a sub-group is updated before it is written back");
                lists([updated], [BufferId::Weights(chunk.flat)])
            }
            Action::AllGatherWeights(Chunk { flat, .. }, _) | Action::BroadcastWeights { flat, .. } => {
                lists([], [BufferId::Weights(*flat)])
            }
        }
    }

    fn of_forward(&self, at_node: usize, instruction: &Instruction) -> Operands {
        let node = &self.graph.nodes[at_node];
        let reads = self.inputs(node).chain(self.params(instruction, &node.params));
        let reads = reads.chain(self.of_stream(node)).collect();
        let outputs = self.values(&node.outputs);
        let mut writes: Vec<BufferId> =
            if node.op.is_loss() { vec![BufferId::Report] } else { outputs.collect() };
        // A training step reports the load of its routers.
        let is_router = self.program.routers.iter().any(|router| router.node == at_node);
        if is_router && self.kind.is_micro_batch() {
            writes.push(BufferId::Report);
        }
        Operands { reads, writes }
    }

    fn of_recompute(&self, node: usize, from_sum: bool, instruction: &Instruction) -> Operands {
        let node = &self.graph.nodes[node];
        let inputs: Vec<BufferId> =
            if from_sum { self.values(&node.outputs[..1]).collect() } else { self.inputs(node).collect() };
        let reads = inputs.into_iter().chain(self.params(instruction, &node.params));
        let outputs = node.outputs[usize::from(from_sum)..].iter();
        Operands {
            reads: reads.chain(self.of_stream(node)).collect(),
            writes: outputs.map(|output| BufferId::Recomputed(self.holder(output.index()))).collect(),
        }
    }

    fn of_cached_attention(&self, at: usize) -> Operands {
        let node = &self.graph.nodes[at];
        let ranges = if is_cross(self.graph, node) { BufferId::SourceRanges } else { BufferId::CacheRanges };
        let cache = [ranges, BufferId::CachedKeys(at), BufferId::CachedValues(at)];
        // q and the biases.
        let values = self.values(&node.inputs[..1]).chain(self.values(&node.inputs[3..]));
        Operands {
            reads: values.chain(cache).collect(),
            // Nothing reads the log-sum-exp.
            writes: self.values(&node.outputs[..1]).collect(),
        }
    }

    fn of_reduction(&self, at: usize, chunk: &Chunk, counts: bool) -> Operands {
        let on_host = self.program.residency[chunk.flat].gradients.is_offloaded();
        let sums = match (self.program.gradient_storage(), on_host) {
            (GradientStorage::FlatF32, _) => BufferId::Grad(chunk.flat),
            (_, true) => BufferId::ReducedChunk(at),
            (_, false) => BufferId::ReducedGrad(chunk.flat),
        };
        let report = counts.then_some(BufferId::Report);
        Operands { reads: vec![self.gradient(chunk)], writes: [sums].into_iter().chain(report).collect() }
    }

    fn of_gradient(&self, node: usize, instruction: &Instruction) -> Operands {
        let (program, node) = (self.program, &self.backward.nodes[node]);
        let of = &self.graph.nodes[node.of];
        let params = self.params(instruction, &node.params);
        let mut reads: Vec<BufferId> = self.values(&node.inputs).chain(params).collect();
        let mut writes: Vec<BufferId> = Vec::new();
        for param in &node.accumulates_into {
            let destination = program.grad_buffer(self.kind, *param);
            if !writes.contains(&destination) {
                writes.push(destination);
            }
        }
        if let Some(tokens) = program.waiting_tokens(self.backward, self.kind, node) {
            reads.extend(self.values(&[tokens]));
            writes.push(BufferId::WaitingRows);
        }
        if of.op.is_loss() {
            reads.extend([BufferId::Input, BufferId::Control]);
        }
        // The loss, and flags of gradients that are not finite.
        let casts = |param: &ParamId| program.producers_cast(self.kind, *param);
        if of.op.is_loss() || node.accumulates_into.iter().any(casts) {
            writes.push(BufferId::Report);
        }
        let outputs = node.outputs.iter().map(|(output, _)| *output);
        let outputs: Vec<Value> = outputs.filter(|output| !self.backward.losses.contains(output)).collect();
        writes.extend(self.values(&outputs));
        reads.extend(self.of_stream(of));
        Operands { reads, writes }
    }

    fn of_load(&self, at: usize, chunk: &Chunk) -> Operands {
        let (program, flat) = (self.program, chunk.flat);
        let states = BufferId::HostStateToken { flat, first: chunk.range.start };
        let is_offloaded = program.residency[flat].gradients.is_offloaded();
        let gradient = is_offloaded.then(|| program.reduced_gradient(flat, 0).0);
        let weights = (!program.has_master(flat)).then_some(BufferId::Weights(flat));
        Operands {
            reads: [states].into_iter().chain(gradient).chain(weights).collect(),
            writes: vec![BufferId::SubGroup(at)],
        }
    }

    fn of_store(&self, chunk: &Chunk) -> Operands {
        let states = BufferId::HostStateToken { flat: chunk.flat, first: chunk.range.start };
        let weights = (!self.program.has_master(chunk.flat)).then_some(BufferId::Weights(chunk.flat));
        Operands { reads: vec![self.sub_group(chunk)], writes: [states].into_iter().chain(weights).collect() }
    }

    fn of_update(&self, at: usize, chunk: &Chunk) -> Operands {
        let (program, flat) = (self.program, chunk.flat);
        let (residency, gradient) = (program.residency[flat], program.reduced_gradient(flat, 0).0);
        let updated = if residency.weights == residency.updates {
            BufferId::Weights(flat)
        } else {
            BufferId::UpdatedWeights(at)
        };
        if program.is_streamed(flat) {
            // A gradient in host memory was loaded with the states; without master weights, the parameters are states.
            let gradient = (!residency.gradients.is_offloaded()).then_some(gradient);
            let weights = program.has_master(flat).then_some(updated);
            return Operands {
                reads: [BufferId::Control].into_iter().chain(gradient).collect(),
                writes: [self.sub_group(chunk)].into_iter().chain(weights).collect(),
            };
        }
        let moments = program.optimizer.moments().iter().map(|moment| BufferId::Moment(*moment, flat));
        let master = program.has_master(flat).then_some(BufferId::Master(flat));
        Operands {
            reads: vec![BufferId::Control, gradient],
            writes: moments.chain(master).chain([updated]).collect(),
        }
    }
}
