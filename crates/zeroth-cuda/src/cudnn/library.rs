//! The library's calls, and descriptors that are given back when they are dropped.
#![allow(unsafe_code, reason = "calls into the library; signatures and numbers are those of cudnn_graph.h")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use crate::driver::Handle;
use crate::library::{Library, text};
use zeroth_kernel::DeviceError;

/// The library's handle or a descriptor.
pub(super) type Object = usize;

/// The two releases before it compute attention wrongly, and older ones take other numbers for scores that are hidden.
const OLDEST: usize = 91_002;

/// Kinds of descriptors, by their number in the header.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Pointwise = 0,
    Engine = 2,
    EngineConfig = 3,
    Heuristics = 4,
    Plan = 5,
    OperationPointwise = 13,
    Graph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
}

/// Types of attributes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Type {
    Handle = 0,
    Number = 1,
    Boolean = 2,
    Int64 = 3,
    Pointer = 6,
    HeuristicsMode = 8,
    NumericalNote = 11,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
}

/// Attributes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Name {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    ConfigEngine = 300,
    PlanHandle = 400,
    PlanConfig = 401,
    PlanWorkspace = 402,
    OperationPointwise = 750,
    OperationPointwiseX = 751,
    OperationPointwiseB = 752,
    OperationPointwiseY = 753,
    OperationPointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorSizes = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsValue = 908,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    EngineNotes = 1303,
    MatmulPrecision = 1500,
    OperationMatmulA = 1520,
    OperationMatmulB = 1521,
    OperationMatmulC = 1522,
    OperationMatmul = 1523,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    OperationReductionX = 1610,
    OperationReductionY = 1611,
    OperationReduction = 1612,
}

type Set = unsafe extern "C" fn(Object, c_int, c_int, i64, *const c_void) -> c_int;
type Get = unsafe extern "C" fn(Object, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;

/// The library with the functions in use, and its handle for the context that was current when it was opened.
pub(super) struct Cudnn {
    handle: Object,
    forget: unsafe extern "C" fn(Object) -> c_int,
    set_stream: unsafe extern "C" fn(Object, Handle) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(c_int, *mut Object) -> c_int,
    destroy: unsafe extern "C" fn(Object) -> c_int,
    set: Set,
    get: Get,
    finalize: unsafe extern "C" fn(Object) -> c_int,
    execute: unsafe extern "C" fn(Object, Object, Object) -> c_int,
}

impl Cudnn {
    /// Needs a current context.
    pub(super) fn open() -> Result<Arc<Self>, DeviceError> {
        let library =
            Library::open(&["libcudnn.so.9"], "Install cuDNN 9, or `pip install nvidia-cudnn-cu13`")?;
        // SAFETY: each function has the type that the headers declare for it.
        let (mut opened, create, version) = unsafe {
            let create: unsafe extern "C" fn(*mut Object) -> c_int = library.function("cudnnCreate")?;
            let version: unsafe extern "C" fn() -> usize = library.function("cudnnGetVersion")?;
            let opened = Self {
                handle: 0,
                forget: library.function("cudnnDestroy")?,
                set_stream: library.function("cudnnSetStream")?,
                error_text: library.function("cudnnGetErrorString")?,
                create: library.function("cudnnBackendCreateDescriptor")?,
                destroy: library.function("cudnnBackendDestroyDescriptor")?,
                set: library.function("cudnnBackendSetAttribute")?,
                get: library.function("cudnnBackendGetAttribute")?,
                finalize: library.function("cudnnBackendFinalize")?,
                execute: library.function("cudnnBackendExecute")?,
            };
            (opened, create, version())
        };
        if version < OLDEST {
            let reason = format!("it is version {version}, and attention needs {OLDEST} or newer");
            return Err(DeviceError::Call {
                device: "cuda".to_owned(),
                call: "opening libcudnn.so.9".to_owned(),
                reason,
            });
        }
        // SAFETY: writes one handle.
        let code = unsafe { create(&raw mut opened.handle) };
        opened.check(code, || "cudnnCreate".to_owned())?;
        Ok(Arc::new(opened))
    }

    pub(super) const fn handle(&self) -> Object {
        self.handle
    }

    /// Enqueues a plan on a stream, with the places that a pack has.
    ///
    /// # Safety
    /// The pack's pointers hold the tensors of the plan's graph, and as much workspace as the plan asks for.
    pub(super) unsafe fn execute(
        &self,
        plan: &Descriptor,
        pack: &Descriptor,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: a living handle and stream.
        let code = unsafe { (self.set_stream)(self.handle, stream) };
        self.check(code, || "cudnnSetStream".to_owned())?;
        // SAFETY: the caller's promise.
        let code = unsafe { (self.execute)(self.handle, plan.object, pack.object) };
        self.check(code, || "cudnnBackendExecute".to_owned())
    }

    /// An error where a call failed, by the name that only then is made.
    fn check(&self, code: c_int, call: impl FnOnce() -> String) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: gives a constant of the library.
        let reason = format!("status {code}: {}", text(unsafe { (self.error_text)(code) }));
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call(), reason })
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: made in `open`, given back once.
            unsafe { (self.forget)(self.handle) };
        }
    }
}

/// An object of the library.
pub(super) struct Descriptor {
    library: Arc<Cudnn>,
    object: Object,
    kind: Kind,
}

impl Descriptor {
    pub(super) fn new(library: &Arc<Cudnn>, kind: Kind) -> Result<Self, DeviceError> {
        let mut object = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (library.create)(kind as c_int, &raw mut object) };
        library.check(code, || format!("cudnnBackendCreateDescriptor of {kind:?}"))?;
        Ok(Self { library: Arc::clone(library), object, kind })
    }

    pub(super) const fn object(&self) -> Object {
        self.object
    }

    /// Sets an attribute; `V` is what the library takes for the type.
    pub(super) fn set<V: Copy>(&self, name: Name, kind: Type, values: &[V]) -> Result<(), DeviceError> {
        // SAFETY: reads as many values as are counted; each type is given in the form that the header declares.
        let code = unsafe {
            (self.library.set)(
                self.object,
                name as c_int,
                kind as c_int,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        };
        self.library.check(code, || format!("cudnnBackendSetAttribute of {:?}: {name:?}", self.kind))
    }

    /// Reads up to as many values as there is room for; how many there are.
    pub(super) fn get<V: Copy>(
        &self,
        name: Name,
        kind: Type,
        values: &mut [V],
    ) -> Result<usize, DeviceError> {
        let mut count = 0i64;
        // SAFETY: writes at most as many values as there is room for.
        let code = unsafe {
            (self.library.get)(
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

    /// Ends the setting of attributes.
    pub(super) fn finish(self) -> Result<Self, DeviceError> {
        // SAFETY: a living descriptor.
        let code = unsafe { (self.library.finalize)(self.object) };
        self.library.check(code, || format!("cudnnBackendFinalize of {:?}", self.kind))?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`, given back once; the library outlives it.
        unsafe { (self.library.destroy)(self.object) };
    }
}
