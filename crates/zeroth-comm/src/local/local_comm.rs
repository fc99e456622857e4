//! A rank's communicator over a shared-memory segment.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use super::control::LocalControl;
use super::device_barrier::LocalDeviceBarrier;
use super::heartbeat::Heartbeat;
use super::lane::Lane;
use super::mapped_window::MappedWindow;
use super::peer_monitor::PeerMonitor;
use super::segment::{SegmentLayout, SharedSegment};
use super::shm_channel::ShmChannel;
use super::wait;
use crate::comm::{Comm, DeviceBarrier, Handle, JobControl, MeshAxes, PendingTransfer, SharedWindows};
use crate::error::{CommError, JoinError, LostReason};
use crate::join_options::JoinOptions;
use crate::op_name::OpName;
use crate::process::Process;
use crate::transfer::Transfer;

/// One rank of a local job, or its end of a lane of it. Dropping the rank leaves the job; drop it before the process exits.
///
/// Bytes move on the calling thread: a call publishes its first piece if the region is free, and `wait` does the rest.
/// After an error the job has ended, and every call returns that error.
pub(super) struct LocalComm {
    pub(super) segment: Arc<SharedSegment>,
    options: JoinOptions,
    /// The peers' windows once they are open; `None` for this rank.
    pub(super) windows: OnceCell<Vec<Option<MappedWindow>>>,
    pub(super) channel: ShmChannel,
    pub(super) layout: SegmentLayout,
    pub(super) lane: Lane,
    /// Its number in the lane, and its slot in the segment.
    pub(super) rank: usize,
    pub(super) slot: usize,
    pub(super) started: Cell<u64>,
    pub(super) finished: Cell<u64>,
    /// Its lanes in a mesh of several groups: of its group and of its rail.
    axes: Option<Box<[LocalComm; 2]>>,
    /// Beats while the rank is there; `None` in a lane of it.
    heartbeat: Option<Heartbeat>,
}

impl LocalComm {
    /// Takes the slot of `rank`.
    pub(super) fn join(
        segment: SharedSegment,
        rank: usize,
        options: &JoinOptions,
    ) -> Result<Self, JoinError> {
        let segment = Arc::new(segment);
        let world = segment.layout.world;
        if rank >= world {
            return Err(JoinError::Rank { rank, world });
        }
        let group = options.group.unwrap_or(world);
        if group == 0 || !world.is_multiple_of(group) {
            return Err(JoinError::Groups { world, group });
        }
        let (pid, started) = Process::own()?;
        segment.slot(rank).take(pid, started).map_err(|pid| JoinError::Taken { rank, pid })?;
        let heartbeat = Heartbeat::start(Arc::clone(&segment), rank, options.timing.heartbeat)?;
        let in_lane = |lane| Self::in_lane(Arc::clone(&segment), lane, rank, options);
        let mut all = in_lane(Lane::all(world));
        if group < world {
            all.axes =
                Some(Box::new([Lane::group(rank, group), Lane::rail(rank, group, world)].map(in_lane)));
        }
        all.heartbeat = Some(heartbeat);
        Ok(all)
    }

    /// The end of a lane of a rank that has taken its slot.
    fn in_lane(segment: Arc<SharedSegment>, lane: Lane, slot: usize, options: &JoinOptions) -> Self {
        let layout = segment.layout;
        let channel = ShmChannel::new(
            Arc::clone(&segment),
            slot,
            lane,
            wait::spins(layout.world, options.threads),
            PeerMonitor::new(slot, layout.world, options.timing),
            options.on_slow.clone(),
        );
        Self {
            segment,
            options: options.clone(),
            windows: OnceCell::new(),
            channel,
            layout,
            lane,
            rank: lane.rank(slot),
            slot,
            started: Cell::new(0),
            finished: Cell::new(0),
            axes: None,
            heartbeat: None,
        }
    }
}

impl Comm for LocalComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.lane.world
    }

    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError> {
        transfer.check(op, self.rank, self.lane.world)?;
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

    fn windows(&self) -> Option<&dyn SharedWindows> {
        // Memory is shared in groups: ranks of a rail may be on different machines.
        self.segment.window(self.slot).filter(|_| !self.lane.is_rail()).map(|_| self as &dyn SharedWindows)
    }

    fn mesh(&self) -> Option<MeshAxes<'_>> {
        self.axes.as_deref().map(|[group, rail]| MeshAxes { group, rail })
    }

    fn device_barrier(&self) -> Option<Box<dyn DeviceBarrier>> {
        let JoinOptions { timing, on_slow, .. } = &self.options;
        let segment = Arc::clone(&self.segment);
        let barrier = LocalDeviceBarrier::new(segment, self.lane, self.slot, *timing, on_slow.clone())?;
        Some(Box::new(barrier))
    }

    fn control(&self) -> Box<dyn JobControl> {
        let timing = self.options.timing;
        Box::new(LocalControl { segment: Arc::clone(&self.segment), rank: self.slot, timing })
    }
}

impl PendingTransfer for LocalComm {
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        self.channel.alive(op)?;
        if ticket != self.finished.get() {
            // The handle is consumed: this rank can no longer complete it, and the others must not wait for it.
            let _ = self.channel.end(self.slot, LostReason::GaveUp, op);
            return Err(CommError::OutOfOrder { op });
        }
        self.channel.slot().enter(op);
        self.move_all(op, transfer)?;
        self.finished.set(ticket + 1);
        self.channel.slot().exit();
        Ok(())
    }

    fn abandon(&self, op: OpName) {
        let _ = self.channel.end(self.slot, LostReason::GaveUp, op);
    }
}

impl Drop for LocalComm {
    fn drop(&mut self) {
        self.close_window();
        if self.heartbeat.is_some() {
            // Its lanes close their windows first.
            self.axes = None;
            self.channel.leave();
        }
    }
}
