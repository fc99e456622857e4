//! An arena: one mapping that holds every buffer of a program.
//!
//! It is private memory, on huge pages where the system grants them. Spans that peers read are backed by a shared file, mapped over
//! the private pages. After the arena there may be a peer view: addresses at which spans of peers' arenas are mapped
//! contiguously, read-only.
#![allow(unsafe_code, reason = "maps memory and returns slices of it")]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use bytemuck::Pod;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::pool::Pool;
use zeroth_kernel::{DeviceError, PeerMapping, Shared, Span};

/// Granularity of arenas and shared spans: a multiple of every supported page size (4 to 64 KiB).
const PAGE: u64 = 64 << 10;
/// Bytes of a huge page. Arenas are aligned to it, so that all but their end can be on huge pages.
pub const LARGE_PAGE: usize = 2 << 20;
/// Bytes per task of a prefault.
const PREFAULTED: usize = 32 << 20;

/// Zero-initialized memory; pages are allocated on first access.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    bytes: usize,
    /// Bytes of the mapping, rounded up to pages.
    length: usize,
    view: Option<PeerView>,
}

/// Addresses after an arena at which peers' spans are mapped.
#[derive(Debug)]
struct PeerView {
    /// Offset of the first byte.
    at: u64,
    memory: Box<Arena>,
    /// Whether peers' files are mapped, read-only; else it is private memory.
    is_mapped: bool,
}

// SAFETY: it owns its mapping, which is not bound to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// An arena of `bytes`.
    pub fn new(tier: &'static str, bytes: u64) -> Result<Self, DeviceError> {
        let refused = |reason: String| DeviceError::Memory { device: "cpu".to_owned(), tier, bytes, reason };
        if bytes == 0 {
            return Ok(Self { start: NonNull::dangling(), bytes: 0, length: 0, view: None });
        }
        let size = |bytes: u64| usize::try_from(bytes).map_err(|error| refused(error.to_string()));
        let (bytes, length) = (size(bytes)?, size(bytes.next_multiple_of(PAGE))?);
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let spare = if length < LARGE_PAGE { 0 } else { LARGE_PAGE };
        // SAFETY: a new mapping at an address of the kernel's choice affects no existing memory.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length + spare, protection, flags) };
        let mapped = mapped.map_err(|error| refused(error.to_string()))?.cast::<u8>();
        let before = if spare == 0 { 0 } else { mapped.align_offset(LARGE_PAGE).min(spare) };
        let start = mapped.wrapping_add(before).cast();
        for (from, bytes) in [(0, before), (before + length, spare - before)] {
            if bytes > 0 {
                // SAFETY: an unused end of the mapping just made. On failure it stays mapped, without pages.
                let _ = unsafe { rustix::mm::munmap(mapped.wrapping_add(from).cast(), bytes) };
            }
        }
        // SAFETY: the mapping just made. Only advice: small pages work too.
        let _ = unsafe { rustix::mm::madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or_else(|| refused("mapped at address 0".to_owned()))?;
        Ok(Self { start, bytes, length, view: None })
    }

    /// Backs spans of the arena with a shared file, for peers to map. Their contents are lost.
    pub fn share(&mut self, shared: &Shared<'_>) -> Result<(), DeviceError> {
        for span in shared.spans {
            self.check::<u8>(*span)?;
            if span.bytes == 0 {
                continue;
            }
            // Whole pages: neighbours on the first and last page are shared too.
            let (first, end) = (span.at / PAGE * PAGE, span.end().next_multiple_of(PAGE));
            let mapped = self.map_file(
                Span { at: first, bytes: end - first, ..*span },
                ProtFlags::READ | ProtFlags::WRITE,
                shared.file,
                shared.at + first,
            );
            mapped.map_err(|reason| DeviceError::Memory {
                device: "cpu".to_owned(),
                tier: "shared",
                bytes: end - first,
                reason,
            })?;
        }
        Ok(())
    }

    /// Maps a range of a file over whole pages. Their contents are lost.
    fn map_file(
        &mut self,
        to: Span,
        protection: ProtFlags,
        file: BorrowedFd<'_>,
        from: u64,
    ) -> Result<(), String> {
        let end = to.at.checked_add(to.bytes).filter(|end| *end <= self.length as u64);
        if end.is_none() {
            return Err(format!("{to:?} is outside of {} bytes", self.length));
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the pages are inside the mapping of `new` (the system refuses unaligned addresses, and the mapping ends on a
        // page), and the arena is borrowed exclusively, so that no slice of them lives. The new mapping is as long.
        let mapped = unsafe {
            let place = self.start.as_ptr().add(to.at as usize).cast();
            rustix::mm::mmap(place, to.bytes as usize, protection, flags, file, from)
        };
        mapped.map(|_| ()).map_err(|error| error.to_string())
    }

    /// Maps ranges of peers' files read-only at offsets from `at` on, after the arena. Returns false where they are not
    /// page-aligned: then the addresses are private memory.
    pub fn map_peers(
        &mut self,
        at: u64,
        bytes: u64,
        peer_mappings: &[PeerMapping<'_>],
    ) -> Result<bool, DeviceError> {
        if at < self.bytes as u64 {
            let problem = format!("a peer view at {at} overlaps an arena of {} bytes", self.bytes);
            return Err(DeviceError::Operands { what: "view", problem });
        }
        let mut memory = Self::new("view", bytes)?;
        let mapped = peer_mappings.iter().try_for_each(|peer| {
            let to = Span { at: peer.to.at.saturating_sub(at), ..peer.to };
            memory.map_file(to, ProtFlags::READ, peer.file, peer.at)
        });
        let is_mapped = mapped.is_ok() && !peer_mappings.is_empty();
        if !is_mapped {
            memory = Self::new("view", bytes)?;
        }
        self.view = Some(PeerView { at, memory: Box::new(memory), is_mapped });
        Ok(is_mapped)
    }

    /// The peer view that a span is in, and the span within it.
    fn in_view(&self, span: Span) -> Option<(&PeerView, Span)> {
        let view = self.view.as_ref().filter(|view| span.at >= view.at)?;
        Some((view, Span { at: span.at - view.at, ..span }))
    }

    /// Allocates all pages on the threads that will use them, so that they are NUMA-local and no kernel faults later.
    pub fn prefault(&mut self, pool: &Pool) {
        let (start, bytes) = (self.start.as_ptr().addr(), self.bytes);
        pool.run(bytes.div_ceil(PREFAULTED), |piece, _| {
            let first = piece * PREFAULTED;
            let place = std::ptr::with_exposed_provenance_mut(start + first);
            // SAFETY: inside the mapping; the pages are populated as by a write, which changes no contents. Older kernels do not
            // support it and allocate on first access.
            let _ = unsafe {
                rustix::mm::madvise(place, PREFAULTED.min(bytes - first), Advice::LinuxPopulateWrite)
            };
        });
    }

    /// Address and bytes of its mapping, for a driver that pins it.
    pub(crate) fn mapping(&self) -> (usize, usize) {
        (self.start.as_ptr().expose_provenance(), self.length)
    }

    /// Bytes of the arena.
    pub const fn capacity(&self) -> u64 {
        self.bytes as u64
    }

    /// The number of elements of a span; an error where it is outside the arena or unaligned.
    fn check<T>(&self, span: Span) -> Result<usize, DeviceError> {
        let size = size_of::<T>() as u64;
        let end = span.at.checked_add(span.bytes);
        let fits = end.is_some_and(|end| end <= self.bytes as u64);
        if fits && span.at.is_multiple_of(align_of::<T>() as u64) && span.bytes.is_multiple_of(size) {
            return Ok((span.bytes / size) as usize);
        }
        let problem =
            format!("{span:?} does not hold elements of {size} bytes in an arena of {} bytes", self.bytes);
        Err(DeviceError::Operands { what: "arena", problem })
    }

    /// The elements of a span.
    ///
    /// # Safety
    /// Nothing is written to it while the slice lives.
    pub(super) unsafe fn slice<'a, T: Pod>(&self, span: Span) -> Result<&'a [T], DeviceError> {
        if let Some((view, span)) = self.in_view(span) {
            // SAFETY: the caller's promise.
            return unsafe { view.memory.slice(span) };
        }
        let count = self.check::<T>(span)?;
        // SAFETY: inside the mapping (or empty) and aligned, by the check; mappings are page-aligned; any bytes are a value of a
        // `Pod` type, and all are initialized by the kernel. The caller guarantees that nothing is written.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(span.at as usize).cast(), count) })
    }

    /// The elements of a span, to write.
    ///
    /// # Safety
    /// Nothing else reads or writes it while the slice lives.
    pub(super) unsafe fn slice_mut<'a, T: Pod>(&self, span: Span) -> Result<&'a mut [T], DeviceError> {
        match self.in_view(span) {
            Some((PeerView { is_mapped: true, .. }, _)) => {
                let problem = format!("{span:?} is memory of other ranks and read-only");
                return Err(DeviceError::Operands { what: "view", problem });
            }
            // SAFETY: the caller's promise.
            Some((view, span)) => return unsafe { view.memory.slice_mut(span) },
            None => {}
        }
        let count = self.check::<T>(span)?;
        // SAFETY: as in `slice`; the caller guarantees exclusive access.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(span.at as usize).cast(), count) })
    }

    /// The bytes of a span.
    pub fn bytes_mut(&mut self, span: Span) -> Result<&mut [u8], DeviceError> {
        // SAFETY: the arena is borrowed for as long as the slice is.
        unsafe { self.slice_mut(span) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: the mapping of `new`; slices of it do not outlive a call into the device that owns it.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_shared_spans_are_backed_by_the_file() {
        let file = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let at = 8 * PAGE;
        rustix::fs::ftruncate(&file, at + 16 * PAGE).unwrap();
        let mut arena = Arena::new("device", 10 * PAGE + 100).unwrap();
        let (first, last) = (Span::device(2 * PAGE + 64, 100), Span::device(10 * PAGE, 100));
        arena.share(&Shared { file: file.as_fd(), at, spans: &[first, Span::device(0, 0), last] }).unwrap();
        arena.prefault(&Pool::new(2));
        let whole = Span::device(0, 10 * PAGE + 100);
        arena
            .bytes_mut(whole)
            .unwrap()
            .iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = (at % 251) as u8);
        let mut seen = vec![0; 16 * PAGE as usize];
        rustix::io::pread(&file, &mut seen, at).unwrap();
        let shared = |at: usize| [2, 10].contains(&(at as u64 / PAGE));
        let expected = |at: usize| if shared(at) && (at as u64) < whole.bytes { (at % 251) as u8 } else { 0 };
        assert!(seen.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
        assert!(
            arena.bytes_mut(whole).unwrap().iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8)
        );
    }

    #[test]
    fn peer_files_are_mapped_contiguously_after_the_arena() {
        let file = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * PAGE).unwrap();
        rustix::io::pwrite(&file, &vec![1; PAGE as usize], PAGE).unwrap();
        rustix::io::pwrite(&file, &vec![2; PAGE as usize], 3 * PAGE).unwrap();
        let peer = |place: u64, at: u64| PeerMapping {
            to: Span::device(2 * PAGE + place * PAGE, PAGE),
            file: file.as_fd(),
            at,
        };
        let mut arena = Arena::new("device", PAGE + 100).unwrap();
        assert!(arena.map_peers(2 * PAGE, 2 * PAGE, &[peer(0, 3 * PAGE), peer(1, PAGE)]).unwrap());
        let across = Span::device(3 * PAGE - 1, 2);
        // SAFETY: nobody writes.
        assert_eq!(unsafe { arena.slice::<u8>(across) }.unwrap(), [2, 1]);
        assert!(arena.bytes_mut(across).is_err(), "it is read-only");
        arena.bytes_mut(Span::device(0, PAGE + 100)).unwrap().fill(7);
        // Unaligned ranges are not mapped, and the addresses are private memory.
        assert!(!arena.map_peers(2 * PAGE, PAGE, &[peer(0, 100)]).unwrap());
        arena.bytes_mut(Span::device(2 * PAGE, 10)).unwrap().fill(3);
        assert!(arena.map_peers(PAGE, PAGE, &[]).is_err(), "it overlaps the arena");
    }

    #[test]
    fn a_span_outside_the_arena_is_not_shared() {
        let file = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut arena = Arena::new("device", PAGE).unwrap();
        let spans = [Span::device(PAGE, 1)];
        assert!(arena.share(&Shared { file: file.as_fd(), at: 0, spans: &spans }).is_err());
    }
}
