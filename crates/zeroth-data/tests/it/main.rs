//! Integration tests of `zeroth-data`: one binary, a module for each subject.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod chat_templates;
mod data;
mod file_formats;
mod forged_cache;
mod long_conversations;
mod long_rows;
mod many_columns_and_messages;
mod pairs;
mod parquet;
mod prepare;
mod row_problems;
mod survey;
