//! Resident memory as proportional set size (PSS), in which pages shared by ranks count once in total.

/// The proportional set size in bytes; 0 if unavailable.
pub fn resident_bytes() -> u64 {
    read("/proc/self/smaps_rollup").unwrap_or(0)
}

/// That of another process.
pub(crate) fn resident_bytes_of(pid: u32) -> Option<u64> {
    read(&format!("/proc/{pid}/smaps_rollup"))
}

fn read(path: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_memory_is_counted() {
        let before = resident_bytes();
        let held = vec![1u8; 64 << 20];
        let after = resident_bytes();
        assert!(after >= before + (60 << 20), "{before} {after} {}", held.len());
    }
}
