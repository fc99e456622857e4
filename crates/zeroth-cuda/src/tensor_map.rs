//! Tensor maps: how Hopper's bulk copies find a box of a tensor in memory. They are kernel parameters, made on the host.
#![allow(unsafe_code, reason = "calls into the driver; signatures are those of cuda.h")]

use std::ffi::{c_int, c_uint, c_void};

use zeroth_base::DType;

use super::bindings::bindings;
use super::driver::{Address, Driver};
use zeroth_kernel::DeviceError;

/// Data types of elements, numbered as in cuda.h.
pub(super) const FLOAT16: c_int = 6;
pub(super) const BFLOAT16: c_int = 9;
/// 16-byte chunks of 128-byte rows are permuted, as wgmma expects.
pub(super) const SWIZZLE_128B: c_int = 3;
pub(super) const L2_PROMOTION_128B: c_int = 2;

bindings! {
    Functions: driver {
        cuTensorMapEncodeTiled(
            *mut c_void,
            c_int,
            c_uint,
            *mut c_void,
            *const u64,
            *const u64,
            *const c_uint,
            *const c_uint,
            c_int,
            c_int,
            c_int,
            c_int,
        );
    }
}

/// A `CUtensorMap`, opaque.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct TensorMap([u64; 16]);

/// A tensor of 16-bit elements whose last dimension is contiguous. Sizes start with the last dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor<const RANK: usize> {
    pub(super) at: Address,
    pub(super) size: [usize; RANK],
    /// Elements from one index to the next, of all dimensions but the last.
    pub(super) stride: [usize; RANK],
    /// Elements that one copy moves.
    pub(super) copied: [u32; RANK],
}

/// The function that makes tensor maps.
pub(super) struct TensorMaps {
    functions: Functions,
}

impl TensorMaps {
    /// `None` if the driver is older than CUDA 12.
    pub(super) fn open() -> Option<Self> {
        let functions = Driver::library().and_then(|library| Functions::load(&library)).ok()?;
        Some(Self { functions })
    }

    pub(super) fn encode<const RANK: usize>(
        &self,
        driver: &Driver,
        dtype: DType,
        tensor: &Tensor<RANK>,
    ) -> Result<TensorMap, DeviceError> {
        let mut map = TensorMap([0; 16]);
        let size = tensor.size.map(|size| size as u64);
        // The first is that of the contiguous dimension, which the driver does not read.
        let strides = tensor.stride.map(|stride| stride as u64 * dtype.bytes());
        let steps = [1; RANK];
        // SAFETY: writes a map of 128 bytes, aligned to 64; arrays have as many elements as the rank, strides one less.
        let code = unsafe {
            (self.functions.cuTensorMapEncodeTiled)(
                (&raw mut map).cast(),
                if dtype == DType::F16 { FLOAT16 } else { BFLOAT16 },
                RANK as c_uint,
                std::ptr::with_exposed_provenance_mut(tensor.at as usize),
                size.as_ptr(),
                strides[1..].as_ptr(),
                tensor.copied.as_ptr(),
                steps.as_ptr(),
                0,
                SWIZZLE_128B,
                L2_PROMOTION_128B,
                0,
            )
        };
        driver.check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }
}
