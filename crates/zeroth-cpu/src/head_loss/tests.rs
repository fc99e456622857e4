//! Padded rows have the bits of contiguous rows.

use half::{bf16, f16};

use super::*;
use crate::rows::apart::{APART, apart, bits, pools, random};
use zeroth_kernel::HeadLossDims;

const SCALE: f32 = 0.125;

fn check_padded_rows<T: Element>(pool: &Pool, dims: HeadLossDims) {
    let HeadLossDims { rows, hidden, vocab, .. } = dims;
    let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
    let (x, w, before) =
        (random::<T>(1, rows * hidden), random::<T>(2, vocab * hidden), random::<f32>(3, vocab * hidden));
    let label = |row: usize| if row % 6 == 5 { -100 } else { (row * 29 % vocab) as i32 };
    let labels: Vec<_> = (0..rows).map(label).collect();
    let padded = HeadLossDims { row_stride: hidden + APART, ..dims };
    let both = [(dims, &x), (padded, &apart(&x, hidden, f32::NAN))];
    let empty = |count: usize| vec![T::from_f32(-f32::NAN); count];
    let dx_apart = |dx: &[T]| bits(&apart(dx, hidden, -f32::NAN));
    let mut scratch = vec![f32::NAN; head_loss_rounded_scratch(dims, pool.threads())];

    let [expected, found] = both.map(|(dims, x)| head_loss(pool, dims, x, &w, &labels, &mut scratch));
    assert_eq!(found.to_bits(), expected.to_bits(), "{case}");

    for add in [false, true] {
        let [(expected, expected_dx), (found, dx)] = both.map(|(dims, x)| {
            let (mut dx, mut dw) = (empty(x.len()), before.clone());
            let loss = head_loss_backward(
                pool,
                dims,
                x,
                &w,
                &labels,
                SCALE,
                Some(&mut dx),
                Some(&mut dw),
                add,
                &mut scratch,
            );
            ((loss.to_bits(), bits(&dw)), dx)
        });
        assert!(found == expected, "{case}, backward, add: {add}");
        assert!(bits(&dx) == dx_apart(&expected_dx), "{case}, dx, add: {add}");
    }

    if !dims.is_one_slice(T::DTYPE) {
        return;
    }
    let ids: Vec<_> =
        (0..rows).map(|row| if row % 5 == 4 { -1 } else { (row * row % vocab) as i32 }).collect();
    let [(expected, expected_dx), (found, dx)] = both.map(|(dims, x)| {
        let (mut dx, mut dw, mut token_rows) = (empty(x.len()), w.clone(), vec![f32::NAN; rows * hidden]);
        let own_rows = Some(TokenRows { ids: &ids, rows: &mut token_rows });
        let (loss, found_inf) = head_loss_backward_rounded(
            pool,
            dims,
            x,
            &w,
            &labels,
            SCALE,
            Some(&mut dx),
            &mut dw,
            own_rows,
            &mut scratch,
        );
        ((loss.to_bits(), found_inf, bits(&dw), bits(&token_rows)), dx)
    });
    assert!(found == expected && !found.1, "{case}, backward once");
    assert!(bits(&dx) == dx_apart(&expected_dx), "{case}, dx once");
}

#[test]
fn padded_rows_have_the_bits_of_contiguous_rows() {
    let small = HeadLossDims::new(70, 33, 600);
    // Too wide for the AMX path.
    let wide = HeadLossDims::new(5, 1030, 40);
    let none = HeadLossDims::new(0, 8, 5);
    let slices = HeadLossDims::new(1100, 24, 40);
    assert!(slices.slice_rows::<bf16>() < slices.rows && slices.slice_rows::<f32>() < slices.rows);
    for pool in pools() {
        for dims in [small, wide, none, slices] {
            check_padded_rows::<f32>(&pool, dims);
            check_padded_rows::<bf16>(&pool, dims);
            check_padded_rows::<f16>(&pool, dims);
        }
    }
}

#[test]
#[should_panic(expected = "`dx` has 8 elements; the sizes given need 10")]
fn dx_has_the_row_stride_of_x() {
    let dims = HeadLossDims { row_stride: 5, ..HeadLossDims::new(2, 4, 1) };
    let (mut scratch, mut dw) = (vec![0.0; head_loss_scratch(dims, 1)], [0.0; 4]);
    let (x, w, dx) = ([0.0f32; 10], [0.0; 4], &mut [0.0; 8]);
    head_loss_backward(
        &Pool::new(1),
        dims,
        &x,
        &w,
        &[0, 0],
        SCALE,
        Some(dx),
        Some(&mut dw),
        true,
        &mut scratch,
    );
}
