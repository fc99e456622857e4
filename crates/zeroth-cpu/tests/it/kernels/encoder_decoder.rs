//! The attention of encoder-decoders: with other sequences, biases and dropout, against its reference and against itself.

use half::{bf16, f16};
use zeroth_base::{ActivationFn, PositionBuckets, name_key};
use zeroth_cpu::*;
use zeroth_kernel::*;

use super::everything::MOST_THREADS;

/// Operands of an attention, from its dimensions and sequences.
#[derive(Clone)]
struct Operands<T> {
    dims: AttentionDims,
    starts: Vec<u32>,
    kv_starts: Option<Vec<u32>>,
    bias: Option<Vec<f32>>,
    probability: Option<f32>,
    keys: Vec<RowKey>,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    dout: Vec<T>,
}

/// What an attention and its gradient write: out, dq, dk and dv; then lse and dbias.
#[derive(Clone)]
struct Results<T> {
    narrow: [Vec<T>; 4],
    wide: [Vec<f32>; 2],
}

fn random<T: Element>(name: &str, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    normal(&Pool::new(1), 5, name_key(name), 0, 1.0, &mut values);
    values
}

fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

impl<T: Element> Operands<T> {
    /// Rows without padding between them.
    fn new(dims: AttentionDims, starts: &[u32], kv_starts: Option<&[u32]>, probability: Option<f32>) -> Self {
        let of_q = dims.rows * dims.q_width();
        let of_kv = dims.kv_rows * dims.kv_width();
        let key = |row: u32| RowKey { sample: u64::from(row / 90) << 20, position: row % 90, epoch: 1 };
        Self {
            dims,
            starts: starts.to_vec(),
            kv_starts: kv_starts.map(<[u32]>::to_vec),
            bias: dims.max_distance.map(|_| random("bias", dims.heads * dims.distances())),
            probability,
            keys: (0..dims.rows as u32).map(key).collect(),
            q: random("q", of_q),
            k: random("k", of_kv),
            v: random("v", of_kv),
            dout: random("dout", of_q),
        }
    }

    fn context(&self) -> ContextSlices<'_> {
        ContextSlices {
            starts: &self.starts,
            kv_starts: self.kv_starts.as_deref(),
            bias: self.bias.as_deref(),
            dropout: self.probability.map(|probability| WeightDropout {
                probability,
                seed: 3 << 40,
                op: 6,
                keys: &self.keys,
            }),
        }
    }

    /// Forward and backward. What they do not write is NaN, or 0.25 of dbias, which `add` adds to.
    fn run(&self, pool: &Pool, add: bool) -> Results<T> {
        let nan = |like: &[T]| vec![T::from_f32(f32::NAN); like.len()];
        let mut results = Results {
            narrow: [&self.q, &self.q, &self.k, &self.v].map(|like| nan(like)),
            wide: [
                vec![f32::NAN; self.dims.heads * self.dims.rows],
                vec![if add { 0.25 } else { f32::NAN }; self.bias.as_ref().map_or(0, Vec::len)],
            ],
        };
        let needed = attention_scratch(&self.dims, pool.threads())
            .max(attention_backward_scratch(&self.dims, pool.threads()));
        self.run_into(pool, &mut results, add, &mut vec![f32::NAN; needed]);
        results
    }

    fn run_into(&self, pool: &Pool, results: &mut Results<T>, add: bool, scratch: &mut [f32]) {
        let Self { dims, q, k, v, dout, .. } = self;
        let Results { narrow: [out, dq, dk, dv], wide: [lse, dbias] } = results;
        scratch.fill(f32::NAN);
        attention(pool, dims, &self.context(), q, k, v, out, lse, scratch);
        scratch.fill(f32::NAN);
        let saved = AttentionSaved { q, k, v, out, lse };
        let dbias = self.bias.is_some().then_some(BiasGradOut { to: dbias, add });
        attention_backward(pool, dims, &self.context(), saved, dout, dq, dk, dv, dbias, scratch);
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.to_f32().to_bits()).collect()
}

/// Sequences of one row, none, some of several panels and tiles, and padding before and behind.
const STARTS: &[u32] = &[1, 2, 2, 290, 331, 340];
/// As many, without keys where q has one row, and with keys where q has none.
const KV_STARTS: &[u32] = &[4, 4, 20, 85, 380, 383];

/// Dimensions, the sequences of keys in cross attention, and the probability of dropout.
type Case = (AttentionDims, Option<&'static [u32]>, Option<f32>);

/// Attentions by heads, kv heads and elements of a head.
fn cases() -> Vec<Case> {
    let dims =
        |heads, kv_heads, head_dim, window| AttentionDims::new(345, heads, kv_heads, head_dim, window, 0.3);
    let encoder = |dims| AttentionDims { causal: false, ..dims };
    let biased = |dims, most| AttentionDims { max_distance: Some(most), ..dims };
    let cross = |dims: AttentionDims| AttentionDims { kv_rows: 390, ..encoder(dims) };
    vec![
        (biased(dims(4, 2, 24, None), 128), None, Some(0.1)),
        (biased(dims(2, 2, 64, Some(40)), 20), None, None),
        (dims(3, 1, 40, None), None, Some(0.3)),
        (encoder(dims(2, 1, 64, None)), None, None),
        (biased(encoder(dims(2, 2, 128, None)), 128), None, None),
        (biased(encoder(dims(4, 1, 40, None)), 1), None, Some(0.1)),
        (cross(dims(2, 2, 64, None)), Some(KV_STARTS), None),
        (cross(dims(4, 2, 33, None)), Some(KV_STARTS), Some(0.25)),
        (cross(dims(1, 1, 128, None)), Some(&[0, 0, 0, 0, 0, 390]), None),
    ]
}

/// Bounds of the errors of out and of gradients, and of dbias.
fn check<T: Element>(pool: &Pool, operands: &Operands<T>, bound: [Deviation; 2]) {
    let case = format!("{}, {}, {:?}", pool.isa(), T::DTYPE, operands.dims);
    let Results { narrow, wide: [lse, dbias] } = operands.run(pool, true);
    let [q, k, v, dout] = [&operands.q, &operands.k, &operands.v, &operands.dout].map(|of| wide(of));
    let [expected, lses] = reference::attention_in(&operands.dims, &operands.context(), &q, &k, &v);
    let [dq, dk, dv, dbiases] =
        reference::attention_in_backward(&operands.dims, &operands.context(), &q, &k, &v, &dout);
    let is_zero = |values: &[f64], width: usize| -> Vec<bool> {
        values.chunks(width).map(|row| row.iter().all(|x| *x == 0.0)).collect()
    };
    let zero_rows = [is_zero(&expected, operands.dims.q_width()), is_zero(&dv, operands.dims.kv_width())];
    for ((name, found), expected) in
        ["out", "dq", "dk", "dv"].into_iter().zip(&narrow).zip([expected, dq, dk, dv])
    {
        let deviation = Deviation::of(&wide(found), &expected);
        assert!(deviation.is_within(bound[0]), "{name}: {deviation:?}, {case}");
        // Rows without a key or a query, and padding: exactly zero. The gradient of a lone key's score is zero up to rounding.
        let width =
            if matches!(name, "out" | "dq") { operands.dims.q_width() } else { operands.dims.kv_width() };
        let of = if matches!(name, "out" | "dq") { &zero_rows[0] } else { &zero_rows[1] };
        let zeros = found.chunks(width).zip(of).filter(|(_, is_zero)| **is_zero);
        assert!(zeros.into_iter().all(|(row, _)| row.iter().all(|x| x.to_f32() == 0.0)), "{name}: {case}");
    }
    let deviation = Deviation::of(&wide(&lse), &lses);
    assert!(deviation.is_within(Deviation { l2: 1e-5, max: 1e-3 }), "lse: {deviation:?}, {case}");
    let dbias: Vec<f64> = dbias.iter().map(|dbias| f64::from(*dbias) - 0.25).collect();
    let deviation = Deviation::of(&dbias, &dbiases);
    assert!(deviation.is_within(bound[1]), "dbias: {deviation:?}, {case}");
}

#[test]
fn attention_with_a_context_matches_its_reference() {
    let pair =
        |l2: f64, max: f64, dbias: f64| [Deviation { l2, max }, Deviation { l2: dbias, max: 8.0 * dbias }];
    for (index, (dims, kv_starts, probability)) in cases().into_iter().enumerate() {
        for (at, isa) in Isa::available().iter().enumerate() {
            // Every case with AMX, and with one of the others; all of them where asked for.
            let is_last = at + 1 == Isa::available().len();
            if !is_last && index % Isa::available().len() != at && std::env::var_os("ZEROTH_FULL").is_none() {
                continue;
            }
            let pool = Pool::on_isa(2, *isa).unwrap();
            check(&pool, &Operands::<f32>::new(dims, STARTS, kv_starts, probability), pair(2e-6, 5e-5, 1e-5));
            check(
                &pool,
                &Operands::<bf16>::new(dims, STARTS, kv_starts, probability),
                pair(4e-3, 8e-2, 1e-2),
            );
            check(&pool, &Operands::<f16>::new(dims, STARTS, kv_starts, probability), pair(4e-4, 1e-2, 1e-3));
        }
    }
}

/// The same rows with a stride of their own and NaN between them.
fn spread<T: Element>(values: &[T], width: usize, stride: usize) -> Vec<T> {
    let between = vec![T::from_f32(f32::NAN); stride - width];
    values.chunks_exact(width).flat_map(|row| [row, &between].concat()).collect()
}

fn check_padded_rows<T: Element>(pool: &Pool, operands: &Operands<T>) {
    let case = format!("{}, {}, {:?}", pool.isa(), T::DTYPE, operands.dims);
    let found = operands.run(pool, false);
    let (q_width, kv_width) = (operands.dims.q_width(), operands.dims.kv_width());
    let (q_stride, kv_stride) = (q_width + 8, kv_width + 5);
    let padded = Operands {
        dims: AttentionDims { q_stride, kv_stride, ..operands.dims },
        q: spread(&operands.q, q_width, q_stride),
        k: spread(&operands.k, kv_width, kv_stride),
        v: spread(&operands.v, kv_width, kv_stride),
        dout: spread(&operands.dout, q_width, q_stride),
        ..operands.clone()
    };
    let padded = padded.run(pool, false);
    let sizes = [(q_width, q_stride), (q_width, q_stride), (kv_width, kv_stride), (kv_width, kv_stride)];
    for ((padded, found), (width, stride)) in padded.narrow.iter().zip(&found.narrow).zip(sizes) {
        // The rows are equal, and the padding is unchanged.
        assert!(bits(padded) == bits(&spread(found, width, stride)), "{case}");
        assert!(found.iter().all(|value| value.to_f32().is_finite()), "{case}");
    }
    for (padded, found) in padded.wide.iter().zip(&found.wide) {
        assert!(bits(padded) == bits(found), "{case}");
        assert!(found.iter().all(|value| value.is_finite()), "{case}");
    }
}

#[test]
fn padding_between_rows_changes_no_bits_and_is_not_written() {
    for (index, (dims, kv_starts, probability)) in cases().into_iter().enumerate() {
        let isa = Isa::available()[index % Isa::available().len()];
        for pool in [Pool::on_isa(1, isa).unwrap(), Pool::on_isa(3, Isa::detect()).unwrap()] {
            check_padded_rows(&pool, &Operands::<f32>::new(dims, STARTS, kv_starts, probability));
            check_padded_rows(&pool, &Operands::<bf16>::new(dims, STARTS, kv_starts, probability));
        }
    }
}

/// The last sequence alone has the bits that it has behind the others, whatever the rows before.
fn check_position<T: Element>(pool: &Pool, dims: AttentionDims, kv: Option<[u32; 2]>) {
    let before = |operands: &Operands<T>, rows: usize, kv_rows: usize| {
        let own = operands.dims;
        let dims = AttentionDims { rows: own.rows + rows, kv_rows: own.kv_rows + kv_rows, ..own };
        let fill = |values: &[T], count: usize| [&vec![T::from_f32(0.25); count], values].concat();
        let (of_q, of_kv) = (rows * own.q_width(), kv_rows * own.kv_width());
        let keys = [&vec![RowKey::default(); rows], &operands.keys[..]].concat();
        Operands {
            dims,
            starts: vec![0, rows as u32, dims.rows as u32],
            kv_starts: kv.map(|_| vec![0, kv_rows as u32, dims.kv_rows as u32]),
            keys,
            q: fill(&operands.q, of_q),
            k: fill(&operands.k, of_kv),
            v: fill(&operands.v, of_kv),
            dout: fill(&operands.dout, of_q),
            ..operands.clone()
        }
    };
    let kv_starts: Option<Vec<u32>> = kv.map(|_| vec![0, dims.kv_rows as u32]);
    let alone = Operands::<T>::new(dims, &[0, dims.rows as u32], kv_starts.as_deref(), Some(0.1));
    let expected = alone.run(pool, false);
    for rows in [1, 95, 128, 200] {
        let kv_rows = kv.map_or(rows, |[times, more]| rows * times as usize + more as usize);
        let found = before(&alone, rows, kv_rows).run(pool, false);
        for (found, expected) in found.narrow.iter().zip(&expected.narrow) {
            let own = &found[found.len() - expected.len()..];
            assert!(bits(own) == bits(expected), "{}, {}, {dims:?}, {rows} before", pool.isa(), T::DTYPE);
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_wherever_it_is_in_the_pack() {
    let dims = AttentionDims::new(300, 2, 1, 20, None, 0.4);
    let encoder = AttentionDims { causal: false, max_distance: Some(50), ..dims };
    let cross = AttentionDims { causal: false, kv_rows: 170, ..dims };
    for &isa in Isa::available() {
        let pool = Pool::on_isa(2, isa).unwrap();
        for (dims, kv) in [(encoder, None), (cross, Some([1, 7]))] {
            check_position::<f32>(&pool, dims, kv);
            check_position::<bf16>(&pool, dims, kv);
        }
    }
}

/// The weights that dropout keeps, from equal scores and v = 1: [rows · heads, keys].
fn kept<T: Element>(
    pool: &Pool,
    keys: &[RowKey],
    length: usize,
    heads: usize,
    probability: f32,
) -> Vec<bool> {
    let rows = keys.len();
    let dims = AttentionDims { causal: false, ..AttentionDims::new(rows, heads, heads, length, None, 1.0) };
    let starts: Vec<u32> = (0..=rows / length).map(|at| (at * length) as u32).collect();
    let dropout = Some(WeightDropout { probability, seed: 11, op: 2, keys });
    let context = ContextSlices { dropout, ..ContextSlices::new(&starts) };
    let q = vec![T::default(); rows * heads * length];
    // v is the identity in each sequence and head: the output is the weights.
    let one = |at: usize| T::from_f32(f32::from(u8::from(at / (heads * length) % length == at % length)));
    let v: Vec<T> = (0..q.len()).map(one).collect();
    let (mut out, mut lse) = (q.clone(), vec![0.0; heads * rows]);
    let mut scratch = vec![0.0; attention_scratch(&dims, pool.threads())];
    attention(pool, &dims, &context, &q, &q, &v, &mut out, &mut lse, &mut scratch);
    let expected = 1.0 / length as f32 / (1.0 - probability);
    out.iter()
        .map(|weight| {
            let weight = weight.to_f32();
            assert!(weight == 0.0 || (weight / expected - 1.0).abs() < 5e-3, "{weight} is not {expected}");
            weight != 0.0
        })
        .collect()
}

#[test]
fn dropout_keeps_its_share_of_weights_and_the_same_ones_on_every_isa() {
    let (length, heads, probability) = (64, 4, 0.1f32);
    let keys: Vec<RowKey> =
        (0..4096).map(|row| RowKey { sample: row / 64, position: (row % 64) as u32, epoch: 0 }).collect();
    let expected = kept::<f32>(&Pool::on_isa(2, Isa::Portable).unwrap(), &keys, length, heads, probability);
    let near = |kept: &mut dyn Iterator<Item = &bool>, what: &str| {
        let (mut count, mut total) = (0u32, 0u32);
        for kept in kept {
            (count, total) = (count + u32::from(*kept), total + 1);
        }
        let (share, n) = (f64::from(count) / f64::from(total), f64::from(total));
        let keeps = 1.0 - f64::from(probability);
        let sigma = (keeps * (1.0 - keeps) / n).sqrt();
        assert!((share - keeps).abs() < 4.0 * sigma, "{what}: {share} of {n}");
    };
    assert!(expected.len() >= 1_000_000);
    near(&mut expected.iter(), "all");
    for head in 0..heads {
        let own = expected.chunks_exact(length).skip(head).step_by(heads);
        near(&mut own.flatten(), &format!("head {head}"));
    }
    // Two heads keep a weight together as often as independent ones.
    let both = expected.chunks_exact(2 * length).map(|two| two.split_at(length));
    let agree = both.flat_map(|(a, b)| a.iter().zip(b)).filter(|(a, b)| !**a && !**b).count() as f64;
    let n = (expected.len() / 2) as f64;
    let chance = f64::from(probability).powi(2);
    assert!((agree / n - chance).abs() < 4.0 * (chance / n).sqrt(), "{agree} of {n}");
    for &isa in Isa::available() {
        let pool = Pool::on_isa(2, isa).unwrap();
        assert!(kept::<f32>(&pool, &keys, length, heads, probability) == expected, "{isa}");
        assert!(kept::<bf16>(&pool, &keys, length, heads, probability) == expected, "{isa}");
    }
}

#[test]
#[should_panic(expected = "causal attention has the keys of its own sequences")]
fn causal_attention_to_other_sequences_is_refused() {
    let dims = AttentionDims::new(3, 1, 1, 4, None, 1.0);
    Operands::<f32>::new(dims, &[0, 3], Some(&[0, 3]), None).run(&Pool::new(1), false);
}

#[test]
#[should_panic(expected = "`kv_starts` has 3 elements; the sizes given need 2")]
fn as_many_sequences_of_keys_as_of_queries_are_asked_for() {
    let dims = AttentionDims { causal: false, ..AttentionDims::new(3, 1, 1, 4, None, 1.0) };
    Operands::<f32>::new(dims, &[0, 3], Some(&[0, 1, 3]), None).run(&Pool::new(1), false);
}

/// All kernels of encoder-decoders, for the tests that ask something of every kernel.
pub(crate) struct EncoderDecoder<T> {
    attentions: Vec<(Operands<T>, Results<T>)>,
    cached: (AttentionDims, Vec<T>),
    activated: [Vec<T>; 3],
    table: Vec<f32>,
    dtable: Vec<f32>,
    scratch: Vec<f32>,
}

const BUCKETS: PositionBuckets = PositionBuckets { buckets: 32, max_distance: 128, bidirectional: true };
const POSITION_BIAS: PositionBiasDims = PositionBiasDims { buckets: BUCKETS, heads: 4 };

impl<T: Element> EncoderDecoder<T> {
    pub(crate) fn new() -> Self {
        let chosen = [0, 5, 7].map(|index| cases()[index]);
        let attentions: Vec<_> = chosen
            .map(|(dims, kv_starts, probability)| {
                let operands = Operands::new(dims, STARTS, kv_starts, probability);
                let results = operands.run(&Pool::new(1), false);
                (operands, results)
            })
            .into();
        let scratch = attentions.iter().flat_map(|(operands, _)| {
            let dims = &operands.dims;
            [attention_scratch(dims, MOST_THREADS), attention_backward_scratch(dims, MOST_THREADS)]
        });
        let scratch = scratch.max().unwrap();
        let cached = AttentionDims { rows: 4, ..attentions[0].0.dims };
        Self {
            attentions,
            cached: (cached, vec![T::default(); 4 * cached.q_width()]),
            activated: [(); 3].map(|()| vec![T::default(); 9_000]),
            table: vec![0.0; 4 * BUCKETS.distances() as usize],
            dtable: vec![0.0; 32 * 4],
            scratch: vec![0.0; scratch.max(cached_attention_scratch(&cached, MOST_THREADS))],
        }
    }

    pub(crate) fn run(&mut self, pool: &Pool) {
        let Self { attentions, cached: (dims, decoded), activated: [y, dx, scaled], scratch, .. } = self;
        for (operands, results) in &mut *attentions {
            operands.run_into(pool, results, false, scratch);
        }
        let Operands { q, k, v, bias, .. } = &attentions[0].0;
        let ranges = [(0, 1), (1, 300), (0, 0), (300, 345)].map(|(first, end)| CacheRange { first, end });
        let q = &q[..decoded.len()];
        cached_attention(pool, dims, 345, &ranges, bias.as_deref(), q, [k, v], decoded, scratch);
        let (x, dy) = (&k[..9_000], &v[..9_000]);
        activation(pool, ActivationFn::Relu, x, y);
        activation_backward(pool, ActivationFn::GeluTanh, dy, x, dx);
        scale(pool, 0.3, x, scaled);
        position_bias(POSITION_BIAS, &x[..32 * 4], &mut self.table);
        self.dtable.fill(0.5);
        position_bias_backward(POSITION_BIAS, &self.table, &mut self.dtable);
    }

    pub(crate) fn bits(&self) -> Vec<Vec<u64>> {
        let narrow = self.attentions.iter().flat_map(|(_, results)| &results.narrow);
        let narrow = narrow.chain([&self.cached.1]).chain(&self.activated).map(|values| bits(values));
        let wide = self.attentions.iter().flat_map(|(_, results)| &results.wide);
        let wide = wide.chain([&self.table, &self.dtable]).map(|values| bits(values));
        narrow.chain(wide).map(|bits| bits.into_iter().map(u64::from).collect()).collect()
    }
}
