//! `--monitor`: the terminal view as a child process. Leaving it leaves the run alone; the end of the run ends it.

use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cli::TrainArgs;
use crate::output::{self, Output};
use crate::stderr_writer;

/// How often the child is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Time for the child to restore the terminal.
const PATIENCE: Duration = Duration::from_secs(2);

/// A view that is open. Dropped, it is closed.
pub(super) struct View(Arc<Mutex<Option<Child>>>);

/// Opens the view if `--monitor` asks for it and there is a terminal.
pub(super) fn open(arguments: &TrainArgs, output: &Output) -> Option<View> {
    if !arguments.monitor {
        return None;
    }
    let folder = arguments.output.display();
    let has_terminal =
        std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
    if !has_terminal || output.is_json() {
        output::note(&format!(
            "note: --monitor needs a terminal; `zeroth monitor {folder}` opens the view in another"
        ));
        return None;
    }
    let name = std::env::args_os().next().unwrap_or_else(|| "zeroth".into());
    let spawned = Command::new("/proc/self/exe")
        .arg0(name)
        .arg("monitor")
        .arg(&arguments.output)
        .arg("--of-run")
        .arg(std::process::id().to_string())
        .spawn();
    let child = match spawned {
        Ok(child) => Arc::new(Mutex::new(Some(child))),
        Err(error) => {
            output::note(&format!("note: the view of --monitor cannot be opened: {error}"));
            return None;
        }
    };
    // The screen belongs to the view until it is left; messages wait.
    stderr_writer::hold();
    let watched = Arc::clone(&child);
    let looks = std::thread::Builder::new().name("view".to_owned()).spawn(move || {
        while !has_ended(&watched) {
            std::thread::sleep(LOOK);
        }
        stderr_writer::release();
    });
    let view = View(child);
    // Without the thread nobody would release the messages.
    looks.ok().map(|_| view)
}

fn has_ended(child: &Mutex<Option<Child>>) -> bool {
    let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(running) = child.as_mut() else { return true };
    let is_running = matches!(running.try_wait(), Ok(None));
    if !is_running {
        *child = None;
    }
    !is_running
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(child) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            zeroth_monitor::close_view(child);
        }
        let begun = Instant::now();
        while !has_ended(&self.0) && begun.elapsed() < PATIENCE {
            std::thread::sleep(LOOK);
        }
        if let Some(child) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
        stderr_writer::release();
    }
}
