//! Scalar functions that vectorize when they are inlined into loops over slices: exp, and sums in a fixed order.

use super::isa::Isa;
use zeroth_kernel::Element;

/// Lanes of a sum: element i is added to lane i mod 16, and lanes are added pairwise at the end, on every instruction set.
pub(super) const LANES: usize = 16;

/// ln 2 in two parts, so that n · HIGH is exact for every exponent n.
const HIGH: f32 = 0.693_359_4;
const LOW: f32 = -2.121_944_4e-4;
/// 1.5 · 2^23: adding it leaves the nearest integer in the low bits.
pub(super) const ROUND_MAGIC: f32 = 12_582_912.0;
/// Coefficients of (e^r - 1 - r) / r², highest order first.
const EXP_COEFFICIENTS: [f32; 6] =
    [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// e^x, within 2 ulp; 0 below -87.33.
///
/// It inlines into vector loops and does not depend on libm.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-87.4, 88.8);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND_MAGIC;
    let n = shifted - ROUND_MAGIC;
    let r = clamped - n * HIGH - n * LOW;
    let mut p = EXP_COEFFICIENTS[0];
    for coefficient in &EXP_COEFFICIENTS[1..] {
        p = p * r + coefficient;
    }
    let value = p * (r * r) + r + 1.0;
    // 2^n in two factors, so that n = 128 does not overflow early.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND_MAGIC.to_bits() as i32);
    let half = exponent >> 1;
    let scaled = value * power_of_two(half) * power_of_two(exponent.wrapping_sub(half));
    if x < -87.336_54 { 0.0 } else { scaled }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

/// Whether multiply-add is one instruction on this instruction set, not a library call.
pub(super) fn has_fma(isa: Isa) -> bool {
    cfg!(target_arch = "aarch64") || isa != Isa::Portable
}

/// a · b + c, rounded once with `FMA`.
#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// 1/√(mean + eps) of a mean of squares, by which a row is normalized. NaN where the squares of finite values overflowed: 0
/// would make the row, and every gradient through it, zero without a word.
#[inline(always)]
pub(super) fn inverse_rms(mean: f32, eps: f32) -> f32 {
    if mean == f32::INFINITY { f32::NAN } else { 1.0 / (mean + eps).sqrt() }
}

/// 1 / (1 + e^-x); 0 below -87.
///
/// The range is smaller than that of [`exp`], so 2^n is a single factor, added to the exponent bits.
#[inline(always)]
pub(super) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    let clamped = (-x).clamp(-87.0, 87.0);
    let shifted = mul_add::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND_MAGIC);
    let n = shifted - ROUND_MAGIC;
    let r = mul_add::<FMA>(n, -LOW, mul_add::<FMA>(n, -HIGH, clamped));
    let mut p = EXP_COEFFICIENTS[0];
    for coefficient in &EXP_COEFFICIENTS[1..] {
        p = mul_add::<FMA>(p, r, *coefficient);
    }
    let value = mul_add::<FMA>(p, r * r, r) + 1.0;
    let power = f32::from_bits(value.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -87.0 { 0.0 } else { 1.0 / (1.0 + power) }
}

/// Coefficients of e^(x²/2) · (1 - Φ(x)) / t in t = 1 / (1 + 0.3125 x) for x from 0 to 13.5, highest order first. A minimax
/// fit; the relative error is below 1e-8.
const UPPER_TAIL: [f32; 10] = [
    -0.018_581_582,
    0.089_005_78,
    -0.145_336_63,
    0.066_564_99,
    0.003_925_511,
    0.052_054_275,
    0.091_297_59,
    0.111_624_986,
    0.124_781_29,
    0.124_663_785,
];

/// The normal distribution function Φ(x), within 3 ulp in both tails, and e^(-x²/2). 1 + erf would cancel in the lower one.
#[inline(always)]
pub(super) fn normal_cdf<const FMA: bool>(x: f32) -> (f32, f32) {
    let a = x.abs().min(20.0);
    let square = a * a;
    // x² in two parts: an error of half an ulp of 80 would be one of 64 ulp of e^80.
    let low = if FMA {
        a.mul_add(a, -square)
    } else {
        let high = f32::from_bits(a.to_bits() & 0xffff_f000);
        let rest = a - high;
        ((high * high - square) + 2.0 * high * rest) + rest * rest
    };
    let bell = exp(-0.5 * square) * (1.0 - 0.5 * low);
    let t = 1.0 / mul_add::<FMA>(a, 0.3125, 1.0);
    let mut p = UPPER_TAIL[0];
    for coefficient in &UPPER_TAIL[1..] {
        p = mul_add::<FMA>(p, t, *coefficient);
    }
    let tail = bell * (t * p);
    let cdf = if x < 0.0 { tail } else { 1.0 - tail };
    // min drops a NaN.
    if x.is_nan() { (x, x) } else { (cdf, bell) }
}

/// Coefficients of (ln(1 + f) - f + f² / 2) / f³ for 1 + f from √½ to √2, highest order first (Cephes).
const LN_COEFFICIENTS: [f32; 9] = [
    7.037_683_6e-2,
    -1.151_461e-1,
    1.167_699_9e-1,
    -1.242_014_1e-1,
    1.424_932_3e-1,
    -1.666_805_8e-1,
    2.000_071_5e-1,
    -2.499_999_4e-1,
    3.333_333e-1,
];

/// ln x for normal x, within 2 ulp; 0 at 1.
#[inline(always)]
pub(super) fn ln<const FMA: bool>(x: f32) -> f32 {
    // The exponent that leaves a mantissa from √½ to √2.
    let exponent = (x.to_bits() as i32).wrapping_sub(0x3f35_04f3) >> 23;
    let f = f32::from_bits((x.to_bits() as i32).wrapping_sub(exponent << 23) as u32) - 1.0;
    let mut p = LN_COEFFICIENTS[0];
    for coefficient in &LN_COEFFICIENTS[1..] {
        p = mul_add::<FMA>(p, f, *coefficient);
    }
    let (square, n) = (f * f, exponent as f32);
    let low = mul_add::<FMA>(n, LOW, p * (f * square));
    mul_add::<FMA>(n, HIGH, f + mul_add::<FMA>(square, -0.5, low))
}

/// Coefficients of (2^t - 1) / t for |t| ≤ 1/2, highest order first. The relative error of 2^t is below 1e-7.
#[allow(clippy::approx_constant, reason = "fitted to the range; ln 2 itself would be further off")]
pub(super) const EXP2_COEFFICIENTS: [f32; 5] =
    [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 0.240_222_42, 0.693_147];

/// 2^x for x up to 126, within 2 ulp; 2^-126 below -126.
///
/// For softmax, where a weight that small is negligible beside the largest, which is at least 1.
#[inline(always)]
pub(super) fn exp2<const FMA: bool>(x: f32) -> f32 {
    let clamped = if x < -126.0 { -126.0 } else { x };
    let shifted = clamped + ROUND_MAGIC;
    let t = clamped - (shifted - ROUND_MAGIC);
    let mut p = EXP2_COEFFICIENTS[0];
    for coefficient in &EXP2_COEFFICIENTS[1..] {
        p = mul_add::<FMA>(p, t, *coefficient);
    }
    let value = mul_add::<FMA>(p, t, 1.0);
    f32::from_bits(value.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// Reference for the sums below: adds `term(i)` for i below `count` in 16 lanes.
#[cfg(test)]
fn sum(count: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = count / LANES * LANES;
    let mut first = 0;
    while first < whole {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += term(first + lane);
        }
        first += LANES;
    }
    for (lane, total) in lanes.iter_mut().enumerate().take(count - whole) {
        *total += term(whole + lane);
    }
    add_lanes(lanes)
}

/// Adds `term` of each element in 16 lanes. Fixed-size chunks vectorize; an indexed loop is four times slower.
#[inline(always)]
pub(super) fn sum_of<T: Element>(a: &[T], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (whole, rest) = a.as_chunks::<LANES>();
    for a in whole {
        for lane in 0..LANES {
            lanes[lane] += term(a[lane].to_f32());
        }
    }
    for (total, a) in lanes.iter_mut().zip(rest) {
        *total += term(a.to_f32());
    }
    add_lanes(lanes)
}

/// [`sum_of`] over two slices of equal length.
#[inline(always)]
pub(super) fn sum_of_two<T: Element>([a, b]: [&[T]; 2], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += term(a[lane].to_f32(), b[lane].to_f32());
        }
    }
    for ((total, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *total += term(a.to_f32(), b.to_f32());
    }
    add_lanes(lanes)
}

/// [`sum_of`] over three slices of equal length.
#[inline(always)]
pub(super) fn sum_of_three<T: Element>([a, b, c]: [&[T]; 3], term: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest), (c, c_rest)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for lane in 0..LANES {
            lanes[lane] += term(a[lane].to_f32(), b[lane].to_f32(), c[lane].to_f32());
        }
    }
    for (((total, a), b), c) in lanes.iter_mut().zip(a_rest).zip(b_rest).zip(c_rest) {
        *total += term(a.to_f32(), b.to_f32(), c.to_f32());
    }
    add_lanes(lanes)
}

/// The sum of the lanes.
#[inline(always)]
pub(super) fn add_lanes(lanes: [f32; LANES]) -> f32 {
    fold(lanes, |a, b| a + b)
}

/// The maximum of a slice; -infinity if it is empty.
#[inline(always)]
pub(super) fn max_of(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = values.as_chunks::<LANES>();
    for chunk in whole {
        for (best, &value) in lanes.iter_mut().zip(chunk) {
            *best = if value > *best { value } else { *best };
        }
    }
    for (best, &value) in lanes.iter_mut().zip(rest) {
        *best = if value > *best { value } else { *best };
    }
    fold(lanes, f32::max)
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = join(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_2_ulp() {
        let mut worst = 0.0f64;
        for step in -870_000..=887_000 {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * exact.max(f64::from(f32::MIN_POSITIVE)) / 2.0;
            worst = worst.max((f64::from(exp(x)) - exact).abs() / unit);
        }
        assert!(worst < 4.0, "{worst} half ulp");
    }

    #[test]
    fn exp_of_special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(-1e9), 0.0);
        assert_eq!(exp(1e9), f32::INFINITY);
    }

    #[test]
    fn sigmoid_is_within_2_ulp_and_saturates() {
        for step in -870_000..=870_000 {
            let x = step as f32 * 1e-4;
            let exact = 1.0 / (1.0 + f64::from(-x).exp());
            let unit = f64::from(f32::EPSILON) * exact;
            for found in [sigmoid::<true>(x), sigmoid::<false>(x)] {
                let error = (f64::from(found) - exact).abs() / unit;
                assert!(error < 2.0, "{x}: {error} ulp");
            }
        }
        for (x, expected) in [
            (f32::INFINITY, 1.0),
            (1e30, 1.0),
            (0.0, 0.5),
            (-87.1, 0.0),
            (-1e30, 0.0),
            (f32::NEG_INFINITY, 0.0),
        ] {
            assert_eq!([sigmoid::<true>(x), sigmoid::<false>(x)], [expected; 2], "{x}");
        }
    }

    #[test]
    fn exp2_is_within_2_ulp_and_keeps_nan() {
        for step in -1_260_000..=1_260_000 {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).exp2();
            for found in [exp2::<true>(x), exp2::<false>(x)] {
                let error = (f64::from(found) - exact).abs() / (f64::from(f32::EPSILON) * exact);
                assert!(error < 2.0, "{x}: {error} ulp");
            }
        }
        for x in [-126.0, -126.5, -1e30, f32::NEG_INFINITY] {
            assert_eq!([exp2::<true>(x), exp2::<false>(x)], [f32::MIN_POSITIVE; 2], "{x}");
        }
        assert!(exp2::<true>(f32::NAN).is_nan() && exp2::<false>(f32::NAN).is_nan());
        assert_eq!(exp2::<true>(0.0), 1.0);
    }

    #[test]
    fn ln_is_within_2_ulp() {
        for step in 1..=2_000_000 {
            let x = step as f32 * 1e-6;
            let exact = f64::from(x).ln();
            for found in [ln::<true>(x), ln::<false>(x)] {
                let error = (f64::from(found) - exact).abs() / (f64::from(f32::EPSILON) * exact.abs());
                assert!(error < 2.0 || (found == 0.0 && exact == 0.0), "{x}: {error} ulp");
            }
        }
        assert_eq!([ln::<true>(1.0), ln::<false>(1.0)], [0.0; 2]);
        let smallest = f64::from(ln::<true>(f32::MIN_POSITIVE)) - f64::from(f32::MIN_POSITIVE).ln();
        assert!(smallest.abs() < 1e-5, "{smallest}");
    }

    #[test]
    fn sums_add_every_element_for_any_length() {
        for count in [0, 1, 15, 16, 17, 33] {
            let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
            assert_eq!(sum_of(&values, |value| value), sum(count, |i| values[i]));
            let squares = sum_of_two([&values, &values], |a, b| a * b);
            assert_eq!(squares, sum(count, |i| values[i] * values[i]));
            let products = sum_of_three([&values, &values, &values], |a, b, c| a * b + c);
            assert_eq!(products, sum(count, |i| values[i] * values[i] + values[i]));
            assert_eq!(sum(count, |i| values[i]), (count * count.saturating_sub(1)) as f32 / 2.0);
            assert_eq!(max_of(&values), if count == 0 { f32::NEG_INFINITY } else { count as f32 - 1.0 });
        }
    }
}
