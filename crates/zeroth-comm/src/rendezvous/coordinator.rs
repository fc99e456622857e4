//! Rank 0's side: opens the socket, and answers join requests with the job or a refusal.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::socket::{JobSocket, Listening};
use super::wire::{self, JoinRequest, MessageKind};
use super::{LOOK, RendezvousError, SPEAK, WaitPolicy, WaitReporter, name_on_host, same_user};
use crate::comm::Comm;
use crate::join_options::JoinOptions;
use crate::local::LocalJob;
use crate::place::Place;

/// How long rank 0 of a previous job may take to end: launchers restart ranks.
const PREDECESSOR: Duration = Duration::from_secs(5);
/// How long late ranks are still told of a refusal.
const REFUSE: Duration = Duration::from_secs(3);
/// Maximum number of open connections without a join request; the oldest is dropped first.
const MAX_SILENT: usize = 64;
/// Maximum number of rejected processes that are named.
const MAX_NAMED: usize = 8;

/// Rank 0 of a job that another launcher started. Dropping it before [`Self::begin`] ends the wait of all others.
pub struct Coordinator {
    listening: Listening,
    name: String,
    place: Place,
    policy: WaitPolicy,
    /// The processes of this host's ranks that have come.
    come: Vec<Option<u32>>,
    /// Connections without a join request yet, and when they were opened.
    silent: Vec<(UnixStream, Instant)>,
    rejected: Vec<String>,
    /// The number of rejected processes that are not named.
    more_rejected: usize,
}

impl Coordinator {
    /// Opens the socket of `job`. Call it first: other ranks wait for it, and notice from then on when this process
    /// ends.
    pub fn open(job: &str, world: usize, policy: WaitPolicy) -> Result<Self, RendezvousError> {
        Self::open_on_host(job, Place::on_one_host(0, world), policy)
    }

    /// Opens the socket of `job` for the ranks of the host that `place` leads.
    pub(crate) fn open_on_host(job: &str, place: Place, policy: WaitPolicy) -> Result<Self, RendezvousError> {
        let socket = JobSocket::of(&name_on_host(job, place))?;
        let name = socket.shown();
        Ok(Self {
            listening: socket.listen(PREDECESSOR)?,
            name,
            place,
            policy,
            come: vec![None; place.local_world],
            silent: Vec::new(),
            rejected: Vec::new(),
            more_rejected: 0,
        })
    }

    /// Creates the job, sends it to all other ranks with `message`, and joins it as rank 0 once all have it. `region` is as
    /// in [`LocalJob::create`].
    pub fn begin(
        mut self,
        region: usize,
        message: &[u8],
        options: &JoinOptions,
    ) -> Result<Box<dyn Comm>, RendezvousError> {
        let job = LocalJob::create(self.place.local_world, region)?;
        self.admit(&job, message)?;
        Ok(job.join(0, options)?)
    }

    /// Sends a job to the other ranks of this host with `message`; returns once all have it.
    pub(crate) fn admit(&mut self, job: &LocalJob, message: &[u8]) -> Result<(), RendezvousError> {
        if message.len() > wire::MOST {
            return Err(RendezvousError::MessageSize { bytes: message.len(), most: wire::MOST });
        }
        let first = self.place.first();
        let token = job.token().to_string();
        let policy = self.policy.clone();
        let (began, mut reporter) = (Instant::now(), WaitReporter::new(&policy));
        loop {
            while let Some((stream, request, pid)) = self.next_request()? {
                // A rank that has ended since its request does not count.
                if wire::send(&stream, MessageKind::Admission, Some((job.fd(), &token)), message).is_ok() {
                    self.come[request.rank as usize - first] = Some(pid);
                }
            }
            let waited = began.elapsed();
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if waited >= policy.peers {
                return Err(RendezvousError::Missing { missing, waited, refused: self.all_rejected() });
            }
            reporter.wait(waited, first, missing);
        }
    }

    /// Cancels the job with a reason. Ranks that connect within a few seconds still receive it.
    pub fn refuse(mut self, reason: &str) {
        let began = Instant::now();
        while !self.missing().is_empty() && began.elapsed() < REFUSE {
            match self.next_request() {
                Ok(Some((stream, request, pid))) => {
                    // A rank that does not receive it sees the socket close.
                    let _ = wire::send(&stream, MessageKind::Refusal, None, reason.as_bytes());
                    self.come[request.rank as usize - self.place.first()] = Some(pid);
                }
                Ok(None) => std::thread::sleep(LOOK),
                Err(_) => return,
            }
        }
    }

    fn missing(&self) -> Vec<usize> {
        let first = self.place.first();
        (1..self.place.local_world)
            .filter(|slot| self.come[*slot].is_none())
            .map(|slot| first + slot)
            .collect()
    }

    fn reject(&mut self, why: String) {
        if self.rejected.len() < MAX_NAMED {
            self.rejected.push(why);
        } else {
            self.more_rejected += 1;
        }
    }

    fn all_rejected(&mut self) -> Vec<String> {
        let mut all = std::mem::take(&mut self.rejected);
        all.extend((self.more_rejected > 0).then(|| format!("and {} more", self.more_rejected)));
        all
    }

    /// Accepts a bounded number of connections, however fast they arrive.
    fn accept(&mut self) -> Result<(), RendezvousError> {
        for _ in 0..MAX_SILENT {
            let stream = match self.listening.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(RendezvousError::System { what: "take a rank in", source: error }),
            };
            match same_user(&stream, &self.name) {
                Ok(()) => self.silent.push((stream, Instant::now())),
                Err(stranger) => self.reject(stranger.to_string()),
            }
        }
        Ok(())
    }

    /// The next valid join request; invalid ones are rejected. `None` where there is none yet.
    fn next_request(&mut self) -> Result<Option<(UnixStream, JoinRequest, u32)>, RendezvousError> {
        self.accept()?;
        let mut place = 0;
        while let Some((stream, since)) = self.silent.get(place) {
            let has_spoken = JoinRequest::arrives(stream);
            if matches!(has_spoken, Ok(false)) && since.elapsed() < SPEAK {
                place += 1;
                continue;
            }
            let (stream, _) = self.silent.remove(place);
            match self.judge(&stream, has_spoken) {
                Ok(Ok((request, pid))) => return Ok(Some((stream, request, pid))),
                Ok(Err(reason)) => {
                    let _ = wire::send(&stream, MessageKind::Rejected, None, reason.as_bytes());
                    self.reject(reason);
                }
                // Not a rank, or one that has ended: there is no one to answer.
                Err(why) => self.reject(why.to_string()),
            }
        }
        for _ in MAX_SILENT..self.silent.len() {
            self.silent.remove(0);
            self.reject(format!("a process connected to {} and said nothing", self.name));
        }
        Ok(None)
    }

    /// Validates a join request, or returns the reason to reject it.
    fn judge(
        &self,
        stream: &UnixStream,
        has_spoken: io::Result<bool>,
    ) -> Result<Result<(JoinRequest, u32), String>, RendezvousError> {
        let malformed = |why: String| RendezvousError::Malformed { name: self.name.clone(), why };
        if !has_spoken.map_err(|error| malformed(error.to_string()))? {
            return Err(malformed("it said nothing".to_owned()));
        }
        let set_up = "set up the connection of a rank";
        stream.set_nonblocking(false).map_err(RendezvousError::system(set_up))?;
        stream.set_read_timeout(Some(SPEAK)).map_err(RendezvousError::system(set_up))?;
        stream.set_write_timeout(Some(SPEAK)).map_err(RendezvousError::system(set_up))?;
        let request = JoinRequest::receive(stream).map_err(|error| malformed(error.to_string()))?;
        let pid = rustix::net::sockopt::socket_peercred(stream)
            .map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        let JoinRequest { rank, world } = request;
        let Place { world: own, local_world, .. } = self.place;
        let first = self.place.first();
        if world as usize != own {
            return Ok(Err(format!(
                "process {pid} was started as rank {rank} of {world}, and rank {first} as one of {own}"
            )));
        }
        match (rank as usize).checked_sub(first).and_then(|slot| self.come.get(slot)) {
            None => Ok(Err(format!(
                "process {pid} was started as rank {rank}, but there are {local_world}, from {first}"
            ))),
            Some(Some(other)) => {
                Ok(Err(format!("processes {other} and {pid} were both started as rank {rank}")))
            }
            Some(None) if rank as usize == first => {
                let own = std::process::id();
                Ok(Err(format!("processes {own} and {pid} were both started as rank {rank}")))
            }
            Some(None) => Ok(Ok((request, pid))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request_join;
    use super::*;

    #[test]
    fn many_that_connect_and_say_nothing_neither_keep_ranks_out_nor_are_kept() {
        let job = format!("test-{}-silent", std::process::id());
        let mut coordinator = Coordinator::open(&job, 2, WaitPolicy::default()).unwrap();
        let silent = || JobSocket::of(&job).unwrap().connect().unwrap();
        let mut held: Vec<_> = std::iter::repeat_with(silent).take(100).collect();
        for _ in 0..10 {
            assert!(coordinator.next_request().unwrap().is_none());
            held.extend(std::iter::repeat_with(silent).take(60));
        }
        assert!(coordinator.silent.len() <= 64, "{}", coordinator.silent.len());
        assert!(coordinator.rejected.len() <= 8, "{:?}", coordinator.rejected);
        assert!(coordinator.more_rejected > 0);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let peer = scope.spawn(|| request_join(&job, 1, 2, &WaitPolicy::default()).unwrap());
            let _comm = coordinator.begin(0, b"go", &JoinOptions::default()).unwrap();
            assert_eq!(peer.join().unwrap().message(), b"go");
        });
        // One after the other, each would be listened to for five seconds.
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}
