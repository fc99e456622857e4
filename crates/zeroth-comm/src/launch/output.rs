//! Where the output of ranks goes: on as it is, line by line to a function, or to files.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use super::LaunchError;

/// A longer line comes in parts.
const LONGEST: u64 = 1 << 16;
/// How long the readers may go on after the last rank has ended: something it started may hold the pipe open.
const LINGER: Duration = Duration::from_secs(1);

/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Its standard output.
    Out,
    /// Its standard error.
    Err,
}

/// A line that a rank wrote. Shown, it carries the rank: `[rank 3] …`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The rank that wrote it.
    pub rank: usize,
    /// Where to.
    pub stream: Stream,
    /// The line without its end; bytes that are no UTF-8 are replaced.
    pub text: String,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[rank {}] {}", self.rank, self.text)
    }
}

/// Where the output of ranks goes.
#[derive(Clone)]
pub enum Output {
    /// To the launcher's own streams, as it is.
    Inherit,
    /// To a function, line by line, from a thread for each stream.
    Lines(Arc<dyn Fn(Line) + Send + Sync>),
    /// To `rank-0.out`, `rank-0.err` and so on in this folder, which must exist.
    Files(PathBuf),
}

impl Output {
    pub(super) fn attach(&self, rank: usize, command: &mut Command) -> Result<(), LaunchError> {
        // Ranks share a terminal; one that reads from it would be stopped or take what is meant for another.
        command.stdin(Stdio::null());
        match self {
            Self::Inherit => {}
            Self::Lines(_) => {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            Self::Files(folder) => {
                let make = |stream: &str| {
                    let path = folder.join(format!("rank-{rank}.{stream}"));
                    File::create(&path).map_err(|source| LaunchError::Output { rank, path, source })
                };
                command.stdout(make("out")?).stderr(make("err")?);
            }
        }
        Ok(())
    }
}

/// The threads that read what ranks write.
pub(super) struct Readers {
    running: Sender<()>,
    ended: Receiver<()>,
}

impl Default for Readers {
    fn default() -> Self {
        let (running, ended) = mpsc::channel();
        Self { running, ended }
    }
}

impl Readers {
    pub(super) fn read(&mut self, rank: usize, child: &mut Child, output: &Output) -> io::Result<()> {
        let Output::Lines(write) = output else { return Ok(()) };
        let streams = [
            child.stdout.take().map(|pipe| (Stream::Out, Box::new(pipe) as Box<dyn Read + Send>)),
            child.stderr.take().map(|pipe| (Stream::Err, Box::new(pipe) as Box<dyn Read + Send>)),
        ];
        for (stream, pipe) in streams.into_iter().flatten() {
            let (write, running) = (Arc::clone(write), self.running.clone());
            std::thread::Builder::new().name(format!("output of rank {rank}")).spawn(move || {
                let mut pipe = BufReader::new(pipe);
                let mut bytes = Vec::new();
                while matches!(pipe.by_ref().take(LONGEST).read_until(b'\n', &mut bytes), Ok(1..)) {
                    let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
                    write(Line { rank, stream, text: String::from_utf8_lossy(line).into_owned() });
                    bytes.clear();
                }
                drop(running);
            })?;
        }
        Ok(())
    }

    /// Waits until all that ranks wrote has been handed on.
    pub(super) fn finish(self) {
        drop(self.running);
        // Nothing is ever sent: the channel closes with the last reader.
        let _ = self.ended.recv_timeout(LINGER);
    }
}
