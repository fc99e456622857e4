//! Splits one scratch buffer into cache-line-aligned parts.

/// f32 elements to reserve so that a buffer can be aligned to a cache line.
pub(super) const ALIGN: usize = 16;

/// The unused remainder of a scratch buffer, starting on a cache line.
pub(super) struct ScratchSplitter<'a>(&'a mut [f32]);

impl<'a> ScratchSplitter<'a> {
    /// Skips to the first cache line of `buffer`, at most [`ALIGN`] elements.
    pub(super) fn new(buffer: &'a mut [f32]) -> Self {
        let skip = buffer.as_ptr().align_offset(64).min(ALIGN);
        Self(&mut buffer[skip..])
    }

    /// Splits off `count` f32 elements.
    pub(super) fn f32(&mut self, count: usize) -> &'a mut [f32] {
        let (front, rest) = std::mem::take(&mut self.0).split_at_mut(count);
        self.0 = rest;
        front
    }

    /// Splits off `count` bf16 elements, an even number.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn bf16(&mut self, count: usize) -> &'a mut [u16] {
        bytemuck::cast_slice_mut(self.f32(count / 2))
    }

    /// Everything that is left.
    pub(super) fn rest(self) -> &'a mut [f32] {
        self.0
    }
}
