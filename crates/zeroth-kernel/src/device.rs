//! The [`Device`] trait: arenas, queues, and asynchronous kernels.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use zeroth_base::{Axis, DType};

use crate::{DeviceError, Exchange, IpcHandles, Kernel, Launch, PeerPlace, Span, Tier, Transport};

/// An in-order queue of a device (a CUDA stream). Work on different queues may run concurrently unless an event orders it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Compute kernels.
    Compute,
    /// Collectives.
    Comm,
    /// Copies from host to device memory.
    Upload,
    /// Copies from device to host memory.
    Download,
    /// Streamed optimizer state: copies to the device, and the update itself.
    Load,
    /// Streamed optimizer state: copies back to the host.
    Store,
}

impl Queue {
    /// All queues.
    pub const ALL: [Self; 6] =
        [Self::Compute, Self::Comm, Self::Upload, Self::Download, Self::Load, Self::Store];

    /// The queue of copies between two tiers.
    pub const fn of_copy(from: Tier, to: Tier) -> Self {
        match (from, to) {
            (Tier::Device, Tier::Device) | (Tier::Host, Tier::Host) => Self::Compute,
            (Tier::Device, Tier::Host) => Self::Download,
            (Tier::Host, Tier::Device) => Self::Upload,
        }
    }

    /// Its name in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Comm => "comm",
            Self::Upload => "upload",
            Self::Download => "download",
            Self::Load => "load",
            Self::Store => "store",
        }
    }
}

/// Bytes to read and bytes to write.
pub type ReadWrite<'a> = (&'a [u8], &'a mut [u8]);

/// Spans of a device arena that are backed by a shared file, so that peers can map them.
#[derive(Debug, Clone, Copy)]
pub struct Shared<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// File offset of the arena's first byte.
    pub at: u64,
    /// The spans that peers read.
    pub spans: &'a [Span],
}

/// A range of a peer's shared file, mapped read-only at an address after the device arena.
#[derive(Debug, Clone, Copy)]
pub struct PeerMapping<'a> {
    /// Where it is mapped.
    pub to: Span,
    /// The file.
    pub file: BorrowedFd<'a>,
    /// File offset of the range.
    pub at: u64,
}

/// A rank's share of the CPUs that the ranks of a machine have in common: part `number` of `of` equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuShare {
    /// The part, from 0.
    pub number: usize,
    /// Number of parts.
    pub of: usize,
}

/// A reduction over ranks, in rank order, that reads every rank's part in that rank's own memory.
#[derive(Clone, Copy)]
pub struct RankSum<'a> {
    /// The number of ranks.
    pub ranks: usize,
    /// This rank.
    pub rank: usize,
    /// This rank's part.
    pub own: Span,
    /// The part of another rank, as long as this rank's.
    pub other: &'a (dyn Fn(usize) -> &'a [u8] + Sync),
    /// The dtype of the parts.
    pub from_type: DType,
    /// The result.
    pub to: Span,
    /// The dtype of the result: sums are in f32 and rounded once.
    pub to_type: DType,
    /// Whether the old result is added.
    pub add: bool,
    /// A [`crate::ExactSum`] to which the squares of the result are added.
    pub squares: Option<Span>,
}

/// Readbacks that may be pending at the same time.
pub const READBACKS: usize = 2;

/// A device with its arenas. Methods may return before the work is done, except `download` and `synchronise`.
pub trait Device: Send {
    /// A description for messages.
    fn name(&self) -> String;

    /// Bytes of scratch of a kernel on this device.
    fn scratch_bytes(&self, kernel: &Kernel, dtype: DType) -> u64;

    /// Enqueues a kernel.
    fn enqueue(&mut self, queue: Queue, launch: &Launch) -> Result<(), DeviceError>;

    /// Enqueues a copy from host memory. `from` may be reused when this returns.
    fn upload(&mut self, queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError>;

    /// Copies to host memory after all work on the queue, and waits for it.
    fn download(&mut self, queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Enqueues an asynchronous readback into slot `number`, below [`READBACKS`].
    fn start_readback(&mut self, queue: Queue, from: Span, number: usize) -> Result<(), DeviceError>;

    /// Waits for the newest readback of a slot, and for nothing enqueued after it; returns its bytes.
    fn finish_readback(&mut self, number: usize) -> Result<&[u8], DeviceError>;

    /// Records event `event` at this point of a queue.
    fn record_event(&mut self, queue: Queue, event: usize) -> Result<(), DeviceError>;

    /// Makes later work on `queue` wait for the newest recording of `event`.
    fn wait_event(&mut self, queue: Queue, event: usize) -> Result<(), DeviceError>;

    /// Reserves events 0 to `count` - 1.
    fn reserve_events(&mut self, count: usize) -> Result<(), DeviceError>;

    /// Declares that all sequences of later micro-batches have this length and fill their rows; `None`: any lengths. A device may
    /// have a faster attention kernel for it. Captured graphs are not affected.
    fn equal_sequences(&mut self, _length: Option<usize>) {}

    /// Limits the temporary memory for tuning kernels on this device, where it does that. Results are bitwise equal without.
    fn limit_autotune_bytes(&mut self, _bytes: u64) {}

    /// Captures launches of one queue as a graph without running them, and returns its number; `None` where a device does not
    /// use graphs. Every launch has been enqueued before.
    fn capture_graph(
        &mut self,
        _queue: Queue,
        _launches: &mut dyn Iterator<Item = &Launch>,
    ) -> Result<Option<usize>, DeviceError> {
        Ok(None)
    }

    /// Enqueues a captured graph.
    fn launch_graph(&mut self, _queue: Queue, graph: usize) -> Result<(), DeviceError> {
        let problem = format!("this device has captured no graph {graph}");
        Err(DeviceError::Operands { what: "launch_graph", problem })
    }

    /// Waits until all queues are empty; returns the first error of their work.
    fn synchronise(&mut self) -> Result<(), DeviceError>;

    /// Two spans as host slices, to read and to write, where the host can address the arena. They must not overlap.
    fn direct(&mut self, read: Span, write: Span) -> Result<Option<ReadWrite<'_>>, DeviceError>;

    /// One span as a host slice, where the host can address the arena.
    fn direct_mut(&mut self, span: Span) -> Result<Option<&mut [u8]>, DeviceError>;

    /// Bytes of an arena.
    fn capacity(&self, tier: Tier) -> u64;

    /// Records a timestamp at this point of a queue. Synchronous devices record nothing: the host's clock is exact there.
    fn record_timestamp(&mut self, _queue: Queue) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Waits for the timestamps recorded since the last call and returns them, in microseconds since the first of all. Empty on
    /// synchronous devices.
    fn take_timestamps(&mut self) -> Result<Vec<f64>, DeviceError> {
        Ok(Vec::new())
    }

    /// Backs spans of the arena with a shared file, before first use. Returns false where the device's memory cannot be shared.
    fn share(&mut self, _shared: &Shared<'_>) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// Maps ranges of peers' shared files read-only at offsets from `at` on, after the arena, in `bytes` of address space.
    /// Returns false where they cannot be mapped: then the range is private memory.
    fn map_peers(
        &mut self,
        _at: u64,
        bytes: u64,
        _mappings: &[PeerMapping<'_>],
    ) -> Result<bool, DeviceError> {
        let problem = format!("this device cannot map {bytes} bytes of other ranks' memory");
        Err(DeviceError::Operands { what: "map_peers", problem })
    }

    /// Pins its threads to their CPUs, where `share` is given, and prefaults its arenas.
    fn pin_and_prefault(&mut self, _share: Option<CpuShare>) {}

    /// Enqueues a sum over ranks that reads peers' mapped memory. Only where [`Device::direct`] returns slices.
    fn sum_ranks(&mut self, _queue: Queue, _sum: &RankSum<'_>) -> Result<(), DeviceError> {
        let problem = "this device cannot read the memory of other ranks".to_owned();
        Err(DeviceError::Operands { what: "sum over ranks", problem })
    }

    /// The handle by which the devices along an axis reach this one. Called before first use of the arena,
    /// which it may write. A device holds at most one transport an axis.
    fn ipc_handle(
        &mut self,
        _axis: Axis,
        _transport: Transport,
        _place: PeerPlace,
    ) -> Result<Vec<u8>, DeviceError> {
        Err(no_ipc())
    }

    /// Opens the handles of all ranks along an axis; collective. [`Self::exchange`] works once all of them have returned.
    fn open_ipc_handles(&mut self, _axis: Axis, _handles: &IpcHandles<'_>) -> Result<(), DeviceError> {
        Err(no_ipc())
    }

    /// Closes the peers' handles along an axis, because a rank failed to open or to use them.
    fn close_ipc_handles(&mut self, _axis: Axis) {}

    /// Enqueues a collective among the devices along an axis; all of them enqueue theirs in the same order on the same queue.
    /// `points` are the next two values of the axis' barrier counters: peers may read this rank's spans once its counter reaches
    /// the first, and later work on the queue waits until all counters reach the second.
    fn exchange(
        &mut self,
        _axis: Axis,
        _queue: Queue,
        _exchange: &Exchange<'_>,
        _points: [u32; 2],
    ) -> Result<(), DeviceError> {
        Err(no_ipc())
    }

    /// Waits until a queue is empty, at most as long as `limit`. After an error the peers' handles can only be closed.
    fn synchronise_within(&mut self, _queue: Queue, _limit: Duration) -> Result<(), DeviceError> {
        self.synchronise()
    }

    /// Free bytes of the device's memory; `None` where they are not known.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// A function that ends waits for peers' devices, on all axes and from any thread, including those of handles that are opened
    /// later; `None` where no device waits. Devices that wait on the barrier counters are released by storing those.
    fn abort(&self) -> Option<Box<dyn Fn() + Send>> {
        None
    }
}

fn no_ipc() -> DeviceError {
    let problem = "this device does not exchange data with other ranks' devices".to_owned();
    DeviceError::Operands { what: "exchange", problem }
}
