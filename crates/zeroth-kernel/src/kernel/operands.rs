//! The kernels, one row each: name, operands with their access, and what devices check before a launch.
//!
//! Adding a row makes every device fail to compile that does not implement it.

use zeroth_base::{ActivationFn, DType};

use super::access::Operand;
use super::{
    Access, AttentionContext, Balance, BiasGrad, DivergenceSpec, GradStore, HeadLossDw, Rounding, Span,
    TeacherSpans, TiedRowsIn,
};
use crate::{
    AttentionDims, BalanceDims, EmbeddingDims, ExpertRowsDims, GatedRowsDims, GroupedLinearDims,
    HeadLossDims, HeadNormRopeDims, LinearDims, LogitsDims, MOMENTS, MasterForm, Optimizer, PositionBiasDims,
    ReportLayout, RmsNormDims, RopeDims, RouteDims, StoreRowsDims,
};

/// Makes the enum, a struct a kernel and their lists of the rows: `Kernel (name) { values } reads { operands } writes { operands }`,
/// then whether every element is touched once, so that a result may have exactly the span of an operand that is read, and
/// whether rows of activations have padding.
macro_rules! kernels {
    (($dollar:tt) $(
        $(#[$doc:meta])*
        $Kernel:ident ($name:expr) { $($value:ident: $Value:ty),* }
        reads { $($read:ident: $Read:ty),* } writes { $($write:ident: $Write:ty),* }
        in_place: $in_place:literal, padded: $padded:expr;
    )*) => {
        /// An op and its operands.
        ///
        /// Operands `x`, `y`, `w`, `dx`, … have the launch's dtype; statistics and weight gradients are f32 (but see [`GradStore`]);
        /// `ids` and `labels` are i32. Rows of activations and their gradients have the row strides of the dimensions, padding included. "Adds" means
        /// accumulation in f32 into the operand. `found_inf` is a u64 that is set to 1 where a result is infinite or NaN, and is
        /// otherwise unchanged.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs, reason = "operands have the names of the formulas in their variant's own sentence")]
        pub enum Kernel {
            $($(#[$doc])* $Kernel { $($value: $Value,)* $($read: $Read,)* $($write: $Write,)* },)*
        }

        $(
            /// The operands of the kernel of this name.
            #[derive(Debug, Clone, Copy)]
            #[allow(missing_docs, reason = "the row says what they are")]
            pub struct $Kernel { $(pub $value: $Value,)* $(pub $read: $Read,)* $(pub $write: $Write,)* }
        )*

        /// Evaluates an expression with the operands of a kernel, a struct of [`operands`](crate::operands): a device
        /// implements a trait for each of them.
        #[macro_export]
        macro_rules! with_operands {
            ($dollar kernel:expr, $dollar operands:ident => $dollar body:expr) => {
                match $dollar kernel {
                    $($dollar crate::Kernel::$Kernel { $($value,)* $($read,)* $($write,)* } => {
                        let $dollar operands =
                            $dollar crate::operands::$Kernel { $($value,)* $($read,)* $($write,)* };
                        $dollar body
                    })*
                }
            };
        }

        #[allow(unused_variables, reason = "a row names the fields that it needs")]
        impl Kernel {
            /// Its name in messages and traces.
            pub const fn name(&self) -> &'static str {
                match *self {
                    $(Self::$Kernel { $($value,)* $($read,)* $($write,)* } => $name,)*
                }
            }

            /// Calls `visit` with every operand and its access.
            pub fn operands(&self, mut visit: impl FnMut(Span, Access)) {
                match *self {
                    $(Self::$Kernel { $($value,)* $($read,)* $($write,)* } => {
                        $($read.visit(Access::Read, &mut visit);)*
                        $($write.visit(Access::Write, &mut visit);)*
                    })*
                }
            }

            /// Whether a result may have exactly the span of an operand that is read.
            pub const fn is_in_place(&self) -> bool {
                match self {
                    $(Self::$Kernel { .. } => $in_place,)*
                }
            }

            /// Whether rows of its activations have padding.
            pub const fn has_padded_rows(&self) -> bool {
                match *self {
                    $(Self::$Kernel { $($value,)* $($read,)* $($write,)* } => $padded,)*
                }
            }
        }
    };
}

kernels! {
    ($)

    /// `y[i] = table[ids[i]]`, `[rows, width]`; an id outside the table gives zeros.
    Embedding ("embedding") { dims: EmbeddingDims, rows: usize }
        reads { ids: Span, table: Span } writes { y: Span }
        in_place: false, padded: dims.row_stride != dims.width;

    /// Adds `dy[i]` to `dtable[ids[i]]`; or to the f32 `tied_rows` that the head has left, which are then rounded into dtable.
    EmbeddingBackward ("embedding_backward") { dims: EmbeddingDims, rows: usize }
        reads { ids: Span, dy: Span } writes { dtable: Span, tied_rows: Option<TiedRowsIn> }
        in_place: false, padded: dims.row_stride != dims.width;

    /// `y[rows, outputs]` = x · wᵀ + bias.
    Linear ("linear") { dims: LinearDims } reads { x: Span, w: Span, bias: Option<Span> } writes { y: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// Adds `scale` · x · wᵀ to `y[rows, outputs]`, in f32 and with one rounding: a low-rank adapter, whose base y already holds.
    LinearAdd ("linear_add") { dims: LinearDims, scale: f32 } reads { x: Span, w: Span } writes { y: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// dx = `scale` · dy · w, plus the old dx where `add` (one rounding).
    LinearDx ("linear_dx") { dims: LinearDims, scale: f32, add: bool }
        reads { dy: Span, w: Span } writes { dx: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// Stores `scale` · dyᵀ · x in dw `[outputs, inputs]`.
    LinearDw ("linear_dw") { dims: LinearDims, scale: f32 }
        reads { dy: Span, x: Span } writes { dw: Span, store: GradStore }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// Adds the column sums of dy to db `[outputs]`.
    LinearDb ("linear_db") { dims: LinearDims } reads { dy: Span } writes { db: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// y = x · rstd · w for rows of `dims.width`; writes rstd `[rows]`.
    RmsNorm ("rms_norm") { dims: RmsNormDims } reads { x: Span, w: Span } writes { y: Span, rstd: Span }
        in_place: true, padded: dims.row_stride != dims.width;

    /// h = residual + x, then y and rstd of `RmsNorm` on h.
    AddRmsNorm ("add_rms_norm") { dims: RmsNormDims }
        reads { x: Span, residual: Span, w: Span } writes { h: Span, y: Span, rstd: Span }
        in_place: true, padded: dims.row_stride != dims.width;

    /// dh = the norm's gradient + `residual`; adds to dw `[width]`. A gradient without a destination is not computed.
    RmsNormBackward ("rms_norm_backward") { dims: RmsNormDims }
        reads { dy: Span, h: Span, rstd: Span, w: Span, residual: Option<Span> }
        writes { dh: Option<Span>, dw: Option<Span> }
        in_place: true, padded: dims.row_stride != dims.width;

    /// y = x rotated by the angles of cos and sin `[rows, rotated / 2]` (f32); by the negative angles where `back`.
    Rope ("rope") { dims: RopeDims, back: bool } reads { cos: Span, sin: Span, x: Span } writes { y: Span }
        in_place: true, padded: dims.row_stride != dims.heads * dims.head_dim;

    /// `RmsNorm` of each head of x, rounded, then `Rope`; writes rstd `[rows, heads]`.
    HeadNormRope ("head_norm_rope") { dims: HeadNormRopeDims }
        reads { x: Span, w: Span, cos: Span, sin: Span } writes { y: Span, rstd: Span }
        in_place: false, padded: dims.rope.row_stride != dims.rope.heads * dims.rope.head_dim;

    /// dh = the norm's gradient of dy rotated back and rounded; adds to dw `[head_dim]`. A gradient without a destination is
    /// not computed.
    HeadNormRopeBackward ("head_norm_rope_backward") { dims: HeadNormRopeDims }
        reads { dy: Span, h: Span, rstd: Span, w: Span, cos: Span, sin: Span }
        writes { dh: Option<Span>, dw: Option<Span> }
        in_place: false, padded: dims.rope.row_stride != dims.rope.heads * dims.rope.head_dim;

    /// `table[h, d + max_distance]` (f32) = `w[bucket of d, h]` for the distances d from `-max_distance` to `max_distance`.
    PositionBias ("position_bias") { dims: PositionBiasDims } reads { w: Span } writes { table: Span }
        in_place: false, padded: false;

    /// Adds to dw `[buckets, heads]` (f32) the entries of dtable (f32) that share a bucket, in the order of their distances.
    PositionBiasBackward ("position_bias_backward") { dims: PositionBiasDims }
        reads { dtable: Span } writes { dw: Span }
        in_place: false, padded: false;

    /// y = attention within each sequence; `lse` `[heads, rows]`, of the scores with their biases. Rows beyond the last sequence give
    /// zeros, and so do queries without a key.
    Attention ("attention") { dims: AttentionDims }
        reads { context: AttentionContext, q: Span, k: Span, v: Span } writes { y: Span, lse: Span }
        in_place: false, padded: dims.q_stride != dims.q_width() || dims.kv_stride != dims.kv_width();

    /// Writes dq, dk and dv, and the gradient of the biases where it has a destination. Rows beyond the last sequence get zeros.
    AttentionBackward ("attention_backward") { dims: AttentionDims }
        reads { context: AttentionContext, q: Span, k: Span, v: Span, y: Span, lse: Span, dy: Span }
        writes { dq: Span, dk: Span, dv: Span, dbias: Option<BiasGrad> }
        in_place: false, padded: dims.q_stride != dims.q_width() || dims.kv_stride != dims.kv_width();

    /// Copies each row of x `[dims.rows, dims.width]` to row `end - 1` of `cache` `[dims.cached, dims.width]`, which has the row
    /// stride of x. `ranges` holds one [`crate::CacheRange`] per row.
    StoreRows ("store_rows") { dims: StoreRowsDims } reads { ranges: Span, x: Span } writes { cache: Span }
        in_place: false, padded: dims.row_stride != dims.width;

    /// y = attention of each row over the cached rows of its [`crate::CacheRange`]: k and v are `[cached, kv_heads · head_dim]`. The query is
    /// the last row of its range: with `bias`, the distance of key j is j - (end - 1). Cross attention has no bias.
    CachedAttention ("cached_attention") { dims: AttentionDims, cached: usize }
        reads { ranges: Span, bias: Option<Span>, q: Span, k: Span, v: Span } writes { y: Span }
        in_place: false, padded: dims.q_stride != dims.q_width() || dims.kv_stride != dims.kv_width();

    /// y = f(x), f the activation.
    Activation (activation.plain_name()) { activation: ActivationFn } reads { x: Span } writes { y: Span }
        in_place: true, padded: false;

    /// dx = dy · f'(x).
    ActivationBackward (activation.plain_backward_name()) { activation: ActivationFn }
        reads { dy: Span, x: Span } writes { dx: Span }
        in_place: true, padded: false;

    /// y = factor · x, rounded once. Backward is the same kernel on dy.
    Scale ("scale") { factor: f32 } reads { x: Span } writes { y: Span } in_place: true, padded: false;

    /// y = f(gate) · up, f the activation.
    GatedActivation (activation.name()) { activation: ActivationFn }
        reads { gate: Span, up: Span } writes { y: Span }
        in_place: true, padded: false;

    /// Writes dgate and dup.
    GatedActivationBackward (activation.backward_name()) { activation: ActivationFn }
        reads { dy: Span, gate: Span, up: Span } writes { dgate: Span, dup: Span }
        in_place: true, padded: false;

    /// y = x · mask / (1 - probability). `keys` holds one [`crate::RowKey`] per row. Backward is the same kernel on dy.
    Dropout ("dropout") { probability: f32, seed: u64, op: u32, width: usize, row_stride: usize }
        reads { keys: Span, x: Span } writes { y: Span }
        in_place: true, padded: row_stride != width;

    /// Routes each row to the `k` experts of its largest logits (ties: the lowest index), in descending order. `weights` `[rows, k]`
    /// (f32) are their probabilities by an f32 softmax, divided by their sum where `normalized`. A slot is a pair of a row and one of
    /// its experts, numbered row · k + j; slots are sorted by expert, stably. i32 results: `experts` `[rows, k]`; `order` `[slots]`, the
    /// slot at each sorted place; `places` `[rows, k]`, its inverse; `offsets` `[experts + 1]`, the first place of each expert, then the
    /// number of routed slots. Rows from the end of the last sequence of `starts` on are padding: weight 0, expert `experts`, sorted
    /// last. Without `starts` every row is routed. A NaN logit is smaller than any other.
    ///
    /// Rows of expert activations stand in sorted order. No kernel reads or writes those of padding.
    Route ("route") { dims: RouteDims }
        reads { starts: Option<Span>, logits: Span }
        writes {
            experts: Span, weights: Span, order: Span, places: Span, offsets: Span, balance: Option<Balance>
        }
        in_place: false, padded: dims.row_stride != dims.experts;

    /// dlogits of `dweights` `[rows, k]` (f32) and of `slopes` `[2, experts]` (f32), the gradient of [`Balance::after`], of which only
    /// the second row counts. An absent gradient is zero; padding gives zeros.
    RouteBackward ("route_backward") { dims: RouteDims }
        reads {
            starts: Option<Span>, logits: Span, experts: Span, weights: Span, dweights: Option<Span>,
            slopes: Option<Span>
        }
        writes { dlogits: Span }
        in_place: false, padded: dims.row_stride != dims.experts;

    /// `y[p]` = `x[order[p] / k]`: x `[rows, width]`, y `[slots, width]`.
    GatherRows ("gather_rows") { dims: ExpertRowsDims }
        reads { order: Span, offsets: Span, x: Span } writes { y: Span }
        in_place: false, padded: dims.row_stride != dims.width;

    /// `y[t]` = the sum over j of `x[places[t, j]]`, in f32, in the order of j, rounded once: x `[slots, width]`, y `[rows, width]`.
    /// Padding gives zeros.
    CombineRows ("combine_rows") { dims: ExpertRowsDims }
        reads { places: Span, offsets: Span, x: Span } writes { y: Span }
        in_place: false, padded: dims.row_stride != dims.width;

    /// `y[p]` = `x[p]` · `w[e]`ᵀ for the rows p of each expert e: w `[experts, outputs, inputs]`.
    GroupedLinear ("grouped_linear") { dims: GroupedLinearDims }
        reads { offsets: Span, x: Span, w: Span } writes { y: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// Adds `scale` · `x[p]` · `w[e]`ᵀ to `y[p]`, in f32 and with one rounding.
    GroupedLinearAdd ("grouped_linear_add") { dims: GroupedLinearDims, scale: f32 }
        reads { offsets: Span, x: Span, w: Span } writes { y: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// `dx[p]` = `scale` · `dy[p]` · `w[e]`, plus the old `dx[p]` where `add` (one rounding).
    GroupedLinearDx ("grouped_linear_dx") { dims: GroupedLinearDims, scale: f32, add: bool }
        reads { offsets: Span, dy: Span, w: Span } writes { dx: Span }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// Stores `scale` · dyᵀ · x over the rows of each expert e in `dw[e]` `[outputs, inputs]`: zeros of an expert without rows.
    GroupedLinearDw ("grouped_linear_dw") { dims: GroupedLinearDims, scale: f32 }
        reads { offsets: Span, dy: Span, x: Span } writes { dw: Span, store: GradStore }
        in_place: false, padded: dims.x_stride != dims.inputs || dims.y_stride != dims.outputs;

    /// `y[p]` = f(gate) · up · `weights[order[p]]`, f the activation, rounded once. `gate_up` is `[slots, 2 · width]`.
    GatedRows ("gated_rows") { activation: ActivationFn, dims: GatedRowsDims }
        reads { order: Span, offsets: Span, weights: Span, gate_up: Span } writes { y: Span }
        in_place: false, padded: dims.gate_up_stride != 2 * dims.width || dims.y_stride != dims.width;

    /// Writes dgate_up, and dweights `[rows, k]` (f32; 0 of padding) where it has a destination.
    GatedRowsBackward ("gated_rows_backward") { activation: ActivationFn, dims: GatedRowsDims }
        reads { order: Span, offsets: Span, weights: Span, gate_up: Span, dy: Span }
        writes { dgate_up: Span, dweights: Option<Span> }
        in_place: false, padded: dims.gate_up_stride != 2 * dims.width || dims.y_stride != dims.width;

    /// Adds n · experts · Σ f · P to `loss`, an f64: f and P are the two rows of `balance` ([`Balance::after`] of the last layer) divided
    /// by layers · the rows that are no padding, n the number of rows with a label (≥ 0).
    BalanceLoss ("balance_loss") { dims: BalanceDims }
        reads { starts: Span, balance: Span, labels: Span } writes { loss: Span }
        in_place: false, padded: false;

    /// `BalanceLoss` with its gradient: writes `slopes` `[2, experts]` (f32), zeros and then n · experts · f / (layers · rows), times
    /// `loss_weight` and the loss scale as in `HeadLossBackward`.
    BalanceLossBackward ("balance_loss_backward") { dims: BalanceDims }
        reads { starts: Span, balance: Span, labels: Span, loss_weight: Span, control: Span }
        writes { loss: Span, slopes: Span }
        in_place: false, padded: false;

    /// Adds the sum of the losses of the tokens with a label (≥ 0) to `loss`, an f64.
    HeadLoss ("head_loss") { dims: HeadLossDims }
        reads { x: Span, w: Span, labels: Span } writes { loss: Span }
        in_place: false, padded: dims.row_stride != dims.hidden;

    /// `HeadLoss` with gradients: writes dx and stores the gradient of w in dw, both times `loss_weight`, an f64 (see
    /// [`crate::StepInput::loss_weights`]), and [`crate::Control::loss_scale`]. A gradient without a destination is not computed.
    HeadLossBackward ("head_loss_backward") { dims: HeadLossDims }
        reads { x: Span, w: Span, labels: Span, loss_weight: Span, control: Span }
        writes { loss: Span, dx: Option<Span>, dw: Option<HeadLossDw> }
        in_place: false, padded: dims.row_stride != dims.hidden;

    /// `HeadLossBackward` with a teacher: adds the sums over the rows with a label (≥ 0) of the cross-entropy and of the divergence from
    /// the teacher to `losses`, an f64 each. Gradients are those of both, each times its weight of `loss_weights` and the loss scale.
    /// Rows are computed in slices ([`HeadLossDims::distill_slice_rows`]).
    DistillLossBackward ("distill_loss_backward") { dims: HeadLossDims, distillation: DivergenceSpec }
        reads {
            teacher: TeacherSpans, x: Span, w: Span, labels: Span, loss_weights: [Span; 2], control: Span
        }
        writes { losses: [Span; 2], dx: Option<Span>, dw: Option<HeadLossDw> }
        in_place: false, padded: dims.row_stride != dims.hidden || teacher.has_padded_rows();

    /// The `k` largest of each row of x · wᵀ, descending, the lowest id first among equals: `ids` `[rows, k]` (i32) and `log_probs`
    /// `[rows, k]` (f32), the log-softmax of the row over `temperature`. A row with a NaN or an infinite sum gives the ids from 0 on,
    /// and NaN.
    TopLogProbs ("top_log_probs") { dims: HeadLossDims, k: usize, temperature: f32 }
        reads { x: Span, w: Span } writes { ids: Span, log_probs: Span }
        in_place: false, padded: dims.row_stride != dims.hidden;

    /// `logits` `[sequences, vocab]` (f32) = the last row of each sequence of x · wᵀ, with `starts` of `Attention`. A missing or
    /// empty sequence gives zeros.
    Logits ("logits") { dims: LogitsDims } reads { starts: Span, x: Span, w: Span } writes { logits: Span }
        in_place: false, padded: dims.row_stride != dims.hidden;

    /// y = a + b, rounded once.
    Sum ("sum") {} reads { a: Span, b: Span } writes { y: Span } in_place: true, padded: false;

    /// Sets all bytes to 0.
    Zero ("zero") {} reads {} writes { to: Span } in_place: false, padded: false;

    /// Converts elements from one dtype to another, rounded to nearest even.
    Convert ("convert") { from_type: DType, to_type: DType }
        reads { from: Span } writes { to: Span, found_inf: Option<Span> }
        in_place: false, padded: false;

    /// y = the elements of the [`crate::Nf4Record`]s `records`, of which the last may have more than y; rounded to nearest even.
    Unpack ("unpack") {} reads { records: Span } writes { y: Span } in_place: false, padded: false;

    /// Sets `found_inf` where a value is infinite or NaN.
    CheckFinite ("check_finite") { value_type: DType } reads { values: Span } writes { found_inf: Span }
        in_place: false, padded: false;

    /// to = the sum of `ranks` contiguous `parts`, added in f32 in rank order and rounded once; plus the old value where `add`.
    SumRanks ("sum_ranks") { ranks: usize, from_type: DType, to_type: DType, add: bool }
        reads { parts: Span } writes { to: Span }
        in_place: false, padded: false;

    /// `sum`, a [`crate::ExactSum`], becomes the exact sum of the blocks' sums of squares.
    Squares ("squares") { value_type: DType } reads { values: Span } writes { sum: Span }
        in_place: false, padded: false;

    /// Adds the rows of each expert (the differences of `offsets` i32 `[experts + 1]`) to `counts` u32 `[experts + 1]`, and to its
    /// last the number of `weights` f32 `[slots]` that are infinite or NaN: a router's load, for the step's record.
    CountTokens ("count_tokens") { experts: usize, slots: usize }
        reads { offsets: Span, weights: Span } writes { counts: Span }
        in_place: false, padded: false;

    /// Gradient norm, clipping, loss scaling and the optimizer's scalars of a step: see [`crate::Control`]. `reports` holds a
    /// report of each rank, in order; `record` receives a [`crate::Record`], the parts of the loss, the norms of the flats and the counts.
    Control ("control") { ranks: usize, layout: ReportLayout }
        reads { recipe: Span, input: Span, reports: Span } writes { control: Span, record: Span }
        in_place: false, padded: false;

    /// An optimizer step with the scalars that `control` holds for a parameter `group`. Where the update is not applied, master
    /// weights and moments are unchanged and `weights` are still written from the master weights.
    ///
    /// `weights`, in the launch's dtype, are absent where the master weights are the compute weights. With bf16 weights the
    /// master weights are [`crate::canonical_master`] values, and may be stored as low-order bits ([`MasterForm`]). Moments are
    /// f32 or bf16 (`moment_type`), in the order of [`crate::Moment::ALL`], absent where the optimizer does not keep them. Arithmetic is in f32; a bf16 moment is rounded when it is
    /// stored, stochastically where `rounding` is given, else to nearest.
    Optimize ("optimize") {
            optimizer: Optimizer, group: usize, grad_type: DType, master_form: MasterForm, moment_type: DType,
            rounding: Option<Rounding>
        }
        reads { control: Span, grads: Span }
        writes { master: Span, moments: [Option<Span>; MOMENTS], weights: Option<Span> }
        in_place: false, padded: false;
}
