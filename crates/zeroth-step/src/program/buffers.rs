//! The buffers of a program: what each holds, how large it is, and which instructions touch it.

use zeroth_base::DType;
use zeroth_device::cpu::{ExactSum, RowKey};
use zeroth_device::{Access, Control, Recipe, Record, Report, StepInput};
use zeroth_graph::{Backward, Graph, Kind, Op, Value};

use super::{Action, GradientHome, Instruction, Program, Section};

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
    /// The f32 flat in which gradients land.
    Gradient(usize),
    /// A flat's gradient as kept for the update, where that is not the flat in which it landed.
    Kept(usize),
    /// Master weights of what this rank updates of a flat.
    Master(usize),
    /// First moments.
    First(usize),
    /// Second moments.
    Second(usize),
    /// A value of forward or backward.
    Value(usize),
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
    /// A flat that an instruction gathered.
    Gathered(usize),
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
    /// Its size, rounded up to the alignment.
    pub bytes: u64,
}

/// A program with the model it was compiled for: all that sizes follow from.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) program: &'a Program,
    pub(super) graph: &'a Graph,
    pub(super) backward: &'a Backward,
}

/// Bytes of one rank's report: its loss and a sum for every flat.
pub(crate) const fn report_bytes(flats: usize) -> u64 {
    (size_of::<Report>() + flats * size_of::<ExactSum>()) as u64
}

/// Bytes of a record: its head and a norm for every flat.
pub(crate) const fn record_bytes(flats: usize) -> u64 {
    (size_of::<Record>() + 8 * flats) as u64
}

impl Source<'_> {
    fn rows(&self) -> u64 {
        self.graph.inputs.first().map_or(0, |ids| self.graph.info(*ids).rows)
    }

    fn has_dropout(&self) -> bool {
        self.graph.nodes.iter().any(|node| matches!(node.op, Op::Dropout { .. }))
    }

    /// Whether the master weights are apart from the weights computed with.
    pub(super) fn has_master(&self) -> bool {
        self.program.types.run != DType::F32
    }

    /// The buffers that are there all the time.
    pub(super) fn always(&self) -> Vec<Buffer> {
        let (program, layout) = (self.program, &self.program.layout);
        let (run, home) = (program.types.run.bytes(), program.gradient_home());
        let mut all = Vec::new();
        let mut push = |content, category, bytes| all.push(Buffer { content, category, bytes });
        for (flat, held) in layout.flats.iter().enumerate() {
            let shard = held.shard_capacity(layout.ranks);
            let weights = if program.stays_gathered(flat) { held.padded() } else { shard };
            push(Content::Weights(flat), Category::Parameters, run * weights);
            if !program.is_trained(flat) {
                continue;
            }
            match home {
                GradientHome::Landed => push(Content::Gradient(flat), Category::Gradients, 4 * held.padded()),
                GradientHome::Rounded => {
                    let bytes = program.types.communication.bytes() * held.padded();
                    push(Content::Kept(flat), Category::Gradients, bytes);
                }
                GradientHome::Shard => push(Content::Kept(flat), Category::Gradients, 4 * shard),
            }
            let updated = 4 * program.updated_capacity(flat);
            if self.has_master() {
                push(Content::Master(flat), Category::Optimizer, updated);
            }
            push(Content::First(flat), Category::Optimizer, updated);
            push(Content::Second(flat), Category::Optimizer, updated);
        }
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
        all
    }

    /// The size and purpose of a buffer that comes and goes in a section.
    pub(super) fn passing(&self, section: &Section, content: Content, scratch: &[u64]) -> Buffer {
        let (layout, types) = (&self.program.layout, self.program.types);
        let chunk = |at: usize| match &section.instructions[at].action {
            Action::Round(chunk) | Action::Exchange(chunk) => chunk.range.end - chunk.range.start,
            other => unreachable!("{other:?} moves no chunk"),
        };
        let (category, bytes) = match content {
            Content::Value(value) => (Category::Activations, self.value_bytes(value)),
            Content::Gathered(at) => {
                let flat = section.instructions[at].action.flat().expect("a gather is about a flat");
                (Category::Buffers, layout.flats[flat].padded() * types.run.bytes())
            }
            Content::Gradient(flat) => (Category::Buffers, 4 * layout.flats[flat].padded()),
            Content::Sent(at) | Content::Received(at) => {
                (Category::Buffers, chunk(at) * layout.ranks * types.communication.bytes())
            }
            Content::Scratch(at) => (Category::Buffers, scratch[at]),
            other => unreachable!("{other:?} is always there"),
        };
        Buffer { content, category, bytes }
    }

    fn value_bytes(&self, value: usize) -> u64 {
        let info = self.backward.values[value];
        let element = match info.kind {
            Kind::Activation => self.program.types.run.bytes(),
            Kind::Statistic | Kind::Index => 4,
        };
        info.elements() * element
    }

    /// Every buffer that each instruction of a section touches, in the order of the list.
    pub(super) fn touches(&self, section: &Section, scratch: &[u64]) -> Vec<Vec<(Content, Access)>> {
        let mut gathered: Vec<Option<usize>> = vec![None; self.program.layout.flats.len()];
        let mut sent: Vec<(super::Chunk, Content)> = Vec::new();
        section
            .instructions
            .iter()
            .enumerate()
            .map(|(at, instruction)| {
                if let Action::Gather(flat) = instruction.action {
                    gathered[flat] = Some(at);
                }
                if let Action::Round(chunk) = &instruction.action {
                    sent.push((chunk.clone(), Content::Sent(at)));
                }
                let mut touched = self.touched(at, instruction, &gathered, &sent);
                // From here on the chunk is what came from all ranks.
                if let Action::Exchange(chunk) = &instruction.action {
                    sent.retain(|(other, _)| other != chunk);
                    sent.push((chunk.clone(), Content::Received(at)));
                }
                if scratch[at] > 0 {
                    touched.push((Content::Scratch(at), Access::Write));
                }
                touched
            })
            .collect()
    }

    /// Where an instruction reads a flat's parameters.
    fn weights(&self, flat: usize, gathered: &[Option<usize>]) -> Content {
        if self.program.stays_gathered(flat) {
            return Content::Weights(flat);
        }
        gathered[flat].map_or(Content::Weights(flat), Content::Gathered)
    }

    fn touched(
        &self,
        at: usize,
        instruction: &Instruction,
        gathered: &[Option<usize>],
        sent: &[(super::Chunk, Content)],
    ) -> Vec<(Content, Access)> {
        use Access::{Read, Write};
        let of = |chunk: &super::Chunk| {
            let found = sent.iter().rev().find(|(other, _)| other == chunk);
            found.map(|(_, content)| *content).expect("a chunk is rounded before it is moved and added")
        };
        let value = |value: &Value| Content::Value(value.index());
        match &instruction.action {
            Action::ClearLoss => vec![(Content::Report, Write)],
            Action::Forward(node) => {
                let node = &self.graph.nodes[*node];
                let mut touched: Vec<_> = node.inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, gathered), Read)));
                if node.op == Op::HeadLoss {
                    touched.push((Content::Report, Write));
                } else {
                    touched.extend(node.outputs.iter().map(|output| (value(output), Write)));
                }
                touched.extend(beside(node.op).iter().map(|content| (*content, Read)));
                touched
            }
            Action::Backward(node) => {
                let node = &self.backward.nodes[*node];
                let mut touched: Vec<_> = node.inputs.iter().map(|input| (value(input), Read)).collect();
                touched.extend(instruction.reads.iter().map(|flat| (self.weights(*flat, gathered), Read)));
                touched.extend(instruction.lands.iter().map(|flat| (Content::Gradient(*flat), Write)));
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
            Action::Gather(flat) => vec![(Content::Weights(*flat), Read), (Content::Gathered(at), Write)],
            Action::Release(_) => Vec::new(),
            Action::Clear(flat) | Action::GatherGradient(flat) => vec![(Content::Gradient(*flat), Write)],
            Action::Keep(flat) => vec![(Content::Gradient(*flat), Read), (Content::Kept(*flat), Write)],
            Action::Round(chunk) => vec![(Content::Gradient(chunk.flat), Read), (of(chunk), Write)],
            Action::Exchange(chunk) => vec![(of(chunk), Read), (Content::Received(at), Write)],
            Action::Add(chunk, _) => vec![(of(chunk), Read), (self.summed(chunk.flat), Write)],
            Action::Squares(flat) => vec![(self.summed(*flat), Read), (Content::Report, Write)],
            Action::Reports => vec![(Content::Report, Read), (Content::Reports, Write)],
            Action::Control => {
                let reports = if self.program.layout.ranks > 1 { Content::Reports } else { Content::Report };
                let reads = [Content::Recipe, Content::Input, reports].map(|content| (content, Read));
                reads.into_iter().chain([(Content::Control, Write), (Content::Record, Write)]).collect()
            }
            Action::Update(flat) => {
                let mut touched = vec![(Content::Control, Read), (self.summed(*flat), Read)];
                let states = [Content::First(*flat), Content::Second(*flat), Content::Weights(*flat)];
                touched.extend(states.map(|content| (content, Write)));
                if self.has_master() {
                    touched.push((Content::Master(*flat), Write));
                }
                touched
            }
            Action::GatherWeights(flat) => vec![(Content::Weights(*flat), Write)],
        }
    }

    /// Where a flat's gradient is when it is complete.
    pub(super) fn summed(&self, flat: usize) -> Content {
        match self.program.gradient_home() {
            GradientHome::Landed => Content::Gradient(flat),
            GradientHome::Rounded | GradientHome::Shard => Content::Kept(flat),
        }
    }
}

/// What an op and its gradient read beside their operands.
fn beside(op: Op) -> &'static [Content] {
    match op {
        Op::Rope { .. } => &[Content::Cosines, Content::Sines],
        Op::Attention { .. } => &[Content::Starts],
        Op::Dropout { .. } => &[Content::Keys],
        _ => &[],
    }
}
