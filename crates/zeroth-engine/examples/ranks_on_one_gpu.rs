//! Two ranks on one GPU that copy from each other's memory by CUDA IPC: compares every exchange byte by byte with its expected
//! result, and times an all-gather against the same through host memory.
//!
//!     cargo run --release -p zeroth-engine --example ranks_on_one_gpu
//!
//! Needs an NVIDIA GPU. Starts itself as two processes. Exits with 1 if a result is wrong.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]

use std::process::ExitCode;
use std::time::Instant;

use zeroth_base::Axis;
use zeroth_comm::launch::RankLauncher;
use zeroth_comm::local::{is_launched, join_from_environment};
use zeroth_comm::{Comm, CommError, DeviceBarrier, DeviceCounters, JoinOptions, OpName};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{
    BarrierCounters, ByTier, Device, DeviceError, Exchange, IpcHandles, PeerPlace, Queue, Span, Transport,
};

const RANKS: usize = 2;
/// Consecutive exchanges; each must see what the peers wrote after the previous one.
const ROUNDS: u32 = 50;
/// Bytes gathered from all ranks in the timing.
const GATHERED: u64 = 64 << 20;
const TIMED: u32 = 20;
const ARENA: u64 = 3 * GATHERED + 4096;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let ended = if is_launched() { rank() } else { launch() };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn launch() -> Outcome<bool> {
    let report = RankLauncher::new(std::env::current_exe()?, RANKS, 64 << 20).run()?;
    Ok(report.first.is_none())
}

/// A rank with its GPU and its connections to the peers.
struct Rank {
    comm: Box<dyn Comm>,
    device: CudaDevice,
    barrier: Box<dyn DeviceBarrier>,
    exchanges: u32,
}

fn rank() -> Outcome<bool> {
    let comm = join_from_environment(&JoinOptions::default())?.ok_or("no launcher started this rank")?;
    let mut device = CudaDevice::open(0, ByTier::on_device(ARENA))?;
    let barrier = comm.device_barrier().ok_or("no device barrier")?;
    let (transport, rank) = (Transport::Ipc, comm.rank());
    let handle = device.ipc_handle(Axis::Group, transport, PeerPlace { rank, one_host: true })?;
    let mut all = vec![0; RANKS * handle.len()];
    comm.all_gather(op(0), &handle, &mut all, &[handle.len(); RANKS])?.wait()?;
    let handles: Vec<Vec<u8>> = all.chunks(handle.len()).map(<[u8]>::to_vec).collect();
    let shared = |DeviceCounters { file, at, bytes, first, stride }| BarrierCounters {
        file,
        at,
        bytes,
        first,
        stride,
    };
    let counters = barrier.counters().map(shared);
    device.open_ipc_handles(
        Axis::Group,
        &IpcHandles { transport, rank, handles: &handles, counters, limit: Transport::connect_limit()? },
    )?;
    comm.barrier(op(0))?.wait()?;
    let mut rank = Rank { comm, device, barrier, exchanges: 0 };
    let wrong = rank.compare()?;
    rank.time()?;
    rank.device.synchronise()?;
    Ok(wrong == 0)
}

fn op(index: u32) -> OpName {
    OpName::new(1, "exchange", index)
}

/// The byte that a rank writes at an offset of its arena before an exchange.
fn value(rank: usize, round: u32, at: u64) -> u8 {
    (rank as u64 * 101 + u64::from(round) * 37 + at * 7 % 253) as u8
}

impl Rank {
    fn exchange(&mut self, exchange: &Exchange<'_>) -> Outcome<()> {
        self.exchanges += 1;
        let points = self.barrier.next(op(self.exchanges)).map_err(|error: CommError| error.to_string())?;
        let enqueued: Result<(), DeviceError> =
            self.device.exchange(Axis::Group, Queue::Comm, exchange, points);
        Ok(enqueued?)
    }

    /// Runs every exchange on the first bytes of the arenas, repeatedly, without host synchronization in between.
    fn compare(&mut self) -> Outcome<usize> {
        const BYTES: u64 = 60_000;
        let counts = [10_007, 9_001];
        let starts = [11_000, 0];
        let (send, recv) = (Span::device(0, 0), 30_000);
        let me = self.comm.rank();
        let exchanges = [
            Exchange::AllGather {
                send: Span { bytes: counts[me] as u64, ..send },
                recv: Span::device(recv, 19_008),
                counts: &counts,
            },
            Exchange::AllGatherInPlace { buffer: Span::device(5, 25_000), starts: &starts, counts: &counts },
            Exchange::Broadcast { root: 1, buffer: Span::device(77, 20_000) },
            Exchange::AllToAll {
                send: Span::device(3, 19_008),
                recv: Span::device(recv, 2 * counts[me] as u64),
                counts: &counts,
            },
        ];
        let all = Span::device(0, BYTES);
        let (mut wrong, mut compared, mut found) = (0, 0, vec![0; BYTES as usize]);
        for round in 0..ROUNDS {
            let own: Vec<u8> = (0..BYTES).map(|at| value(me, round, at)).collect();
            // Enqueued after the previous exchange, when no peer reads these bytes any more.
            self.device.upload(Queue::Comm, &own, all)?;
            self.exchange(&exchanges[round as usize % exchanges.len()])?;
            // Compares every third result; the others follow each other without host synchronization.
            if round % 3 == 0 {
                self.device.download(Queue::Comm, all, &mut found)?;
                let expected = expected(me, round, BYTES, &exchanges[round as usize % exchanges.len()]);
                wrong += usize::from(found != expected);
                compared += 1;
            }
        }
        println!("rank {me}: {ROUNDS} exchanges, {wrong} of {compared} compared are wrong");
        Ok(wrong)
    }

    /// Times an all-gather between the GPUs, and the same through host memory.
    fn time(&mut self) -> Outcome<()> {
        let (part, me) = (GATHERED / RANKS as u64, self.comm.rank());
        let counts = [part as usize; RANKS];
        let (send, recv) = (Span::device(0, part), Span::device(GATHERED, GATHERED));
        let mut best = [f64::INFINITY; 2];
        for _ in 0..3 {
            self.comm.barrier(op(0))?.wait()?;
            let begun = Instant::now();
            for _ in 0..TIMED {
                self.exchange(&Exchange::AllGather { send, recv, counts: &counts })?;
            }
            let enqueued = begun.elapsed();
            self.device.synchronise()?;
            let each = begun.elapsed().as_secs_f64() / f64::from(TIMED);
            best[0] = best[0].min(each);
            let (mut from, mut to) = (vec![0; part as usize], vec![0; GATHERED as usize]);
            self.comm.barrier(op(0))?.wait()?;
            let begun = Instant::now();
            self.device.download(Queue::Comm, send, &mut from)?;
            self.comm.all_gather(op(0), &from, &mut to, &counts)?.wait()?;
            self.device.upload(Queue::Comm, &to, recv)?;
            self.device.synchronise()?;
            best[1] = best[1].min(begun.elapsed().as_secs_f64());
            if me == 0 {
                println!("{TIMED} gathers were enqueued in {:.0} µs", 1e6 * enqueued.as_secs_f64());
            }
        }
        if me == 0 {
            let [gpu, host] = best.map(|seconds| 1e3 * seconds);
            println!(
                "all-gather of {} MiB on {RANKS} ranks: {gpu:.3} ms by CUDA IPC, {host:.2} ms through the host",
                GATHERED >> 20
            );
        }
        Ok(())
    }
}

/// The expected first bytes of a rank's arena after an exchange.
fn expected(me: usize, round: u32, bytes: u64, exchange: &Exchange<'_>) -> Vec<u8> {
    let mut all: Vec<u8> = (0..bytes).map(|at| value(me, round, at)).collect();
    let mut put = |to: usize, from: usize, at: usize, count: usize| {
        for place in 0..count {
            all[to + place] = value(from, round, (at + place) as u64);
        }
    };
    match *exchange {
        Exchange::AllGather { recv, counts, .. } => {
            put(recv.at as usize, 0, 0, counts[0]);
            put(recv.at as usize + counts[0], 1, 0, counts[1]);
        }
        Exchange::AllGatherInPlace { buffer, starts, counts } => {
            for rank in 0..RANKS {
                let at = buffer.at as usize + starts[rank];
                put(at, rank, at, counts[rank]);
            }
        }
        Exchange::Broadcast { root, buffer } => {
            put(buffer.at as usize, root, buffer.at as usize, buffer.bytes as usize);
        }
        Exchange::AllToAll { send, recv, counts } => {
            let at = send.at as usize + counts[..me].iter().sum::<usize>();
            for rank in 0..RANKS {
                put(recv.at as usize + rank * counts[me], rank, at, counts[me]);
            }
        }
    }
    all
}
