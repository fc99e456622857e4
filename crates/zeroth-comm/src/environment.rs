//! Ranks that another launcher started, found from its variables: torchrun, Open MPI, MPICH and SLURM.
//!
//! Launchers nest: `torchrun` runs inside `srun`, and `mpirun` starts its helpers with `srun` in an allocation. Ranks then
//! have the variables of both, and the innermost counts. The order:
//!
//! 1. **torchrun**, or DeepSpeed's launcher, which sets the same: `RANK` and `WORLD_SIZE`, or `TORCHELASTIC_RUN_ID`.
//! 2. **Open MPI**: `OMPI_COMM_WORLD_RANK`.
//! 3. **MPICH** and others with Hydra (Intel MPI): `PMI_RANK` (or `PMI_ID`) with `MPI_LOCALNRANKS`. `srun --mpi=pmi2` sets
//!    `PMI_RANK` alone.
//! 4. **SLURM**: `SLURM_PROCID` in a step of `srun`. A batch script and the shell of `salloc` have it too, and are no rank.
//! 5. Any other that sets `PMI_RANK`.
//!
//! Variables of our own launcher come before all of these: see [`crate::local::join_from_environment`]. A job of one rank
//! is no job of a foreign launcher: there is nobody to meet.

mod starter;

use std::ffi::OsString;
use std::fmt;

/// Who started this process as one rank of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// PyTorch's `torchrun`, or DeepSpeed's launcher.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// `mpiexec` of MPICH, of Intel MPI, or another that speaks PMI.
    Mpich,
    /// `srun`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH (PMI)",
            Self::Slurm => "SLURM",
        })
    }
}

/// This process's place in a job that another launcher started on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: usize,
    /// Ranks of the job: more than one.
    pub world: usize,
    /// Its rank among those of this machine.
    pub local_rank: usize,
    /// Ranks on this machine: all of them, for now.
    pub local_world: usize,
    /// A name that all ranks of this job share, and no other job on this machine has.
    pub job: String,
    /// Who started it.
    pub launcher: Launcher,
}

/// The variables of a launcher cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// A variable is missing where others of the same launcher are set.
    #[error(
        "{launcher} started this process, but {name} is not set; start it through the launcher, or unset {because}"
    )]
    Missing {
        /// The launcher.
        launcher: Launcher,
        /// The variable, or those of which one would do.
        name: String,
        /// The variable that tells of the launcher.
        because: &'static str,
    },
    /// A variable is no number.
    #[error("{name} of {launcher} is {value:?}, which is not a number of ranks or a rank")]
    NotANumber {
        /// The launcher.
        launcher: Launcher,
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// Variables contradict each other.
    #[error("{below} of {launcher} is {value}, but {above} is {bound}; ranks are numbered from 0")]
    Contradiction {
        /// The launcher.
        launcher: Launcher,
        /// The variable that is too large.
        below: &'static str,
        /// Its value.
        value: usize,
        /// The variable that bounds it.
        above: &'static str,
        /// Its value.
        bound: usize,
    },
    /// The job spans machines.
    #[error(
        "not yet: many machines ({launcher} has {world} rank(s), of which this machine runs {}); start all ranks on one",
        here.map_or_else(|| "a part".to_owned(), |here| here.to_string())
    )]
    ManyMachines {
        /// The launcher.
        launcher: Launcher,
        /// Ranks of the job.
        world: usize,
        /// Those on this machine, where the launcher says.
        here: Option<usize>,
    },
}

impl Place {
    /// The place of this process. `Ok(None)` where no foreign launcher started it as one of several.
    pub fn of_this_process() -> Result<Option<Self>, PlaceError> {
        Self::find(|name| std::env::var_os(name), starter::starter)
    }

    /// The place that variables tell of. `starter` is the process that started all ranks: it names the job for launchers
    /// that give it no name.
    pub fn find(
        lookup: impl Fn(&str) -> Option<OsString>,
        starter: impl Fn() -> u32,
    ) -> Result<Option<Self>, PlaceError> {
        let of = |launcher| Variables { lookup: &lookup, launcher };
        let all = |names: &[&str]| names.iter().all(|name| lookup(name).is_some());
        let pmi = if all(&["PMI_RANK"]) { "PMI_RANK" } else { "PMI_ID" };
        let found = if all(&["RANK", "WORLD_SIZE"]) || all(&["TORCHELASTIC_RUN_ID"]) {
            torchrun(&of(Launcher::Torchrun))?
        } else if all(&["OMPI_COMM_WORLD_RANK"]) {
            open_mpi(&of(Launcher::OpenMpi))?
        } else if all(&[pmi, "PMI_SIZE", "MPI_LOCALNRANKS"]) {
            mpich(&of(Launcher::Mpich), pmi, starter)?
        } else if let Some(step) = slurm_step(&of(Launcher::Slurm))? {
            slurm(&of(Launcher::Slurm), step)?
        } else if all(&[pmi, "PMI_SIZE"]) {
            mpich(&of(Launcher::Mpich), pmi, starter)?
        } else {
            return Ok(None);
        };
        found.check()
    }
}

/// What a launcher's variables say, not yet checked.
struct Found {
    launcher: Launcher,
    rank: (&'static str, usize),
    world: (&'static str, usize),
    local_rank: (&'static str, usize),
    /// `None` where the launcher runs ranks on other machines, and does not say how many here.
    local_world: Option<(&'static str, usize)>,
    job: String,
}

impl Found {
    fn check(self) -> Result<Option<Place>, PlaceError> {
        let Self { launcher, rank, world, local_rank, local_world, job } = self;
        let below = |(below, value): (&'static str, usize), (above, bound): (&'static str, usize)| {
            (value < bound).then_some(()).ok_or(PlaceError::Contradiction {
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
        let Some(local_world) = local_world else {
            return Err(PlaceError::ManyMachines { launcher, world: world.1, here: None });
        };
        below(local_rank, local_world)?;
        if local_world.1 < world.1 {
            return Err(PlaceError::ManyMachines { launcher, world: world.1, here: Some(local_world.1) });
        }
        if local_world.1 > world.1 {
            let ((below, value), (above, bound)) = (local_world, world);
            return Err(PlaceError::Contradiction { launcher, below, value, above, bound });
        }
        Ok(Some(Place {
            rank: rank.1,
            world: world.1,
            local_rank: local_rank.1,
            local_world: local_world.1,
            job,
            launcher,
        }))
    }
}

struct Variables<'a, L> {
    lookup: &'a L,
    launcher: Launcher,
}

impl<L: Fn(&str) -> Option<OsString>> Variables<'_, L> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.to_string_lossy().into_owned())
    }

    fn maybe(&self, name: &'static str) -> Result<Option<(&'static str, usize)>, PlaceError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) => Ok(Some((name, number))),
            Err(_) => Err(PlaceError::NotANumber { launcher: self.launcher, name, value }),
        }
    }

    /// The first of some variables that is set.
    fn first(&self, names: &[&'static str]) -> Result<Option<(&'static str, usize)>, PlaceError> {
        for name in names {
            if let Some(found) = self.maybe(name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn number(
        &self,
        names: &[&'static str],
        because: &'static str,
    ) -> Result<(&'static str, usize), PlaceError> {
        let missing = || PlaceError::Missing { launcher: self.launcher, name: names.join(" or "), because };
        self.first(names)?.ok_or_else(missing)
    }
}

/// `torch/distributed/elastic/agent/server/local_elastic_agent.py`; DeepSpeed's `launcher/launch.py` has `LOCAL_SIZE`.
fn torchrun(variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>) -> Result<Found, PlaceError> {
    let because = if variables.text("RANK").is_some() { "RANK" } else { "TORCHELASTIC_RUN_ID" };
    let (rank, world) = (variables.number(&["RANK"], because)?, variables.number(&["WORLD_SIZE"], because)?);
    // One rank needs no more than these two, and many notebooks set just them.
    let alone = ("WORLD_SIZE", 1);
    let (local_rank, local_world) = if world.1 == 1 {
        (("RANK", 0), alone)
    } else {
        (
            variables.number(&["LOCAL_RANK"], because)?,
            variables.number(&["LOCAL_WORLD_SIZE", "LOCAL_SIZE"], because)?,
        )
    };
    // Workers that are started again must not meet what is left of those before.
    let parts = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"];
    let parts: Vec<String> = parts.iter().filter_map(|name| variables.text(name)).collect();
    let job = format!("torchrun-{}", parts.join("-"));
    Ok(Found { launcher: variables.launcher, rank, world, local_rank, local_world: Some(local_world), job })
}

/// mpirun(1) of Open MPI, "Environment variables"; the job's number is PMIx's.
fn open_mpi(variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>) -> Result<Found, PlaceError> {
    let because = "OMPI_COMM_WORLD_RANK";
    let name = variables.text("PMIX_NAMESPACE").or_else(|| variables.text("OMPI_MCA_ess_base_jobid"));
    let missing =
        || PlaceError::Missing { launcher: variables.launcher, name: "PMIX_NAMESPACE".to_owned(), because };
    Ok(Found {
        launcher: variables.launcher,
        rank: variables.number(&[because], because)?,
        world: variables.number(&["OMPI_COMM_WORLD_SIZE"], because)?,
        local_rank: variables.number(&["OMPI_COMM_WORLD_LOCAL_RANK"], because)?,
        local_world: Some(variables.number(&["OMPI_COMM_WORLD_LOCAL_SIZE"], because)?),
        job: format!("openmpi-{}", name.ok_or_else(missing)?),
    })
}

/// Hydra's proxy sets these; the job has a name only inside PMI's protocol, so the proxy's process stands for it.
fn mpich(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
    rank: &'static str,
    starter: impl Fn() -> u32,
) -> Result<Found, PlaceError> {
    let name = variables.text("PMI_JOBID").unwrap_or_else(|| format!("started-by-{}", starter()));
    Ok(Found {
        launcher: variables.launcher,
        rank: variables.number(&[rank], rank)?,
        world: variables.number(&["PMI_SIZE"], rank)?,
        local_rank: variables.maybe("MPI_LOCALRANKID")?.unwrap_or((rank, 0)),
        local_world: variables.maybe("MPI_LOCALNRANKS")?,
        job: format!("mpich-{name}"),
    })
}

/// The step of `srun` that this process is a task of.
///
/// slurm.h numbers the steps that are no `srun` from 0xfffffff0 on: the batch script, the shell of `salloc`, and others.
fn slurm_step(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
) -> Result<Option<usize>, PlaceError> {
    if variables.text("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    let step = variables.first(&["SLURM_STEP_ID", "SLURM_STEPID"])?;
    Ok(step.map(|(_, step)| step).filter(|step| *step < 0xffff_fff0))
}

/// srun(1), "Output environment variables". Those of the step count, where the allocation is larger.
fn slurm(
    variables: &Variables<'_, impl Fn(&str) -> Option<OsString>>,
    step: usize,
) -> Result<Found, PlaceError> {
    let because = "SLURM_PROCID";
    let world = variables.number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], because)?;
    let nodes = variables.number(&["SLURM_STEP_NUM_NODES", "SLURM_NNODES"], because)?;
    let job = variables.number(&["SLURM_JOB_ID", "SLURM_JOBID"], because)?.1;
    Ok(Found {
        launcher: variables.launcher,
        rank: variables.number(&[because], because)?,
        world,
        local_rank: variables.number(&["SLURM_LOCALID"], because)?,
        local_world: (nodes.1 == 1).then_some(world),
        job: format!("slurm-{job}-{step}"),
    })
}

#[cfg(test)]
mod tests;
