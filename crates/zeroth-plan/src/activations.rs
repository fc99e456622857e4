//! Activation memory in closed form: bytes per token and block.
//!
//! 16-bit activations, flash attention that keeps one f32 (the log-sum-exp) per head instead of a score matrix, no
//! dropout. For a llama block whose heads are together as wide as its hidden state this is h(12 + 4g) + 6f + 4a, with g
//! key-value heads per head, feed-forward width f and a heads. LoRA keeps the same: its matrices read the inputs of the
//! frozen ones, and its own activations are a few numbers per token.

/// Tokens whose logits exist at the same time: the loss is computed in slices, so no [tokens, vocab] tensor exists.
pub const HEAD_SLICE_TOKENS: u64 = 1024;

/// Logits in f32, overwritten by their gradient, and that gradient in 16 bits for the matmul.
const HEAD_BYTES_PER_LOGIT: u64 = 4 + 2;

/// The model dimensions that activations depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivationShape {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Rows of the head.
    pub vocab: u64,
    /// Stacks of equal blocks; an encoder-decoder model has two, each over as many tokens.
    pub stacks: Vec<Stack>,
}

/// A stack of equal blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// The number of blocks.
    pub blocks: u64,
    /// The block.
    pub block: Block,
}

/// A transformer block: attention and feed-forward, each with a norm and a residual add.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and of values.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Queries and keys are normalised (Qwen3), so their inputs are kept too.
    pub qk_norm: bool,
    /// A second attention, over an encoder's output (T5's decoder).
    pub cross_attention: bool,
    /// The feed-forward layer.
    pub feed_forward: FeedForward,
}

/// The feed-forward layer of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// A gated layer (SwiGLU, GeGLU).
    Gated {
        /// Width of each.
        width: u64,
    },
    /// One projection and GELU, whose input backward needs.
    Gelu {
        /// Its width.
        width: u64,
    },
    /// One projection and ReLU, whose output suffices for backward (T5 before 1.1).
    Relu {
        /// Its width.
        width: u64,
    },
    /// A router and gated experts.
    Experts {
        /// Width of one expert.
        width: u64,
        /// Experts per token.
        per_token: u64,
        /// The number of experts.
        experts: u64,
    },
}

impl FeedForward {
    /// Bytes kept per token.
    pub fn bytes_per_token(self) -> u64 {
        match self {
            Self::Gated { width } => width.saturating_mul(4 + 2),
            Self::Gelu { width } => width.saturating_mul(2 + 2),
            Self::Relu { width } => width.saturating_mul(2),
            // Rows are gathered again from the norm's output, and a routing weight's gradient follows from the gradient
            // of gate times up: neither an expert's input nor its output is kept. The router keeps its f32
            // probabilities, and an index and a weight per selected expert.
            Self::Experts { width, per_token, experts } => {
                let chosen = width.saturating_mul(4 + 2).saturating_add(4 + 4);
                per_token.saturating_mul(chosen).saturating_add(experts.saturating_mul(4))
            }
        }
    }
}

impl Block {
    /// Bytes kept per token.
    pub fn bytes_per_token(self, hidden: u64) -> u64 {
        let attentions = if self.cross_attention { 2 } else { 1 };
        let mut attention = self.attention_bytes(4);
        // Residual input and norm output, before each attention.
        attention = attention.saturating_add(hidden.saturating_mul(2 + 2));
        if self.qk_norm {
            let normed = self.query_width().saturating_add(self.key_value_width());
            attention = attention.saturating_add(normed.saturating_mul(2));
        }
        let feed_forward = self.feed_forward.bytes_per_token().saturating_add(hidden.saturating_mul(2 + 2));
        attention.saturating_mul(attentions).saturating_add(feed_forward)
    }

    /// Bytes per token of the largest set of gradients live at once in backward: those of the residual, of a norm's
    /// output, and of everything that attention or the feed-forward keeps.
    fn gradient_bytes_per_token(self, hidden: u64) -> u64 {
        let inside = self.attention_bytes(0).max(self.feed_forward.bytes_per_token());
        inside.saturating_add(hidden.saturating_mul(2 + 2))
    }

    /// Queries, keys, values and attention output, and `per_head` bytes per head.
    fn attention_bytes(self, per_head: u64) -> u64 {
        let queries_and_output = self.query_width().saturating_mul(2 + 2);
        let keys_and_values = self.key_value_width().saturating_mul(2 + 2);
        queries_and_output.saturating_add(keys_and_values).saturating_add(self.heads.saturating_mul(per_head))
    }

    fn query_width(self) -> u64 {
        self.heads.saturating_mul(self.head_dim)
    }

    fn key_value_width(self) -> u64 {
        self.kv_heads.saturating_mul(self.head_dim)
    }
}

impl ActivationShape {
    /// Bytes that all blocks keep per token.
    pub fn bytes_per_token(&self, recompute: bool) -> u64 {
        if recompute {
            // Each block's input, and the one block being recomputed.
            let blocks = self.stacks.iter().map(|stack| stack.blocks).fold(0, u64::saturating_add);
            let widest = self.widest(|block| block.bytes_per_token(self.hidden));
            return blocks.saturating_mul(2).saturating_mul(self.hidden).saturating_add(widest);
        }
        let stacks = self.stacks.iter();
        stacks
            .map(|stack| stack.blocks.saturating_mul(stack.block.bytes_per_token(self.hidden)))
            .fold(0, u64::saturating_add)
    }

    /// Peak bytes of a micro-batch of `tokens` tokens.
    ///
    /// Everything that blocks keep; each stack's last residual and norm output; and the larger of the head's slice of
    /// logits and one block's gradients, which never exist together.
    pub fn bytes(&self, tokens: u64, recompute: bool) -> u64 {
        let ends = self.hidden.saturating_mul(2 + 2).saturating_mul(self.stacks.len() as u64);
        let kept = tokens.saturating_mul(self.bytes_per_token(recompute).saturating_add(ends));
        let logits =
            tokens.min(HEAD_SLICE_TOKENS).saturating_mul(self.vocab).saturating_mul(HEAD_BYTES_PER_LOGIT);
        let gradients =
            tokens.saturating_mul(self.widest(|block| block.gradient_bytes_per_token(self.hidden)));
        kept.saturating_add(logits.max(gradients))
    }

    fn widest(&self, bytes: impl Fn(Block) -> u64) -> u64 {
        self.stacks.iter().filter(|stack| stack.blocks > 0).map(|stack| bytes(stack.block)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn qwen2_5_7b() -> ActivationShape {
        let feed_forward = FeedForward::Gated { width: 18_944 };
        let block = Block {
            heads: 28,
            kv_heads: 4,
            head_dim: 128,
            qk_norm: false,
            cross_attention: false,
            feed_forward,
        };
        ActivationShape { hidden: 3584, vocab: 152_064, stacks: vec![Stack { blocks: 28, block }] }
    }

    /// h(12 + 4g) + 6f + 4a with h 3584, g 1/7, f 18944, a 28: 158.8 kB a token and block, 4.45 MB a token.
    #[test]
    fn qwen2_5_7b_keeps_4_45_mb_a_token() {
        let shape = qwen2_5_7b();
        assert_eq!(shape.stacks[0].block.bytes_per_token(3584), 158_832);
        assert_eq!(shape.bytes_per_token(false), 4_447_296);
    }

    /// Korthikanti et al. (arXiv 2205.05198), full recomputation: 2h a token and block.
    #[test]
    fn recomputation_keeps_each_blocks_input_and_one_block() {
        assert_eq!(qwen2_5_7b().bytes_per_token(true), 2 * 3584 * 28 + 158_832);
    }

    #[test]
    fn long_micro_batches_do_not_grow_the_slice_of_logits() {
        let mut shape = qwen2_5_7b();
        shape.stacks.clear();
        assert_eq!(shape.bytes(512, false), 512 * 152_064 * 6);
        assert_eq!(shape.bytes(1 << 20, false), 1024 * 152_064 * 6);
    }

    #[test]
    fn qk_norm_keeps_what_queries_and_keys_were() {
        let plain = qwen2_5_7b().stacks[0].block;
        let normed = Block { qk_norm: true, ..plain };
        let more = normed.bytes_per_token(3584) - plain.bytes_per_token(3584);
        assert_eq!(more, 2 * 28 * 128 + 2 * 4 * 128);
    }

    /// Qwen3-30B-A3B: 8 of 128 experts of width 768 are as wide as a gated layer of 6144.
    #[test]
    fn experts_count_as_wide_as_a_token_sees_them() {
        let experts = FeedForward::Experts { width: 768, per_token: 8, experts: 128 };
        let dense = FeedForward::Gated { width: 6144 };
        assert_eq!(experts.bytes_per_token(), dense.bytes_per_token() + 8 * 8 + 128 * 4);
    }

    /// t5-3b: hidden 1024, 32 heads of 128, ReLU of width 16384.
    #[test]
    fn a_t5_decoder_block_has_two_attentions_and_no_gate() {
        let feed_forward = FeedForward::Relu { width: 16_384 };
        let encoder = Block {
            heads: 32,
            kv_heads: 32,
            head_dim: 128,
            qk_norm: false,
            cross_attention: false,
            feed_forward,
        };
        let decoder = Block { cross_attention: true, ..encoder };
        let attention = 4 * 1024 + 8 * 4096 + 4 * 32;
        assert_eq!(encoder.bytes_per_token(1024), attention + 4 * 1024 + 2 * 16_384);
        assert_eq!(decoder.bytes_per_token(1024), 2 * attention + 4 * 1024 + 2 * 16_384);
    }
}
