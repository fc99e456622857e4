//! `offload`: which parts of a flat live in host memory, and the copies that this requires.
//!
//! Keys: `zero_optimization.offload_optimizer.{device, ratio, buffer_count}`, `zero_optimization.offload_param.{device,
//! max_in_cpu, buffer_count, buffer_size, pin_memory}`, `zero_optimization.sub_group_size`, `zeroth.update`,
//! `zeroth.update_window`.
//!
//! With an offloaded optimizer, gradients are copied to host memory once they are reduced and updated there sub-group
//! by sub-group; updated parameters come back through as many staging buffers as allowed. With offloaded parameters, a
//! rank's shard is copied piece by piece into the flat being gathered; from pageable memory the pieces go through
//! staging buffers. The arithmetic does not change.
//!
//! On a GPU, `zeroth.update` decides where the update runs: "host" updates on the CPU, on a queue of its own, while the
//! GPU runs the next forward, whose units wait for their own sub-groups; "device" streams the states through the GPU.

use zeroth_graph::Group;
use zeroth_kernel::{Queue, Tier};

use crate::BLOCK;
use crate::{
    Accumulate, Action, Chunk, GradientStorage, Instruction, Program, Residency, Section, SectionKind,
    Settings, UpdatedBy,
};
use crate::{FlatKind, Layout};

/// Minimum and maximum elements of a streamed sub-group: large enough for the bus and for a queue of about a thousand
/// commands, small enough that several fit.
const PASSING_TILE: [u64; 2] = [32 << 20, 64 << 20];
/// Sub-groups per window, unless they become too small.
const TILES_OF_WINDOW: u64 = 64;
/// Approximate bytes of an element's states.
const STATE_BYTES: u64 = 14;

/// The residency of each flat: whole flats in layout order, as far as `ratio` and `max_in_cpu` reach. A teacher's are all in one
/// place.
pub(super) fn hold(layout: &Layout, settings: &Settings) -> Vec<Residency> {
    let offload = &settings.offload;
    let trained: u64 = layout
        .flats
        .iter()
        .filter(|flat| !flat.is_frozen())
        .map(|flat| flat.shard_capacity(layout.ranks()))
        .sum();
    let most_states =
        offload.optimizer.filter(|_| settings.stage >= 1).map_or(0.0, |ratio| ratio * trained as f64);
    let most_weights = offload.parameters.unwrap_or(0);
    let (mut states, mut weights) = (0, 0);
    layout
        .flats
        .iter()
        .map(|flat| {
            let shard = flat.shard_capacity(layout.ranks());
            let mut residency = Residency {
                is_partitioned: settings.shards(flat),
                weights: Tier::Device,
                gradients: Tier::Device,
                states: Tier::Device,
                updates: Tier::Device,
            };
            if !flat.is_frozen() && (states as f64) < most_states {
                states += shard;
                residency.states = Tier::Host;
                (residency.gradients, residency.updates) = offload
                    .stream
                    .map_or((Tier::Host, Tier::Host), |stream| (stream.gradients, Tier::Device));
            }
            if flat.group == Group::Teacher {
                residency.weights = if settings.teacher.offloaded { Tier::Host } else { Tier::Device };
                return residency;
            }
            let may_leave = residency.is_partitioned && flat.kind != FlatKind::Persistent;
            if may_leave && shard <= most_weights.saturating_sub(weights) {
                weights += shard;
                residency.weights = Tier::Host;
            }
            residency
        })
        .collect()
}

pub(super) fn offload(mut program: Program, settings: &Settings) -> Program {
    let mut sections = std::mem::take(&mut program.sections);
    for section in &mut sections {
        let instructions = std::mem::take(&mut section.instructions);
        section.instructions = match section.kind {
            SectionKind::Update => updates(&program, instructions, settings),
            _ => copies(&program, section, &instructions, settings),
        };
    }
    program.sections = sections;
    program
}

/// An instruction of a transfer queue, or of the compute queue without overlap_comm.
fn transfer(action: Action, queue: Queue, settings: &Settings) -> Instruction {
    Instruction { queue: if settings.overlap { queue } else { Queue::Compute }, ..Instruction::new(action) }
}

/// Splits a shard into pieces of whole blocks, at most `most` elements each (one block at least).
fn pieces(flat: usize, capacity: u64, most: u64) -> Vec<Chunk> {
    let step = (most / BLOCK).max(1) * BLOCK;
    let piece = |first: u64| Chunk { flat, range: first..first.saturating_add(step).min(capacity) };
    (0..capacity).step_by(usize::try_from(step).unwrap_or(usize::MAX)).map(piece).collect()
}

/// As [`pieces`], of about equal size: every sub-group buffer has the size of the largest.
fn even_pieces(flat: usize, capacity: u64, most: u64) -> Vec<Chunk> {
    let most = (most / BLOCK).max(1) * BLOCK;
    pieces(flat, capacity, capacity.div_ceil(capacity.div_ceil(most).max(1)).next_multiple_of(BLOCK))
}

fn copies(
    program: &Program,
    section: &Section,
    instructions: &[Instruction],
    settings: &Settings,
) -> Vec<Instruction> {
    let ranks = program.layout.ranks();
    let on_host = |flat: usize| program.residency[flat].gradients.is_offloaded();
    let saves = |flat: usize| Queue::of_copy(Tier::Device, program.residency[flat].gradients);
    let last_accumulation = |flat: usize| {
        instructions.iter().rposition(|instruction| instruction.accumulates_into.contains(&flat))
    };
    // Without a cast or a reduction, a gradient is complete with its last accumulation.
    let complete_when_accumulated: Vec<(usize, usize)> = (0..program.layout.flats.len())
        .filter(|flat| section.kind.is_last() && on_host(*flat) && !program.reduces())
        .filter_map(|flat| last_accumulation(flat).map(|at| (at, flat)))
        .collect();
    let mut out = Vec::with_capacity(instructions.len());
    for (at, instruction) in instructions.iter().enumerate() {
        if let Action::AllGather(flat, _) = instruction.action
            && program.residency[flat].weights.is_offloaded()
        {
            upload_shards(program, flat, settings, &mut out);
        }
        out.push(instruction.clone());
        match &instruction.action {
            Action::SumRanks(chunk, addition, axis)
                if on_host(chunk.flat) && !program.sums_partially(*axis) =>
            {
                let save = Action::OffloadGrad(chunk.clone(), *addition);
                out.push(transfer(save, saves(chunk.flat), settings));
            }
            Action::KeepGrad(flat) if on_host(*flat) => {
                let whole = Chunk { flat: *flat, range: 0..program.layout.flats[*flat].padded() };
                // Its squared norm, while it is still on the device.
                out.push(Instruction::new(Action::GradSquares(*flat)));
                out.push(transfer(Action::OffloadGrad(whole, Accumulate::Overwrite), saves(*flat), settings));
            }
            _ => {}
        }
        for (_, flat) in complete_when_accumulated.iter().filter(|(last, _)| *last == at) {
            let whole = Chunk { flat: *flat, range: 0..program.layout.flats[*flat].shard_capacity(ranks) };
            out.push(transfer(Action::OffloadGrad(whole, Accumulate::Overwrite), saves(*flat), settings));
        }
    }
    debug_assert!(
        complete_when_accumulated.is_empty() || program.gradient_storage() == GradientStorage::FlatF32,
        "only what landed is complete without a sum"
    );
    out
}

/// Uploads what this rank holds of a flat into the flat that is gathered next.
fn upload_shards(program: &Program, flat: usize, settings: &Settings, out: &mut Vec<Instruction>) {
    let pieces = pieces(flat, program.held_capacity(flat), settings.offload.param_buffer_size);
    let queue = Queue::of_copy(program.residency[flat].weights, Tier::Device);
    if settings.offload.pageable {
        pipeline(
            &pieces,
            settings.offload.param_buffers,
            out,
            |chunk| Instruction::new(Action::StageShard(chunk)),
            |chunk| transfer(Action::UploadShard(chunk), queue, settings),
        );
    } else {
        out.extend(pieces.into_iter().map(|chunk| transfer(Action::UploadShard(chunk), queue, settings)));
    }
}

/// Emits `make` and `take` of each chunk with at most `depth` chunks in flight.
fn pipeline(
    chunks: &[Chunk],
    depth: u64,
    out: &mut Vec<Instruction>,
    make: impl Fn(Chunk) -> Instruction,
    take: impl Fn(Chunk) -> Instruction,
) {
    let behind = (depth as usize).clamp(1, chunks.len().max(1)) - 1;
    for (at, chunk) in chunks.iter().enumerate() {
        out.push(make(chunk.clone()));
        if at >= behind {
            out.push(take(chunks[at - behind].clone()));
        }
    }
    out.extend(chunks[chunks.len().saturating_sub(behind)..].iter().cloned().map(take));
}

/// Splits the update into sub-groups.
fn updates(program: &Program, instructions: Vec<Instruction>, settings: &Settings) -> Vec<Instruction> {
    let mut out = Vec::with_capacity(instructions.len());
    let counted = |flat: usize| {
        program.gradient_storage() == GradientStorage::FlatComm
            && program.residency[flat].gradients.is_offloaded()
    };
    let window = program.update_window.unwrap_or(0) / TILES_OF_WINDOW;
    let passing_tile = (window / STATE_BYTES).clamp(PASSING_TILE[0], PASSING_TILE[1]);
    // Sub-groups of consecutive flats are pipelined: the first of a flat is loaded while the last of the previous one
    // is updated.
    let (mut streamed, mut beside, mut spread) = (Vec::new(), Vec::new(), Vec::new());
    let runs_beside = |flat: usize| {
        settings.offload.updated_by == Some(UpdatedBy::Host) && program.residency[flat].updates == Tier::Host
    };
    // Persistent parameters come first: every unit of the next forward waits for them.
    let add = |tiles: &mut Vec<Chunk>, whole: &Chunk, most: u64| {
        let is_shared = program.layout.flats[whole.flat].kind == FlatKind::Persistent;
        let at = if is_shared { 0 } else { tiles.len() };
        let most = settings.offload.sub_group_size.min(most);
        tiles.splice(at..at, even_pieces(whole.flat, whole.range.end, most));
    };
    for instruction in instructions {
        let whole = match &instruction.action {
            Action::Update(whole) => whole,
            Action::GradSquares(flat) if counted(*flat) => continue,
            Action::AllGatherWeights(Chunk { flat, .. }, _) | Action::BroadcastWeights { flat, .. }
                if program.is_streamed(*flat) || runs_beside(*flat) =>
            {
                spread.push(instruction);
                continue;
            }
            _ => {
                out.push(instruction);
                continue;
            }
        };
        let residency = program.residency[whole.flat];
        if program.is_streamed(whole.flat) {
            add(&mut streamed, whole, passing_tile);
            continue;
        }
        if runs_beside(whole.flat) {
            add(&mut beside, whole, PASSING_TILE[1]);
            continue;
        }
        let tiles = pieces(whole.flat, whole.range.end, settings.offload.sub_group_size);
        let update = |chunk: Chunk| Instruction::new(Action::Update(chunk));
        if residency.weights == residency.updates {
            out.extend(tiles.into_iter().map(update));
            continue;
        }
        let queue = Queue::of_copy(residency.updates, residency.weights);
        pipeline(&tiles, settings.offload.sub_group_buffers, &mut out, update, |chunk| {
            transfer(Action::WriteBack(chunk), queue, settings)
        });
    }
    let (mut all, through) = pass_through(program, &streamed, settings);
    all.extend(out);
    all.extend(through);
    all.extend(updates_beside(program, &beside, settings));
    all.extend(spread);
    all
}

/// The update on the CPU, on the queue that loads would use: forward and backward do not wait for it. Updated
/// parameters that live on the device follow sub-group by sub-group.
fn updates_beside(program: &Program, tiles: &[Chunk], settings: &Settings) -> Vec<Instruction> {
    let mut out = Vec::new();
    let update = |chunk: Chunk| Instruction { queue: Queue::Load, ..Instruction::new(Action::Update(chunk)) };
    let goes_up = |chunk: &&Chunk| !program.residency[chunk.flat].weights.is_offloaded();
    let put_back = |chunk: Chunk| {
        let Residency { updates, weights, .. } = program.residency[chunk.flat];
        Instruction { queue: Queue::of_copy(updates, weights), ..Instruction::new(Action::WriteBack(chunk)) }
    };
    let (going, staying): (Vec<&Chunk>, Vec<&Chunk>) = tiles.iter().partition(goes_up);
    let going: Vec<Chunk> = going.into_iter().cloned().collect();
    pipeline(&going, settings.offload.sub_group_buffers, &mut out, update, put_back);
    out.extend(staying.into_iter().cloned().map(update));
    out
}

/// Streams states through the device: as many sub-groups in flight as there is room for, half of them loading and half
/// storing, so that both directions of the bus are busy. The update runs on their queue, not on the compute queue, so
/// only what depends on it waits. The first loads precede everything else of the update, so that they share no memory
/// with it and need not wait for it.
fn pass_through(
    program: &Program,
    tiles: &[Chunk],
    settings: &Settings,
) -> (Vec<Instruction>, Vec<Instruction>) {
    let on = |queue, action| Instruction { queue, ..Instruction::new(action) };
    let room = (settings.offload.sub_group_buffers as usize).clamp(1, tiles.len().max(1));
    // Where all fit at once, none waits for another's buffer.
    let going = if room == tiles.len() { room } else { room / 2 };
    let load = |chunk: &Chunk| on(Queue::Load, Action::LoadStates(chunk.clone()));
    let first = tiles.iter().take(room).map(load).collect();
    let mut out = Vec::new();
    for at in 0..tiles.len() + going {
        // Stores a sub-group that was updated earlier while the next one loads, whatever the update in between waits
        // for. With room for only one, it is stored right after its own update.
        let done = at.checked_sub(going);
        let mut store = done.map(|done| on(Queue::Store, Action::StoreStates(tiles[done].clone())));
        out.extend(store.take_if(|_| going > 0));
        if let Some(chunk) = tiles.get(at) {
            out.push(on(Queue::Load, Action::Update(chunk.clone())));
            // Before the states of earlier sub-groups: the next forward waits only for parameters.
            if program.has_master(chunk.flat) && program.residency[chunk.flat].weights.is_offloaded() {
                out.push(on(Queue::Store, Action::WriteBack(chunk.clone())));
            }
        }
        out.extend(store);
        // Into the buffer of the stored one.
        out.extend(done.and_then(|done| tiles.get(done + room)).map(load));
    }
    (first, out)
}
