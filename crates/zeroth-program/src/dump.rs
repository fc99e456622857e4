//! Program dumps: a compiled program as text, one line per instruction, in the style of LLVM IR.
//!
//! ```text
//! section update:
//!   %12 = all_gather flat3 [comm] waits(%9)
//! ```
//!
//! A line has the number of the instruction in its section, its opcode, its operands, its queue, and the instructions of
//! other queues it waits for; waits for an earlier section carry the section's name. `vN` is a value of the graph, `flatN` a
//! flat of the layout, `flatN[a..b]` a range within every rank's shard of it. Tests compare dumps, so that a change of a pass
//! is a diff of text.

use std::fmt;

use zeroth_graph::{GradOp, Op, Value};
use zeroth_kernel::Tier;

use crate::{Action, Chunk, Compiled, Flat, Instruction, Residency};

impl fmt::Display for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = &self.program;
        writeln!(
            f,
            "program: stage {}, ranks {}, micro_batches {}, compute {}, communication {}, optimizer {:?}",
            program.stage,
            program.layout.ranks,
            program.accumulation,
            program.types.compute,
            program.types.communication,
            program.optimizer,
        )?;
        for (index, flat) in program.layout.flats.iter().enumerate() {
            self.fmt_flat(f, index, flat)?;
        }
        for (index, section) in program.sections.iter().enumerate() {
            writeln!(f, "\nsection {}:", section.kind.name())?;
            for (at, instruction) in section.instructions.iter().enumerate() {
                write!(f, "  %{at} = {}", instruction.action.name())?;
                self.fmt_operands(f, instruction)?;
                write!(f, " [{}]", instruction.queue.name())?;
                self.fmt_waits(f, index, at)?;
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

impl Compiled {
    fn fmt_flat(&self, f: &mut fmt::Formatter<'_>, index: usize, flat: &Flat) -> fmt::Result {
        let Residency { weights, gradients, states, updates, .. } = self.program.residency[index];
        let ranks = self.program.layout.ranks;
        write!(
            f,
            "flat{index}: {}, {} elements, shard {}, weights {}",
            self.flat_name(index),
            flat.elements(),
            flat.shard_capacity(ranks),
            tier(weights)
        )?;
        if self.program.is_trained(index) {
            write!(f, ", gradients {}, states {}, update {}", tier(gradients), tier(states), tier(updates))?;
        }
        writeln!(f)
    }

    fn fmt_operands(&self, f: &mut fmt::Formatter<'_>, instruction: &Instruction) -> fmt::Result {
        match &instruction.action {
            Action::Forward(node) => {
                let node = &self.graph.nodes[*node];
                write!(f, " {} {} -> {}", node.op.name(), values(&node.inputs), values(&node.outputs))?;
            }
            Action::Logits { node, sequences } => {
                let x = self.graph.nodes[*node].inputs[0];
                write!(f, " {}, {sequences} sequences", values(&[x]))?;
            }
            Action::StoreKv(node) => write!(f, " {}", values(&self.graph.nodes[*node].inputs[1..]))?,
            Action::CachedAttention(node) => {
                let node = &self.graph.nodes[*node];
                write!(f, " {} -> {}", values(&node.inputs[..1]), values(&node.outputs[..1]))?;
            }
            Action::Backward(node) => {
                let node = &self.backward.nodes[*node];
                let outputs: Vec<Value> = node.outputs.iter().map(|(output, _)| *output).collect();
                let name = gradient_name(node.op, self.graph.nodes[node.of].op);
                write!(f, " {name} {} -> {}", values(&node.inputs), values(&outputs))?;
            }
            Action::Recompute { node, from_sum } => {
                let node = &self.graph.nodes[*node];
                let inputs = if *from_sum { &node.outputs[..1] } else { &node.inputs[..] };
                let outputs = &node.outputs[usize::from(*from_sum)..];
                write!(f, " {} {} -> {}", node.op.name(), values(inputs), values(outputs))?;
            }
            Action::OffloadActivation(value) | Action::ReloadActivation(value) => write!(f, " v{value}")?,
            Action::BroadcastWeights { flat, root } => write!(f, " flat{flat}, root {root}")?,
            action => match (action.chunk(), action.flat()) {
                (Some(Chunk { flat, range }), _) => write!(f, " flat{flat}[{}..{}]", range.start, range.end)?,
                (None, Some(flat)) => write!(f, " flat{flat}")?,
                (None, None) => {}
            },
        }
        fmt_flats(f, "reads", &instruction.reads)?;
        fmt_flats(f, "accumulates", &instruction.accumulates_into)
    }

    fn fmt_waits(&self, f: &mut fmt::Formatter<'_>, section: usize, at: usize) -> fmt::Result {
        let memory = &self.memory.sections[section];
        let within = memory.waits[at].iter().map(|earlier| format!("%{earlier}"));
        let across = memory.cross_step_waits.get(at).into_iter().flatten();
        let across = across
            .map(|(section, earlier)| format!("{}%{earlier}", self.program.sections[*section].kind.name()));
        let waits: Vec<String> = within.chain(across).collect();
        if waits.is_empty() { Ok(()) } else { write!(f, " waits({})", waits.join(", ")) }
    }
}

/// The name of a gradient op: that of its forward op, and which operand's gradient it is where there are several ops.
const fn gradient_name(op: GradOp, of: Op) -> &'static str {
    match op {
        GradOp::LinearInput => "linear_input",
        GradOp::LinearParams => "linear_params",
        GradOp::Sum => "sum",
        _ => of.name(),
    }
}

const fn tier(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
    }
}

fn values(values: &[Value]) -> String {
    let names: Vec<String> = values.iter().map(|value| format!("v{}", value.index())).collect();
    if names.is_empty() { "()".to_owned() } else { names.join(", ") }
}

fn fmt_flats(f: &mut fmt::Formatter<'_>, what: &str, flats: &[usize]) -> fmt::Result {
    if flats.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = flats.iter().map(|flat| format!("flat{flat}")).collect();
    write!(f, " {what}({})", names.join(", "))
}
