//! Windows: memory that peers on one machine map read-only (as MPI's shared-memory windows), so that a collective is a
//! single pass.
//!
//! A rank's window is a part of the job's memory file. The rank maps parts of it over the spans of its arena that peers
//! read and writes there as usual; the peers map it read-only. A read ([`Windows::read`]) has three phases: all ranks
//! have arrived, so their data is complete; each reads what it needs; all have read, so everyone may write again.
#![allow(unsafe_code, reason = "maps memory that another process writes to; each block says why it is sound")]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use crate::error::CommError;
use crate::op_name::OpName;

/// Memory of each rank that its peers read in place.
pub trait Windows {
    /// The file of this rank's window and its offset. Memory is taken on first touch.
    fn own(&self) -> (BorrowedFd<'_>, u64);

    /// The file of a rank's window and its offset, to map pages of it once windows are open.
    fn of(&self, rank: usize) -> (BorrowedFd<'_>, u64);

    /// Opens windows of `bytes`. Every rank calls it once and tells whether its own window is `ready`, that is, mapped.
    /// Returns true if all are ready and mapped by everyone.
    fn open(&self, op: OpName, bytes: usize, ready: bool) -> Result<bool, CommError>;

    /// Synchronises, and calls `visit` with the bytes `from[s]` of every other rank s's window. All ranks call it with
    /// the same `op`.
    ///
    /// From call to return no rank writes to the parts of its window that others read, `visit` included. When it
    /// returns, everyone has read.
    fn read(
        &self,
        op: OpName,
        from: &[Range<usize>],
        visit: &mut dyn FnMut(&PeerSlices<'_>),
    ) -> Result<(), CommError>;
}

/// The peers' bytes during a read.
#[derive(Clone, Copy)]
pub struct PeerSlices<'a> {
    windows: &'a [Option<MappedWindow>],
    from: &'a [Range<usize>],
}

impl<'a> PeerSlices<'a> {
    /// `from` has a valid range for each window.
    pub(crate) fn new(windows: &'a [Option<MappedWindow>], from: &'a [Range<usize>]) -> Self {
        Self { windows, from }
    }

    /// The bytes of a rank; empty for the reader itself.
    pub fn of(&self, rank: usize) -> &'a [u8] {
        match &self.windows[rank] {
            None => &[],
            Some(window) => window.bytes(self.from[rank].clone()),
        }
    }
}

/// A read-only mapping of a peer's window.
pub(crate) struct MappedWindow {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is not bound to a thread, and it is never written here.
unsafe impl Send for MappedWindow {}
// SAFETY: as above.
unsafe impl Sync for MappedWindow {}

impl MappedWindow {
    /// Maps `bytes` of the file from offset `at`; `None` if mmap fails.
    pub(crate) fn new(file: BorrowedFd<'_>, at: u64, bytes: usize) -> Option<Self> {
        // mmap rejects a length of 0.
        let bytes = bytes.max(1);
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours. The file is sealed and
        // has room for a window there, so every byte stays backed.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, at) };
        Some(Self { start: NonNull::new(start.ok()?.cast())?, bytes })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    fn bytes(&self, range: Range<usize>) -> &[u8] {
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
