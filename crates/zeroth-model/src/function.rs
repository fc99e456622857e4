//! What a model computes from its weights, field by field, so that two configs of equal shapes can be compared.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::ModelConfig;
use crate::layer::Positions;
use crate::rope::RopeScaling;

/// Fields of a config.json that change nothing of what is computed, or that others repeat.
const LEFT_OUT: [&str; 11] = [
    "architectures",
    "attention_dropout",
    "dtype",
    "initializer_factor",
    "initializer_range",
    "max_window_layers",
    "rope_scaling",
    "rope_theta",
    "router_jitter_noise",
    "torch_dtype",
    "use_cache",
];
/// Counts only where rotations depend on it.
const MAX_POSITIONS: &str = "max_position_embeddings";

/// The resolved fields of a config.json that decide what the model computes, by name. Values are JSON text, so that numbers are
/// kept exactly.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelFunction(BTreeMap<String, String>);

impl ModelFunction {
    /// How this model computes otherwise than the one that was `saved`, one phrase for each field, as `rms_norm_eps is 1e-5, that
    /// of the checkpoint 1e-6`.
    pub fn differences(&self, saved: &Self, place: &str) -> Vec<String> {
        let fields = self.0.keys().chain(saved.0.keys().filter(|field| !self.0.contains_key(*field)));
        let value = |function: &Self, field: &str| function.0.get(field).cloned();
        let shown = |value: Option<String>| value.unwrap_or_else(|| "absent".to_owned());
        fields
            .map(|field| (field, value(self, field), value(saved, field)))
            .filter(|(_, now, saved)| !is_same(now.as_deref(), saved.as_deref()))
            .map(|(field, now, saved)| format!("{field} is {}, that of {place} {}", shown(now), shown(saved)))
            .collect()
    }
}

impl ModelConfig {
    /// What the model computes from its weights.
    pub fn function(&self) -> ModelFunction {
        let mut fields = self.to_map();
        fields.retain(|field, _| !LEFT_OUT.contains(&field.as_str()));
        let depends_on_length = matches!(
            &self.first_attention().positions,
            Some(Positions::Rope(rope)) if matches!(rope.scaling, RopeScaling::Dynamic { .. })
        );
        if !depends_on_length {
            fields.remove(MAX_POSITIONS);
        }
        let mut function = BTreeMap::new();
        flatten("", &fields, &mut function);
        ModelFunction(function)
    }
}

/// Whether two values are the same, numbers whatever their text is.
fn is_same(one: Option<&str>, other: Option<&str>) -> bool {
    let number = |text: Option<&str>| text?.parse::<f64>().ok();
    one == other
        || number(one).zip(number(other)).is_some_and(|(one, other)| one.to_bits() == other.to_bits())
}

fn flatten(within: &str, fields: &Map<String, Value>, into: &mut BTreeMap<String, String>) {
    for (field, value) in fields {
        match value {
            Value::Object(inner) => flatten(&format!("{within}{field}."), inner, into),
            value => _ = into.insert(format!("{within}{field}"), value.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(change: &[(&str, Value)]) -> ModelConfig {
        let mut map = json!({
            "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 16,
            "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "norm_topk_prob": true, "max_position_embeddings": 64,
        });
        for (field, value) in change {
            map[field] = value.clone();
        }
        ModelConfig::from_map(map.as_object().unwrap(), "config.json").unwrap()
    }

    fn differences(change: &[(&str, Value)]) -> Vec<String> {
        let (now, saved) = (config(change).function(), config(&[]).function());
        // As a checkpoint keeps it.
        let saved: ModelFunction = serde_json::from_value(serde_json::to_value(saved).unwrap()).unwrap();
        now.differences(&saved, "the other")
    }

    #[test]
    fn fields_that_change_what_is_computed_are_named() {
        for (field, value, expected) in [
            ("num_experts_per_tok", json!(1), "num_experts_per_tok is 1, that of the other 2"),
            ("rms_norm_eps", json!(1e-5), "rms_norm_eps is 0.00001, that of the other 1e-6"),
            ("hidden_act", json!("gelu"), "hidden_act is \"gelu\", that of the other \"silu\""),
            ("norm_topk_prob", json!(false), "norm_topk_prob is false, that of the other true"),
            ("output_router_logits", json!(true), "output_router_logits is true, that of the other false"),
            ("rope_theta", json!(5e5), "rope_parameters.rope_theta is 500000.0, that of the other 10000.0"),
        ] {
            assert_eq!(differences(&[(field, value)]), [expected]);
        }
        let dynamic = json!({"rope_type": "dynamic", "factor": 2.0});
        let found = differences(&[("rope_scaling", dynamic)]);
        assert!(found.iter().any(|line| line.starts_with("rope_parameters.rope_type")), "{found:?}");
    }

    #[test]
    fn numbers_are_the_same_whatever_their_text_is() {
        let function = |eps: &str| ModelFunction([("rms_norm_eps".to_owned(), eps.to_owned())].into());
        assert_eq!(function("1e-5").differences(&function("0.00001"), "the other"), [""; 0]);
        assert_eq!(function("1e-5").differences(&function("1.1e-5"), "the other").len(), 1);
    }

    #[test]
    fn fields_that_change_nothing_do_not_count() {
        for (field, value) in [
            ("initializer_range", json!(0.5)),
            ("attention_dropout", json!(0.1)),
            ("torch_dtype", json!("bfloat16")),
            ("max_position_embeddings", json!(128)),
            ("hidden_act", json!("swish")),
            ("transformers_version", json!("9")),
        ] {
            assert_eq!(differences(&[(field, value)]), [""; 0], "{field}");
        }
    }
}
