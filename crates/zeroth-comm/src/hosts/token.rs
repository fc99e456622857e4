//! Where a host takes the job's token from: its launcher, or a file that only this user can read.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::JoinError;
use crate::local::{JOB_TOKEN, JobToken};

/// A token that cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum TokenError {
    #[error("{JOB_TOKEN} is not a job token of 32 hexadecimal digits; `openssl rand -hex 16` makes one")]
    Variable,
    #[error("the job's token cannot be read from {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(
        "the job's token in {} can be read by others (mode {mode:o}): anyone who reads it can take part in the job; \
         `chmod 600` it, and use a new token", path.display()
    )]
    Readable { path: PathBuf, mode: u32 },
    #[error("the job's token in {} belongs to user {owner}, and user {user} runs this", path.display())]
    Owner { path: PathBuf, owner: u32, user: u32 },
    #[error("{} is not a job token of 32 hexadecimal digits", path.display())]
    Text { path: PathBuf },
    #[error("the job's token cannot be written to {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Random(#[from] JoinError),
    #[error(
        "hosts prove to each other that they belong to one job by a token, and there is none: set {JOB_TOKEN} on all of them \
         (`openssl rand -hex 16` makes one), or give them a folder that all see"
    )]
    None,
}

/// Where the token comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// The launcher has handed it over.
    Given(JobToken),
    /// A file of mode 0600, which is read for every connection: rank 0 may write it anew while others wait.
    File(PathBuf),
}

impl TokenSource {
    /// `ZEROTH_JOB_TOKEN`; `Ok(None)` where it is not set.
    pub fn of_environment() -> Result<Option<Self>, TokenError> {
        let Some(text) = std::env::var_os(JOB_TOKEN) else { return Ok(None) };
        let token = text.to_str().and_then(|text| text.trim().parse().ok()).ok_or(TokenError::Variable)?;
        Ok(Some(Self::Given(token)))
    }

    /// Draws a token and writes it to a file, over one of an earlier job: for rank 0.
    pub fn create(path: &Path) -> Result<Self, TokenError> {
        let failed = |source| TokenError::Write { path: path.to_owned(), source };
        let token = JobToken::random()?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}", std::process::id()));
        let unfinished = path.with_file_name(name);
        let write = || {
            // One that a killed process of the same number has left.
            let _ = std::fs::remove_file(&unfinished);
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&unfinished)?;
            writeln!(file, "{token}")?;
            std::fs::rename(&unfinished, path)
        };
        write().map_err(failed)?;
        Ok(Self::File(path.to_owned()))
    }

    /// The token.
    pub fn load(&self) -> Result<JobToken, TokenError> {
        match self {
            Self::Given(token) => Ok(*token),
            Self::File(path) => read(path),
        }
    }
}

fn read(path: &Path) -> Result<JobToken, TokenError> {
    let failed = |source| TokenError::File { path: path.to_owned(), source };
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(flags.bits() as i32).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user {
        return Err(TokenError::Owner { path: path.to_owned(), owner: found.uid(), user });
    }
    if found.mode() & 0o077 != 0 {
        return Err(TokenError::Readable { path: path.to_owned(), mode: found.mode() & 0o777 });
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).map_err(failed)?;
    text.trim().parse().map_err(|_| TokenError::Text { path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_holds_the_token_for_this_user_alone_and_is_replaced_by_the_next_job() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".token");
        let source = TokenSource::create(&path).unwrap();
        let first = source.load().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let second = TokenSource::create(&path).unwrap().load().unwrap();
        assert_ne!(first, second);
        assert_eq!(source.load().unwrap(), second, "a file is read anew");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
    }

    #[test]
    fn files_that_others_can_read_and_those_that_hold_something_else_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let source = TokenSource::create(&path).unwrap();
        let refused = || source.load().unwrap_err().to_string();
        for mode in [0o640, 0o604, 0o644] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let said = refused();
            assert!(said.contains(&format!("can be read by others (mode {mode:o})")), "{said}");
            assert!(said.contains(path.to_str().unwrap()) && said.contains("chmod 600"), "{said}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        for text in ["", "12", "0123456789abcdef0123456789abcdeg", &"0".repeat(1000)] {
            std::fs::write(&path, text).unwrap();
            assert!(refused().contains("is not a job token of 32 hexadecimal digits"), "{text}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(refused().contains("cannot be read from"), "{}", refused());
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        assert!(refused().contains("cannot be read from"), "{}", refused());
    }
}
