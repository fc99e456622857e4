//! The values that flow between ops.

/// A tensor of the graph, by its place in the table of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(pub(crate) u32);

impl Value {
    /// Its place in the table of values.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a value's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Numbers in the type of the run: bf16, fp16 or f32.
    Activation,
    /// Numbers in f32 whatever the run: statistics that a gradient reads.
    Statistic,
    /// Whole numbers of 4 bytes: tokens, labels, positions.
    Index,
}

/// A value's shape and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueInfo {
    /// Rows: tokens of a micro-batch, or what an op makes of them.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    /// What its elements are.
    pub kind: Kind,
}

impl ValueInfo {
    /// Elements in all.
    pub const fn elements(&self) -> u64 {
        self.rows * self.width
    }
}
