//! What was asked for: DeepSpeed's JSON, read with the place of every value, checked key by key, explained, resolved
//! against the command line, and generated.

pub mod asked;
pub mod check;
pub mod environment;
pub mod explain;
pub mod facts;
pub mod generate;
pub mod json_schema;
pub mod page;
pub mod preset;
pub mod read;
pub mod resolve;
pub mod schema;
pub mod snippet;
pub mod unbuilt;
pub mod verify;
