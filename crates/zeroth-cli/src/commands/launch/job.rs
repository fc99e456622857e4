//! A job over several hosts: who has which ranks, and what each rank is told.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use zeroth::comm::launch::Hostfile;

use crate::launch_args::LaunchArgs;

/// The variable with the secret by which the hosts of a job know each other.
pub(super) const JOB_TOKEN: &str = "ZEROTH_JOB_TOKEN";
/// Beginnings of the names of variables that all hosts get as they are here, as DeepSpeed's launcher does it.
const PASSED_ON: [&str; 5] = ["NCCL_", "UCX_", "ZEROTH_", "HF_", "OMP_"];

/// The hosts of a job, in the order of their ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JobLayout {
    pub(super) hosts: Vec<HostLayout>,
    /// Name and port of the first.
    pub(super) master: (String, u16),
}

/// A host and its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostLayout {
    pub(super) name: String,
    pub(super) ranks: usize,
    /// The GPUs of its ranks, where those are not its first ones.
    pub(super) gpus: Option<Vec<u32>>,
}

/// The first line of the standard input of a host's launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JobOpening {
    pub(super) token: Option<String>,
    pub(super) variables: BTreeMap<String, String>,
    pub(super) layout: JobLayout,
    /// How often the job was started again.
    pub(super) restarts: u64,
}

impl JobLayout {
    /// The hosts of a hostfile.
    pub(super) fn of_hostfile(file: &Hostfile, arguments: &LaunchArgs) -> Self {
        let hosts: Vec<HostLayout> = file
            .hosts()
            .iter()
            .map(|host| HostLayout {
                name: host.name.clone(),
                ranks: host.slots.len(),
                gpus: host.is_chosen().then(|| host.slots.clone()),
            })
            .collect();
        let address = arguments.master_addr.clone().unwrap_or_else(|| hosts[0].name.clone());
        Self { hosts, master: (address, arguments.master_port) }
    }

    /// Hosts with equal numbers of ranks, whose names only they know.
    pub(super) fn of_equal_hosts(hosts: usize, ranks: u64, address: &str, port: u16) -> Self {
        let host =
            |number: usize| HostLayout { name: format!("node {number}"), ranks: ranks as usize, gpus: None };
        Self { hosts: (0..hosts).map(host).collect(), master: (address.to_owned(), port) }
    }

    /// All ranks.
    pub(super) fn world(&self) -> usize {
        self.hosts.iter().map(|host| host.ranks).sum()
    }

    /// The first rank of a host.
    pub(super) fn first(&self, host: usize) -> usize {
        self.hosts[..host].iter().map(|host| host.ranks).sum()
    }
}

impl HostLayout {
    /// CUDA_VISIBLE_DEVICES of its ranks, where those are not its first GPUs.
    pub(super) fn visible_gpus(&self) -> Option<String> {
        let gpus = self.gpus.as_ref()?;
        Some(gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
    }
}

impl JobOpening {
    /// The variables of every rank of a host, in order: those that torchrun sets.
    pub(super) fn rank_variables(&self, host: usize) -> Vec<Vec<(String, String)>> {
        let Self { token, variables, layout, restarts } = self;
        let ranks = layout.hosts[host].ranks;
        let (address, port) = &layout.master;
        let first = layout.first(host);
        let of_all = [
            ("WORLD_SIZE", Some(layout.world().to_string())),
            ("LOCAL_WORLD_SIZE", Some(ranks.to_string())),
            ("GROUP_RANK", Some(host.to_string())),
            ("MASTER_ADDR", Some(address.clone())),
            ("MASTER_PORT", Some(port.to_string())),
            // On one host, jobs of one address and port are told apart by their launcher.
            ("TORCHELASTIC_RUN_ID", Some(format!("zeroth-launch-{}", std::process::id()))),
            ("TORCHELASTIC_RESTART_COUNT", Some(restarts.to_string())),
            (JOB_TOKEN, token.clone()),
            ("CUDA_VISIBLE_DEVICES", layout.hosts[host].visible_gpus()),
        ];
        let of_all = of_all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let of_all: Vec<(String, String)> = variables.clone().into_iter().chain(of_all).collect();
        let of_rank = |local: usize| {
            let own = [("RANK", first + local), ("LOCAL_RANK", local)];
            let own = own.map(|(name, value)| (name.to_owned(), value.to_string()));
            of_all.iter().cloned().chain(own).collect()
        };
        (0..ranks).map(of_rank).collect()
    }
}

/// A new secret of a job, of 32 hexadecimal digits.
pub(super) fn new_token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    let mut random =
        File::open("/dev/urandom").context("cannot read random bytes for the token of the job")?;
    random.read_exact(&mut bytes).context("cannot read random bytes for the token of the job")?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// The variables of this process that other hosts get, too. Text only: they travel as JSON.
pub(super) fn variables_to_pass_on() -> BTreeMap<String, String> {
    let named = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let passed = named.filter(|(name, _)| is_passed_on(name));
    passed.filter_map(|(name, value)| Some((name, value.into_string().ok()?))).collect()
}

fn is_passed_on(name: &str) -> bool {
    name != JOB_TOKEN && PASSED_ON.iter().any(|begin| name.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> JobLayout {
        let host = |name: &str, ranks, gpus| HostLayout { name: name.to_owned(), ranks, gpus };
        let hosts = vec![host("a", 2, None), host("b", 1, Some(vec![3]))];
        JobLayout { hosts, master: ("a".to_owned(), 29_500) }
    }

    #[test]
    fn ranks_are_numbered_host_by_host() {
        let variables = [("NCCL_DEBUG".to_owned(), "INFO".to_owned())].into();
        let token = Some("secret".to_owned());
        let opening = JobOpening { token, variables, layout: layout(), restarts: 2 };
        let of = |host: usize, local: usize, name: &str| {
            let variables = opening.rank_variables(host);
            let found = variables[local].iter().rfind(|(known, _)| known == name);
            found.map(|(_, value)| value.clone())
        };
        let is = |host, local, name, value: &str| {
            assert_eq!(of(host, local, name).as_deref(), Some(value), "{name}");
        };
        for (host, local, rank) in [(0, 0, "0"), (0, 1, "1"), (1, 0, "2")] {
            is(host, local, "RANK", rank);
            is(host, local, "WORLD_SIZE", "3");
            is(host, local, "MASTER_ADDR", "a");
            is(host, local, "TORCHELASTIC_RESTART_COUNT", "2");
            is(host, local, "NCCL_DEBUG", "INFO");
            is(host, local, JOB_TOKEN, "secret");
        }
        is(1, 0, "LOCAL_RANK", "0");
        is(1, 0, "LOCAL_WORLD_SIZE", "1");
        is(1, 0, "GROUP_RANK", "1");
        is(1, 0, "CUDA_VISIBLE_DEVICES", "3");
        assert_eq!(of(0, 0, "CUDA_VISIBLE_DEVICES"), None);
        let text = serde_json::to_string(&opening).unwrap();
        assert_eq!(serde_json::from_str::<JobOpening>(&text).unwrap(), opening);
    }

    #[test]
    fn tokens_differ_and_are_not_passed_on_as_variables() {
        let [one, other] = [(); 2].map(|()| new_token().unwrap());
        assert!(one != other && one.len() == 32);
        let passed = ["NCCL_DEBUG", "ZEROTH_CPU", "HF_HOME"];
        assert!(passed.into_iter().all(is_passed_on));
        assert!(!["PATH", "HOME", JOB_TOKEN, "RANK"].into_iter().any(is_passed_on));
    }
}
