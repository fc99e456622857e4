//! Checkpoints from outside: what was saved is loaded bit by bit at any number of ranks, every damage is found, and no
//! end of a save costs the one before it.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod damage;
mod directory;
mod disk;
mod export;
mod forged;
mod kills;
mod own_files;
mod round_trip;
mod sample;
