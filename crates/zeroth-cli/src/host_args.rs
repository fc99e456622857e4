//! The flags of `plan` and of `train --dry-run` that say on how many hosts ranks are.

use clap::Args;
use zeroth::base::counted;

use crate::value_args::whole;

/// Hosts to plan for.
#[derive(Debug, Default, Args)]
pub(crate) struct HostArgs {
    /// Number of hosts to plan for, with as many ranks each [default: as --ranks and --ranks-per-host have it]
    #[arg(long, value_name = "N", value_parser = whole(1..=1_000_000))]
    pub(crate) hosts: Option<u64>,
    /// Ranks per host [default: all, or those of --hosts]
    #[arg(long, value_name = "N", value_parser = whole(1..=1_000_000))]
    pub(crate) ranks_per_host: Option<u64>,
}

impl HostArgs {
    /// Whether one of them is typed.
    pub(crate) fn is_typed(&self) -> bool {
        self.hosts.is_some() || self.ranks_per_host.is_some()
    }

    /// All ranks and those of a host, as far as they are given; `ranks` is --ranks.
    pub(crate) fn ranks(&self, ranks: Option<u64>) -> anyhow::Result<(Option<u64>, Option<u64>)> {
        let Some(hosts) = self.hosts else { return Ok((ranks, self.ranks_per_host)) };
        match (ranks, self.ranks_per_host) {
            (None, None) => {
                anyhow::bail!("--hosts needs --ranks-per-host, or --ranks for those of all hosts")
            }
            (None, Some(each)) => Ok((Some(hosts.saturating_mul(each)), Some(each))),
            (Some(all), None) if !all.is_multiple_of(hosts) => anyhow::bail!(
                "--hosts is {hosts}, and {} cannot be divided by it: give --ranks-per-host, where the last host may have fewer",
                counted(all, "rank")
            ),
            (Some(all), None) => Ok((Some(all), Some(all / hosts))),
            (Some(all), Some(each)) if all.div_ceil(each) != hosts => anyhow::bail!(
                "--ranks is {all} and --ranks-per-host {each}, which is {} and not {hosts} as --hosts says: leave one of them out",
                counted(all.div_ceil(each), "host")
            ),
            (Some(all), Some(each)) => Ok((Some(all), Some(each))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ranks_agree_or_are_refused() {
        let of = |hosts, ranks_per_host, ranks| HostArgs { hosts, ranks_per_host }.ranks(ranks);
        assert_eq!(of(None, Some(8), Some(12)).unwrap(), (Some(12), Some(8)));
        assert_eq!(of(Some(16), Some(8), None).unwrap(), (Some(128), Some(8)));
        assert_eq!(of(Some(16), None, Some(128)).unwrap(), (Some(128), Some(8)));
        assert_eq!(of(Some(2), Some(8), Some(12)).unwrap(), (Some(12), Some(8)));
        for (hosts, each, ranks, says) in [
            (3, Some(8), Some(16), "2 hosts and not 3"),
            (3, None, Some(16), "16 ranks cannot be divided by it"),
            (3, None, None, "--hosts needs --ranks-per-host"),
        ] {
            let refused = of(Some(hosts), each, ranks).unwrap_err().to_string();
            assert!(refused.contains(says), "{refused}");
        }
    }
}
