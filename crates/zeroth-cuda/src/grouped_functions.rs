//! The functions of grouped matmuls, and the tiles of those for Hopper.

use std::ffi::CStr;

use super::driver::Handle;
use super::tensor_map::TensorMaps;

/// Rows of a tile on Hopper, and k-step and panel width of a stage (`ROWS` and `PANEL` in grouped_hopper.cu).
pub(super) const HOPPER_ROWS: usize = 128;
pub(super) const PANEL: usize = 64;
/// Columns of a tile on Hopper, and its stages: the last arguments of `INSTANTIATE_GROUPED`.
pub(super) const WIDE: [usize; 2] = [256, 4];
pub(super) const NARROW: [usize; 2] = [64, 6];
/// Most experts of the kernels for Hopper, which keep a table of them in shared memory.
pub(super) const MAX_EXPERTS: usize = 1024;

/// Kernels for any size.
pub(super) const PORTABLE: [&CStr; 4] = [c"grouped_forward", c"grouped_dx", c"grouped_dw", c"grouped_dw_f32"];

/// Kernels for Hopper: each wide, then narrow.
pub(super) const HOPPER: [&CStr; 8] = [
    c"grouped_forward_256",
    c"grouped_forward_64",
    c"grouped_dx_256",
    c"grouped_dx_64",
    c"grouped_dw_256",
    c"grouped_dw_64",
    c"grouped_dw_f32_256",
    c"grouped_dw_f32_64",
];

/// The kernels for Hopper, loaded, and what their launch needs.
pub(super) struct HopperFunctions {
    /// By position in [`HOPPER`].
    pub(super) all: [Handle; HOPPER.len()],
    pub(super) tensor_maps: TensorMaps,
    pub(super) multiprocessors: u32,
}

/// Most dynamic shared memory of the kernel at a position in [`HOPPER`].
pub(super) fn hopper_shared_limit(position: usize) -> u32 {
    hopper_shared(position % 2 == 1, MAX_EXPERTS)
}

/// Dynamic shared memory: stages, two barriers each, and the table of experts. Stages are aligned to 1,024 bytes.
pub(super) fn hopper_shared(narrow: bool, experts: usize) -> u32 {
    let [columns, stages] = if narrow { NARROW } else { WIDE };
    (1024 + stages * (2 * PANEL * (HOPPER_ROWS + columns) + 16) + 8 * (experts + 1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_fit_into_shared_memory() {
        assert!((0..HOPPER.len()).all(|position| hopper_shared_limit(position) <= 227 << 10));
    }
}
