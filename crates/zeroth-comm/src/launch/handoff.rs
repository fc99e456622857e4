//! Handoff of data to ranks: bytes of any length in a sealed memory file. Ranks inherit its descriptor, whose number is
//! in an environment variable; a variable itself is limited to 128 kB.

use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, SealFlags};

/// Creates a memory file, filled by `write` and then sealed. It is closed on exec, except in ranks that
/// [inherit](super::RankLauncher::inherit) it.
pub fn sealed(write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("zeroth-handoff", flags)?);
    write(&mut file)?;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Reopens an inherited file, to read it from the start.
pub fn inherited(number: u32) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{number}"))
}
