//! Verification: the invariants of every program, whatever the passes did.

use zeroth_base::Axis;

use super::{Action, Program, Section, SectionKind, World};

/// A program that cannot be compiled or violates an invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what their fields are")]
pub enum ProgramError {
    #[error("ZeRO has no stage {stage}: the stages are 0, 1, 2 and 3")]
    Stage { stage: u8 },
    #[error("{} ranks cannot be groups of {}: a group has at least one rank, and as many as every other", .0.ranks, .0.group)]
    Groups(World),
    #[error("{section:?}, instruction {index}: {action:?} reads flat {flat}, which is not gathered")]
    NotResident { section: SectionKind, index: usize, action: Action, flat: usize },
    #[error("{section:?}, instruction {index}: {live} elements are gathered, and {most} are allowed")]
    TooManyLive { section: SectionKind, index: usize, live: u64, most: u64 },
    #[error(
        "{section:?}: the gradient of flat {flat} is reduced {times} time(s) along the {axis} over its shard instead of {expected}"
    )]
    Reduced { section: SectionKind, flat: usize, axis: Axis, times: u64, expected: u64 },
}

/// Gather statistics found by [`Program::check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherStats {
    /// The peak number of gathered elements, persistent ones included, without padding.
    pub most_live: u64,
    /// All-gathers per micro-batch.
    pub gathers: usize,
}

impl Program {
    /// The limit on gathered elements: `max_live`, raised to what the largest instruction needs.
    pub fn live_limit(&self, max_live: u64) -> u64 {
        let needs = self.sections.iter().flat_map(|section| &section.instructions).map(|instruction| {
            let cut = instruction.reads.iter().filter(|flat| self.is_sharded(**flat));
            cut.map(|flat| self.gathered_elements(*flat)).sum::<u64>()
        });
        max_live.max(self.persistent_elements() + needs.max().unwrap_or(0))
    }

    /// Elements of memory that a gathered flat takes: none with zero-copy gathers.
    pub(super) fn gathered_elements(&self, flat: usize) -> u64 {
        if self.is_viewed(flat) { 0 } else { self.layout.flats[flat].elements() }
    }

    pub(super) fn persistent_elements(&self) -> u64 {
        if self.shards_parameters() { self.layout.persistent_elements() } else { 0 }
    }

    /// Checks the invariants of every program: parameters are gathered when read; no more than `max_live` elements are
    /// gathered, beyond what one instruction needs; every gradient is reduced exactly once.
    pub fn check(&self, max_live: u64) -> Result<GatherStats, ProgramError> {
        let (most, persistent) = (self.live_limit(max_live), self.persistent_elements());
        let mut found = GatherStats { most_live: persistent, gathers: 0 };
        for section in self.sections.iter().filter(|section| section.kind != SectionKind::Update) {
            let mut resident: Vec<usize> = Vec::new();
            let mut gathers = 0;
            for (index, instruction) in section.instructions.iter().enumerate() {
                match instruction.action {
                    // The first level of two takes the memory, the last one completes it.
                    Action::AllGather(flat, axis) => {
                        if !resident.contains(&flat) {
                            resident.push(flat);
                        }
                        gathers += usize::from(axis == self.layout.world.gather_axis());
                    }
                    Action::Release(flat) => resident.retain(|other| *other != flat),
                    _ => {}
                }
                for flat in &instruction.reads {
                    if self.is_sharded(*flat) && !resident.contains(flat) {
                        let (action, flat) = (instruction.action.clone(), *flat);
                        return Err(ProgramError::NotResident { section: section.kind, index, action, flat });
                    }
                }
                let live =
                    persistent + resident.iter().map(|flat| self.gathered_elements(*flat)).sum::<u64>();
                if live > most && self.shards_parameters() {
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
        self.layout.world.levels().iter().try_for_each(|axis| self.check_level(section, *axis))
    }

    /// Whether every gradient is reduced once along an axis, where it is due.
    fn check_level(&self, section: &Section, axis: Axis) -> Result<(), ProgramError> {
        let waits = self.accumulates_partial_sums() && !self.sums_partially(axis);
        let due = self.reduces() && (self.stage >= 2 && !waits || section.kind.is_last());
        let flats = self.layout.flats.len();
        let capacity = |flat: usize| self.layout.flats[flat].shard_capacity(self.layout.ranks());
        let (mut accumulated, mut reduced) = (vec![false; flats], vec![0; flats]);
        for instruction in &section.instructions {
            instruction.accumulates_into.iter().for_each(|flat| accumulated[*flat] = true);
            match &instruction.action {
                Action::SumRanks(chunk, _, along) | Action::ReduceScatter(chunk, _, along)
                    if *along == axis =>
                {
                    reduced[chunk.flat] += chunk.range.end - chunk.range.start;
                }
                Action::KeepGrad(flat) => reduced[*flat] += capacity(*flat),
                _ => {}
            }
        }
        for flat in 0..flats {
            let (capacity, reduced) = (capacity(flat), reduced[flat]);
            let expected = u64::from(accumulated[flat] && due);
            if reduced != expected * capacity {
                let times = reduced.div_ceil(capacity);
                return Err(ProgramError::Reduced { section: section.kind, flat, axis, times, expected });
            }
        }
        Ok(())
    }
}
