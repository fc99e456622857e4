//! `offload`: which parts of a flat live in host memory, and the copies that this needs.
//!
//! Keys: `zero_optimization.offload_optimizer.{device, ratio, buffer_count}`, `zero_optimization.offload_param.{device,
//! max_in_cpu, buffer_count, buffer_size, pin_memory}`, `zero_optimization.sub_group_size`, `zeroth.update`,
//! `zeroth.update_window`.
//!
//! With the optimizer in host memory, gradients go there as soon as ranks have added them, and are updated there tile by
//! tile; updated parameters come back through as many staging tiles as buffers are allowed. With parameters in host
//! memory, a rank's shard is copied straight to its place in the flat that is being gathered, piece by piece; from
//! pageable memory the pieces pass through staging. The same arithmetic on the same numbers, elsewhere.
//!
//! On a card, `zeroth.update` says who updates: with "host" the host's processors do, in a line of their own, while the card
//! goes on with the next forward, whose units wait for their own tiles; with "device" states pass through the card.

use zeroth_kernel::{Queue, Tier};

use super::super::{
    Action, Addition, Chunk, GradientHome, Held, Instruction, Program, Section, SectionKind, Settings,
    UpdatedBy,
};
use crate::BLOCK;
use crate::{FlatKind, Layout};

/// Elements of a tile that passes through the device, at least and at most: large enough for the bus and for a line that
/// holds about a thousand commands, small enough that several fit.
const PASSING_TILE: [u64; 2] = [32 << 20, 64 << 20];
/// Tiles that a window is cut into, if they are not too small then.
const TILES_OF_WINDOW: u64 = 64;
/// Bytes of an element's states, about.
const STATE_BYTES: u64 = 14;

/// Where each flat's parts live: whole flats in the order of the layout, as far as `ratio` and `max_in_cpu` reach.
pub(in super::super) fn hold(layout: &Layout, settings: &Settings) -> Vec<Held> {
    let offload = &settings.offload;
    let trained: u64 = layout
        .flats
        .iter()
        .filter(|flat| !matches!(flat.kind, FlatKind::Frozen(_)))
        .map(|flat| flat.shard_capacity(layout.ranks))
        .sum();
    let most_states =
        offload.optimizer.filter(|_| settings.stage >= 1).map_or(0.0, |ratio| ratio * trained as f64);
    let most_weights = offload.parameters.filter(|_| settings.stage >= 3).unwrap_or(0);
    let (mut states, mut weights) = (0, 0);
    layout
        .flats
        .iter()
        .map(|flat| {
            let shard = flat.shard_capacity(layout.ranks);
            let mut held = Held {
                weights: Tier::Device,
                gradients: Tier::Device,
                states: Tier::Device,
                updates: Tier::Device,
            };
            let is_trained = !matches!(flat.kind, FlatKind::Frozen(_));
            if is_trained && (states as f64) < most_states {
                states += shard;
                held.states = Tier::Host;
                (held.gradients, held.updates) = offload
                    .stream
                    .map_or((Tier::Host, Tier::Host), |stream| (stream.gradients, Tier::Device));
            }
            if flat.kind != FlatKind::Persistent && shard <= most_weights.saturating_sub(weights) {
                weights += shard;
                held.weights = Tier::Host;
            }
            held
        })
        .collect()
}

pub(in super::super) fn offload(mut program: Program, settings: &Settings) -> Program {
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

/// A transfer's instruction: beside compute where transfers may overlap.
fn transfer(action: Action, queue: Queue, settings: &Settings) -> Instruction {
    Instruction { queue: if settings.overlap { queue } else { Queue::Compute }, ..Instruction::new(action) }
}

/// Pieces of whole blocks, of at most `most` elements (a block at least).
fn pieces(flat: usize, capacity: u64, most: u64) -> Vec<Chunk> {
    let step = (most / BLOCK).max(1) * BLOCK;
    let piece = |first: u64| Chunk { flat, range: first..first.saturating_add(step).min(capacity) };
    (0..capacity).step_by(usize::try_from(step).unwrap_or(usize::MAX)).map(piece).collect()
}

/// As few pieces as there must be, all of about the same size: every one has a place of the largest one's size.
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
    let ranks = program.layout.ranks;
    let on_host = |flat: usize| program.held[flat].gradients == Tier::Host;
    let last_landing =
        |flat: usize| instructions.iter().rposition(|instruction| instruction.lands.contains(&flat));
    // Where nothing is added or rounded, a gradient is complete with its last landing.
    let complete_as_landed: Vec<(usize, usize)> = (0..program.layout.flats.len())
        .filter(|flat| section.kind.is_last() && on_host(*flat) && !program.reduces())
        .filter_map(|flat| last_landing(flat).map(|at| (at, flat)))
        .collect();
    let mut out = Vec::with_capacity(instructions.len());
    for (at, instruction) in instructions.iter().enumerate() {
        if let Action::Gather(flat) = instruction.action
            && program.held[flat].weights == Tier::Host
        {
            bring(program, flat, settings, &mut out);
        }
        out.push(instruction.clone());
        match &instruction.action {
            Action::Add(chunk, addition) if on_host(chunk.flat) => {
                let save = Action::SaveGradient(chunk.clone(), *addition);
                out.push(transfer(save, Queue::Download, settings));
            }
            Action::Keep(flat) if on_host(*flat) => {
                let whole = Chunk { flat: *flat, range: 0..program.layout.flats[*flat].padded() };
                // Its part of the norm while it is still here.
                out.push(Instruction::new(Action::Squares(*flat)));
                out.push(transfer(Action::SaveGradient(whole, Addition::Write), Queue::Download, settings));
            }
            _ => {}
        }
        for (_, flat) in complete_as_landed.iter().filter(|(last, _)| *last == at) {
            let whole = Chunk { flat: *flat, range: 0..program.layout.flats[*flat].shard_capacity(ranks) };
            out.push(transfer(Action::SaveGradient(whole, Addition::Write), Queue::Download, settings));
        }
    }
    debug_assert!(
        complete_as_landed.is_empty() || program.gradient_home() == GradientHome::Landed,
        "only what landed is complete without a sum"
    );
    out
}

/// A shard on its way into the flat that is gathered next.
fn bring(program: &Program, flat: usize, settings: &Settings, out: &mut Vec<Instruction>) {
    let capacity = program.layout.flats[flat].shard_capacity(program.layout.ranks);
    let pieces = pieces(flat, capacity, settings.offload.piece);
    if settings.offload.pageable {
        pipeline(
            &pieces,
            settings.offload.pieces,
            out,
            |chunk| Instruction::new(Action::Stage(chunk)),
            |chunk| transfer(Action::Bring(chunk), Queue::Upload, settings),
        );
    } else {
        out.extend(pieces.into_iter().map(|chunk| transfer(Action::Bring(chunk), Queue::Upload, settings)));
    }
}

/// `make` and `take` of each chunk, with at most `depth` made and not taken.
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

/// The update, tile by tile.
fn updates(program: &Program, instructions: Vec<Instruction>, settings: &Settings) -> Vec<Instruction> {
    let mut out = Vec::with_capacity(instructions.len());
    let counted = |flat: usize| {
        program.gradient_home() == GradientHome::Rounded && program.held[flat].gradients == Tier::Host
    };
    let window = program.window.unwrap_or(0) / TILES_OF_WINDOW;
    let passing_tile = (window / STATE_BYTES).clamp(PASSING_TILE[0], PASSING_TILE[1]);
    // Tiles of one flat after the other's: the first of a flat is on its way while the last one's is updated.
    let (mut passing, mut beside, mut spread) = (Vec::new(), Vec::new(), Vec::new());
    let runs_beside = |flat: usize| {
        settings.offload.updated_by == Some(UpdatedBy::Host) && program.held[flat].updates == Tier::Host
    };
    // Small parameters of all units come first: every unit of the next forward waits for them.
    let add = |tiles: &mut Vec<Chunk>, whole: &Chunk, most: u64| {
        let is_shared = program.layout.flats[whole.flat].kind == FlatKind::Persistent;
        let at = if is_shared { 0 } else { tiles.len() };
        let most = settings.offload.tile.min(most);
        tiles.splice(at..at, even_pieces(whole.flat, whole.range.end, most));
    };
    for instruction in instructions {
        let whole = match &instruction.action {
            Action::Update(whole) => whole,
            Action::Squares(flat) if counted(*flat) => continue,
            Action::GatherWeights(Chunk { flat, .. }) | Action::SpreadWeights { flat, .. }
                if program.streams(*flat) || runs_beside(*flat) =>
            {
                spread.push(instruction);
                continue;
            }
            _ => {
                out.push(instruction);
                continue;
            }
        };
        let held = program.held[whole.flat];
        if program.streams(whole.flat) {
            add(&mut passing, whole, passing_tile);
            continue;
        }
        if runs_beside(whole.flat) {
            add(&mut beside, whole, PASSING_TILE[1]);
            continue;
        }
        let tiles = pieces(whole.flat, whole.range.end, settings.offload.tile);
        let update = |chunk: Chunk| Instruction::new(Action::Update(chunk));
        if held.weights == held.updates {
            out.extend(tiles.into_iter().map(update));
            continue;
        }
        let queue = if held.weights == Tier::Device { Queue::Upload } else { Queue::Download };
        pipeline(&tiles, settings.offload.tiles, &mut out, update, |chunk| {
            transfer(Action::PutBack(chunk), queue, settings)
        });
    }
    let (mut all, through) = pass_through(program, &passing, settings);
    all.extend(out);
    all.extend(through);
    all.extend(updates_beside(program, &beside, settings));
    all.extend(spread);
    all
}

/// The update by the host's processors, in the line that states would pass in: forward and backward do not see it. Updated
/// parameters that live on the device follow tile by tile.
fn updates_beside(program: &Program, tiles: &[Chunk], settings: &Settings) -> Vec<Instruction> {
    let mut out = Vec::new();
    let update = |chunk: Chunk| Instruction { queue: Queue::Load, ..Instruction::new(Action::Update(chunk)) };
    let goes_up = |chunk: &&Chunk| program.held[chunk.flat].weights == Tier::Device;
    let put_back =
        |chunk: Chunk| Instruction { queue: Queue::Upload, ..Instruction::new(Action::PutBack(chunk)) };
    let (going, staying): (Vec<&Chunk>, Vec<&Chunk>) = tiles.iter().partition(goes_up);
    let going: Vec<Chunk> = going.into_iter().cloned().collect();
    pipeline(&going, settings.offload.tiles, &mut out, update, put_back);
    out.extend(staying.into_iter().cloned().map(update));
    out
}

/// States on their way through the device: as many tiles at a time as there is room for, half of them coming and half
/// going, so that both ways of the bus are used. The update runs in their line, not in that of forward and backward: what
/// does not wait for it does not see it. The first loads stand before everything else of the update, so that they share no
/// memory with it and need not wait for it.
fn pass_through(
    program: &Program,
    tiles: &[Chunk],
    settings: &Settings,
) -> (Vec<Instruction>, Vec<Instruction>) {
    let on = |queue, action| Instruction { queue, ..Instruction::new(action) };
    let room = (settings.offload.tiles as usize).clamp(1, tiles.len().max(1));
    // Where all are there at once, none waits for another's place.
    let going = if room == tiles.len() { room } else { room / 2 };
    let load = |chunk: &Chunk| on(Queue::Load, Action::Load(chunk.clone()));
    let first = tiles.iter().take(room).map(load).collect();
    let mut out = Vec::new();
    for at in 0..tiles.len() + going {
        // One that was updated some tiles ago: it goes while the next one comes, whatever the update in between waits for.
        // Where there is room for one alone, it goes behind its own update.
        let done = at.checked_sub(going);
        let mut store = done.map(|done| on(Queue::Store, Action::Store(tiles[done].clone())));
        out.extend(store.take_if(|_| going > 0));
        if let Some(chunk) = tiles.get(at) {
            out.push(on(Queue::Load, Action::Update(chunk.clone())));
            // Before the states of those ahead of it: the next forward waits for parameters, and for nothing else.
            if program.has_master(chunk.flat) && program.held[chunk.flat].weights == Tier::Host {
                out.push(on(Queue::Store, Action::PutBack(chunk.clone())));
            }
        }
        out.extend(store);
        // Where the one that has gone was.
        out.extend(done.and_then(|done| tiles.get(done + room)).map(load));
    }
    (first, out)
}
