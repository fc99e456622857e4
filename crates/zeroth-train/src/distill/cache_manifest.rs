//! manifest.json of a cache of a teacher's distributions: what it was made of, and how much is done.

use serde::{Deserialize, Serialize};
use zeroth_base::counted;
use zeroth_model::ModelFunction;

use crate::checkpoint::{BaseEntry, exact};

pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const RECORDS: &str = "records.bin";
pub(super) const CHECKSUMS: &str = "checksums.bin";
/// The format version that this version writes.
pub(super) const FORMAT_VERSION: u64 = 2;
/// An earlier one, without checksums, that it reads.
pub(super) const WITHOUT_CHECKSUMS: u64 = 1;
/// Bytes of an id and its log-probability.
const ENTRY_BYTES: u64 = 8;
/// Marks the folder as a cache.
pub(super) const KIND: &str = "zeroth teacher cache";

/// Bytes of a block, or of one record where that is larger.
const BLOCK: u64 = 16 << 10;
/// What a cache was made of, and how much of it is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "names say what they are")]
pub struct CacheManifest {
    /// What the folder is.
    pub kind: String,
    /// The format of its files.
    pub format_version: u64,
    pub data: CachedData,
    pub teacher: BaseEntry,
    /// What the teacher computes from its weights; caches of earlier versions do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<ModelFunction>,
    /// Whether the teacher's linear layers were in nf4.
    pub quantized: bool,
    /// The dtype that the teacher was computed in.
    pub dtype: String,
    pub vocab: u64,
    /// Ids of a token, the most probable ones.
    pub k: u64,
    /// The temperature of the softmax.
    #[serde(with = "exact")]
    pub temperature: f64,
    /// Tokens whose records are written and synced: whole samples in the order of the token cache.
    pub tokens_done: u64,
    /// Checksums of the records; caches of format 1 have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksums: Option<BlockChecksums>,
}

/// The data of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedData {
    /// A hash of all tokens and labels.
    pub hash: String,
    /// Samples.
    pub samples: u64,
    /// Tokens of all samples.
    pub tokens: u64,
}

/// A manifest's part of the checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockChecksums {
    /// Tokens of a block.
    pub tokens: u64,
    /// CRC32C of checksums.bin.
    pub whole: u32,
    /// CRC32C of the records behind the last whole block.
    pub last: u32,
}

impl BlockChecksums {
    /// Of a cache without records.
    pub(super) fn new(record_bytes: u64) -> Self {
        Self { tokens: (BLOCK / record_bytes.max(1)).max(1), whole: 0, last: 0 }
    }
}

impl CacheManifest {
    /// Bytes of a token's record: k ids and k log-probabilities of 4 bytes each.
    pub const fn record_bytes(&self) -> u64 {
        self.k * ENTRY_BYTES
    }

    /// Whether all tokens are done.
    pub const fn is_complete(&self) -> bool {
        self.tokens_done == self.data.tokens
    }

    /// Whether it can be of a cache: sizes are computed from its numbers.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.kind != KIND {
            return Err(format!("it is of `{}`", self.kind));
        }
        if ![WITHOUT_CHECKSUMS, FORMAT_VERSION].contains(&self.format_version) {
            let found = self.format_version;
            return Err(format!(
                "its format version is {found}, this version reads {WITHOUT_CHECKSUMS} and {FORMAT_VERSION}"
            ));
        }
        let has_checksums = self.checksums.is_some_and(|checksums| checksums.tokens > 0);
        if has_checksums != (self.format_version == FORMAT_VERSION) {
            let has = if has_checksums { "checksums" } else { "no checksums" };
            return Err(format!("its format version is {}, and it has {has}", self.format_version));
        }
        if !(1..=self.vocab).contains(&self.k) || self.vocab > i32::MAX as u64 {
            return Err(format!("k is {}, the vocabulary {}", self.k, self.vocab));
        }
        if !(self.temperature.is_finite() && self.temperature > 0.0) {
            return Err(format!("its temperature is {}", self.temperature));
        }
        // Blocks are read whole.
        if let Some(BlockChecksums { tokens, .. }) = self.checksums
            && tokens != BlockChecksums::new(self.record_bytes()).tokens
        {
            return Err(format!("its blocks have {}", counted(tokens, "token")));
        }
        let bytes =
            self.data.tokens.checked_mul(self.record_bytes()).filter(|bytes| i64::try_from(*bytes).is_ok());
        if bytes.is_none() || self.tokens_done > self.data.tokens || self.data.samples > self.data.tokens {
            let CachedData { samples, tokens, .. } = self.data;
            return Err(format!(
                "it has {} of {} in {}",
                self.tokens_done,
                counted(tokens, "token"),
                counted(samples, "sample")
            ));
        }
        Ok(())
    }

    /// What a cache with the settings of `now` would have otherwise: one phrase each, with what was asked first. A teacher that
    /// is not known by its whole weights yet is compared by the first of each tensor.
    pub fn differences(&self, now: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        let mut compare = |what: &str, now: String, saved: String| {
            if now != saved {
                differences.push(format!("{what} is {now}, that of the cache {saved}"));
            }
        };
        compare("--top-k", now.k.to_string(), self.k.to_string());
        compare("--kd-temperature", now.temperature.to_string(), self.temperature.to_string());
        let nf4 = |quantized: bool| if quantized { "nf4" } else { "none" }.to_owned();
        compare("--teacher-quantize", nf4(now.quantized), nf4(self.quantized));
        compare("the precision", now.dtype.clone(), self.dtype.clone());
        differences.extend(self.data_difference(&now.data));
        differences.extend(self.teacher_differences(&now.teacher, now.function.as_ref()));
        differences
    }

    /// How other data differs from that of the cache.
    pub fn data_difference(&self, now: &CachedData) -> Option<String> {
        if self.data == *now {
            return None;
        }
        let words = |data: &CachedData| {
            format!("{} of {}", counted(data.samples, "sample"), counted(data.tokens, "token"))
        };
        let (now, saved) = (words(now), words(&self.data));
        let how = if now == saved { " with other tokens or labels" } else { "" };
        Some(format!("the data is {now}, that of the cache {saved}{how}"))
    }

    /// How another teacher differs from that of the cache: by the first weights of each tensor, and by what it computes from them.
    pub fn teacher_differences(&self, now: &BaseEntry, function: Option<&ModelFunction>) -> Vec<String> {
        let saved = &self.teacher;
        let mut differences = Vec::new();
        if saved.sample != now.sample || saved.total != now.total {
            differences.push(format!(
                "--teacher {} has other weights ({}) than {} of the cache ({})",
                now.name, now.sample, saved.name, saved.sample
            ));
        }
        let fields = function.zip(self.function.as_ref());
        let fields = fields.map(|(now, saved)| now.differences(saved, "the cache")).unwrap_or_default();
        differences.extend(fields.into_iter().map(|field| format!("the teacher's {field}")));
        differences
    }
}
