//! Reading and writing of weights: files that transformers wrote, folders that are wrong, and our own files again.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

#[path = "weight_files/adapters.rs"]
mod adapters;
#[path = "weight_files/attacks.rs"]
mod attacks;
#[path = "weight_files/experts.rs"]
mod experts;
#[path = "weight_files/folders.rs"]
mod folders;
#[path = "weight_files/golden.rs"]
mod golden;
#[path = "weight_files/made.rs"]
mod made;
#[path = "weight_files/writing.rs"]
mod writing;
