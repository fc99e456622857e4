//! Training data: from files to tokens and labels.
//!
//! [`prepare`] reads rows (JSONL, JSON arrays, CSV, TSV, Parquet; gzip and Zstandard), encodes them with an [`Encode`] on all threads, and writes the token
//! cache, which all ranks open as [`Samples`]. [`survey`] reads the same rows without stopping at invalid ones.

mod array_reader;
mod assistant;
mod byte_gate;
mod cache;
mod catch_panic;
mod chat_template;
mod check_trained;
mod columns;
mod content_digest;
mod conversation;
mod date;
mod encode;
mod encoder;
mod error;
mod eval_rows;
mod file_format;
mod find_files;
mod folder_file;
mod held_out;
mod index_builder;
mod line_reader;
mod longest_token;
mod pack;
mod pair_packs;
mod pair_rows;
mod pairs;
mod parquet_pages;
mod parquet_row_sizes;
mod parquet_rows;
mod pipeline;
mod prepare;
mod prepare_options;
mod preview;
mod python_compat;
mod renderer;
mod row_fields;
mod row_format;
mod row_limits;
mod row_number;
mod row_problem;
mod rows;
mod same_tokenizer;
mod sample_index;
mod samples;
mod samples_builder;
mod source;
mod survey;
mod table_reader;
mod template_process;
mod token_file;
mod token_row;
mod tokenizer;
mod totals;

pub use cache::{CACHE_VARIABLE, CacheFolder};
pub use check_trained::check_trained;
pub use columns::{Columns, ColumnsError};
pub use date::{Date, DateError};
pub use encode::{Encode, Encoded, SkipRule};
pub use encoder::{Encoder, EncoderOptions};
pub use error::{DataError, EncoderError};
pub use eval_rows::{EvalRow, eval_rows};
pub use find_files::{DataFiles, find_files};
pub use held_out::Packing;
pub use pairs::{DecoderStart, PairLimits, PairOptions, Pairs};
pub use prepare::{Prepared, TokenizeProgress, prepare, prepare_with_progress};
pub use prepare_options::{PrepareOptions, Truncation};
pub use preview::{TRAINED_MARKERS, omitted_range, preview};
pub use row_number::RowNumber;
pub use row_problem::{MessageProblem, RowProblem};
pub use same_tokenizer::{TokenizerDifference, tokenizer_difference, tokenizer_ids};
pub use samples::Samples;
pub use samples_builder::SamplesBuilder;
pub use source::Codec;
pub use survey::{CappedList, FirstRow, InvalidRow, LIST_LIMIT, LengthBucket, RowLocation, Survey, survey};
pub use template_process::render_templates;
pub use totals::{LengthLimits, TargetTotals, Totals};

/// A label that is not trained, as in PyTorch and Hugging Face.
pub const IGNORED: i32 = -100;
