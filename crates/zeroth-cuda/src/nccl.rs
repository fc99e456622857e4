//! NCCL (libnccl), opened at run time: for ranks on GPUs that cannot map each other's memory.
//!
//! NCCL only moves bytes. Reductions are our own kernels, in rank order, so that results do not depend on the transport.
#![allow(unsafe_code, reason = "calls into the library; signatures are those of nccl.h")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use super::arenas::Arenas;
use super::bindings::bindings;
use super::driver::{Address, Handle};
use super::gpu_uuid::{GpuUuid, ranks_on_one_gpu};
use super::library::{Library, text};
use zeroth_kernel::bytes_before;
use zeroth_kernel::{DeviceError, Exchange, Span};

const HOW_TO_GET: &str =
    "Install NCCL (libnccl2 of NVIDIA's packages, nccl of conda-forge, or nvidia-nccl-cu13 of pip)";
const UNIQUE_ID_BYTES: usize = 128;
/// `ncclUint8`.
pub(super) const UINT8: c_int = 1;

/// `ncclUniqueId`, which all ranks of a communicator share; passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId([u8; UNIQUE_ID_BYTES]);

/// An `ncclComm_t`.
type Communicator = usize;

bindings! {
    Functions: nccl {
        ncclGetVersion(*mut c_int);
        ncclGetErrorString(c_int) -> *const c_char;
        ncclGetLastError(Communicator) -> *const c_char;
        ncclGetUniqueId(*mut UniqueId);
        ncclCommInitRank(*mut Communicator, c_int, UniqueId, c_int);
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
    fn open() -> Result<Self, DeviceError> {
        Self::load(&Library::open(&["libnccl.so.2"], HOW_TO_GET)?)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both return NUL-terminated strings owned by the library.
        let (what, more) =
            unsafe { (text((self.ncclGetErrorString)(code)), text((self.ncclGetLastError)(0))) };
        let reason = format!("error {code}: {what}{}{more}", if more.is_empty() { "" } else { ": " });
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }
}

/// The version of NCCL, such as 2.27.3.
pub(super) fn version() -> Result<String, DeviceError> {
    let (functions, mut version) = (Functions::open()?, 0);
    // SAFETY: writes one int.
    functions.check("ncclGetVersion", unsafe { (functions.ncclGetVersion)(&raw mut version) })?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// A rank's handle: the UUID of its GPU and, from rank 0, the id of the communicator.
pub(super) fn ipc_handle(gpu: GpuUuid, rank: usize) -> Result<Vec<u8>, DeviceError> {
    let (functions, mut id) = (Functions::open()?, UniqueId([0; UNIQUE_ID_BYTES]));
    if rank == 0 {
        // SAFETY: writes one id.
        functions.check("ncclGetUniqueId", unsafe { (functions.ncclGetUniqueId)(&raw mut id) })?;
    }
    Ok(gpu.into_iter().chain(id.0).collect())
}

/// Parses the handles of all ranks into the UUIDs of their GPUs and the id of rank 0.
fn parse_handles(handles: &[Vec<u8>]) -> Result<(Vec<GpuUuid>, UniqueId), DeviceError> {
    let parse = |handle: &Vec<u8>| {
        let (gpu, id) = handle.split_first_chunk::<{ size_of::<GpuUuid>() }>()?;
        Some((*gpu, UniqueId(id.try_into().ok()?)))
    };
    let all: Option<Vec<(GpuUuid, UniqueId)>> = handles.iter().map(parse).collect();
    let refused = |problem: String| DeviceError::Operands { what: "NCCL", problem };
    let all = all.filter(|all| !all.is_empty());
    let all = all.ok_or_else(|| refused("a rank's handle is not one of NCCL's".to_owned()))?;
    let gpus: Vec<GpuUuid> = all.iter().map(|(gpu, _)| *gpu).collect();
    if let Some((first, second)) = ranks_on_one_gpu(&gpus) {
        let problem =
            format!("ranks {first} and {second} are on the same GPU; NCCL supports one rank per GPU");
        return Err(refused(problem));
    }
    Ok((gpus, all[0].1))
}

/// A communicator of all ranks.
pub(super) struct Nccl {
    functions: Functions,
    rank: usize,
    world: usize,
    /// `None` once aborted.
    communicator: Arc<Mutex<Option<Communicator>>>,
}

impl Nccl {
    /// Joins the communicator; blocks until all ranks have joined. The GPU's context must be current.
    pub(super) fn open(rank: usize, handles: &[Vec<u8>]) -> Result<Self, DeviceError> {
        let (gpus, id) = parse_handles(handles)?;
        let (functions, world) = (Functions::open()?, gpus.len());
        let mut communicator = 0;
        // SAFETY: writes one handle.
        let code =
            unsafe { (functions.ncclCommInitRank)(&raw mut communicator, world as c_int, id, rank as c_int) };
        functions.check("ncclCommInitRank", code)?;
        Ok(Self { functions, rank, world, communicator: Arc::new(Mutex::new(Some(communicator))) })
    }

    /// Enqueues an exchange.
    pub(super) fn exchange(
        &self,
        arenas: Arenas,
        exchange: &Exchange<'_>,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        let held = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = || DeviceError::Operands {
            what: exchange.name(),
            problem: "the communicator was aborted because a rank was lost".to_owned(),
        };
        let op = Operation { functions: &self.functions, communicator: held.ok_or_else(gone)?, stream };
        let mut failed = 0;
        // SAFETY: writes one status.
        let code = unsafe { (self.functions.ncclCommGetAsyncError)(op.communicator, &raw mut failed) };
        self.functions.check("ncclCommGetAsyncError", code)?;
        self.functions.check("an earlier exchange", failed)?;
        let find = |span: Span| arenas.find(exchange.name(), span);
        match *exchange {
            Exchange::AllGather { send, recv, counts } => {
                let (from, to) = (find(send)?, find(recv)?);
                if let Some(count) = equal(counts) {
                    return op.all_gather(from, to, count);
                }
                let part = |rank: usize| {
                    let to = to + bytes_before(counts, rank);
                    (if rank == self.rank { from } else { to }, to, counts[rank])
                };
                op.grouped(|| (0..self.world).try_for_each(|rank| op.broadcast(rank, part(rank))))
            }
            Exchange::AllGatherInPlace { buffer, starts, counts } => {
                let all = find(buffer)?;
                let parts = starts.iter().zip(counts).map(|(start, count)| {
                    find(buffer.part(*start as u64, *count as u64, 1)).map(|at| (at, at, *count))
                });
                let parts: Vec<(Address, Address, usize)> = parts.collect::<Result<_, _>>()?;
                let touch =
                    |count: &usize| (0..self.world).all(|rank| starts[rank] == starts[0] + rank * count);
                if let Some(count) = equal(counts).filter(touch) {
                    return op.all_gather(parts[self.rank].0, all + starts[0] as u64, count);
                }
                op.grouped(|| (0..self.world).try_for_each(|rank| op.broadcast(rank, parts[rank])))
            }
            Exchange::Broadcast { root, buffer } => {
                let at = find(buffer)?;
                op.broadcast(root, (at, at, buffer.bytes as usize))
            }
            Exchange::AllToAll { send, recv, counts } => {
                let (from, to, own) = (find(send)?, find(recv)?, counts[self.rank]);
                op.grouped(|| {
                    (0..self.world).try_for_each(|rank| {
                        op.send(rank, from + bytes_before(counts, rank), counts[rank])?;
                        op.receive(rank, to + (rank * own) as u64, own)
                    })
                })
            }
        }
    }

    /// A function that aborts the communicator from any thread: pending operations end.
    pub(super) fn abort(&self) -> Box<dyn Fn() + Send> {
        let (communicator, abort) = (Arc::clone(&self.communicator), self.functions.ncclCommAbort);
        Box::new(move || {
            if let Some(communicator) = communicator.lock().unwrap_or_else(PoisonError::into_inner).take() {
                // SAFETY: taken out of the mutex, so this is its only user. Nothing depends on the status.
                unsafe { abort(communicator) };
            }
        })
    }

    /// Destroys the communicator. All streams must be idle.
    pub(super) fn close(self) {
        if let Some(communicator) = self.communicator.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // SAFETY: taken out of the mutex, so this is its only user. Nothing depends on the status.
            unsafe { (self.functions.ncclCommDestroy)(communicator) };
        }
    }
}

/// The common count of all ranks, if they are equal.
fn equal(counts: &[usize]) -> Option<usize> {
    counts.iter().all(|count| *count == counts[0]).then(|| counts[0])
}

/// One exchange being enqueued. Addresses are within arenas, which outlive all work on the streams.
struct Operation<'a> {
    functions: &'a Functions,
    communicator: Communicator,
    stream: Handle,
}

impl Operation<'_> {
    fn all_gather(&self, from: Address, to: Address, count: usize) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: callers have checked `count` bytes at `from` and `count` times the world size at `to`.
        let code =
            unsafe { (self.functions.ncclAllGather)(from, to, count, UINT8, self.communicator, self.stream) };
        self.functions.check("ncclAllGather", code)
    }

    /// `part` is source, destination and bytes; only `root` reads its source.
    fn broadcast(&self, root: usize, part: (Address, Address, usize)) -> Result<(), DeviceError> {
        let (from, to, count) = (part.0 as *const c_void, part.1 as *mut c_void, part.2);
        if count == 0 {
            return Ok(());
        }
        let root = root as c_int;
        // SAFETY: callers have checked `count` bytes at both addresses.
        let code = unsafe {
            (self.functions.ncclBroadcast)(from, to, count, UINT8, root, self.communicator, self.stream)
        };
        self.functions.check("ncclBroadcast", code)
    }

    fn send(&self, to: usize, from: Address, count: usize) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let (from, to) = (from as *const c_void, to as c_int);
        // SAFETY: callers have checked `count` bytes at `from`.
        let code =
            unsafe { (self.functions.ncclSend)(from, count, UINT8, to, self.communicator, self.stream) };
        self.functions.check("ncclSend", code)
    }

    fn receive(&self, from: usize, to: Address, count: usize) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let (to, from) = (to as *mut c_void, from as c_int);
        // SAFETY: callers have checked `count` bytes at `to`.
        let code =
            unsafe { (self.functions.ncclRecv)(to, count, UINT8, from, self.communicator, self.stream) };
        self.functions.check("ncclRecv", code)
    }

    /// Runs calls as one NCCL group, which is ended even if a call fails.
    fn grouped(&self, calls: impl Fn() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        // SAFETY: no arguments.
        self.functions.check("ncclGroupStart", unsafe { (self.functions.ncclGroupStart)() })?;
        let outcome = calls();
        // SAFETY: no arguments; a group was started.
        let ended = self.functions.check("ncclGroupEnd", unsafe { (self.functions.ncclGroupEnd)() });
        outcome.and(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(gpu: u8, id: u8) -> Vec<u8> {
        [vec![gpu; 16], vec![id; UNIQUE_ID_BYTES]].concat()
    }

    #[test]
    fn two_ranks_on_one_gpu_are_rejected_before_any_rank_blocks() {
        let problem = parse_handles(&[handle(1, 5), handle(2, 0), handle(2, 0)]).err().unwrap().to_string();
        assert!(problem.contains("ranks 1 and 2 are on the same GPU"), "{problem}");
        let (gpus, id) = parse_handles(&[handle(1, 5), handle(2, 0)]).unwrap();
        assert_eq!((gpus.len(), id.0), (2, [5; UNIQUE_ID_BYTES]));
        assert!(parse_handles(&[handle(1, 5), vec![0; 3]]).is_err());
        assert!(parse_handles(&[]).is_err());
    }

    #[test]
    fn a_missing_library_is_an_error_with_a_remedy() {
        match version() {
            Ok(version) => assert!(version.starts_with("2."), "{version}"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("libnccl.so.2") && error.contains("nvidia-nccl-cu13"), "{error}");
            }
        }
    }
}
