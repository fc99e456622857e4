//! A barrier between the devices of ranks that does not involve their hosts, and the detection of lost ranks for it.
//!
//! The counters of [`DeviceBarrier`] are in shared memory. A waiting device cannot detect that a peer is gone, so a host
//! thread watches the ranks for it. If a rank is lost, the thread ends the job and then stores counters that release every
//! waiting stream.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::lane::Lane;
use super::peer_monitor::{Observed, PeerMonitor};
use super::rank_slot::{DeviceCounter, LEFT};
use super::segment::SharedSegment;
use super::wait::{COUNTED, SLICE, reached};
use crate::comm::{DeviceBarrier, DeviceCounters, Liveness, OnLost};
use crate::error::{CommError, LostReason};
use crate::join_options::{OnSlow, Timing};
use crate::op_name::OpName;

/// Distance of the releasing counters from the last enqueued point.
const RELEASE_DISTANCE: u32 = 1 << 30;

struct Shared {
    segment: Arc<SharedSegment>,
    /// The ranks that meet.
    lane: Lane,
    /// This rank's slot.
    rank: usize,
    /// Whether these are all ranks that meet: their devices can wait on the counters.
    is_whole: bool,
    /// The last enqueued collective.
    op: Mutex<Option<OpName>>,
    /// Releases this rank's device if it does not wait on the counters.
    on_lost: Mutex<Option<OnLost>>,
    on_slow: Option<Arc<OnSlow>>,
}

/// Where a rank is that has enqueued no collective yet.
const CONNECT: OpName = OpName::new(0, "connect devices", 0);

/// One rank's end of the barrier.
pub(super) struct LocalDeviceBarrier {
    shared: Arc<Shared>,
    // Dropped to stop the thread, before it is joined; hence the `Option`.
    running: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LocalDeviceBarrier {
    /// A barrier of the ranks of a lane, for the one in slot `rank`. `None` if the watching thread cannot be started.
    pub(super) fn new(
        segment: Arc<SharedSegment>,
        lane: Lane,
        rank: usize,
        timing: Timing,
        on_slow: Option<Arc<OnSlow>>,
    ) -> Option<Self> {
        Self::start((segment, lane, rank), true, timing, on_slow)
    }

    fn start(
        (segment, lane, rank): (Arc<SharedSegment>, Lane, usize),
        is_whole: bool,
        timing: Timing,
        on_slow: Option<Arc<OnSlow>>,
    ) -> Option<Self> {
        let world = segment.layout.world;
        let (op, on_lost) = (Mutex::new(None), Mutex::new(None));
        let shared = Arc::new(Shared { segment, lane, rank, is_whole, op, on_lost, on_slow });
        let (running, stopped) = mpsc::channel();
        let watching = Arc::clone(&shared);
        let watch = PeerMonitor::new(rank, world, timing);
        let thread = std::thread::Builder::new()
            .name(format!("barrier {rank}"))
            .spawn(move || watching.run(watch, &stopped))
            .ok()?;
        Some(Self { shared, running: Some(running), thread: Some(thread) })
    }
}

/// A barrier of ranks that are on several machines, for the one in slot `rank`. It has no counters: it tells of losses, here and
/// elsewhere.
pub(crate) fn barrier_across_machines(
    segment: Arc<SharedSegment>,
    rank: usize,
    timing: Timing,
) -> Option<Box<dyn DeviceBarrier>> {
    let lane = Lane::rails(segment.layout.world);
    let barrier = LocalDeviceBarrier::start((segment, lane, rank), false, timing, None)?;
    Some(Box::new(barrier))
}

impl DeviceBarrier for LocalDeviceBarrier {
    fn counters(&self) -> Option<DeviceCounters<'_>> {
        let Shared { segment, lane, is_whole, .. } = &*self.shared;
        let (file, at, bytes) = segment.counters(lane.number);
        let size = size_of::<DeviceCounter>();
        let (first, stride) = (lane.slot(0) * size, lane.stride() * size);
        is_whole.then_some(DeviceCounters { file, at, bytes, first, stride })
    }

    fn next(&self, op: OpName) -> Result<[u32; 2], CommError> {
        self.check(op)?;
        let shared = &self.shared;
        shared.segment.slot(shared.rank).enter(op);
        *lock(&shared.op) = Some(op);
        let enqueued = &shared.counter(shared.rank).enqueued;
        let before = enqueued.load(Ordering::Relaxed);
        let points = [before.wrapping_add(1), before.wrapping_add(2)];
        // Release: whoever sees that this rank has left (acquire) also sees its last point.
        enqueued.store(points[1], Ordering::Release);
        Ok(points)
    }
}

impl Liveness for LocalDeviceBarrier {
    fn check(&self, op: OpName) -> Result<(), CommError> {
        self.shared.ended(op).map_or(Ok(()), Err)
    }

    fn on_lost(&self, abort: Option<OnLost>) {
        *lock(&self.shared.on_lost) = abort;
    }
}

impl Drop for LocalDeviceBarrier {
    fn drop(&mut self) {
        self.running.take();
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did, the rank is leaving anyway.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The error that ended the job, for a rank in `op`.
    fn ended(&self, op: OpName) -> Option<CommError> {
        Some(self.segment.lost_on(self.rank, op, self.segment.ended()?))
    }

    /// Watches the ranks until the barrier is dropped.
    fn run(&self, mut watch: PeerMonitor, stopped: &Receiver<()>) {
        // The point at which the device waits.
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
                    self.check_peers(&mut watch, awaited, watched);
                }
            }
            let op = lock(&self.op).unwrap_or(CONNECT);
            if let Some(error) = self.ended(op) {
                self.release_all(&error);
            }
        }
    }

    /// A rank that this rank's device waits for, or may be waiting for, and the point at which it waits.
    fn awaited(&self) -> Option<(usize, u32)> {
        // Relaxed: no other memory is read based on this value.
        let arrived = |rank: usize| self.counter(rank).arrived.load(Ordering::Relaxed);
        let (own, external) = (arrived(self.rank), self.is_external());
        self.others().find(|peer| external || !reached(arrived(*peer), own)).map(|peer| (peer, own))
    }

    /// Whether devices synchronize by other means than the counters (NCCL).
    fn is_external(&self) -> bool {
        !self.is_whole || lock(&self.on_lost).is_some()
    }

    /// How far the device of a slot is.
    fn counter(&self, slot: usize) -> &DeviceCounter {
        self.segment.counter(self.lane.number, slot)
    }

    fn check_peers(&self, watch: &mut PeerMonitor, awaited: usize, watched: Duration) {
        if let Some(rank) = self.others().find(|peer| self.has_left_too_early(*peer)) {
            self.segment.end(rank, LostReason::Left);
        }
        match watch.look(&self.segment, awaited, watched) {
            Err((rank, reason)) => {
                self.segment.end(rank, reason);
            }
            // Whether an external device waits is unknown.
            Ok(Observed::Slow) if self.is_external() => {}
            Ok(observed) => {
                if let (Some(on_slow), Some(waiting_in)) = (&self.on_slow, *lock(&self.op))
                    && let Some(warning) = watch.warning(&self.segment, awaited, observed, waiting_in)
                {
                    on_slow(&warning);
                }
            }
        }
    }

    /// A rank leaves after its device has passed all enqueued collectives, unless the device failed.
    fn has_left_too_early(&self, peer: usize) -> bool {
        // The acquire load in `state` makes the rank's last points visible.
        let has_left = self.segment.slot(peer).state() == LEFT;
        let point = |rank: usize| {
            let counter = self.counter(rank);
            if self.is_external() { &counter.enqueued } else { &counter.arrived }.load(Ordering::Relaxed)
        };
        has_left && !reached(point(peer), point(self.rank))
    }

    /// Releases all waiting devices. Devices of live ranks may still store to their counters, so the thread repeats this until
    /// it is stopped.
    fn release_all(&self, error: &CommError) {
        let enqueued = self.counter(self.rank).enqueued.load(Ordering::Relaxed);
        let released = enqueued.wrapping_add(RELEASE_DISTANCE);
        for rank in self.lane.slots() {
            // Release: whoever is released by this store sees that the job has ended.
            self.counter(rank).arrived.store(released, Ordering::Release);
        }
        if let Some(abort) = &*lock(&self.on_lost) {
            abort(error);
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        self.lane.slots().filter(|peer| *peer != self.rank)
    }
}

/// Ignores poisoning: no holder leaves the value half written.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::segment::{JobToken, SegmentLayout};
    use super::*;
    use crate::process::Process;

    /// Model of a device: executes its enqueued points as far as the counters of the others allow.
    struct Model {
        rank: usize,
        /// Enqueued points that it has not reached yet.
        queue: std::collections::VecDeque<u32>,
        waits: Option<u32>,
        /// The value that it exposes to peers, and the values read from each rank, by collective.
        exposed: u32,
        read: Vec<Vec<u32>>,
    }

    impl Model {
        /// Takes one step; false if it waits or is idle.
        fn step(&mut self, segment: &SharedSegment, exposed: &[u32]) -> bool {
            if let Some(point) = self.waits {
                let all = 0..segment.layout.world;
                if !all
                    .clone()
                    .all(|rank| reached(segment.counter(0, rank).arrived.load(Ordering::Relaxed), point))
                {
                    return false;
                }
                self.waits = None;
                if point % 2 == 1 {
                    self.read.push(all.map(|rank| exposed[rank]).collect());
                } else {
                    // Work after the collective may overwrite what peers read in it.
                    self.exposed = u32::MAX;
                }
                return true;
            }
            let Some(point) = self.queue.pop_front() else { return false };
            if point % 2 == 1 {
                self.exposed = point / 2;
            }
            segment.counter(0, self.rank).arrived.store(point, Ordering::Relaxed);
            self.waits = Some(point);
            true
        }
    }

    fn barriers(world: usize) -> (Arc<SharedSegment>, Vec<LocalDeviceBarrier>) {
        let segment =
            SharedSegment::create(SegmentLayout::new(world, 0).unwrap(), JobToken::random().unwrap())
                .unwrap()
                .1;
        let segment = Arc::new(segment);
        let (pid, started) = Process::own().unwrap();
        (0..world).for_each(|rank| segment.slot(rank).take(pid, started).unwrap());
        let timing = Timing::default();
        let barrier = |rank| {
            LocalDeviceBarrier::new(Arc::clone(&segment), Lane::all(world), rank, timing, None).unwrap()
        };
        (Arc::clone(&segment), (0..world).map(barrier).collect())
    }

    const OP: OpName = OpName::new(3, "gather", 1);

    proptest::proptest! {
        #![proptest_config(proptest::test_runner::Config::with_cases(64))]

        /// For any interleaving of devices and of hosts running ahead: in collective n every device reads what every rank
        /// exposed for collective n, and none hangs.
        #[test]
        fn devices_read_what_all_exposed_for_the_same_collective(
            world in 1usize..5,
            moves in proptest::collection::vec((0usize..5, proptest::bool::ANY), 0..400),
        ) {
            const COLLECTIVES: u32 = 12;
            let (segment, barriers) = barriers(world);
            let mut models: Vec<Model> = (0..world)
                .map(|rank| Model { rank, queue: [].into(), waits: None, exposed: 0, read: Vec::new() })
                .collect();
            let rest = (0..world * 8 * COLLECTIVES as usize).map(|at| (at % world, at % (3 * world) < world));
            for (rank, is_host) in moves.into_iter().chain(rest) {
                let rank = rank % world;
                let enqueued = segment.counter(0, rank).enqueued.load(Ordering::Relaxed);
                if is_host && enqueued < 2 * COLLECTIVES {
                    models[rank].queue.extend(barriers[rank].next(OP).unwrap());
                } else {
                    let exposed: Vec<u32> = models.iter().map(|model| model.exposed).collect();
                    models[rank].step(&segment, &exposed);
                }
            }
            for model in &models {
                let expected: Vec<Vec<u32>> = (0..COLLECTIVES).map(|number| vec![number; world]).collect();
                proptest::prop_assert_eq!(&model.read, &expected);
            }
        }
    }

    #[test]
    fn points_wrap_around() {
        let (segment, barriers) = barriers(2);
        segment.counter(0, 0).enqueued.store(u32::MAX - 1, Ordering::Relaxed);
        assert_eq!(barriers[0].next(OP).unwrap(), [u32::MAX, 0]);
        assert_eq!(barriers[0].next(OP).unwrap(), [1, 2]);
    }

    #[test]
    fn a_device_that_waits_for_a_rank_that_left_is_released_and_its_host_gets_an_error() {
        let (segment, barriers) = barriers(3);
        let points = barriers[0].next(OP).unwrap();
        segment.slot(1).leave();
        assert!(barriers[0].check(OP).is_ok());
        // The device reaches the collective, and waits.
        segment.counter(0, 0).arrived.store(points[0], Ordering::Relaxed);
        while !reached(segment.counter(0, 1).arrived.load(Ordering::Acquire), points[1]) {
            std::thread::yield_now();
        }
        let error = barriers[0].check(OP).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("left the job"), "{error}");
        assert!(error.contains("rank 0 was in step 3, op gather#1"), "{error}");
        assert!(barriers[2].next(OP).is_err());
    }

    #[test]
    fn a_lost_rank_aborts_devices_that_do_not_wait_on_the_counters() {
        let (segment, barriers) = barriers(2);
        let (aborted, notified) = mpsc::channel();
        barriers[0].on_lost(Some(Box::new(move |error| {
            let _ = aborted.send(error.to_string());
        })));
        segment.end(1, LostReason::Dead);
        let error = notified.recv_timeout(Duration::from_mins(1)).unwrap();
        assert!(error.contains("rank 1") && error.contains("op connect devices"), "{error}");
    }

    #[test]
    fn axes_of_a_mesh_have_counters_of_their_own() {
        let (segment, _) = barriers(6);
        let barrier =
            |lane| LocalDeviceBarrier::new(Arc::clone(&segment), lane, 4, Timing::default(), None).unwrap();
        let [all, group, rail] = [Lane::all(6), Lane::group(4, 2), Lane::rail(4, 2, 6)].map(barrier);
        assert_eq!(group.next(OP).unwrap(), [1, 2]);
        assert_eq!(rail.next(OP).unwrap(), [1, 2]);
        assert_eq!(group.next(OP).unwrap(), [3, 4]);
        let enqueued = |lane| segment.counter(lane, 4).enqueued.load(Ordering::Relaxed);
        assert_eq!([0, 1, 2].map(enqueued), [0, 4, 2]);
        let [all, group, rail] = [&all, &group, &rail].map(|barrier| barrier.counters().unwrap());
        assert_eq!([all.first, all.stride], [0, 64]);
        assert_eq!([group.first, group.stride], [4 * 64, 64]);
        assert_eq!([rail.first, rail.stride], [0, 2 * 64]);
        assert!(all.at + all.bytes as u64 <= group.at && group.at + group.bytes as u64 <= rail.at);
    }

    #[test]
    fn a_rail_that_leaves_the_machine_has_no_counters_and_tells_of_a_neighbour_that_left_too_early() {
        let (segment, _) = barriers(2);
        let across = |rank| barrier_across_machines(Arc::clone(&segment), rank, Timing::default()).unwrap();
        let ends = [across(0), across(1)];
        assert!(ends[0].counters().is_none());
        for end in &ends {
            assert_eq!(end.next(OP).unwrap(), [1, 2]);
        }
        let (aborted, notified) = mpsc::channel();
        ends[0].on_lost(Some(Box::new(move |error| {
            let _ = aborted.send(error.to_string());
        })));
        segment.slot(1).leave();
        // It has taken part in everything so far.
        assert!(notified.recv_timeout(10 * SLICE).is_err() && ends[0].check(OP).is_ok());
        assert_eq!(ends[0].next(OP).unwrap(), [3, 4]);
        let error = notified.recv_timeout(Duration::from_mins(1)).unwrap();
        assert!(error.contains("rank 1") && error.contains("left the job"), "{error}");
    }
}
