//! Detection of ranks started by another launcher, from its environment variables: torchrun, Open MPI, MPICH and SLURM.
//!
//! Launchers nest: `torchrun` runs inside `srun`, and `mpirun` starts its helpers with `srun` in an allocation. Ranks
//! then have the variables of both, and the innermost launcher counts, in this order:
//!
//! 1. **torchrun**, or DeepSpeed's launcher, which sets the same: `RANK` and `WORLD_SIZE`, or `TORCHELASTIC_RUN_ID`.
//! 2. **Open MPI**: `OMPI_COMM_WORLD_RANK`.
//! 3. **MPICH** and others with Hydra (Intel MPI): `PMI_RANK` (or `PMI_ID`) with `MPI_LOCALNRANKS`. `srun --mpi=pmi2` sets
//!    `PMI_RANK` alone.
//! 4. **SLURM**: `SLURM_PROCID` in a step of `srun`. A batch script and the shell of `salloc` have it too, and are no rank.
//! 5. Any other that sets `PMI_RANK`.
//!
//! Variables of our own launcher take precedence: see [`crate::local::join_from_environment`]. A job of one rank does
//! not count as a job of another launcher.
//!
//! Ranks may run on several hosts, numbered host by host. What a launcher does not tell of other hosts, they tell each
//! other when they meet: see [`crate::hosts`].

mod slurm;
mod starter;

use std::ffi::OsString;
use std::fmt;

use crate::hosts::{PortChoice, Rank0Address};
use crate::place::{HostTable, Place, PlaceError};

/// The launcher that started this process as one of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExternalLauncher {
    /// PyTorch's `torchrun`, or DeepSpeed's launcher.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// `mpiexec` of MPICH or Intel MPI, or another PMI launcher.
    Mpich,
    /// `srun`.
    Slurm,
}

impl fmt::Display for ExternalLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH (PMI)",
            Self::Slurm => "SLURM",
        })
    }
}

/// This process's rank in a job that another launcher started.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct LaunchedRank {
    /// In a world of at least 2.
    pub place: Place,
    /// A name that is unique to the job on this host and equal on all its ranks.
    pub job: String,
    pub launcher: ExternalLauncher,
    /// Where the hosts meet rank 0; `None` where neither the launcher nor the user tells it. MPI can broadcast it.
    pub rank0: Option<Rank0Address>,
    /// All hosts, where the launcher tells them.
    pub hosts: Option<HostTable>,
    /// How often the launcher has started the job again.
    pub restarts: usize,
}

/// Environment variables of a launcher that are missing or inconsistent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum LauncherError {
    #[error(
        "{launcher} started this process, but {name} is not set; start it through the launcher, or unset {because}"
    )]
    Missing { launcher: ExternalLauncher, name: String, because: &'static str },
    #[error("{name} of {launcher} is {value:?}, which is not a number of ranks or a rank")]
    NotANumber { launcher: ExternalLauncher, name: &'static str, value: String },
    #[error("{below} of {launcher} is {value}, but {above} is {bound}; ranks are numbered from 0")]
    Contradiction {
        launcher: ExternalLauncher,
        below: &'static str,
        value: usize,
        above: &'static str,
        bound: usize,
    },
    #[error("MASTER_PORT of {launcher} is {value:?}, which is not a port: 1 to 65535")]
    Port { launcher: ExternalLauncher, value: String },
    #[error("{launcher} runs ranks on several hosts: {source}")]
    Place { launcher: ExternalLauncher, source: PlaceError },
    #[error("{list:?} is no list of SLURM's nodes: {why}")]
    NodeList { list: String, why: &'static str },
    #[error("{text:?} of SLURM is not tasks per node, as in 2(x2),1: {why}")]
    TasksPerNode { text: String, why: &'static str },
}

impl LaunchedRank {
    /// The rank of this process; `Ok(None)` where no other launcher started it as one of several.
    pub fn of_this_process() -> Result<Option<Self>, LauncherError> {
        Self::find(|name| std::env::var_os(name), starter::starter)
    }

    /// The rank that the variables describe. `starter` is the process that started all ranks; it identifies the job for
    /// launchers that do not name it.
    pub fn find(
        lookup: impl Fn(&str) -> Option<OsString>,
        starter: impl Fn() -> u32,
    ) -> Result<Option<Self>, LauncherError> {
        let of = |launcher| Variables { lookup: &lookup, launcher };
        let all = |names: &[&str]| names.iter().all(|name| lookup(name).is_some());
        let pmi = if all(&["PMI_RANK"]) { "PMI_RANK" } else { "PMI_ID" };
        let found = if all(&["RANK", "WORLD_SIZE"]) || all(&["TORCHELASTIC_RUN_ID"]) {
            torchrun(&of(ExternalLauncher::Torchrun))?
        } else if all(&["OMPI_COMM_WORLD_RANK"]) {
            open_mpi(&of(ExternalLauncher::OpenMpi))?
        } else if all(&[pmi, "PMI_SIZE", "MPI_LOCALNRANKS"]) {
            mpich(&of(ExternalLauncher::Mpich), pmi, starter)?
        } else if let Some(step) = slurm_step(&of(ExternalLauncher::Slurm))? {
            slurm(&of(ExternalLauncher::Slurm), step)?
        } else if all(&[pmi, "PMI_SIZE"]) {
            mpich(&of(ExternalLauncher::Mpich), pmi, starter)?
        } else {
            return Ok(None);
        };
        found.check()
    }
}

/// A launcher's variables before validation.
struct UncheckedRank {
    launcher: ExternalLauncher,
    rank: (&'static str, usize),
    world: (&'static str, usize),
    local_rank: (&'static str, usize),
    local_world: (&'static str, usize),
    /// Where the launcher tells it.
    host: Option<usize>,
    job: String,
    rank0: Option<Rank0Address>,
    hosts: Option<HostTable>,
    restarts: usize,
}

impl UncheckedRank {
    fn check(self) -> Result<Option<LaunchedRank>, LauncherError> {
        let Self { launcher, rank, world, local_rank, local_world, host, .. } = self;
        let below = |(below, value): (&'static str, usize), (above, bound): (&'static str, usize)| {
            (value < bound).then_some(()).ok_or(LauncherError::Contradiction {
                launcher,
                below,
                value,
                above,
                bound,
            })
        };
        below(rank, world)?;
        if world.1 == 1 {
            return Ok(None);
        }
        below(local_rank, local_world)?;
        if local_world.1 > world.1 {
            let ((below, value), (above, bound)) = (local_world, world);
            return Err(LauncherError::Contradiction { launcher, below, value, above, bound });
        }
        let wrong = |source| LauncherError::Place { launcher, source };
        let place = Place {
            rank: rank.1,
            world: world.1,
            local_rank: local_rank.1,
            local_world: local_world.1,
            host: 0,
        };
        let mut place = place.check().map_err(wrong)?;
        // Right where hosts have equal numbers of ranks, and 0 for the first host only.
        place.host = match place.first() {
            0 => 0,
            first => host.unwrap_or(first / place.local_world).max(1),
        };
        if let Some(hosts) = &self.hosts {
            let Place { rank, world, local_rank, local_world, .. } = place;
            let found = hosts.place(rank).filter(|found| *found == place && hosts.world() == world);
            place = found
                .ok_or(PlaceError::NotHostByHost { rank, world, local_rank, local_world })
                .map_err(wrong)?;
        }
        let Self { job, rank0, hosts, restarts, .. } = self;
        Ok(Some(LaunchedRank { place, job, launcher, rank0, hosts, restarts }))
    }
}

struct Variables<'a, L> {
    lookup: &'a L,
    launcher: ExternalLauncher,
}

impl<L: Fn(&str) -> Option<OsString>> Variables<'_, L> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.to_string_lossy().into_owned())
    }

    fn maybe(&self, name: &'static str) -> Result<Option<(&'static str, usize)>, LauncherError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) => Ok(Some((name, number))),
            Err(_) => Err(LauncherError::NotANumber { launcher: self.launcher, name, value }),
        }
    }

    /// The first of some variables that is set.
    fn first(&self, names: &[&'static str]) -> Result<Option<(&'static str, usize)>, LauncherError> {
        for name in names {
            if let Some(found) = self.maybe(name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The address of rank 0 by `MASTER_ADDR` and `MASTER_PORT`, else `otherwise`. A store of the launcher may hold that
    /// port, so the ones behind it count.
    fn master(&self, otherwise: Option<(String, u16)>) -> Result<Option<Rank0Address>, LauncherError> {
        let port = match self.text("MASTER_PORT") {
            None => None,
            Some(value) => match value.trim().parse::<u16>() {
                Ok(port) if port > 0 => Some(port),
                _ => return Err(LauncherError::Port { launcher: self.launcher, value }),
            },
        };
        let (host, other_port) = otherwise.map_or((None, None), |(host, port)| (Some(host), Some(port)));
        let host = self
            .text("MASTER_ADDR")
            .map(|host| host.trim().to_owned())
            .filter(|host| !host.is_empty())
            .or(host);
        Ok(host
            .zip(port.or(other_port))
            .map(|(host, port)| Rank0Address { host, port: PortChoice::After(port) }))
    }

    fn number(
        &self,
        names: &[&'static str],
        because: &'static str,
    ) -> Result<(&'static str, usize), LauncherError> {
        let missing =
            || LauncherError::Missing { launcher: self.launcher, name: names.join(" or "), because };
        self.first(names)?.ok_or_else(missing)
    }
}

/// `torch/distributed/elastic/agent/server/local_elastic_agent.py`; DeepSpeed's `launcher/launch.py` has `LOCAL_SIZE` and
/// `CROSS_RANK`.
fn torchrun(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
) -> Result<UncheckedRank, LauncherError> {
    let because = if variables.text("RANK").is_some() { "RANK" } else { "TORCHELASTIC_RUN_ID" };
    let (rank, world) = (variables.number(&["RANK"], because)?, variables.number(&["WORLD_SIZE"], because)?);
    // A single rank needs no more than these two, which many notebooks set.
    let alone = ("WORLD_SIZE", 1);
    let (local_rank, local_world) = if world.1 == 1 {
        (("RANK", 0), alone)
    } else {
        (
            variables.number(&["LOCAL_RANK"], because)?,
            variables.number(&["LOCAL_WORLD_SIZE", "LOCAL_SIZE"], because)?,
        )
    };
    // Restarted workers must not join the remains of the previous job.
    let parts = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"];
    let parts: Vec<String> = parts.iter().filter_map(|name| variables.text(name)).collect();
    let job = format!("torchrun-{}", parts.join("-"));
    Ok(UncheckedRank {
        launcher: variables.launcher,
        rank,
        world,
        local_rank,
        local_world,
        host: variables.first(&["GROUP_RANK", "CROSS_RANK"])?.map(|(_, host)| host),
        job,
        rank0: variables.master(None)?,
        hosts: None,
        restarts: variables.maybe("TORCHELASTIC_RESTART_COUNT")?.map_or(0, |(_, count)| count),
    })
}

/// mpirun(1) of Open MPI, "Environment variables"; the job id is PMIx's.
fn open_mpi(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
) -> Result<UncheckedRank, LauncherError> {
    let because = "OMPI_COMM_WORLD_RANK";
    let name = variables.text("PMIX_NAMESPACE").or_else(|| variables.text("OMPI_MCA_ess_base_jobid"));
    let missing = || LauncherError::Missing {
        launcher: variables.launcher,
        name: "PMIX_NAMESPACE".to_owned(),
        because,
    };
    Ok(UncheckedRank {
        launcher: variables.launcher,
        rank: variables.number(&[because], because)?,
        world: variables.number(&["OMPI_COMM_WORLD_SIZE"], because)?,
        local_rank: variables.number(&["OMPI_COMM_WORLD_LOCAL_RANK"], because)?,
        local_world: variables.number(&["OMPI_COMM_WORLD_LOCAL_SIZE"], because)?,
        // Its "node rank" is a number among the processes of a node.
        host: None,
        job: format!("openmpi-{}", name.ok_or_else(missing)?),
        rank0: variables.master(None)?,
        hosts: None,
        restarts: 0,
    })
}

/// Hydra's proxy sets these. The job id is only known inside the PMI protocol, so the proxy's process id stands for it.
fn mpich(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
    rank: &'static str,
    starter: impl Fn() -> u32,
) -> Result<UncheckedRank, LauncherError> {
    let name = variables.text("PMI_JOBID").unwrap_or_else(|| format!("started-by-{}", starter()));
    let world = variables.number(&["PMI_SIZE"], rank)?;
    let (local_rank, local_world) = if world.1 == 1 {
        ((rank, 0), ("PMI_SIZE", 1))
    } else {
        (variables.number(&["MPI_LOCALRANKID"], rank)?, variables.number(&["MPI_LOCALNRANKS"], rank)?)
    };
    Ok(UncheckedRank {
        launcher: variables.launcher,
        rank: variables.number(&[rank], rank)?,
        world,
        local_rank,
        local_world,
        host: None,
        job: format!("mpich-{name}"),
        rank0: variables.master(None)?,
        hosts: None,
        restarts: 0,
    })
}

/// The `srun` step that this process is a task of.
///
/// slurm.h numbers steps that are not `srun` from 0xfffffff0: the batch script, the shell of `salloc`, and others.
fn slurm_step(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
) -> Result<Option<usize>, LauncherError> {
    if variables.text("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    let step = variables.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?;
    Ok(step.map(|(_, step)| step).filter(|step| *step < 0xffff_fff0))
}

/// srun(1), "Output environment variables". Those of the step take precedence over the allocation's.
fn slurm(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
    step: usize,
) -> Result<UncheckedRank, LauncherError> {
    let because = "SLURM_PROCID";
    let rank = variables.number(&[because], because)?;
    let world = variables.number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], because)?;
    let nodes = variables.number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"], because)?;
    let job = variables.number(&["SLURM_JOB_ID", "SLURM_JOBID"], because)?.1;
    let is_one_host = nodes.1 == 1 || world.1 == 1;
    let hosts = if is_one_host { None } else { Some(slurm_hosts(variables, because)?) };
    let (local_world, host) = match &hosts {
        None => (world, None),
        Some(hosts) => {
            let node = variables.number(&["SLURM_NODEID"], because)?;
            let of_node = hosts.hosts().get(node.1).ok_or(LauncherError::Contradiction {
                launcher: variables.launcher,
                below: node.0,
                value: node.1,
                above: TASKS[0],
                bound: hosts.hosts().len(),
            })?;
            ((TASKS[0], of_node.ranks), Some(node.1))
        }
    };
    let first = hosts.as_ref().map(|hosts| hosts.hosts()[0].name.clone());
    // Jobs that share a node, and steps of a job, begin with different ports.
    let port = 20_000 + (job.wrapping_mul(31).wrapping_add(step.wrapping_mul(17)) % 10_000) as u16;
    Ok(UncheckedRank {
        launcher: variables.launcher,
        rank,
        world,
        local_rank: variables.number(&["SLURM_LOCALID"], because)?,
        local_world,
        host,
        job: format!("slurm-{job}-{step}"),
        rank0: variables.master(first.map(|host| (host, port)))?,
        hosts,
        restarts: variables.maybe("SLURM_RESTART_COUNT")?.map_or(0, |(_, count)| count),
    })
}

const TASKS: [&str; 2] = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
const NODES: [&str; 3] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];

/// The hosts of a step.
fn slurm_hosts(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
    because: &'static str,
) -> Result<HostTable, LauncherError> {
    let launcher = variables.launcher;
    let text = |names: &[&str]| {
        let missing = || LauncherError::Missing { launcher, name: names.join(" or "), because };
        names.iter().find_map(|name| variables.text(name)).ok_or_else(missing)
    };
    let (tasks, names) = (slurm::tasks(&text(&TASKS)?)?, slurm::nodes(&text(&NODES)?)?);
    if tasks.len() != names.len() {
        return Err(LauncherError::Contradiction {
            launcher,
            below: TASKS[0],
            value: tasks.len(),
            above: NODES[0],
            bound: names.len(),
        });
    }
    HostTable::in_order(names.into_iter().zip(tasks))
        .map_err(|source| LauncherError::Place { launcher, source })
}

#[cfg(test)]
mod tests;
