//! Errors of reading and writing weights.

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::grouped;

use crate::error::{did_you_mean, listed};

/// An error while reading or writing weights.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum WeightsError {
    /// There is neither a weight file nor an index file.
    #[error(
        "{} has no weights: there is neither model.safetensors nor model.safetensors.index.json{}",
        folder.display(), other_weights(found)
    )]
    NoWeights {
        folder: PathBuf,
        /// Weight files under other names or in other formats.
        found: Vec<String>,
    },
    /// The weights are in an unsupported format.
    #[error(
        "{} has weights in a format that is not read ({}), and no safetensors: {}; to train new weights, copy config.json \
         and the tokenizer to a folder of their own",
        folder.display(), shown_names(found), how_to_convert(found)
    )]
    OtherFormat { folder: PathBuf, found: Vec<String> },
    /// A weight file is a dangling symlink.
    #[error(
        "{}: {link} is a link to {}, which is not there: the download was not finished, or the folder was copied without \
         what it links to; download the model again, or copy it with `cp -rL`",
        folder.display(), target.display()
    )]
    DanglingLink { folder: PathBuf, link: String, target: PathBuf },
    /// A snapshot in the Hub's cache has no weights.
    #[error(
        "{} is a snapshot in the Hub's cache without weights{}: download the model again; to train new weights, copy \
         config.json and the tokenizer to a folder of their own",
        folder.display(),
        if *unfinished > 0 { " whose download was not finished (blobs/*.incomplete)" } else { "" }
    )]
    NotDownloaded {
        folder: PathBuf,
        /// The number of incomplete downloads.
        unfinished: usize,
    },
    /// The folder cannot be listed.
    #[error("cannot look for weights in {}: {source}", folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    /// The index file is invalid.
    #[error("{}: {problem}", path.display())]
    Index { path: PathBuf, problem: String },
    /// The files do not match the model. All problems are listed.
    #[error("the weights in {} do not fit the model:{}", folder.display(), listed(problems, 20))]
    DoNotFit { folder: PathBuf, problems: Vec<WeightProblem> },
    /// The model has no parameter of this name.
    #[error("the model has no parameter `{name}`{}", did_you_mean(near.as_deref()))]
    NoSuchParameter {
        name: String,
        /// A parameter with a similar name.
        near: Option<String>,
    },
    /// A range extends beyond the tensor, or differs in length from the buffer.
    #[error(
        "elements {start} to {end} of `{name}` were asked for a buffer of {buffer}: the tensor has {} elements",
        grouped(*elements)
    )]
    Range {
        name: String,
        /// The first element of the range.
        start: u64,
        /// The end of the range, exclusive.
        end: u64,
        /// The number of elements of the buffer.
        buffer: u64,
        /// The number of elements of the tensor.
        elements: u64,
    },
    /// A tensor cannot be read, or the file was truncated after it was opened.
    #[error("cannot read `{tensor}` from {}: {source}", path.display())]
    Read { path: PathBuf, tensor: String, source: io::Error },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// A tensor cannot be stored in a safetensors file.
    #[error("the tensor `{name}` cannot be written: {problem}")]
    NotWritable { name: String, problem: &'static str },
    /// Values were appended out of order.
    #[error("{given} elements of `{name}` were given where {expected}")]
    OutOfOrder {
        /// The tensor that was given.
        name: String,
        /// The number of elements that were given.
        given: u64,
        /// What was expected instead.
        expected: String,
    },
}

/// A problem with the weight files of a model.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum WeightProblem {
    /// A parameter is in no file.
    #[error("`{name}` is missing{}", did_you_mean(near.as_deref()))]
    Missing {
        name: String,
        /// A tensor with a similar name that the model does not use.
        near: Option<String>,
    },
    /// The shape differs from the model's.
    #[error("`{name}` has the shape {found:?} in {file}: config.json asks for {expected:?}")]
    Shape {
        name: String,
        file: String,
        /// The shape in the file.
        found: Vec<u64>,
        /// The shape in the model.
        expected: Vec<u64>,
    },
    /// A tensor is stored whole, and a part of it too.
    #[error("`{whole}` is stored beside `{part}`, which is a part of it: remove one of the two")]
    WholeAndPart {
        whole: String,
        /// The part, or the first of several.
        part: String,
    },
    /// The experts of some blocks are fused, those of others not.
    #[error(
        "`{fused}` holds all experts of its block and `{split}` is one expert's: a folder has one layout, so save the model \
         again with the tool that wrote it"
    )]
    MixedExperts {
        /// The first fused tensor.
        fused: String,
        /// The first tensor of one expert.
        split: String,
    },
    /// The experts of a block are more or fewer than the model's.
    #[error("the files have {found} experts (`{begin}0` to `{begin}{}`): config.json asks for {expected}", found - 1)]
    ExpertCount {
        /// The beginning of their names.
        begin: String,
        /// How many there are.
        found: u64,
        /// How many the model has.
        expected: u64,
    },
    /// The dtype is not supported for weights.
    #[error("`{name}` is stored as {found} in {file}: F32, BF16 and F16 are read")]
    Type {
        name: String,
        file: String,
        /// The dtype in the file.
        found: &'static str,
    },
    /// Two tensors that the config ties have different values.
    #[error(
        "`{alias}` is stored beside `{name}` and differs from it, but config.json ties them: set \
         `tie_word_embeddings` to false, or remove one"
    )]
    TiedButDifferent {
        name: String,
        /// The tensor tied to it.
        alias: String,
    },
    /// A tensor is in two files.
    #[error("`{name}` is in two files, {first} and {second}")]
    InTwoFiles { name: String, first: String, second: String },
    /// A tensor is not in the file that the index names.
    #[error("the index says that `{name}` is in {file}, and it is not there")]
    NotWhereIndexed {
        name: String,
        /// The file the index names.
        file: String,
    },
    /// A weight file cannot be read.
    #[error(
        "cannot read {}: {source}{}",
        path.display(),
        if source.kind() == io::ErrorKind::NotFound { "; the index names it: download the model again" } else { "" }
    )]
    Unreadable { path: PathBuf, source: io::Error },
    /// A file is not a complete safetensors file.
    #[error("{}: {source}", path.display())]
    Broken {
        path: PathBuf,
        /// The error in its header.
        source: HeaderError,
    },
}

/// An error in the header of a safetensors file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum HeaderError {
    /// The file is too short to contain the length of a header.
    #[error(
        "it has {length} bytes, and a safetensors file begins with 8 bytes that give its header's length"
    )]
    NoLength {
        /// The length of the file in bytes.
        length: u64,
    },
    /// The header is longer than the format allows.
    #[error("its header would have {} bytes, and the format allows {}: this is no safetensors file", grouped(*length), grouped(*limit))]
    TooLong {
        /// The length of the header in bytes, according to the file.
        length: u64,
        /// The largest length that the format allows.
        limit: u64,
    },
    /// The header is longer than the file.
    #[error("its header has {} bytes by its own count, but only {} follow: it is cut short, or no safetensors file", grouped(*length), grouped(*found))]
    CutHeader {
        /// The length of the header in bytes, according to the file.
        length: u64,
        /// The number of bytes after the length.
        found: u64,
    },
    /// The header is not the JSON of a safetensors header.
    #[error("its header is not one of a safetensors file: {problem}")]
    Json {
        /// The error of the JSON parser.
        problem: String,
    },
    /// A name occurs twice.
    #[error("its header has `{name}` twice")]
    Twice { name: String },
    /// The dtype does not exist in the format.
    #[error("`{name}` has the type `{found}`, which safetensors does not have")]
    UnknownType {
        name: String,
        /// The dtype as written.
        found: String,
    },
    /// The size of a tensor overflows, or is not a whole number of bytes.
    #[error("`{name}` has the shape {shape}: that is not a number of bytes that a file can hold")]
    Shape {
        name: String,
        /// The shape, or its first dimensions.
        shape: String,
    },
    /// The offsets do not match the size of the tensor.
    #[error("`{name}` lies in bytes {begin} to {end} of the data, and its shape and type need {} bytes", grouped(*needed))]
    Length {
        name: String,
        /// The offset at which it begins.
        begin: u64,
        /// The offset at which it ends.
        end: u64,
        /// The size of its elements in bytes.
        needed: u64,
    },
    #[error("`{name}` begins at byte {begin} of the data, inside of `{other}`, which ends at {end}")]
    Overlap {
        name: String,
        /// The offset at which it begins.
        begin: u64,
        other: String,
        /// The offset at which the earlier tensor ends.
        end: u64,
    },
    /// Part of the data belongs to no tensor.
    #[error("{} bytes of the data, from byte {begin}, belong to no tensor", grouped(*length))]
    Gap {
        /// The offset at which the gap begins.
        begin: u64,
        /// The length of the gap in bytes.
        length: u64,
    },
    /// The data ends before a tensor does.
    #[error("it is cut short: `{name}` ends at byte {end} of the data, and the file has {} bytes of data", grouped(*found))]
    CutData {
        /// The first incomplete tensor.
        name: String,
        /// The offset at which it ends.
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
