//! How near the collectives of local ranks come to a plain copy of the same bytes.
//!
//!     cargo run --release -p zeroth-comm --example local_collectives [-- <bursts> [<region in KiB>]]
//!
//! Two ranks, a thread each, take turns with collectives and copies. A line: the bytes of a rank's part, and GB/s of what
//! a rank ends up with that it did not have in place (a copy of n bytes counts n; `all_gather` and `all_to_all` give two
//! parts, in place it is the other's one), best and median of the slower rank, in percent of a copy past the caches by
//! both threads at the same time. The first three collectives go through the regions; those "read" are read in the other's
//! window. Memory is on huge pages where the system gives them, as arenas are, but for windows. Data is random.
//! `program_collectives` of zeroth-step measures the same as a program does it, sums included.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]
#![allow(clippy::unwrap_used, reason = "a program that is run by hand stops where something fails")]
#![allow(unsafe_code, reason = "maps memory, and stores past the caches take pointers")]

use std::sync::Barrier;
use std::time::Instant;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use zeroth_comm::local::{Job, LocalComm, Options};
use zeroth_comm::{Comm, OpName, Windows};

const RANKS: usize = 2;
/// Bytes of a rank's part.
const SIZES: [usize; 4] = [1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// What is measured, and the parts that it writes.
const KINDS: [(&str, usize); 7] = [
    ("copy, past the caches", 1),
    ("copy", 1),
    ("all_gather", RANKS),
    ("all_gather in place", RANKS - 1),
    ("all_to_all", RANKS),
    ("all_gather, read", RANKS),
    ("in place, read", RANKS - 1),
];

/// Private memory, as an arena has it; freed with the process.
fn memory(bytes: usize, seed: u64) -> &'static mut [u8] {
    // SAFETY: a new mapping at a place of the system's choice, used as one slice and never unmapped.
    let memory = unsafe {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let start = mmap_anonymous(std::ptr::null_mut(), bytes, rights, MapFlags::PRIVATE).unwrap();
        let _ = madvise(start, bytes, Advice::LinuxHugepage);
        std::slice::from_raw_parts_mut(start.cast::<u8>(), bytes)
    };
    fill(memory, seed);
    memory
}

/// This rank's window.
fn window(comm: &LocalComm, bytes: usize, seed: u64) -> &'static mut [u8] {
    let (file, at) = comm.own();
    // SAFETY: as above.
    let memory = unsafe {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let start = mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, file, at).unwrap();
        std::slice::from_raw_parts_mut(start.cast::<u8>(), bytes)
    };
    fill(memory, seed);
    assert!(comm.open(OpName::new(0, "open windows", 0), bytes, true).unwrap());
    memory
}

fn fill(memory: &mut [u8], seed: u64) {
    let mut state = seed;
    for bytes in memory.as_chunks_mut::<8>().0 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *bytes = (state ^ state >> 33).to_le_bytes();
    }
}

fn copy_past(from: &[u8], to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128};
        assert!(to.as_ptr().addr().is_multiple_of(64) && to.len() == from.len());
        for at in (0..to.len() / 16 * 16).step_by(16) {
            // SAFETY: inside both, and aligned where it is written; a place a page ahead is only asked for.
            unsafe {
                if at % 64 == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(at + 4096).cast());
                }
                let value = _mm_loadu_si128(from.as_ptr().add(at).cast());
                _mm_stream_si128(to.as_mut_ptr().add(at).cast(), value);
            }
        }
        // SAFETY: part of every x86-64 processor.
        unsafe { _mm_sfence() };
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// One burst.
fn run(kind: usize, comm: &LocalComm, index: u32, own: &[u8], shown: &[u8], all: &mut [u8], bytes: usize) {
    let counts = [bytes; RANKS];
    let op = OpName::new(1, KINDS[kind].0, index);
    match kind {
        0 => copy_past(&own[..bytes], &mut all[..bytes]),
        1 => all[..bytes].copy_from_slice(&own[..bytes]),
        2 => comm.all_gather(op, &own[..bytes], &mut all[..RANKS * bytes], &counts).unwrap().wait().unwrap(),
        3 => {
            let all = &mut all[..RANKS * bytes];
            comm.all_gather_in_place(op, all, &[0, bytes], &counts).unwrap().wait().unwrap();
        }
        5 | 6 => {
            let (rank, other) = (comm.rank(), 1 - comm.rank());
            if kind == 5 {
                copy_past(&shown[..bytes], &mut all[rank * bytes..(rank + 1) * bytes]);
            }
            let to = &mut all[other * bytes..(other + 1) * bytes];
            comm.read(op, &[0..bytes, 0..bytes], &mut |peers| copy_past(peers.of(other), to)).unwrap();
        }
        _ => {
            let (send, receive) = (&own[..RANKS * bytes], &mut all[..RANKS * bytes]);
            comm.all_to_all(op, send, receive, &counts).unwrap().wait().unwrap();
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|text| text.parse::<usize>().ok());
    let bursts = arguments.next().unwrap_or(9);
    let region = arguments.next().unwrap_or(1024) << 10;
    let job = Job::create(RANKS, region).unwrap();
    let together = Barrier::new(RANKS);
    let rank = |rank: usize| {
        let comm = job.join(rank, &Options::default()).unwrap();
        let largest = RANKS * SIZES[SIZES.len() - 1];
        let (own, all) = (memory(largest, rank as u64 + 1), memory(largest, rank as u64 + 77));
        let shown = window(&comm, largest, rank as u64 + 5);
        let mut seconds = vec![vec![Vec::new(); KINDS.len()]; SIZES.len()];
        let mut index = 0;
        for _ in 0..bursts {
            for (&bytes, seconds) in SIZES.iter().zip(&mut seconds) {
                for (kind, seconds) in seconds.iter_mut().enumerate() {
                    together.wait();
                    let begin = Instant::now();
                    run(kind, &comm, index, own, shown, all, bytes);
                    seconds.push(begin.elapsed().as_secs_f64());
                    index += 1;
                }
            }
        }
        seconds
    };
    let [first, second] = std::thread::scope(|scope| {
        [scope.spawn(|| rank(0)), scope.spawn(|| rank(1))].map(|thread| thread.join().unwrap())
    });
    println!("region {} KiB", region >> 10);
    println!("{:<22} {:>5} {:>10} {:>8} {:>7} {:>7}", "", "MiB", "best GB/s", "median", "best %", "med. %");
    for (size, bytes) in SIZES.iter().enumerate() {
        let mut limits = [0.0; 2];
        for (kind, (name, parts)) in KINDS.iter().enumerate() {
            let mut seconds: Vec<f64> =
                first[size][kind].iter().zip(&second[size][kind]).map(|(a, b)| a.max(*b)).collect();
            seconds.sort_by(f64::total_cmp);
            let rates =
                [seconds[0], seconds[seconds.len() / 2]].map(|time| (parts * bytes) as f64 / time / 1e9);
            if kind == 0 {
                limits = rates;
            }
            let [best, median] = [0, 1].map(|at: usize| 100.0 * rates[at] / limits[at]);
            println!(
                "{name:<22} {:>5} {:>10.1} {:>8.1} {best:>7.0} {median:>7.0}",
                bytes >> 20,
                rates[0],
                rates[1]
            );
        }
    }
}
