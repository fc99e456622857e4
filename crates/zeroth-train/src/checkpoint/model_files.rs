//! Config and tokenizer files of a model folder, snapshotted when a run starts. Checkpoints and the exported model
//! contain these copies, even if the folder changes meanwhile.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use zeroth_comm::launch::sealed;

/// The file that identifies a model folder.
pub(crate) const CONFIG: &str = "config.json";
/// The base's defaults for generating text.
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
/// Files of a model folder that are copied along, besides config.json and the weights.
pub(crate) const COMPANION_FILES: &[&str] = &[
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// A file of a model folder could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", path.display())]
#[allow(missing_docs, reason = "names say what they are")]
pub struct ModelFilesError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// Config and tokenizer files in a sealed memfd that rank processes can inherit.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    /// The files, concatenated.
    memory: Arc<File>,
    /// Their names and lengths.
    list: Vec<(String, u64)>,
}

impl ModelFiles {
    /// Reads the files of a model folder.
    pub fn read(folder: &Path) -> Result<Self, ModelFilesError> {
        Self::read_some(folder, COMPANION_FILES)
    }

    /// Reads config.json only, which suffices for ranks that write neither checkpoints nor the model.
    pub fn read_config(folder: &Path) -> Result<Self, ModelFilesError> {
        Self::read_some(folder, &[])
    }

    fn read_some(folder: &Path, others: &[&str]) -> Result<Self, ModelFilesError> {
        let (mut list, mut at) = (Vec::new(), folder.to_owned());
        let memory = sealed(|memory| {
            for name in std::iter::once(&CONFIG).chain(others) {
                at = folder.join(name);
                // config.json is required; which other files exist depends on the tokenizer.
                if *name == CONFIG || is_file(&at)? {
                    list.push(((*name).to_owned(), io::copy(&mut File::open(&at)?, memory)?));
                }
            }
            Ok(())
        });
        let memory = memory.map_err(|source| ModelFilesError { path: at, source })?;
        Ok(Self { memory: Arc::new(memory), list })
    }

    /// Opens the files that another process has read, from its memfd and its [`Self::list`].
    pub fn of_memory(mut memory: File, list: Vec<(String, u64)>) -> io::Result<Self> {
        let bytes = list.iter().try_fold(0_u64, |sum, (_, bytes)| sum.checked_add(*bytes));
        if bytes != Some(memory.seek(io::SeekFrom::End(0))?) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "its length does not match the model's files",
            ));
        }
        Ok(Self { memory: Arc::new(memory), list })
    }

    /// The memfd.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// Names and lengths, in memory order.
    pub fn list(&self) -> &[(String, u64)] {
        &self.list
    }

    /// All files, opened for reading.
    pub fn iter(&self) -> impl Iterator<Item = (&str, ModelFile<'_>)> {
        self.list.iter().scan(0, |end, (name, bytes)| {
            let start = *end;
            *end += bytes;
            Some((name.as_str(), ModelFile { memory: &self.memory, at: start, end: *end }))
        })
    }

    /// The parsed config.json.
    pub fn config(&self) -> io::Result<Map<String, Value>> {
        let (_, config) = self.iter().next().ok_or(io::ErrorKind::NotFound)?;
        Ok(serde_json::from_reader(io::BufReader::new(config))?)
    }
}

/// Whether a file exists. An inaccessible file is an error, not an absent one.
fn is_file(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.is_file()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// A snapshotted file.
#[derive(Debug)]
pub struct ModelFile<'a> {
    memory: &'a File,
    at: u64,
    end: u64,
}

impl ModelFile<'_> {
    /// Bytes left to read.
    pub(crate) fn len(&self) -> u64 {
        self.end - self.at
    }
}

impl Read for ModelFile<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = self.len().min(into.len() as u64) as usize;
        let read = self.memory.read_at(&mut into[..most], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_snapshots_and_can_be_inherited() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("config.json", "{\"a\": 1}");
        write("tokenizer.json", "tokens");
        write("README.md", "not of the model");
        let files = ModelFiles::read(folder.path()).unwrap();
        write("config.json", "{\"a\": 2, \"b\": 3}");
        write("tokenizer.json", "");
        write("vocab.json", "new");
        let handed =
            ModelFiles::of_memory(files.memory().try_clone().unwrap(), files.list().to_vec()).unwrap();
        for files in [&files, &handed] {
            assert_eq!(files.config().unwrap()["a"], 1);
            let read = files.iter().map(|(name, file)| (name, io::read_to_string(file).unwrap()));
            let expected =
                [("config.json", "{\"a\": 1}".to_owned()), ("tokenizer.json", "tokens".to_owned())];
            assert_eq!(read.collect::<Vec<_>>(), expected);
        }
        let list = vec![("config.json".to_owned(), 99)];
        assert!(ModelFiles::of_memory(files.memory().try_clone().unwrap(), list).is_err());
        let error = ModelFiles::read(&folder.path().join("absent")).unwrap_err().to_string();
        assert!(error.contains("absent/config.json"), "{error}");
    }
}
