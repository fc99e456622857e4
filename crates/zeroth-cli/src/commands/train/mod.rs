//! `train`: resolves, plans and launches a run.
//!
//! Every rank is this same command, started again with the launcher's environment variables: it resolves the same job from
//! the same arguments, and receives the launcher's decisions in a [`zeroth::job::LauncherHandoff`]. The launcher owns the
//! run folder; rank 0 writes metrics, checkpoint manifests and the model. Under an external launcher (torchrun, srun,
//! mpirun), rank 0 does the launcher's work first.

mod agreement;
mod checkpoints;
mod cpu_hosts;
mod external_launcher;
mod launch;
mod live;
mod lora;
mod prepare;
mod prepared_run;
mod rank;
mod reporter;
mod resolve_job;
mod startup_summary;
pub(crate) mod strategies;
mod summary;
mod teacher;
mod trainer_note;
mod view;

use zeroth::comm::local::is_launched;
use zeroth::job::StartedRanks;

use prepare::prepare_run;

use crate::cli::TrainArgs;
use crate::exit::Exit;
use crate::output::Output;
use crate::signals::{SaveSignals, SignalRole, Signals};
use crate::startup_signals::InterruptedWork;

pub(super) fn run(arguments: &TrainArgs, output: &Output) -> anyhow::Result<Exit> {
    if is_launched() {
        return rank::of_a_launcher(arguments);
    }
    if let Some(place) = external_launcher::place()? {
        return external_launcher::run(arguments, &place, output);
    }
    let saves = SaveSignals::of(None, arguments.signal_exit);
    let signals = Signals::install(SignalRole::Primary, InterruptedWork::Training, saves)?;
    let run = match prepare_run(arguments, planned_hosts(arguments)?, output, &signals)? {
        Ok(run) => run,
        Err(exit) => return Ok(exit),
    };
    let status = live::LiveStatus::start(&run, &signals);
    let view = view::open(arguments, output);
    // A single rank runs in this process, unless it is to be restarted when it dies.
    let exit = if run.resolved_job.ranks == 1 && arguments.max_restarts == 0 {
        rank::only(arguments, &run, &signals, &status)?
    } else {
        launch::many(arguments, &run, &signals, &status)?
    };
    status.finish(exit);
    drop(view);
    if exit == Exit::Done { summary::print(&run, output) } else { Ok(exit) }
}

/// The hosts that a dry run plans for, as the first rank sees them; `None` for this one.
fn planned_hosts(arguments: &TrainArgs) -> anyhow::Result<Option<StartedRanks>> {
    let hosts = &arguments.on_hosts;
    if !hosts.is_typed() {
        return Ok(None);
    }
    if !arguments.dry_run && arguments.dump_program.is_none() {
        anyhow::bail!(
            "--hosts and --ranks-per-host plan for hosts and start none: add --dry-run, or start ranks on several hosts with \
             zeroth launch"
        );
    }
    let (Some(world), Some(local_world)) = hosts.ranks(arguments.ranks)? else {
        anyhow::bail!("--ranks-per-host needs --hosts, or --ranks for those of all hosts");
    };
    Ok(Some(StartedRanks { world, local_world: local_world.min(world), host: 0, local_rank: 0 }))
}
