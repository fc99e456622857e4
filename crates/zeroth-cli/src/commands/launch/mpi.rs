//! Starts the ranks of all hosts by the `mpirun` of an MPI library.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::mpsc;

use anyhow::Context as _;
use zeroth::comm::launch::{ExitReason, Hostfile, MpiLauncher, MpiRun, sealed};

use super::job::variables_to_pass_on;
use super::report;
use super::signals::PassedSignals;
use crate::command_line::TrainCommand;
use crate::exit::Exit;
use crate::launch_args::LaunchArgs;
use crate::output;
use crate::signals::STOP_SIGNAL;

pub(super) fn run(
    arguments: &LaunchArgs,
    library: MpiLauncher,
    hosts: &Hostfile,
    command: &TrainCommand,
) -> anyhow::Result<Exit> {
    let program = library.find()?;
    let hostfile = library.hostfile(hosts.hosts())?;
    // mpirun opens it by this process, which lives as long.
    let hostfile = sealed(|file| file.write_all(hostfile.as_bytes())).context("cannot make a hostfile")?;
    let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), hostfile.as_raw_fd()));
    let mut variables: Vec<(String, String)> = variables_to_pass_on().into_iter().collect();
    variables.push((STOP_SIGNAL.to_owned(), library.stop_signal().to_owned()));
    let names: Vec<&str> = variables.iter().map(|(name, _)| name.as_str()).collect();
    let further = arguments.launcher_args.iter().flat_map(|text| text.split_whitespace());
    let further: Vec<String> = further.map(str::to_owned).collect();
    let mut words = library.arguments(&path, hosts.world(), arguments.ssh_port, &names, &further);
    variables.extend(
        arguments
            .ssh_port
            .and_then(|port| library.ssh_port_variable(port))
            .map(|(name, port)| (name.to_owned(), port)),
    );
    words.push(std::env::current_exe().context("cannot find this program's file")?.into());
    words.extend(command.arguments.iter().map(OsString::from));
    let (sender, commands) = mpsc::channel();
    let signals = PassedSignals::pass_on(sender)?;
    let mut mpirun = MpiRun { library, program, arguments: words, variables };
    let mut restarts = 0;
    loop {
        let how = mpirun.run(&commands)?;
        let exit = match how {
            ExitReason::Exited { code } => Exit::of_process(code),
            _ => None,
        };
        match (exit, signals.stop()) {
            (Some(Exit::Done), _) => return Ok(Exit::Done),
            (_, Some(stop)) => return Ok(Exit::after(stop)),
            (Some(exit), None) => return Ok(exit),
            (None, None) => {}
        }
        // The library's mpirun ends with the signal of the rank that was killed.
        report([format!("mpirun of {}: {how}", library.name())]);
        if restarts >= arguments.max_restarts {
            return Ok(Exit::Failed);
        }
        restarts += 1;
        if !command.resumes() && restarts == 1 {
            mpirun.arguments.extend(["--resume", "auto"].map(OsString::from));
        }
        output::note(&format!("restarting ({restarts} of {})", arguments.max_restarts));
    }
}
