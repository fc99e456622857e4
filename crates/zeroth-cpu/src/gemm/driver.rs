//! The GEMM driver: entry points, each for the micro-kernel of the instruction set.
//!
//! There are seven loop nests. A single one with the kernels behind it would lose the interleaving or the packing order that
//! each was measured with:
//! - [`MicroKernel::run_task`] is the plain one, for AVX2, NEON and portable code.
//! - [`multiply_block`] multiplies a packed B on the calling thread, for attention and the head.
//! - `avx512_driver` packs a group of A panels while the previous group is multiplied.
//! - `amx_driver` stores a C tile while the next one is multiplied.
//! - `amx_gemm_tn` keeps a whole transposed operand in L2, which the blocked order would transpose again for every block.
//! - `amx_short_k` and `amx_narrow_tn` are for matmuls of adapters, whose k or whose output is a few tiles.

#[cfg(target_arch = "x86_64")]
use zeroth_base::DType;

use super::MatrixView;
use super::blocking::{BAND_ROWS, Blocking, band_scratch, gemm_tn_scratch, scratch};
#[cfg(target_arch = "x86_64")]
use super::blocking::{GemmTnBlocking, NarrowTnBlocking};
use super::epilogue::{ClosureEpilogue, Epilogue};
use super::micro_kernel::{MicroKernel, Operands, pack_b_panels, panels};
use super::portable::PortableKernel;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::rows::check_rows;
use crate::scratch_splitter::ScratchSplitter;
use crate::work_partition::Grid;
use crate::{check_len, check_scratch};
use zeroth_kernel::Element;

/// Evaluates an expression with `$kernel` bound to the micro-kernel for these operand types on an instruction set.
macro_rules! with_kernel {
    ($isa:expr, $a:ty, $b:ty, $kernel:ident => $body:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if amx_supports::<$a, $b>() => {
                type $kernel = super::amx::AmxKernel;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                type $kernel = super::avx512::Avx512Kernel;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                type $kernel = PortableKernel<true>;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                type $kernel = super::neon::NeonKernel;
                $body
            }
            _ => {
                type $kernel = PortableKernel<false>;
                $body
            }
        }
    };
}

pub(super) use with_kernel;

/// Whether AMX multiplies these types: one operand is bf16, and the other can be rounded to it.
#[cfg(target_arch = "x86_64")]
pub(super) const fn amx_supports<A: Element, B: Element>() -> bool {
    matches!((A::DTYPE, B::DTYPE), (DType::Bf16, DType::Bf16 | DType::F32) | (DType::F32, DType::Bf16))
}

/// [`gemm`] with a closure `(first column, accumulators, out)` as its epilogue.
pub(crate) fn gemm_with<A: Element, B: Element, O: Send>(
    pool: &Pool,
    shape: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    out: &mut [O],
    scratch: &mut [f32],
    epilogue: impl Fn(usize, &[f32], &mut [O]) + Sync,
) {
    gemm(pool, shape, a, b, out, shape[1], scratch, &ClosureEpilogue(epilogue));
}

/// Computes a[m, k] · b[k, n] and passes each row of each C tile to `epilogue`. Rows of `out` are `row_stride` apart.
pub(crate) fn gemm<A: Element, B: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    out: &mut [O],
    row_stride: usize,
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    check_rows("out", out.len(), [m, n], row_stride);
    check_scratch(scratch.len(), self::scratch(m, n, k, pool.threads()));
    let operands = Operands { k, a, b };
    with_kernel!(pool.isa(), A, B, K => {
        let [rows, columns] = K::BLOCKING.for_layout(a.is_transposed()).task_shape(m, n, k, pool.threads());
        pool.each_with(Grid::with_row_stride(out, [n, row_stride], rows, columns), scratch, |_, tile, scratch| {
            K::run_task(operands, tile, scratch, epilogue);
        });
    });
}

/// Computes a[k, m]ᵀ · b[k, n] and passes each row of each C tile to `epilogue`.
pub(crate) fn gemm_tn<T: Element, O: Send>(
    pool: &Pool,
    [m, n, k]: [usize; 3],
    a: MatrixView<T>,
    b: MatrixView<T>,
    out: &mut [O],
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    check_len("out", out.len(), m * n);
    check_scratch(scratch.len(), gemm_tn_scratch(m, n, k, pool.threads()));
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx, Some(blocking)) = (pool.isa(), NarrowTnBlocking::of([m, n, k]))
        && T::DTYPE == DType::Bf16
    {
        super::amx_narrow_tn::run(pool, blocking, [m, n, k], a, b, out, scratch, epilogue);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx, Some(blocking)) = (pool.isa(), GemmTnBlocking::of([m, n, k]))
        && T::DTYPE == DType::Bf16
        && pool.threads() <= blocking.wide
    {
        super::amx_gemm_tn::run(pool, blocking, [m, n, k], a, b, out, scratch, epilogue);
        return;
    }
    gemm(pool, [m, n, k], a.transposed(), b, out, n, scratch, epilogue);
}

/// Multiplies a[m, kc] by a packed b[kc, n] into `c`, whose rows are `stride` apart; with `add` accumulates.
fn multiply_block<K: MicroKernel, T: Element>(
    kernel: &mut K,
    [m, n, kc]: [usize; 3],
    a: MatrixView<T>,
    a_pack: &mut [K::Packed],
    b_pack: &[K::Packed],
    c: &mut [f32],
    stride: usize,
    add: bool,
) {
    let Blocking { mr, nr, .. } = K::BLOCKING;
    for row in (0..m).step_by(mr) {
        let rows = mr.min(m - row);
        let a_panel = kernel.pack_a(a.submatrix(row, 0), rows, kc, a_pack);
        for (panel, b_panel) in b_pack.chunks_exact(K::BLOCKING.panel_len(nr, kc)).enumerate() {
            let column = panel * nr;
            let extent = [rows, nr.min(n - column)];
            kernel.multiply(a_panel, b_panel, &mut c[row * stride + column..], stride, extent, add);
        }
    }
}

/// Computes a[m, k] · b[k, n] on the calling thread with B packed once, and passes C of each band of rows, [rows, n], to
/// `finish(first row, c)`.
pub(crate) fn gemm_row_bands<A: Element, B: Element>(
    isa: Isa,
    [m, n, k]: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    scratch: &mut [f32],
    mut finish: impl FnMut(usize, &mut [f32]),
) {
    check_scratch(scratch.len(), band_scratch(n, k));
    with_kernel!(isa, A, B, K => {
        let (mut kernel, blocking, b) = (K::setup(), K::BLOCKING, b.transposed());
        let mut scratch = ScratchSplitter::new(scratch);
        let (c, pack) = (scratch.f32(BAND_ROWS * n), bytemuck::cast_slice_mut(scratch.rest()));
        let (a_pack, b_pack) = pack.split_at_mut(blocking.panel_len(blocking.mr, blocking.kc(k)));
        let columns = n.next_multiple_of(blocking.nr);
        let blocks = || (0..k).step_by(blocking.kc(k).max(1)).map(|first| (first, blocking.kc(k).min(k - first)));
        let packed = |first: usize, kc: usize| {
            let start = blocking.panel_len(columns, first);
            start..start + blocking.panel_len(columns, kc)
        };
        for (first, kc) in blocks() {
            pack_b_panels(&kernel, b.submatrix(0, first), n, kc, &mut b_pack[packed(first, kc)]);
        }
        for first_row in (0..m).step_by(BAND_ROWS) {
            let rows = BAND_ROWS.min(m - first_row);
            if k == 0 {
                c.fill(0.0);
            }
            for (first, kc) in blocks() {
                let (a, b_pack) = (a.submatrix(first_row, first), &b_pack[packed(first, kc)]);
                multiply_block(&mut kernel, [rows, n, kc], a, a_pack, b_pack, c, n, first > 0);
            }
            finish(first_row, &mut c[..rows * n]);
        }
    });
}

/// Computes a[m, k] · b[k, n] on the calling thread into `c`, whose rows are `stride` apart; with `add` accumulates.
pub(crate) fn gemm_serial<A: Element, B: Element>(
    isa: Isa,
    [m, n, k]: [usize; 3],
    a: MatrixView<A>,
    b: MatrixView<B>,
    c: &mut [f32],
    stride: usize,
    add: bool,
    pack: &mut [f32],
) {
    with_kernel!(isa, A, B, K => {
        let (mut kernel, blocking) = (K::setup(), K::BLOCKING);
        let (b, pack) = (b.transposed(), ScratchSplitter::new(pack).rest());
        for first in (0..k).step_by(blocking.kc(k).max(1)) {
            let kc = blocking.kc(k).min(k - first);
            let (a_pack, b_pack) = panels::<K>(pack, blocking.mr, n, kc);
            pack_b_panels(&kernel, b.submatrix(0, first), n, kc, b_pack);
            let a = a.submatrix(0, first);
            multiply_block(&mut kernel, [m, n, kc], a, a_pack, b_pack, c, stride, add || first > 0);
        }
    });
}
