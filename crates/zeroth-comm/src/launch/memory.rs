//! Memory of control groups: the number of OOM kills and the limit.
//!
//! A container's limit is set on an ancestor of the launcher's group, and version 1 counts a kill only in the group of
//! the killed process. So the own group and all its ancestors up to the mount point are read.

use std::path::{Path, PathBuf};

const MOUNTED: &str = "/sys/fs/cgroup";

/// OOM kills so far, by group.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OomKills(Vec<(PathBuf, u64)>);

impl OomKills {
    pub(super) fn count() -> Self {
        Self::count_in(&membership(), Path::new(MOUNTED))
    }

    fn count_in(membership: &str, mounted: &Path) -> Self {
        let counted = groups(membership, mounted).into_iter().filter_map(|group| {
            // Version 2, then version 1; both have a line `oom_kill N`.
            let kills = ["memory.events", "memory.oom_control"].iter().find_map(|file| {
                let text = std::fs::read_to_string(group.join(file)).ok()?;
                text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
            });
            Some((group, kills?))
        });
        Self(counted.collect())
    }

    /// Whether a group has counted a kill since `before`.
    pub(super) fn more_than(&self, before: &Self) -> bool {
        self.0
            .iter()
            .any(|(group, kills)| before.0.iter().any(|(known, earlier)| known == group && kills > earlier))
    }
}

/// The lowest limit in bytes of the own group and its ancestors.
pub(super) fn limit() -> Option<u64> {
    limit_in(&membership(), Path::new(MOUNTED))
}

fn limit_in(membership: &str, mounted: &Path) -> Option<u64> {
    let limits = groups(membership, mounted).into_iter().filter_map(|group| {
        // Without a limit, version 2 says `max`, version 1 the largest multiple of the page size.
        let text = ["memory.max", "memory.limit_in_bytes"]
            .iter()
            .find_map(|file| std::fs::read_to_string(group.join(file)).ok())?;
        text.trim().parse().ok().filter(|limit| *limit < 1_u64 << 62)
    });
    limits.min()
}

fn membership() -> String {
    std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// The folders of this process's memory groups, from its own upwards.
///
/// A line is `number:controllers:path`. Version 2 has no controllers; version 1 names `memory`. A path that is hidden
/// in a container has no folder; the mount point always exists.
fn groups(membership: &str, mounted: &Path) -> Vec<PathBuf> {
    let roots = membership.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        if controllers.is_empty() {
            Some((mounted.to_owned(), path))
        } else {
            controllers
                .split(',')
                .any(|controller| controller == "memory")
                .then(|| (mounted.join("memory"), path))
        }
    });
    roots
        .flat_map(|(root, path)| {
            let own = root.join(path);
            let above: Vec<PathBuf> =
                own.ancestors().take_while(|folder| folder.starts_with(&root)).map(Path::to_owned).collect();
            above
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of groups with files as Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst show them.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn kills(&self, membership: &str) -> OomKills {
            OomKills::count_in(membership, self.0.path())
        }

        fn limit(&self, membership: &str) -> Option<u64> {
            limit_in(membership, self.0.path())
        }
    }

    fn events(kills: u64) -> String {
        format!("low 0\nhigh 0\nmax 12\noom 3\noom_kill {kills}\noom_group_kill 0\n")
    }

    #[test]
    fn a_kill_counts_in_the_own_group_and_in_those_above() {
        let (tree, own) = (Tree::new(), "0::/pod/job\n");
        tree.put("pod/job/memory.events", &events(2));
        tree.put("pod/memory.events", &events(5));
        let before = tree.kills(own);
        assert!(!tree.kills(own).more_than(&before));
        tree.put("pod/memory.events", &events(6));
        assert!(tree.kills(own).more_than(&before), "one in a neighbour that shares the limit above");
        tree.put("other/memory.events", &events(9));
        let before = tree.kills(own);
        tree.put("other/memory.events", &events(10));
        assert!(!tree.kills(own).more_than(&before), "a group that is not ours");
    }

    #[test]
    fn version_1_counts_where_it_is_mounted_even_if_the_path_is_the_hosts() {
        let (tree, own) = (Tree::new(), "9:name=systemd:/\n4:cpu,memory:/docker/9f8e\n0::/\n");
        let control = |kills: u64| format!("oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n");
        tree.put("memory/memory.oom_control", &control(0));
        let before = tree.kills(own);
        tree.put("memory/memory.oom_control", &control(1));
        assert!(tree.kills(own).more_than(&before));
        assert!(!tree.kills("9:name=systemd:/\n").more_than(&before), "no group tells of memory");
    }

    #[test]
    fn the_limit_is_the_lowest_of_the_groups_above_and_may_be_missing() {
        let tree = Tree::new();
        tree.put("pod/job/memory.max", "max\n");
        assert_eq!(tree.limit("0::/pod/job\n"), None);
        tree.put("pod/memory.max", "8589934592\n");
        tree.put("memory.max", "17179869184\n");
        assert_eq!(tree.limit("0::/pod/job\n"), Some(8_589_934_592));
        tree.put("memory/old/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(tree.limit("4:memory:/old\n"), None);
        tree.put("memory/memory.limit_in_bytes", "1073741824\n");
        assert_eq!(tree.limit("4:memory:/old\n"), Some(1_073_741_824));
    }
}
