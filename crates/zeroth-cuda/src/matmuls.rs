//! Products of matrices: by the library, with a plan for every shape made and tried at its first use, or by our own kernel
//! where the library has no algorithm.
//!
//! Ours are by rows, the library's by columns. A matrix by rows [r, c] is the same memory as one by columns [c, r], so
//! d = p · q by rows is dᵀ = qᵀ · pᵀ by columns: the library gets q as its first operand and p as its second, with as
//! many rows as ours has columns, and a matrix is transposed for it exactly when it is for us.
#![allow(unsafe_code, reason = "enqueues products over addresses that callers have checked")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use zeroth_base::DType;

use super::choice::choose;
use super::cublaslt::{CublasLt, Operand, Places, Plan, Question, place};
use super::driver::Address;
use super::line::{Line, THREADS};
use super::programs;
use super::scratch::WORKSPACE;
use zeroth_kernel::DeviceError;

/// Rows and columns of a tile of our own kernel.
const TILE: usize = 64;

/// A matrix in memory by rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix {
    pub(super) at: Address,
    /// Elements from one row to the next.
    pub(super) pitch: usize,
    /// Whether what is multiplied is its transpose.
    pub(super) transposed: bool,
}

impl Matrix {
    pub(super) const fn rows(at: Address, pitch: usize) -> Self {
        Self { at, pitch, transposed: false }
    }

    pub(super) const fn transposed(at: Address, pitch: usize) -> Self {
        Self { at, pitch, transposed: true }
    }
}

/// d[m, n] = p[m, k] · q[k, n], + bias by columns or + what d holds; summed in f32 and rounded once.
pub(super) struct Task {
    pub(super) size: [usize; 3],
    pub(super) p: Matrix,
    pub(super) q: Matrix,
    /// The type of p and q.
    pub(super) from: DType,
    pub(super) d: Matrix,
    /// The type of d and bias.
    pub(super) to: DType,
    pub(super) bias: Option<Address>,
    pub(super) add: bool,
}

/// The library with its plans; `None` in the table: our own kernel.
#[derive(Default)]
pub(super) struct Products {
    library: Option<CublasLt>,
    plans: BTreeMap<Question, Option<Plan>>,
    /// Whether all products are our own kernel's.
    pub(super) own: bool,
    /// The most bytes that a trial of algorithms takes beside the arenas; none: as many as are free.
    pub(super) spare: Option<u64>,
}

impl Products {
    pub(super) fn open(&mut self) -> Result<(), DeviceError> {
        self.library = Some(CublasLt::open()?);
        Ok(())
    }

    /// Enqueues a product. `workspace` holds [`WORKSPACE`] bytes.
    pub(super) fn multiply(
        &mut self,
        line: &Line,
        task: &Task,
        workspace: Address,
    ) -> Result<(), DeviceError> {
        let [m, n, k] = task.size;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let library = match &self.library {
            Some(library) if !self.own && k > 0 => library,
            _ => return own(line, task),
        };
        let question = question(task);
        let beta = if task.add { 1.0 } else { 0.0 };
        let plan = match self.plans.entry(question) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let mut plan = library.plan(&question)?;
                if let Some(plan) = &mut plan {
                    choose(line, library, plan, &question, beta, workspace, self.spare)?;
                }
                place.insert(plan)
            }
        };
        let Some(plan) = plan else { return own(line, task) };
        let places = Places { a: task.q.at, b: task.p.at, d: task.d.at, bias: task.bias, workspace };
        // SAFETY: the task's addresses hold matrices of its sizes, which the plan is for.
        unsafe { library.multiply(plan, plan.chosen(), &places, beta, WORKSPACE, line.stream) }
    }

    /// Gives everything back.
    pub(super) fn close(&mut self) {
        let plans = std::mem::take(&mut self.plans);
        if let Some(library) = self.library.take() {
            plans.values().flatten().for_each(|plan| library.forget(plan));
            library.close();
        }
    }
}

fn question(task: &Task) -> Question {
    let [m, n, k] = task.size.map(|size| size as u64);
    let operand = |matrix: Matrix, dtype: DType, [rows, columns]: [u64; 2]| {
        // As it lies in memory: by rows, and so with rows and columns exchanged for the library.
        let [rows, columns] = if matrix.transposed { [columns, rows] } else { [rows, columns] };
        Operand {
            dtype: place(dtype),
            rows: columns,
            columns: rows,
            pitch: matrix.pitch as u64,
            transposed: matrix.transposed,
            alignment: alignment(matrix.at),
        }
    };
    Question {
        a: operand(task.q, task.from, [k, n]),
        b: operand(task.p, task.from, [m, k]),
        d: operand(task.d, task.to, [m, n]),
        bias: task.bias.map_or(0, alignment),
        workspace: WORKSPACE,
    }
}

/// What an address is a multiple of, up to 16: no algorithm asks for more. Operands begin at multiples of 16 wherever
/// a plan puts them, so the choice does not depend on the place.
fn alignment(at: Address) -> u32 {
    1 << at.trailing_zeros().min(4)
}

fn own(line: &Line, task: &Task) -> Result<(), DeviceError> {
    let [m, n, k] = task.size;
    let strides = |matrix: Matrix| {
        let pitch = matrix.pitch as u64;
        if matrix.transposed { [1, pitch] } else { [pitch, 1] }
    };
    let ([p_row, p_column], [q_row, q_column]) = (strides(task.p), strides(task.q));
    let (bias, add) = (task.bias.unwrap_or(0), u64::from(task.add));
    let arguments = [
        task.p.at,
        p_row,
        p_column,
        task.q.at,
        q_row,
        q_column,
        task.d.at,
        task.d.pitch as u64,
        bias,
        m as u64,
        n as u64,
        k as u64,
        add,
    ];
    let grid = [m.div_ceil(TILE), n.div_ceil(TILE), 1];
    line.run(programs::Entry::Product, &[task.from, task.to], grid, THREADS, &arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_sees_the_same_memory_by_columns() {
        // y[5, 7] = x[5, 3] · w[7, 3]ᵀ.
        let (p, q) = (Matrix::rows(16, 3), Matrix::transposed(24, 3));
        let (from, to) = (DType::Bf16, DType::F32);
        let task = Task { size: [5, 7, 3], p, q, from, d: Matrix::rows(32, 7), to, bias: None, add: false };
        let Question { a, b, d, .. } = question(&task);
        assert_eq!((a.rows, a.columns, a.pitch, a.transposed, a.alignment), (3, 7, 3, true, 8));
        assert_eq!((b.rows, b.columns, b.pitch, b.transposed, b.alignment), (3, 5, 3, false, 16));
        assert_eq!((d.rows, d.columns, d.pitch, d.dtype), (7, 5, 7, 0));
        // dw[7, 3] = dy[5, 7]ᵀ · x[5, 3].
        let (p, q) = (Matrix::transposed(16, 7), Matrix::rows(16, 3));
        let Question { a, b, .. } = question(&Task { size: [7, 3, 5], p, q, ..task });
        assert_eq!((a.rows, a.columns, a.transposed), (3, 5, false));
        assert_eq!((b.rows, b.columns, b.transposed), (7, 5, true));
    }
}
