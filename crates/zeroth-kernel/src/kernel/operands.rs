//! The name of a kernel, its operands and how it accesses them.

use super::{AttentionContext, Kernel, Span, TeacherSpans};

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
            Self::DistillLossBackward { dims, teacher, .. } => {
                let pads_teacher = match teacher {
                    TeacherSpans::Hidden { hidden, row_stride, .. } => *row_stride != *hidden,
                    TeacherSpans::TopK { .. } => false,
                };
                dims.row_stride != dims.hidden || pads_teacher
            }
            Self::TopLogProbs { dims, .. } => dims.row_stride != dims.hidden,
            Self::Logits { dims, .. } => dims.row_stride != dims.hidden,
            Self::Route { dims, .. } | Self::RouteBackward { dims, .. } => dims.row_stride != dims.experts,
            Self::GatherRows { dims, .. } | Self::CombineRows { dims, .. } => dims.row_stride != dims.width,
            Self::GroupedLinear { dims, .. }
            | Self::GroupedLinearAdd { dims, .. }
            | Self::GroupedLinearDx { dims, .. }
            | Self::GroupedLinearDw { dims, .. } => {
                dims.x_stride != dims.inputs || dims.y_stride != dims.outputs
            }
            Self::GatedRows { dims, .. } | Self::GatedRowsBackward { dims, .. } => {
                dims.gate_up_stride != 2 * dims.width || dims.y_stride != dims.width
            }
            // Element by element, or over flats.
            Self::GatedActivation { .. }
            | Self::GatedActivationBackward { .. }
            | Self::Activation { .. }
            | Self::ActivationBackward { .. }
            | Self::Scale { .. }
            | Self::PositionBias { .. }
            | Self::PositionBiasBackward { .. }
            | Self::BalanceLoss { .. }
            | Self::BalanceLossBackward { .. }
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
            Self::PositionBias { .. } => "position_bias",
            Self::PositionBiasBackward { .. } => "position_bias_backward",
            Self::Attention { .. } => "attention",
            Self::AttentionBackward { .. } => "attention_backward",
            Self::StoreRows { .. } => "store_rows",
            Self::CachedAttention { .. } => "cached_attention",
            Self::GatedActivation { activation, .. } => activation.name(),
            Self::GatedActivationBackward { activation, .. } => activation.backward_name(),
            Self::Activation { activation, .. } => activation.plain_name(),
            Self::ActivationBackward { activation, .. } => activation.plain_backward_name(),
            Self::Scale { .. } => "scale",
            Self::Dropout { .. } => "dropout",
            Self::Route { .. } => "route",
            Self::RouteBackward { .. } => "route_backward",
            Self::GatherRows { .. } => "gather_rows",
            Self::CombineRows { .. } => "combine_rows",
            Self::GroupedLinear { .. } => "grouped_linear",
            Self::GroupedLinearAdd { .. } => "grouped_linear_add",
            Self::GroupedLinearDx { .. } => "grouped_linear_dx",
            Self::GroupedLinearDw { .. } => "grouped_linear_dw",
            Self::GatedRows { .. } => "gated_rows",
            Self::GatedRowsBackward { .. } => "gated_rows_backward",
            Self::BalanceLoss { .. } => "balance_loss",
            Self::BalanceLossBackward { .. } => "balance_loss_backward",
            Self::HeadLoss { .. } => "head_loss",
            Self::HeadLossBackward { .. } => "head_loss_backward",
            Self::DistillLossBackward { .. } => "distill_loss_backward",
            Self::TopLogProbs { .. } => "top_log_probs",
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
        let (mut reads, mut writes): ([Option<Span>; 10], [Option<Span>; 6]) = ([None; 10], [None; 6]);
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
            Self::PositionBias { w, table, .. } => touch!([w], [table]),
            Self::PositionBiasBackward { dtable, dw, .. } => touch!([dtable], [dw]),
            Self::Attention { context, q, k, v, y, lse, .. } => {
                let AttentionContext { starts, kv_starts, bias, dropout } = context;
                touch!([starts, kv_starts, bias, dropout.map(|dropout| dropout.keys), q, k, v], [y, lse]);
            }
            Self::AttentionBackward { context, q, k, v, y, lse, dy, dq, dk, dv, dbias, .. } => {
                let AttentionContext { starts, kv_starts, bias, dropout } = context;
                let keys = dropout.map(|dropout| dropout.keys);
                touch!(
                    [starts, kv_starts, bias, keys, q, k, v, y, lse, dy],
                    [dq, dk, dv, dbias.map(|dbias| dbias.to)]
                );
            }
            Self::StoreRows { ranges, x, cache, .. } => touch!([ranges, x], [cache]),
            Self::CachedAttention { ranges, bias, q, k, v, y, .. } => touch!([ranges, bias, q, k, v], [y]),
            Self::Activation { x, y, .. } | Self::Scale { x, y, .. } => touch!([x], [y]),
            Self::ActivationBackward { dy, x, dx, .. } => touch!([dy, x], [dx]),
            Self::GatedActivation { gate, up, y, .. } => touch!([gate, up], [y]),
            Self::GatedActivationBackward { dy, gate, up, dgate, dup, .. } => {
                touch!([dy, gate, up], [dgate, dup]);
            }
            Self::Dropout { keys, x, y, .. } => touch!([keys, x], [y]),
            Self::Route { starts, logits, experts, weights, order, places, offsets, balance, .. } => {
                let before = balance.and_then(|balance| balance.before);
                let after = balance.map(|balance| balance.after);
                touch!([starts, logits, before], [experts, weights, order, places, offsets, after]);
            }
            Self::RouteBackward { starts, logits, experts, weights, dweights, slopes, dlogits, .. } => {
                touch!([starts, logits, experts, weights, dweights, slopes], [dlogits]);
            }
            Self::GatherRows { order, offsets, x, y, .. } => touch!([order, offsets, x], [y]),
            Self::CombineRows { places, offsets, x, y, .. } => touch!([places, offsets, x], [y]),
            Self::GroupedLinear { offsets, x, w, y, .. }
            | Self::GroupedLinearAdd { offsets, x, w, y, .. } => {
                touch!([offsets, x, w], [y]);
            }
            Self::GroupedLinearDx { offsets, dy, w, dx, .. } => touch!([offsets, dy, w], [dx]),
            Self::GroupedLinearDw { offsets, dy, x, dw, store, .. } => {
                touch!([offsets, dy, x], [dw, store.found_inf()]);
            }
            Self::GatedRows { order, offsets, weights, gate_up, y, .. } => {
                touch!([order, offsets, weights, gate_up], [y]);
            }
            Self::GatedRowsBackward { order, offsets, weights, gate_up, dy, dgate_up, dweights, .. } => {
                touch!([order, offsets, weights, gate_up, dy], [dgate_up, dweights]);
            }
            Self::BalanceLoss { starts, balance, labels, loss, .. } => {
                touch!([starts, balance, labels], [loss]);
            }
            Self::BalanceLossBackward {
                starts, balance, labels, loss, loss_weight, control, slopes, ..
            } => touch!([starts, balance, labels, loss_weight, control], [loss, slopes]),
            Self::HeadLoss { x, w, labels, loss, .. } => touch!([x, w, labels], [loss]),
            Self::HeadLossBackward { x, w, labels, loss, loss_weight, control, dx, dw, .. } => {
                let tied_rows = dw.and_then(|dw| dw.tied_rows);
                let [ids, rows] = [tied_rows.map(|tied| tied.ids), tied_rows.map(|tied| tied.rows)];
                let (to, found_inf) = (dw.map(|dw| dw.to), dw.and_then(|dw| dw.store.found_inf()));
                touch!([x, w, labels, loss_weight, control, ids], [loss, dx, to, found_inf, rows]);
            }
            Self::DistillLossBackward {
                teacher,
                x,
                w,
                labels,
                losses,
                loss_weights,
                control,
                dx,
                dw,
                ..
            } => {
                let [of_teacher, probs] = teacher.spans();
                let ([ce, kd], [ce_weight, kd_weight]) = (losses, loss_weights);
                let tied_rows = dw.and_then(|dw| dw.tied_rows);
                let [ids, rows] = [tied_rows.map(|tied| tied.ids), tied_rows.map(|tied| tied.rows)];
                let (to, found_inf) = (dw.map(|dw| dw.to), dw.and_then(|dw| dw.store.found_inf()));
                touch!(
                    [x, w, labels, of_teacher, probs, ce_weight, kd_weight, control, ids],
                    [ce, kd, dx, to, found_inf, rows]
                );
            }
            Self::TopLogProbs { x, w, ids, log_probs, .. } => touch!([x, w], [ids, log_probs]),
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
