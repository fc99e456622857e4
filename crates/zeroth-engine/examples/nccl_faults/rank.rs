//! One rank: joins the others by NCCL, exchanges bytes, and suffers its fault.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};
use zeroth_base::Axis;
use zeroth_comm::local::join_from_environment;
use zeroth_comm::{Comm, DeviceBarrier, JoinOptions, OpName, Timing};
use zeroth_cuda::CudaDevice;
use zeroth_engine::{await_verdict, end_soon_after_loss};
use zeroth_kernel::{ByTier, Device, Exchange, IpcHandles, PeerPlace, Queue, Span, Transport};

use super::{FAULT, Outcome};

/// Bytes of a rank's part.
const PART: usize = 256 << 10;
const ARENA: u64 = 64 << 20;
const EXCHANGES: u32 = 1_000;
/// Exchanges between two waits of the host.
const AHEAD: u32 = 5;
/// A rank that is silent for so long is lost, as a host is.
const SILENCE: Duration = Duration::from_secs(5);

/// What this rank does, for the report of a fault.
static PHASE: AtomicUsize = AtomicUsize::new(0);
const NAMES: [&str; 6] = ["start", "init", "first", "middle", "aborted", "end"];

struct Rank {
    comm: Box<dyn Comm>,
    device: CudaDevice,
    barrier: Box<dyn DeviceBarrier>,
    /// This rank's own fault: signal, phase and delay.
    fault: Option<(Signal, String, Duration)>,
}

pub(super) fn run() -> Outcome<bool> {
    // Ranks do not outlive the report.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let timing = Timing { lost: SILENCE, ..Timing::default() };
    let comm = join_from_environment(&JoinOptions::default().timing(timing))?.ok_or("no launcher")?;
    let fault = std::env::var(FAULT).ok().and_then(|text| {
        let words: Vec<&str> = text.split(' ').collect();
        let signal = if words[0] == "KILL" { Signal::KILL } else { Signal::STOP };
        let delay = Duration::from_millis(words[2].parse().ok()?);
        (words[3] == comm.rank().to_string()).then(|| (signal, words[1].to_owned(), delay))
    });
    let device = CudaDevice::open(0, ByTier::on_device(ARENA))?;
    let barrier = comm.device_barrier().ok_or("no device barrier")?;
    barrier.on_lost(device.abort().map(end_soon_after_loss));
    let mut rank = Rank { comm, device, barrier, fault };
    let outcome = rank.train();
    let Err(error) = outcome else { return Ok(true) };
    println!("error: {error}");
    // The communicator is aborted by its thread.
    let begun = Instant::now();
    while rank.device.abort_time().is_none() && begun.elapsed() < Duration::from_millis(1_500) {
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Some(time) = rank.device.abort_time() {
        println!("abort ms: {:.0}", 1e3 * time.as_secs_f64());
    }
    let begun = Instant::now();
    drop(rank);
    println!("closed in {:.0} ms", 1e3 * begun.elapsed().as_secs_f64());
    Ok(false)
}

impl Rank {
    fn train(&mut self) -> Outcome<()> {
        let op = OpName::new(0, "connect devices", 0);
        let free = self.device.free_bytes();
        let connected = self.connect(op);
        self.cause(op, connected)?;
        let after = self.device.free_bytes();
        for number in 0..EXCHANGES {
            let op = OpName::new(1 + u64::from(number / 100), "gather weights", number % 100);
            match number {
                0 => self.enter(2),
                1 => self.enter(3),
                _ => {}
            }
            if number == EXCHANGES / 3 && self.fault.as_ref().is_some_and(|(_, phase, _)| phase == "aborted")
            {
                return self.abort_and_fail();
            }
            let exchanged = self.exchange(op, number);
            self.cause(op, exchanged)?;
        }
        self.enter(5);
        if self.comm.rank() == 0 {
            let taken = free.zip(after).map_or(0, |(before, after)| before.saturating_sub(after));
            let now =
                free.zip(self.device.free_bytes()).map_or(0, |(before, now)| before.saturating_sub(now));
            println!(
                "free memory of the GPU fell by {} MB while joining, by {} MB in all (of all ranks)",
                taken >> 20,
                now >> 20
            );
        }
        Ok(())
    }

    fn connect(&mut self, op: OpName) -> Outcome<()> {
        let (axis, transport, rank) = (Axis::Group, Transport::Nccl, self.comm.rank());
        let handle = self.device.ipc_handle(axis, transport, PeerPlace { rank, one_host: true })?;
        let mut all = vec![0; self.comm.world() * handle.len()];
        let counts = vec![handle.len(); self.comm.world()];
        self.comm.all_gather(op, &handle, &mut all, &counts)?.wait()?;
        let handles: Vec<Vec<u8>> = all.chunks(handle.len()).map(<[u8]>::to_vec).collect();
        let begun = Instant::now();
        self.barrier.next(op)?;
        self.enter(1);
        let limit = Transport::connect_limit()?;
        let handles = IpcHandles { transport, rank, handles: &handles, counters: None, limit };
        self.device.open_ipc_handles(axis, &handles)?;
        println!("joined in {:.0} ms", 1e3 * begun.elapsed().as_secs_f64());
        self.comm.barrier(op)?.wait()?;
        Ok(())
    }

    fn exchange(&mut self, op: OpName, number: u32) -> Outcome<()> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let whole = (world * PART) as u64;
        let (send, recv, counts) = (Span::device(0, whole), Span::device(whole, whole), vec![PART; world]);
        let value = |rank: usize| (rank as u8 + 1).wrapping_mul(number as u8 | 1);
        let begun = Instant::now();
        let compared = number.is_multiple_of(AHEAD);
        if compared {
            self.device.upload(Queue::Comm, &vec![value(rank); world * PART], send)?;
        }
        let points = self.barrier.next(op)?;
        let gather = Exchange::AllGather { send: send.part(0, PART as u64, 1), recv, counts: &counts };
        let swap = Exchange::AllToAll { send, recv, counts: &counts };
        let exchange = if number.is_multiple_of(2) { gather } else { swap };
        self.device.exchange(Axis::Group, Queue::Comm, &exchange, points)?;
        if compared {
            let mut found = vec![0; world * PART];
            self.device.download(Queue::Comm, recv, &mut found)?;
            let right = found
                .chunks(PART)
                .enumerate()
                .all(|(from, part)| part.iter().all(|byte| *byte == value(from)));
            self.barrier.check(op)?;
            if !right {
                return Err(format!("wrong bytes in exchange {number}").into());
            }
        }
        if number == 0 {
            println!("first exchange in {:.0} ms", 1e3 * begun.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// The lost rank is the cause of an error, where one is lost.
    fn cause<T>(&self, op: OpName, outcome: Outcome<T>) -> Outcome<T> {
        if outcome.is_err() {
            await_verdict(&*self.barrier, op)?;
        }
        outcome
    }

    /// Begins a phase, and the time to this rank's fault if it is in that phase.
    fn enter(&self, phase: usize) {
        PHASE.store(phase, Ordering::Relaxed);
        let Some((signal, wanted, delay)) = &self.fault else { return };
        if wanted == NAMES[phase] {
            let (signal, delay) = (*signal, *delay);
            std::thread::spawn(move || strike(signal, delay));
        }
    }

    /// Aborts the communicator as after a loss; the fault comes before the exit.
    fn abort_and_fail(&self) -> Outcome<()> {
        if let Some(abort) = self.device.abort() {
            abort();
        }
        while self.device.abort_time().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.enter(4);
        std::thread::sleep(Duration::from_secs(20));
        Err("the fault did not come".into())
    }
}

fn strike(signal: Signal, delay: Duration) {
    std::thread::sleep(delay);
    println!("fault in: {}", NAMES[PHASE.load(Ordering::Relaxed)]);
    let _ = kill_process(getpid(), signal);
}
