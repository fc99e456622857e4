//! Transport by CUDA IPC: ranks copy directly out of each other's arenas, which their processes map.
//!
//! They synchronize on counters in host memory that all ranks have mapped: a stream stores its own counter and waits for those of
//! the others, without the host. The protocol is that of `zeroth_comm::DeviceBarrier`.
#![allow(unsafe_code, reason = "calls into the driver; maps a file that other processes map too")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::arenas::Arenas;
use super::bindings::bindings;
use super::driver::{Address, Driver, Handle};
use super::gpu_uuid::{GpuUuid, gpu_uuid};
use zeroth_kernel::{BarrierCounters, DeviceError, Exchange, IpcHandles};

/// Bytes that a rank writes to the start of its still empty arena, so that peers can verify their mapping.
pub(super) const TOKEN: usize = 16;
const MEM_HANDLE: usize = 64;
const HANDLE: usize = MEM_HANDLE + size_of::<GpuUuid>() + 8 + TOKEN;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: also maps memory of another GPU, where the GPUs support it.
pub(super) const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
pub(super) const PORTABLE_DEVICEMAP: c_uint = 3;
/// `CU_STREAM_WAIT_VALUE_GEQ`: waits until the counter has reached the value, modulo 2³².
pub(super) const WAIT_VALUE_GEQ: c_uint = 0;

/// Distance of the releasing counters from the last enqueued point: they end the waits of all streams.
const RELEASE_DISTANCE: u32 = 1 << 30;

/// `CUipcMemHandle`; passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct MemHandle([u8; MEM_HANDLE]);

bindings! {
    /// Functions that only this transport needs: a driver that lacks one still runs everything else.
    Functions: driver {
        cuIpcGetMemHandle(*mut MemHandle, Address);
        cuIpcOpenMemHandle_v2(*mut Address, MemHandle, c_uint);
        cuIpcCloseMemHandle(Address);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, c_uint);
        cuStreamWriteValue32_v2(Handle, Address, u32, c_uint);
        cuStreamWaitValue32_v2(Handle, Address, u32, c_uint);
    }
}

/// A rank's handle, by which peers map its arena. The arena's first bytes are `token`.
pub(super) fn ipc_handle(
    driver: &Driver,
    device: c_int,
    arena: (Address, u64),
    token: [u8; TOKEN],
) -> Result<Vec<u8>, DeviceError> {
    let mut memory = MemHandle([0; MEM_HANDLE]);
    let functions = Functions::load(&Driver::library()?)?;
    // SAFETY: writes one handle; the address is the start of an allocation.
    let code = unsafe { (functions.cuIpcGetMemHandle)(&raw mut memory, arena.0) };
    driver.check("cuIpcGetMemHandle", code)?;
    let mut handle = memory.0.to_vec();
    handle.extend(gpu_uuid(driver, device)?);
    handle.extend(arena.1.to_le_bytes());
    handle.extend(token);
    Ok(handle)
}

/// The parsed handle of a peer.
struct PeerHandle {
    memory: MemHandle,
    gpu: GpuUuid,
    bytes: u64,
    token: [u8; TOKEN],
}

impl PeerHandle {
    fn parse(handle: &[u8]) -> Option<Self> {
        let (memory, rest) = handle.split_first_chunk::<MEM_HANDLE>()?;
        let (gpu, rest) = rest.split_first_chunk::<{ size_of::<GpuUuid>() }>()?;
        let (bytes, rest) = rest.split_first_chunk::<8>()?;
        let token = *rest.first_chunk::<TOKEN>()?;
        (handle.len() == HANDLE).then_some(Self {
            memory: MemHandle(*memory),
            gpu: *gpu,
            bytes: u64::from_le_bytes(*bytes),
            token,
        })
    }
}

/// Arenas and counters of all ranks, mapped for this rank's device.
pub(super) struct Ipc {
    functions: Functions,
    rank: usize,
    arenas: Vec<Address>,
    /// Bytes of each arena.
    bytes: u64,
    counters: MappedCounters,
    /// Where the first rank's counter is, and bytes from one to the next.
    first: usize,
    stride: usize,
    shares_gpu: bool,
    /// The last enqueued point.
    last: AtomicU32,
}

/// The counters of all ranks, mapped and pinned.
struct MappedCounters {
    start: *mut c_void,
    bytes: usize,
    /// Device address of the first counter; 0 while not pinned.
    address: Address,
}

// SAFETY: the mapping is not tied to a thread, and only devices write to it.
unsafe impl Send for MappedCounters {}

impl Drop for MappedCounters {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no longer referenced.
        let _ = unsafe { rustix::mm::munmap(self.start, self.bytes) };
    }
}

impl Ipc {
    /// Maps the arenas of all peers and verifies their tokens. Tests the counters on `stream`.
    pub(super) fn open(
        driver: &Driver,
        own: (Address, u64),
        handles: &IpcHandles<'_>,
        stream: Handle,
    ) -> Result<Self, DeviceError> {
        let functions = Functions::load(&Driver::library()?)?;
        let shared = handles.counters.ok_or_else(|| DeviceError::Operands {
            what: "exchange",
            problem: "the ranks share no memory for barrier counters".to_owned(),
        })?;
        let BarrierCounters { first, stride, bytes, .. } = shared;
        let end = first + handles.handles.len().saturating_sub(1) * stride + size_of::<u32>();
        if ![first, stride].iter().all(|at| at.is_multiple_of(size_of::<u32>())) || end > bytes {
            let world = handles.handles.len();
            let problem = format!("{world} counters, {stride} bytes apart from {first} on, in {bytes} bytes");
            return Err(DeviceError::Operands { what: "exchange", problem });
        }
        let counters = map(driver, &shared)?;
        let rank = handles.rank;
        let gpus: Vec<Option<GpuUuid>> =
            handles.handles.iter().map(|handle| Some(PeerHandle::parse(handle)?.gpu)).collect();
        let shares_gpu = gpus.iter().filter(|gpu| **gpu == gpus[rank]).count() > 1;
        let (arenas, bytes) = (Vec::new(), own.1);
        let mut opened = Self {
            functions,
            rank,
            arenas,
            bytes,
            counters,
            first,
            stride,
            shares_gpu,
            last: AtomicU32::new(0),
        };
        let outcome = opened.pin(driver).and_then(|()| opened.map_arenas(driver, own.0, handles, stream));
        if let Err(error) = outcome {
            opened.close(driver);
            return Err(error);
        }
        Ok(opened)
    }

    fn pin(&mut self, driver: &Driver) -> Result<(), DeviceError> {
        let MappedCounters { start, bytes, .. } = self.counters;
        // SAFETY: the mapping stays until `close` has unregistered it.
        let code = unsafe { (self.functions.cuMemHostRegister_v2)(start, bytes, PORTABLE_DEVICEMAP) };
        driver.check("cuMemHostRegister", code)?;
        let mut address = 0;
        // SAFETY: writes one address; the memory was registered above.
        let code = unsafe { (self.functions.cuMemHostGetDevicePointer_v2)(&raw mut address, start, 0) };
        let mapped = driver.check("cuMemHostGetDevicePointer", code);
        if mapped.is_err() {
            driver.unregister_host(start.expose_provenance());
        }
        mapped?;
        self.counters.address = address;
        Ok(())
    }

    fn map_arenas(
        &mut self,
        driver: &Driver,
        own: Address,
        handles: &IpcHandles<'_>,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        for (rank, handle) in handles.handles.iter().enumerate() {
            let arena = if rank == self.rank { own } else { self.map_arena(driver, rank, handle, stream)? };
            self.arenas.push(arena);
        }
        // SAFETY: within the mapping, by the check in `open`, and aligned by its stride. Only this rank's device writes to it,
        // and the device is idle.
        let now = unsafe {
            let counters = self.counters.start.cast::<u32>();
            counters.byte_add(self.first + self.rank * self.stride).read_volatile()
        };
        self.store_counter(driver, now, stream)?;
        self.wait_counter(driver, self.rank, now, stream)?;
        driver.synchronise(stream)
    }

    fn map_arena(
        &self,
        driver: &Driver,
        rank: usize,
        handle: &[u8],
        stream: Handle,
    ) -> Result<Address, DeviceError> {
        let failed = |reason: String| driver.failed(&format!("mapping the memory of rank {rank}"), reason);
        let peer = PeerHandle::parse(handle)
            .ok_or_else(|| failed(format!("its handle has {} bytes instead of {HANDLE}", handle.len())))?;
        if peer.bytes != self.bytes {
            let reason = format!("its arena has {} bytes, this rank's {}", peer.bytes, self.bytes);
            return Err(failed(reason));
        }
        let mut arena = 0;
        // SAFETY: writes one address; the handle was exported by another process.
        let code = unsafe {
            (self.functions.cuIpcOpenMemHandle_v2)(&raw mut arena, peer.memory, LAZY_ENABLE_PEER_ACCESS)
        };
        driver.check("cuIpcOpenMemHandle", code)?;
        let mut found = [0; TOKEN];
        let read = driver.copy_to_host(&mut found, arena, stream);
        if read.is_ok() && found == peer.token {
            return Ok(arena);
        }
        // SAFETY: opened above, closed once.
        unsafe { (self.functions.cuIpcCloseMemHandle)(arena) };
        read?;
        Err(failed("the token read there differs from the one that the rank wrote".to_owned()))
    }

    /// Whether another rank uses the same GPU.
    pub(super) const fn shares_gpu(&self) -> bool {
        self.shares_gpu
    }

    /// Enqueues an exchange between the two points of a barrier.
    pub(super) fn exchange(
        &self,
        driver: &Driver,
        arenas: Arenas,
        exchange: &Exchange<'_>,
        points: [u32; 2],
        stream: Handle,
    ) -> Result<(), DeviceError> {
        let world = self.arenas.len();
        let others = || (0..world).filter(|rank| *rank != self.rank);
        // All spans are checked before this rank announces its arrival.
        for take in exchange.copies(self.rank, world) {
            arenas.find(exchange.name(), take.to)?;
            arenas.find(exchange.name(), take.place)?;
        }
        self.last.store(points[1], Ordering::Relaxed);
        self.store_counter(driver, points[0], stream)?;
        others().try_for_each(|rank| self.wait_counter(driver, rank, points[0], stream))?;
        for take in exchange.copies(self.rank, world) {
            let to = arenas.find(exchange.name(), take.to)?;
            let from = self.arenas[take.from] + take.place.at;
            // SAFETY: `to` is within this rank's arena and `from` within a peer's, which has the same size; both stay mapped
            // until `close`, before which the device synchronizes its streams.
            unsafe { driver.copy(to, from, take.to.bytes, stream)? };
        }
        self.store_counter(driver, points[1], stream)?;
        others().try_for_each(|rank| self.wait_counter(driver, rank, points[1], stream))
    }

    fn counter(&self, rank: usize) -> Address {
        self.counters.address + (self.first + rank * self.stride) as u64
    }

    /// Enqueues a store to this rank's counter, after all earlier writes of the stream.
    fn store_counter(&self, driver: &Driver, value: u32, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: a pinned counter.
        let code =
            unsafe { (self.functions.cuStreamWriteValue32_v2)(stream, self.counter(self.rank), value, 0) };
        driver.check("cuStreamWriteValue32", code)
    }

    /// Makes the stream wait until a rank's counter has reached `value`.
    fn wait_counter(
        &self,
        driver: &Driver,
        rank: usize,
        value: u32,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: a pinned counter.
        let code = unsafe {
            (self.functions.cuStreamWaitValue32_v2)(stream, self.counter(rank), value, WAIT_VALUE_GEQ)
        };
        driver.check("cuStreamWaitValue32", code)
    }

    /// Ends the waits of this rank's streams for peers. Counters are undefined after it.
    pub(super) fn release(&self) {
        let released = self.last.load(Ordering::Relaxed).wrapping_add(RELEASE_DISTANCE);
        for rank in 0..self.arenas.len() {
            // SAFETY: within the mapping, by the check in `open`, and aligned by its stride. Nothing else depends on the counters any
            // more.
            unsafe {
                let counter = self.counters.start.cast::<u32>().byte_add(self.first + rank * self.stride);
                counter.write_volatile(released);
            }
        }
    }

    /// Unmaps everything. All streams must be idle.
    pub(super) fn close(&mut self, driver: &Driver) {
        for (rank, arena) in std::mem::take(&mut self.arenas).into_iter().enumerate() {
            if rank != self.rank {
                // SAFETY: opened by `map_arena`, closed once. Nothing depends on the status.
                unsafe { (self.functions.cuIpcCloseMemHandle)(arena) };
            }
        }
        if std::mem::take(&mut self.counters.address) != 0 {
            driver.unregister_host(self.counters.start.expose_provenance());
        }
    }
}

fn map(driver: &Driver, counters: &BarrierCounters<'_>) -> Result<MappedCounters, DeviceError> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel does not affect existing ones.
    let start = unsafe {
        let none = std::ptr::null_mut();
        rustix::mm::mmap(none, counters.bytes, rights, MapFlags::SHARED, counters.file, counters.at)
    };
    let start = start.map_err(|error| driver.failed("mapping the barrier counters", error.to_string()))?;
    Ok(MappedCounters { start, bytes: counters.bytes, address: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_parses_only_with_its_exact_length() {
        let mut bytes = vec![7; MEM_HANDLE];
        bytes.extend([1; size_of::<GpuUuid>()]);
        bytes.extend(4096u64.to_le_bytes());
        bytes.extend([9; TOKEN]);
        let peer = PeerHandle::parse(&bytes).unwrap();
        assert_eq!((peer.memory.0, peer.bytes, peer.token), ([7; MEM_HANDLE], 4096, [9; TOKEN]));
        assert_eq!(peer.gpu, [1; size_of::<GpuUuid>()]);
        assert!(PeerHandle::parse(&bytes[1..]).is_none());
        bytes.push(0);
        assert!(PeerHandle::parse(&bytes).is_none());
    }
}
