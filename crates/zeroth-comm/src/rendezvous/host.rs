//! Rank 0's side: opens the socket, and hands the job or a refusal to those who come.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::socket::{JobSocket, Listening};
use super::wire::{self, Greeting, Kind};
use super::{LOOK, MeetError, Patience, SPEAK, Telling, same_user};
use crate::local::Job;

/// How long a rank 0 of the job before may take to end: launchers start ranks again.
const PREDECESSOR: Duration = Duration::from_secs(5);
/// How long those who come late get to hear of a refusal.
const REFUSE: Duration = Duration::from_secs(3);
/// Connections that may be open without having said who they are; the oldest goes first.
const ROOM: usize = 64;
/// How many of those who were turned away are named.
const NAMED: usize = 8;

/// Rank 0 of a job that another launcher started. Dropped before it begins, it sends all others home.
pub struct Host {
    listening: Listening,
    name: String,
    world: usize,
    patience: Patience,
    come: Vec<Option<u32>>,
    /// Those who have connected, and when, and have not said yet who they are.
    silent: Vec<(UnixStream, Instant)>,
    turned_away: Vec<String>,
    /// Those beyond the ones that are named.
    more_turned_away: usize,
}

impl Host {
    /// Opens the socket of `job`. Call it first of all: others wait for it, and from then on see when this process ends.
    pub fn open(job: &str, world: usize, patience: Patience) -> Result<Self, MeetError> {
        let socket = JobSocket::of(job)?;
        let name = socket.shown();
        Ok(Self {
            listening: socket.listen(PREDECESSOR)?,
            name,
            world,
            patience,
            come: vec![None; world],
            silent: Vec::new(),
            turned_away: Vec::new(),
            more_turned_away: 0,
        })
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
                return Err(MeetError::Missing { missing, waited, refused: self.all_turned_away() });
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

    fn turn_away(&mut self, why: String) {
        if self.turned_away.len() < NAMED {
            self.turned_away.push(why);
        } else {
            self.more_turned_away += 1;
        }
    }

    fn all_turned_away(&mut self) -> Vec<String> {
        let mut all = std::mem::take(&mut self.turned_away);
        all.extend((self.more_turned_away > 0).then(|| format!("and {} more", self.more_turned_away)));
        all
    }

    /// Takes in some of those at the door. However fast others come, this ends.
    fn accept(&mut self) -> Result<(), MeetError> {
        for _ in 0..ROOM {
            let stream = match self.listening.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(MeetError::System { what: "take a rank in", source: error }),
            };
            match same_user(&stream, &self.name) {
                Ok(()) => self.silent.push((stream, Instant::now())),
                Err(stranger) => self.turn_away(stranger.to_string()),
            }
        }
        Ok(())
    }

    /// The next rank that has come and is one of this job; others are sent away. `None` where nobody has spoken.
    fn next_guest(&mut self) -> Result<Option<(UnixStream, Greeting, u32)>, MeetError> {
        self.accept()?;
        let mut place = 0;
        while let Some((stream, since)) = self.silent.get(place) {
            let has_spoken = Greeting::arrives(stream);
            if matches!(has_spoken, Ok(false)) && since.elapsed() < SPEAK {
                place += 1;
                continue;
            }
            let (stream, _) = self.silent.remove(place);
            match self.judge(&stream, has_spoken) {
                Ok(Ok((greeting, pid))) => return Ok(Some((stream, greeting, pid))),
                Ok(Err(reason)) => {
                    let _ = wire::send(&stream, Kind::NotLetIn, None, reason.as_bytes());
                    self.turn_away(reason);
                }
                // Not a rank, or one that has ended: nobody to answer.
                Err(why) => self.turn_away(why.to_string()),
            }
        }
        for _ in ROOM..self.silent.len() {
            self.silent.remove(0);
            self.turn_away(format!("a process connected to {} and said nothing", self.name));
        }
        Ok(None)
    }

    /// Who has come, or why that one is not let in.
    fn judge(
        &self,
        stream: &UnixStream,
        has_spoken: io::Result<bool>,
    ) -> Result<Result<(Greeting, u32), String>, MeetError> {
        let garbled = |why: String| MeetError::Garbled { name: self.name.clone(), why };
        if !has_spoken.map_err(|error| garbled(error.to_string()))? {
            return Err(garbled("it said nothing".to_owned()));
        }
        let set_up = "set up the connection of a rank";
        stream.set_nonblocking(false).map_err(MeetError::system(set_up))?;
        stream.set_read_timeout(Some(SPEAK)).map_err(MeetError::system(set_up))?;
        stream.set_write_timeout(Some(SPEAK)).map_err(MeetError::system(set_up))?;
        let greeting = Greeting::receive(stream).map_err(|error| garbled(error.to_string()))?;
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

#[cfg(test)]
mod tests {
    use super::super::attend;
    use super::*;

    #[test]
    fn many_that_connect_and_say_nothing_neither_keep_ranks_out_nor_are_kept() {
        let job = format!("test-{}-silent", std::process::id());
        let mut host = Host::open(&job, 2, Patience::default()).unwrap();
        let silent = || JobSocket::of(&job).unwrap().connect().unwrap();
        let mut held: Vec<_> = std::iter::repeat_with(silent).take(100).collect();
        for _ in 0..10 {
            assert!(host.next_guest().unwrap().is_none());
            held.extend(std::iter::repeat_with(silent).take(60));
        }
        assert!(host.silent.len() <= 64, "{}", host.silent.len());
        assert!(host.turned_away.len() <= 8, "{:?}", host.turned_away);
        assert!(host.more_turned_away > 0);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| attend(&job, 1, 2, &Patience::default()).unwrap());
            let _job = host.begin(0, b"go").unwrap();
            assert_eq!(guest.join().unwrap().message(), b"go");
        });
        // One after the other, each would be listened to for five seconds.
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}
