//! A program with its model and a place for every buffer: what ranks share before they differ.

use std::collections::BTreeMap;

use crate::Target;
use zeroth_base::DType;
use zeroth_graph::{Backward, Graph, GraphError, Op};
use zeroth_kernel::{Span, Tier};

use crate::{
    Action, Content, Gather, Instruction, Memory, Placed, Program, ProgramError, Settings, bytes, compile,
    compile_inference, guarded_bytes, in_place,
};

/// A program that can be run.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// The model over the largest micro-batch.
    pub graph: Graph,
    /// Its backward.
    pub backward: Backward,
    /// What a step does.
    pub program: Program,
    /// Where every buffer is.
    pub memory: Memory,
    /// The numbers of rows that micro-batches are rounded up to, in rising order; the last is the graph's.
    pub row_sizes: Vec<u64>,
    /// The kind of device it was counted for.
    pub target: Target,
}

/// A program that cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CompileError {
    /// The model has no backward.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A pass refused.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// GPUs do not map each other's shards.
    #[error(
        "zeroth.gather is \"view\", which only CPU ranks can do, and this run is on GPUs; leave the key out, or write \
         \"copy\""
    )]
    ViewOnGpu,
    /// Sizes that do not end with the graph's rows.
    #[error("row sizes {sizes:?} must rise and end with the {rows} rows of the model")]
    RowSizes {
        /// The sizes.
        sizes: Vec<u64>,
        /// Rows of the model.
        rows: u64,
    },
}

impl Compiled {
    /// Compiles a step of a model on `ranks` ranks.
    pub fn new(
        graph: Graph,
        ranks: u64,
        settings: &Settings,
        target: Target,
        row_sizes: Vec<u64>,
    ) -> Result<Self, CompileError> {
        Self::guarded(graph, ranks, settings, target, row_sizes, 0)
    }

    /// As [`Self::new`], with `guard` bytes behind every buffer for an executor that looks after them.
    pub fn guarded(
        graph: Graph,
        ranks: u64,
        settings: &Settings,
        target: Target,
        row_sizes: Vec<u64>,
        guard: u64,
    ) -> Result<Self, CompileError> {
        check_rows(&graph, &row_sizes)?;
        let backward = graph.backward()?;
        if target == Target::Cuda && settings.stage >= 3 && settings.gather == Some(Gather::View) {
            return Err(CompileError::ViewOnGpu);
        }
        let mut settings = settings.on(target);
        if guard > 0 {
            // With guards between them shards do not begin with pages, and cannot be mapped.
            settings.gather = Some(Gather::Copy);
        }
        let made = |settings: &Settings| -> Result<(Program, Memory), ProgramError> {
            let program = in_place(compile(&graph, &backward, ranks, settings)?, target);
            let memory = guarded_bytes(&program, &graph, &backward, target, &row_sizes, guard);
            Ok((program, memory))
        };
        let (mut program, mut memory) = made(&settings)?;
        // As many tiles at a time as fit into their window. More would lie where the next forward wants to be.
        let (asked, arena) = (settings.offload.tiles, memory.arena(Tier::Device));
        settings.offload.tiles = memory.room_for_tiles(program.window.unwrap_or(0)).max(asked);
        while settings.offload.tiles > asked {
            let deeper = made(&settings)?;
            if deeper.1.arena(Tier::Device) <= arena {
                (program, memory) = deeper;
                break;
            }
            settings.offload.tiles -= 1;
        }
        Ok(Self { graph, backward, program, memory, row_sizes, target })
    }

    /// Compiles a model for inference, its numbers stored in `run`: [`super::Engine::logits`] gives the next-token logits of
    /// up to `sequences` sequences at once. Nothing is dropped, and there is no room for gradients and optimizer state.
    pub fn inference(
        mut graph: Graph,
        run: DType,
        sequences: u64,
        target: Target,
        row_sizes: Vec<u64>,
    ) -> Result<Self, CompileError> {
        check_rows(&graph, &row_sizes)?;
        graph.params.iter_mut().for_each(|param| param.spec.trainable = false);
        for node in &mut graph.nodes {
            if let Op::Dropout { probability, .. } = &mut node.op {
                *probability = 0.0;
            }
        }
        let backward = graph.backward()?;
        let program = compile_inference(&graph, run, sequences);
        let memory = bytes(&program, &graph, &backward, target, &row_sizes);
        Ok(Self { graph, backward, program, memory, row_sizes, target })
    }
}

fn check_rows(graph: &Graph, row_sizes: &[u64]) -> Result<(), CompileError> {
    let rows = graph.inputs.first().map_or(0, |ids| graph.info(*ids).rows);
    if row_sizes.is_sorted() && row_sizes.last() == Some(&rows) {
        return Ok(());
    }
    Err(CompileError::RowSizes { sizes: row_sizes.to_vec(), rows })
}

impl Compiled {
    /// Where every buffer is while a section runs, for those who ask often.
    pub fn spans(&self, section: usize) -> BTreeMap<Content, Span> {
        let placed = self.memory.always.iter().chain(&self.memory.sections[section].buffers);
        placed.map(|placed| (placed.buffer.content, placed.span(self.memory.guard))).collect()
    }

    /// Where a buffer is while a section runs.
    pub fn find(&self, section: usize, content: Content) -> Option<Span> {
        self.placed(section, content).map(|placed| placed.span(self.memory.guard))
    }

    fn placed(&self, section: usize, content: Content) -> Option<&Placed> {
        let is = |placed: &&Placed| placed.buffer.content == content;
        let passing = self.memory.sections[section].buffers.iter().find(is);
        passing.or_else(|| self.memory.always.iter().find(is))
    }

    /// The span of a buffer that the section has.
    ///
    /// # Panics
    /// When it has none: a mistake of the program.
    pub fn span(&self, section: usize, content: Content) -> Span {
        self.find(section, content)
            .unwrap_or_else(|| unreachable!("{content:?} has a place in section {section}"))
    }

    /// An instruction in words: what, and of which unit.
    pub fn describe(&self, instruction: &Instruction) -> String {
        let unit = |unit: zeroth_graph::UnitId| &self.graph.units[unit.index()].name;
        match &instruction.action {
            Action::Forward(node) => {
                let node = &self.graph.nodes[*node];
                format!("{} of {}", node.op.name(), unit(node.unit))
            }
            Action::Logits { node, .. } => format!("logits of {}", unit(self.graph.nodes[*node].unit)),
            Action::Backward(node) => {
                let node = &self.backward.nodes[*node];
                format!("gradient of {} of {}", self.graph.nodes[node.of].op.name(), unit(node.unit))
            }
            Action::Recompute { node, .. } => {
                let node = &self.graph.nodes[*node];
                format!("{} of {} again", node.op.name(), unit(node.unit))
            }
            other => match other.flat() {
                Some(flat) => format!("{} of {}", other.name(), self.flat_name(flat)),
                None => other.name().to_owned(),
            },
        }
    }

    /// The unit a flat belongs to, in words.
    pub fn flat_name(&self, flat: usize) -> String {
        use crate::FlatKind::{Frozen, Persistent, Trained};
        match self.program.layout.flats[flat].kind {
            Trained(unit) => self.graph.units[unit.index()].name.clone(),
            Frozen(unit) => format!("{} (frozen)", self.graph.units[unit.index()].name),
            Persistent => "the persistent parameters".to_owned(),
        }
    }
}
