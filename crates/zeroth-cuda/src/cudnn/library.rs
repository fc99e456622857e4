//! Calls into cuDNN's backend API, and descriptors that are destroyed on drop.
#![allow(unsafe_code, reason = "calls into cuDNN; signatures and constants are those of cudnn_graph.h")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use crate::bindings::bindings;
use crate::driver::Handle;
use crate::library::{Library, text};
use zeroth_kernel::DeviceError;

/// A descriptor, or the library handle.
pub(super) type Object = usize;

/// The oldest supported version, 9.10.2: the two releases before it compute attention wrongly, and older ones mask scores
/// differently.
const OLDEST: usize = 91_002;

/// `cudnnBackendDescriptorType_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DescriptorType {
    Pointwise = 0,
    Engine = 2,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    OperationPointwise = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
}

/// `cudnnBackendAttributeType_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AttributeType {
    Handle = 0,
    DataType = 1,
    Boolean = 2,
    Int64 = 3,
    VoidPtr = 6,
    HeuristicsMode = 8,
    NumericalNote = 11,
    PointwiseMode = 14,
    BackendDescriptor = 15,
    ReductionOperator = 18,
}

/// `cudnnBackendAttributeName_t`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Attribute {
    PointwiseMode = 0,
    PointwiseMathPrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    EngineConfigEngine = 300,
    PlanHandle = 400,
    PlanEngineConfig = 401,
    PlanWorkspaceSize = 402,
    OperationPointwise = 750,
    OperationPointwiseX = 751,
    OperationPointwiseB = 752,
    OperationPointwiseY = 753,
    OperationPointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorUniqueId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    VariantPackIds = 1000,
    VariantPackPointers = 1001,
    VariantPackWorkspace = 1003,
    EngineNumericalNotes = 1303,
    MatmulComputeType = 1500,
    OperationMatmulA = 1520,
    OperationMatmulB = 1521,
    OperationMatmulC = 1522,
    OperationMatmul = 1523,
    ReductionOperator = 1600,
    ReductionComputeType = 1601,
    OperationReductionX = 1610,
    OperationReductionY = 1611,
    OperationReduction = 1612,
}

bindings! {
    Functions: cudnn {
        cudnnCreate(*mut Object);
        cudnnGetVersion() -> usize;
        cudnnDestroy(Object);
        cudnnSetStream(Object, Handle);
        cudnnGetErrorString(c_int) -> *const c_char;
        cudnnBackendCreateDescriptor(c_int, *mut Object);
        cudnnBackendDestroyDescriptor(Object);
        cudnnBackendSetAttribute(Object, c_int, c_int, i64, *const c_void);
        cudnnBackendGetAttribute(Object, c_int, c_int, i64, *mut i64, *mut c_void);
        cudnnBackendFinalize(Object);
        cudnnBackendExecute(Object, Object, Object);
    }
}

/// The library, and its handle for the context that was current when it was opened.
pub(super) struct Cudnn {
    handle: Object,
    functions: Functions,
}

impl Cudnn {
    /// Opens the library. A context must be current.
    pub(super) fn open() -> Result<Arc<Self>, DeviceError> {
        let library =
            Library::open(&["libcudnn.so.9"], "Install cuDNN 9, or `pip install nvidia-cudnn-cu13`")?;
        let mut opened = Self { handle: 0, functions: Functions::load(&library)? };
        // SAFETY: takes no arguments.
        let version = unsafe { (opened.functions.cudnnGetVersion)() };
        if version < OLDEST {
            let reason = format!("it is version {version}; attention needs {OLDEST} or newer");
            return Err(DeviceError::Call {
                device: "cuda".to_owned(),
                call: "opening libcudnn.so.9".to_owned(),
                reason,
            });
        }
        // SAFETY: writes one handle.
        let code = unsafe { (opened.functions.cudnnCreate)(&raw mut opened.handle) };
        opened.check(code, || "cudnnCreate".to_owned())?;
        Ok(Arc::new(opened))
    }

    pub(super) const fn handle(&self) -> Object {
        self.handle
    }

    /// Enqueues an execution plan on a stream with the pointers of a variant pack.
    ///
    /// # Safety
    /// The pointers must hold the tensors of the plan's graph, and as much workspace as the plan needs.
    pub(super) unsafe fn execute(
        &self,
        plan: &Descriptor,
        pack: &Descriptor,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: a live handle and stream.
        let code = unsafe { (self.functions.cudnnSetStream)(self.handle, stream) };
        self.check(code, || "cudnnSetStream".to_owned())?;
        // SAFETY: upheld by the caller.
        let code = unsafe { (self.functions.cudnnBackendExecute)(self.handle, plan.object, pack.object) };
        self.check(code, || "cudnnBackendExecute".to_owned())
    }

    /// Converts a status to an error. `call` is evaluated only on failure.
    fn check(&self, code: c_int, call: impl FnOnce() -> String) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string.
        let message = text(unsafe { (self.functions.cudnnGetErrorString)(code) });
        let reason = format!("status {code}: {message}");
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call(), reason })
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: created in `open`, destroyed once.
            unsafe { (self.functions.cudnnDestroy)(self.handle) };
        }
    }
}

/// A backend descriptor.
pub(super) struct Descriptor {
    library: Arc<Cudnn>,
    object: Object,
    kind: DescriptorType,
}

impl Descriptor {
    pub(super) fn new(library: &Arc<Cudnn>, kind: DescriptorType) -> Result<Self, DeviceError> {
        let mut object = 0;
        // SAFETY: writes one handle.
        let code =
            unsafe { (library.functions.cudnnBackendCreateDescriptor)(kind as c_int, &raw mut object) };
        library.check(code, || format!("cudnnBackendCreateDescriptor of {kind:?}"))?;
        Ok(Self { library: Arc::clone(library), object, kind })
    }

    pub(super) const fn object(&self) -> Object {
        self.object
    }

    /// Sets an attribute; `V` must be the representation of `kind`.
    pub(super) fn set<V: Copy>(
        &self,
        name: Attribute,
        kind: AttributeType,
        values: &[V],
    ) -> Result<(), DeviceError> {
        // SAFETY: reads `values.len()` values; callers pass the representation that the header declares for the type.
        let code = unsafe {
            (self.library.functions.cudnnBackendSetAttribute)(
                self.object,
                name as c_int,
                kind as c_int,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        };
        self.library.check(code, || format!("cudnnBackendSetAttribute of {:?}: {name:?}", self.kind))
    }

    /// Reads an attribute into `values`; returns the number of values read.
    pub(super) fn get<V: Copy>(
        &self,
        name: Attribute,
        kind: AttributeType,
        values: &mut [V],
    ) -> Result<usize, DeviceError> {
        let mut count = 0i64;
        // SAFETY: writes at most `values.len()` values.
        let code = unsafe {
            (self.library.functions.cudnnBackendGetAttribute)(
                self.object,
                name as c_int,
                kind as c_int,
                values.len() as i64,
                &raw mut count,
                values.as_mut_ptr().cast(),
            )
        };
        self.library.check(code, || format!("cudnnBackendGetAttribute of {:?}: {name:?}", self.kind))?;
        Ok((count.max(0) as usize).min(values.len()))
    }

    /// Finalizes the descriptor: its attributes are set.
    pub(super) fn finalize(self) -> Result<Self, DeviceError> {
        // SAFETY: a live descriptor.
        let code = unsafe { (self.library.functions.cudnnBackendFinalize)(self.object) };
        self.library.check(code, || format!("cudnnBackendFinalize of {:?}", self.kind))?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; the library outlives it.
        unsafe { (self.library.functions.cudnnBackendDestroyDescriptor)(self.object) };
    }
}
