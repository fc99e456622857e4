//! Watching the ranks of a host, and with them the job, while a rank waits outside of its segment: on a rail.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::peer_monitor::PeerMonitor;
use super::segment::SharedSegment;
use super::wait::{COUNTED, SLICE};
use crate::hosts::HostWatch;
use crate::join_options::Timing;
use crate::op_name::OpName;

struct Watched {
    monitor: PeerMonitor,
    looked: Instant,
    op: Option<OpName>,
}

/// What the rank of a slot calls while it polls a collective along a rail: it fails once the job has ended, and looks at the
/// ranks of its own host. A call costs a load where nothing is due.
pub(crate) fn host_watch(segment: Arc<SharedSegment>, slot: usize, timing: Timing) -> HostWatch {
    let mut monitor = PeerMonitor::new(slot, segment.layout.world, timing);
    monitor.begin(&segment);
    let watched = Mutex::new(Watched { monitor, looked: Instant::now(), op: None });
    Arc::new(move |op| {
        if let Some(ended) = segment.ended() {
            return Err(segment.lost_on(slot, op, ended));
        }
        // A second thread of the rank that polls at this moment looks for both.
        let Ok(mut watched) = watched.try_lock() else { return Ok(()) };
        if watched.op != Some(op) {
            watched.op = Some(op);
            segment.slot(slot).enter(op);
        }
        let time: Duration = watched.looked.elapsed();
        if time < SLICE {
            return Ok(());
        }
        watched.looked = Instant::now();
        match watched.monitor.look(&segment, slot, time.min(COUNTED)) {
            Ok(_) => Ok(()),
            Err((lost, reason)) => {
                let ended = segment.end(lost, reason);
                Err(segment.lost_on(slot, op, ended))
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::LocalJob;
    use crate::process::Process;
    use crate::{JoinOptions, LostReason};

    #[test]
    fn a_rank_on_a_rail_learns_of_a_dead_neighbour_and_of_a_verdict() {
        let job = LocalJob::create(3, 0).unwrap();
        let _own = job.join(0, &JoinOptions::default()).unwrap();
        let segment = Arc::clone(job.segment());
        segment.header().hosts.set(3, 6, "n1");
        let (pid, started) = Process::own().unwrap();
        segment.slot(1).take(pid, started).unwrap();
        // A process that is gone: the pid is another one's by now.
        segment.slot(2).take(pid, started + 1).unwrap();
        let watch = host_watch(Arc::clone(&segment), 0, Timing::default());
        let op = OpName::new(2, "rail", 5);
        let began = Instant::now();
        let error = loop {
            match watch(op) {
                Ok(()) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => break error.to_string(),
            }
            assert!(began.elapsed() < Duration::from_secs(20), "nobody noticed");
        };
        assert!(error.contains("rank 5 (host n1, pid ") && error.contains(") is dead"), "{error}");
        assert!(error.contains("rank 3 was in step 2, op rail#5"), "{error}");
        assert_eq!(segment.slot(0).last_op().unwrap().name, "rail");
        assert!(matches!(segment.ended(), Some(super::super::EndedBy::Slot(2, LostReason::Dead))));
    }
}
