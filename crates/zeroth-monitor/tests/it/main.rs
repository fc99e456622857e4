//! Integration tests of `zeroth-monitor`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod monitor;
mod scripts;
