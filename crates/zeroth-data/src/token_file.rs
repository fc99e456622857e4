//! The token cache file: a header of 256 bytes, then sections aligned to 64 bytes.
//!
//! | section | |
//! |---|---|
//! | tokens, i32 | for each sample its tokens, then its labels: one contiguous read, and written as rows arrive |
//! | starts, u64 | prefix sums of sample lengths |
//! | trained, u32 | trained tokens of each sample |
//! | pack starts, u64 | prefix sums of pack sizes; only with packing |
//! | members, u64 | samples of each pack; only with packing |
//! | target starts, u64 | prefix sums of the numbers of labels; only for pairs, whose `starts` are those of sources |
//!
//! All numbers are little-endian. The header has the counts, the totals, the SHA-256 of the body, and its own.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytemuck::{Pod, Zeroable, bytes_of, bytes_of_mut, cast_slice, cast_slice_mut};
use sha2::{Digest, Sha256};

use super::pack::Packs;
use super::sample_index::SampleIndex;
use super::totals::TargetTotals;
use super::{DataError, Totals};

/// Incremented with every change of the format, or of the encoding of rows.
pub(super) const VERSION: u64 = 1;
/// The version of files of pairs, which have a section more.
const PAIRS_VERSION: u64 = 2;
const MAGIC: [u8; 8] = *b"ZTOKENS\n";
const ALIGNMENT: u64 = 64;

// Sections are read without conversion.
const _: () = assert!(cfg!(target_endian = "little"));

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TokenFileHeader {
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
    /// Counts of the targets of pairs; `tokens`, `longest` and `longest_pack` are then those of sources.
    target_tokens: u64,
    longest_target: u64,
    longest_target_pack: u64,
    spare: [u64; 3],
    key: [u8; 32],
    body_sha256: [u8; 32],
    /// Of all preceding header bytes.
    own_sha256: [u8; 32],
}

const HEADER: usize = size_of::<TokenFileHeader>();
const _: () = assert!(HEADER == 256);

impl TokenFileHeader {
    fn sealed(mut self) -> Self {
        self.own_sha256 = self.checksum();
        self
    }

    fn checksum(&self) -> [u8; 32] {
        Sha256::digest(&bytes_of(self)[..HEADER - size_of::<[u8; 32]>()]).into()
    }

    /// Checks the header's numbers for consistency, as buffers are sized by them.
    fn check(&self) -> Result<(), &'static str> {
        let Self { samples, tokens, trained_tokens, longest, .. } = *self;
        let Self { packs, longest_pack, most_in_pack, .. } = *self;
        let Self { too_long, truncated, untrained, .. } = *self;
        let Self { target_tokens, longest_target, longest_target_pack, .. } = *self;
        let is_packed = packs > 0;
        let labels = if self.is_paired() { target_tokens } else { tokens };
        if samples.checked_add(too_long).is_none() || truncated > samples || untrained > samples {
            return Err("its header has inconsistent row counts");
        }
        let targets = [target_tokens, longest_target, longest_target_pack];
        let targets_fit = if self.is_paired() {
            tokens.checked_add(target_tokens).is_some()
                && longest_target.max(longest_target_pack) <= target_tokens
        } else {
            targets == [0; 3]
        };
        if trained_tokens > labels || longest > tokens || tokens.min(labels) < samples || !targets_fit {
            return Err("its header has inconsistent token counts");
        }
        if packs > samples || longest_pack > tokens || most_in_pack > samples {
            return Err("its header has inconsistent pack counts");
        }
        let packs_targets = if self.is_paired() { longest_target_pack > 0 } else { is_packed };
        if [longest_pack > 0, most_in_pack > 0, packs_targets] != [is_packed; 3] {
            return Err("its header has contradictory pack counts");
        }
        Ok(())
    }

    fn is_paired(&self) -> bool {
        self.version == PAIRS_VERSION
    }

    /// Tokens and labels in the file.
    fn all_tokens(&self) -> Option<u64> {
        self.tokens.checked_add(if self.is_paired() { self.target_tokens } else { self.tokens })
    }

    /// Ranges of the sections, and the end of the last one. `None` on overflow.
    fn sections(&self) -> Option<(Sections, u64)> {
        let packed = self.packs > 0;
        let mut end = HEADER as u64;
        let mut section = |entries: u64, size: u64| {
            let start = end.checked_next_multiple_of(ALIGNMENT)?;
            end = start.checked_add(entries.checked_mul(size)?)?;
            Some(start..end)
        };
        let sections = Sections {
            tokens: section(self.all_tokens()?, 4)?,
            starts: section(self.samples.checked_add(1)?, 8)?,
            trained: section(self.samples, 4)?,
            pack_starts: section(if packed { self.packs.checked_add(1)? } else { 0 }, 8)?,
            members: section(if packed { self.samples } else { 0 }, 8)?,
            // Not even an empty section, which would be aligned.
            target_starts: if self.is_paired() {
                Some(section(self.samples.checked_add(1)?, 8)?)
            } else {
                None
            },
        };
        Some((sections, end))
    }
}

impl TokenFileHeader {
    /// Whether all samples are within the tokens, all packs within the samples, and none is longer than stated.
    fn covers(&self, index: &SampleIndex) -> bool {
        let covers = |starts: &[u64], all: u64, longest: u64| {
            starts.first() == Some(&0)
                && starts.last() == Some(&all)
                && starts.windows(2).all(|ends| {
                    ends[1].checked_sub(ends[0]).is_some_and(|length| (1..=longest).contains(&length))
                })
        };
        let SampleIndex { starts, target_starts, trained, packs, .. } = index;
        let within = |starts: &[u64], pack: &[u64], longest: u64| {
            let length = |sample: &u64| starts[*sample as usize + 1] - starts[*sample as usize];
            pack.iter().map(length).sum::<u64>() <= longest
        };
        let labels = index.label_starts();
        covers(starts, self.tokens, self.longest)
            && target_starts
                .as_ref()
                .is_none_or(|starts| covers(starts, self.target_tokens, self.longest_target))
            && labels.windows(2).zip(trained).all(|(ends, trained)| u64::from(*trained) <= ends[1] - ends[0])
            && (packs.starts.is_empty() || covers(&packs.starts, self.samples, self.most_in_pack))
            && packs.members.iter().all(|member| *member < self.samples)
            && packs.iter().all(|pack| {
                let targets = target_starts.as_ref();
                within(starts, pack, self.longest_pack)
                    && targets.is_none_or(|starts| within(starts, pack, self.longest_target_pack))
            })
    }
}

#[derive(Debug)]
struct Sections {
    tokens: Range<u64>,
    starts: Range<u64>,
    trained: Range<u64>,
    pack_starts: Range<u64>,
    members: Range<u64>,
    target_starts: Option<Range<u64>>,
}

/// Why a token cache was rejected.
#[derive(Debug)]
pub(super) enum Reject {
    Io(io::Error),
    /// Invalid contents, described here.
    Damaged(&'static str),
}

/// An open token cache. Tokens are read on demand rather than mapped: accessing a mapping of a truncated file kills
/// the process with SIGBUS, while a read returns an error. Ranks share the page cache either way.
#[derive(Debug)]
pub(super) struct TokenFile {
    file: File,
    path: PathBuf,
    header: TokenFileHeader,
    sections: Sections,
    count: NonZeroU64,
}

impl TokenFile {
    /// Checks the header and size of a file; `path` is for messages.
    pub(super) fn new(file: File, path: &Path) -> Result<Self, Reject> {
        let found = file.metadata().map_err(Reject::Io)?;
        let length = found.len();
        if !found.is_file() {
            return Err(Reject::Damaged("it is not a file"));
        }
        if length < HEADER as u64 {
            return Err(Reject::Damaged("it is too short for a header"));
        }
        let mut header = TokenFileHeader::zeroed();
        file.read_exact_at(bytes_of_mut(&mut header), 0).map_err(Reject::Io)?;
        if header.magic != MAGIC {
            return Err(Reject::Damaged("it has no valid magic number"));
        }
        if ![VERSION, PAIRS_VERSION].contains(&header.version) {
            return Err(Reject::Damaged("it has another version"));
        }
        if header.own_sha256 != header.checksum() {
            return Err(Reject::Damaged("its header does not match the header's checksum"));
        }
        let sections = header
            .sections()
            .filter(|(_, end)| *end == length && header.body_bytes == length - HEADER as u64);
        let Some((sections, _)) = sections else {
            return Err(Reject::Damaged("its length does not match its header"));
        };
        header.check().map_err(Reject::Damaged)?;
        let items = if header.packs > 0 { header.packs } else { header.samples };
        let count = NonZeroU64::new(items).ok_or(Reject::Damaged("it holds no samples"))?;
        Ok(Self { file, path: path.to_owned(), header, sections, count })
    }

    /// Checks that it was made for `key`, and that its body matches the checksum.
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

    /// Reads everything but the tokens: 12 bytes per sample, 8 more of pairs, and 8 and more with packing.
    pub(super) fn index(&self) -> Result<SampleIndex, Reject> {
        let Sections { starts, trained, pack_starts, members, target_starts, .. } = &self.sections;
        let index = SampleIndex {
            starts: self.section(starts)?,
            target_starts: target_starts.as_ref().map(|place| self.section(place)).transpose()?,
            trained: self.section(trained)?,
            packs: Packs { starts: self.section(pack_starts)?, members: self.section(members)? },
            count: self.count,
            totals: self.totals(),
            hash: self.header.hash,
        };
        if self.header.covers(&index) {
            Ok(index)
        } else {
            Err(Reject::Damaged("its index is out of bounds"))
        }
    }

    /// Reads a section; its length was checked against the file's.
    fn section<T: Pod>(&self, place: &Range<u64>) -> Result<Vec<T>, Reject> {
        let mut list = vec![T::zeroed(); (place.end - place.start) as usize / size_of::<T>()];
        self.file.read_exact_at(cast_slice_mut(&mut list), place.start).map_err(Reject::Io)?;
        Ok(list)
    }

    /// Reads tokens of `sample` into `into`, starting at index `first`.
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
            tokens: header.tokens + header.target_tokens,
            trained_tokens: header.trained_tokens,
            longest: header.longest,
            too_long: header.too_long,
            truncated: header.truncated,
            untrained: header.untrained,
            packs: header.packs,
            longest_pack: header.longest_pack,
            most_in_pack: header.most_in_pack,
            targets: header.is_paired().then_some(TargetTotals {
                tokens: header.target_tokens,
                longest: header.longest_target,
                longest_pack: header.longest_target_pack,
            }),
        }
    }
}

/// Writes a token cache: samples as they arrive, then the index.
pub(super) struct TokenWriter {
    out: BufWriter<File>,
    body: Sha256,
    body_bytes: u64,
}

impl TokenWriter {
    /// Starts writing to an empty file.
    pub(super) fn new(file: File) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        // Placeholder: the header is written last, and until then the file is invalid.
        out.write_all(&[0; HEADER])?;
        Ok(Self { out, body: Sha256::new(), body_bytes: 0 })
    }

    /// Appends a sample.
    pub(super) fn push(&mut self, ids: &[i32], labels: &[i32]) -> io::Result<()> {
        self.write(cast_slice(ids))?;
        self.write(cast_slice(labels))
    }

    /// Completes and syncs the file.
    pub(super) fn finish(mut self, index: &SampleIndex, key: [u8; 32]) -> io::Result<()> {
        self.section(cast_slice(&index.starts))?;
        self.section(cast_slice(&index.trained))?;
        self.section(cast_slice(&index.packs.starts))?;
        self.section(cast_slice(&index.packs.members))?;
        if let Some(starts) = &index.target_starts {
            self.section(cast_slice(starts))?;
        }
        let totals = &index.totals;
        let targets = totals.targets.unwrap_or_default();
        let header = TokenFileHeader {
            magic: MAGIC,
            version: if totals.targets.is_some() { PAIRS_VERSION } else { VERSION },
            body_bytes: self.body_bytes,
            samples: totals.samples,
            tokens: totals.source_tokens(),
            trained_tokens: totals.trained_tokens,
            longest: totals.longest,
            too_long: totals.too_long,
            truncated: totals.truncated,
            untrained: totals.untrained,
            packs: totals.packs,
            longest_pack: totals.longest_pack,
            most_in_pack: totals.most_in_pack,
            hash: index.hash,
            target_tokens: targets.tokens,
            longest_target: targets.longest,
            longest_target_pack: targets.longest_pack,
            spare: [0; 3],
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
