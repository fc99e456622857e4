//! FLOPs of a step, and model FLOPs utilisation (MFU).
//!
//! Only matmuls count: 2 FLOPs per weight and token in the forward pass, twice that in the backward pass (once that for
//! frozen weights, which have no gradient of their own), and attention's two matmuls over the pairs of tokens that attend to each other. Embedding lookups count nothing; a
//! tied head counts. Recomputation is not counted, as MFU is defined in appendix B of PaLM (Chowdhery et al. 2022),
//! but with causal pairs instead of the full square.

use zeroth_base::DType;
use zeroth_machine::known_gpu;
use zeroth_model::{Layer, ModelConfig, Parameter, ParameterKind, ParameterTable};

/// FLOPs of a model's steps.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFlops {
    /// Trained matmul weights that each token is multiplied with.
    trained: u64,
    /// Frozen ones.
    frozen: u64,
    /// The width of all heads of all blocks, by attention window.
    attention_widths: Vec<(Option<u64>, u64)>,
    /// The teacher of a distillation, which has a forward pass only.
    teacher: Option<Box<Self>>,
}

impl ModelFlops {
    /// The FLOPs of a model. `None` for encoder-decoders, which [`PairFlops`](super::pair_flops::PairFlops) counts.
    pub fn of(model: &ModelConfig, table: &ParameterTable) -> Option<Self> {
        if model.family.is_encoder_decoder() {
            return None;
        }
        let matmuls = |is_trained: bool| -> u64 {
            let matrices =
                table.iter().filter(|parameter| parameter.trained == is_trained && is_matmul(parameter));
            let (experts, dense): (Vec<&Parameter>, Vec<&Parameter>) =
                matrices.partition(|p| p.adapted_kind() == ParameterKind::Expert);
            let [experts, dense] =
                [experts, dense].map(|all| all.into_iter().map(Parameter::elements).sum::<u64>());
            // All experts of all blocks are equal, so the division leaves nothing.
            dense + table.routing.map_or(experts, |routing| experts / routing.experts * routing.per_token)
        };
        let (mut trained, mut frozen) = (matmuls(true), matmuls(false));
        if model.tied_head {
            let is_trained = table.iter().any(|p| p.kind == ParameterKind::Embedding && p.trained);
            *(if is_trained { &mut trained } else { &mut frozen }) += model.vocab * model.hidden;
        }
        let mut attention_widths: Vec<(Option<u64>, u64)> = Vec::new();
        for attention in model.layers.iter().flat_map(Layer::attentions) {
            match attention_widths.iter_mut().find(|(window, _)| *window == attention.window) {
                Some((_, width)) => *width += attention.q.out,
                None => attention_widths.push((attention.window, attention.q.out)),
            }
        }
        Some(Self { trained, frozen, attention_widths, teacher: None })
    }

    /// The same with the forward pass of a teacher.
    #[must_use]
    pub fn with_teacher(self, teacher: Self) -> Self {
        Self { teacher: Some(Box::new(teacher)), ..self }
    }

    /// Matmul weights that each token is multiplied with.
    pub const fn weights(&self) -> u64 {
        self.trained + self.frozen
    }

    /// FLOPs of forward and backward over sequences of these lengths.
    pub fn step(&self, lengths: impl IntoIterator<Item = u64>) -> f64 {
        let teacher = self.teacher.as_deref();
        let (mut tokens, mut pairs) = (0, vec![0.0; self.attention_widths.len()]);
        let mut pairs_of_teacher = vec![0.0; teacher.map_or(0, |teacher| teacher.attention_widths.len())];
        for length in lengths {
            tokens += length;
            self.add_pairs(length, &mut pairs);
            if let Some(teacher) = teacher {
                teacher.add_pairs(length, &mut pairs_of_teacher);
            }
        }
        let of_teacher = teacher.map_or(0.0, |teacher| {
            2.0 * teacher.weights() as f64 * tokens as f64 + 4.0 * teacher.attended(&pairs_of_teacher)
        });
        self.of_counts(tokens, self.attended(&pairs)) + of_teacher
    }

    /// Adds the pairs of a sequence by attention window.
    fn add_pairs(&self, length: u64, pairs: &mut [f64]) {
        for (pairs, (window, _)) in pairs.iter_mut().zip(&self.attention_widths) {
            *pairs += pairs_of(length, *window);
        }
    }

    /// Pairs times the width of all heads, from the pairs by attention window.
    fn attended(&self, pairs: &[f64]) -> f64 {
        pairs.iter().zip(&self.attention_widths).map(|(pairs, (_, width))| pairs * *width as f64).sum()
    }

    /// FLOPs from the token count and the sum of squared lengths, for models without a window shorter than a
    /// sequence.
    pub fn of_sums(&self, tokens: u64, squares: u64) -> f64 {
        let width: u64 = self.attention_widths.iter().map(|(_, width)| width).sum();
        self.of_counts(tokens, width as f64 * squares as f64 / 2.0)
    }

    /// 6 = 3 × 2: a multiply and an add, once in forward and twice in backward, once for frozen weights. Attention has two
    /// matmuls per pair.
    fn of_counts(&self, tokens: u64, attended: f64) -> f64 {
        let weights = 6.0 * self.trained as f64 + 4.0 * self.frozen as f64;
        weights * tokens as f64 + 12.0 * attended
    }
}

/// Whether tokens are multiplied with it; the head of a tied model is counted with its embedding.
pub(super) fn is_matmul(parameter: &Parameter) -> bool {
    parameter.kind.is_linear() || parameter.is_adapter()
}

/// Pairs of tokens in one causal sequence: half of the square, less those outside the window.
pub(super) fn pairs_of(length: u64, window: Option<u64>) -> f64 {
    let seen = window.map_or(length, |window| window.min(length)) as f64;
    seen * length as f64 - seen * seen / 2.0
}

/// Peak throughput of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct Peak {
    /// The GPU.
    pub gpu: &'static str,
    /// Operand dtype.
    pub dtype: DType,
    /// FLOP/s without sparsity.
    pub flops: f64,
}

/// Peak f32 throughput by GPU in TFLOP/s, without tensor cores: f32 matmuls are not rounded to TF32 here. From
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
    /// The peak of a GPU by its driver name; `None` where no datasheet figure is known.
    pub fn of(name: &str, dtype: DType) -> Option<Self> {
        let gpu = known_gpu(name).ok()?;
        let tflops = match dtype {
            // Tensor cores run both at the same rate since Ampere; earlier ones have no bf16 and no figure here.
            DType::Bf16 | DType::F16 => gpu.bf16_tflops?,
            DType::F32 => F32_TFLOPS.iter().find(|(name, _)| *name == gpu.name)?.1,
        };
        Some(Self { gpu: gpu.name, dtype, flops: tflops * 1e12 })
    }
}

/// Compute rate of all devices together.
#[derive(Debug, Clone, PartialEq)]
pub struct ComputeRate {
    /// FLOP/s.
    pub flops: f64,
    /// Peak of all devices, if known.
    pub peak: Option<f64>,
}

impl ComputeRate {
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

/// Three significant digits with an SI prefix: `12.3 TFLOP/s`.
pub(super) fn scaled(value: f64, unit: &str) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // Values that round to 1000 take the next prefix.
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
    use zeroth_model::{Lora, ModelConfig, add_adapters, table};

    use super::*;

    /// The shapes of Qwen3-0.6B's published config.
    const QWEN3: &str = r#"{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "tie_word_embeddings": true, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu"}"#;

    fn work(json: &str) -> ModelFlops {
        let model = ModelConfig::from_json(json, "config.json").unwrap();
        ModelFlops::of(&model, &table(&model)).unwrap()
    }

    #[test]
    fn qwen3_flops_match_a_hand_count() {
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
    fn a_teacher_has_a_forward_pass_only() {
        let both = work(QWEN3).with_teacher(work(QWEN3));
        let forward = work(QWEN3).step([1_000, 2_000]) / 3.0;
        let sum = both.step([1_000, 2_000]);
        assert!((sum - 4.0 * forward).abs() < 1e-9 * sum, "{sum}");
    }

    #[test]
    fn frozen_weights_have_no_gradient_to_compute() {
        let model = ModelConfig::from_json(QWEN3, "config.json").unwrap();
        let lora = Lora { rank: 8, ..Lora::default() };
        let adapted = add_adapters(&table(&model), &lora).unwrap();
        let found = ModelFlops::of(&model, &adapted).unwrap();
        // 8·(in + out) of q, k, v, o, gate, up and down.
        let adapters = 28 * 8 * ((1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072));
        let expected = 4.0 * 595_984_384.0 * 1_000.0 + 6.0 * f64::from(adapters) * 1_000.0;
        assert_eq!(found.step([1_000]), expected + 12.0 * 28.0 * 2_048.0 * 500_000.0);
    }

    #[test]
    fn weights_match_transformers_without_norms() {
        // transformers 5.22: Qwen3ForCausalLM(config).num_parameters(exclude_embeddings=True) is 440,467,456, norms
        // included: 28 · (2 · 1024 + 2 · 128) + 1024. Its Trainer counts 6 · tokens · that.
        let blocks = work(QWEN3).weights() - 151_936 * 1_024;
        assert_eq!(blocks + 28 * (2 * 1_024 + 2 * 128) + 1_024, 440_467_456);
    }

    #[test]
    fn windows_limit_pairs() {
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
    fn only_routed_experts_count() {
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
    fn peaks_come_from_datasheets_or_are_unknown() {
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
    fn rates_show_mfu_only_with_a_known_peak() {
        let text = |flops, peak| ComputeRate { flops, peak }.text();
        assert_eq!(text(408.5e12, Some(989e12)), "MFU 41.3% of 989T");
        assert_eq!(text(1.0e15, Some(8.0 * 989e12)), "MFU 12.6% of 7912T");
        assert_eq!(text(3.9e12, Some(19.5e12)), "MFU 20.0% of 19.5T");
        assert_eq!(text(12.34e12, None), "12.3 TFLOP/s");
        assert_eq!(text(45.6e9, None), "45.6 GFLOP/s");
        assert_eq!(text(999.9e9, None), "1.00 TFLOP/s");
        assert_eq!(text(0.0, None), "0.00 FLOP/s");
    }
}
