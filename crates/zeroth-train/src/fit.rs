//! Fits a job into memory budgets: searches the settings that the config leaves open, or reports the shortfall and the
//! single changes that would fit.
//!
//! A choice never changes the result of training: the recompute policy, the prefetch bucket, and the split of a batch
//! into micro-batches. Every candidate is compiled and its memory planned; nothing is estimated.

use zeroth_base::{DType, format_bytes};
use zeroth_kernel::Tier;
use zeroth_machine::Rates;
use zeroth_program::Compiled;
use zeroth_program::Target;
use zeroth_program::{Offload, Recompute, StateStream, UpdatedBy};

use crate::{Job, JobError, Overhead, Processes};

/// 1 / this of the free device memory stays free: autotuning of matmuls allocates its own workspace.
const FREE_FRACTION: u64 = 8;
/// 1 / this of a GPU's budget stays free when some blocks are not recomputed.
const SPARE_FRACTION: u64 = 32;

const EVERY_BLOCK: Recompute = Recompute::Block { blocks: None, checkpoints: None, offloaded: false };

/// Bytes of memory traffic per recomputed byte: its inputs are read, it is written, and it is read again.
const RECOMPUTE_TRAFFIC: u64 = 3;

/// The memory budget of one rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Budget {
    /// Device memory.
    pub device: Option<u64>,
    /// Host memory.
    pub host: Option<u64>,
    /// Both together, for devices that compute in host memory.
    pub together: Option<u64>,
    /// How ranks are started: a host budget includes the overhead of their processes.
    pub processes: Processes,
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
    /// `zeroth.update`, with the measured rates of a rank's share of the machine.
    pub update: Option<Rates>,
}

/// A chosen setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub value: serde_json::Value,
}

/// A budget that no choice of settings fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// The kind of memory, for messages.
    pub of: &'static str,
    /// The least that a rank needs over all choices.
    pub needed: u64,
    /// The budget.
    pub given: u64,
    /// The part of `needed` that is process overhead beside the plan.
    pub overhead: u64,
    /// Single changes that would fit, each with the device and host bytes it needs per rank, overhead included.
    pub remedies: Vec<(String, [u64; 2])>,
}

impl std::fmt::Display for Misfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let beside = match self.overhead {
            0 => String::new(),
            overhead => format!(", {} of it beside the plan for the process itself,", format_bytes(overhead)),
        };
        write!(
            f,
            "a rank needs at least {} of {}{} and {} are given: {} are missing ({} and {} bytes)",
            format_bytes(self.needed),
            self.of,
            beside,
            format_bytes(self.given),
            format_bytes(self.needed - self.given),
            self.needed,
            self.given
        )?;
        if self.remedies.is_empty() {
            return write!(f, "; no single change fits: more ranks, or a smaller model");
        }
        write!(f, ". One of these would do:")?;
        for (change, [device, host]) in &self.remedies {
            write!(
                f,
                "\n  {change}: {} on the device, {} on the host",
                format_bytes(*device),
                format_bytes(*host)
            )?;
        }
        Ok(())
    }
}

/// A candidate change of a job.
type Change = Box<dyn Fn(&mut Job)>;

/// A budget that a program exceeds.
#[derive(Clone, Copy)]
struct Shortfall {
    of: &'static str,
    needed: u64,
    given: u64,
    overhead: u64,
}

impl Budget {
    /// The first budget that the program exceeds.
    fn shortfall(&self, job: &Job, compiled: &Compiled) -> Option<Shortfall> {
        let device = compiled.memory.arena(Tier::Device);
        let [host, overhead] = self.on_host(job, compiled);
        let of = |of, needed: u64, overhead: u64, given: Option<u64>| {
            given.filter(|given| needed > *given).map(|given| Shortfall { of, needed, given, overhead })
        };
        of("device memory", device, 0, self.device)
            .or_else(|| of("host memory", host, overhead, self.host))
            .or_else(|| of("memory", device + host, overhead, self.together))
    }

    /// Host bytes of a rank, and the part of them that is process overhead.
    fn on_host(&self, job: &Job, compiled: &Compiled) -> [u64; 2] {
        let overhead = Overhead::of(job, compiled, self.processes).total;
        [compiled.memory.arena(Tier::Host) + overhead, overhead]
    }

    /// Device and host bytes of a rank.
    fn needed(&self, job: &Job, compiled: &Compiled) -> [u64; 2] {
        [compiled.memory.arena(Tier::Device), self.on_host(job, compiled)[0]]
    }
}

impl Job {
    /// Compiles a program that fits the budget. The chosen settings become the job's.
    pub fn fit(
        &mut self,
        target: Target,
        budget: Budget,
        freedom: Freedom,
    ) -> Result<Result<(Compiled, Vec<Choice>), Misfit>, JobError> {
        let asked = (self.settings, self.shape, self.row_sizes.clone());
        let mut least: Option<Shortfall> = None;
        for halvings in 0..=self.max_halvings(freedom) {
            for (recompute, prefetch) in self.policies(freedom) {
                self.settings = asked.0;
                self.shape = asked.1;
                self.row_sizes.clone_from(&asked.2);
                self.halve_micro_batch(halvings);
                (self.settings.recompute, self.settings.prefetch) = (recompute, prefetch);
                for stream in self.streams(target) {
                    self.settings.offload.stream = stream;
                    let compiled = self.compile(target)?;
                    match budget.shortfall(self, &compiled) {
                        None => {
                            let compiled = self.fewest_blocks(compiled, target, budget, asked.0.recompute)?;
                            let compiled = self.widen(compiled, target, budget)?;
                            let compiled = self.recompute_to_widen(compiled, target, budget, freedom)?;
                            let compiled = self.faster_update(compiled, target, budget, freedom.update)?;
                            return Ok(Ok((compiled, self.choices(&asked.0, halvings))));
                        }
                        Some(shortfall) if least.is_none_or(|known| shortfall.needed < known.needed) => {
                            least = Some(shortfall);
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        (self.settings, self.shape, self.row_sizes) = asked;
        let Shortfall { of, needed, given, overhead } =
            least.unwrap_or(Shortfall { of: "memory", needed: 0, given: 0, overhead: 0 });
        Ok(Err(Misfit { of, needed, given, overhead, remedies: self.remedies(target, budget)? }))
    }

    /// Reduces the number of recomputed blocks to the fewest that fit, by bisection.
    fn fewest_blocks(
        &mut self,
        mut compiled: Compiled,
        target: Target,
        budget: Budget,
        asked: Recompute,
    ) -> Result<Compiled, JobError> {
        if self.settings.recompute == asked || self.settings.recompute != EVERY_BLOCK {
            return Ok(compiled);
        }
        let spare = if target == Target::Cuda { SPARE_FRACTION } else { u64::MAX };
        let budget = Budget { device: budget.device.map(|given| given - given / spare), ..budget };
        let (mut too_few, mut enough) = (0, compiled.graph.blocks().count() as u64);
        while enough - too_few > 1 {
            let blocks = too_few.midpoint(enough);
            self.settings.recompute =
                Recompute::Block { blocks: Some(blocks), checkpoints: None, offloaded: false };
            let candidate = self.compile(target)?;
            if budget.shortfall(self, &candidate).is_none() {
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

    /// The candidate streams of offloaded optimizer state, the one with the least bus traffic first: gradients stay on the
    /// device.
    fn streams(&self, target: Target) -> Vec<Option<StateStream>> {
        let asked = self.settings.for_target(target).offload.stream;
        let Some(stream) = asked else { return vec![None] };
        [Tier::Device, Tier::Host].map(|gradients| Some(StateStream { gradients, ..stream })).to_vec()
    }

    /// Widens the update window to the free device memory, minus a reserve for libraries.
    fn widen(&mut self, compiled: Compiled, target: Target, budget: Budget) -> Result<Compiled, JobError> {
        let offload = self.settings.offload;
        let (Some(stream), Some(given), None) = (offload.stream, budget.device, offload.update_window) else {
            return Ok(compiled);
        };
        let left = given.saturating_sub(compiled.memory.arena(Tier::Device));
        // All states, and the padding between them.
        let all = compiled.memory.states(Tier::Host);
        let window = (left - left / FREE_FRACTION).min(all + all / 8 + (64 << 20));
        self.settings.offload.stream = Some(StateStream { window, ..stream });
        self.settings.offload.update_window = Some(window);
        self.compile(target)
    }

    /// Recomputes cheap activations to widen the update window further, if the saved waiting outweighs the recomputation.
    fn recompute_to_widen(
        &mut self,
        compiled: Compiled,
        target: Target,
        budget: Budget,
        freedom: Freedom,
    ) -> Result<Compiled, JobError> {
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
        let candidate = self.compile(target)?;
        let candidate = self.widen(candidate, target, budget)?;
        let recomputed = activations(&compiled).saturating_sub(activations(&candidate));
        let cost = rates.memory_seconds(RECOMPUTE_TRAFFIC * recomputed * asked.accumulation);
        if budget.shortfall(self, &candidate).is_none()
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
        let parameters: u64 = compiled.graph.params.iter().map(zeroth_graph::Param::elements).sum();
        let rows = self.row_sizes.last().copied().unwrap_or(0);
        (rates.transfer_seconds(outside) - rates.matmul_seconds(2 * parameters * rows)).max(0.0)
    }

    /// Moves the update of streamed state to the CPU where that is faster.
    fn faster_update(
        &mut self,
        compiled: Compiled,
        target: Target,
        budget: Budget,
        rates: Option<Rates>,
    ) -> Result<Compiled, JobError> {
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
        let beside = self.compile(target)?;
        let is_slower = through <= rates.host_update_seconds(on_host.optimizer) + sums(&beside);
        if is_slower || budget.shortfall(self, &beside).is_some() {
            self.settings.offload = Offload { updated_by: Some(UpdatedBy::Device), ..asked.offload };
            return Ok(compiled);
        }
        Ok(beside)
    }

    /// How often the micro-batch may be halved.
    fn max_halvings(&self, freedom: Freedom) -> u32 {
        if freedom.micro_batch { self.shape.micro_batch.trailing_zeros() } else { 0 }
    }

    /// Halves the micro-batch and doubles accumulation; the samples of a step stay the same.
    fn halve_micro_batch(&mut self, times: u32) {
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
            policies.extend([Recompute::NormSwiGlu, EVERY_BLOCK].map(|recompute| (recompute, prefetch)));
        }
        if freedom.prefetch && prefetch > 0 {
            policies.extend(policies.last().map(|(recompute, _)| (*recompute, 0)));
        }
        policies
    }

    fn choices(&self, asked: &zeroth_program::Settings, halvings: u32) -> Vec<Choice> {
        let mut choices = Vec::new();
        if self.settings.recompute != asked.recompute {
            let value = match self.settings.recompute {
                Recompute::Nothing => "none",
                Recompute::NormSwiGlu => "norm_swiglu",
                Recompute::Attention => "attention",
                Recompute::Block { .. } => "block",
            };
            choices.push(Choice { key: "zeroth.recompute", value: value.into() });
            if let Recompute::Block { blocks: Some(blocks), .. } = self.settings.recompute {
                choices.push(Choice { key: "zeroth.recompute_blocks", value: blocks.into() });
            }
        }
        if self.settings.prefetch != asked.prefetch {
            choices.push(Choice {
                key: "zero_optimization.stage3_prefetch_bucket_size",
                value: self.settings.prefetch.into(),
            });
        }
        if let (Some(window), None) = (self.settings.offload.update_window, asked.offload.update_window) {
            choices.push(Choice { key: "zeroth.update_window", value: window.into() });
        }
        if let (Some(by), None) = (self.settings.offload.updated_by, asked.offload.updated_by) {
            let value = match by {
                UpdatedBy::Device => "device",
                UpdatedBy::Host => "host",
            };
            choices.push(Choice { key: "zeroth.update", value: value.into() });
        }
        if halvings > 0 {
            let (micro_batch, accumulation) = (self.shape.micro_batch, self.shape.accumulation);
            choices.push(Choice { key: "train_micro_batch_size_per_gpu", value: micro_batch.into() });
            choices.push(Choice { key: "gradient_accumulation_steps", value: accumulation.into() });
        }
        choices
    }

    /// Single changes of the user's settings that fit.
    fn remedies(&mut self, target: Target, budget: Budget) -> Result<Vec<(String, [u64; 2])>, JobError> {
        let asked = (self.settings, self.shape, self.row_sizes.clone());
        let block = EVERY_BLOCK;
        let optimizer = Offload { optimizer: Some(1.0), ..asked.0.offload };
        let both = Offload { parameters: Some(u64::MAX), ..optimizer };
        let halvings = self.shape.micro_batch.trailing_zeros();
        let mut changes: Vec<(String, Change)> = Vec::new();
        if asked.0.recompute == Recompute::Nothing {
            let change = move |job: &mut Self| job.settings.recompute = block;
            changes.push(("zeroth.recompute \"block\"".to_owned(), Box::new(change)));
        }
        if asked.0.offload.update_window.is_some_and(|window| window > 0) {
            let change = |job: &mut Self| job.settings.offload.update_window = Some(0);
            changes.push(("zeroth.update_window 0, or none at all".to_owned(), Box::new(change)));
        }
        if halvings > 0 {
            let name = format!(
                "train_micro_batch_size_per_gpu {} with gradient_accumulation_steps {}",
                asked.1.micro_batch >> halvings,
                asked.1.accumulation << halvings
            );
            changes.push((name, Box::new(move |job: &mut Self| job.halve_micro_batch(halvings))));
        }
        for stage in asked.0.stage + 1..=3 {
            let change = move |job: &mut Self| job.settings.stage = stage;
            changes.push((format!("zero_optimization.stage {stage}"), Box::new(change)));
        }
        if asked.0.offload.optimizer.is_none() {
            let (stage, name) = (asked.0.stage.max(2), "offload_optimizer to cpu");
            let change =
                move |job: &mut Self| (job.settings.stage, job.settings.offload) = (stage, optimizer);
            changes.push((format!("{name} (stage {stage})"), Box::new(change)));
        }
        if asked.0.offload.parameters.is_none() {
            let change = move |job: &mut Self| (job.settings.stage, job.settings.offload) = (3, both);
            changes
                .push(("offload_optimizer and offload_param to cpu (stage 3)".to_owned(), Box::new(change)));
            let change = move |job: &mut Self| {
                (job.settings.stage, job.settings.offload, job.settings.recompute) = (3, both, block);
            };
            let name = "offload_optimizer and offload_param to cpu (stage 3) with zeroth.recompute \"block\"";
            changes.push((name.to_owned(), Box::new(change)));
        }
        let mut fitting = Vec::new();
        for (name, change) in changes {
            change(self);
            let compiled = self.compile(target)?;
            if budget.shortfall(self, &compiled).is_none() {
                fitting.push((name, budget.needed(self, &compiled)));
            }
            (self.settings, self.shape) = (asked.0, asked.1);
            self.row_sizes.clone_from(&asked.2);
        }
        if fitting.is_empty() {
            fitting.extend(self.more_ranks(target, budget)?);
            (self.settings, self.shape) = (asked.0, asked.1);
        }
        Ok(fitting)
    }

    /// The fewest ranks, doubling the present number, that fit with everything offloaded and blocks recomputed.
    fn more_ranks(&mut self, target: Target, budget: Budget) -> Result<Option<(String, [u64; 2])>, JobError> {
        self.settings.stage = 3;
        self.settings.offload.optimizer = Some(1.0);
        self.settings.offload.parameters = Some(u64::MAX);
        self.settings.recompute = EVERY_BLOCK;
        let there = self.shape.ranks;
        for ranks in [2, 4, 8, 16, 32].map(|times| times * there) {
            self.shape.ranks = ranks;
            let compiled = self.compile(target)?;
            if budget.shortfall(self, &compiled).is_none() {
                let name = format!(
                    "{ranks} ranks with as much memory each, offload_optimizer and offload_param to cpu (stage 3) and \
                     zeroth.recompute \"block\""
                );
                return Ok(Some((name, budget.needed(self, &compiled))));
            }
        }
        Ok(None)
    }
}
