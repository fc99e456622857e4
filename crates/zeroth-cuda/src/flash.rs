//! Flash attention on tensor cores: supported head dimensions, tile sizes and shared memory. The kernels get these as macros.

/// Threads of a warpgroup, and its rows of a tile.
const WARPGROUP: usize = 128;
const WARPGROUP_ROWS: usize = 64;
/// Alignment of tiles in shared memory.
const ALIGNMENT: usize = 1024;
/// Bytes of the mbarriers.
const BARRIERS: usize = 128;
/// Columns of dk and dv per block.
const DKV_COLUMNS: usize = 128;

/// Compiled head dimensions; smaller ones are padded, in shared memory only.
const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Tile sizes of one kernel.
#[derive(Debug, Clone, Copy)]
struct TileConfig {
    /// Consumer warpgroups per block.
    warpgroups: usize,
    /// Rows of the other operand per pipeline stage; there are two stages.
    stage_rows: usize,
}

const fn tile(warpgroups: usize, stage_rows: usize) -> TileConfig {
    TileConfig { warpgroups, stage_rows }
}

/// By padded head dimension: forward, dq, and dk with dv. Hopper has 227 KiB of shared memory per block.
const HOPPER: [[TileConfig; 3]; 3] = [
    [tile(2, 128), tile(2, 128), tile(2, 128)],
    [tile(2, 128), tile(1, 64), tile(2, 64)],
    [tile(2, 64), tile(1, 64), tile(1, 64)],
];

/// For GPUs with 99 KiB; head dimensions above 128 need more.
const OTHERS: [[TileConfig; 3]; 3] = [
    [tile(2, 64), tile(2, 64), tile(2, 64)],
    [tile(2, 64), tile(1, 64), tile(1, 64)],
    [tile(1, 32), tile(1, 32), tile(1, 32)],
];

/// Tile sizes of all kernels for a padded head dimension. Sums run tile by tile, so tile sizes affect the bits of results: they depend
/// only on the head dimension and the GPU generation.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileConfigs {
    head_dim: usize,
    hopper: bool,
    forward: TileConfig,
    dq: TileConfig,
    dkv: TileConfig,
}

/// Launch configuration of one kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct KernelConfig {
    /// Rows of a block's own operand.
    pub(super) rows: usize,
    pub(super) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(super) shared: u32,
}

/// The compiled head dimension for `head_dim`; `None` if it is too large or not a multiple of 8.
pub(super) fn padded_head_dim(head_dim: usize) -> Option<usize> {
    let fits = |head: &usize| head_dim <= *head;
    HEAD_DIMS.into_iter().find(fits).filter(|_| head_dim > 0 && head_dim.is_multiple_of(8))
}

/// Whether kernels use Hopper's architecture-specific features.
pub(super) fn is_hopper(arch: &str) -> bool {
    arch == "sm_90a"
}

impl TileConfigs {
    /// `head_dim` is a compiled head dimension.
    pub(super) fn new(head_dim: usize, hopper: bool) -> Self {
        let index =
            HEAD_DIMS.into_iter().position(|known| known == head_dim).expect("a compiled head dimension");
        let [forward, dq, dkv] = if hopper { HOPPER[index] } else { OTHERS[index] };
        Self { head_dim, hopper, forward, dq, dkv }
    }

    /// Macro definitions for the kernels.
    pub(super) fn defines(&self) -> String {
        let Self { head_dim, forward, dq, dkv, .. } = self;
        let numbers = [
            ("HEAD_DIM", *head_dim),
            ("FORWARD_WARPGROUPS", forward.warpgroups),
            ("FORWARD_KEYS", forward.stage_rows),
            ("DQ_WARPGROUPS", dq.warpgroups),
            ("DQ_KEYS", dq.stage_rows),
            ("DKV_WARPGROUPS", dkv.warpgroups),
            ("DKV_QUERIES", dkv.stage_rows),
        ];
        numbers.map(|(name, number)| format!("#define {name} {number}\n")).concat()
    }

    /// Launch configurations of forward, dq, and dk with dv.
    pub(super) fn kernels(&self) -> [KernelConfig; 3] {
        // Own tiles, two stages of keys and values (or queries and dy), statistics, barriers.
        let kernel = |tile: TileConfig, own_tiles: usize, statistics: usize| {
            let rows = tile.warpgroups * WARPGROUP_ROWS;
            let producers = if self.hopper { WARPGROUP } else { 0 };
            let tiles = 2 * self.head_dim * (own_tiles * rows + 4 * tile.stage_rows);
            KernelConfig {
                rows,
                threads: (tile.warpgroups * WARPGROUP + producers) as u32,
                shared: (ALIGNMENT + tiles + statistics + BARRIERS) as u32,
            }
        };
        // Two f32 statistics per query, in two stages.
        [kernel(self.forward, 1, 0), kernel(self.dq, 2, 0), kernel(self.dkv, 2, 16 * self.dkv.stage_rows)]
    }

    /// Blocks over the columns of dk and dv.
    pub(super) const fn column_blocks(&self) -> usize {
        self.head_dim.div_ceil(DKV_COLUMNS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_dims_are_padded_to_the_next_compiled_one() {
        let found = [8, 64, 72, 128, 136, 256, 264, 20, 0].map(padded_head_dim);
        let (none, short, middle, long) = (None, Some(64), Some(128), Some(256));
        assert_eq!(found, [short, short, middle, middle, long, long, none, none, none]);
    }

    #[test]
    fn tiles_fit_into_shared_memory() {
        for head in HEAD_DIMS {
            let most = |hopper: bool| {
                let kernels = TileConfigs::new(head, hopper).kernels();
                kernels.into_iter().map(|kernel| kernel.shared).max().unwrap()
            };
            assert!(most(true) <= 227 << 10, "{head}: {}", most(true));
            // An A100 has 163 KiB, smaller GPUs of its generation 99.
            assert!(most(false) <= if head > 128 { 163 << 10 } else { 99 << 10 }, "{head}: {}", most(false));
        }
    }

    #[test]
    fn tile_sizes_are_passed_as_macros() {
        let text = TileConfigs::new(128, true).defines();
        assert!(
            text.contains("#define HEAD_DIM 128\n") && text.contains("#define DKV_QUERIES 64\n"),
            "{text}"
        );
    }
}
