//! Where a rank runs: its host, its number there, and the hosts of its job.

use std::fmt;

use crate::local::MOST_RANKS;

/// The most hosts of a job: every bound on what a host may say follows from it.
pub const MOST_HOSTS: usize = 4096;
/// The longest name of a host, in bytes: that of a DNS name.
pub(crate) const MOST_NAME: usize = 255;

/// A rank among all ranks of a job and among those of its host.
///
/// Ranks are numbered host by host: the rank is the first rank of its host plus its local rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Place {
    pub rank: usize,
    pub world: usize,
    /// Its number among the ranks of its host.
    pub local_rank: usize,
    /// The ranks of its host.
    pub local_world: usize,
    /// The number of its host, from 0 in the order of ranks. Before the hosts have met, a guess where the launcher does not
    /// tell it; 0 for the first host in any case.
    pub host: usize,
}

/// Ranks and hosts that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum PlaceError {
    #[error(
        "rank {rank} of {world} is number {local_rank} of the {local_world} ranks of its host: ranks must be numbered host by \
         host, so that those of a host follow each other; {}",
        remedy()
    )]
    NotHostByHost { rank: usize, world: usize, local_rank: usize, local_world: usize },
    #[error(
        "host {name} has ranks {} to {}, but the hosts before it end with rank {}: ranks must be numbered host by host; {}",
        first, first + ranks - 1, before, remedy()
    )]
    Overlap {
        name: String,
        first: usize,
        ranks: usize,
        /// The last rank of the hosts before it.
        before: isize,
    },
    #[error("{ranks} ranks on host {name}: a host has 1 to {most}; start fewer there")]
    RanksOfHost { name: String, ranks: usize, most: usize },
    #[error("{hosts} hosts: a job has 1 to {most}")]
    Hosts { hosts: usize, most: usize },
    #[error(
        "{name:?} is no name of a host: it has {bytes} bytes, and 1 to {most} without control characters are allowed"
    )]
    Name { name: String, bytes: usize, most: usize },
}

fn remedy() -> &'static str {
    "use `--map-by slot` with Open MPI, `-ppn` with MPICH, `--distribution=block` with srun, one block of lines a host in a \
     hostfile"
}

impl Place {
    /// A rank of a job on one host.
    pub fn on_one_host(rank: usize, world: usize) -> Self {
        Self { rank, world, local_rank: rank, local_world: world, host: 0 }
    }

    /// Whether all ranks run on one host.
    pub fn is_one_host(self) -> bool {
        self.local_world == self.world
    }

    /// Whether it is the lowest rank of its host, which speaks for the host.
    pub fn is_leader(self) -> bool {
        self.local_rank == 0
    }

    /// The first rank of its host.
    pub fn first(self) -> usize {
        self.rank - self.local_rank
    }

    /// Checks its numbers against each other.
    pub fn check(self) -> Result<Self, PlaceError> {
        let Self { rank, world, local_rank, local_world, .. } = self;
        if !(1..=MOST_RANKS).contains(&local_world) {
            let name = "of this rank".to_owned();
            return Err(PlaceError::RanksOfHost { name, ranks: local_world, most: MOST_RANKS });
        }
        let is_inside = local_rank <= rank
            && local_rank < local_world
            && (rank - local_rank).checked_add(local_world).is_some_and(|end| end <= world);
        if is_inside {
            Ok(self)
        } else {
            Err(PlaceError::NotHostByHost { rank, world, local_rank, local_world })
        }
    }
}

/// The ranks of one host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct HostRanks {
    pub name: String,
    /// Its lowest rank, which leads it.
    pub first: usize,
    /// How many ranks it has.
    pub ranks: usize,
}

/// The hosts of a job in the order of their ranks, which follow each other without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTable(Vec<HostRanks>);

impl HostTable {
    /// Checks that the ranks of the hosts are numbered host by host, from 0. Hosts of equal names get their numbers behind
    /// the name.
    pub fn new(mut hosts: Vec<HostRanks>) -> Result<Self, PlaceError> {
        if !(1..=MOST_HOSTS).contains(&hosts.len()) {
            return Err(PlaceError::Hosts { hosts: hosts.len(), most: MOST_HOSTS });
        }
        hosts.sort_by_key(|host| host.first);
        let mut next = 0;
        for HostRanks { name, first, ranks } in &hosts {
            check_name(name)?;
            if !(1..=MOST_RANKS).contains(ranks) {
                return Err(PlaceError::RanksOfHost { name: name.clone(), ranks: *ranks, most: MOST_RANKS });
            }
            if *first != next {
                let before = next.cast_signed() - 1;
                return Err(PlaceError::Overlap { name: name.clone(), first: *first, ranks: *ranks, before });
            }
            next += ranks;
        }
        let names: Vec<String> = hosts.iter().map(|host| host.name.clone()).collect();
        for (number, host) in hosts.iter_mut().enumerate() {
            if names.iter().filter(|name| **name == host.name).count() > 1 {
                let end = format!("#{number}");
                host.name.truncate(host.name.floor_char_boundary(MOST_NAME - end.len()));
                host.name.push_str(&end);
            }
        }
        Ok(Self(hosts))
    }

    /// A table of hosts that are named in the order of their ranks, with the number of ranks of each.
    pub fn in_order(hosts: impl IntoIterator<Item = (String, usize)>) -> Result<Self, PlaceError> {
        let mut next = 0_usize;
        let hosts = hosts.into_iter().map(|(name, ranks)| {
            let first = next;
            next = next.saturating_add(ranks);
            HostRanks { name, first, ranks }
        });
        Self::new(hosts.collect())
    }

    /// The hosts.
    pub fn hosts(&self) -> &[HostRanks] {
        &self.0
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.0.iter().map(|host| host.ranks).sum()
    }

    /// The number of the host of a rank; `None` where there is no such rank.
    pub fn host_of(&self, rank: usize) -> Option<usize> {
        let number = self.0.partition_point(|host| host.first <= rank).checked_sub(1)?;
        let host = &self.0[number];
        (rank - host.first < host.ranks).then_some(number)
    }

    /// The place of a rank; `None` where there is no such rank.
    pub fn place(&self, rank: usize) -> Option<Place> {
        let host = self.host_of(rank)?;
        let HostRanks { first, ranks, .. } = self.0[host];
        Some(Place { rank, world: self.world(), local_rank: rank - first, local_world: ranks, host })
    }

    /// The ranks of every host, where all have as many.
    pub fn equal_ranks(&self) -> Option<usize> {
        let ranks = self.0[0].ranks;
        self.0.iter().all(|host| host.ranks == ranks).then_some(ranks)
    }
}

impl fmt::Display for HostTable {
    /// As in `n1 (ranks 0 to 7), n2 (ranks 8 to 15)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, HostRanks { name, first, ranks }) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            match ranks {
                1 => write!(f, "{comma}{name} (rank {first})")?,
                _ => write!(f, "{comma}{name} (ranks {first} to {})", first + ranks - 1)?,
            }
        }
        Ok(())
    }
}

/// Checks the name of a host: it is printed, and comes from other machines.
pub(crate) fn check_name(name: &str) -> Result<(), PlaceError> {
    if (1..=MOST_NAME).contains(&name.len()) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let (shown, bytes) = (name.chars().take(40).collect(), name.len());
    Err(PlaceError::Name { name: shown, bytes, most: MOST_NAME })
}

/// The name of this machine.
pub(crate) fn own_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if check_name(name).is_ok() { name.to_owned() } else { "this machine".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(hosts: &[(&str, usize, usize)]) -> Result<HostTable, PlaceError> {
        let hosts = hosts.iter();
        HostTable::new(
            hosts
                .map(|(name, first, ranks)| HostRanks {
                    name: (*name).to_owned(),
                    first: *first,
                    ranks: *ranks,
                })
                .collect(),
        )
    }

    #[test]
    fn every_rank_has_its_place() {
        let hosts = table(&[("b", 2, 1), ("a", 0, 2), ("c", 3, 3)]).unwrap();
        let places: Vec<[usize; 3]> = (0..6)
            .map(|rank| hosts.place(rank).unwrap().check().unwrap())
            .map(|place| [place.host, place.local_rank, place.local_world])
            .collect();
        assert_eq!(places, [[0, 0, 2], [0, 1, 2], [1, 0, 1], [2, 0, 3], [2, 1, 3], [2, 2, 3]]);
        assert_eq!((hosts.world(), hosts.place(6), hosts.equal_ranks()), (6, None, None));
        assert_eq!(hosts.to_string(), "a (ranks 0 to 1), b (rank 2), c (ranks 3 to 5)");
        let leaders: Vec<usize> = (0..6).filter(|rank| hosts.place(*rank).unwrap().is_leader()).collect();
        assert_eq!(leaders, [0, 2, 3]);
        assert_eq!(hosts.place(5).unwrap().first(), 3);
        assert_eq!(table(&[("a", 0, 4), ("b", 4, 4)]).unwrap().equal_ranks(), Some(4));
    }

    #[test]
    fn ranks_that_are_not_numbered_host_by_host_are_refused() {
        for hosts in [&[("a", 0, 2), ("b", 1, 2)][..], &[("a", 0, 2), ("b", 3, 1)], &[("a", 1, 1)]] {
            let error = table(hosts).unwrap_err();
            assert!(matches!(error, PlaceError::Overlap { .. }), "{error}");
        }
        let said = table(&[("a", 0, 2), ("b", 1, 2)]).unwrap_err().to_string();
        assert!(said.contains("host b has ranks 1 to 2, but the hosts before it end with rank 1"), "{said}");
        for (rank, world, local_rank, local_world) in [(2, 4, 0, 3), (1, 4, 2, 4), (0, 4, 4, 4), (5, 4, 0, 1)]
        {
            let place = Place { rank, world, local_rank, local_world, host: 0 };
            assert!(matches!(place.check(), Err(PlaceError::NotHostByHost { .. })), "{place:?}");
        }
        let many = Place { rank: 0, world: 1025, local_rank: 0, local_world: 1025, host: 0 };
        assert!(
            many.check()
                .unwrap_err()
                .to_string()
                .starts_with("1025 ranks on host of this rank: a host has 1 to 1024")
        );
    }

    #[test]
    fn numbers_and_names_of_hosts_are_bounded() {
        assert!(matches!(table(&[]), Err(PlaceError::Hosts { hosts: 0, .. })));
        assert!(matches!(table(&[("a", 0, 1025)]), Err(PlaceError::RanksOfHost { ranks: 1025, .. })));
        assert!(matches!(table(&[("a", 0, 0)]), Err(PlaceError::RanksOfHost { ranks: 0, .. })));
        let many = HostTable::in_order((0..=MOST_HOSTS).map(|host| (format!("n{host}"), 1)));
        assert!(matches!(many, Err(PlaceError::Hosts { .. })));
        for name in [String::new(), "a\u{1b}[31m".to_owned(), "x".repeat(256)] {
            assert!(matches!(table(&[(&name, 0, 1)]), Err(PlaceError::Name { .. })), "{name:?}");
        }
        assert!(table(&[(&"x".repeat(255), 0, 1)]).is_ok());
    }

    #[test]
    fn hosts_of_one_name_are_told_apart() {
        let long = "x".repeat(255);
        let hosts =
            table(&[("vm", 0, 1), ("other", 1, 1), ("vm", 2, 1), (&long, 3, 1), (&long, 4, 1)]).unwrap();
        let names: Vec<&str> = hosts.hosts().iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names[..3], ["vm#0", "other", "vm#2"]);
        assert!(names[3].len() == 255 && names[3].ends_with("x#3") && names[4].ends_with("x#4"));
    }
}
