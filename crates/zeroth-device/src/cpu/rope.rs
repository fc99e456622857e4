//! Rotary position embedding in the rotate-half form: dimension i turns with dimension i + rotated/2.
//!
//! cos and sin stay f32 (transformers rounds them to the model's type), and a product is rounded once.

use super::check_len;
use super::cut::Chunks;
use super::element::Element;
use super::path::each_path;
use super::pool::Pool;

/// What the kernel needs of a model's rotary embedding. How frequencies are stretched is the model's affair.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// The angle a position adds, for each pair of dimensions.
    pub inv_freq: Vec<f32>,
    /// Multiplies cos and sin.
    pub attention_scaling: f32,
}

impl RopeTable {
    /// The frequencies of base `theta` for `dim` rotated dimensions, as trained.
    pub fn plain(theta: f64, dim: usize) -> Self {
        let frequency = |pair: usize| theta.powf(-2.0 * pair as f64 / dim as f64) as f32;
        Self { inv_freq: (0..dim / 2).map(frequency).collect(), attention_scaling: 1.0 }
    }
}

/// Rows that one task turns.
const ROWS: usize = 32;

/// The sizes of what is turned: [rows, heads · head_dim].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeDims {
    /// Tokens.
    pub rows: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Leading elements of a head that turn; the rest is left as it is.
    pub rotated: usize,
}

/// cos and sin [rows, rotated / 2] of every row's position, for all layers of a step.
pub fn rope_angles(pool: &Pool, table: &RopeTable, positions: &[i32], cos: &mut [f32], sin: &mut [f32]) {
    let pairs = table.inv_freq.len();
    check_len("cos", cos.len(), positions.len() * pairs);
    check_len("sin", sin.len(), positions.len() * pairs);
    pool.each((Chunks::new(cos, ROWS * pairs), Chunks::new(sin, ROWS * pairs)), |task, (cos, sin)| {
        let rows = cos.chunks_exact_mut(pairs).zip(sin.chunks_exact_mut(pairs));
        for ((cos, sin), &position) in rows.zip(&positions[task * ROWS..]) {
            for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&table.inv_freq) {
                let angle = position as f32 * frequency;
                *cos = angle.cos() * table.attention_scaling;
                *sin = angle.sin() * table.attention_scaling;
            }
        }
    });
}

/// Turns x in place by each row's angles.
pub fn rope<T: Element>(pool: &Pool, dims: RopeDims, cos: &[f32], sin: &[f32], x: &mut [T]) {
    turn(pool, dims, cos, sin, 1.0, x);
}

/// The gradient of [`rope`], in place: the turn by the negative angle.
pub fn rope_backward<T: Element>(pool: &Pool, dims: RopeDims, cos: &[f32], sin: &[f32], dx: &mut [T]) {
    turn(pool, dims, cos, sin, -1.0, dx);
}

fn turn<T: Element>(pool: &Pool, dims: RopeDims, cos: &[f32], sin: &[f32], sign: f32, x: &mut [T]) {
    let pairs = dims.rotated / 2;
    check_len("cos", cos.len(), dims.rows * pairs);
    check_len("sin", sin.len(), dims.rows * pairs);
    check_len("x", x.len(), dims.rows * dims.heads * dims.head_dim);
    if pairs == 0 {
        return;
    }
    pool.each(Chunks::new(x, ROWS * dims.heads * dims.head_dim), |task, x| {
        let first = task * ROWS * pairs;
        turn_rows(pool.path(), dims, &cos[first..], &sin[first..], sign, x);
    });
}

each_path! {
    fn turn_rows<T>(dims: RopeDims, cos: &[f32], sin: &[f32], sign: f32, x: &mut [T]) {
        let pairs = dims.rotated / 2;
        let angles = cos.chunks_exact(pairs).zip(sin.chunks_exact(pairs));
        for (row, (cos, sin)) in x.chunks_exact_mut(dims.heads * dims.head_dim).zip(angles) {
            for head in row.chunks_exact_mut(dims.head_dim) {
                let (first, second) = head[..dims.rotated].split_at_mut(pairs);
                for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    let (u, v, sin) = (a.to_f32(), b.to_f32(), sin * sign);
                    *a = T::from_f32(u * cos - v * sin);
                    *b = T::from_f32(v * cos + u * sin);
                }
            }
        }
    }
}
