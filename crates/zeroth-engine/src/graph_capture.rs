//! Graph capture: a section that is a plain list of launches is captured once and launched as a whole.
//!
//! Launches repeat at every step with the same sequence lengths; everything else that differs is read from memory. The
//! first run of a section is launch by launch, since the device may then select algorithms and allocate workspace.
//! Sections with collectives, with several queues, or that overlap another one are never captured, and nothing is
//! captured while tracing or with chaos.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use zeroth_kernel::{Device, DeviceError, Launch, Queue};

use zeroth_program::Compiled;
use zeroth_program::Work;

/// The capture state of a section for one row count and sequence length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Capture {
    /// It is always enqueued launch by launch.
    Never,
    /// It has run once.
    RanOnce,
    /// It is captured as the device graph with this number.
    Captured(usize),
}

/// The maximum number of captured graphs, so that varying lengths do not fill GPU memory.
const MOST: usize = 64;

/// The captured sections of a program.
pub(super) struct CapturedSections {
    /// Whether a section can be captured, by row size and section.
    can: Vec<Vec<bool>>,
    /// Keyed by row size, section, and the common sequence length.
    captures: BTreeMap<([usize; 2], Option<usize>), Capture>,
}

impl CapturedSections {
    /// Finds the sections that can be captured. `lowered` is indexed by row size, section and instruction.
    pub(super) fn new(compiled: &Compiled, lowered: &[Vec<Vec<Work>>], overlaps_next_step: bool) -> Self {
        let can = |section: usize, works: &[Work]| {
            let instructions = &compiled.program.sections[section].instructions;
            let fits = |(at, work): (usize, &Work)| match work {
                Work::Nothing => true,
                Work::Launches(_) => instructions[at].queue == Queue::Compute,
                Work::Collective(..) => false,
            };
            !overlaps_next_step && works.iter().enumerate().all(fits)
        };
        let of_size = |sections: &Vec<Vec<Work>>| {
            sections.iter().enumerate().map(|(section, works)| can(section, works)).collect()
        };
        Self { can: lowered.iter().map(of_size).collect(), captures: BTreeMap::new() }
    }

    /// Launches a captured section, or captures it; false where it must be enqueued launch by launch.
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
        let is_full = self.captures.len() >= MOST;
        let capture = match self.captures.entry(([size, section], length)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                if !is_full {
                    place.insert(Capture::RanOnce);
                }
                return Ok(false);
            }
        };
        if *capture == Capture::RanOnce {
            let mut launches = works.iter().flat_map(launches);
            *capture = device
                .capture_graph(Queue::Compute, &mut launches)?
                .map_or(Capture::Never, Capture::Captured);
        }
        let Capture::Captured(kept) = *capture else { return Ok(false) };
        device.launch_graph(Queue::Compute, kept)?;
        Ok(true)
    }
}

fn launches(work: &Work) -> &[Launch] {
    match work {
        Work::Launches(launches) => launches,
        Work::Nothing | Work::Collective(..) => &[],
    }
}
