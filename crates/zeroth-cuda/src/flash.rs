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

/// With a context, tiles leave room for biases, the sums of their gradients, and the bits of dropout.
const OTHERS_WITH_CONTEXT: [[TileConfig; 3]; 3] = [
    [tile(2, 64), tile(2, 32), tile(2, 64)],
    [tile(2, 64), tile(1, 32), tile(1, 32)],
    [tile(1, 32), tile(1, 32), tile(1, 32)],
];

/// Distances of a head with biases, at most: 160 to either side.
pub(super) const MAX_DISTANCES: usize = 321;
/// Heads with biases that share keys, at most.
pub(super) const MAX_GROUP: usize = 4;

/// What the kernels do beside causal attention within sequences, chosen when they are compiled: the causal ones have no code for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Features {
    /// Whole sequences and those of other rows; biases and dropout on CUDA cores, too.
    pub(super) general: bool,
    /// Biases by distance.
    pub(super) bias: bool,
    /// Dropout of softmax weights.
    pub(super) dropout: bool,
}

impl Features {
    /// Causal attention within sequences.
    pub(super) const CAUSAL: Self = Self { general: false, bias: false, dropout: false };
    /// All that the kernels on CUDA cores can.
    pub(super) const GENERAL: Self = Self { general: true, ..Self::CAUSAL };
    /// All that the kernels on tensor cores can.
    pub(super) const ALL: Self = Self { general: true, bias: true, dropout: true };

    fn names(self) -> [(&'static str, bool); 3] {
        [("GENERAL", self.general), ("BIAS", self.bias), ("DROPOUT", self.dropout)]
    }

    /// Macro definitions for the kernels.
    pub(super) fn defines(self) -> String {
        self.names().map(|(name, is_on)| format!("#define {name} {}\n", u8::from(is_on))).concat()
    }

    /// The end of a program's name.
    pub(super) fn suffix(self) -> String {
        let on = self.names().map(|(name, is_on)| if is_on { format!("_{name}") } else { String::new() });
        on.concat().to_lowercase()
    }
}

/// Tile sizes of all kernels for a padded head dimension. Sums run tile by tile, so tile sizes affect the bits of results: they depend
/// only on the head dimension and the GPU generation.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileConfigs {
    head_dim: usize,
    hopper: bool,
    features: Features,
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

impl TileConfigs {
    /// `head_dim` is a compiled head dimension.
    pub(super) fn new(head_dim: usize, hopper: bool, features: Features) -> Self {
        let index =
            HEAD_DIMS.into_iter().position(|known| known == head_dim).expect("a compiled head dimension");
        let [forward, dq, dkv] = match (hopper, features.general) {
            (true, _) => HOPPER[index],
            (false, false) => OTHERS[index],
            (false, true) => OTHERS_WITH_CONTEXT[index],
        };
        Self { head_dim, hopper, features, forward, dq, dkv }
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
        let numbers = numbers.map(|(name, number)| format!("#define {name} {number}\n"));
        numbers.concat() + &self.features.defines()
    }

    /// Launch configurations of forward, dq, and dk with dv, for a number of distances of a head with biases, and heads that share keys.
    pub(super) fn kernels(&self, distances: usize, group: usize) -> [KernelConfig; 3] {
        // Own tiles, two stages of keys and values (or queries and dy), statistics, barriers, and what a context needs.
        let kernel = |tile: TileConfig, own_tiles: usize, context: usize| {
            let rows = tile.warpgroups * WARPGROUP_ROWS;
            let (producers, barriers) = if self.hopper { (WARPGROUP, BARRIERS) } else { (0, 0) };
            let tiles = 2 * self.head_dim * (own_tiles * rows + 4 * tile.stage_rows);
            KernelConfig {
                rows,
                threads: (tile.warpgroups * WARPGROUP + producers) as u32,
                shared: (ALIGNMENT + tiles + barriers + context) as u32,
            }
        };
        let Self { forward, dq, dkv, features, .. } = *self;
        // `BiasTable` in flash_context.cu: the biases of heads, repeated at both ends.
        let biases = |heads: usize, columns: usize| {
            let entries = heads * (distances + 2 * (columns + 16));
            if features.bias { (4 * entries).next_multiple_of(16) } else { 0 }
        };
        // `DistanceSums`: a row of sums and a buffer of 8 rows of each warp.
        let warps = dq.warpgroups * WARPGROUP / 32;
        let sums = if features.bias {
            warps * ((4 * distances).next_multiple_of(16) + 32 * (dq.stage_rows + 8))
        } else {
            0
        };
        // Two f32 statistics per query, in two stages; `KeptBits`: words of 32 keys.
        let statistics = 16 * dkv.stage_rows;
        let words = if features.dropout { dkv.warpgroups * WARPGROUP_ROWS / 32 } else { 0 };
        let kept = 8 * dkv.stage_rows * words;
        [
            kernel(forward, 1, biases(1, forward.stage_rows)),
            kernel(dq, 2, biases(1, dq.stage_rows) + sums),
            kernel(dkv, 2, statistics + kept + biases(group, dkv.stage_rows)),
        ]
    }

    /// The configurations with the most shared memory.
    pub(super) fn largest_kernels(&self) -> [KernelConfig; 3] {
        self.kernels(MAX_DISTANCES, MAX_GROUP)
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
                let kernels = [Features::CAUSAL, Features::GENERAL, Features::ALL]
                    .map(|features| TileConfigs::new(head, hopper, features).largest_kernels());
                kernels.into_iter().flatten().map(|kernel| kernel.shared).max().unwrap()
            };
            assert!(most(true) <= 227 << 10, "{head}: {}", most(true));
            // An A100 has 163 KiB, smaller GPUs of its generation 99.
            assert!(most(false) <= if head > 128 { 163 << 10 } else { 99 << 10 }, "{head}: {}", most(false));
        }
    }

    #[test]
    fn tile_sizes_are_passed_as_macros() {
        let text = TileConfigs::new(128, true, Features::GENERAL).defines();
        for define in ["HEAD_DIM 128", "DKV_QUERIES 64", "GENERAL 1", "BIAS 0"] {
            assert!(text.contains(&format!("#define {define}\n")), "{text}");
        }
    }

    #[test]
    fn two_blocks_of_an_encoder_gradient_fit_on_a_hopper_multiprocessor() {
        // 228 KiB, of which every block takes 1 KiB more.
        let [_, dq, _] = TileConfigs::new(128, true, Features::ALL).kernels(257, 1);
        assert!(2 * (dq.shared + 1024) <= 228 << 10, "{}", dq.shared);
    }
}
