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
    LaunchedRank {
        place: Place::on_one_host(rank, world),
        job: job.to_owned(),
        launcher,
        rank0: None,
        hosts: None,
        restarts: 0,
    }
}

#[test]
fn each_launcher_is_told_from_its_variables() {
    use ExternalLauncher::{Mpich, OpenMpi, Slurm, Torchrun};
    for (variables, expected) in [
        (
            &TORCHRUN[..],
            Some(LaunchedRank {
                rank0: Some(Rank0Address { host: "localhost".to_owned(), port: PortChoice::After(29500) }),
                ..place(Torchrun, 1, 3, "torchrun-none-localhost-29500-0")
            }),
        ),
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
    let found = find(&variables).unwrap().unwrap();
    assert_eq!((found.place, found.launcher), (Place::on_one_host(0, 2), ExternalLauncher::Torchrun));
    assert_eq!(found.job, "torchrun-127.0.0.1-29500");
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

/// A place on several hosts.
fn spread(rank: usize, world: usize, local_rank: usize, local_world: usize, host: usize) -> Place {
    Place { rank, world, local_rank, local_world, host }
}

#[test]
fn ranks_of_several_hosts_know_their_place() {
    let address =
        |host: &str, port| Some(Rank0Address { host: host.to_owned(), port: PortChoice::After(port) });
    for (variables, more, expected, rank0) in [
        (
            &TORCHRUN[..],
            &[("WORLD_SIZE", "9"), ("RANK", "4"), ("GROUP_RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "2")][..],
            spread(4, 9, 1, 3, 1),
            address("localhost", 29500),
        ),
        (
            &OPEN_MPI[..],
            &[("OMPI_COMM_WORLD_SIZE", "6"), ("OMPI_COMM_WORLD_RANK", "5")],
            spread(5, 6, 1, 2, 2),
            None,
        ),
        (&MPICH[..], &[("PMI_SIZE", "4"), ("PMI_RANK", "2")], spread(2, 4, 0, 2, 1), None),
    ] {
        let found = find(&[variables, more].concat()).unwrap().unwrap();
        assert_eq!((found.place, &found.rank0), (expected, &rank0), "{found:?}");
        assert_eq!(found.restarts, if found.launcher == ExternalLauncher::Torchrun { 2 } else { 0 });
    }
    // Hosts with other numbers of ranks: only the first host is 0.
    let uneven =
        [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];
    let found =
        find(&[&OPEN_MPI[..], &uneven, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "3")]].concat()).unwrap().unwrap();
    assert_eq!(found.place, spread(1, 4, 0, 3, 1));
}

const NODES: [(&str, &str); 5] = [
    ("SLURM_NNODES", "3"),
    ("SLURM_NTASKS", "5"),
    ("SLURM_TASKS_PER_NODE", "2(x2),1"),
    ("SLURM_NODELIST", "n[08-09],gpu01"),
    ("SLURM_NODEID", "1"),
];

#[test]
fn slurm_tells_of_all_hosts() {
    let second = [&SLURM[..], &NODES, &[("SLURM_LOCALID", "1")]].concat();
    let found = find(&second).unwrap().unwrap();
    assert_eq!(found.place, spread(3, 5, 1, 2, 1));
    assert_eq!(found.hosts.unwrap().to_string(), "n08 (ranks 0 to 1), n09 (ranks 2 to 3), gpu01 (rank 4)");
    let Some(Rank0Address { host, port: PortChoice::After(port) }) = found.rank0 else {
        panic!("no address")
    };
    assert_eq!(host, "n08");
    assert!((20_000..30_000).contains(&port), "{port}");
    let third =
        [("SLURM_LOCALID", "0"), ("SLURM_PROCID", "4"), ("SLURM_NODEID", "2"), ("MASTER_ADDR", "10.0.0.1")];
    let found = find(&[&second[..], &third, &[("MASTER_PORT", "7")]].concat()).unwrap().unwrap();
    assert_eq!(found.place, spread(4, 5, 0, 1, 2));
    assert_eq!(found.rank0, Some(Rank0Address { host: "10.0.0.1".to_owned(), port: PortChoice::After(7) }));
    // A step on one node of a larger allocation is on one host.
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
}

#[test]
fn ranks_that_are_not_numbered_host_by_host_are_refused_by_name() {
    // mpirun --map-by node: ranks 0 and 2 on the first host. srun --distribution=cyclic.
    let by_node =
        [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];
    let cyclic = [&NODES[..], &[("SLURM_PROCID", "1"), ("SLURM_LOCALID", "0")]].concat();
    for (variables, more) in [(&OPEN_MPI[..], &by_node[..]), (&SLURM[..], &cyclic)] {
        let error = find(&[variables, more].concat()).unwrap_err().to_string();
        assert!(
            error.contains("runs ranks on several hosts") && error.contains("--distribution=block"),
            "{error}"
        );
    }
    for (variables, more, said) in [
        (&SLURM[..], ("SLURM_TASKS_PER_NODE", "2,2"), "SLURM_STEP_TASKS_PER_NODE of SLURM is 2, but"),
        (&SLURM[..], ("SLURM_TASKS_PER_NODE", "2(y2),1"), "is not tasks per node"),
        (&SLURM[..], ("SLURM_NODELIST", "n[1"), "is no list of SLURM's nodes: a bracket is not closed"),
        (&SLURM[..], ("SLURM_NODEID", "3"), "SLURM_NODEID of SLURM is 3, but"),
        (&SLURM[..], ("MASTER_PORT", "0"), "MASTER_PORT of SLURM is \"0\", which is not a port"),
    ] {
        let error = find(&[variables, &NODES[..], &[more]].concat()).unwrap_err().to_string();
        assert!(error.contains(said), "{more:?}: {error}");
    }
    let many = [("WORLD_SIZE", "1025"), ("LOCAL_WORLD_SIZE", "1025")];
    let error = find(&[&TORCHRUN[..], &many].concat()).unwrap_err().to_string();
    assert!(error.contains("1025 ranks on host of this rank: a host has 1 to 1024"), "{error}");
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
        (&MPICH[..], "MPI_LOCALRANKID"),
    ] {
        let left: Vec<_> = variables.iter().copied().filter(|(name, _)| *name != gone).collect();
        let error = find(&left).unwrap_err();
        assert!(
            matches!(&error, LauncherError::Missing { name, .. } if name.contains(gone)),
            "{gone}: {error}"
        );
    }
}
