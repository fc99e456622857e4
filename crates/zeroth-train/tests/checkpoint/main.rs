//! Checkpoints: exact round trips on any number of ranks, detection of any damage, and crash safety.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod damage;
mod directory;
mod disk;
mod export;
mod forged;
mod kills;
mod merge;
mod own_files;
mod round_trip;
mod sample;
