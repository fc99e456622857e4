//! Ranks on one machine over a shared-memory segment: processes, or threads that each map it.

mod collectives;
mod windows;

use std::cell::{Cell, OnceCell};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;

use rustix::io::FdFlags;

use crate::comm::{Comm, Finish, Handle, Transfer};
use crate::device_barrier::DeviceBarrier;
use crate::error::{CommError, JoinError, LostReason, RankLost};
use crate::first_step::{self, FirstStep};
use crate::heartbeat::{Heartbeat, Process};
use crate::job_requests::JobRequests;
use crate::observer::RankObserver;
use crate::op_name::LastOp;
use crate::op_name::OpName;
use crate::peer_monitor::{PeerMonitor, SlowRank, Timing};
use crate::progress::{ProgressCell, ProgressPlace};
use crate::rank_slot::{FREE, LEFT};
use crate::segment::{Segment, SegmentLayout, Token};
use crate::shm_channel::{OnSlow, ShmChannel, describe};
use crate::wait;
use crate::windows::{MappedWindow, Windows};

/// Environment variable: this process's rank.
pub const RANK: &str = "ZEROTH_RANK";
/// Environment variable: the number of ranks.
pub const WORLD: &str = "ZEROTH_WORLD";
/// Environment variable: the descriptor number of the job's segment.
pub const JOB_FD: &str = "ZEROTH_JOB_FD";
/// Environment variable: the job's token.
pub const JOB_TOKEN: &str = "ZEROTH_JOB_TOKEN";

/// Options of a rank.
#[derive(Clone)]
pub struct Options {
    threads: usize,
    timing: Timing,
    on_slow: Option<Arc<OnSlow>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads: 1, timing: Timing::default(), on_slow: None }
    }
}

impl Options {
    /// Compute threads per rank. Waits spin only where ranks × threads fit the CPUs.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// Sets the timeouts.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Called on the waiting thread when a live rank has been waited for long.
    #[must_use]
    pub fn on_slow(mut self, warn: impl Fn(&SlowRank) + Send + Sync + 'static) -> Self {
        self.on_slow = Some(Arc::new(warn));
        self
    }
}

/// The state of a rank in the job's segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankStatus {
    /// Its process id, once it has joined.
    pub pid: Option<u32>,
    /// Whether it has left.
    pub left: bool,
    /// Its current or last collective.
    pub last: Option<LastOp>,
}

/// A job on this machine, created by the launcher and held while it starts ranks.
pub struct Job {
    file: OwnedFd,
    segment: Arc<Segment>,
    token: Token,
}

impl Job {
    /// Creates a job of `world` ranks, each with a region of `region` bytes that peers read.
    ///
    /// A larger region moves large messages in fewer rounds; memory is only taken as it is used. There is always room
    /// for 64 bytes from each rank to each other.
    pub fn create(world: usize, region: usize) -> Result<Self, JoinError> {
        let layout = SegmentLayout::new(world, region)?;
        let token = Token::random()?;
        let (file, segment) = Segment::create(layout, token)?;
        Ok(Self { file, segment: Arc::new(segment), token })
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.segment.layout.world
    }

    /// The token that ranks join with.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The segment's descriptor, closed on exec; the launcher passes it to its ranks.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Joins as `rank` from this process, for ranks that are threads.
    pub fn join(&self, rank: usize, options: &Options) -> Result<LocalComm, JoinError> {
        join(self.fd(), self.token, rank, options)
    }

    /// An observer of its ranks, which may outlive this value.
    pub fn observer(&self) -> RankObserver {
        RankObserver::of(Arc::clone(&self.segment))
    }

    /// What is asked of its ranks.
    pub fn requests(&self) -> JobRequests {
        JobRequests(Arc::clone(&self.segment))
    }

    /// The state of a rank.
    pub fn status(&self, rank: usize) -> Result<RankStatus, JoinError> {
        if rank >= self.world() {
            return Err(JoinError::Rank { rank, world: self.world() });
        }
        let slot = self.segment.slot(rank);
        let state = slot.state();
        let pid = (state != FREE).then(|| slot.process().0);
        Ok(RankStatus { pid, left: state == LEFT, last: slot.last_op() })
    }

    /// Ends the job for all ranks because `rank` is lost. Only the first such call counts.
    pub(crate) fn end(&self, rank: usize, reason: LostReason) {
        self.segment.end(rank, reason);
    }

    /// Stops the job unless a rank has begun the first step; see [`FirstStep::stop`].
    pub(crate) fn stop_before_first_step(&self) -> bool {
        first_step::stop(&self.segment)
    }

    /// The rank that ended the job, if one did.
    pub fn lost(&self) -> Option<RankLost> {
        let (rank, reason) = self.segment.ended()?;
        Some(describe(&self.segment, rank, reason))
    }
}

/// Joins the job whose segment is `file`. The descriptor may be closed afterwards.
pub fn join(
    file: BorrowedFd<'_>,
    token: Token,
    rank: usize,
    options: &Options,
) -> Result<LocalComm, JoinError> {
    take_part(Segment::open(file, token)?, rank, options)
}

fn take_part(segment: Segment, rank: usize, options: &Options) -> Result<LocalComm, JoinError> {
    let segment = Arc::new(segment);
    let world = segment.layout.world;
    if rank >= world {
        return Err(JoinError::Rank { rank, world });
    }
    let (pid, started) = Process::own()?;
    segment.slot(rank).take(pid, started).map_err(|pid| JoinError::Taken { rank, pid })?;
    let heartbeat = Heartbeat::start(Arc::clone(&segment), rank, options.timing.heartbeat)?;
    let channel = ShmChannel::new(
        Arc::clone(&segment),
        rank,
        wait::spins(world, options.threads),
        PeerMonitor::new(rank, world, options.timing),
        options.on_slow.clone(),
    );
    let layout = segment.layout;
    Ok(LocalComm {
        segment,
        options: options.clone(),
        windows: OnceCell::new(),
        channel,
        layout,
        rank,
        started: Cell::new(0),
        finished: Cell::new(0),
        _heartbeat: heartbeat,
    })
}

/// Joins the job of the launcher that started this process; `Ok(None)` where there is none.
pub fn join_from_environment(options: &Options) -> Result<Option<LocalComm>, JoinError> {
    if std::env::var_os(JOB_FD).is_none() {
        return Ok(None);
    }
    let number: i32 = variable(JOB_FD, "is not the number of a descriptor")?;
    let token = variable::<Token>(JOB_TOKEN, "is not a job token of 32 hexadecimal digits")?;
    let rank = variable(RANK, "is not a rank")?;
    let world: usize = variable(WORLD, "is not a number of ranks")?;
    let closed = |problem: &str| JoinError::Environment { name: JOB_FD, problem: problem.to_owned() };
    if number < 0 {
        return Err(closed("is not the number of a descriptor"));
    }
    #[allow(unsafe_code, reason = "a descriptor that comes as a number")]
    // SAFETY: the number is not −1, and the descriptor stays open: it was inherited, and nothing in this process
    // knows it as its own to close. The first use finds out whether it is open at all.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    // Children of this process are not ranks and must not keep the segment alive.
    rustix::io::fcntl_setfd(file, FdFlags::CLOEXEC)
        .map_err(|_| closed("names a descriptor that is not open"))?;
    let segment = Segment::open(file, token)?;
    if segment.layout.world != world {
        let problem = format!("is {world}, but the job has {} rank(s)", segment.layout.world);
        return Err(JoinError::Environment { name: WORLD, problem });
    }
    take_part(segment, rank, options).map(Some)
}

fn variable<T: FromStr>(name: &'static str, problem: &'static str) -> Result<T, JoinError> {
    let wrong = |problem: &str| JoinError::Environment { name, problem: problem.to_owned() };
    let value: OsString = std::env::var_os(name).ok_or_else(|| wrong("is not set"))?;
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong(problem))
}

/// One rank of a local job. Dropping it leaves the job; drop it before the process exits.
///
/// Bytes move on the calling thread: a call publishes its first piece if the region is free, and `wait` does the rest.
/// After an error the job has ended, and every call returns that error.
pub struct LocalComm {
    segment: Arc<Segment>,
    options: Options,
    /// The peers' windows once they are open; `None` for this rank.
    windows: OnceCell<Vec<Option<MappedWindow>>>,
    channel: ShmChannel,
    layout: SegmentLayout,
    rank: usize,
    started: Cell<u64>,
    finished: Cell<u64>,
    _heartbeat: Heartbeat,
}

impl LocalComm {
    /// The word that decides whether the first step has begun. It outlives this rank's membership.
    pub fn first_step(&self) -> FirstStep {
        FirstStep(Arc::clone(&self.segment))
    }

    /// What the launcher asks of the job's ranks.
    pub fn requests(&self) -> JobRequests {
        JobRequests(Arc::clone(&self.segment))
    }

    /// Where this rank publishes its phase and step. It outlives this rank's membership.
    pub fn progress(&self) -> ProgressCell {
        ProgressCell(ProgressPlace::Slot(Arc::clone(&self.segment), self.rank))
    }

    /// An observer of all ranks.
    pub fn observer(&self) -> RankObserver {
        RankObserver::of(Arc::clone(&self.segment))
    }
}

impl Comm for LocalComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.layout.world
    }

    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError> {
        transfer.check(op, self.rank, self.layout.world)?;
        self.channel.alive(op)?;
        let ticket = self.started.get();
        self.started.set(ticket + 1);
        if ticket == self.finished.get() {
            self.channel.slot().enter(op);
            if self.channel.may_publish() {
                self.publish(op, &transfer, 0)?;
            }
        }
        Ok(Handle::new(self, ticket, op, transfer))
    }

    fn windows(&self) -> Option<&dyn Windows> {
        self.segment.window(self.rank).map(|_| self as &dyn Windows)
    }

    fn device_barrier(&self) -> Option<DeviceBarrier> {
        let Options { timing, on_slow, .. } = &self.options;
        DeviceBarrier::new(Arc::clone(&self.segment), self.rank, *timing, on_slow.clone())
    }
}

impl Finish for LocalComm {
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        self.channel.alive(op)?;
        if ticket != self.finished.get() {
            // The handle is consumed: this rank can no longer complete it, and the others must not wait for it.
            let _ = self.channel.end(self.rank, LostReason::GaveUp, op);
            return Err(CommError::OutOfOrder { op });
        }
        self.channel.slot().enter(op);
        self.move_all(op, transfer)?;
        self.finished.set(ticket + 1);
        self.channel.slot().exit();
        Ok(())
    }

    fn abandon(&self, op: OpName) {
        let _ = self.channel.end(self.rank, LostReason::GaveUp, op);
    }
}

impl Drop for LocalComm {
    fn drop(&mut self) {
        self.close_window();
        self.channel.leave();
    }
}
