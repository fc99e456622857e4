//! C = Aᵀ · B on AMX where one operand has a few columns, as in the gradients of an adapter: its rank.
//!
//! [`super::amx_gemm_tn`] packs a panel of the wide operand over all rows before it multiplies it. With one or two narrow
//! panels a packed element is used once or twice, so it should not leave the cache in between: here a block of rows is
//! packed and multiplied at a time, and the C tiles, which are few, stay in L1 between blocks.
//!
//! The bits are those of [`super::gemm`]: each sum has the same terms in the same order.
#![allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]

use super::MatrixView;
use super::amx::AmxKernel;
use super::amx_gemm_tn::{QUARTERS, transpose_quarter};
use super::amx_pack::{Operand, pack};
use super::blocking::{NARROW_STEPS, NarrowTnBlocking, PANEL, TILE};
use super::epilogue::Epilogue;
use super::micro_kernel::{NoInterleave, TileRect, store_rows, store_wide_rows};
use crate::pool::Pool;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::{Chunks, Grid, Tile};
use zeroth_kernel::Element;

/// Computes a[k, m]ᵀ · b[k, n] and passes each row of each C tile to `epilogue`.
pub(super) fn run<T: Element, O: Send>(
    pool: &Pool,
    blocking: NarrowTnBlocking,
    [m, n, k]: [usize; 3],
    a: MatrixView<T>,
    b: MatrixView<T>,
    out: &mut [O],
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    let ((narrow, width), (wide, across)) = if m > n { ((b, n), (a, m)) } else { ((a, m), (b, n)) };
    let (shared, own) = scratch.split_at_mut(blocking.shared_len());
    // By blocks of rows, each with its panels: [block, panel, step].
    let packed = ScratchSplitter::new(shared).bf16(blocking.narrow * blocking.steps * TILE);
    let block_len = blocking.narrow * NARROW_STEPS * TILE;
    pool.each(Chunks::new(packed, block_len), |block, out| {
        let first = block * NARROW_STEPS * PANEL;
        let view = narrow.submatrix(first, 0).transposed();
        pack(Operand::A, view, width, (NARROW_STEPS * PANEL).min(k - first), out);
    });
    let packed = &*packed;
    let part = blocking.panels_per_task(pool.threads()) * PANEL;
    let grid = if m > n { Grid::new(out, n, part, n) } else { Grid::new(out, n, m, part) };
    pool.each_with(grid, own, |task, mut out, scratch| {
        let mut scratch = ScratchSplitter::new(scratch);
        let columns = part.min(across - task * part);
        let count = columns.div_ceil(PANEL);
        // C tiles: [narrow panel, wide panel].
        let acc = scratch.f32(blocking.narrow * count * TILE);
        let transposed = scratch.f32(TILE);
        let b_pack = scratch.bf16(count * NARROW_STEPS * TILE);
        let mut kernel = AmxKernel::configured();
        for (block, narrow_block) in packed.chunks(block_len).enumerate() {
            let panel_len = narrow_block.len() / blocking.narrow;
            let first = block * NARROW_STEPS * PANEL;
            let terms = (NARROW_STEPS * PANEL).min(k - first);
            let b_pack = &mut b_pack[..count * panel_len];
            pack(Operand::B, wide.submatrix(first, task * part).transposed(), columns, terms, b_pack);
            for (at, acc) in acc.chunks_exact_mut(TILE).enumerate() {
                let a = &narrow_block[at / count * panel_len..][..panel_len];
                let b = &b_pack[at % count * panel_len..][..panel_len];
                kernel.matmul_panels(a, b, acc, block > 0, &mut NoInterleave);
            }
        }
        // SAFETY: `Isa::available` reports AMX only with AVX-512 and its bf16 conversions.
        unsafe {
            if m > n {
                store::<true, O>(acc, count, transposed, &mut out, epilogue);
            } else {
                store::<false, O>(acc, count, transposed, &mut out, epilogue);
            }
        }
    });
}

/// Stores the C tiles of a task, [narrow panel, wide panel], or their transposes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn store<const TRANSPOSED: bool, O>(
    acc: &[f32],
    count: usize,
    transposed: &mut [f32],
    out: &mut Tile<O>,
    epilogue: &impl Epilogue<O>,
) {
    for (at, acc) in acc.chunks_exact(TILE).enumerate() {
        let (narrow, wide) = (at / count * PANEL, at % count * PANEL);
        if TRANSPOSED {
            (0..QUARTERS).for_each(|quarter| transpose_quarter(acc, transposed, quarter));
            let rect = TileRect::new(out, [wide, narrow], [PANEL; 2]);
            store_rows::<PANEL, O>(transposed, rect, out, epilogue);
        } else {
            store_wide_rows(acc, TileRect::new(out, [narrow, wide], [PANEL; 2]), out, epilogue);
        }
    }
}
