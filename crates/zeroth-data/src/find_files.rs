//! The data files behind `--data`: files, folders, and patterns such as `data/*.jsonl`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use glob::MatchOptions;
use walkdir::{DirEntry, WalkDir};

use super::DataError;
use super::file_format::{ENDINGS, extension};

/// Metadata that `datasets` writes beside its data.
const METADATA: [&str; 4] = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// The data files behind paths.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DataFiles {
    /// The files, in the order of the paths; those of one folder or pattern are sorted by path.
    pub files: Vec<PathBuf>,
    /// Files in folders that are no data by their names.
    pub skipped: Vec<PathBuf>,
}

/// Finds the data files behind paths. A path is a file, a folder whose data files are found recursively without hidden
/// ones, or a pattern with `*`, `**`, `?` or `[…]` where no file has that name.
pub fn find_files(paths: &[PathBuf]) -> Result<DataFiles, DataError> {
    let mut found = DataFiles::default();
    for path in paths {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => found.add_folder(path)?,
            Ok(_) => found.files.push(path.clone()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match path.to_str() {
                Some(pattern) if pattern.contains(['*', '?', '[']) => found.files.extend(matches(pattern)?),
                _ => return Err(DataError::NotFound { path: path.clone() }),
            },
            Err(source) => return Err(DataError::Read { path: path.clone(), line: 1, source }),
        }
    }
    Ok(found)
}

impl DataFiles {
    fn add_folder(&mut self, folder: &Path) -> Result<(), DataError> {
        let is_shown =
            |entry: &DirEntry| entry.depth() == 0 || !entry.file_name().as_encoded_bytes().starts_with(b".");
        let (mut files, mut others) = (Vec::new(), Vec::new());
        // The Hugging Face cache holds symlinks to its files.
        for entry in WalkDir::new(folder).follow_links(true).into_iter().filter_entry(is_shown) {
            let entry = entry.map_err(|error| DataError::ListFolder {
                path: error.path().unwrap_or(folder).to_owned(),
                message: error
                    .io_error()
                    .map_or_else(|| "a symlink leads back to it".to_owned(), ToString::to_string),
            })?;
            if entry.file_type().is_dir() {
                continue;
            }
            let is_data = entry.file_type().is_file() && is_data(entry.path());
            if is_data { &mut files } else { &mut others }.push(entry.into_path());
        }
        files.sort_unstable();
        others.sort_unstable();
        if files.is_empty() {
            return Err(DataError::NoDataInFolder { path: folder.to_owned(), others });
        }
        self.files.append(&mut files);
        self.skipped.append(&mut others);
        Ok(())
    }
}

/// The files that match a pattern, sorted. As in a shell, hidden files match only a pattern that has the dot.
fn matches(pattern: &str) -> Result<Vec<PathBuf>, DataError> {
    let refused = |message: String| DataError::Pattern { pattern: pattern.to_owned(), message };
    let options = MatchOptions { require_literal_leading_dot: true, ..MatchOptions::new() };
    let found = glob::glob_with(pattern, options).map_err(|error| refused(error.msg.to_owned()))?;
    let found: Vec<PathBuf> = found.collect::<Result<_, _>>().map_err(|error| refused(error.to_string()))?;
    let has_folder = found.iter().any(|path| path.is_dir());
    let mut files: Vec<PathBuf> = found.into_iter().filter(|path| !path.is_dir()).collect();
    files.sort_unstable();
    match (files.is_empty(), has_folder) {
        (false, _) => Ok(files),
        (true, true) => Err(refused("it matches folders only; name a folder itself to read it".to_owned())),
        (true, false) => Err(refused("it matches no file".to_owned())),
    }
}

/// Whether a file of a folder is data, by its name.
fn is_data(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| !METADATA.contains(&name))
        && extension(path).is_some_and(|extension| ENDINGS.contains(&extension.as_str()))
}

/// Checks all files before the first is read.
pub(super) fn check(files: &[PathBuf]) -> Result<(), DataError> {
    if files.is_empty() {
        return Err(DataError::NoFiles);
    }
    for path in files {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(DataError::Folder { path: path.clone() }),
            Ok(found) if !found.is_file() => return Err(DataError::NotAFile { path: path.clone() }),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DataError::NotFound { path: path.clone() });
            }
            Err(source) => return Err(DataError::Read { path: path.clone(), line: 1, source }),
        }
    }
    Ok(())
}
