//! Integration tests of `zeroth-config`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod auto_table;
mod built;
mod environment_page;
mod known_configs;
mod notes;
mod pages;
mod reading;
mod wrong_configs;
