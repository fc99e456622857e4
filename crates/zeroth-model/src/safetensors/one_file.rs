//! One safetensors file by itself, for those who keep other things than a model's weights in it: which tensors it
//! holds and where, the bytes it begins with, and its numbers as f32.

use std::fs::File;
use std::io;
use std::ops::Range;

use zeroth_base::DType;

use super::error::HeaderError;
use super::{convert, header};

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its type; `None` for one of the format's types that we do not compute with.
    pub dtype: Option<DType>,
    /// Its bytes, counted from the beginning of the file.
    pub bytes: Range<u64>,
}

/// The tensors of a file in the order they lie in it, checked: they fill it without gap or overlap. The outer error is
/// the system's.
pub fn read_header(file: &File) -> io::Result<Result<Vec<TensorEntry>, HeaderError>> {
    let place = |tensor: header::StoredTensor| TensorEntry {
        name: tensor.name,
        shape: tensor.shape,
        dtype: tensor.kind.as_dtype(),
        bytes: tensor.bytes,
    };
    Ok(header::read(file)?.map(|tensors| tensors.into_iter().map(place).collect()))
}

/// The first bytes of a file that will hold these tensors (name, shape, type) one after the other; `metadata` are names
/// and texts that its header carries.
pub fn write_header<'a>(
    metadata: &[(&str, &str)],
    tensors: impl Iterator<Item = (&'a str, &'a [u64], DType)>,
) -> Vec<u8> {
    header::encode(metadata, tensors)
}

/// Reads stored bytes as f32; `bytes` holds exactly the elements of `out`.
pub fn stored_to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    convert::to_f32(dtype, bytes, out);
}

/// Appends numbers as they are stored in a type, rounded to the nearest.
pub fn f32_to_stored(dtype: DType, values: &[f32], bytes: &mut Vec<u8>) {
    convert::from_f32(dtype, values, bytes);
}
