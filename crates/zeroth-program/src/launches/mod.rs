//! Lowering of instructions to kernel launches over arena spans, and to collectives.
//!
//! Kernel sizes follow from the model's shapes, spans from the placement of the instruction's operands. Only the rows of the streams
//! differ between micro-batches, so a section is lowered once per size; a value's rows follow from its stream's.

mod attention;
mod distill;
mod experts;
mod flats;
mod ops;
mod sub_groups;

use std::mem::offset_of;

use zeroth_base::{Axis, DType};
use zeroth_graph::{Backward, GradNode, Graph, Kind, ParamId, Value};
use zeroth_kernel::{Kernel, Launch, Span, StepInput, Target};

use super::grad_destinations::GradSlice;
use super::{Action, BufferId, Operands, Program, Section, Storage, StreamSizes};
use crate::memory::buffer::ALIGNMENT;
use crate::memory::buffer_analysis::BufferAnalysis;

/// The work of an instruction on one rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Nothing: it only ends a lifetime.
    Nothing,
    /// Kernels, in order.
    Launches(Vec<Launch>),
    /// A collective along an axis.
    Collective(Axis, Collective),
}

/// A collective over arena spans. Ranks are those along its axis, by their numbers there. Counts are bytes, one entry per
/// rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Collective {
    /// Every rank's `send` arrives in every rank's `recv`, in rank order.
    AllGather {
        /// This rank's part.
        send: Span,
        /// All parts.
        recv: Span,
        /// Bytes of each rank's part.
        counts: Vec<usize>,
    },
    /// An all-gather whose parts are already in the result.
    InPlace {
        /// The result.
        buffer: Span,
        /// The first byte of each rank's part.
        starts: Vec<usize>,
        /// Bytes of each rank's part.
        counts: Vec<usize>,
    },
    /// One rank's bytes arrive at all ranks.
    Broadcast {
        /// The rank that sends.
        root: usize,
        /// The bytes.
        buffer: Span,
    },
    /// GradSlice `r` of every rank's `send` arrives at rank `r`.
    AllToAll {
        /// Parts for all ranks.
        send: Span,
        /// Parts of all ranks.
        recv: Span,
        /// Bytes of each part.
        counts: Vec<usize>,
    },
    /// A reduce-scatter: the sum over ranks of this rank's part.
    Reduce {
        /// All parts of this rank.
        send: Span,
        /// The first element of each rank's part.
        starts: Vec<usize>,
        /// Bytes of each rank's part.
        counts: Vec<usize>,
        /// The type of the parts.
        from_type: DType,
        /// The sum.
        to: Span,
        /// Its type.
        to_type: DType,
        /// Whether the sum is added to what `to` holds.
        add: bool,
        /// Receives the squares of the sums where these are the gradient's last.
        squares: Option<Span>,
    },
}

/// What lowering depends on besides the program.
#[derive(Clone, Copy)]
pub struct Binding<'a> {
    /// The rank.
    pub rank: u64,
    /// The run's seed, for dropout.
    pub seed: u64,
    /// Whether weight decay applies to a parameter.
    pub decayed: &'a dyn Fn(ParamId) -> bool,
}

/// A buffer that is large enough for everything. Sizes do not depend on placement.
const SOMEWHERE: Span = Span::device(0, u64::MAX / 4);

/// Lowers the instructions of a program.
pub struct Lowering<'a> {
    source: BufferAnalysis<'a>,
}

/// An instruction being lowered, with everything its launches follow from.
struct At<'a> {
    source: BufferAnalysis<'a>,
    section: &'a Section,
    /// Where buffers are; `None` where only sizes are asked for.
    span: Option<&'a dyn Fn(BufferId) -> Span>,
    binding: Binding<'a>,
    /// Rows of every stream.
    rows: &'a [u64],
    /// Scratch bytes that lowering reserves at the start, before those of the kernels.
    reserved: std::cell::Cell<u64>,
    index: usize,
}

impl<'a> Lowering<'a> {
    /// Creates a lowering of a program for a target.
    pub fn new(
        program: &'a Program,
        graph: &'a Graph,
        backward: &'a Backward,
        target: &'a dyn Target,
    ) -> Self {
        Self { source: BufferAnalysis { program, graph, backward, target } }
    }

    /// Scratch bytes of every instruction of a section: the maximum over all row sizes.
    pub fn scratch(&self, section: &Section, row_sizes: &StreamSizes) -> Vec<u64> {
        let count = section.instructions.len();
        let binding = Binding { rank: 0, seed: 0, decayed: &|_| true };
        let of = |index: usize| {
            let count = match &section.instructions[index].action {
                // A copy for every rank: copies need no scratch.
                Action::PackGrad(_) | Action::CastAndPackGrad(_) => 0,
                action if action.flat().is_some() => 1,
                _ => row_sizes.len(),
            };
            let sizes = row_sizes.iter().take(count).map(|rows| {
                let at = self.at(section, index, None, binding, rows);
                let kernels = at.kernels();
                let (target, dtype) = (self.source.target, self.source.program.types.compute);
                let most = kernels.iter().map(|kernel| target.scratch_bytes(kernel, dtype));
                at.reserved.get() + most.max().unwrap_or(0)
            });
            sizes.max().unwrap_or(0)
        };
        (0..count).map(of).collect()
    }

    /// Lowers a section for one rank and the rows of every stream.
    pub fn lower(
        &self,
        section: &Section,
        span: &dyn Fn(BufferId) -> Span,
        scratch: &dyn Fn(usize) -> Option<Span>,
        binding: Binding<'_>,
        rows: &[u64],
    ) -> Vec<Work> {
        let work = |index: usize| {
            let at = self.at(section, index, Some(span), binding, rows);
            // On one rank there are no collectives: its parameters are uploaded, not gathered.
            let alone = self.source.program.layout.ranks() == 1;
            let axis = section.instructions[index].action.collective_axis();
            if let Some(axis) = axis.filter(|_| !alone) {
                return Work::Collective(axis, at.collective());
            }
            let kernels = at.kernels();
            if kernels.is_empty() {
                return Work::Nothing;
            }
            let all = scratch(index).unwrap_or(Span::device(0, 0));
            let rest = all.part(at.reserved.get(), all.bytes - at.reserved.get(), 1);
            let dtype = self.source.program.types.compute;
            Work::Launches(
                kernels.into_iter().map(|kernel| Launch { kernel, dtype, scratch: rest }).collect(),
            )
        };
        (0..section.instructions.len()).map(work).collect()
    }

    fn at<'b>(
        &'b self,
        section: &'b Section,
        index: usize,
        span: Option<&'b dyn Fn(BufferId) -> Span>,
        binding: Binding<'b>,
        rows: &'b [u64],
    ) -> At<'b> {
        let reserved = std::cell::Cell::new(0);
        At { source: self.source, section, span, binding, rows, reserved, index }
    }
}

impl At<'_> {
    fn program(&self) -> &Program {
        self.source.program
    }

    /// How a flat's parameters are kept and gathered.
    fn storage(&self, flat: usize) -> Storage {
        self.program().layout.flats[flat].storage
    }

    fn operands(&self) -> &Operands {
        &self.section.instructions[self.index].operands
    }

    /// The buffer that this instruction reads first.
    fn source_buffer(&self) -> BufferId {
        self.operands().reads[0]
    }

    /// The buffer that it writes first.
    fn destination(&self) -> BufferId {
        self.operands().writes[0]
    }

    /// Whether a buffer is an operand, or memory that has none: scratch, and host states behind their token.
    fn may_access(&self, id: BufferId) -> bool {
        let stands_for = |operand: BufferId| match (operand, id) {
            (BufferId::HostStateToken { flat, .. }, BufferId::Master(of) | BufferId::Moment(_, of)) => {
                flat == of
            }
            _ => operand == id,
        };
        id == BufferId::Scratch(self.index)
            || self.operands().find_map(|operand| stands_for(operand).then_some(())).is_some()
    }

    /// The span of `count` elements of a buffer from `first` on.
    fn part(&self, id: BufferId, first: u64, count: u64, size: u64) -> Span {
        let Some(span) = self.span else { return SOMEWHERE.part(first, count, size) };
        let action = &self.section.instructions[self.index].action;
        debug_assert!(self.may_access(id), "{action:?} accesses {id:?}, which is not an operand");
        span(id).part(first, count, size)
    }

    /// The span of `count` elements of a flat from `first` on, in a buffer that holds them as they are kept. Both begin at a
    /// block, except for parameters that are not quantised.
    fn kept(&self, id: BufferId, flat: usize, first: u64, count: u64) -> Span {
        let storage = self.storage(flat);
        self.part(id, storage.bytes(first), storage.bytes(count), 1)
    }

    /// The span of a value, limited to the rows of this micro-batch.
    fn value(&self, value: Value) -> Span {
        let (rows, row_bytes) = (self.rows(value), self.source.row_bytes(value.index()));
        if self.span.is_none() {
            return SOMEWHERE.part(0, rows, row_bytes);
        }
        // The forward value, or its recomputed or reloaded copy.
        let holder = self.program().shared_buffers.holder(self.section.kind, value.index());
        let holds = |id: BufferId| (id.value() == Some(holder)).then_some(id);
        let id = self.operands().find_map(holds).expect("the values of an op are operands");
        self.part(id, 0, rows, row_bytes)
    }

    /// The rows of a value in this micro-batch.
    fn rows(&self, value: Value) -> u64 {
        self.source.backward.values[value.index()].rows.count(self.rows)
    }

    fn width(&self, value: Value) -> usize {
        self.source.backward.values[value.index()].width as usize
    }

    fn shape<const N: usize>(&self, param: ParamId) -> [usize; N] {
        let shape = &self.source.graph.param(param).spec.shape;
        std::array::from_fn(|place| shape[place] as usize)
    }

    /// The span this instruction reads a parameter from.
    fn param(&self, param: ParamId) -> Span {
        let (flat, slot) = self.program().layout.place(param);
        let holds = |id: BufferId| match id {
            BufferId::Weights(of) | BufferId::Gathered { flat: of, .. } if of == flat => {
                Some(self.kept(id, flat, slot.start, slot.elements))
            }
            BufferId::Unpacked(at) if self.section.instructions[at].action == Action::Unpack(param) => {
                Some(self.part(id, 0, slot.elements, self.program().types.compute.bytes()))
            }
            _ => None,
        };
        self.operands().find_map(holds).expect("the parameters of an op are operands")
    }

    /// The span of a gradient slice.
    fn of_gradients(&self, part: &GradSlice) -> Span {
        let GradSlice { id, dtype, elements } = part;
        self.part(*id, elements.start, elements.end - elements.start, dtype.bytes())
    }

    /// The span of a parameter's gradient.
    fn gradient(&self, param: ParamId) -> Span {
        self.of_gradients(&self.program().grad_destination(self.section.kind, param))
    }

    /// Whether this node accumulates into a parameter's gradient instead of overwriting it.
    fn adds(&self, node: &GradNode, param: ParamId) -> bool {
        let first = self.source.backward.first_producers[param.index()];
        let is_first =
            first.is_some_and(|first| std::ptr::eq(&raw const self.source.backward.nodes[first], node));
        !(is_first && self.program().begins_gradients(self.section.kind))
    }

    /// Scratch between kernels of this instruction.
    fn reserve(&self, bytes: u64) -> Span {
        let at = self.reserved.get();
        self.reserved.set(at + bytes.next_multiple_of(ALIGNMENT));
        self.part(BufferId::Scratch(self.index), at, bytes, 1)
    }

    /// The span of the gradient of a parameter that a node reads; `None` where the parameter is frozen.
    fn grad_destination(&self, node: &GradNode, param: ParamId) -> Option<Span> {
        node.accumulates_into.contains(&param).then(|| self.gradient(param))
    }

    /// The span of a part of the loss in this rank's report.
    fn loss(&self, part: usize) -> Span {
        self.part(BufferId::Report, self.program().report().loss(part) as u64, 8, 1)
    }

    /// The span of the factor of a part of the loss in the step's input.
    fn loss_weight(&self, part: usize) -> Span {
        self.part(BufferId::Input, (offset_of!(StepInput, loss_weights) + 8 * part) as u64, 8, 1)
    }

    fn whole(&self, id: BufferId, bytes: u64) -> Span {
        self.part(id, 0, bytes, 1)
    }

    /// A copy of a value.
    fn moved(&self, value: usize) -> Kernel {
        let dtype = match self.source.backward.values[value].kind {
            Kind::Activation => self.program().types.compute,
            Kind::Statistic | Kind::Index => DType::F32,
        };
        let rows = self.source.backward.values[value].rows.count(self.rows);
        let row_bytes = self.source.row_bytes(value);
        Kernel::Convert {
            from: self.part(self.source_buffer(), 0, rows, row_bytes),
            from_type: dtype,
            to: self.part(self.destination(), 0, rows, row_bytes),
            to_type: dtype,
            found_inf: None,
        }
    }

    fn kernels(&self) -> Vec<Kernel> {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::ZeroLoss => {
                let bytes = program.report().bytes() as u64;
                vec![Kernel::Zero { to: self.whole(BufferId::Report, bytes) }]
            }
            Action::Forward(node) => {
                let kernels = self.forward(&self.source.graph.nodes[*node]);
                kernels.into_iter().chain(self.count_tokens(*node)).collect()
            }
            Action::Logits { node, sequences } => {
                vec![self.logits(&self.source.graph.nodes[*node], *sequences)]
            }
            Action::TopLogProbs { node, k } => {
                vec![self.top_log_probs(&self.source.graph.nodes[*node], *k)]
            }
            Action::EvaluateLoss(node) => self.forward(&self.source.graph.nodes[*node].evaluated()),
            Action::StoreKv(node) => self.store_kv(*node).to_vec(),
            Action::CachedAttention(node) => vec![self.cached_attention(*node)],
            Action::Backward(node) => self.backward(&self.source.backward.nodes[*node]),
            Action::Recompute { node, from_sum } => {
                let node = &self.source.graph.nodes[*node];
                if *from_sum { vec![self.norm_of_sum(node)] } else { self.forward(node) }
            }
            Action::Unpack(param) => vec![self.unpack(*param)],
            Action::OffloadActivation(value) | Action::ReloadActivation(value) => vec![self.moved(*value)],
            Action::ZeroGrad(flat) => {
                let parts = program.zeroed(self.section.kind, *flat);
                parts.iter().map(|part| Kernel::Zero { to: self.of_gradients(part) }).collect()
            }
            Action::KeepGrad(flat) | Action::CastGrad(flat) => self.cast_rest(*flat),
            Action::PackGrad(chunk) => self.pack(chunk),
            Action::CastAndPackGrad(chunk) => self.round(chunk),
            Action::SumRanks(chunk, addition, axis) => self.add(chunk, *addition, *axis),
            Action::GradSquares(flat) => self.squares(*flat),
            Action::Control => vec![self.control()],
            Action::OffloadGrad(chunk, addition) => self.offload_gradient(chunk, *addition),
            Action::StageShard(chunk) => self.stage(chunk),
            Action::UploadShard(chunk) => self.upload_shard(chunk),
            Action::LoadStates(chunk) => self.load(chunk),
            Action::Update(chunk) => self.update(chunk),
            Action::StoreStates(chunk) => self.store(chunk),
            Action::WriteBack(chunk) => self.write_back(chunk),
            Action::AllGather(..)
            | Action::Release(_)
            | Action::AllToAll(..)
            | Action::ReduceScatter(..)
            | Action::AllGatherGrad(..)
            | Action::AllGatherReports(_)
            | Action::AllGatherWeights(..)
            | Action::BroadcastWeights { .. } => Vec::new(),
        }
    }
}
