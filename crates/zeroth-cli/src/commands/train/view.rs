//! `--monitor`: the terminal view as a child process. Leaving it leaves the run alone; the end of the run ends it. A view that is
//! killed or stopped cannot restore the terminal: this process does.

use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zeroth_monitor::TerminalModes;

use crate::cli::TrainArgs;
use crate::output::{self, Output};
use crate::stderr_writer;

/// How often the child is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Time for the child to restore the terminal.
const PATIENCE: Duration = Duration::from_secs(2);

/// A view that is open. Dropped, it is closed.
pub(super) struct View(Arc<Mutex<OpenView>>);

struct OpenView {
    /// `None` once it has ended.
    child: Option<Child>,
    /// The terminal before it was opened.
    modes: Option<TerminalModes>,
}

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
    let modes = TerminalModes::save().ok();
    let name = std::env::args_os().next().unwrap_or_else(|| "zeroth".into());
    let spawned = Command::new("/proc/self/exe")
        .arg0(name)
        .arg("monitor")
        .arg(&arguments.output)
        .arg("--of-run")
        .arg(std::process::id().to_string())
        .spawn();
    let view = match spawned {
        Ok(child) => Arc::new(Mutex::new(OpenView { child: Some(child), modes })),
        Err(error) => {
            output::note(&format!("note: the view of --monitor cannot be opened: {error}"));
            return None;
        }
    };
    // The screen belongs to the view until it is left; messages wait.
    stderr_writer::hold();
    let (watched, folder) = (Arc::clone(&view), folder.to_string());
    let looks = std::thread::Builder::new().name("view".to_owned()).spawn(move || {
        let ended = loop {
            if let Some(ended) = locked(&watched).look() {
                break ended;
            }
            std::thread::sleep(LOOK);
        };
        stderr_writer::release();
        if ended == Ended::Broken {
            output::note(&format!(
                "note: the view of --monitor was killed or stopped, and the run goes on; `zeroth monitor {folder}` opens another"
            ));
        }
    });
    let view = View(view);
    // Without the thread nobody would release the messages.
    looks.ok().map(|_| view)
}

/// How a view ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// It has restored the terminal.
    Well,
    /// It could not.
    Broken,
}

impl OpenView {
    /// Whether it has ended. A stopped one is ended: it holds the terminal, and Ctrl-C would reach nobody.
    fn look(&mut self) -> Option<Ended> {
        let Some(child) = self.child.as_mut() else { return Some(Ended::Well) };
        if zeroth_monitor::is_stopped(child) {
            let _ = child.kill();
            let _ = child.wait();
            return Some(self.broken());
        }
        match child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) if status.code().is_some() => {
                self.child = None;
                Some(Ended::Well)
            }
            _ => Some(self.broken()),
        }
    }

    fn broken(&mut self) -> Ended {
        self.child = None;
        if let Some(modes) = &self.modes {
            // The terminal may be gone, too.
            let _ = modes.restore();
        }
        Ended::Broken
    }
}

fn locked(view: &Mutex<OpenView>) -> MutexGuard<'_, OpenView> {
    view.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(child) = &locked(&self.0).child {
            zeroth_monitor::close_view(child);
        }
        let begun = Instant::now();
        while locked(&self.0).look().is_none() && begun.elapsed() < PATIENCE {
            std::thread::sleep(LOOK);
        }
        let mut view = locked(&self.0);
        if let Some(child) = view.child.as_mut() {
            let _ = child.kill();
            let _ = child.wait();
            view.broken();
        }
        drop(view);
        stderr_writer::release();
    }
}
