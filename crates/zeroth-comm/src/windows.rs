//! Windows: memory that ranks of one machine read in each other's hands, so that a collective is one pass.
//!
//! A rank's window is a part of the job's file. The rank maps it wherever it wants to (pieces of it over the places of its
//! arena that others read), writes there as to any memory of its own, and the others map it to read. A meeting
//! ([`Windows::read`]) has three points: all have come, so that what they hold is complete; each reads what it needs;
//! all have read, so that everybody may write again.
#![allow(unsafe_code, reason = "maps memory that another process writes to; each block says why it is sound")]

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use crate::comm::OpName;
use crate::error::CommError;

/// Memory of the ranks that all of them read in place.
pub trait Windows {
    /// The file that this rank's window is a part of, and where in it the window begins. Memory is taken as it is touched.
    fn own(&self) -> (BorrowedFd<'_>, u64);

    /// The file that a rank's window is a part of, and where in it the window begins: to map pages of it once windows are open.
    fn of(&self, rank: usize) -> (BorrowedFd<'_>, u64);

    /// Opens windows of `bytes`. Every rank calls it once, and says whether its own window is `ready`: mapped where it
    /// writes. True where all are and everyone sees everyone's; then they may be read.
    fn open(&self, op: OpName, bytes: usize, ready: bool) -> Result<bool, CommError>;

    /// Meets, and shows `visit` the bytes `from[s]` of every other rank s's window. All ranks call it with the same `op`.
    ///
    /// From its call to its return no rank writes to what others read of its window: `visit` included. When it returns,
    /// everyone has read.
    fn read(
        &self,
        op: OpName,
        from: &[Range<usize>],
        visit: &mut dyn FnMut(&Peers<'_>),
    ) -> Result<(), CommError>;
}

/// What a rank reads in the others' windows.
#[derive(Clone, Copy)]
pub struct Peers<'a> {
    windows: &'a [Option<Mapped>],
    from: &'a [Range<usize>],
}

impl<'a> Peers<'a> {
    /// `from` has an entry for each window, inside of it.
    pub(crate) fn new(windows: &'a [Option<Mapped>], from: &'a [Range<usize>]) -> Self {
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

/// A peer's window, to read.
pub(crate) struct Mapped {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and nobody here writes to it.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `bytes` of the file from `at` on; none where the system does not want to.
    pub(crate) fn new(file: BorrowedFd<'_>, at: u64, bytes: usize) -> Option<Self> {
        // An empty mapping there is not.
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
        // SAFETY: inside the mapping, by the assertion. Nobody writes while the slice lives: a `Peers` is made in a
        // meeting, whose owner of these bytes keeps them as they are until this rank has left it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; slices of it do not outlive it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping that was made");
    }
}
