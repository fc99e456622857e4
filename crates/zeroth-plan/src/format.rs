//! Byte counts in messages: rounded, or exact where rounding would hide a difference.

use zeroth_base::{counted, format_bytes, grouped};

/// `3,400,000,000 bytes (3.4 GB)`.
pub(crate) fn exact(bytes: u64) -> String {
    format!("{} bytes ({})", grouped(bytes), format_bytes(bytes))
}

/// Formats two sizes for comparison: with all digits where three do not tell them apart.
pub(crate) fn pair(a: u64, b: u64) -> (String, String) {
    let (short_a, short_b) = (format_bytes(a), format_bytes(b));
    if a != b && short_a == short_b {
        (format!("{} bytes", grouped(a)), format!("{} bytes", grouped(b)))
    } else {
        (short_a, short_b)
    }
}

/// `1 GPU`, `5 GPUs`.
pub(crate) fn gpus(count: u64) -> String {
    counted(count, "GPU")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_look_alike_are_given_in_full() {
        assert_eq!(pair(44_800_000_000, 44_000_000_000), ("44.8 GB".into(), "44 GB".into()));
        assert_eq!(pair(44_000_000_001, 44_000_000_000).0, "44,000,000,001 bytes");
    }
}
