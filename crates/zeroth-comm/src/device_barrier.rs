//! Where devices of ranks meet while their hosts are elsewhere, and what becomes of a device that waits for a lost rank.
//!
//! Every rank has a word that its device alone counts up, in the order of its queue, and that all devices see. Meeting `n`
//! (from 1) has two points, `2n − 1` and `2n`:
//!
//! - A device that has come to the meeting writes `2n − 1`: what others read of its memory is complete. It goes on when all
//!   words have come to `2n − 1`, and reads.
//! - When it has read it writes `2n`, and goes on when all words have come to `2n`: nobody reads its memory any more, and
//!   what follows may write there.
//!
//! So no two words are more than one meeting apart, and 32 bits are enough to compare them. The host gives out the numbers
//! ([`DeviceBarrier::next`]) when it enqueues a meeting, long before the device comes to it. A device that waits for ever cannot
//! look around: a thread of the host does so for it. Where a rank is lost it ends the job, and then writes words that let
//! everybody go. What devices compute from there on is worth nothing, so whoever waits for a device asks
//! [`DeviceBarrier::check`] afterwards.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::comm::OpName;
use crate::error::{CommError, Lost, RankLost};
use crate::lanes::{OnSlow, describe};
use crate::segment::Segment;
use crate::slot::LEFT;
use crate::wait::{COUNTED, SLICE, reached};
use crate::watch::{Slow, Timing, Watch};

/// How far beyond all meetings the words are put that let everybody go.
const BEYOND: u32 = 1 << 30;

/// How far a rank's device is, and how far it was sent.
#[repr(C, align(64))]
pub(crate) struct Counter {
    /// Written by the rank's device.
    come: AtomicU32,
    /// The last point that was enqueued; written by the rank's host.
    sent: AtomicU32,
}

type OnLost = Box<dyn Fn() + Send>;

struct Shared {
    segment: Arc<Segment>,
    rank: usize,
    /// The collective enqueued last.
    op: Mutex<Option<OpName>>,
    /// What lets this rank's device go where words do not.
    on_lost: Mutex<Option<OnLost>>,
    on_slow: Option<Arc<OnSlow>>,
}

/// One rank's place where devices meet. Dropped after its device has come past all meetings.
pub struct DeviceBarrier {
    shared: Arc<Shared>,
    // Dropped to stop the thread; an `Option` because dropping must come before joining.
    running: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceBarrier {
    /// Bytes from one rank's word to the next one's.
    pub const STRIDE: usize = size_of::<Counter>();

    /// None where the system has no thread for it.
    pub(crate) fn new(
        segment: Arc<Segment>,
        rank: usize,
        timing: Timing,
        on_slow: Option<Arc<OnSlow>>,
    ) -> Option<Self> {
        let world = segment.layout.world;
        let shared =
            Arc::new(Shared { segment, rank, op: Mutex::new(None), on_lost: Mutex::new(None), on_slow });
        let (running, stopped) = mpsc::channel();
        let watching = Arc::clone(&shared);
        let watch = Watch::new(rank, world, timing);
        let thread = std::thread::Builder::new()
            .name(format!("crossing {rank}"))
            .spawn(move || watching.run(watch, &stopped))
            .ok()?;
        Some(Self { shared, running: Some(running), thread: Some(thread) })
    }

    /// The file that holds the words, where in it the first rank's is (on a page), and how many bytes of whole pages all
    /// take. A rank's word is its first four bytes of [`Self::STRIDE`].
    pub fn counters(&self) -> (BorrowedFd<'_>, u64, usize) {
        self.shared.segment.counters()
    }

    /// The two points of the next meeting, which all ranks enqueue by the same name.
    pub fn next(&self, op: OpName) -> Result<[u32; 2], CommError> {
        self.check(op)?;
        let shared = &self.shared;
        shared.segment.slot(shared.rank).enter(op);
        *lock(&shared.op) = Some(op);
        let sent = &shared.segment.counter(shared.rank).sent;
        let before = sent.load(Ordering::Relaxed);
        let points = [before.wrapping_add(1), before.wrapping_add(2)];
        // Release: a rank that is seen to have left (acquire) is seen with its last point.
        sent.store(points[1], Ordering::Release);
        Ok(points)
    }

    /// The error that ended the job, if one did: then nothing that a device has brought may be used.
    pub fn check(&self, op: OpName) -> Result<(), CommError> {
        match self.shared.segment.ended() {
            None => Ok(()),
            Some((rank, reason)) => {
                let lost = describe(&self.shared.segment, rank, reason);
                let (by, waiting_in) = (Some(self.shared.rank), Some(op));
                Err(Box::new(RankLost { by, waiting_in, ..lost }).into())
            }
        }
    }

    /// For devices that do not wait at the words: `abort` is called when a rank is lost, again and again, by another
    /// thread. Ranks are then watched at all times.
    pub fn on_lost(&self, abort: impl Fn() + Send + 'static) {
        *lock(&self.shared.on_lost) = Some(Box::new(abort));
    }
}

impl Drop for DeviceBarrier {
    fn drop(&mut self) {
        self.running.take();
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and if it did, the rank is leaving anyway.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Looks around until the rank has no more to meet for.
    fn run(&self, mut watch: Watch, stopped: &Receiver<()>) {
        // The point that the device has been waiting at.
        let (mut last, mut point) = (Instant::now(), None);
        while stopped.recv_timeout(SLICE) == Err(RecvTimeoutError::Timeout) {
            let now = Instant::now();
            let watched = (now - last).min(COUNTED);
            last = now;
            match self.awaited() {
                None => point = None,
                Some((awaited, at)) => {
                    if point != Some(at) {
                        watch.begin(&self.segment);
                        point = Some(at);
                    }
                    self.look(&mut watch, awaited, watched);
                }
            }
            if self.segment.ended().is_some() {
                self.abort();
            }
        }
    }

    /// A rank that this one's device waits for, or may be waiting for, and the point that it waits at.
    fn awaited(&self) -> Option<(usize, u32)> {
        // Relaxed: what counts is that it comes; no memory is read by it.
        let come = |rank: usize| self.segment.counter(rank).come.load(Ordering::Relaxed);
        let (own, unseen) = (come(self.rank), self.is_unseen());
        self.others().find(|peer| unseen || !reached(come(*peer), own)).map(|peer| (peer, own))
    }

    /// Whether devices meet elsewhere than at the words.
    fn is_unseen(&self) -> bool {
        lock(&self.on_lost).is_some()
    }

    fn look(&self, watch: &mut Watch, awaited: usize, watched: Duration) {
        if let Some(rank) = self.others().find(|peer| self.has_left_too_early(*peer)) {
            self.segment.end(rank, Lost::Left);
        }
        match watch.look(&self.segment, awaited, watched) {
            Err((rank, reason)) => {
                self.segment.end(rank, reason);
            }
            // Of a device that is not seen nobody knows whether it waits.
            Ok(true) if !self.is_unseen() => {
                if let (Some(on_slow), Some(waiting_in)) = (&self.on_slow, *lock(&self.op)) {
                    let last = self.segment.slot(awaited).place();
                    on_slow(&Slow { rank: awaited, last, waiting_in, seconds: watch.seconds() });
                }
            }
            Ok(_) => {}
        }
    }

    /// A rank leaves after its device has come past all that it was sent to, unless that device failed.
    fn has_left_too_early(&self, peer: usize) -> bool {
        // Acquire in `state`: with it the rank's last points are seen.
        let has_left = self.segment.slot(peer).state() == LEFT;
        let word = |rank: usize| {
            let turn = self.segment.counter(rank);
            if self.is_unseen() { &turn.sent } else { &turn.come }.load(Ordering::Relaxed)
        };
        has_left && !reached(word(peer), word(self.rank))
    }

    /// Lets all devices go. Those of living ranks may still write to their words: the thread comes back here until it is
    /// stopped.
    fn abort(&self) {
        let beyond = self.segment.counter(self.rank).sent.load(Ordering::Relaxed).wrapping_add(BEYOND);
        for rank in 0..self.segment.layout.world {
            // Release: whoever goes on by this word finds the job ended.
            self.segment.counter(rank).come.store(beyond, Ordering::Release);
        }
        if let Some(abort) = &*lock(&self.on_lost) {
            abort();
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.segment.layout.world).filter(|peer| *peer != self.rank)
    }
}

/// Nothing is left half written where a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::Process;
    use crate::segment::{Layout, Token};

    /// A device as the words see it: it does what it was sent to do, as far as the others let it.
    struct Model {
        rank: usize,
        /// Points that are enqueued and not passed yet.
        queue: std::collections::VecDeque<u32>,
        waits: Option<u32>,
        /// What it holds for others to read, by meeting, and what it has read of each rank.
        shown: u32,
        read: Vec<Vec<u32>>,
    }

    impl Model {
        fn word<'a>(&self, segment: &'a Segment) -> &'a AtomicU32 {
            &segment.counter(self.rank).come
        }

        /// One move; false where it waits or has nothing to do.
        fn go(&mut self, segment: &Segment, shown: &[u32]) -> bool {
            if let Some(point) = self.waits {
                let all = 0..segment.layout.world;
                if !all.clone().all(|rank| reached(segment.counter(rank).come.load(Ordering::Relaxed), point))
                {
                    return false;
                }
                self.waits = None;
                if point % 2 == 1 {
                    self.read.push(all.map(|rank| shown[rank]).collect());
                } else {
                    // What follows a meeting may write where others read in it.
                    self.shown = u32::MAX;
                }
                return true;
            }
            let Some(point) = self.queue.pop_front() else { return false };
            if point % 2 == 1 {
                self.shown = point / 2;
            }
            self.word(segment).store(point, Ordering::Relaxed);
            self.waits = Some(point);
            true
        }
    }

    fn crossings(world: usize) -> (Arc<Segment>, Vec<DeviceBarrier>) {
        let segment = Segment::create(Layout::new(world, 0).unwrap(), Token::random().unwrap()).unwrap().1;
        let segment = Arc::new(segment);
        let (pid, started) = Process::own().unwrap();
        (0..world).for_each(|rank| segment.slot(rank).take(pid, started).unwrap());
        let timing = Timing::default();
        let crossing = |rank| DeviceBarrier::new(Arc::clone(&segment), rank, timing, None).unwrap();
        (Arc::clone(&segment), (0..world).map(crossing).collect())
    }

    const OP: OpName = OpName::new(3, "gather", 1);

    proptest::proptest! {
        #![proptest_config(proptest::test_runner::Config::with_cases(64))]

        /// Devices in any order, hosts that run ahead as far as they like: each reads in meeting n what every rank
        /// showed for meeting n, and nobody hangs.
        #[test]
        fn everyone_reads_what_all_showed_for_the_same_meeting(
            world in 1usize..5,
            moves in proptest::collection::vec((0usize..5, proptest::bool::ANY), 0..400),
        ) {
            const MEETINGS: u32 = 12;
            let (segment, crossings) = crossings(world);
            let mut models: Vec<Model> = (0..world)
                .map(|rank| Model { rank, queue: [].into(), waits: None, shown: 0, read: Vec::new() })
                .collect();
            let rest = (0..world * 8 * MEETINGS as usize).map(|at| (at % world, at % (3 * world) < world));
            for (rank, is_host) in moves.into_iter().chain(rest) {
                let rank = rank % world;
                let sent = segment.counter(rank).sent.load(Ordering::Relaxed);
                if is_host && sent < 2 * MEETINGS {
                    models[rank].queue.extend(crossings[rank].next(OP).unwrap());
                } else {
                    let shown: Vec<u32> = models.iter().map(|model| model.shown).collect();
                    models[rank].go(&segment, &shown);
                }
            }
            for model in &models {
                let expected: Vec<Vec<u32>> = (0..MEETINGS).map(|meeting| vec![meeting; world]).collect();
                proptest::prop_assert_eq!(&model.read, &expected);
            }
        }
    }

    #[test]
    fn numbers_go_on_across_their_overflow() {
        let (segment, crossings) = crossings(2);
        segment.counter(0).sent.store(u32::MAX - 1, Ordering::Relaxed);
        assert_eq!(crossings[0].next(OP).unwrap(), [u32::MAX, 0]);
        assert_eq!(crossings[0].next(OP).unwrap(), [1, 2]);
    }

    #[test]
    fn a_device_that_waits_for_a_rank_that_left_is_let_go_and_its_host_told() {
        let (segment, crossings) = crossings(3);
        let points = crossings[0].next(OP).unwrap();
        segment.slot(1).leave();
        assert!(crossings[0].check(OP).is_ok());
        // The device comes to the meeting, and waits.
        segment.counter(0).come.store(points[0], Ordering::Relaxed);
        while !reached(segment.counter(1).come.load(Ordering::Acquire), points[1]) {
            std::thread::yield_now();
        }
        let error = crossings[0].check(OP).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("left the job"), "{error}");
        assert!(error.contains("rank 0 was in step 3, op gather#1"), "{error}");
        assert!(crossings[2].next(OP).is_err());
    }

    #[test]
    fn a_lost_rank_is_told_to_devices_that_meet_elsewhere() {
        let (segment, crossings) = crossings(2);
        let (told, heard) = mpsc::channel();
        crossings[0].on_lost(move || {
            let _ = told.send(());
        });
        segment.end(1, Lost::Dead);
        assert_eq!(heard.recv_timeout(Duration::from_mins(1)), Ok(()));
    }
}
