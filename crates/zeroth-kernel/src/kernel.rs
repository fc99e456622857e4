//! The kernel list: every op that a device computes, over spans of its arenas.
//!
//! A [`Kernel`] carries its dimensions. Values that change between micro-batches or steps (tokens, sequence starts, the
//! learning rate, whether an update is applied) are read from device memory, so that a launch is built once and enqueued any
//! number of times.

use zeroth_base::{DType, GatedActivation};

use crate::{
    AttentionDims, EmbeddingDims, HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, RmsNormDims,
    RopeDims, StoreRowsDims,
};
use crate::{MOMENTS, MasterForm, Optimizer, ReportLayout, Tier};

/// A byte range of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// The arena.
    pub tier: Tier,
    /// Offset of the first byte.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Span {
    /// A range of the device arena.
    pub const fn device(at: u64, bytes: u64) -> Self {
        Self { tier: Tier::Device, at, bytes }
    }

    /// Offset of the first byte after the range.
    pub const fn end(self) -> u64 {
        self.at + self.bytes
    }

    /// The range of `count` elements of `size` bytes from element `first` on.
    ///
    /// # Panics
    /// When it is not within this range.
    #[must_use]
    pub fn part(self, first: u64, count: u64, size: u64) -> Self {
        let part = Self { tier: self.tier, at: self.at + first * size, bytes: count * size };
        assert!(part.end() <= self.end(), "{part:?} is not within {self:?}");
        part
    }

    /// Whether two ranges share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.tier as u8 == other.tier as u8 && self.at < other.end() && other.at < self.end()
    }
}

/// The identity of a row's token, from which dropout masks follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct RowKey {
    /// The sample in the dataset.
    pub sample: u64,
    /// The token's position in the sample.
    pub position: u32,
    /// The epoch.
    pub epoch: u32,
}

/// The cache rows of a token's sequence up to the token itself, whose keys and values are in row `end - 1`: what it attends
/// to, before a sliding window. Empty for padding, which is not stored and gives zeros.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct CacheRange {
    /// The row of the sequence's first token.
    pub first: u32,
    /// One past the row of this token.
    pub end: u32,
}

/// A kernel with its storage dtype and scratch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The op and its operands.
    pub kernel: Kernel,
    /// The dtype of activations, their gradients and compute weights.
    pub dtype: DType,
    /// Scratch of at least [`Device::scratch_bytes`](crate::Device::scratch_bytes); its contents do not matter.
    pub scratch: Span,
}

/// An op and its operands.
///
/// Operands `x`, `y`, `w`, `dx`, … have the launch's dtype; statistics and weight gradients are f32 (but see [`GradStore`]);
/// `ids` and `labels` are i32. Rows of activations and their gradients have the row strides of the dimensions, padding included. "Adds" means
/// accumulation in f32 into the operand. `found_inf` is a u64 that is set to 1 where a result is infinite or NaN, and is
/// otherwise unchanged.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "operands have the names of the formulas in their variant's own sentence")]
pub enum Kernel {
    /// `y[i] = table[ids[i]]`, `[rows, width]`; an id outside the table gives zeros.
    Embedding { dims: EmbeddingDims, rows: usize, ids: Span, table: Span, y: Span },
    /// Adds `dy[i]` to `dtable[ids[i]]`; or to the f32 `tied_rows` that the head has left, which are then rounded into dtable.
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
    /// Adds `scale` · x · wᵀ to `y[rows, outputs]`, in f32 and with one rounding: a low-rank adapter, whose base y already holds.
    LinearAdd { dims: LinearDims, scale: f32, x: Span, w: Span, y: Span },
    /// dx = `scale` · dy · w, plus the old dx where `add` (one rounding).
    LinearDx { dims: LinearDims, scale: f32, dy: Span, w: Span, dx: Span, add: bool },
    /// Stores `scale` · dyᵀ · x in dw `[outputs, inputs]`.
    LinearDw { dims: LinearDims, scale: f32, dy: Span, x: Span, dw: Span, store: GradStore },
    /// Adds the column sums of dy to db `[outputs]`.
    LinearDb { dims: LinearDims, dy: Span, db: Span },
    /// y = x · rstd · w for rows of `dims.width`; writes rstd `[rows]`.
    RmsNorm { dims: RmsNormDims, x: Span, w: Span, y: Span, rstd: Span },
    /// h = residual + x, then y and rstd of `RmsNorm` on h.
    AddRmsNorm { dims: RmsNormDims, x: Span, residual: Span, w: Span, h: Span, y: Span, rstd: Span },
    /// dh = the norm's gradient + `residual`; adds to dw `[width]`. A gradient without a destination is not computed.
    RmsNormBackward {
        dims: RmsNormDims,
        dy: Span,
        h: Span,
        rstd: Span,
        w: Span,
        residual: Option<Span>,
        dh: Option<Span>,
        dw: Option<Span>,
    },
    /// y = x rotated by the angles of cos and sin `[rows, rotated / 2]` (f32); by the negative angles where `back`.
    Rope { dims: RopeDims, cos: Span, sin: Span, x: Span, y: Span, back: bool },
    /// `RmsNorm` of each head of x, rounded, then `Rope`; writes rstd `[rows, heads]`.
    HeadNormRope { dims: HeadNormRopeDims, x: Span, w: Span, cos: Span, sin: Span, y: Span, rstd: Span },
    /// dh = the norm's gradient of dy rotated back and rounded; adds to dw `[head_dim]`. A gradient without a destination is
    /// not computed.
    HeadNormRopeBackward {
        dims: HeadNormRopeDims,
        dy: Span,
        h: Span,
        rstd: Span,
        w: Span,
        cos: Span,
        sin: Span,
        dh: Option<Span>,
        dw: Option<Span>,
    },
    /// y = causal attention within each sequence; `lse` `[heads, rows]`. `starts` holds u32: the number of entries, then the
    /// first row of each sequence and the end of the last (cu_seqlens). Rows beyond it give zeros.
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
    /// Copies each row of x `[dims.rows, dims.width]` to row `end - 1` of `cache` `[dims.cached, dims.width]`, which has the row
    /// stride of x. `ranges` holds one [`CacheRange`] per row.
    StoreRows { dims: StoreRowsDims, ranges: Span, x: Span, cache: Span },
    /// y = attention of each row over the cached rows of its [`CacheRange`]: k and v are `[cached, kv_heads · head_dim]`.
    CachedAttention { dims: AttentionDims, cached: usize, ranges: Span, q: Span, k: Span, v: Span, y: Span },
    /// y = f(gate) · up, f the activation.
    GatedActivation { activation: GatedActivation, gate: Span, up: Span, y: Span },
    /// Writes dgate and dup.
    GatedActivationBackward {
        activation: GatedActivation,
        dy: Span,
        gate: Span,
        up: Span,
        dgate: Span,
        dup: Span,
    },
    /// y = x · mask / (1 - probability). `keys` holds one [`RowKey`] per row. Backward is the same kernel on dy.
    Dropout {
        probability: f32,
        seed: u64,
        op: u32,
        width: usize,
        row_stride: usize,
        keys: Span,
        x: Span,
        y: Span,
    },
    /// Adds the sum of the losses of the tokens with a label (≥ 0) to `loss`, an f64.
    HeadLoss { dims: HeadLossDims, x: Span, w: Span, labels: Span, loss: Span },
    /// `HeadLoss` with gradients: writes dx and stores the gradient of w in dw, both times `loss_weight`, an f64 (see
    /// [`crate::StepInput::loss_weights`]), and [`crate::Control::loss_scale`]. A gradient without a destination is not computed.
    HeadLossBackward {
        dims: HeadLossDims,
        x: Span,
        w: Span,
        labels: Span,
        loss: Span,
        loss_weight: Span,
        control: Span,
        dx: Option<Span>,
        dw: Option<HeadLossDw>,
    },
    /// `logits` `[sequences, vocab]` (f32) = the last row of each sequence of x · wᵀ, with `starts` of `Attention`. A missing or
    /// empty sequence gives zeros.
    Logits { dims: LogitsDims, starts: Span, x: Span, w: Span, logits: Span },
    /// y = a + b, rounded once.
    Sum { a: Span, b: Span, y: Span },
    /// Sets all bytes to 0.
    Zero { to: Span },
    /// Converts elements from one dtype to another, rounded to nearest even.
    Convert { from: Span, from_type: DType, to: Span, to_type: DType, found_inf: Option<Span> },
    /// y = the elements of the [`crate::Nf4Record`]s `records`, of which the last may have more than y; rounded to nearest even.
    Unpack { records: Span, y: Span },
    /// Sets `found_inf` where a value is infinite or NaN.
    CheckFinite { values: Span, value_type: DType, found_inf: Span },
    /// to = the sum of `ranks` contiguous `parts`, added in f32 in rank order and rounded once; plus the old value where `add`.
    SumRanks { ranks: usize, parts: Span, from_type: DType, to: Span, to_type: DType, add: bool },
    /// `sum`, a [`crate::ExactSum`], becomes the exact sum of the blocks' sums of squares.
    Squares { values: Span, value_type: DType, sum: Span },
    /// Adds the rows of each expert (the differences of `offsets` i32 `[experts + 1]`) to `counts` u32 `[experts + 1]`, and to its
    /// last the number of `weights` f32 `[slots]` that are infinite or NaN: a router's load, for the step's record.
    CountTokens { experts: usize, slots: usize, offsets: Span, weights: Span, counts: Span },
    /// Gradient norm, clipping, loss scaling and the optimizer's scalars of a step: see [`crate::Control`]. `reports` holds a
    /// report of each rank, in order; `record` receives a [`crate::Record`], the parts of the loss, the norms of the flats and the counts.
    Control {
        ranks: usize,
        layout: ReportLayout,
        recipe: Span,
        input: Span,
        reports: Span,
        control: Span,
        record: Span,
    },
    /// An optimizer step with the scalars that `control` holds for a parameter `group`. Where the update is not applied, master
    /// weights and moments are unchanged and `weights` are still written from the master weights.
    ///
    /// `weights`, in the launch's dtype, are absent where the master weights are the compute weights. With bf16 weights the
    /// master weights are [`crate::canonical_master`] values, and may be stored as low-order bits ([`MasterForm`]). Moments are
    /// f32 or bf16 (`moment_type`), in the order of [`crate::Moment::ALL`], absent where the optimizer does not keep them. Arithmetic is in f32; a bf16 moment is rounded when it is
    /// stored, stochastically where `rounding` is given, else to nearest.
    Optimize {
        optimizer: Optimizer,
        group: usize,
        control: Span,
        grads: Span,
        grad_type: DType,
        master: Span,
        master_form: MasterForm,
        moments: [Option<Span>; MOMENTS],
        moment_type: DType,
        rounding: Option<Rounding>,
        weights: Option<Span>,
    },
}

/// How a weight gradient is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradStore {
    /// Added to the buffer, in f32.
    Add,
    /// Written in f32, with the bits of an addition to zero.
    Write,
    /// Written and rounded to the launch's dtype or f32.
    Round {
        /// The dtype of the buffer.
        to: DType,
        /// Set to 1 where a result is infinite or NaN.
        found_inf: Span,
    },
}

impl GradStore {
    const fn found_inf(self) -> Option<Span> {
        match self {
            Self::Add | Self::Write => None,
            Self::Round { found_inf, .. } => Some(found_inf),
        }
    }
}

/// Where and how the head stores the gradient of its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLossDw {
    /// The gradient `[vocab, hidden]`.
    pub to: Span,
    /// How it is stored. [`GradStore::Round`] needs [`HeadLossDims::is_one_slice`].
    pub store: GradStore,
    /// The rows of the micro-batch's own tokens, which are left to an `EmbeddingBackward` that completes, rounds and checks
    /// them.
    pub tied_rows: Option<TiedRowsOut>,
}

/// Rows of a tied table's gradient that the head leaves in f32, because the embedding still adds to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedRowsOut {
    /// Token ids of the micro-batch, as in `EmbeddingBackward`.
    pub ids: Span,
    /// `[rows, hidden]` in f32: the head's gradient of every token's row.
    pub rows: Span,
}

/// The rows of [`TiedRowsOut`], which the embedding completes and rounds into the table's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedRowsIn {
    /// See [`TiedRowsOut::rows`].
    pub rows: Span,
    /// Set to 1 where a result is infinite or NaN.
    pub found_inf: Span,
}

/// Stochastic rounding of bf16 moments. The random bits of an element follow from the seed, the applied step and its index,
/// whatever rank holds it: Philox4x32 with key `seed` and counter (step, flat, index low, index high). The high half of word n
/// is for moment n of [`crate::Moment::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounding {
    /// The run's seed.
    pub seed: u64,
    /// The flat buffer.
    pub flat: u32,
    /// The index in the flat buffer of the first element.
    pub first: u64,
}

/// How a kernel accesses an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Written, or read and written.
    Write,
}

impl Kernel {
    /// Whether rows of its activations have padding.
    pub const fn has_padded_rows(&self) -> bool {
        match self {
            Self::Embedding { dims, .. } | Self::EmbeddingBackward { dims, .. } => {
                dims.row_stride != dims.width
            }
            Self::Linear { dims, .. }
            | Self::LinearAdd { dims, .. }
            | Self::LinearDx { dims, .. }
            | Self::LinearDw { dims, .. }
            | Self::LinearDb { dims, .. } => dims.x_stride != dims.inputs || dims.y_stride != dims.outputs,
            Self::RmsNorm { dims, .. }
            | Self::AddRmsNorm { dims, .. }
            | Self::RmsNormBackward { dims, .. } => dims.row_stride != dims.width,
            Self::Rope { dims, .. } => dims.row_stride != dims.heads * dims.head_dim,
            Self::HeadNormRope { dims, .. } | Self::HeadNormRopeBackward { dims, .. } => {
                dims.rope.row_stride != dims.rope.heads * dims.rope.head_dim
            }
            Self::Attention { dims, .. }
            | Self::AttentionBackward { dims, .. }
            | Self::CachedAttention { dims, .. } => {
                dims.q_stride != dims.q_width() || dims.kv_stride != dims.kv_width()
            }
            Self::StoreRows { dims, .. } => dims.row_stride != dims.width,
            Self::Dropout { width, row_stride, .. } => *row_stride != *width,
            Self::HeadLoss { dims, .. } | Self::HeadLossBackward { dims, .. } => {
                dims.row_stride != dims.hidden
            }
            Self::Logits { dims, .. } => dims.row_stride != dims.hidden,
            // Element by element, or over flats.
            Self::GatedActivation { .. }
            | Self::GatedActivationBackward { .. }
            | Self::Sum { .. }
            | Self::Zero { .. }
            | Self::Convert { .. }
            | Self::Unpack { .. }
            | Self::CheckFinite { .. }
            | Self::SumRanks { .. }
            | Self::Squares { .. }
            | Self::CountTokens { .. }
            | Self::Control { .. }
            | Self::Optimize { .. } => false,
        }
    }

    /// Its name in messages and traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embedding { .. } => "embedding",
            Self::EmbeddingBackward { .. } => "embedding_backward",
            Self::Linear { .. } => "linear",
            Self::LinearAdd { .. } => "linear_add",
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
            Self::StoreRows { .. } => "store_rows",
            Self::CachedAttention { .. } => "cached_attention",
            Self::GatedActivation { activation, .. } => activation.name(),
            Self::GatedActivationBackward { activation, .. } => activation.backward_name(),
            Self::Dropout { .. } => "dropout",
            Self::HeadLoss { .. } => "head_loss",
            Self::HeadLossBackward { .. } => "head_loss_backward",
            Self::Logits { .. } => "logits",
            Self::Sum { .. } => "sum",
            Self::Zero { .. } => "zero",
            Self::Convert { .. } => "convert",
            Self::Unpack { .. } => "unpack",
            Self::CheckFinite { .. } => "check_finite",
            Self::SumRanks { .. } => "sum_ranks",
            Self::Squares { .. } => "squares",
            Self::CountTokens { .. } => "count_tokens",
            Self::Control { .. } => "control",
            Self::Optimize { .. } => "optimize",
        }
    }

    /// Calls `visit` with every operand and its access.
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
            Self::LinearAdd { x, w, y, .. } => touch!([x, w], [y]),
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
            Self::StoreRows { ranges, x, cache, .. } => touch!([ranges, x], [cache]),
            Self::CachedAttention { ranges, q, k, v, y, .. } => touch!([ranges, q, k, v], [y]),
            Self::GatedActivation { gate, up, y, .. } => touch!([gate, up], [y]),
            Self::GatedActivationBackward { dy, gate, up, dgate, dup, .. } => {
                touch!([dy, gate, up], [dgate, dup]);
            }
            Self::Dropout { keys, x, y, .. } => touch!([keys, x], [y]),
            Self::HeadLoss { x, w, labels, loss, .. } => touch!([x, w, labels], [loss]),
            Self::HeadLossBackward { x, w, labels, loss, loss_weight, control, dx, dw, .. } => {
                let tied_rows = dw.and_then(|dw| dw.tied_rows);
                let [ids, rows] = [tied_rows.map(|tied| tied.ids), tied_rows.map(|tied| tied.rows)];
                let (to, found_inf) = (dw.map(|dw| dw.to), dw.and_then(|dw| dw.store.found_inf()));
                touch!([x, w, labels, loss_weight, control, ids], [loss, dx, to, found_inf, rows]);
            }
            Self::Logits { starts, x, w, logits, .. } => touch!([starts, x, w], [logits]),
            Self::Sum { a, b, y } => touch!([a, b], [y]),
            Self::Zero { to } => touch!([], [to]),
            Self::Convert { from, to, found_inf, .. } => touch!([from], [to, found_inf]),
            Self::Unpack { records, y } => touch!([records], [y]),
            Self::CheckFinite { values, found_inf, .. } => touch!([values], [found_inf]),
            Self::SumRanks { parts, to, .. } => touch!([parts], [to]),
            Self::Squares { values, sum, .. } => touch!([values], [sum]),
            Self::CountTokens { offsets, weights, counts, .. } => touch!([offsets, weights], [counts]),
            Self::Control { recipe, input, reports, control, record, .. } => {
                touch!([recipe, input, reports], [control, record]);
            }
            Self::Optimize { control, grads, master, moments: [first, second, third], weights, .. } => {
                touch!([control, grads], [master, first, second, third, weights]);
            }
        }
        reads.into_iter().flatten().for_each(|span| visit(span, Access::Read));
        writes.into_iter().flatten().for_each(|span| visit(span, Access::Write));
    }
}
