//! The CPU as a [`Target`].

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use zeroth_base::DType;
use zeroth_kernel::{ByTier, Device, DeviceError, Kernel, Target};

use super::device::{CpuDevice, scratch_bytes};
use super::rows::row_stride;

/// Ranks with a number of threads each.
#[derive(Debug)]
pub struct CpuTarget {
    /// Threads of a rank.
    pub threads: usize,
}

impl CpuTarget {
    /// The target with this number of threads. It is made once, because programs keep a reference to it.
    pub fn of(threads: usize) -> &'static Self {
        static MADE: Mutex<BTreeMap<usize, &'static CpuTarget>> = Mutex::new(BTreeMap::new());
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        made.entry(threads).or_insert_with(|| Box::leak(Box::new(Self { threads })))
    }
}

impl Target for CpuTarget {
    fn threads(&self) -> usize {
        self.threads
    }

    fn scratch_bytes(&self, kernel: &Kernel, _: DType) -> u64 {
        scratch_bytes(kernel, self.threads)
    }

    fn row_stride(&self, width: u64, dtype: DType) -> u64 {
        row_stride(width as usize, dtype) as u64
    }

    fn tile_rows(&self) -> u64 {
        1
    }

    fn is_host(&self) -> bool {
        true
    }

    fn maps_peers(&self) -> bool {
        true
    }

    fn rounds_head_gradient(&self) -> bool {
        true
    }

    fn process_bytes(&self) -> u64 {
        // Fixed allocations, and memory of the operating system for each process.
        7_000_000
    }

    fn open(&self, _ordinal: usize, arenas: ByTier<u64>) -> Result<Box<dyn Device>, DeviceError> {
        Ok(Box::new(CpuDevice::new(self.threads, arenas)?))
    }
}
