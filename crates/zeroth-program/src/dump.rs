//! Program dumps: a compiled program as text, one line per instruction, in the style of LLVM IR.
//!
//! ```text
//! section update:
//!   %12 = all_gather flat3 reads(weights3) writes(gathered3.0) [comm] waits(%9)
//! ```
//!
//! A line has the number of the instruction in its section, its opcode, the buffers it reads and writes, its queue, and the
//! instructions of other queues it waits for; waits for an earlier section carry the section's name. `flatN` is a flat of the
//! layout, `flatN[a..b]` a range within every rank's shard of it, `gatheredN.k` its k-th gathered copy in the section, `vN` a
//! value of the graph, `send_chunk%N` a chunk that instruction N packed. With several groups of ranks, collectives and sums
//! name their axis: `along(rail)`. Tests compare dumps, so that a change of a pass is a diff of text.

use std::fmt;

use zeroth_graph::{GradOp, Op};
use zeroth_kernel::Tier;

use crate::{Action, Chunk, Compiled, Flat, Residency};

impl fmt::Display for Compiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (program, world) = (&self.program, self.program.layout.world);
        writeln!(
            f,
            "program: stage {}, ranks {}{}, micro_batches {}, compute {}, communication {}, optimizer {:?}",
            program.stage,
            program.layout.ranks(),
            if world.groups() > 1 { format!(" in groups of {}", world.group) } else { String::new() },
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
                self.fmt_action(f, &instruction.action)?;
                self.fmt_axis(f, &instruction.action)?;
                write!(f, "{} [{}]", instruction.operands, instruction.queue.name())?;
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
        let ranks = self.program.layout.ranks();
        write!(
            f,
            "flat{index}: {}, {} elements, shard {}, weights {}",
            self.flat_name(index),
            flat.elements(),
            flat.shard_capacity(ranks),
            weights.name()
        )?;
        if self.program.is_trained(index) {
            let [gradients, states, updates] = [gradients, states, updates].map(Tier::name);
            write!(f, ", gradients {gradients}, states {states}, update {updates}")?;
        }
        writeln!(f)
    }

    /// What the opcode does it to, besides its operands.
    fn fmt_action(&self, f: &mut fmt::Formatter<'_>, action: &Action) -> fmt::Result {
        match action {
            Action::Forward(node) | Action::Recompute { node, .. } | Action::EvaluateLoss(node) => {
                write!(f, " {}", self.graph.nodes[*node].op.name())
            }
            Action::Backward(node) => {
                let node = &self.backward.nodes[*node];
                write!(f, " {}", gradient_name(node.op, self.graph.nodes[node.of].op))
            }
            Action::Unpack(param) => write!(f, " {}", self.graph.param(*param).spec.name),
            Action::Logits { sequences, .. } => write!(f, " {sequences} sequences"),
            Action::TopLogProbs { k, .. } => write!(f, " {k}"),
            Action::BroadcastWeights { flat, root, .. } => write!(f, " flat{flat}, root {root}"),
            action => match (action.chunk(), action.flat()) {
                (Some(Chunk { flat, range }), _) => write!(f, " flat{flat}[{}..{}]", range.start, range.end),
                (None, Some(flat)) => write!(f, " flat{flat}"),
                (None, None) => Ok(()),
            },
        }
    }

    /// The axis of a collective or a sum, where there are several groups.
    fn fmt_axis(&self, f: &mut fmt::Formatter<'_>, action: &Action) -> fmt::Result {
        let axis = match action {
            Action::SumRanks(.., axis) => Some(*axis),
            action => action.collective_axis(),
        };
        match axis {
            Some(axis) if self.program.layout.world.groups() > 1 => write!(f, " along({axis})"),
            _ => Ok(()),
        }
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
        GradOp::LinearAddInput { .. } => "linear_add_input",
        GradOp::LinearAddParams { .. } => "linear_add_params",
        GradOp::Sum => "sum",
        _ => of.name(),
    }
}
