//! Errors of reading and writing weights.

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::grouped;

use crate::error::{did_you_mean, listed};

/// An error while reading or writing weights.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum WeightsError {
    #[error(
        "{} has no weights: there is neither model.safetensors nor model.safetensors.index.json{}",
        folder.display(), other_weights(found)
    )]
    NoWeights {
        folder: PathBuf,
        /// Weight files under other names or in other formats.
        found: Vec<String>,
    },
    #[error(
        "{} has weights in a format that is not read ({}), and no safetensors: {}; to train new weights, copy config.json \
         and the tokenizer to a folder of their own",
        folder.display(), shown_names(found), how_to_convert(found)
    )]
    OtherFormat { folder: PathBuf, found: Vec<String> },
    #[error(
        "{}: {link} is a link to {}, which is not there: the download was not finished, or the folder was copied without \
         what it links to; download the model again, or copy it with `cp -rL`",
        folder.display(), target.display()
    )]
    DanglingLink { folder: PathBuf, link: String, target: PathBuf },
    #[error(
        "{} is a snapshot in the Hub's cache without weights{}: download the model again; to train new weights, copy \
         config.json and the tokenizer to a folder of their own",
        folder.display(),
        if *unfinished > 0 { " whose download was not finished (blobs/*.incomplete)" } else { "" }
    )]
    NotDownloaded { folder: PathBuf, unfinished: usize },
    #[error("cannot look for weights in {}: {source}", folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    #[error("{}: {problem}", path.display())]
    Index { path: PathBuf, problem: String },
    #[error("the weights in {} do not fit the model:{}", folder.display(), listed(problems, 20))]
    DoNotFit { folder: PathBuf, problems: Vec<WeightProblem> },
    #[error("the model has no parameter `{name}`{}", did_you_mean(near.as_deref()))]
    NoSuchParameter { name: String, near: Option<String> },
    #[error(
        "elements {start} to {end} of `{name}` were asked for a buffer of {buffer}: the tensor has {} elements",
        grouped(*elements)
    )]
    Range {
        name: String,
        start: u64,
        /// The end of the range, exclusive.
        end: u64,
        buffer: u64,
        elements: u64,
    },
    #[error("cannot read `{tensor}` from {}: {source}", path.display())]
    Read { path: PathBuf, tensor: String, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("the tensor `{name}` cannot be written: {problem}")]
    NotWritable { name: String, problem: &'static str },
    #[error("{given} elements of `{name}` were given where {expected}")]
    OutOfOrder { name: String, given: u64, expected: String },
}

/// A problem with the weight files of a model.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum WeightProblem {
    #[error("`{name}` is missing{}", did_you_mean(near.as_deref()))]
    Missing {
        name: String,
        /// A tensor with a similar name that the model does not use.
        near: Option<String>,
    },
    #[error("`{name}` has the shape {found:?} in {file}: config.json asks for {expected:?}")]
    Shape { name: String, file: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("`{whole}` is stored beside `{part}`, which is a part of it: remove one of the two")]
    WholeAndPart { whole: String, part: String },
    #[error(
        "`{fused}` holds all experts of its block and `{split}` is one expert's: a folder has one layout, so save the model \
         again with the tool that wrote it"
    )]
    MixedExperts { fused: String, split: String },
    #[error("the files have {found} experts (`{begin}0` to `{begin}{}`): config.json asks for {expected}", found - 1)]
    ExpertCount { begin: String, found: u64, expected: u64 },
    #[error("`{name}` is stored as {found} in {file}: F32, BF16 and F16 are read")]
    Type { name: String, file: String, found: &'static str },
    #[error(
        "`{alias}` is stored beside `{name}` and differs from it, but config.json ties them: set \
         `tie_word_embeddings` to false, or remove one"
    )]
    TiedButDifferent { name: String, alias: String },
    #[error("`{name}` is in two files, {first} and {second}")]
    InTwoFiles { name: String, first: String, second: String },
    #[error("the index says that `{name}` is in {file}, and it is not there")]
    NotWhereIndexed { name: String, file: String },
    #[error(
        "cannot read {}: {source}{}",
        path.display(),
        if source.kind() == io::ErrorKind::NotFound { "; the index names it: download the model again" } else { "" }
    )]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Broken { path: PathBuf, source: HeaderError },
}

/// An error in the header of a safetensors file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum HeaderError {
    #[error(
        "it has {length} bytes, and a safetensors file begins with 8 bytes that give its header's length"
    )]
    NoLength {
        /// The length of the file in bytes.
        length: u64,
    },
    #[error("its header would have {} bytes, and the format allows {}: this is no safetensors file", grouped(*length), grouped(*limit))]
    TooLong {
        /// The length of the header in bytes, according to the file.
        length: u64,
        limit: u64,
    },
    #[error("its header has {} bytes by its own count, but only {} follow: it is cut short, or no safetensors file", grouped(*length), grouped(*found))]
    CutHeader {
        /// The length of the header in bytes, according to the file.
        length: u64,
        /// The number of bytes after the length.
        found: u64,
    },
    #[error("its header is not one of a safetensors file: {problem}")]
    Json { problem: String },
    #[error("its header has `{name}` twice")]
    Twice { name: String },
    #[error("`{name}` has the type `{found}`, which safetensors does not have")]
    UnknownType { name: String, found: String },
    #[error("`{name}` has the shape {shape}: that is not a number of bytes that a file can hold")]
    Shape { name: String, shape: String },
    #[error("`{name}` lies in bytes {begin} to {end} of the data, and its shape and type need {} bytes", grouped(*needed))]
    Length {
        name: String,
        begin: u64,
        end: u64,
        /// The size of its elements in bytes.
        needed: u64,
    },
    #[error("`{name}` begins at byte {begin} of the data, inside of `{other}`, which ends at {end}")]
    Overlap {
        name: String,
        begin: u64,
        other: String,
        /// The offset at which the earlier tensor ends.
        end: u64,
    },
    #[error("{} bytes of the data, from byte {begin}, belong to no tensor", grouped(*length))]
    Gap {
        begin: u64,
        /// The length of the gap in bytes.
        length: u64,
    },
    #[error("it is cut short: `{name}` ends at byte {end} of the data, and the file has {} bytes of data", grouped(*found))]
    CutData {
        name: String,
        end: u64,
        /// The number of bytes of data in the file.
        found: u64,
    },
}

fn other_weights(found: &[String]) -> String {
    match found {
        [] => String::new(),
        found => format!(" ({} is there: save the model as safetensors)", shown_names(found)),
    }
}

fn shown_names(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

fn how_to_convert(found: &[String]) -> String {
    let gguf = found.iter().find(|name| Path::new(name).extension().is_some_and(|end| end == "gguf"));
    let load = match gguf {
        Some(name) => format!("`from_pretrained(DIR, gguf_file=\"{name}\")`"),
        None => "`from_pretrained(DIR)`".to_owned(),
    };
    format!(
        "download the model again as safetensors, or convert it once with transformers, {load} and then \
         `save_pretrained(NEW_DIR, safe_serialization=True)`"
    )
}
