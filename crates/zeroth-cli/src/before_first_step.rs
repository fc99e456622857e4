//! What a signal does before the first step: the run is undone and the process ends, whatever it is waiting for.
//!
//! Until then there is nothing to save, and the thread that would have to look at a flag may sit in a read that never
//! returns. So a thread of its own waits for signals and ends the process itself. From the first step on it only answers.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use signal_hook::low_level::{exit, pipe};
use zeroth::comm::FirstStep;

use crate::output;
use crate::signals::Ended;

/// How long undoing may take: a network that has gone away must not hold up the end, nor may the kernel, which lets no thread
/// map memory while another one populates gigabytes of it.
const PATIENCE: Duration = Duration::from_millis(1200);
/// How long a rank of a stopped job waits to be ended before it finds out by itself that others are gone.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// How far the run is.
enum Stage {
    /// Only this process, and nothing that it cannot undo.
    Preparing,
    /// Ranks run: their launcher's loop acts on signals.
    Launched,
    /// One of several ranks: the first step is a matter of all of them.
    Joined(FirstStep),
    /// Steps run: there is something to save.
    Stepping,
    /// A signal came before the first step: the process is about to end.
    Stopped,
}

/// What was written so far.
struct Written {
    /// What takes it back, the newest last.
    undo: Vec<Box<dyn FnOnce() + Send>>,
    /// What is left then, in words.
    left: &'static str,
}

/// A run on its way to the first step.
pub(crate) struct BeforeFirstStep {
    /// Never locked for long.
    stage: Mutex<Stage>,
    /// Locked while files are written: they are undone whole or not at all.
    written: Mutex<Written>,
    undoing: Mutex<Undoing>,
    changed: Condvar,
    is_told: AtomicBool,
    /// Whether this process speaks for its job.
    speaks: bool,
}

/// What the thread that undoes is at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Undoing {
    No,
    Asked(Ended),
    Done,
}

impl BeforeFirstStep {
    /// Waits for `stops` on a thread of its own; `asked` says what they ask for.
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
            // A byte comes with each signal, after its flags are set.
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

    /// Undoes the run and ends the process. Ranks that this process started must be gone.
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

    /// A thread of its own, because each part of it may hang: in a write that holds the lock, in removing, in telling. It
    /// is there from the start, with memory of its own: see [`PATIENCE`].
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
        // Still locked: nothing is written any more.
        std::thread::sleep(PATIENCE);
    }

    /// Adds to what is undone.
    pub(crate) fn on_stop(&self, undo: impl FnOnce() + Send + 'static) {
        locked(&self.written).undo.push(Box::new(undo));
    }

    /// A run that goes on has something that stays.
    pub(crate) fn keeps_checkpoints(&self) {
        locked(&self.written).left = "its checkpoints are as they were";
    }

    /// Writes files that are undone whole or not at all.
    pub(crate) fn write<T>(&self, write: impl FnOnce() -> T) -> T {
        let _held = locked(&self.written);
        write()
    }

    /// From here on the launcher's loop acts on signals.
    pub(crate) fn launch(&self) {
        self.enter(Stage::Launched);
    }

    /// From here on the first step is a matter of all ranks.
    pub(crate) fn join(&self, first_step: FirstStep) {
        self.enter(Stage::Joined(first_step));
    }

    /// The first step begins: from here on a signal saves.
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

/// Whoever panics with one of them locked ends the process anyway.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a first signal is answered with once there is something to save.
pub(crate) const FINISHING: &str = "finishing the step and saving; once more Ctrl-C stops at once";

/// A job that was stopped before its first step has no steps: its launcher or a signal ends this process. Where neither
/// does, the next collective finds the rank that is gone.
pub(crate) fn wait_for_the_end() {
    std::thread::sleep(LAST_WAIT);
}
