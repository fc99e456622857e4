//! Where gradients land, and in which type.
//!
//! What ops give of a parameter's gradient adds up in f32 and is rounded once to the communication type. Where one product
//! gives all of it and it is rounded in the same section, the product itself rounds what it writes: nothing is cleared,
//! read, added to and rounded later, and the bits are the same. So does a head whose rows are one slice; of a table that is
//! an embedding's, too, it leaves the rows of the micro-batch's own tokens to that. All else lands in f32: in the flat's own
//! gradient where that stays (stages 0 and 1), otherwise in a buffer that holds only such parameters, end to end.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_graph::{Backward, GradNode, GradOp, Graph, Op, ParamId};
use zeroth_kernel::HeadLossDims;
use zeroth_kernel::Tier;

use super::{Content, GradientHome, Program, SectionKind, Settings, Types};
use crate::Slot;

/// Who gives a parameter's gradient in a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Givers {
    /// One product, all of it at once.
    Product,
    /// The head, all of it at once but for the rows of the micro-batch's own tokens, which an embedding completes.
    HeadAndRows,
    /// A product first; what others give, or the product itself by and by, is added to that.
    ProductFirst,
    /// Ops that add to what is there; or nobody.
    Adders,
}

impl Givers {
    /// Whether they can round what they give: each element is complete when one of them writes it.
    const fn can_round(self) -> bool {
        matches!(self, Self::Product | Self::HeadAndRows)
    }
}

/// For each parameter, who gives its gradient.
pub(super) fn givers(graph: &Graph, backward: &Backward, settings: &Settings) -> Vec<Givers> {
    let mut all: Vec<Vec<&GradNode>> = vec![Vec::new(); graph.params.len()];
    for node in &backward.nodes {
        node.accumulates_into.iter().for_each(|param| all[param.index()].push(node));
    }
    let head_rounds = head_rounds(graph, settings);
    let of = |(place, nodes): (usize, &Vec<&GradNode>)| {
        let is_product = |node: &GradNode| {
            let weight = graph.nodes[node.of].params.first().map(|weight| weight.index());
            node.op == GradOp::LinearParams && weight == Some(place)
        };
        match nodes[..] {
            [node] if is_product(node) => Givers::Product,
            [node] if node.op == GradOp::HeadLoss && head_rounds => Givers::Product,
            [head, rows] if head.op == GradOp::HeadLoss && rows.op == GradOp::Embedding && head_rounds => {
                Givers::HeadAndRows
            }
            // The head may take its rows in slices.
            [first, ..] if is_product(first) || first.op == GradOp::HeadLoss => Givers::ProductFirst,
            _ => Givers::Adders,
        }
    };
    all.iter().enumerate().map(of).collect()
}

/// Whether the head can round the gradient of its projection: to the type of its operands, where it takes the largest
/// micro-batch, and so every other, as one slice.
fn head_rounds(graph: &Graph, settings: &Settings) -> bool {
    let Types { run, communication } = settings.types;
    let head = graph.nodes.iter().find(|node| node.op == Op::HeadLoss);
    head.is_some_and(|head| {
        let [vocab, hidden] = [0, 1].map(|place| graph.param(head.params[0]).spec.shape[place] as usize);
        let rows = graph.info(head.inputs[0]).rows as usize;
        let is_narrow = run == communication && run != DType::F32;
        settings.head_rounds && is_narrow && HeadLossDims { rows, hidden, vocab }.is_one_slice(run)
    })
}

/// A parameter whose gradient lands in f32: its elements in the flat, padding included, and where in the buffer of such
/// gradients they begin.
struct Wide {
    of_flat: Range<u64>,
    at: u64,
    slot: Slot,
}

/// Elements of a buffer that holds gradients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) content: Content,
    pub(super) dtype: DType,
    pub(super) elements: Range<u64>,
}

impl Program {
    /// Whether a section's gradients begin with it: nothing of an earlier micro-batch lies under them.
    pub(super) const fn begins_gradients(&self, kind: SectionKind) -> bool {
        self.stage >= 2 || kind.is_first()
    }

    /// Whether a section's gradients are complete with it, and become what the update reads.
    pub(super) fn reduces_in(&self, kind: SectionKind) -> bool {
        self.reduces() && (self.stage >= 2 || kind.is_last())
    }

    /// Whether a section's gradients land in the communication type where they can. A product rounds to the type of its
    /// operands.
    pub(super) fn rounds_landings(&self, kind: SectionKind) -> bool {
        let Types { run, communication } = self.types;
        let can = communication == DType::F32 || communication == run;
        can && self.begins_gradients(kind) && self.reduces_in(kind)
    }

    /// Whether a parameter's gradient lands in the communication type.
    fn lands_rounded(&self, kind: SectionKind, param: ParamId) -> bool {
        let is_wide = self.types.communication == DType::F32;
        self.givers_round(kind, param) || self.rounds_landings(kind) && is_wide
    }

    /// Whether those who give a parameter's gradient round it, and so look whether it is finite.
    pub(super) fn givers_round(&self, kind: SectionKind, param: ParamId) -> bool {
        self.rounds_landings(kind) && self.givers[param.index()].can_round()
    }

    /// Whether rows of a parameter's gradient wait in f32 for what an embedding adds to them.
    pub(super) fn rows_wait(&self, kind: SectionKind, param: ParamId) -> bool {
        self.rounds_landings(kind) && self.givers[param.index()] == Givers::HeadAndRows
    }

    /// The buffer of a flat's gradient in the communication type, each element in its place.
    pub(super) fn rounded(&self, flat: usize) -> Content {
        match (self.gradient_home(), self.held[flat].gradients) {
            (GradientHome::Rounded, Tier::Device) => Content::Kept(flat),
            _ => Content::Rounded(flat),
        }
    }

    fn wide(&self, kind: SectionKind, flat: usize) -> impl Iterator<Item = Wide> + '_ {
        let stays = self.gradient_home() == GradientHome::Landed;
        let slots = self.layout.flats[flat].padded_slots();
        let wide = slots.filter(move |(slot, _)| !self.lands_rounded(kind, slot.param));
        wide.scan(0, move |end, (slot, of_flat)| {
            let at = if stays { of_flat.start } else { *end };
            *end = at + (of_flat.end - of_flat.start);
            Some(Wide { of_flat, at, slot })
        })
    }

    /// Elements of the buffer in which a flat's gradients land in f32, where it is one of a section's own.
    pub(super) fn wide_elements(&self, kind: SectionKind, flat: usize) -> u64 {
        self.wide(kind, flat).map(|wide| wide.of_flat.end - wide.of_flat.start).sum()
    }

    /// Where a parameter's gradient lands.
    pub(super) fn landing(&self, kind: SectionKind, param: ParamId) -> Part {
        let (flat, slot) = self.layout.place(param);
        let (content, dtype, first) = if self.lands_rounded(kind, param) {
            (self.rounded(flat), self.types.communication, slot.start)
        } else {
            let wide = self.wide(kind, flat).find(|wide| wide.slot.param == param);
            (Content::Gradient(flat), DType::F32, wide.expect("what is not rounded is wide").at)
        };
        Part { content, dtype, elements: first..first + slot.elements }
    }

    /// What of a flat must be zero before its first landing: what is added to, and padding.
    pub(super) fn cleared(&self, kind: SectionKind, flat: usize) -> Vec<Part> {
        if !self.begins_gradients(kind) {
            return Vec::new();
        }
        let mut parts: Vec<Part> = Vec::new();
        for (slot, of_flat) in self.layout.flats[flat].padded_slots() {
            let Part { content, dtype, elements } = self.landing(kind, slot.param);
            let end = elements.start + (of_flat.end - of_flat.start);
            let is_written = self.givers[slot.param.index()] != Givers::Adders;
            let start = if is_written { elements.end } else { elements.start };
            match parts.last_mut() {
                _ if start == end => {}
                Some(last) if last.content == content && last.elements.end == start => {
                    last.elements.end = end;
                }
                _ => parts.push(Part { content, dtype, elements: start..end }),
            }
        }
        parts
    }

    /// What of a flat landed in f32 and is yet to be rounded: where it begins, and its elements in the flat.
    pub(super) fn unrounded(&self, kind: SectionKind, flat: usize) -> Vec<(u64, Range<u64>)> {
        let mut runs: Vec<(u64, Range<u64>)> = Vec::new();
        for Wide { of_flat, at, .. } in self.wide(kind, flat) {
            match runs.last_mut() {
                Some((first, last)) if last.end == of_flat.start && at - *first == last.end - last.start => {
                    last.end = of_flat.end;
                }
                _ => runs.push((at, of_flat)),
            }
        }
        runs
    }

    /// What of a flat landed in the communication type without a look at whether it is finite.
    pub(super) fn unseen(&self, kind: SectionKind, flat: usize) -> Vec<Range<u64>> {
        let slots = self.layout.flats[flat].padded_slots();
        let is_unseen = |param| self.lands_rounded(kind, param) && !self.givers_round(kind, param);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (_, of_flat) in slots.filter(|(slot, _)| is_unseen(slot.param)) {
            match runs.last_mut() {
                Some(last) if last.end == of_flat.start => last.end = of_flat.end,
                _ => runs.push(of_flat),
            }
        }
        runs
    }
}
