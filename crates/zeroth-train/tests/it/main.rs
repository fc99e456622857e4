//! Integration tests of `zeroth-train`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod batches;
mod checkpoint;
mod generate;
mod metrics;
mod private_cache;
mod report;
mod run_ahead;
mod schedules;
mod small_job;
mod window;
