//! Fits a job into memory budgets: searches the settings that the config leaves open, or reports the shortfall and the
//! single changes that would fit.
//!
//! A choice never changes the result of training: the recompute policy, the prefetch bucket, and the split of a batch
//! into micro-batches. Every candidate is compiled and its memory planned; nothing is estimated. The data enters as
//! sizes only, so that `plan` sizes a job that has none.

use zeroth_base::DType;
use zeroth_config::resolve::Choice;
use zeroth_graph::Op;
use zeroth_kernel::{Target, Tier};
use zeroth_machine::Rates;
use zeroth_model::{BatchTokens, ForwardError, ModelConfig, Objective, ParameterTable};
use zeroth_program::{CompileError, Compiled, Settings, StreamSizes};
use zeroth_program::{FrozenPlacement, Offload, Recompute, StateStream, UpdatedBy};

use crate::budget::{Budget, Shortfall};
use crate::misfit::Misfit;
use crate::overhead::DataSize;
use crate::row_sizes::RowSizes;

/// 1 / this of the free device memory stays free: autotuning of matmuls allocates its own workspace.
const FREE_FRACTION: u64 = 8;
/// 1 / this of a GPU's budget stays free when some blocks are not recomputed.
const SPARE_FRACTION: u64 = 32;

/// Bytes of memory traffic per recomputed byte: its inputs are read, it is written, and it is read again.
const RECOMPUTE_TRAFFIC: u64 = 3;

/// The decomposition of a train batch: micro-batch size, gradient accumulation and data-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per rank and optimizer step (gradient accumulation).
    pub accumulation: u64,
    /// Data-parallel ranks.
    pub ranks: u64,
}

impl BatchShape {
    /// Samples per optimizer step (DeepSpeed's `train_batch_size`).
    pub fn train_batch(&self) -> u64 {
        self.micro_batch * self.accumulation * self.ranks
    }

    /// The position of a micro-batch's first sample. Steps count from 0.
    pub fn position(&self, step: u64, micro: u64, rank: u64) -> u64 {
        ((step * self.accumulation + micro) * self.ranks + rank) * self.micro_batch
    }
}

/// Everything that a job's memory depends on. A search leaves the settings it chose here.
#[derive(Clone)]
pub struct Sizing<'a> {
    /// The model's config.
    pub model: &'a ModelConfig,
    /// Its parameter table.
    pub table: &'a ParameterTable,
    /// What the model is trained for.
    pub objective: Objective<'a>,
    /// The kind of device.
    pub target: &'static dyn Target,
    /// The batch decomposition.
    pub shape: BatchShape,
    /// Settings of the compiler passes.
    pub settings: Settings,
    /// Row counts that micro-batches are padded to.
    pub row_sizes: StreamSizes,
    /// Tokens of the largest micro-batch of a decomposition; of an encoder-decoder, of sources and of targets.
    pub largest_micro_batch: &'a dyn Fn(BatchShape) -> [u64; 2],
    /// The size of the data in a rank's memory.
    pub data: DataSize,
    /// How much of a program is compiled.
    pub detail: Detail,
}

/// A job that cannot be compiled.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SizingError {
    #[error(transparent)]
    Forward(#[from] ForwardError),
    #[error(transparent)]
    Compile(#[from] CompileError),
}

/// The settings that may be chosen because the user did not set them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freedom {
    /// `zeroth.recompute`.
    pub recompute: bool,
    /// `stage3_prefetch_bucket_size`.
    pub prefetch: bool,
    /// The split of a rank's samples into micro-batches.
    pub micro_batch: bool,
    /// `zeroth.frozen`.
    pub frozen: bool,
    /// `zeroth.update`, with the measured rates of a rank's share of the machine.
    pub update: Option<Rates>,
}

/// What a search found.
pub(crate) struct Found {
    /// The program.
    pub(crate) compiled: Compiled,
    /// The settings chosen for it.
    pub(crate) choices: Vec<Choice>,
    /// What it lacks of the budget; `None` where it fits.
    pub(crate) shortfall: Option<Shortfall>,
}

/// Steps that earlier searches of a job compiled for other row counts, with their settings.
#[derive(Default)]
pub(crate) struct EarlierSteps(Vec<(Settings, Compiled)>);

impl EarlierSteps {
    /// Keeps a step for later searches.
    pub(crate) fn keep(&mut self, settings: Settings, compiled: Compiled) {
        self.0.push((settings, compiled));
    }

    fn take(&mut self, settings: &Settings) -> Option<Compiled> {
        let at = self.0.iter().position(|(of, _)| of == settings)?;
        Some(self.0.swap_remove(at).1)
    }
}

/// Settings that a search tries.
struct Candidate {
    halvings: u32,
    recompute: Recompute,
    prefetch: u64,
    frozen: FrozenPlacement,
    stream: Option<StateStream>,
}

/// How much of a program is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// All of it, to run it.
    Run,
    /// The bytes, to the last.
    Bytes,
    /// The bytes by its smallest and its largest row count, to decide whether anything fits.
    Verdict,
}

/// A micro-batch of the largest of these sizes.
pub fn batch_of(sizes: &StreamSizes) -> BatchTokens {
    let rows = sizes.iter().last().unwrap_or_default();
    let [tokens, target_tokens] = [0, 1].map(|stream| rows.get(stream).copied().unwrap_or(0));
    BatchTokens { tokens, target_tokens }
}

impl<'a> Sizing<'a> {
    /// The size of a job, with rows for its largest micro-batch.
    pub fn new(
        model: &'a ModelConfig,
        table: &'a ParameterTable,
        target: &'static dyn Target,
        shape: BatchShape,
        settings: Settings,
        largest_micro_batch: &'a dyn Fn(BatchShape) -> [u64; 2],
    ) -> Self {
        let (row_sizes, data) = (Vec::new().into(), DataSize::default());
        let (objective, detail) = (Objective::CrossEntropy, Detail::Run);
        let mut sizing = Self {
            model,
            table,
            objective,
            target,
            shape,
            settings,
            row_sizes,
            largest_micro_batch,
            data,
            detail,
        };
        sizing.size_rows();
        sizing
    }

    /// Compiles one optimizer step, with the placement of every buffer.
    pub fn compile(&self) -> Result<Compiled, SizingError> {
        self.compile_from(None)
    }

    /// Compiles a step; from an earlier one with these settings, faster.
    fn compile_from(&self, earlier: Option<Compiled>) -> Result<Compiled, SizingError> {
        let (world, mut sizes) = (self.settings.world(self.shape.ranks), self.row_sizes.clone());
        if self.detail == Detail::Verdict && sizes.len() > 2 {
            let ends = sizes.iter().take(1).chain(sizes.iter().skip(sizes.len() - 1));
            sizes = StreamSizes::of_streams(ends.map(<[u64]>::to_vec).collect());
        }
        if let Some(earlier) = earlier.filter(|_| self.detail != Detail::Run) {
            return Ok(earlier.resized(world, &self.settings, sizes)?);
        }
        let graph = self.objective.forward(self.model, self.table, batch_of(&self.row_sizes))?;
        let compile = if self.detail == Detail::Run { Compiled::new } else { Compiled::for_bytes };
        Ok(compile(graph, world, &self.settings, self.target, sizes)?)
    }

    /// Chooses the row counts for the largest micro-batch.
    fn size_rows(&mut self) {
        self.row_sizes = RowSizes::of_streams((self.largest_micro_batch)(self.shape));
    }

    /// Compiles a program that fits the budget. The chosen settings become the job's.
    pub fn fit(
        &mut self,
        budget: Budget,
        freedom: Freedom,
    ) -> Result<Result<(Compiled, Vec<Choice>), Misfit>, SizingError> {
        let asked = self.clone();
        let found = self.search(budget, freedom)?;
        let Some(Shortfall { of, needed, given, overhead }) = found.shortfall else {
            return Ok(Ok((found.compiled, found.choices)));
        };
        *self = asked;
        Ok(Err(Misfit { of, needed, given, overhead, remedies: self.remedies(budget)? }))
    }

    /// The program that a run takes: the first candidate within the budget, refined. Where none is within it, the one that
    /// needs least. Runs and plans both search here.
    pub(crate) fn search(&mut self, budget: Budget, freedom: Freedom) -> Result<Found, SizingError> {
        let asked = self.clone();
        let (mut compiled, shortfall) =
            self.first_within(budget, asked.candidates(freedom)?, &mut EarlierSteps::default())?;
        if shortfall.is_none() {
            compiled = self.fewest_blocks(compiled, budget, asked.settings.recompute)?;
            compiled = self.widen(compiled, budget)?;
            compiled = self.recompute_to_widen(compiled, budget, freedom)?;
            compiled = self.faster_update(compiled, budget, freedom.update)?;
        }
        Ok(Found { compiled, choices: self.choices(&asked), shortfall })
    }

    /// Whether anything is within the budget, by the candidates with the least on the device alone: far fewer programs than
    /// [`Self::search`] compiles.
    pub(crate) fn search_least(
        &mut self,
        budget: Budget,
        freedom: Freedom,
        earlier: &mut EarlierSteps,
    ) -> Result<Found, SizingError> {
        let asked = self.clone();
        let mut candidates = asked.candidates(freedom)?;
        candidates.reverse();
        // What a device gives up goes to the host, which may have no room for it: then other placements may fit.
        let placements =
            if budget.limits[Tier::Host].is_some() { asked.placements(freedom).len() } else { 1 };
        candidates.truncate(placements);
        let (compiled, shortfall) = self.first_within(budget, candidates, earlier)?;
        Ok(Found { compiled, choices: self.choices(&asked), shortfall })
    }

    /// The settings that a fit tries, in order: whole micro-batches before halves, little recomputation before much, and
    /// states on the device before states on the host.
    fn candidates(&self, freedom: Freedom) -> Result<Vec<Candidate>, SizingError> {
        let placements = self.placements(freedom);
        let mut candidates = Vec::new();
        for halvings in 0..=self.max_halvings(freedom)? {
            for (recompute, prefetch) in self.policies(freedom) {
                candidates.extend(placements.iter().map(|(frozen, stream)| Candidate {
                    halvings,
                    recompute,
                    prefetch,
                    frozen: *frozen,
                    stream: *stream,
                }));
            }
        }
        Ok(candidates)
    }

    /// The first candidate within the budget, else the one that needs least, with what it lacks.
    fn first_within(
        &mut self,
        budget: Budget,
        candidates: Vec<Candidate>,
        earlier: &mut EarlierSteps,
    ) -> Result<(Compiled, Option<Shortfall>), SizingError> {
        let asked = self.clone();
        let mut least: Option<(Self, Compiled, Shortfall)> = None;
        // Where what lies on the device for the whole step is more than its budget, recomputation changes nothing, and the
        // last candidate of a plan says well enough how much is missing.
        let (final_index, is_plan) = (candidates.len() - 1, self.detail != Detail::Run);
        let mut hopeless = Vec::new();
        for (at, candidate) in candidates.into_iter().enumerate() {
            let placement = (candidate.frozen, candidate.stream);
            if is_plan && at < final_index && hopeless.contains(&placement) {
                continue;
            }
            *self = asked.clone();
            self.halve_micro_batch(candidate.halvings);
            self.settings.recompute = candidate.recompute;
            self.settings.prefetch = candidate.prefetch;
            self.settings.frozen = candidate.frozen;
            self.settings.offload.stream = candidate.stream;
            let compiled = self.compile_from(earlier.take(&self.settings))?;
            let Some(shortfall) = budget.shortfall(self.data, &compiled) else {
                return Ok((compiled, None));
            };
            let (fixed, _) = compiled.memory.shared[Tier::Device];
            if budget.limits[Tier::Device].is_some_and(|given| fixed > given) {
                hopeless.push(placement);
            }
            if least.as_ref().is_none_or(|(.., known)| shortfall.needed < known.needed) {
                least = Some((self.clone(), compiled, shortfall));
            }
        }
        let (sizing, compiled, shortfall) =
            least.expect("there is at least the candidate that was asked for");
        *self = sizing;
        Ok((compiled, Some(shortfall)))
    }

    /// Reduces the number of recomputed blocks to the fewest that fit, by bisection.
    fn fewest_blocks(
        &mut self,
        mut compiled: Compiled,
        budget: Budget,
        asked: Recompute,
    ) -> Result<Compiled, SizingError> {
        if self.settings.recompute == asked || self.settings.recompute != Recompute::EVERY_BLOCK {
            return Ok(compiled);
        }
        let spare = if self.target.is_host() { u64::MAX } else { SPARE_FRACTION };
        let device = budget.limits[Tier::Device].map(|given| given - given / spare);
        let budget = Budget { limits: budget.limits.with(Tier::Device, device), ..budget };
        let (mut too_few, mut enough) = (0, compiled.graph.blocks().count() as u64);
        while enough - too_few > 1 {
            let blocks = too_few.midpoint(enough);
            self.settings.recompute =
                Recompute::Block { blocks: Some(blocks), checkpoints: None, offloaded: false };
            let candidate = self.compile()?;
            if budget.shortfall(self.data, &candidate).is_none() {
                (enough, compiled) = (blocks, candidate);
            } else {
                too_few = blocks;
            }
        }
        let fewer = enough < compiled.graph.blocks().count() as u64;
        let blocks = fewer.then_some(enough);
        self.settings.recompute = Recompute::Block { blocks, checkpoints: None, offloaded: false };
        Ok(compiled)
    }

    /// Candidate placements of frozen parameters and of offloaded optimizer state, the one with the least traffic first.
    fn placements(&self, freedom: Freedom) -> Vec<(FrozenPlacement, Option<StateStream>)> {
        let is_open = freedom.frozen && self.settings.offload.parameters.is_none();
        let frozen = match self.settings.frozen {
            FrozenPlacement::ByStage if is_open && self.has_frozen() && self.shape.ranks > 1 => {
                vec![FrozenPlacement::Whole, FrozenPlacement::Sharded]
            }
            asked => vec![asked],
        };
        let streams = self.streams();
        frozen.into_iter().flat_map(|frozen| streams.iter().map(move |stream| (frozen, *stream))).collect()
    }

    fn has_frozen(&self) -> bool {
        self.table.iter().any(|parameter| !parameter.trained)
    }

    /// The candidate streams of offloaded optimizer state, the one with the least bus traffic first: gradients stay on the
    /// device.
    fn streams(&self) -> Vec<Option<StateStream>> {
        let asked = self.settings.for_target(self.target).offload.stream;
        let Some(stream) = asked else { return vec![None] };
        [Tier::Device, Tier::Host].map(|gradients| Some(StateStream { gradients, ..stream })).to_vec()
    }

    /// Widens the update window to the free device memory, minus a reserve for libraries.
    fn widen(&mut self, compiled: Compiled, budget: Budget) -> Result<Compiled, SizingError> {
        let offload = self.settings.offload;
        let limit = budget.limits[Tier::Device];
        let (Some(stream), Some(given), None) = (offload.stream, limit, offload.update_window) else {
            return Ok(compiled);
        };
        let left = given.saturating_sub(compiled.memory.arena(Tier::Device));
        // All states, and the padding between them.
        let all = compiled.memory.states(Tier::Host);
        let window = (left - left / FREE_FRACTION).min(all + all / 8 + (64 << 20));
        self.settings.offload.stream = Some(StateStream { window, ..stream });
        self.settings.offload.update_window = Some(window);
        self.compile()
    }

    /// Recomputes cheap activations to widen the update window further, if the saved waiting outweighs the recomputation.
    fn recompute_to_widen(
        &mut self,
        compiled: Compiled,
        budget: Budget,
        freedom: Freedom,
    ) -> Result<Compiled, SizingError> {
        let asked = self.settings;
        let (Some(rates), Some(stream), Recompute::Nothing, true) =
            (freedom.update, asked.offload.stream, asked.recompute, freedom.recompute)
        else {
            return Ok(compiled);
        };
        let activations = |compiled: &Compiled| compiled.memory.by_category(Tier::Device).activations;
        let before = self.stall_seconds(&compiled, rates);
        self.settings.recompute = Recompute::NormSwiGlu;
        let closed = Some(StateStream { window: 0, ..stream });
        self.settings.offload = Offload { update_window: None, stream: closed, ..asked.offload };
        let candidate = self.compile()?;
        let candidate = self.widen(candidate, budget)?;
        let recomputed = activations(&compiled).saturating_sub(activations(&candidate));
        let cost = rates.memory_seconds(RECOMPUTE_TRAFFIC * recomputed * asked.accumulation);
        if budget.shortfall(self.data, &candidate).is_none()
            && self.stall_seconds(&candidate, rates) + cost < before
        {
            return Ok(candidate);
        }
        self.settings = asked;
        Ok(compiled)
    }

    /// Seconds that forward waits for state outside the update window, beyond what overlaps with forward itself.
    fn stall_seconds(&self, compiled: &Compiled, rates: Rates) -> f64 {
        let window = self.settings.offload.stream.map_or(0, |stream| stream.window);
        let outside = compiled.memory.states(Tier::Host).saturating_sub(window);
        let parameters = self.table.active_per_token();
        // Each stream of an encoder-decoder passes about half of its parameters.
        let rows =
            self.row_sizes.iter().last().map_or(0, |rows| rows.iter().sum::<u64>() / rows.len() as u64);
        (rates.transfer_seconds(outside) - rates.matmul_seconds(2 * parameters * rows)).max(0.0)
    }

    /// Moves the update of streamed state to the CPU where that is faster.
    fn faster_update(
        &mut self,
        compiled: Compiled,
        budget: Budget,
        rates: Option<Rates>,
    ) -> Result<Compiled, SizingError> {
        let asked = self.settings;
        let (Some(stream), Some(rates)) = (asked.offload.stream, rates) else { return Ok(compiled) };
        let on_host = compiled.memory.by_category(Tier::Host);
        let travelling = on_host.optimizer + on_host.gradients;
        // With accumulation, every micro-batch but the first reads and writes host gradients over the bus.
        let sums = |compiled: &Compiled| {
            let gradients = compiled.memory.by_category(Tier::Host).gradients;
            rates.transfer_seconds(2 * (asked.accumulation - 1) * gradients)
        };
        // With a window for all of it, state streams under forward and backward; otherwise only under forward, a third of a
        // step.
        let shares = if stream.window >= travelling { 3.0 } else { 1.0 };
        let through = rates.transfer_seconds(travelling) / shares + sums(&compiled);
        self.settings.offload.updated_by = Some(UpdatedBy::Device);
        // In fp32 there are no master weights, only the device's parameters.
        if through <= rates.host_update_seconds(on_host.optimizer) || asked.types.compute == DType::F32 {
            return Ok(compiled);
        }
        self.settings.offload =
            Offload { updated_by: Some(UpdatedBy::Host), stream: None, update_window: None, ..asked.offload };
        let candidate = self.compile()?;
        let is_slower = through <= rates.host_update_seconds(on_host.optimizer) + sums(&candidate);
        if is_slower || budget.shortfall(self.data, &candidate).is_some() {
            self.settings.offload = Offload { updated_by: Some(UpdatedBy::Device), ..asked.offload };
            return Ok(compiled);
        }
        Ok(candidate)
    }

    /// How often the micro-batch may be halved.
    fn max_halvings(&self, freedom: Freedom) -> Result<u32, SizingError> {
        let most = self.shape.micro_batch.trailing_zeros();
        let is_free = freedom.micro_batch && most > 0 && !self.balances_micro_batches()?;
        Ok(if is_free { most } else { 0 })
    }

    /// Whether the split of a batch into micro-batches changes the training: the auxiliary loss of a mixture of experts
    /// balances the load of every micro-batch.
    pub fn balances_micro_batches(&self) -> Result<bool, SizingError> {
        let graph = self.objective.forward(self.model, self.table, BatchTokens::of_tokens(1))?;
        Ok(graph.nodes.iter().any(|node| matches!(node.op, Op::BalanceLoss { .. })))
    }

    /// Halves the micro-batch and doubles accumulation; the samples of a step stay the same.
    pub(crate) fn halve_micro_batch(&mut self, times: u32) {
        if times == 0 {
            return;
        }
        self.shape.micro_batch >>= times;
        self.shape.accumulation <<= times;
        self.settings.accumulation = self.shape.accumulation;
        self.size_rows();
    }

    /// Candidate recompute policies and prefetch buckets, cheapest first.
    fn policies(&self, freedom: Freedom) -> Vec<(Recompute, u64)> {
        let (asked, prefetch) = (self.settings.recompute, self.settings.prefetch);
        let mut policies = vec![(asked, prefetch)];
        if freedom.recompute {
            policies.extend(
                [Recompute::NormSwiGlu, Recompute::EVERY_BLOCK].map(|recompute| (recompute, prefetch)),
            );
        }
        if freedom.prefetch && prefetch > 0 {
            policies.extend(policies.last().map(|(recompute, _)| (*recompute, 0)));
        }
        policies
    }
}
