//! A kernel allocates nothing: an allocator that counts says so.
#![allow(unsafe_code, reason = "an allocator is unsafe to write")]
#![allow(
    clippy::many_single_char_names,
    clippy::similar_names,
    reason = "names of the formulas: q, k and v; dx and dw"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use zeroth_device::cpu::Pool;

#[path = "cpu/everything.rs"]
mod everything;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

// One test in this binary: another one beside it would be counted.
#[test]
fn no_kernel_allocates_once_the_pool_runs() {
    let mut all = everything::AllTypes::new();
    for threads in [1, 2, everything::MOST_THREADS] {
        let pool = Pool::new(threads);
        all.run(&pool);
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        all.run(&pool);
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{threads} threads");
    }
    let [full, half, other_half] = all.bits().map(|bits| bits.len());
    assert!(full == half && half == other_half);
}
