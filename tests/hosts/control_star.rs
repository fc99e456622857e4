//! A control connection for the experiments on MPI: every rank beats to rank 0 over TCP, and rank 0 to every rank. A closed
//! connection is a death, silence a stopped rank or a lost host. Rank 0's first verdict counts for all it reaches.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use zeroth_comm::mpi::{Mpi, Watch};
use zeroth_comm::{LostReason, RankLost};

const BEAT: Duration = Duration::from_millis(250);
const SILENCE: Duration = Duration::from_secs(5);
/// Everything is well.
const ALIVE: u8 = 255;
/// The sender leaves after its last step.
const LEAVES: u8 = 254;

/// The rank that was lost, with the reason.
type Verdict = Arc<OnceLock<(usize, LostReason)>>;

pub(crate) struct ControlStar {
    rank: usize,
    verdict: Verdict,
    peers: Arc<Mutex<Vec<TcpStream>>>,
}

impl ControlStar {
    /// Connects all ranks. `host` is the name of rank 0's host.
    pub(crate) fn connect(mpi: &Mpi) -> Self {
        let (rank, world) = mpi.world();
        let listener = (rank == 0).then(|| TcpListener::bind("0.0.0.0:0").unwrap());
        let mut place = Vec::new();
        if let Some(listener) = &listener {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
            place = format!("{}:{}", host.trim(), listener.local_addr().unwrap().port()).into_bytes();
        }
        mpi.broadcast(0, &mut place).unwrap();
        let verdict = Verdict::default();
        let mut peers = Vec::new();
        if let Some(listener) = listener {
            for _ in 1..world {
                let (mut peer, _) = listener.accept().unwrap();
                let mut number = [0];
                peer.read_exact(&mut number).unwrap();
                peers.push((usize::from(number[0]), peer));
            }
        } else {
            let mut peer = TcpStream::connect(std::str::from_utf8(&place).unwrap()).unwrap();
            peer.write_all(&[rank as u8]).unwrap();
            peers.push((0, peer));
        }
        let writers: Vec<_> = peers.iter().map(|(_, peer)| peer.try_clone().unwrap()).collect();
        let star = Self { rank, verdict, peers: Arc::new(Mutex::new(writers)) };
        for (number, peer) in peers {
            let (verdict, peers) = (Arc::clone(&star.verdict), Arc::clone(&star.peers));
            std::thread::spawn(move || listen(number, peer, &verdict, &peers));
        }
        let peers = Arc::clone(&star.peers);
        std::thread::spawn(move || {
            loop {
                send(&peers, ALIVE);
                std::thread::sleep(BEAT);
            }
        });
        star
    }

    /// Says goodbye: the end of this rank's connection is no death.
    pub(crate) fn leave(&self) {
        send(&self.peers, LEAVES);
    }

    pub(crate) fn watch(&self) -> Watch {
        let (verdict, by) = (Arc::clone(&self.verdict), self.rank);
        Arc::new(move |op| {
            let Some((rank, reason)) = verdict.get().copied() else { return Ok(()) };
            let host = "of the experiment".to_owned();
            let lost =
                RankLost { rank, host, pid: 0, reason, last: None, by: Some(by), waiting_in: Some(op) };
            Err(Box::new(lost).into())
        })
    }
}

fn send(peers: &Mutex<Vec<TcpStream>>, byte: u8) {
    for peer in &mut *peers.lock().unwrap() {
        // A connection that is broken is noticed by its reader.
        let _ = peer.write_all(&[byte]);
    }
}

/// Reads what a peer says until it leaves or is lost.
fn listen(number: usize, mut peer: TcpStream, verdict: &Verdict, peers: &Mutex<Vec<TcpStream>>) {
    peer.set_read_timeout(Some(SILENCE)).unwrap();
    let mut byte = [0];
    let lost = loop {
        match peer.read(&mut byte) {
            Ok(1) if byte[0] == ALIVE => {}
            Ok(1) if byte[0] == LEAVES => return,
            Ok(1) => break (usize::from(byte[0]), LostReason::Dead),
            // A debugger came, or the process was stopped and resumed.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                break (number, LostReason::Stopped { seconds: SILENCE.as_secs() as u32 });
            }
            Ok(_) | Err(_) => break (number, LostReason::Dead),
        }
    };
    let _ = verdict.set(lost);
    if let Some((rank, _)) = verdict.get() {
        send(peers, *rank as u8);
    }
}
