//! A head that rounds the gradient of its table on the fly has the bits of one that rounds it at the end.

use std::fmt::Debug;

use half::{bf16, f16};
use zeroth_base::DType;
use zeroth_base::name_key;
use zeroth_cpu::*;
use zeroth_kernel::*;

/// A table of more than one block and chunk of the vocabulary, the last of them partial.
const HEAD: HeadLossDims = HeadLossDims::new(77, 133, 1_301);
const TABLE: EmbeddingDims = EmbeddingDims::new(HEAD.vocab, HEAD.hidden);
const SCALE: f32 = 0.125;

/// A micro-batch: the input of the head, the output gradient of the embedding, and the table.
struct Batch<T> {
    x: Vec<T>,
    dy: Vec<T>,
    w: Vec<T>,
    ids: Vec<i32>,
    labels: Vec<i32>,
}

impl<T: Element> Batch<T> {
    /// With repeated tokens, tokens at block boundaries and as labels, and padding.
    fn new() -> Self {
        let pool = Pool::new(1);
        let random = |name: &str, count: usize| {
            let mut values = vec![T::default(); count];
            normal(&pool, 11, name_key(name), 0, 0.5, &mut values);
            values
        };
        let ends = [0, 63, 64, 511, 512, 1023, 1024, 1300];
        let id = |row: usize| match row {
            0..8 => ends[row],
            row if row % 9 == 8 => -1,
            row => (row * row * 7 % 600) as i32,
        };
        let label = |row: usize| match row {
            row if row % 6 == 5 => -100,
            row if row % 2 == 0 => id(row + 1),
            row => (row * 29 % HEAD.vocab) as i32,
        };
        Self {
            x: random("x", HEAD.rows * HEAD.hidden),
            dy: random("dy", HEAD.rows * HEAD.hidden),
            w: random("w", HEAD.vocab * HEAD.hidden),
            ids: (0..HEAD.rows).map(id).collect(),
            labels: (0..HEAD.rows).map(label).collect(),
        }
    }

    /// The same batch, in which twelve tokens of this label have a value near the maximum in x, and zeros in that column of w.
    fn with_overflow_at(mut self, label: i32) -> Self {
        let largest = if T::DTYPE == DType::F16 { 60_000.0 } else { 3e38 };
        let column = 7;
        self.w.iter_mut().skip(column).step_by(HEAD.hidden).for_each(|w| *w = T::default());
        for row in 20..32 {
            self.labels[row] = label;
            self.x[row * HEAD.hidden + column] = T::from_f32(largest);
        }
        self
    }

    /// The sum of the losses, dx, the table's gradient and whether it is not finite: accumulated in f32, then rounded.
    fn rounded_at_the_end(&self, pool: &Pool, tied: bool) -> (f64, Vec<T>, Vec<T>, bool) {
        let mut scratch = vec![f32::NAN; head_loss_scratch(HEAD, pool.threads())];
        let (mut dx, mut wide) = (self.x.clone(), vec![f32::NAN; self.w.len()]);
        let (x, w, labels) = (&self.x, &self.w, &self.labels);
        let sum = head_loss_backward(
            pool,
            HEAD,
            x,
            w,
            labels,
            SCALE,
            Some(&mut dx),
            Some(&mut wide),
            false,
            &mut scratch,
        );
        if tied {
            embedding_backward(pool, TABLE, &self.ids, &self.dy, &mut wide);
        }
        let mut dw = self.w.clone();
        let found_inf = convert_and_check_finite(pool, &wide, &mut dw);
        (sum, dx, dw, found_inf)
    }

    /// The same with each row rounded as soon as it is complete, and whether the head found a value that is not finite.
    fn rounded_on_the_fly(&self, pool: &Pool, tied: bool) -> ((f64, Vec<T>, Vec<T>, bool), bool) {
        let mut scratch = vec![f32::NAN; head_loss_rounded_scratch(HEAD, pool.threads())];
        let (mut dx, mut dw) = (self.x.clone(), self.w.clone());
        let mut token_rows = vec![f32::NAN; HEAD.rows * HEAD.hidden];
        let own = tied.then_some(TokenRows { ids: &self.ids, rows: &mut token_rows });
        let (x, w, labels) = (&self.x, &self.w, &self.labels);
        let (sum, by_head) = head_loss_backward_rounded(
            pool,
            HEAD,
            x,
            w,
            labels,
            SCALE,
            Some(&mut dx),
            &mut dw,
            own,
            &mut scratch,
        );
        let by_rows =
            tied && embedding_backward_tied(pool, TABLE, &self.ids, &self.dy, &mut token_rows, &mut dw);
        ((sum, dx, dw, by_head || by_rows), by_head)
    }
}

/// Every available instruction set, with one and three threads.
fn pools() -> impl Iterator<Item = Pool> {
    let on = |isa: &Isa| [1, 3].map(|threads| Pool::on_isa(threads, *isa).unwrap());
    Isa::available().iter().flat_map(on)
}

#[track_caller]
fn same<T: Element + PartialEq + Debug>(pool: &Pool, batch: &Batch<T>, tied: bool) -> [bool; 2] {
    let expected = batch.rounded_at_the_end(pool, tied);
    let (found, by_head) = batch.rounded_on_the_fly(pool, tied);
    let what = format!("{}, {} threads, {}, tied {tied}", pool.isa(), pool.threads(), T::DTYPE);
    assert_eq!(expected.0.to_bits(), found.0.to_bits(), "{what}: the loss");
    assert!(
        bytemuck::cast_slice::<T, u8>(&expected.1) == bytemuck::cast_slice::<T, u8>(&found.1),
        "{what}: dx"
    );
    assert!(
        bytemuck::cast_slice::<T, u8>(&expected.2) == bytemuck::cast_slice::<T, u8>(&found.2),
        "{what}: dw"
    );
    assert_eq!(expected.3, found.3, "{what}: found_inf");
    [found.3, by_head]
}

fn check_type<T: Element + PartialEq + Debug>() {
    let batch = Batch::<T>::new();
    for pool in pools() {
        for tied in [true, false] {
            assert_eq!(same(&pool, &batch, tied), [false; 2]);
        }
    }
}

#[test]
fn rounding_on_the_fly_has_the_bits_of_rounding_at_the_end() {
    check_type::<bf16>();
    check_type::<f16>();
    check_type::<f32>();
}

fn check_found_inf<T: Element + PartialEq + Debug>() {
    for pool in pools() {
        // An infinite gradient from the embedding only: the head does not see it.
        let mut batch = Batch::<T>::new();
        batch.dy[12 * HEAD.hidden + 3] = T::from_f32(f32::INFINITY);
        assert_eq!(same(&pool, &batch, true), [true, false]);
        // One from the head only, in a row that is a token's or is not; the rest of the vocabulary stays finite.
        for (row, by_head) in [(512, false), (1_299, true)] {
            let batch = Batch::<T>::new().with_overflow_at(row);
            assert_eq!(batch.ids.contains(&row), !by_head);
            assert_eq!(same(&pool, &batch, true), [true, by_head]);
            assert_eq!(same(&pool, &batch, false), [true, true]);
        }
        // NaN in every row: the head finds it in rows that are no token's.
        let mut batch = Batch::<T>::new();
        batch.x[12 * HEAD.hidden + 3] = T::from_f32(f32::NAN);
        assert_eq!(same(&pool, &batch, true), [true, true]);
        assert_eq!(same(&pool, &batch, false), [true, true]);
    }
}

#[test]
fn non_finite_rows_are_found_by_the_kernel_that_completes_them() {
    check_found_inf::<bf16>();
    check_found_inf::<f16>();
}
