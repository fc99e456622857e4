//! Integration tests of `zeroth-model`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod bounds;
mod builtin;
mod encoder_decoder;
mod golden;
mod golden_runs;
mod new_weights;
mod properties;
mod refusals;
mod rotary;
mod weights;
