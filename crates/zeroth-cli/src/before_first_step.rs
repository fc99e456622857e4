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
use zeroth::comm::FirstStep;

use crate::output;
use crate::signals::Ended;

/// Time limit for the cleanup: an unresponsive network must not delay the exit, nor the kernel, which blocks mmap
/// while another thread populates gigabytes.
const PATIENCE: Duration = Duration::from_millis(1200);
/// How long a rank of a stopped job waits to be killed before it detects the loss of its peers itself.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// The phase of the run.
enum Stage {
    /// Only this process exists, and it can undo everything.
    Preparing,
    /// Ranks are running; the launcher's loop handles signals.
    Launched,
    /// One of several ranks, which agree on whether the first step begins.
    Joined(FirstStep),
    /// Steps are running, so there is something to save.
    Stepping,
    /// A signal arrived before the first step; the process is about to exit.
    Stopped,
}

/// Files written so far.
struct Written {
    /// Cleanup actions, run in reverse order.
    undo: Vec<Box<dyn FnOnce() + Send>>,
    /// The message about what remains.
    left: &'static str,
}

/// Signal handling of a run up to its first step.
pub(crate) struct BeforeFirstStep {
    /// Held only briefly.
    stage: Mutex<Stage>,
    /// Held while files are written, so that they are removed completely or not at all.
    written: Mutex<Written>,
    undoing: Mutex<Undoing>,
    changed: Condvar,
    is_told: AtomicBool,
    /// Whether this process prints messages for its job.
    speaks: bool,
}

/// The state of the cleanup thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Undoing {
    No,
    Asked(Ended),
    Done,
}

impl BeforeFirstStep {
    /// Waits for `stops` on a dedicated thread; `asked` returns the pending request.
    pub(crate) fn watch(
        speaks: bool,
        stops: &[i32],
        asked: impl Fn() -> Option<Ended> + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let written = Written { undo: Vec::new(), left: "nothing was written" };
        let run = Arc::new(Self {
            stage: Mutex::new(Stage::Preparing),
            written: Mutex::new(written),
            undoing: Mutex::new(Undoing::No),
            changed: Condvar::new(),
            is_told: AtomicBool::new(false),
            speaks,
        });
        let (mut signals, from_handler) = UnixStream::pair()?;
        for signal in stops {
            pipe::register(*signal, from_handler.try_clone()?)?;
        }
        let watched = Arc::clone(&run);
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            let mut is_answered = false;
            // Each signal sends a byte, after its flags are set.
            while signals.read_exact(&mut [0]).is_ok() {
                if let Some(asked) = asked() {
                    watched.act(asked, &mut is_answered);
                }
            }
        })?;
        let undoes = Arc::clone(&run);
        std::thread::Builder::new().name("undo".to_owned()).spawn(move || undoes.undo_when_asked())?;
        Ok(run)
    }

    fn act(&self, asked: Ended, is_answered: &mut bool) {
        let mut stage = locked(&self.stage);
        let stops = match &*stage {
            Stage::Preparing => true,
            Stage::Joined(first_step) => first_step.stop(),
            Stage::Stepping => false,
            Stage::Launched | Stage::Stopped => return,
        };
        if stops {
            *stage = Stage::Stopped;
            drop(stage);
            self.stop(asked);
        }
        drop(stage);
        if self.speaks && !std::mem::replace(is_answered, true) {
            output::note(FINISHING);
        }
    }

    /// Cleans up and exits the process. Ranks started by this process must have exited.
    pub(crate) fn stop(&self, asked: Ended) -> ! {
        let mut undoing = locked(&self.undoing);
        *undoing = Undoing::Asked(asked);
        self.changed.notify_all();
        let is_done = |undoing: &mut Undoing| *undoing != Undoing::Done;
        drop(self.changed.wait_timeout_while(undoing, PATIENCE, is_done));
        if self.speaks && !self.is_told.load(Ordering::Relaxed) {
            let _ = writeln!(io::stderr(), "stopped by {} before the first step", asked.name());
        }
        exit(i32::from(asked.exit_code()))
    }

    /// Runs on its own thread, because each part may block: a write that holds the lock, the removal, the message.
    /// The thread exists from the start, with its own heap memory: see [`PATIENCE`].
    fn undo_when_asked(&self) {
        drop(std::hint::black_box(vec![0_u8; 1 << 16]));
        let is_asked = |undoing: &mut Undoing| *undoing == Undoing::No;
        let undoing = self.changed.wait_while(locked(&self.undoing), is_asked);
        let Undoing::Asked(asked) = *undoing.unwrap_or_else(PoisonError::into_inner) else { return };
        let mut written = locked(&self.written);
        while let Some(undo) = written.undo.pop() {
            undo();
        }
        self.is_told.store(true, Ordering::Relaxed);
        if self.speaks {
            output::note(&format!("stopped by {} before the first step; {}", asked.name(), written.left));
        }
        *locked(&self.undoing) = Undoing::Done;
        self.changed.notify_all();
        // The lock is kept, so nothing more is written.
        std::thread::sleep(PATIENCE);
    }

    /// Adds a cleanup action.
    pub(crate) fn on_stop(&self, undo: impl FnOnce() + Send + 'static) {
        locked(&self.written).undo.push(Box::new(undo));
    }

    /// A resumed run keeps its checkpoints.
    pub(crate) fn keeps_checkpoints(&self) {
        locked(&self.written).left = "its checkpoints are unchanged";
    }

    /// Writes files that are removed completely or not at all.
    pub(crate) fn write<T>(&self, write: impl FnOnce() -> T) -> T {
        let _held = locked(&self.written);
        write()
    }

    /// From here on the launcher's loop handles signals.
    pub(crate) fn launch(&self) {
        self.enter(Stage::Launched);
    }

    /// From here on all ranks agree on the first step.
    pub(crate) fn join(&self, first_step: FirstStep) {
        self.enter(Stage::Joined(first_step));
    }

    /// Begins the first step: from here on a signal saves a checkpoint.
    pub(crate) fn begin(&self) {
        let is_ours = match &*locked(&self.stage) {
            Stage::Joined(first_step) => first_step.begin(),
            _ => true,
        };
        if is_ours {
            self.enter(Stage::Stepping);
        } else {
            wait_for_the_end();
        }
    }

    fn enter(&self, next: Stage) {
        let mut stage = locked(&self.stage);
        if matches!(*stage, Stage::Stopped) {
            drop(stage);
            wait_for_the_end();
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
pub(crate) const FINISHING: &str =
    "finishing the step and saving a checkpoint; press Ctrl-C again to stop at once";

/// Waits to be killed by the launcher or a signal, as a job stopped before its first step runs none. Otherwise the
/// next collective detects the missing rank.
pub(crate) fn wait_for_the_end() {
    std::thread::sleep(LAST_WAIT);
}
