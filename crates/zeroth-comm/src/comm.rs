//! What ranks need of each other, as traits. A transport implements [`Comm`] and what a [`Comm`] hands out; all code
//! outside of this crate is written against these traits.
//!
//! | trait | as in | what it does |
//! |---|---|---|
//! | [`Comm`] | an MPI communicator | collectives: moves bytes between ranks |
//! | [`PendingTransfer`] | an MPI request | completes a collective that was started |
//! | [`SharedWindows`] | MPI's shared-memory windows | memory that peers read in place |
//! | [`DeviceBarrier`] | NCCL's stream order | a barrier between devices, without their hosts |
//! | [`Liveness`] | NCCL's asynchronous errors | tells of a rank that is lost while no host waits for it |
//! | [`JobControl`] | a torchrun agent | first step, requests to stop and save, progress |
//! | [`RankObserver`] | | what ranks publish about themselves |
//!
//! [`crate::local`] implements them over shared memory, for ranks of one machine.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use zeroth_base::Axis;

use crate::error::CommError;
use crate::op_name::{LastOp, OpName};
use crate::process::ProcessState;
use crate::progress::RankPhase;
use crate::transfer::Transfer;

/// A communicator: one rank's connection to the others.
///
/// All ranks start the same collectives in the same order. Sizes are known to all ranks beforehand. [`Transfer`] defines
/// what each call moves.
pub trait Comm: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// Starts a collective. `all_gather`, `gather` and `barrier` are shorthands.
    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError>;

    /// Windows of memory that peers map read-only; `None` where they cannot.
    fn windows(&self) -> Option<&dyn SharedWindows> {
        None
    }

    /// The device barrier of these ranks; `None` where there is none. Called once per rank.
    fn device_barrier(&self) -> Option<Box<dyn DeviceBarrier>> {
        None
    }

    /// The communicators along the axes of the mesh; `None` where all ranks are one group.
    fn mesh(&self) -> Option<MeshAxes<'_>> {
        None
    }

    /// The ranks of this rank's machine; `None` where all are.
    fn of_machine(&self) -> Option<&dyn Comm> {
        None
    }

    /// Leaves the job with all other ranks, after the last collective. Once it returns, a process that ends is no loss. Without it
    /// a rank leaves where it is dropped.
    fn leave(&self, _op: OpName) -> Result<(), CommError> {
        Ok(())
    }

    /// This rank's end of the control plane. It outlives the rank's membership.
    fn control(&self) -> Box<dyn JobControl>;

    /// Every rank's part to every rank: [`Transfer::AllGather`].
    fn all_gather<'a>(
        &'a self,
        op: OpName,
        send: &'a [u8],
        recv: &'a mut [u8],
        counts: &'a [usize],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::AllGather { send, recv, counts })
    }

    /// Every rank's part to `root`: [`Transfer::Gather`].
    fn gather<'a>(
        &'a self,
        op: OpName,
        root: usize,
        send: &'a [u8],
        recv: &'a mut [u8],
        counts: &'a [usize],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::Gather { root, send, recv, counts })
    }

    /// Returns once all ranks have entered.
    fn barrier(&self, op: OpName) -> Result<Handle<'_>, CommError> {
        self.start(op, Transfer::Barrier)
    }

    /// All-gathers a text of any length from every rank, in rank order.
    fn gather_texts(&self, op: OpName, own: &str) -> Result<Vec<String>, CommError> {
        let mut lengths = vec![0; 8 * self.world()];
        let length = (own.len() as u64).to_le_bytes();
        self.all_gather(op, &length, &mut lengths, &vec![8; self.world()])?.wait()?;
        let counts: Vec<usize> =
            lengths.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize).collect();
        let mut texts = vec![0; counts.iter().sum()];
        self.all_gather(op, own.as_bytes(), &mut texts, &counts)?.wait()?;
        let mut rest = texts.as_slice();
        let texts = counts.iter().map(|count| {
            let text;
            (text, rest) = rest.split_at(*count);
            String::from_utf8_lossy(text).into_owned()
        });
        Ok(texts.collect())
    }
}

/// A rank's communicators in a mesh of several groups.
#[derive(Clone, Copy)]
pub struct MeshAxes<'a> {
    /// The ranks of its group. Its rank there is its place.
    pub group: &'a dyn Comm,
    /// The ranks with the same place. Its rank there is its group's number.
    pub rail: &'a dyn Comm,
}

impl<'a> MeshAxes<'a> {
    /// The communicator along an axis.
    pub fn along(self, axis: Axis) -> &'a dyn Comm {
        match axis {
            Axis::Group => self.group,
            Axis::Rail => self.rail,
        }
    }
}

/// The completion side of a [`Comm`], called by [`Handle`].
pub trait PendingTransfer {
    /// Completes the collective that `start` gave `ticket`.
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError>;

    /// The handle was dropped without waiting: this rank will not complete the collective, and the other ranks are
    /// notified.
    fn abandon(&self, op: OpName);
}

/// A collective in progress. Its buffers are borrowed until it is waited for.
///
/// Handles are waited for in call order. Dropping one without waiting aborts the job: every rank's next call or wait
/// fails with an error that names this rank.
#[must_use = "a collective is complete only after `wait`"]
pub struct Handle<'a> {
    comm: &'a dyn PendingTransfer,
    ticket: u64,
    op: OpName,
    transfer: Transfer<'a>,
    waited: bool,
}

impl<'a> Handle<'a> {
    /// For implementations of [`Comm`]: a collective that `comm` has started.
    pub fn new(comm: &'a dyn PendingTransfer, ticket: u64, op: OpName, transfer: Transfer<'a>) -> Self {
        Self { comm, ticket, op, transfer, waited: false }
    }

    /// Waits until this rank's part is done: `send` may be modified and `recv` is complete.
    ///
    /// Fails with [`CommError::RankLost`] when a rank it needs is dead or stopped; it never hangs silently.
    pub fn wait(mut self) -> Result<(), CommError> {
        self.waited = true;
        self.comm.finish(self.ticket, self.op, &mut self.transfer)
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if !self.waited {
            self.comm.abandon(self.op);
        }
    }
}

/// Memory of each rank that its peers map read-only, so that a collective is a single pass.
///
/// The rank maps parts of its window over the spans of its arena that peers read and writes there as usual. A read has
/// three phases: all ranks have arrived, so their data is complete; each reads what it needs; all have read, so
/// everyone may write again.
pub trait SharedWindows {
    /// The file of this rank's window and its offset. Memory is taken on first touch.
    fn own(&self) -> (BorrowedFd<'_>, u64);

    /// The file of a rank's window and its offset, to map pages of it once windows are open.
    fn of(&self, rank: usize) -> (BorrowedFd<'_>, u64);

    /// Opens windows of `bytes`. Every rank calls it once and tells whether its own window is `ready`, that is, mapped.
    /// Returns true if all are ready and mapped by everyone.
    fn open(&self, op: OpName, bytes: usize, ready: bool) -> Result<bool, CommError>;

    /// Synchronises, and calls `visit` with the bytes `from[s]` of every other rank s's window. All ranks call it with
    /// the same `op`.
    ///
    /// From call to return no rank writes to the parts of its window that others read, `visit` included. When it
    /// returns, everyone has read.
    fn read(
        &self,
        op: OpName,
        from: &[Range<usize>],
        visit: &mut dyn FnMut(&PeerSlices<'_>),
    ) -> Result<(), CommError>;
}

/// The peers' bytes during a read.
#[derive(Clone, Copy)]
pub struct PeerSlices<'a>(&'a (dyn Fn(usize) -> &'a [u8] + Sync));

impl<'a> PeerSlices<'a> {
    /// For implementations of [`SharedWindows`]: `of` returns the bytes of a rank; none of the reader itself.
    pub fn new(of: &'a (dyn Fn(usize) -> &'a [u8] + Sync)) -> Self {
        Self(of)
    }

    /// The bytes of a rank; empty for the reader itself.
    pub fn of(&self, rank: usize) -> &'a [u8] {
        (self.0)(rank)
    }
}

/// Called from another thread, repeatedly, once a rank is lost: see [`Liveness::on_lost`].
pub type OnLost = Box<dyn Fn(&CommError) + Send>;

/// Tells of a rank that is lost while this rank's host waits for a device and not for a collective.
pub trait Liveness: Send {
    /// Returns the error that ended the job, if one did: results of the device are then undefined.
    fn check(&self, op: OpName) -> Result<(), CommError>;

    /// For devices that do not wait on the counters: another thread calls `abort`, repeatedly, once a rank is lost, with
    /// the error that ended the job. While it is set, ranks are watched at all times. `None`: devices wait on the
    /// counters.
    fn on_lost(&self, abort: Option<OnLost>);
}

/// One rank's end of a barrier between the ranks' devices. Drop it only after the device has passed all enqueued
/// collectives.
///
/// Every rank has a counter that only its device increments, in stream order, and that all devices read. Collective `n`
/// (from 1) has two points, `2n − 1` and `2n`:
///
/// - A device that reaches the collective stores `2n − 1`: its memory is ready to be read by peers. It waits until all
///   counters have reached `2n − 1`, and reads.
/// - After reading it stores `2n`, and waits until all counters have reached `2n`: no peer reads its memory any more, and
///   later work may overwrite it.
///
/// Counters are therefore at most one collective apart, and 32-bit wrapping comparison is sufficient. If a rank is lost,
/// counters are stored that release every waiting device. Results computed after that are undefined, so callers that
/// wait for a device must call [`Liveness::check`] afterwards.
pub trait DeviceBarrier: Liveness {
    /// The counters of all ranks; `None` where the ranks share no memory: devices then synchronize by their transport.
    fn counters(&self) -> Option<DeviceCounters<'_>>;

    /// The two points of the next collective, which the host assigns when it enqueues it, long before the device reaches
    /// it. All ranks must enqueue it under the same name.
    fn next(&self, op: OpName) -> Result<[u32; 2], CommError>;
}

/// Where the counters of a [`DeviceBarrier`] are.
#[derive(Debug, Clone, Copy)]
pub struct DeviceCounters<'a> {
    /// The file that holds them.
    pub file: BorrowedFd<'a>,
    /// The page-aligned offset of their pages.
    pub at: u64,
    /// The length of their pages.
    pub bytes: usize,
    /// Where on these pages the first one is.
    pub first: usize,
    /// Bytes between the counters of two ranks; a counter is the first four of them.
    pub stride: usize,
}

/// A rank's end of the control plane: what the ranks and the launcher of a job tell each other outside of collectives.
pub trait JobControl: Send + Sync {
    /// Begins the first step. False if the job was stopped before: then no step may run.
    ///
    /// Either a rank begins the first step or the job is stopped, whichever comes first: this is decided once for all
    /// ranks, so no rank runs a step that its launcher believes never began.
    fn begin_first_step(&self) -> bool;

    /// Stops the job. False if a rank has begun the first step: then there is something to save.
    fn stop_before_first_step(&self) -> bool;

    /// Whether the launcher asks all ranks to stop. Ranks poll it between steps.
    fn is_stop_requested(&self) -> bool;

    /// How often the launcher has asked for a save, modulo 2³².
    fn save_requests(&self) -> u32;

    /// Publishes a phase, and the last completed step if it is given.
    fn publish_progress(&self, phase: RankPhase, step: Option<u64>);

    /// An observer of all ranks of the job.
    fn observer(&self) -> Box<dyn RankObserver>;
}

/// Reads what ranks publish about themselves, from any thread or process. Ranks do nothing for it.
pub trait RankObserver: Send {
    /// The number of ranks.
    fn world(&self) -> usize;

    /// Looks at a rank; `rank` is below [`Self::world`].
    fn look(&self, rank: usize) -> RankObservation;
}

/// What is known about a rank at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct RankObservation {
    /// Process id and its start time in clock ticks since boot, once it has joined.
    pub process: Option<(u32, u64)>,
    /// The state of that process.
    pub state: ProcessState,
    /// Whether it has left the job.
    pub left: bool,
    /// A counter that moves while it lives.
    pub heartbeat: u64,
    pub phase: RankPhase,
    /// Its last completed step.
    pub step: u64,
    /// Its current or last collective.
    pub last: Option<LastOp>,
    /// The name of its host, in a job on several hosts.
    pub host: Option<String>,
    /// Bytes of memory that its process occupies, as its host has reported them; `None` where the observer can read them.
    pub resident: Option<u64>,
}
