//! Integration tests of `zeroth-plan`: one binary, a module for each subject.

mod claims;
mod claims_page;
mod common;
mod hosts;
mod plan;
mod properties;
