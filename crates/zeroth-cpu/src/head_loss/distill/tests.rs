use half::{bf16, f16};
use zeroth_graph::DistillSpec;
use zeroth_graph::reference::{self, distill_loss};
use zeroth_kernel::Deviation;

use super::*;
use crate::rows::apart::{APART, apart, bits, pools, random};
use crate::{head_loss_backward, head_loss_scratch, top_log_probs, top_log_probs_scratch};

const SCALES: [f32; 2] = [0.05, 0.125];

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

fn every_distillation() -> impl Iterator<Item = DivergenceSpec> {
    [0.0, 0.3, 1.0].into_iter().flat_map(|beta| {
        [(1.0, false), (2.0, true)].map(|(temperature, squared)| DivergenceSpec {
            beta,
            temperature,
            squared,
        })
    })
}

const fn spec(distillation: DivergenceSpec) -> DistillSpec {
    let DivergenceSpec { beta, temperature, squared } = distillation;
    // As f32 has it.
    DistillSpec { beta: beta as f64, temperature: temperature as f64, squared }
}

/// A head, its teacher and its labels.
struct Case<T> {
    dims: HeadLossDims,
    x: Vec<T>,
    w: Vec<T>,
    labels: Vec<i32>,
    hidden: usize,
    vocab: usize,
    teacher_x: Vec<T>,
    teacher_w: Vec<T>,
}

/// Losses, dx and dw.
type Found<T> = ([f64; 2], Vec<T>, Vec<f32>);

impl<T: Element> Case<T> {
    fn new(dims: HeadLossDims, hidden: usize, vocab: usize) -> Self {
        let HeadLossDims { rows, hidden: own, vocab: known, .. } = dims;
        let label = |row: usize| if row % 6 == 5 { -100 } else { (row * 29 % known) as i32 };
        Self {
            dims,
            x: random(1, rows * own),
            w: random(2, known * own),
            labels: (0..rows).map(label).collect(),
            hidden,
            vocab,
            teacher_x: random(3, rows * hidden),
            teacher_w: random(4, vocab * hidden),
        }
    }

    fn online(&self) -> TeacherSlices<'_, T> {
        let (hidden, vocab) = (self.hidden, self.vocab);
        TeacherSlices::Hidden { hidden, vocab, row_stride: hidden, x: &self.teacher_x, w: &self.teacher_w }
    }

    /// The teacher's tokens and their log-probabilities.
    fn top(&self, pool: &Pool, k: usize, temperature: f32) -> (Vec<i32>, Vec<f32>) {
        let dims = HeadLossDims::new(self.dims.rows, self.hidden, self.vocab);
        let (mut ids, mut log_probs) = (vec![-7; dims.rows * k], vec![f32::NAN; dims.rows * k]);
        let mut scratch = vec![f32::NAN; top_log_probs_scratch(dims, k, pool.threads())];
        let (x, w) = (&self.teacher_x, &self.teacher_w);
        top_log_probs(pool, dims, k, temperature, x, w, &mut ids, &mut log_probs, &mut scratch);
        (ids, log_probs)
    }

    fn run(&self, pool: &Pool, distillation: DivergenceSpec, teacher: TeacherSlices<T>) -> Found<T> {
        let mut scratch =
            vec![f32::NAN; distill_loss_scratch(self.dims, teacher.dims(), pool.threads(), false)];
        let (mut dx, mut dw) = (vec![T::from_f32(f32::NAN); self.x.len()], vec![f32::NAN; self.w.len()]);
        let to = DistillDw::F32 { dw: &mut dw, add: false };
        let (losses, found_inf) = distill_loss_backward(
            pool,
            self.dims,
            distillation,
            teacher,
            &self.x,
            &self.w,
            &self.labels,
            SCALES,
            Some(&mut dx),
            Some(to),
            &mut scratch,
        );
        assert!(!found_inf);
        (losses, dx, dw)
    }

    fn expected(
        &self,
        distillation: DivergenceSpec,
        teacher: &reference::TeacherRows<'_>,
    ) -> ([f64; 2], [Vec<f64>; 2]) {
        let labels: Vec<i64> = self.labels.iter().map(|label| i64::from(*label)).collect();
        let scales = SCALES.map(f64::from);
        distill_loss(&wide(&self.x), &wide(&self.w), &labels, teacher, spec(distillation), scales)
    }

    /// The relative errors of the losses, dx and dw.
    fn errors((losses, dx, dw): &Found<T>, expected: &([f64; 2], [Vec<f64>; 2])) -> [f64; 3] {
        let of = |found: &[f64], expected: &[f64]| Deviation::of(found, expected).l2;
        [of(losses, &expected.0), of(&wide(dx), &expected.1[0]), of(&wide(dw), &expected.1[1])]
    }
}

fn check_reference<T: Element>(pool: &Pool) {
    let bounds = match T::DTYPE {
        // The logits of the widest head are some tens.
        DType::F32 => [1e-6, 4e-5, 4e-5],
        DType::F16 => [1e-5, 1e-3, 1e-4],
        // Gradients of logits are rounded to bf16 before they are multiplied.
        DType::Bf16 => [1e-5, 6e-3, 6e-3],
    };
    // Vocabularies on both sides, and a hidden size too large for the head's own AMX path.
    let cases = [
        (HeadLossDims::new(40, 33, 301), 50, 301),
        (HeadLossDims::new(37, 64, 301), 33, 290),
        (HeadLossDims::new(9, 1030, 77), 20, 90),
    ];
    let mut far = Vec::new();
    for (dims, hidden, vocab) in cases {
        let case = Case::<T>::new(dims, hidden, vocab);
        for distillation in every_distillation() {
            let mut check = |what: String, found: &Found<T>, expected: &([f64; 2], [Vec<f64>; 2])| {
                let errors = Case::errors(found, expected);
                // A NaN is far, too.
                if errors.iter().zip(bounds).any(|(error, bound)| error.is_nan() || *error > bound) {
                    far.push(format!("{dims:?}, {distillation:?}, {what}: {errors:?}"));
                }
            };
            let (x, w) = (wide(&case.teacher_x), wide(&case.teacher_w));
            let expected = case.expected(distillation, &reference::TeacherRows::Hidden { x: &x, w: &w });
            check(format!("teacher of {vocab}"), &case.run(pool, distillation, case.online()), &expected);
            for (k, tail) in [(20, true), (20, false), (vocab, true)] {
                let (ids, log_probs) = case.top(pool, k, distillation.temperature);
                let of_ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
                let log_probs_wide = wide(&log_probs);
                let cached =
                    reference::TeacherRows::TopK { ids: &of_ids, log_probs: &log_probs_wide, vocab, tail };
                let expected = case.expected(distillation, &cached);
                let teacher = TeacherSlices::TopK { k, vocab, tail, ids: &ids, log_probs: &log_probs };
                check(
                    format!("{k} of {vocab}, tail {tail}"),
                    &case.run(pool, distillation, teacher),
                    &expected,
                );
            }
        }
    }
    assert!(far.is_empty(), "{}, {}: {far:#?}", pool.isa(), T::DTYPE);
}

#[test]
fn losses_and_gradients_are_those_of_the_reference() {
    for isa in crate::Isa::available() {
        let pool = Pool::on_isa(2, *isa).expect("an available ISA");
        check_reference::<f32>(&pool);
        check_reference::<bf16>(&pool);
        check_reference::<f16>(&pool);
    }
}

fn check_bits<T: Element>(pools: &[Pool; 2]) {
    let dims = HeadLossDims::new(1100, 24, 150);
    assert!(!dims.is_one_distill_slice(150));
    let case = Case::<T>::new(dims, 16, 140);
    let distillation = DivergenceSpec { beta: 0.3, temperature: 2.0, squared: true };
    let found = pools.each_ref().map(|pool| {
        let (ids, log_probs) = case.top(pool, 12, 2.0);
        let cached = TeacherSlices::TopK { k: 12, vocab: 140, tail: true, ids: &ids, log_probs: &log_probs };
        [case.online(), cached].map(|teacher| {
            let (losses, dx, dw) = case.run(pool, distillation, teacher);
            (losses.map(f64::to_bits), bits(&dx), bits(&dw))
        })
    });
    assert!(found[0] == found[1], "{}, {}", pools[0].isa(), T::DTYPE);
}

#[test]
fn bits_do_not_depend_on_threads() {
    for isa in crate::Isa::available() {
        let pools = [1, 3].map(|threads| Pool::on_isa(threads, *isa).expect("an available ISA"));
        check_bits::<f32>(&pools);
        check_bits::<bf16>(&pools);
        check_bits::<f16>(&pools);
    }
}

/// Padded rows, an accumulated gradient, and a rounded one with tied rows have the bits of the plain ones.
fn check_stores<T: Element>(pool: &Pool) {
    let dims = HeadLossDims::new(40, 33, 2_500);
    let HeadLossDims { rows, hidden, .. } = dims;
    let case = Case::<T>::new(dims, 17, 2_500);
    let distillation = DivergenceSpec { beta: 0.0, temperature: 2.0, squared: true };
    let (losses, dx, dw) = case.run(pool, distillation, case.online());
    let what = format!("{}, {} threads, {}", pool.isa(), pool.threads(), T::DTYPE);
    let padded = HeadLossDims { row_stride: hidden + APART, ..dims };
    let (x, teacher_x) = (apart(&case.x, hidden, f32::NAN), apart(&case.teacher_x, 17, f32::NAN));
    let teacher = TeacherSlices::Hidden {
        hidden: 17,
        vocab: 2_500,
        row_stride: 17 + APART,
        x: &teacher_x,
        w: &case.teacher_w,
    };
    let mut scratch = vec![f32::NAN; distill_loss_scratch(padded, teacher.dims(), pool.threads(), true)];
    let mut run = |dx: Option<&mut [T]>, dw: Option<DistillDw<T>>| {
        let (found, found_inf) = distill_loss_backward(
            pool,
            padded,
            distillation,
            teacher,
            &x,
            &case.w,
            &case.labels,
            SCALES,
            dx,
            dw,
            &mut scratch,
        );
        assert!(found == losses && !found_inf, "{what}");
    };
    let before = random::<f32>(9, dw.len());
    let (mut added, mut padded_dx) = (before.clone(), vec![T::from_f32(-f32::NAN); x.len()]);
    run(Some(&mut padded_dx), Some(DistillDw::F32 { dw: &mut added, add: true }));
    assert!(bits(&padded_dx) == bits(&apart(&dx, hidden, -f32::NAN)), "{what}: dx");
    let sums: Vec<f32> = before.iter().zip(&dw).map(|(before, dw)| before + dw).collect();
    assert!(bits(&added) == bits(&sums), "{what}: added");
    let ids: Vec<i32> = (0..rows as i32).map(|row| if row % 5 == 4 { -1 } else { row * row }).collect();
    let (mut rounded, mut own) = (case.w.clone(), vec![f32::NAN; rows * hidden]);
    let token_rows = Some(TokenRows { ids: &ids, rows: &mut own });
    run(None, Some(DistillDw::Rounded { dw: &mut rounded, token_rows }));
    let expected: Vec<T> = dw.iter().map(|dw| T::from_f32(*dw)).collect();
    assert!(bits(&rounded) == bits(&expected), "{what}: rounded");
    for (row, id) in own.chunks_exact(hidden).zip(&ids).filter(|(_, id)| **id >= 0) {
        assert!(bits(row) == bits(&dw[*id as usize * hidden..][..hidden]), "{what}: the row of token {id}");
    }
    run(None, None);
}

#[test]
fn every_store_has_the_same_bits() {
    for pool in pools() {
        check_stores::<f32>(&pool);
        check_stores::<bf16>(&pool);
        check_stores::<f16>(&pool);
    }
}

#[test]
fn a_student_that_is_its_teacher_has_no_divergence() {
    for isa in crate::Isa::available() {
        let pool = Pool::on_isa(2, *isa).expect("an available ISA");
        let mut case = Case::<bf16>::new(HeadLossDims::new(40, 64, 500), 64, 500);
        (case.teacher_x, case.teacher_w) = (case.x.clone(), case.w.clone());
        for distillation in every_distillation() {
            let teacher = case.online();
            let mut scratch = vec![f32::NAN; distill_loss_scratch(case.dims, teacher.dims(), 2, false)];
            let (mut dx, mut dw) = (vec![bf16::NAN; case.x.len()], vec![f32::NAN; case.w.len()]);
            let to = DistillDw::F32 { dw: &mut dw, add: false };
            let ([_, kd], _) = distill_loss_backward(
                &pool,
                case.dims,
                distillation,
                teacher,
                &case.x,
                &case.w,
                &case.labels,
                [0.0, 1.0],
                Some(&mut dx),
                Some(to),
                &mut scratch,
            );
            let largest = dw.iter().fold(0.0f32, |largest, gradient| largest.max(gradient.abs()));
            assert!(kd == 0.0 && largest == 0.0, "{isa}, {distillation:?}: {kd}, {largest}");
            assert!(dx.iter().all(|dx| dx.to_f32() == 0.0), "{isa}, {distillation:?}");
        }
    }
}

#[test]
fn extreme_logits_stay_finite_and_nan_is_reported() {
    let pool = Pool::new(2);
    let mut case = Case::<f32>::new(HeadLossDims::new(8, 16, 300), 16, 300);
    // Logits of some hundreds, of opposite signs.
    case.x.iter_mut().for_each(|x| *x *= 40.0);
    case.teacher_x = case.x.iter().map(|x| -x).collect();
    case.teacher_w.clone_from(&case.w);
    for distillation in every_distillation() {
        let ([ce, kd], dx, _) = case.run(&pool, distillation, case.online());
        assert!(ce.is_finite() && kd.is_finite() && kd > 0.0, "{distillation:?}: {ce}, {kd}");
        assert!(dx.iter().all(|dx| dx.is_finite()), "{distillation:?}");
    }
    case.teacher_x[3] = f32::NAN;
    for distillation in every_distillation() {
        let ([ce, kd], ..) = case.run(&pool, distillation, case.online());
        assert!(ce.is_finite() && kd.is_nan(), "{distillation:?}: {ce}, {kd}");
    }
    // Ids that no vocabulary has are no tokens.
    let (ids, log_probs) = ([i32::MAX, -5, 300, 2].repeat(8), vec![-2.0; 32]);
    let teacher = TeacherSlices::TopK { k: 4, vocab: 400, tail: true, ids: &ids, log_probs: &log_probs };
    let ([_, kd], ..) =
        case.run(&pool, DivergenceSpec { beta: 1.0, temperature: 1.0, squared: false }, teacher);
    assert!(kd.is_finite());
}

#[test]
fn cross_entropy_is_that_of_the_head() {
    let pool = Pool::on_isa(2, crate::Isa::Portable).expect("every CPU has it");
    let case = Case::<f32>::new(HeadLossDims::new(30, 20, 200), 16, 220);
    let distillation = DivergenceSpec { beta: 0.0, temperature: 1.0, squared: false };
    let ([ce, _], ..) = case.run(&pool, distillation, case.online());
    let mut scratch = vec![f32::NAN; head_loss_scratch(case.dims, 2)];
    let (x, w, labels) = (&case.x, &case.w, &case.labels);
    let plain = head_loss_backward(&pool, case.dims, x, w, labels, 1.0, None, None, false, &mut scratch);
    assert!((ce - plain).abs() < 1e-5 * plain, "{ce}, {plain}");
}

#[test]
fn the_largest_log_probabilities_are_found_in_order() {
    for pool in pools() {
        // Equal rows of w have equal logits: the lowest id comes first.
        let mut case = Case::<f32>::new(HeadLossDims::new(5, 4, 8), 16, 700);
        let (first, second) = case.teacher_w.split_at_mut(350 * 16);
        second.copy_from_slice(first);
        let rows = case.teacher_x.clone();
        case.teacher_x[2 * 16] = f32::NAN;
        let everything = case.top(&pool, 700, 1.5);
        for k in [1, 3, 255, 256, 257, 699, 700] {
            let (ids, log_probs) = case.top(&pool, k, 1.5);
            for row in 0..5 {
                let range = row * k..(row + 1) * k;
                let all = row * 700..row * 700 + k;
                assert_eq!(ids[range.clone()], everything.0[all.clone()], "{}, {k}", pool.isa());
                assert_eq!(bits(&log_probs[range]), bits(&everything.1[all]), "{}, {k}", pool.isa());
            }
        }
        let logits = |row: usize| -> Vec<f64> {
            let x = &rows[row * 16..][..16];
            let dot =
                |w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() / 1.5;
            case.teacher_w.chunks_exact(16).map(dot).collect()
        };
        for row in [0, 1, 3, 4] {
            let (logits, ids) = (logits(row), &everything.0[row * 700..][..700]);
            let lse = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
            let log_probs = &everything.1[row * 700..][..700];
            for (pair, probs) in ids.windows(2).zip(log_probs.windows(2)) {
                assert!(probs[0] > probs[1] || (probs[0] == probs[1] && pair[0] < pair[1]), "{pair:?}");
            }
            for (id, log_prob) in ids.iter().zip(log_probs) {
                assert!((f64::from(*log_prob) - (logits[*id as usize] - lse)).abs() < 1e-5);
            }
        }
        assert_eq!(everything.0[2 * 700..2 * 700 + 3], [0, 1, 2]);
        assert!(everything.1[2 * 700..3 * 700].iter().all(|log_prob| log_prob.is_nan()));
    }
}
