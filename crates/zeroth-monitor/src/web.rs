//! The web view: one page on loopback.
//!
//! - It answers GET only, from 127.0.0.1, to a Host that is this machine's loopback.
//! - A connection without a token takes no place from one with: see `connections`.
//! - The URL's token is valid once; the browser that brings it gets a cookie. `/metrics` takes a bearer token of its own.
//! - Nothing of a request names a path: files of a run are found by name in what the model has listed.
//! - The page is one document with its script and style inside, allowed by their hashes; it loads nothing from elsewhere.

mod connections;
mod page;
mod prometheus;
mod request;
mod response;
mod secrets;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::run::Run;
use crate::snapshot::{Sent, snapshot};
use crate::timeline::Timeline;
use connections::{Connection, Connections};
use page::Page;
use request::{Problem, Request};
use response::Response;
use secrets::Secrets;

/// Time for a request to arrive and for a response to be taken.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often runs are read, and pages get what is new.
const PERIOD: Duration = Duration::from_millis(500);
/// A comment is sent to a quiet page, to notice that it is gone.
const QUIET: Duration = Duration::from_secs(10);

/// The web view could not be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum WebError {
    #[error("cannot listen on 127.0.0.1:{port}: {source}; give another --port, or none for a free one")]
    Port { port: u16, source: io::Error },
    #[error("cannot draw a token: {0}")]
    Token(io::Error),
}

/// A server of the web view.
pub struct WebServer {
    listener: TcpListener,
    shared: Arc<Shared>,
}

struct Shared {
    runs: Mutex<Vec<Run>>,
    secrets: Mutex<Secrets>,
    page: Page,
    port: u16,
    connections: Arc<Connections>,
    stops: AtomicBool,
    /// Called with a new URL once the token of the old one is redeemed.
    on_url: Box<dyn Fn(&str) + Send + Sync>,
}

impl WebServer {
    /// Listens on loopback; port 0 takes a free one. `on_url` gets the URL to open, and a new one each time it was used.
    pub fn bind(
        runs: Vec<Run>,
        port: u16,
        on_url: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self, WebError> {
        let failed = |source| WebError::Port { port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let secrets = Secrets::draw().map_err(WebError::Token)?;
        let shared = Shared {
            runs: Mutex::new(runs),
            secrets: Mutex::new(secrets),
            page: Page::new(),
            port,
            connections: Arc::default(),
            stops: AtomicBool::new(false),
            on_url: Box::new(on_url),
        };
        Ok(Self { listener, shared: Arc::new(shared) })
    }

    /// The URL with its token.
    pub fn url(&self) -> String {
        self.shared.url()
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.shared.port
    }

    /// The token for `Authorization: Bearer` at `/metrics`.
    pub fn bearer(&self) -> String {
        locked(&self.shared.secrets).bearer().to_owned()
    }

    /// Serves until `stop` is set.
    pub fn run(&self, stop: &Arc<AtomicBool>) -> io::Result<()> {
        // An accept that ends now and then sees the stop and reads the runs.
        set_socket_timeout(&self.listener, Timeout::Recv, Some(PERIOD / 2))?;
        let mut read = Instant::now();
        let served = loop {
            if stop.load(Ordering::Relaxed) {
                break Ok(());
            }
            match self.listener.accept() {
                Ok((stream, _)) => self.shared.accept(stream),
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                // A connection that is gone already, or too many files: the next may do better.
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            if read.elapsed() >= PERIOD {
                read = Instant::now();
                for run in locked(&self.shared.runs).iter_mut() {
                    run.poll();
                }
            }
        };
        self.shared.stops.store(true, Ordering::Relaxed);
        served
    }
}

/// No holder of these locks panics.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/?token={}", self.port, locked(&self.secrets).token())
    }

    fn accept(self: &Arc<Self>, stream: TcpStream) {
        // Out of descriptors or threads the connection is closed.
        let Ok(connection) = self.connections.admit(&stream) else { return };
        let shared = Arc::clone(self);
        let _ = std::thread::Builder::new().name("connection".to_owned()).spawn(move || {
            // A browser that has gone away is no error.
            let _ = shared.serve(stream, connection);
        });
    }

    fn serve(&self, mut stream: TcpStream, mut connection: Connection) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let response = match request::read(&mut stream, PATIENCE) {
            Ok(request) => {
                let is_known = self.check(&request).is_ok();
                if is_known && !connection.authenticate() {
                    Response::problem(503, "too many pages are open: close some")
                } else if is_known && request.path == "/api/stream" {
                    return self.stream(&mut stream);
                } else {
                    self.answer(&request)
                }
            }
            Err(Problem::Closed) => return Ok(()),
            Err(problem) => Response::problem(problem.status(), problem.reason()),
        };
        response.write(&mut stream)?;
        close(&mut stream);
        Ok(())
    }

    /// What keeps a request from being answered.
    fn check(&self, request: &Request) -> Result<(), Response> {
        if request.method != "GET" {
            return Err(Response::problem(405, "only GET is answered").with("Allow", "GET"));
        }
        if !request.has_own_host() {
            return Err(Response::problem(421, "the Host header is not this machine's loopback"));
        }
        if request.is_cross_site() {
            return Err(Response::problem(403, "requests of other sites are refused"));
        }
        let allowed = if request.path == "/metrics" {
            let bearer = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
            bearer.is_some_and(|bearer| locked(&self.secrets).is_bearer(bearer.trim()))
        } else {
            let name = self.cookie_name();
            request.cookie(&name).is_some_and(|cookie| locked(&self.secrets).is_session(cookie))
        };
        if !allowed {
            let why = if request.path == "/metrics" {
                "give the token that `zeroth monitor --web` has printed as `Authorization: Bearer`"
            } else {
                "open the URL that `zeroth monitor --web` has printed; each is valid once"
            };
            return Err(Response::problem(403, why));
        }
        Ok(())
    }

    /// Cookies of one host are shared by its ports.
    fn cookie_name(&self) -> String {
        format!("zeroth_{}", self.port)
    }

    fn answer(&self, request: &Request) -> Response {
        // The token comes by a link, perhaps from another site: it is exchanged before other checks of origin.
        if let (Some(token), "/", "GET") =
            (request.query("token"), request.path.as_str(), request.method.as_str())
            && request.has_own_host()
        {
            return self.exchange(token);
        }
        if let Err(refusal) = self.check(request) {
            return refusal;
        }
        match request.path.as_str() {
            "/" => self.page.response(),
            "/metrics" => Response::text("text/plain; version=0.0.4", prometheus::text(&locked(&self.runs))),
            "/api/snapshot" => Response::json(&snapshot(&locked(&self.runs))),
            "/api/config" => self.of_run(request, |run| Ok(Response::json(&run.settings()))),
            "/api/timeline" => {
                let name = request.query("name").unwrap_or_default().to_owned();
                let path = self.path_of_timeline(request, &name);
                match path.map(|path| Timeline::read(&path)) {
                    Some(Ok(timeline)) => Response::json(&timeline),
                    Some(Err(error)) => Response::problem(422, &error.to_string()),
                    None => Response::problem(404, "there is no timeline of that name"),
                }
            }
            _ => Response::problem(404, "there is nothing of that name"),
        }
    }

    fn exchange(&self, token: &str) -> Response {
        let session = locked(&self.secrets).exchange(token);
        match session {
            Ok(Some(session)) => {
                (self.on_url)(&self.url());
                let cookie = format!("{}={session}; HttpOnly; SameSite=Strict; Path=/", self.cookie_name());
                Page::entrance().with("Set-Cookie", &cookie)
            }
            Ok(None) => {
                Response::problem(403, "this token is not valid, or was used: open the newest URL printed")
            }
            Err(_) => Response::problem(500, "no random numbers for a session"),
        }
    }

    fn of_run(&self, request: &Request, answer: impl Fn(&Run) -> Result<Response, Response>) -> Response {
        let runs = locked(&self.runs);
        let found =
            request.query("run").and_then(|run| run.parse::<usize>().ok()).and_then(|run| runs.get(run));
        found.map_or_else(
            || Response::problem(404, "there is no such run"),
            |run| answer(run).unwrap_or_else(|no| no),
        )
    }

    /// Only names that the model has listed: no path of a request reaches the file system.
    fn path_of_timeline(&self, request: &Request, name: &str) -> Option<std::path::PathBuf> {
        let runs = locked(&self.runs);
        let run = runs.get(request.query("run")?.parse::<usize>().ok()?)?;
        let listed = run.timelines().iter().find(|listed| *listed == name)?;
        Some(run.folder.join("logs").join(listed))
    }

    /// Server-sent events: everything first, then what is new.
    fn stream(&self, stream: &mut TcpStream) -> io::Result<()> {
        Response::event_stream().write_head(stream)?;
        let mut sent = Sent::default();
        let (mut last, mut spoke) = (String::new(), Instant::now());
        while !self.stops.load(Ordering::Relaxed) {
            let message = sent.next(&locked(&self.runs));
            if message != last {
                stream.write_all(format!("data: {message}\n\n").as_bytes())?;
                (last, spoke) = (message, Instant::now());
            } else if spoke.elapsed() >= QUIET {
                stream.write_all(b": still here\n\n")?;
                spoke = Instant::now();
            }
            std::thread::sleep(PERIOD);
        }
        Ok(())
    }
}

/// Closes a connection so that the response arrives: what the client still sends is read, within bounds.
fn close(stream: &mut TcpStream) {
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
    let mut rest = [0; 4096];
    for _ in 0..16 {
        if !matches!(stream.read(&mut rest), Ok(1..)) {
            break;
        }
    }
}
