//! What a launcher hands over to its ranks: bytes of any length, in memory that nobody can change any more. Ranks inherit its
//! descriptor, and a variable names that; a variable with the bytes themselves could have 128 kB.

use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, SealFlags};

/// A file in memory, filled by `write` and never changed again. It is closed on exec, but for ranks that
/// [inherit](super::Launch::inherit) it.
pub fn sealed(write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("zeroth-handoff", flags)?);
    write(&mut file)?;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// A file that this process has inherited under a number, opened anew: it is read from its beginning.
pub fn inherited(number: u32) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{number}"))
}
