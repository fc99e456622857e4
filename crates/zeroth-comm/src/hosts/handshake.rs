//! Proof of the job's token on a new connection, by both sides.
//!
//! ```text
//! coordinator → leader   32 random bytes
//! leader → coordinator   32 random bytes, HMAC(token, "leader", both)
//! coordinator → leader   HMAC(token, "coordinator", both)
//! ```
//!
//! Nothing else is sent to a peer that has not proven the token, and the token itself never is. The keys of the connection, one
//! for each direction, follow from the token and both random texts, so that nothing of another connection counts on this one.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};

use super::frame::{Opener, Sealer};
use super::mac::{MacKey, TAG};
use crate::local::JobToken;

/// Bytes of a random text.
const NONCE: usize = 32;
/// Time for a peer to prove the token.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

const OF_LEADER: &[u8] = b"zeroth control: proof of a leader, of ";
const OF_COORDINATOR: &[u8] = b"zeroth control: proof of a coordinator";
const UPWARD: &[u8] = b"zeroth control: key of frames upward..";
const DOWNWARD: &[u8] = b"zeroth control: key of frames downward";

/// Why a peer is not one of this job.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("it does not know this job's token")]
    Token,
    #[error("it said nothing within {} s", PATIENCE.as_secs())]
    Silent,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Both random texts of a connection, and what follows from them.
struct Session {
    key: MacKey,
    coordinator: [u8; NONCE],
    leader: [u8; NONCE],
}

impl Session {
    fn tag(&self, label: &[u8]) -> [u8; TAG] {
        self.key.tag(&[label, &self.coordinator, &self.leader])
    }

    fn verifies(&self, label: &[u8], tag: &[u8]) -> bool {
        self.key.verifies(&[label, &self.coordinator, &self.leader], tag)
    }

    fn keys(&self) -> [MacKey; 2] {
        [UPWARD, DOWNWARD].map(|label| MacKey::new(&self.tag(label)))
    }
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes)
}

/// The coordinator's side.
pub(super) fn accept(stream: &TcpStream, token: JobToken) -> Result<(Sealer, Opener), HandshakeError> {
    let coordinator = nonce()?;
    let deadline = Instant::now() + PATIENCE;
    stream.set_write_timeout(Some(PATIENCE))?;
    (&*stream).write_all(&coordinator)?;
    let mut said = [0; NONCE + TAG];
    read_until(stream, &mut said, deadline)?;
    let (leader, proof) = said.split_at(NONCE);
    let mut session = Session { key: MacKey::new(&token.bytes()), coordinator, leader: [0; NONCE] };
    session.leader.copy_from_slice(leader);
    if !session.verifies(OF_LEADER, proof) {
        return Err(HandshakeError::Token);
    }
    (&*stream).write_all(&session.tag(OF_COORDINATOR))?;
    let [up, down] = session.keys();
    Ok((Sealer::new(down), Opener::new(up)))
}

/// The leader's side.
pub(super) fn prove(stream: &TcpStream, token: JobToken) -> Result<(Sealer, Opener), HandshakeError> {
    let deadline = Instant::now() + PATIENCE;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut coordinator = [0; NONCE];
    read_until(stream, &mut coordinator, deadline)?;
    let session = Session { key: MacKey::new(&token.bytes()), coordinator, leader: nonce()? };
    (&*stream).write_all(&[session.leader, session.tag(OF_LEADER)].concat())?;
    let mut proof = [0; TAG];
    match read_until(stream, &mut proof, deadline) {
        Ok(()) if session.verifies(OF_COORDINATOR, &proof) => {}
        // A coordinator closes on a token that is not its own.
        Ok(()) => return Err(HandshakeError::Token),
        Err(HandshakeError::Io(error)) if is_closed(&error) => return Err(HandshakeError::Token),
        Err(error) => return Err(error),
    }
    let [up, down] = session.keys();
    Ok((Sealer::new(up), Opener::new(down)))
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

/// Fills `into`, however slowly the bytes come, until the deadline.
fn read_until(mut stream: &TcpStream, into: &mut [u8], deadline: Instant) -> Result<(), HandshakeError> {
    let mut filled = 0;
    while filled < into.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HandshakeError::Silent);
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut into[filled..]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(read) => filled += read,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let leader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, leader)
    }

    #[test]
    fn both_sides_get_the_same_keys_and_others_of_every_connection() {
        let token = JobToken::random().unwrap();
        let mut frames = Vec::new();
        for _ in 0..2 {
            let (coordinator, leader) = pair();
            std::thread::scope(|scope| {
                let proves = scope.spawn(|| prove(&leader, token).unwrap());
                let (mut down, mut up) = accept(&coordinator, token).unwrap();
                let (mut sends, mut reads) = proves.join().unwrap();
                let (mut one, mut two) = (Vec::new(), Vec::new());
                sends.seal(b"upward", &mut one);
                down.seal(b"downward", &mut two);
                assert_eq!(up.open(&mut one.as_slice()).unwrap(), b"upward");
                assert_eq!(reads.open(&mut two.as_slice()).unwrap(), b"downward");
                frames.push(one);
            });
        }
        assert_ne!(frames[0], frames[1]);
    }

    #[test]
    fn another_token_is_refused_on_both_sides() {
        let (coordinator, leader) = pair();
        std::thread::scope(|scope| {
            let proves = scope.spawn(|| prove(&leader, JobToken::random().unwrap()).err().unwrap());
            let error = accept(&coordinator, JobToken::random().unwrap()).err().unwrap();
            drop(coordinator);
            assert!(matches!(error, HandshakeError::Token), "{error}");
            assert!(matches!(proves.join().unwrap(), HandshakeError::Token));
        });
    }

    #[test]
    fn a_coordinators_own_proof_sent_back_to_it_proves_nothing() {
        let token = JobToken::random().unwrap();
        let (coordinator, mut stranger) = pair();
        std::thread::scope(|scope| {
            let accepts = scope.spawn(|| accept(&coordinator, token).err().unwrap());
            let mut challenge = [0; NONCE];
            stranger.read_exact(&mut challenge).unwrap();
            let session =
                Session { key: MacKey::new(&token.bytes()), coordinator: challenge, leader: challenge };
            stranger.write_all(&[challenge, session.tag(OF_COORDINATOR)].concat()).unwrap();
            assert!(matches!(accepts.join().unwrap(), HandshakeError::Token));
        });
    }
}
