//! One rank's end of what hosts tell each other, once it has joined.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use super::HostWatch;
use super::chunks::MOST_BYTES;
use super::control_thread::{ControlOrder, ControlThread, LinkState, TICK};
use super::settings::{join_parts, split_parts};
use crate::comm::{Comm, DeviceBarrier, Handle, JobControl, RankObservation, RankObserver};
use crate::error::{CommError, LostReason};
use crate::join_options::Timing;
use crate::local::{self, LocalControl, LocalObserver, SharedSegment, barrier_across_machines, host_watch};
use crate::op_name::OpName;
use crate::place::{HostTable, Place};
use crate::process::ProcessState;
use crate::progress::RankPhase;
use crate::transfer::Transfer;

/// A rank that has joined its job.
pub struct JoinedHost {
    /// The ranks of this host, by their local ranks. Its errors name ranks of the job.
    pub group: Box<dyn Comm>,
    /// What concerns all hosts.
    pub link: HostLink,
}

/// One rank's end of what hosts tell each other. Dropping it before [`Self::leave`] ends the job for all, as a rank that leaves
/// too early.
pub struct HostLink {
    place: Place,
    hosts: HostTable,
    segment: Arc<SharedSegment>,
    timing: Timing,
    /// Of rank 0 and of leaders, in a job on several hosts.
    thread: Option<ControlThread>,
    has_left: AtomicBool,
}

impl HostLink {
    pub(super) fn new(
        place: Place,
        hosts: HostTable,
        segment: Arc<SharedSegment>,
        timing: Timing,
        thread: Option<ControlThread>,
    ) -> Self {
        Self { place, hosts, segment, timing, thread, has_left: AtomicBool::new(false) }
    }

    #[cfg(test)]
    pub(super) fn thread(&self) -> &ControlThread {
        self.thread.as_ref().expect("the rank leads its host")
    }

    /// This rank's place, as all hosts agree on it.
    pub fn place(&self) -> Place {
        self.place
    }

    /// All hosts.
    pub fn hosts(&self) -> &HostTable {
        &self.hosts
    }

    /// What this rank calls while it polls a rail.
    pub fn watch(&self) -> HostWatch {
        host_watch(Arc::clone(&self.segment), self.place.local_rank, self.timing)
    }

    /// A barrier for the devices of a rail, which tells them of losses on any host.
    pub(super) fn rail_barrier(&self) -> Option<Box<dyn DeviceBarrier>> {
        barrier_across_machines(Arc::clone(&self.segment), self.place.local_rank, self.timing)
    }

    /// The control plane. On rank 0 its observer sees the ranks of all hosts, elsewhere those of this host.
    pub fn control(&self) -> Box<dyn JobControl> {
        let segment = Arc::clone(&self.segment);
        let local = LocalControl { segment, rank: self.place.local_rank, timing: self.timing };
        match &self.thread {
            Some(thread) if self.place.rank == 0 => Box::new(CoordinatorControl {
                local,
                state: Arc::clone(&thread.state),
                world: self.place.world,
            }),
            _ => Box::new(local),
        }
    }

    /// Asks the ranks of all hosts to stop, as a launcher does: see [`JobControl::is_stop_requested`].
    pub fn request_stop(&self) {
        local::request_stop(&self.segment);
    }

    /// Asks the ranks of all hosts for a save: see [`JobControl::save_requests`].
    pub fn request_save(&self) {
        local::request_save(&self.segment);
    }

    /// The bytes of every rank, on every rank, in rank order. All ranks call it, with the communicator of their host. For what
    /// ranks agree on: a few MB in all.
    pub fn gather(&self, group: &dyn Comm, op: OpName, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let of_host = gather_in(group, op, own)?;
        if self.place.is_one_host() {
            return Ok(of_host);
        }
        let mut whole = match &self.thread {
            Some(thread) => self.exchange(thread, op, join_parts(&of_host))?,
            None => Vec::new(),
        };
        let mut length = (whole.len() as u64).to_le_bytes();
        broadcast_in(group, op, &mut length)?;
        whole.resize(u64::from_le_bytes(length) as usize, 0);
        broadcast_in(group, op, &mut whole)?;
        split_parts(&whole, self.place.world).ok_or_else(|| self.end_here(op, LostReason::BadFrame))
    }

    /// As [`Self::gather`], for texts.
    pub fn gather_texts(&self, group: &dyn Comm, op: OpName, own: &str) -> Result<Vec<String>, CommError> {
        let parts = self.gather(group, op, own.as_bytes())?;
        Ok(parts.iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect())
    }

    /// Rank 0's bytes on every rank. All ranks call it; those of the others are ignored.
    pub fn broadcast(&self, group: &dyn Comm, op: OpName, own: &[u8]) -> Result<Vec<u8>, CommError> {
        let own = if self.place.rank == 0 { own } else { &[] };
        Ok(self.gather(group, op, own)?.swap_remove(0))
    }

    /// The least of every number over all ranks, which give equally many: budgets, for instance.
    pub fn minimum(&self, group: &dyn Comm, op: OpName, own: &[u64]) -> Result<Vec<u64>, CommError> {
        let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut least = own.to_vec();
        for part in self.gather(group, op, &bytes)? {
            for (least, bytes) in least.iter_mut().zip(part.as_chunks::<8>().0) {
                *least = u64::from_le_bytes(*bytes).min(*least);
            }
        }
        Ok(least)
    }

    /// Leaves the job with all others: returns once the ranks of all hosts have called it. A process that ends from then on is
    /// no loss. Call it after the last collective, also where all ranks have agreed to end before the first step.
    pub fn leave(&self, group: &dyn Comm, op: OpName) -> Result<(), CommError> {
        if self.place.is_one_host() {
            return Ok(());
        }
        group.barrier(op).and_then(Handle::wait)?;
        if let Some(thread) = &self.thread {
            let (reply, left) = sync_channel(1);
            thread.order(ControlOrder::Leave(reply));
            self.answer(op, || left.recv_timeout(TICK))?;
        }
        group.barrier(op).and_then(Handle::wait)?;
        self.has_left.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Exchanges this host's part of a gather for those of all hosts.
    fn exchange(&self, thread: &ControlThread, op: OpName, part: Vec<u8>) -> Result<Vec<u8>, CommError> {
        if part.len() > MOST_BYTES {
            return Err(CommError::TooLong { op, bytes: part.len(), most: MOST_BYTES });
        }
        let (reply, whole) = sync_channel(1);
        thread.order(ControlOrder::Gather(part, reply));
        self.segment.slot(self.place.local_rank).enter(op);
        let whole = self.answer(op, || whole.recv_timeout(TICK))?;
        self.segment.slot(self.place.local_rank).exit();
        Ok(whole.to_vec())
    }

    /// Waits for an answer of the control thread, which judges everyone whom it may wait for.
    fn answer<T>(
        &self,
        op: OpName,
        mut receive: impl FnMut() -> Result<T, RecvTimeoutError>,
    ) -> Result<T, CommError> {
        loop {
            let received = receive();
            match (received, self.segment.ended()) {
                (Ok(answer), _) => return Ok(answer),
                (Err(_), Some(ended)) => {
                    return Err(self.segment.lost_on(self.place.local_rank, op, ended));
                }
                (Err(RecvTimeoutError::Timeout), None) => {}
                // The thread ends a job before it drops what it was asked.
                (Err(RecvTimeoutError::Disconnected), None) => {
                    return Err(self.end_here(op, LostReason::GaveUp));
                }
            }
        }
    }

    pub(super) fn end_here(&self, op: OpName, reason: LostReason) -> CommError {
        let ended = self.segment.end(self.place.local_rank, reason);
        self.segment.lost_on(self.place.local_rank, op, ended)
    }
}

impl Drop for HostLink {
    fn drop(&mut self) {
        // Ranks that wait on rails do not see who has left their host: the segment tells them, and the control thread, which
        // is dropped next, tells the other hosts.
        if !self.has_left.load(Ordering::Relaxed) && !self.place.is_one_host() {
            self.segment.end(self.place.local_rank, LostReason::Left);
        }
    }
}

/// The bytes of every rank of a communicator.
fn gather_in(group: &dyn Comm, op: OpName, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
    let world = group.world();
    let mut lengths = vec![0; 8 * world];
    let length = (own.len() as u64).to_le_bytes();
    group.all_gather(op, &length, &mut lengths, &vec![8; world])?.wait()?;
    let counts: Vec<usize> =
        lengths.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize).collect();
    let mut bytes = vec![0; counts.iter().sum()];
    group.all_gather(op, own, &mut bytes, &counts)?.wait()?;
    let mut rest = bytes.as_slice();
    let parts = counts.iter().map(|count| {
        let part;
        (part, rest) = rest.split_at(*count);
        part.to_vec()
    });
    Ok(parts.collect())
}

fn broadcast_in(group: &dyn Comm, op: OpName, bytes: &mut [u8]) -> Result<(), CommError> {
    group.start(op, Transfer::Broadcast { root: 0, buffer: bytes }).and_then(Handle::wait)
}

/// The control plane of rank 0, which hears of all hosts.
struct CoordinatorControl {
    local: LocalControl,
    state: Arc<LinkState>,
    world: usize,
}

impl JobControl for CoordinatorControl {
    fn begin_first_step(&self) -> bool {
        self.local.begin_first_step()
    }

    fn stop_before_first_step(&self) -> bool {
        self.local.stop_before_first_step()
    }

    fn is_stop_requested(&self) -> bool {
        self.local.is_stop_requested()
    }

    fn save_requests(&self) -> u32 {
        self.local.save_requests()
    }

    fn publish_progress(&self, phase: RankPhase, step: Option<u64>) {
        self.local.publish_progress(phase, step);
    }

    fn observer(&self) -> Box<dyn RankObserver> {
        let segment = Arc::clone(&self.local.segment);
        Box::new(WorldObserver {
            local: LocalObserver(segment),
            state: Arc::clone(&self.state),
            world: self.world,
        })
    }
}

/// Observes the ranks of all hosts: those of this one in the segment, others as their hosts report them.
struct WorldObserver {
    local: LocalObserver,
    state: Arc<LinkState>,
    world: usize,
}

impl RankObserver for WorldObserver {
    fn world(&self) -> usize {
        self.world
    }

    fn look(&self, rank: usize) -> RankObservation {
        let view = self.state.lock();
        let reported = view.seen.get(rank).cloned().flatten();
        let is_dead =
            view.lost.as_ref().is_some_and(|lost| lost.rank == rank && lost.reason == LostReason::Dead);
        let host =
            view.table.as_ref().and_then(|table| Some(table.hosts()[table.host_of(rank)?].name.clone()));
        drop(view);
        let mut seen = match reported {
            _ if rank < self.local.world() => RankObservation { host, ..self.local.look(rank) },
            Some(seen) => seen,
            None => RankObservation {
                process: None,
                state: ProcessState::Absent,
                left: false,
                heartbeat: 0,
                phase: RankPhase::Starting,
                step: 0,
                last: None,
                host,
                resident: None,
            },
        };
        if is_dead {
            seen.state = ProcessState::Ended;
        }
        seen
    }
}
