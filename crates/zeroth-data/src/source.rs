//! Opens a data file as text: decompresses it, and knows its beginning.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;

use super::DataError;

/// Bytes of a file that its format is detected from, and of read buffers.
const BEGINNING: usize = 1 << 20;

/// How a file is compressed, detected by its magic bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// gzip, of any number of members.
    Gzip,
    /// Zstandard, of any number of frames.
    Zstd,
}

impl Codec {
    fn of(beginning: &[u8]) -> Option<Self> {
        match beginning {
            [0x1F, 0x8B, ..] => Some(Self::Gzip),
            // The second is a skippable frame, with which pzstd begins.
            [0x28, 0xB5, 0x2F, 0xFD, ..] | [0x50..=0x5F, 0x2A, 0x4D, 0x18, ..] => Some(Self::Zstd),
            _ => None,
        }
    }

    /// The command that checks and decompresses such files.
    pub(super) fn command(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Gzip => "gzip",
            Self::Zstd => "Zstandard",
        })
    }
}

/// The decompressed text of a file, without a byte order mark.
pub(super) struct DataSource {
    reader: Box<dyn BufRead + Send>,
    codec: Option<Codec>,
    /// Bytes of the file read so far.
    raw_bytes: Arc<AtomicU64>,
    beginning: Vec<u8>,
    /// Bytes of the beginning consumed so far.
    consumed: usize,
    /// The error that ended the beginning, reported once all before it is consumed.
    failed: Option<io::Error>,
}

impl DataSource {
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let failed = |source| DataError::Read { path: path.to_owned(), line: 1, source };
        let raw_bytes = Arc::new(AtomicU64::new(0));
        let file = Counted { file: File::open(path).map_err(failed)?, bytes: Arc::clone(&raw_bytes) };
        let mut file = BufReader::with_capacity(BEGINNING, file);
        let codec = Codec::of(file.fill_buf().map_err(failed)?);
        let mut reader: Box<dyn BufRead + Send> = match codec {
            None => Box::new(file),
            Some(Codec::Gzip) => Box::new(BufReader::with_capacity(BEGINNING, MultiGzDecoder::new(file))),
            // Frames that need more than 128 MiB for their window are refused by the decoder.
            Some(Codec::Zstd) => {
                let decoder = zstd::stream::read::Decoder::with_buffer(file).map_err(failed)?;
                Box::new(BufReader::with_capacity(BEGINNING, decoder))
            }
        };
        let mut beginning = Vec::new();
        let failed = (&mut reader).take(BEGINNING as u64).read_to_end(&mut beginning).err();
        // A byte order mark, which some editors write and parsers reject.
        let consumed = if beginning.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
        Ok(Self { reader, codec, raw_bytes, beginning, consumed, failed })
    }

    pub(super) fn codec(&self) -> Option<Codec> {
        self.codec
    }

    /// The first bytes of the text, before anything is read.
    pub(super) fn beginning(&self) -> &[u8] {
        &self.beginning[self.consumed..]
    }

    /// Bytes of a compressed file read so far.
    pub(super) fn compressed_bytes(&self) -> Option<u64> {
        // Relaxed: only for display.
        self.codec.map(|_| self.raw_bytes.load(Ordering::Relaxed))
    }
}

impl Read for DataSource {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let count = available.len().min(buffer.len());
        buffer[..count].copy_from_slice(&available[..count]);
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for DataSource {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.consumed < self.beginning.len() {
            return Ok(&self.beginning[self.consumed..]);
        }
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.reader.fill_buf(),
        }
    }

    fn consume(&mut self, count: usize) {
        if self.consumed < self.beginning.len() {
            self.consumed += count;
        } else {
            self.reader.consume(count);
        }
    }
}

/// A file that counts what is read of it.
struct Counted {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Line ends of a text.
pub(super) fn line_ends(text: &[u8]) -> u64 {
    text.iter().map(|byte| u64::from(*byte == b'\n')).sum()
}
