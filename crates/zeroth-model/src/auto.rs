//! The hidden size that Hugging Face's "auto" rules read, from the `config.json` of any model, known here or not.

use serde_json::{Map, Value};

/// What `model.config.hidden_size` reads in models whose config has another name for it: transformers maps the
/// attribute (the `attribute_map` of its config classes, version 5.22). The name, and the `model_type`s that have it.
const OTHER_NAMES: &[(&str, &str)] = &[
    (
        "d_model",
        "autoformer bart bigbird_pegasus blenderbot blenderbot-small conditional_detr d_fine dbrx \
         deformable_detr deimv2 detr fsmt funnel grounding-dino informer led longt5 m2m_100 marian mbart \
         mm-grounding-dino mpt mt5 mvp nllb-moe patchtsmixer patchtst pegasus pegasus_x plbart pop2piano \
         pp_doclayout_v2 pp_doclayout_v3 pp_formulanet_text qwen2_5_omni_audio_encoder \
         qwen2_audio_encoder qwen3_asr_encoder qwen3_omni_moe_audio_encoder rt_detr rt_detr_v2 \
         speech_to_text switch_transformers t5 table-transformer time_series_transformer trocr udop umt5 \
         whisper xglm xlnet",
    ),
    ("n_embd", "codegen ctrl gpt-sw3 gpt2 gpt_bigcode gptj imagegpt openai-gpt"),
    ("embed_dim", "idefics_vision kosmos_2_5_text_model kosmos_2_text_model swin2sr"),
    ("hidden_dim", "granite_speech_encoder granite_speech_plus_encoder mask2former oneformer"),
    ("emb_dim", "flaubert xlm"),
    ("dim", "distilbert"),
    ("mask_feature_size", "maskformer"),
    ("text_hidden_size", "inkling_audio"),
];

/// The hidden size from which transformers fills bucket sizes that a DeepSpeed config leaves at "auto":
/// `hidden_size`, else the largest of `hidden_sizes`, else those two of `text_config`. `None` where transformers
/// would refuse.
///
/// T5 counts: its config has `d_model`, and transformers answers `hidden_size` with it.
pub fn hidden_size_for_auto(config: &Map<String, Value>) -> Option<u64> {
    own_hidden_size(config).or_else(|| own_hidden_size(config.get("text_config")?.as_object()?))
}

fn own_hidden_size(config: &Map<String, Value>) -> Option<u64> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let field = OTHER_NAMES
        .iter()
        .find_map(|(field, types)| types.split(' ').any(|name| name == model_type).then_some(*field))
        .unwrap_or("hidden_size");
    config
        .get(field)
        .and_then(Value::as_u64)
        .or_else(|| config.get("hidden_sizes")?.as_array()?.iter().filter_map(Value::as_u64).max())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(text: &str) -> Option<u64> {
        let config: Map<String, Value> = serde_json::from_str(text).unwrap();
        hidden_size_for_auto(&config)
    }

    #[test]
    fn the_places_are_searched_in_the_order_of_transformers() {
        assert_eq!(
            hidden(r#"{"hidden_size": 8, "hidden_sizes": [9], "text_config": {"hidden_size": 7}}"#),
            Some(8)
        );
        assert_eq!(
            hidden(r#"{"hidden_sizes": [32, 256, 64], "text_config": {"hidden_size": 7}}"#),
            Some(256)
        );
        assert_eq!(hidden(r#"{"text_config": {"hidden_size": 7, "hidden_sizes": [9]}}"#), Some(7));
        assert_eq!(hidden(r#"{"text_config": {"hidden_sizes": [3, 5]}}"#), Some(5));
        assert_eq!(hidden(r#"{"vision_config": {"hidden_size": 7}}"#), None);
    }

    #[test]
    fn mapped_names_count_only_for_the_models_that_map_them() {
        assert_eq!(hidden(r#"{"model_type": "t5", "d_model": 512}"#), Some(512));
        assert_eq!(hidden(r#"{"model_type": "gpt2", "n_embd": 768}"#), Some(768));
        assert_eq!(hidden(r#"{"model_type": "mamba", "d_model": 512}"#), None);
        assert_eq!(hidden(r#"{"text_config": {"model_type": "mpt", "d_model": 64}}"#), Some(64));
    }
}
