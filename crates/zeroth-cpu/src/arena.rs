//! An arena: one piece of the machine's memory, taken once, in which every buffer of a program has its place.
//!
//! It is private and on huge pages, where the system gives them. Places that other ranks read lie in a file that they map,
//! too: the file's pages take the place of private ones, so that addresses stay one piece. Behind an arena there may be a
//! view: addresses at which parts of other ranks' arenas appear end to end, to read.
#![allow(unsafe_code, reason = "maps memory and sees its bytes as slices of numbers")]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use bytemuck::Pod;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::pool::Pool;
use zeroth_kernel::{DeviceError, PeerMapping, Shared, Span};

/// What arenas and shared places are rounded to: a page, or several, of every system meant (4 to 64 KiB).
const PAGE: u64 = 64 << 10;
/// Bytes of a large page: an arena begins on one, so that all of it but the end can lie on large pages.
pub const LARGE_PAGE: usize = 2 << 20;
/// Bytes that one task takes from the system.
const TOUCHED: usize = 32 << 20;

/// Memory of the system, zero at first; pages are taken as they are touched.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    bytes: usize,
    /// Bytes of the mapping; those behind the arena are never touched.
    length: usize,
    view: Option<View>,
}

/// Places behind an arena.
#[derive(Debug)]
struct View {
    /// The first of them.
    at: u64,
    memory: Box<Arena>,
    /// Whether they are parts of files, to read only.
    is_seen: bool,
}

// SAFETY: it owns its mapping, and nothing of it is bound to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// An arena of this many bytes.
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
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length + spare, protection, flags) };
        let mapped = mapped.map_err(|error| refused(error.to_string()))?.cast::<u8>();
        let before = if spare == 0 { 0 } else { mapped.align_offset(LARGE_PAGE).min(spare) };
        let start = mapped.wrapping_add(before).cast();
        for (from, bytes) in [(0, before), (before + length, spare - before)] {
            if bytes > 0 {
                // SAFETY: an end of the mapping just made, which nobody has seen. What stays mapped has no pages, and does no harm.
                let _ = unsafe { rustix::mm::munmap(mapped.wrapping_add(from).cast(), bytes) };
            }
        }
        // SAFETY: the mapping just made. Only advice: small pages work as well, only slower.
        let _ = unsafe { rustix::mm::madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or_else(|| refused("mapped at address 0".to_owned()))?;
        Ok(Self { start, bytes, length, view: None })
    }

    /// Puts places of the arena into a file that other ranks map. What lay there is forgotten.
    pub fn share(&mut self, shared: &Shared<'_>) -> Result<(), DeviceError> {
        for span in shared.spans {
            self.check::<u8>(*span)?;
            if span.bytes == 0 {
                continue;
            }
            // Whole pages: neighbours on the first and the last one come along.
            let (first, end) = (span.at / PAGE * PAGE, span.end().next_multiple_of(PAGE));
            let mapped = self.put(
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

    /// Puts a part of a file in a place of whole pages. What lay there is forgotten.
    fn put(
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
        // SAFETY: the pages lie inside the mapping made in `new` (the system refuses what does not begin with a page, and
        // `new` ends with one), and the arena is borrowed alone: no slice of them lives. The new mapping is as long.
        let mapped = unsafe {
            let place = self.start.as_ptr().add(to.at as usize).cast();
            rustix::mm::mmap(place, to.bytes as usize, protection, flags, file, from)
        };
        mapped.map(|_| ()).map_err(|error| error.to_string())
    }

    /// Gives places from `at` on, behind the arena, in which parts of files appear, to read; plain memory and false where
    /// they cannot, because they do not begin and end with pages.
    pub fn map_peers(
        &mut self,
        at: u64,
        bytes: u64,
        peer_mappings: &[PeerMapping<'_>],
    ) -> Result<bool, DeviceError> {
        if at < self.bytes as u64 {
            let problem = format!("a view at {at} overlaps an arena of {} bytes", self.bytes);
            return Err(DeviceError::Operands { what: "view", problem });
        }
        let mut memory = Self::new("view", bytes)?;
        let seen = peer_mappings.iter().try_for_each(|sight| {
            let to = Span { at: sight.to.at.saturating_sub(at), ..sight.to };
            memory.put(to, ProtFlags::READ, sight.file, sight.at)
        });
        let is_seen = seen.is_ok() && !peer_mappings.is_empty();
        if !is_seen {
            memory = Self::new("view", bytes)?;
        }
        self.view = Some(View { at, memory: Box::new(memory), is_seen });
        Ok(is_seen)
    }

    /// The view that a place lies in, and the place as one of its own.
    fn behind(&self, span: Span) -> Option<(&View, Span)> {
        let view = self.view.as_ref().filter(|view| span.at >= view.at)?;
        Some((view, Span { at: span.at - view.at, ..span }))
    }

    /// Takes all its pages now, on the threads that will use them: they lie near those, and nobody waits for them later.
    pub fn touch(&mut self, pool: &Pool) {
        let (start, bytes) = (self.start.as_ptr().addr(), self.bytes);
        pool.run(bytes.div_ceil(TOUCHED), |piece, _| {
            let first = piece * TOUCHED;
            let place = std::ptr::with_exposed_provenance_mut(start + first);
            // SAFETY: inside the mapping, whose pages come as if each had been written to: nothing changes. A system that
            // does not know how takes them when they are first written to, as ever.
            let _ =
                unsafe { rustix::mm::madvise(place, TOUCHED.min(bytes - first), Advice::LinuxPopulateWrite) };
        });
    }

    /// Its first byte's address and the bytes of its mapping, for a driver that pins them.
    pub(crate) fn mapping(&self) -> (usize, usize) {
        (self.start.as_ptr().expose_provenance(), self.length)
    }

    /// Its bytes.
    pub const fn capacity(&self) -> u64 {
        self.bytes as u64
    }

    /// Refuses a place that is not within the arena, or not on an element's boundary.
    fn check<T>(&self, span: Span) -> Result<usize, DeviceError> {
        let size = size_of::<T>() as u64;
        let end = span.at.checked_add(span.bytes);
        let fits = end.is_some_and(|end| end <= self.bytes as u64);
        if fits && span.at.is_multiple_of(align_of::<T>() as u64) && span.bytes.is_multiple_of(size) {
            return Ok((span.bytes / size) as usize);
        }
        let problem =
            format!("{span:?} is no place for elements of {size} bytes in an arena of {}", self.bytes);
        Err(DeviceError::Operands { what: "arena", problem })
    }

    /// The elements of a place.
    ///
    /// # Safety
    /// While the slice lives, nobody writes to a byte of it.
    pub(super) unsafe fn slice<'a, T: Pod>(&self, span: Span) -> Result<&'a [T], DeviceError> {
        if let Some((view, span)) = self.behind(span) {
            // SAFETY: the caller's promise.
            return unsafe { view.memory.slice(span) };
        }
        let count = self.check::<T>(span)?;
        // SAFETY: inside the mapping (or empty) and aligned, by the check; mappings are page-aligned; any bytes are a
        // value of a `Pod` type, and all are initialised by the kernel. Nobody writes meanwhile: the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(span.at as usize).cast(), count) })
    }

    /// The elements of a place, to write.
    ///
    /// # Safety
    /// While the slice lives, nobody else reads or writes a byte of it.
    pub(super) unsafe fn slice_mut<'a, T: Pod>(&self, span: Span) -> Result<&'a mut [T], DeviceError> {
        match self.behind(span) {
            Some((View { is_seen: true, .. }, _)) => {
                let problem = format!("{span:?} is other ranks' memory, to read");
                return Err(DeviceError::Operands { what: "view", problem });
            }
            // SAFETY: the caller's promise.
            Some((view, span)) => return unsafe { view.memory.slice_mut(span) },
            None => {}
        }
        let count = self.check::<T>(span)?;
        // SAFETY: as in `slice`, and nobody else touches it: the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(span.at as usize).cast(), count) })
    }

    /// The bytes of a place, to read and write.
    pub fn bytes_mut(&mut self, span: Span) -> Result<&mut [u8], DeviceError> {
        // SAFETY: the arena is borrowed for as long as the slice is.
        unsafe { self.slice_mut(span) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.length > 0 {
            // SAFETY: the mapping made in `new`; slices of it do not outlive a call into the device that owns it.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_is_shared_lies_in_the_file_and_all_else_does_not() {
        let file = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let at = 8 * PAGE;
        rustix::fs::ftruncate(&file, at + 16 * PAGE).unwrap();
        let mut arena = Arena::new("device", 10 * PAGE + 100).unwrap();
        let (first, last) = (Span::device(2 * PAGE + 64, 100), Span::device(10 * PAGE, 100));
        arena.share(&Shared { file: file.as_fd(), at, spans: &[first, Span::device(0, 0), last] }).unwrap();
        arena.touch(&Pool::new(2));
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
    fn parts_of_files_appear_behind_the_arena_end_to_end() {
        let file = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4 * PAGE).unwrap();
        rustix::io::pwrite(&file, &vec![1; PAGE as usize], PAGE).unwrap();
        rustix::io::pwrite(&file, &vec![2; PAGE as usize], 3 * PAGE).unwrap();
        let sight = |place: u64, at: u64| PeerMapping {
            to: Span::device(2 * PAGE + place * PAGE, PAGE),
            file: file.as_fd(),
            at,
        };
        let mut arena = Arena::new("device", PAGE + 100).unwrap();
        assert!(arena.map_peers(2 * PAGE, 2 * PAGE, &[sight(0, 3 * PAGE), sight(1, PAGE)]).unwrap());
        let across = Span::device(3 * PAGE - 1, 2);
        // SAFETY: nobody writes.
        assert_eq!(unsafe { arena.slice::<u8>(across) }.unwrap(), [2, 1]);
        assert!(arena.bytes_mut(across).is_err(), "it is to be read only");
        arena.bytes_mut(Span::device(0, PAGE + 100)).unwrap().fill(7);
        // What does not lie on pages is not seen, and the places are plain memory.
        assert!(!arena.map_peers(2 * PAGE, PAGE, &[sight(0, 100)]).unwrap());
        arena.bytes_mut(Span::device(2 * PAGE, 10)).unwrap().fill(3);
        assert!(arena.map_peers(PAGE, PAGE, &[]).is_err(), "it lies in the arena");
    }

    #[test]
    fn a_place_outside_is_not_shared() {
        let file = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut arena = Arena::new("device", PAGE).unwrap();
        let spans = [Span::device(PAGE, 1)];
        assert!(arena.share(&Shared { file: file.as_fd(), at: 0, spans: &spans }).is_err());
    }
}
