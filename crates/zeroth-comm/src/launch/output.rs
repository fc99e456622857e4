//! Output of ranks: inherited, or line by line to a function.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

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
}

impl RankOutput {
    pub(super) fn attach(&self, command: &mut Command) {
        // Ranks share a terminal; one that reads from it would be stopped or take another's input.
        command.stdin(Stdio::null());
        if let Self::Lines(_) = self {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
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
