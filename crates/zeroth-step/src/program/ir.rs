//! The words of the program: instructions over flats and values, in sections.

use std::ops::Range;

use zeroth_graph::{Backward, Graph, ParamId};

use crate::{FlatKind, Layout};

/// What a rank does in one step. Every rank runs the same program.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Where every element lives.
    pub layout: Layout,
    /// The sections, in the order they run; [`SectionKind::Middle`] runs as often as accumulation asks.
    pub sections: Vec<Section>,
    /// How often each section runs in a step.
    pub accumulation: u64,
    /// Whether parameters are cut: then flats that are not persistent must be gathered before they are read.
    pub cuts_parameters: bool,
}

/// A part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    /// Which part.
    pub kind: SectionKind,
    /// What it does, in order.
    pub instructions: Vec<Instruction>,
}

/// The parts of a step. Micro-batches differ only in how gradients land.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SectionKind {
    /// The only micro-batch of a step without accumulation.
    Only,
    /// The first of several micro-batches.
    First,
    /// A micro-batch between the first and the last.
    Middle,
    /// The last of several.
    Last,
    /// The optimizer.
    Update,
}

/// One instruction: what it does, and the flats whose parameters it reads or whose gradients it adds to.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// What it does.
    pub action: Action,
    /// Flats whose parameters it reads, by their place in the layout.
    pub reads: Vec<usize>,
    /// Flats whose gradients it adds to.
    pub lands: Vec<usize>,
}

/// What an instruction does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A node of forward, by its place in the graph.
    Forward(usize),
    /// A node of backward.
    Backward(usize),
    /// Brings all shards of a flat together.
    Gather(usize),
    /// Lets a gathered flat go.
    Release(usize),
    /// Sets a flat's gradient to zero.
    Clear(usize),
    /// Exchanges a chunk of a flat's gradients and adds the ranks' parts, in rank order, in f32.
    Reduce {
        /// The flat.
        flat: usize,
        /// The chunk, as a range within every rank's shard.
        chunk: Range<u64>,
        /// How the sum meets what the shard holds.
        addition: Addition,
    },
    /// Brings the sums of all shards of a flat's gradient together (stage 0, where every rank updates all).
    GatherGradient(usize),
    /// The norm of all gradients, the clip factor, and whether the step counts.
    Control,
    /// The optimizer over what this rank updates of a flat.
    Update(usize),
}

/// How a sum of ranks meets a gradient shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addition {
    /// It takes its place: the first micro-batch of a step.
    Write,
    /// It is added: the later ones.
    Add,
}

/// A program that cannot be compiled, or that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// A stage whose passes are not built.
    #[error("programs of stage {stage} are not yet built: 0 and 3 are")]
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

impl Instruction {
    pub(crate) fn new(action: Action) -> Self {
        Self { action, reads: Vec::new(), lands: Vec::new() }
    }
}

impl Program {
    /// The flats that parameters lie in, each once, in order.
    pub(crate) fn flats_of(layout: &Layout, params: &[ParamId]) -> Vec<usize> {
        let mut flats: Vec<usize> = params.iter().map(|param| layout.place(*param).0).collect();
        flats.sort_unstable();
        flats.dedup();
        flats
    }

    /// Whether a flat is whole on every rank all the time.
    pub(crate) fn stays_gathered(&self, flat: usize) -> bool {
        !self.cuts_parameters || self.layout.flats[flat].kind == FlatKind::Persistent
    }

    /// The sections of micro-batches.
    pub fn micro_batches(&self) -> impl Iterator<Item = &Section> {
        self.sections.iter().filter(|section| section.kind != SectionKind::Update)
    }

    /// The sections as they run in one step, the middle one repeated.
    pub fn in_order(&self) -> impl Iterator<Item = &Section> {
        self.sections.iter().flat_map(|section| {
            let times =
                if section.kind == SectionKind::Middle { self.accumulation.saturating_sub(2) } else { 1 };
            std::iter::repeat_n(section, times as usize)
        })
    }

    /// Checks the rules that every program keeps: what is read is resident; no more than `max_live` elements are
    /// gathered (the largest flat always may be); every gradient that landed is reduced once.
    pub fn check(&self, max_live: u64) -> Result<Residency, ProgramError> {
        let largest = (0..self.layout.flats.len()).filter(|flat| !self.stays_gathered(*flat));
        let largest = largest.map(|flat| self.layout.flats[flat].elements()).max().unwrap_or(0);
        let persistent = if self.cuts_parameters { self.layout.persistent_elements() } else { 0 };
        let most = max_live.max(persistent + largest);
        let mut found = Residency { most_live: persistent, gathers: 0 };
        for section in self.micro_batches() {
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
                    persistent + resident.iter().map(|flat| self.layout.flats[*flat].elements()).sum::<u64>();
                if live > most && self.cuts_parameters {
                    return Err(ProgramError::TooManyLive { section: section.kind, index, live, most });
                }
                found.most_live = found.most_live.max(live);
            }
            found.gathers = found.gathers.max(gathers);
            self.check_reductions(section)?;
        }
        Ok(found)
    }

    fn check_reductions(&self, section: &Section) -> Result<(), ProgramError> {
        let reduces = self.cuts_parameters || matches!(section.kind, SectionKind::Only | SectionKind::Last);
        for flat in 0..self.layout.flats.len() {
            let landed = section.instructions.iter().any(|instruction| instruction.lands.contains(&flat));
            let exchanged: u64 = section
                .instructions
                .iter()
                .filter_map(|instruction| match &instruction.action {
                    Action::Reduce { flat: other, chunk, .. } if *other == flat => {
                        Some(chunk.end - chunk.start)
                    }
                    _ => None,
                })
                .sum();
            let expected = u64::from(landed && reduces);
            let capacity = self.layout.flats[flat].shard_capacity(self.layout.ranks);
            if exchanged != expected * capacity {
                let times = exchanged.div_ceil(capacity);
                return Err(ProgramError::Reduced { section: section.kind, flat, times, expected });
            }
        }
        Ok(())
    }
}

/// The instructions of one micro-batch's forward and backward.
pub(super) fn micro_batch(graph: &Graph, backward: &Backward, layout: &Layout) -> Vec<Instruction> {
    let head = graph.nodes.len() - 1;
    let forward = graph.nodes[..head].iter().enumerate().map(|(index, node)| Instruction {
        action: Action::Forward(index),
        reads: Program::flats_of(layout, &node.params),
        lands: Vec::new(),
    });
    let backward = backward.nodes.iter().enumerate().map(|(index, node)| Instruction {
        action: Action::Backward(index),
        reads: Program::flats_of(layout, &node.params),
        lands: Program::flats_of(layout, &node.lands),
    });
    forward.chain(backward).collect()
}
