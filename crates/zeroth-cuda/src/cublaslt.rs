//! cuBLASLt, NVIDIA's library of matrix products: descriptors, the choice of an algorithm, and the call.
#![allow(unsafe_code, reason = "calls into the library; signatures and numbers are those of cublasLt.h")]

use std::ffi::{c_char, c_int, c_void};

use zeroth_base::DType;

use super::driver::{Address, Handle};
use super::library::{Library, text};
use zeroth_kernel::DeviceError;

/// A descriptor or the library's own handle.
type Object = usize;

const COMPUTE_32F: c_int = 68;
const EPILOGUE_BIAS: u32 = 4;
/// `CUBLAS_STATUS_NOT_SUPPORTED`: there is no algorithm for it.
const NOT_SUPPORTED: c_int = 15;

/// Attributes of a product, by their number in the header.
#[derive(Clone, Copy)]
enum Product {
    TransposeA = 3,
    TransposeB = 4,
    Epilogue = 7,
    BiasPointer = 8,
}

/// Attributes of the search for an algorithm.
#[derive(Clone, Copy)]
enum Search {
    MaxWorkspace = 1,
    ReductionSchemes = 3,
    AlignmentA = 5,
    AlignmentB = 6,
    AlignmentC = 7,
    AlignmentD = 8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Found {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Found>() == 96);

/// A matrix of a product as the library sees it: by columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Operand {
    /// `place` of its type; see [`data_type`].
    pub(super) dtype: u8,
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// Elements from one column to the next.
    pub(super) pitch: u64,
    pub(super) transposed: bool,
    /// Its address is a multiple of this.
    pub(super) alignment: u32,
}

/// Everything that the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Question {
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) d: Operand,
    /// The alignment of a bias that is added, or 0.
    pub(super) bias: u32,
    pub(super) workspace: u64,
}

/// How a question is computed.
pub(super) struct Plan {
    product: Object,
    layouts: [Object; 3],
    /// As the library orders them.
    algorithms: Vec<Algorithm>,
    chosen: usize,
}

impl Plan {
    /// How many algorithms there are to choose from.
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

/// Algorithms that the library is asked for.
const ALGORITHMS: usize = 8;

/// Sums along k may be cut into parts that are written to the workspace and added in one order, where a product has long
/// sums and too few results to keep a card busy. Other ways to cut them add parts as they come.
const CUT_SUMS: u32 = 2;
const LONG_SUM: u64 = 4096;
/// Results of a tile, and tiles that keep a card busy.
const TILE: u64 = 128;
const BUSY: u64 = 128;

impl Question {
    /// The library's mask of ways to cut sums; it follows from sizes alone.
    const fn reductions(&self) -> u32 {
        let Self { a, d, .. } = self;
        let along = if a.transposed { a.rows } else { a.columns };
        let tiles = d.rows.div_ceil(TILE) * d.columns.div_ceil(TILE);
        if along >= LONG_SUM && tiles < BUSY { CUT_SUMS } else { 0 }
    }
}

/// Addresses of one product.
pub(super) struct Places {
    pub(super) a: Address,
    pub(super) b: Address,
    pub(super) d: Address,
    pub(super) bias: Option<Address>,
    pub(super) workspace: Address,
}

type SetAttribute = unsafe extern "C" fn(Object, c_int, *const c_void, usize) -> c_int;
type Destroy = unsafe extern "C" fn(Object) -> c_int;
type Choose = unsafe extern "C" fn(
    Object,
    Object,
    Object,
    Object,
    Object,
    Object,
    Object,
    c_int,
    *mut Found,
    *mut c_int,
) -> c_int;
type Multiply = unsafe extern "C" fn(
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
) -> c_int;

/// The library with the functions in use, and its handle for the context that was current when it was opened.
pub(super) struct CublasLt {
    handle: Object,
    destroy: Destroy,
    status: unsafe extern "C" fn(c_int) -> *const c_char,
    product_create: unsafe extern "C" fn(*mut Object, c_int, c_int) -> c_int,
    product_set: SetAttribute,
    product_destroy: Destroy,
    layout_create: unsafe extern "C" fn(*mut Object, c_int, u64, u64, i64) -> c_int,
    layout_destroy: Destroy,
    search_create: unsafe extern "C" fn(*mut Object) -> c_int,
    search_set: SetAttribute,
    search_destroy: Destroy,
    choose: Choose,
    multiply: Multiply,
}

/// The library's number of a type.
const fn data_type(place: u8) -> c_int {
    match place {
        0 => 0,
        1 => 14,
        _ => 2,
    }
}

/// A type as a number with an order.
pub(super) const fn place(dtype: DType) -> u8 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}

impl CublasLt {
    /// Needs a current context.
    pub(super) fn open() -> Result<Self, DeviceError> {
        let library = Library::open(
            &["libcublasLt.so.13", "libcublasLt.so.12"],
            "Install the CUDA toolkit 12 or 13, or `pip install nvidia-cublas`",
        )?;
        // SAFETY: each function has the type that cublasLt.h declares for it.
        let (mut opened, create) = unsafe {
            let create: unsafe extern "C" fn(*mut Object) -> c_int = library.function("cublasLtCreate")?;
            let opened = Self {
                handle: 0,
                destroy: library.function("cublasLtDestroy")?,
                status: library.function("cublasLtGetStatusString")?,
                product_create: library.function("cublasLtMatmulDescCreate")?,
                product_set: library.function("cublasLtMatmulDescSetAttribute")?,
                product_destroy: library.function("cublasLtMatmulDescDestroy")?,
                layout_create: library.function("cublasLtMatrixLayoutCreate")?,
                layout_destroy: library.function("cublasLtMatrixLayoutDestroy")?,
                search_create: library.function("cublasLtMatmulPreferenceCreate")?,
                search_set: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                search_destroy: library.function("cublasLtMatmulPreferenceDestroy")?,
                choose: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                multiply: library.function("cublasLtMatmul")?,
            };
            (opened, create)
        };
        // SAFETY: writes one handle.
        let code = unsafe { create(&raw mut opened.handle) };
        opened.check("cublasLtCreate", code)?;
        Ok(opened)
    }

    /// The plan for a question; `None` where the library has no algorithm.
    pub(super) fn plan(&self, question: &Question) -> Result<Option<Plan>, DeviceError> {
        let mut plan = Plan { product: 0, layouts: [0; 3], algorithms: Vec::new(), chosen: 0 };
        let mut search = 0;
        let found = self.fill(question, &mut plan, &mut search);
        if search != 0 {
            // SAFETY: made in `fill`, given back once.
            unsafe { (self.search_destroy)(search) };
        }
        match found {
            Ok(true) => Ok(Some(plan)),
            Ok(false) => {
                self.forget(&plan);
                Ok(None)
            }
            Err(error) => {
                self.forget(&plan);
                Err(error)
            }
        }
    }

    /// Makes the descriptors and asks for an algorithm; whether there is one.
    fn fill(&self, question: &Question, plan: &mut Plan, search: &mut Object) -> Result<bool, DeviceError> {
        let Question { a, b, d, bias, workspace } = *question;
        // SAFETY: writes one handle. Sums and factors are f32: no shorter type stands in between.
        let code = unsafe { (self.product_create)(&raw mut plan.product, COMPUTE_32F, data_type(0)) };
        self.check("cublasLtMatmulDescCreate", code)?;
        self.set_product(plan.product, Product::TransposeA, i32::from(a.transposed))?;
        self.set_product(plan.product, Product::TransposeB, i32::from(b.transposed))?;
        if bias != 0 {
            self.set_product(plan.product, Product::Epilogue, EPILOGUE_BIAS)?;
            // Not read here: the search looks at the alignment.
            self.set_product(plan.product, Product::BiasPointer, 4096 + Address::from(bias))?;
        }
        for (layout, operand) in plan.layouts.iter_mut().zip([a, b, d]) {
            let dtype = data_type(operand.dtype);
            // SAFETY: writes one handle.
            let code = unsafe {
                (self.layout_create)(layout, dtype, operand.rows, operand.columns, operand.pitch as i64)
            };
            self.check("cublasLtMatrixLayoutCreate", code)?;
        }
        // SAFETY: writes one handle.
        self.check("cublasLtMatmulPreferenceCreate", unsafe { (self.search_create)(search) })?;
        self.set_search(*search, Search::MaxWorkspace, workspace)?;
        // One order, the same bits at every run.
        self.set_search(*search, Search::ReductionSchemes, question.reductions())?;
        self.set_search(*search, Search::AlignmentA, a.alignment)?;
        self.set_search(*search, Search::AlignmentB, b.alignment)?;
        self.set_search(*search, Search::AlignmentC, d.alignment)?;
        self.set_search(*search, Search::AlignmentD, d.alignment)?;
        let (mut found, mut count) = ([Found::default(); ALGORITHMS], 0);
        let [a, b, d] = plan.layouts;
        // SAFETY: writes at most as many results as are asked for, and how many there are.
        let code = unsafe {
            let (handle, product) = (self.handle, plan.product);
            let (most, found) = (ALGORITHMS as c_int, found.as_mut_ptr());
            (self.choose)(handle, product, a, b, d, d, *search, most, found, &raw mut count)
        };
        if code == NOT_SUPPORTED {
            return Ok(false);
        }
        self.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        let usable = |found: &&Found| found.state == 0 && found.workspace as u64 <= workspace;
        let found = found.iter().take(count.max(0) as usize).filter(usable);
        plan.algorithms = found.map(|found| found.algorithm).collect();
        Ok(!plan.algorithms.is_empty())
    }

    /// Enqueues d = a · b + beta · d, + bias where the plan has one, by one of the plan's algorithms.
    ///
    /// # Safety
    /// The addresses hold the matrices that the plan was made for, and as much workspace.
    pub(super) unsafe fn multiply(
        &self,
        plan: &Plan,
        algorithm: usize,
        places: &Places,
        beta: f32,
        workspace: u64,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        if let Some(bias) = places.bias {
            self.set_product(plan.product, Product::BiasPointer, bias)?;
        }
        let ([a, b, d], alpha) = (plan.layouts, 1.0f32);
        // SAFETY: the caller's promise; alpha and beta are read before the call returns.
        let code = unsafe {
            (self.multiply)(
                self.handle,
                plan.product,
                &raw const alpha,
                places.a,
                a,
                places.b,
                b,
                &raw const beta,
                places.d,
                d,
                places.d,
                d,
                &raw const plan.algorithms[algorithm],
                places.workspace,
                workspace as usize,
                stream,
            )
        };
        self.check("cublasLtMatmul", code)
    }

    /// Gives back what a plan holds.
    pub(super) fn forget(&self, plan: &Plan) {
        for &layout in plan.layouts.iter().filter(|layout| **layout != 0) {
            // SAFETY: made with the plan, given back once.
            unsafe { (self.layout_destroy)(layout) };
        }
        if plan.product != 0 {
            // SAFETY: as above.
            unsafe { (self.product_destroy)(plan.product) };
        }
    }

    /// Gives back the library's handle.
    pub(super) fn close(&self) {
        // SAFETY: made in `open`, given back once.
        unsafe { (self.destroy)(self.handle) };
    }

    fn set_product<V: Copy>(&self, product: Object, attribute: Product, value: V) -> Result<(), DeviceError> {
        // SAFETY: reads the value's own bytes; each attribute has the length of the type it is set with above.
        let code = unsafe {
            (self.product_set)(product, attribute as c_int, (&raw const value).cast(), size_of::<V>())
        };
        self.check("cublasLtMatmulDescSetAttribute", code)
    }

    fn set_search<V: Copy>(&self, search: Object, attribute: Search, value: V) -> Result<(), DeviceError> {
        // SAFETY: as above.
        let code = unsafe {
            (self.search_set)(search, attribute as c_int, (&raw const value).cast(), size_of::<V>())
        };
        self.check("cublasLtMatmulPreferenceSetAttribute", code)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: gives a constant of the library.
        let reason = text(unsafe { (self.status)(code) });
        let reason = format!("status {code}: {reason}");
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_cut_where_they_are_long_and_results_few() {
        let operand = |rows, columns| Operand {
            dtype: 1,
            rows,
            columns,
            pitch: rows,
            transposed: false,
            alignment: 16,
        };
        let cut = |m, n, k| {
            let (a, b, d) = (operand(m, k), operand(k, n), operand(m, n));
            Question { a, b, d, bias: 0, workspace: 0 }.reductions() != 0
        };
        assert!(cut(1024, 1024, 151_936) && cut(1024, 1024, 16_384));
        assert!(!cut(1024, 1024, 1024), "a short sum");
        assert!(!cut(151_936, 1024, 8192), "results enough");
    }
}
