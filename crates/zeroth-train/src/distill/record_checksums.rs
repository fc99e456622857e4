//! CRC32C of a cache's records, block by block.
//!
//! checksums.bin has those of the whole blocks, 4 bytes each, little-endian. The manifest has that of the records behind them,
//! and that of checksums.bin, and ends with its own: a cache is known by its manifest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crc32c::{crc32c, crc32c_append};

use super::cache_manifest::{BlockChecksums, CHECKSUMS, CacheManifest, RECORDS};
use super::error::TeacherCacheError;

/// Bytes of a checksum.
const CHECKSUM: u64 = 4;

/// Checksums of records as they are appended.
#[derive(Debug)]
pub(super) struct RunningChecksums {
    /// Of all that was appended.
    now: BlockChecksums,
    /// Records of the open block.
    open: u64,
    /// Of blocks that became whole since the last commit, as they go to checksums.bin.
    pub(super) pending: Vec<u8>,
}

impl RunningChecksums {
    /// Continues those of `tokens` records.
    pub(super) fn after(tokens: u64, checksums: BlockChecksums) -> Self {
        Self { now: checksums, open: tokens % checksums.tokens, pending: Vec::new() }
    }

    /// Adds records.
    pub(super) fn append(&mut self, records: &[u8], record_bytes: u64) {
        for record in records.chunks_exact(record_bytes as usize) {
            self.now.last = crc32c_append(self.now.last, record);
            self.open += 1;
            if self.open == self.now.tokens {
                let checksum = self.now.last.to_le_bytes();
                self.pending.extend(checksum);
                self.now.whole = crc32c_append(self.now.whole, &checksum);
                (self.now.last, self.open) = (0, 0);
            }
        }
    }

    /// For the manifest.
    pub(super) fn now(&self) -> BlockChecksums {
        self.now
    }
}

/// Bytes of checksums.bin beside `tokens` records.
pub(super) fn checksum_bytes(tokens: u64, block_tokens: u64) -> u64 {
    tokens / block_tokens * CHECKSUM
}

/// The records of a cache, read block by block.
#[derive(Debug)]
pub(super) struct CheckedRecords {
    folder: PathBuf,
    records: File,
    /// checksums.bin, and the manifest's part; caches of format 1 have none.
    checksums: Option<(File, BlockChecksums)>,
    tokens: u64,
    record_bytes: u64,
}

impl CheckedRecords {
    /// Opens the records that a manifest counts, and checks their length and checksums.bin.
    pub(super) fn open(folder: &Path, manifest: &CacheManifest) -> Result<Self, TeacherCacheError> {
        let (tokens, record_bytes) = (manifest.tokens_done, manifest.record_bytes());
        let records = of_length(folder, RECORDS, tokens * record_bytes, manifest.is_complete())?;
        let checksums = match manifest.checksums {
            None => None,
            Some(checksums) => {
                let bytes = checksum_bytes(tokens, checksums.tokens);
                let file = of_length(folder, CHECKSUMS, bytes, manifest.is_complete())?;
                let found = crc32c_of(&file, bytes).map_err(reading(folder, CHECKSUMS))?;
                if found != checksums.whole {
                    let why = mismatch("its CRC32C", found, "its manifest says", checksums.whole);
                    return Err(TeacherCacheError::Damaged { path: folder.join(CHECKSUMS), why });
                }
                Some((file, checksums))
            }
        };
        Ok(Self { folder: folder.to_owned(), records, checksums, tokens, record_bytes })
    }

    /// The path of the records, for messages.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(RECORDS)
    }

    /// Reads the records of `tokens` tokens into `block`, each as ids and log-probabilities, and checks them: by the checksums of
    /// the blocks around them, or by their contents where there are none. Returns the place of the first in `block`.
    pub(super) fn read(
        &self,
        first: u64,
        tokens: u64,
        block: &mut Vec<i32>,
    ) -> Result<usize, TeacherCacheError> {
        let of_block = self.checksums.as_ref().map_or(1, |(_, checksums)| checksums.tokens);
        let start = first / of_block * of_block;
        let end = (first + tokens).next_multiple_of(of_block).min(self.tokens);
        let words = self.record_bytes / 4;
        block.resize((end.saturating_sub(start) * words) as usize, 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(block);
        self.records
            .read_exact_at(bytes, start * self.record_bytes)
            .map_err(reading(&self.folder, RECORDS))?;
        if let Some((file, checksums)) = &self.checksums {
            let of_block = (checksums.tokens * self.record_bytes) as usize;
            let mut whole = vec![0; bytes.len() / of_block * CHECKSUM as usize];
            let at = checksum_bytes(start, checksums.tokens);
            file.read_exact_at(&mut whole, at).map_err(reading(&self.folder, CHECKSUMS))?;
            let whole = whole.as_chunks().0.iter().map(|checksum| u32::from_le_bytes(*checksum));
            let expected = whole.chain(std::iter::once(checksums.last));
            for ((block, expected), place) in bytes.chunks(of_block).zip(expected).zip(0..) {
                let found = crc32c(block);
                if found != expected {
                    let from = start + place * checksums.tokens;
                    let to = (from + checksums.tokens).min(self.tokens) - 1;
                    let what = format!("the CRC32C of the records of tokens {from} to {to}");
                    let why = mismatch(&what, found, "it was", expected);
                    return Err(TeacherCacheError::Damaged { path: self.path(), why });
                }
            }
        }
        Ok(((first - start) * words) as usize)
    }

    /// Reads all records, each block of bytes given to `each`.
    pub(super) fn read_all(
        &self,
        manifest: &CacheManifest,
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), TeacherCacheError> {
        let (mut first, mut block) = (0, Vec::new());
        let at_once = BlockChecksums::new(self.record_bytes).tokens;
        let step = self.checksums.as_ref().map_or(at_once, |(_, checksums)| checksums.tokens);
        while first < self.tokens {
            let tokens = step.min(self.tokens - first);
            self.read(first, tokens, &mut block)?;
            check_records(&block, first, manifest).map_err(|why| {
                let path = self.path();
                TeacherCacheError::Damaged { path, why }
            })?;
            each(bytemuck::cast_slice(&block));
            first += tokens;
        }
        Ok(())
    }
}

/// Checks that records are of ids and log-probabilities; the first is that of token `first`.
pub(super) fn check_records(records: &[i32], first: u64, manifest: &CacheManifest) -> Result<(), String> {
    let k = manifest.k as usize;
    for (token, record) in (first..).zip(records.chunks_exact(2 * k)) {
        let (ids, log_probs) = record.split_at(k);
        let is_known = |id: &i32| u64::try_from(*id).is_ok_and(|id| id < manifest.vocab);
        let is_probable = |bits: &i32| is_log_prob(f32::from_bits(bits.cast_unsigned()));
        if !ids.iter().all(is_known) || !log_probs.iter().all(is_probable) {
            return Err(format!("the record of token {token} is not of ids and log-probabilities"));
        }
    }
    Ok(())
}

/// Whether it can be a log-probability: rounding may leave that of a certain token a little above 0.
pub(super) fn is_log_prob(number: f32) -> bool {
    number.is_finite() && number < 1e-2
}

/// Opens a file that must have `bytes` bytes, or at least as many where a cache `is_complete` not: a kill may have left more.
fn of_length(folder: &Path, name: &str, bytes: u64, is_complete: bool) -> Result<File, TeacherCacheError> {
    let failed = || reading(folder, name);
    let file = match File::open(folder.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = format!("it is missing, and its manifest says {bytes} bytes");
            return Err(TeacherCacheError::Damaged { path: folder.join(name), why });
        }
        opened => opened.map_err(failed())?,
    };
    let found = file.metadata().map_err(failed())?.len();
    if found < bytes || (is_complete && found > bytes) {
        let why = format!("it has {found} bytes, and its manifest says {bytes}");
        return Err(TeacherCacheError::Damaged { path: folder.join(name), why });
    }
    Ok(file)
}

/// CRC32C of the first `bytes` bytes of a file.
pub(super) fn crc32c_of(file: &File, bytes: u64) -> io::Result<u32> {
    let (mut at, mut crc) = (0, 0);
    let mut part = vec![0; (1 << 20).min(bytes as usize)];
    while at < bytes {
        let part = &mut part[..(1 << 20).min((bytes - at) as usize)];
        file.read_exact_at(part, at)?;
        crc = crc32c_append(crc, part);
        at += part.len() as u64;
    }
    Ok(crc)
}

fn mismatch(what: &str, found: u32, says: &str, expected: u32) -> String {
    format!("{what} is {found:08x}, and {says} {expected:08x}")
}

fn reading(folder: &Path, name: &str) -> impl FnOnce(io::Error) -> TeacherCacheError {
    let path = folder.join(name);
    move |source| TeacherCacheError::Read { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_16_kib_or_one_record() {
        let tokens = |k: u64| BlockChecksums::new(8 * k).tokens;
        assert_eq!([1, 20, 2048, 150_000].map(tokens), [2048, 102, 1, 1]);
    }

    #[test]
    fn appending_in_parts_gives_the_checksums_of_the_whole() {
        let records: Vec<u8> = (0..10_u32 * 16).map(|at| (at * 7) as u8).collect();
        let of_three = BlockChecksums { tokens: 3, whole: 0, last: 0 };
        let mut whole = RunningChecksums::after(0, of_three);
        whole.append(&records, 16);
        let blocks: Vec<u8> =
            records[..144].chunks(48).flat_map(|block| crc32c(block).to_le_bytes()).collect();
        assert_eq!(whole.pending, blocks);
        assert_eq!(
            whole.now(),
            BlockChecksums { tokens: 3, whole: crc32c(&blocks), last: crc32c(&records[144..]) }
        );
        for split in 0..=10 {
            let (before, behind) = records.split_at(16 * split);
            let mut parts = RunningChecksums::after(0, of_three);
            parts.append(before, 16);
            let mut continued = RunningChecksums::after(split as u64, parts.now());
            continued.append(behind, 16);
            assert_eq!(continued.now(), whole.now(), "{split}");
            assert_eq!([parts.pending, continued.pending].concat(), blocks, "{split}");
        }
    }
}
