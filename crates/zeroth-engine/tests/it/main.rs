//! Integration tests of `zeroth-engine`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod decode;
mod effect;
mod frozen;
mod golden;
mod head_rounds;
mod job;
mod keys;
mod logits;
mod mesh;
mod not_finite;
mod program;
mod rows_apart;
mod same_bits;
mod streams;
mod without_windows;
