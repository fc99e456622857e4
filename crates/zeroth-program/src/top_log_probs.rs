//! Programs that compute a teacher's most probable tokens at every position, for caches of them.

use zeroth_graph::Graph;
use zeroth_kernel::Target;

use super::compiled::{check_rows, check_views};
use super::passes;
use super::{
    CompileError, Compiled, FrozenPlacement, Layout, Offload, Settings, StreamSizes, World, plan_memory,
};

/// What is kept of the distribution at a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopLogProbs {
    /// The number of ids, the most probable ones.
    pub k: u64,
    /// The temperature of the softmax.
    pub temperature: f64,
}

impl Compiled {
    /// Compiles a teacher, the only model of `graph`: forward, then the log-probabilities of the `top.k` most probable next
    /// tokens at every token. All parameters are frozen and placed as [`Settings::teacher`] says. Ranks have rows of their own,
    /// and run the program together where parameters are sharded.
    pub fn top_log_probs(
        mut graph: Graph,
        world: impl Into<World>,
        settings: &Settings,
        target: &'static dyn Target,
        row_sizes: impl Into<StreamSizes>,
        top: TopLogProbs,
    ) -> Result<Self, CompileError> {
        let (world, row_sizes) = (world.into(), row_sizes.into());
        check_rows(&graph, &row_sizes)?;
        let parameters = settings.teacher.offloaded.then_some(u64::MAX);
        let offload = Offload { parameters, optimizer: None, stream: None, ..settings.offload };
        let is_partitioned = settings.teacher.is_partitioned();
        let frozen = if is_partitioned { FrozenPlacement::Sharded } else { FrozenPlacement::Whole };
        let settings = Settings { stage: 0, accumulation: 1, frozen, offload, ..*settings };
        check_views(&graph, &settings, target)?;
        let settings = settings.for_target(target);
        graph.params.iter_mut().for_each(|param| param.spec.trainable = false);
        let backward = graph.backward()?;
        let layout = Layout::new(&graph, world.ranks, 0, 0, settings.types.compute);
        let program = passes::lower_top_log_probs(&graph, world, layout, &settings, top);
        let program = passes::gather(program, &settings);
        let program = passes::overlap(program, &settings);
        let program = passes::offload(program, &settings);
        let program = passes::unpack(program, &graph, &backward);
        let program = passes::operands(program, &graph, &backward);
        let memory = plan_memory(&program, &graph, &backward, target, &row_sizes);
        Ok(Self { graph, backward, program, memory, row_sizes, decode_sizes: Vec::new().into(), target })
    }
}
