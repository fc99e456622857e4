//! The end of a process whose devices may wait for a lost rank forever.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use zeroth_comm::{CommError, Liveness, OnLost, OpName};

/// The longest time until a rank that took others' connections with it is known to be lost: the silence of a lost host, and what
/// its verdict takes.
const VERDICT: Duration = Duration::from_secs(6);
const LOOK: Duration = Duration::from_millis(10);

/// The time for a rank to end with its own message.
const NOTICE: Duration = Duration::from_secs(2);

/// A handler for [`zeroth_comm::Liveness::on_lost`] that ends waits by `abort`. If the process is still there two seconds later, it
/// prints the loss and ends the process without cleaning up: aborting a communicator of NCCL may hang.
pub fn end_soon_after_loss(abort: Box<dyn Fn() + Send>) -> OnLost {
    let begun = AtomicBool::new(false);
    Box::new(move |error| {
        abort();
        if begun.swap(true, Ordering::Relaxed) {
            return;
        }
        let message = error.to_string();
        let end = move || {
            std::thread::sleep(NOTICE);
            end_now(&message);
        };
        // Where no thread can be started, this one waits.
        if std::thread::Builder::new().name("end".to_owned()).spawn(end.clone()).is_err() {
            end();
        }
    })
}

/// Waits for the loss that explains an error of a connection between devices: connections fail before the loss is known. Returns
/// the error that ended the job, or nothing if no rank is lost.
pub fn await_verdict(liveness: &(impl Liveness + ?Sized), op: OpName) -> Result<(), CommError> {
    let begun = Instant::now();
    while begun.elapsed() < VERDICT {
        liveness.check(op)?;
        std::thread::sleep(LOOK);
    }
    liveness.check(op)
}

#[allow(clippy::print_stderr, reason = "the last words of a process, which nobody else can say")]
fn end_now(message: &str) {
    eprintln!("error: {message}; the process did not end by itself within {} s", NOTICE.as_secs());
    signal_hook::low_level::exit(1);
}
