//! Resident memory as proportional set size (PSS), in which pages shared by ranks count once in total.

/// The proportional set size in bytes; 0 if unavailable.
pub fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
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
