//! A GPU with its arenas, streams and events.
#![allow(unsafe_code, reason = "copies between host memory and arenas")]

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::arch::Arch;
use super::arenas::Arenas;
use super::cpu_optimizer::CpuOptimizer;
use super::cudnn::FusedAttention;
use super::driver::{Address, DeviceAttribute, Driver, Handle};
use super::gpu_kernel::Libraries;
use super::gpu_uuid::{GpuOfHost, gpu_uuid};
use super::graphs::Graphs;
use super::kernels::ENTRIES;
use super::launch_context::LaunchContext;
use super::loss::Loss;
use super::matmuls::Matmuls;
use super::modules::Modules;
use super::peers::{Peers, host_is_no_device_transport, token};
use super::{cudnn, gpu_kernel, ipc, nccl};
use zeroth_base::{Axis, DType};
use zeroth_kernel::{ByTier, READBACKS};
use zeroth_kernel::{
    Device, DeviceError, Exchange, IpcHandles, Kernel, Launch, PeerPlace, Queue, Span, Tier, Transport,
};

/// Pinned staging slots of uploads: enough for the inputs of two steps, one of which may still be queued.
const SLOTS: usize = 24;
const SLOT_BYTES: usize = 4 << 20;
/// The environment variable that keeps collectives in a stream of their own.
const COMM_STREAM: &str = "ZEROTH_GPU_COMM_STREAM";
/// The interval at which a stream is asked whether it is idle.
const LOOK: Duration = Duration::from_micros(100);
/// The time for released waits to end.
const RELEASE: Duration = Duration::from_secs(5);
/// Largest readback in bytes.
const READBACK_BYTES: usize = 1 << 20;

/// An NVIDIA GPU. Its arenas are allocated when it is opened. The first use of a shape allocates more: for the plan of a matmul,
/// temporarily for autotuning it if the GPU has free memory, and for the machine code of attention.
pub struct CudaDevice {
    driver: Driver,
    device: c_int,
    name: String,
    context: Handle,
    modules: Option<Modules>,
    matmuls: Matmuls,
    /// `None` only while the device is being opened.
    fused: Option<FusedAttention>,
    arenas: Arenas,
    /// Owner of the host arena.
    cpu_optimizer: Option<CpuOptimizer>,
    /// CUDA graphs, if supported and enabled.
    graphs: Option<Graphs>,
    /// By [`Queue`].
    streams: Vec<Handle>,
    events: Vec<Handle>,
    /// Address of the staging slots, followed by the readbacks.
    staging: Address,
    /// One event per slot, recorded after the copy that reads it.
    staged: Vec<Handle>,
    next_slot: usize,
    /// Timed events: the time origin, then those in use, then spare ones.
    timestamps: Vec<Handle>,
    timestamps_used: usize,
    /// Event and length of each readback.
    readbacks: Vec<(Handle, usize)>,
    /// Connections to the other ranks, by [`Axis`].
    peers: [Option<Peers>; Axis::ALL.len()],
    /// Declared from another thread: see [`Device::abort`].
    loss: Arc<Loss>,
    /// Whether collectives have a stream of their own where ranks share the GPU, too.
    own_comm_stream: bool,
}

impl CudaDevice {
    /// Opens the GPU number `ordinal` of those visible to this process, with arenas of the given sizes.
    pub fn open(ordinal: usize, arenas: ByTier<u64>) -> Result<Self, DeviceError> {
        Self::open_for(ordinal, arenas, Arch::of_gpu)
    }

    /// Opens a GPU like [`Self::open`], with kernels that avoid architecture-specific features: to test what other GPUs run.
    pub fn open_portable(ordinal: usize, arenas: ByTier<u64>) -> Result<Self, DeviceError> {
        Self::open_for(ordinal, arenas, |major, minor| Ok(Arch::portable(major, minor)))
    }

    fn open_for(
        ordinal: usize,
        arenas: ByTier<u64>,
        arch: fn(u32, u32) -> Result<Arch, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let driver = Driver::open(ordinal)?;
        let device = driver.get(ordinal)?;
        let name = format!("{} (cuda:{ordinal})", driver.name(device)?);
        let context = driver.retain(device)?;
        // From here on, dropping it releases what has been acquired so far.
        let mut opened = Self {
            driver,
            device,
            name,
            context,
            modules: None,
            matmuls: Matmuls::default(),
            fused: None,
            arenas: Arenas::default(),
            cpu_optimizer: None,
            graphs: None,
            streams: Vec::new(),
            events: Vec::new(),
            staging: 0,
            staged: Vec::new(),
            next_slot: 0,
            timestamps: Vec::new(),
            timestamps_used: 0,
            readbacks: Vec::new(),
            peers: [None, None],
            loss: Arc::default(),
            own_comm_stream: own_comm_stream()?,
        };
        let driver = &opened.driver;
        let major = driver.attribute(device, DeviceAttribute::ComputeCapabilityMajor)?;
        let minor = driver.attribute(device, DeviceAttribute::ComputeCapabilityMinor)?;
        let arch = arch(major, minor)?;
        let is_hopper = arch.is_hopper();
        let multiprocessors = driver.attribute(device, DeviceAttribute::MultiprocessorCount)?;
        opened.modules = Some(Modules::load(driver, arch, multiprocessors, ENTRIES)?);
        opened.fused = Some(FusedAttention::new(is_hopper)?);
        opened.matmuls.open()?;
        opened.graphs = Graphs::open()?;
        for _ in Queue::ALL {
            opened.streams.push(driver.stream()?);
        }
        opened.staging = driver.allocate_host((SLOTS * SLOT_BYTES + READBACKS * READBACK_BYTES) as u64)?;
        for _ in 0..READBACKS {
            opened.readbacks.push((driver.event()?, 0));
        }
        for _ in 0..SLOTS {
            opened.staged.push(driver.event()?);
        }
        for (tier, &bytes) in arenas.iter().filter(|(_, bytes)| **bytes > 0) {
            let address = match tier {
                Tier::Device => driver.allocate(bytes)?,
                Tier::Host => {
                    let (cpu_optimizer, address) = CpuOptimizer::open(driver, bytes)?;
                    opened.cpu_optimizer = Some(cpu_optimizer);
                    address
                }
            };
            opened.arenas.0[tier] = (address, bytes);
        }
        Ok(opened)
    }

    /// Runs all matmuls by our own fallback kernel instead of cuBLASLt, for tests.
    pub fn use_own_matmuls(&mut self, own: bool) {
        self.matmuls.own = own;
    }

    /// Checks that cuDNN is available.
    pub fn check_cudnn(&self) -> Result<(), DeviceError> {
        self.current()?;
        cudnn::is_there()
    }

    /// Forces attention forward over sequences of equal length to cuDNN, where supported, or to our own kernel. By default the
    /// faster one for the shape runs.
    pub fn use_cudnn_attention(&mut self, cudnn: bool) {
        if let Some(fused) = &mut self.fused {
            fused.force(cudnn);
        }
    }

    /// The number of shapes with a cuDNN plan.
    pub fn cudnn_plans(&self) -> usize {
        self.fused.as_ref().map_or(0, FusedAttention::plans)
    }

    /// The version of NCCL.
    pub fn nccl_version() -> Result<String, DeviceError> {
        nccl::version()
    }

    /// The time that NCCL took to abort, once it has after a rank was lost.
    pub fn abort_time(&self) -> Option<Duration> {
        self.loss.abort_time()
    }

    /// Returns the error for which exchanges have ended, if they have: what they wrote is undefined.
    fn check_peers(&self) -> Result<(), DeviceError> {
        self.peers.iter().flatten().find_map(Peers::failure).map_or(Ok(()), Err)
    }

    fn current(&self) -> Result<(), DeviceError> {
        self.driver.set_current(self.context)
    }

    /// The stream of a queue. If ranks share a GPU, collectives run on the compute stream: the GPU switches to another process at
    /// once when its only active stream waits, but takes two milliseconds when one waiting stream waits for another.
    fn stream(&self, queue: Queue) -> Handle {
        let shares_gpu = || self.peers.iter().flatten().any(Peers::share_gpu);
        let shares_compute = queue == Queue::Comm && !self.own_comm_stream && shares_gpu();
        self.streams[if shares_compute { Queue::Compute } else { queue } as usize]
    }

    fn event(&self, event: usize) -> Result<Handle, DeviceError> {
        self.events.get(event).copied().ok_or_else(|| DeviceError::Operands {
            what: "event",
            problem: format!("event {event} of {}; `reserve_events` sets their number", self.events.len()),
        })
    }
}

fn check_length(what: &'static str, host: usize, span: Span) -> Result<(), DeviceError> {
    if host as u64 == span.bytes {
        return Ok(());
    }
    let problem = format!("{host} bytes on the host and {span:?} on the device");
    Err(DeviceError::Operands { what, problem })
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn scratch_bytes(&self, kernel: &Kernel, dtype: DType) -> u64 {
        crate::scratch_bytes(kernel, dtype)
    }

    /// A matmul that is not autotuned uses cuBLASLt's first algorithm.
    fn limit_autotune_bytes(&mut self, bytes: u64) {
        self.matmuls.autotune_bytes = Some(bytes);
    }

    fn enqueue(&mut self, queue: Queue, launch: &Launch) -> Result<(), DeviceError> {
        self.current()?;
        let stream = self.stream(queue);
        if let Some(cpu) = self.cpu_optimizer.as_ref().filter(|_| CpuOptimizer::handles(launch)) {
            return cpu.enqueue(&self.driver, &self.arenas, stream, launch);
        }
        let modules = self.modules.as_ref().expect("set by `open`");
        let mut cx = LaunchContext::new(&self.driver, modules, self.arenas, stream, launch)?;
        let fused = self.fused.as_mut().expect("set by `open`");
        gpu_kernel::enqueue(&mut cx, &mut Libraries { matmuls: &mut self.matmuls, fused }, &launch.kernel)
    }

    fn equal_sequences(&mut self, length: Option<usize>) {
        if let Some(fused) = &mut self.fused {
            fused.length = length;
        }
    }

    fn capture_graph(
        &mut self,
        queue: Queue,
        launches: &mut dyn Iterator<Item = &Launch>,
    ) -> Result<Option<usize>, DeviceError> {
        self.current()?;
        let stream = self.stream(queue);
        if !self.graphs.as_ref().is_some_and(|graphs| graphs.begin_capture(stream)) {
            return Ok(None);
        }
        let mut outcome = Ok(());
        for launch in launches {
            outcome = outcome.and_then(|()| self.enqueue(queue, launch));
        }
        self.graphs.as_mut().map_or(Ok(None), |graphs| graphs.end_capture(stream, outcome))
    }

    fn launch_graph(&mut self, queue: Queue, graph: usize) -> Result<(), DeviceError> {
        self.current()?;
        let code = self.graphs.as_ref().map_or(1, |graphs| graphs.launch(graph, self.stream(queue)));
        self.driver.check("cuGraphLaunch", code)
    }

    fn upload(&mut self, queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError> {
        self.current()?;
        check_length("upload", from.len(), to)?;
        let (mut at, stream) = (self.arenas.find("upload", to)?, self.stream(queue));
        if to.tier == Tier::Host {
            self.driver.synchronise(stream)?;
            // SAFETY: pinned host memory within its arena, of the length of `from`; the stream is idle.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len()) };
            return Ok(());
        }
        for chunk in from.chunks(SLOT_BYTES) {
            let (slot, event) =
                (self.staging + (self.next_slot * SLOT_BYTES) as Address, self.staged[self.next_slot]);
            self.next_slot = (self.next_slot + 1) % SLOTS;
            self.driver.synchronise_event(event)?;
            // SAFETY: a chunk fits into a slot, and no copy reads the slot any more: its event has completed.
            unsafe {
                std::ptr::copy_nonoverlapping(chunk.as_ptr(), slot as *mut u8, chunk.len());
                self.driver.copy(at, slot, chunk.len() as u64, stream)?;
            }
            self.driver.record_event(event, stream)?;
            at += chunk.len() as Address;
        }
        Ok(())
    }

    fn download(&mut self, queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError> {
        self.current()?;
        check_length("download", to.len(), from)?;
        let (at, stream) = (self.arenas.find("download", from)?, self.stream(queue));
        if from.tier == Tier::Device && !to.is_empty() {
            self.driver.copy_to_host(to, at, stream)?;
            return self.check_peers();
        }
        self.driver.synchronise(stream)?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: pinned host memory within its arena, of the length of `to`; the stream is idle.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn start_readback(&mut self, queue: Queue, from: Span, number: usize) -> Result<(), DeviceError> {
        self.current()?;
        let (at, stream) = (self.arenas.find("readback", from)?, self.stream(queue));
        if number >= READBACKS || from.bytes > READBACK_BYTES as u64 {
            let problem = format!(
                "readback {number} of {} bytes; there are {READBACKS} of up to {READBACK_BYTES} bytes",
                from.bytes
            );
            return Err(DeviceError::Operands { what: "readback", problem });
        }
        let to = self.staging + (SLOTS * SLOT_BYTES + number * READBACK_BYTES) as Address;
        // SAFETY: the copy fits into its readback slot, which lives as long as the device; the device synchronizes its streams before
        // it frees memory.
        unsafe { self.driver.copy(to, at, from.bytes, stream)? };
        self.readbacks[number].1 = from.bytes as usize;
        self.driver.record_event(self.readbacks[number].0, stream)
    }

    fn finish_readback(&mut self, number: usize) -> Result<&[u8], DeviceError> {
        self.current()?;
        let (event, bytes) = self.readbacks[number];
        self.driver.synchronise_event(event)?;
        self.check_peers()?;
        self.cpu_optimizer.as_ref().map_or(Ok(()), CpuOptimizer::take_error)?;
        let at = self.staging + (SLOTS * SLOT_BYTES + number * READBACK_BYTES) as Address;
        // SAFETY: the copy has completed; the next copy to this slot needs `&mut self`, which the result borrows.
        Ok(unsafe { std::slice::from_raw_parts(at as *const u8, bytes) })
    }

    fn record_event(&mut self, queue: Queue, event: usize) -> Result<(), DeviceError> {
        self.current()?;
        self.driver.record_event(self.event(event)?, self.stream(queue))
    }

    fn wait_event(&mut self, queue: Queue, event: usize) -> Result<(), DeviceError> {
        self.current()?;
        self.driver.wait_event(self.stream(queue), self.event(event)?)
    }

    fn reserve_events(&mut self, count: usize) -> Result<(), DeviceError> {
        self.current()?;
        while self.events.len() < count {
            self.events.push(self.driver.event()?);
        }
        Ok(())
    }

    fn synchronise(&mut self) -> Result<(), DeviceError> {
        self.current()?;
        self.streams.iter().try_for_each(|&stream| self.driver.synchronise(stream))?;
        self.check_peers()?;
        self.cpu_optimizer.as_ref().map_or(Ok(()), CpuOptimizer::take_error)
    }

    fn record_timestamp(&mut self, queue: Queue) -> Result<(), DeviceError> {
        self.current()?;
        let stream = self.stream(queue);
        if self.timestamps.is_empty() {
            self.timestamps.push(self.driver.timed_event()?);
            self.driver.record_event(self.timestamps[0], stream)?;
        }
        self.timestamps_used += 1;
        if self.timestamps_used == self.timestamps.len() {
            self.timestamps.push(self.driver.timed_event()?);
        }
        self.driver.record_event(self.timestamps[self.timestamps_used], stream)
    }

    fn take_timestamps(&mut self) -> Result<Vec<f64>, DeviceError> {
        self.synchronise()?;
        let used = std::mem::take(&mut self.timestamps_used);
        let since =
            |event: &Handle| self.driver.elapsed(self.timestamps[0], *event).map(|ms| 1e3 * f64::from(ms));
        self.timestamps.iter().skip(1).take(used).map(since).collect()
    }

    fn direct(&mut self, _: Span, _: Span) -> Result<Option<(&[u8], &mut [u8])>, DeviceError> {
        Ok(None)
    }

    fn direct_mut(&mut self, _: Span) -> Result<Option<&mut [u8]>, DeviceError> {
        Ok(None)
    }

    fn capacity(&self, tier: Tier) -> u64 {
        self.arenas.0[tier].1
    }

    fn ipc_handle(
        &mut self,
        _axis: Axis,
        transport: Transport,
        place: PeerPlace,
    ) -> Result<Vec<u8>, DeviceError> {
        self.current()?;
        match transport {
            Transport::Ipc => {
                let token = token();
                self.upload(Queue::Comm, &token, Span::device(0, token.len() as u64))?;
                self.driver.synchronise(self.stream(Queue::Comm))?;
                ipc::ipc_handle(&self.driver, self.device, self.arenas.0[Tier::Device], token)
            }
            Transport::Nccl => nccl::ipc_handle(GpuOfHost::here(gpu_uuid(&self.driver, self.device)?), place),
            Transport::Host => Err(host_is_no_device_transport()),
        }
    }

    fn open_ipc_handles(&mut self, axis: Axis, handles: &IpcHandles<'_>) -> Result<(), DeviceError> {
        self.current()?;
        self.close_ipc_handles(axis);
        let stream = self.stream(Queue::Comm);
        let gpu = (&self.driver, self.context);
        let peers = Peers::open(gpu, self.arenas.0[Tier::Device], handles, stream, &self.loss)?;
        self.peers[axis as usize] = Some(peers);
        Ok(())
    }

    fn close_ipc_handles(&mut self, axis: Axis) {
        if let Some(peers) = self.peers[axis as usize].take() {
            peers.close(&self.driver);
        }
    }

    fn exchange(
        &mut self,
        axis: Axis,
        queue: Queue,
        exchange: &Exchange<'_>,
        points: [u32; 2],
    ) -> Result<(), DeviceError> {
        self.current()?;
        let closed = || DeviceError::Operands {
            what: exchange.name(),
            problem: format!("the handles of the peers along the {axis} are not open"),
        };
        let peers = self.peers[axis as usize].as_ref().ok_or_else(closed)?;
        peers.exchange(&self.driver, self.arenas, exchange, points, self.stream(queue))
    }

    fn synchronise_within(&mut self, queue: Queue, limit: Duration) -> Result<(), DeviceError> {
        self.current()?;
        let stream = self.stream(queue);
        let is_idle_within = |limit: Duration| -> Result<bool, DeviceError> {
            let begun = Instant::now();
            while !self.driver.is_idle(stream)? {
                if begun.elapsed() > limit {
                    return Ok(false);
                }
                std::thread::sleep(LOOK);
            }
            Ok(true)
        };
        if !is_idle_within(limit)? {
            self.peers.iter().flatten().for_each(Peers::release);
            // What the stream waits on may be unmapped after this.
            is_idle_within(RELEASE)?;
            let reason = format!("the queue is not idle after {} s", limit.as_secs());
            return Err(self.driver.failed("waiting for the devices of other ranks", reason));
        }
        self.check_peers()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.current().and_then(|()| self.driver.free_bytes()).ok()
    }

    fn abort(&self) -> Option<Box<dyn Fn() + Send>> {
        let loss = Arc::clone(&self.loss);
        Some(Box::new(move || loss.declare()))
    }
}

/// Reads [`COMM_STREAM`].
fn own_comm_stream() -> Result<bool, DeviceError> {
    let Some(value) = std::env::var_os(COMM_STREAM).filter(|value| !value.is_empty()) else {
        return Ok(false);
    };
    if value.eq_ignore_ascii_case("own") {
        return Ok(true);
    }
    Err(DeviceError::Call {
        device: "cuda".to_owned(),
        call: format!("reading {COMM_STREAM}"),
        reason: format!("it is `{}`; write own, or unset it", value.display()),
    })
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A failed device accepts no calls; its resources are released with the process.
        if self.current().is_err() {
            return;
        }
        for &stream in &self.streams {
            let _ = self.driver.synchronise(stream);
        }
        for axis in Axis::ALL {
            self.close_ipc_handles(axis);
        }
        if let Some(graphs) = &mut self.graphs {
            graphs.close();
        }
        self.matmuls.close();
        if let Some(fused) = &mut self.fused {
            fused.close();
        }
        let readbacks = self.readbacks.iter().map(|(event, _)| event);
        let events = self.staged.iter().chain(&self.events).chain(&self.timestamps).chain(readbacks);
        events.for_each(|&event| self.driver.destroy_event(event));
        self.streams.iter().for_each(|&stream| self.driver.destroy_stream(stream));
        if let Some(modules) = &self.modules {
            modules.unload(&self.driver);
        }
        if self.staging != 0 {
            self.driver.free_host(self.staging);
        }
        if let Some(cpu_optimizer) = &self.cpu_optimizer {
            cpu_optimizer.close(&self.driver);
        }
        if self.arenas.0[Tier::Device].0 != 0 {
            self.driver.free(self.arenas.0[Tier::Device].0);
        }
        self.driver.release(self.device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_gpu_is_an_error() {
        let error = CudaDevice::open(1 << 20, ByTier::on_device(1 << 20)).err().unwrap().to_string();
        assert!(
            error.contains("libcuda.so.1") || error.contains("are visible") || error.contains("cuInit"),
            "{error}"
        );
    }

    #[test]
    fn a_device_is_send() {
        const fn sendable<T: Send>() {}
        const { sendable::<CudaDevice>() };
    }
}
