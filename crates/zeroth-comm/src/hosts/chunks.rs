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

/// What is to be sent on a connection. Nothing blocks.
pub(super) struct Outbox {
    stream: TcpStream,
    sealer: Sealer,
    /// Frames, sent up to `sent`.
    frames: Vec<u8>,
    sent: usize,
    /// Longer bytes, sealed chunk by chunk as they are sent, and how many are.
    long: VecDeque<(Topic, Arc<[u8]>, usize)>,
}

impl Outbox {
    pub(super) fn new(stream: TcpStream, sealer: Sealer) -> Self {
        Self { stream, sealer, frames: Vec::new(), sent: 0, long: VecDeque::new() }
    }

    pub(super) fn push(&mut self, message: &HostMessage) {
        if self.frames.len() - self.sent < MOST_UNSENT {
            self.sealer.seal(&message.to_bytes(), &mut self.frames);
        }
    }

    pub(super) fn push_long(&mut self, topic: Topic, bytes: Arc<[u8]>) {
        self.long.push_back((topic, bytes, 0));
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
                        self.long.clear();
                        self.sent = self.frames.len();
                    }
                }
            }
            self.frames.clear();
            self.sent = 0;
            let Some((topic, bytes, done)) = self.long.front_mut() else { return true };
            let end = bytes.len().min(*done + CHUNK);
            let (topic, total) = (*topic, bytes.len() as u32);
            let chunk = HostMessage::Chunk { topic, total, bytes: bytes[*done..end].to_vec() };
            *done = end;
            if end == bytes.len() {
                self.long.pop_front();
            }
            self.sealer.seal(&chunk.to_bytes(), &mut self.frames);
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
