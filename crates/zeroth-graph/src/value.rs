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

/// The number of a value's rows. That of a stream differs between micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rows {
    /// One for each token of a stream.
    Stream(usize),
    /// So many for each token of a stream.
    Times(usize, u64),
    /// Always as many.
    Fixed(u64),
}

impl Rows {
    /// The number, given that of every stream.
    pub fn count(self, streams: &[u64]) -> u64 {
        match self {
            Self::Stream(stream) => streams[stream],
            Self::Times(stream, factor) => factor * streams[stream],
            Self::Fixed(rows) => rows,
        }
    }

    /// So many rows for each of these.
    #[must_use]
    pub const fn times(self, factor: u64) -> Self {
        match (self, factor) {
            (rows, 1) => rows,
            (Self::Stream(stream), factor) => Self::Times(stream, factor),
            (Self::Times(stream, rows), factor) => Self::Times(stream, rows * factor),
            (Self::Fixed(rows), factor) => Self::Fixed(rows * factor),
        }
    }
}

/// A value's shape and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueInfo {
    /// Rows.
    pub rows: Rows,
    /// Elements of a row.
    pub width: u64,
    /// The kind of its elements.
    pub kind: Kind,
}
