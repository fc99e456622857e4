//! Reads and writes the header of a safetensors file, the byte range of each tensor. It is validated completely.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use zeroth_base::DType;

use super::error::HeaderError;

/// The format's limit on the length of a header, in bytes.
const LARGEST_HEADER: u64 = 100_000_000;
/// The reserved name that is not a tensor.
pub(super) const METADATA: &str = "__metadata__";

/// A dtype of the format: its name and the bits per element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredType {
    pub(super) name: &'static str,
    bits: u64,
}

/// All dtypes of safetensors 0.8.
const TYPES: [StoredType; 22] = {
    const fn of(name: &'static str, bits: u64) -> StoredType {
        StoredType { name, bits }
    }
    [
        of("F32", 32),
        of("BF16", 16),
        of("F16", 16),
        of("F64", 64),
        of("BOOL", 8),
        of("U8", 8),
        of("I8", 8),
        of("U16", 16),
        of("I16", 16),
        of("U32", 32),
        of("I32", 32),
        of("U64", 64),
        of("I64", 64),
        of("C64", 64),
        of("F4", 4),
        of("F6_E2M3", 6),
        of("F6_E3M2", 6),
        of("F8_E5M2", 8),
        of("F8_E4M3", 8),
        of("F8_E8M0", 8),
        of("F8_E4M3FNUZ", 8),
        of("F8_E5M2FNUZ", 8),
    ]
};

impl StoredType {
    fn named(name: &str) -> Option<Self> {
        TYPES.into_iter().find(|known| known.name == name)
    }

    /// The corresponding dtype, if weights can be read from it.
    pub(super) fn as_dtype(self) -> Option<DType> {
        match self.name {
            "F32" => Some(DType::F32),
            "BF16" => Some(DType::Bf16),
            "F16" => Some(DType::F16),
            _ => None,
        }
    }
}

/// The format's name of a dtype that we write.
pub(super) const fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
    }
}

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) kind: StoredType,
    pub(super) shape: Vec<u64>,
    /// The byte range, from the beginning of the file.
    pub(super) bytes: Range<u64>,
}

/// Reads and validates the header of a file. The outer error is an I/O error.
pub(super) fn read(file: &File) -> std::io::Result<Result<Vec<StoredTensor>, HeaderError>> {
    let file_length = file.metadata()?.len();
    if file_length < 8 {
        return Ok(Err(HeaderError::NoLength { length: file_length }));
    }
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > LARGEST_HEADER {
        return Ok(Err(HeaderError::TooLong { length, limit: LARGEST_HEADER }));
    }
    // Checked before memory is allocated for the header.
    let found = file_length - 8;
    if length > found {
        return Ok(Err(HeaderError::CutHeader { length, found }));
    }
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, 8)?;
    Ok(parse(&json, file_length))
}

/// Parses and validates a header's JSON; `file_length` is the length of the whole file.
fn parse(json: &[u8], file_length: u64) -> Result<Vec<StoredTensor>, HeaderError> {
    let RawHeader(raw) =
        serde_json::from_slice(json).map_err(|error| HeaderError::Json { problem: error.to_string() })?;
    let data_begins = 8 + json.len() as u64;
    let data_length = file_length - data_begins;

    let mut tensors = Vec::with_capacity(raw.len());
    for (name, tensor) in raw {
        let Some(kind) = StoredType::named(&tensor.dtype) else {
            return Err(HeaderError::UnknownType { name, found: tensor.dtype });
        };
        let Some(needed) = byte_length(&tensor.shape, kind.bits) else {
            let shape = format!("{:?}", &tensor.shape[..tensor.shape.len().min(8)]);
            return Err(HeaderError::Shape { name, shape });
        };
        let (begin, end) = tensor.data_offsets;
        if end.checked_sub(begin) != Some(needed) {
            return Err(HeaderError::Length { name, begin, end, needed });
        }
        // An end beyond the file is refused below, before the range is used for reading.
        tensors.push(StoredTensor { name, kind, shape: tensor.shape, bytes: begin..end });
    }
    refuse_double_names(&tensors)?;

    tensors.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
    let mut expected = 0;
    let mut last: Option<&StoredTensor> = None;
    for tensor in &tensors {
        let Range { start, end } = tensor.bytes;
        if let Some(other) = last.filter(|other| start < other.bytes.end) {
            let (name, other_name) = (tensor.name.clone(), other.name.clone());
            return Err(HeaderError::Overlap { name, begin: start, other: other_name, end: other.bytes.end });
        }
        if start > expected {
            return Err(HeaderError::Gap { begin: expected, length: start - expected });
        }
        if end > data_length {
            return Err(HeaderError::CutData { name: tensor.name.clone(), end, found: data_length });
        }
        expected = end;
        last = Some(tensor);
    }
    if expected < data_length {
        return Err(HeaderError::Gap { begin: expected, length: data_length - expected });
    }
    for tensor in &mut tensors {
        tensor.bytes = tensor.bytes.start + data_begins..tensor.bytes.end + data_begins;
    }
    Ok(tensors)
}

/// The size of a tensor in bytes; `None` if it overflows or is not a whole number.
fn byte_length(shape: &[u64], bits: u64) -> Option<u64> {
    let bits = shape.iter().try_fold(bits, |bits, side| bits.checked_mul(*side))?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

fn refuse_double_names(tensors: &[StoredTensor]) -> Result<(), HeaderError> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(HeaderError::Twice { name: pair[0].to_owned() }),
        None => Ok(()),
    }
}

/// An entry of the header's JSON.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's JSON as a list, because a map would hide duplicate names.
struct RawHeader(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<std::collections::HashMap<String, String>>()?;
                        continue;
                    }
                    let tensor =
                        map.next_value().map_err(|error| A::Error::custom(format!("`{name}`: {error}")))?;
                    tensors.push((name, tensor));
                }
                Ok(RawHeader(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Encodes the length and header of a file with these tensors in this order.
///
/// The header is padded with spaces so that the data begins at a multiple of 8.
pub(super) fn encode<'a>(
    metadata: &[(&str, &str)],
    tensors: impl Iterator<Item = (&'a str, &'a [u64], DType)>,
) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let metadata = metadata.iter().map(|(name, text)| ((*name).to_owned(), (*text).into()));
    header.insert(METADATA.to_owned(), serde_json::Value::Object(metadata.collect()));
    let mut begin = 0;
    for (name, shape, dtype) in tensors {
        let end = begin + shape.iter().product::<u64>() * dtype.bytes();
        let tensor =
            serde_json::json!({"dtype": type_name(dtype), "shape": shape, "data_offsets": [begin, end]});
        header.insert(name.to_owned(), tensor);
        begin = end;
    }
    let mut json = serde_json::Value::Object(header).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes
}
