//! A program with its model and its placed buffers: everything that is equal on all ranks.

use std::collections::BTreeMap;

use zeroth_base::DType;
use zeroth_graph::{Backward, Graph, GraphError, Group};
use zeroth_kernel::{LOSSES, Span, Target, Tier};

use crate::grad_producers::grad_producers;
use crate::memory::plan::{MemoryDetail, place_buffers};
use crate::{
    Action, BufferId, CachedTokens, Chunk, FrozenPlacement, Gather, Instruction, Memory, PlacedBuffer,
    Program, ProgramError, Settings, StreamSizes, Subject, World, compile, compile_inference, cross_streams,
    in_place, plan_memory,
};

/// A program ready to run.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// The model's graph, sized for the largest micro-batch.
    pub graph: Graph,
    /// Its backward.
    pub backward: Backward,
    /// The step program.
    pub program: Program,
    /// The placement of every buffer.
    pub memory: Memory,
    /// The row counts that micro-batches are padded to, in ascending order; the last are the graph's.
    pub row_sizes: StreamSizes,
    /// The row counts of the decode section, in ascending order; empty without one.
    pub decode_sizes: StreamSizes,
    /// The kind of device it was compiled for.
    pub target: &'static dyn Target,
}

/// A program that cannot be compiled.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what their fields are")]
pub enum CompileError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(
        "zeroth.gather is \"view\", which only CPU ranks can do, and this run is on GPUs; leave the key out, or write \
         \"copy\""
    )]
    ViewOnGpu,
    #[error(
        "the loss has {found} parts ({names}), and a step records at most {LOSSES}: give parts with one weight one name"
    )]
    LossParts { found: usize, names: String },
    #[error("row sizes {sizes:?} must rise and end with {rows:?}, the rows of the model's streams")]
    RowSizes { sizes: StreamSizes, rows: Vec<u64> },
}

impl Compiled {
    /// Compiles a step of a model for the ranks of `world`.
    pub fn new(
        graph: Graph,
        world: impl Into<World>,
        settings: &Settings,
        target: &'static dyn Target,
        row_sizes: impl Into<StreamSizes>,
    ) -> Result<Self, CompileError> {
        Self::guarded(graph, world, settings, target, row_sizes, 0)
    }

    /// As [`Self::new`], for its bytes and not to run: without the waits between instructions.
    pub fn for_bytes(
        graph: Graph,
        world: impl Into<World>,
        settings: &Settings,
        target: &'static dyn Target,
        row_sizes: impl Into<StreamSizes>,
    ) -> Result<Self, CompileError> {
        let (world, row_sizes) = (world.into(), row_sizes.into());
        Self::in_detail(graph, world, settings, target, row_sizes, MemoryDetail::Bytes, None)
    }

    /// As [`Self::for_bytes`] with the world and settings of this step, for micro-batches of other sizes. Only memory is
    /// planned again where the passes would make the same program.
    pub fn resized(
        self,
        world: impl Into<World>,
        settings: &Settings,
        row_sizes: impl Into<StreamSizes>,
    ) -> Result<Self, CompileError> {
        let (Self { mut graph, backward, program, target, .. }, row_sizes) = (self, row_sizes.into());
        let largest = row_sizes.iter().last().unwrap_or_default();
        graph.streams.iter_mut().zip(largest).for_each(|(stream, rows)| stream.rows = *rows);
        // How many sub-groups are in flight depends on how large they are, and who writes a gradient on its head's slices.
        let is_same = program.update_window.is_none_or(|window| window == 0)
            && program.grad_producers == grad_producers(&graph, &backward, &settings.for_target(target));
        let earlier = is_same.then_some(program);
        Self::in_detail(graph, world.into(), settings, target, row_sizes, MemoryDetail::Bytes, earlier)
    }

    /// As [`Self::new`], with `guard` bytes after every buffer, which the chaos executor checks.
    pub fn guarded(
        graph: Graph,
        world: impl Into<World>,
        settings: &Settings,
        target: &'static dyn Target,
        row_sizes: impl Into<StreamSizes>,
        guard: u64,
    ) -> Result<Self, CompileError> {
        let detail = MemoryDetail::Runnable { guard };
        Self::in_detail(graph, world.into(), settings, target, row_sizes.into(), detail, None)
    }

    fn in_detail(
        graph: Graph,
        world: World,
        settings: &Settings,
        target: &'static dyn Target,
        row_sizes: StreamSizes,
        detail: MemoryDetail,
        earlier: Option<Program>,
    ) -> Result<Self, CompileError> {
        check_rows(&graph, &row_sizes)?;
        check_losses(&graph)?;
        let backward = graph.backward()?;
        check_views(&graph, settings, target)?;
        let mut settings = settings.for_target(target);
        if matches!(detail, MemoryDetail::Runnable { guard: 1.. }) {
            // With guards in between, shards are not page-aligned and cannot be mapped.
            settings.gather = Some(Gather::Copy);
        }
        let make = |settings: &Settings| -> Result<Program, ProgramError> {
            Ok(in_place(compile(&graph, &backward, world, settings)?, &graph, &backward, target))
        };
        let place = |program: &Program| place_buffers(program, &graph, &backward, target, &row_sizes, detail);
        let mut program = earlier.map_or_else(|| make(&settings), Ok)?;
        let mut memory = place(&program);
        // Keep as many sub-groups in flight as fit the window. More would overlap the memory of the next forward.
        let (asked, arena) = (settings.offload.sub_group_buffers, memory.arena(Tier::Device));
        settings.offload.sub_group_buffers =
            memory.sub_groups_within(program.update_window.unwrap_or(0)).max(asked);
        while settings.offload.sub_group_buffers > asked {
            let deeper = make(&settings)?;
            let with_deeper = place(&deeper);
            if with_deeper.arena(Tier::Device) <= arena {
                (program, memory) = (deeper, with_deeper);
                break;
            }
            settings.offload.sub_group_buffers -= 1;
        }
        Ok(Self { graph, backward, program, memory, row_sizes, decode_sizes: Vec::new().into(), target })
    }

    /// Compiles a model for inference with compute dtype `run`: the engine then computes the next-token logits of up to
    /// `sequences` sequences at once, and decodes them token by token where a cache holds the keys and values of so many
    /// `cached` tokens. An encoder-decoder with a cache runs its encoder apart, and decodes as many tokens at a time as its decoder's
    /// stream has rows. Dropout is off, and nothing is allocated for gradients and optimizer states.
    pub fn inference(
        mut graph: Graph,
        run: DType,
        sequences: u64,
        cached: impl Into<CachedTokens>,
        target: &'static dyn Target,
        row_sizes: impl Into<StreamSizes>,
    ) -> Result<Self, CompileError> {
        let (row_sizes, cached) = (row_sizes.into(), cached.into());
        check_rows(&graph, &row_sizes)?;
        check_losses(&graph)?;
        graph.params.iter_mut().for_each(|param| param.spec.trainable = false);
        let backward = graph.backward()?;
        let program = compile_inference(&graph, &backward, run, sequences, cached);
        let decode_sizes = match cached.tokens {
            0 => Vec::new(),
            _ => decode_sizes(&graph, sequences, target, &row_sizes),
        };
        let decode_sizes = StreamSizes::of_streams(decode_sizes);
        let all_sizes = decode_sizes.iter().chain(row_sizes.iter()).map(<[u64]>::to_vec);
        let all_sizes = StreamSizes::of_streams(all_sizes.collect());
        let memory = plan_memory(&program, &graph, &backward, target, &all_sizes);
        Ok(Self { graph, backward, program, memory, row_sizes, decode_sizes, target })
    }

    /// Bytes of a teacher's parameters in a tier; they are among the parameters of [`Memory::by_category`].
    pub fn teacher_bytes(&self, tier: Tier) -> u64 {
        let flats = &self.program.layout.flats;
        let is_of_teacher = |placed: &&PlacedBuffer| {
            let group = match placed.buffer.id {
                BufferId::Weights(flat) => flats[flat].group,
                _ => Group::Model,
            };
            group == Group::Teacher && placed.buffer.tier == tier
        };
        let placed = self.memory.static_buffers.iter().filter(is_of_teacher);
        placed.map(|placed| placed.buffer.bytes).sum()
    }

    /// Bytes of the cache of keys and values.
    pub fn cache_bytes(&self) -> u64 {
        let is_cache = |placed: &&PlacedBuffer| {
            matches!(placed.buffer.id, BufferId::CachedKeys(_) | BufferId::CachedValues(_))
        };
        self.memory.static_buffers.iter().filter(is_cache).map(|placed| placed.buffer.bytes).sum()
    }
}

/// Row counts for decoding: powers of two, up to the number of sequences, or the rows of the stream of an encoder-decoder that is
/// decoded, from a tile of the device on: fewer would not be faster.
fn decode_sizes(
    graph: &Graph,
    sequences: u64,
    target: &dyn Target,
    row_sizes: &StreamSizes,
) -> Vec<Vec<u64>> {
    let tile = target.tile_rows();
    let cross = cross_streams(graph);
    let decoder = cross.map_or(0, |[decoder, _]| decoder);
    let rows = graph.streams[decoder].rows;
    let largest = match cross {
        Some(_) => rows,
        None => sequences.max(1).next_multiple_of(tile).min(rows),
    };
    let powers = std::iter::successors(Some(tile), |size| size.checked_mul(2));
    let sizes = powers.take_while(|size| *size < largest).chain([largest]);
    // Nothing reads the other stream's rows: they are those of the smallest size.
    let smallest = row_sizes.iter().next().unwrap_or(&[]);
    let of_streams = |size: u64| {
        let mut rows = smallest.to_vec();
        rows[decoder] = size;
        rows
    };
    sizes.map(of_streams).collect()
}

fn check_losses(graph: &Graph) -> Result<(), CompileError> {
    let names: Vec<&str> = graph.loss_parts.iter().map(|part| part.name).collect();
    if names.len() <= LOSSES {
        return Ok(());
    }
    Err(CompileError::LossParts { found: names.len(), names: names.join(", ") })
}

/// GPUs cannot map each other's shards.
pub(super) fn check_views(
    graph: &Graph,
    settings: &Settings,
    target: &dyn Target,
) -> Result<(), CompileError> {
    let has_teacher = graph.units.iter().any(|unit| unit.group == Group::Teacher);
    let shards = settings.stage >= 3
        || settings.frozen == FrozenPlacement::Sharded
        || (has_teacher && settings.teacher.is_partitioned());
    if !target.maps_peers() && shards && settings.gather == Some(Gather::View) {
        return Err(CompileError::ViewOnGpu);
    }
    Ok(())
}

pub(super) fn check_rows(graph: &Graph, row_sizes: &StreamSizes) -> Result<(), CompileError> {
    let rows = graph.stream_rows();
    if row_sizes.end_with(&rows) {
        return Ok(());
    }
    Err(CompileError::RowSizes { sizes: row_sizes.clone(), rows })
}

impl Compiled {
    /// The spans of all buffers of a section, for repeated lookups.
    pub fn spans(&self, section: usize) -> BTreeMap<BufferId, Span> {
        let placed = self.memory.static_buffers.iter().chain(&self.memory.sections[section].buffers);
        placed.map(|placed| (placed.buffer.id, placed.span(self.memory.guard))).collect()
    }

    /// The span of a buffer while a section runs.
    pub fn find(&self, section: usize, id: BufferId) -> Option<Span> {
        self.placed(section, id).map(|placed| placed.span(self.memory.guard))
    }

    fn placed(&self, section: usize, id: BufferId) -> Option<&PlacedBuffer> {
        let is = |placed: &&PlacedBuffer| placed.buffer.id == id;
        let transient = self.memory.sections[section].buffers.iter().find(is);
        transient.or_else(|| self.memory.static_buffers.iter().find(is))
    }

    /// The span of a buffer that the section uses.
    ///
    /// # Panics
    ///
    /// If the section has no such buffer, which is a bug in the compiler.
    pub fn span(&self, section: usize, id: BufferId) -> Span {
        self.find(section, id).unwrap_or_else(|| unreachable!("{id:?} has a place in section {section}"))
    }

    /// Describes an instruction for messages and traces: its operation and unit.
    pub fn describe(&self, instruction: &Instruction) -> String {
        let unit = |unit: zeroth_graph::UnitId| &self.graph.units[unit.index()].name;
        let (action, of) = (&instruction.action, |node: usize| &self.graph.nodes[node]);
        match (action, action.subject()) {
            (Action::Forward(_), Subject::Node(node)) => {
                format!("{} of {}", of(node).op.name(), unit(of(node).unit))
            }
            (Action::Recompute { .. }, Subject::Node(node)) => {
                format!("recompute {} of {}", of(node).op.name(), unit(of(node).unit))
            }
            (_, Subject::Node(node)) => format!("{} of {}", action.name(), unit(of(node).unit)),
            (_, Subject::GradNode(node)) => {
                let node = &self.backward.nodes[node];
                format!("{} backward of {}", of(node.of).op.name(), unit(node.unit))
            }
            (_, Subject::Param(param)) => {
                format!("{} {}", action.name(), self.graph.param(param).spec.name)
            }
            (_, Subject::Flat(flat) | Subject::Chunk(&Chunk { flat, .. })) => {
                format!("{} of {}", action.name(), self.flat_name(flat))
            }
            (_, Subject::Value(_) | Subject::Step) => action.name().to_owned(),
        }
    }

    /// The name of the unit a flat belongs to.
    pub fn flat_name(&self, flat: usize) -> String {
        use crate::FlatKind::{Frozen, Persistent, Quantized, Trained};
        match self.program.layout.flats[flat].kind {
            Trained(unit) => self.graph.units[unit.index()].name.clone(),
            Frozen(unit) => format!("{} (frozen)", self.graph.units[unit.index()].name),
            Quantized(unit) => format!("{} (nf4)", self.graph.units[unit.index()].name),
            Persistent => "the persistent parameters".to_owned(),
        }
    }
}
