//! Auto-vectorized packing to f32 panels.

use super::MatrixView;
use crate::isa::each_isa;

each_isa! {
    /// Packs `lines` rows of `source` as a panel of `width` rows, k-major: element k of every row, then element k + 1.
    /// Missing rows are zeros.
    pub(super) fn pack_panel<T>(source: MatrixView<'_, T>, lines: usize, kc: usize, width: usize, out: &mut [f32]) {
        let out = &mut out[..width * kc];
        if lines < width {
            out.fill(0.0);
        }
        if source.row_stride == 1 {
            for (k, out) in out.chunks_exact_mut(width).enumerate() {
                let start = k * source.col_stride;
                for (out, value) in out.iter_mut().zip(&source.data[start..start + lines]) {
                    *out = value.to_f32();
                }
            }
        } else {
            // Four rows at a time: one store of four elements instead of four strided stores.
            let row = |i: usize| &source.data[i * source.row_stride..][..kc];
            let fours = lines / 4 * 4;
            for i in (0..fours).step_by(4) {
                let (a, b, c, d) = (row(i), row(i + 1), row(i + 2), row(i + 3));
                for (k, out) in out.chunks_exact_mut(width).enumerate() {
                    out[i..i + 4].copy_from_slice(&[a[k].to_f32(), b[k].to_f32(), c[k].to_f32(), d[k].to_f32()]);
                }
            }
            for i in fours..lines {
                for (out, value) in out.chunks_exact_mut(width).zip(row(i)) {
                    out[i] = value.to_f32();
                }
            }
        }
    }
}
