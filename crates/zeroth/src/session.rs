//! Trains a custom model under a DeepSpeed config; the counterpart of `deepspeed.initialize`.
//!
//! Build a forward graph with [`zeroth_graph::Builder`], pass it with a config, and step. Ranks are threads of this
//! process, each with its own memory; `zeroth train` runs them as processes.

use std::num::NonZeroU64;

use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, JoinError, JoinOptions};
use zeroth_config::checked::CheckedConfig;
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, Resolved, resolve};
use zeroth_config::unsupported::unsupported_keys;
use zeroth_cpu::CpuTarget;
use zeroth_engine::{Engine, InstructionTime, RankSetup, RunError, StreamBatch, StreamRows};
use zeroth_graph::{Graph, Op, ParamId};
use zeroth_kernel::{DeviceError, RATES, Recipe, Record};
use zeroth_model::{INITIALIZER_RANGE, NewValues, Parameter, ParameterKind, fill_new};
use zeroth_program::{CompileError, Compiled};
use zeroth_program::{Settings, StreamSizes};
use zeroth_train::{Schedule, ScheduleError, from_config};

/// A model compiled under a config.
pub struct Session {
    compiled: Compiled,
    config: Resolved,
    recipe: Recipe,
    schedule: Schedule,
    seed: u64,
}

/// An error of a session.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SessionError {
    #[error("{0}")]
    Config(String),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("a rank panicked")]
    Panicked,
}

/// One rank of a session.
pub struct RankSession<'s> {
    engine: Engine<'s>,
    schedule: &'s Schedule,
    applied: u64,
}

impl Session {
    /// Compiles a model for `ranks` ranks and a run of `steps` steps. `config` is a preset, a file, or JSON. Ranks
    /// share the CPUs evenly.
    pub fn new(graph: Graph, config: &str, ranks: u64, steps: NonZeroU64) -> Result<Self, SessionError> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cpus / ranks.max(1) as usize).max(1);
        Self::with_threads(graph, config, ranks, threads, steps)
    }

    /// As [`Self::new`], with `threads` threads per rank.
    pub fn with_threads(
        graph: Graph,
        config: &str,
        ranks: u64,
        threads: usize,
        steps: NonZeroU64,
    ) -> Result<Self, SessionError> {
        let wrong = |error: &dyn std::fmt::Display| SessionError::Config(error.to_string());
        let checked = CheckedConfig::load(config).map_err(|error| wrong(&error))?;
        let widest = graph.values.iter().map(|value| value.width).max();
        let request = ResolveRequest {
            file: &checked.report.values,
            flags: &Flags::default(),
            ranks,
            model: Some(ModelFacts { hidden_size: widest, blocks: Some(graph.blocks().count() as u64) }),
            steps: Some(steps.get()),
        };
        let config = resolve(&request).map_err(|error| wrong(&error))?;
        if let Some(lack) = unsupported_keys(&config).refused.first() {
            return Err(wrong(lack));
        }
        let rows = StreamSizes::of_streams(vec![graph.stream_rows()]);
        let target = CpuTarget::of(threads);
        let settings = Settings::from_config(&config);
        let compiled = Compiled::new(graph, settings.world(ranks), &settings, target, rows)?;
        let (recipe, schedule) =
            (from_config::recipe(&config, 0), from_config::schedule(&config, steps.get())?);
        Ok(Self { compiled, config, recipe, schedule, seed: 42 })
    }

    /// The compiled program, with the placement of every buffer.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// Arena bytes per rank.
    pub fn bytes(&self) -> u64 {
        self.compiled.memory.arenas().sum()
    }

    /// The resolved config.
    pub fn config(&self) -> &Resolved {
        &self.config
    }

    /// Runs `body` on every rank with freshly initialised weights, and returns the results in rank order.
    pub fn run<T: Send>(
        &self,
        body: impl Fn(&mut RankSession<'_>) -> Result<T, SessionError> + Sync,
    ) -> Result<Vec<T>, SessionError> {
        let ranks = self.compiled.program.layout.ranks() as usize;
        if ranks == 1 {
            return Ok(vec![body(&mut self.rank(None)?)?]);
        }
        let job = LocalJob::create(ranks, 1 << 20)?;
        let options = JoinOptions::default().group(self.compiled.program.world().group as usize);
        std::thread::scope(|scope| {
            let start = |rank: usize| {
                let comm = job.join(rank, &options)?;
                let body = &body;
                std::thread::Builder::new()
                    .spawn_scoped(scope, move || body(&mut self.rank(Some(comm))?))
                    .map_err(|source| JoinError::System { what: "start a thread for a rank", source })
            };
            let threads = (0..ranks).map(start).collect::<Result<Vec<_>, JoinError>>()?;
            threads.into_iter().map(|thread| thread.join().map_err(|_| SessionError::Panicked)?).collect()
        })
    }

    fn rank(&self, comm: Option<Box<dyn Comm>>) -> Result<RankSession<'_>, SessionError> {
        let graph = &self.compiled.graph;
        // The bias of a linear map is its second parameter.
        let is_bias = |param: ParamId| {
            graph.nodes.iter().any(|node| node.op == Op::Linear && node.params.get(1) == Some(&param))
        };
        let parameter = |param: ParamId| {
            let spec = &graph.param(param).spec;
            let kind = match spec.shape.len() {
                1 if is_bias(param) => ParameterKind::Bias,
                1 => ParameterKind::Norm,
                _ => ParameterKind::Linear,
            };
            Parameter {
                name: spec.name.clone(),
                shape: spec.shape.clone(),
                kind,
                role: None,
                adapts: None,
                aliases: &[],
                parts: Vec::new(),
                trained: spec.trainable,
                quantized: spec.quantized,
            }
        };
        let all = from_config::decays_all(&self.config);
        let decayed = |param| all || graph.param(param).spec.shape.len() > 1;
        let device = self.compiled.target.open(0, self.compiled.memory.arenas())?;
        let rank = RankSetup { comm, device, recipe: self.recipe, decayed: &decayed, seed: self.seed };
        let mut engine = Engine::new(&self.compiled, rank)?;
        engine.load(&mut |param, range, elements| {
            let parameter = parameter(param);
            let new = NewValues::of(&parameter, INITIALIZER_RANGE as f32);
            fill_new(self.seed, new, &parameter, range, elements);
            Ok(())
        })?;
        Ok(RankSession { engine, schedule: &self.schedule, applied: 0 })
    }
}

impl RankSession<'_> {
    /// The rank's index.
    pub fn rank(&self) -> u64 {
        self.engine.rank()
    }

    /// Enables timing of every instruction.
    pub fn record_times(&mut self) {
        self.engine.record_trace();
    }

    /// Instruction times since the last call; empty unless enabled.
    pub fn take_times(&mut self) -> Result<Vec<InstructionTime>, SessionError> {
        Ok(self.engine.take_times(false)?)
    }

    /// The summed loss over a micro-batch's trained tokens on this rank; collective.
    pub fn evaluate(&mut self, batch: &StreamRows<'_>) -> Result<f64, SessionError> {
        Ok(self.engine.evaluate(batch)?)
    }

    /// As [`Self::evaluate`], for a model with several streams or further inputs.
    pub fn evaluate_streams(&mut self, batch: &StreamBatch<'_>) -> Result<f64, SessionError> {
        Ok(self.engine.evaluate_streams(batch)?)
    }

    /// Runs one optimizer step on this rank's micro-batches. `trained` is the number of trained tokens over all
    /// ranks.
    pub fn step(&mut self, batches: &[StreamRows<'_>], trained: u64) -> Result<Record, SessionError> {
        let rates = self.rates();
        self.engine.step(batches, trained, self.applied, &rates)?;
        self.finish_step()
    }

    /// As [`Self::step`], for a model with several streams or further inputs.
    pub fn step_streams(
        &mut self,
        batches: &[StreamBatch<'_>],
        trained: u64,
    ) -> Result<Record, SessionError> {
        let rates = self.rates();
        self.engine.step_streams(batches, trained, self.applied, &rates)?;
        self.finish_step()
    }

    /// The learning rates of the next updates.
    fn rates(&self) -> [f64; RATES] {
        std::array::from_fn(|ahead| self.schedule.rate(self.applied + ahead as u64))
    }

    fn finish_step(&mut self) -> Result<Record, SessionError> {
        let record = self.engine.record()?.head;
        self.applied = record.applied;
        Ok(record)
    }
}
