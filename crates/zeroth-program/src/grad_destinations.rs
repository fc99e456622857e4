//! Destinations of parameter gradients: the buffer and dtype that backward ops write or accumulate into.
//!
//! A parameter's gradient accumulates in f32 and is cast once to the communication dtype. Where one matmul produces all
//! of it and it is reduced in the same section, the matmul writes the communication dtype directly: nothing is zeroed,
//! accumulated or cast later, and the bits are the same. So does a head whose rows form one slice; of a table tied to
//! an embedding, it leaves the rows of the micro-batch's own tokens to the embedding. Everything else accumulates in
//! f32: in the flat's persistent gradient (stages 0 and 1), otherwise in a buffer that packs only such parameters.

use std::ops::Range;

use zeroth_base::DType;
use zeroth_graph::{Backward, GradNode, GradOp, ParamId, Value};

use super::{BufferId, GradProducers, GradientStorage, Program, SectionKind, Types};
use crate::Slot;

/// A parameter whose gradient accumulates in f32: its elements in the flat, padding included, and its offset in the f32
/// buffer.
struct F32Range {
    of_flat: Range<u64>,
    at: u64,
}

/// A range of elements in a gradient buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GradSlice {
    pub(super) id: BufferId,
    pub(super) dtype: DType,
    pub(super) elements: Range<u64>,
}

impl Program {
    /// Whether gradients start in this section: it holds nothing of an earlier micro-batch.
    pub(super) const fn begins_gradients(&self, kind: SectionKind) -> bool {
        self.stage >= 2 || kind.is_first()
    }

    /// Whether gradients are reduced in this section.
    pub(super) fn reduces_in(&self, kind: SectionKind) -> bool {
        self.reduces() && (self.stage >= 2 || kind.is_last())
    }

    /// Whether gradients of a section are produced in the communication dtype where possible. A matmul casts only to
    /// the dtype of its operands.
    pub(super) fn casts_in_producers(&self, kind: SectionKind) -> bool {
        let Types { compute, communication } = self.types;
        let can = communication == DType::F32 || communication == compute;
        can && self.begins_gradients(kind) && self.reduces_in(kind)
    }

    /// Whether a parameter's gradient is written in the communication dtype.
    fn is_written_in_comm_dtype(&self, kind: SectionKind, param: ParamId) -> bool {
        let is_wide = self.types.communication == DType::F32;
        self.producers_cast(kind, param) || self.casts_in_producers(kind) && is_wide
    }

    /// Whether a parameter's producers cast its gradient, and so check it for non-finite values.
    pub(super) fn producers_cast(&self, kind: SectionKind, param: ParamId) -> bool {
        self.casts_in_producers(kind) && self.grad_producers[param.index()].can_cast()
    }

    /// Whether rows of a parameter's gradient wait in f32 for the embedding's contribution.
    pub(super) fn embedding_completes(&self, kind: SectionKind, param: ParamId) -> bool {
        self.casts_in_producers(kind) && self.grad_producers[param.index()] == GradProducers::HeadAndEmbedding
    }

    /// The token ids of a tied table's waiting rows, where a backward node is the head that leaves them or the
    /// embedding that completes them.
    pub(super) fn waiting_tokens(
        &self,
        backward: &Backward,
        kind: SectionKind,
        node: &GradNode,
    ) -> Option<Value> {
        let param = node.accumulates_into.iter().find(|param| self.embedding_completes(kind, **param))?;
        let completes =
            |node: &&GradNode| node.op == GradOp::Embedding && node.accumulates_into.contains(param);
        backward.nodes.iter().find(completes).map(|embedding| embedding.inputs[0])
    }

    /// The buffer of a flat's gradient in the communication dtype, in flat order.
    pub(super) fn comm_grad(&self, flat: usize) -> BufferId {
        let is_reduced = self.gradient_storage() == GradientStorage::FlatComm
            && !self.residency[flat].gradients.is_offloaded();
        if is_reduced { BufferId::ReducedGrad(flat) } else { BufferId::CommGrad(flat) }
    }

    /// The destination of every parameter of a flat, in order, with its elements in the flat, padding included.
    fn destinations(
        &self,
        kind: SectionKind,
        flat: usize,
    ) -> impl Iterator<Item = (Slot, Range<u64>, GradSlice)> + '_ {
        let stays = self.gradient_storage() == GradientStorage::FlatF32;
        self.layout.flats[flat].padded_slots().scan(0, move |end, (slot, of_flat)| {
            let (dtype, first) = if self.is_written_in_comm_dtype(kind, slot.param) {
                (self.types.communication, slot.start)
            } else {
                let at = if stays { of_flat.start } else { *end };
                *end = at + (of_flat.end - of_flat.start);
                (DType::F32, at)
            };
            let id = self.grad_buffer(kind, slot.param);
            let slice = GradSlice { id, dtype, elements: first..first + slot.elements };
            Some((slot, of_flat, slice))
        })
    }

    fn wide(&self, kind: SectionKind, flat: usize) -> impl Iterator<Item = F32Range> + '_ {
        let is_wide = move |param| !self.is_written_in_comm_dtype(kind, param);
        let wide = self.destinations(kind, flat).filter(move |(slot, ..)| is_wide(slot.param));
        wide.map(|(_, of_flat, slice)| F32Range { of_flat, at: slice.elements.start })
    }

    /// Elements of a flat's transient f32 gradient buffer.
    pub(super) fn f32_elements(&self, kind: SectionKind, flat: usize) -> u64 {
        self.wide(kind, flat).map(|wide| wide.of_flat.end - wide.of_flat.start).sum()
    }

    /// The buffer that a parameter's gradient is written to.
    pub(super) fn grad_buffer(&self, kind: SectionKind, param: ParamId) -> BufferId {
        let (flat, _) = self.layout.place(param);
        if self.is_written_in_comm_dtype(kind, param) { self.comm_grad(flat) } else { BufferId::Grad(flat) }
    }

    /// The destination of a parameter's gradient.
    pub(super) fn grad_destination(&self, kind: SectionKind, param: ParamId) -> GradSlice {
        let (flat, slot) = self.layout.place(param);
        let id = self.grad_buffer(kind, param);
        let elements = slot.start..slot.start + slot.elements;
        if self.is_written_in_comm_dtype(kind, param) {
            return GradSlice { id, dtype: self.types.communication, elements };
        }
        // Nothing of the flat is packed: it persists, or all of it accumulates in f32.
        if self.gradient_storage() == GradientStorage::FlatF32 || !self.casts_in_producers(kind) {
            return GradSlice { id, dtype: DType::F32, elements };
        }
        let mut all = self.destinations(kind, flat);
        all.find(|(slot, ..)| slot.param == param).expect("a flat has its parameters").2
    }

    /// The parts of a flat that must be zero before backward writes it: accumulated parameters and padding.
    pub(super) fn zeroed(&self, kind: SectionKind, flat: usize) -> Vec<GradSlice> {
        if !self.begins_gradients(kind) {
            return Vec::new();
        }
        let mut parts: Vec<GradSlice> = Vec::new();
        for (slot, of_flat, slice) in self.destinations(kind, flat) {
            let GradSlice { id, dtype, elements } = slice;
            let end = elements.start + (of_flat.end - of_flat.start);
            let is_written = self.grad_producers[slot.param.index()] != GradProducers::Accumulating;
            let start = if is_written { elements.end } else { elements.start };
            match parts.last_mut() {
                _ if start == end => {}
                Some(last) if last.id == id && last.elements.end == start => {
                    last.elements.end = end;
                }
                _ => parts.push(GradSlice { id, dtype, elements: start..end }),
            }
        }
        parts
    }

    /// The f32 parts of a flat that are still to be cast: their offset in the f32 buffer, and their range in the flat.
    pub(super) fn uncast(&self, kind: SectionKind, flat: usize) -> Vec<(u64, Range<u64>)> {
        let mut runs: Vec<(u64, Range<u64>)> = Vec::new();
        for F32Range { of_flat, at } in self.wide(kind, flat) {
            match runs.last_mut() {
                Some((first, last)) if last.end == of_flat.start && at - *first == last.end - last.start => {
                    last.end = of_flat.end;
                }
                _ => runs.push((at, of_flat)),
            }
        }
        runs
    }

    /// The parts of a flat that were written in the communication dtype without a check for non-finite values.
    pub(super) fn unchecked(&self, kind: SectionKind, flat: usize) -> Vec<Range<u64>> {
        let slots = self.layout.flats[flat].padded_slots();
        let is_unseen =
            |param| self.is_written_in_comm_dtype(kind, param) && !self.producers_cast(kind, param);
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
