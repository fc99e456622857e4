//! The groups of ranks that a config asks for, against the ranks that there are.

use super::resolved::Resolved;

const HPZ: &str = "zero_optimization.zero_hpz_partition_size";
const SUM_GROUP: &str = "zeroth.sum_group";

/// Groups that the ranks of a run cannot form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{key} is {group}, and {ranks} rank{} cannot be groups of {group}: write a divisor of {ranks} ({}), or leave the key out",
    if *ranks == 1 { "" } else { "s" }, divisors(*ranks, *least)
)]
pub struct GroupError {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub group: u64,
    /// The ranks of the run.
    pub ranks: u64,
    /// The smallest group that the key allows.
    least: u64,
}

/// Numbers that divide the ranks, in words.
fn divisors(ranks: u64, from: u64) -> String {
    let small = (1..=ranks.isqrt()).filter(|group| ranks.is_multiple_of(*group));
    let mut all: Vec<u64> =
        small.flat_map(|group| [group, ranks / group]).filter(|group| *group >= from).collect();
    all.sort_unstable();
    all.dedup();
    let mut words: Vec<String> = all.iter().map(u64::to_string).collect();
    match words.pop() {
        None => format!("at least {from}, which one rank cannot be"),
        Some(last) if words.is_empty() => last,
        Some(last) => format!("{} or {last}", words.join(", ")),
    }
}

impl Resolved {
    /// The ranks of a group, as the config has them: those that parameters are sharded over, or that add up gradients
    /// first; `None` where it leaves them open.
    pub fn group(&self) -> Option<u64> {
        self.asked_group().map(|(_, group)| group)
    }

    /// Whether 16-bit parameters are sharded within groups only.
    pub const fn shards_in_groups(&self) -> bool {
        self.values.zero.stage >= 3 && self.values.zero.zero_hpz_partition_size > 1
    }

    fn asked_group(&self) -> Option<(&'static str, u64)> {
        if self.shards_in_groups() {
            return Some((HPZ, self.values.zero.zero_hpz_partition_size));
        }
        self.values.zeroth.sum_group.map(|group| (SUM_GROUP, group))
    }

    /// Whether the ranks of a run can form the groups.
    pub(super) fn check_groups(&self, ranks: u64) -> Result<(), GroupError> {
        match self.asked_group() {
            Some((key, group)) if !ranks.is_multiple_of(group) => {
                Err(GroupError { key, group, ranks, least: if key == HPZ { 2 } else { 1 } })
            }
            _ => Ok(()),
        }
    }
}
