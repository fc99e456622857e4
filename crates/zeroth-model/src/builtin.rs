//! Configs of well-known models: the facts of their `config.json`, for commands that read no weights.

use serde_json::{Map, Value};
use zeroth_base::nearest;

/// Models that differ in a few numbers.
struct Series {
    /// The fields that all of them share.
    shared: &'static str,
    /// The fields of the columns of `models`; `tie_word_embeddings` is 0 or 1.
    columns: &'static [&'static str],
    /// Hub names, and the values of the columns.
    models: &'static [(&'static [&'static str], &'static [u64])],
}

const DECODER: &[&str] = &[
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "max_position_embeddings",
];

const T5: &[&str] = &["d_model", "d_ff", "num_layers", "num_heads", "d_kv"];

#[rustfmt::skip]
const SERIES: &[Series] = &[
    Series {
        shared: r#"{"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 1000000}"#,
        columns: DECODER,
        models: &[
            (&["Qwen/Qwen3-0.6B"], &[1024, 3072, 28, 16, 8, 1, 40960]),
            (&["Qwen/Qwen3-0.6B-Base"], &[1024, 3072, 28, 16, 8, 1, 32768]),
            (&["Qwen/Qwen3-1.7B"], &[2048, 6144, 28, 16, 8, 1, 40960]),
            (&["Qwen/Qwen3-1.7B-Base"], &[2048, 6144, 28, 16, 8, 1, 32768]),
            (&["Qwen/Qwen3-4B"], &[2560, 9728, 36, 32, 8, 1, 40960]),
            (&["Qwen/Qwen3-4B-Base"], &[2560, 9728, 36, 32, 8, 1, 32768]),
            (&["Qwen/Qwen3-8B"], &[4096, 12288, 36, 32, 8, 0, 40960]),
            (&["Qwen/Qwen3-8B-Base"], &[4096, 12288, 36, 32, 8, 0, 32768]),
            (&["Qwen/Qwen3-14B"], &[5120, 17408, 40, 40, 8, 0, 40960]),
            (&["Qwen/Qwen3-14B-Base"], &[5120, 17408, 40, 40, 8, 0, 32768]),
            (&["Qwen/Qwen3-32B"], &[5120, 25600, 64, 64, 8, 0, 40960]),
        ],
    },
    Series {
        shared: r#"{"model_type": "qwen3_moe", "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": true, "num_experts": 128, "num_experts_per_tok": 8,
            "tie_word_embeddings": false}"#,
        columns: &["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "moe_intermediate_size"],
        models: &[
            (&["Qwen/Qwen3-30B-A3B"], &[2048, 6144, 48, 32, 4, 768]),
            (&["Qwen/Qwen3-235B-A22B"], &[4096, 12288, 94, 64, 4, 1536]),
        ],
    },
    Series {
        shared: r#"{"model_type": "mixtral", "vocab_size": 32000, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 1000000, "sliding_window": null, "num_local_experts": 8, "num_experts_per_tok": 2}"#,
        columns: DECODER,
        models: &[
            (&["mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"],
                &[4096, 14336, 32, 32, 8, 0, 32768]),
            (&["mistralai/Mixtral-8x22B-v0.1"], &[6144, 16384, 56, 48, 8, 0, 65536]),
        ],
    },
    Series {
        shared: r#"{"model_type": "qwen2", "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "use_sliding_window": false}"#,
        columns: DECODER,
        models: &[
            (&["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"], &[896, 4864, 24, 14, 2, 1, 32768]),
            (&["Qwen/Qwen2.5-1.5B"], &[1536, 8960, 28, 12, 2, 1, 131_072]),
            (&["Qwen/Qwen2.5-1.5B-Instruct"], &[1536, 8960, 28, 12, 2, 1, 32768]),
            (&["Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-3B-Instruct"], &[2048, 11008, 36, 16, 2, 1, 32768]),
        ],
    },
    Series {
        shared: r#"{"model_type": "qwen2", "vocab_size": 152064, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 1000000, "use_sliding_window": false}"#,
        columns: DECODER,
        models: &[
            (&["Qwen/Qwen2.5-7B"], &[3584, 18944, 28, 28, 4, 0, 131_072]),
            (&["Qwen/Qwen2.5-7B-Instruct"], &[3584, 18944, 28, 28, 4, 0, 32768]),
        ],
    },
    Series {
        shared: r#"{"model_type": "qwen2", "vocab_size": 152064, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 1000000, "use_sliding_window": false}"#,
        columns: DECODER,
        models: &[
            (&["Qwen/Qwen2.5-14B"], &[5120, 13824, 48, 40, 8, 0, 131_072]),
            (&["Qwen/Qwen2.5-32B"], &[5120, 27648, 64, 40, 8, 0, 131_072]),
            (&["Qwen/Qwen2.5-72B"], &[8192, 29568, 80, 64, 8, 0, 131_072]),
        ],
    },
    Series {
        shared: r#"{"model_type": "llama", "vocab_size": 32000, "hidden_act": "silu", "rms_norm_eps": 1e-5}"#,
        columns: DECODER,
        models: &[
            (&["meta-llama/Llama-2-7b-hf"], &[4096, 11008, 32, 32, 32, 0, 4096]),
            (&["meta-llama/Llama-2-13b-hf"], &[5120, 13824, 40, 40, 40, 0, 4096]),
        ],
    },
    Series {
        shared: r#"{"model_type": "llama", "vocab_size": 128256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
            "high_freq_factor": 4, "original_max_position_embeddings": 8192}}"#,
        columns: DECODER,
        models: &[
            (&["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"], &[4096, 14336, 32, 32, 8, 0, 131_072]),
            (&["meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"],
                &[8192, 28672, 80, 64, 8, 0, 131_072]),
        ],
    },
    Series {
        shared: r#"{"model_type": "llama", "vocab_size": 128256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1,
            "high_freq_factor": 4, "original_max_position_embeddings": 8192}}"#,
        columns: DECODER,
        models: &[
            (&["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"], &[2048, 8192, 16, 32, 8, 1, 131_072]),
            (&["meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"], &[3072, 8192, 28, 24, 8, 1, 131_072]),
        ],
    },
    Series {
        shared: r#"{"model_type": "mistral", "vocab_size": 32768, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 1000000, "sliding_window": null}"#,
        columns: DECODER,
        models: &[
            (&["mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"],
                &[4096, 14336, 32, 32, 8, 0, 32768]),
        ],
    },
    Series {
        shared: r#"{"model_type": "t5", "vocab_size": 32128, "relative_attention_num_buckets": 32,
            "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1, "decoder_start_token_id": 0}"#,
        columns: T5,
        models: &[
            (&["t5-small", "google-t5/t5-small"], &[512, 2048, 6, 8, 64]),
            (&["t5-base", "google-t5/t5-base"], &[768, 3072, 12, 12, 64]),
            (&["t5-large", "google-t5/t5-large"], &[1024, 4096, 24, 16, 64]),
            (&["t5-3b", "google-t5/t5-3b"], &[1024, 16384, 24, 32, 128]),
            (&["t5-11b", "google-t5/t5-11b"], &[1024, 65536, 24, 128, 128]),
        ],
    },
    Series {
        shared: r#"{"model_type": "t5", "vocab_size": 32128, "relative_attention_num_buckets": 32,
            "layer_norm_epsilon": 1e-6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false,
            "dropout_rate": 0.1, "decoder_start_token_id": 0}"#,
        columns: T5,
        models: &[
            (&["google/flan-t5-small", "google/t5-v1_1-small"], &[512, 1024, 8, 6, 64]),
            (&["google/flan-t5-base", "google/t5-v1_1-base"], &[768, 2048, 12, 12, 64]),
            (&["google/flan-t5-large", "google/t5-v1_1-large"], &[1024, 2816, 24, 16, 64]),
            (&["google/flan-t5-xl", "google/t5-v1_1-xl"], &[2048, 5120, 24, 32, 64]),
            (&["google/flan-t5-xxl", "google/t5-v1_1-xxl"], &[4096, 10240, 24, 64, 64]),
        ],
    },
    Series {
        shared: r#"{"model_type": "mt5", "vocab_size": 250112, "relative_attention_num_buckets": 32,
            "layer_norm_epsilon": 1e-6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": false,
            "dropout_rate": 0.1, "decoder_start_token_id": 0}"#,
        columns: T5,
        models: &[
            (&["google/mt5-small"], &[512, 1024, 8, 6, 64]),
            (&["google/mt5-base"], &[768, 2048, 12, 12, 64]),
            (&["google/mt5-large"], &[1024, 2816, 24, 16, 64]),
            (&["google/mt5-xl"], &[2048, 5120, 24, 32, 64]),
            (&["google/mt5-xxl"], &[4096, 10240, 24, 64, 64]),
        ],
    },
];

/// The names of all built-in models.
pub fn builtin_names() -> impl Iterator<Item = &'static str> + Clone {
    SERIES.iter().flat_map(|series| series.models.iter().flat_map(|(names, _)| names.iter().copied()))
}

/// The built-in `config.json` of a Hub name.
pub(crate) fn builtin_config(name: &str) -> Option<Map<String, Value>> {
    let (series, values) = SERIES.iter().find_map(|series| {
        let found = series.models.iter().find(|(names, _)| names.contains(&name));
        found.map(|(_, values)| (series, values))
    })?;
    let mut config: Map<String, Value> =
        serde_json::from_str(series.shared).expect("a test reads every built-in config");
    for (column, value) in series.columns.iter().zip(*values) {
        let value = if *column == "tie_word_embeddings" { (*value == 1).into() } else { (*value).into() };
        config.insert((*column).to_owned(), value);
    }
    Some(config)
}

/// The built-in model that a name most likely means: one of the same family and size (`Meta-Llama-3-8B` has the shapes of
/// Llama-3.1-8B), else one of nearly that name, with or without its owner.
pub(crate) fn near_builtin(name: &str) -> Option<&'static str> {
    let own = without_owner(name);
    let by_spelling = || {
        let near = nearest(own, builtin_names().map(without_owner))?;
        builtin_names().find(|name| without_owner(name) == near)
    };
    let size = |name: &str| words(without_owner(name)).into_iter().find(|word| is_size(word));
    same_family_and_size(own).or_else(|| {
        nearest(name, builtin_names()).or_else(by_spelling).filter(|near| size(near) == size(name))
    })
}

fn same_family_and_size(name: &str) -> Option<&'static str> {
    let given = words(name);
    let size = given.iter().find(|word| is_size(word))?;
    let alike = |known: &str| {
        let words = words(without_owner(known));
        let is_same = words.contains(size) && given.iter().any(|word| stem(word) == stem(&words[0]));
        let shared = words.iter().filter(|word| given.contains(word)).count();
        // Of two that share as much, the one with fewer words of its own.
        is_same.then(|| (shared, usize::MAX - words.len()))
    };
    // The first of the best.
    let scored = builtin_names().filter_map(|known| Some((alike(known)?, known)));
    scored.reduce(|best, next| if next.0 > best.0 { next } else { best }).map(|(_, known)| known)
}

fn without_owner(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, name)| name)
}

fn words(name: &str) -> Vec<String> {
    name.to_ascii_lowercase().split(['-', '_']).map(str::to_owned).collect()
}

/// Whether a word counts parameters: 8b, 0.6b, 8x7b.
fn is_size(word: &str) -> bool {
    let number = word.strip_suffix('b').unwrap_or_default();
    !number.is_empty() && number.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | 'x'))
}

/// The family of a word: `qwen` of `qwen2.5`.
fn stem(word: &str) -> &str {
    word.trim_end_matches(|c: char| !c.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_near_a_built_in_one_suggest_it() {
        for (name, near) in [
            ("Qwen3-8B", Some("Qwen/Qwen3-8B")),
            ("qwen/qwen3-8b", Some("Qwen/Qwen3-8B")),
            ("unsloth/Qwen3-8B", Some("Qwen/Qwen3-8B")),
            ("meta-llama/Meta-Llama-3-8B", Some("meta-llama/Llama-3.1-8B")),
            ("meta-llama/Meta-Llama-3-70B-Instruct", Some("meta-llama/Llama-3.1-70B-Instruct")),
            ("Llama-3.1-8B-Instruct", Some("meta-llama/Llama-3.1-8B-Instruct")),
            ("mistral-7b", Some("mistralai/Mistral-7B-v0.3")),
            ("Mixtral-8x7B", Some("mistralai/Mixtral-8x7B-v0.1")),
            ("flan-t5-xl", Some("google/flan-t5-xl")),
            ("Qwen3-30B", Some("Qwen/Qwen3-30B-A3B")),
            ("Qwem/Qwem3-8B", Some("Qwen/Qwen3-8B")),
            ("gpt2", None),
            ("bigscience/bloom-7b1", None),
            ("tiiuae/falcon-7b", None),
            ("Qwen3-9000B", None),
        ] {
            assert_eq!(near_builtin(name), near, "{name}");
        }
    }
}
