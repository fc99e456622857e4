//! What a device can be asked to compute: one list of kernels for every device, each over places in its arenas.
//!
//! A [`Kernel`] says what and over which [`Span`]s; how is the device's affair. Sizes stand in the kernel, so that nothing
//! is decided when it runs. What differs from one micro-batch or step to the next (tokens, where sequences begin, the
//! learning rate, whether a step counts) is read from memory, never from the launch: a launch can be made once and
//! enqueued a million times.

use zeroth_base::DType;

use crate::{
    AttentionDims, EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, RmsNormDims,
    RopeDims,
};
use crate::{MasterForm, Recipe};

/// A kind of memory: one arena each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// What kernels compute in.
    Device,
    /// The machine's memory beside it.
    Host,
}

/// A place in an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// Which arena.
    pub tier: Tier,
    /// Its first byte.
    pub at: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Span {
    /// A place in the device's arena.
    pub const fn device(at: u64, bytes: u64) -> Self {
        Self { tier: Tier::Device, at, bytes }
    }

    /// The byte behind its last.
    pub const fn end(self) -> u64 {
        self.at + self.bytes
    }

    /// `count` elements of `size` bytes from element `first` on.
    ///
    /// # Panics
    /// When they do not lie within this place: a mistake of the program.
    #[must_use]
    pub fn part(self, first: u64, count: u64, size: u64) -> Self {
        let part = Self { tier: self.tier, at: self.at + first * size, bytes: count * size };
        assert!(part.end() <= self.end(), "{part:?} is not within {self:?}");
        part
    }

    /// Whether two places share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.tier as u8 == other.tier as u8 && self.at < other.end() && other.at < self.end()
    }
}

/// The token that a row holds.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct RowKey {
    /// The sample in the data.
    pub sample: u64,
    /// The token's place in the sample.
    pub position: u32,
    /// The pass over the data.
    pub epoch: u32,
}

/// A kernel with what every kernel has: the type that activations and weights are stored in, and scratch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// What is computed.
    pub kernel: Kernel,
    /// The type of activations, their gradients, and weights as computed with.
    pub dtype: DType,
    /// At least as many bytes as the device says it needs for this kernel; what they hold means nothing.
    pub scratch: Span,
}

/// What is computed. Operands named `x`, `y`, `w`, `dx`, … are in the launch's type, statistics and gradients of weights
/// in f32 (but see [`GradStore`]), `ids`, `labels` and `positions` in i32. Rows of activations and their gradients are
/// [`zeroth_program::Target::row_stride`] apart. "Adds" means in f32 to what is there.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "operands have the names of the formulas in their variant's own sentence")]
pub enum Kernel {
    /// `y[i] = table[ids[i]]`, `[rows, width]`; an id outside of the table gives zeros.
    Embedding { dims: EmbeddingDims, rows: usize, ids: Span, table: Span, y: Span },
    /// Adds `dy[i]` to `dtable[ids[i]]`, or to the rows of it that wait for that: these are then rounded to their places.
    EmbeddingBackward {
        dims: EmbeddingDims,
        rows: usize,
        ids: Span,
        dy: Span,
        dtable: Span,
        tied_rows: Option<TiedRowsIn>,
    },
    /// `y[rows, outputs]` = x · wᵀ + bias.
    Linear { dims: LinearDims, x: Span, w: Span, bias: Option<Span>, y: Span },
    /// dx = dy · w, or added to what dx holds (one rounding).
    LinearDx { dims: LinearDims, dy: Span, w: Span, dx: Span, add: bool },
    /// dyᵀ · x lands in dw `[outputs, inputs]`.
    LinearDw { dims: LinearDims, dy: Span, x: Span, dw: Span, store: GradStore },
    /// Adds the column sums of dy to db `[outputs]`.
    LinearDb { dims: LinearDims, dy: Span, db: Span },
    /// y = x · rstd · w by rows of `dims.width`; writes rstd `[rows]`.
    RmsNorm { dims: RmsNormDims, x: Span, w: Span, y: Span, rstd: Span },
    /// h = residual + x, then y and rstd as `RmsNorm` of h.
    AddRmsNorm { dims: RmsNormDims, x: Span, residual: Span, w: Span, h: Span, y: Span, rstd: Span },
    /// dh = the norm's gradient + `residual`; adds to dw `[width]`.
    RmsNormBackward {
        dims: RmsNormDims,
        dy: Span,
        h: Span,
        rstd: Span,
        w: Span,
        residual: Option<Span>,
        dh: Span,
        dw: Span,
    },
    /// y = x turned by the angles whose cosines and sines `[rows, rotated / 2]` (f32) are given; backwards where `back`.
    Rope { dims: RopeDims, cos: Span, sin: Span, x: Span, y: Span, back: bool },
    /// y = the norm of each head of x · w as `RmsNorm`, then turned as `Rope`; writes rstd `[rows, heads]`. What is normed is
    /// rounded before it turns.
    HeadNormRope { dims: HeadNormRopeDims, x: Span, w: Span, cos: Span, sin: Span, y: Span, rstd: Span },
    /// dh = the norm's gradient of dy turned back, which is rounded before; adds to dw `[head_dim]`.
    HeadNormRopeBackward {
        dims: HeadNormRopeDims,
        dy: Span,
        h: Span,
        rstd: Span,
        w: Span,
        cos: Span,
        sin: Span,
        dh: Span,
        dw: Span,
    },
    /// y = causal attention within each sequence; `lse` `[heads, rows]`. `starts` holds u32: the number n of entries, then
    /// n entries: where each sequence begins and, last, where the last one ends. Rows beyond it give zeros.
    Attention { dims: AttentionDims, starts: Span, q: Span, k: Span, v: Span, y: Span, lse: Span },
    /// Writes dq, dk and dv.
    AttentionBackward {
        dims: AttentionDims,
        starts: Span,
        q: Span,
        k: Span,
        v: Span,
        y: Span,
        lse: Span,
        dy: Span,
        dq: Span,
        dk: Span,
        dv: Span,
    },
    /// y = silu(gate) · up.
    SwiGlu { gate: Span, up: Span, y: Span },
    /// Writes dgate and dup.
    SwiGluBackward { dy: Span, gate: Span, up: Span, dgate: Span, dup: Span },
    /// y = x · mask / (1 - probability). `keys` holds a [`crate::RowKey`] a row; backward is the same of dy.
    Dropout { probability: f32, seed: u64, op: u32, width: usize, keys: Span, x: Span, y: Span },
    /// Adds the sum of the losses of trained tokens (label not negative) to `loss`, an f64.
    HeadLoss { dims: HeadLossDims, x: Span, w: Span, labels: Span, loss: Span },
    /// As `HeadLoss`; writes dx, and the gradient of w lands in dw. Both are times [`crate::StepInput::loss_weight`] ·
    /// [`crate::Control::loss_scale`]. It is rounded only where [`HeadLossDims::is_one_slice`] holds; rows of it that are
    /// `own` wait for an `EmbeddingBackward`, which then writes them to dw and looks at them.
    HeadLossBackward {
        dims: HeadLossDims,
        x: Span,
        w: Span,
        labels: Span,
        loss: Span,
        input: Span,
        control: Span,
        dx: Span,
        dw: Span,
        store: GradStore,
        tied_rows: Option<TiedRowsOut>,
    },
    /// `logits` `[sequences, vocab]` (f32) = the last row of x of each sequence · wᵀ. `starts` is a table as `Attention` has
    /// it; a sequence that it lacks or that is empty gives zeros.
    Logits { dims: LogitsDims, starts: Span, x: Span, w: Span, logits: Span },
    /// y = a + b, rounded once.
    Sum { a: Span, b: Span, y: Span },
    /// All bytes become 0.
    Zero { to: Span },
    /// Element by element from one type to another, rounded to the nearest, ties to even. `found_inf`, a u64, becomes 1 where
    /// a result is not finite, and is left alone where all are.
    Convert { from: Span, from_type: DType, to: Span, to_type: DType, found_inf: Option<Span> },
    /// `found_inf`, a u64, becomes 1 where a value is not finite, and is left alone where all are.
    CheckFinite { values: Span, value_type: DType, found_inf: Span },
    /// `parts` holds `ranks` parts of the length of `to` end to end, in `from_type`; `to` becomes their sum, added in
    /// f32 in rank order and rounded once, or has the sum added to it.
    SumRanks { ranks: usize, parts: Span, from_type: DType, to: Span, to_type: DType, add: bool },
    /// `sum` (a [`crate::ExactSum`]) becomes the exact sum of the sums of squares of the blocks of `values`.
    Squares { values: Span, value_type: DType, sum: Span },
    /// What a step's outcome decides: see [`crate::Control`]. `reports` holds for each rank, end to end, a
    /// [`crate::Report`], `flats` exact sums, and `flats` u64 that are not 0 where the rank's own gradient of a flat was not
    /// finite; `record` receives a [`crate::Record`] and `flats` norms (f64).
    Control {
        ranks: usize,
        flats: usize,
        recipe: Span,
        input: Span,
        reports: Span,
        control: Span,
        record: Span,
    },
    /// An optimizer's step with the numbers of `control` for a `group` of parameters; where the step does not count,
    /// master weights and moments stay, and `weights` are written from the master weights all the same. `weights` are in
    /// the launch's type, absent where master weights are computed with. Beside weights in bf16 master weights are
    /// [`crate::settled`], and may be the rest of them, which is read and written with the weights. Moments that an optimizer does not have are
    /// absent; they are in `moment_type`, f32 or bf16. Arithmetic is in f32; a moment in bf16 is rounded once, when it is
    /// stored: by chance where `rounding` is given, else to the nearest.
    Optimize {
        optimizer: Optimizer,
        group: usize,
        control: Span,
        grads: Span,
        grad_type: DType,
        master: Span,
        master_form: MasterForm,
        first: Option<Span>,
        second: Option<Span>,
        moment_type: DType,
        rounding: Option<Rounding>,
        weights: Option<Span>,
    },
}

/// How a product meets the place of a gradient of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradStore {
    /// It is added, in f32.
    Add,
    /// It takes the place, in f32. The bits are those of what is added to zeros.
    Write,
    /// As `Write`, rounded to the launch's type or to f32. `found_inf`, a u64, becomes 1 where a result is not finite, and is left alone where all
    /// are.
    Round {
        /// The type of the place.
        to: DType,
        /// Where that is noted.
        found_inf: Span,
    },
}

impl GradStore {
    /// Where it notes results that are not finite.
    const fn found_inf(self) -> Option<Span> {
        match self {
            Self::Add | Self::Write => None,
            Self::Round { found_inf, .. } => Some(found_inf),
        }
    }
}

/// The tokens whose rows of a table's gradient the head does not complete, and where it leaves these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedRowsOut {
    /// The tokens, as `EmbeddingBackward` has them.
    pub ids: Span,
    /// `[rows, hidden]` in f32: for each token what its row has.
    pub rows: Span,
}

/// Rows of a table's gradient that the head left, in the launch's type once they are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedRowsIn {
    /// As [`TiedRowsOut::rows`].
    pub rows: Span,
    /// A u64 that becomes 1 where a result is not finite, and is left alone where all are.
    pub found_inf: Span,
}

/// How weights are changed by gradients. The kernels of cards know them by these numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Optimizer {
    /// Adam with decoupled weight decay.
    AdamW = 0,
    /// Adam with weight decay added to the gradient.
    Adam = 1,
    /// Stochastic gradient descent. The first moment is its velocity; without momentum it may be absent.
    Sgd = 2,
    /// The sign of a moment, of Chen and others, "Symbolic discovery of optimization algorithms" (2023). The sign of 0 is 0
    /// as there; DeepSpeed's kernels move such a weight, up on a card and down on the host.
    Lion = 3,
    /// Gradients over the root of the sum of their squares.
    Adagrad = 4,
}

impl Optimizer {
    /// Its name, as configs write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW => "AdamW",
            Self::Adam => "Adam",
            Self::Sgd => "SGD",
            Self::Lion => "Lion",
            Self::Adagrad => "Adagrad",
        }
    }

    /// Whether it keeps first moments, and second ones.
    pub const fn moments(self) -> [bool; 2] {
        match self {
            Self::AdamW | Self::Adam => [true, true],
            Self::Sgd | Self::Lion => [true, false],
            Self::Adagrad => [false, true],
        }
    }

    /// What every second moment is before the first step. First moments are 0.
    pub fn initial_second(self, recipe: &Recipe) -> f32 {
        match self {
            Self::Adagrad => recipe.initial_accumulator as f32,
            _ => 0.0,
        }
    }
}

/// Chance for moments in 16 bits: each element rounds up or down by a number that follows from these, the applied step
/// and its own place, whatever rank holds it. The numbers are Philox4x32's of key `seed` and counter (step, flat, place
/// low, place high): the upper half of the first word is for the first moment, of the second word for the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounding {
    /// The run's seed.
    pub seed: u64,
    /// The flat.
    pub flat: u32,
    /// The place in the flat of the first element given.
    pub first: u64,
}

/// How a kernel touches an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It reads.
    Read,
    /// It writes, or reads and writes.
    Write,
}

impl Kernel {
    /// Its name in messages and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embedding { .. } => "embedding",
            Self::EmbeddingBackward { .. } => "embedding_backward",
            Self::Linear { .. } => "linear",
            Self::LinearDx { .. } => "linear_dx",
            Self::LinearDw { .. } => "linear_dw",
            Self::LinearDb { .. } => "linear_db",
            Self::RmsNorm { .. } => "rms_norm",
            Self::AddRmsNorm { .. } => "add_rms_norm",
            Self::RmsNormBackward { .. } => "rms_norm_backward",
            Self::Rope { .. } => "rope",
            Self::HeadNormRope { .. } => "head_norm_rope",
            Self::HeadNormRopeBackward { .. } => "head_norm_rope_backward",
            Self::Attention { .. } => "attention",
            Self::AttentionBackward { .. } => "attention_backward",
            Self::SwiGlu { .. } => "swiglu",
            Self::SwiGluBackward { .. } => "swiglu_backward",
            Self::Dropout { .. } => "dropout",
            Self::HeadLoss { .. } => "head_loss",
            Self::HeadLossBackward { .. } => "head_loss_backward",
            Self::Logits { .. } => "logits",
            Self::Sum { .. } => "sum",
            Self::Zero { .. } => "zero",
            Self::Convert { .. } => "convert",
            Self::CheckFinite { .. } => "check_finite",
            Self::SumRanks { .. } => "sum_ranks",
            Self::Squares { .. } => "squares",
            Self::Control { .. } => "control",
            Self::Optimize { .. } => "optimize",
        }
    }

    /// Calls `visit` with every operand and how it is touched.
    pub fn operands(&self, mut visit: impl FnMut(Span, Access)) {
        let (mut reads, mut writes): ([Option<Span>; 8], [Option<Span>; 5]) = ([None; 8], [None; 5]);
        macro_rules! touch {
            ([$($read:expr),*], [$($write:expr),*]) => {{
                for (place, span) in reads.iter_mut().zip([$(Option::<Span>::from($read)),*]) { *place = span; }
                for (place, span) in writes.iter_mut().zip([$(Option::<Span>::from($write)),*]) { *place = span; }
            }};
        }
        match *self {
            Self::Embedding { ids, table, y, .. } => touch!([ids, table], [y]),
            Self::EmbeddingBackward { ids, dy, dtable, tied_rows, .. } => {
                let [rows, found_inf] =
                    [tied_rows.map(|tied| tied.rows), tied_rows.map(|tied| tied.found_inf)];
                touch!([ids, dy], [dtable, rows, found_inf]);
            }
            Self::Linear { x, w, bias, y, .. } => touch!([x, w, bias], [y]),
            Self::LinearDx { dy, w, dx, .. } => touch!([dy, w], [dx]),
            Self::LinearDw { dy, x, dw, store, .. } => touch!([dy, x], [dw, store.found_inf()]),
            Self::LinearDb { dy, db, .. } => touch!([dy], [db]),
            Self::RmsNorm { x, w, y, rstd, .. } => touch!([x, w], [y, rstd]),
            Self::AddRmsNorm { x, residual, w, h, y, rstd, .. } => touch!([x, residual, w], [h, y, rstd]),
            Self::RmsNormBackward { dy, h, rstd, w, residual, dh, dw, .. } => {
                touch!([dy, h, rstd, w, residual], [dh, dw]);
            }
            Self::Rope { cos, sin, x, y, .. } => touch!([cos, sin, x], [y]),
            Self::HeadNormRope { x, w, cos, sin, y, rstd, .. } => touch!([x, w, cos, sin], [y, rstd]),
            Self::HeadNormRopeBackward { dy, h, rstd, w, cos, sin, dh, dw, .. } => {
                touch!([dy, h, rstd, w, cos, sin], [dh, dw]);
            }
            Self::Attention { starts, q, k, v, y, lse, .. } => touch!([starts, q, k, v], [y, lse]),
            Self::AttentionBackward { starts, q, k, v, y, lse, dy, dq, dk, dv, .. } => {
                touch!([starts, q, k, v, y, lse, dy], [dq, dk, dv]);
            }
            Self::SwiGlu { gate, up, y } => touch!([gate, up], [y]),
            Self::SwiGluBackward { dy, gate, up, dgate, dup } => touch!([dy, gate, up], [dgate, dup]),
            Self::Dropout { keys, x, y, .. } => touch!([keys, x], [y]),
            Self::HeadLoss { x, w, labels, loss, .. } => touch!([x, w, labels], [loss]),
            Self::HeadLossBackward { x, w, labels, loss, input, control, dx, dw, store, tied_rows, .. } => {
                let [ids, rows] = [tied_rows.map(|tied| tied.ids), tied_rows.map(|tied| tied.rows)];
                touch!([x, w, labels, input, control, ids], [loss, dx, dw, store.found_inf(), rows]);
            }
            Self::Logits { starts, x, w, logits, .. } => touch!([starts, x, w], [logits]),
            Self::Sum { a, b, y } => touch!([a, b], [y]),
            Self::Zero { to } => touch!([], [to]),
            Self::Convert { from, to, found_inf, .. } => touch!([from], [to, found_inf]),
            Self::CheckFinite { values, found_inf, .. } => touch!([values], [found_inf]),
            Self::SumRanks { parts, to, .. } => touch!([parts], [to]),
            Self::Squares { values, sum, .. } => touch!([values], [sum]),
            Self::Control { recipe, input, reports, control, record, .. } => {
                touch!([recipe, input, reports], [control, record]);
            }
            Self::Optimize { control, grads, master, first, second, weights, .. } => {
                touch!([control, grads], [master, first, second, weights]);
            }
        }
        reads.into_iter().flatten().for_each(|span| visit(span, Access::Read));
        writes.into_iter().flatten().for_each(|span| visit(span, Access::Write));
    }
}
