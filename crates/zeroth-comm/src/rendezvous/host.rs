//! Rank 0's side: opens the socket, and hands the job or a refusal to those who come.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::wire::{self, Greeting, Kind};
use super::{LOOK, MeetError, Patience, SPEAK, Telling, address, name, same_user};
use crate::local::Job;

/// How long a rank 0 of the job before may take to end: launchers start ranks again.
const PREDECESSOR: Duration = Duration::from_secs(5);
/// How long those who come late get to hear of a refusal.
const REFUSE: Duration = Duration::from_secs(3);

/// Rank 0 of a job that another launcher started. Dropped before it begins, it sends all others home.
pub struct Host {
    listener: UnixListener,
    name: String,
    world: usize,
    patience: Patience,
    come: Vec<Option<u32>>,
    turned_away: Vec<String>,
}

impl Host {
    /// Opens the socket of `job`. Call it first of all: others wait for it, and from then on see when this process ends.
    pub fn open(job: &str, world: usize, patience: Patience) -> Result<Self, MeetError> {
        let name = name(job);
        let address = address(&name)?;
        let began = Instant::now();
        let listener = loop {
            match UnixListener::bind_addr(&address) {
                Ok(listener) => break listener,
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                    return Err(MeetError::System { what: "open the job's socket", source: error });
                }
                Err(_) if began.elapsed() >= PREDECESSOR => return Err(MeetError::NameTaken { name }),
                Err(_) => std::thread::sleep(LOOK),
            }
        };
        listener.set_nonblocking(true).map_err(MeetError::system("set up the job's socket"))?;
        Ok(Self { listener, name, world, patience, come: vec![None; world], turned_away: Vec::new() })
    }

    /// Makes the job and hands it to all other ranks, each with `message`. It returns when all have it.
    ///
    /// `region` is as in [`Job::create`]. This process joins the job as rank 0 itself, and may drop the `Job` then.
    pub fn begin(mut self, region: usize, message: &[u8]) -> Result<Job, MeetError> {
        if message.len() > wire::MOST {
            return Err(MeetError::MessageSize { bytes: message.len(), most: wire::MOST });
        }
        let job = Job::create(self.world, region)?;
        let token = job.token().to_string();
        let patience = self.patience.clone();
        let (began, mut telling) = (Instant::now(), Telling::new(&patience));
        loop {
            while let Some((stream, greeting, pid)) = self.next_guest()? {
                // A rank that has ended since it came is one that has not come.
                if wire::send(&stream, Kind::Invitation, Some((job.fd(), &token)), message).is_ok() {
                    self.come[greeting.rank as usize] = Some(pid);
                }
            }
            let waited = began.elapsed();
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(job);
            }
            if waited >= patience.guests {
                return Err(MeetError::Missing { missing, waited, refused: self.turned_away });
            }
            telling.wait(waited, 0, missing)?;
        }
    }

    /// Sends all other ranks home with a reason: there will be no job. Those who come within some seconds hear of it.
    pub fn refuse(mut self, reason: &str) {
        let began = Instant::now();
        while !self.missing().is_empty() && began.elapsed() < REFUSE {
            match self.next_guest() {
                Ok(Some((stream, greeting, pid))) => {
                    // Whoever does not hear of it sees the socket close.
                    let _ = wire::send(&stream, Kind::Refusal, None, reason.as_bytes());
                    self.come[greeting.rank as usize] = Some(pid);
                }
                Ok(None) => std::thread::sleep(LOOK),
                Err(_) => return,
            }
        }
    }

    fn missing(&self) -> Vec<usize> {
        (1..self.world).filter(|rank| self.come[*rank].is_none()).collect()
    }

    /// The next rank that has come and is one of this job; others are sent away. `None` where nobody is at the door.
    fn next_guest(&mut self) -> Result<Option<(UnixStream, Greeting, u32)>, MeetError> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(MeetError::System { what: "take a rank in", source: error }),
            };
            match self.judge(&stream) {
                Ok(Ok((greeting, pid))) => return Ok(Some((stream, greeting, pid))),
                Ok(Err(reason)) => {
                    let _ = wire::send(&stream, Kind::NotLetIn, None, reason.as_bytes());
                    self.turned_away.push(reason);
                }
                // Not a rank, or one that has ended: nobody to answer.
                Err(why) => self.turned_away.push(why.to_string()),
            }
        }
    }

    /// Who has come, or why that one is not let in.
    fn judge(&self, stream: &UnixStream) -> Result<Result<(Greeting, u32), String>, MeetError> {
        same_user(stream, &self.name)?;
        let set_up = "set up the connection of a rank";
        stream.set_nonblocking(false).map_err(MeetError::system(set_up))?;
        stream.set_read_timeout(Some(SPEAK)).map_err(MeetError::system(set_up))?;
        stream.set_write_timeout(Some(SPEAK)).map_err(MeetError::system(set_up))?;
        let greeting = Greeting::receive(stream)
            .map_err(|error| MeetError::Garbled { name: self.name.clone(), why: error.to_string() })?;
        let pid = rustix::net::sockopt::socket_peercred(stream)
            .map_or(0, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        let Greeting { rank, world } = greeting;
        if world as usize != self.world {
            return Ok(Err(format!(
                "process {pid} was started as rank {rank} of {world}, and rank 0 as one of {}",
                self.world
            )));
        }
        match self.come.get(rank as usize) {
            None => {
                Ok(Err(format!("process {pid} was started as rank {rank}, but there are {world}, from 0")))
            }
            Some(Some(other)) => {
                Ok(Err(format!("processes {other} and {pid} were both started as rank {rank}")))
            }
            Some(None) if rank == 0 => {
                let own = std::process::id();
                Ok(Err(format!("processes {own} and {pid} were both started as rank 0")))
            }
            Some(None) => Ok(Ok((greeting, pid))),
        }
    }
}
