//! Offloaded optimizer steps: a step whose states, gradients and weights are all in host memory runs on the CPU, in stream order.
//!
//! The host arena belongs to a [`CpuDevice`]. A stream that reaches such a launch calls it on a thread of the driver, and continues
//! when it returns; other streams do not wait. The control struct is on the GPU, and is copied to the host before each call. The
//! CPU and CUDA optimizers are bitwise equal, so results do not depend on where a step runs.
#![allow(unsafe_code, reason = "pins arenas, and passes launches to the driver's thread")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::arenas::Arenas;
use super::driver::{Address, Driver, Handle};
use zeroth_cpu::CpuDevice;
use zeroth_kernel::{ByTier, Control, Device, DeviceError, Kernel, Launch, Queue, Span, Tier};

/// The CPU that owns the host arena.
pub(super) struct CpuOptimizer {
    shared: Arc<Shared>,
    /// Addresses of the pinned arenas: control and host.
    pinned: Vec<usize>,
    control: Address,
}

struct Shared {
    cpu: Mutex<CpuDevice>,
    /// The first error that was not reported yet.
    error: Mutex<Option<DeviceError>>,
}

/// A launch passed to the driver's thread.
struct Work {
    shared: Arc<Shared>,
    launch: Launch,
}

const CONTROL: Span = Span::device(0, size_of::<Control>() as u64);

impl CpuOptimizer {
    /// Allocates, prefaults and pins the host arena; returns its address.
    pub(super) fn open(driver: &Driver, host_bytes: u64) -> Result<(Self, Address), DeviceError> {
        // Threads are not pinned to cores, which they share with the enqueuing thread and with other ranks.
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let arenas = ByTier::on_device(CONTROL.bytes).with(Tier::Host, host_bytes);
        let mut cpu = CpuDevice::new(threads, arenas)?;
        // Prefaulted in parallel: the driver would fault pages in one by one, which takes minutes.
        cpu.pin_and_prefault(None);
        let [(control, control_bytes), (host, length)] =
            [Tier::Device, Tier::Host].map(|tier| cpu.mapping(tier));
        let shared = Arc::new(Shared { cpu: Mutex::new(cpu), error: Mutex::new(None) });
        let mut opened = Self { shared, pinned: Vec::new(), control: control as Address };
        for (address, bytes) in [(control, control_bytes), (host, length)] {
            // SAFETY: the arenas live as long as `self`, which unpins them in `close`.
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

    /// Unpins the arenas. The GPU must be idle.
    pub(super) fn close(&self, driver: &Driver) {
        self.pinned.iter().for_each(|address| driver.unregister_host(*address));
    }

    /// Whether a launch runs on the CPU.
    pub(super) fn handles(launch: &Launch) -> bool {
        let Kernel::Optimize { grads, master, moments: [first, second, third], weights, .. } = launch.kernel
        else {
            return false;
        };
        let operands = [Some(grads), Some(master), first, second, third, weights];
        operands.into_iter().flatten().all(|span| span.tier == Tier::Host)
    }

    /// Enqueues a launch for which [`Self::handles`] is true.
    pub(super) fn enqueue(
        &self,
        driver: &Driver,
        arenas: &Arenas,
        stream: Handle,
        launch: &Launch,
    ) -> Result<(), DeviceError> {
        let mut launch = Launch { scratch: Span::device(0, 0), ..launch.clone() };
        let Kernel::Optimize { control, .. } = &mut launch.kernel else {
            unreachable!("`handles` accepts optimizer steps only")
        };
        let from = arenas.find("optimize", Span { bytes: CONTROL.bytes, ..*control })?;
        // SAFETY: both ranges have the size of the struct, and the control arena is pinned. The previous call has returned when the
        // stream reaches the copy.
        unsafe { driver.copy(self.control, from, CONTROL.bytes, stream)? };
        *control = CONTROL;
        let work = Box::into_raw(Box::new(Work { shared: Arc::clone(&self.shared), launch }));
        // SAFETY: `run_launch` takes ownership of the box, and the driver calls it once.
        let called = unsafe { driver.launch_host_function(stream, run_launch, work.cast()) };
        if called.is_err() {
            // SAFETY: the driver rejected the call, so the box is still owned here.
            drop(unsafe { Box::from_raw(work) });
        }
        called
    }

    /// Returns and clears the first error since the last call.
    pub(super) fn take_error(&self) -> Result<(), DeviceError> {
        lock(&self.shared.error).take().map_or(Ok(()), Err)
    }
}

/// Ignores poisoning: a panic on the driver's thread is reported as an error.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn run_launch(work: *mut c_void) {
    // SAFETY: the box created by `enqueue` for this call.
    let Work { shared, launch } = *unsafe { Box::from_raw(work.cast::<Work>()) };
    let run = || lock(&shared.cpu).enqueue(Queue::Compute, &launch);
    // A panic must not unwind into the driver.
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        let (device, call) = ("host".to_owned(), launch.kernel.name().to_owned());
        Err(DeviceError::Call { device, call, reason: "it panicked".to_owned() })
    });
    if let Err(error) = outcome {
        lock(&shared.error).get_or_insert(error);
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
            control: CONTROL,
            grads: span,
            grad_type: DType::Bf16,
            master: Span { tier: Tier::Host, ..span },
            master_form: MasterForm::F32,
            moments: [Some(span), Some(span), None],
            moment_type: DType::F32,
            rounding: None,
            weights: None,
        };
        Launch { kernel, dtype: DType::Bf16, scratch: Span::device(0, 0) }
    }

    #[test]
    fn only_steps_entirely_in_host_memory_run_on_the_cpu() {
        assert!(CpuOptimizer::handles(&launch(Tier::Host)));
        assert!(!CpuOptimizer::handles(&launch(Tier::Device)), "master weights alone are not enough");
        let other = Launch {
            kernel: Kernel::Zero { to: Span { tier: Tier::Host, at: 0, bytes: 8 } },
            ..launch(Tier::Host)
        };
        assert!(!CpuOptimizer::handles(&other));
    }
}
