//! Layout: the placement of every parameter element. It depends only on the model, the mesh of ranks and the
//! persistence threshold: bucket and prefetch sizes group chunks and never move an element.
//!
//! A **flat** is the concatenation of a unit's parameters, each aligned to a **block**. A flat is partitioned across
//! ranks into **shards** of whole blocks, in the order of the ranks' positions. The shards of a rail follow each other
//! and make a **group shard**. A **chunk** is the slice of a flat that one collective moves.

use std::ops::Range;

use zeroth_base::{Axis, DType};
use zeroth_graph::{Graph, Group, ParamId, UnitId};
use zeroth_kernel::Nf4Record;

use crate::World;

/// Elements of a block: the alignment of parameters and shards, and the granularity of gradient norms.
pub const BLOCK: u64 = 2048;

/// Which parameters a flat holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlatKind {
    /// A unit's trained parameters.
    Trained(UnitId),
    /// A unit's frozen parameters.
    Frozen(UnitId),
    /// A unit's frozen parameters that are kept in nf4.
    Quantized(UnitId),
    /// Trained parameters of all units up to the persistence threshold: they stay gathered.
    Persistent,
}

/// How the parameters of a flat are kept and gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// In a dtype: compute reads them as they are.
    Dense(DType),
    /// In nf4, one [`Nf4Record`] per block: an op reads an unpacked copy.
    Nf4,
}

// A shard of whole blocks is one of whole records.
const _: () = assert!(BLOCK == Nf4Record::ELEMENTS as u64);

impl Storage {
    /// Bytes of elements that begin at a block; of nf4 whole records.
    pub const fn bytes(self, elements: u64) -> u64 {
        match self {
            Self::Dense(dtype) => elements * dtype.bytes(),
            Self::Nf4 => elements.div_ceil(BLOCK) * Nf4Record::BYTES as u64,
        }
    }

    /// A dtype for copies of whole blocks, which leave every bit as it is.
    pub const fn copied_as(self) -> DType {
        match self {
            Self::Dense(dtype) => dtype,
            Self::Nf4 => DType::F32,
        }
    }
}

/// A parameter's range in its flat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The parameter.
    pub param: ParamId,
    /// Its offset in the flat; a multiple of [`BLOCK`].
    pub start: u64,
    /// Its elements, without padding.
    pub elements: u64,
}

/// Parameters concatenated in one buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flat {
    /// Which parameters.
    pub kind: FlatKind,
    /// The model they belong to.
    pub group: Group,
    /// How they are kept and gathered.
    pub storage: Storage,
    /// Their slots, in order.
    pub slots: Vec<Slot>,
    /// The number of blocks.
    pub blocks: u64,
}

/// The placement of every element of a model on a number of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The ranks.
    pub world: World,
    /// All flats with at least one parameter, in the order of the units; the persistent one comes last.
    pub flats: Vec<Flat>,
    /// For each parameter of the graph, its flat and its slot there.
    places: Vec<(usize, usize)>,
}

impl Flat {
    fn new(kind: FlatKind, group: Group, storage: Storage) -> Self {
        Self { kind, group, storage, slots: Vec::new(), blocks: 0 }
    }

    fn push(&mut self, param: ParamId, elements: u64) {
        self.slots.push(Slot { param, start: self.blocks * BLOCK, elements });
        self.blocks += elements.div_ceil(BLOCK);
    }

    /// Whether its parameters are frozen: without gradients and states.
    pub const fn is_frozen(&self) -> bool {
        matches!(self.kind, FlatKind::Frozen(_) | FlatKind::Quantized(_))
    }

    /// Bytes of its parameters, padding included.
    pub fn bytes(&self) -> u64 {
        self.storage.bytes(self.padded())
    }

    /// Elements including padding.
    pub const fn padded(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// The slots with their element ranges, padding included.
    pub fn padded_slots(&self) -> impl Iterator<Item = (Slot, Range<u64>)> + '_ {
        self.slots.iter().enumerate().map(|(place, slot)| {
            let end = self.slots.get(place + 1).map_or(self.padded(), |next| next.start);
            (*slot, slot.start..end)
        })
    }

    /// Elements without padding.
    pub fn elements(&self) -> u64 {
        self.slots.iter().map(|slot| slot.elements).sum()
    }

    /// The shard at a position ([`World::position`]); empty for the last ones of a short flat.
    pub fn shard(&self, position: u64, ranks: u64) -> Range<u64> {
        let share = self.blocks.div_ceil(ranks);
        let edge = |position: u64| (share * position).min(self.blocks) * BLOCK;
        edge(position)..edge(position + 1)
    }

    /// The group shard of a place: the shards of the ranks that have it, one of each group.
    pub fn group_shard(&self, place: u64, world: World) -> Range<u64> {
        let (first, groups) = (place * world.groups(), world.groups());
        self.shard(first, world.ranks).start..self.shard(first + groups - 1, world.ranks).end
    }

    /// Elements that every rank reserves for a group shard.
    pub const fn group_shard_capacity(&self, world: World) -> u64 {
        self.shard_capacity(world.ranks) * world.groups()
    }

    /// What the rank with this number along an axis holds of the part of a flat that they share: of a group a group shard,
    /// of the rail of `place` a shard. In one group, and with groups of one rank, this is a rank's shard.
    pub fn extent(&self, axis: Axis, place: u64, number: u64, world: World) -> Range<u64> {
        match axis {
            Axis::Group => self.group_shard(number, world),
            Axis::Rail => self.shard(place * world.groups() + number, world.ranks),
        }
    }

    /// Elements that every rank reserves for its shard: the largest one's.
    pub const fn shard_capacity(&self, ranks: u64) -> u64 {
        self.blocks.div_ceil(ranks) * BLOCK
    }

    /// The chunks of a shard's length that collectives move, at most `bucket` elements of the whole flat at a time
    /// (at least a block a rank). Ranges are within a shard; the same range of every rank's shard moves together.
    pub fn chunks(&self, ranks: u64, bucket: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        ranges(self.blocks.div_ceil(ranks), bucket / BLOCK / ranks)
    }

    /// The chunks of an all-gather along an axis, at most `bucket` elements at a time (at least a block a rank): ranges
    /// within what each of its ranks holds ([`Self::extent`]).
    pub fn gather_chunks(
        &self,
        axis: Axis,
        world: World,
        bucket: u64,
    ) -> impl Iterator<Item = Range<u64>> + use<> {
        let share = self.blocks.div_ceil(world.ranks);
        let held = match axis {
            Axis::Group => share * world.groups(),
            Axis::Rail => share,
        };
        ranges(held, bucket / BLOCK / world.along(axis))
    }

    /// The pieces of parameters that lie in a range of the flat: the parameter, its own elements, and where in the
    /// flat they begin. What weights are loaded, saved and initialised by.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = ParamPart> + '_ {
        self.slots.iter().filter_map(move |slot| {
            let begin = slot.start.max(range.start);
            let end = (slot.start + slot.elements).min(range.end);
            (begin < end).then(|| ParamPart {
                param: slot.param,
                elements: begin - slot.start..end - slot.start,
                at: begin,
            })
        })
    }
}

/// Ranges of at most `step` blocks (at least one) that cover the first `blocks`, in elements.
fn ranges(blocks: u64, step: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let step = step.max(1);
    (0..blocks).step_by(step as usize).map(move |first| first * BLOCK..(first + step).min(blocks) * BLOCK)
}

/// A contiguous range of one parameter's elements in a flat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamPart {
    /// The parameter.
    pub param: ParamId,
    /// Its elements, relative to the parameter.
    pub elements: Range<u64>,
    /// Their offset in the flat.
    pub at: u64,
}

impl Layout {
    /// Creates the layout of a model. Trained parameters of at most `persistence` elements stay gathered, in a flat of
    /// their own, up to `model_persistence` elements in all; a threshold of 0 keeps none. Parameters that
    /// are not quantised are kept in `dtype`.
    pub fn new(
        graph: &Graph,
        world: impl Into<World>,
        persistence: u64,
        model_persistence: u64,
        dtype: DType,
    ) -> Self {
        let mut flats = Vec::new();
        let storage = Storage::Dense(dtype);
        let mut persistent = Flat::new(FlatKind::Persistent, Group::Model, storage);
        let mut persistent_elements = 0;
        for (index, unit) in graph.units.iter().enumerate() {
            let id = UnitId::at(index);
            let [mut trained, mut frozen] = [FlatKind::Trained(id), FlatKind::Frozen(id)]
                .map(|kind| Flat::new(kind, unit.group, storage));
            let mut quantized = Flat::new(FlatKind::Quantized(id), unit.group, Storage::Nf4);
            for param in &unit.params {
                let (elements, spec) = (graph.param(*param).elements(), &graph.param(*param).spec);
                let flat = match spec.trainable {
                    true if elements <= persistence
                        && persistent_elements + elements <= model_persistence =>
                    {
                        persistent_elements += elements;
                        &mut persistent
                    }
                    true => &mut trained,
                    false if spec.quantized => &mut quantized,
                    false => &mut frozen,
                };
                flat.push(*param, elements);
            }
            flats.extend([trained, frozen, quantized]);
        }
        flats.push(persistent);
        flats.retain(|flat| !flat.slots.is_empty());
        let mut places = vec![(0, 0); graph.params.len()];
        for (flat_index, flat) in flats.iter().enumerate() {
            for (slot_index, slot) in flat.slots.iter().enumerate() {
                places[slot.param.index()] = (flat_index, slot_index);
            }
        }
        Self { world: world.into(), flats, places }
    }

    /// The number of ranks.
    pub const fn ranks(&self) -> u64 {
        self.world.ranks
    }

    /// The shard of a rank.
    pub fn shard(&self, flat: usize, rank: u64) -> Range<u64> {
        self.flats[flat].shard(self.world.position(rank), self.world.ranks)
    }

    /// The group shard of a rank's place.
    pub fn group_shard(&self, flat: usize, rank: u64) -> Range<u64> {
        self.flats[flat].group_shard(self.world.place(rank), self.world)
    }

    /// A parameter's flat, as an index into [`Layout::flats`], and its slot there.
    pub fn place(&self, param: ParamId) -> (usize, Slot) {
        let (flat, slot) = self.places[param.index()];
        (flat, self.flats[flat].slots[slot])
    }

    /// Elements of the persistent flat, without padding.
    pub fn persistent_elements(&self) -> u64 {
        let persistent = self.flats.iter().filter(|flat| flat.kind == FlatKind::Persistent);
        persistent.map(Flat::elements).sum()
    }
}
