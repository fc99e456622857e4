//! How far apart the rows of activations lie.
//!
//! A product takes the same few terms of 32 rows at a time. Rows an even number of cache lines apart share few places of the
//! caches, and drive each other out; an odd number spreads them over all places. So long rows are kept a line further apart than
//! they are long. Nobody reads that line, and what it holds means nothing.

use zeroth_base::DType;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes from which on rows are kept apart: of shorter ones a line would be too large a part.
const LONG: usize = 16 * LINE;

/// Elements from one row of activations to the next.
pub const fn row_stride(width: usize, dtype: DType) -> usize {
    let size = dtype.bytes() as usize;
    let bytes = width * size;
    if bytes >= LONG && bytes.is_multiple_of(2 * LINE) { width + LINE / size } else { width }
}

/// Elements from one row to the next of a matrix [rows, width] that fills a slice of `found` elements.
///
/// # Panics
/// When it cannot: a mistake of the program.
#[track_caller]
pub(super) fn pitch(name: &str, found: usize, [rows, width]: [usize; 2]) -> usize {
    let pitch = found.checked_div(rows).unwrap_or(width);
    assert!(
        found == rows * pitch && pitch >= width,
        "`{name}` has {found} elements; the sizes given need {rows} rows of {width} or more"
    );
    pitch
}

/// For tests of kernels: matrices whose rows are further apart than they are long.
#[cfg(test)]
pub(super) mod apart {
    use super::super::{Isa, Pool, normal};
    use zeroth_kernel::Element;

    /// Elements between the end of a row and the next row.
    pub(in super::super) const APART: usize = 8;

    /// Numbers that depend on a name.
    pub(in super::super) fn random<T: Element>(name: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        normal(&Pool::new(1), 9, name, 0, 1.0, &mut values);
        values
    }

    /// The same rows, `pitch` elements from one to the next, with numbers between them.
    pub(in super::super) fn spread<T: Element>(
        values: &[T],
        [width, pitch]: [usize; 2],
        between: f32,
    ) -> Vec<T> {
        let between = vec![T::from_f32(between); pitch - width];
        values.chunks_exact(width).flat_map(|row| [row, &between].concat()).collect()
    }

    /// As [`spread`], [`APART`] elements apart.
    pub(in super::super) fn apart<T: Element>(values: &[T], width: usize, between: f32) -> Vec<T> {
        spread(values, [width, width + APART], between)
    }

    pub(in super::super) fn bits<T: Element>(values: &[T]) -> Vec<u32> {
        values.iter().map(|value| value.to_f32().to_bits()).collect()
    }

    /// Pools of one and three threads on every path that the machine has.
    pub(in super::super) fn pools() -> impl Iterator<Item = Pool> {
        let on = |path: Isa| [1, 3].map(|threads| Pool::on_isa(threads, path).expect("an available path"));
        Isa::available().iter().flat_map(move |path| on(*path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_rows_are_an_odd_number_of_lines_apart() {
        // Elements of a row, and to the next: 16 lines of 32 numbers of bf16 become 17.
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
        for (width, pitch) in of_bf16 {
            assert_eq!(row_stride(width, DType::Bf16), pitch, "{width}");
            assert_eq!(row_stride(width, DType::F16), pitch, "{width}");
        }
        for (width, pitch) in [(240, 240), (256, 272), (272, 272), (1024, 1040)] {
            assert_eq!(row_stride(width, DType::F32), pitch, "{width}");
        }
    }

    #[test]
    fn a_matrix_knows_its_pitch_by_its_length() {
        assert_eq!(pitch("x", 12, [3, 4]), 4);
        assert_eq!(pitch("x", 15, [3, 4]), 5);
        assert_eq!(pitch("x", 0, [0, 4]), 4);
        assert_eq!(pitch("x", 0, [3, 0]), 0);
    }

    #[test]
    #[should_panic(expected = "`x` has 13 elements; the sizes given need 3 rows of 4 or more")]
    fn rows_are_equally_far_apart() {
        pitch("x", 13, [3, 4]);
    }

    #[test]
    #[should_panic(expected = "`x` has 9 elements; the sizes given need 3 rows of 4 or more")]
    fn rows_do_not_overlap() {
        pitch("x", 9, [3, 4]);
    }
}
