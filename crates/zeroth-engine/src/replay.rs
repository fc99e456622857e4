//! Sections that are one line of launches: a device that can keeps the whole line, and enqueues it by one call.
//!
//! Launches are the same at every step with sequences of the same form; what else differs is read from memory. The first run
//! of a section is launch by launch: a device may choose algorithms then, and take memory for them. Sections with collectives,
//! with several queues, or beside which another one runs are never kept, and nothing is while instructions are timed or run in
//! any order.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use zeroth_kernel::{Device, DeviceError, Launch, Queue};

use zeroth_program::Compiled;
use zeroth_program::Work;

/// What is known of one section for one number of rows and one form of sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// It is enqueued launch by launch, always.
    Loose,
    /// It has run once.
    Tried,
    /// The device keeps it under this number.
    Kept(usize),
}

/// The most lines: lengths that change from one micro-batch to the next do not fill a card's memory with them.
const MOST: usize = 64;

/// The lines.
pub(super) struct Replays {
    /// Which can be kept, by number of rows and section.
    can: Vec<Vec<bool>>,
    /// By number of rows, section, and the length of all sequences where it is one.
    lines: BTreeMap<([usize; 2], Option<usize>), Line>,
}

impl Replays {
    /// Finds the sections that can be kept. `lowered` is by number of rows, section and instruction.
    pub(super) fn new(compiled: &Compiled, lowered: &[Vec<Vec<Work>>], runs_on: bool) -> Self {
        let can = |section: usize, works: &[Work]| {
            let instructions = &compiled.program.sections[section].instructions;
            let fits = |(at, work): (usize, &Work)| match work {
                Work::Nothing => true,
                Work::Launches(_) => instructions[at].queue == Queue::Compute,
                Work::Collective(_) => false,
            };
            !runs_on && works.iter().enumerate().all(fits)
        };
        let of_size = |sections: &Vec<Vec<Work>>| {
            sections.iter().enumerate().map(|(section, works)| can(section, works)).collect()
        };
        Self { can: lowered.iter().map(of_size).collect(), lines: BTreeMap::new() }
    }

    /// Enqueues a section from what the device keeps, or has it kept; false where it is to be enqueued launch by launch.
    pub(super) fn run(
        &mut self,
        device: &mut dyn Device,
        [size, section]: [usize; 2],
        length: Option<usize>,
        works: &[Work],
    ) -> Result<bool, DeviceError> {
        if !self.can[size][section] {
            return Ok(false);
        }
        let is_full = self.lines.len() >= MOST;
        let line = match self.lines.entry(([size, section], length)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                if !is_full {
                    place.insert(Line::Tried);
                }
                return Ok(false);
            }
        };
        if *line == Line::Tried {
            let mut launches = works.iter().flat_map(launches);
            *line = device.capture_graph(Queue::Compute, &mut launches)?.map_or(Line::Loose, Line::Kept);
        }
        let Line::Kept(kept) = *line else { return Ok(false) };
        device.launch_graph(Queue::Compute, kept)?;
        Ok(true)
    }
}

fn launches(work: &Work) -> &[Launch] {
    match work {
        Work::Launches(launches) => launches,
        Work::Nothing | Work::Collective(_) => &[],
    }
}
