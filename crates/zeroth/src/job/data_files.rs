//! The files behind the paths of data, and the system message.

use std::path::{Path, PathBuf};

use zeroth_base::counted;
use zeroth_data::{CacheFolder, find_files};

use super::data_error::DataRequestError;

/// The data files behind paths, and a note that names files of folders that are no data.
pub fn data_files(paths: &[PathBuf]) -> Result<(Vec<PathBuf>, Option<String>), DataRequestError> {
    const SHOWN: usize = 5;
    let found = find_files(paths)?;
    if found.skipped.is_empty() {
        return Ok((found.files, None));
    }
    let mut names: Vec<String> =
        found.skipped.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
    if found.skipped.len() > SHOWN {
        names.push("…".to_owned());
    }
    let note = format!(
        "{} skipped, not data by {}: {}",
        counted(found.skipped.len() as u64, "file"),
        if found.skipped.len() == 1 { "its name" } else { "their names" },
        names.join(", ")
    );
    Ok((found.files, Some(note)))
}

/// Refuses an output inside a folder of data: a later run would read its files as rows.
pub fn refuse_output_inside(
    flag: &'static str,
    paths: &[PathBuf],
    output: &Path,
) -> Result<(), DataRequestError> {
    let output_path = std::path::absolute(output).map_err(DataRequestError::Output)?;
    // Without symlinks as far as it exists.
    let resolved = output_path.ancestors().find_map(|above| {
        let rest = output_path.strip_prefix(above).ok()?;
        Some(above.canonicalize().ok()?.join(rest))
    });
    let holds_output = |folder: &PathBuf| {
        let folder = folder.canonicalize().ok().filter(|folder| folder.is_dir());
        folder.zip(resolved.as_ref()).is_some_and(|(folder, output)| output.starts_with(folder))
    };
    match paths.iter().find(|path| holds_output(path)) {
        None => Ok(()),
        Some(folder) => {
            let (output, folder) = (output.to_owned(), folder.clone());
            Err(DataRequestError::OutputInside { output, flag, folder })
        }
    }
}

/// A system message: a text, or the contents of a .txt file.
pub fn system_message(given: &str) -> Result<String, DataRequestError> {
    let path = Path::new(given);
    let is_file = path.extension().is_some_and(|extension| extension == "txt") && path.is_file();
    let text = if is_file {
        std::fs::read_to_string(path)
            .map_err(|source| DataRequestError::SystemFile { given: given.to_owned(), source })?
    } else {
        given.to_owned()
    };
    if text.trim().is_empty() {
        return Err(DataRequestError::EmptySystem);
    }
    Ok(text)
}

/// The token cache: the user's, or a temporary one beside the output.
pub fn token_cache(output: &Path) -> CacheFolder {
    let cache = CacheFolder::default_location();
    match nearest_existing(output) {
        Some(folder) => cache.or_temporary_in(folder),
        None => cache,
    }
}

/// The folder, or its nearest existing ancestor.
pub fn nearest_existing(folder: &Path) -> Option<&Path> {
    // A relative path ends with an empty ancestor: the working directory.
    folder
        .ancestors()
        .map(|above| if above.as_os_str().is_empty() { Path::new(".") } else { above })
        .find(|above| above.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_directory_is_above_a_relative_folder() {
        let missing = Path::new("no-such-folder");
        assert_eq!(nearest_existing(missing), Some(Path::new(".")));
        assert_eq!(nearest_existing(&missing.join("run")), Some(Path::new(".")));
        assert_eq!(nearest_existing(Path::new("/no-such-folder/run")), Some(Path::new("/")));
    }
}
