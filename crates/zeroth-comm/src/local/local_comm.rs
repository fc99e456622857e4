//! A rank's communicator over a shared-memory segment.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use super::control::LocalControl;
use super::device_barrier::LocalDeviceBarrier;
use super::heartbeat::Heartbeat;
use super::mapped_window::MappedWindow;
use super::peer_monitor::PeerMonitor;
use super::segment::{SegmentLayout, SharedSegment};
use super::shm_channel::ShmChannel;
use super::wait;
use crate::comm::{Comm, DeviceBarrier, Handle, JobControl, PendingTransfer, SharedWindows};
use crate::error::{CommError, JoinError, LostReason};
use crate::join_options::JoinOptions;
use crate::op_name::OpName;
use crate::process::Process;
use crate::transfer::Transfer;

/// One rank of a local job. Dropping it leaves the job; drop it before the process exits.
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
    pub(super) rank: usize,
    pub(super) started: Cell<u64>,
    pub(super) finished: Cell<u64>,
    _heartbeat: Heartbeat,
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
        Ok(Self {
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

    fn windows(&self) -> Option<&dyn SharedWindows> {
        self.segment.window(self.rank).map(|_| self as &dyn SharedWindows)
    }

    fn device_barrier(&self) -> Option<Box<dyn DeviceBarrier>> {
        let JoinOptions { timing, on_slow, .. } = &self.options;
        let barrier =
            LocalDeviceBarrier::new(Arc::clone(&self.segment), self.rank, *timing, on_slow.clone())?;
        Some(Box::new(barrier))
    }

    fn control(&self) -> Box<dyn JobControl> {
        let timing = self.options.timing;
        Box::new(LocalControl { segment: Arc::clone(&self.segment), rank: self.rank, timing })
    }
}

impl PendingTransfer for LocalComm {
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
