//! Whether a folder is one on all hosts: one process leaves a random text in it, and every host looks for it. Paths prove
//! nothing, as each host may have a folder of that name.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use zeroth_base::{create_unfinished, remove_unfinished, unfinished_path};
use zeroth_model::is_weight_file;

use crate::checkpoint::hex;

/// The final name of the file, which it never gets.
pub(crate) const PROOF: &str = "shared-folder";
/// How long a file may take to appear on another host: network file systems keep lists of a folder for some seconds.
const APPEARS: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(100);
/// Bytes of the begin of a weight file and of each sample of the rest, and the number of samples.
const SAMPLE: usize = 16 << 10;
const SAMPLES: u64 = 64;

/// A random text in a folder, removed when this is dropped.
#[derive(Debug)]
pub struct SharedFolderProof {
    path: PathBuf,
    question: SharedFolderQuestion,
}

/// What other hosts have to find in their folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedFolderQuestion {
    file: String,
    text: String,
}

impl SharedFolderProof {
    /// Leaves the text in `folder`.
    pub fn leave(folder: &Path) -> io::Result<Self> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        let text = format!("{:032x}", u128::from_be_bytes(bytes));
        let path = unfinished_path(folder, PROOF);
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let proof = Self { path, question: SharedFolderQuestion { file, text } };
        let mut file = create_unfinished(&proof.path)?;
        file.write_all(proof.question.text.as_bytes())?;
        file.sync_all()?;
        zeroth_base::sync_folder(folder)?;
        Ok(proof)
    }

    /// What to ask the other hosts.
    pub fn question(&self) -> &SharedFolderQuestion {
        &self.question
    }
}

impl Drop for SharedFolderProof {
    fn drop(&mut self) {
        remove_unfinished(&self.path);
    }
}

impl SharedFolderQuestion {
    /// Whether `folder` of this host is the one that was asked about. Where it exists, the file has some seconds to appear.
    pub fn is_about(&self, folder: &Path) -> bool {
        // Of another process, which may not be one of this job.
        if self.file.contains('/') {
            return false;
        }
        let began = Instant::now();
        loop {
            match fs::read_to_string(folder.join(&self.file)) {
                Ok(found) if found == self.text => return true,
                // Written, but not yet visible as a whole.
                Ok(found) if self.text.starts_with(&found) => {}
                Err(_) if folder.is_dir() => {}
                Ok(_) | Err(_) => return false,
            }
            if began.elapsed() >= APPEARS {
                return false;
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// A hash of a model folder's weight files: names, lengths, their headers and samples of their bytes. Hosts with copies of one
/// model have the same; reading all of it would take as long as loading it.
pub fn weights_identity(folder: &Path) -> io::Result<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.extend(entry?.file_name().into_string().ok().filter(|name| is_weight_file(name)));
    }
    names.sort_unstable();
    let mut hash = Sha256::new();
    for name in names {
        let file = File::open(folder.join(&name))?;
        let bytes = file.metadata()?.len();
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(&name);
        hash.update(bytes.to_le_bytes());
        let mut sample = vec![0; SAMPLE];
        for number in 0..SAMPLES {
            // The last sample ends with the file.
            let last = u128::from(bytes.saturating_sub(SAMPLE as u64));
            let at = (last * u128::from(number) / u128::from(SAMPLES - 1)) as u64;
            let length = SAMPLE.min((bytes - at.min(bytes)) as usize);
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut sample[..length], at)?;
            hash.update(&sample[..length]);
        }
    }
    Ok(hex(hash))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_folder_answers() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let proof = SharedFolderProof::leave(one.path()).unwrap();
        let text = serde_json::to_string(proof.question()).unwrap();
        let question: SharedFolderQuestion = serde_json::from_str(&text).unwrap();
        assert!(question.is_about(one.path()));
        let link = other.path().join("link");
        std::os::unix::fs::symlink(one.path(), &link).unwrap();
        assert!(question.is_about(&link));
        assert!(!question.is_about(&other.path().join("absent")));
        // A folder of that path with a file of that name from another job.
        fs::write(other.path().join(&question.file), "another text").unwrap();
        assert!(!question.is_about(other.path()));
        drop(proof);
        assert_eq!(fs::read_dir(one.path()).unwrap().count(), 0);
        let outside = SharedFolderQuestion { file: "../x".to_owned(), text: String::new() };
        assert!(!outside.is_about(one.path()));
    }

    #[test]
    fn a_file_that_appears_late_counts() {
        let folder = tempfile::tempdir().unwrap();
        let question = SharedFolderQuestion { file: "late".to_owned(), text: "0123".to_owned() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for text in ["", "01", "0123"] {
                    std::thread::sleep(Duration::from_millis(200));
                    fs::write(folder.path().join("late"), text).unwrap();
                }
            });
            assert!(question.is_about(folder.path()));
        });
    }

    #[test]
    fn other_weights_have_another_identity() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let identity = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            weights_identity(folder.path()).unwrap()
        };
        let mut bytes = vec![7; 4 << 20];
        let before = identity(&bytes);
        assert_eq!(identity(&bytes), before);
        for at in [0, (4 << 20) - 1] {
            bytes[at] ^= 1;
            assert_ne!(identity(&bytes), before, "byte {at}");
            bytes[at] ^= 1;
        }
        assert_ne!(identity(&bytes[1..]), before);
        assert_ne!(identity(b""), identity(b"x"));
        fs::write(folder.path().join("notes.txt"), "x").unwrap();
        assert_eq!(identity(&bytes), before);
    }
}
