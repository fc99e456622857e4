//! Rotary frequencies of every scaling against transformers.

use serde_json::{Value, json};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};

#[test]
fn frequencies_and_scales_are_those_of_transformers() {
    let golden: Value = serde_json::from_str(include_str!("../golden/rope.json")).unwrap();
    let (longest, max_positions) = (golden["length"].as_u64().unwrap(), &golden["max_positions"]);
    let tables = golden["tables"].as_object().unwrap();
    assert_eq!(tables.len(), 14);
    for (name, expected) in tables {
        let config = json!({
            "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "head_dim": expected["head_dim"], "intermediate_size": 8, "vocab_size": 8,
            "max_position_embeddings": max_positions, "rope_parameters": expected["rope_parameters"],
        });
        let config = ModelConfig::from_json(&config.to_string(), name).unwrap();
        let graph = forward(&config, &table(&config), BatchTokens::of_tokens(1)).unwrap();
        let [rotary] = &graph.rotaries[..] else { panic!("one rotary embedding") };
        let frequencies = expected["frequencies"].as_array().unwrap();
        let found: Vec<f64> = rotary.frequencies_at(longest).collect();
        assert_eq!(found.len(), frequencies.len(), "{name}");
        for (found, expected) in found.iter().zip(frequencies) {
            let expected = expected.as_f64().unwrap();
            // transformers computes in f32.
            assert!((found - expected).abs() <= 1e-6 * expected, "{name}: {found} {expected}");
        }
        let scale = expected["scale"].as_f64().unwrap();
        assert!((rotary.scale - scale).abs() <= 1e-7, "{name}: {} {scale}", rotary.scale);
    }
}
