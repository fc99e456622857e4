//! Integration tests of `zeroth-cpu`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod conformance;
mod control;
mod kernels;
mod optimizers;
