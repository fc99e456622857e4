//! The kernel list: every op that a device computes, over spans of its arenas.
//!
//! A [`Kernel`] carries its dimensions. Values that change between micro-batches or steps (tokens, sequence starts, the
//! learning rate, whether an update is applied) are read from device memory, so that a launch is built once and enqueued any
//! number of times.

mod attention_context;
mod distillation;
mod operands;

use zeroth_base::{ActivationFn, DType};

use crate::{
    AttentionDims, BalanceDims, EmbeddingDims, ExpertRowsDims, GatedRowsDims, GroupedLinearDims,
    HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, PositionBiasDims, RmsNormDims, RopeDims,
    RouteDims, StoreRowsDims,
};
use crate::{MOMENTS, MasterForm, Optimizer, ReportLayout, Tier};

pub use attention_context::{AttentionContext, AttentionDropout, BiasGrad};
pub use distillation::{Distillation, TeacherSpans};
pub use operands::Access;

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
    /// `table[h, d + max_distance]` (f32) = `w[bucket of d, h]` for the distances d from `-max_distance` to `max_distance`.
    PositionBias { dims: PositionBiasDims, w: Span, table: Span },
    /// Adds to dw `[buckets, heads]` (f32) the entries of dtable (f32) that share a bucket, in the order of their distances.
    PositionBiasBackward { dims: PositionBiasDims, dtable: Span, dw: Span },
    /// y = attention within each sequence; `lse` `[heads, rows]`, of the scores with their biases. Rows beyond the last sequence give
    /// zeros, and so do queries without a key.
    Attention {
        dims: AttentionDims,
        context: AttentionContext,
        q: Span,
        k: Span,
        v: Span,
        y: Span,
        lse: Span,
    },
    /// Writes dq, dk and dv, and the gradient of the biases where it has a destination. Rows beyond the last sequence get zeros.
    AttentionBackward {
        dims: AttentionDims,
        context: AttentionContext,
        q: Span,
        k: Span,
        v: Span,
        y: Span,
        lse: Span,
        dy: Span,
        dq: Span,
        dk: Span,
        dv: Span,
        dbias: Option<BiasGrad>,
    },
    /// Copies each row of x `[dims.rows, dims.width]` to row `end - 1` of `cache` `[dims.cached, dims.width]`, which has the row
    /// stride of x. `ranges` holds one [`CacheRange`] per row.
    StoreRows { dims: StoreRowsDims, ranges: Span, x: Span, cache: Span },
    /// y = attention of each row over the cached rows of its [`CacheRange`]: k and v are `[cached, kv_heads · head_dim]`. The query is
    /// the last row of its range: with `bias`, the distance of key j is j - (end - 1). Cross attention has no bias.
    CachedAttention {
        dims: AttentionDims,
        cached: usize,
        ranges: Span,
        bias: Option<Span>,
        q: Span,
        k: Span,
        v: Span,
        y: Span,
    },
    /// y = f(x), f the activation.
    Activation { activation: ActivationFn, x: Span, y: Span },
    /// dx = dy · f'(x).
    ActivationBackward { activation: ActivationFn, dy: Span, x: Span, dx: Span },
    /// y = factor · x, rounded once. Backward is the same kernel on dy.
    Scale { factor: f32, x: Span, y: Span },
    /// y = f(gate) · up, f the activation.
    GatedActivation { activation: ActivationFn, gate: Span, up: Span, y: Span },
    /// Writes dgate and dup.
    GatedActivationBackward {
        activation: ActivationFn,
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
    /// Routes each row to the `k` experts of its largest logits (ties: the lowest index), in descending order. `weights` `[rows, k]`
    /// (f32) are their probabilities by an f32 softmax, divided by their sum where `normalized`. A slot is a pair of a row and one of
    /// its experts, numbered row · k + j; slots are sorted by expert, stably. i32 results: `experts` `[rows, k]`; `order` `[slots]`, the
    /// slot at each sorted place; `places` `[rows, k]`, its inverse; `offsets` `[experts + 1]`, the first place of each expert, then the
    /// number of routed slots. Rows from the end of the last sequence of `starts` on are padding: weight 0, expert `experts`, sorted
    /// last. Without `starts` every row is routed. A NaN logit is smaller than any other.
    ///
    /// Rows of expert activations stand in sorted order. No kernel reads or writes those of padding.
    Route {
        dims: RouteDims,
        starts: Option<Span>,
        logits: Span,
        experts: Span,
        weights: Span,
        order: Span,
        places: Span,
        offsets: Span,
        balance: Option<Balance>,
    },
    /// dlogits of `dweights` `[rows, k]` (f32) and of `slopes` `[2, experts]` (f32), the gradient of [`Balance::after`], of which only
    /// the second row counts. An absent gradient is zero; padding gives zeros.
    RouteBackward {
        dims: RouteDims,
        starts: Option<Span>,
        logits: Span,
        experts: Span,
        weights: Span,
        dweights: Option<Span>,
        slopes: Option<Span>,
        dlogits: Span,
    },
    /// `y[p]` = `x[order[p] / k]`: x `[rows, width]`, y `[slots, width]`.
    GatherRows { dims: ExpertRowsDims, order: Span, offsets: Span, x: Span, y: Span },
    /// `y[t]` = the sum over j of `x[places[t, j]]`, in f32, in the order of j, rounded once: x `[slots, width]`, y `[rows, width]`.
    /// Padding gives zeros.
    CombineRows { dims: ExpertRowsDims, places: Span, offsets: Span, x: Span, y: Span },
    /// `y[p]` = `x[p]` · `w[e]`ᵀ for the rows p of each expert e: w `[experts, outputs, inputs]`.
    GroupedLinear { dims: GroupedLinearDims, offsets: Span, x: Span, w: Span, y: Span },
    /// Adds `scale` · `x[p]` · `w[e]`ᵀ to `y[p]`, in f32 and with one rounding.
    GroupedLinearAdd { dims: GroupedLinearDims, scale: f32, offsets: Span, x: Span, w: Span, y: Span },
    /// `dx[p]` = `scale` · `dy[p]` · `w[e]`, plus the old `dx[p]` where `add` (one rounding).
    GroupedLinearDx {
        dims: GroupedLinearDims,
        scale: f32,
        offsets: Span,
        dy: Span,
        w: Span,
        dx: Span,
        add: bool,
    },
    /// Stores `scale` · dyᵀ · x over the rows of each expert e in `dw[e]` `[outputs, inputs]`: zeros of an expert without rows.
    GroupedLinearDw {
        dims: GroupedLinearDims,
        scale: f32,
        offsets: Span,
        dy: Span,
        x: Span,
        dw: Span,
        store: GradStore,
    },
    /// `y[p]` = f(gate) · up · `weights[order[p]]`, f the activation, rounded once. `gate_up` is `[slots, 2 · width]`.
    GatedRows {
        activation: ActivationFn,
        dims: GatedRowsDims,
        order: Span,
        offsets: Span,
        weights: Span,
        gate_up: Span,
        y: Span,
    },
    /// Writes dgate_up, and dweights `[rows, k]` (f32; 0 of padding) where it has a destination.
    GatedRowsBackward {
        activation: ActivationFn,
        dims: GatedRowsDims,
        order: Span,
        offsets: Span,
        weights: Span,
        gate_up: Span,
        dy: Span,
        dgate_up: Span,
        dweights: Option<Span>,
    },
    /// Adds n · experts · Σ f · P to `loss`, an f64: f and P are the two rows of `balance` ([`Balance::after`] of the last layer) divided
    /// by layers · the rows that are no padding, n the number of rows with a label (≥ 0).
    BalanceLoss { dims: BalanceDims, starts: Span, balance: Span, labels: Span, loss: Span },
    /// `BalanceLoss` with its gradient: writes `slopes` `[2, experts]` (f32), zeros and then n · experts · f / (layers · rows), times
    /// `loss_weight` and the loss scale as in `HeadLossBackward`.
    BalanceLossBackward {
        dims: BalanceDims,
        starts: Span,
        balance: Span,
        labels: Span,
        loss: Span,
        loss_weight: Span,
        control: Span,
        slopes: Span,
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
    /// `HeadLossBackward` with a teacher: adds the sums over the rows with a label (≥ 0) of the cross-entropy and of the divergence from
    /// the teacher to `losses`, an f64 each. Gradients are those of both, each times its weight of `loss_weights` and the loss scale.
    /// Rows are computed in slices ([`HeadLossDims::distill_slice_rows`]).
    DistillLossBackward {
        dims: HeadLossDims,
        distillation: Distillation,
        teacher: TeacherSpans,
        x: Span,
        w: Span,
        labels: Span,
        losses: [Span; 2],
        loss_weights: [Span; 2],
        control: Span,
        dx: Option<Span>,
        dw: Option<HeadLossDw>,
    },
    /// The `k` largest of each row of x · wᵀ, descending, the lowest id first among equals: `ids` `[rows, k]` (i32) and `log_probs`
    /// `[rows, k]` (f32), the log-softmax of the row over `temperature`. A row with a NaN or an infinite sum gives the ids from 0 on,
    /// and NaN.
    TopLogProbs {
        dims: HeadLossDims,
        k: usize,
        temperature: f32,
        x: Span,
        w: Span,
        ids: Span,
        log_probs: Span,
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

/// What an auxiliary loss knows of the routing: `[2, experts]` f32, the tokens of each expert and the sum of its probabilities over
/// the rows that are no padding, both summed over layers so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Balance {
    /// The sums of the layers before; absent at the first.
    pub before: Option<Span>,
    /// Those with this layer.
    pub after: Span,
}

/// Where and how the head stores the gradient of its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadLossDw {
    /// The gradient `[vocab, hidden]`.
    pub to: Span,
    /// How it is stored. [`GradStore::Round`] needs [`HeadLossDims::is_one_slice`], or [`HeadLossDims::is_one_distill_slice`].
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
