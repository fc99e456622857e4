//! The memory of a placement by the program that would train it: to the byte what a run allocates.

use zeroth_graph::Group;
use zeroth_kernel::{ByTier, Tier};
use zeroth_program::{Bytes, Compiled, FrozenPlacement, GradientStorage, Program, Recompute, Settings};

use crate::budget::Budget;
use crate::overhead::{DataSize, Overhead};
use crate::row::{Basis, Footprint};
use crate::sizing::{BatchShape, Detail, EarlierSteps, Found, Freedom, Sizing};
use crate::{BytesPerParameter, Placement, PlanError, PlanRequest, PrefetchLimit};

/// The program that a run of this placement takes, as [`crate::plan()`] counts it, and whether it is within the budgets;
/// where nothing is, the one that needs least. `None` where the request is for what cannot be compiled yet.
pub fn compile(request: &PlanRequest, placement: &Placement) -> Result<Option<(Compiled, bool)>, PlanError> {
    let found = search(request, placement, Detail::Run, &mut EarlierSteps::default())?;
    Ok(found.map(|(found, _)| (found.compiled, found.shortfall.is_none())))
}

/// The footprint of the compiled step; `None` where the request is for what cannot be compiled yet.
pub(crate) fn footprint(
    request: &PlanRequest,
    placement: &Placement,
    detail: Detail,
    earlier: &mut EarlierSteps,
) -> Result<Option<Footprint>, PlanError> {
    let found = search(request, placement, detail, earlier)?;
    Ok(found.map(|(Found { compiled, choices, .. }, settings)| {
        let ranks_on_host = request.ranks_on_host();
        let process = Overhead::of(DataSize::default(), &compiled, request.processes).total;
        let footprint = Footprint {
            prefetch: PrefetchLimit::of(&compiled, &settings),
            process: process.saturating_mul(ranks_on_host),
            choices,
            ..Footprint::of_program(&compiled, request)
        };
        earlier.keep(settings, compiled);
        footprint
    }))
}

/// Searches as a run does: the same freedom, budget and rows.
fn search(
    request: &PlanRequest,
    placement: &Placement,
    detail: Detail,
    earlier: &mut EarlierSteps,
) -> Result<Option<(Found, Settings)>, PlanError> {
    let (Some(model), Some(rows)) = (&request.model, request.rows) else { return Ok(None) };
    let Some(table) = model.table(request.train_type) else { return Ok(None) };
    let (ranks, accumulation) = (request.ranks, request.accumulation);
    let mut settings = Settings { accumulation, ..placement.settings };
    let mut freedom = placement.freedom;
    if rows.recompute {
        freedom.recompute = false;
        if !matches!(settings.recompute, Recompute::Block { .. }) {
            settings.recompute = Recompute::EVERY_BLOCK;
        }
    }
    if request.hosts() > 1 {
        // As a run on these hosts: groups are hosts where they have equally many ranks.
        settings.group.get_or_insert(request.usual_group());
    }
    let batch = BatchShape { micro_batch: rows.micro_batch, accumulation, ranks };
    let largest = |batch: BatchShape| rows.lengths().map(|length| batch.micro_batch.saturating_mul(length));
    let target = model.device.target(request.ranks_on_host());
    if let Some(placement) = model.teacher.as_ref().and_then(|teacher| teacher.placement) {
        settings.teacher = placement;
    }
    let mut sizing = Sizing::new(&model.config, table, target, batch, settings, &largest);
    sizing.objective = model.objective();
    let host = request.host_memory.map(|bytes| bytes / request.ranks_on_host().max(1));
    let budget = Budget::given(request.device_memory, host, model.shares_host_memory(), request.processes);
    // Without a budget nothing has to be chosen, and frozen parameters are shown as the stage has the trained ones.
    let freedom = if budget.is_limited() { freedom } else { Freedom::default() };
    // Host memory counts the program of every row count.
    let is_exact = detail == Detail::Verdict && budget.limits[Tier::Host].or(budget.together).is_some();
    sizing.detail = if is_exact { Detail::Bytes } else { detail };
    let found = match detail {
        Detail::Run | Detail::Bytes => sizing.search(budget, freedom),
        Detail::Verdict => sizing.search_least(budget, freedom, earlier),
    };
    let refused = |source| PlanError::Compile { preset: placement.preset.clone(), source: Box::new(source) };
    Ok(Some((found.map_err(refused)?, sizing.settings)))
}

impl Footprint {
    fn of_program(compiled: &Compiled, request: &PlanRequest) -> Self {
        let (Compiled { program, memory, .. }, ranks_on_host) = (compiled, request.ranks_on_host());
        let is_gathered = |flat: &usize| !program.stays_gathered(*flat) && !program.is_viewed(*flat);
        let gathered = (0..program.layout.flats.len()).filter(is_gathered);
        let gathered = gathered.map(|flat| program.layout.flats[flat].bytes()).max().unwrap_or(0);
        Self {
            // A device is a rank's own; its host is shared.
            bytes: ByTier::new(|tier| {
                let ranks = if tier.is_offloaded() { ranks_on_host } else { 1 };
                times(memory.by_category(tier), ranks)
            }),
            gathered_layer: gathered,
            sent: program.bytes_sent_per_step(),
            into_host: program.bytes_between_hosts_per_step(ranks_on_host),
            bytes_per_parameter: bytes_per_parameter(program),
            frozen: frozen(program),
            process: 0,
            choices: Vec::new(),
            blocks: compiled.graph.blocks().count() as u64,
            prefetch: None,
            basis: Basis::Program,
        }
    }
}

/// Where most of the model's frozen parameters are.
fn frozen(program: &Program) -> Option<FrozenPlacement> {
    let flats = program.layout.flats.iter().enumerate();
    let flats = flats.filter(|(_, flat)| flat.is_frozen() && flat.group == Group::Model);
    let largest = flats.max_by_key(|(_, flat)| flat.padded());
    largest.map(
        |(flat, _)| {
            if program.is_sharded(flat) { FrozenPlacement::Sharded } else { FrozenPlacement::Whole }
        },
    )
}

fn times(bytes: Bytes, ranks: u64) -> Bytes {
    let times = |bytes: u64| bytes.saturating_mul(ranks);
    Bytes::of_states(times(bytes.parameters), times(bytes.gradients), times(bytes.optimizer))
        .with(times(bytes.activations), times(bytes.buffers))
}

fn bytes_per_parameter(program: &Program) -> BytesPerParameter {
    let gradients = match program.gradient_storage() {
        GradientStorage::FlatF32 => 4,
        GradientStorage::FlatComm => program.types.communication.bytes(),
        GradientStorage::Shard => program.grad_accum_dtype.bytes(),
    };
    let flat = (0..program.layout.flats.len()).find(|flat| program.has_master(*flat));
    let master = flat.map_or(0, |flat| program.master_form(flat).bytes());
    let moments = program.optimizer.moments().len() as u64 * program.moment_dtype.bytes();
    BytesPerParameter { parameters: program.types.compute.bytes(), gradients, optimizer: master + moments }
}
