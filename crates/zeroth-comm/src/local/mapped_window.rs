//! A read-only mapping of a peer's window.
#![allow(unsafe_code, reason = "maps memory that another process writes to; each block says why it is sound")]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

/// A read-only mapping of a peer's window.
pub(super) struct MappedWindow {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is not bound to a thread, and it is never written here.
unsafe impl Send for MappedWindow {}
// SAFETY: as above.
unsafe impl Sync for MappedWindow {}

impl MappedWindow {
    /// Maps `bytes` of the file from offset `at`; `None` if mmap fails.
    pub(super) fn new(file: BorrowedFd<'_>, at: u64, bytes: usize) -> Option<Self> {
        // mmap rejects a length of 0.
        let bytes = bytes.max(1);
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours. The file is sealed and
        // has room for a window there, so every byte stays backed.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, at) };
        Some(Self { start: NonNull::new(start.ok()?.cast())?, bytes })
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "outside of a window");
        // SAFETY: inside the mapping, by the assertion. Nobody writes while the slice lives: a `PeerSlices` is made in a
        // meeting, whose owner of these bytes keeps them as they are until this rank has left it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for MappedWindow {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; slices of it do not outlive it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping that was made");
    }
}
