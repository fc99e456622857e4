//! Shared basics: dtypes, gated activations, human-readable sizes, did-you-mean suggestions, counter-based random numbers, atomic files.

mod dtype;
mod gated_activation;
mod nearest;
mod philox;
mod publish;
mod size;

pub use dtype::DType;
pub use gated_activation::GatedActivation;
pub use nearest::nearest;
pub use philox::{halves, name_key, normal_at, philox4x32, philox4x32_lanes};
pub use publish::{PublishError, publish, sync_folder};
pub use size::{SizeError, counted, format_bytes, format_count, grouped, parse_bytes, parse_count};
