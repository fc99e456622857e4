//! Checkpoints: exact round trips on any number of ranks, detection of any damage, and crash safety.

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
