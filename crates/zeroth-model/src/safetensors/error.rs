//! Errors of weights on disk.

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::grouped;

use crate::error::did_you_mean;

/// Weights that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// Neither one file nor an index.
    #[error(
        "{} has no weights: there is neither model.safetensors nor model.safetensors.index.json{}",
        folder.display(), other_weights(found)
    )]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// Weights under other names, or in other formats, that are there.
        found: Vec<String>,
    },
    /// Weights in a format that is not read.
    #[error(
        "{} has weights in a format that is not read ({}), and no safetensors: {}; to train new weights, copy config.json \
         and the tokenizer to a folder of their own",
        folder.display(), shown_names(found), how_to_convert(found)
    )]
    OtherFormat {
        /// The folder.
        folder: PathBuf,
        /// Its weight files.
        found: Vec<String>,
    },
    /// A weight file that links to nothing.
    #[error(
        "{}: {link} is a link to {}, which is not there: the download was not finished, or the folder was copied without \
         what it links to; download the model again, or copy it with `cp -rL`",
        folder.display(), target.display()
    )]
    DanglingLink {
        /// The folder.
        folder: PathBuf,
        /// The link in it.
        link: String,
        /// Where it leads.
        target: PathBuf,
    },
    /// A snapshot in the Hub's cache without its weights.
    #[error(
        "{} is a snapshot in the Hub's cache without weights{}: download the model again; to train new weights, copy \
         config.json and the tokenizer to a folder of their own",
        folder.display(),
        if *unfinished > 0 { " whose download was not finished (blobs/*.incomplete)" } else { "" }
    )]
    NotDownloaded {
        /// The folder.
        folder: PathBuf,
        /// Files whose download was broken off.
        unfinished: usize,
    },
    /// The system refused to list the folder.
    #[error("cannot look for weights in {}: {source}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The index is not what an index is.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The files do not hold the model; all that is wrong, at once.
    #[error("the weights in {} do not fit the model:{}", folder.display(), listed(problems))]
    DoNotFit {
        /// The model folder.
        folder: PathBuf,
        /// Everything found.
        problems: Vec<WeightProblem>,
    },
    /// A name that the table does not have.
    #[error("the model has no parameter `{name}`{}", did_you_mean(near.as_deref()))]
    NoSuchParameter {
        /// The name.
        name: String,
        /// A parameter of nearly that name.
        near: Option<String>,
    },
    /// A range beyond the end of a tensor, or a buffer of another length.
    #[error(
        "elements {start} to {end} of `{name}` were asked for a buffer of {buffer}: the tensor has {} elements",
        grouped(*elements)
    )]
    Range {
        /// The parameter.
        name: String,
        /// The first element of the range.
        start: u64,
        /// The element after the last of the range.
        end: u64,
        /// Elements the buffer holds.
        buffer: u64,
        /// Elements the tensor has.
        elements: u64,
    },
    /// The system refused to read, or the file became shorter since it was opened.
    #[error("cannot read `{tensor}` from {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refused to write.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Tensors that no file can hold.
    #[error("the tensor `{name}` cannot be written: {problem}")]
    NotWritable {
        /// The tensor.
        name: String,
        /// Why not.
        problem: &'static str,
    },
    /// Values that are not the next ones.
    #[error("{given} elements of `{name}` were given where {expected}")]
    OutOfOrder {
        /// The tensor given.
        name: String,
        /// The number of elements.
        given: u64,
        /// The number expected.
        expected: String,
    },
}

/// One thing that is wrong with the files of a model.
#[derive(Debug, thiserror::Error)]
pub enum WeightProblem {
    /// A parameter that no file has.
    #[error("`{name}` is missing{}", did_you_mean(near.as_deref()))]
    Missing {
        /// The parameter.
        name: String,
        /// A tensor of nearly that name that nobody asks for.
        near: Option<String>,
    },
    /// Another shape than the model's.
    #[error("`{name}` has the shape {found:?} in {file}: config.json asks for {expected:?}")]
    Shape {
        /// The parameter.
        name: String,
        /// The file.
        file: String,
        /// Its shape there.
        found: Vec<u64>,
        /// The shape of the model.
        expected: Vec<u64>,
    },
    /// A type that weights are not read from.
    #[error("`{name}` is stored as {found} in {file}: F32, BF16 and F16 are read")]
    Type {
        /// The parameter.
        name: String,
        /// The file.
        file: String,
        /// The type there.
        found: &'static str,
    },
    /// Two tensors that the config makes one have different values.
    #[error(
        "`{alias}` is stored beside `{name}` and differs from it, but config.json ties them: set \
         `tie_word_embeddings` to false, or remove one"
    )]
    TiedButDifferent {
        /// The parameter.
        name: String,
        /// The other name.
        alias: String,
    },
    /// One name in two files.
    #[error("`{name}` is in two files, {first} and {second}")]
    InTwoFiles {
        /// The tensor.
        name: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// A tensor that is not where the index says.
    #[error("the index says that `{name}` is in {file}, and it is not there")]
    NotWhereIndexed {
        /// The tensor.
        name: String,
        /// The file the index names.
        file: String,
    },
    /// A file that the index names cannot be opened.
    #[error(
        "cannot read {}: {source}{}",
        path.display(),
        if source.kind() == io::ErrorKind::NotFound { "; the index names it: download the model again" } else { "" }
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file that is not a whole safetensors file.
    #[error("{}: {source}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// The problem of its header.
        source: HeaderError,
    },
}

/// A problem of the header of one file.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// Not even a length.
    #[error(
        "it has {length} bytes, and a safetensors file begins with 8 bytes that give its header's length"
    )]
    NoLength {
        /// Bytes of the file.
        length: u64,
    },
    /// A header that no writer makes.
    #[error("its header would have {} bytes, and the format allows {}: this is no safetensors file", grouped(*length), grouped(*limit))]
    TooLong {
        /// Bytes by the file's own count.
        length: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// A header that is longer than the file.
    #[error("its header has {} bytes by its own count, but only {} follow: it is cut short, or no safetensors file", grouped(*length), grouped(*found))]
    CutHeader {
        /// Bytes by the file's own count.
        length: u64,
        /// Bytes that follow.
        found: u64,
    },
    /// Not the JSON that a header is.
    #[error("its header is not one of a safetensors file: {problem}")]
    Json {
        /// The error of the parser.
        problem: String,
    },
    /// One name twice.
    #[error("its header has `{name}` twice")]
    Twice {
        /// The name.
        name: String,
    },
    /// A type that the format does not have.
    #[error("`{name}` has the type `{found}`, which safetensors does not have")]
    UnknownType {
        /// The tensor.
        name: String,
        /// The type as written.
        found: String,
    },
    /// A shape with more elements than can be counted, or with half a byte too many.
    #[error("`{name}` has the shape {shape}: that is not a number of bytes that a file can hold")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape, or its beginning.
        shape: String,
    },
    /// Offsets that do not hold the tensor.
    #[error("`{name}` lies in bytes {begin} to {end} of the data, and its shape and type need {} bytes", grouped(*needed))]
    Length {
        /// The tensor.
        name: String,
        /// Where it begins.
        begin: u64,
        /// Where it ends.
        end: u64,
        /// Bytes of its elements.
        needed: u64,
    },
    /// Two tensors share bytes.
    #[error("`{name}` begins at byte {begin} of the data, inside of `{other}`, which ends at {end}")]
    Overlap {
        /// The later tensor.
        name: String,
        /// Where it begins.
        begin: u64,
        /// The earlier tensor.
        other: String,
        /// Where that one ends.
        end: u64,
    },
    /// Bytes that belong to nobody.
    #[error("{} bytes of the data, from byte {begin}, belong to no tensor", grouped(*length))]
    Gap {
        /// Where they begin.
        begin: u64,
        /// Their number.
        length: u64,
    },
    /// The data ends before the tensor does.
    #[error("it is cut short: `{name}` ends at byte {end} of the data, and the file has {} bytes of data", grouped(*found))]
    CutData {
        /// The first tensor that is not whole.
        name: String,
        /// Where it ends.
        end: u64,
        /// Bytes of data that are there.
        found: u64,
    },
}

/// A list is read to its end only if it is short: the first ones, and how many more.
fn listed(problems: &[WeightProblem]) -> String {
    const SHOWN: usize = 20;
    let mut text = String::new();
    for problem in problems.iter().take(SHOWN) {
        text.push_str(&format!("\n  {problem}"));
    }
    if problems.len() > SHOWN {
        text.push_str(&format!("\n  and {} more", grouped((problems.len() - SHOWN) as u64)));
    }
    text
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
