//! SHA256SUMS: checksums of all files, manifest included, in the format of `sha256sum --check`.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::manifest::FileEntry;

/// The list of checksums, which also covers the manifest.
pub(super) const SUMS: &str = "SHA256SUMS";
/// The metadata file.
pub(super) const MANIFEST: &str = "manifest.json";
/// Read buffer size in bytes.
const READ: usize = 4 << 20;

/// Finalises a SHA-256 as hexadecimal.
pub(crate) fn hex(hash: Sha256) -> String {
    hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The SHA-256 of a byte slice.
pub(super) fn sha256(bytes: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(bytes);
    hex(hash)
}

/// The SHA-256 and length of a file, read in chunks.
pub(super) fn sha256_of(path: &Path) -> io::Result<(String, u64)> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; READ.min(file.metadata()?.len().max(1) as usize)];
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((hex(hash), bytes)),
            Ok(count) => {
                hash.update(&buffer[..count]);
                bytes += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The contents of SHA256SUMS, fully determined by the manifest, so every byte of it can be checked.
pub(super) fn checksums_text(manifest: &[u8], files: &[FileEntry]) -> String {
    let mut text = format!("{}  {MANIFEST}\n", sha256(manifest));
    for file in files {
        text.push_str(&format!("{}  {}\n", file.sha256, file.name));
    }
    text
}

/// The manifest's checksum in a SHA256SUMS; `None` if not listed.
pub(super) fn manifest_checksum(sums: &[u8]) -> Option<&[u8]> {
    let ending = format!("  {MANIFEST}");
    sums.split(|byte| *byte == b'\n').find_map(|line| line.strip_suffix(ending.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-2, appendix B.1.
    #[test]
    fn sha256_matches_the_fips_test_vector() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(sha256_of(&path).unwrap(), (sha256(b"abc"), 3));
    }
}
