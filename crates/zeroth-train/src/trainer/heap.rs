//! Returns free heap memory to the operating system.
#![allow(unsafe_code, reason = "calls malloc_trim(3), for which there is no safe function")]

/// Returns freed memory to the system. Tokenisation leaves tens of megabytes in the allocator, which a launcher or
/// rank would otherwise hold until it exits.
pub fn release_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            // From the C library that the standard library links.
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: the signature is that of malloc_trim(3). It takes the allocator's own locks and touches free memory only.
        unsafe { malloc_trim(0) };
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;
    use crate::report::resident_bytes;

    #[test]
    fn freed_memory_is_no_longer_resident() {
        // Small allocations, the last of which stays live: the allocator cannot trim the top of its heap by itself.
        let mut pieces: Vec<Vec<u8>> = (0..4096).map(|_| vec![1; 16 << 10]).collect();
        let last = pieces.pop();
        let held = resident_bytes();
        drop(pieces);
        release_freed_memory();
        let left = resident_bytes();
        assert!(left + (48 << 20) < held, "{held} {left} {last:?}", last = last.map(|last| last.len()));
    }
}
