//! Reads files of a model folder that may be absent.

use std::path::Path;
use std::{fs, io};

use serde_json::{Map, Value};

use super::EncoderError;

/// The file's bytes; `None` if it does not exist.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, EncoderError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(EncoderError::Read { path: path.to_owned(), source }),
    }
}

/// The file's JSON object; empty if the file does not exist.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, EncoderError> {
    let Some(bytes) = read(path)? else { return Ok(Map::new()) };
    read_object_of(path, &bytes)
}

/// The JSON object of a file with this content.
pub(super) fn read_object_of(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, EncoderError> {
    serde_json::from_slice(bytes)
        .map_err(|error| EncoderError::Json { path: path.to_owned(), message: error.to_string() })
}
