//! The socket of a job, in a folder private to its user: abstract names could be taken by anyone.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{LOOK, RendezvousError};

/// The longest socket name: an address has 107 bytes, some of which the folder takes.
const MOST: usize = 80;

/// What the name of a lock ends in.
const LOCK: &str = ".lock";

/// The name of a job's socket in its open private folder.
pub(super) struct JobSocket {
    folder: OwnedFd,
    path: PathBuf,
    name: String,
}

impl JobSocket {
    pub(super) fn of(job: &str) -> Result<Self, RendezvousError> {
        let (folder, path) = private_folder()?;
        Ok(Self { folder, path, name: name(job) })
    }

    /// Its path in messages.
    pub(super) fn shown(&self) -> String {
        self.path.join(&self.name).display().to_string()
    }

    /// Its path relative to the open folder: short, and immune to renames.
    fn address(&self) -> String {
        format!("/proc/self/fd/{}/{}", self.folder.as_raw_fd(), self.name)
    }

    fn lock_name(&self) -> String {
        format!("{}{LOCK}", self.name)
    }

    /// Removes names of jobs that no living process owns: a killed process leaves its socket and its lock, which is released.
    fn remove_stale(&self) {
        let Ok(entries) = rustix::fs::Dir::read_from(&self.folder) else { return };
        for entry in entries.flatten() {
            let lock = entry.file_name().to_string_lossy().into_owned();
            let Some(name) = lock.strip_suffix(LOCK).filter(|name| *name != self.name) else { continue };
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let Ok(file) = rustix::fs::openat(&self.folder, &lock, flags, Mode::empty()) else { continue };
            let is_free = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            if is_free && is_there(&self.folder, &lock, &file) {
                // As its owner would: the lock file last, while it is locked.
                let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
                let _ = rustix::fs::unlinkat(&self.folder, &lock, AtFlags::empty());
            }
        }
    }

    /// Listens once no other process does. A killed process leaves a stale name and a released lock.
    pub(super) fn listen(self, policy: Duration) -> Result<Listening, RendezvousError> {
        let open = "open the job's socket";
        let failed = |errno: Errno| RendezvousError::System { what: open, source: errno.into() };
        self.remove_stale();
        let began = Instant::now();
        let lock = loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let name = self.lock_name();
            let file = rustix::fs::openat(&self.folder, &name, flags, Mode::RUSR | Mode::WUSR);
            let file = file.map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The holder may have removed the file between our open and lock.
                Ok(()) if is_there(&self.folder, &name, &file) => break file,
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) if began.elapsed() < policy => std::thread::sleep(LOOK),
                Err(Errno::WOULDBLOCK) => return Err(RendezvousError::NameTaken { name: self.shown() }),
                Err(errno) => return Err(failed(errno)),
            }
        };
        match rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let address = SocketAddr::from_pathname(self.address()).map_err(RendezvousError::system(open))?;
        let listener = UnixListener::bind_addr(&address).map_err(RendezvousError::system(open))?;
        listener.set_nonblocking(true).map_err(RendezvousError::system(open))?;
        Ok(Listening { listener, socket: self, _lock: lock })
    }

    /// Connects; `None` while no one listens or the backlog is full.
    pub(super) fn connect(&self) -> Result<Option<UnixStream>, RendezvousError> {
        let connect = || -> rustix::io::Result<UnixStream> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(self.address())?)?;
            Ok(UnixStream::from(socket))
        };
        match connect() {
            Ok(stream) => {
                stream.set_nonblocking(false).map_err(RendezvousError::system("connect to rank 0"))?;
                Ok(Some(stream))
            }
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(RendezvousError::System { what: "connect to rank 0", source: errno.into() }),
        }
    }
}

/// A listening socket; its name is removed on drop.
pub(super) struct Listening {
    pub(super) listener: UnixListener,
    pub(super) socket: JobSocket,
    /// Held while the name belongs to this process.
    _lock: OwnedFd,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // The lock file last, while it is still locked. Leftovers are harmless.
        let JobSocket { folder, name, .. } = &self.socket;
        let _ = rustix::fs::unlinkat(folder, name, AtFlags::empty());
        let _ = rustix::fs::unlinkat(folder, self.socket.lock_name(), AtFlags::empty());
    }
}

fn is_there(folder: &OwnedFd, name: &str, file: &OwnedFd) -> bool {
    let there = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
    let same = |there: rustix::fs::Stat| {
        rustix::fs::fstat(file).is_ok_and(|file| (file.st_dev, file.st_ino) == (there.st_dev, there.st_ino))
    };
    there.is_ok_and(same)
}

/// The folder of this user's sockets: in `$XDG_RUNTIME_DIR` where that is owned by this user, else in the folder for
/// temporary files.
fn private_folder() -> Result<(OwnedFd, PathBuf), RendezvousError> {
    let user = rustix::process::geteuid().as_raw();
    let is_own =
        |path: &PathBuf| path.is_absolute() && rustix::fs::stat(path).is_ok_and(|found| found.st_uid == user);
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(is_own);
    // The variable may name another machine's folder, or one that is not writable.
    if let Some(Ok(opened)) = runtime.map(|runtime| open_private(runtime.join("zeroth"))) {
        return Ok(opened);
    }
    open_private(std::env::temp_dir().join(format!("zeroth-{user}")))
}

fn open_private(path: PathBuf) -> Result<(OwnedFd, PathBuf), RendezvousError> {
    let user = rustix::process::geteuid().as_raw();
    let open = || -> rustix::io::Result<(OwnedFd, rustix::fs::Stat)> {
        match rustix::fs::mkdir(&path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&path, flags, Mode::empty())?;
        let found = rustix::fs::fstat(&folder)?;
        if found.st_uid == user && found.st_mode & 0o077 != 0 {
            rustix::fs::fchmod(&folder, Mode::RWXU)?;
        }
        Ok((folder, found))
    };
    let failed = |errno: Errno| RendezvousError::Folder { path: path.clone(), source: errno.into() };
    let (folder, found) = open().map_err(failed)?;
    if found.st_uid != user {
        let why = format!("it belongs to user {}, and user {user} runs this", found.st_uid);
        let source = io::Error::new(io::ErrorKind::PermissionDenied, why);
        return Err(RendezvousError::Folder { path, source });
    }
    Ok((folder, path))
}

/// The name of a job's socket. A name that is too long or could leave the folder is truncated and hashed.
fn name(job: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if job.len() <= MOST && job.chars().all(is_plain) && !job.starts_with('.') {
        return job.to_owned();
    }
    // Stable across processes: its keys are fixed.
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    let plain: String = job.chars().map(|letter| if is_plain(letter) { letter } else { '_' }).collect();
    format!("j{:.1$}-{2:016x}", plain, MOST - 18, hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_of_killed_processes_are_removed_and_living_ones_stay() {
        let named = |name: &str| JobSocket::of(&format!("test-{}-{name}", std::process::id())).unwrap();
        let [killed, living, next] = ["killed", "living", "next"].map(named);
        let folder = killed.path.clone();
        // A killed process closes its files, and removes nothing.
        let left = killed.name.clone();
        std::fs::write(folder.join(format!("{left}.lock")), "").unwrap();
        drop(UnixListener::bind(folder.join(&left)).unwrap());
        let other = folder.join(format!("{left}.other"));
        std::fs::write(&other, "").unwrap();
        let held = living.name.clone();
        let living = living.listen(Duration::from_secs(1)).unwrap();
        let listening = next.listen(Duration::from_secs(1)).unwrap();
        let is_there = |name: &str| folder.join(name).exists();
        assert!(!is_there(&left) && !is_there(&format!("{left}.lock")));
        assert!(is_there(&held) && is_there(&format!("{held}.lock")));
        assert!(other.exists(), "it is no job's");
        std::fs::remove_file(other).unwrap();
        drop((living, listening));
        assert!(!is_there(&held));
    }

    #[test]
    fn long_names_stay_apart_and_fit() {
        let [one, two] = ["1", "2"].map(|end| name(&format!("{}{end}", "a-long-host.example.org".repeat(9))));
        assert_ne!(one, two);
        assert!(one.len() <= MOST, "{one}");
        assert_eq!(name("slurm-77-0"), "slurm-77-0");
        for odd in ["../../etc", ".hidden", "a/b", "a\0b", ""] {
            assert!(!name(odd).contains(['/', '\0']) && !name(odd).starts_with('.'), "{odd:?}");
        }
    }
}
