//! Environments as launchers set them. Those of Open MPI 4.1.4 and MPICH 4.0.2 are as real ranks have them, torchrun's
//! as `local_elastic_agent.py` sets them; those of SLURM follow srun(1).

use super::*;

fn find(variables: &[(&str, &str)]) -> Result<Option<LaunchedRank>, LauncherError> {
    let lookup =
        |name: &str| variables.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value.into());
    LaunchedRank::find(lookup, || 4242)
}

const TORCHRUN: [(&str, &str); 8] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "3"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "3"),
    ("MASTER_ADDR", "localhost"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
];
const OPEN_MPI: [(&str, &str); 6] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "825688065"),
    ("OMPI_MCA_ess_base_jobid", "825688065"),
];
const MPICH: [(&str, &str); 5] = [
    ("PMI_RANK", "0"),
    ("PMI_SIZE", "2"),
    ("PMI_FD", "6"),
    ("MPI_LOCALRANKID", "0"),
    ("MPI_LOCALNRANKS", "2"),
];
const SLURM: [(&str, &str); 6] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_LOCALID", "3"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_NNODES", "1"),
];

fn place(launcher: ExternalLauncher, rank: usize, world: usize, job: &str) -> LaunchedRank {
    LaunchedRank { rank, world, local_rank: rank, local_world: world, job: job.to_owned(), launcher }
}

#[test]
fn each_launcher_is_told_from_its_variables() {
    use ExternalLauncher::{Mpich, OpenMpi, Slurm, Torchrun};
    for (variables, expected) in [
        (&TORCHRUN[..], Some(place(Torchrun, 1, 3, "torchrun-none-localhost-29500-0"))),
        (&OPEN_MPI[..], Some(place(OpenMpi, 1, 2, "openmpi-825688065"))),
        (&MPICH[..], Some(place(Mpich, 0, 2, "mpich-started-by-4242"))),
        (&SLURM[..], Some(place(Slurm, 3, 4, "slurm-77-0"))),
        (&[], None),
    ] {
        assert_eq!(find(variables), Ok(expected), "{variables:?}");
    }
}

#[test]
fn deepspeeds_launcher_counts_as_torchrun() {
    let variables = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];
    assert_eq!(
        find(&variables),
        Ok(Some(place(ExternalLauncher::Torchrun, 0, 2, "torchrun-127.0.0.1-29500")))
    );
}

#[test]
fn of_nested_launchers_the_innermost_counts() {
    // torchrun and mpirun inside one task of srun, and mpiexec whose proxy srun started.
    let one_task =
        [&SLURM[..], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_LOCALID", "0")]].concat();
    for (inner, launcher) in [
        (&TORCHRUN[..], ExternalLauncher::Torchrun),
        (&OPEN_MPI[..], ExternalLauncher::OpenMpi),
        (&MPICH[..], ExternalLauncher::Mpich),
    ] {
        let found = find(&[&one_task[..], inner].concat()).unwrap().unwrap();
        assert_eq!(found.launcher, launcher);
    }
    // srun --mpi=pmi2 sets PMI_RANK besides its own, and no local numbers.
    let pmi = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("PMI_JOBID", "77.0")];
    assert_eq!(find(&[&SLURM[..], &pmi].concat()).unwrap().unwrap().launcher, ExternalLauncher::Slurm);
}

#[test]
fn batch_scripts_shells_and_lone_ranks_are_no_ranks_of_a_foreign_job() {
    let batch: Vec<_> = SLURM.iter().copied().filter(|(name, _)| *name != "SLURM_STEP_ID").collect();
    assert_eq!(find(&batch), Ok(None));
    for step in ["4294967291", "4294967290"] {
        assert_eq!(find(&[&SLURM[..], &[("SLURM_STEP_ID", step)]].concat()), Ok(None), "step {step}");
    }
    assert_eq!(find(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
    assert_eq!(find(&[("WORLD_SIZE", "8")]), Ok(None));
    let one = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
    assert_eq!(find(&[&OPEN_MPI[..], &one].concat()), Ok(None));
    assert_eq!(find(&[&SLURM[..], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]].concat()), Ok(None));
}

#[test]
fn many_machines_are_refused_as_not_yet() {
    for (variables, more) in [
        (&TORCHRUN[..], ("WORLD_SIZE", "6")),
        (&OPEN_MPI[..], ("OMPI_COMM_WORLD_SIZE", "4")),
        (&MPICH[..], ("PMI_SIZE", "4")),
        (&SLURM[..], ("SLURM_NNODES", "2")),
        (&SLURM[..], ("SLURM_STEP_NUM_NODES", "2")),
    ] {
        let error = find(&[variables, &[more]].concat()).unwrap_err();
        assert!(matches!(error, LauncherError::ManyMachines { .. }), "{more:?}: {error}");
        assert!(error.to_string().starts_with("not yet: many machines"), "{error}");
    }
    // A step on one machine of a larger allocation is one machine; PMI without local numbers may be any number.
    let step = [
        ("SLURM_NNODES", "2"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_STEP_NUM_NODES", "1"),
        ("SLURM_STEP_NUM_TASKS", "4"),
    ];
    assert_eq!(
        find(&[&SLURM[..], &step].concat()),
        Ok(Some(place(ExternalLauncher::Slurm, 3, 4, "slurm-77-0")))
    );
    let error = find(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).unwrap_err();
    assert_eq!(
        error,
        LauncherError::ManyMachines { launcher: ExternalLauncher::Mpich, world: 2, here: None }
    );
}

#[test]
fn variables_that_are_missing_or_wrong_are_named_with_their_values() {
    for (variables, wrong, said) in [
        (&TORCHRUN[..], ("RANK", "one"), "RANK of torchrun is \"one\", which is not a number"),
        (&TORCHRUN[..], ("WORLD_SIZE", ""), "WORLD_SIZE of torchrun is \"\""),
        (&TORCHRUN[..], ("RANK", "3"), "RANK of torchrun is 3, but WORLD_SIZE is 3"),
        (&TORCHRUN[..], ("LOCAL_RANK", "5"), "LOCAL_RANK of torchrun is 5, but LOCAL_WORLD_SIZE is 3"),
        (&TORCHRUN[..], ("LOCAL_WORLD_SIZE", "4"), "LOCAL_WORLD_SIZE of torchrun is 4, but WORLD_SIZE is 3"),
        (&OPEN_MPI[..], ("OMPI_COMM_WORLD_RANK", "-1"), "OMPI_COMM_WORLD_RANK of Open MPI is \"-1\""),
        (&SLURM[..], ("SLURM_STEP_ID", "x"), "SLURM_STEP_ID of SLURM is \"x\""),
        (&MPICH[..], ("PMI_SIZE", "0"), "PMI_RANK of MPICH (PMI) is 0, but PMI_SIZE is 0"),
    ] {
        let error = find(&[variables, &[wrong]].concat()).unwrap_err().to_string();
        assert!(error.contains(said), "{wrong:?}: {error}");
    }
    for (variables, gone) in [
        (&TORCHRUN[..], "LOCAL_RANK"),
        (&TORCHRUN[..], "LOCAL_WORLD_SIZE"),
        (&TORCHRUN[..], "RANK"),
        (&OPEN_MPI[..], "OMPI_COMM_WORLD_SIZE"),
        (&SLURM[..], "SLURM_JOB_ID"),
        (&SLURM[..], "SLURM_NNODES"),
    ] {
        let left: Vec<_> = variables.iter().copied().filter(|(name, _)| *name != gone).collect();
        let error = find(&left).unwrap_err();
        assert!(
            matches!(&error, LauncherError::Missing { name, .. } if name.contains(gone)),
            "{gone}: {error}"
        );
    }
}
