//! The samples of a run: from data files to tokens and labels.
//!
//! [`prepare`] reads the rows of the files (JSONL or Parquet), has an [`Encode`] turn each into tokens on
//! all threads, and keeps them in the token cache, which all ranks read as [`Samples`]. [`survey`] looks at the
//! same rows without stopping at wrong ones. A format of rows is a file beside this one that implements [`Encode`].

mod assistant;
mod cache;
mod chat_template;
mod columns;
mod conversation;
mod day;
mod encode;
mod encoder;
mod error;
mod eval_rows;
mod file_format;
mod guarded;
mod intake;
mod lines;
mod pack;
mod parquet_rows;
mod pipeline;
mod prepare;
mod preview;
mod python;
mod ready_row;
mod renderer;
mod row;
mod row_problem;
mod rows;
mod samples;
mod survey;
mod template_process;
mod token_file;
mod tokenizer;
mod totals;
mod trained;

pub use cache::{CACHE_VARIABLE, CacheFolder};
pub use columns::{Columns, ColumnsError};
pub use day::{Day, DayError};
pub use encode::{Encode, Encoded};
pub use encoder::{Encoder, EncoderError, EncoderOptions};
pub use error::DataError;
pub use eval_rows::{EvalRow, eval_rows};
pub use intake::{SamplesBuilder, Truncation};
pub use prepare::{PrepareOptions, Prepared, Tokenising, prepare, prepare_watched};
pub use preview::{MARKS, left_out, preview};
pub use row_problem::{MessageProblem, RowProblem};
pub use rows::RowNumber;
pub use samples::Samples;
pub use survey::{Bucket, FirstRow, LISTED, Listed, Problem, RowPlace, Survey, survey};
pub use template_process::render_templates;
pub use totals::Totals;
pub use trained::check_trained;

/// A label that is not trained, as in PyTorch and Hugging Face.
pub const IGNORED: i32 = -100;
