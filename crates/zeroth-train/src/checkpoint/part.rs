//! The file of one rank: what it owns of every state, streamed, hashed on the way, and never held twice.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use zeroth_base::{DType, grouped};
use zeroth_engine::State;
use zeroth_model::{f32_to_stored, write_header};

use super::error::{CheckpointError, writing};
use super::manifest::{FORMAT_VERSION, FileEntry};
use super::state::{state_name, tensor_name};
use super::sums::hex;

/// Bytes that are hashed and written at once.
const BUFFER: usize = 8 << 20;

/// A range of a parameter's elements in one state, owned by one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The state.
    pub state: State,
    /// The parameter's name.
    pub name: String,
    /// The first element.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The type it is held in.
    pub dtype: DType,
}

impl Piece {
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

/// The name of a rank's file.
pub fn part_name(rank: u64, world: u64) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

/// Whether a name is one that [`part_name`] gives.
pub(super) fn is_part_name(name: &str) -> bool {
    let numbers = name.strip_prefix("rank-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let numbers = numbers.and_then(|numbers| numbers.split_once("-of-"));
    let numbers = numbers.and_then(|(rank, world)| Some((rank.parse().ok()?, world.parse().ok()?)));
    numbers.is_some_and(|(rank, world)| part_name(rank, world) == name)
}

/// A rank's file on its way to a checkpoint. Dropped before [`PartWriter::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct PartWriter {
    place: Unfinished,
    name: String,
    file: File,
    pieces: Vec<Piece>,
    /// The piece that comes next, and how many of its bytes are there.
    piece: usize,
    done: u64,
    buffer: Vec<u8>,
    hash: Sha256,
    written: u64,
    /// Bytes of the whole file.
    total: u64,
}

/// The path of a file that is removed where it does not become whole.
#[derive(Debug)]
struct Unfinished {
    path: PathBuf,
    is_whole: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_whole {
            // Best effort: the folder it lies in is never taken for a checkpoint.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl PartWriter {
    /// Begins the file of a rank in an unfinished checkpoint. The pieces come in this order; neighbours are joined to one
    /// tensor, and empty ones are left out.
    pub fn create(
        unfinished: &Path,
        rank: u64,
        world: u64,
        pieces: Vec<Piece>,
    ) -> Result<Self, CheckpointError> {
        let name = part_name(rank, world);
        let path = unfinished.join(&name);
        let pieces = joined(pieces);
        if pieces.iter().any(|piece| state_name(piece.state).is_none()) {
            let problem = "gradients are not saved: a checkpoint lies between steps".to_owned();
            return Err(CheckpointError::Part { path, problem });
        }
        let tensors: Vec<(String, [u64; 1], DType)> =
            pieces.iter().map(|piece| (piece.stored_name(), [piece.count], piece.dtype)).collect();
        let version = FORMAT_VERSION.to_string();
        let metadata = [("zeroth_checkpoint", version.as_str())];
        let header = write_header(
            &metadata,
            tensors.iter().map(|(name, shape, dtype)| (name.as_str(), &shape[..], *dtype)),
        );
        let total = header.len() as u64 + pieces.iter().map(Piece::bytes).sum::<u64>();
        let file = File::create_new(&path).map_err(writing("create", &path, total))?;
        let mut writer = Self {
            place: Unfinished { path, is_whole: false },
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

    /// What comes next: state, parameter and element; `None` when all is there.
    pub fn next(&self) -> Option<(State, &str, u64)> {
        let piece = self.pieces.get(self.piece)?;
        Some((piece.state, &piece.name, piece.first + self.done / piece.dtype.bytes()))
    }

    /// Bytes of the whole file.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Adds the next elements as they are held: little-endian, in the type of their piece. May go over several pieces.
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

    /// Adds the next elements, rounded to the type of their piece: exact for what is held in that type.
    pub fn append_f32(&mut self, mut values: &[f32]) -> Result<(), CheckpointError> {
        while !values.is_empty() {
            let piece = self.expected(values.len() as u64)?;
            let (dtype, left) = (piece.dtype, piece.bytes() - self.done);
            let size = dtype.bytes();
            // Converted straight into the buffer, as much as it takes.
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

    /// Closes the file, without waiting for the disk: that is [`PartWritten::sync`].
    pub fn finish(mut self) -> Result<PartWritten, CheckpointError> {
        if let Some((state, name, element)) = self.next() {
            let state = state_name(state).unwrap_or_default();
            return Err(self.wrong(format!("ended before element {} of {state}/{name}", grouped(element))));
        }
        self.flush()?;
        self.place.is_whole = true;
        let entry = FileEntry { name: self.name, bytes: self.written, sha256: hex(self.hash) };
        Ok(PartWritten { path: self.place.path.clone(), file: self.file, entry })
    }

    fn expected(&self, given: u64) -> Result<&Piece, CheckpointError> {
        let piece = self.pieces.get(self.piece);
        piece.ok_or_else(|| self.wrong(format!("{} more were given than its pieces hold", grouped(given))))
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
        CheckpointError::Part { path: self.place.path.clone(), problem }
    }
}

/// A rank's file, whole, but perhaps not yet on the disk.
#[derive(Debug)]
pub struct PartWritten {
    path: PathBuf,
    file: File,
    entry: FileEntry,
}

impl PartWritten {
    /// What the manifest says of it.
    pub fn entry(&self) -> &FileEntry {
        &self.entry
    }

    /// Waits until it is on the disk. A checkpoint may be committed only then.
    pub fn sync(&self) -> Result<(), CheckpointError> {
        self.file.sync_all().map_err(writing("sync", &self.path, self.entry.bytes))
    }
}

/// Neighbours as one piece, however finely a rank reads them.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces.into_iter().filter(|piece| piece.count > 0) {
        match joined.last_mut() {
            Some(before) if piece.continues(before) => before.count += piece.count,
            _ => joined.push(piece),
        }
    }
    joined
}
