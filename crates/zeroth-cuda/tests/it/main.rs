//! Integration tests of `zeroth-cuda`: one binary, a module for each subject.

mod compile;
