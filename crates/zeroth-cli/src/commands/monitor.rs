//! `monitor`: shows runs in the terminal or in a browser.

use std::io::IsTerminal;
use std::net::IpAddr;
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
    let tunnel = tunnel(server.port(), std::env::var("SSH_CONNECTION").ok().as_deref());
    if is_json {
        output::json(&json!({"url": server.url(), "bearer": server.bearer(), "ssh": tunnel}))?;
    } else {
        output::note(&format!("open {}", server.url()));
        output::note(&format!("from another machine, first there: {tunnel}"));
        output::note(&format!("/metrics for Prometheus: Authorization: Bearer {}", server.bearer()));
        output::note("Ctrl-C ends it");
    }
    server.run(&stop)?;
    Ok(Exit::Done)
}

/// The command that makes the page reachable on another machine, at the URL that is printed. A session over ssh knows the
/// address by which this machine was reached.
fn tunnel(port: u16, connection: Option<&str>) -> String {
    let mut fields = connection.unwrap_or_default().split(' ').skip(2);
    let address = fields.next().and_then(|field| field.parse::<IpAddr>().ok());
    let host = match address {
        Some(address) => address.to_string(),
        None => own_name(),
    };
    let ssh_port = fields.next().and_then(|field| field.parse::<u16>().ok()).filter(|port| *port != 22);
    let option = ssh_port.map(|port| format!("-p {port} ")).unwrap_or_default();
    format!("ssh -N -L {port}:127.0.0.1:{port} {option}{host}")
}

/// The name of this machine.
fn own_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "HOST".to_owned() } else { name.trim().to_owned() }
}

/// Set by the signals that end a view.
fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tunnel_leads_to_the_address_that_ssh_used() {
        assert_eq!(
            tunnel(8080, Some("10.0.0.7 51234 192.0.2.3 22")),
            "ssh -N -L 8080:127.0.0.1:8080 192.0.2.3"
        );
        assert_eq!(tunnel(9, Some("::1 5 2001:db8::3 2222")), "ssh -N -L 9:127.0.0.1:9 -p 2222 2001:db8::3");
        for unknown in [None, Some(""), Some("a b $(id) x")] {
            assert_eq!(tunnel(9, unknown), format!("ssh -N -L 9:127.0.0.1:9 {}", own_name()));
        }
    }
}
