//! Sections that are one line of launches: a device that can keeps the whole line, and enqueues it by one call.
//!
//! Launches are the same at every step; what differs is read from memory. The first run of a section is launch by launch:
//! a device may choose algorithms then, and take memory for them. Sections with collectives, with several queues, or beside
//! which another one runs are never kept, and nothing is while instructions are timed or run in any order.

use zeroth_device::{Device, DeviceError, Launch, Queue};

use super::Compiled;
use crate::program::Work;

/// What is known of one section for one number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// It is enqueued launch by launch, always.
    Loose,
    /// It has not run yet.
    New,
    /// It has run once.
    Tried,
    /// The device keeps it under this number.
    Kept(usize),
}

/// The lines, by number of rows and section.
pub(super) struct Replays {
    lines: Vec<Vec<Line>>,
}

impl Replays {
    /// Finds the sections that can be kept. `lowered` is by number of rows, section and instruction.
    pub(super) fn new(compiled: &Compiled, lowered: &[Vec<Vec<Work>>], runs_on: bool) -> Self {
        let line = |section: usize, works: &[Work]| {
            let instructions = &compiled.program.sections[section].instructions;
            let fits = |(at, work): (usize, &Work)| match work {
                Work::Nothing => true,
                Work::Launches(_) => instructions[at].queue == Queue::Compute,
                Work::Collective(_) => false,
            };
            if !runs_on && works.iter().enumerate().all(fits) { Line::New } else { Line::Loose }
        };
        let of_size = |sections: &Vec<Vec<Work>>| {
            sections.iter().enumerate().map(|(section, works)| line(section, works)).collect()
        };
        Self { lines: lowered.iter().map(of_size).collect() }
    }

    /// Enqueues a section from what the device keeps, or has it kept; false where it is to be enqueued launch by launch.
    pub(super) fn run(
        &mut self,
        device: &mut dyn Device,
        [size, section]: [usize; 2],
        works: &[Work],
    ) -> Result<bool, DeviceError> {
        let line = &mut self.lines[size][section];
        match *line {
            Line::Loose => return Ok(false),
            Line::New => {
                *line = Line::Tried;
                return Ok(false);
            }
            Line::Tried => {
                let mut launches = works.iter().flat_map(launches);
                *line = device.keep(Queue::Compute, &mut launches)?.map_or(Line::Loose, Line::Kept);
            }
            Line::Kept(_) => {}
        }
        let Line::Kept(kept) = *line else { return Ok(false) };
        device.replay(Queue::Compute, kept)?;
        Ok(true)
    }
}

fn launches(work: &Work) -> &[Launch] {
    match work {
        Work::Launches(launches) => launches,
        Work::Nothing | Work::Collective(_) => &[],
    }
}
