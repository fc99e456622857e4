//! Loads a config from a file, an argument, or base64 in an argument.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use base64::Engine;
use base64::alphabet::{self, Alphabet};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::error::{ReadError, ReadErrorKind, shown};
use super::parse;
use super::source::ConfigSource;

/// The largest file that is read as a config: 16 MiB. Real ones have some kilobytes.
pub const MAX_BYTES: u64 = 16 << 20;

impl ConfigSource {
    /// The text of a file, at most [`MAX_BYTES`].
    pub fn from_path(path: &Path) -> Result<ConfigSource, ReadError> {
        let name = path.display().to_string();
        let bytes = read_file(path).map_err(|error| cannot_read(path, &error))?;
        // A pipe has no size beforehand: what was read counts.
        if bytes.len() as u64 > MAX_BYTES {
            return Err(too_large(name, &format!("more than {MAX_BYTES} bytes")));
        }
        ConfigSource::from_bytes(name, bytes)
    }

    /// What a user may give for a config: its path, its text (it begins with `{`), or base64 of its text.
    pub fn from_argument(argument: &str) -> Result<ConfigSource, ReadError> {
        /// A path that is longer than this in bytes is not shown whole.
        const MOST_OF_A_PATH: usize = 255;
        if argument.trim_start().starts_with('{') {
            return Ok(ConfigSource::from_text("<argument>", argument));
        }
        let path = Path::new(argument);
        if fs::metadata(path).is_err()
            && let Some(text) = decode(argument)
        {
            return Ok(ConfigSource::from_text("<base64>", text));
        }
        ConfigSource::from_path(path).map_err(|error| {
            if error.kind != ReadErrorKind::NotFound {
                return error;
            }
            let name = match argument.len() {
                0 => "<argument>".to_owned(),
                1..=MOST_OF_A_PATH => argument.to_owned(),
                // A damaged base64 text may be some kilobytes long.
                _ => shown(argument).trim_matches('`').to_owned(),
            };
            error.renamed(name).or_help("give a config's path, its text (`{…}`), or base64 of its text")
        })
    }
}

/// The bytes of a file, one more than allowed at most.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if metadata.len() > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("{} bytes", metadata.len())));
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn cannot_read(path: &Path, error: &io::Error) -> ReadError {
    let name = path.display().to_string();
    let (message, help) = match error.kind() {
        // A name that no file can have names no file.
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::InvalidInput => {
            let message = if name.is_empty() { "no path was given" } else { "there is no such file" };
            return ReadError::whole(ReadErrorKind::NotFound, name, message, similar_file(path));
        }
        io::ErrorKind::FileTooLarge => return too_large(name, &error.to_string()),
        io::ErrorKind::IsADirectory => {
            ("this is a folder, not a file".to_owned(), Some("give the path of a file in it".to_owned()))
        }
        io::ErrorKind::PermissionDenied => (
            "reading this file is not permitted".to_owned(),
            Some(format!("let this user read it, as with `chmod u+r {name}`")),
        ),
        _ => (format!("cannot read this file: {error}"), None),
    };
    ReadError::whole(ReadErrorKind::Io, name, message, help)
}

fn too_large(name: String, found: &str) -> ReadError {
    let message = format!("the file has {found}; a config has at most {MAX_BYTES} (16 MiB)");
    ReadError::whole(ReadErrorKind::TooLarge, name, message, Some("is this the config?".to_owned()))
}

/// "Did you mean": the file beside `path` whose name is nearly the same.
fn similar_file(path: &Path) -> Option<String> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut names: Vec<String> =
        fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_unstable(); // a folder's own order is the disk's: the same question gets the same answer
    let name = zeroth_base::nearest(path.file_name()?.to_str()?, names.iter().map(String::as_str))?;
    Some(format!("did you mean `{}`?", path.with_file_name(name).display()))
}

/// The config in a base64 argument, if it is one. A mistyped path may be base64 by accident, so the bytes must be
/// text that begins as an object does, or reads as one.
fn decode(argument: &str) -> Option<String> {
    fn engine(alphabet: &Alphabet) -> GeneralPurpose {
        let config = GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true);
        GeneralPurpose::new(alphabet, config)
    }
    // `base64 FILE` breaks its lines.
    let packed: Vec<u8> = argument.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let bytes = engine(&alphabet::STANDARD)
        .decode(&packed)
        .or_else(|_| engine(&alphabet::URL_SAFE).decode(&packed))
        .ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let is_config = text.trim_start_matches(['\u{feff}', ' ', '\t', '\r', '\n']).starts_with('{')
        || parse::root(&ConfigSource::from_text("", text.as_str())).is_ok();
    is_config.then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_by_the_system_has_its_own_sentence() {
        let path = Path::new("ds.json");
        let denied = cannot_read(path, &io::ErrorKind::PermissionDenied.into());
        assert_eq!(denied.to_string(), "ds.json: reading this file is not permitted");
        assert_eq!(denied.help.as_deref(), Some("let this user read it, as with `chmod u+r ds.json`"));
        let other = cannot_read(path, &io::Error::other("the disk is on fire"));
        assert_eq!(other.to_string(), "ds.json: cannot read this file: the disk is on fire");
    }
}
