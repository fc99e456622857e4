//! The command line of `mpirun` for the hosts of a hostfile. Ranks are numbered host by host and bound to no CPUs.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::HostSlots;

/// A library of MPI whose `mpirun` starts ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpiLauncher {
    /// Open MPI.
    OpenMpi,
    /// MPICH, or another library with its Hydra.
    Mpich,
}

/// No `mpirun` of a library can be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum MpiCommandError {
    #[error(
        "no mpirun of {} was found: tried {}; install it, or put its folder first in PATH",
        library.name(), tried.join(", ")
    )]
    NotFound { library: MpiLauncher, tried: Vec<String> },
    #[error("cannot start {}: {source}", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error(
        "{host} is limited to GPUs {slots:?}, which {} cannot tell its ranks: leave its last slots out instead, or use \
         --launcher ssh",
        library.name()
    )]
    ChosenSlots { library: MpiLauncher, host: String, slots: Vec<u32> },
}

impl MpiLauncher {
    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        }
    }

    /// Its `mpirun`, which several libraries may have under one name. Distributions give each a name of its own.
    pub fn find(self) -> Result<PathBuf, MpiCommandError> {
        let names = match self {
            Self::OpenMpi => ["mpirun.openmpi", "mpirun", "mpiexec"],
            Self::Mpich => ["mpirun.mpich", "mpiexec.hydra", "mpirun"],
        };
        let mut tried = Vec::new();
        for name in names {
            match Command::new(name).arg("--version").stdin(Stdio::null()).output() {
                Ok(said) if self.is_version(&String::from_utf8_lossy(&said.stdout)) => return Ok(name.into()),
                Ok(said) => {
                    let said = String::from_utf8_lossy(&said.stdout);
                    let first = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
                    tried.push(format!("{name} (it says {:?})", first.trim().trim_end_matches(':')));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    tried.push(format!("{name} (missing)"));
                }
                Err(source) => return Err(MpiCommandError::Start { program: name.into(), source }),
            }
        }
        Err(MpiCommandError::NotFound { library: self, tried })
    }

    /// Whether an `mpirun --version` is that of this library.
    fn is_version(self, said: &str) -> bool {
        match self {
            Self::OpenMpi => said.contains("Open MPI") || said.contains("OpenRTE"),
            Self::Mpich => said.contains("HYDRA") || said.contains("Intel(R) MPI"),
        }
    }

    /// The text of its hostfile.
    pub fn hostfile(self, hosts: &[HostSlots]) -> Result<String, MpiCommandError> {
        let mut text = String::new();
        for host in hosts {
            if host.is_chosen() {
                let (host, slots) = (host.name.clone(), host.slots.clone());
                return Err(MpiCommandError::ChosenSlots { library: self, host, slots });
            }
            let ranks = host.slots.len();
            let _ = match self {
                Self::OpenMpi => writeln!(text, "{} slots={ranks}", host.name),
                // Its separator is a colon, so an address stands in brackets.
                Self::Mpich if host.name.contains(':') => writeln!(text, "[{}]:{ranks}", host.name),
                Self::Mpich => writeln!(text, "{}:{ranks}", host.name),
            };
        }
        Ok(text)
    }

    /// The variable by which it is told the port of ssh, where no argument does it.
    pub fn ssh_port_variable(self, port: u16) -> Option<(&'static str, String)> {
        (self == Self::Mpich).then(|| ("HYDRA_LAUNCHER_EXTRA_ARGS", format!("-p {port}")))
    }

    /// Arguments that start `ranks` ranks on the hosts of a [`Self::hostfile`], each with these variables of this process.
    pub fn arguments(
        self,
        hostfile: &Path,
        ranks: usize,
        ssh_port: Option<u16>,
        variables: &[&str],
        further: &[String],
    ) -> Vec<OsString> {
        let mut all: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| all.extend(words.iter().map(OsString::from));
        let ranks = ranks.to_string();
        match self {
            Self::OpenMpi => {
                add(&["--map-by", "slot", "--bind-to", "none", "-n", &ranks]);
                for variable in variables {
                    add(&["-x", variable]);
                }
                if let Some(port) = ssh_port {
                    add(&["-mca", "plm_rsh_args", &format!("-p {port}")]);
                }
            }
            Self::Mpich => {
                // Else a lost rank takes all others with it by SIGKILL, before they can say which one it was.
                // Variables of this process are passed on without being named.
                add(&["-disable-auto-cleanup", "-n", &ranks]);
            }
        }
        add(&further.iter().map(String::as_str).collect::<Vec<_>>());
        add(&[if self == Self::OpenMpi { "--hostfile" } else { "-f" }]);
        all.push(hostfile.into());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::Hostfile;
    use super::*;

    fn hosts(text: &str, include: Option<&str>) -> Vec<HostSlots> {
        let found = Hostfile::parse(Path::new("hosts.txt"), text.as_bytes()).unwrap();
        found.choose(include, None).unwrap().hosts().to_vec()
    }

    #[test]
    fn hostfiles_are_those_of_the_library() {
        let two = hosts("a slots=4\nfd00::2 slots=2", Some("a:0,1@fd00::2"));
        assert_eq!(MpiLauncher::OpenMpi.hostfile(&two).unwrap(), "a slots=2\nfd00::2 slots=2\n");
        assert_eq!(MpiLauncher::Mpich.hostfile(&two).unwrap(), "a:2\n[fd00::2]:2\n");
        let error = MpiLauncher::Mpich.hostfile(&hosts("a slots=4", Some("a:1,3"))).unwrap_err();
        assert!(
            error.to_string().starts_with("a is limited to GPUs [1, 3], which MPICH cannot tell"),
            "{error}"
        );
    }

    #[test]
    fn versions_tell_libraries_apart() {
        let open = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n";
        let hydra = "HYDRA build details:\n    Version:                                 4.0.2\n";
        for (library, own, other) in [(MpiLauncher::OpenMpi, open, hydra), (MpiLauncher::Mpich, hydra, open)]
        {
            assert!(library.is_version(own) && !library.is_version(other));
        }
    }

    #[test]
    fn options_stand_before_the_hostfile() {
        let words = |library: MpiLauncher| {
            let further = ["-x".to_owned()];
            let all = library.arguments(Path::new("/f"), 4, Some(2222), &["A", "B"], &further);
            all.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            words(MpiLauncher::OpenMpi),
            "--map-by slot --bind-to none -n 4 -x A -x B -mca plm_rsh_args -p 2222 -x --hostfile /f"
        );
        assert_eq!(words(MpiLauncher::Mpich), "-disable-auto-cleanup -n 4 -x -f /f");
        assert_eq!(
            MpiLauncher::Mpich.ssh_port_variable(2222),
            Some(("HYDRA_LAUNCHER_EXTRA_ARGS", "-p 2222".to_owned()))
        );
        assert_eq!(MpiLauncher::OpenMpi.ssh_port_variable(2222), None);
    }
}
