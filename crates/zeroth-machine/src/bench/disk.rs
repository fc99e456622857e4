//! Disk benchmarks: a file written and read as checkpoints are, against O_DIRECT.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use rustix::fs::{Advice, OFlags, fadvise};
use zeroth_base::ProcessOwner;

use super::operands::{Operands, random};
use super::{BenchError, Benchmark, RateUnit};
use crate::disk;

/// Bytes per O_DIRECT read or write, and threads that issue them.
const BLOCK: usize = 4 << 20;
const THREADS: usize = 4;
/// Bytes per write of a checkpoint.
const PIECE: usize = 4 << 20;

/// The file; removed with the last benchmark.
struct Scratch {
    path: PathBuf,
    bytes: usize,
    /// Whether O_DIRECT works.
    direct: bool,
    /// Whether the file is complete.
    whole: Cell<bool>,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Best effort: nothing depends on it.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Scratch {
    fn failed(&self, source: io::Error) -> BenchError {
        BenchError::File { path: self.path.clone(), source }
    }

    /// Opens the file, with O_DIRECT where it works.
    fn open_raw(&self, write: bool) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(!write).write(write);
        if self.direct {
            options.custom_flags(OFlags::DIRECT.bits() as i32);
        }
        options.open(&self.path)
    }

    /// Every thread writes or reads its own part, block by block; returns the seconds.
    fn raw(&self, write: bool, blocks: &mut [&mut [u8]; THREADS]) -> io::Result<f64> {
        let file = self.open_raw(write)?;
        let part = self.bytes / THREADS;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = blocks
                .iter_mut()
                .enumerate()
                .map(|(thread, block)| {
                    let file = &file;
                    std::thread::Builder::new().spawn_scoped(scope, move || {
                        for at in (thread * part..(thread + 1) * part).step_by(BLOCK) {
                            if write {
                                file.write_all_at(block, at as u64)?;
                            } else {
                                file.read_exact_at(block, at as u64)?;
                            }
                        }
                        Ok(())
                    })
                })
                .collect::<io::Result<_>>()?;
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
            })
        })?;
        if write {
            file.sync_data()?;
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Writes a new file through the page cache and syncs it.
    fn write(&self, piece: &[u8]) -> io::Result<f64> {
        self.whole.set(false);
        let start = Instant::now();
        let mut file = File::create(&self.path)?;
        for _ in 0..self.bytes / piece.len() {
            file.write_all(piece)?;
        }
        file.sync_all()?;
        self.whole.set(true);
        Ok(start.elapsed().as_secs_f64())
    }

    /// Reads the file after dropping it from the page cache.
    fn read(&self, piece: &mut [u8]) -> io::Result<f64> {
        let mut file = File::open(&self.path)?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
        let start = Instant::now();
        for _ in 0..self.bytes / piece.len() {
            file.read_exact(piece)?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Writes and reads of a file of `bytes`, rounded up to whole blocks of every thread, in an existing folder.
pub fn disk_benchmarks(folder: &Path, bytes: usize) -> Result<Vec<Benchmark>, BenchError> {
    let bytes = bytes.next_multiple_of(BLOCK * THREADS);
    let path = folder.join(format!(".zeroth-bench-{}", ProcessOwner::own()));
    let failed = |source| BenchError::File { path: path.clone(), source };
    let free = disk(folder).map_err(|error| failed(error.source))?.free;
    if free < bytes as u64 {
        return Err(BenchError::NoRoom { folder: folder.to_owned(), free, needed: bytes as u64 });
    }
    File::create(&path).map_err(failed)?;
    let mut scratch = Scratch { path, bytes, direct: true, whole: Cell::new(false) };
    scratch.direct = scratch.open_raw(true).is_ok();
    let past = if scratch.direct { "O_DIRECT" } else { "no O_DIRECT here" };
    let scratch = Rc::new(scratch);
    let limit = |what: &str| format!("raw {what} ({past}, {THREADS} threads)");
    let mut lines = Vec::new();
    for write in [true, false] {
        let name = if write { "write" } else { "read" };
        let (own, mut operands) = (Rc::clone(&scratch), random_blocks::<THREADS>(BLOCK)?);
        // Written before the first measurement, so that its blocks are allocated.
        lines.push(Benchmark::of_seconds(limit(name), 1, RateUnit::Gigabytes, bytes as f64, move || {
            let mut blocks = operands.split();
            if !own.whole.get() {
                own.write(blocks[0]).map_err(|error| own.failed(error))?;
            }
            own.raw(write, &mut blocks).map_err(|error| own.failed(error))
        }));
        let (own, mut operands) = (Rc::clone(&scratch), random_blocks::<1>(PIECE)?);
        let title = if write { "write a new file, synced" } else { "read a file, not cached" };
        let run = move || {
            let [piece] = operands.split();
            let done = if write { own.write(piece) } else { own.read(piece) };
            done.map_err(|error| own.failed(error))
        };
        let line = Benchmark::of_seconds(title, 1, RateUnit::Gigabytes, bytes as f64, run);
        lines.push(line.limited_by(limit(name)));
    }
    Ok(lines)
}

fn random_blocks<const N: usize>(bytes: usize) -> Result<Operands<N>, BenchError> {
    let mut operands = Operands::new([bytes; N])?;
    for (name, block) in operands.split().into_iter().enumerate() {
        random::<f32>(name as u64, block);
    }
    Ok(operands)
}

#[cfg(test)]
mod tests {
    use super::super::measure;
    use super::*;

    #[test]
    fn the_benchmark_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let measured = measure(disk_benchmarks(folder.path(), 1).unwrap(), 1, &mut |_| {}).unwrap();
        assert_eq!(measured.len(), 4);
        assert!(measured.iter().filter(|line| line.percent.is_some()).count() == 2, "{measured:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_or_full_folder_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let gone = disk_benchmarks(&folder.path().join("gone"), 1).err().expect("no such folder").to_string();
        assert!(gone.contains("gone") && gone.contains("--dir"), "{gone}");
        let full = disk_benchmarks(folder.path(), usize::MAX / 4).err().expect("no such disk").to_string();
        assert!(full.contains("bytes free") && full.contains("--dir"), "{full}");
    }
}
