//! Integration tests of `zeroth`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod job;
mod plan;
mod session;
