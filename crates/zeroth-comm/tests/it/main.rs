//! Integration tests of `zeroth-comm`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod collectives;
mod handoff;
mod host_launchers;
mod hosts;
mod mesh;
mod model;
mod processes;
mod rendezvous;
mod starved;
mod stop_requests;
mod windows;
