//! The functions of libnccl, and the configuration of a communicator.
#![allow(unsafe_code, reason = "calls into the library; signatures are those of nccl.h")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::Once;

use crate::bindings::bindings;
use crate::driver::Handle;
use crate::library::{Library, text};
use zeroth_kernel::DeviceError;

const HOW_TO_GET: &str =
    "Install NCCL (libnccl2 of NVIDIA's packages, nccl of conda-forge, or nvidia-nccl-cu13 of pip)";
pub(super) const UNIQUE_ID_BYTES: usize = 128;
/// `ncclUint8`.
pub(crate) const UINT8: c_int = 1;
/// `ncclInProgress`: the call goes on in a thread of NCCL.
pub(crate) const IN_PROGRESS: c_int = 7;
/// `NCCL_API_MAGIC` and `NCCL_CONFIG_UNDEF_INT`.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
/// The version of NCCL whose fields [`Configuration`] has.
const CONFIGURATION_VERSION: u32 = 21_700;
/// The network interfaces that NCCL uses.
const INTERFACES: &str = "NCCL_SOCKET_IFNAME";

/// `ncclUniqueId`, which all ranks of a communicator share; passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(super) [u8; UNIQUE_ID_BYTES]);

/// An `ncclComm_t`.
pub(super) type Communicator = usize;

/// `ncclConfig_t` of NCCL 2.17. A library takes as many bytes as `size` says and has defaults for its other fields.
#[repr(C)]
pub(crate) struct Configuration {
    pub(crate) size: usize,
    pub(crate) magic: u32,
    pub(crate) version: u32,
    pub(crate) blocking: c_int,
    pub(crate) cga_cluster_size: c_int,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
    pub(crate) net_name: *const c_char,
    pub(crate) split_share: c_int,
    /// Padding in 2.17, the traffic class from 2.25 on.
    pub(crate) traffic_class: c_int,
}

impl Configuration {
    /// Calls return at once, and [`Functions::ncclCommGetAsyncError`] tells of their end.
    pub(super) const fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: CONFIGURATION_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

bindings! {
    Functions: nccl {
        ncclGetVersion(*mut c_int);
        ncclGetErrorString(c_int) -> *const c_char;
        ncclGetLastError(Communicator) -> *const c_char;
        ncclGetUniqueId(*mut UniqueId);
        ncclCommInitRankConfig(*mut Communicator, c_int, UniqueId, c_int, *mut Configuration);
        ncclCommFinalize(Communicator);
        ncclCommDestroy(Communicator);
        ncclCommAbort(Communicator);
        ncclCommGetAsyncError(Communicator, *mut c_int);
        ncclAllGather(*const c_void, *mut c_void, usize, c_int, Communicator, Handle);
        ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Handle);
        ncclSend(*const c_void, usize, c_int, c_int, Communicator, Handle);
        ncclRecv(*mut c_void, usize, c_int, c_int, Communicator, Handle);
        ncclGroupStart();
        ncclGroupEnd();
    }
}

impl Functions {
    pub(super) fn open() -> Result<Self, DeviceError> {
        Self::load(&Library::open(&["libnccl.so.2"], HOW_TO_GET)?)
    }

    /// An error for a status other than success. `communicator` is 0 before there is one.
    pub(super) fn check(
        &self,
        call: &str,
        communicator: Communicator,
        code: c_int,
    ) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both return NUL-terminated strings owned by the library.
        let (what, more) =
            unsafe { (text((self.ncclGetErrorString)(code)), text((self.ncclGetLastError)(communicator))) };
        let reason = format!("error {code}: {what}{}{more}", if more.is_empty() { "" } else { ": " });
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }

    pub(super) fn version(&self) -> Result<String, DeviceError> {
        let mut version = 0;
        // SAFETY: writes one int.
        self.check("ncclGetVersion", 0, unsafe { (self.ncclGetVersion)(&raw mut version) })?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    /// A new id. The library starts to listen for the ranks of its communicator.
    pub(super) fn unique_id(&self) -> Result<UniqueId, DeviceError> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: writes one id.
        self.check("ncclGetUniqueId", 0, unsafe { (self.ncclGetUniqueId)(&raw mut id) })?;
        Ok(id)
    }
}

/// Keeps NCCL on the loopback interface, unless the user has chosen interfaces: it listens without authentication. Effective if
/// called before NCCL is used for the first time.
pub(super) fn stay_on_this_host() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os(INTERFACES).is_none() {
            // SAFETY: Rust's own readers are locked out meanwhile. Of the C libraries only the driver is open here, which has
            // read its variables, and NCCL, which reads them when it is used for the first time.
            unsafe { std::env::set_var(INTERFACES, "lo") };
        }
    });
}
