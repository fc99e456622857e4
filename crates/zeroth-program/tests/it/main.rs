//! Integration tests of `zeroth-program`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod dumps;
mod file_check;
mod inference;
mod layout;
mod many_parameters;
mod memory;
mod mesh;
mod passes;
mod presets;
