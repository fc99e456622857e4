//! The functions of MPI that are used, with two tables of bindings: MPICH's binary interface, whose handles are integers
//! (also that of Intel MPI, MVAPICH and Cray's), and Open MPI's, whose handles are addresses of exported objects.
//!
//! [`Calls`] is the same for both: a handle is passed as the bits of an integer or of an address.
#![allow(unsafe_code, reason = "signatures and constants are those of mpi.h")]

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

use zeroth_base::SharedLibrary;

/// A binary interface of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Abi {
    Mpich,
    OpenMpi,
}

/// A communicator, as bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Communicator(usize);

/// An operation in progress, as bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct MpiRequest(usize);

/// A status of MPI other than success.
#[derive(Debug, Clone, Copy)]
pub(super) struct Code(c_int);

/// Room for a text of MPI: MPICH needs 8,192 bytes for its version.
const TEXT: usize = 1 << 14;

/// `MPI_THREAD_SERIALIZED` of both.
pub(super) const THREAD_SERIALIZED: c_int = 2;

/// The tag of messages between two ranks; their order tells them apart.
const TAG: c_int = 0;

/// Counts and displacements of every rank, in bytes. MPI reads them until the operation is complete.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) counts: Vec<c_int>,
    pub(super) displacements: Vec<c_int>,
}

/// The functions of MPI, for bytes. Buffers and layouts stay valid until the operation is complete; callers see to it that
/// one thread at a time is inside of MPI.
pub(super) trait Calls: Send {
    /// `MPI_Init_thread`; the thread level provided.
    fn init(&self) -> Result<c_int, Code>;
    fn finalize(&self) -> Result<(), Code>;
    fn error_text(&self, code: Code) -> String;
    fn world(&self) -> Communicator;
    /// Rank and size.
    fn place(&self, communicator: Communicator) -> Result<(usize, usize), Code>;
    /// Errors are returned from now on, where the library would end the process.
    fn return_errors(&self, communicator: Communicator) -> Result<(), Code>;
    fn split(&self, color: c_int, key: c_int) -> Result<Communicator, Code>;
    /// Whether an operation is complete.
    fn test(&self, request: &mut MpiRequest) -> Result<bool, Code>;
    fn barrier(&self, communicator: Communicator) -> Result<MpiRequest, Code>;
    /// # Safety
    /// `count` bytes at `buffer`, read on `root` and written elsewhere, until the operation is complete.
    unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        count: c_int,
        root: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code>;
    /// `send` is `None` where this rank's part is in place.
    ///
    /// # Safety
    /// The bytes sent and those that `layout` describes from `recv` on, until the operation is complete; `layout` too.
    unsafe fn all_gather(
        &self,
        send: Option<(*const u8, c_int)>,
        recv: *mut u8,
        layout: &Layout,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code>;
    /// # Safety
    /// The bytes that the layouts describe, until the operation is complete; the layouts too.
    unsafe fn all_to_all(
        &self,
        send: (*const u8, &Layout),
        recv: (*mut u8, &Layout),
        communicator: Communicator,
    ) -> Result<MpiRequest, Code>;
    /// # Safety
    /// As of `all_gather`; only `root` receives.
    unsafe fn gather(
        &self,
        send: (*const u8, c_int),
        recv: *mut u8,
        layout: &Layout,
        root: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code>;
    /// # Safety
    /// `count` bytes at `buffer` until the operation is complete.
    unsafe fn send(
        &self,
        buffer: *const u8,
        count: c_int,
        to: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code>;
    /// # Safety
    /// As of `send`; they are written.
    unsafe fn receive(
        &self,
        buffer: *mut u8,
        count: c_int,
        from: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code>;
}

/// A handle: a communicator, a datatype, a request.
trait Handle: Copy + Send + 'static {
    fn from_bits(bits: usize) -> Self;
    fn bits(self) -> usize;
}

impl Handle for c_int {
    fn from_bits(bits: usize) -> Self {
        bits as Self
    }

    fn bits(self) -> usize {
        self as usize
    }
}

/// The address of an object of the library.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Object(usize);

impl Handle for Object {
    fn from_bits(bits: usize) -> Self {
        Self(bits)
    }

    fn bits(self) -> usize {
        self.0
    }
}

macro_rules! functions {
    ($($symbol:ident($($argument:ty),* $(,)?);)*) => {
        /// One function pointer a symbol, named as in mpi.h. `H` is the type of handles.
        #[allow(non_snake_case, reason = "fields are named as the functions in the header")]
        struct Functions<H> {
            $($symbol: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl<H> Functions<H> {
            fn load(library: &SharedLibrary) -> Result<Self, String> {
                // SAFETY: each field has the type that mpi.h declares for its symbol.
                unsafe { Ok(Self { $($symbol: library.function(stringify!($symbol))?,)* }) }
            }
        }
    };
}

functions! {
    MPI_Init_thread(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    MPI_Finalize();
    MPI_Error_string(c_int, *mut c_char, *mut c_int);
    MPI_Comm_rank(H, *mut c_int);
    MPI_Comm_size(H, *mut c_int);
    MPI_Comm_split(H, c_int, c_int, *mut H);
    MPI_Comm_set_errhandler(H, H);
    MPI_Test(*mut H, *mut c_int, *mut c_void);
    MPI_Ibarrier(H, *mut H);
    MPI_Ibcast(*mut c_void, c_int, H, c_int, H, *mut H);
    MPI_Iallgatherv(*const c_void, c_int, H, *mut c_void, *const c_int, *const c_int, H, H, *mut H);
    MPI_Ialltoallv(
        *const c_void, *const c_int, *const c_int, H,
        *mut c_void, *const c_int, *const c_int, H, H, *mut H,
    );
    MPI_Igatherv(*const c_void, c_int, H, *mut c_void, *const c_int, *const c_int, H, c_int, H, *mut H);
    MPI_Isend(*const c_void, c_int, H, c_int, c_int, H, *mut H);
    MPI_Irecv(*mut c_void, c_int, H, c_int, c_int, H, *mut H);
}

/// The functions of a library, and its constants.
struct Table<H> {
    functions: Functions<H>,
    world: H,
    byte: H,
    errors_return: H,
    in_place: *const c_void,
    status_ignore: *mut c_void,
}

// SAFETY: the two pointers are constants of the interface and are never followed.
unsafe impl<H: Send> Send for Table<H> {}

/// The interface of an open library, by what it exports; the error says what is missing.
pub(super) fn abi_of(library: &SharedLibrary) -> Result<Abi, String> {
    // SAFETY: the address of an exported object; it is not followed.
    if unsafe { library.function::<Object>("ompi_mpi_comm_world") }.is_ok() {
        return Ok(Abi::OpenMpi);
    }
    let version = version(library)?;
    // Others have other numbers: those of MPI 5's standard interface, for one.
    if ["MPICH", "Intel(R) MPI", "MVAPICH"].iter().any(|name| version.contains(name)) {
        return Ok(Abi::Mpich);
    }
    Err(format!("its binary interface is neither that of MPICH nor that of Open MPI ({version})"))
}

/// The first line of `MPI_Get_library_version`, which may be called before `MPI_Init`.
pub(super) fn version(library: &SharedLibrary) -> Result<String, String> {
    // SAFETY: as mpi.h declares it.
    let call: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int =
        unsafe { library.function("MPI_Get_library_version") }?;
    // SAFETY: writes less than `TEXT` bytes and one int.
    let text = text(|text, length| unsafe { call(text, length) });
    let line = text.lines().next().unwrap_or_default();
    Ok(line.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn text(call: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let (mut text, mut length) = (vec![0_u8; TEXT], 0);
    call(text.as_mut_ptr().cast(), &raw mut length);
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).trim().to_owned()
}

/// The functions of a library with this interface; the error names what is missing.
pub(super) fn load(library: &SharedLibrary, abi: Abi) -> Result<Box<dyn Calls>, String> {
    match abi {
        Abi::Mpich => Ok(Box::new(Table::<c_int> {
            functions: Functions::load(library)?,
            world: 0x4400_0000,
            byte: 0x4c00_010d,
            errors_return: 0x5400_0001,
            in_place: std::ptr::without_provenance(usize::MAX),
            status_ignore: std::ptr::without_provenance_mut(1),
        })),
        Abi::OpenMpi => {
            // SAFETY: the addresses of exported objects, which the library follows.
            let object = |name| unsafe { library.function::<Object>(name) };
            Ok(Box::new(Table::<Object> {
                functions: Functions::load(library)?,
                world: object("ompi_mpi_comm_world")?,
                byte: object("ompi_mpi_byte")?,
                errors_return: object("ompi_mpi_errors_return")?,
                in_place: std::ptr::without_provenance(1),
                status_ignore: null_mut(),
            }))
        }
    }
}

fn check(code: c_int) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

/// Starts an operation with `call`, which writes its request.
fn started<H: Handle>(call: impl FnOnce(*mut H) -> c_int) -> Result<MpiRequest, Code> {
    let mut request = H::from_bits(0);
    check(call(&raw mut request))?;
    Ok(MpiRequest(request.bits()))
}

impl<H: Handle> Calls for Table<H> {
    fn init(&self) -> Result<c_int, Code> {
        let mut provided = 0;
        // SAFETY: MPI allows null for the arguments of the program; one int is written.
        let code = unsafe {
            (self.functions.MPI_Init_thread)(null_mut(), null_mut(), THREAD_SERIALIZED, &raw mut provided)
        };
        check(code).map(|()| provided)
    }

    fn finalize(&self) -> Result<(), Code> {
        // SAFETY: no arguments.
        check(unsafe { (self.functions.MPI_Finalize)() })
    }

    fn error_text(&self, code: Code) -> String {
        // SAFETY: writes less than `TEXT` bytes and one int.
        text(|text, length| unsafe { (self.functions.MPI_Error_string)(code.0, text, length) })
    }

    fn world(&self) -> Communicator {
        Communicator(self.world.bits())
    }

    fn place(&self, communicator: Communicator) -> Result<(usize, usize), Code> {
        let (mut rank, mut size) = (0, 0);
        let communicator = H::from_bits(communicator.0);
        // SAFETY: each writes one int.
        unsafe {
            check((self.functions.MPI_Comm_rank)(communicator, &raw mut rank))?;
            check((self.functions.MPI_Comm_size)(communicator, &raw mut size))?;
        }
        Ok((rank as usize, size as usize))
    }

    fn return_errors(&self, communicator: Communicator) -> Result<(), Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: handles of the library.
        check(unsafe { (self.functions.MPI_Comm_set_errhandler)(communicator, self.errors_return) })
    }

    fn split(&self, color: c_int, key: c_int) -> Result<Communicator, Code> {
        let mut new = H::from_bits(0);
        // SAFETY: writes one handle.
        check(unsafe { (self.functions.MPI_Comm_split)(self.world, color, key, &raw mut new) })?;
        Ok(Communicator(new.bits()))
    }

    fn test(&self, request: &mut MpiRequest) -> Result<bool, Code> {
        let (mut handle, mut done) = (H::from_bits(request.0), 0);
        // SAFETY: writes the handle and one int; the constant says that no status is wanted.
        let code = unsafe { (self.functions.MPI_Test)(&raw mut handle, &raw mut done, self.status_ignore) };
        *request = MpiRequest(handle.bits());
        check(code).map(|()| done != 0)
    }

    fn barrier(&self, communicator: Communicator) -> Result<MpiRequest, Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: writes one handle.
        started(|request| unsafe { (self.functions.MPI_Ibarrier)(communicator, request) })
    }

    unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        count: c_int,
        root: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: the caller keeps the buffer; writes one handle.
        started(|request| unsafe {
            (self.functions.MPI_Ibcast)(buffer.cast(), count, self.byte, root, communicator, request)
        })
    }

    unsafe fn all_gather(
        &self,
        send: Option<(*const u8, c_int)>,
        recv: *mut u8,
        layout: &Layout,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code> {
        let (send, count) = send.map_or((self.in_place, 0), |(send, count)| (send.cast(), count));
        let communicator = H::from_bits(communicator.0);
        // SAFETY: the caller keeps buffers and layout; writes one handle.
        started(|request| unsafe {
            (self.functions.MPI_Iallgatherv)(
                send,
                count,
                self.byte,
                recv.cast(),
                layout.counts.as_ptr(),
                layout.displacements.as_ptr(),
                self.byte,
                communicator,
                request,
            )
        })
    }

    unsafe fn all_to_all(
        &self,
        send: (*const u8, &Layout),
        recv: (*mut u8, &Layout),
        communicator: Communicator,
    ) -> Result<MpiRequest, Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: the caller keeps buffers and layouts; writes one handle.
        started(|request| unsafe {
            (self.functions.MPI_Ialltoallv)(
                send.0.cast(),
                send.1.counts.as_ptr(),
                send.1.displacements.as_ptr(),
                self.byte,
                recv.0.cast(),
                recv.1.counts.as_ptr(),
                recv.1.displacements.as_ptr(),
                self.byte,
                communicator,
                request,
            )
        })
    }

    unsafe fn gather(
        &self,
        send: (*const u8, c_int),
        recv: *mut u8,
        layout: &Layout,
        root: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: the caller keeps buffers and layout; writes one handle.
        started(|request| unsafe {
            (self.functions.MPI_Igatherv)(
                send.0.cast(),
                send.1,
                self.byte,
                recv.cast(),
                layout.counts.as_ptr(),
                layout.displacements.as_ptr(),
                self.byte,
                root,
                communicator,
                request,
            )
        })
    }

    unsafe fn send(
        &self,
        buffer: *const u8,
        count: c_int,
        to: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: the caller keeps the buffer; writes one handle.
        started(|request| unsafe {
            (self.functions.MPI_Isend)(buffer.cast(), count, self.byte, to, TAG, communicator, request)
        })
    }

    unsafe fn receive(
        &self,
        buffer: *mut u8,
        count: c_int,
        from: c_int,
        communicator: Communicator,
    ) -> Result<MpiRequest, Code> {
        let communicator = H::from_bits(communicator.0);
        // SAFETY: the caller keeps the buffer; writes one handle.
        started(|request| unsafe {
            (self.functions.MPI_Irecv)(buffer.cast(), count, self.byte, from, TAG, communicator, request)
        })
    }
}
