//! Windows of local ranks: mapped once, and read in rounds that move nothing through the regions.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::fs::FallocateFlags;

use super::local_comm::LocalComm;
use super::mapped_window::MappedWindow;
use super::segment::WINDOW;
use crate::comm::{Comm, PeerSlices, SharedWindows};
use crate::error::{CommError, LostReason};
use crate::op_name::OpName;
use crate::transfer::Transfer;

impl SharedWindows for LocalComm {
    fn own(&self) -> (BorrowedFd<'_>, u64) {
        self.of(self.rank)
    }

    fn of(&self, rank: usize) -> (BorrowedFd<'_>, u64) {
        self.segment.window(self.lane.slot(rank)).expect("`Comm::windows` gives none where the file has none")
    }

    fn open(&self, op: OpName, bytes: usize, ready: bool) -> Result<bool, CommError> {
        let map = |rank: usize| {
            let (file, at) = self.segment.window(self.lane.slot(rank))?;
            MappedWindow::new(file, at, bytes)
        };
        let fits = ready && bytes as u64 <= WINDOW && self.windows.get().is_none();
        let mapped: Option<Vec<Option<MappedWindow>>> = fits.then_some(()).and_then(|()| {
            (0..self.lane.world)
                .map(|rank| if rank == self.rank { Some(None) } else { map(rank).map(Some) })
                .collect()
        });
        // If one rank cannot map them, all do without: all must use the same transport.
        let mut all = vec![0; self.lane.world];
        let counts = vec![1; self.lane.world];
        self.all_gather(op, &[u8::from(mapped.is_some())], &mut all, &counts)?.wait()?;
        let open = all.iter().all(|can| *can == 1);
        if let (true, Some(mapped)) = (open, mapped) {
            let first = self.windows.set(mapped);
            debug_assert!(first.is_ok(), "windows that are open are not ready a second time");
        }
        Ok(open)
    }

    fn read(
        &self,
        op: OpName,
        from: &[Range<usize>],
        visit: &mut dyn FnMut(&PeerSlices<'_>),
    ) -> Result<(), CommError> {
        let windows = self.windows.get().map_or(&[][..], Vec::as_slice);
        let needs = |what, given, needed| CommError::Operands { op, kind: "read", what, given, needed };
        if from.len() != windows.len() {
            return Err(needs("windows to read, of those that are open", from.len(), windows.len()));
        }
        for (range, window) in from.iter().zip(windows) {
            let end = range.start.max(range.end);
            if let Some(window) = window.as_ref().filter(|window| end > window.len()) {
                return Err(needs("bytes to the end of what is read of a window", end, window.len()));
            }
        }
        self.channel.alive(op)?;
        if self.started.get() != self.finished.get() {
            let _ = self.channel.end(self.slot, LostReason::GaveUp, op);
            return Err(CommError::OutOfOrder { op });
        }
        self.channel.slot().enter(op);
        // Differs from a transfer with the same name.
        let signature = !Transfer::Barrier.signature(op);
        self.channel.publish(op, signature, std::iter::empty())?;
        for peer in self.others() {
            self.channel.receive(op, signature, peer, 0, &mut [], false)?;
        }
        let of = |rank: usize| match &windows[rank] {
            None => &[][..],
            Some(window) => window.bytes(from[rank].clone()),
        };
        visit(&PeerSlices::new(&of));
        self.channel.consume();
        self.channel.settle(op)?;
        self.channel.slot().exit();
        Ok(())
    }
}

impl LocalComm {
    /// Frees this rank's window even where peers have it mapped.
    pub(super) fn close_window(&self) {
        let Some(window) = self.windows.get().and_then(|all| all.iter().flatten().next()) else { return };
        let (file, at) = self.own();
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Where that fails, the memory is freed with the last rank.
        let _ = rustix::fs::fallocate(file, hole, at, window.len() as u64);
    }
}
