//! The row stride of activations.
//!
//! A matmul reads a few columns of 32 rows at a time. Rows an even number of cache lines apart map to few cache sets and
//! evict each other (conflict misses); an odd number of lines spreads them over all sets. So long rows are padded by one line,
//! which no kernel reads.

use zeroth_base::DType;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Shortest row that is padded, in bytes: on shorter ones a line would cost too much memory.
const LONG: usize = 16 * LINE;

/// The row stride of activations [rows, width], in elements.
pub const fn row_stride(width: usize, dtype: DType) -> usize {
    let size = dtype.bytes() as usize;
    let bytes = width * size;
    if bytes >= LONG && bytes.is_multiple_of(2 * LINE) { width + LINE / size } else { width }
}

/// Checks that a slice of `found` elements is a matrix [rows, width] whose rows are `stride` apart, the last with its padding.
///
/// # Panics
/// When it is shorter or longer, or when rows overlap.
#[track_caller]
pub(super) fn check_rows(name: &str, found: usize, [rows, width]: [usize; 2], stride: usize) {
    assert!(
        stride >= width,
        "rows of `{name}` are {width} elements wide; a stride of {stride} makes them overlap"
    );
    let needed = rows * stride;
    assert!(
        found == needed,
        "`{name}` has {found} elements; {rows} rows that are {stride} apart need {needed}"
    );
}

/// For tests of kernels: matrices with padded rows.
#[cfg(test)]
pub(super) mod apart {
    use super::super::{Isa, Pool, normal};
    use zeroth_kernel::Element;

    /// Padding of a row, in elements.
    pub(in super::super) const APART: usize = 8;

    /// Normal numbers that depend on `name`.
    pub(in super::super) fn random<T: Element>(name: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        normal(&Pool::new(1), 9, name, 0, 1.0, &mut values);
        values
    }

    /// The same rows with another stride and `between` as padding.
    pub(in super::super) fn spread<T: Element>(
        values: &[T],
        [width, stride]: [usize; 2],
        between: f32,
    ) -> Vec<T> {
        let between = vec![T::from_f32(between); stride - width];
        values.chunks_exact(width).flat_map(|row| [row, &between].concat()).collect()
    }

    /// [`spread`] with [`APART`] elements of padding.
    pub(in super::super) fn apart<T: Element>(values: &[T], width: usize, between: f32) -> Vec<T> {
        spread(values, [width, width + APART], between)
    }

    pub(in super::super) fn bits<T: Element>(values: &[T]) -> Vec<u32> {
        values.iter().map(|value| value.to_f32().to_bits()).collect()
    }

    /// Pools of one and three threads on every ISA of this machine.
    pub(in super::super) fn pools() -> impl Iterator<Item = Pool> {
        let on = |isa: Isa| [1, 3].map(|threads| Pool::on_isa(threads, isa).expect("an available ISA"));
        Isa::available().iter().flat_map(move |isa| on(*isa))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rows_get_an_odd_number_of_cache_lines() {
        // (width, stride): 16 lines of 32 bf16 become 17.
        let of_bf16 = [
            (1, 1),
            (480, 480),
            (511, 511),
            (512, 544),
            (544, 544),
            (1000, 1000),
            (1024, 1056),
            (3072, 3104),
        ];
        for (width, stride) in of_bf16 {
            assert_eq!(row_stride(width, DType::Bf16), stride, "{width}");
            assert_eq!(row_stride(width, DType::F16), stride, "{width}");
        }
        for (width, stride) in [(240, 240), (256, 272), (272, 272), (1024, 1040)] {
            assert_eq!(row_stride(width, DType::F32), stride, "{width}");
        }
    }

    #[test]
    fn whole_rows_pass() {
        check_rows("x", 12, [3, 4], 4);
        check_rows("x", 15, [3, 4], 5);
        check_rows("x", 0, [0, 4], 5);
        check_rows("x", 0, [3, 0], 0);
    }

    #[test]
    #[should_panic(expected = "`x` has 15 elements; 3 rows that are 4 apart need 12")]
    fn a_longer_slice_is_refused_even_if_it_has_another_whole_stride() {
        check_rows("x", 15, [3, 4], 4);
    }

    #[test]
    #[should_panic(expected = "`x` has 14 elements; 3 rows that are 5 apart need 15")]
    fn the_last_row_has_its_padding() {
        check_rows("x", 14, [3, 4], 5);
    }

    #[test]
    #[should_panic(expected = "rows of `x` are 4 elements wide; a stride of 3 makes them overlap")]
    fn rows_do_not_overlap() {
        check_rows("x", 9, [3, 4], 3);
    }
}
