//! A card with its arenas, its queues and its marks.
#![allow(unsafe_code, reason = "copies between the host's memory and arenas")]

use std::ffi::c_int;

use super::cudnn::Fused;
use super::driver::{Address, Attribute, Driver, Handle};
use super::flash::is_hopper;
use super::graphs::Graphs;
use super::line::{Arenas, Line};
use super::peers::{Peers, card, not_on_cards, token};
use super::processors::Processors;
use super::products::Products;
use super::programs::Functions;
use super::{cudnn, ipc, nccl, run};
use zeroth_base::DType;
use zeroth_kernel::READBACKS;
use zeroth_kernel::{
    Device, DeviceError, Exchange, IpcHandles, Kernel, Launch, Queue, Span, Tier, Transport,
};

/// Pinned memory that uploads go through, so that they need not wait for one another: enough for the inputs of two steps, of
/// which one may still be waiting for its turn.
const SLOTS: usize = 24;
const SLOT_BYTES: usize = 4 << 20;
/// The most bytes of a note.
const NOTE_BYTES: usize = 1 << 20;

/// A card. Memory is taken when it is opened. At the first use of a shape more is taken: for the plan of a matrix product,
/// with what its trial takes for a moment where the card has it free, and for attention's machine code.
pub struct CudaDevice {
    driver: Driver,
    device: c_int,
    name: String,
    context: Handle,
    functions: Option<Functions>,
    products: Products,
    /// Attention by the library; `None` only while the device is opened.
    fused: Option<Fused>,
    arenas: Arenas,
    /// What the host's arena belongs to.
    processors: Option<Processors>,
    /// Lines of launches that the driver keeps, where it can.
    graphs: Option<Graphs>,
    /// By [`Queue`].
    streams: Vec<Handle>,
    marks: Vec<Handle>,
    /// First address; an event for each slot, recorded behind the copy that reads it.
    staging: Address,
    staged: Vec<Handle>,
    next_slot: usize,
    /// Events that note times: the first of all, then those in use, then spare ones.
    stamps: Vec<Handle>,
    stamped: usize,
    /// For each note its event and its bytes; notes lie behind the slots.
    notes: Vec<(Handle, usize)>,
    /// The other ranks, where it reaches them.
    peers: Option<Peers>,
}

impl CudaDevice {
    /// Opens card number `ordinal` of those that this process may use, with arenas of so many bytes.
    pub fn open(ordinal: usize, device_bytes: u64, host_bytes: u64) -> Result<Self, DeviceError> {
        Self::open_for(ordinal, device_bytes, host_bytes, arch)
    }

    /// As `open`, with kernels that leave out what only this generation of cards has: for tests of what others run.
    pub fn open_portable(ordinal: usize, device_bytes: u64, host_bytes: u64) -> Result<Self, DeviceError> {
        Self::open_for(ordinal, device_bytes, host_bytes, |major, minor| format!("sm_{major}{minor}"))
    }

    fn open_for(
        ordinal: usize,
        device_bytes: u64,
        host_bytes: u64,
        arch: fn(u32, u32) -> String,
    ) -> Result<Self, DeviceError> {
        let driver = Driver::open(ordinal)?;
        let device = driver.get(ordinal)?;
        let name = format!("{} (cuda:{ordinal})", driver.name(device)?);
        let context = driver.retain(device)?;
        // From here on, dropping it gives back what it has so far.
        let mut opened = Self {
            driver,
            device,
            name,
            context,
            functions: None,
            products: Products::default(),
            fused: None,
            arenas: Arenas::default(),
            processors: None,
            graphs: None,
            streams: Vec::new(),
            marks: Vec::new(),
            staging: 0,
            staged: Vec::new(),
            next_slot: 0,
            stamps: Vec::new(),
            stamped: 0,
            notes: Vec::new(),
            peers: None,
        };
        let driver = &opened.driver;
        let major = driver.attribute(device, Attribute::CapabilityMajor)?;
        let minor = driver.attribute(device, Attribute::CapabilityMinor)?;
        let arch = arch(major, minor);
        opened.functions = Some(Functions::load(driver, &arch)?);
        opened.fused = Some(Fused::new(is_hopper(&arch))?);
        opened.products.open()?;
        opened.graphs = Graphs::open()?;
        for _ in Queue::ALL {
            opened.streams.push(driver.stream()?);
        }
        opened.staging = driver.allocate_host((SLOTS * SLOT_BYTES + READBACKS * NOTE_BYTES) as u64)?;
        for _ in 0..READBACKS {
            opened.notes.push((driver.event()?, 0));
        }
        for _ in 0..SLOTS {
            opened.staged.push(driver.event()?);
        }
        if host_bytes > 0 {
            let (processors, address) = Processors::open(driver, host_bytes)?;
            opened.arenas.host = (address, host_bytes);
            opened.processors = Some(processors);
        }
        if device_bytes > 0 {
            opened.arenas.device = (driver.allocate(device_bytes)?, device_bytes);
        }
        Ok(opened)
    }

    /// Whether all products of matrices are our own kernel's from now on, and not the library's. Slower; it is what
    /// shapes get that the library has no algorithm for.
    pub fn own_products(&mut self, own: bool) {
        self.products.own = own;
    }

    /// Whether NVIDIA's library of attention is there, and what is wrong where it is not.
    pub fn has_attention_library(&self) -> Result<(), DeviceError> {
        self.current()?;
        cudnn::is_there()
    }

    /// Whether attention forward over sequences of one length is NVIDIA's library's wherever it can, from now on, or our own
    /// kernel's always; before, whoever is faster does it.
    pub fn attention_by_library(&mut self, library: bool) {
        if let Some(fused) = &mut self.fused {
            fused.by_library(library);
        }
    }

    /// Shapes whose attention forward the library has computed.
    pub fn attention_plans(&self) -> usize {
        self.fused.as_ref().map_or(0, Fused::plans)
    }

    /// The version of NVIDIA's library of collectives, where it is found.
    pub fn nccl_version() -> Result<String, DeviceError> {
        nccl::version()
    }

    /// The most bytes that it takes beside its arenas, for a moment, to try algorithms of products with. The first of the
    /// library's algorithms is taken without a trial; results are the same bits.
    pub fn spare(&mut self, bytes: u64) {
        self.products.spare = Some(bytes);
    }

    fn current(&self) -> Result<(), DeviceError> {
        self.driver.set_current(self.context)
    }

    /// The stream of a queue. Where ranks share a card, collectives are in the stream of kernels: a card turns to another
    /// process at once when the only stream at work waits, and two milliseconds later when one waits for another that waits.
    fn stream(&self, queue: Queue) -> Handle {
        let in_line = queue == Queue::Comm && self.peers.as_ref().is_some_and(Peers::share_a_card);
        self.streams[if in_line { Queue::Compute } else { queue } as usize]
    }

    fn marked(&self, mark: usize) -> Result<Handle, DeviceError> {
        self.marks.get(mark).copied().ok_or_else(|| DeviceError::Operands {
            what: "mark",
            problem: format!("mark {mark} of {}; `marks` says how many there are", self.marks.len()),
        })
    }
}

/// The name of an architecture, with all that is its own.
fn arch(major: u32, minor: u32) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

fn check_length(what: &'static str, host: usize, span: Span) -> Result<(), DeviceError> {
    if host as u64 == span.bytes {
        return Ok(());
    }
    let problem = format!("{host} bytes on the host's side and {span:?} on the device's");
    Err(DeviceError::Operands { what, problem })
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn scratch_bytes(&self, kernel: &Kernel, dtype: DType) -> u64 {
        crate::scratch_bytes(kernel, dtype)
    }

    fn enqueue(&mut self, queue: Queue, launch: &Launch) -> Result<(), DeviceError> {
        self.current()?;
        let stream = self.stream(queue);
        if let Some(processors) = self.processors.as_ref().filter(|_| Processors::take(launch)) {
            return processors.enqueue(&self.driver, &self.arenas, stream, launch);
        }
        let functions = self.functions.as_ref().expect("an open device has its functions");
        let mut line = Line::new(&self.driver, functions, self.arenas, stream, launch)?;
        let fused = self.fused.as_mut().expect("an open device knows who computes attention");
        run::run(&mut line, &mut self.products, fused, &launch.kernel)
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
        if !self.graphs.as_ref().is_some_and(|graphs| graphs.begin(stream)) {
            return Ok(None);
        }
        let mut outcome = Ok(());
        for launch in launches {
            outcome = outcome.and_then(|()| self.enqueue(queue, launch));
        }
        self.graphs.as_mut().map_or(Ok(None), |graphs| graphs.end(stream, outcome))
    }

    fn launch_graph(&mut self, queue: Queue, kept: usize) -> Result<(), DeviceError> {
        self.current()?;
        let code = self.graphs.as_ref().map_or(1, |graphs| graphs.launch(kept, self.stream(queue)));
        self.driver.check("cuGraphLaunch", code)
    }

    fn upload(&mut self, queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError> {
        self.current()?;
        check_length("upload", from.len(), to)?;
        let (mut at, stream) = (self.arenas.find("upload", to)?, self.stream(queue));
        if to.tier == Tier::Host {
            self.driver.synchronise(stream)?;
            // SAFETY: pinned memory of the host, within its arena and as long as `from`; the queue has come past all that
            // it holds.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at as *mut u8, from.len()) };
            return Ok(());
        }
        for piece in from.chunks(SLOT_BYTES) {
            let (slot, event) =
                (self.staging + (self.next_slot * SLOT_BYTES) as Address, self.staged[self.next_slot]);
            self.next_slot = (self.next_slot + 1) % SLOTS;
            self.driver.wait_for(event)?;
            // SAFETY: a slot is as long as the longest piece, and no copy reads it: its event is past.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), slot as *mut u8, piece.len());
                self.driver.copy(at, slot, piece.len() as u64, stream)?;
            }
            self.driver.record(event, stream)?;
            at += piece.len() as Address;
        }
        Ok(())
    }

    fn download(&mut self, queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError> {
        self.current()?;
        check_length("download", to.len(), from)?;
        let (at, stream) = (self.arenas.find("download", from)?, self.stream(queue));
        if from.tier == Tier::Device && !to.is_empty() {
            return self.driver.copy_to_host(to, at, stream);
        }
        self.driver.synchronise(stream)?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: pinned memory of the host, within its arena and as long as `to`; the queue has come past its writers.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn start_readback(&mut self, queue: Queue, from: Span, number: usize) -> Result<(), DeviceError> {
        self.current()?;
        let (at, stream) = (self.arenas.find("note", from)?, self.stream(queue));
        if number >= READBACKS || from.bytes > NOTE_BYTES as u64 {
            let problem =
                format!("note {number} of {} bytes; {READBACKS} of {NOTE_BYTES} can be", from.bytes);
            return Err(DeviceError::Operands { what: "note", problem });
        }
        let to = self.staging + (SLOTS * SLOT_BYTES + number * NOTE_BYTES) as Address;
        // SAFETY: the place of a note is as long as the longest, and lives as long as the device, which waits for its
        // streams before it gives memory back.
        unsafe { self.driver.copy(to, at, from.bytes, stream)? };
        self.notes[number].1 = from.bytes as usize;
        self.driver.record(self.notes[number].0, stream)
    }

    fn finish_readback(&mut self, number: usize) -> Result<&[u8], DeviceError> {
        self.current()?;
        let (event, bytes) = self.notes[number];
        self.driver.wait_for(event)?;
        self.processors.as_ref().map_or(Ok(()), Processors::outcome)?;
        let at = self.staging + (SLOTS * SLOT_BYTES + number * NOTE_BYTES) as Address;
        // SAFETY: the copy has ended; the next one to this place is enqueued by a call that borrows the device alone.
        Ok(unsafe { std::slice::from_raw_parts(at as *const u8, bytes) })
    }

    fn record_event(&mut self, queue: Queue, mark: usize) -> Result<(), DeviceError> {
        self.current()?;
        self.driver.record(self.marked(mark)?, self.stream(queue))
    }

    fn wait_event(&mut self, queue: Queue, mark: usize) -> Result<(), DeviceError> {
        self.current()?;
        self.driver.wait(self.stream(queue), self.marked(mark)?)
    }

    fn reserve_events(&mut self, count: usize) -> Result<(), DeviceError> {
        self.current()?;
        while self.marks.len() < count {
            self.marks.push(self.driver.event()?);
        }
        Ok(())
    }

    fn synchronise(&mut self) -> Result<(), DeviceError> {
        self.current()?;
        self.streams.iter().try_for_each(|&stream| self.driver.synchronise(stream))?;
        self.processors.as_ref().map_or(Ok(()), Processors::outcome)
    }

    fn record_timestamp(&mut self, queue: Queue) -> Result<(), DeviceError> {
        self.current()?;
        let stream = self.stream(queue);
        if self.stamps.is_empty() {
            self.stamps.push(self.driver.timed_event()?);
            self.driver.record(self.stamps[0], stream)?;
        }
        self.stamped += 1;
        if self.stamped == self.stamps.len() {
            self.stamps.push(self.driver.timed_event()?);
        }
        self.driver.record(self.stamps[self.stamped], stream)
    }

    fn take_timestamps(&mut self) -> Result<Vec<f64>, DeviceError> {
        self.synchronise()?;
        let stamped = std::mem::take(&mut self.stamped);
        let since =
            |event: &Handle| self.driver.elapsed(self.stamps[0], *event).map(|ms| 1e3 * f64::from(ms));
        self.stamps.iter().skip(1).take(stamped).map(since).collect()
    }

    fn direct(&mut self, _: Span, _: Span) -> Result<Option<(&[u8], &mut [u8])>, DeviceError> {
        Ok(None)
    }

    fn direct_mut(&mut self, _: Span) -> Result<Option<&mut [u8]>, DeviceError> {
        Ok(None)
    }

    fn capacity(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Device => self.arenas.device.1,
            Tier::Host => self.arenas.host.1,
        }
    }

    fn ipc_handle(&mut self, way: Transport, rank: usize) -> Result<Vec<u8>, DeviceError> {
        self.current()?;
        match way {
            Transport::Ipc => {
                let token = token();
                self.upload(Queue::Comm, &token, Span::device(0, token.len() as u64))?;
                self.driver.synchronise(self.stream(Queue::Comm))?;
                ipc::ipc_handle(&self.driver, self.device, self.arenas.device, token)
            }
            Transport::Nccl => nccl::ipc_handle(card(&self.driver, self.device)?, rank),
            Transport::Host => Err(not_on_cards()),
        }
    }

    fn open_ipc_handles(&mut self, doors: &IpcHandles<'_>) -> Result<(), DeviceError> {
        self.current()?;
        self.close_ipc_handles();
        let stream = self.stream(Queue::Comm);
        self.peers = Some(Peers::open(&self.driver, self.arenas.device, doors, stream)?);
        Ok(())
    }

    fn close_ipc_handles(&mut self) {
        if let Some(peers) = self.peers.take() {
            peers.close(&self.driver);
        }
    }

    fn exchange(
        &mut self,
        queue: Queue,
        exchange: &Exchange<'_>,
        points: [u32; 2],
    ) -> Result<(), DeviceError> {
        self.current()?;
        let closed = || DeviceError::Operands {
            what: exchange.name(),
            problem: "the other ranks' doors are not open".to_owned(),
        };
        let peers = self.peers.as_ref().ok_or_else(closed)?;
        peers.exchange(&self.driver, self.arenas, exchange, points, self.stream(queue))
    }

    fn abort(&self) -> Option<Box<dyn Fn() + Send>> {
        self.peers.as_ref().and_then(Peers::abort)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A device that failed cannot be told anything; what it holds goes with the process.
        if self.current().is_err() {
            return;
        }
        for &stream in &self.streams {
            let _ = self.driver.synchronise(stream);
        }
        self.close_ipc_handles();
        if let Some(graphs) = &mut self.graphs {
            graphs.close();
        }
        self.products.close();
        if let Some(fused) = &mut self.fused {
            fused.close();
        }
        let notes = self.notes.iter().map(|(event, _)| event);
        let events = self.staged.iter().chain(&self.marks).chain(&self.stamps).chain(notes);
        events.for_each(|&event| self.driver.destroy_event(event));
        self.streams.iter().for_each(|&stream| self.driver.destroy_stream(stream));
        if let Some(functions) = &self.functions {
            functions.unload(&self.driver);
        }
        if self.staging != 0 {
            self.driver.free_host(self.staging);
        }
        if let Some(processors) = &self.processors {
            processors.close(&self.driver);
        }
        if self.arenas.device.0 != 0 {
            self.driver.free(self.arenas.device.0);
        }
        self.driver.release(self.device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_cards_are_compiled_for_with_what_is_only_theirs() {
        assert_eq!(arch(8, 0), "sm_80");
        assert_eq!(arch(9, 0), "sm_90a");
        assert_eq!(arch(10, 0), "sm_100a");
    }

    #[test]
    fn a_card_that_is_not_there_is_an_error_that_says_so() {
        let error = CudaDevice::open(1 << 20, 1 << 20, 0).err().unwrap().to_string();
        assert!(
            error.contains("libcuda.so.1") || error.contains("are visible") || error.contains("cuInit"),
            "{error}"
        );
    }

    #[test]
    fn a_device_moves_to_the_thread_that_drives_it() {
        const fn sendable<T: Send>() {}
        const { sendable::<CudaDevice>() };
    }
}
