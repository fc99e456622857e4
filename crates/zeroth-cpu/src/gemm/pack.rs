//! Packing to f32 in code that the compiler makes vectors of.

use super::View;
use crate::isa::each_isa;

each_isa! {
    /// Writes `lines` rows of `source` as a panel of `tile` rows, one term of every row after the other, zeros below the
    /// last row.
    pub(super) fn pack_panel<T>(source: View<'_, T>, lines: usize, depth: usize, tile: usize, out: &mut [f32]) {
        let out = &mut out[..tile * depth];
        if lines < tile {
            out.fill(0.0);
        }
        if source.row == 1 {
            for (k, out) in out.chunks_exact_mut(tile).enumerate() {
                let start = k * source.column;
                for (out, value) in out.iter_mut().zip(&source.data[start..start + lines]) {
                    *out = value.to_f32();
                }
            }
        } else {
            // Four rows at a time: one store of four numbers instead of four far apart.
            let row = |i: usize| &source.data[i * source.row..][..depth];
            let fours = lines / 4 * 4;
            for i in (0..fours).step_by(4) {
                let (a, b, c, d) = (row(i), row(i + 1), row(i + 2), row(i + 3));
                for (k, out) in out.chunks_exact_mut(tile).enumerate() {
                    out[i..i + 4].copy_from_slice(&[a[k].to_f32(), b[k].to_f32(), c[k].to_f32(), d[k].to_f32()]);
                }
            }
            for i in fours..lines {
                for (out, value) in out.chunks_exact_mut(tile).zip(row(i)) {
                    out[i] = value.to_f32();
                }
            }
        }
    }
}
