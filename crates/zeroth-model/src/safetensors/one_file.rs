//! Single safetensors files, for contents other than a model's weights: reading and writing the header, and converting
//! stored values from and to f32.

use std::fs::File;
use std::io;
use std::ops::Range;

use zeroth_base::DType;

use super::error::HeaderError;
use super::{convert, header};

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct TensorEntry {
    pub name: String,
    pub shape: Vec<u64>,
    /// Its dtype; `None` for a dtype of the format that we do not compute with.
    pub dtype: Option<DType>,
    /// Its byte range, from the beginning of the file.
    pub bytes: Range<u64>,
}

/// Reads the header of a file and returns its tensors in file order.
///
/// The header is validated: tensors fill the file without gaps or overlaps. The outer error is an I/O error.
pub fn read_header(file: &File) -> io::Result<Result<Vec<TensorEntry>, HeaderError>> {
    let place = |tensor: header::StoredTensor| TensorEntry {
        name: tensor.name,
        shape: tensor.shape,
        dtype: tensor.kind.as_dtype(),
        bytes: tensor.bytes,
    };
    Ok(header::read(file)?.map(|tensors| tensors.into_iter().map(place).collect()))
}

/// Encodes the length and header of a file with these tensors (name, shape, dtype) in this order.
///
/// `metadata` are the names and values of the header's `__metadata__`.
pub fn write_header<'a>(
    metadata: &[(&str, &str)],
    tensors: impl Iterator<Item = (&'a str, &'a [u64], DType)>,
) -> Vec<u8> {
    header::encode(metadata, tensors)
}

/// Converts stored bytes to f32. `bytes` must hold exactly the elements of `out`.
pub fn stored_to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    convert::to_f32(dtype, bytes, out);
}

/// Appends f32 values in the stored dtype, rounded to nearest.
pub fn f32_to_stored(dtype: DType, values: &[f32], bytes: &mut Vec<u8>) {
    convert::from_f32(dtype, values, bytes);
}
