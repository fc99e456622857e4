//! From instructions to what a device does: kernels over places in the arena, and collectives.
//!
//! Everything a kernel needs is known here: its sizes from the model's shapes, its operands from the places of their
//! buffers. Only the number of rows differs from one micro-batch to the next, so a section is lowered once for each size.

use zeroth_base::DType;
use zeroth_device::cpu::{
    AttentionDims, EmbeddingDims, ExactSum, HeadLossDims, LinearDims, RmsNormDims, RopeDims,
};
use zeroth_device::{Access, Kernel, Launch, Report, Span, Target};
use zeroth_graph::{Backward, GradNode, GradOp, Graph, Kind, Landing, Node, Op, ParamId, Value};

use super::buffers::{Source, record_bytes, report_bytes};
use super::place::ALIGNMENT;
use super::{Action, Addition, Chunk, Content, GradientHome, Program, Section};

/// What an instruction makes a device or the ranks do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Work {
    /// Nothing: it only ends a life.
    Nothing,
    /// Kernels, in order.
    Launches(Vec<Launch>),
    /// A meeting of all ranks.
    Collective(Collective),
}

/// A collective over places in the arena. Counts are bytes, one entry a rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Collective {
    AllGather { send: Span, recv: Span, counts: Vec<usize> },
    InPlace { buffer: Span, counts: Vec<usize> },
    AllToAll { send: Span, recv: Span, counts: Vec<usize> },
}

/// What a lowered program depends on beside the program itself.
#[derive(Clone, Copy)]
pub(crate) struct Binding<'a> {
    /// The rank that will run it.
    pub(crate) rank: u64,
    /// The run's seed, for dropout.
    pub(crate) seed: u64,
    /// Whether a parameter is decayed.
    pub(crate) decayed: &'a dyn Fn(ParamId) -> bool,
}

/// Lowers the instructions of a program.
pub(crate) struct Lowering<'a> {
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
    pub(crate) fn new(program: &'a Program, graph: &'a Graph, backward: &'a Backward) -> Self {
        Self { source: Source { program, graph, backward } }
    }

    /// Bytes of scratch of every instruction of a section: the most over all sizes.
    pub(crate) fn scratch(&self, section: &Section, target: Target, row_sizes: &[u64]) -> Vec<u64> {
        let count = section.instructions.len();
        let touches = self.source.touches(section, &vec![0; count]);
        // Sizes do not depend on places: every buffer is as large as need be.
        let span = |_: Content| Span::device(0, u64::MAX / 4);
        let binding = Binding { rank: 0, seed: 0, decayed: &|_| true };
        let of = |index: usize| {
            let sizes = row_sizes.iter().map(|rows| {
                let at = self.at(section, index, &touches[index], &span, binding, *rows);
                let kernels = at.kernels();
                let most = kernels.iter().map(|kernel| target.scratch(kernel, self.source.program.types.run));
                at.sinks.get() + most.max().unwrap_or(0)
            });
            sizes.max().unwrap_or(0)
        };
        (0..count).map(of).collect()
    }

    /// What every instruction of a section does on a rank, over `rows` rows.
    pub(crate) fn lower(
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
            if section.instructions[index].action.is_collective() {
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
        let info = self.source.backward.values[value.index()];
        let size = if info.kind == Kind::Activation { self.run_bytes() } else { 4 };
        self.part(Content::Value(value.index()), 0, self.rows * info.width, size)
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
            Content::Weights(other) => *other == flat,
            Content::Gathered(at) => self.section.instructions[*at].action == Action::Gather(flat),
            _ => false,
        };
        let (content, _) =
            self.touched.iter().find(|(content, _)| gathers(content)).expect("its flat is read");
        self.part(*content, slot.start, slot.elements, self.run_bytes())
    }

    /// A parameter's gradient where it lands.
    fn gradient(&self, param: ParamId) -> Span {
        let (flat, slot) = self.program().layout.place(param);
        self.part(Content::Gradient(flat), slot.start, slot.elements, 4)
    }

    /// A place for a result that nobody asked for.
    fn sink(&self, bytes: u64) -> Span {
        let at = self.sinks.get();
        self.sinks.set(at + bytes.next_multiple_of(ALIGNMENT));
        self.part(Content::Scratch(self.index), at, bytes, 1)
    }

    fn landing(&self, node: &GradNode, param: ParamId) -> Span {
        if node.lands.contains(&param) {
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

    fn kernels(&self) -> Vec<Kernel> {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::ClearLoss => vec![Kernel::Zero { to: self.loss() }],
            Action::Forward(node) => vec![self.forward(&self.source.graph.nodes[*node])],
            Action::Backward(node) => self.backward(&self.source.backward.nodes[*node]),
            Action::Clear(flat) => {
                let elements = program.layout.flats[*flat].padded();
                vec![Kernel::Zero { to: self.part(Content::Gradient(*flat), 0, elements, 4) }]
            }
            Action::Keep(flat) => {
                let elements = program.layout.flats[*flat].padded();
                let to_type = program.types.communication;
                vec![Kernel::Convert {
                    from: self.part(Content::Gradient(*flat), 0, elements, 4),
                    from_type: DType::F32,
                    to: self.part(Content::Kept(*flat), 0, elements, to_type.bytes()),
                    to_type,
                }]
            }
            Action::Round(chunk) => self.round(chunk),
            Action::Add(chunk, addition) => self.add(chunk, *addition),
            Action::Squares(flat) => self.squares(*flat),
            Action::Control => vec![self.control()],
            Action::Update(flat) => self.update(*flat),
            _ => Vec::new(),
        }
    }

    fn norm_dims(&self, op: Op, x: Value) -> RmsNormDims {
        let (rows, width) = (self.rows as usize, self.width(x));
        match op {
            Op::HeadNorm { heads, eps } => {
                RmsNormDims::per_head(rows, heads as usize, width / heads as usize, eps as f32)
            }
            Op::RmsNorm { eps } | Op::AddRmsNorm { eps } => RmsNormDims { rows, width, eps: eps as f32 },
            other => unreachable!("{} is no norm", other.name()),
        }
    }

    fn linear_dims(&self, weight: ParamId) -> LinearDims {
        let [outputs, inputs] = self.shape(weight);
        LinearDims { rows: self.rows as usize, inputs, outputs }
    }

    fn attention_dims(&self, op: Op, q: Value) -> AttentionDims {
        let Op::Attention { heads, kv_heads, window, scale } = op else {
            unreachable!("attention's own dims")
        };
        AttentionDims {
            rows: self.rows as usize,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: self.width(q) / heads as usize,
            window: window.map(|window| window as usize),
            scale: scale as f32,
        }
    }

    fn starts(&self) -> Span {
        self.part(Content::Starts, 0, self.source.graph.info(self.source.graph.inputs[0]).rows + 2, 4)
    }

    fn rope(&self, op: Op, x: Value, y: Value, back: bool) -> Kernel {
        let Op::Rope { heads } = op else { unreachable!("rope's own kernel") };
        let pairs = self.source.graph.rotary.frequencies.len() as u64;
        let head_dim = self.width(x) / heads as usize;
        let angles = |content| self.part(content, 0, self.rows * pairs, 4);
        Kernel::Rope {
            dims: RopeDims {
                rows: self.rows as usize,
                heads: heads as usize,
                head_dim,
                rotated: 2 * pairs as usize,
            },
            cos: angles(Content::Cosines),
            sin: angles(Content::Sines),
            x: self.value(x),
            y: self.value(y),
            back,
        }
    }

    fn dropout(&self, op: Op, x: Value, y: Value) -> Kernel {
        let Op::Dropout { probability, salt } = op else { unreachable!("dropout's own kernel") };
        Kernel::Dropout {
            probability: probability as f32,
            seed: self.binding.seed,
            op: salt,
            width: self.width(x),
            keys: self.part(Content::Keys, 0, self.rows, 16),
            x: self.value(x),
            y: self.value(y),
        }
    }

    fn head_dims(&self, weight: ParamId) -> HeadLossDims {
        let [vocab, hidden] = self.shape(weight);
        HeadLossDims { rows: self.rows as usize, hidden, vocab }
    }

    fn forward(&self, node: &Node) -> Kernel {
        let (input, output) =
            (|place: usize| self.value(node.inputs[place]), |place: usize| self.value(node.outputs[place]));
        match node.op {
            Op::Embedding => {
                let [vocab, width] = self.shape(node.params[0]);
                Kernel::Embedding {
                    dims: EmbeddingDims { vocab, width },
                    rows: self.rows as usize,
                    ids: input(0),
                    table: self.param(node.params[0]),
                    y: output(0),
                }
            }
            Op::Linear => Kernel::Linear {
                dims: self.linear_dims(node.params[0]),
                x: input(0),
                w: self.param(node.params[0]),
                bias: node.params.get(1).map(|bias| self.param(*bias)),
                y: output(0),
            },
            Op::RmsNorm { .. } | Op::HeadNorm { .. } => Kernel::RmsNorm {
                dims: self.norm_dims(node.op, node.inputs[0]),
                x: input(0),
                w: self.param(node.params[0]),
                y: output(0),
                rstd: output(1),
            },
            Op::AddRmsNorm { .. } => Kernel::AddRmsNorm {
                dims: self.norm_dims(node.op, node.inputs[0]),
                residual: input(0),
                x: input(1),
                w: self.param(node.params[0]),
                h: output(0),
                y: output(1),
                rstd: output(2),
            },
            Op::Rope { .. } => self.rope(node.op, node.inputs[0], node.outputs[0], false),
            Op::Attention { .. } => Kernel::Attention {
                dims: self.attention_dims(node.op, node.inputs[0]),
                starts: self.starts(),
                q: input(0),
                k: input(1),
                v: input(2),
                y: output(0),
                lse: output(1),
            },
            Op::SwiGlu => Kernel::SwiGlu { gate: input(0), up: input(1), y: output(0) },
            Op::Dropout { .. } => self.dropout(node.op, node.inputs[0], node.outputs[0]),
            Op::HeadLoss => Kernel::HeadLoss {
                dims: self.head_dims(node.params[0]),
                x: input(0),
                w: self.param(node.params[0]),
                labels: input(1),
                loss: self.loss(),
            },
        }
    }

    fn backward(&self, node: &GradNode) -> Vec<Kernel> {
        let input = |place: usize| self.value(node.inputs[place]);
        let output = |place: usize| self.value(node.outputs[place].0);
        let of = &self.source.graph.nodes[node.of];
        let kernel = match node.op {
            GradOp::HeadLoss => {
                let (dims, weight) = (self.head_dims(node.params[0]), node.params[0]);
                let dx = node.outputs.get(1).map(|(dx, _)| self.value(*dx));
                Kernel::HeadLossBackward {
                    dims,
                    x: input(0),
                    w: self.param(weight),
                    labels: input(1),
                    loss: self.loss(),
                    input: self.whole(Content::Input, size_of::<zeroth_device::StepInput>() as u64),
                    control: self.whole(Content::Control, size_of::<zeroth_device::Control>() as u64),
                    dx: dx.unwrap_or_else(|| self.sink(self.rows * dims.hidden as u64 * self.run_bytes())),
                    dw: self.landing(node, weight),
                }
            }
            GradOp::LinearInput => Kernel::LinearDx {
                dims: self.linear_dims(node.params[0]),
                dy: input(0),
                w: self.param(node.params[0]),
                dx: output(0),
                add: node.outputs[0].1 == Landing::Add,
            },
            GradOp::LinearParams => {
                let dims = self.linear_dims(of.params[0]);
                let lands = |param: &&ParamId| node.lands.contains(*param);
                let weight = of.params.first().filter(lands).map(|weight| Kernel::LinearDw {
                    dims,
                    dy: input(1),
                    x: input(0),
                    dw: self.gradient(*weight),
                });
                let bias = of.params.get(1).filter(lands).map(|bias| Kernel::LinearDb {
                    dims,
                    dy: input(1),
                    db: self.gradient(*bias),
                });
                return weight.into_iter().chain(bias).collect();
            }
            GradOp::RmsNorm(op) | GradOp::AddRmsNorm(op) | GradOp::HeadNorm(op) => {
                let dh = node.outputs.first().map(|(dh, _)| self.value(*dh));
                Kernel::RmsNormBackward {
                    dims: self.norm_dims(op, node.inputs[0]),
                    h: input(0),
                    rstd: input(1),
                    dy: input(2),
                    residual: node.inputs.get(3).map(|residual| self.value(*residual)),
                    w: self.param(node.params[0]),
                    dh: dh.unwrap_or_else(|| self.sink(input(0).bytes)),
                    dw: self.landing(node, node.params[0]),
                }
            }
            GradOp::Rope(op) => self.rope(op, node.inputs[0], node.outputs[0].0, true),
            GradOp::Attention(op) => Kernel::AttentionBackward {
                dims: self.attention_dims(op, node.inputs[0]),
                starts: self.starts(),
                q: input(0),
                k: input(1),
                v: input(2),
                y: input(3),
                lse: input(4),
                dy: input(5),
                dq: output(0),
                dk: output(1),
                dv: output(2),
            },
            GradOp::SwiGlu => Kernel::SwiGluBackward {
                gate: input(0),
                up: input(1),
                dy: input(2),
                dgate: output(0),
                dup: output(1),
            },
            GradOp::Dropout(op) => self.dropout(op, node.inputs[0], node.outputs[0].0),
            GradOp::Embedding => {
                let [vocab, width] = self.shape(of.params[0]);
                Kernel::EmbeddingBackward {
                    dims: EmbeddingDims { vocab, width },
                    rows: self.rows as usize,
                    ids: input(0),
                    dy: input(1),
                    dtable: self.gradient(of.params[0]),
                }
            }
            GradOp::Sum => Kernel::Sum { a: input(0), b: input(1), y: output(0) },
        };
        vec![kernel]
    }

    /// The part of a chunk that a rank owns, as a range of the flat.
    fn owned(&self, chunk: &Chunk, rank: u64) -> std::ops::Range<u64> {
        let shard = self.program().layout.flats[chunk.flat].shard(rank, self.program().layout.ranks);
        let at = |place: u64| (shard.start + place).min(shard.end);
        at(chunk.range.start)..at(chunk.range.end)
    }

    /// Bytes of a chunk that each rank owns, in the communication type.
    fn chunk_counts(&self, chunk: &Chunk) -> Vec<usize> {
        let size = self.program().types.communication.bytes();
        let count = |rank: u64| {
            let owned = self.owned(chunk, rank);
            ((owned.end - owned.start) * size) as usize
        };
        (0..self.program().layout.ranks).map(count).collect()
    }

    /// The chunk's buffer that this instruction reads or writes beside the gradient.
    fn chunk_buffer(&self, wanted: Access) -> Content {
        let found = self.touched.iter().find(|(content, access)| {
            *access == wanted && matches!(content, Content::Sent(_) | Content::Received(_))
        });
        found.expect("a chunk has its buffer").0
    }

    fn round(&self, chunk: &Chunk) -> Vec<Kernel> {
        let (to_type, to) = (self.program().types.communication, self.chunk_buffer(Access::Write));
        let mut at = 0;
        let convert = |rank: u64| {
            let owned = self.owned(chunk, rank);
            let count = owned.end - owned.start;
            let first = at;
            at += count;
            (count > 0).then(|| Kernel::Convert {
                from: self.part(Content::Gradient(chunk.flat), owned.start, count, 4),
                from_type: DType::F32,
                to: self.part(to, first, count, to_type.bytes()),
                to_type,
            })
        };
        (0..self.program().layout.ranks).filter_map(convert).collect()
    }

    fn add(&self, chunk: &Chunk, addition: Addition) -> Vec<Kernel> {
        let (program, owned) = (self.program(), self.owned(chunk, self.binding.rank));
        let (count, ranks, from_type) =
            (owned.end - owned.start, program.layout.ranks, program.types.communication);
        if count == 0 {
            return Vec::new();
        }
        let to = match program.gradient_home() {
            GradientHome::Landed => self.part(Content::Gradient(chunk.flat), owned.start, count, 4),
            _ => self.part(Content::Kept(chunk.flat), chunk.range.start, count, 4),
        };
        vec![Kernel::SumRanks {
            ranks: ranks as usize,
            parts: self.part(self.chunk_buffer(Access::Read), 0, ranks * count, from_type.bytes()),
            from_type,
            to,
            add: addition == Addition::Add,
        }]
    }

    /// A flat's complete gradient: where it is, its type, and how many elements of it lie before `first`.
    fn summed(&self, flat: usize, range: &std::ops::Range<u64>) -> (Span, DType) {
        let program = self.program();
        let count = range.end - range.start;
        let content = self.source.summed(flat);
        match program.gradient_home() {
            GradientHome::Landed => (self.part(content, range.start, count, 4), DType::F32),
            GradientHome::Rounded => {
                let dtype = program.types.communication;
                (self.part(content, range.start, count, dtype.bytes()), dtype)
            }
            GradientHome::Shard => {
                let shard = program.layout.flats[flat].shard(self.binding.rank, program.layout.ranks);
                (self.part(content, range.start - shard.start, count, 4), DType::F32)
            }
        }
    }

    fn squares(&self, flat: usize) -> Vec<Kernel> {
        let program = self.program();
        // At stage 0 too each rank counts what it reduced; the others' sums come with their reports.
        let shard = program.layout.flats[flat].shard(self.binding.rank, program.layout.ranks);
        let sum = self.part(Content::Report, 0, report_bytes(program.layout.flats.len()), 1).part(
            (size_of::<Report>() + flat * size_of::<ExactSum>()) as u64,
            size_of::<ExactSum>() as u64,
            1,
        );
        if shard.is_empty() {
            return vec![Kernel::Zero { to: sum }];
        }
        let (values, value_type) = self.summed(flat, &shard);
        vec![Kernel::Squares { values, value_type, sum }]
    }

    fn control(&self) -> Kernel {
        let (ranks, flats) = (self.program().layout.ranks, self.program().layout.flats.len());
        let reports = if ranks > 1 { Content::Reports } else { Content::Report };
        Kernel::Control {
            ranks: ranks as usize,
            flats,
            recipe: self.whole(Content::Recipe, size_of::<zeroth_device::Recipe>() as u64),
            input: self.whole(Content::Input, size_of::<zeroth_device::StepInput>() as u64),
            reports: self.whole(reports, ranks * report_bytes(flats)),
            control: self.whole(Content::Control, size_of::<zeroth_device::Control>() as u64),
            record: self.whole(Content::Record, record_bytes(flats)),
        }
    }

    /// AdamW over what this rank updates of a flat, run by run of parameters that decay alike.
    fn update(&self, flat: usize) -> Vec<Kernel> {
        let program = self.program();
        let updated = program.updated(flat, self.binding.rank);
        let held = &program.layout.flats[flat];
        // (group, range of the flat): slots touch each other, padding belongs to the slot before it.
        let mut runs: Vec<(usize, std::ops::Range<u64>)> = Vec::new();
        for (place, slot) in held.slots.iter().enumerate() {
            let end = held.slots.get(place + 1).map_or(held.padded(), |next| next.start);
            let range = slot.start.max(updated.start)..end.min(updated.end);
            let group = usize::from(!(self.binding.decayed)(slot.param));
            match runs.last_mut() {
                _ if range.is_empty() => {}
                Some((last, before)) if *last == group => before.end = range.end,
                _ => runs.push((group, range)),
            }
        }
        let kernel = |(group, range): (usize, std::ops::Range<u64>)| {
            let count = range.end - range.start;
            let (grads, grad_type) = self.summed(flat, &range);
            let state = |content| self.part(content, range.start - updated.start, count, 4);
            let first_weight = if program.stays_gathered(flat) { 0 } else { updated.start };
            let weights = |size| self.part(Content::Weights(flat), range.start - first_weight, count, size);
            let has_master = self.source.has_master();
            Kernel::AdamW {
                group,
                control: self.whole(Content::Control, size_of::<zeroth_device::Control>() as u64),
                grads,
                grad_type,
                master: if has_master { state(Content::Master(flat)) } else { weights(4) },
                first: state(Content::First(flat)),
                second: state(Content::Second(flat)),
                weights: has_master.then(|| weights(self.run_bytes())),
            }
        };
        runs.into_iter().map(kernel).collect()
    }

    /// Bytes of each rank's shard of a flat.
    fn shard_counts(&self, flat: usize, size: u64) -> Vec<usize> {
        let layout = &self.program().layout;
        let bytes = |rank: u64| {
            let shard = layout.flats[flat].shard(rank, layout.ranks);
            ((shard.end - shard.start) * size) as usize
        };
        (0..layout.ranks).map(bytes).collect()
    }

    fn collective(&self) -> Collective {
        let program = self.program();
        match &self.section.instructions[self.index].action {
            Action::Gather(flat) => {
                let counts = self.shard_counts(*flat, self.run_bytes());
                let own = counts[self.binding.rank as usize] as u64;
                let send = self.whole(Content::Weights(*flat), own);
                let all = counts.iter().sum::<usize>() as u64;
                Collective::AllGather { send, recv: self.whole(Content::Gathered(self.index), all), counts }
            }
            Action::GatherWeights(flat) => {
                let counts = self.shard_counts(*flat, self.run_bytes());
                let all = counts.iter().sum::<usize>() as u64;
                Collective::InPlace { buffer: self.whole(Content::Weights(*flat), all), counts }
            }
            Action::GatherGradient(flat) => {
                let counts = self.shard_counts(*flat, 4);
                let all = counts.iter().sum::<usize>() as u64;
                Collective::InPlace { buffer: self.whole(Content::Gradient(*flat), all), counts }
            }
            Action::Exchange(chunk) => {
                let counts = self.chunk_counts(chunk);
                let own = (counts.len() * counts[self.binding.rank as usize]) as u64;
                let all = counts.iter().sum::<usize>() as u64;
                Collective::AllToAll {
                    send: self.whole(self.chunk_buffer(Access::Read), all),
                    recv: self.whole(self.chunk_buffer(Access::Write), own),
                    counts,
                }
            }
            Action::Reports => {
                let (ranks, bytes) = (program.layout.ranks, report_bytes(program.layout.flats.len()));
                Collective::AllGather {
                    send: self.whole(Content::Report, bytes),
                    recv: self.whole(Content::Reports, ranks * bytes),
                    counts: vec![bytes as usize; ranks as usize],
                }
            }
            other => unreachable!("{other:?} is no collective"),
        }
    }
}
