//! Rates of a communicator over MPI, beside calls of the library itself in the same processes:
//!
//!     cargo build --release -p zeroth-comm --example mpi_rates
//!     tests/hosts/hosts with rates 2 tests/hosts/hosts mpich rates 1,1 target/release/examples/mpi_rates 16777216 9
//!
//! The arguments are the bytes of a rank's part, the number of rounds and, if given, a CSV file to which rank 0 adds all
//! times. In a round each way runs once, one after the other, between barriers, and every round begins with another way;
//! rank 0 prints the median of its times. "Polled" are `MPI_Iallgather` and `MPI_Ialltoall` with
//! `MPI_Test` in a loop, "sleeping" the same with a sleep of 20 µs after 20 tests.
#![allow(unsafe_code, reason = "calls MPI beside the communicator")]
#![allow(clippy::print_stdout, reason = "a program that measures")]

use std::ffi::{OsStr, c_int, c_void};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zeroth_base::SharedLibrary;
use zeroth_comm::mpi::Mpi;
use zeroth_comm::{Handle, OpName, Transfer};

type Blocking = unsafe extern "C" fn(*const c_void, c_int, usize, *mut c_void, c_int, usize, usize) -> c_int;
type Started =
    unsafe extern "C" fn(*const c_void, c_int, usize, *mut c_void, c_int, usize, usize, *mut usize) -> c_int;
type Test = unsafe extern "C" fn(*mut usize, *mut c_int, *mut c_void) -> c_int;

/// MPI's own functions. Handles are passed as the bits of an integer or an address.
struct Bare {
    blocking: [Blocking; 2],
    started: [Started; 2],
    test: Test,
    world: usize,
    byte: usize,
    status_ignore: *mut c_void,
}

impl Bare {
    /// The library that is open already.
    fn load(mpi: &Mpi) -> Result<Self, String> {
        let at = mpi.library().rsplit_once('(').map_or("", |(_, at)| at.trim_end_matches(')'));
        let library = SharedLibrary::open_global(OsStr::new(at))?;
        // SAFETY: types as in mpi.h, with handles as machine words; objects are exported by Open MPI alone.
        unsafe {
            let open_mpi = library.function::<usize>("ompi_mpi_comm_world");
            let (world, byte, status_ignore) = match open_mpi {
                Ok(world) => (world, library.function("ompi_mpi_byte")?, std::ptr::null_mut()),
                Err(_) => (0x4400_0000, 0x4c00_010d, std::ptr::without_provenance_mut(1)),
            };
            Ok(Self {
                blocking: [library.function("MPI_Allgather")?, library.function("MPI_Alltoall")?],
                started: [library.function("MPI_Iallgather")?, library.function("MPI_Ialltoall")?],
                test: library.function("MPI_Test")?,
                world,
                byte,
                status_ignore,
            })
        }
    }

    /// Sends `count` bytes to, and receives as many from, each rank.
    fn run(&self, kind: usize, way: Way, send: &[u8], recv: &mut [u8], count: usize) {
        let (send, recv, count) = (send.as_ptr().cast(), recv.as_mut_ptr().cast(), count as c_int);
        if way == Way::Blocking {
            // SAFETY: the buffers hold `count` bytes for each rank.
            unsafe { (self.blocking[kind])(send, count, self.byte, recv, count, self.byte, self.world) };
            return;
        }
        let (mut request, mut done, mut tests) = (0, 0, 0_u32);
        // SAFETY: as above; they are borrowed until the operation is complete.
        unsafe {
            (self.started[kind])(
                send,
                count,
                self.byte,
                recv,
                count,
                self.byte,
                self.world,
                &raw mut request,
            );
        }
        while done == 0 {
            // SAFETY: the request that was started.
            unsafe { (self.test)(&raw mut request, &raw mut done, self.status_ignore) };
            tests += 1;
            if way == Way::Sleeping && tests > 20 && done == 0 {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The communicator, polling without sleeps.
    OursPolled,
    /// The communicator where CPUs are shared.
    OursSleeping,
    Blocking,
    Polled,
    Sleeping,
}

const KINDS: [&str; 2] = ["all_gather", "all_to_all"];

const WAYS: [(Way, &str); 5] = [
    (Way::OursPolled, "communicator, polled"),
    (Way::Polled, "MPI, polled"),
    (Way::OursSleeping, "communicator, sleeping"),
    (Way::Sleeping, "MPI, sleeping"),
    (Way::Blocking, "MPI, blocking"),
];

/// Adds all times to a file, one a line.
fn write(path: &str, library: &str, size: (usize, usize), times: &[Vec<f64>]) -> std::io::Result<()> {
    let mut file = File::options().append(true).create(true).open(path)?;
    if file.metadata()?.len() == 0 {
        writeln!(file, "library,ranks,bytes,collective,way,round,ms")?;
    }
    let library = library.split(['(', ',']).next().unwrap_or_default().trim();
    for (at, times) in times.iter().enumerate() {
        let (collective, way) = (KINDS[at / WAYS.len()], WAYS[at % WAYS.len()].1.replace(',', ""));
        for (round, time) in times.iter().enumerate() {
            writeln!(file, "{library},{},{},{collective},{way},{},{time:.3}", size.0, size.1, round + 1)?;
        }
    }
    Ok(())
}

fn main() {
    let mpi = Mpi::init().expect("MPI is initialized once, by mpirun");
    let bare = Bare::load(&mpi).expect("the library is open");
    let (rank, world) = mpi.world();
    let mut arguments = std::env::args().skip(1);
    let mut number =
        |default| arguments.next().map_or(default, |text| text.parse().expect("BYTES ROUNDS FILE"));
    let (count, rounds): (usize, usize) = (number(16 << 20), number(9));
    let raw = arguments.next();
    let comm = mpi.split(0, rank, Arc::new(|_| Ok(()))).expect("nothing ends this job");
    let counts = vec![count; world];
    let (send, mut recv) = (vec![rank as u8; count * world], vec![0; count * world]);
    let op = OpName::new(1, "rate", 0);
    let mut times = vec![Vec::new(); 2 * WAYS.len()];
    // The first round connects and touches memory.
    for round in 0..=rounds {
        for turn in 0..times.len() {
            let at = (turn + round) % times.len();
            let (kind, way) = (at / WAYS.len(), &WAYS[at % WAYS.len()].0);
            mpi.share_host(if *way == Way::OursSleeping { usize::MAX } else { 1 }, 1);
            comm.barrier(op).and_then(Handle::wait).expect("nothing ends this job");
            let began = Instant::now();
            if matches!(way, Way::OursPolled | Way::OursSleeping) {
                let transfer = if kind == 0 {
                    Transfer::AllGather { send: &send[..count], recv: &mut recv, counts: &counts }
                } else {
                    Transfer::AllToAll { send: &send, recv: &mut recv, counts: &counts }
                };
                comm.start(op, transfer).and_then(Handle::wait).expect("nothing ends this job");
            } else {
                bare.run(kind, *way, &send, &mut recv, count);
            }
            if round > 0 {
                times[at].push(began.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    if rank == 0 {
        if let Some(raw) = raw {
            write(&raw, mpi.library(), (world, count), &times).expect("the file can be written");
        }
        println!("{}: {world} ranks, {count} bytes a part, median of {rounds} rounds", mpi.library());
        for (kind, name) in KINDS.iter().enumerate() {
            for (slot, (_, way)) in WAYS.iter().enumerate() {
                let times = &mut times[kind * WAYS.len() + slot];
                times.sort_by(f64::total_cmp);
                let (median, least) = (times[times.len() / 2], times[0]);
                println!("{name:<11} {way:<23} {median:8.2} ms (least {least:.2})");
            }
        }
    }
    mpi.leave(Duration::from_secs(5));
    // SAFETY: nothing is left to do. Exit handlers of a library that was not left may hang.
    unsafe { libc::_exit(0) };
}
