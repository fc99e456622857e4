//! Freed memory that the allocator keeps for later.
#![allow(unsafe_code, reason = "calls malloc_trim(3), for which there is no safe function")]

/// Gives what was freed back to the system. Tokenising leaves tens of megabytes with the allocator, and a process that starts
/// ranks, or is one, holds them until it ends.
pub fn release_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            // The C library's, which the standard library links and allocates by.
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: the signature is that of malloc_trim(3). It takes the allocator's own locks and touches free memory only.
        unsafe { malloc_trim(0) };
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;
    use crate::resident_bytes;

    #[test]
    fn what_was_freed_is_resident_no_more() {
        // Small pieces, of which the last stays: the allocator cannot give back the end of its heap by itself.
        let mut pieces: Vec<Vec<u8>> = (0..4096).map(|_| vec![1; 16 << 10]).collect();
        let last = pieces.pop();
        let held = resident_bytes();
        drop(pieces);
        release_freed_memory();
        let left = resident_bytes();
        assert!(left + (48 << 20) < held, "{held} {left} {last:?}", last = last.map(|last| last.len()));
    }
}
