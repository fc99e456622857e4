//! Converts between dtypes: exactly if the target is wider, rounded to nearest (ties to even) if it is narrower, as in
//! PyTorch. Files are little-endian.

use half::{bf16, f16};
use zeroth_base::DType;

/// Converts stored bytes to f32. `bytes` must hold exactly the elements of `out`.
pub(super) fn to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => each(bytes, out, f32::from_le_bytes),
        DType::Bf16 => each(bytes, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        DType::F16 => each(bytes, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
    }
}

fn each<const N: usize, T>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T) {
    for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *value = convert(*bytes);
    }
}

/// Appends f32 values in the stored dtype.
pub(super) fn from_f32(dtype: DType, values: &[f32], bytes: &mut Vec<u8>) {
    match dtype {
        DType::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        DType::Bf16 => bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes())),
        DType::F16 => bytes.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes())),
    }
}
