//! Reading and writing of weights: files that transformers wrote, folders that are wrong, and our own files again.

mod adapters;
mod attacks;
mod experts;
mod folders;
mod golden;
mod made;
mod writing;
