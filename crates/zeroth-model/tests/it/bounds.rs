//! Numbers of a config.json that are each possible and together none of a model, or that no type of a run can hold.

use serde_json::{Value, json};
use zeroth_model::{MAX_PARAMETERS, ModelConfig, table};

fn read(changes: &Value) -> Result<ModelConfig, String> {
    let mut config = json!({
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 100, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    ModelConfig::from_json(&config.to_string(), "m/config.json").map_err(|error| error.to_string())
}

#[test]
fn sizes_that_together_are_no_model_are_refused() {
    let widest = 1 << 20;
    for changes in [
        json!({"hidden_size": widest, "num_hidden_layers": 4096, "num_experts": 64, "moe_intermediate_size": widest}),
        json!({"hidden_size": widest, "num_hidden_layers": 4096, "intermediate_size": widest, "num_experts": 0}),
        json!({"hidden_size": widest, "vocab_size": 1 << 28}),
    ] {
        let message = read(&changes).unwrap_err();
        assert!(message.contains("`number of parameters` is about "), "{message}");
        assert!(message.ends_with(&format!("it must be from 1 to {MAX_PARAMETERS}")), "{message}");
    }
    // Qwen3-235B-A22B is far within.
    let large = json!({
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151_936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    });
    assert_eq!(table(&read(&large).unwrap()).total(), 235_093_634_560);
}

#[test]
fn numbers_that_fp32_cannot_hold_are_refused() {
    for (field, value) in [("rms_norm_eps", 1e300), ("rms_norm_eps", 1e-300), ("rope_theta", 1e39)] {
        let message = read(&json!({ field: value })).unwrap_err();
        assert!(message.contains(&format!("`{field}` is ")), "{message}");
        assert!(message.ends_with("it must be a number above zero that fp32 can hold"), "{message}");
    }
    read(&json!({"rms_norm_eps": 1e-6, "rope_theta": 5e6})).unwrap();
}
