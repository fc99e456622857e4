//! Limits of sizes in a `config.json`.

// Limits far beyond any model: within them no count overflows 64 bits and no table is larger than a few hundred MB.
pub(crate) const MAX_WIDTH: u64 = 1 << 20;
pub(crate) const MAX_VOCAB: u64 = 1 << 28;
pub(crate) const MAX_BLOCKS: u64 = 1 << 12;
pub(crate) const MAX_EXPERTS: u64 = 1 << 12;
pub(crate) const MAX_EXPERTS_OF_ALL_BLOCKS: u64 = 1 << 18;
pub(crate) const MAX_POSITIONS: u64 = 1 << 40;
/// Parameters of a model: their bytes in every type, on all ranks together, are counted in 64 bits.
pub const MAX_PARAMETERS: u64 = 1 << 46;
