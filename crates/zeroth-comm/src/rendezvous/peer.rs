//! The side of all ranks but 0: connects, waits, and receives the job or a refusal.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use super::socket::JobSocket;
use super::wire::{self, JoinRequest, MessageKind};
use super::{RendezvousError, SPEAK, WaitPolicy, WaitReporter, name_on_host, same_user};
use crate::comm::Comm;
use crate::error::JoinError;
use crate::join_options::JoinOptions;
use crate::local::{self, JobToken, SharedSegment};
use crate::place::Place;

/// Rank 0's answer to a join request: the job, and a message.
pub struct Admission {
    file: OwnedFd,
    token: JobToken,
    place: Place,
    message: Vec<u8>,
}

impl Admission {
    /// Rank 0's message to all ranks.
    pub fn message(&self) -> &[u8] {
        &self.message
    }

    /// Joins the job.
    pub fn join(self, options: &JoinOptions) -> Result<Box<dyn Comm>, JoinError> {
        local::join(self.file.as_fd(), self.token, self.place.local_rank, options)
    }

    /// Joins the job, and keeps its segment.
    pub(crate) fn join_with_segment(
        self,
        options: &JoinOptions,
    ) -> Result<(Box<dyn Comm>, Arc<SharedSegment>), JoinError> {
        local::join_with_segment(self.file.as_fd(), self.token, self.place.local_rank, options)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission")
            .field("rank", &self.place.rank)
            .field("bytes", &self.message.len())
            .finish_non_exhaustive()
    }
}

/// Requests to join `job` as `rank` of `world`, and waits for rank 0's answer.
pub fn request_join(
    job: &str,
    rank: usize,
    world: usize,
    policy: &WaitPolicy,
) -> Result<Admission, RendezvousError> {
    request_join_on_host(job, Place::on_one_host(rank, world), policy)
}

/// Requests to join `job` at the leader of this host.
pub(crate) fn request_join_on_host(
    job: &str,
    place: Place,
    policy: &WaitPolicy,
) -> Result<Admission, RendezvousError> {
    let socket = JobSocket::of(&name_on_host(job, place))?;
    let name = socket.shown();
    let (rank, leader) = (place.rank, place.first());
    let (began, mut reporter) = (Instant::now(), WaitReporter::new(policy));
    let mut stream: Option<UnixStream> = None;
    loop {
        match &stream {
            None => stream = greet(&socket, &name, place)?,
            Some(stream) => match wire::arrives(stream) {
                Ok(false) => {}
                Ok(true) => return answer(stream, place, &name),
                Err(_) => return Err(RendezvousError::Rank0Gone { leader }),
            },
        }
        let waited = began.elapsed();
        if waited >= policy.rank0 {
            return Err(RendezvousError::NoRank0 { rank, leader, waited, name });
        }
        reporter.wait(waited, rank, vec![leader]);
    }
}

/// Connects and sends the join request; `None` while the leader has not opened its socket.
fn greet(socket: &JobSocket, name: &str, place: Place) -> Result<Option<UnixStream>, RendezvousError> {
    let Place { rank, world, .. } = place;
    let Some(stream) = socket.connect()? else { return Ok(None) };
    same_user(&stream, name)?;
    let set_up = "set up the connection to rank 0";
    stream.set_read_timeout(Some(SPEAK)).map_err(RendezvousError::system(set_up))?;
    stream.set_write_timeout(Some(SPEAK)).map_err(RendezvousError::system(set_up))?;
    let number = |number: usize| {
        u32::try_from(number).map_err(|_| RendezvousError::Join(JoinError::Rank { rank, world }))
    };
    let request = JoinRequest { rank: number(rank)?, world: number(world)? };
    request.send(&stream).map_err(|_| RendezvousError::Rank0Gone { leader: place.first() })?;
    Ok(Some(stream))
}

fn answer(stream: &UnixStream, place: Place, name: &str) -> Result<Admission, RendezvousError> {
    let malformed = |why: String| RendezvousError::Malformed { name: name.to_owned(), why };
    let answer = wire::receive(stream).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => malformed(error.to_string()),
        _ => RendezvousError::Rank0Gone { leader: place.first() },
    })?;
    let reason = || String::from_utf8_lossy(&answer.text).into_owned();
    match (answer.kind, answer.segment) {
        (MessageKind::Admission, Some((file, token))) => {
            let token = token.parse().map_err(|why: &str| malformed(format!("the token {why}")))?;
            Ok(Admission { file, token, place, message: answer.text })
        }
        (MessageKind::Rejected, _) => Err(RendezvousError::Rejected { rank: place.rank, reason: reason() }),
        _ => Err(RendezvousError::Refused { reason: reason() }),
    }
}
