//! The kinds of device a program is compiled for.

use std::fmt::Debug;

use zeroth_base::DType;

use crate::{ByTier, Device, DeviceError, Kernel};

/// What a program asks of a kind of device when it is compiled, without one. A device crate implements it.
pub trait Target: Debug + Send + Sync {
    /// CPU threads that run kernels of a rank.
    fn threads(&self) -> usize;

    /// Bytes of scratch of a kernel.
    fn scratch_bytes(&self, kernel: &Kernel, dtype: DType) -> u64;

    /// The row stride of activations, in elements.
    fn row_stride(&self, width: u64, dtype: DType) -> u64;

    /// Rows of a tile of a matmul: fewer are not faster.
    fn tile_rows(&self) -> u64;

    /// Whether kernels run on the host as they are enqueued, with arenas in its memory.
    fn is_host(&self) -> bool;

    /// Whether ranks of a host read each other's device arenas in place.
    fn maps_peers(&self) -> bool;

    /// Whether the kernel of the LM head can round its weights' gradient to the communication dtype.
    fn rounds_head_gradient(&self) -> bool;

    /// Host memory that a process takes for the device, without threads and arenas.
    fn process_bytes(&self) -> u64;

    /// Opens device number `ordinal` of this kind, with arenas of these sizes.
    fn open(&self, ordinal: usize, arenas: ByTier<u64>) -> Result<Box<dyn Device>, DeviceError>;
}
