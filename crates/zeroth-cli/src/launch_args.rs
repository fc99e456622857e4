//! The flags of `launch`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::value_args::{whole, whole_as};

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth launch --hostfile hosts.txt -- train --model Qwen/Qwen3-8B --data d.jsonl --output /nfs/run\n  \
                  zeroth launch --hostfile hosts.txt --include worker-1@worker-2:0,2 -- train …\n  \
                  zeroth launch --hostfile hosts.txt --launcher openmpi -- train --device cpu …\n  \
                  zeroth launch --no-ssh --nnodes 2 --node-rank 0 --master-addr worker-1 -- train …   (on worker-1)\n\n\
                  The hostfile is DeepSpeed's: a line `HOST slots=N` a host. Hosts need ssh without a password, and this binary, \
                  model, data and output under the same paths. Ctrl-C asks all ranks for a checkpoint and ends them; a second \
                  one ends them at once. CPU ranks on several hosts need --launcher openmpi or mpich."
)]
pub(crate) struct LaunchArgs {
    /// DeepSpeed's hostfile: a line `HOST slots=N` a host
    #[arg(short = 'H', long, value_name = "FILE", required_unless_present = "nnodes")]
    pub(crate) hostfile: Option<PathBuf>,
    /// Hosts and slots of the hostfile to use, as in worker-0@worker-1:0,2
    #[arg(short, long, value_name = "HOSTS", requires = "hostfile", allow_hyphen_values = true)]
    pub(crate) include: Option<String>,
    /// Hosts and slots of the hostfile to leave out
    #[arg(short, long, value_name = "HOSTS", requires = "hostfile", allow_hyphen_values = true)]
    pub(crate) exclude: Option<String>,
    /// What starts ranks on the hosts
    #[arg(long, value_enum, value_name = "NAME", default_value_t = LauncherArg::Ssh)]
    pub(crate) launcher: LauncherArg,
    /// Further arguments of ssh or mpirun, separated by spaces
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) launcher_args: Option<String>,
    /// Port of ssh on the hosts [default: ssh's]
    #[arg(long, value_name = "PORT", value_parser = port)]
    pub(crate) ssh_port: Option<u16>,
    /// Start the ranks of this host only: run the same command on every host
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) no_ssh: bool,
    /// With --no-ssh: the number of hosts [default: those of the hostfile]
    #[arg(long, alias = "num-nodes", value_name = "N", value_parser = whole_as::<usize>(1..=4096), requires = "no_ssh")]
    pub(crate) nnodes: Option<usize>,
    /// With --no-ssh: the number of this host, from 0
    #[arg(long, value_name = "R", value_parser = whole_as::<usize>(0..=4095), requires = "no_ssh")]
    pub(crate) node_rank: Option<usize>,
    /// With --nnodes: ranks on every host [default: the GPUs found here, else 1]
    #[arg(long, aliases = ["num-gpus", "ranks"], value_name = "N", value_parser = whole(1..=1024), requires = "nnodes")]
    pub(crate) nproc_per_node: Option<u64>,
    /// Name or address of the first host, by which all reach it [default: as the hostfile has it]
    #[arg(long, value_name = "HOST")]
    pub(crate) master_addr: Option<String>,
    /// Port on the first host; the first free one of 16 from here is used
    #[arg(long, value_name = "PORT", value_parser = port, default_value = "29500")]
    pub(crate) master_port: u16,
    /// Start again from the newest checkpoint, on the hosts that still answer, if a rank or a host dies
    #[arg(long, value_name = "N", value_parser = whole(0..=1_000_000), default_value_t = 0)]
    pub(crate) max_restarts: u64,
    /// Read token, variables and hosts from standard input, and end the ranks at its end: set by `launch` over ssh
    #[arg(long, hide = true, requires = "no_ssh")]
    pub(crate) token_from_stdin: bool,
    /// `train` and its flags
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// What starts ranks on several hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LauncherArg {
    /// ssh: a launcher on every host
    Ssh,
    /// mpirun of Open MPI
    #[value(alias = "open-mpi")]
    Openmpi,
    /// mpirun of MPICH
    Mpich,
}

fn port(text: &str) -> Result<u16, String> {
    text.parse().ok().filter(|port| *port > 0).ok_or_else(|| "a port is a number from 1 to 65535".to_owned())
}
