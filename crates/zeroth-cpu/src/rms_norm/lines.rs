//! Both directions for rows of bf16 with the processor's own conversions: in plain loops arithmetic takes as long as
//! memory. Sums are in the lanes and the tree of [`crate::math`].
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps, _mm512_sub_ps,
};

use crate::isa::Isa;
use crate::lines::{self, AHEAD, LANES, load, rounded, store, total};
use zeroth_kernel::Element;
use zeroth_kernel::RmsNormDims;

/// Numbers that are taken at a time.
const LINE: usize = 2 * LANES;

/// Whether rows of this type and width are done here.
pub(super) fn fit<T: Element>(path: Isa, dims: RmsNormDims) -> bool {
    lines::fit::<T>(path) && dims.width.is_multiple_of(LINE)
}

/// As the plain loop of the same name.
pub(super) fn add_norm_rows(
    dims: RmsNormDims,
    pitch: usize,
    x: &[u16],
    residual: &[u16],
    w: &[u16],
    h: &mut [u16],
    y: &mut [u16],
    rstd: &mut [f32],
) {
    let (width, count) = (dims.width, h.len());
    assert!([x.len(), residual.len(), y.len(), rstd.len() * pitch].iter().all(|len| *len == count));
    assert!(w.len() == width && width <= pitch);
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let at = row * pitch;
        let from = [x[at..].as_ptr(), residual[at..].as_ptr()];
        // SAFETY: the path has the instructions, as `fit` has asked; lengths were checked.
        unsafe {
            let squares = add(from, width, h[at..].as_mut_ptr());
            *rstd = norm(squares, dims, h[at..].as_ptr(), w.as_ptr(), y[at..].as_mut_ptr());
        }
    }
}

/// As the plain loop of the same name.
pub(super) fn norm_rows(
    dims: RmsNormDims,
    pitch: usize,
    h: &[u16],
    w: &[u16],
    y: &mut [u16],
    rstd: &mut [f32],
) {
    let (width, count) = (dims.width, h.len());
    assert!(y.len() == count && rstd.len() * pitch == count && w.len() == width && width <= pitch);
    for (row, rstd) in rstd.iter_mut().enumerate() {
        let at = row * pitch;
        // SAFETY: as above.
        unsafe {
            let squares = squares(h[at..].as_ptr(), width);
            *rstd = norm(squares, dims, h[at..].as_ptr(), w.as_ptr(), y[at..].as_mut_ptr());
        }
    }
}

/// As the plain loop of the same name.
pub(super) fn backward_rows(
    [width, pitch]: [usize; 2],
    dy: &[u16],
    h: &[u16],
    rstd: &[f32],
    w: &[u16],
    residual_grad: Option<&[u16]>,
    dh: &mut [u16],
    dw: &mut [f32],
) {
    let count = dh.len();
    assert!([dy.len(), h.len(), residual_grad.map_or(count, <[u16]>::len)].iter().all(|len| *len == count));
    assert!(w.len() == width && dw.len() == width && width <= pitch && rstd.len() * pitch >= count);
    for (row, rstd) in rstd.iter().enumerate().take(count / pitch) {
        let at = row * pitch;
        let from = [dy[at..].as_ptr(), h[at..].as_ptr()];
        let (w, dh) = (w.as_ptr(), dh[at..].as_mut_ptr());
        // SAFETY: as above.
        unsafe {
            match residual_grad {
                Some(grad) => backward::<true>(from, *rstd, w, grad[at..].as_ptr(), dh, dw),
                None => backward::<false>(from, *rstd, w, w, dh, dw),
            }
        }
    }
}

/// h = the sum of two rows; the sum of its squares.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn add([x, residual]: [*const u16; 2], width: usize, h: *mut u16) -> f32 {
    let mut lanes = _mm512_setzero_ps();
    for at in (0..width).step_by(LINE) {
        // SAFETY: the caller has a row in each; hints may have any address.
        unsafe {
            ask(x, at);
            ask(residual, at);
            let sum = [at, at + LANES].map(|at| _mm512_add_ps(load(residual.add(at)), load(x.add(at))));
            store(sum, h.add(at));
            for value in rounded(sum) {
                lanes = _mm512_add_ps(lanes, _mm512_mul_ps(value, value));
            }
        }
    }
    total(lanes)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn squares(h: *const u16, width: usize) -> f32 {
    let mut lanes = _mm512_setzero_ps();
    for at in (0..width).step_by(LANES) {
        // SAFETY: the caller has a row.
        let value = unsafe { load(h.add(at)) };
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(value, value));
    }
    total(lanes)
}

/// Norms a row with its sum of squares, and returns its rstd.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn norm(squares: f32, dims: RmsNormDims, h: *const u16, w: *const u16, y: *mut u16) -> f32 {
    let rstd = 1.0 / (squares / dims.width as f32 + dims.eps).sqrt();
    let scale = _mm512_set1_ps(rstd);
    for at in (0..dims.width).step_by(LINE) {
        // SAFETY: the caller has a row in each.
        unsafe {
            let normed = rounded([at, at + LANES].map(|at| _mm512_mul_ps(load(h.add(at)), scale)));
            let weighed = [0, 1].map(|i| _mm512_mul_ps(load(w.add(at + i * LANES)), normed[i]));
            store(weighed, y.add(at));
        }
    }
    rstd
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn backward<const GRAD: bool>(
    [dy, h]: [*const u16; 2],
    rstd: f32,
    w: *const u16,
    grad: *const u16,
    dh: *mut u16,
    dw: &mut [f32],
) {
    let (width, scale) = (dw.len(), _mm512_set1_ps(rstd));
    // dy, dy times w, and h as it was normed.
    let read = |at: usize| -> [__m512; 3] {
        // SAFETY: the caller has a row in each.
        unsafe {
            let dy = load(dy.add(at));
            [dy, _mm512_mul_ps(dy, load(w.add(at))), _mm512_mul_ps(load(h.add(at)), scale)]
        }
    };
    let mut lanes = _mm512_setzero_ps();
    for at in (0..width).step_by(LANES) {
        let [_, weighed, normed] = read(at);
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(weighed, normed));
    }
    let along = _mm512_set1_ps(total(lanes) / width as f32);
    for at in (0..width).step_by(LINE) {
        // SAFETY: as above; hints may have any address.
        unsafe {
            ask(dy, at);
            ask(h, at);
            if GRAD {
                ask(grad, at);
            }
            let slopes = [at, at + LANES].map(|at| {
                let [dy, weighed, normed] = read(at);
                let sums = dw.as_mut_ptr().add(at);
                _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_mul_ps(dy, normed)));
                let slope = _mm512_mul_ps(scale, _mm512_sub_ps(weighed, _mm512_mul_ps(normed, along)));
                if GRAD { _mm512_add_ps(slope, load(grad.add(at))) } else { slope }
            });
            store(slopes, dh.add(at));
        }
    }
}

/// Asks for a line that comes later.
#[inline]
#[target_feature(enable = "avx512f")]
fn ask(row: *const u16, at: usize) {
    _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(at + AHEAD).cast());
}
