//! A job with all that its run needs, and the fit of its step into memory.

use zeroth_base::format_bytes;
use zeroth_config::resolve::{Choice, Resolved};
use zeroth_config::schema::FrozenPlacement;
use zeroth_graph::Op;
use zeroth_kernel::Target;
use zeroth_machine::{DeviceKind, Rates};
use zeroth_plan::{Misfit, Overhead, PrefetchLimit, SizingError};
use zeroth_program::Compiled;
use zeroth_train::Job;
use zeroth_train::checkpoint::Checkpoint;

use super::data::Reading;
use super::handoff::{Inputs, LauncherHandoff};
use super::machine::StartedRanks;
use super::rank_facts::RankFacts;
use super::rank_share::{LeastShare, RankShare};
use super::strategies::Strategies;
use crate::planning;

/// A request, resolved.
#[derive(Debug)]
pub struct ResolvedJob {
    /// What is trained.
    pub job: Job,
    /// The config, value by value.
    pub resolved: Resolved,
    /// The model, as given.
    pub name: String,
    /// The run's name, or that of the run that is resumed.
    pub run_name: Option<String>,
    /// Data-parallel ranks, on all hosts.
    pub ranks: u64,
    /// Where this process's ranks are among them.
    pub started: StartedRanks,
    /// What this process's rank can have of its host.
    pub share: RankShare,
    /// Memory budget of one device, if it was given.
    pub(super) given_device_memory: Option<u64>,
    /// The devices to train on.
    pub device: DeviceKind,
    /// GPUs that this process sees.
    pub gpus: u64,
    /// What its ranks may differ in.
    pub facts: RankFacts,
    /// What the program is compiled for, the same on all ranks.
    pub target: &'static dyn Target,
    /// CPU threads that this rank computes with, at most those that memory is planned for.
    pub threads: usize,
    /// When it evaluates, saves and logs.
    pub strategies: Strategies,
    /// The config's `steps_per_print`.
    pub steps_per_print: Option<u64>,
    /// Whether the evaluation data was taken from the training data.
    pub holds_out: bool,
    /// Whether the trained model is exported at the end.
    pub writes_model: bool,
    /// The checkpoint to resume from, already verified.
    pub checkpoint: Option<Checkpoint>,
    /// Whether the run continues one in its own folder.
    pub resumes_here: bool,
    /// Tokenisation settings.
    pub reading: Reading,
    /// Passed to all ranks.
    pub handoff: LauncherHandoff,
    /// Input files, as read.
    pub inputs: Inputs,
    /// What was decided, and what has no effect.
    pub notes: Vec<String>,
}

impl ResolvedJob {
    /// Plans for the least share of all ranks, which other hosts and launchers that show each rank another GPU tell first;
    /// before [`Self::fit`].
    pub fn limit_to(&mut self, shares: &[RankShare]) {
        let least = LeastShare::of(shares);
        self.handoff.threads = least.threads;
        self.handoff.budget = least.budget(self.device, self.given_device_memory);
        self.handoff.rates = least.rates.or(self.handoff.rates);
        self.target = self.device.target(least.threads);
        self.threads = self.threads.min(least.threads);
    }

    /// Host memory of a rank outside its arenas.
    pub fn overhead(&self, compiled: &Compiled) -> Overhead {
        self.job.overhead(compiled, self.handoff.budget.processes)
    }

    /// Compiles the step within the budgets, choosing values that were left open.
    pub fn fit(&mut self) -> Result<Result<Compiled, Misfit>, SizingError> {
        let freedom = planning::freedom(&self.resolved, self.handoff.rates);
        let (compiled, choices) = match self.job.fit(self.target, self.handoff.budget, freedom)? {
            Ok(fitted) => fitted,
            Err(misfit) => return Ok(Err(misfit)),
        };
        for choice in choices {
            let why = why_chosen(choice, self.handoff.rates);
            let settings = choice.settings().into_iter();
            self.notes.extend(settings.map(|(key, value)| format!("{key} is {value}: {why}")));
            self.resolved.choose(choice, &why);
        }
        let mut ops = compiled.graph.nodes.iter().map(|node| node.op);
        if freedom.micro_batch && ops.any(|op| matches!(op, Op::BalanceLoss { .. })) {
            self.notes.push(
                "the micro-batch is not chosen by memory: the auxiliary loss (router_aux_loss_coef) balances the experts \
                 within each"
                    .to_owned(),
            );
        }
        if let Some(limit) = PrefetchLimit::of(&compiled, &self.job.settings) {
            self.notes.push(limit.to_string());
        }
        Ok(Ok(compiled))
    }
}

/// The reason of a choice, as the origin of its keys.
fn why_chosen(choice: Choice, rates: Option<Rates>) -> String {
    match (choice, rates) {
        (Choice::UpdatedBy(_), Some(Rates { update, bus, .. })) => format!(
            "the CPUs update {} of state per second, and the bus moves {} per second each way",
            format_bytes(update),
            format_bytes(bus)
        ),
        (Choice::Frozen(FrozenPlacement::Whole), _) => {
            "every rank has room for all frozen weights".to_owned()
        }
        (Choice::Frozen(FrozenPlacement::ByStage | FrozenPlacement::Sharded), _) => {
            "not every rank has room for all frozen weights".to_owned()
        }
        (Choice::Recompute(_), Some(_)) => "chosen for the memory it saves".to_owned(),
        (Choice::UpdatedBy(_) | Choice::Recompute(_), None)
        | (Choice::Prefetch(_) | Choice::UpdateWindow(_) | Choice::Batch { .. }, _) => {
            "chosen to fit the memory".to_owned()
        }
    }
}
