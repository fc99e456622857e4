//! Values: the tensors between ops.

/// A tensor of the graph: an index into its table of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value(pub(crate) u32);

impl Value {
    /// Its index in the table of values.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The kind of a value's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Numbers in the run's dtype: bf16, fp16 or f32.
    Activation,
    /// f32 at every run dtype: statistics that a gradient reads.
    Statistic,
    /// 32-bit integers: tokens, labels, positions.
    Index,
}

/// A value's shape and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueInfo {
    /// Rows: the tokens of a micro-batch, or 1.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
    /// The kind of its elements.
    pub kind: Kind,
}

impl ValueInfo {
    /// Number of elements.
    pub const fn elements(&self) -> u64 {
        self.rows * self.width
    }
}
