//! The buffers of a program: what each holds, how large it is, and which instructions touch it.

use crate::Target;
use zeroth_graph::{Backward, GradNode, GradOp, Graph, Kind, Node, Op, Value};
use zeroth_kernel::{Access, Control, Recipe, Record, Report, StepInput, Tier};
use zeroth_kernel::{ExactSum, RowKey};

use super::tile::TileParts;
use super::{Action, Chunk, GradientHome, Instruction, Program, Section, SectionKind};

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// Parameters that are always there.
    Parameters,
    /// Gradients that stay until the update.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Values of forward and backward, and the data they come from.
    Activations,
    /// Gathered flats, gradients of one unit, chunks on their way, scratch.
    Buffers,
}

/// What a buffer holds. Numbers are places: of a value, of a flat, of an instruction in its section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// A flat's parameters as this rank keeps them: whole, or its shard.
    Weights(usize),
    /// The f32 flat in which gradients land; where it does not stay, those of a flat that land in f32, end to end.
    Gradient(usize),
    /// A flat's gradient in the communication type, each element in its place.
    Rounded(usize),
    /// Rows of the head's gradient that wait for what an embedding adds to them, in f32, one for each token.
    WaitingRows,
    /// A flat's gradient as kept for the update, where that is not the flat in which it landed.
    Kept(usize),
    /// Master weights of what this rank updates of a flat, or what they are beside its weights.
    Master(usize),
    /// First moments.
    First(usize),
    /// Second moments.
    Second(usize),
    /// A value of forward or backward.
    Value(usize),
    /// A value of forward, computed again for backward.
    Recomputed(usize),
    /// A value of forward that waits in host memory.
    Parked(usize),
    /// And that is back.
    Fetched(usize),
    /// Where sequences begin.
    Starts,
    /// The sample and place of every token, for dropout.
    Keys,
    /// Cosines of the rotations.
    Cosines,
    /// Sines of the rotations.
    Sines,
    /// What the config says once.
    Recipe,
    /// What the host says before each step.
    Input,
    /// This rank's loss and sums of squares.
    Report,
    /// All ranks' reports.
    Reports,
    /// What a step's outcome decides.
    Control,
    /// What the host reads after a step.
    Record,
    /// Next-token logits, which the host reads.
    Logits,
    /// A flat that is gathered, for the so-manieth time in its section.
    Gathered {
        /// The flat.
        flat: usize,
        /// Which of its stays.
        stay: usize,
    },
    /// The sums of a chunk that an instruction made, on their way to host memory.
    Summed(usize),
    /// A piece of parameters that an instruction staged.
    Staged(usize),
    /// A tile of parameters that an instruction updated.
    Updated(usize),
    /// The states of a tile that an instruction brought to the device.
    Tile(usize),
    /// Stands for the states of a tile where they live: it has no memory of its own, only an order of uses.
    Living {
        /// The flat.
        flat: usize,
        /// The tile's first element within what this rank updates.
        first: u64,
    },
    /// A chunk that an instruction rounded.
    Sent(usize),
    /// The parts of a chunk that an exchange brought.
    Received(usize),
    /// What an instruction scribbles on.
    Scratch(usize),
}

/// A buffer: what it holds, what it is for, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// What it holds.
    pub content: Content,
    /// What it is for.
    pub category: Category,
    /// Where it lies.
    pub tier: Tier,
    /// Its size, rounded up to the alignment.
    pub bytes: u64,
}

/// A program with the model it was compiled for: all that sizes follow from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) program: &'a Program,
    pub(super) graph: &'a Graph,
    pub(super) backward: &'a Backward,
    /// The kind of device that says how rows lie.
    pub(super) target: Target,
}

/// Bytes of one rank's report: its loss, and for every flat a sum and whether its own gradient was finite.
pub(crate) const fn report_bytes(flats: usize) -> u64 {
    (size_of::<Report>() + flats * (size_of::<ExactSum>() + 8)) as u64
}

/// Bytes of a record: its head and a norm for every flat.
pub(crate) const fn record_bytes(flats: usize) -> u64 {
    (size_of::<Record>() + 8 * flats) as u64
}

/// Rows of the head's projection.
pub fn vocabulary(graph: &Graph) -> u64 {
    head(graph).map_or(0, |head| graph.param(head.params[0]).spec.shape[0])
}

fn head(graph: &Graph) -> Option<&Node> {
    graph.nodes.iter().find(|node| node.op == Op::HeadLoss)
}

impl Source<'_> {
    fn rows(&self) -> u64 {
        self.graph.inputs.first().map_or(0, |ids| self.graph.info(*ids).rows)
    }

    /// Where a node of backward is the head, which leaves rows of a table's gradient waiting, or the embedding that completes
    /// them: the tokens whose rows they are.
    pub(super) fn tokens_of_waiting(&self, kind: SectionKind, node: &GradNode) -> Option<Value> {
        let param = node.accumulates_into.iter().find(|param| self.program.rows_wait(kind, **param))?;
        let completes = |node: &&GradNode| node.op == GradOp::Embedding && node.accumulates_into.contains(param);
        self.backward.nodes.iter().find(completes).map(|embedding| embedding.inputs[0])
    }

    fn has_dropout(&self) -> bool {
        self.graph.nodes.iter().any(|node| matches!(node.op, Op::Dropout { .. }))
    }

    /// The buffers that are there all the time.
    pub(super) fn always(&self) -> Vec<Buffer> {
        let (program, layout) = (self.program, &self.program.layout);
        let (run, home) = (program.types.run.bytes(), program.gradient_home());
        let mut all = Vec::new();
        let mut push_to =
            |tier, content, category, bytes| all.push(Buffer { content, category, tier, bytes });
        // Parameters lie together: other ranks may read them in place, from pages that are not private.
        for (flat, laid) in layout.flats.iter().enumerate() {
            let shard = laid.shard_capacity(layout.ranks);
            let weights = if program.stays_gathered(flat) { laid.padded() } else { shard };
            push_to(program.held[flat].weights, Content::Weights(flat), Category::Parameters, run * weights);
        }
        for (flat, laid) in layout.flats.iter().enumerate().filter(|(flat, _)| program.is_trained(*flat)) {
            let (shard, held) = (laid.shard_capacity(layout.ranks), program.held[flat]);
            let updated = program.updated_capacity(flat);
            if home == GradientHome::Landed {
                push_to(Tier::Device, Content::Gradient(flat), Category::Gradients, 4 * laid.padded());
            }
            let kept = match (home, held.gradients) {
                (GradientHome::Landed, Tier::Device) => 0,
                (GradientHome::Landed, Tier::Host) => 4 * shard,
                (GradientHome::Shard, _) => program.sums.bytes() * shard,
                (GradientHome::Rounded, _) => program.types.communication.bytes() * laid.padded(),
            };
            if kept > 0 {
                push_to(held.gradients, Content::Kept(flat), Category::Gradients, kept);
            }
            if program.has_master(flat) {
                let bytes = program.master_form(flat).bytes() * updated;
                push_to(held.states, Content::Master(flat), Category::Optimizer, bytes);
            }
            let moments = program.moments.bytes() * updated;
            let [has_first, has_second] = program.optimizer.moments();
            if has_first {
                push_to(held.states, Content::First(flat), Category::Optimizer, moments);
            }
            if has_second {
                push_to(held.states, Content::Second(flat), Category::Optimizer, moments);
            }
        }
        let mut push = |content, category, bytes| push_to(Tier::Device, content, category, bytes);
        let rows = self.rows();
        for input in &self.graph.inputs {
            push(Content::Value(input.index()), Category::Activations, 4 * rows);
        }
        // The number of entries, a start for every sequence, and the end of the last.
        push(Content::Starts, Category::Activations, 4 * (rows + 2));
        if self.has_dropout() {
            push(Content::Keys, Category::Activations, size_of::<RowKey>() as u64 * rows);
        }
        let angles = 4 * rows * self.graph.rotary.frequencies.len() as u64;
        if angles > 0 {
            push(Content::Cosines, Category::Activations, angles);
            push(Content::Sines, Category::Activations, angles);
        }
        let (ranks, flats) = (layout.ranks, layout.flats.len());
        push(Content::Recipe, Category::Buffers, size_of::<Recipe>() as u64);
        push(Content::Input, Category::Buffers, size_of::<StepInput>() as u64);
        push(Content::Control, Category::Buffers, size_of::<Control>() as u64);
        push(Content::Report, Category::Buffers, report_bytes(flats));
        if ranks > 1 {
            push(Content::Reports, Category::Buffers, ranks * report_bytes(flats));
        }
        push(Content::Record, Category::Buffers, record_bytes(flats));
        if let Some((_, sequences)) = program.logits() {
            push(Content::Logits, Category::Activations, 4 * sequences * vocabulary(self.graph));
        }
        all
    }

    /// The size and purpose of a buffer that comes and goes in a section.
    pub(super) fn passing(&self, section: &Section, content: Content, scratch: &[u64]) -> Buffer {
        let (layout, types) = (&self.program.layout, self.program.types);
        let chunk = |at: usize| match &section.instructions[at].action {
            Action::Pack(chunk)
            | Action::Round(chunk)
            | Action::Exchange(chunk)
            | Action::Add(chunk, _)
            | Action::Reduce(chunk, _)
            | Action::Stage(chunk)
            | Action::Load(chunk)
            | Action::Update(chunk) => chunk.range.end - chunk.range.start,
            other => unreachable!("{other:?} moves no chunk"),
        };
        let (category, bytes) = match content {
            Content::Value(value)
            | Content::Recomputed(value)
            | Content::Parked(value)
            | Content::Fetched(value) => (Category::Activations, self.value_bytes(value)),
            Content::Gathered { flat, .. } => {
                (Category::Buffers, layout.flats[flat].padded() * types.run.bytes())
            }
            Content::Gradient(flat) => {
                (Category::Buffers, 4 * self.program.wide_elements(section.kind, flat))
            }
            Content::Rounded(flat) => {
                (Category::Buffers, layout.flats[flat].padded() * types.communication.bytes())
            }
            Content::WaitingRows => {
                let width = head(self.graph).map_or(0, |head| self.graph.info(head.inputs[0]).width);
                (Category::Buffers, 4 * self.rows() * width)
            }
            Content::Sent(at) => (Category::Buffers, chunk(at) * layout.ranks * types.communication.bytes()),
            Content::Received(at) => {
                // Every rank's part for this one, or every rank's parts for all.
                let from_each = if self.program.reduce_scatter { 1 } else { layout.ranks };
                (Category::Buffers, chunk(at) * from_each * layout.ranks * types.communication.bytes())
            }
            Content::Summed(at) => {
                let (Action::Add(_, addition) | Action::Reduce(_, addition)) =
                    &section.instructions[at].action
                else {
                    unreachable!("only sums are on their way to host memory")
                };
                (Category::Buffers, self.program.summed_type(*addition).bytes() * chunk(at))
            }
            Content::Staged(at) | Content::Updated(at) => (Category::Buffers, chunk(at) * types.run.bytes()),
            Content::Tile(at) => {
                let flat = section.instructions[at].action.flat().expect("a tile is of a flat");
                (Category::Buffers, TileParts::of(self.program, flat, chunk(at)).bytes)
            }
            Content::Living { .. } => (Category::Buffers, 0),
            Content::Scratch(at) => (Category::Buffers, scratch[at]),
            other => unreachable!("{other:?} is always there"),
        };
        let tier = match content {
            Content::Parked(_) | Content::Staged(_) | Content::Living { .. } => Tier::Host,
            Content::Updated(at) => {
                let flat = section.instructions[at].action.flat().expect("an update is about a flat");
                self.program.held[flat].updates
            }
            _ => Tier::Device,
        };
        Buffer { content, category, tier, bytes }
    }

    fn value_bytes(&self, value: usize) -> u64 {
        self.backward.values[value].rows * self.row_bytes(value)
    }

    /// Bytes from one row of a value to the next.
    pub(super) fn row_bytes(&self, value: usize) -> u64 {
        let (info, run) = (self.backward.values[value], self.program.types.run);
        match info.kind {
            Kind::Activation => self.target.row_stride(info.width, run) * run.bytes(),
            Kind::Statistic | Kind::Index => 4 * info.width,
        }
    }

    /// Every buffer that each instruction of a section touches, in the order of the list.
    pub(super) fn touches(&self, section: &Section, scratch: &[u64]) -> Vec<Vec<(Content, Access)>> {
        let mut way = Simulation {
            kind: section.kind,
            stays: vec![0; self.program.layout.flats.len()],
            moving: Vec::new(),
            tiles: Vec::new(),
            current: (0..self.backward.values.len()).map(Content::Value).collect(),
        };
        section
            .instructions
            .iter()
            .enumerate()
            .map(|(at, instruction)| {
                let mut touched = self.touched(at, instruction, &way);
                self.go_on(at, instruction, &mut way);
                if scratch[at] > 0 {
                    touched.push((Content::Scratch(at), Access::Write));
                }
                touched
            })
            .collect()
    }

    /// What stands for values, flats and chunks after an instruction.
    fn go_on(&self, at: usize, instruction: &Instruction, way: &mut Simulation) {
        match &instruction.action {
            Action::Recompute { node, from_sum } => {
                for output in &self.graph.nodes[*node].outputs[usize::from(*from_sum)..] {
                    way.current[output.index()] = Content::Recomputed(output.index());
                }
            }
            Action::Fetch(value) => way.current[*value] = Content::Fetched(*value),
            Action::Release(flat) => way.stays[*flat] += 1,
            Action::Pack(chunk) | Action::Round(chunk) => way.put(chunk, Content::Sent(at)),
            Action::Exchange(chunk) => way.put(chunk, Content::Received(at)),
            Action::Add(chunk, _) | Action::Reduce(chunk, _) => way.put(chunk, Content::Summed(at)),
            Action::Stage(chunk) => way.put(chunk, Content::Staged(at)),
            Action::Load(chunk) => way.tiles.push((chunk.clone(), Content::Tile(at))),
            Action::Update(chunk) => way.put(chunk, Content::Updated(at)),
            _ => {}
        }
    }

    /// Where an instruction reads a flat's parameters.
    fn weights(&self, flat: usize, way: &Simulation) -> Content {
        if self.program.stays_gathered(flat) {
            return Content::Weights(flat);
        }
        Content::Gathered { flat, stay: way.stays[flat] }
    }

    fn touched(&self, at: usize, instruction: &Instruction, way: &Simulation) -> Vec<(Content, Access)> {
        use Access::{Read, Write};
        let program = self.program;
        let gradient = |chunk: &Chunk| way.gradient(chunk).unwrap_or(Content::Rounded(chunk.flat));
        let on_host = |flat: usize| program.held[flat].gradients == Tier::Host;
        let summed = |flat: usize| program.complete_gradient(flat, 0).0;
        let value = |value: &Value| way.current[value.index()];
        match &instruction.action {
            Action::ClearLoss => vec![(Content::Report, Write)],
            Action::Forward(node) => {
                let node = &self.graph.nodes[*node];
                let mut touched: Vec<_> = node.inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, way), Read)));
                if node.op == Op::HeadLoss {
                    touched.push((Content::Report, Write));
                } else {
                    touched.extend(node.outputs.iter().map(|output| (value(output), Write)));
                }
                touched.extend(beside(node.op).iter().map(|content| (*content, Read)));
                touched
            }
            Action::Logits { node, .. } => {
                // The last rows of x, and no labels.
                let mut touched =
                    vec![(value(&self.graph.nodes[*node].inputs[0]), Read), (Content::Starts, Read)];
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, way), Read)));
                touched.push((Content::Logits, Write));
                touched
            }
            Action::Backward(node) => {
                let node = &self.backward.nodes[*node];
                let mut touched: Vec<_> = node.inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, way), Read)));
                for param in &node.accumulates_into {
                    let landing = (program.landing(way.kind, *param).content, Write);
                    if !touched.contains(&landing) {
                        touched.push(landing);
                    }
                }
                if node.accumulates_into.iter().any(|param| program.givers_round(way.kind, *param)) {
                    touched.push((Content::Report, Write));
                }
                if let Some(tokens) = self.tokens_of_waiting(way.kind, node) {
                    touched.extend([(value(&tokens), Read), (Content::WaitingRows, Write)]);
                }
                let of = self.graph.nodes[node.of].op;
                if of == Op::HeadLoss {
                    touched.extend([(Content::Input, Read), (Content::Control, Read)]);
                    touched.push((Content::Report, Write));
                }
                let outputs = node.outputs.iter().filter(|(output, _)| *output != self.backward.loss);
                touched.extend(outputs.map(|(output, _)| (value(output), Write)));
                touched.extend(beside(of).iter().map(|content| (*content, Read)));
                touched
            }
            Action::Recompute { node, from_sum } => {
                let node = &self.graph.nodes[*node];
                let inputs = if *from_sum { &node.outputs[..1] } else { &node.inputs[..] };
                let mut touched: Vec<_> = inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, way), Read)));
                let outputs = node.outputs[usize::from(*from_sum)..].iter();
                touched.extend(outputs.map(|output| (Content::Recomputed(output.index()), Write)));
                touched.extend(beside(node.op).iter().map(|content| (*content, Read)));
                touched
            }
            Action::Park(value) => vec![(Content::Value(*value), Read), (Content::Parked(*value), Write)],
            Action::Fetch(value) => vec![(Content::Parked(*value), Read), (Content::Fetched(*value), Write)],
            Action::Gather(flat) if program.held[*flat].weights == Tier::Host => {
                vec![(self.weights(*flat, way), Write)]
            }
            Action::Gather(flat) => vec![(Content::Weights(*flat), Read), (self.weights(*flat, way), Write)],
            Action::Stage(chunk) => vec![(Content::Weights(chunk.flat), Read), (Content::Staged(at), Write)],
            Action::Bring(chunk) => {
                let staged = way.find(chunk).filter(|content| matches!(content, Content::Staged(_)));
                let from = staged.unwrap_or(Content::Weights(chunk.flat));
                vec![(from, Read), (self.weights(chunk.flat, way), Write)]
            }
            Action::Release(_) => Vec::new(),
            Action::Clear(flat) => {
                let mut contents: Vec<Content> =
                    program.cleared(way.kind, *flat).iter().map(|part| part.content).collect();
                contents.sort_unstable();
                contents.dedup();
                contents.into_iter().map(|content| (content, Write)).collect()
            }
            Action::GatherGradient(flat) => vec![(Content::Gradient(*flat), Write)],
            Action::Keep(flat) | Action::RoundRest(flat) => {
                let mut touched = vec![(program.rounded(*flat), Write), (Content::Report, Write)];
                if !program.unrounded(way.kind, *flat).is_empty() {
                    touched.push((Content::Gradient(*flat), Read));
                }
                touched
            }
            Action::Pack(chunk) => {
                vec![(Content::Rounded(chunk.flat), Read), (Content::Sent(at), Write)]
            }
            Action::Round(chunk) => {
                vec![
                    (Content::Gradient(chunk.flat), Read),
                    (Content::Sent(at), Write),
                    (Content::Report, Write),
                ]
            }
            Action::Exchange(chunk) => vec![(gradient(chunk), Read), (Content::Received(at), Write)],
            Action::Add(chunk, addition) | Action::Reduce(chunk, addition) => {
                let sums = match (program.gradient_home(), on_host(chunk.flat)) {
                    (GradientHome::Landed, _) => Content::Gradient(chunk.flat),
                    (_, true) => Content::Summed(at),
                    (_, false) => Content::Kept(chunk.flat),
                };
                let mut touched = vec![(gradient(chunk), Read), (sums, Write)];
                let counts = matches!(instruction.action, Action::Reduce(..))
                    && program.completes(way.kind, chunk.flat, *addition);
                touched.extend(counts.then_some((Content::Report, Write)));
                touched
            }
            Action::SaveGradient(chunk, _) => {
                let from = match program.gradient_home() {
                    GradientHome::Landed => Content::Gradient(chunk.flat),
                    _ => gradient(chunk),
                };
                vec![(from, Read), (Content::Kept(chunk.flat), Write)]
            }
            Action::Squares(flat) => {
                // On its way to host memory a gradient is still here.
                let is_passing = way.kind != SectionKind::Update;
                let values = if is_passing { program.rounded(*flat) } else { summed(*flat) };
                vec![(values, Read), (Content::Report, Write)]
            }
            Action::Reports => vec![(Content::Report, Read), (Content::Reports, Write)],
            Action::Control => {
                let reports = if self.program.layout.ranks > 1 { Content::Reports } else { Content::Report };
                let reads = [Content::Recipe, Content::Input, reports].map(|content| (content, Read));
                reads.into_iter().chain([(Content::Control, Write), (Content::Record, Write)]).collect()
            }
            Action::Load(chunk) => {
                let living = Content::Living { flat: chunk.flat, first: chunk.range.start };
                let mut touched = vec![(living, Read), (Content::Tile(at), Write)];
                if on_host(chunk.flat) {
                    touched.push((summed(chunk.flat), Read));
                }
                if !program.has_master(chunk.flat) {
                    touched.push((Content::Weights(chunk.flat), Read));
                }
                touched
            }
            Action::Store(chunk) => {
                let living = Content::Living { flat: chunk.flat, first: chunk.range.start };
                let mut touched = vec![(way.tile(chunk), Read), (living, Write)];
                if !program.has_master(chunk.flat) {
                    touched.push((Content::Weights(chunk.flat), Write));
                }
                touched
            }
            Action::Update(chunk) if program.streams(chunk.flat) => {
                let flat = chunk.flat;
                let mut touched = vec![(Content::Control, Read), (way.tile(chunk), Write)];
                if !on_host(flat) {
                    touched.push((summed(flat), Read));
                }
                if program.has_master(flat) {
                    let here = program.held[flat].weights == Tier::Device;
                    touched.push((if here { Content::Weights(flat) } else { Content::Updated(at) }, Write));
                }
                touched
            }
            Action::Update(chunk) => {
                let (flat, held) = (chunk.flat, program.held[chunk.flat]);
                let mut touched = vec![(Content::Control, Read), (summed(flat), Read)];
                let [has_first, has_second] = program.optimizer.moments();
                let weights =
                    if held.weights == held.updates { Content::Weights(flat) } else { Content::Updated(at) };
                let states = [
                    has_first.then_some(Content::First(flat)),
                    has_second.then_some(Content::Second(flat)),
                    program.has_master(flat).then_some(Content::Master(flat)),
                    Some(weights),
                ];
                touched.extend(states.into_iter().flatten().map(|content| (content, Write)));
                touched
            }
            Action::PutBack(chunk) => {
                let updated = way.find(chunk).expect("a tile is updated before it is put back");
                vec![(updated, Read), (Content::Weights(chunk.flat), Write)]
            }
            Action::GatherWeights(Chunk { flat, .. }) | Action::SpreadWeights { flat, .. } => {
                vec![(Content::Weights(*flat), Write)]
            }
        }
    }
}

/// What stands for values, flats and chunks at a point of the list.
struct Simulation {
    kind: SectionKind,
    /// How often each flat was let go.
    stays: Vec<usize>,
    /// Chunks on their way, and the buffer they are in now.
    moving: Vec<(Chunk, Content)>,
    /// Tiles whose states were brought.
    tiles: Vec<(Chunk, Content)>,
    /// Values, and what stands for them now.
    current: Vec<Content>,
}

impl Simulation {
    fn put(&mut self, chunk: &Chunk, content: Content) {
        self.moving.retain(|(other, _)| other != chunk);
        self.moving.push((chunk.clone(), content));
    }

    fn find(&self, chunk: &Chunk) -> Option<Content> {
        self.moving.iter().rev().find(|(other, _)| other == chunk).map(|(_, content)| *content)
    }

    /// The buffer of its own that a chunk of a gradient is in.
    fn gradient(&self, chunk: &Chunk) -> Option<Content> {
        self.find(chunk)
            .filter(|content| matches!(content, Content::Sent(_) | Content::Received(_) | Content::Summed(_)))
    }

    fn tile(&self, chunk: &Chunk) -> Content {
        let found = self.tiles.iter().rev().find(|(other, _)| other == chunk);
        found.expect("a tile is brought before it is updated").1
    }
}

/// What an op and its gradient read beside their operands.
fn beside(op: Op) -> &'static [Content] {
    match op {
        Op::Rope { .. } | Op::HeadNormRope { .. } => &[Content::Cosines, Content::Sines],
        Op::Attention { .. } => &[Content::Starts],
        Op::Dropout { .. } => &[Content::Keys],
        _ => &[],
    }
}
