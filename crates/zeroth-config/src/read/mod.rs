//! Reads a config as DeepSpeed's reader does, with the location of every value.
//!
//! DeepSpeed reads configs with the Python package `hjson`. Accepted here is what that package accepts: JSON; JSON
//! with `//`, `/* */` and `#` comments and trailing commas; Hjson, where the outer braces, quotes and the commas at
//! line ends may be missing; and, as an argument, base64 of these.
//!
//! # The quoteless rule
//!
//! Hjson reads `"stage": treu,` as the text `treu,`. In a file that is meant as JSON that is a trap, so the key
//! decides, member by member:
//!
//! - A key in double quotes demands a JSON value (text in any of Hjson's quotes included): `"stage": treu` is an
//!   error with a place.
//! - Any other key permits a quoteless text, which runs to the end of its line, commas and comments included:
//!   `name: a b, c` is the text `a b, c`. What is a number, `true`, `false` or `null` up to a comma, a closing
//!   bracket, a comment or the line's end is that value: `stage: 3 # x` is the number 3.
//! - The elements of a list follow the key that the list belongs to. Members of an object each have their own key.
//!
//! # Where we are stricter than `hjson`
//!
//! Each of these is a slip of the hand that `hjson` turns into another config without a word: `NaN`, `Infinity` and
//! Python's `True`, `False`, `None` as bare words; two members on one line without a comma; a key without a value
//! before the next line's key; numbers beyond the range of an f64; lone surrogates; control and invisible
//! characters and typographic quotes outside of quoted text; an empty file; nesting deeper than [`MAX_DEPTH`].

mod bare_word;
mod cursor;
mod error;
mod load;
mod location;
mod number;
mod parse;
mod quoted;
mod source;
mod value;

pub use error::{ReadError, ReadErrorKind, ReadProblem};
pub use load::MAX_BYTES;
pub use location::{Location, TextSpan};
pub use number::Number;
pub use parse::MAX_DEPTH;
pub use source::ConfigSource;
pub use value::{Entry, JsonNode, JsonValue};

/// A config that was read: its text and what the text says.
#[derive(Debug, Clone)]
pub struct Document {
    /// The text, for places and lines.
    pub source: ConfigSource,
    /// What it says; always an object.
    pub root: JsonNode,
}

/// Reads a config. Duplicate keys stay, in the order of the file: to refuse them is the checker's part.
pub fn parse(source: ConfigSource) -> Result<Document, ReadError> {
    match parse::root(&source) {
        Ok(root) => Ok(Document { source, root }),
        Err(fault) => Err(source.error(fault)),
    }
}
