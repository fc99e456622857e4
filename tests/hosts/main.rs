//! Tests on several hosts, which the script `hosts` makes of network namespaces on this machine. They need root and
//! iproute2, and the MPI libraries or SLURM that a test is about; each says what is missing and is skipped.
//!
//! `ZEROTH_FULL=1 cargo test -p zeroth-comm --test hosts -- --nocapture --test-threads 1` runs all cases.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]
#![allow(clippy::print_stdout, reason = "a rank tells its test, and a test that is skipped says so")]

mod control_star;
mod liveness;
mod namespaces;
mod ranks;
mod script;
