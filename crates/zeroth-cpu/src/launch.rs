//! What a kernel of the CPU is to the device: its scratch, and how a checked launch runs.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

#[cfg(test)]
mod tests;

use bytemuck::Pod;
use zeroth_kernel::{ByTier, DeviceError, Element, Span};

use super::Arena;
use super::pool::Pool;

/// Evaluates an expression with the Rust type of a dtype.
macro_rules! typed {
    ($dtype:expr, $name:ident => $body:expr) => {
        match $dtype {
            zeroth_base::DType::F32 => {
                type $name = f32;
                $body
            }
            zeroth_base::DType::Bf16 => {
                type $name = half::bf16;
                $body
            }
            zeroth_base::DType::F16 => {
                type $name = half::f16;
                $body
            }
        }
    };
}
pub(crate) use typed;

/// A kernel of the CPU, implemented by the struct of its operands.
pub(crate) trait CpuKernel {
    /// Bytes of scratch on a pool of `threads`.
    fn scratch_bytes(&self, threads: usize) -> u64;

    /// Runs it with activations of type `T`.
    ///
    /// # Safety
    /// The launch has been checked.
    unsafe fn run<T: Element>(self, cx: &CpuLaunch<'_>) -> Result<(), DeviceError>;
}

/// A kernel of the CPU: `Kernel { operands }`, bytes of scratch on a pool of some threads, and what runs, with activations of
/// type `T`.
macro_rules! cpu_kernel {
    ($Kernel:ident { $($field:ident),* }, |$threads:pat_param| $scratch:expr, |$cx:ident| $run:expr) => {
        impl $crate::launch::CpuKernel for zeroth_kernel::operands::$Kernel {
            #[allow(unused_variables, reason = "scratch depends on a few")]
            fn scratch_bytes(&self, $threads: usize) -> u64 {
                let Self { $($field,)* .. } = *self;
                $scratch
            }

            #[allow(unsafe_code, reason = "operands become slices after they are checked")]
            unsafe fn run<T: zeroth_kernel::Element>(
                self,
                $cx: &$crate::launch::CpuLaunch<'_>,
            ) -> Result<(), zeroth_kernel::DeviceError> {
                let Self { $($field,)* .. } = self;
                // SAFETY: the launch has been checked, and each operand is taken once, with the access that its row says.
                unsafe { $run };
                Ok(())
            }
        }
    };
}
pub(crate) use cpu_kernel;

/// Bytes of scratch in f32.
pub(crate) const fn floats(elements: usize) -> u64 {
    4 * elements as u64
}

/// A checked launch, whose operands become slices.
pub(crate) struct CpuLaunch<'a> {
    pub(crate) arenas: &'a ByTier<Arena>,
    /// The threads.
    pub(crate) pool: &'a Pool,
    /// The name of the kernel.
    pub(crate) what: &'static str,
    /// Scratch of at least [`CpuKernel::scratch_bytes`].
    pub(crate) scratch: Span,
}

impl<'a> CpuLaunch<'a> {
    /// # Safety
    /// The launch has been checked, and `span` is one of its operands that it reads.
    pub(crate) unsafe fn read<T: Pod>(&self, span: Span) -> Result<&'a [T], DeviceError> {
        // SAFETY: no written operand of the launch overlaps it, and `enqueue` borrows the arena exclusively.
        unsafe { self.arenas[span.tier].slice(span) }
    }

    /// # Safety
    /// The launch has been checked, and `span` is one of its operands that it writes, taken once.
    pub(crate) unsafe fn write<T: Pod>(&self, span: Span) -> Result<&'a mut [T], DeviceError> {
        // SAFETY: no other operand of the launch overlaps it, and `enqueue` borrows the arena exclusively.
        unsafe { self.arenas[span.tier].slice_mut(span) }
    }

    /// # Safety
    /// As [`Self::read`], for one struct.
    pub(crate) unsafe fn read_one<T: Pod>(&self, span: Span) -> Result<&'a T, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.read::<T>(span) }?.first().ok_or_else(|| empty_span(span))
    }

    /// # Safety
    /// As [`Self::write`], for one struct.
    pub(crate) unsafe fn write_one<T: Pod>(&self, span: Span) -> Result<&'a mut T, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.write::<T>(span) }?.first_mut().ok_or_else(|| empty_span(span))
    }

    /// # Safety
    /// As [`Self::write`], for the scratch.
    pub(crate) unsafe fn scratch(&self) -> Result<&'a mut [f32], DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.write(self.scratch) }
    }

    /// # Safety
    /// As [`Self::read`], for a table of sequence starts with its number of entries first.
    pub(crate) unsafe fn starts(&self, span: Span) -> Result<&'a [u32], DeviceError> {
        // SAFETY: the caller's promise.
        let table: &[u32] = unsafe { self.read(span) }?;
        let entries = table.split_first().and_then(|(count, starts)| starts.get(..*count as usize));
        entries.ok_or_else(|| DeviceError::Operands {
            what: "starts",
            problem: format!("the table of sequence starts at {span:?} declares more entries than it holds"),
        })
    }
}

fn empty_span(span: Span) -> DeviceError {
    DeviceError::Operands { what: "arena", problem: format!("{span:?} is empty") }
}
