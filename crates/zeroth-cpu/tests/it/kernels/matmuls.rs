//! Matmuls of every shape and layout on every instruction set: accuracy, and the same bits in a smaller matrix.

use half::bf16;
use zeroth_base::name_key;
use zeroth_cpu::*;
use zeroth_kernel::*;

fn random<T: Element>(name: &str, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    normal(&Pool::new(1), 6, name_key(name), 0, 1.0, &mut values);
    values
}

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

fn relative_error<T: Element>(found: &[T], expected: &[f64]) -> f64 {
    let distance: f64 = found.iter().zip(expected).map(|(a, b)| (f64::from(a.to_f32()) - b).powi(2)).sum();
    (distance / expected.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

fn check_edge_shapes<T: Element>(bound: f64) {
    let shapes = [
        [1, 1, 1],
        [1, 3, 2],
        [2, 31, 17],
        [16, 16, 32],
        [17, 33, 15],
        [31, 1, 33],
        [33, 64, 65],
        [40, 47, 63],
        [7, 1100, 5],
        [530, 37, 3],
        [5, 40, 540],
        [3, 530, 1030],
        [193, 257, 97],
        // Around MR = 9 and NR = 48, tasks of 240 columns and k-steps of 64 terms, of AVX-512 in f32.
        [9, 64, 48],
        [13, 65, 64],
        [24, 130, 80],
        [46, 1026, 241],
        // More than one block of k, in y and in dw.
        [70, 4200, 37],
        [4150, 70, 37],
    ];
    for [rows, inputs, outputs] in shapes {
        let dims = LinearDims::new(rows, inputs, outputs);
        let (x, w) = (random::<T>("x", rows * inputs), random::<T>("w", outputs * inputs));
        let dy = random::<T>("dy", rows * outputs);
        let expected = reference::linear(dims, &wide(&x), &wide(&w), None);
        let [expected_dx, expected_dw, _] =
            reference::linear_backward(dims, &wide(&x), &wide(&w), &wide(&dy));
        for &isa in Isa::available() {
            let pool = Pool::on_isa(2, isa).unwrap();
            let mut scratch = vec![f32::NAN; linear_scratch(dims, 2)];
            let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), vec![0.0f32; w.len()]);
            linear(&pool, dims, &x, &w, None, &mut y, &mut scratch);
            linear_dx(&pool, dims, 1.0, &dy, &w, &mut dx, false, &mut scratch);
            linear_dw(&pool, dims, 1.0, &dy, &x, &mut dw, &mut scratch);
            let errors = [
                relative_error(&y, &expected),
                relative_error(&dx, &expected_dx),
                relative_error(&dw, &expected_dw),
            ];
            let bounds = [bound, bound, 3e-6];
            assert!(
                errors.iter().zip(bounds).all(|(error, bound)| *error < bound),
                "{isa}, {} {dims:?}: y, dx and dw are off by {errors:?}",
                T::DTYPE
            );
        }
    }
}

#[test]
fn edge_tiles_and_blocks_are_accurate_in_every_layout() {
    check_edge_shapes::<f32>(3e-6);
    // One rounding is off by at most half an ulp, 2^-8 of the value.
    check_edge_shapes::<bf16>(3.91e-3);
}

#[test]
fn a_row_gives_the_same_bits_in_a_smaller_matrix() {
    fn run<T: Element>(isa: Isa) {
        let (rows, inputs, outputs) = (70, 1057, 75);
        let pool = Pool::on_isa(2, isa).unwrap();
        let (x, w) = (random::<T>("x", rows * inputs), random::<T>("w", outputs * inputs));
        let y_of = |first: usize, rows: usize, outputs: usize| {
            let dims = LinearDims::new(rows, inputs, outputs);
            let mut y = vec![T::default(); rows * outputs];
            let mut scratch = vec![f32::NAN; linear_scratch(dims, 2)];
            let x = &x[first * inputs..][..rows * inputs];
            linear(&pool, dims, x, &w[..outputs * inputs], None, &mut y, &mut scratch);
            y
        };
        let whole = y_of(0, rows, outputs);
        for (first, rows, columns) in [(0, 1, 1), (3, 40, 33), (69, 1, 75), (17, 16, 16), (37, 33, 74)] {
            let part = y_of(first, rows, columns);
            for (row, part) in part.chunks_exact(columns).enumerate() {
                let expected = &whole[(first + row) * outputs..][..columns];
                let same =
                    part.iter().zip(expected).all(|(a, b)| a.to_f32().to_bits() == b.to_f32().to_bits());
                assert!(same, "{isa}, {}: row {row} of {rows} from {first}", T::DTYPE);
            }
        }
    }
    for &isa in Isa::available() {
        run::<f32>(isa);
        run::<bf16>(isa);
    }
}

/// A rounded dw has the bits of zeroing, accumulating and rounding, a sum of -0 included, and reports results that are not
/// finite.
#[test]
fn a_rounded_dw_has_the_bits_of_an_accumulated_one() {
    fn run<T: Element>(isa: Isa, [rows, inputs, outputs]: [usize; 3]) {
        let pool = Pool::on_isa(2, isa).unwrap();
        let dims = LinearDims::new(rows, inputs, outputs);
        let (mut x, mut dy) = (random::<T>("x", rows * inputs), random::<T>("dy", rows * outputs));
        // The first row of dw has sums that underflow from below, the second has zeros.
        for (row, dy) in dy.chunks_exact_mut(outputs).enumerate() {
            dy[0] = T::from_f32(if row == 0 { -1e-7 } else { 0.0 });
            dy[1] = T::from_f32(-0.0);
        }
        for x in &mut x {
            *x = T::from_f32(x.to_f32() * 1e-38);
        }
        let mut scratch = vec![f32::NAN; linear_scratch(dims, 2)];
        let mut sums = vec![0.0f32; outputs * inputs];
        linear_dw(&pool, dims, 1.0, &dy, &x, &mut sums, &mut scratch);
        let (mut wide, mut narrow) = (vec![f32::NAN; sums.len()], vec![T::from_f32(f32::NAN); sums.len()]);
        assert!(
            !linear_dw_rounded(&pool, dims, 1.0, &dy, &x, &mut wide, &mut scratch),
            "{isa}: all is finite"
        );
        assert!(
            !linear_dw_rounded(&pool, dims, 1.0, &dy, &x, &mut narrow, &mut scratch),
            "{isa}: all is finite"
        );
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits();
        assert!(sums.iter().zip(&wide).all(|(a, b)| same(*a, *b)), "{isa} {dims:?}");
        let rounded = sums.iter().map(|sum| T::from_f32(*sum).to_f32());
        assert!(rounded.zip(&narrow).all(|(a, b)| same(a, b.to_f32())), "{isa} {dims:?} {}", T::DTYPE);
        for infinite in [f32::NAN, f32::INFINITY] {
            let (mut dy, last) = (dy.clone(), dy.len() - 1);
            dy[last] = T::from_f32(infinite);
            assert!(
                linear_dw_rounded(&pool, dims, 1.0, &dy, &x, &mut narrow, &mut scratch),
                "{isa}: {infinite}"
            );
        }
    }
    for &isa in Isa::available() {
        for shape in [[3, 5, 2], [40, 33, 47], [130, 300, 65], [2100, 32, 64]] {
            run::<f32>(isa, shape);
            run::<bf16>(isa, shape);
        }
    }
}

/// Intel's manual specifies the order of TDPBF16PS: even and odd terms of 32 separately, then their sum.
#[test]
fn amx_sums_in_the_order_of_the_manual() {
    let Some(pool) = Pool::on_isa(1, Isa::Amx) else { return };
    let dims = LinearDims::new(100, 21, 19);
    let (x, dy) = (random::<bf16>("x", 100 * 21), random::<bf16>("dy", 100 * 19));
    let (mut dw, mut scratch) = (vec![0.0; 19 * 21], vec![f32::NAN; linear_scratch(dims, 1)]);
    linear_dw(&pool, dims, 1.0, &dy, &x, &mut dw, &mut scratch);
    for (at, dw) in dw.into_iter().enumerate() {
        let (output, input) = (at / 21, at % 21);
        let term =
            |sum: f32, row: usize| dy[row * 19 + output].to_f32().mul_add(x[row * 21 + input].to_f32(), sum);
        let expected = (0..100).step_by(32).fold(0.0f32, |before, first| {
            let part = |odd: usize| (first + odd..100.min(first + 32)).step_by(2).fold(0.0, term);
            before + (part(0) + part(1))
        });
        assert_eq!(dw.to_bits(), expected.to_bits(), "element {at}");
    }
}
