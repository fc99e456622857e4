//! How many processes of this control group the system has killed for lack of memory.

use std::path::{Path, PathBuf};

/// The count so far; `None` where there is no control group for memory to read.
pub(super) fn kills() -> Option<u64> {
    kills_in(&std::fs::read_to_string("/proc/self/cgroup").ok()?, Path::new("/sys/fs/cgroup"))
}

fn kills_in(groups: &str, mounted: &Path) -> Option<u64> {
    groups.lines().find_map(|line| {
        let file = events(line, mounted)?;
        count(&std::fs::read_to_string(file).ok()?)
    })
}

/// A line is `number:controllers:path`. Version 2 has the number 0 and no controllers; version 1 names `memory`.
fn events(line: &str, mounted: &Path) -> Option<PathBuf> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let path = path.trim_start_matches('/');
    if controllers.is_empty() {
        Some(mounted.join(path).join("memory.events"))
    } else if controllers.split(',').any(|controller| controller == "memory") {
        Some(mounted.join("memory").join(path).join("memory.oom_control"))
    } else {
        None
    }
}

/// Both versions have a line `oom_kill N`.
fn count(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_comes_from_either_version_of_control_groups() {
        let tree = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = tree.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        // The files as Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel show them.
        put("job/memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n");
        assert_eq!(kills_in("0::/job\n", tree.path()), Some(2));
        put("memory/old/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
        assert_eq!(kills_in("9:name=systemd:/\n4:cpu,memory:/old\n0::/\n", tree.path()), Some(5));
        assert_eq!(kills_in("9:name=systemd:/\n", tree.path()), None);
    }
}
