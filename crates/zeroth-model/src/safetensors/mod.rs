//! Weights on disk: safetensors files, one or several with an index, read by ranges and written tensor by tensor.
//!
//! The header is parsed by our own code instead of the `safetensors` crate, which needs the file's bytes in memory (or
//! mapped), stops at the first error, and names neither file nor tensor in it. Here a rank reads only the bytes of its
//! shard, and all problems of a folder are reported at once. The format is simple: an 8-byte length, a JSON object, the
//! data.

mod convert;
mod error;
mod expert_layout;
mod files;
mod folder_files;
mod header;
mod one_file;
mod writer;

pub use error::{HeaderError, WeightProblem, WeightsError};
pub use files::{WeightFiles, WeightWarning};
pub use folder_files::has_weights;
pub(crate) use folder_files::weights_include;
pub use one_file::{TensorEntry, f32_to_stored, read_header, stored_to_f32, write_header};
pub use writer::{DEFAULT_SHARD_BYTES, NewTensor, WeightWriter, WrittenWeights, is_weight_file};

/// The name of a single weight file.
const ONE_FILE: &str = "model.safetensors";
/// The name of the index file, which maps tensors to files if there are several.
const INDEX: &str = "model.safetensors.index.json";
