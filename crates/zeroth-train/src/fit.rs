//! Memory budgets: a program that fits them, found among what the config leaves open, or what is missing and which one
//! change would do.
//!
//! Choices never change what is trained: a policy of recomputation, how far gathers run ahead, and how a given batch is
//! cut into micro-batches. Every candidate is compiled and its bytes are counted; nothing is estimated.

use zeroth_base::{DType, format_bytes};
use zeroth_kernel::Tier;
use zeroth_machine::Rates;
use zeroth_program::Compiled;
use zeroth_program::Target;
use zeroth_program::{Offload, Recompute, StateStream, UpdatedBy};

use crate::{Job, JobError, Overhead, Processes};

/// One part in so many of what is free stays so: matrix products are tried with memory of their own.
const LEFT_FREE: u64 = 8;
/// And one part in so many of a card's budget, where blocks are kept rather than computed again.
const SPARE: u64 = 32;

const EVERY_BLOCK: Recompute = Recompute::Block { blocks: None, checkpoints: None, offloaded: false };

/// Bytes that kernels read and write for a byte that is computed again: what it is made of, itself, and itself once more.
const AGAIN: u64 = 3;

/// Bytes that one rank may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Budget {
    /// Of the device's memory.
    pub device: Option<u64>,
    /// Of the host's.
    pub host: Option<u64>,
    /// Of both together, where the device's memory is the host's.
    pub together: Option<u64>,
    /// How ranks are started: a budget of host memory holds what their processes take beside the plan, too.
    pub processes: Processes,
}

/// What may be chosen, because nobody typed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freedom {
    /// `zeroth.recompute`.
    pub recompute: bool,
    /// `stage3_prefetch_bucket_size`.
    pub prefetch: bool,
    /// How a step's samples of a rank are cut into micro-batches.
    pub micro_batch: bool,
    /// `zeroth.update`, by what a rank's share of the machine can do.
    pub update: Option<Rates>,
}

/// What was chosen, key by key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub value: serde_json::Value,
}

/// A budget that is not enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// What it is a budget of, in words.
    pub of: &'static str,
    /// The least that a rank needs, with all that may be chosen.
    pub needed: u64,
    /// What is given.
    pub given: u64,
    /// What is needed beside the plan, of the bytes that are needed.
    pub overhead: u64,
    /// Single changes that would fit, each with what a rank then needs on the device and on the host, its process included.
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

/// A change of a job, to be tried.
type Change = Box<dyn Fn(&mut Job)>;

/// What does not fit.
#[derive(Clone, Copy)]
struct Lack {
    of: &'static str,
    needed: u64,
    given: u64,
    overhead: u64,
}

impl Budget {
    /// What does not fit.
    fn lack(&self, job: &Job, compiled: &Compiled) -> Option<Lack> {
        let device = compiled.memory.arena(Tier::Device);
        let [host, overhead] = self.on_host(job, compiled);
        let of = |of, needed: u64, overhead: u64, given: Option<u64>| {
            given.filter(|given| needed > *given).map(|given| Lack { of, needed, given, overhead })
        };
        of("device memory", device, 0, self.device)
            .or_else(|| of("host memory", host, overhead, self.host))
            .or_else(|| of("memory", device + host, overhead, self.together))
    }

    /// Bytes of host memory that a rank takes, and how many of them are beside the plan.
    fn on_host(&self, job: &Job, compiled: &Compiled) -> [u64; 2] {
        let overhead = Overhead::of(job, compiled, self.processes).total;
        [compiled.memory.arena(Tier::Host) + overhead, overhead]
    }

    /// What a rank needs on the device and on the host.
    fn needed(&self, job: &Job, compiled: &Compiled) -> [u64; 2] {
        [compiled.memory.arena(Tier::Device), self.on_host(job, compiled)[0]]
    }
}

impl Job {
    /// Compiles a program that keeps to the budget, choosing what may be chosen; the choices are the job's from then on.
    pub fn fit(
        &mut self,
        target: Target,
        budget: Budget,
        freedom: Freedom,
    ) -> Result<Result<(Compiled, Vec<Choice>), Misfit>, JobError> {
        let asked = (self.settings, self.shape, self.row_sizes.clone());
        let mut least: Option<Lack> = None;
        for cuts in 0..=self.cuts(freedom) {
            for (recompute, prefetch) in self.policies(freedom) {
                self.settings = asked.0;
                self.shape = asked.1;
                self.row_sizes.clone_from(&asked.2);
                self.cut(cuts);
                (self.settings.recompute, self.settings.prefetch) = (recompute, prefetch);
                for stream in self.streams(target) {
                    self.settings.offload.stream = stream;
                    let compiled = self.compile(target)?;
                    match budget.lack(self, &compiled) {
                        None => {
                            let compiled = self.fewest_blocks(compiled, target, budget, asked.0.recompute)?;
                            let compiled = self.widen(compiled, target, budget)?;
                            let compiled = self.wider(compiled, target, budget, freedom)?;
                            let compiled = self.faster_update(compiled, target, budget, freedom.update)?;
                            return Ok(Ok((compiled, self.choices(&asked.0, cuts))));
                        }
                        Some(lack) if least.is_none_or(|known| lack.needed < known.needed) => {
                            least = Some(lack);
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        (self.settings, self.shape, self.row_sizes) = asked;
        let Lack { of, needed, given, overhead } =
            least.unwrap_or(Lack { of: "memory", needed: 0, given: 0, overhead: 0 });
        Ok(Err(Misfit { of, needed, given, overhead, remedies: self.remedies(target, budget)? }))
    }

    /// Where all blocks are computed again because less was not enough: no more of them than must be.
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
        let spare = if target == Target::Cuda { SPARE } else { u64::MAX };
        let budget = Budget { device: budget.device.map(|given| given - given / spare), ..budget };
        let (mut too_few, mut enough) = (0, compiled.graph.units.len().saturating_sub(2) as u64);
        while enough - too_few > 1 {
            let blocks = too_few.midpoint(enough);
            self.settings.recompute =
                Recompute::Block { blocks: Some(blocks), checkpoints: None, offloaded: false };
            let candidate = self.compile(target)?;
            if budget.lack(self, &candidate).is_none() {
                (enough, compiled) = (blocks, candidate);
            } else {
                too_few = blocks;
            }
        }
        let fewer = enough < compiled.graph.units.len().saturating_sub(2) as u64;
        let blocks = fewer.then_some(enough);
        self.settings.recompute = Recompute::Block { blocks, checkpoints: None, offloaded: false };
        Ok(compiled)
    }

    /// Ways for states in host memory to pass through the device, the one with the least on the bus first: gradients wait
    /// where they are made.
    fn streams(&self, target: Target) -> Vec<Option<StateStream>> {
        let asked = self.settings.for_target(target).offload.stream;
        let Some(stream) = asked else { return vec![None] };
        [Tier::Device, Tier::Host].map(|gradients| Some(StateStream { gradients, ..stream })).to_vec()
    }

    /// Gives states that pass through the device what is free there, but for a part that libraries may want.
    fn widen(&mut self, compiled: Compiled, target: Target, budget: Budget) -> Result<Compiled, JobError> {
        let offload = self.settings.offload;
        let (Some(stream), Some(given), None) = (offload.stream, budget.device, offload.update_window) else {
            return Ok(compiled);
        };
        let left = given.saturating_sub(compiled.memory.arena(Tier::Device));
        // All of them, and what lies between.
        let all = compiled.memory.states(Tier::Host);
        let window = (left - left / LEFT_FREE).min(all + all / 8 + (64 << 20));
        self.settings.offload.stream = Some(StateStream { window, ..stream });
        self.settings.offload.update_window = Some(window);
        self.compile(target)
    }

    /// Where state in host memory has too little room on the device, and forward would wait for it: what is cheap to compute
    /// again gives its room to the window, if that saves more time than it takes.
    fn wider(
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
        let before = self.waiting(&compiled, rates);
        self.settings.recompute = Recompute::NormSwiGlu;
        let closed = Some(StateStream { window: 0, ..stream });
        self.settings.offload = Offload { update_window: None, stream: closed, ..asked.offload };
        let candidate = self.compile(target)?;
        let candidate = self.widen(candidate, target, budget)?;
        let again = activations(&compiled).saturating_sub(activations(&candidate));
        let cost = rates.memory_seconds(AGAIN * again * asked.accumulation);
        if budget.lack(self, &candidate).is_none() && self.waiting(&candidate, rates) + cost < before {
            return Ok(candidate);
        }
        self.settings = asked;
        Ok(compiled)
    }

    /// Seconds that forward waits for state that had no room on the device before it was decided about: what does not pass
    /// beneath forward itself.
    fn waiting(&self, compiled: &Compiled, rates: Rates) -> f64 {
        let window = self.settings.offload.stream.map_or(0, |stream| stream.window);
        let outside = compiled.memory.states(Tier::Host).saturating_sub(window);
        let parameters: u64 = compiled.graph.params.iter().map(zeroth_graph::Param::elements).sum();
        let rows = self.row_sizes.last().copied().unwrap_or(0);
        (rates.transfer_seconds(outside) - rates.matmul_seconds(2 * parameters * rows)).max(0.0)
    }

    /// State that passes through the device is updated by the host's processors instead where they are faster.
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
        // Sums of several micro-batches that grow in host memory are read and written over the bus by each but the first.
        let sums = |compiled: &Compiled| {
            let gradients = compiled.memory.by_category(Tier::Host).gradients;
            rates.transfer_seconds(2 * (asked.accumulation - 1) * gradients)
        };
        // With room for all of it, state passes beneath forward and backward; without, and on processors, only beneath
        // forward, a third of a step.
        let shares = if stream.window >= travelling { 3.0 } else { 1.0 };
        let through = rates.transfer_seconds(travelling) / shares + sums(&compiled);
        self.settings.offload.updated_by = Some(UpdatedBy::Device);
        // In fp32 there are no master weights, only the card's own.
        if through <= rates.host_update_seconds(on_host.optimizer) || asked.types.compute == DType::F32 {
            return Ok(compiled);
        }
        self.settings.offload =
            Offload { updated_by: Some(UpdatedBy::Host), stream: None, update_window: None, ..asked.offload };
        let beside = self.compile(target)?;
        let is_slower = through <= rates.host_update_seconds(on_host.optimizer) + sums(&beside);
        if is_slower || budget.lack(self, &beside).is_some() {
            self.settings.offload = Offload { updated_by: Some(UpdatedBy::Device), ..asked.offload };
            return Ok(compiled);
        }
        Ok(beside)
    }

    /// How often micro-batches may be halved.
    fn cuts(&self, freedom: Freedom) -> u32 {
        if freedom.micro_batch { self.shape.micro_batch.trailing_zeros() } else { 0 }
    }

    /// Halves micro-batches: the step stays the same.
    fn cut(&mut self, times: u32) {
        if times == 0 {
            return;
        }
        self.shape.micro_batch >>= times;
        self.shape.accumulation <<= times;
        self.settings.accumulation = self.shape.accumulation;
        self.size_rows();
    }

    /// What is computed again and how far gathers run ahead, from what costs nothing to what costs most time.
    fn policies(&self, freedom: Freedom) -> Vec<(Recompute, u64)> {
        let (asked, prefetch) = (self.settings.recompute, self.settings.prefetch);
        let mut policies = vec![(asked, prefetch)];
        if freedom.recompute {
            policies.extend([Recompute::NormSwiGlu, EVERY_BLOCK].map(|again| (again, prefetch)));
        }
        if freedom.prefetch && prefetch > 0 {
            policies.extend(policies.last().map(|(again, _)| (*again, 0)));
        }
        policies
    }

    fn choices(&self, asked: &zeroth_program::Settings, cuts: u32) -> Vec<Choice> {
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
        if cuts > 0 {
            let (micro_batch, accumulation) = (self.shape.micro_batch, self.shape.accumulation);
            choices.push(Choice { key: "train_micro_batch_size_per_gpu", value: micro_batch.into() });
            choices.push(Choice { key: "gradient_accumulation_steps", value: accumulation.into() });
        }
        choices
    }

    /// Changes that a person may make, each by itself, that fit.
    fn remedies(&mut self, target: Target, budget: Budget) -> Result<Vec<(String, [u64; 2])>, JobError> {
        let asked = (self.settings, self.shape, self.row_sizes.clone());
        let block = EVERY_BLOCK;
        let optimizer = Offload { optimizer: Some(1.0), ..asked.0.offload };
        let both = Offload { parameters: Some(u64::MAX), ..optimizer };
        let cuts = self.shape.micro_batch.trailing_zeros();
        let mut changes: Vec<(String, Change)> = Vec::new();
        if asked.0.recompute == Recompute::Nothing {
            let change = move |job: &mut Self| job.settings.recompute = block;
            changes.push(("zeroth.recompute \"block\"".to_owned(), Box::new(change)));
        }
        if asked.0.offload.update_window.is_some_and(|window| window > 0) {
            let change = |job: &mut Self| job.settings.offload.update_window = Some(0);
            changes.push(("zeroth.update_window 0, or none at all".to_owned(), Box::new(change)));
        }
        if cuts > 0 {
            let name = format!(
                "train_micro_batch_size_per_gpu {} with gradient_accumulation_steps {}",
                asked.1.micro_batch >> cuts,
                asked.1.accumulation << cuts
            );
            changes.push((name, Box::new(move |job: &mut Self| job.cut(cuts))));
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
            if budget.lack(self, &compiled).is_none() {
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

    /// The fewest ranks, doubled from those there are, that fit with all in host memory and blocks computed again.
    fn more_ranks(&mut self, target: Target, budget: Budget) -> Result<Option<(String, [u64; 2])>, JobError> {
        self.settings.stage = 3;
        self.settings.offload.optimizer = Some(1.0);
        self.settings.offload.parameters = Some(u64::MAX);
        self.settings.recompute = EVERY_BLOCK;
        let there = self.shape.ranks;
        for ranks in [2, 4, 8, 16, 32].map(|times| times * there) {
            self.shape.ranks = ranks;
            let compiled = self.compile(target)?;
            if budget.lack(self, &compiled).is_none() {
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
