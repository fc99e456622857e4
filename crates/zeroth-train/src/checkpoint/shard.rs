//! A rank's safetensors file: the shard of every state it owns, streamed and hashed in one pass.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use zeroth_base::{DType, grouped};
use zeroth_engine::StateKind;
use zeroth_model::{f32_to_stored, write_header};

use super::checksums::hex;
use super::error::{CheckpointError, writing};
use super::file_names::shard_name;
use super::manifest::{FORMAT_VERSION, FileEntry};
use super::state::{state_name, tensor_name};

/// Bytes hashed and written at once.
const BUFFER: usize = 8 << 20;

/// A contiguous range of a parameter's elements in one state, owned by one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPiece {
    /// The state.
    pub state: StateKind,
    /// The parameter's name.
    pub name: String,
    /// The first element.
    pub first: u64,
    /// Number of elements.
    pub count: u64,
    /// The dtype it is stored in.
    pub dtype: DType,
}

impl ShardPiece {
    fn bytes(&self) -> u64 {
        self.count * self.dtype.bytes()
    }

    fn continues(&self, before: &Self) -> bool {
        self.state == before.state
            && self.name == before.name
            && self.dtype == before.dtype
            && self.first == before.first + before.count
    }

    fn stored_name(&self) -> String {
        tensor_name(state_name(self.state).unwrap_or_default(), &self.name, self.first)
    }
}

/// Writes a rank's file of a checkpoint. Removed on drop unless [`ShardWriter::finish`] succeeded.
#[derive(Debug)]
pub struct ShardWriter {
    place: UnfinishedFile,
    name: String,
    file: File,
    pieces: Vec<ShardPiece>,
    /// Index of the current piece, and how many of its bytes are written.
    piece: usize,
    done: u64,
    buffer: Vec<u8>,
    hash: Sha256,
    written: u64,
    /// Size of the complete file.
    total: u64,
}

/// The path of a file that is removed on drop unless complete.
#[derive(Debug)]
struct UnfinishedFile {
    path: PathBuf,
    is_whole: bool,
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.is_whole {
            // Best effort: its folder is never taken for a checkpoint.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl ShardWriter {
    /// Creates a rank's file in an unfinished checkpoint. `pieces` are written in this order; adjacent ones are
    /// merged into one tensor, and empty ones skipped.
    pub fn create(
        unfinished: &Path,
        rank: u64,
        world: u64,
        pieces: Vec<ShardPiece>,
    ) -> Result<Self, CheckpointError> {
        let name = shard_name(rank, world);
        let path = unfinished.join(&name);
        let pieces = joined(pieces);
        if pieces.iter().any(|piece| state_name(piece.state).is_none()) {
            let problem = "gradients cannot be saved: a checkpoint is taken between steps".to_owned();
            return Err(CheckpointError::Shard { path, problem });
        }
        let tensors: Vec<(String, [u64; 1], DType)> =
            pieces.iter().map(|piece| (piece.stored_name(), [piece.count], piece.dtype)).collect();
        let version = FORMAT_VERSION.to_string();
        let metadata = [("zeroth_checkpoint", version.as_str())];
        let header = write_header(
            &metadata,
            tensors.iter().map(|(name, shape, dtype)| (name.as_str(), &shape[..], *dtype)),
        );
        let total = header.len() as u64 + pieces.iter().map(ShardPiece::bytes).sum::<u64>();
        let file = File::create_new(&path).map_err(writing("create", &path, total))?;
        let mut writer = Self {
            place: UnfinishedFile { path, is_whole: false },
            name,
            file,
            pieces,
            piece: 0,
            done: 0,
            buffer: Vec::with_capacity(BUFFER.min(total as usize)),
            hash: Sha256::new(),
            written: 0,
            total,
        };
        writer.push(&header)?;
        Ok(writer)
    }

    /// The next element to write, as state, parameter and index; `None` when complete.
    pub fn next(&self) -> Option<(StateKind, &str, u64)> {
        let piece = self.pieces.get(self.piece)?;
        Some((piece.state, &piece.name, piece.first + self.done / piece.dtype.bytes()))
    }

    /// Size of the complete file.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Appends elements as stored: little-endian, in the dtype of their piece. May span several pieces.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            let piece = self.expected(bytes.len() as u64)?;
            let (left, size) = (piece.bytes() - self.done, piece.dtype.bytes());
            let taken = left.min(bytes.len() as u64);
            if !taken.is_multiple_of(size) {
                return Err(self.wrong(format!("{taken} bytes are not whole elements of {size}")));
            }
            let (now, later) = bytes.split_at(taken as usize);
            self.push(now)?;
            self.step_over(taken);
            bytes = later;
        }
        Ok(())
    }

    /// Appends elements, rounded to the dtype of their piece; exact for values held in that dtype.
    pub fn append_f32(&mut self, mut values: &[f32]) -> Result<(), CheckpointError> {
        while !values.is_empty() {
            let piece = self.expected(values.len() as u64)?;
            let (dtype, left) = (piece.dtype, piece.bytes() - self.done);
            let size = dtype.bytes();
            // Convert directly into the free part of the buffer.
            let room = ((BUFFER - self.buffer.len()) as u64 / size).max(1);
            let taken = (left / size).min(room).min(values.len() as u64);
            let (now, later) = values.split_at(taken as usize);
            f32_to_stored(dtype, now, &mut self.buffer);
            self.step_over(taken * size);
            if self.buffer.len() + 8 > BUFFER {
                self.flush()?;
            }
            values = later;
        }
        Ok(())
    }

    /// Completes the file without waiting for the disk; [`WrittenShard::sync`] does that.
    pub fn finish(mut self) -> Result<WrittenShard, CheckpointError> {
        if let Some((state, name, element)) = self.next() {
            let state = state_name(state).unwrap_or_default();
            return Err(self.wrong(format!("ended before element {} of {state}/{name}", grouped(element))));
        }
        self.flush()?;
        self.place.is_whole = true;
        let entry = FileEntry { name: self.name, bytes: self.written, sha256: hex(self.hash) };
        Ok(WrittenShard { path: self.place.path.clone(), file: self.file, entry })
    }

    fn expected(&self, given: u64) -> Result<&ShardPiece, CheckpointError> {
        let piece = self.pieces.get(self.piece);
        piece.ok_or_else(|| self.wrong(format!("{} more were appended than its pieces hold", grouped(given))))
    }

    fn step_over(&mut self, bytes: u64) {
        self.done += bytes;
        if self.done == self.pieces[self.piece].bytes() {
            self.piece += 1;
            self.done = 0;
        }
    }

    fn push(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BUFFER - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            if self.buffer.len() == BUFFER {
                self.flush()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CheckpointError> {
        self.file.write_all(&self.buffer).map_err(writing("write", &self.place.path, self.total))?;
        self.hash.update(&self.buffer);
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    fn wrong(&self, problem: String) -> CheckpointError {
        CheckpointError::Shard { path: self.place.path.clone(), problem }
    }
}

/// A rank's complete file, possibly not yet on disk.
#[derive(Debug)]
pub struct WrittenShard {
    path: PathBuf,
    file: File,
    entry: FileEntry,
}

impl WrittenShard {
    /// Its entry in the manifest.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// Waits until it is on disk. Only then may the checkpoint be committed.
    pub fn sync(&self) -> Result<(), CheckpointError> {
        self.file.sync_all().map_err(writing("sync", &self.path, self.entry.bytes))
    }
}

/// Merges adjacent pieces.
fn joined(pieces: Vec<ShardPiece>) -> Vec<ShardPiece> {
    let mut joined: Vec<ShardPiece> = Vec::with_capacity(pieces.len());
    for piece in pieces.into_iter().filter(|piece| piece.count > 0) {
        match joined.last_mut() {
            Some(before) if piece.continues(before) => before.count += piece.count,
            _ => joined.push(piece),
        }
    }
    joined
}
