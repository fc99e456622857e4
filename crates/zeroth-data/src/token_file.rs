//! The file of the token cache: a header of 256 bytes, then sections, each on a multiple of 64 bytes.
//!
//! | section | |
//! |---|---|
//! | tokens, i32 | of each sample its tokens, then its labels: one stretch to read, and written as rows come |
//! | starts, u64 | tokens before each sample and, last, all of them |
//! | trained, u32 | trained tokens of each sample |
//! | pack starts, u64 | samples before each pack and, last, all of them; only where samples are packed |
//! | members, u64 | the samples of each pack; only where samples are packed |
//!
//! All numbers are little-endian. The header has the counts, the totals, a SHA-256 of the body, and one of itself.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytemuck::{Pod, Zeroable, bytes_of, bytes_of_mut, cast_slice, cast_slice_mut};
use sha2::{Digest, Sha256};

use super::intake::Index;
use super::pack::Packs;
use super::{DataError, Totals};

/// Goes up with every change of the format, and of what rows become in it.
pub(super) const VERSION: u64 = 1;
const MAGIC: [u8; 8] = *b"ZTOKENS\n";
const ALIGNMENT: u64 = 64;

// Sections are read as they lie in the file.
const _: () = assert!(cfg!(target_endian = "little"));

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u64,
    body_bytes: u64,
    samples: u64,
    tokens: u64,
    trained_tokens: u64,
    longest: u64,
    too_long: u64,
    truncated: u64,
    untrained: u64,
    packs: u64,
    longest_pack: u64,
    most_in_pack: u64,
    hash: u64,
    spare: [u64; 6],
    key: [u8; 32],
    body_sha256: [u8; 32],
    /// Of all bytes of the header before it.
    own_sha256: [u8; 32],
}

const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 256);

impl Header {
    fn sealed(mut self) -> Self {
        self.own_sha256 = self.checksum();
        self
    }

    fn checksum(&self) -> [u8; 32] {
        Sha256::digest(&bytes_of(self)[..HEADER - size_of::<[u8; 32]>()]).into()
    }

    /// Whether its numbers can be those of the sections that follow. Buffers are sized by them.
    fn check(&self) -> Result<(), &'static str> {
        let Self { samples, tokens, trained_tokens, longest, .. } = *self;
        let Self { packs, longest_pack, most_in_pack, .. } = *self;
        let Self { too_long, truncated, untrained, .. } = *self;
        let is_packed = packs > 0;
        if samples.checked_add(too_long).is_none() || truncated > samples || untrained > samples {
            return Err("its header counts rows that it does not have");
        }
        if trained_tokens > tokens || longest > tokens || tokens < samples {
            return Err("its header counts tokens that it does not have");
        }
        if packs > samples || longest_pack > tokens || most_in_pack > samples {
            return Err("its header counts packs that it does not have");
        }
        if is_packed != (longest_pack > 0) || is_packed != (most_in_pack > 0) {
            return Err("its header counts packs in one place and none in another");
        }
        Ok(())
    }

    /// Where each section lies in the file, and where the last one ends. `None` where that is beyond counting.
    fn sections(&self) -> Option<(Sections, u64)> {
        let packed = self.packs > 0;
        let mut end = HEADER as u64;
        let mut section = |entries: u64, size: u64| {
            let start = end.checked_next_multiple_of(ALIGNMENT)?;
            end = start.checked_add(entries.checked_mul(size)?)?;
            Some(start..end)
        };
        let sections = Sections {
            tokens: section(self.tokens.checked_mul(2)?, 4)?,
            starts: section(self.samples.checked_add(1)?, 8)?,
            trained: section(self.samples, 4)?,
            pack_starts: section(if packed { self.packs.checked_add(1)? } else { 0 }, 8)?,
            members: section(if packed { self.samples } else { 0 }, 8)?,
        };
        Some((sections, end))
    }
}

impl Header {
    /// Whether every sample lies within the tokens, every pack within the samples, and none is longer than said here.
    fn covers(&self, index: &Index) -> bool {
        let covers = |starts: &[u64], all: u64, longest: u64| {
            starts.first() == Some(&0)
                && starts.last() == Some(&all)
                && starts.windows(2).all(|ends| {
                    ends[1].checked_sub(ends[0]).is_some_and(|length| (1..=longest).contains(&length))
                })
        };
        let Index { starts, trained, packs, .. } = index;
        let length = |sample: &u64| starts[*sample as usize + 1] - starts[*sample as usize];
        covers(starts, self.tokens, self.longest)
            && starts.windows(2).zip(trained).all(|(ends, trained)| u64::from(*trained) <= ends[1] - ends[0])
            && (packs.starts.is_empty() || covers(&packs.starts, self.samples, self.most_in_pack))
            && packs.members.iter().all(|member| *member < self.samples)
            && packs.iter().all(|pack| pack.iter().map(length).sum::<u64>() <= self.longest_pack)
    }
}

#[derive(Debug)]
struct Sections {
    tokens: Range<u64>,
    starts: Range<u64>,
    trained: Range<u64>,
    pack_starts: Range<u64>,
    members: Range<u64>,
}

/// Why a file is no token cache.
#[derive(Debug)]
pub(super) enum Reject {
    /// The system refused.
    Io(io::Error),
    /// It is not what it should be, in words.
    Damaged(&'static str),
}

/// A token cache that is open. Tokens are read when they are needed, and not mapped: a mapping whose file is cut short ends
/// the process without a word, a read is an error that names the file. The system keeps the pages for all ranks either way.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: File,
    path: PathBuf,
    header: Header,
    sections: Sections,
    count: NonZeroU64,
}

impl TokenFile {
    /// Checks the header and the size of a file; `path` is for messages.
    pub(super) fn new(file: File, path: &Path) -> Result<Self, Reject> {
        let found = file.metadata().map_err(Reject::Io)?;
        let length = found.len();
        if !found.is_file() {
            return Err(Reject::Damaged("it is not a file"));
        }
        if length < HEADER as u64 {
            return Err(Reject::Damaged("it is too short for a header"));
        }
        let mut header = Header::zeroed();
        file.read_exact_at(bytes_of_mut(&mut header), 0).map_err(Reject::Io)?;
        if header.magic != MAGIC {
            return Err(Reject::Damaged("it does not begin like one"));
        }
        if header.version != VERSION {
            return Err(Reject::Damaged("it is of another version"));
        }
        if header.own_sha256 != header.checksum() {
            return Err(Reject::Damaged("its header does not match the header's checksum"));
        }
        let sections = header
            .sections()
            .filter(|(_, end)| *end == length && header.body_bytes == length - HEADER as u64);
        let Some((sections, _)) = sections else {
            return Err(Reject::Damaged("its length is not what its header says"));
        };
        header.check().map_err(Reject::Damaged)?;
        let units = if header.packs > 0 { header.packs } else { header.samples };
        let count = NonZeroU64::new(units).ok_or(Reject::Damaged("it holds no samples"))?;
        Ok(Self { file, path: path.to_owned(), header, sections, count })
    }

    /// Whether it was made for `key`, and its body is what was written.
    pub(super) fn verify(&self, key: &[u8; 32]) -> Result<(), Reject> {
        if self.header.key != *key {
            return Err(Reject::Damaged("it was made from other data"));
        }
        let (mut digest, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        let end = HEADER as u64 + self.header.body_bytes;
        let mut at = HEADER as u64;
        while at < end {
            let piece = &mut buffer[..(end - at).min(1 << 20) as usize];
            self.file.read_exact_at(piece, at).map_err(Reject::Io)?;
            digest.update(&*piece);
            at += piece.len() as u64;
        }
        let found: [u8; 32] = digest.finalize().into();
        if found != self.header.body_sha256 {
            return Err(Reject::Damaged("its contents do not match their checksum"));
        }
        Ok(())
    }

    /// Everything but the tokens, read into memory: 12 bytes a sample, 20 and more where samples are packed.
    pub(super) fn index(&self) -> Result<Index, Reject> {
        let Sections { starts, trained, pack_starts, members, .. } = &self.sections;
        let index = Index {
            starts: self.section(starts)?,
            trained: self.section(trained)?,
            packs: Packs { starts: self.section(pack_starts)?, members: self.section(members)? },
            count: self.count,
            totals: self.totals(),
            hash: self.header.hash,
        };
        if self.header.covers(&index) {
            Ok(index)
        } else {
            Err(Reject::Damaged("its index leads out of its tokens"))
        }
    }

    /// A section as a list. Its length was checked against that of the file.
    fn section<T: Pod>(&self, place: &Range<u64>) -> Result<Vec<T>, Reject> {
        let mut list = vec![T::zeroed(); (place.end - place.start) as usize / size_of::<T>()];
        self.file.read_exact_at(cast_slice_mut(&mut list), place.start).map_err(Reject::Io)?;
        Ok(list)
    }

    /// Fills `into` with tokens from the `first` one on, for a sample.
    pub(super) fn read(&self, first: u64, into: &mut [i32], sample: u64) -> Result<(), DataError> {
        let at = self.sections.tokens.start + first * size_of::<i32>() as u64;
        self.file.read_exact_at(cast_slice_mut(into), at).map_err(|source| DataError::ReadCache {
            path: self.path.clone(),
            sample,
            source,
        })
    }

    fn totals(&self) -> Totals {
        let header = &self.header;
        Totals {
            samples: header.samples,
            tokens: header.tokens,
            trained_tokens: header.trained_tokens,
            longest: header.longest,
            too_long: header.too_long,
            truncated: header.truncated,
            untrained: header.untrained,
            packs: header.packs,
            longest_pack: header.longest_pack,
            most_in_pack: header.most_in_pack,
        }
    }
}

/// Writes a token cache: samples as they come, then all else.
pub(super) struct TokenWriter {
    out: BufWriter<File>,
    body: Sha256,
    body_bytes: u64,
}

impl TokenWriter {
    /// Begins a file, which is empty.
    pub(super) fn new(file: File) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        // The header's place: it is written last, and until then the file is no cache.
        out.write_all(&[0; HEADER])?;
        Ok(Self { out, body: Sha256::new(), body_bytes: 0 })
    }

    /// Adds a sample.
    pub(super) fn push(&mut self, ids: &[i32], labels: &[i32]) -> io::Result<()> {
        self.write(cast_slice(ids))?;
        self.write(cast_slice(labels))
    }

    /// Ends the file, synced.
    pub(super) fn finish(mut self, index: &Index, key: [u8; 32]) -> io::Result<()> {
        self.section(cast_slice(&index.starts))?;
        self.section(cast_slice(&index.trained))?;
        self.section(cast_slice(&index.packs.starts))?;
        self.section(cast_slice(&index.packs.members))?;
        let totals = &index.totals;
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            body_bytes: self.body_bytes,
            samples: totals.samples,
            tokens: totals.tokens,
            trained_tokens: totals.trained_tokens,
            longest: totals.longest,
            too_long: totals.too_long,
            truncated: totals.truncated,
            untrained: totals.untrained,
            packs: totals.packs,
            longest_pack: totals.longest_pack,
            most_in_pack: totals.most_in_pack,
            hash: index.hash,
            spare: [0; 6],
            key,
            body_sha256: self.body.finalize().into(),
            own_sha256: [0; 32],
        };
        let mut file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.seek(SeekFrom::Start(0))?;
        file.write_all(bytes_of(&header.sealed()))?;
        file.sync_all()
    }

    fn section(&mut self, bytes: &[u8]) -> io::Result<()> {
        let beyond = self.body_bytes.next_multiple_of(ALIGNMENT) - self.body_bytes;
        self.write(&[0; ALIGNMENT as usize][..beyond as usize])?;
        self.write(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.body.update(bytes);
        self.body_bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }
}
