//! Words shared by all of zeroth: data types, sizes as people write them, names that were nearly right, random
//! numbers by place, and files that appear by rename.

mod dtype;
mod nearest;
mod philox;
mod publish;
mod size;

pub use dtype::DType;
pub use nearest::nearest;
pub use philox::{halves, name_key, normal_at, philox4x32};
pub use publish::{PublishError, publish, sync_folder};
pub use size::{SizeError, counted, format_bytes, format_count, grouped, parse_bytes, parse_count};
