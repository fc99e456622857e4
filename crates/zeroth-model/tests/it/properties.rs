//! What holds for every config that is accepted, and for every text that is not.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use serde_json::{Value, json};
use zeroth_model::{
    Layer, Lora, ModelConfig, Parameter, ParameterKind, ParameterTable, ParameterUnit, hidden_size_for_auto,
    lora_table, table,
};

prop_compose! {
    /// A valid config of a decoder-only family.
    fn decoder()(
        family in prop::sample::select(vec!["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]),
        (kv_heads, group, half_head) in (1u64..5, 1u64..5, 1u64..20),
        (hidden, ffn, blocks, vocab) in (1u64..100, 1u64..100, 1u64..9, 1u64..500),
        (attention_bias, mlp_bias, tied) in any::<(bool, bool, bool)>(),
        (experts, per_token, width, step) in (1u64..9, 1u64..9, 1u64..50, 1u64..4),
        dense in prop::collection::vec(0u64..9, 0..3),
    ) -> Value {
        json!({
            "model_type": family, "hidden_size": hidden, "intermediate_size": ffn,
            "num_hidden_layers": blocks, "num_attention_heads": kv_heads * group,
            "num_key_value_heads": kv_heads, "head_dim": 2 * half_head, "vocab_size": vocab,
            "attention_bias": attention_bias, "mlp_bias": mlp_bias, "tie_word_embeddings": tied,
            "num_experts": experts, "num_local_experts": experts, "num_experts_per_tok": per_token.min(experts),
            "moe_intermediate_size": width, "decoder_sparse_step": step, "mlp_only_layers": dense,
        })
    }
}

prop_compose! {
    /// A valid config of T5 or mT5.
    fn encoder_decoder()(
        family in prop::sample::select(vec!["t5", "mt5"]),
        (hidden, head, ffn, heads, vocab) in (1u64..100, 1u64..40, 1u64..100, 1u64..9, 1u64..500),
        (blocks, decoder_blocks) in (1u64..9, prop::option::of(1u64..9)),
        proj in prop::sample::select(vec!["relu", "gated-gelu", "gated-silu", "gelu"]),
        (buckets, tied) in (4u64..40, any::<bool>()),
    ) -> Value {
        json!({
            "model_type": family, "d_model": hidden, "d_kv": head, "d_ff": ffn, "num_heads": heads,
            "vocab_size": vocab, "num_layers": blocks, "num_decoder_layers": decoder_blocks,
            "feed_forward_proj": proj, "relative_attention_num_buckets": buckets,
            "tie_word_embeddings": tied,
        })
    }
}

fn read(config: &Value) -> ModelConfig {
    ModelConfig::from_json(&config.to_string(), "config.json").unwrap()
}

/// Names and shapes of a block, with its own number replaced.
fn pattern(unit: &ParameterUnit) -> Vec<(String, Vec<u64>)> {
    let number = unit.name.to_string().rsplit_once(' ').unwrap().1.to_owned();
    let from = format!(".{number}.");
    unit.parameters.iter().map(|p| (p.name.replacen(&from, ".N.", 1), p.shape.clone())).collect()
}

fn check(config: &ModelConfig) -> ParameterTable {
    let table = table(config);
    let parameters: u64 = table.iter().map(Parameter::elements).sum();
    assert_eq!(table.total(), parameters);
    assert!(table.active_per_token() <= table.total());

    let names: HashSet<&str> = table.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names.len(), table.iter().count(), "two parameters have one name");
    for parameter in table.iter() {
        assert!(parameter.aliases.iter().all(|alias| !names.contains(alias)), "{parameter:?}");
        assert!(parameter.elements() > 0, "{parameter:?}");
    }
    // DeepSpeed's largest layer, the plain way: sum by module on disk, whatever the order.
    let mut modules: HashMap<String, u64> = HashMap::new();
    for parameter in table.iter() {
        let of_parts: u64 = parameter.parts.iter().map(|part| part.shape.iter().product::<u64>()).sum();
        assert!(parameter.parts.is_empty() || of_parts == parameter.elements(), "{parameter:?}");
        let whole = parameter.parts.is_empty().then(|| (parameter.name.as_str(), parameter.elements()));
        let parts = parameter.parts.iter().map(|p| (p.name.as_str(), p.shape.iter().product()));
        for (name, elements) in whole.into_iter().chain(parts) {
            *modules.entry(name.rsplit_once('.').unwrap().0.to_owned()).or_default() += elements;
        }
    }
    let largest = modules.into_values().max();
    assert_eq!(table.largest_module().map(|(_, elements)| elements), largest);
    assert_eq!(table.blocks().count() as u64, config.blocks());
    table
}

proptest! {
    #[test]
    fn tables_of_decoders_are_sound(json in decoder()) {
        let config = read(&json);
        let table = check(&config);
        for (index, unit) in table.blocks().enumerate() {
            let has_experts = |layer: &Layer| layer.experts().is_some();
            let own = has_experts(&config.layers[index]);
            let alike = config.layers.iter().position(|layer| has_experts(layer) == own);
            let first = table.blocks().nth(alike.unwrap()).unwrap();
            prop_assert_eq!(pattern(unit), pattern(first));
        }
    }

    #[test]
    fn tables_of_encoder_decoders_are_sound(json in encoder_decoder()) {
        let config = read(&json);
        let table = check(&config);
        let (encoder, decoder): (Vec<_>, Vec<_>) =
            table.blocks().partition(|unit| unit.name.to_string().starts_with("encoder"));
        for stack in [encoder, decoder] {
            for unit in &stack {
                prop_assert_eq!(pattern(unit), pattern(stack[0]));
            }
        }
    }

    #[test]
    fn adapters_stand_beside_every_linear_but_the_head(
        json in prop_oneof![decoder(), encoder_decoder()],
        rank in 1u64..3,
    ) {
        let base = table(&read(&json));
        let rank_of = |p: &Parameter| if p.name.ends_with("gate_up_proj") { 2 * rank } else { rank };
        let sides = |p: &Parameter| p.shape[p.shape.len() - 2..].to_vec();
        let Ok(adapters) = lora_table(&base, &Lora { rank, ..Lora::default() }) else {
            // Only a model with a matrix that is thinner than the rank.
            let is_thin = |p: &Parameter| sides(p).into_iter().all(|side| side < rank_of(p));
            prop_assert!(base.iter().any(|p| p.kind.is_linear() && is_thin(p)));
            return Ok(());
        };
        // Beside experts, dense feed-forward parts have none.
        let has_experts = base.iter().any(|p| p.kind == ParameterKind::Expert);
        let is_dense = |p: &Parameter| p.kind == ParameterKind::Linear && p.name.contains(".mlp.");
        let targets = base.iter().filter(|p| {
            p.kind.is_linear() && p.kind != ParameterKind::Head && !(has_experts && is_dense(p))
        });
        let of = |p: &Parameter| {
            let experts = if p.kind == ParameterKind::Expert { p.shape[0] } else { 1 };
            experts * rank_of(p) * sides(p).iter().sum::<u64>()
        };
        prop_assert_eq!(adapters.total(), targets.map(of).sum::<u64>());
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".*") {
        let _ = ModelConfig::from_json(&text, "config.json");
    }

    #[test]
    fn any_bytes_in_a_folder_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), bytes).unwrap();
        let _ = ModelConfig::from_folder(folder.path());
    }

    /// One field of a good config is replaced by something else; what is still accepted has a table.
    #[test]
    fn a_spoiled_config_is_read_or_refused(
        json in prop_oneof![decoder(), encoder_decoder()],
        field in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![
            json!(null), json!(0), json!(1), json!(3), json!(-1), json!(1.5), json!(u64::MAX), json!("4"),
            json!(true), json!([]), json!([7, "x"]), json!({}), json!({"rope_type": "yarn"}),
            json!({"full_attention": {}}), json!(1_u64 << 20), json!(1_u64 << 12),
        ]),
        extra in prop::option::of(prop::sample::select(vec![
            "rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "use_sliding_window",
            "layer_types", "dtype", "torch_dtype", "hidden_act", "rms_norm_eps", "architectures",
            "max_position_embeddings", "partial_rotary_factor", "text_config", "hidden_sizes",
        ])),
    ) {
        let mut json = json;
        let object = json.as_object_mut().unwrap();
        let field = match extra {
            Some(extra) => extra.to_owned(),
            None => object.keys().nth(field.index(object.len())).unwrap().clone(),
        };
        object.insert(field, value);
        let _ = hidden_size_for_auto(object);
        if let Ok(config) = ModelConfig::from_json(&json.to_string(), "config.json") {
            prop_assert!(table(&config).total() > 0);
        }
    }
}
