//! The fault audit: kills, failing system calls, damaged files and teacher caches, long rows, long runs, unequal ranks. See
//! README.md.
//!
//! `ZEROTH_FULL=1 cargo test --release -p zeroth-cli --test faults -- --nocapture --test-threads 1` runs all of it; without the
//! variable each part is a small sample of itself.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]
#![allow(clippy::print_stdout, reason = "an audit prints its figures, and a test that is skipped says so")]

mod caches;
mod chance;
mod errors;
mod fuzz;
mod hosts;
mod inject;
mod job;
mod kills;
mod kinds;
mod long_rows;
mod long_run;
mod unequal;

/// `full` in the full audit, else `few`.
fn cases(few: u32, full: u32) -> u32 {
    if std::env::var_os("ZEROTH_FULL").is_some() { full } else { few }
}
