//! Every kernel once, on buffers that are made before: for the tests that ask something of all of them.

use half::{bf16, f16};
use zeroth_base::{ActivationFn, name_key};
use zeroth_cpu::*;
use zeroth_kernel::*;
use zeroth_kernel::{Optimizer, Recipe, Rounding, StepNumbers};

use super::encoder_decoder::EncoderDecoder;
use super::mixture::Mixture;

/// Threads that the scratch is large enough for.
pub(crate) const MOST_THREADS: usize = 7;

const ROWS: usize = 330;
const WIDTH: usize = 280;
const VOCAB: usize = 300;
const HEAD_ROWS: usize = 1_100;
const FLAT: usize = 40_001;

const LINEAR: LinearDims = LinearDims::new(ROWS, WIDTH, 290);
/// A low-rank adapter of it.
const RANK: usize = 5;
const ADAPTER: LinearDims = LinearDims::new(ROWS, RANK, 290);
const EMBEDDING: EmbeddingDims = EmbeddingDims::new(90, WIDTH);
const NORM: RmsNormDims = RmsNormDims::new(ROWS, WIDTH, 1e-5);
const ROPE: RopeDims = RopeDims::new(ROWS, 10, 28, 28);
const HEAD_NORM_ROPE: HeadNormRopeDims = HeadNormRopeDims { rope: ROPE, eps: 1e-5 };
const ATTENTION: AttentionDims = AttentionDims::new(ROWS, 10, 5, 28, None, 0.2);
const WINDOW: AttentionDims = AttentionDims { window: Some(33), ..ATTENTION };
/// More than one slice.
const HEAD: HeadLossDims = HeadLossDims::new(HEAD_ROWS, 8, VOCAB);
/// One slice, of a table that is an embedding's, too.
const TIED: HeadLossDims = HeadLossDims { rows: ROWS, ..HEAD };
const LOGITS: LogitsDims = LogitsDims::new(ROWS, 5, WIDTH, 290);
/// Rows of decoding: each is a query of its own.
const CACHED: AttentionDims = AttentionDims { rows: 6, ..WINDOW };
const STARTS: [u32; 5] = [0, 1, 150, 151, 320];

/// Inputs, outputs and scratch of every kernel.
pub(crate) struct Everything<T> {
    x: Vec<T>,
    other: Vec<T>,
    weight: Vec<T>,
    flat: Vec<f32>,
    head_x: Vec<T>,
    head_w: Vec<T>,
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    keys: Vec<RowKey>,
    table: RopeTable,
    /// Outputs of the storage type, in the order they are written.
    narrow: Vec<Vec<T>>,
    /// Outputs in f32.
    wide: Vec<Vec<f32>>,
    sums: Vec<f64>,
    /// Moments in 16 bits.
    moments: [Vec<bf16>; 2],
    mixture: Mixture<T>,
    encoder_decoder: EncoderDecoder<T>,
    scratch: Vec<f32>,
}

impl<T: Element> Everything<T> {
    pub(crate) fn new() -> Self {
        let pool = Pool::new(1);
        let random = |name: &str, count: usize| {
            let mut values = vec![T::default(); count];
            normal(&pool, 5, name_key(name), 0, 1.0, &mut values);
            values
        };
        let scratch = [
            linear_scratch(LINEAR, MOST_THREADS),
            rms_norm_scratch(NORM),
            head_norm_rope_scratch(HEAD_NORM_ROPE),
            attention_scratch(&ATTENTION, MOST_THREADS),
            attention_backward_scratch(&ATTENTION, MOST_THREADS),
            head_loss_scratch(HEAD, MOST_THREADS),
            head_loss_rounded_scratch(TIED, MOST_THREADS),
            logits_scratch(LOGITS, MOST_THREADS),
            cached_attention_scratch(&CACHED, MOST_THREADS),
        ];
        let narrow = [
            290, 280, 280, 280, 280, 280, 280, 280, 280, 280, 280, 280, 140, 140, 280, 140, 140, 280, 280,
            280, 280, 280, 280,
        ];
        let wide = [
            290 * WIDTH,
            290,
            90 * WIDTH,
            ROWS,
            WIDTH,
            ROWS * 14,
            ROWS * 14,
            10 * ROWS,
            10 * ROWS,
            VOCAB * 8,
            5 * 290,
            10 * ROWS,
            28,
            FLAT,
            FLAT,
            FLAT,
            FLAT,
            FLAT,
            FLAT,
            ROWS * 8,
        ];
        assert!(HEAD.slice_rows::<bf16>() < HEAD_ROWS, "the head must take several slices");
        Self {
            x: random("x", ROWS * 290),
            other: random("other", ROWS * 290),
            weight: random("weight", 290 * WIDTH),
            flat: (0..FLAT).map(|i| (i as f32 * 0.37).sin()).collect(),
            head_x: random("head x", HEAD_ROWS * 8),
            head_w: random("head w", VOCAB * 8),
            ids: (0..ROWS as i32).map(|i| if i % 11 == 10 { -1 } else { i * i % 90 }).collect(),
            labels: (0..HEAD_ROWS as i32).map(|i| if i % 5 == 0 { -100 } else { i / 4 }).collect(),
            positions: (0..ROWS as i32).collect(),
            keys: (0..ROWS as u32)
                .map(|i| RowKey { sample: u64::from(i / 50), position: i % 50, epoch: 2 })
                .collect(),
            table: RopeTable::plain(1e4, 28),
            narrow: narrow
                .iter()
                .map(|width| vec![T::default(); ROWS * width])
                .chain(
                    [HEAD_ROWS * 8, FLAT, ROWS * 8, VOCAB * 8, 6 * 280, ROWS * 140]
                        .map(|count| vec![T::default(); count]),
                )
                .collect(),
            wide: wide.iter().map(|&count| vec![0.0; count]).collect(),
            sums: vec![0.0; FLAT.div_ceil(BLOCK) + 4],
            moments: [vec![bf16::ZERO; FLAT], vec![bf16::ZERO; FLAT]],
            mixture: Mixture::new(),
            encoder_decoder: EncoderDecoder::new(),
            scratch: vec![0.0; scratch.into_iter().max().expect("there are nine")],
        }
    }

    /// Calls every kernel. Scratch holds NaN before, so that a kernel that reads what it did not write is found.
    pub(crate) fn run(&mut self, pool: &Pool) {
        self.mixture.run(pool);
        self.encoder_decoder.run(pool);
        let s = &mut self.scratch[..];
        s.fill(f32::NAN);
        self.wide.iter_mut().for_each(|values| values.fill(0.5));
        let (x, other) = (&self.x[..ROWS * WIDTH], &self.other[..ROWS * WIDTH]);
        let (k, v) = (&self.other[..ROWS * 140], &self.other[ROWS * 140..ROWS * 280]);
        let w = &self.weight[..WIDTH];
        let [y, dx, embedded, h, normed, plain, dh, turned, back, swished, dgate, dup, dk, dv, dq, rest @ ..] =
            &mut self.narrow[..]
        else {
            unreachable!("29 outputs")
        };
        let [dk_window, dv_window, dq_window, out, out_window, dropped, both, both_dh, rest @ ..] = rest
        else {
            unreachable!("29 outputs")
        };
        let [head_dx, weights, tied_dx, tied_dw, cached, stored] = rest else { unreachable!("29 outputs") };
        let [dw, db, dtable, rstd, dnorm, cos, sin, lse, lse_window, head_dw, answers, others @ ..] =
            &mut self.wide[..]
        else {
            unreachable!("20 outputs")
        };
        let [head_rstd, dhead, master, first, second, total, kept_first, kept_second, waiting] = others
        else {
            unreachable!("20 outputs")
        };
        self.moments.iter_mut().for_each(|moments| moments.fill(bf16::ONE));
        linear(pool, LINEAR, x, &self.weight, Some(&self.weight[..290]), y, s);
        linear_dx(pool, LINEAR, 1.0, &self.x, &self.weight, dx, false, s);
        linear_dw(pool, LINEAR, 1.0, &self.x, other, dw, s);
        linear_db(pool, LINEAR, &self.x, db, s);
        linear_add(pool, ADAPTER, 0.3, &x[..ROWS * RANK], &self.weight[..290 * RANK], y, s);
        embedding(pool, EMBEDDING, &self.ids, &self.weight[..90 * WIDTH], embedded);
        embedding_backward(pool, EMBEDDING, &self.ids, x, dtable);
        rms_norm_residual(pool, NORM, x, other, w, h, normed, rstd);
        rms_norm(pool, NORM, x, w, plain, rstd);
        rms_norm_backward(pool, NORM, other, x, rstd, w, Some(other), Some(dh), Some(dnorm), s);
        rope_angles(pool, &self.table, &self.positions, cos, sin);
        copy(pool, x, turned);
        rope(pool, ROPE, cos, sin, turned);
        convert(pool, x, back);
        rope_backward(pool, ROPE, cos, sin, back);
        head_norm_rope(pool, HEAD_NORM_ROPE, x, &w[..28], cos, sin, both, head_rstd);
        let (dims, w) = (HEAD_NORM_ROPE, &w[..28]);
        head_norm_rope_backward(pool, dims, other, x, head_rstd, w, cos, sin, Some(both_dh), Some(dhead), s);
        gated_activation(pool, ActivationFn::Silu, x, other, swished);
        gated_activation_backward(pool, ActivationFn::Silu, other, x, other, dgate, dup);
        attention(pool, &ATTENTION, &ContextSlices::new(&STARTS), x, k, v, out, lse, s);
        let saved = AttentionSaved { q: x, k, v, out, lse };
        attention_backward(pool, &ATTENTION, &ContextSlices::new(&STARTS), saved, other, dq, dk, dv, None, s);
        attention(pool, &WINDOW, &ContextSlices::new(&STARTS), x, k, v, out_window, lse_window, s);
        let saved = AttentionSaved { q: x, k, v, out: out_window, lse: lse_window };
        attention_backward(
            pool,
            &WINDOW,
            &ContextSlices::new(&STARTS),
            saved,
            other,
            dq_window,
            dk_window,
            dv_window,
            None,
            s,
        );
        let ranges = [(0, 1), (1, 150), (150, 151), (151, 320), (0, 0), (0, 330)]
            .map(|(first, end)| CacheRange { first, end });
        cached_attention(pool, &CACHED, ROWS, &ranges, None, &x[..6 * 280], [k, v], cached, s);
        store_rows(StoreRowsDims::new(6, 140, ROWS), &ranges, &k[..6 * 140], stored);
        let (head_x, head_w) = (&self.head_x, &self.head_w);
        self.sums[0] = head_loss(pool, HEAD, head_x, head_w, &self.labels, s);
        s.fill(f32::NAN);
        self.sums[1] = head_loss_backward(
            pool,
            HEAD,
            head_x,
            head_w,
            &self.labels,
            0.01,
            Some(head_dx),
            Some(head_dw),
            true,
            s,
        );
        s.fill(f32::NAN);
        let (labels, own) = (&self.labels[..ROWS], Some(TokenRows { ids: &self.ids, rows: waiting }));
        let (tied_x, dims) = (&head_x[..ROWS * 8], EmbeddingDims::new(VOCAB, 8));
        let (sum, broken) = head_loss_backward_rounded(
            pool,
            TIED,
            tied_x,
            head_w,
            labels,
            0.01,
            Some(tied_dx),
            tied_dw,
            own,
            s,
        );
        let own_broken = embedding_backward_tied(pool, dims, &self.ids, tied_x, waiting, tied_dw);
        self.sums[3] = sum + f64::from(u8::from(broken)) + f64::from(u8::from(own_broken));
        logits(pool, LOGITS, &STARTS, x, &self.weight, answers, s);
        let setting = Dropout { probability: 0.3, seed: 1, op: 3 };
        dropout(pool, setting, &self.keys, [WIDTH, WIDTH], x, dropped);
        fill(pool, 0.25, first);
        let recipe = Recipe { momentum: 0.9, weight_decay: [0.1; 2], ..Recipe::default() };
        let numbers = StepNumbers::new(&recipe, 0, 3, 1e-3, 0.5, 0.7);
        for optimizer in [Optimizer::AdamW, Optimizer::Adam] {
            let moments =
                Moments { buffers: [Some(&mut first[..]), Some(&mut second[..]), None], rounding: None };
            optimize(
                pool,
                optimizer,
                &numbers,
                &self.flat,
                Master::F32(master),
                moments,
                Some(&mut weights[..]),
            );
        }
        let rounding = Some((Rounding { seed: 3, flat: 1, first: 77 }, 3));
        for optimizer in [Optimizer::Sgd, Optimizer::Lion, Optimizer::Adagrad] {
            let [first, second] = &mut self.moments;
            let moments = Moments { buffers: [Some(first), Some(second), None], rounding };
            optimize(
                pool,
                optimizer,
                &numbers,
                &self.flat,
                Master::F32(master),
                moments,
                Some(&mut weights[..]),
            );
        }
        convert(pool, &self.moments[0], kept_first);
        convert(pool, &self.moments[1], kept_second);
        self.sums[2] = f64::from(u8::from(convert_and_check_finite(pool, &self.flat, weights)));
        block_squares(pool, &self.flat, &mut self.sums[4..]);
        sum_ranks(pool, &self.flat, total, true);
    }

    /// Every output as bits.
    pub(crate) fn bits(&self) -> Vec<Vec<u64>> {
        let narrow =
            self.narrow.iter().map(|values| values.iter().map(|x| u64::from(x.to_f32().to_bits())).collect());
        let wide = self.wide.iter().map(|values| values.iter().map(|x| u64::from(x.to_bits())).collect());
        narrow
            .chain(wide)
            .chain(self.mixture.bits())
            .chain(self.encoder_decoder.bits())
            .chain([self.sums.iter().map(|x| x.to_bits()).collect()])
            .collect()
    }
}

/// All storage types, for a test that is written once.
pub(crate) struct AllTypes(Everything<f32>, Everything<bf16>, Everything<f16>);

impl AllTypes {
    pub(crate) fn new() -> Self {
        Self(Everything::new(), Everything::new(), Everything::new())
    }

    pub(crate) fn run(&mut self, pool: &Pool) {
        self.0.run(pool);
        self.1.run(pool);
        self.2.run(pool);
    }

    /// The outputs of each type.
    pub(crate) fn bits(&self) -> [Vec<Vec<u64>>; 3] {
        [self.0.bits(), self.1.bits(), self.2.bits()]
    }
}
