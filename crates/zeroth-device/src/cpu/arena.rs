//! An arena: one piece of the machine's memory, taken once, in which every buffer of a program has its place.
#![allow(unsafe_code, reason = "maps memory and sees its bytes as slices of numbers")]

use std::ptr::NonNull;

use bytemuck::Pod;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{DeviceError, Span};

/// Private memory of the system, zero at first; pages are taken as they are touched.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its mapping, and nothing of it is bound to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// An arena of this many bytes.
    pub fn new(tier: &'static str, bytes: u64) -> Result<Self, DeviceError> {
        let refused = |reason: String| DeviceError::Memory { device: "cpu".to_owned(), tier, bytes, reason };
        if bytes == 0 {
            return Ok(Self { start: NonNull::dangling(), bytes: 0 });
        }
        let length = usize::try_from(bytes).map_err(|error| refused(error.to_string()))?;
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
        let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, flags) };
        let start = start.map_err(|error| refused(error.to_string()))?;
        // SAFETY: the mapping just made. Only advice: small pages work as well, only slower.
        let _ = unsafe { rustix::mm::madvise(start, length, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or_else(|| refused("mapped at address 0".to_owned()))?;
        Ok(Self { start, bytes: length })
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
        if self.bytes > 0 {
            // SAFETY: the mapping made in `new`; slices of it do not outlive a call into the device that owns it.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}
