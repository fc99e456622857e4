//! cuBLASLt: descriptors, heuristics and the matmul call.
#![allow(unsafe_code, reason = "calls into cuBLASLt; signatures and constants are those of cublasLt.h")]

use std::ffi::{c_char, c_int, c_void};

use zeroth_base::DType;

use super::bindings::bindings;
use super::driver::{Address, Handle};
use super::library::{Library, text};
use zeroth_kernel::DeviceError;

/// A descriptor, or the library handle.
type Object = usize;

pub(super) const COMPUTE_32F: c_int = 68;
pub(super) const EPILOGUE_BIAS: u32 = 4;
/// `CUBLAS_STATUS_NOT_SUPPORTED`: no algorithm supports the problem.
pub(super) const NOT_SUPPORTED: c_int = 15;

/// `cublasLtMatmulDescAttributes_t`.
#[derive(Clone, Copy)]
pub(super) enum MatmulAttribute {
    TransposeA = 3,
    TransposeB = 4,
    Epilogue = 7,
    BiasPointer = 8,
}

/// `cublasLtMatmulPreferenceAttributes_t`.
#[derive(Clone, Copy)]
pub(super) enum PreferenceAttribute {
    MaxWorkspaceBytes = 1,
    ReductionSchemeMask = 3,
    MinAlignmentA = 5,
    MinAlignmentB = 6,
    MinAlignmentC = 7,
    MinAlignmentD = 8,
}

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct HeuristicResult {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// A matrix of a matmul in the library's column-major view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MatrixLayout {
    /// The [`dtype_index`] of its elements.
    pub(super) dtype: u8,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Leading dimension: elements between two columns.
    pub(super) leading_dimension: u64,
    pub(super) transposed: bool,
    /// Alignment of its address in bytes.
    pub(super) alignment: u32,
}

/// A matmul problem: everything that the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MatmulProblem {
    pub(super) a: MatrixLayout,
    pub(super) b: MatrixLayout,
    pub(super) d: MatrixLayout,
    /// Alignment of the bias; 0 without a bias.
    pub(super) bias: u32,
    pub(super) workspace: u64,
}

/// Descriptors and candidate algorithms for a problem.
pub(super) struct Plan {
    matmul: Object,
    layouts: [Object; 3],
    /// In the library's order: fastest first, by its estimate.
    algorithms: Vec<Algorithm>,
    chosen: usize,
}

impl Plan {
    /// Number of candidate algorithms.
    pub(super) fn algorithms(&self) -> usize {
        self.algorithms.len()
    }

    pub(super) fn choose(&mut self, algorithm: usize) {
        self.chosen = algorithm;
    }

    pub(super) const fn chosen(&self) -> usize {
        self.chosen
    }
}

/// Candidates requested from the heuristics.
const ALGORITHMS: usize = 8;

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: split-k with partial sums in the workspace, reduced in a fixed order. The in-place scheme
/// reduces in order of arrival, so it is never allowed.
pub(super) const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// Split-k is allowed for k of at least this, if the output has too few tiles to occupy a GPU.
const SPLIT_K_MIN: u64 = 4096;
/// Rows and columns of an output tile, and tiles that occupy a GPU.
const TILE: u64 = 128;
const FULL_GPU_TILES: u64 = 128;

impl MatmulProblem {
    /// The mask of allowed reduction schemes. It depends on sizes alone.
    const fn reduction_schemes(&self) -> u32 {
        let Self { a, d, .. } = self;
        let k = if a.transposed { a.rows } else { a.columns };
        let tiles = d.rows.div_ceil(TILE) * d.columns.div_ceil(TILE);
        if k >= SPLIT_K_MIN && tiles < FULL_GPU_TILES { REDUCTION_COMPUTE_TYPE } else { 0 }
    }
}

/// d = alpha · a · b + beta · d. Neither changes the choice of an algorithm.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors {
    pub(super) alpha: f32,
    pub(super) beta: f32,
}

/// Device pointers of one matmul.
pub(super) struct Pointers {
    pub(super) a: Address,
    pub(super) b: Address,
    pub(super) d: Address,
    pub(super) bias: Option<Address>,
    pub(super) workspace: Address,
}

bindings! {
    Functions: cublaslt {
        cublasLtCreate(*mut Object);
        cublasLtDestroy(Object);
        cublasLtGetStatusString(c_int) -> *const c_char;
        cublasLtMatmulDescCreate(*mut Object, c_int, c_int);
        cublasLtMatmulDescSetAttribute(Object, c_int, *const c_void, usize);
        cublasLtMatmulDescDestroy(Object);
        cublasLtMatrixLayoutCreate(*mut Object, c_int, u64, u64, i64);
        cublasLtMatrixLayoutDestroy(Object);
        cublasLtMatmulPreferenceCreate(*mut Object);
        cublasLtMatmulPreferenceSetAttribute(Object, c_int, *const c_void, usize);
        cublasLtMatmulPreferenceDestroy(Object);
        cublasLtMatmulAlgoGetHeuristic(
            Object,
            Object,
            Object,
            Object,
            Object,
            Object,
            Object,
            c_int,
            *mut HeuristicResult,
            *mut c_int,
        );
        cublasLtMatmul(
            Object,
            Object,
            *const f32,
            Address,
            Object,
            Address,
            Object,
            *const f32,
            Address,
            Object,
            Address,
            Object,
            *const Algorithm,
            Address,
            usize,
            Handle,
        );
    }
}

/// The library, and its handle for the context that was current when it was opened.
pub(super) struct CublasLt {
    handle: Object,
    functions: Functions,
}

/// `cudaDataType_t` of a [`dtype_index`].
pub(super) const fn data_type(index: u8) -> c_int {
    match index {
        0 => 0,
        1 => 14,
        _ => 2,
    }
}

/// Index of a data type, for use in keys and kernel arguments.
pub(super) const fn dtype_index(dtype: DType) -> u8 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}

impl CublasLt {
    /// Opens the library. A context must be current.
    pub(super) fn open() -> Result<Self, DeviceError> {
        let library = Library::open(
            &["libcublasLt.so.13", "libcublasLt.so.12"],
            "Install the CUDA toolkit 12 or 13, or `pip install nvidia-cublas`",
        )?;
        let mut opened = Self { handle: 0, functions: Functions::load(&library)? };
        // SAFETY: writes one handle.
        let code = unsafe { (opened.functions.cublasLtCreate)(&raw mut opened.handle) };
        opened.check("cublasLtCreate", code)?;
        Ok(opened)
    }

    /// Plans a problem; `None` if the library has no algorithm for it.
    pub(super) fn plan(&self, problem: &MatmulProblem) -> Result<Option<Plan>, DeviceError> {
        let mut plan = Plan { matmul: 0, layouts: [0; 3], algorithms: Vec::new(), chosen: 0 };
        let mut preference = 0;
        let found = self.fill(problem, &mut plan, &mut preference);
        if preference != 0 {
            // SAFETY: created in `fill`, destroyed once.
            unsafe { (self.functions.cublasLtMatmulPreferenceDestroy)(preference) };
        }
        match found {
            Ok(true) => Ok(Some(plan)),
            Ok(false) => {
                self.destroy_plan(&plan);
                Ok(None)
            }
            Err(error) => {
                self.destroy_plan(&plan);
                Err(error)
            }
        }
    }

    /// Creates the descriptors and queries the heuristics; false if there is no algorithm.
    fn fill(
        &self,
        problem: &MatmulProblem,
        plan: &mut Plan,
        preference: &mut Object,
    ) -> Result<bool, DeviceError> {
        let MatmulProblem { a, b, d, bias, workspace } = *problem;
        // SAFETY: writes one handle. Accumulation and scaling are in f32.
        let code = unsafe {
            (self.functions.cublasLtMatmulDescCreate)(&raw mut plan.matmul, COMPUTE_32F, data_type(0))
        };
        self.check("cublasLtMatmulDescCreate", code)?;
        self.set_matmul(plan.matmul, MatmulAttribute::TransposeA, i32::from(a.transposed))?;
        self.set_matmul(plan.matmul, MatmulAttribute::TransposeB, i32::from(b.transposed))?;
        if bias != 0 {
            self.set_matmul(plan.matmul, MatmulAttribute::Epilogue, EPILOGUE_BIAS)?;
            // The heuristics use only the alignment of the pointer.
            self.set_matmul(plan.matmul, MatmulAttribute::BiasPointer, 4096 + Address::from(bias))?;
        }
        for (layout, matrix) in plan.layouts.iter_mut().zip([a, b, d]) {
            let dtype = data_type(matrix.dtype);
            // SAFETY: writes one handle.
            let code = unsafe {
                (self.functions.cublasLtMatrixLayoutCreate)(
                    layout,
                    dtype,
                    matrix.rows,
                    matrix.columns,
                    matrix.leading_dimension as i64,
                )
            };
            self.check("cublasLtMatrixLayoutCreate", code)?;
        }
        // SAFETY: writes one handle.
        self.check("cublasLtMatmulPreferenceCreate", unsafe {
            (self.functions.cublasLtMatmulPreferenceCreate)(preference)
        })?;
        self.set_preference(*preference, PreferenceAttribute::MaxWorkspaceBytes, workspace)?;
        // Deterministic reductions only.
        self.set_preference(
            *preference,
            PreferenceAttribute::ReductionSchemeMask,
            problem.reduction_schemes(),
        )?;
        self.set_preference(*preference, PreferenceAttribute::MinAlignmentA, a.alignment)?;
        self.set_preference(*preference, PreferenceAttribute::MinAlignmentB, b.alignment)?;
        self.set_preference(*preference, PreferenceAttribute::MinAlignmentC, d.alignment)?;
        self.set_preference(*preference, PreferenceAttribute::MinAlignmentD, d.alignment)?;
        let (mut found, mut count) = ([HeuristicResult::default(); ALGORITHMS], 0);
        let [a, b, d] = plan.layouts;
        // SAFETY: writes at most the requested number of results, and their count.
        let code = unsafe {
            let (handle, matmul) = (self.handle, plan.matmul);
            let (requested, found) = (ALGORITHMS as c_int, found.as_mut_ptr());
            (self.functions.cublasLtMatmulAlgoGetHeuristic)(
                handle,
                matmul,
                a,
                b,
                d,
                d,
                *preference,
                requested,
                found,
                &raw mut count,
            )
        };
        if code == NOT_SUPPORTED {
            return Ok(false);
        }
        self.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        let usable = |found: &&HeuristicResult| found.state == 0 && found.workspace as u64 <= workspace;
        let found = found.iter().take(count.max(0) as usize).filter(usable);
        plan.algorithms = found.map(|found| found.algorithm).collect();
        Ok(!plan.algorithms.is_empty())
    }

    /// Enqueues d = alpha · a · b + beta · d (+ bias) with one of the plan's algorithms.
    ///
    /// # Safety
    /// The pointers must hold the matrices of the planned problem, and `workspace` bytes of workspace.
    pub(super) unsafe fn matmul(
        &self,
        plan: &Plan,
        algorithm: usize,
        pointers: &Pointers,
        factors: Factors,
        workspace: u64,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        if let Some(bias) = pointers.bias {
            self.set_matmul(plan.matmul, MatmulAttribute::BiasPointer, bias)?;
        }
        let ([a, b, d], Factors { alpha, beta }) = (plan.layouts, factors);
        // SAFETY: upheld by the caller; alpha and beta are read before the call returns.
        let code = unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                plan.matmul,
                &raw const alpha,
                pointers.a,
                a,
                pointers.b,
                b,
                &raw const beta,
                pointers.d,
                d,
                pointers.d,
                d,
                &raw const plan.algorithms[algorithm],
                pointers.workspace,
                workspace as usize,
                stream,
            )
        };
        self.check("cublasLtMatmul", code)
    }

    /// Destroys the descriptors of a plan.
    pub(super) fn destroy_plan(&self, plan: &Plan) {
        for &layout in plan.layouts.iter().filter(|layout| **layout != 0) {
            // SAFETY: created with the plan, destroyed once.
            unsafe { (self.functions.cublasLtMatrixLayoutDestroy)(layout) };
        }
        if plan.matmul != 0 {
            // SAFETY: as above.
            unsafe { (self.functions.cublasLtMatmulDescDestroy)(plan.matmul) };
        }
    }

    /// Destroys the library handle.
    pub(super) fn close(&self) {
        // SAFETY: created in `open`, destroyed once.
        unsafe { (self.functions.cublasLtDestroy)(self.handle) };
    }

    fn set_matmul<V: Copy>(
        &self,
        matmul: Object,
        attribute: MatmulAttribute,
        value: V,
    ) -> Result<(), DeviceError> {
        // SAFETY: reads the bytes of `value`; `fill` passes each attribute with its type.
        let code = unsafe {
            (self.functions.cublasLtMatmulDescSetAttribute)(
                matmul,
                attribute as c_int,
                (&raw const value).cast(),
                size_of::<V>(),
            )
        };
        self.check("cublasLtMatmulDescSetAttribute", code)
    }

    fn set_preference<V: Copy>(
        &self,
        preference: Object,
        attribute: PreferenceAttribute,
        value: V,
    ) -> Result<(), DeviceError> {
        // SAFETY: as above.
        let code = unsafe {
            (self.functions.cublasLtMatmulPreferenceSetAttribute)(
                preference,
                attribute as c_int,
                (&raw const value).cast(),
                size_of::<V>(),
            )
        };
        self.check("cublasLtMatmulPreferenceSetAttribute", code)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string.
        let reason = text(unsafe { (self.functions.cublasLtGetStatusString)(code) });
        let reason = format!("status {code}: {reason}");
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_k_is_allowed_for_long_sums_with_few_outputs() {
        let layout = |rows, columns| MatrixLayout {
            dtype: 1,
            rows,
            columns,
            leading_dimension: rows,
            transposed: false,
            alignment: 16,
        };
        let splits = |m, n, k| {
            let (a, b, d) = (layout(m, k), layout(k, n), layout(m, n));
            MatmulProblem { a, b, d, bias: 0, workspace: 0 }.reduction_schemes() != 0
        };
        assert!(splits(1024, 1024, 151_936) && splits(1024, 1024, 16_384));
        assert!(!splits(1024, 1024, 1024), "a short sum");
        assert!(!splits(151_936, 1024, 8192), "enough outputs");
    }
}
