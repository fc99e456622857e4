//! CPUs: name, usable threads and instruction sets.

use std::collections::BTreeSet;

use serde::Serialize;

use zeroth_cpu::{InstructionSets, KernelIsa};

use super::cgroup::{Version, groups};
use super::notes::Notes;
use super::tree::Tree;

/// The CPUs this process may use.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Cpu {
    pub model: Option<String>,
    /// Logical CPUs in the process's affinity mask.
    pub allowed: Option<u32>,
    /// Physical cores among them: two logical CPUs of one core share its matrix and vector units.
    pub cores: Option<u32>,
    /// CPU quota of the cgroups: 1.5 for `150000 100000`. `None` without a limit.
    pub quota: Option<f64>,
    /// Useful threads: the allowed CPUs, limited by the quota, at least 1.
    pub threads: u32,
    /// Instruction sets that kernels use.
    pub instruction_sets: InstructionSets,
    /// The ISA of the kernels that run here.
    pub kernels: KernelIsa,
}

/// Probes the CPUs.
pub(super) fn probe(tree: &Tree, notes: &mut Notes) -> Cpu {
    let model = notes.parse_file("cpu.model", tree, "/proc/cpuinfo", model);
    let allowed = notes.parse_file("cpu.allowed", tree, "/proc/self/status", |status| {
        cpu_list(field(status, "Cpus_allowed_list")?)
    });
    let cores = allowed.as_ref().and_then(|allowed| cores(tree, allowed, notes));
    let quota = quota(tree, notes);
    let instruction_sets = InstructionSets::detect();
    let allowed = allowed.map(|list| list.len() as u32);
    Cpu {
        model,
        allowed,
        cores,
        quota,
        threads: threads(allowed, quota),
        instruction_sets,
        kernels: instruction_sets.kernels(),
    }
}

/// A quota of 1.5 CPUs keeps one thread busy; a second one would be throttled half of the time.
fn threads(allowed: Option<u32>, quota: Option<f64>) -> u32 {
    let allowed = allowed.unwrap_or_else(|| {
        std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
    });
    quota.map_or(allowed, |quota| allowed.min(quota as u32)).max(1)
}

/// The first value of `name: value` in a file of /proc.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

/// x86 has a `model name`; Arm has numbers of the designer and the design.
fn model(cpuinfo: &str) -> Option<String> {
    if let Some(name) = field(cpuinfo, "model name").filter(|name| !name.is_empty()) {
        return Some(name.to_owned());
    }
    let designer = field(cpuinfo, "CPU implementer")?;
    let part = field(cpuinfo, "CPU part")?;
    // Numbers from the Linux kernel's arch/arm64/include/asm/cputype.h: the servers one trains on.
    let name = match (designer, part) {
        ("0x41", "0xd0c") => "Arm Neoverse N1",
        ("0x41", "0xd40") => "Arm Neoverse V1",
        ("0x41", "0xd49") => "Arm Neoverse N2",
        ("0x41", "0xd4f") => "Arm Neoverse V2",
        ("0xc0", "0xac3") => "AmpereOne",
        ("0x48", "0xd01") => "HiSilicon TSV110",
        _ => return Some(format!("Arm design {part} of designer {designer}")),
    };
    Some(name.to_owned())
}

/// `0-3,8` as the kernel writes sets of CPUs. The limit keeps a broken file from filling memory.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    const MOST: usize = 1 << 16;
    let mut cpus = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || (last - first) as usize >= MOST - cpus.len().min(MOST) {
            return None;
        }
        cpus.extend(first..=last);
    }
    (!cpus.is_empty()).then_some(cpus)
}

/// Cores are told apart by which CPUs share them.
fn cores(tree: &Tree, allowed: &[u32], notes: &mut Notes) -> Option<u32> {
    let mut cores = BTreeSet::new();
    for cpu in allowed {
        let siblings = tree.read(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
        cores.insert(notes.or_note("cpu.cores", siblings)?);
    }
    Some(cores.len() as u32)
}

/// The least quota of the own group and all above it.
fn quota(tree: &Tree, notes: &mut Notes) -> Option<f64> {
    let groups = notes.or_note("cpu.quota", groups(tree, "cpu"))??;
    let number = |text: &str| text.trim().parse::<f64>().ok();
    let mut least: Option<f64> = None;
    for folder in &groups.folders {
        // A root group has none of these files: it has no limit.
        let quota = match groups.version {
            Version::V2 => tree.read(folder.join("cpu.max")).ok().and_then(|text| {
                // `max 100000` is no number: no limit.
                let (quota, period) = text.trim().split_once(' ')?;
                Some(number(quota)? / number(period)?)
            }),
            Version::V1 => tree.read(folder.join("cpu.cfs_quota_us")).ok().and_then(|quota| {
                // -1 is no limit.
                let quota = number(&quota).filter(|quota| *quota > 0.0)?;
                Some(quota / number(&tree.read(folder.join("cpu.cfs_period_us")).ok()?)?)
            }),
        };
        let quota = quota.filter(|quota| quota.is_finite() && *quota > 0.0);
        least = match (least, quota) {
            (Some(least), Some(quota)) => Some(least.min(quota)),
            (least, quota) => least.or(quota),
        };
    }
    least
}

#[cfg(test)]
mod tests {
    use super::super::tree::Recorded;
    use super::*;

    const V2: (&str, &str) =
        ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n");

    fn quota_of(files: &[(&str, &str)]) -> Option<f64> {
        let mut notes = Notes::default();
        let quota = quota(&Recorded::new(files.iter().copied()).tree, &mut notes);
        assert!(notes.0.is_empty(), "{notes:?}");
        quota
    }

    #[test]
    fn the_tightest_cgroup_sets_the_quota() {
        let own = ("/proc/self/cgroup", "0::/pod/box\n");
        let outer = ("/sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
        assert_eq!(
            quota_of(&[own, V2, outer, ("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")]),
            Some(1.5)
        );
        assert_eq!(
            quota_of(&[own, V2, outer, ("/sys/fs/cgroup/pod/box/cpu.max", "50000 100000\n")]),
            Some(0.5)
        );
        assert_eq!(quota_of(&[own, V2, ("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")]), None);
    }

    #[test]
    fn version_1_has_quota_and_period_in_two_files() {
        let own = ("/proc/self/cgroup", "3:cpu,cpuacct:/docker/1a\n");
        let mount = (
            "/proc/self/mountinfo",
            "701 699 0:31 /docker/1a /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
        );
        let period = ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
        let quota = |text| ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", text);
        assert_eq!(quota_of(&[own, mount, period, quota("400000\n")]), Some(4.0));
        assert_eq!(quota_of(&[own, mount, period, quota("-1\n")]), None);
    }

    #[test]
    fn threads_follow_affinity_and_whole_cpus_of_quota() {
        assert_eq!(threads(Some(8), None), 8);
        assert_eq!(threads(Some(8), Some(2.5)), 2);
        assert_eq!(threads(Some(2), Some(16.0)), 2);
        assert_eq!(threads(Some(8), Some(0.5)), 1);
        assert!(threads(None, None) >= 1);
    }

    #[test]
    fn cpu_lists_are_parsed() {
        assert_eq!(cpu_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cpu_list("5"), Some(vec![5]));
        for broken in ["", "a-b", "3-1", "0-4294967295", "0-65535,70000"] {
            assert_eq!(cpu_list(broken), None, "{broken}");
        }
    }

    #[test]
    fn two_threads_of_a_core_count_as_one_core() {
        let status = "Name:\tzeroth\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n";
        let siblings = |cpu: u32| format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let paths: Vec<String> = (0..4).map(siblings).collect();
        let mut files =
            vec![("/proc/self/status", status), ("/proc/cpuinfo", "model name\t: AMD EPYC 7B13\n")];
        // Core 0 is CPUs 0 and 32, core 1 is CPUs 1 and 33, core 2 is CPUs 2 and 3.
        let lists = ["0,32\n", "1,33\n", "2-3\n", "2-3\n"];
        files.extend(paths.iter().map(String::as_str).zip(lists));
        let cpu = probe(&Recorded::new(files).tree, &mut Notes::default());
        assert_eq!((cpu.allowed, cpu.cores, cpu.threads), (Some(4), Some(3), 4));
        assert_eq!(cpu.model.as_deref(), Some("AMD EPYC 7B13"));
    }

    #[test]
    fn arm_servers_are_named_from_their_numbers() {
        let grace = "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
                     CPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n";
        assert_eq!(model(grace).as_deref(), Some("Arm Neoverse V2"));
        let other = "CPU implementer : 0x61\nCPU part : 0x022\n";
        assert_eq!(model(other).as_deref(), Some("Arm design 0x022 of designer 0x61"));
        assert_eq!(model("processor : 0\n"), None);
    }

    #[test]
    fn a_system_without_proc_notes_every_unknown_field() {
        let mut notes = Notes::default();
        let cpu = probe(&Recorded::new([]).tree, &mut notes);
        assert_eq!((cpu.model, cpu.allowed, cpu.cores, cpu.quota), (None, None, None, None));
        let what: Vec<_> = notes.0.iter().map(|note| note.what).collect();
        assert_eq!(what, ["cpu.model", "cpu.allowed", "cpu.quota"]);
        assert!(cpu.threads >= 1);
    }
}
