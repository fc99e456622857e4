//! The side of all ranks but 0: connects, waits, and gets the job or a reason.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::socket::JobSocket;
use super::wire::{self, Greeting, Kind};
use super::{MeetError, Patience, SPEAK, Telling, same_user};
use crate::error::JoinError;
use crate::local::{self, LocalComm, Options};
use crate::segment::Token;

/// A job that rank 0 has begun, for this rank to join.
pub struct Invitation {
    file: OwnedFd,
    token: Token,
    rank: usize,
    message: Vec<u8>,
}

impl Invitation {
    /// What rank 0 has to say to all.
    pub fn message(&self) -> &[u8] {
        &self.message
    }

    /// Joins the job.
    pub fn join(self, options: &Options) -> Result<LocalComm, JoinError> {
        local::join(self.file.as_fd(), self.token, self.rank, options)
    }
}

impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invitation")
            .field("rank", &self.rank)
            .field("bytes", &self.message.len())
            .finish_non_exhaustive()
    }
}

/// Waits for rank 0 of `job` to begin, as `rank` of `world`.
pub fn attend(job: &str, rank: usize, world: usize, patience: &Patience) -> Result<Invitation, MeetError> {
    let socket = JobSocket::of(job)?;
    let name = socket.shown();
    let (began, mut telling) = (Instant::now(), Telling::new(patience));
    let mut stream: Option<UnixStream> = None;
    loop {
        match &stream {
            None => stream = greet(&socket, &name, rank, world)?,
            Some(stream) => match wire::arrives(stream) {
                Ok(false) => {}
                Ok(true) => return answer(stream, rank, &name),
                Err(_) => return Err(MeetError::HostGone),
            },
        }
        let waited = began.elapsed();
        if waited >= patience.host {
            return Err(MeetError::NoHost { rank, waited, name });
        }
        telling.wait(waited, rank, vec![0])?;
    }
}

/// Connects and says who is there. `None` while rank 0 has not opened its socket.
fn greet(socket: &JobSocket, name: &str, rank: usize, world: usize) -> Result<Option<UnixStream>, MeetError> {
    let Some(stream) = socket.connect()? else { return Ok(None) };
    same_user(&stream, name)?;
    let set_up = "set up the connection to rank 0";
    stream.set_read_timeout(Some(SPEAK)).map_err(MeetError::system(set_up))?;
    stream.set_write_timeout(Some(SPEAK)).map_err(MeetError::system(set_up))?;
    let number =
        |number: usize| u32::try_from(number).map_err(|_| MeetError::Join(JoinError::Rank { rank, world }));
    let greeting = Greeting { rank: number(rank)?, world: number(world)? };
    greeting.send(&stream).map_err(|_| MeetError::HostGone)?;
    Ok(Some(stream))
}

fn answer(stream: &UnixStream, rank: usize, name: &str) -> Result<Invitation, MeetError> {
    let garbled = |why: String| MeetError::Garbled { name: name.to_owned(), why };
    let answer = wire::receive(stream).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => garbled(error.to_string()),
        _ => MeetError::HostGone,
    })?;
    let reason = || String::from_utf8_lossy(&answer.text).into_owned();
    match (answer.kind, answer.segment) {
        (Kind::Invitation, Some((file, token))) => {
            let token = token.parse().map_err(|why: &str| garbled(format!("the token {why}")))?;
            Ok(Invitation { file, token, rank, message: answer.text })
        }
        (Kind::NotLetIn, _) => Err(MeetError::NotLetIn { rank, reason: reason() }),
        _ => Err(MeetError::Refused { reason: reason() }),
    }
}
