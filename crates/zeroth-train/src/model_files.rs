//! The small files of a model's folder, as they were when they were read. A run carries them to its checkpoints and to the
//! trained model, whatever becomes of the folder meanwhile.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};
use zeroth_comm::launch::sealed;

use crate::export::{BESIDE, CONFIG};

/// A file of a model's folder that could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", path.display())]
pub struct ModelFilesError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// The config and the tokenizer's files of a model, in memory that is no part of the process and that ranks can be handed.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    /// One after the other.
    memory: Arc<File>,
    /// Their names and lengths.
    list: Vec<(String, u64)>,
}

impl ModelFiles {
    /// Reads those of a model's folder.
    pub fn read(folder: &Path) -> Result<Self, ModelFilesError> {
        Self::read_some(folder, BESIDE)
    }

    /// Reads config.json alone: what a rank needs that writes neither checkpoints nor the model.
    pub fn read_config(folder: &Path) -> Result<Self, ModelFilesError> {
        Self::read_some(folder, &[])
    }

    fn read_some(folder: &Path, beside: &[&str]) -> Result<Self, ModelFilesError> {
        let (mut list, mut at) = (Vec::new(), folder.to_owned());
        let memory = sealed(|memory| {
            for name in std::iter::once(&CONFIG).chain(beside) {
                at = folder.join(name);
                // A model has a config; what else there is depends on its tokenizer.
                if *name == CONFIG || is_file(&at)? {
                    list.push(((*name).to_owned(), io::copy(&mut File::open(&at)?, memory)?));
                }
            }
            Ok(())
        });
        let memory = memory.map_err(|source| ModelFilesError { path: at, source })?;
        Ok(Self { memory: Arc::new(memory), list })
    }

    /// Files that another process has read: its memory, and what [`Self::list`] gave there.
    pub fn of_memory(mut memory: File, list: Vec<(String, u64)>) -> io::Result<Self> {
        let bytes = list.iter().try_fold(0_u64, |sum, (_, bytes)| sum.checked_add(*bytes));
        if bytes != Some(memory.seek(io::SeekFrom::End(0))?) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "its length is not that of the model's files",
            ));
        }
        Ok(Self { memory: Arc::new(memory), list })
    }

    /// The memory that holds them.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// Their names and lengths, in the order in which they lie in memory.
    pub fn list(&self) -> &[(String, u64)] {
        &self.list
    }

    /// Each of them, to be read.
    pub fn iter(&self) -> impl Iterator<Item = (&str, ModelFile<'_>)> {
        self.list.iter().scan(0, |end, (name, bytes)| {
            let start = *end;
            *end += bytes;
            Some((name.as_str(), ModelFile { memory: &self.memory, at: start, end: *end }))
        })
    }

    /// What config.json says.
    pub fn config(&self) -> io::Result<Map<String, Value>> {
        let (_, config) = self.iter().next().ok_or(io::ErrorKind::NotFound)?;
        Ok(serde_json::from_reader(io::BufReader::new(config))?)
    }
}

/// Whether there is a file. One that cannot be looked at is not taken for an absent one.
fn is_file(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.is_file()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// A file of a model that was read.
#[derive(Debug)]
pub struct ModelFile<'a> {
    memory: &'a File,
    at: u64,
    end: u64,
}

impl ModelFile<'_> {
    /// Bytes that are left to read.
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
    fn files_stay_what_they_were_and_can_be_handed_over() {
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
