//! How much arithmetic a step is, and which share of a device's peak that comes to.
//!
//! Counted are matrix products alone: 2 operations for each weight that a token passes in forward, twice that in
//! backward; and attention's two products over the pairs of tokens that see each other. Looking up an embedding is no
//! product; a tied head is one. What is computed twice to save memory counts once: the share is model FLOPs utilisation
//! (MFU), as PaLM's appendix B defines it (Chowdhery et al. 2022), with causal pairs counted and not the whole square.

use zeroth_base::DType;
use zeroth_machine::known_gpu;
use zeroth_model::{ModelConfig, Parameter, ParameterKind, ParameterTable};

/// Floating-point operations of a model's steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Weights of matrix products that one token passes.
    weights: u64,
    /// Heads × head_dim.
    attention_width: u64,
    /// Blocks by how far back they attend.
    blocks: Vec<(Option<u64>, u64)>,
}

impl Work {
    /// The work of a model. `None` for an encoder-decoder, whose sequences have two lengths.
    pub fn of(model: &ModelConfig, table: &ParameterTable) -> Option<Self> {
        if model.family.is_encoder_decoder() {
            return None;
        }
        let linear = |kind: fn(ParameterKind) -> bool| -> u64 {
            table.iter().filter(|parameter| kind(parameter.kind)).map(Parameter::elements).sum()
        };
        let dense = linear(|kind| kind.is_linear() && kind != ParameterKind::Expert);
        let experts = linear(|kind| kind == ParameterKind::Expert);
        let passed = table.routing.map_or(experts, |routing| experts / routing.experts * routing.per_token);
        let tied = if model.tied_head { model.vocab * model.hidden } else { 0 };
        let mut blocks: Vec<(Option<u64>, u64)> = Vec::new();
        for window in &model.windows {
            match blocks.iter_mut().find(|(known, _)| known == window) {
                Some((_, count)) => *count += 1,
                None => blocks.push((*window, 1)),
            }
        }
        Some(Self { weights: dense + passed + tied, attention_width: model.attention_width(), blocks })
    }

    /// Weights of matrix products that one token passes.
    pub const fn weights(&self) -> u64 {
        self.weights
    }

    /// Operations, forward and backward, over sequences of these lengths.
    pub fn step(&self, lengths: impl IntoIterator<Item = u64>) -> f64 {
        let (mut tokens, mut pairs) = (0, vec![0.0; self.blocks.len()]);
        for length in lengths {
            tokens += length;
            for (pairs, (window, _)) in pairs.iter_mut().zip(&self.blocks) {
                *pairs += pairs_of(length, *window);
            }
        }
        let pairs: f64 =
            pairs.iter().zip(&self.blocks).map(|(pairs, (_, count))| pairs * *count as f64).sum();
        self.of_counts(tokens, pairs)
    }

    /// The same from the number of tokens and the sum of the squares of all lengths, for a model none of whose windows
    /// is shorter than a sequence.
    pub fn of_sums(&self, tokens: u64, squares: u64) -> f64 {
        let blocks: u64 = self.blocks.iter().map(|(_, count)| count).sum();
        self.of_counts(tokens, blocks as f64 * squares as f64 / 2.0)
    }

    /// 6 = 3 × 2: a product and an addition, in forward and twice in backward. Attention has two products a pair.
    fn of_counts(&self, tokens: u64, pairs: f64) -> f64 {
        6.0 * self.weights as f64 * tokens as f64 + 12.0 * self.attention_width as f64 * pairs
    }
}

/// Pairs of tokens that see each other in one causal sequence: half of the square, less what a window cuts off.
pub(super) fn pairs_of(length: u64, window: Option<u64>) -> f64 {
    let seen = window.map_or(length, |window| window.min(length)) as f64;
    seen * length as f64 - seen * seen / 2.0
}

/// What one device could do at most.
#[derive(Debug, Clone, PartialEq)]
pub struct Peak {
    /// The card.
    pub card: &'static str,
    /// The type of its operands.
    pub dtype: DType,
    /// Operations a second, without sparsity.
    pub flops: f64,
}

/// Peaks of f32 by card, in TFLOP/s, outside of tensor cores: products of f32 are not rounded to TF32 here. From
/// NVIDIA's datasheets of H100 and H200 (67; PCIe 51), A100 (19.5) and L40S (91.6).
const F32_TFLOPS: [(&str, f64); 6] = [
    ("H200", 67.0),
    ("H100 SXM", 67.0),
    ("H100 PCIe", 51.0),
    ("A100 40GB", 19.5),
    ("A100 80GB", 19.5),
    ("L40S", 91.6),
];

impl Peak {
    /// The peak of a card as its driver names it. `None` where no datasheet gave one: then there is no share to tell.
    pub fn of(name: &str, dtype: DType) -> Option<Self> {
        let card = known_gpu(name).ok()?;
        let tflops = match dtype {
            // Tensor cores take both at the same rate since Ampere; earlier ones have no bf16, and no figure here.
            DType::Bf16 | DType::F16 => card.bf16_tflops?,
            DType::F32 => F32_TFLOPS.iter().find(|(name, _)| *name == card.name)?.1,
        };
        Some(Self { card: card.name, dtype, flops: tflops * 1e12 })
    }
}

/// How fast a run computes, all devices together.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    /// Operations a second.
    pub flops: f64,
    /// The peak of all devices together, where it is known.
    pub peak: Option<f64>,
}

impl Rate {
    /// `MFU 41.3% of 989T` or `12.3 TFLOP/s`.
    pub fn text(&self) -> String {
        match self.peak {
            Some(peak) => {
                let tera = (peak / 1e11).round() / 10.0;
                format!("MFU {:.1}% of {tera}T", 100.0 * self.flops / peak)
            }
            None => scaled(self.flops, "FLOP/s"),
        }
    }
}

/// Three figures and a prefix: `12.3 TFLOP/s`.
pub(super) fn scaled(value: f64, unit: &str) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // What rounds to 1000 of a prefix is 1 of the next.
    let (size, prefix) = prefixes.into_iter().find(|(size, _)| value >= 0.9995 * size).unwrap_or((1.0, ""));
    let shown = value / size;
    let digits = match shown {
        99.95.. => 0,
        9.995.. => 1,
        _ => 2,
    };
    format!("{shown:.digits$} {prefix}{unit}")
}

#[cfg(test)]
mod tests {
    use zeroth_model::{ModelConfig, table};

    use super::*;

    /// The published config of Qwen3-0.6B, as far as shapes need it.
    const QWEN3: &str = r#"{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "tie_word_embeddings": true, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu"}"#;

    fn work(json: &str) -> Work {
        let model = ModelConfig::from_json(json, "config.json").unwrap();
        Work::of(&model, &table(&model)).unwrap()
    }

    #[test]
    fn qwen3_is_what_its_shapes_give_by_hand() {
        // A block: q 1024·2048, k and v 1024·1024 each, o 2048·1024, gate, up and down 1024·3072 each.
        let block = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072;
        let weights = 28 * block + 151_936 * 1024;
        assert_eq!(weights, 595_984_384);
        let work = work(QWEN3);
        assert_eq!(work.weights(), 595_984_384);
        // Two sequences: 6 · weights · 3,000 tokens, and 12 · 28 · 16 · 128 · (1,000² + 2,000²) / 2.
        let expected = 6.0 * 595_984_384.0 * 3_000.0 + 12.0 * 28.0 * 2_048.0 * 5_000_000.0 / 2.0;
        assert_eq!(work.step([1_000, 2_000]), expected);
        assert_eq!(work.of_sums(3_000, 5_000_000), expected);
    }

    #[test]
    fn weights_are_those_of_transformers_formula_less_norms() {
        // transformers 5.22: Qwen3ForCausalLM(config).num_parameters(exclude_embeddings=True) is 440,467,456, norms
        // included: 28 · (2 · 1024 + 2 · 128) + 1024. Its Trainer counts 6 · tokens · that.
        let blocks = work(QWEN3).weights() - 151_936 * 1_024;
        assert_eq!(blocks + 28 * (2 * 1_024 + 2 * 128) + 1_024, 440_467_456);
    }

    #[test]
    fn windows_cut_pairs_off() {
        let windowed = |window: &str| {
            work(&format!(
                r#"{{"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256,
                "rms_norm_eps": 1e-5, "rope_theta": 10000, "sliding_window": {window}}}"#
            ))
        };
        // A window of 10 over 100 tokens: token i sees min(i, 10), about 10·100 − 10²/2 pairs.
        let apart = windowed("null").step([100]) - windowed("10").step([100]);
        assert_eq!(apart, 12.0 * 2.0 * 64.0 * (5_000.0 - 950.0));
        assert_eq!(windowed("null").step([10, 10]), windowed("10").step([10, 10]));
    }

    #[test]
    fn a_token_passes_the_experts_it_is_sent_to() {
        let work = work(
            r#"{"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100, "rms_norm_eps": 1e-6, "rope_theta": 10000,
            "tie_word_embeddings": false, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []}"#,
        );
        // q, k, v, o; the router; two of eight experts; the head.
        assert_eq!(work.weights(), 4 * 64 * 64 + 64 * 8 + 2 * 3 * 64 * 32 + 100 * 64);
    }

    #[test]
    fn peaks_are_those_of_datasheets_or_none() {
        let tflops = |name: &str, dtype| Peak::of(name, dtype).map(|peak| peak.flops / 1e12);
        assert_eq!(tflops("NVIDIA H200", DType::Bf16), Some(989.0));
        assert_eq!(tflops("NVIDIA H100 PCIe", DType::F16), Some(756.0));
        assert_eq!(tflops("NVIDIA A100-SXM4-80GB", DType::Bf16), Some(312.0));
        assert_eq!(tflops("NVIDIA A100-SXM4-80GB", DType::F32), Some(19.5));
        for unknown in
            [("NVIDIA H100 NVL", DType::Bf16), ("Tesla T4", DType::Bf16), ("NVIDIA A10", DType::F32)]
        {
            assert_eq!(tflops(unknown.0, unknown.1), None, "{unknown:?}");
        }
    }

    #[test]
    fn rates_name_the_peak_or_stand_alone() {
        let text = |flops, peak| Rate { flops, peak }.text();
        assert_eq!(text(408.5e12, Some(989e12)), "MFU 41.3% of 989T");
        assert_eq!(text(1.0e15, Some(8.0 * 989e12)), "MFU 12.6% of 7912T");
        assert_eq!(text(3.9e12, Some(19.5e12)), "MFU 20.0% of 19.5T");
        assert_eq!(text(12.34e12, None), "12.3 TFLOP/s");
        assert_eq!(text(45.6e9, None), "45.6 GFLOP/s");
        assert_eq!(text(999.9e9, None), "1.00 TFLOP/s");
        assert_eq!(text(0.0, None), "0.00 FLOP/s");
    }
}
