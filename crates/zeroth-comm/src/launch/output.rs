//! Output of ranks: inherited, line by line to a function, or to files.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use super::LaunchError;

/// Longer lines are split.
const LONGEST: u64 = 1 << 16;
/// How long readers may continue after the last rank has ended: a grandchild may hold the pipe open.
const LINGER: Duration = Duration::from_secs(1);

/// An output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// A line that a rank wrote; displayed as `[rank 3] …`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct OutputLine {
    /// The rank that wrote it.
    pub rank: usize,
    pub stream: OutputStream,
    /// The line without its end; invalid UTF-8 is replaced.
    pub text: String,
}

impl fmt::Display for OutputLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[rank {}] {}", self.rank, self.text)
    }
}

/// Where the output of ranks goes.
#[derive(Clone)]
pub enum RankOutput {
    /// To the launcher's own streams, as it is.
    Inherit,
    /// To a function, line by line, from a thread for each stream.
    Lines(Arc<dyn Fn(OutputLine) + Send + Sync>),
    /// To `rank-0.out`, `rank-0.err` and so on in this folder, which must exist.
    Files(PathBuf),
}

impl RankOutput {
    pub(super) fn attach(&self, rank: usize, command: &mut Command) -> Result<(), LaunchError> {
        // Ranks share a terminal; one that reads from it would be stopped or take another's input.
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

/// The threads that read the ranks' output.
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
    pub(super) fn read(&mut self, rank: usize, child: &mut Child, output: &RankOutput) -> io::Result<()> {
        let RankOutput::Lines(write) = output else { return Ok(()) };
        let streams = [
            child.stdout.take().map(|pipe| (OutputStream::Out, Box::new(pipe) as Box<dyn Read + Send>)),
            child.stderr.take().map(|pipe| (OutputStream::Err, Box::new(pipe) as Box<dyn Read + Send>)),
        ];
        for (stream, pipe) in streams.into_iter().flatten() {
            let (write, running) = (Arc::clone(write), self.running.clone());
            std::thread::Builder::new().name(format!("output of rank {rank}")).spawn(move || {
                let mut pipe = BufReader::new(pipe);
                let mut bytes = Vec::new();
                while matches!(pipe.by_ref().take(LONGEST).read_until(b'\n', &mut bytes), Ok(1..)) {
                    let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
                    write(OutputLine { rank, stream, text: String::from_utf8_lossy(line).into_owned() });
                    bytes.clear();
                }
                drop(running);
            })?;
        }
        Ok(())
    }

    /// Waits until all output has been forwarded.
    pub(super) fn finish(self) {
        drop(self.running);
        // Nothing is sent: the channel closes with the last reader.
        let _ = self.ended.recv_timeout(LINGER);
    }
}
