//! The control groups that limit this process, version 1 and 2.
//!
//! A limit counts when it is set on the process's own group or on any group above it, so both are handed out:
//! the folders from the own group up to the root of what is mounted.

use std::path::{Component, Path, PathBuf};

use super::mounts::{Mount, mounts};
use super::tree::{Tree, Unreadable};

/// Which files a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}

/// The groups of this process for one controller.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Groups {
    pub(super) version: Version,
    /// The own group's folder first, the mounted root last.
    pub(super) folders: Vec<PathBuf>,
}

/// The groups that `controller` (`memory`, `cpu`) limits this process by; `None` where none is mounted.
pub(super) fn groups(tree: &Tree, controller: &str) -> Result<Option<Groups>, Unreadable> {
    let membership = tree.read("/proc/self/cgroup")?;
    let Some((version, group)) = own_group(&membership, controller) else { return Ok(None) };
    let mounted: Vec<Mount> = mounts(tree)?
        .into_iter()
        .filter(|mount| match version {
            Version::V1 => mount.kind == "cgroup" && mount.options.split(',').any(|name| name == controller),
            Version::V2 => mount.kind == "cgroup2",
        })
        .collect();
    // A container may see the hierarchy mounted twice; the mount that shows our own group is the right one.
    let Some((mount, below)) = mounted
        .iter()
        .find_map(|mount| Some((mount, below_root(mount, group)?)))
        .or_else(|| mounted.last().map(|mount| (mount, Path::new(""))))
    else {
        return Ok(None);
    };
    // The path may be one of the host's that this container does not show: the nearest folder there is, then.
    let own: PathBuf = mount.point.components().chain(below.components()).collect();
    let folders = own
        .ancestors()
        .take_while(|folder| folder.starts_with(&mount.point))
        .filter(|folder| tree.locate(folder).is_dir())
        .map(Path::to_owned)
        .collect();
    Ok(Some(Groups { version, folders }))
}

/// The line of the controller (`4:memory:/job`) if version 1 has it, else version 2's (`0::/job`).
fn own_group<'a>(membership: &'a str, controller: &str) -> Option<(Version, &'a str)> {
    let mut unified = None;
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(names), Some(group)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if names.split(',').any(|name| name == controller) {
            return Some((Version::V1, group));
        }
        if id == "0" && names.is_empty() {
            unified = Some((Version::V2, group));
        }
    }
    unified
}

/// The group's path below the part of the hierarchy that is mounted. A group outside of it has none.
fn below_root<'a>(mount: &Mount, group: &'a str) -> Option<&'a Path> {
    let below = Path::new(group).strip_prefix(&mount.root).ok()?;
    below.components().all(|part| matches!(part, Component::Normal(_))).then_some(below)
}

#[cfg(test)]
mod tests {
    use super::super::tree::Recorded;
    use super::*;

    const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn folders(files: &[(&str, &str)], controller: &str) -> Option<(Version, Vec<String>)> {
        let recorded = Recorded::new(files.iter().copied());
        let groups = groups(&recorded.tree, controller).unwrap()?;
        Some((groups.version, groups.folders.iter().map(|folder| folder.display().to_string()).collect()))
    }

    #[test]
    fn version_2_walks_from_the_own_group_to_the_root() {
        let found = folders(
            &[
                ("/proc/self/cgroup", "0::/user.slice/user-1000.slice/session-2.scope\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope/memory.max", "max\n"),
            ],
            "memory",
        );
        let expected = [
            "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope",
            "/sys/fs/cgroup/user.slice/user-1000.slice",
            "/sys/fs/cgroup/user.slice",
            "/sys/fs/cgroup",
        ];
        assert_eq!(found, Some((Version::V2, expected.map(str::to_owned).to_vec())));
    }

    #[test]
    fn a_docker_container_on_version_1_sees_its_group_as_the_mounted_root() {
        let found = folders(
            &[
                (
                    "/proc/self/cgroup",
                    "5:cpu,cpuacct:/docker/9f8e\n4:memory:/docker/9f8e\n1:name=systemd:/docker/9f8e\n",
                ),
                (
                    "/proc/self/mountinfo",
                    "700 699 0:30 /docker/9f8e /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n\
                     701 699 0:31 /docker/9f8e /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n",
                ),
                ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
                ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ],
            "memory",
        );
        assert_eq!(found, Some((Version::V1, vec!["/sys/fs/cgroup/memory".to_owned()])));
    }

    #[test]
    fn on_a_hybrid_system_each_controller_is_where_it_is_mounted() {
        let files = [
            ("/proc/self/cgroup", "4:memory:/job\n1:cpuset:/\n0::/system.slice\n"),
            (
                "/proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1\n"),
            ("/sys/fs/cgroup/unified/system.slice/cpu.max", "max 100000\n"),
        ];
        let memory = vec!["/sys/fs/cgroup/memory/job".to_owned(), "/sys/fs/cgroup/memory".to_owned()];
        assert_eq!(folders(&files, "memory"), Some((Version::V1, memory)));
        let cpu =
            ["/sys/fs/cgroup/unified/system.slice", "/sys/fs/cgroup/unified"].map(str::to_owned).to_vec();
        assert_eq!(folders(&files, "cpu"), Some((Version::V2, cpu)));
    }

    #[test]
    fn a_group_outside_the_container_falls_back_to_what_is_mounted() {
        for group in ["0::/../../kubepods/pod1\n", "0::/kubepods.slice/host-only\n"] {
            let found = folders(
                &[
                    ("/proc/self/cgroup", group),
                    ("/proc/self/mountinfo", V2_MOUNT),
                    ("/sys/fs/cgroup/memory.max", "max\n"),
                ],
                "memory",
            );
            assert_eq!(found, Some((Version::V2, vec!["/sys/fs/cgroup".to_owned()])), "{group}");
        }
    }

    #[test]
    fn no_mounted_hierarchy_means_no_groups() {
        let mountinfo = ("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n");
        assert_eq!(folders(&[("/proc/self/cgroup", "0::/\n"), mountinfo], "memory"), None);
        assert_eq!(folders(&[("/proc/self/cgroup", ""), mountinfo], "memory"), None);
    }
}
