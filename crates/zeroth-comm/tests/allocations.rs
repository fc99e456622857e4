//! A collective allocates nothing, so that a step does not.
#![allow(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use zeroth_comm::local::LocalJob;
use zeroth_comm::{JoinOptions, OpName, Transfer};

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: hands everything on to the system's allocator; the count is a plain cell of the thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn collectives_allocate_nothing() {
    let job = LocalJob::create(3, 1000).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let comm = job.join(rank, &JoinOptions::default()).unwrap();
            scope.spawn(move || {
                let counts = [1500, 0, 77];
                let (send, mut all, mut mine) = (vec![1; 1577], vec![0; 1577], vec![0; 3 * counts[rank]]);
                let mut root = if rank == 1 { vec![0; 1577] } else { Vec::new() };
                let before = COUNT.get();
                for step in 0..20 {
                    let op = |index| OpName::new(step, "op", index);
                    let own = &send[..counts[rank]];
                    comm.all_gather(op(0), own, &mut all, &counts).unwrap().wait().unwrap();
                    let transfer = Transfer::AllToAll { send: &send, recv: &mut mine, counts: &counts };
                    comm.start(op(1), transfer).unwrap().wait().unwrap();
                    comm.gather(op(2), 1, own, &mut root, &counts).unwrap().wait().unwrap();
                    let transfer = Transfer::Broadcast { root: 2, buffer: &mut all };
                    comm.start(op(3), transfer).unwrap().wait().unwrap();
                    if rank == 0 && step == 10 {
                        // Long enough for the others to sleep, wake and look around.
                        std::thread::sleep(std::time::Duration::from_millis(120));
                    }
                    comm.barrier(op(4)).unwrap().wait().unwrap();
                }
                assert_eq!(COUNT.get() - before, 0);
            });
        }
    });
}
