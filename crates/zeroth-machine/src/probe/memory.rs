//! Host memory: total, available, cgroup limits and settings.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::cgroup::{Groups, Version, groups};
use super::notes::Notes;
use super::tree::Tree;

/// Host memory, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// Memory of the machine.
    pub total: Option<u64>,
    /// MemAvailable: what can be allocated without swapping.
    pub available: Option<u64>,
    /// Swap space.
    pub swap_total: Option<u64>,
    /// Swap space not in use.
    pub swap_free: Option<u64>,
    /// Cgroup limits, the process's own group first.
    pub groups: Vec<GroupLimit>,
    /// The transparent huge pages setting.
    pub huge_pages: Option<HugePages>,
    /// The limit of locked memory.
    pub locked_limit: Option<Limit>,
    /// The size of `/dev/shm`.
    pub shared: Option<SharedMemory>,
}

/// The memory limit of one cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct GroupLimit {
    pub group: PathBuf,
    /// Its limit; of a version 2 group the lower of `memory.max` and `memory.high`.
    pub limit: u64,
    /// Memory in use, page cache included.
    pub used: u64,
    /// Inactive page cache, which the kernel drops before it refuses memory.
    pub reclaimable: u64,
    /// limit − used + reclaimable.
    pub headroom: u64,
}

/// The setting of transparent huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HugePages {
    /// For all memory.
    Always,
    /// With madvise only.
    Madvise,
    /// Never.
    Never,
}

/// A limit of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// No limit.
    Unlimited,
    /// A limit in bytes.
    Bytes(u64),
}

/// Size of `/dev/shm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SharedMemory {
    /// Bytes it may hold.
    pub total: u64,
    /// Bytes not in use.
    pub free: u64,
}

/// Probes host memory.
pub(super) fn probe(tree: &Tree, notes: &mut Notes) -> HostMemory {
    const MEMINFO: &str = "/proc/meminfo";
    let mut meminfo = |what, name| notes.parse_file(what, tree, MEMINFO, |text| meminfo_field(text, name));
    let total = meminfo("memory.total", "MemTotal");
    let swap_total = meminfo("memory.swap_total", "SwapTotal");
    let swap_free = meminfo("memory.swap_free", "SwapFree");
    let available = notes.parse_file("memory.available", tree, MEMINFO, available);
    let groups = match notes.or_note("memory.groups", groups(tree, "memory")).flatten() {
        Some(groups) => limits(tree, &groups, total, notes),
        None => Vec::new(),
    };
    let enabled = "/sys/kernel/mm/transparent_hugepage/enabled";
    let shared = rustix::fs::statvfs(tree.locate(Path::new("/dev/shm"))).map(|found| SharedMemory {
        total: found.f_blocks.saturating_mul(found.f_frsize),
        free: found.f_bavail.saturating_mul(found.f_frsize),
    });
    HostMemory {
        total,
        available,
        swap_total,
        swap_free,
        groups,
        huge_pages: notes.parse_file("memory.huge_pages", tree, enabled, huge_pages),
        locked_limit: notes.parse_file("memory.locked_limit", tree, "/proc/self/limits", locked_limit),
        shared: notes.or_note("memory.shared", shared.map_err(|why| format!("/dev/shm: {why}"))),
    }
}

/// MemAvailable. Before Linux 3.14 a lower bound: free memory and inactive page cache.
fn available(meminfo: &str) -> Option<u64> {
    meminfo_field(meminfo, "MemAvailable").or_else(|| {
        meminfo_field(meminfo, "MemFree")?.checked_add(meminfo_field(meminfo, "Inactive(file)").unwrap_or(0))
    })
}

/// `MemTotal:  24682740 kB`, in bytes.
fn meminfo_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The limits of all groups that have one below what the machine has.
fn limits(tree: &Tree, groups: &Groups, machine: Option<u64>, notes: &mut Notes) -> Vec<GroupLimit> {
    // Version 1 writes "no limit" as the largest number of whole pages: more than any machine has.
    let machine = machine.unwrap_or(1 << 60);
    groups
        .folders
        .iter()
        .filter_map(|folder| {
            let number = |file: &str| tree.read(folder.join(file)).ok()?.trim().parse::<u64>().ok();
            let stat = tree.read(folder.join("memory.stat")).unwrap_or_default();
            let stat = |name: &str| {
                let value = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
                value.trim().parse::<u64>().ok()
            };
            // The files of a group count the groups below it; in version 1's memory.stat the `total_` lines do.
            // A group above that a container does not show still stands in its hierarchical limit.
            let (limits, used, reclaimable) = match groups.version {
                Version::V2 => (
                    [number("memory.max"), number("memory.high")],
                    number("memory.current"),
                    stat("inactive_file"),
                ),
                Version::V1 => (
                    [number("memory.limit_in_bytes"), stat("hierarchical_memory_limit")],
                    number("memory.usage_in_bytes"),
                    stat("total_inactive_file"),
                ),
            };
            let limit = limits.into_iter().flatten().min().filter(|limit| *limit < machine)?;
            if used.is_none() {
                notes.add(
                    "memory.groups",
                    format!("{} does not report its use: taken as 0", folder.display()),
                );
            }
            let used = used.unwrap_or(0);
            let reclaimable = reclaimable.unwrap_or(0).min(used);
            let headroom = limit.saturating_sub(used - reclaimable);
            Some(GroupLimit { group: folder.clone(), limit, used, reclaimable, headroom })
        })
        .collect()
}

/// `always [madvise] never`: the chosen one is in brackets.
fn huge_pages(text: &str) -> Option<HugePages> {
    let (_, rest) = text.split_once('[')?;
    match rest.split_once(']')?.0 {
        "always" => Some(HugePages::Always),
        "madvise" => Some(HugePages::Madvise),
        "never" => Some(HugePages::Never),
        _ => None,
    }
}

/// `Max locked memory  8388608  8388608  bytes`: the first number is the limit in force.
fn locked_limit(text: &str) -> Option<Limit> {
    let values = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match values.split_whitespace().next()? {
        "unlimited" => Some(Limit::Unlimited),
        bytes => bytes.parse().ok().map(Limit::Bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::Recorded;
    use super::*;

    const GIB: u64 = 1 << 30;

    // The first lines of a Linux 6 machine with 24 GB, in the kernel's own spacing.
    const LINUX_6: &str = "\
MemTotal:       24682740 kB
MemFree:        22505100 kB
MemAvailable:   24030376 kB
Buffers:           32856 kB
Cached:          1701876 kB
SwapCached:            0 kB
Active:           494392 kB
Inactive:        1258632 kB
Inactive(file):  1228868 kB
SwapTotal:       8388604 kB
SwapFree:        8388000 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
";
    // Linux 2.6.32 (RHEL 6): no MemAvailable yet.
    const LINUX_2_6: &str = "\
MemTotal:        8060964 kB
MemFree:          311040 kB
Buffers:          212800 kB
Cached:          5914368 kB
Active(file):    3093036 kB
Inactive(file):  2816504 kB
SwapTotal:             0 kB
SwapFree:              0 kB
";
    const V2_MOUNT: (&str, &str) =
        ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n");

    fn probed(files: &[(&str, &str)]) -> (HostMemory, Notes) {
        let mut notes = Notes::default();
        let memory = probe(&Recorded::new(files.iter().copied()).tree, &mut notes);
        (memory, notes)
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        let (memory, _) = probed(&[("/proc/meminfo", LINUX_6)]);
        assert_eq!(memory.total, Some(25_275_125_760));
        assert_eq!(memory.available, Some(24_607_105_024));
        assert_eq!((memory.swap_total, memory.swap_free), (Some(8_589_930_496), Some(8_589_312_000)));
    }

    #[test]
    fn an_old_kernel_without_memavailable_gets_a_lower_bound() {
        let (memory, _) = probed(&[("/proc/meminfo", LINUX_2_6)]);
        assert_eq!(memory.available, Some((311_040 + 2_816_504) * 1024));
        assert_eq!(memory.swap_total, Some(0));
    }

    #[test]
    fn nested_version_2_groups_all_count_and_max_is_no_limit() {
        let (memory, _) = probed(&[
            ("/proc/meminfo", LINUX_6),
            ("/proc/self/cgroup", "0::/kubepods/pod7/box\n"),
            V2_MOUNT,
            ("/sys/fs/cgroup/kubepods/memory.max", "max\n"),
            ("/sys/fs/cgroup/kubepods/memory.current", "9663676416\n"),
            ("/sys/fs/cgroup/kubepods/pod7/memory.max", "8589934592\n"),
            ("/sys/fs/cgroup/kubepods/pod7/memory.high", "max\n"),
            ("/sys/fs/cgroup/kubepods/pod7/memory.current", "7516192768\n"),
            (
                "/sys/fs/cgroup/kubepods/pod7/memory.stat",
                "anon 5368709120\nfile 2147483648\ninactive_file 1073741824\n",
            ),
            ("/sys/fs/cgroup/kubepods/pod7/box/memory.max", "4294967296\n"),
            ("/sys/fs/cgroup/kubepods/pod7/box/memory.current", "1073741824\n"),
            ("/sys/fs/cgroup/kubepods/pod7/box/memory.stat", "anon 1073741824\ninactive_file 0\n"),
        ]);
        let found: Vec<_> = memory.groups.iter().map(|group| (group.limit, group.headroom)).collect();
        assert_eq!(found, [(4 * GIB, 3 * GIB), (8 * GIB, 2 * GIB)], "the outer group leaves less: 8 − 7 + 1");
        assert_eq!(memory.groups[1].group, Path::new("/sys/fs/cgroup/kubepods/pod7"));
    }

    #[test]
    fn memory_high_below_memory_max_is_the_limit() {
        let (memory, _) = probed(&[
            ("/proc/meminfo", LINUX_6),
            ("/proc/self/cgroup", "0::/user.slice\n"),
            V2_MOUNT,
            ("/sys/fs/cgroup/user.slice/memory.max", "8589934592\n"),
            ("/sys/fs/cgroup/user.slice/memory.high", "2147483648\n"),
            ("/sys/fs/cgroup/user.slice/memory.current", "3221225472\n"),
        ]);
        assert_eq!(
            (memory.groups[0].limit, memory.groups[0].headroom),
            (2 * GIB, 0),
            "over the limit leaves nothing"
        );
    }

    fn version_1(limit: &str, hierarchical: u64) -> HostMemory {
        let stat = format!(
            "cache 1073741824\nrss 2147483648\ninactive_file 4096\nhierarchical_memory_limit {hierarchical}\n\
             total_cache 1073741824\ntotal_inactive_file 536870912\n"
        );
        let (memory, _) = probed(&[
            ("/proc/meminfo", LINUX_6),
            ("/proc/self/cgroup", "4:memory:/docker/9f8e\n1:name=systemd:/docker/9f8e\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "700 699 0:30 /docker/9f8e /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", limit),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "3221225472\n"),
            ("/sys/fs/cgroup/memory/memory.stat", &stat),
        ]);
        memory
    }

    #[test]
    fn version_1_headroom_counts_the_page_cache_of_the_subtree() {
        let group = &version_1("4294967296\n", 4 * GIB).groups[0];
        assert_eq!((group.limit, group.used, group.reclaimable), (4 * GIB, 3 * GIB, GIB / 2));
        assert_eq!(group.headroom, 3 * GIB / 2);
    }

    #[test]
    fn version_1_uses_the_hierarchical_limit_and_knows_no_limit() {
        const NONE: &str = "9223372036854771712\n";
        assert_eq!(version_1(NONE, 4 * GIB).groups[0].limit, 4 * GIB);
        assert_eq!(version_1(NONE, 9_223_372_036_854_771_712).groups, []);
        // With pages of 64 KiB the number is another one.
        assert_eq!(version_1("9223372036854710272\n", 9_223_372_036_854_710_272).groups, []);
    }

    #[test]
    fn a_cgroup_without_usage_still_limits_and_is_noted() {
        let (memory, notes) = probed(&[
            ("/proc/self/cgroup", "0::/\n"),
            V2_MOUNT,
            ("/sys/fs/cgroup/memory.max", "1073741824\n"),
            ("/proc/meminfo", "garbage"),
        ]);
        assert_eq!((memory.groups[0].limit, memory.groups[0].headroom), (GIB, GIB));
        let why = |what| notes.0.iter().find(|note| note.what == what).map(|note| note.why.as_str());
        assert_eq!(why("memory.groups"), Some("/sys/fs/cgroup does not report its use: taken as 0"));
        assert_eq!(why("memory.total"), Some("/proc/meminfo has an unknown format"));
    }

    #[test]
    fn kernel_settings_are_parsed() {
        let limits = "\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max locked memory         8388608              unlimited            bytes     
";
        let (memory, _) = probed(&[
            ("/proc/self/limits", limits),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("/dev/shm/file", ""),
        ]);
        assert_eq!(memory.locked_limit, Some(Limit::Bytes(8 << 20)));
        assert_eq!(memory.huge_pages, Some(HugePages::Madvise));
        assert!(memory.shared.unwrap().total > 0);
        assert_eq!(locked_limit("Max locked memory  unlimited  unlimited  bytes\n"), Some(Limit::Unlimited));
        assert_eq!(huge_pages("[always] madvise never\n"), Some(HugePages::Always));
        assert_eq!(huge_pages("always madvise [never]\n"), Some(HugePages::Never));
    }

    #[test]
    fn an_empty_system_notes_every_unknown_field() {
        let (memory, notes) = probed(&[]);
        assert_eq!((memory.total, memory.available, memory.shared), (None, None, None));
        let what: Vec<_> = notes.0.iter().map(|note| note.what.trim_start_matches("memory.")).collect();
        let every_field = [
            "total",
            "swap_total",
            "swap_free",
            "available",
            "groups",
            "huge_pages",
            "locked_limit",
            "shared",
        ];
        assert_eq!(what, every_field);
    }
}
