//! What the environment says about the launcher of this process: which library it belongs to, and how many ranks it has.

use std::ffi::OsString;
use std::path::PathBuf;

use super::calls::Abi;

/// The launcher of an MPI job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaunchedBy {
    /// Its name in messages.
    pub(super) name: &'static str,
    /// The binary interface of its library.
    pub(super) abi: Option<Abi>,
    /// Whether no other library can connect to it.
    pub(super) only: bool,
    /// The variable with the number of ranks, and its value.
    pub(super) world: Option<(&'static str, usize)>,
}

impl LaunchedBy {
    /// Reads the variables of Open MPI, of Hydra (MPICH, Intel MPI) and of `srun`, the innermost launcher first.
    pub(super) fn find(lookup: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let number = |name: &'static str| {
            let value = lookup(name)?.to_string_lossy().trim().parse().ok()?;
            Some((name, value))
        };
        let is_set = |name: &str| lookup(name).is_some();
        let steps = || number("SLURM_STEP_NUM_TASKS");
        if is_set("OMPI_COMM_WORLD_SIZE") {
            let world = number("OMPI_COMM_WORLD_SIZE");
            return Some(Self { name: "Open MPI's mpirun", abi: Some(Abi::OpenMpi), only: true, world });
        }
        if is_set("PMI_SIZE") {
            // srun sets the variables of PMI too, and some builds of Open MPI speak it.
            let hydra = is_set("MPI_LOCALNRANKS");
            let name = if hydra { "mpirun of MPICH" } else { "a launcher with PMI" };
            return Some(Self { name, abi: Some(Abi::Mpich), only: hydra, world: number("PMI_SIZE") });
        }
        if is_set("PMIX_RANK") {
            return Some(Self {
                name: "a launcher with PMIx",
                abi: Some(Abi::OpenMpi),
                only: false,
                world: steps(),
            });
        }
        steps().map(|world| Self { name: "srun", abi: None, only: false, world: Some(world) })
    }
}

/// How many ancestors to inspect: ranks may be started through scripts, but not many.
const MOST: usize = 8;

/// Library folders beside the programs that started this process, the nearest first: `PREFIX/lib` of `PREFIX/bin/orted`.
/// Installations outside of the loader's search, such as conda's, are found by them.
pub(super) fn folders_of_ancestors() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut pid = std::os::unix::process::parent_id();
    for _ in 0..MOST {
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
        if let Some(prefix) = program.as_deref().and_then(|program| program.parent()?.parent()) {
            for folder in ["lib", "lib64"] {
                let folder = prefix.join(folder);
                if !folders.contains(&folder) {
                    folders.push(folder);
                }
            }
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
        match parent {
            Some(parent) if parent != 0 => pid = parent,
            _ => break,
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Option<LaunchedBy> {
        LaunchedBy::find(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn the_launcher_s_variables_name_its_library_and_the_number_of_ranks() {
        let open = found(&[("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "0")]).unwrap();
        assert_eq!(
            (open.abi, open.only, open.world),
            (Some(Abi::OpenMpi), true, Some(("OMPI_COMM_WORLD_SIZE", 4)))
        );
        let hydra = found(&[("PMI_SIZE", "3"), ("PMI_RANK", "0"), ("MPI_LOCALNRANKS", "3")]).unwrap();
        assert_eq!((hydra.abi, hydra.only, hydra.world), (Some(Abi::Mpich), true, Some(("PMI_SIZE", 3))));
        let slurm = [("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")];
        let under_srun = |variable| found(&[&slurm[..], &[variable]].concat()).unwrap();
        let found_by_pmi = under_srun(("PMI_SIZE", "4"));
        assert_eq!((found_by_pmi.abi, found_by_pmi.only), (Some(Abi::Mpich), false));
        let other = under_srun(("PMIX_RANK", "1"));
        assert_eq!((other.abi, other.world), (Some(Abi::OpenMpi), Some(("SLURM_STEP_NUM_TASKS", 4))));
        assert_eq!(found(&slurm).unwrap().abi, None);
        assert_eq!(found(&[("RANK", "0"), ("WORLD_SIZE", "2")]), None);
    }

    #[test]
    fn folders_beside_the_programs_above_are_searched() {
        // The test's runner is cargo, or a program beside it.
        let folders = folders_of_ancestors();
        assert!(folders.iter().all(|folder| folder.is_absolute()), "{folders:?}");
        assert!(folders.iter().any(|folder| folder.ends_with("lib")), "{folders:?}");
    }
}
