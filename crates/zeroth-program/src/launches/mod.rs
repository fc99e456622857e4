//! From instructions to what a device does: kernels over places in the arena, and collectives.
//!
//! Everything a kernel needs is known here: its sizes from the model's shapes, its operands from the places of their
//! buffers. Only the number of rows differs from one micro-batch to the next, so a section is lowered once for each size.

mod flats;
mod ops;
mod tiles;

use crate::Target;
use zeroth_base::DType;
use zeroth_graph::{Backward, GradNode, Graph, Kind, ParamId, Value};
use zeroth_kernel::{Access, Kernel, Launch, Report, Span};

use super::buffers::{Source, report_bytes};
use super::landings::Part;
use super::place::ALIGNMENT;
use super::{Action, Content, Program, Section};

/// What an instruction makes a device or the ranks do.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Nothing: it only ends a life.
    Nothing,
    /// Kernels, in order.
    Launches(Vec<Launch>),
    /// A meeting of all ranks.
    Collective(Collective),
}

/// A collective over places in the arena. Counts are bytes, one entry a rank.
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
    /// An all-gather whose parts lie in the result already.
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
    /// Part `r` of every rank's `send` arrives at rank `r`.
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

/// What a lowered program depends on beside the program itself.
#[derive(Clone, Copy)]
pub struct Binding<'a> {
    /// The rank that will run it.
    pub rank: u64,
    /// The run's seed, for dropout.
    pub seed: u64,
    /// Whether a parameter is decayed.
    pub decayed: &'a dyn Fn(ParamId) -> bool,
}

/// Lowers the instructions of a program.
pub struct Lowering<'a> {
    source: Source<'a>,
}

/// One instruction with all that its operands follow from.
struct At<'a> {
    source: Source<'a>,
    section: &'a Section,
    touched: &'a [(Content, Access)],
    span: &'a dyn Fn(Content) -> Span,
    binding: Binding<'a>,
    rows: u64,
    /// Bytes at the beginning of its scratch that take results nobody asked for.
    sinks: std::cell::Cell<u64>,
    index: usize,
}

impl<'a> Lowering<'a> {
    /// A lowering of one program for one kind of device.
    pub fn new(program: &'a Program, graph: &'a Graph, backward: &'a Backward, target: Target) -> Self {
        Self { source: Source { program, graph, backward, target } }
    }

    /// Bytes of scratch of every instruction of a section: the most over all sizes.
    pub fn scratch(&self, section: &Section, row_sizes: &[u64]) -> Vec<u64> {
        let count = section.instructions.len();
        let touches = self.source.touches(section, &vec![0; count]);
        // Sizes do not depend on places: every buffer is as large as need be.
        let span = |_: Content| Span::device(0, u64::MAX / 4);
        let binding = Binding { rank: 0, seed: 0, decayed: &|_| true };
        let of = |index: usize| {
            let sizes = row_sizes.iter().map(|rows| {
                let at = self.at(section, index, &touches[index], &span, binding, *rows);
                let kernels = at.kernels();
                let (target, dtype) = (self.source.target, self.source.program.types.run);
                let most = kernels.iter().map(|kernel| target.scratch(kernel, dtype));
                at.sinks.get() + most.max().unwrap_or(0)
            });
            sizes.max().unwrap_or(0)
        };
        (0..count).map(of).collect()
    }

    /// What every instruction of a section does on a rank, over `rows` rows.
    pub fn lower(
        &self,
        section: &Section,
        span: &dyn Fn(Content) -> Span,
        scratch: &dyn Fn(usize) -> Option<Span>,
        binding: Binding<'_>,
        rows: u64,
    ) -> Vec<Work> {
        let sizes: Vec<u64> =
            (0..section.instructions.len()).map(|at| scratch(at).map_or(0, |span| span.bytes)).collect();
        let touches = self.source.touches(section, &sizes);
        let work = |index: usize| {
            let at = self.at(section, index, &touches[index], span, binding, rows);
            // A rank that is alone meets nobody: its parameters are brought, not gathered.
            let alone = self.source.program.layout.ranks == 1;
            if section.instructions[index].action.is_collective() && !alone {
                return Work::Collective(at.collective());
            }
            let kernels = at.kernels();
            if kernels.is_empty() {
                return Work::Nothing;
            }
            let all = scratch(index).unwrap_or(Span::device(0, 0));
            let rest = all.part(at.sinks.get(), all.bytes - at.sinks.get(), 1);
            let dtype = self.source.program.types.run;
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
        touched: &'b [(Content, Access)],
        span: &'b dyn Fn(Content) -> Span,
        binding: Binding<'b>,
        rows: u64,
    ) -> At<'b> {
        At {
            source: self.source,
            section,
            touched,
            span,
            binding,
            rows,
            sinks: std::cell::Cell::new(0),
            index,
        }
    }
}

impl At<'_> {
    fn program(&self) -> &Program {
        self.source.program
    }

    fn run_bytes(&self) -> u64 {
        self.program().types.run.bytes()
    }

    /// Elements from `first` on of a buffer.
    fn part(&self, content: Content, first: u64, count: u64, size: u64) -> Span {
        (self.span)(content).part(first, count, size)
    }

    /// A value, as many rows of it as this micro-batch has.
    fn value(&self, value: Value) -> Span {
        // Forward's, or what stands for it in backward.
        let stands = |content: &Content| match content {
            Content::Value(other) | Content::Recomputed(other) | Content::Fetched(other) => {
                *other == value.index()
            }
            _ => false,
        };
        let found = self.touched.iter().map(|(content, _)| content).find(|content| stands(content));
        let content = found.copied().unwrap_or(Content::Value(value.index()));
        self.part(content, 0, self.rows, self.source.row_bytes(value.index()))
    }

    fn width(&self, value: Value) -> usize {
        self.source.backward.values[value.index()].width as usize
    }

    fn shape<const N: usize>(&self, param: ParamId) -> [usize; N] {
        let shape = &self.source.graph.param(param).spec.shape;
        std::array::from_fn(|place| shape[place] as usize)
    }

    /// A parameter where this instruction reads it.
    fn param(&self, param: ParamId) -> Span {
        let (flat, slot) = self.program().layout.place(param);
        let gathers = |content: &Content| match content {
            Content::Weights(other) | Content::Gathered { flat: other, .. } => *other == flat,
            _ => false,
        };
        let (content, _) =
            self.touched.iter().find(|(content, _)| gathers(content)).expect("its flat is read");
        self.part(*content, slot.start, slot.elements, self.run_bytes())
    }

    /// Elements of a buffer of gradients.
    fn of_gradients(&self, part: &Part) -> Span {
        let Part { content, dtype, elements } = part;
        self.part(*content, elements.start, elements.end - elements.start, dtype.bytes())
    }

    /// A parameter's gradient where it lands.
    fn gradient(&self, param: ParamId) -> Span {
        self.of_gradients(&self.program().landing(self.section.kind, param))
    }

    /// Whether what this node gives of a parameter's gradient is added to what is there.
    fn adds(&self, node: &GradNode, param: ParamId) -> bool {
        let first = self.source.backward.nodes.iter().find(|node| node.accumulates_into.contains(&param));
        let is_first = first.is_some_and(|first| std::ptr::eq(first, node));
        !(is_first && self.program().begins_gradients(self.section.kind))
    }

    /// A place for a result that nobody asked for.
    fn sink(&self, bytes: u64) -> Span {
        let at = self.sinks.get();
        self.sinks.set(at + bytes.next_multiple_of(ALIGNMENT));
        self.part(Content::Scratch(self.index), at, bytes, 1)
    }

    fn landing(&self, node: &GradNode, param: ParamId) -> Span {
        if node.accumulates_into.contains(&param) {
            self.gradient(param)
        } else {
            self.sink(4 * self.source.graph.param(param).elements())
        }
    }

    /// The loss, at the head of this rank's report.
    fn loss(&self) -> Span {
        self.part(Content::Report, 0, 1, size_of::<Report>() as u64)
    }

    fn whole(&self, content: Content, bytes: u64) -> Span {
        self.part(content, 0, bytes, 1)
    }

    /// The one of these buffers that this instruction writes.
    fn written(&self, candidates: &[Content]) -> Content {
        let found = self
            .touched
            .iter()
            .find(|(content, access)| *access == Access::Write && candidates.contains(content));
        found.map_or(candidates[0], |(content, _)| *content)
    }

    /// A value as it is, from one place to another.
    fn moved(&self, value: usize, from: Content, to: Content) -> Kernel {
        let dtype = match self.source.backward.values[value].kind {
            Kind::Activation => self.program().types.run,
            Kind::Statistic | Kind::Index => DType::F32,
        };
        let row_bytes = self.source.row_bytes(value);
        Kernel::Convert {
            from: self.part(from, 0, self.rows, row_bytes),
            from_type: dtype,
            to: self.part(to, 0, self.rows, row_bytes),
            to_type: dtype,
            found_inf: None,
        }
    }

    fn kernels(&self) -> Vec<Kernel> {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::ClearLoss => {
                let bytes = report_bytes(program.layout.flats.len());
                vec![Kernel::Zero { to: self.whole(Content::Report, bytes) }]
            }
            Action::Forward(node) => vec![self.forward(&self.source.graph.nodes[*node])],
            Action::Logits { node, sequences } => {
                vec![self.logits(&self.source.graph.nodes[*node], *sequences)]
            }
            Action::Backward(node) => self.backward(&self.source.backward.nodes[*node]),
            Action::Recompute { node, from_sum } => {
                let node = &self.source.graph.nodes[*node];
                vec![if *from_sum { self.norm_of_sum(node) } else { self.forward(node) }]
            }
            Action::Park(value) => vec![self.moved(*value, Content::Value(*value), Content::Parked(*value))],
            Action::Fetch(value) => {
                vec![self.moved(*value, Content::Parked(*value), Content::Fetched(*value))]
            }
            Action::Clear(flat) => {
                let parts = program.cleared(self.section.kind, *flat);
                parts.iter().map(|part| Kernel::Zero { to: self.of_gradients(part) }).collect()
            }
            Action::Keep(flat) | Action::RoundRest(flat) => self.round_rest(*flat),
            Action::Pack(chunk) => self.pack(chunk),
            Action::Round(chunk) => self.round(chunk),
            Action::Add(chunk, addition) => self.add(chunk, *addition),
            Action::Squares(flat) => self.squares(*flat),
            Action::Control => vec![self.control()],
            Action::SaveGradient(chunk, addition) => self.save_gradient(chunk, *addition),
            Action::Stage(chunk) => self.stage(chunk),
            Action::Bring(chunk) => self.bring(chunk),
            Action::Load(chunk) => self.load(chunk),
            Action::Update(chunk) => self.update(chunk),
            Action::Store(chunk) => self.store(chunk),
            Action::PutBack(chunk) => self.put_back(chunk),
            _ => Vec::new(),
        }
    }
}
