//! `lower`: forward and backward of a micro-batch, split into the sections of a step; or forward alone, for inference.
//!
//! Keys: `gradient_accumulation_steps`, `zero_optimization.stage`.

use zeroth_graph::{Backward, Graph, Node, Op};

use super::offload::hold;
use crate::Layout;
use crate::grad_producers::grad_producers;
use crate::memory::buffer::ALIGNMENT;
use crate::memory::shared_buffers::SharedBuffers;
use crate::streams::{Sides, cross_streams, is_attention, is_cross};
use crate::{
    Action, CachedTokens, Gather, GradProducers, Instruction, Program, RouterCounts, Section, SectionKind,
    Settings, TopLogProbs,
};

/// Larger than any device: a larger window counts as this and exceeds every budget.
const MOST_WINDOW: u64 = 1 << 60;

pub(super) fn lower(graph: &Graph, backward: &Backward, layout: Layout, settings: &Settings) -> Program {
    let kinds: &[SectionKind] = match settings.accumulation {
        0 | 1 => &[SectionKind::Only],
        2 => &[SectionKind::First, SectionKind::Last],
        _ => &[SectionKind::First, SectionKind::Middle, SectionKind::Last],
    };
    let section = |kind: &SectionKind| Section {
        kind: *kind,
        instructions: micro_batch(graph, backward, &layout, kind.is_first()),
    };
    let mut sections: Vec<Section> = kinds.iter().map(section).collect();
    sections.push(Section { kind: SectionKind::Eval, instructions: evaluation(graph, &layout) });
    let grad_producers = grad_producers(graph, backward, settings);
    let program = program(graph, layout, sections, grad_producers, settings);
    Program { routers: RouterCounts::find(graph), ..program }
}

/// Forward with a head that computes next-token logits instead of a loss. With a cache, that section stores keys and
/// values, and another one decodes with them. An encoder-decoder with a cache has a section for its encoder, which stores the keys
/// and values of cross attention, and the one that decodes.
pub(super) fn lower_inference(
    graph: &Graph,
    layout: Layout,
    settings: &Settings,
    sequences: u64,
    cached: CachedTokens,
) -> Program {
    let kinds: &[SectionKind] = match (cached.tokens > 0, cross_streams(graph)) {
        (false, _) => &[SectionKind::Logits],
        (true, None) => &[SectionKind::Logits, SectionKind::Decode],
        (true, Some(_)) => &[SectionKind::Encode, SectionKind::Decode],
    };
    let sides = Sides::of(graph);
    let of_node = |kind: SectionKind, instruction: Instruction| -> Vec<Instruction> {
        let Action::Forward(at) = instruction.action else { return vec![instruction] };
        let (attends, is_cross) = (is_attention(&graph.nodes[at]), is_cross(graph, &graph.nodes[at]));
        let store = Instruction::new(Action::StoreKv(at));
        let attend = Instruction::new(Action::CachedAttention(at));
        match kind {
            SectionKind::Encode if is_cross && sides.decodes[at] => vec![store],
            SectionKind::Encode if !sides.encodes[at] => Vec::new(),
            SectionKind::Decode if !sides.decodes[at] => Vec::new(),
            SectionKind::Decode if is_cross => vec![attend],
            SectionKind::Decode if attends => vec![store, attend],
            SectionKind::Logits if attends && cached.tokens > 0 => vec![instruction, store],
            _ => vec![instruction],
        }
    };
    let of_kind = |kind: &SectionKind| {
        let nodes = without_losses(graph, &layout).into_iter();
        let mut instructions: Vec<Instruction> =
            nodes.flat_map(|instruction| of_node(*kind, instruction)).collect();
        if *kind != SectionKind::Encode {
            instructions.extend(of_heads(graph, &layout, |node| Action::Logits { node, sequences }));
        }
        Section { kind: *kind, instructions }
    };
    let sections = kinds.iter().map(of_kind).collect();
    Program {
        cached_tokens: cached.tokens,
        cached_source_tokens: cached.source_tokens,
        ..program(graph, layout, sections, Vec::new(), settings)
    }
}

/// Forward with a head that computes the most probable tokens of every row instead of a loss.
pub(super) fn lower_top_log_probs(
    graph: &Graph,
    layout: Layout,
    settings: &Settings,
    top: TopLogProbs,
) -> Program {
    let mut instructions = without_losses(graph, &layout);
    instructions.extend(of_heads(graph, &layout, |node| Action::TopLogProbs { node, k: top.k }));
    let section = Section { kind: SectionKind::TopLogProbs, instructions };
    let program = program(graph, layout, vec![section], Vec::new(), settings);
    Program { temperature: top.temperature, ..program }
}

/// Forward without losses and dropout.
fn without_losses(graph: &Graph, layout: &Layout) -> Vec<Instruction> {
    forward(graph, layout, |node| !node.op.is_loss() && !is_dropout(node.op))
}

/// An action instead of every head's loss.
fn of_heads(graph: &Graph, layout: &Layout, action: impl Fn(usize) -> Action) -> Vec<Instruction> {
    let is_head = |node: &usize| graph.nodes[*node].op.loss().is_some_and(|loss| loss.head.is_some());
    let heads = graph.losses().filter(is_head);
    let of_head = |node: usize| Instruction {
        reads: Program::flats_of(layout, &graph.nodes[node].params),
        ..Instruction::new(action(node))
    };
    heads.map(of_head).collect()
}

const fn is_dropout(op: Op) -> bool {
    matches!(op, Op::Dropout { .. })
}

fn program(
    graph: &Graph,
    layout: Layout,
    sections: Vec<Section>,
    grad_producers: Vec<GradProducers>,
    settings: &Settings,
) -> Program {
    let residency = hold(&layout, settings);
    Program {
        sections,
        grad_producers,
        residency,
        reduce_scatter: settings.reduce_scatter,
        update_window: settings
            .offload
            .stream
            .map(|stream| stream.window.min(MOST_WINDOW) / ALIGNMENT * ALIGNMENT),
        // A rank maps what its group holds.
        zero_copy_gather: settings.gather == Some(Gather::View)
            && (layout.world.groups() == 1 || settings.hpz && layout.world.group > 1),
        hpz: settings.hpz,
        accumulation: settings.accumulation.max(1),
        losses: graph.loss_parts.clone(),
        evaluated_weights: graph.evaluated().loss_parts.iter().map(|part| part.weight).collect(),
        routers: Vec::new(),
        stage: settings.stage,
        types: settings.types,
        grad_accum_dtype: settings.grad_accum_dtype,
        optimizer: settings.optimizer,
        moment_dtype: settings.moment_dtype,
        stochastic_rounding: settings.stochastic_rounding,
        cached_tokens: 0,
        cached_source_tokens: 0,
        temperature: 1.0,
        shared_buffers: SharedBuffers::find(graph),
        layout,
    }
}

/// The nodes that are wanted.
fn forward(graph: &Graph, layout: &Layout, wanted: impl Fn(&Node) -> bool) -> Vec<Instruction> {
    let node = |(index, node): (usize, &Node)| Instruction {
        reads: Program::flats_of(layout, &node.params),
        ..Instruction::new(Action::Forward(index))
    };
    graph.nodes.iter().enumerate().filter(|(_, node)| wanted(node)).map(node).collect()
}

/// Forward without its losses, each of which is one backward op with its gradient, then backward.
fn micro_batch(graph: &Graph, backward: &Backward, layout: &Layout, is_first: bool) -> Vec<Instruction> {
    let mut instructions = Vec::new();
    if is_first {
        instructions.push(Instruction::new(Action::ZeroLoss));
    }
    instructions.extend(forward(graph, layout, |node| !node.op.is_loss()));
    instructions.extend(backward.nodes.iter().enumerate().map(|(index, node)| Instruction {
        reads: Program::flats_of(layout, &node.params),
        accumulates_into: Program::flats_of(layout, &node.accumulates_into),
        ..Instruction::new(Action::Backward(index))
    }));
    instructions
}

/// Forward with its losses as they are evaluated, and without dropout: [`Graph::evaluated`] with the nodes of the graph.
fn evaluation(graph: &Graph, layout: &Layout) -> Vec<Instruction> {
    let run = |index: usize| {
        let node = graph.nodes[index].evaluated();
        let action = if node.op == graph.nodes[index].op { Action::Forward } else { Action::EvaluateLoss };
        Instruction { reads: Program::flats_of(layout, &node.params), ..Instruction::new(action(index)) }
    };
    let nodes = graph.evaluated_nodes().into_iter().filter(|index| !is_dropout(graph.nodes[*index].op));
    std::iter::once(Instruction::new(Action::ZeroLoss)).chain(nodes.map(run)).collect()
}
