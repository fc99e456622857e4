//! The interface that every device implements: arenas, queues, and kernels that are enqueued and never waited for.

use std::os::fd::BorrowedFd;

use zeroth_base::DType;

use crate::{Exchange, IpcHandles, Kernel, Launch, Span, Tier, Transport};

/// A line of work that a device does in order. Work of two queues may run at the same time; what must wait says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Kernels.
    Compute,
    /// Collectives.
    Comm,
    /// From the host's memory to the device's.
    Upload,
    /// From the device's memory to the host's.
    Download,
    /// Optimizer state that passes through the device: its way there, and the update itself.
    Load,
    /// And its way back.
    Store,
}

impl Queue {
    /// All queues.
    pub const ALL: [Self; 6] =
        [Self::Compute, Self::Comm, Self::Upload, Self::Download, Self::Load, Self::Store];

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

/// What goes wrong on a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An arena that cannot be had.
    #[error("{device}: {bytes} bytes of {tier} memory were asked for and not given: {reason}")]
    Memory {
        /// The device.
        device: String,
        /// Which arena.
        tier: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
    /// A thread that the system does not give.
    #[error(
        "cpu: thread {number} of {threads} could not be started: {reason}; use fewer with --threads-per-rank, or raise the \
         limit on processes (ulimit -u, pids.max of the control group)"
    )]
    Threads {
        /// Which one; the calling thread is the first.
        number: usize,
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// `ZEROTH_CPU` asks for what this machine has not.
    #[error("{0}")]
    Isa(String),
    /// A place outside of its arena, or two operands that overlap and must not.
    #[error("{what}: {problem}")]
    Operands {
        /// The kernel or the copy.
        what: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A library or a call of it that fails.
    #[error("{device}: {call} failed: {reason}")]
    Call {
        /// The device.
        device: String,
        /// What was called.
        call: String,
        /// What it said.
        reason: String,
    },
}

/// Bytes to read and bytes to write.
pub type ReadWrite<'a> = (&'a [u8], &'a mut [u8]);

/// A file's part that a device's arena is put into where other ranks read it.
#[derive(Debug, Clone, Copy)]
pub struct Shared<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Where in it the arena's first byte would lie.
    pub at: u64,
    /// The places of the device's arena that others read.
    pub spans: &'a [Span],
}

/// A part of a file, as it appears in a place behind a device's arena.
#[derive(Debug, Clone, Copy)]
pub struct PeerMapping<'a> {
    /// The place.
    pub to: Span,
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Where in it the part begins.
    pub at: u64,
}

/// Which of the processors that several ranks may use are a rank's: the `number`th of `of` equal parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuShare {
    /// Which part, from 0.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

/// A sum over ranks, in their order, of parts that lie in their own memory.
#[derive(Clone, Copy)]
pub struct RankSum<'a> {
    /// The number of ranks.
    pub ranks: usize,
    /// This rank.
    pub rank: usize,
    /// Its part.
    pub own: Span,
    /// The part of another rank, as long as its own.
    pub other: &'a (dyn Fn(usize) -> &'a [u8] + Sync),
    /// The type of all parts.
    pub from_type: DType,
    /// The sums.
    pub to: Span,
    /// Their type: what is added in f32 is rounded once.
    pub to_type: DType,
    /// Whether the sum is added to what is there.
    pub add: bool,
    /// A [`crate::ExactSum`] to which the squares of what `to` then holds are added, block by block.
    pub squares: Option<Span>,
}

/// Notes that a device keeps at the same time.
pub const READBACKS: usize = 2;

/// A device with its arenas. All functions but `synchronise` may return before the work is done.
pub trait Device: Send {
    /// What it is, in words.
    fn name(&self) -> String;

    /// Bytes of scratch that a kernel needs on this device.
    fn scratch_bytes(&self, kernel: &Kernel, dtype: DType) -> u64;

    /// Enqueues a kernel.
    fn enqueue(&mut self, queue: Queue, launch: &Launch) -> Result<(), DeviceError>;

    /// Enqueues a copy from host memory. The bytes are taken before this returns.
    fn upload(&mut self, queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError>;

    /// Copies to host memory, after all that the queue holds; the bytes are there when this returns.
    fn download(&mut self, queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError>;

    /// Enqueues a copy of some bytes that the host reads later, under a number below [`READBACKS`].
    fn start_readback(&mut self, queue: Queue, from: Span, number: usize) -> Result<(), DeviceError>;

    /// The bytes of the newest note of this number; waits for it, and for nothing behind it.
    fn finish_readback(&mut self, number: usize) -> Result<&[u8], DeviceError>;

    /// Marks this point of a queue with a number below the one given to `marks`.
    fn record_event(&mut self, queue: Queue, mark: usize) -> Result<(), DeviceError>;

    /// What is enqueued on `queue` from now on runs after the work before the newest `mark`.
    fn wait_event(&mut self, queue: Queue, mark: usize) -> Result<(), DeviceError>;

    /// How many marks will be used.
    fn reserve_events(&mut self, count: usize) -> Result<(), DeviceError>;

    /// All sequences of the micro-batches that are enqueued from now on have this length, and fill their rows; none: any
    /// lengths. A device may have a faster kernel for it. Lines that are kept stay what they were.
    fn equal_sequences(&mut self, _length: Option<usize>) {}

    /// Keeps a line of launches of one queue, which are not run now, and gives its number; none where a device has nothing
    /// to gain by it. Each of them has been enqueued before.
    fn capture_graph(
        &mut self,
        _queue: Queue,
        _launches: &mut dyn Iterator<Item = &Launch>,
    ) -> Result<Option<usize>, DeviceError> {
        Ok(None)
    }

    /// Enqueues a line that is kept.
    fn launch_graph(&mut self, _queue: Queue, kept: usize) -> Result<(), DeviceError> {
        let problem = format!("line {kept} is not kept here");
        Err(DeviceError::Operands { what: "replay", problem })
    }

    /// Waits until all queues are empty, and says what went wrong on the way.
    fn synchronise(&mut self) -> Result<(), DeviceError>;

    /// Two places as the host sees them, the first to read and the second to write, where the host can see the arena at
    /// all. They must not overlap.
    fn direct(&mut self, read: Span, write: Span) -> Result<Option<ReadWrite<'_>>, DeviceError>;

    /// One place as the host sees it.
    fn direct_mut(&mut self, span: Span) -> Result<Option<&mut [u8]>, DeviceError>;

    /// Bytes of an arena.
    fn capacity(&self, tier: Tier) -> u64;

    /// Notes the time at which a queue comes to this point; nothing where the host's clock says it, because the work is done
    /// when a launch returns.
    fn record_timestamp(&mut self, _queue: Queue) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The times noted since the last call, in the order of the notes, in microseconds since the first of all; none where
    /// the host's clock says them. Waits for them.
    fn take_timestamps(&mut self) -> Result<Vec<f64>, DeviceError> {
        Ok(Vec::new())
    }

    /// Puts places of the arena where other ranks can read them, before anything lies there. False where the device's
    /// memory cannot be there.
    fn share(&mut self, _shared: &Shared<'_>) -> Result<bool, DeviceError> {
        Ok(false)
    }

    /// Gives places from `at` on, behind the arena, `bytes` of addresses, in which the parts of files appear, to read. False
    /// where they cannot: then it is plain memory.
    fn map_peers(&mut self, _at: u64, bytes: u64, _sights: &[PeerMapping<'_>]) -> Result<bool, DeviceError> {
        let problem = format!("{bytes} bytes of other ranks' memory are not seen from this device");
        Err(DeviceError::Operands { what: "map_peers", problem })
    }

    /// Takes its processors, where it has some of its own, and all memory of its arenas: no launch waits for memory later.
    fn pin_and_prefault(&mut self, _share: Option<CpuShare>) {}

    /// Enqueues a sum over ranks that reads the others' memory. Only where [`Device::direct`] sees the arena.
    fn sum_ranks(&mut self, _queue: Queue, _sum: &RankSum<'_>) -> Result<(), DeviceError> {
        let problem = "the memory of other ranks is not seen from this device".to_owned();
        Err(DeviceError::Operands { what: "sum over ranks", problem })
    }

    /// What `rank` tells the others, so that their devices can reach this one. The arena holds nothing yet, and something
    /// may be written there.
    fn ipc_handle(&mut self, _way: Transport, _rank: usize) -> Result<Vec<u8>, DeviceError> {
        Err(no_ipc())
    }

    /// Reaches the devices of all ranks, all of whom call it. From when all have done so, [`Self::exchange`] works.
    fn open_ipc_handles(&mut self, _doors: &IpcHandles<'_>) -> Result<(), DeviceError> {
        Err(no_ipc())
    }

    /// Forgets the devices of the other ranks, because one of them could not reach all.
    fn close_ipc_handles(&mut self) {}

    /// Enqueues an exchange with the devices of the other ranks, who enqueue theirs in the same order on the same queue.
    /// `points` are the next two numbers of the words they meet at: the others may read this rank's places when it has
    /// come to the first, and what the queue does afterwards comes after all have come to the second.
    fn exchange(
        &mut self,
        _queue: Queue,
        _exchange: &Exchange<'_>,
        _points: [u32; 2],
    ) -> Result<(), DeviceError> {
        Err(no_ipc())
    }

    /// What ends all waiting for other ranks' devices, from any thread; none where writing to their words does.
    fn abort(&self) -> Option<Box<dyn Fn() + Send>> {
        None
    }
}

fn no_ipc() -> DeviceError {
    let problem = "this device does not meet other ranks' devices".to_owned();
    DeviceError::Operands { what: "exchange", problem }
}
