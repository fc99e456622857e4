//! Bounds on what reading a file may take: memory, by an allocator that counts, and time.
#![allow(unsafe_code, reason = "an allocator cannot be written without")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Bytes that reading a file may take beyond what was there before.
pub(crate) const MEMORY: usize = 256 << 20;
/// How long it may take. Files have some kilobytes; the rest is for a machine that is busy.
const TIME: Duration = Duration::from_secs(20);

#[global_allocator]
static COUNTING: Counting = Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
/// No more may live than this; 0: whatever is wanted.
static MOST: AtomicUsize = AtomicUsize::new(0);
static EXCEEDED: AtomicBool = AtomicBool::new(false);

struct Counting;

impl Counting {
    /// Counts an allocation. A thread that asks for too much gets no further: the audit notices, and goes on without it.
    fn take(bytes: usize) {
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let most = MOST.load(Ordering::Relaxed);
        if most > 0 && live > most {
            EXCEEDED.store(true, Ordering::Relaxed);
            LIVE.fetch_sub(bytes, Ordering::Relaxed);
            loop {
                std::thread::sleep(Duration::from_hours(1));
            }
        }
    }
}

// SAFETY: all memory is the system allocator's; counting touches none of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::take(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        Self::take(bytes);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(place, layout, bytes) }
    }
}

/// How reading a file went wrong.
pub(crate) enum Fault {
    Panic(String),
    Memory,
    Time,
}

/// What reads a file, and says whether it was taken for a good one.
pub(crate) type Reader = Arc<dyn Fn(&Path) -> bool + Send + Sync>;

/// Files to a thread, and what came of each.
type Lane = (Sender<PathBuf>, Receiver<Result<bool, String>>);

/// A thread that reads files. Left alone where it gets no further, and replaced.
pub(crate) struct Guard {
    reader: Reader,
    lane: Option<Lane>,
}

impl Guard {
    pub(crate) fn new(reader: Reader) -> Self {
        Self { reader, lane: None }
    }

    pub(crate) fn read(&mut self, file: &Path) -> Result<bool, Fault> {
        let (files, ends) = self.lane.get_or_insert_with(|| {
            let ((files, taken), (ended, ends)) = (channel::<PathBuf>(), channel());
            let reader = Arc::clone(&self.reader);
            std::thread::spawn(move || {
                for file in taken {
                    let read = catch_unwind(AssertUnwindSafe(|| reader(&file)));
                    let said = read.map_err(|panic| {
                        let text = panic.downcast_ref::<String>().cloned();
                        text.or(panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
                    });
                    if ended.send(said).is_err() {
                        return;
                    }
                }
            });
            (files, ends)
        });
        MOST.store(LIVE.load(Ordering::Relaxed) + MEMORY, Ordering::Relaxed);
        files.send(file.to_owned()).expect("the thread reads until this end is dropped");
        let ended = wait(ends);
        MOST.store(0, Ordering::Relaxed);
        if matches!(ended, Err(Fault::Memory | Fault::Time)) {
            std::mem::forget(self.lane.take());
        }
        ended
    }
}

fn wait(ends: &Receiver<Result<bool, String>>) -> Result<bool, Fault> {
    let slice = Duration::from_millis(50);
    let mut waited = Duration::ZERO;
    loop {
        match ends.recv_timeout(slice) {
            Ok(ended) => return ended.map_err(Fault::Panic),
            Err(RecvTimeoutError::Disconnected) => return Err(Fault::Panic("the thread is gone".to_owned())),
            Err(RecvTimeoutError::Timeout) if EXCEEDED.swap(false, Ordering::Relaxed) => {
                return Err(Fault::Memory);
            }
            Err(RecvTimeoutError::Timeout) => waited += slice,
        }
        if waited > TIME {
            return Err(Fault::Time);
        }
    }
}
