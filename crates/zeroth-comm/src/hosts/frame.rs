//! Frames of a proven connection: a length, the bytes of a message, and a tag.
//!
//! The tag covers a counter that is not sent, so that frames that are repeated, left out or in another order are refused. Every
//! direction has a key and a counter of its own.

use std::io::{self, Read};

use super::mac::{MacKey, TAG};

/// The most bytes of a message. Longer ones go in chunks, between which others may be sent.
pub(super) const MOST: usize = 64 << 10;

/// Why no more frames are read of a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    /// It ended between two frames, or inside of one.
    #[error("the connection was closed")]
    Closed,
    #[error("the connection failed: {0}")]
    Io(io::Error),
    #[error("a frame of {0} bytes")]
    Length(usize),
    #[error("a frame that does not prove the token")]
    Tag,
    #[error("a message that does not exist")]
    Message,
}

/// Makes frames.
pub(super) struct Sealer {
    key: MacKey,
    counter: u64,
}

impl Sealer {
    pub(super) fn new(key: MacKey) -> Self {
        Self { key, counter: 0 }
    }

    /// Appends the frame of a message of 1 to [`MOST`] bytes.
    pub(super) fn seal(&mut self, message: &[u8], into: &mut Vec<u8>) {
        debug_assert!((1..=MOST).contains(&message.len()), "{} bytes", message.len());
        let length = (message.len() as u32).to_le_bytes();
        let tag = self.key.tag(&[&self.counter.to_le_bytes(), &length, message]);
        self.counter += 1;
        into.extend_from_slice(&length);
        into.extend_from_slice(message);
        into.extend_from_slice(&tag);
    }
}

/// Reads frames.
pub(super) struct Opener {
    key: MacKey,
    counter: u64,
}

impl Opener {
    pub(super) fn new(key: MacKey) -> Self {
        Self { key, counter: 0 }
    }

    /// Reads the next frame and returns its message. No more is allocated than [`MOST`].
    pub(super) fn open(&mut self, from: &mut impl Read) -> Result<Vec<u8>, FrameError> {
        let mut length = [0; 4];
        read(from, &mut length)?;
        let bytes = u32::from_le_bytes(length) as usize;
        if !(1..=MOST).contains(&bytes) {
            return Err(FrameError::Length(bytes));
        }
        let mut message = vec![0; bytes + TAG];
        read(from, &mut message)?;
        let (text, tag) = message.split_at(bytes);
        if !self.key.verifies(&[&self.counter.to_le_bytes(), &length, text], tag) {
            return Err(FrameError::Tag);
        }
        self.counter += 1;
        message.truncate(bytes);
        Ok(message)
    }
}

fn read(from: &mut impl Read, into: &mut [u8]) -> Result<(), FrameError> {
    from.read_exact(into).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            FrameError::Closed
        }
        _ => FrameError::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (Sealer, Opener) {
        let key = MacKey::new(b"key");
        (Sealer::new(key.clone()), Opener::new(key))
    }

    #[test]
    fn frames_come_out_as_they_went_in() {
        let (mut sealer, mut opener) = ends();
        let mut bytes = Vec::new();
        let messages = [vec![1], vec![2; MOST], b"three".to_vec()];
        for message in &messages {
            sealer.seal(message, &mut bytes);
        }
        let mut from = bytes.as_slice();
        for message in &messages {
            assert_eq!(&opener.open(&mut from).unwrap(), message);
        }
        assert!(matches!(opener.open(&mut from), Err(FrameError::Closed)));
    }

    #[test]
    fn frames_that_are_repeated_reordered_left_out_or_of_the_other_direction_are_refused() {
        let (mut sealer, _) = ends();
        let frames: Vec<Vec<u8>> = (0..3_u8)
            .map(|number| {
                let mut frame = Vec::new();
                sealer.seal(&[number], &mut frame);
                frame
            })
            .collect();
        for order in [&[0, 0][..], &[1], &[0, 2]] {
            let (_, mut opener) = ends();
            let bytes = order.iter().map(|number| frames[*number].clone()).collect::<Vec<_>>().concat();
            let mut from = bytes.as_slice();
            for _ in 1..order.len() {
                opener.open(&mut from).unwrap();
            }
            assert!(matches!(opener.open(&mut from), Err(FrameError::Tag)), "{order:?}");
        }
        let mut other = Opener::new(MacKey::new(b"other"));
        assert!(matches!(other.open(&mut frames[0].as_slice()), Err(FrameError::Tag)));
    }

    #[test]
    fn no_bit_of_a_frame_may_differ_and_no_length_is_believed() {
        let (mut sealer, _) = ends();
        let mut frame = Vec::new();
        sealer.seal(b"message", &mut frame);
        for bit in 0..8 * frame.len() {
            let mut wrong = frame.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let (_, mut opener) = ends();
            assert!(opener.open(&mut wrong.as_slice()).is_err(), "bit {bit}");
        }
        for length in [0, MOST as u32 + 1, u32::MAX] {
            let (_, mut opener) = ends();
            let error = opener.open(&mut length.to_le_bytes().as_slice()).unwrap_err();
            assert!(matches!(error, FrameError::Length(_)), "{error}");
        }
    }
}
