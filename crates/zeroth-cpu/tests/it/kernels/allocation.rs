//! A kernel allocates nothing: an allocator that counts says so.
#![allow(unsafe_code, reason = "an allocator is unsafe to write")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use zeroth_cpu::Pool;

use super::everything::{AllTypes, MOST_THREADS};

/// Tells the process that counts from the one that runs all tests.
const ALONE: &str = "ZEROTH_TEST_ALONE";

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

/// Needs a process of its own, because allocations of concurrent tests would be counted. It shares the binary of the other
/// tests, because another one would compile every kernel again.
#[test]
fn no_kernel_allocates_once_the_pool_runs() {
    const NAME: &str = "kernels::allocation::no_kernel_allocates_once_the_pool_runs";
    if std::env::var_os(ALONE).is_some() {
        return count();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    assert!(said.contains("1 passed"), "{said}");
}

fn count() {
    let mut all = AllTypes::new();
    for threads in [1, 2, MOST_THREADS] {
        let pool = Pool::new(threads);
        all.run(&pool);
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        all.run(&pool);
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{threads} threads");
    }
    let [full, half, other_half] = all.bits().map(|bits| bits.len());
    assert!(full == half && half == other_half);
}
