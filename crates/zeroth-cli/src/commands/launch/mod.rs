//! `launch`: starts `train` on several hosts.
//!
//! With ssh, one process of this command a host starts the ranks there (`host.rs`), each as torchrun would; this process starts
//! those of all hosts, passes signals on and starts the job again (`remote.rs`). With an MPI library, its `mpirun` starts the
//! ranks (`mpi.rs`).

mod host;
mod job;
mod mpi;
mod remote;
mod signals;

use std::net::{IpAddr, ToSocketAddrs as _};
use std::os::unix::process::CommandExt as _;

use zeroth::base::host_name;
use zeroth::comm::launch::{Hostfile, MpiLauncher};
use zeroth::machine::{DeviceKind, probe};

use self::job::{HostLayout, JobLayout, JobOpening};
use crate::command_line::{self, TrainCommand};
use crate::exit::Exit;
use crate::launch_args::{LaunchArgs, LauncherArg};
use crate::{flag_rules, output};

pub(super) fn run(arguments: &LaunchArgs) -> anyhow::Result<Exit> {
    if arguments.token_from_stdin {
        return host::run_opened(arguments);
    }
    let command = match command_line::read_train(&flag_rules::command(), &arguments.command) {
        Ok(command) => command,
        Err(failure) => return Ok(failure.print()),
    };
    let library = match arguments.launcher {
        LauncherArg::Ssh => None,
        LauncherArg::Openmpi => Some(MpiLauncher::OpenMpi),
        LauncherArg::Mpich => Some(MpiLauncher::Mpich),
    };
    let hosts = hosts(arguments)?;
    if let Some(library) = library {
        let Some(hosts) = hosts.filter(|_| !arguments.no_ssh) else {
            anyhow::bail!("--no-ssh and --launcher: mpirun starts the ranks of all hosts by itself");
        };
        return mpi::run(arguments, library, &hosts, &command);
    }
    let layout = layout(arguments, hosts.as_ref())?;
    if layout.hosts.len() > 1 {
        refuse_cpu_ranks(&command)?;
    }
    if arguments.no_ssh {
        host::run(arguments, layout, &command)
    } else if let [host] = &layout.hosts[..]
        && is_this_host(&host.name)
    {
        Err(train_here(arguments, host, &command))
    } else {
        remote::run(arguments, layout, &command)
    }
}

/// Whether a name is that of this host for sure.
fn is_this_host(name: &str) -> bool {
    name == host_name() || resolve(name).iter().any(IpAddr::is_loopback)
}

/// A single host needs no ssh: this process becomes `train`, whose launcher starts the ranks.
fn train_here(arguments: &LaunchArgs, host: &HostLayout, command: &TrainCommand) -> anyhow::Error {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return anyhow::Error::from(error).context("cannot find this program's file"),
    };
    let mut train = std::process::Command::new(program);
    train.args(&command.arguments).args(["--ranks", &host.ranks.to_string()]);
    if arguments.max_restarts > 0 {
        train.args(["--max-restarts", &arguments.max_restarts.to_string()]);
    }
    if let Some(gpus) = host.visible_gpus() {
        train.env("CUDA_VISIBLE_DEVICES", gpus);
    }
    // Returns if it fails only.
    anyhow::Error::from(train.exec()).context("cannot start `train`")
}

/// The hosts of the hostfile that are chosen.
fn hosts(arguments: &LaunchArgs) -> anyhow::Result<Option<Hostfile>> {
    let Some(file) = &arguments.hostfile else { return Ok(None) };
    if arguments.nnodes.is_some() {
        anyhow::bail!("--hostfile and --nnodes: the hostfile says how many hosts there are");
    }
    let hosts = Hostfile::read(file)?.choose(arguments.include.as_deref(), arguments.exclude.as_deref())?;
    hosts.check_addresses(resolve)?;
    Ok(Some(hosts))
}

/// The hosts of a job and their ranks.
fn layout(arguments: &LaunchArgs, hosts: Option<&Hostfile>) -> anyhow::Result<JobLayout> {
    if let Some(hosts) = hosts {
        return Ok(JobLayout::of_hostfile(hosts, arguments));
    }
    let ranks = arguments.nproc_per_node.unwrap_or_else(|| {
        let machine = probe();
        let device = if zeroth::job::gpus(&machine) > 0 { DeviceKind::Cuda } else { DeviceKind::Cpu };
        zeroth::job::usual_ranks(device, &machine)
    });
    let Some(address) = &arguments.master_addr else {
        anyhow::bail!(
            "--nnodes needs --master-addr: the name or address of the host with --node-rank 0, the same on all"
        );
    };
    Ok(JobLayout::of_equal_hosts(arguments.nnodes.unwrap_or(1), ranks, address, arguments.master_port))
}

/// The addresses of a name, as this host sees it.
fn resolve(name: &str) -> Vec<IpAddr> {
    (name, 0).to_socket_addrs().map(|all| all.map(|found| found.ip()).collect()).unwrap_or_default()
}

/// Between hosts, bytes of CPU ranks travel by MPI alone.
fn refuse_cpu_ranks(command: &TrainCommand) -> anyhow::Result<()> {
    if command.is_cpu {
        anyhow::bail!(
            "CPU ranks on several hosts need an MPI launcher: give --launcher openmpi or --launcher mpich, or start \
             `zeroth train` with mpirun or srun"
        );
    }
    Ok(())
}

/// What a host of a job is told that must be on no command line.
fn opening(layout: &JobLayout, restarts: u64) -> anyhow::Result<JobOpening> {
    let token = job::new_token()?;
    Ok(JobOpening {
        token: Some(token),
        variables: job::variables_to_pass_on(),
        layout: layout.clone(),
        restarts,
    })
}

/// Prints what ended a job, once.
fn report(lines: impl IntoIterator<Item = String>) {
    for line in lines {
        output::error(&line);
    }
}
