//! Bytes longer than a frame, in chunks: what is waiting to be sent on a connection, and what has arrived.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::frame::Sealer;
use super::message::{CHUNK, HostMessage, Topic};

/// The most bytes that hosts hand each other in one piece: the settings of all ranks, or what they agree on.
pub(super) const MOST_BYTES: usize = 64 << 20;
/// Unsent messages of a peer that reads nothing; it is silent long before.
const MOST_UNSENT: usize = 8 << 20;
const MOST_LATER: usize = 10_000;

/// What is to be sent on a connection. Nothing blocks.
pub(super) struct Outbox {
    stream: TcpStream,
    sealer: Sealer,
    /// Frames, sent up to `sent`.
    frames: Vec<u8>,
    sent: usize,
    /// What comes behind them.
    later: VecDeque<Unsealed>,
}

/// What is sealed once it is its turn.
enum Unsealed {
    /// A message that must not overtake what was said before.
    Message(Vec<u8>),
    /// Longer bytes, chunk by chunk, and how many are sealed.
    Long(Topic, Arc<[u8]>, usize),
}

impl Outbox {
    pub(super) fn new(stream: TcpStream, sealer: Sealer) -> Self {
        Self { stream, sealer, frames: Vec::new(), sent: 0, later: VecDeque::new() }
    }

    /// Sends a message behind everything else; a heartbeat before it.
    pub(super) fn push(&mut self, message: &HostMessage) {
        let is_beat = matches!(message, HostMessage::Beat { .. } | HostMessage::Beats(_));
        if self.frames.len() - self.sent >= MOST_UNSENT || self.later.len() >= MOST_LATER {
            return;
        }
        if is_beat || self.later.is_empty() {
            self.sealer.seal(&message.to_bytes(), &mut self.frames);
        } else {
            self.later.push_back(Unsealed::Message(message.to_bytes()));
        }
    }

    pub(super) fn push_long(&mut self, topic: Topic, bytes: Arc<[u8]>) {
        self.later.push_back(Unsealed::Long(topic, bytes, 0));
    }

    /// Sends what the connection takes now; true if nothing is left. A connection that failed takes nothing more, which its
    /// reader reports.
    pub(super) fn flush(&mut self) -> bool {
        loop {
            while self.sent < self.frames.len() {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match rustix::net::send(&self.stream, &self.frames[self.sent..], flags) {
                    Ok(sent) => self.sent += sent,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => return false,
                    Err(_) => {
                        self.later.clear();
                        self.sent = self.frames.len();
                    }
                }
            }
            self.frames.clear();
            self.sent = 0;
            let message = match self.later.pop_front() {
                None => return true,
                Some(Unsealed::Message(message)) => message,
                Some(Unsealed::Long(topic, bytes, done)) => {
                    let end = bytes.len().min(done + CHUNK);
                    let (total, piece) = (bytes.len() as u32, bytes[done..end].to_vec());
                    if end < bytes.len() {
                        self.later.push_front(Unsealed::Long(topic, bytes, end));
                    }
                    HostMessage::Chunk { topic, total, bytes: piece }.to_bytes()
                }
            };
            self.sealer.seal(&message, &mut self.frames);
        }
    }

    /// Closes the connection in both directions; its reader ends.
    pub(super) fn close(&self) {
        // Where it is closed already there is nothing to do.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Chunks that have arrived.
#[derive(Default)]
pub(super) struct Inbox {
    begun: Option<(Topic, usize, Vec<u8>)>,
}

impl Inbox {
    /// Takes a chunk; the whole, once it is the last one. An error where chunks do not fit each other.
    pub(super) fn take(
        &mut self,
        topic: Topic,
        total: u32,
        chunk: &[u8],
    ) -> io::Result<Option<(Topic, Vec<u8>)>> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidData);
        let total = total as usize;
        let (begun, whole, mut bytes) = self.begun.take().unwrap_or((topic, total, Vec::new()));
        let is_progress = !chunk.is_empty() || total == 0;
        if (begun, whole) != (topic, total)
            || !is_progress
            || total > MOST_BYTES
            || chunk.len() > total - bytes.len()
        {
            return Err(wrong());
        }
        bytes.extend_from_slice(chunk);
        if bytes.len() == total {
            return Ok(Some((topic, bytes)));
        }
        self.begun = Some((topic, total, bytes));
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_become_the_whole_and_those_that_do_not_fit_are_refused() {
        let mut inbox = Inbox::default();
        assert_eq!(inbox.take(Topic::Part, 5, &[1, 2]).unwrap(), None);
        assert_eq!(inbox.take(Topic::Part, 5, &[3, 4, 5]).unwrap(), Some((Topic::Part, vec![1, 2, 3, 4, 5])));
        assert_eq!(inbox.take(Topic::Begin, 0, &[]).unwrap(), Some((Topic::Begin, Vec::new())));
        for (first, second) in [
            ((Topic::Part, 5, 2), (Topic::Part, 6, 2)),
            ((Topic::Part, 5, 2), (Topic::Whole, 5, 2)),
            ((Topic::Part, 5, 2), (Topic::Part, 5, 4)),
            ((Topic::Part, 5, 2), (Topic::Part, 5, 0)),
        ] {
            let mut inbox = Inbox::default();
            inbox.take(first.0, first.1, &vec![0; first.2]).unwrap();
            assert!(inbox.take(second.0, second.1, &vec![0; second.2]).is_err(), "{second:?}");
        }
        assert!(Inbox::default().take(Topic::Begin, MOST_BYTES as u32 + 1, &[0]).is_err());
        assert!(Inbox::default().take(Topic::Begin, u32::MAX, &[0]).is_err());
    }
}
