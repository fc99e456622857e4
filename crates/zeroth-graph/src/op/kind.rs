//! The kinds of ops, and what they hold.

use zeroth_base::{ActivationFn, PositionBuckets};

/// The op of a node. T is the number of rows, H the hidden size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// `ids` `[T]` and a table [V, H] give the rows [T, H].
    Embedding,
    /// `x` [T, I], weight [O, I] and an optional bias `[O]` give `x · wᵀ + b` [T, O].
    Linear,
    /// `base` [T, O], `u` [T, I] and weight [O, I] give `base + scale · u · wᵀ` [T, O].
    LinearAdd {
        /// The factor of the product.
        scale: f64,
    },
    /// `x` [T, H] and weight `[H]` give `x · rstd · w` [T, H] and the statistic `rstd` `[T]`.
    RmsNorm {
        /// Added to the mean of squares.
        eps: f64,
    },
    /// `r` and `x` [T, H] and weight `[H]` give the sum `h = r + x`, its norm and `rstd`: the residual add and the norm
    /// after it in one pass.
    AddRmsNorm {
        /// Added to the mean of squares.
        eps: f64,
        /// Whether the sum is limited to what fp16 represents, in a run in fp16.
        clamp: bool,
    },
    /// `x` [T, heads · D], `positions` `[T]` and weight `[D]` give each head's norm, rotated as `Rope` does, [T, heads · D] and
    /// `rstd` [T, heads]: the norm of q or k and its rotation in one pass. The norm is rounded before it is rotated.
    HeadNormRope {
        /// Heads in a row.
        heads: u64,
        /// Added to the mean of squares.
        eps: f64,
        /// The index of its rotary embedding in [`Graph::rotaries`](crate::Graph::rotaries).
        rotary: usize,
    },
    /// `x` [T, heads · D] and `positions` `[T]` give `x` with each head's halves rotated.
    Rope {
        /// Heads in a row.
        heads: u64,
        /// The index of its rotary embedding in [`Graph::rotaries`](crate::Graph::rotaries).
        rotary: usize,
    },
    /// `q` [Tq, heads · D], `k` and `v` [Tk, kv_heads · D], then the biases [heads, distances] where it has any, give [Tq, heads · D]
    /// and the log of the softmax's sum [Tq, heads]. A query attends to keys of its own sequence; where k and v are of another
    /// stream, to the sequence of the same index there.
    Attention(AttentionSpec),
    /// A table [buckets, heads] gives the biases [heads, distances] of attention by the distance of a key from its query, a statistic:
    /// the distance d is at d + `max_distance`.
    PositionBias(PositionBuckets),
    /// `x` gives `f(x)`, f the activation.
    Activation(ActivationFn),
    /// `x` gives `factor · x`.
    Scale {
        /// The factor.
        factor: f64,
    },
    /// `gate` and `up` [T, F] give `f(gate) · up`, f the activation.
    GatedActivation(ActivationFn),
    /// `x` with elements zeroed at random and the others scaled up; the mask is recomputed in backward.
    Dropout {
        /// The probability that an element is zeroed.
        probability: f64,
        /// The number of this op among the model's dropouts: part of the key of its random numbers.
        salt: u32,
    },
    /// `logits` [T, E], and the sums of the layers before with `balance`, give the `experts` [T, k] with the largest logits (ties: the
    /// lowest index), their `weights` [T, k] by softmax, the slots `order` `[T · k]` sorted by expert, its inverse `places` [T, k], the
    /// `offsets` `[E + 1]` of the experts in it, and with `balance` sums [2, E] of tokens and of probabilities. See
    /// [`Routing`](crate::Routing).
    Route {
        /// Experts of a token.
        k: u64,
        /// Whether a token's weights are divided by their sum.
        normalized: bool,
        /// Whether it computes sums for an auxiliary loss.
        balance: bool,
    },
    /// `x` [T, H], `order`, `places` and `offsets` give the rows of the slots [T · k, H] in sorted order.
    GatherRows,
    /// `x` [T · k, H], `order`, `places` and `offsets` give the sum of each token's rows [T, H].
    CombineRows,
    /// `x` [T · k, I], `offsets` and weight [E, O, I] give `x · w[e]ᵀ` [T · k, O] for the rows of each expert e.
    GroupedLinear,
    /// `base` [T · k, O], `u` [T · k, I], `offsets` and weight [E, O, I] give `base + scale · u · w[e]ᵀ` [T · k, O].
    GroupedLinearAdd {
        /// The factor of the product.
        scale: f64,
    },
    /// `gate_up` [T · k, 2F], `weights` [T, k], `order` and `offsets` give `f(gate) · up · weight` [T · k, F], f the activation.
    GatedRows(ActivationFn),
    /// `balance` [2, E] and `labels` `[T]` give the auxiliary loss `[1]`, counted once for every trained token.
    BalanceLoss {
        /// The index in [`Graph::loss_parts`](crate::Graph::loss_parts) of the part that it belongs to.
        part: usize,
        /// Layers that `balance` sums over.
        layers: u64,
    },
    /// `x` [T, H], weight [V, H] and `labels` `[T]` give the sum of the tokens' losses `[1]`: projection, softmax and
    /// cross-entropy in slices of tokens, so that no [T, V] tensor exists.
    HeadLoss {
        /// The index in [`Graph::loss_parts`](crate::Graph::loss_parts) of the part that it belongs to.
        part: usize,
    },
    /// `x` [T, H], weight [V, H], `labels` `[T]` and a teacher give the sums `[1]` of the tokens' cross-entropies and of their
    /// divergences from the teacher, in slices of tokens. The teacher is `x` [T, H'] and a second weight [V', H'], or `ids` and
    /// `log_probs` [T, k].
    DistillLoss {
        /// The index in [`Graph::loss_parts`](crate::Graph::loss_parts) of the cross-entropy.
        ce_part: usize,
        /// The index of the divergence.
        kd_part: usize,
        /// The divergence.
        spec: DistillSpec,
        /// Where the teacher's distribution comes from.
        teacher: TeacherKind,
    },
}

/// An attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Heads of q.
    pub heads: u64,
    /// Heads of k and v; each serves heads / kv_heads heads of q.
    pub kv_heads: u64,
    /// Sliding window: keys per query, its own included; `None` attends to the whole prefix. Causal attention only.
    pub window: Option<u64>,
    /// Factor of the scores.
    pub scale: f64,
    /// Whether a query attends to the keys up to its own only; else to all of its sequence.
    pub causal: bool,
    /// The largest distance in the table of biases; `None` without biases.
    pub max_distance: Option<u64>,
    /// Dropout of the softmax weights.
    pub dropout: Option<DropoutSpec>,
}

/// A dropout within an op.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutSpec {
    /// The probability that an element is zeroed.
    pub probability: f64,
    /// Its number among the model's dropouts: part of the key of its random numbers.
    pub salt: u32,
}

/// The divergence of a student s from its teacher t, both at a temperature: KL(t‖s) where beta is 0, KL(s‖t) where it is 1, and
/// between them beta · KL(t‖m) + (1 - beta) · KL(s‖m) with the mixture m = beta · t + (1 - beta) · s (the generalised Jensen-Shannon
/// divergence).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DistillSpec {
    /// From 0, the forward divergence, to 1, the reverse one.
    pub beta: f64,
    /// Divisor of both logits.
    pub temperature: f64,
    /// Whether the divergence is multiplied by the square of the temperature, so that its gradients do not shrink with it.
    pub squared: bool,
}

/// The kind of a [`Teacher`](crate::Teacher): what a node has besides its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TeacherKind {
    /// A model's hidden state and head.
    Hidden,
    /// Cached log-probabilities.
    TopK {
        /// The teacher's vocabulary.
        vocab: u64,
        /// See [`Teacher::TopK`](crate::Teacher::TopK).
        tail: bool,
    },
}

impl Op {
    /// The index of the rotary embedding that it reads.
    pub const fn rotary(self) -> Option<usize> {
        match self {
            Self::Rope { rotary, .. } | Self::HeadNormRope { rotary, .. } => Some(rotary),
            _ => None,
        }
    }

    /// Its name in messages, traces and plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Linear => "linear",
            Self::LinearAdd { .. } => "linear_add",
            Self::RmsNorm { .. } => "rms_norm",
            Self::AddRmsNorm { .. } => "add_rms_norm",
            Self::HeadNormRope { .. } => "head_norm_rope",
            Self::Rope { .. } => "rope",
            Self::Attention(_) => "attention",
            Self::PositionBias(_) => "position_bias",
            Self::Activation(activation) => activation.plain_name(),
            Self::Scale { .. } => "scale",
            Self::GatedActivation(activation) => activation.name(),
            Self::Dropout { .. } => "dropout",
            Self::Route { .. } => "route",
            Self::GatherRows => "gather_rows",
            Self::CombineRows => "combine_rows",
            Self::GroupedLinear => "grouped_linear",
            Self::GroupedLinearAdd { .. } => "grouped_linear_add",
            Self::GatedRows(_) => "gated_rows",
            Self::BalanceLoss { .. } => "balance_loss",
            Self::HeadLoss { .. } => "head_loss",
            Self::DistillLoss { .. } => "distill_loss",
        }
    }
}
