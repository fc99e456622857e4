//! How near the machine at hand comes to its limits: kernels, optimizer and disk, each beside what the hardware gives at
//! most in the same run, and the profile that keeps it.
//!
//! Clocks and memory of a shared machine change within milliseconds. So all [`Line`]s of a list are measured in turns, one
//! short burst each, and the best and the median of a line are set beside the best and the median of its limit. Data is
//! random: zeros cost less power and run faster than any work does.

mod cards;
mod disk;
mod line;
mod memory;
mod moving;
mod processor;
mod products;
mod profile;
mod room;

pub use cards::card_lines;
pub use disk::disk_lines;
pub use line::{Against, BenchError, Line, Measured, Rate, Unit, measure};
pub use memory::{COPY, TRIAD, copy};
pub use moving::{MovingSizes, moving_lines, optimizer_lines};
pub use processor::{F32, TILES, TILES_FROM_L2, matrix_limit, processor_flop, processor_lines};
pub use products::{Form, Product, attention_lines, head_lines, product_lines};
pub use profile::{Identity, Part, Profile, ProfileError, ProfilePart};
pub use room::fill_random;
