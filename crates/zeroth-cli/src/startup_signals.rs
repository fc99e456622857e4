//! Handles signals before the first step: the run's files are removed and the process exits, whatever it is blocked
//! on.
//!
//! Until then there is nothing to save, and the main thread may be blocked in a read that never returns. So a
//! dedicated thread waits for signals and exits the process itself. After the first step has begun it only
//! acknowledges them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use signal_hook::low_level::{exit, pipe};
use zeroth::comm::JobControl;

use crate::output;
use crate::stop_signal::StopSignal;

/// Time limit for the cleanup: an unresponsive network must not delay the exit, nor the kernel, which blocks mmap
/// while another thread populates gigabytes.
const CLEANUP_TIMEOUT: Duration = Duration::from_millis(1200);
/// How long a rank of a stopped job waits to be killed before it detects the loss of its peers itself.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// The phase of the run.
enum Stage {
    /// Only this process exists, and it can undo everything.
    Preparing,
    /// Ranks are running; the launcher's loop handles signals.
    Launched,
    /// One of several ranks, which agree on whether the first step begins.
    Joined(Box<dyn JobControl>),
    /// Steps are running, so there is something to save.
    Stepping,
    /// A signal arrived before the first step; the process is about to exit.
    Stopped,
}

/// What a signal interrupts, as messages name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InterruptedWork {
    /// The steps of a run.
    Training,
    /// The tokens of a teacher cache.
    TeacherCache,
    /// A model folder, which is not kept unless it is whole.
    ModelFolder,
}

impl InterruptedWork {
    /// The answer to the first signal once there is something to save.
    const fn acknowledgement(self) -> &'static str {
        match self {
            Self::Training | Self::ModelFolder => STOP_ACKNOWLEDGEMENT,
            Self::TeacherCache => {
                "finishing the batch and saving what is cached; press Ctrl-C again to stop at once"
            }
        }
    }

    /// Until when there is nothing to save.
    const fn begin(self) -> &'static str {
        match self {
            Self::Training => " before the first step",
            Self::TeacherCache => " before the first token was cached",
            Self::ModelFolder => "",
        }
    }

    /// What remains if nothing says otherwise.
    const fn left(self) -> &'static str {
        match self {
            Self::Training | Self::TeacherCache => "nothing was written",
            Self::ModelFolder => "no unfinished files are left",
        }
    }
}

/// Files written so far.
struct Written {
    /// Cleanup actions, run in reverse order.
    undo: Vec<Box<dyn FnOnce() + Send>>,
    /// The message about what remains.
    left: &'static str,
}

/// What a signal before the first step does with written files.
pub(crate) enum OnStop {
    /// Removes them.
    Undo(Box<dyn FnOnce() + Send>),
    /// Leaves them: a resumed run keeps its checkpoints.
    KeepCheckpoints,
}

/// Signal handling of a run up to its first step.
pub(crate) struct StartupSignals {
    /// Held only briefly.
    stage: Mutex<Stage>,
    /// Held while files are written, so that they are removed completely or not at all.
    written: Mutex<Written>,
    cleanup: Mutex<Cleanup>,
    changed: Condvar,
    is_reported: AtomicBool,
    is_acknowledged: AtomicBool,
    /// Whether this process prints messages for its job.
    prints: bool,
    work: InterruptedWork,
}

/// The state of the cleanup thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cleanup {
    No,
    Requested(StopSignal),
    Done,
}

impl StartupSignals {
    /// Waits for `stops` on a dedicated thread; `signal` returns the pending request.
    pub(crate) fn watch(
        prints: bool,
        work: InterruptedWork,
        stops: &[i32],
        signal: impl Fn() -> Option<StopSignal> + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let written = Written { undo: Vec::new(), left: work.left() };
        let run = Arc::new(Self {
            stage: Mutex::new(Stage::Preparing),
            written: Mutex::new(written),
            cleanup: Mutex::new(Cleanup::No),
            changed: Condvar::new(),
            is_reported: AtomicBool::new(false),
            is_acknowledged: AtomicBool::new(false),
            prints,
            work,
        });
        let (mut signals, from_handler) = UnixStream::pair()?;
        for signal in stops {
            pipe::register(*signal, from_handler.try_clone()?)?;
        }
        let watched = Arc::clone(&run);
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            // Each signal sends a byte, after its flags are set.
            while signals.read_exact(&mut [0]).is_ok() {
                if let Some(signal) = signal() {
                    watched.act(signal);
                }
            }
        })?;
        let undoes = Arc::clone(&run);
        std::thread::Builder::new()
            .name("undo".to_owned())
            .spawn(move || undoes.clean_up_when_requested())?;
        Ok(run)
    }

    fn act(&self, signal: StopSignal) {
        let mut stage = locked(&self.stage);
        let stops = match &*stage {
            Stage::Preparing => true,
            Stage::Joined(control) => control.stop_before_first_step(),
            Stage::Stepping => false,
            Stage::Launched | Stage::Stopped => return,
        };
        if stops {
            *stage = Stage::Stopped;
            drop(stage);
            self.stop(signal);
        }
        drop(stage);
        self.acknowledge();
    }

    /// Says once that the first signal was seen. Work that ends because of it calls this, too: it may be faster than the
    /// thread that waits for signals.
    pub(crate) fn acknowledge(&self) {
        if self.prints && !self.is_acknowledged.swap(true, Ordering::Relaxed) {
            output::note(self.work.acknowledgement());
        }
    }

    /// Cleans up and exits the process. Ranks started by this process must have exited.
    pub(crate) fn stop(&self, signal: StopSignal) -> ! {
        let mut cleanup = locked(&self.cleanup);
        *cleanup = Cleanup::Requested(signal);
        self.changed.notify_all();
        let is_done = |cleanup: &mut Cleanup| *cleanup != Cleanup::Done;
        drop(self.changed.wait_timeout_while(cleanup, CLEANUP_TIMEOUT, is_done));
        if self.prints && !self.is_reported.load(Ordering::Relaxed) {
            let _ = writeln!(io::stderr(), "stopped by {}{}", signal.name(), self.work.begin());
        }
        exit(i32::from(signal.exit_code()))
    }

    /// Runs on its own thread, because each part may block: a write that holds the lock, the removal, the message.
    /// The thread exists from the start, with its own heap memory: see [`CLEANUP_TIMEOUT`].
    fn clean_up_when_requested(&self) {
        drop(std::hint::black_box(vec![0_u8; 1 << 16]));
        let is_asked = |cleanup: &mut Cleanup| *cleanup == Cleanup::No;
        let cleanup = self.changed.wait_while(locked(&self.cleanup), is_asked);
        let Cleanup::Requested(signal) = *cleanup.unwrap_or_else(PoisonError::into_inner) else { return };
        let mut written = locked(&self.written);
        while let Some(undo) = written.undo.pop() {
            undo();
        }
        self.is_reported.store(true, Ordering::Relaxed);
        if self.prints {
            output::note(&format!("stopped by {}{}; {}", signal.name(), self.work.begin(), written.left));
        }
        *locked(&self.cleanup) = Cleanup::Done;
        self.changed.notify_all();
        // The lock is kept, so nothing more is written.
        std::thread::sleep(CLEANUP_TIMEOUT);
    }

    /// Adds a cleanup action.
    pub(crate) fn on_stop(&self, undo: impl FnOnce() + Send + 'static) {
        locked(&self.written).undo.push(Box::new(undo));
    }

    /// Writes files into a run folder. They are removed completely or not at all.
    pub(crate) fn write<T>(&self, write: impl FnOnce() -> T) -> T {
        let _held = locked(&self.written);
        write()
    }

    /// As [`Self::write`], with a cleanup action that is added before a signal can be handled.
    pub(crate) fn write_with_cleanup<T, E>(
        &self,
        write: impl FnOnce() -> Result<(T, OnStop), E>,
    ) -> Result<T, E> {
        let mut written = locked(&self.written);
        let (value, on_stop) = write()?;
        match on_stop {
            OnStop::Undo(undo) => written.undo.push(undo),
            OnStop::KeepCheckpoints => written.left = "its checkpoints are unchanged",
        }
        Ok(value)
    }

    /// From here on the launcher's loop handles signals.
    pub(crate) fn launch(&self) {
        self.enter(Stage::Launched);
    }

    /// From here on all ranks agree on the first step.
    pub(crate) fn join(&self, control: Box<dyn JobControl>) {
        self.enter(Stage::Joined(control));
    }

    /// Begins the first step: from here on a signal saves a checkpoint.
    pub(crate) fn begin(&self) {
        let is_ours = match &*locked(&self.stage) {
            Stage::Joined(control) => control.begin_first_step(),
            _ => true,
        };
        if is_ours {
            self.enter(Stage::Stepping);
        } else {
            wait_to_be_killed();
        }
    }

    fn enter(&self, next: Stage) {
        let mut stage = locked(&self.stage);
        if matches!(*stage, Stage::Stopped) {
            drop(stage);
            wait_to_be_killed();
        } else {
            *stage = next;
        }
    }
}

/// A panic with a lock held ends the process anyway.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The acknowledgement of the first signal once there is something to save.
pub(crate) const STOP_ACKNOWLEDGEMENT: &str =
    "finishing the step and saving a checkpoint; press Ctrl-C again to stop at once";

/// Waits to be killed by the launcher or a signal, as a job stopped before its first step runs none. Otherwise the
/// next collective detects the missing rank.
pub(crate) fn wait_to_be_killed() {
    std::thread::sleep(KILL_TIMEOUT);
}
