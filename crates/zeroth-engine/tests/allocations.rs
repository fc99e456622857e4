//! A step allocates nothing: after the first two, no thread of any rank asks for memory.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]
#![allow(unsafe_code, reason = "an allocator that counts")]

#[path = "it/job/mod.rs"]
mod job;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};

use job::{BF16, Golden, ROOMY, Setup};
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, JoinOptions};
use zeroth_engine::{Feed, MicroBatches, RunError, StreamBatch, StreamRows};
use zeroth_program::Compiled;
use zeroth_program::Settings;

/// Steps that may still allocate: what is made on its first use and kept.
const WARM_UP: usize = 2;
const WATCHED: usize = 6;

/// Whether an allocation is one too many.
static WATCHING: AtomicBool = AtomicBool::new(false);
/// Where the first one was asked for.
static FOUND: Mutex<Option<String>> = Mutex::new(None);

struct Watching;

fn look(bytes: usize) {
    // The backtrace allocates too: the first allocation ends the watch.
    if WATCHING.swap(false, Ordering::SeqCst) {
        let place = Backtrace::force_capture();
        *FOUND.lock().unwrap() = Some(format!("{bytes} bytes at\n{place}"));
    }
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        look(layout.size());
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        look(bytes);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Two sequences end to end.
struct Pair {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    starts: [u32; 3],
}

impl Pair {
    /// Lengths follow from `salt`, up to `longest` each: micro-batches of all sizes come by.
    fn new(vocabulary: u64, longest: usize, salt: usize) -> Self {
        let lengths = [1 + salt * 7 % longest, 1 + salt * 13 % longest];
        let rows = lengths[0] + lengths[1];
        let token = |at: usize| ((at * 5 + salt) as u64 % vocabulary) as i32;
        Self {
            ids: (0..rows).map(token).collect(),
            labels: (0..rows).map(|at| if at % 3 == 0 { -100 } else { token(at + 1) }).collect(),
            positions: lengths.into_iter().flat_map(|length| 0..length as i32).collect(),
            starts: [0, lengths[0] as u32, rows as u32],
        }
    }

    fn view(&self) -> StreamRows<'_> {
        let Self { ids, labels, positions, starts } = self;
        StreamRows { ids, labels, positions, starts, keys: &[] }
    }
}

/// The source and the target of an encoder-decoder.
struct Translations<'a>(std::slice::Iter<'a, [Pair; 2]>);

impl MicroBatches for Translations<'_> {
    type Error = RunError;

    fn next(&mut self, feed: Feed<'_>) -> Result<(), RunError> {
        let [source, target] = self.0.next().unwrap();
        feed(&StreamBatch { streams: &[source.view(), target.view()], inputs: &[] })
    }
}

fn rank(
    golden: &Golden,
    setup: &Setup,
    compiled: &Compiled,
    comm: Option<Box<dyn Comm>>,
    together: &Barrier,
) {
    let mut engine = golden.engine(compiled, setup.threads, comm);
    let accumulation = setup.settings.accumulation as usize;
    let most_rows = compiled.graph.streams.iter().map(|stream| stream.rows).min().unwrap();
    let longest = most_rows as usize / 2;
    let pair = |at: usize| Pair::new(golden.config.vocab, longest, at * 11 + engine.rank() as usize * 3 + 1);
    let numbers = 0..(WARM_UP + WATCHED) * accumulation;
    let pairs: Vec<[Pair; 2]> = numbers.map(|number| [pair(number), pair(number + 1)]).collect();
    let views: Vec<StreamRows<'_>> = pairs.iter().map(|[_, target]| target.view()).collect();
    let has_source = compiled.graph.streams.len() == 2;
    let mut record = engine.record().unwrap();
    for (step, (batches, pairs)) in views.chunks(accumulation).zip(pairs.chunks(accumulation)).enumerate() {
        if step == WARM_UP && together.wait().is_leader() {
            WATCHING.store(true, Ordering::SeqCst);
        }
        if step == WARM_UP {
            together.wait();
        }
        if has_source {
            engine.step_from(&mut Translations(pairs.iter()), 40, step as u64, &[1e-3]).unwrap();
        } else {
            engine.step(batches, 40, step as u64, &[1e-3]).unwrap();
        }
        engine.read_record(&mut record).unwrap();
    }
    if together.wait().is_leader() {
        WATCHING.store(false, Ordering::SeqCst);
    }
    together.wait();
    assert!(record.head.loss > 0.0 && record.head.applied == (WARM_UP + WATCHED) as u64, "{record:?}");
}

fn assert_no_allocation(golden: &Golden, setup: &Setup) {
    let compiled = golden.compile(setup);
    let together = Barrier::new(setup.ranks as usize);
    if setup.ranks == 1 {
        rank(golden, setup, &compiled, None, &together);
    } else {
        let job = LocalJob::create(setup.ranks as usize, 1 << 16).unwrap();
        std::thread::scope(|scope| {
            for number in 0..setup.ranks as usize {
                let comm = job.join(number, &JoinOptions::default()).unwrap();
                let (compiled, together) = (&compiled, &together);
                scope.spawn(move || rank(golden, setup, compiled, Some(comm), together));
            }
        });
    }
    let found = FOUND.lock().unwrap().take();
    assert!(found.is_none(), "{} {setup:?}: {}", golden.name, found.unwrap());
}

/// One test: the allocator watches the whole process, and tests of one file may run side by side.
#[test]
fn a_step_allocates_nothing() {
    let watched = std::hint::black_box(vec![0u8; 3]);
    WATCHING.store(true, Ordering::SeqCst);
    drop(std::hint::black_box(watched.clone()));
    assert!(FOUND.lock().unwrap().take().is_some(), "the watch does not see an allocation");

    // Rows that stretch dynamic rope's base have angles of their own; the others look theirs up.
    for name in ["qwen3-tied", "mistral-window", "llama-dynamic", "t5/t5-relu-tied"] {
        let golden = Golden::named(name);
        for (ranks, stage, accumulation, threads) in
            [(1, 0, 1, 1), (1, 3, 2, 2), (2, 0, 1, 1), (2, 0, 2, 1), (2, 3, 1, 2), (2, 3, 2, 1)]
        {
            let settings = Settings {
                stage,
                accumulation,
                types: BF16,
                reduce_bucket: 6000,
                max_live: 8000,
                prefetch: 5000,
                overlap: true,
                ..ROOMY
            };
            let setup = Setup { ranks, micro_batch: 2, threads, settings, sizes: 4, ..Setup::default() };
            assert_no_allocation(&golden, &setup);
        }
    }
}
