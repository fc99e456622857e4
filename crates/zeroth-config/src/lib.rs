//! DeepSpeed's JSON config: reads it with the location of every value, checks it key by key, explains it, resolves it
//! against the command line, and generates new ones.

pub mod check;
pub mod checked;
pub mod docs;
pub mod environment;
pub mod explain;
pub mod file_values;
pub mod generate;
pub mod json_schema;
pub mod preset;
pub mod read;
pub mod resolve;
pub mod schema;
pub mod snippet;
pub mod trainer_defaults;
pub mod unsupported;
pub mod verify;
pub mod view;
