//! The process that started all ranks of a job, for launchers that do not name the job.

/// How many ancestors to inspect: ranks may be started through scripts, but not many.
const MOST: usize = 16;

/// The nearest ancestor that is a launcher's helper, else the parent.
///
/// MPICH and Intel MPI start a machine's ranks from one `hydra_pmi_proxy`, directly or through scripts of the user.
pub(super) fn starter() -> u32 {
    let parent = std::os::unix::process::parent_id();
    let above = std::iter::successors(Some(parent), |pid| parent_of(*pid)).take(MOST);
    above.into_iter().find(|pid| is_helper(*pid)).unwrap_or(parent)
}

fn is_helper(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("hydra"))
}

fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())?;
    (parent != 0).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_launchers_helper_the_starter_is_the_parent() {
        let parent = std::os::unix::process::parent_id();
        assert_eq!(starter(), parent);
        assert_eq!(parent_of(std::process::id()), Some(parent));
        assert_eq!(parent_of(u32::MAX), None);
    }
}
