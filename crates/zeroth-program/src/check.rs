//! The rules that every program keeps, whatever the passes did.

use super::{Action, Program, Section, SectionKind};

/// A program that cannot be compiled, or that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// A stage that ZeRO does not have.
    #[error("there is no stage {stage}: 0, 1, 2 and 3 are")]
    Stage {
        /// The stage.
        stage: u8,
    },
    /// An instruction reads parameters that are not there.
    #[error("{section:?}, instruction {index}: {action:?} reads flat {flat}, which is not gathered")]
    NotResident {
        /// The section.
        section: SectionKind,
        /// The instruction.
        index: usize,
        /// What it does.
        action: Action,
        /// The flat.
        flat: usize,
    },
    /// More elements are gathered at once than allowed.
    #[error("{section:?}, instruction {index}: {live} elements are gathered, and {most} are allowed")]
    TooManyLive {
        /// The section.
        section: SectionKind,
        /// The instruction.
        index: usize,
        /// Elements gathered, persistent ones included.
        live: u64,
        /// The most allowed.
        most: u64,
    },
    /// A gradient landed and was never reduced, or was reduced twice.
    #[error(
        "{section:?}: the gradient of flat {flat} is reduced {times} times over its shard, and should be {expected}"
    )]
    Reduced {
        /// The section.
        section: SectionKind,
        /// The flat.
        flat: usize,
        /// How often each element was.
        times: u64,
        /// How often it should be.
        expected: u64,
    },
}

/// What the rules of residency found in a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// The most elements gathered at any time, persistent ones included, padding not.
    pub most_live: u64,
    /// Gathers of one micro-batch.
    pub gathers: usize,
}

impl Program {
    /// The most elements that may be gathered at once: `max_live`, raised to what the largest instruction needs.
    pub fn live_limit(&self, max_live: u64) -> u64 {
        let needs = self.sections.iter().flat_map(|section| &section.instructions).map(|instruction| {
            let cut = instruction.reads.iter().filter(|flat| !self.stays_gathered(**flat));
            cut.map(|flat| self.gathered_elements(*flat)).sum::<u64>()
        });
        max_live.max(self.persistent_elements() + needs.max().unwrap_or(0))
    }

    /// Elements of memory that a flat takes while it is gathered: none where it is read in place.
    pub(super) fn gathered_elements(&self, flat: usize) -> u64 {
        if self.is_viewed(flat) { 0 } else { self.layout.flats[flat].elements() }
    }

    pub(super) fn persistent_elements(&self) -> u64 {
        if self.cuts_parameters() { self.layout.persistent_elements() } else { 0 }
    }

    /// Checks the rules that every program keeps: what is read is resident; no more than `max_live` elements are
    /// gathered (what one instruction needs always may be); every gradient that landed is reduced once.
    pub fn check(&self, max_live: u64) -> Result<Residency, ProgramError> {
        let (most, persistent) = (self.live_limit(max_live), self.persistent_elements());
        let mut found = Residency { most_live: persistent, gathers: 0 };
        for section in self.sections.iter().filter(|section| section.kind != SectionKind::Update) {
            let mut resident: Vec<usize> = Vec::new();
            let mut gathers = 0;
            for (index, instruction) in section.instructions.iter().enumerate() {
                match instruction.action {
                    Action::Gather(flat) => {
                        resident.push(flat);
                        gathers += 1;
                    }
                    Action::Release(flat) => resident.retain(|other| *other != flat),
                    _ => {}
                }
                for flat in &instruction.reads {
                    if !self.stays_gathered(*flat) && !resident.contains(flat) {
                        let (action, flat) = (instruction.action.clone(), *flat);
                        return Err(ProgramError::NotResident { section: section.kind, index, action, flat });
                    }
                }
                let live =
                    persistent + resident.iter().map(|flat| self.gathered_elements(*flat)).sum::<u64>();
                if live > most && self.cuts_parameters() {
                    return Err(ProgramError::TooManyLive { section: section.kind, index, live, most });
                }
                found.most_live = found.most_live.max(live);
            }
            found.gathers = found.gathers.max(gathers);
            if section.is_micro_batch() {
                self.check_reductions(section)?;
            }
        }
        Ok(found)
    }

    fn check_reductions(&self, section: &Section) -> Result<(), ProgramError> {
        let due = self.reduces() && (self.stage >= 2 || section.kind.is_last());
        for flat in 0..self.layout.flats.len() {
            let landed = section.instructions.iter().any(|instruction| instruction.lands.contains(&flat));
            let capacity = self.layout.flats[flat].shard_capacity(self.layout.ranks);
            let reduced: u64 = section
                .instructions
                .iter()
                .map(|instruction| match &instruction.action {
                    Action::Add(chunk, _) | Action::Reduce(chunk, _) if chunk.flat == flat => {
                        chunk.range.end - chunk.range.start
                    }
                    Action::Keep(kept) if *kept == flat => capacity,
                    _ => 0,
                })
                .sum();
            let expected = u64::from(landed && due);
            if reduced != expected * capacity {
                let times = reduced.div_ceil(capacity);
                return Err(ProgramError::Reduced { section: section.kind, flat, times, expected });
            }
        }
        Ok(())
    }
}
