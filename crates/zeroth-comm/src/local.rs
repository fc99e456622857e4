//! Ranks on one machine over a shared-memory segment: processes, or threads that each map it.

mod collectives;
mod control;
mod copy;
mod device_barrier;
mod heartbeat;
mod host_watch;
mod host_words;
mod lane;
mod local_comm;
mod mapped_window;
mod peer_monitor;
mod rank_slot;
mod segment;
mod shm_channel;
mod wait;
mod windows;

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;

use rustix::io::FdFlags;

pub(crate) use control::LocalObserver;
use local_comm::LocalComm;
use rank_slot::{FREE, LEFT};
use segment::SegmentLayout;

use crate::comm::{Comm, RankObserver};
use crate::error::{JoinError, LostReason, RankLost};
use crate::join_options::JoinOptions;
use crate::op_name::LastOp;

pub(crate) use control::{BEGUN, LocalControl, OPEN, STOPPED, decide, request_save, request_stop};
pub(crate) use device_barrier::barrier_across_machines;
pub(crate) use host_watch::host_watch;
pub(crate) use peer_monitor::PeerMonitor;
pub use segment::JobToken;
pub(crate) use segment::{EndedBy, MOST_RANKS, SharedSegment};
pub(crate) use wait::COUNTED;

/// Environment variable: this process's rank.
pub const RANK: &str = "ZEROTH_RANK";
/// Environment variable: the number of ranks.
pub const WORLD: &str = "ZEROTH_WORLD";
/// Environment variable: the descriptor number of the job's segment.
pub const JOB_FD: &str = "ZEROTH_JOB_FD";
/// Environment variable: the job's token.
pub const JOB_TOKEN: &str = "ZEROTH_JOB_TOKEN";

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
pub struct LocalJob {
    file: OwnedFd,
    segment: Arc<SharedSegment>,
    token: JobToken,
}

impl LocalJob {
    /// Creates a job of `world` ranks, each with a region of `region` bytes that peers read.
    ///
    /// A larger region moves large messages in fewer rounds; memory is only taken as it is used. There is always room
    /// for 64 bytes from each rank to each other.
    pub fn create(world: usize, region: usize) -> Result<Self, JoinError> {
        let layout = SegmentLayout::new(world, region)?;
        let token = JobToken::random()?;
        let (file, segment) = SharedSegment::create(layout, token)?;
        Ok(Self { file, segment: Arc::new(segment), token })
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.segment.layout.world
    }

    /// The token that ranks join with.
    pub fn token(&self) -> JobToken {
        self.token
    }

    /// The segment's descriptor, closed on exec; the launcher passes it to its ranks.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Joins as `rank` from this process, for ranks that are threads.
    pub fn join(&self, rank: usize, options: &JoinOptions) -> Result<Box<dyn Comm>, JoinError> {
        join(self.fd(), self.token, rank, options)
    }

    /// An observer of its ranks, which may outlive this value.
    pub fn observer(&self) -> Box<dyn RankObserver> {
        Box::new(LocalObserver(Arc::clone(&self.segment)))
    }

    /// Asks all ranks to stop.
    pub(crate) fn request_stop(&self) {
        request_stop(&self.segment);
    }

    /// Asks the ranks for a save.
    pub(crate) fn request_save(&self) {
        request_save(&self.segment);
    }

    /// Its segment, for the control connection.
    pub(crate) fn segment(&self) -> &Arc<SharedSegment> {
        &self.segment
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

    /// Stops the job unless a rank has begun the first step.
    pub(crate) fn stop_before_first_step(&self) -> bool {
        control::stop_before_first_step(&self.segment)
    }

    /// The rank that ended the job, if one did.
    pub fn lost(&self) -> Option<RankLost> {
        Some(self.segment.describe(self.segment.ended()?))
    }
}

/// Joins the job whose segment is `file`. The descriptor may be closed afterwards.
pub fn join(
    file: BorrowedFd<'_>,
    token: JobToken,
    rank: usize,
    options: &JoinOptions,
) -> Result<Box<dyn Comm>, JoinError> {
    Ok(join_with_segment(file, token, rank, options)?.0)
}

/// Joins a job, and keeps its segment.
pub(crate) fn join_with_segment(
    file: BorrowedFd<'_>,
    token: JobToken,
    rank: usize,
    options: &JoinOptions,
) -> Result<(Box<dyn Comm>, Arc<SharedSegment>), JoinError> {
    let comm = LocalComm::join(SharedSegment::open(file, token)?, rank, options)?;
    let segment = Arc::clone(&comm.segment);
    Ok((Box::new(comm), segment))
}

/// Whether zeroth's launcher started this process as a rank.
pub fn is_launched() -> bool {
    std::env::var_os(JOB_FD).is_some()
}

/// Joins the job of the launcher that started this process; `Ok(None)` where there is none.
pub fn join_from_environment(options: &JoinOptions) -> Result<Option<Box<dyn Comm>>, JoinError> {
    if !is_launched() {
        return Ok(None);
    }
    let number: i32 = variable(JOB_FD, "is not the number of a descriptor")?;
    let token = variable::<JobToken>(JOB_TOKEN, "is not a job token of 32 hexadecimal digits")?;
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
    let segment = SharedSegment::open(file, token)?;
    if segment.layout.world != world {
        let problem = format!("is {world}, but the job has {} rank(s)", segment.layout.world);
        return Err(JoinError::Environment { name: WORLD, problem });
    }
    Ok(Some(Box::new(LocalComm::join(segment, rank, options)?)))
}

fn variable<T: FromStr>(name: &'static str, problem: &'static str) -> Result<T, JoinError> {
    let wrong = |problem: &str| JoinError::Environment { name, problem: problem.to_owned() };
    let value: OsString = std::env::var_os(name).ok_or_else(|| wrong("is not set"))?;
    value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| wrong(problem))
}
