//! `checkpoint`: which activations are kept from forward to backward, recomputed, or offloaded to host memory.
//!
//! Keys: `zeroth.recompute`, `zeroth.recompute_blocks`, `activation_checkpointing.number_checkpoints`,
//! `activation_checkpointing.cpu_checkpointing`.
//!
//! A dropped value is recomputed by the same kernel from the same operands right before backward first reads it: the
//! same bits, later. With `block`, blocks are grouped into runs so that the requested number of inputs is kept;
//! everything a run computes that no other unit reads is dropped and recomputed before the run's backward. Where only
//! some blocks are recomputed, they are the first: backward reaches them when the memory of the others is free again. A run
//! has no gap: the blocks of an encoder and of its decoder are in runs of their own. What several blocks read, such as the
//! output of an encoder, is live between them in any case: it is kept, and stays on the device.
//!
//! The input of an adapter behind dropout is dropped in any case: otherwise every adapter would keep a masked copy of the
//! input that it shares with others. Each is recomputed alone, right before the gradient of the adapter's inner matrix.
//! What that matrix makes of it, [tokens, rank], is kept even where the block around it is recomputed.

use std::collections::{BTreeSet, HashMap};

use zeroth_graph::{Backward, Graph, Node, Op, Role, UnitId, Value};

use crate::{Action, Instruction, Program, Recompute, Section, Settings};

pub(super) fn checkpoint(
    mut program: Program,
    graph: &Graph,
    backward: &Backward,
    settings: &Settings,
) -> Program {
    let mut is_read_by_backward = vec![false; backward.values.len()];
    for input in backward.nodes.iter().flat_map(|node| &node.inputs) {
        is_read_by_backward[input.index()] = true;
    }
    let masked = masked_inputs(graph, &is_read_by_backward);
    // Recomputing a masked input reads what it masks.
    for input in masked.iter().flat_map(|masked| &graph.nodes[masked.dropout].inputs) {
        is_read_by_backward[input.index()] = true;
    }
    let model = Model { graph, backward, is_read_by_backward: &is_read_by_backward, masked: &masked };
    // A teacher has no backward. Only its last activation is read there, and its units are gathered no more.
    let is_of_model = |unit: &UnitId| graph.units[unit.index()].group == zeroth_graph::Group::Model;
    let all: Vec<UnitId> = (0..graph.units.len()).map(UnitId::at).filter(is_of_model).collect();
    let (runs, single) = match settings.recompute {
        Recompute::Nothing if masked.is_empty() => return program,
        Recompute::Nothing => (Vec::new(), Vec::new()),
        Recompute::NormSwiGlu => (Vec::new(), model.single(&all, |op| !matches!(op, Op::Attention(_)))),
        Recompute::Attention => (Vec::new(), model.single(&all, |_| true)),
        Recompute::Block { blocks: most, checkpoints: kept, .. } => {
            let blocks: Vec<Vec<UnitId>> = graph.blocks().collect();
            let first = most.map_or(blocks.len(), |most| blocks.len().min(most as usize));
            let (first, others) = blocks.split_at(first);
            (model.runs(first, kept), model.single(&others.concat(), |op| !matches!(op, Op::Attention(_))))
        }
    };
    let parked = matches!(settings.recompute, Recompute::Block { offloaded: true, .. });
    let entering = if parked { model.entering(&runs) } else { Vec::new() };
    let alone = masked.iter().map(|masked| Group {
        dropped: BTreeSet::from([graph.nodes[masked.dropout].outputs[0].index()]),
        nodes: vec![masked.dropout],
    });
    let groups: Vec<Group> = runs.into_iter().chain(single).chain(alone).collect();
    let sections = std::mem::take(&mut program.sections);
    program.sections = sections
        .into_iter()
        .map(|section| {
            if !section.is_micro_batch() {
                return section;
            }
            let section = model.recomputed(&program, section, &groups);
            model.offloaded_between(section, &entering)
        })
        .collect();
    program
}

/// Values that are recomputed together: the dropped values, and the nodes that recompute those that backward reads.
struct Group {
    dropped: BTreeSet<usize>,
    nodes: Vec<usize>,
}

/// The input of an adapter behind dropout.
struct MaskedInput {
    /// The dropout node.
    dropout: usize,
    /// What the inner matrices of adapters make of it.
    projected: Vec<Value>,
}

/// The outputs of an op that are large, cheap to recompute, and read by its consumers alone: a residual sum flows on and stays.
fn recomputable(node: &Node) -> &[Value] {
    match node.op {
        Op::RmsNorm { .. }
        | Op::HeadNormRope { .. }
        | Op::GatedActivation(_)
        | Op::Activation(_)
        | Op::Dropout { .. }
        | Op::Scale { .. }
        | Op::GatherRows
        | Op::GatedRows(_) => &node.outputs[..1],
        Op::AddRmsNorm { .. } => &node.outputs[1..2],
        Op::Attention(_) => &node.outputs,
        _ => &[],
    }
}

/// Whether an op's gradient does not read its input, which its recomputation does.
const fn is_linear_map(op: Op) -> bool {
    matches!(op, Op::Dropout { .. } | Op::Scale { .. })
}

/// The dropouts that only inner matrices of adapters read, where backward reads their output.
fn masked_inputs(graph: &Graph, is_read_by_backward: &[bool]) -> Vec<MaskedInput> {
    let mut readers: Vec<Vec<&Node>> = vec![Vec::new(); graph.values.len()];
    for node in &graph.nodes {
        node.inputs.iter().for_each(|input| readers[input.index()].push(node));
    }
    let is_inner = |node: &&Node| {
        let u = node.outputs[0];
        let is_outer = |outer: &&Node| matches!(outer.op, Op::LinearAdd { .. }) && outer.inputs[1] == u;
        node.op == Op::Linear && readers[u.index()].iter().any(is_outer)
    };
    let dropouts = graph.nodes.iter().enumerate().filter(|(_, node)| {
        let y = node.outputs[0].index();
        matches!(node.op, Op::Dropout { .. }) && is_read_by_backward[y] && readers[y].iter().all(is_inner)
    });
    let masked = |(dropout, node): (usize, &Node)| MaskedInput {
        dropout,
        projected: readers[node.outputs[0].index()].iter().map(|inner| inner.outputs[0]).collect(),
    };
    dropouts.map(masked).collect()
}

#[derive(Clone, Copy)]
struct Model<'a> {
    graph: &'a Graph,
    backward: &'a Backward,
    /// By value.
    is_read_by_backward: &'a [bool],
    masked: &'a [MaskedInput],
}

impl Model<'_> {
    /// A group for each norm, activation, dropout, factor, copy of tokens to experts and attention of these units whose op is wanted;
    /// only its own output is dropped.
    fn single(&self, units: &[UnitId], wanted: impl Fn(Op) -> bool) -> Vec<Group> {
        let mut groups: Vec<Option<Group>> = Vec::new();
        // The group that drops a value.
        let mut owners: HashMap<usize, usize> = HashMap::new();
        let (inside, shared) = (self.inside(units), self.read_by_several_blocks());
        let is_masked = |index: usize| self.masked.iter().any(|masked| masked.dropout == index);
        let is_candidate = |(index, node): &(usize, &Node)| {
            let stays = recomputable(node).first().is_none_or(|output| shared[output.index()]);
            inside[node.unit.index()] && wanted(node.op) && !stays && !is_masked(*index)
        };
        let candidates: Vec<(usize, &Node)> =
            self.graph.nodes.iter().enumerate().filter(is_candidate).collect();
        let is_read = self.read_with_recomputed(&candidates);
        for (index, node) in candidates {
            let given = recomputable(node);
            let dropped = || given.iter().map(|value| value.index());
            if !dropped().any(|value| is_read[value]) {
                continue;
            }
            let mut dropped: BTreeSet<usize> = dropped().collect();
            // An op's inputs may be dropped too: they are recomputed in one group with it, right before it.
            let feeding: BTreeSet<usize> =
                node.inputs.iter().filter_map(|value| owners.get(&value.index()).copied()).collect();
            let mut nodes = Vec::new();
            for earlier in feeding.into_iter().filter_map(|place| groups[place].take()) {
                nodes.extend(earlier.nodes);
                dropped.extend(earlier.dropped);
            }
            nodes.push(index);
            owners.extend(dropped.iter().map(|value| (*value, groups.len())));
            groups.push(Some(Group { dropped, nodes }));
        }
        groups.into_iter().flatten().collect()
    }

    /// By value: whether backward, or the recomputation of what backward reads, reads it as an output of these nodes. A dropout or
    /// a factor counts only where its own input is read by backward or recomputed: else its input would be kept for it.
    fn read_with_recomputed(&self, candidates: &[(usize, &Node)]) -> Vec<bool> {
        let mut is_dropped = vec![false; self.graph.values.len()];
        for (_, node) in candidates {
            let x = node.inputs[0].index();
            if !is_linear_map(node.op) || is_dropped[x] || self.is_read_by_backward[x] {
                for output in recomputable(node) {
                    is_dropped[output.index()] = true;
                }
            }
        }
        let mut is_read = vec![false; self.graph.values.len()];
        for (_, node) in candidates.iter().rev() {
            for output in recomputable(node).iter().map(|output| output.index()) {
                is_read[output] |= is_dropped[output] && self.is_read_by_backward[output];
                is_read[node.inputs[0].index()] |= is_read[output] && is_linear_map(node.op);
            }
        }
        is_read
    }

    /// By value: whether several blocks read it.
    fn read_by_several_blocks(&self) -> Vec<bool> {
        let mut first: Vec<Option<u64>> = vec![None; self.graph.values.len()];
        let mut several = vec![false; self.graph.values.len()];
        for node in &self.graph.nodes {
            let Role::Block(block) = self.graph.units[node.unit.index()].role else { continue };
            for input in &node.inputs {
                several[input.index()] |= *first[input.index()].get_or_insert(block) != block;
            }
        }
        several
    }

    /// For each unit of the graph, whether it is one of these.
    fn inside(&self, units: &[UnitId]) -> Vec<bool> {
        let mut inside = vec![false; self.graph.units.len()];
        for unit in units {
            inside[unit.index()] = true;
        }
        inside
    }

    /// A group for each run of these blocks, so that at most `kept` inputs stay, or one for each stack of blocks.
    fn runs(&self, blocks: &[Vec<UnitId>], kept: Option<u64>) -> Vec<Group> {
        let most = blocks.len();
        let kept = kept.map_or(most, |kept| kept as usize);
        let is_next = |block: &Vec<UnitId>, next: &Vec<UnitId>| {
            block.last().map(|unit| unit.index() + 1) == next.first().map(|unit| unit.index())
        };
        let stacks: Vec<&[Vec<UnitId>]> = blocks.chunk_by(is_next).collect();
        let count = |length: usize| stacks.iter().map(|stack| stack.len().div_ceil(length)).sum::<usize>();
        let length = (1..most).find(|length| count(*length) <= kept).unwrap_or(most.max(1));
        let runs = stacks.iter().flat_map(|stack| stack.chunks(length));
        runs.map(|blocks| self.run(&blocks.concat())).collect()
    }

    fn run(&self, units: &[UnitId]) -> Group {
        let is_inside = self.inside(units);
        let inside = |node: &Node| is_inside[node.unit.index()];
        let own = self.graph.nodes.iter().filter(|node| inside(node));
        let mut dropped: BTreeSet<usize> =
            own.flat_map(|node| node.outputs.iter().map(|o| o.index())).collect();
        for input in self.graph.nodes.iter().filter(|node| !inside(node)).flat_map(|node| &node.inputs) {
            dropped.remove(&input.index());
        }
        for MaskedInput { dropout, projected } in self.masked {
            dropped.remove(&self.graph.nodes[*dropout].outputs[0].index());
            for value in projected {
                dropped.remove(&value.index());
            }
        }
        // Backwards over the nodes: one is needed if backward or a needed node reads its output.
        let mut needed: BTreeSet<usize> =
            dropped.iter().copied().filter(|value| self.is_read_by_backward[*value]).collect();
        let mut nodes = Vec::new();
        for (index, node) in self.graph.nodes.iter().enumerate().rev().filter(|(_, node)| inside(node)) {
            if node.outputs.iter().any(|value| needed.contains(&value.index())) {
                let inputs = node.inputs.iter().map(|value| value.index());
                needed.extend(inputs.filter(|value| dropped.contains(value)));
                nodes.push(index);
            }
        }
        nodes.reverse();
        Group { dropped, nodes }
    }

    fn recomputed(&self, program: &Program, section: Section, groups: &[Group]) -> Section {
        // The group that drops a value; a value is dropped once.
        let dropped = |(place, group): (usize, &Group)| {
            group.dropped.iter().map(move |value| (*value, place)).collect::<Vec<_>>()
        };
        let owners: HashMap<usize, usize> = groups.iter().enumerate().flat_map(dropped).collect();
        let mut is_done = vec![false; groups.len()];
        let mut out = Vec::with_capacity(section.instructions.len());
        for instruction in section.instructions {
            if let Action::Backward(node) = instruction.action {
                let reads = &self.backward.nodes[node].inputs;
                let due: BTreeSet<usize> =
                    reads.iter().filter_map(|value| owners.get(&value.index()).copied()).collect();
                for place in due {
                    self.recompute(program, groups, &owners, place, &mut is_done, &mut out);
                }
            }
            out.push(instruction);
        }
        Section { kind: section.kind, instructions: out }
    }

    /// Recomputes a group, after those that drop what it reads.
    fn recompute(
        &self,
        program: &Program,
        groups: &[Group],
        owners: &HashMap<usize, usize>,
        place: usize,
        is_done: &mut [bool],
        out: &mut Vec<Instruction>,
    ) {
        if std::mem::replace(&mut is_done[place], true) {
            return;
        }
        let group = &groups[place];
        for input in group.nodes.iter().flat_map(|node| &self.graph.nodes[*node].inputs) {
            if let Some(earlier) = owners.get(&input.index()) {
                self.recompute(program, groups, owners, *earlier, is_done, out);
            }
        }
        out.extend(group.nodes.iter().map(|node| self.again(program, *node, group)));
    }

    fn again(&self, program: &Program, index: usize, group: &Group) -> Instruction {
        let node = &self.graph.nodes[index];
        let from_sum =
            matches!(node.op, Op::AddRmsNorm { .. }) && !group.dropped.contains(&node.outputs[0].index());
        Instruction {
            reads: Program::flats_of(&program.layout, &node.params),
            ..Instruction::new(Action::Recompute { node: index, from_sum })
        }
    }

    /// Offloads these values after forward's last use and reloads them before backward's first.
    fn offloaded_between(&self, section: Section, values: &[usize]) -> Section {
        let forward_reads = |action: &Action, value: usize| match action {
            Action::Forward(node) => self.graph.nodes[*node].inputs.iter().any(|v| v.index() == value),
            _ => false,
        };
        let backward_reads = |action: &Action, value: usize| match action {
            Action::Recompute { node, .. } => {
                self.graph.nodes[*node].inputs.iter().any(|v| v.index() == value)
            }
            Action::Backward(node) => self.backward.nodes[*node].inputs.iter().any(|v| v.index() == value),
            _ => false,
        };
        let mut instructions = section.instructions;
        for &value in values {
            let (Some(last), Some(first)) = (
                instructions.iter().rposition(|i| forward_reads(&i.action, value)),
                instructions.iter().position(|i| backward_reads(&i.action, value)),
            ) else {
                continue;
            };
            instructions.insert(first, Instruction::new(Action::ReloadActivation(value)));
            instructions.insert(last + 1, Instruction::new(Action::OffloadActivation(value)));
        }
        Section { kind: section.kind, instructions }
    }

    /// The inputs of the runs, without those of the model and those of several blocks.
    fn entering(&self, groups: &[Group]) -> Vec<usize> {
        let shared = self.read_by_several_blocks();
        let mut values: Vec<usize> = groups
            .iter()
            .flat_map(|group| group.nodes.iter().map(move |node| (group, *node)))
            .flat_map(|(group, node)| {
                let inputs = self.graph.nodes[node].inputs.iter().map(|value| value.index());
                inputs.filter(move |value| !group.dropped.contains(value))
            })
            .filter(|value| !shared[*value])
            .filter(|value| !self.graph.inputs.iter().any(|input| input.index() == *value))
            .collect();
        values.sort_unstable();
        values.dedup();
        values
    }
}
