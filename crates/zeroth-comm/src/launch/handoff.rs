//! What a launcher hands over to its ranks: bytes of any length, in memory that nobody can change any more. A variable names
//! the inherited descriptor; the bytes of a variable itself would be limited to 128 kB, and its neighbours'.

use std::fs::File;
use std::io::{self, Read, Write};

use rustix::fs::{MemfdFlags, SealFlags};

/// A file in memory with these bytes, closed on exec.
pub(super) fn sealed(bytes: &[u8]) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("zeroth-handoff", flags)?);
    file.write_all(bytes)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(file)
}

/// What the launcher of this process handed over by [`Launch::hand_over`](super::Launch::hand_over) under a variable; `None`
/// where it is not set.
pub fn handed_over(variable: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(value) = std::env::var_os(variable) else { return Ok(None) };
    let number: Option<u32> = value.to_str().and_then(|text| text.parse().ok());
    let number = number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it names no descriptor"))?;
    let mut bytes = Vec::new();
    // Opened anew: every rank reads from the beginning.
    File::open(format!("/proc/self/fd/{number}"))?.read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}
