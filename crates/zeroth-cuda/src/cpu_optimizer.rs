//! The host's processors beside a card: an optimizer's step whose states, gradients and weights all lie in host memory is
//! theirs, in its queue's order.
//!
//! The host's arena belongs to a [`CpuDevice`]. A queue that comes to such a launch calls it back on a thread of the driver's,
//! and goes on when it is done; the card's other queues do not wait. What decides the step is on the card, and is copied beside
//! the host's arena before each call. The kernel is the processor's own, so the bits are those of a run without a card, which
//! are the card's bits, too.
#![allow(unsafe_code, reason = "pins arenas, and hands launches to the driver's thread")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Address, Driver, Handle};
use super::line::Arenas;
use zeroth_cpu::CpuDevice;
use zeroth_kernel::{Control, Device, DeviceError, Kernel, Launch, Queue, Span, Tier};

/// The processors with the host's arena.
pub(super) struct Processors {
    shared: Arc<Shared>,
    /// Where the arenas are pinned: what decides a step, and the host's.
    pinned: Vec<usize>,
    control: Address,
}

struct Shared {
    cpu: Mutex<CpuDevice>,
    /// What went wrong first, until somebody asks.
    failed: Mutex<Option<DeviceError>>,
}

/// A launch on its way.
struct Work {
    shared: Arc<Shared>,
    launch: Launch,
}

const CONTROL: Span = Span::device(0, size_of::<Control>() as u64);

impl Processors {
    /// Takes the host's arena, all its pages at once, and pins it; gives its first address.
    pub(super) fn open(driver: &Driver, host_bytes: u64) -> Result<(Self, Address), DeviceError> {
        // Not pinned to processors: the thread that enqueues, and those of other ranks, are on them, too.
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut cpu = CpuDevice::new(threads, CONTROL.bytes, host_bytes)?;
        // Pages that all processors take at once: the driver takes them one after the other, for minutes.
        cpu.pin_and_prefault(None);
        let [(control, control_bytes), (host, length)] =
            [Tier::Device, Tier::Host].map(|tier| cpu.mapping(tier));
        let shared = Arc::new(Shared { cpu: Mutex::new(cpu), failed: Mutex::new(None) });
        let mut opened = Self { shared, pinned: Vec::new(), control: control as Address };
        for (address, bytes) in [(control, control_bytes), (host, length)] {
            // SAFETY: the arenas live as long as this, which lets go of them in `close`.
            match unsafe { driver.register_host(address, bytes) } {
                Ok(()) => opened.pinned.push(address),
                Err(error) => {
                    opened.close(driver);
                    return Err(error);
                }
            }
        }
        Ok((opened, host as Address))
    }

    /// Lets go of the pinned arenas. The card has nothing to do any more.
    pub(super) fn close(&self, driver: &Driver) {
        self.pinned.iter().for_each(|address| driver.unregister_host(*address));
    }

    /// Whether a launch is theirs.
    pub(super) fn take(launch: &Launch) -> bool {
        let Kernel::Optimize { grads, master, first, second, weights, .. } = launch.kernel else {
            return false;
        };
        let operands = [Some(grads), Some(master), first, second, weights];
        operands.into_iter().flatten().all(|span| span.tier == Tier::Host)
    }

    /// Enqueues such a launch.
    pub(super) fn enqueue(
        &self,
        driver: &Driver,
        arenas: &Arenas,
        stream: Handle,
        launch: &Launch,
    ) -> Result<(), DeviceError> {
        let mut launch = Launch { scratch: Span::device(0, 0), ..launch.clone() };
        let Kernel::Optimize { control, .. } = &mut launch.kernel else {
            unreachable!("`take` has looked at the kernel")
        };
        let from = arenas.find("optimize", Span { bytes: CONTROL.bytes, ..*control })?;
        // SAFETY: both places are as long as the struct, and the arena beside the host's is pinned. The call before this one
        // has ended when the queue comes to the copy.
        unsafe { driver.copy(self.control, from, CONTROL.bytes, stream)? };
        *control = CONTROL;
        let work = Box::into_raw(Box::new(Work { shared: Arc::clone(&self.shared), launch }));
        // SAFETY: `carry_out` takes the box back, and the driver calls it once.
        let called = unsafe { driver.call(stream, carry_out, work.cast()) };
        if called.is_err() {
            // SAFETY: the driver refused it and will not call.
            drop(unsafe { Box::from_raw(work) });
        }
        called
    }

    /// What went wrong since the last call.
    pub(super) fn outcome(&self) -> Result<(), DeviceError> {
        lock(&self.shared.failed).take().map_or(Ok(()), Err)
    }
}

/// A panic on the driver's thread is reported like any other failure.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn carry_out(work: *mut c_void) {
    // SAFETY: the box that `enqueue` made for this call.
    let Work { shared, launch } = *unsafe { Box::from_raw(work.cast::<Work>()) };
    let run = || lock(&shared.cpu).enqueue(Queue::Compute, &launch);
    // A panic may not pass through the driver.
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let (device, call) = ("host".to_owned(), launch.kernel.name().to_owned());
        Err(DeviceError::Call { device, call, reason: "it panicked".to_owned() })
    });
    if let Err(error) = outcome {
        lock(&shared.failed).get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use zeroth_base::DType;

    use super::*;
    use zeroth_kernel::{MasterForm, Optimizer};

    fn launch(tier: Tier) -> Launch {
        let span = Span { tier, at: 0, bytes: 64 };
        let kernel = Kernel::Optimize {
            optimizer: Optimizer::AdamW,
            group: 0,
            control: Span::device(0, 192),
            grads: span,
            grad_type: DType::Bf16,
            master: Span { tier: Tier::Host, ..span },
            master_form: MasterForm::Whole,
            first: Some(span),
            second: Some(span),
            moment_type: DType::F32,
            rounding: None,
            weights: None,
        };
        Launch { kernel, dtype: DType::Bf16, scratch: Span::device(0, 0) }
    }

    #[test]
    fn only_what_lies_in_host_memory_is_the_processors() {
        assert!(Processors::take(&launch(Tier::Host)));
        assert!(!Processors::take(&launch(Tier::Device)), "master weights alone are not enough");
        let other = Launch {
            kernel: Kernel::Zero { to: Span { tier: Tier::Host, at: 0, bytes: 8 } },
            ..launch(Tier::Host)
        };
        assert!(!Processors::take(&other));
    }
}
