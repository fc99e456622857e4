//! From what a user asks for to a job, by one call for runs, plans and users of the library.

mod lora;
mod row_length;

pub use lora::{LoraRequest, LoraRequestError, ResolvedLora};
pub use row_length::longest_row;
