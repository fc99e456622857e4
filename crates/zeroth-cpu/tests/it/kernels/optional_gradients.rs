//! A gradient without a destination is not computed, and the other one keeps its bits.

use std::fmt::Debug;

use half::{bf16, f16};
use zeroth_cpu::*;
use zeroth_kernel::*;

/// The destinations that a frozen weight, or an input below which nothing is trained, leave.
const WANTED: [[bool; 2]; 3] = [[true, true], [true, false], [false, true]];

fn pools() -> impl Iterator<Item = Pool> {
    let on = |isa: &Isa| [1, 3].map(|threads| Pool::on_isa(threads, *isa).unwrap());
    Isa::available().iter().flat_map(on)
}

fn random<T: Element>(name: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    normal(&Pool::new(1), 11, name, 0, 1.0, &mut values);
    values
}

/// Runs a kernel with each set of destinations and compares what it writes with what it writes when it has both. It gets
/// scratch only where it writes a weight's gradient.
#[track_caller]
fn assert_same<T: Element + PartialEq + Debug>(
    case: &str,
    [elements, weights, scratch]: [usize; 3],
    kernel: impl Fn(Option<&mut [T]>, Option<&mut [f32]>, &mut [f32]),
) {
    let run = |[input, weight]: [bool; 2]| {
        let (mut dx, mut dw) = (vec![T::from_f32(-3.0); elements], vec![0.5; weights]);
        let mut scratch = vec![f32::NAN; if weight { scratch } else { 0 }];
        kernel(input.then_some(&mut dx[..]), weight.then_some(&mut dw[..]), &mut scratch);
        (dx, dw)
    };
    let (dx, dw) = run([true, true]);
    assert!(dx.iter().any(|dx| *dx != T::from_f32(-3.0)) && dw.iter().any(|dw| *dw != 0.5), "{case}");
    for wanted in WANTED {
        let (found_dx, found_dw) = run(wanted);
        let untouched = (vec![T::from_f32(-3.0); elements], vec![0.5; weights]);
        assert_eq!(found_dx, if wanted[0] { dx.clone() } else { untouched.0 }, "{case}, {wanted:?}");
        assert_eq!(found_dw, if wanted[1] { dw.clone() } else { untouched.1 }, "{case}, {wanted:?}");
    }
}

fn norms<T: Element + PartialEq + Debug>(pool: &Pool) {
    // A width of whole vectors and another one; more rows than one task has.
    for (rows, width) in [(70, 96), (3, 40)] {
        let dims = RmsNormDims::new(rows, width, 1e-6);
        let case = format!("rms_norm, {}, {}, {dims:?}", pool.isa(), T::DTYPE);
        let [dy, h, past] = [1, 2, 3].map(|name| random::<T>(name, rows * width));
        let (w, rstd) = (random::<T>(4, width), random::<f32>(5, rows));
        for residual in [None, Some(&past[..])] {
            let sizes = [rows * width, width, rms_norm_scratch(dims)];
            assert_same(&case, sizes, |dh, dw, scratch| {
                rms_norm_backward(pool, dims, &dy, &h, &rstd, &w, residual, dh, dw, scratch);
            });
        }
    }
}

fn head_norms<T: Element + PartialEq + Debug>(pool: &Pool) {
    // Heads rotated whole, in part, and not at all.
    for (head_dim, rotated) in [(64, 64), (20, 12), (8, 0)] {
        let rope = RopeDims::new(37, 3, head_dim, rotated);
        let dims = HeadNormRopeDims { rope, eps: 1e-6 };
        let (elements, angles) = (37 * 3 * head_dim, 37 * rotated / 2);
        let case = format!("head_norm_rope, {}, {}, {rope:?}", pool.isa(), T::DTYPE);
        let [dy, h] = [1, 2].map(|name| random::<T>(name, elements));
        let (w, rstd) = (random::<T>(3, head_dim), random::<f32>(4, 37 * 3));
        let (cos, sin) = (random::<f32>(5, angles), random::<f32>(6, angles));
        let sizes = [elements, head_dim, head_norm_rope_scratch(dims)];
        assert_same(&case, sizes, |dh, dw, scratch| {
            head_norm_rope_backward(pool, dims, &dy, &h, &rstd, &w, &cos, &sin, dh, dw, scratch);
        });
    }
}

fn heads<T: Element + PartialEq + Debug>(pool: &Pool) {
    // One slice, too wide for AMX, and several slices.
    for (rows, hidden, vocab) in [(70, 33, 600), (5, 1030, 40), (1100, 24, 40)] {
        let dims = HeadLossDims::new(rows, hidden, vocab);
        let case = format!("head_loss, {}, {}, {dims:?}", pool.isa(), T::DTYPE);
        let (x, w) = (random::<T>(1, rows * hidden), random::<T>(2, vocab * hidden));
        let label = |row: usize| if row % 6 == 5 { -100 } else { (row * 29 % vocab) as i32 };
        let labels: Vec<_> = (0..rows).map(label).collect();
        let mut scratch = vec![f32::NAN; head_loss_rounded_scratch(dims, pool.threads())];
        let alone = head_loss(pool, dims, &x, &w, &labels, &mut scratch);
        for add in [false, true] {
            assert_same(&case, [rows * hidden, vocab * hidden, 0], |dx, dw, _| {
                let mut scratch = vec![f32::NAN; head_loss_scratch(dims, pool.threads())];
                let loss = head_loss_backward(pool, dims, &x, &w, &labels, 0.125, dx, dw, add, &mut scratch);
                assert_eq!(loss.to_bits(), alone.to_bits(), "{case}");
            });
        }
        let loss = head_loss_backward(pool, dims, &x, &w, &labels, 0.125, None, None, false, &mut scratch);
        assert_eq!(loss.to_bits(), alone.to_bits(), "{case}, without gradients");
        if !dims.is_one_slice(T::DTYPE) {
            continue;
        }
        let [whole, weight_alone] = [true, false].map(|wants_dx| {
            let (mut dx, mut dw) = (x.clone(), w.clone());
            let dx = wants_dx.then_some(&mut dx[..]);
            let grads = (dx, &mut dw[..]);
            head_loss_backward_rounded(
                pool,
                dims,
                &x,
                &w,
                &labels,
                0.125,
                grads.0,
                grads.1,
                None,
                &mut scratch,
            );
            dw
        });
        assert_eq!(weight_alone, whole, "{case}, rounded");
    }
}

#[test]
fn a_gradient_without_a_destination_leaves_the_bits_of_the_other() {
    for pool in pools() {
        norms::<f32>(&pool);
        norms::<bf16>(&pool);
        norms::<f16>(&pool);
        head_norms::<f32>(&pool);
        head_norms::<bf16>(&pool);
        head_norms::<f16>(&pool);
        heads::<f32>(&pool);
        heads::<bf16>(&pool);
        heads::<f16>(&pool);
    }
}
