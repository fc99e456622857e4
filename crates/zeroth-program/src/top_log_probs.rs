//! Programs that compute a teacher's most probable tokens at every position, for caches of them.

use zeroth_graph::Graph;
use zeroth_kernel::Target;

use super::compiled::{check_rows, check_views};
use super::passes::compile_top_log_probs;
use super::{
    CompileError, Compiled, FrozenPlacement, Offload, Settings, StreamSizes, TopLogProbs, World, plan_memory,
};

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
        let program = compile_top_log_probs(&graph, &backward, world, &settings, top);
        let memory = plan_memory(&program, &graph, &backward, target, &row_sizes);
        Ok(Self { graph, backward, program, memory, row_sizes, decode_sizes: Vec::new().into(), target })
    }
}
