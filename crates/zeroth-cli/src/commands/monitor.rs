//! `monitor`: shows runs in the terminal or in a browser.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use zeroth_monitor::{Run, ViewOptions, WebServer, report, snapshot, watch};

use crate::exit::Exit;
use crate::monitor_args::MonitorArgs;
use crate::output::{self, Output};

/// Runs shown at once.
const MOST_RUNS: usize = 16;

pub(super) fn run(arguments: &MonitorArgs, output: &Output) -> anyhow::Result<Exit> {
    let count = arguments.runs.len();
    anyhow::ensure!(count <= MOST_RUNS, "{count} runs were given; {MOST_RUNS} are shown at most");
    let mut runs = Vec::new();
    for folder in &arguments.runs {
        match Run::open(folder) {
            Ok(run) => runs.push(run),
            Err(error) => output::error(&error.to_string()),
        }
    }
    if runs.len() < count {
        return Ok(Exit::Wrong);
    }
    if arguments.web {
        return serve(runs, arguments.port.unwrap_or(0), output);
    }
    if output.is_json() {
        output::json(&snapshot(&runs))?;
    } else if std::io::stdout().is_terminal() {
        let stop = stop_flag()?;
        let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let shown = watch(runs, ViewOptions { colour, run: arguments.of_run }, &stop);
        // A terminal that has hung up cannot be restored.
        if !stop.load(Ordering::Relaxed) {
            shown?;
        }
    } else {
        output::text(&report(&runs));
    }
    Ok(Exit::Done)
}

fn serve(runs: Vec<Run>, port: u16, output: &Output) -> anyhow::Result<Exit> {
    let stop = stop_flag()?;
    let is_json = output.is_json();
    let on_url = move |url: &str| {
        if !is_json {
            output::note(&format!("opened in a browser; for another one: {url}"));
        }
    };
    let server = WebServer::bind(runs, port, on_url)?;
    if is_json {
        output::json(&json!({"url": server.url(), "bearer": server.bearer()}))?;
    } else {
        output::note(&format!("open {}", server.url()));
        output::note(&format!("/metrics for Prometheus: Authorization: Bearer {}", server.bearer()));
        output::note("Ctrl-C ends it");
    }
    server.run(&stop)?;
    Ok(Exit::Done)
}

/// Set by the signals that end a view.
fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
