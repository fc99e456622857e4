//! Matmuls: by cuBLASLt, with a plan per shape, made and autotuned at its first use, or by our own kernel where cuBLASLt has no
//! algorithm.
//!
//! Our matrices are row-major, cuBLASLt's column-major. A row-major matrix [r, c] is the same memory as a column-major one [c, r], so
//! d = p · q becomes dᵀ = qᵀ · pᵀ: q is passed as the first operand and p as the second, with rows and columns swapped, and an
//! operand is transposed for the library exactly if it is for us.
#![allow(unsafe_code, reason = "enqueues matmuls over addresses checked by callers")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use zeroth_base::DType;

use super::autotune::autotune;
use super::cublaslt::{CublasLt, Factors, MatmulProblem, MatrixLayout, Plan, Pointers, dtype_index};
use super::driver::Address;
use super::entry_points::EntryPoint;
use super::launch_context::{LaunchContext, THREADS, float};
use super::scratch::WORKSPACE;
use zeroth_kernel::DeviceError;

/// Rows and columns of an output tile of our own kernel.
const TILE: usize = 64;

/// A row-major matrix in memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix {
    pub(super) at: Address,
    /// Elements between two rows.
    pub(super) row_stride: usize,
    /// Whether its transpose is multiplied.
    pub(super) transposed: bool,
}

impl Matrix {
    pub(super) const fn rows(at: Address, row_stride: usize) -> Self {
        Self { at, row_stride, transposed: false }
    }

    pub(super) const fn transposed(at: Address, row_stride: usize) -> Self {
        Self { at, row_stride, transposed: true }
    }
}

/// d [m, n] = scale · p [m, k] · q [k, n] (+ bias [n] or + d), accumulated in f32 and rounded once.
pub(super) struct Matmul {
    /// m, n and k.
    pub(super) size: [usize; 3],
    pub(super) p: Matrix,
    pub(super) q: Matrix,
    /// Data type of p and q.
    pub(super) from: DType,
    pub(super) d: Matrix,
    /// Data type of d and the bias.
    pub(super) to: DType,
    pub(super) bias: Option<Address>,
    pub(super) scale: f32,
    /// Adds to d instead of overwriting it.
    pub(super) add: bool,
}

/// cuBLASLt with its plans; a `None` plan means our own kernel.
#[derive(Default)]
pub(super) struct Matmuls {
    library: Option<CublasLt>,
    plans: BTreeMap<MatmulProblem, Option<Plan>>,
    /// Runs all matmuls by our own kernel.
    pub(super) own: bool,
    /// Memory limit of autotuning; `None`: all free memory.
    pub(super) autotune_bytes: Option<u64>,
}

impl Matmuls {
    pub(super) fn open(&mut self) -> Result<(), DeviceError> {
        self.library = Some(CublasLt::open()?);
        Ok(())
    }

    /// Enqueues a matmul. `workspace` has [`WORKSPACE`] bytes.
    pub(super) fn enqueue(
        &mut self,
        cx: &LaunchContext,
        matmul: &Matmul,
        workspace: Address,
    ) -> Result<(), DeviceError> {
        let [m, n, k] = matmul.size;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let library = match &self.library {
            Some(library) if !self.own && k > 0 => library,
            _ => return own_matmul(cx, matmul),
        };
        let problem = problem(matmul);
        let factors = Factors { alpha: matmul.scale, beta: if matmul.add { 1.0 } else { 0.0 } };
        let plan = match self.plans.entry(problem) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => {
                let mut plan = library.plan(&problem)?;
                if let Some(plan) = &mut plan {
                    autotune(cx, library, plan, &problem, factors, workspace, self.autotune_bytes)?;
                }
                entry.insert(plan)
            }
        };
        let Some(plan) = plan else { return own_matmul(cx, matmul) };
        let pointers =
            Pointers { a: matmul.q.at, b: matmul.p.at, d: matmul.d.at, bias: matmul.bias, workspace };
        // SAFETY: the addresses hold matrices of the sizes that the plan was made for.
        unsafe { library.matmul(plan, plan.chosen(), &pointers, factors, WORKSPACE, cx.stream) }
    }

    /// Destroys all plans and closes the library.
    pub(super) fn close(&mut self) {
        let plans = std::mem::take(&mut self.plans);
        if let Some(library) = self.library.take() {
            plans.values().flatten().for_each(|plan| library.destroy_plan(plan));
            library.close();
        }
    }
}

fn problem(matmul: &Matmul) -> MatmulProblem {
    let [m, n, k] = matmul.size.map(|size| size as u64);
    let operand = |matrix: Matrix, dtype: DType, [rows, columns]: [u64; 2]| {
        // The row-major layout in memory; rows and columns are swapped for the library.
        let [rows, columns] = if matrix.transposed { [columns, rows] } else { [rows, columns] };
        MatrixLayout {
            dtype: dtype_index(dtype),
            rows: columns,
            columns: rows,
            leading_dimension: matrix.row_stride as u64,
            transposed: matrix.transposed,
            alignment: alignment(matrix.at),
        }
    };
    MatmulProblem {
        a: operand(matmul.q, matmul.from, [k, n]),
        b: operand(matmul.p, matmul.from, [m, k]),
        d: operand(matmul.d, matmul.to, [m, n]),
        bias: matmul.bias.map_or(0, alignment),
        workspace: WORKSPACE,
    }
}

/// Alignment of an address, up to 16 bytes: no algorithm requires more. Memory plans align operands to 16 bytes, so the choice of an
/// algorithm does not depend on addresses.
fn alignment(at: Address) -> u32 {
    1 << at.trailing_zeros().min(4)
}

fn own_matmul(cx: &LaunchContext, matmul: &Matmul) -> Result<(), DeviceError> {
    let [m, n, k] = matmul.size;
    let strides = |matrix: Matrix| {
        let row_stride = matrix.row_stride as u64;
        if matrix.transposed { [1, row_stride] } else { [row_stride, 1] }
    };
    let ([p_row, p_column], [q_row, q_column]) = (strides(matmul.p), strides(matmul.q));
    let (bias, add) = (matmul.bias.unwrap_or(0), u64::from(matmul.add));
    let arguments = [
        matmul.p.at,
        p_row,
        p_column,
        matmul.q.at,
        q_row,
        q_column,
        matmul.d.at,
        matmul.d.row_stride as u64,
        bias,
        m as u64,
        n as u64,
        k as u64,
        float(matmul.scale),
        add,
    ];
    let grid = [m.div_ceil(TILE), n.div_ceil(TILE), 1];
    cx.run(EntryPoint::Matmul, &[matmul.from, matmul.to], grid, THREADS, &arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_gets_the_column_major_view() {
        // y[5, 7] = x[5, 3] · w[7, 3]ᵀ.
        let (p, q) = (Matrix::rows(16, 3), Matrix::transposed(24, 3));
        let (from, to) = (DType::Bf16, DType::F32);
        let d = Matrix::rows(32, 7);
        let matmul = Matmul { size: [5, 7, 3], p, q, from, d, to, bias: None, scale: 1.0, add: false };
        let MatmulProblem { a, b, d, .. } = problem(&matmul);
        assert_eq!((a.rows, a.columns, a.leading_dimension, a.transposed, a.alignment), (3, 7, 3, true, 8));
        assert_eq!((b.rows, b.columns, b.leading_dimension, b.transposed, b.alignment), (3, 5, 3, false, 16));
        assert_eq!((d.rows, d.columns, d.leading_dimension, d.dtype), (7, 5, 7, 0));
        // dw[7, 3] = dy[5, 7]ᵀ · x[5, 3].
        let (p, q) = (Matrix::transposed(16, 7), Matrix::rows(16, 3));
        let MatmulProblem { a, b, .. } = problem(&Matmul { size: [7, 3, 5], p, q, ..matmul });
        assert_eq!((a.rows, a.columns, a.transposed), (3, 5, false));
        assert_eq!((b.rows, b.columns, b.transposed), (7, 5, true));
    }
}
