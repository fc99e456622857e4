//! Operands of benchmarked kernels, allocated as in a run: one arena on huge pages, every operand page-aligned.

use bytemuck::Pod;

use zeroth_cpu::{Arena, LARGE_PAGE, Pool, normal};
use zeroth_kernel::Element;
use zeroth_kernel::{DeviceError, Span};

const PAGE: usize = 4096;

/// The operands of a kernel, by their bytes.
pub(super) struct Operands<const N: usize> {
    arena: Arena,
    bytes: [usize; N],
}

impl<const N: usize> Operands<N> {
    pub(super) fn new(bytes: [usize; N]) -> Result<Self, DeviceError> {
        let all: usize = bytes.iter().map(|bytes| bytes.next_multiple_of(PAGE)).sum();
        // Whole huge pages: else the last operand would be on small ones.
        Ok(Self { arena: Arena::new("device", all.next_multiple_of(LARGE_PAGE) as u64)?, bytes })
    }

    /// All operands, in order.
    pub(super) fn split(&mut self) -> [&mut [u8]; N] {
        let all = Span::device(0, self.arena.capacity());
        let mut rest = self.arena.bytes_mut(all).expect("a span of the whole arena");
        self.bytes.map(|bytes| {
            let taken = std::mem::take(&mut rest);
            let (own, behind) = taken.split_at_mut(bytes.next_multiple_of(PAGE));
            rest = behind;
            &mut own[..bytes]
        })
    }
}

/// An operand as elements.
pub(super) fn of<T: Pod>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

/// Random numbers that are generated; longer operands repeat them, because generating takes long.
const FRESH: usize = 1 << 16;

/// Fills an operand with standard normal numbers of the stream `name`.
pub(super) fn random<T: Element>(name: u64, bytes: &mut [u8]) {
    fill_random::<T>(name, of(bytes));
}

/// Fills a slice with standard normal numbers of the stream `name`.
pub fn fill_random<T: Element>(name: u64, numbers: &mut [T]) {
    let (fresh, rest) = numbers.split_at_mut(FRESH.min(numbers.len()));
    normal::<T>(&Pool::new(1), 7, name, 0, 1.0, fresh);
    for piece in rest.chunks_mut(FRESH) {
        piece.copy_from_slice(&fresh[..piece.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_page_aligned_and_disjoint() {
        let mut operands = Operands::new([10, 0, 5000, 4096]).unwrap();
        for (at, operand) in operands.split().into_iter().enumerate() {
            assert!(operand.as_ptr().addr().is_multiple_of(PAGE));
            operand.fill(at as u8 + 1);
        }
        let found = operands.split().map(|operand| (operand.len(), operand.first().copied()));
        assert_eq!(found, [(10, Some(1)), (0, None), (5000, Some(3)), (4096, Some(4))]);
    }

    #[test]
    fn random_numbers_fill_the_whole_operand() {
        let mut numbers = vec![0.0f32; 2 * FRESH + 5];
        fill_random(1, &mut numbers);
        let zeros = numbers.iter().filter(|number| **number == 0.0).count();
        assert!(zeros < 10, "{zeros} zeros");
        let mut other = vec![0.0f32; 9];
        fill_random(2, &mut other);
        assert_ne!(other, numbers[..9]);
    }
}
