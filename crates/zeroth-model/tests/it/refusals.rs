//! What is refused, and in which words; and where models are looked for.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use zeroth_model::{
    Family, HubCache, Lora, LoraTargets, ModelConfig, ModelError, Positions, RopeScaling, add_adapters,
    lora_table, table,
};

fn llama() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    })
}

fn read(config: &Value) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(&config.to_string(), "m/config.json")
}

/// The message for a llama with these fields changed; `null` removes one.
fn refusal(changes: &Value) -> String {
    let mut config = llama();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    config.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    read(&config).unwrap_err().to_string()
}

#[test]
fn fields_that_make_no_sense_have_each_their_own_sentence() {
    for (changes, message) in [
        (json!({"hidden_size": null}), "m/config.json: `hidden_size` is missing"),
        (
            json!({"hidden_size": null, "hiden_size": 64}),
            "m/config.json: `hidden_size` is missing; did you mean `hiden_size`?",
        ),
        (
            json!({"hidden_size": "64"}),
            "m/config.json: `hidden_size` is the text \"64\": it must be a whole number",
        ),
        (json!({"vocab_size": 1.5}), "m/config.json: `vocab_size` is 1.5: it must be a whole number"),
        (
            json!({"num_attention_heads": 0}),
            "m/config.json: `num_attention_heads` is 0: it must be from 1 to 1048576",
        ),
        (
            json!({"num_hidden_layers": -1}),
            "m/config.json: `num_hidden_layers` is -1: it must be from 1 to 4096",
        ),
        (
            json!({"num_key_value_heads": 3}),
            "m/config.json: `num_attention_heads` (4) is not a multiple of `num_key_value_heads` (3): every \
                 key-value head serves the same number of heads",
        ),
        (
            json!({"model_type": "qwen2", "architectures": null}),
            "m/config.json: `num_attention_heads` (4) is not a multiple of `num_key_value_heads` (32, the \
                 default of this family): every key-value head serves the same number of heads",
        ),
        (
            json!({"num_attention_heads": 5}),
            "m/config.json: `hidden_size` (64) is not a multiple of `num_attention_heads` (5), and `head_dim` \
                 does not say how wide a head is",
        ),
        (
            json!({"head_dim": 15}),
            "m/config.json: `head_dim` is 15: rotary positions turn pairs of numbers, so a head must be even",
        ),
        (
            json!({"head_dim": 1_048_576}),
            "m/config.json: `num_attention_heads × head_dim` is 4194304: it must be from 1 to 1048576",
        ),
        (
            json!({"tie_word_embeddings": "yes"}),
            "m/config.json: `tie_word_embeddings` is the text \"yes\": it must be true or false",
        ),
        (
            json!({"hidden_act": "sliu"}),
            "m/config.json: `hidden_act` is `sliu`, which is not one of silu, swish, relu, gelu, gelu_new, \
                 gelu_pytorch_tanh; did you mean `silu`?",
        ),
        (
            json!({"torch_dtype": "float8_e4m3fn"}),
            "m/config.json: `torch_dtype` is `float8_e4m3fn`, which is not one of float32, bfloat16, float16",
        ),
        (json!({"rms_norm_eps": 0.0}), "m/config.json: `rms_norm_eps` is 0: it must be a number above zero"),
    ] {
        assert_eq!(refusal(&changes), message);
    }
}

#[test]
fn ropes_that_are_not_known_are_named() {
    for (changes, message) in [
        (
            json!({"rope_scaling": {"rope_type": "lama3", "factor": 8.0}}),
            "m/config.json: `rope_scaling.rope_type` is `lama3`, which is not one of default, linear, dynamic, \
                 llama3, yarn; did you mean `llama3`?",
        ),
        (json!({"rope_scaling": {"type": "linear"}}), "m/config.json: `rope_scaling.factor` is missing"),
        (
            json!({"rope_parameters": {"rope_theta": -1}}),
            "m/config.json: `rope_parameters.rope_theta` is -1: it must be a number above zero",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "m/config.json: `partial_rotary_factor` is 0.5: only heads that are rotated whole are supported",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}),
            "m/config.json: `rope_parameters.full_attention` is an object: only one rope for all blocks is \
                 supported",
        ),
    ] {
        assert_eq!(refusal(&changes), message);
    }
}

#[test]
fn windows_and_experts_that_do_not_fit_the_model_are_named() {
    let qwen = json!({"model_type": "qwen2", "architectures": null, "num_key_value_heads": 2});
    let moe = json!({
        "model_type": "qwen3_moe", "architectures": null, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    });
    for (base, changes, message) in [
        (
            &qwen,
            json!({"layer_types": ["full_attention"]}),
            "m/config.json: `layer_types` is a list of 1: the model has 2 layers (`num_hidden_layers`)",
        ),
        (
            &qwen,
            json!({"num_hidden_layers": 1, "layer_types": ["full_attention", "full_attention"]}),
            "m/config.json: `layer_types` is a list of 2: the model has 1 layer (`num_hidden_layers`)",
        ),
        (
            &qwen,
            json!({"layer_types": ["full_attention", "linear_attention"]}),
            "m/config.json: `layer_types` is `linear_attention`, which is not one of full_attention, \
                 sliding_attention",
        ),
        (
            &moe,
            json!({"num_experts_per_tok": 5}),
            "m/config.json: `num_experts_per_tok` is 5: a block has 4 experts (`num_experts`), and a token goes to at \
                 most all of them",
        ),
        (&moe, json!({"num_experts": null}), "m/config.json: `num_experts` is missing"),
        (
            &moe,
            json!({"router_jitter_noise": 0.1}),
            "m/config.json: `router_jitter_noise` is 0.1: random noise on the input of routers is not yet built: set \
                 it to 0",
        ),
        (
            &moe,
            json!({"model_type": "mixtral", "num_local_experts": 0}),
            "m/config.json: `num_hidden_layers × num_local_experts` is 0: it must be from 1 to 262144",
        ),
        (
            &moe,
            json!({"mlp_only_layers": ["0"]}),
            "m/config.json: `mlp_only_layers` is a list: it must be a list of layer numbers",
        ),
        (
            &moe,
            json!({"num_hidden_layers": 4096, "num_experts": 4096}),
            "m/config.json: `num_hidden_layers × num_experts` is 16777216: it must be from 1 to 262144",
        ),
    ] {
        let mut all = base.clone();
        for (field, value) in changes.as_object().unwrap() {
            all[field] = value.clone();
        }
        assert_eq!(refusal(&all), message);
    }
}

#[test]
fn other_architectures_are_refused_by_name() {
    let known = Family::ALL.iter().map(|family| family.model_type()).collect::<Vec<_>>().join(", ");
    for (changes, message) in [
        (
            json!({"model_type": "gpt_oss", "architectures": null}),
            "m/config.json: models with `model_type` `gpt_oss` are not yet built; those built are KNOWN",
        ),
        (
            json!({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}),
            "m/config.json: models with `model_type` `deepseek_v3` are not yet built; those built are KNOWN",
        ),
        (
            json!({"model_type": "qwen3moe", "architectures": null}),
            "m/config.json: model_type `qwen3moe` is not a model family known here (KNOWN); did you mean `qwen3_moe`?",
        ),
        (
            json!({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}),
            "m/config.json: model_type `mamba2` (architectures: Mamba2ForCausalLM) is not a model family known \
                 here (KNOWN)",
        ),
        (
            json!({"model_type": null, "architectures": ["LLaMAForCausalLM2"]}),
            "m/config.json: `LLaMAForCausalLM2` in `architectures` is not a model family known here (KNOWN); did you mean `llama`?",
        ),
        (
            json!({"model_type": null, "architectures": null}),
            "m/config.json: a config without `model_type` and `architectures` is not a model family known here \
                 (KNOWN)",
        ),
        (
            json!({"architectures": ["LlamaForSequenceClassification"]}),
            "m/config.json: `architectures` names LlamaForSequenceClassification; of the family llama only \
                 LlamaForCausalLM is supported",
        ),
        (json!({"model_type": 7}), "m/config.json: `model_type` is 7: it must be a text"),
    ] {
        assert_eq!(refusal(&changes), message.replace("KNOWN", &known));
    }
}

#[test]
fn an_old_file_without_a_model_type_is_known_by_its_class() {
    let mut config = llama();
    config.as_object_mut().unwrap().shift_remove("model_type");
    assert_eq!(read(&config).unwrap(), read(&llama()).unwrap());
}

#[test]
fn text_that_is_not_json_is_refused_with_its_place() {
    let message = |text: &str| ModelConfig::from_json(text, "m/config.json").unwrap_err().to_string();
    assert_eq!(message("{\n  \"hidden_size\": 64,\n}"), "m/config.json: line 3, column 1: trailing comma");
    assert_eq!(message(""), "m/config.json: line 1, column 0: EOF while parsing a value");
    assert_eq!(message("[1]"), "m/config.json: a model's config is a JSON object, this is a list");
}

#[test]
fn a_yarn_rope_without_details_has_those_of_transformers() {
    let mut config = llama();
    config["max_position_embeddings"] = json!(128);
    config["rope_scaling"] =
        json!({"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 32});
    let config = read(&config).unwrap();
    let Some(Positions::Rope(rope)) = &config.first_attention().positions else { panic!("llama has a rope") };
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        original_max_positions: 32,
        attention_factor: None,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    assert_eq!(rope.scaling, expected);
}

#[test]
fn lora_targets_must_be_linear_maps_of_the_model() {
    let mut config = llama();
    config["tie_word_embeddings"] = json!(true);
    let base = table(&read(&config).unwrap());
    let refusal = |rank, targets| {
        lora_table(&base, &Lora { rank, targets, ..Lora::default() }).unwrap_err().to_string()
    };
    let named = |name: &str| LoraTargets::Named(vec!["v_proj".to_owned(), name.to_owned()]);
    assert_eq!(
        refusal(8, named("q_prj")),
        "the LoRA target `q_prj` matches no module of this model (q_proj, k_proj, v_proj, o_proj, gate_proj, \
             up_proj, down_proj); did you mean `q_proj`?"
    );
    assert_eq!(
        refusal(8, named("input_layernorm")),
        "the LoRA target `input_layernorm` is not a linear map (model.layers.0.input_layernorm); those are \
             q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    );
    assert_eq!(
        refusal(8, named("lm_head")),
        "the LoRA target `lm_head` is tied to model.embed_tokens.weight: this model has no matrix of its own \
             there"
    );
    assert_eq!(
        refusal(8, LoraTargets::Named(Vec::new())),
        "no LoRA target modules are given: name some, or say all-linear"
    );
    assert_eq!(
        refusal(0, LoraTargets::AllLinear),
        "a LoRA rank of 0 adds nothing: give 1 or more, 8 is usual"
    );
    assert_eq!(
        refusal(97, LoraTargets::AllLinear),
        "a LoRA rank of 97 is larger than model.layers.0.self_attn.q_proj (64 × 64): give at most 64"
    );
    let pattern = |text: &str| LoraTargets::Pattern(text.to_owned());
    assert_eq!(
        refusal(8, pattern("q_proj|v_proj")),
        "the LoRA target `q_proj|v_proj` matches no module of this model (q_proj, k_proj, v_proj, o_proj, \
             gate_proj, up_proj, down_proj)"
    );
    assert_eq!(
        refusal(8, pattern(".*layers.*")),
        "the LoRA target `.*layers.*` is not a linear map (model.layers.0.input_layernorm); those are q_proj, \
             k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    );
    assert!(
        refusal(8, pattern("(q_proj")).starts_with("the LoRA target `(q_proj` is no regular expression: ")
    );
}

#[test]
fn lora_numbers_must_give_a_scale_and_a_probability() {
    let base = table(&read(&llama()).unwrap());
    let refusal = |lora| add_adapters(&base, &lora).unwrap_err().to_string();
    for alpha in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let refused = refusal(Lora { alpha, ..Lora::default() });
        assert!(refused.starts_with(&format!("a LoRA alpha of {alpha} gives no scale")), "{refused}");
    }
    for dropout in [1.0, -0.1, f64::NAN] {
        let refused = refusal(Lora { dropout, ..Lora::default() });
        assert!(refused.starts_with(&format!("a LoRA dropout of {dropout} is no prob")), "{refused}");
    }
    assert_eq!(
        refusal(Lora { targets: LoraTargets::Named(vec!["lm_head".to_owned()]), ..Lora::default() }),
        "LoRA on the output projection (lm_head) is not yet built: leave it out of the target modules"
    );
}

#[test]
fn adapters_follow_the_linear_maps_they_adapt_and_are_all_that_is_trained() {
    let base = table(&read(&llama()).unwrap());
    let targets = LoraTargets::Pattern(r".*\.(q_proj|down_proj)".to_owned());
    let lora = Lora { rank: 4, alpha: 6.0, rslora: true, targets, ..Lora::default() };
    let adapted = add_adapters(&base, &lora).unwrap();
    let trained: Vec<_> = adapted.iter().filter(|p| p.trained).map(|p| p.name.clone()).collect();
    let own: Vec<_> = lora_table(&base, &lora).unwrap().iter().map(|p| p.name.clone()).collect();
    assert_eq!(trained, own);
    assert_eq!(adapted.adapters.unwrap().scale, 3.0);
    let block = &adapted.units[1].parameters;
    let place = block.iter().position(|p| p.name == "model.layers.0.self_attn.q_proj.weight").unwrap();
    let part = |at: usize| (block[at].name.as_str(), block[at].shape.as_slice());
    assert_eq!(
        part(place + 1),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", &[4, 64][..])
    );
    assert_eq!(
        part(place + 2),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", &[64, 4][..])
    );
    assert_eq!(adapted.iter().filter(|p| !p.trained).count(), base.iter().count());
    assert_eq!(adapted.trained(), lora_table(&base, &lora).unwrap().total());
}

fn write_config(folder: &Path, config: &Value) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_folder_and_its_config_file_are_the_same_model() {
    let place = tempfile::tempdir().unwrap();
    let cache = HubCache::new(place.path().join("no cache"));
    let folder = place.path().join("model");
    write_config(&folder, &llama());
    let file = folder.join("config.json");
    assert_eq!(cache.locate(folder.to_str().unwrap()).unwrap(), folder);
    assert_eq!(cache.locate(file.to_str().unwrap()).unwrap(), folder);
    assert_eq!(ModelConfig::from_folder(&folder).unwrap(), ModelConfig::from_folder(&file).unwrap());
}

#[test]
fn paths_without_a_model_say_what_is_there() {
    let place = tempfile::tempdir().unwrap();
    let cache = HubCache::new(place.path());
    let at = |name: &str| place.path().join(name).display().to_string();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("weights.bin"), "x").unwrap();
    let message = |path: &str| cache.locate(path).unwrap_err().to_string();
    assert_eq!(message(&at("absent")), format!("there is no model folder {}", at("absent")));
    let no_config = format!("{} has no config.json: it is not a Hugging Face model folder", at("empty"));
    assert_eq!(message(&at("empty")), no_config);
    assert_eq!(message(&at("empty/config.json")), no_config);
    assert_eq!(
        message(&at("weights.bin")),
        format!("{} is a file: give the model folder, or the config.json in it", at("weights.bin"))
    );
    assert_eq!(
        message(&at("weights.bin/config.json")),
        format!("there is no model folder {}", at("weights.bin/config.json"))
    );
}

#[test]
fn a_hub_name_is_found_in_the_cache() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("models--Qwen--Qwen3-8B");
    let snapshot = model.join("snapshots/0123abc");
    write_config(&snapshot, &llama());
    let cache = HubCache::new(place.path());
    // Fetched by revision: no branch, but one snapshot.
    assert_eq!(cache.locate("Qwen/Qwen3-8B").unwrap(), snapshot);

    let message = |name: &str| cache.locate(name).unwrap_err().to_string();
    let broken = |problem: &str| {
        format!(
            "the Hugging Face cache knows `Qwen/Qwen3-8B` but {problem} ({}); fetch it again with \
                 `hf download Qwen/Qwen3-8B`",
            model.display()
        )
    };
    write_config(&model.join("snapshots/4567def"), &llama());
    assert_eq!(message("Qwen/Qwen3-8B"), broken("has no refs/main that says which snapshot is meant"));

    fs::create_dir(model.join("refs")).unwrap();
    for forged in ["", "gone", "../..", "0123abc/..", "/"] {
        fs::write(model.join("refs/main"), forged).unwrap();
        assert_eq!(message("Qwen/Qwen3-8B"), broken("its refs/main names a snapshot that is not there"));
    }
    fs::write(model.join("refs/main"), "0123abc\n").unwrap();
    assert_eq!(cache.locate("Qwen/Qwen3-8B").unwrap(), snapshot);
    fs::remove_file(snapshot.join("config.json")).unwrap();
    assert_eq!(message("Qwen/Qwen3-8B"), broken("its snapshot has no config.json"));

    assert_eq!(
        message("Qwen/Qwen3-9B"),
        format!(
            "there is no folder `Qwen/Qwen3-9B`, and no model of that name in the Hugging Face cache {}; fetch \
                 it with `hf download Qwen/Qwen3-9B`, or give a folder; did you mean `Qwen/Qwen3-8B`?",
            place.path().display()
        )
    );
}

#[test]
fn the_cache_is_where_hugging_face_keeps_it() {
    let cache = |variables: &[(&str, &str)]| {
        HubCache::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    };
    let home = ("HOME", "/home/u");
    assert_eq!(cache(&[home]), HubCache::new("/home/u/.cache/huggingface/hub"));
    assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/x")]), HubCache::new("/x/huggingface/hub"));
    assert_eq!(cache(&[home, ("HF_HOME", "~/hf")]), HubCache::new("/home/u/hf/hub"));
    assert_eq!(cache(&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]), HubCache::new("/c"));
    assert_eq!(cache(&[home, ("HF_HUB_CACHE", "")]), HubCache::new("/home/u/.cache/huggingface/hub"));
}

/// transformers 5 writes `tie_word_embeddings: true` for a Flan-T5 it saves, with the head beside it.
#[test]
fn the_weights_of_a_t5_say_whether_its_head_is_tied() {
    let t5 = json!({
        "model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2,
        "vocab_size": 16, "scale_decoder_outputs": false, "tie_word_embeddings": true,
    });
    let place = tempfile::tempdir().unwrap();
    write_config(place.path(), &t5);
    let tied = || ModelConfig::from_folder(place.path()).unwrap().tied_head;
    assert!(tied(), "no weights");

    let weights = |names: &[&str]| {
        let empty = r#"{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}"#;
        let tensors: Vec<String> = names.iter().map(|name| format!("\"{name}\": {empty}")).collect();
        let header = format!("{{{}}}", tensors.join(", "));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        fs::write(place.path().join("model.safetensors"), file).unwrap();
    };
    weights(&["shared.weight"]);
    assert!(tied(), "no head among the weights");
    weights(&["shared.weight", "lm_head.weight"]);
    assert!(!tied(), "a head among the weights");
    fs::write(place.path().join("model.safetensors"), [255; 20]).unwrap();
    assert!(tied(), "a broken file says nothing");
    // One file goes before an index, as in transformers.
    fs::remove_file(place.path().join("model.safetensors")).unwrap();
    let index = json!({"weight_map": {"lm_head.weight": "a", "shared.weight": "b"}});
    fs::write(place.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(!tied(), "a head in the index of sharded weights");
}
