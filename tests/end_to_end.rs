//! End-to-end tests: they run the real binary and check its output and exit code.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]
#![allow(clippy::print_stdout, reason = "a test that is skipped says so")]

mod arguments;
mod bench;
mod chat_templates;
mod checkpoint;
mod cluster;
mod command_line;
mod common;
mod config;
mod docs;
mod escapes;
mod estimate;
mod examples;
mod flags;
mod generate;
mod generate_chat;
mod init;
mod messages;
mod model_paths;
#[path = "hosts/namespaces.rs"]
mod namespaces;
mod plan;
mod train;
mod trainer_defaults;
