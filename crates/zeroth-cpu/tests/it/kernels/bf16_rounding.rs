//! bf16 storage: the distance of results, in ulp, from the exact result of the same stored inputs.

use half::bf16;
use zeroth_base::{ActivationFn, name_key};
use zeroth_cpu::*;
use zeroth_kernel::*;

fn random(name: &str, count: usize) -> Vec<bf16> {
    let mut values = vec![bf16::ZERO; count];
    normal(&Pool::new(1), 4, name_key(name), 0, 1.0, &mut values);
    values
}

fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|&x| x.to_f64()).collect()
}

/// The largest distance in bf16 ulp. Where terms cancel, the ulp is that of 1/64 of the typical magnitude; a smaller one would
/// measure the error of the f32 sum.
fn ulps(found: &[bf16], expected: &[f64]) -> f64 {
    let typical = (expected.iter().map(|b| b * b).sum::<f64>() / expected.len() as f64).sqrt();
    let unit = |size: f64| 2f64.powf(size.max(typical / 64.0).log2().floor() - 7.0);
    found.iter().zip(expected).map(|(a, b)| (a.to_f64() - b).abs() / unit(b.abs())).fold(0.0, f64::max)
}

/// A single rounding is half an ulp; the f32 arithmetic before it adds a little.
const ONE_ROUNDING: f64 = 0.51;

#[test]
fn results_rounded_once_are_within_half_an_ulp() {
    for &isa in Isa::available() {
        rounded_once(&Pool::on_isa(2, isa).unwrap());
    }
}

fn rounded_once(pool: &Pool) {
    let dims = LinearDims::new(33, 300, 40);
    let (x, w, dy) = (random("x", 33 * 300), random("w", 40 * 300), random("dy", 33 * 40));
    let mut scratch = vec![0.0; linear_scratch(dims, 2)];
    let (mut y, mut dx) = (vec![bf16::ZERO; 33 * 40], vec![bf16::ZERO; 33 * 300]);
    linear(pool, dims, &x, &w, None, &mut y, &mut scratch);
    linear_dx(pool, dims, 1.0, &dy, &w, &mut dx, false, &mut scratch);
    let linear_y = ulps(&y, &reference::linear(dims, &wide(&x), &wide(&w), None));
    let linear_dx = ulps(&dx, &reference::linear_backward(dims, &wide(&x), &wide(&w), &wide(&dy))[0]);

    let (gate, up) = (random("gate", 5000), random("up", 5000));
    let mut gated = vec![bf16::ZERO; 5000];
    let activations = ActivationFn::ALL.map(|activation| {
        gated_activation(pool, activation, &gate, &up, &mut gated);
        let expected = reference::gated_activation(activation, &wide(&gate), &wide(&up));
        (activation.name(), ulps(&gated, &expected), ONE_ROUNDING)
    });

    let dims = AttentionDims::new(200, 4, 2, 16, None, 0.25);
    let (q, k, v) = (random("q", 200 * 64), random("k", 200 * 32), random("v", 200 * 32));
    let (mut out, mut lse) = (vec![bf16::ZERO; 200 * 64], vec![0.0; 800]);
    let mut scratch = vec![0.0; attention_scratch(&dims, 2)];
    attention(pool, &dims, &ContextSlices::new(&[0, 60, 200]), &q, &k, &v, &mut out, &mut lse, &mut scratch);
    let attention =
        ulps(&out, &reference::attention(&dims, &[0, 60, 200], &wide(&q), &wide(&k), &wide(&v))[0]);

    // AMX multiplies softmax weights rounded to bf16, as flash attention does: up to half an ulp more for each weight, most of
    // which cancels. Where the terms cancel, the ulp is that of the remainder.
    let weights = if pool.isa() == Isa::Amx { 64.0 } else { ONE_ROUNDING };
    for (name, ulps, bound) in [
        ("linear y", linear_y, ONE_ROUNDING),
        ("linear dx", linear_dx, ONE_ROUNDING),
        ("attention", attention, weights),
    ]
    .into_iter()
    .chain(activations)
    {
        assert!(ulps <= bound, "{name} on {}: {ulps} ulp", pool.isa());
    }
}

#[test]
fn rms_norm_rounds_twice_as_transformers_does() {
    let pool = Pool::new(2);
    let dims = RmsNormDims::new(70, 96, 1e-6);
    let (h, w) = (random("h", 70 * 96), random("w", 96));
    let (mut y, mut rstd) = (vec![bf16::ZERO; 70 * 96], vec![0.0; 70]);
    rms_norm(&pool, dims, &h, &w, &mut y, &mut rstd);
    let ulps = ulps(&y, &reference::rms_norm(dims, &wide(&h), &wide(&w))[0]);
    assert!(ulps <= 1.6, "{ulps} ulp");
    for (at, y) in y.iter().enumerate() {
        let normed = bf16::from_f32(h[at].to_f32() * rstd[at / 96]);
        assert_eq!(*y, bf16::from_f32(w[at % 96].to_f32() * normed.to_f32()), "element {at}");
    }
}

#[test]
fn casts_round_to_nearest_even_and_keep_nan() {
    let pool = Pool::new(2);
    let values = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX, f32::INFINITY, f32::NAN, -0.0, 1e-40];
    let mut narrow = [bf16::ZERO; 8];
    convert(&pool, &values, &mut narrow);
    // 1 + 2^-8 is halfway between 1 and 1 + 2^-7, 1 + 3·2^-8 between 1 + 2^-7 and 1 + 2^-6; the even ones are 1 and 1 + 2^-6.
    assert_eq!(narrow[..5], [1.0, 1.0, 1.015_625, f32::INFINITY, f32::INFINITY].map(bf16::from_f32));
    assert!(narrow[5].is_nan());
    assert!(narrow[6].is_sign_negative());
    assert_ne!(narrow[7], bf16::ZERO, "a subnormal number is kept");
}

#[test]
fn rank_sums_are_f32_in_rank_order_and_rounded_once() {
    let pool = Pool::new(2);
    let ranks = [[1.0f32], [3.0e-3], [3.0e-3]].map(|rank| rank.map(bf16::from_f32));
    let mut narrow = [bf16::ZERO];
    sum_ranks(&pool, &ranks.concat(), &mut narrow, false);
    // With a rounding after each addition it would have stayed 1.
    assert_eq!(narrow[0].to_f32(), 1.007_812_5);
    let mut wide = [0.5f32];
    sum_ranks(&pool, &[1e8f32, 1.0, -1e8], &mut wide, true);
    // 1e8 + 1 is 1e8 in f32: ranks are added in the given order.
    assert_eq!(wide[0], 0.5);
    sum_ranks(&pool, &[1e8f32, -1e8, 1.0], &mut wide, true);
    assert_eq!(wide[0], 1.5);
}
