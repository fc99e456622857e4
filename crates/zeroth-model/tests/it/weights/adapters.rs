//! Adapter folders: those of PEFT, our own again, and wrong ones.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use zeroth_base::DType;
use zeroth_model::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, AdapterConfig, AdapterError, Lora, LoraTargets, ModelConfig,
    NewTensor, Parameter, ParameterTable, WeightWriter, adapter_config_json, adapter_parameters,
    add_adapters, lora_table, table, to_stored_layout,
};

use super::made::{self, Filled};

/// Keys of PEFT 0.10's `LoraConfig`; older versions refuse a file with others.
const OF_PEFT_0_10: &str = "alpha_pattern auto_mapping base_model_name_or_path bias fan_in_fan_out inference_mode \
    init_lora_weights layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_dropout \
    megatron_config megatron_core modules_to_save peft_type r rank_pattern revision target_modules task_type use_dora \
    use_rslora";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn base_of(case: &str) -> ParameterTable {
    let steps = fs::read_to_string(golden().join("lora").join(case).join("steps.json")).unwrap();
    let steps: Value = serde_json::from_str(&steps).unwrap();
    table(&ModelConfig::from_folder(&golden().join(steps["base"].as_str().unwrap())).unwrap())
}

#[test]
fn adapters_of_peft_are_read_and_written_again_byte_for_byte() {
    let mut cases = 0;
    for entry in fs::read_dir(golden().join("lora")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        cases += 1;
        let case = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let base = base_of(&case);
        let adapter = Adapter::open(&folder, &base).unwrap();
        assert_eq!(adapter.notes(), [""; 0], "{case}");
        let lora = adapter.lora();
        assert_eq!((lora.rank, lora.alpha, lora.dropout), (4, 6.0, 0.0), "{case}");
        let expected = if case.ends_with("rslora") { 3.0 } else { 1.5 };
        assert!((lora.scale() - expected).abs() < 1e-12, "{case}");
        let targets = if case.contains("-all") {
            LoraTargets::AllLinear
        } else {
            LoraTargets::Named(vec!["q_proj".to_owned(), "v_proj".to_owned()])
        };
        let ours = Lora { targets, ..lora.clone() };
        assert_eq!(adapter.table(), &lora_table(&base, &ours).unwrap(), "{case}");

        let written = TempDir::new().unwrap();
        let keys = write_again(&adapter, &ours, &base, written.path());
        let bytes = |folder: &Path| fs::read(folder.join(ADAPTER_WEIGHTS)).unwrap();
        assert!(bytes(written.path()) == bytes(&folder), "{case}: other bytes than PEFT's");
        let again = Adapter::open(written.path(), &base).unwrap();
        assert_eq!(again.table(), adapter.table(), "{case}");
        assert_eq!(again.config().base.as_deref(), Some("base"));

        let names: Vec<&String> = keys.keys().collect();
        assert!(names.is_sorted(), "{names:?}");
        assert!(keys.keys().all(|key| OF_PEFT_0_10.split(' ').any(|known| known == key)), "{names:?}");
        assert_eq!((&keys["lora_alpha"], &keys["r"]), (&json!(6), &json!(4)));
        if case.contains("-all") {
            let all = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
            assert_eq!(keys["target_modules"], json!(all));
        }
    }
    assert_eq!(cases, 12);
}

#[test]
fn adapters_of_encoder_decoders_are_read_and_written_as_peft_does() {
    let base = table(&ModelConfig::from_folder(&golden().join("t5/t5-relu-tied")).unwrap());
    for (case, names) in [("all", &["k", "o", "q", "v", "wi", "wo"] as &[&str]), ("qv", &["q", "v"])] {
        let folder = golden().join(format!("t5/lora/t5-relu-tied-{case}"));
        let adapter = Adapter::open(&folder, &base).unwrap();
        assert_eq!(adapter.notes(), [""; 0], "{case}");
        let targets = match case {
            "all" => LoraTargets::AllLinear,
            _ => LoraTargets::Named(names.iter().map(|name| (*name).to_owned()).collect()),
        };
        let ours = Lora { targets, ..adapter.lora().clone() };
        assert_eq!(adapter.table(), &lora_table(&base, &ours).unwrap(), "{case}");
        let written = TempDir::new().unwrap();
        let keys = write_again(&adapter, &ours, &base, written.path());
        let bytes = |folder: &Path| fs::read(folder.join(ADAPTER_WEIGHTS)).unwrap();
        assert!(bytes(written.path()) == bytes(&folder), "{case}: other bytes than PEFT's");
        assert_eq!((&keys["task_type"], &keys["target_modules"]), (&json!("SEQ_2_SEQ_LM"), &json!(names)));
    }
}

/// Writes an adapter that was read; returns its `adapter_config.json`.
fn write_again(adapter: &Adapter, lora: &Lora, base: &ParameterTable, folder: &Path) -> Map<String, Value> {
    let text = adapter_config_json(lora, base, "base");
    fs::write(folder.join(ADAPTER_CONFIG), &text).unwrap();
    // The base's parameters in the table are no matrices of the adapter.
    let table = add_adapters(base, lora).unwrap();
    let parameters = adapter_parameters(&table);
    let tensors = parameters.iter().flat_map(|parameter| NewTensor::all_of(parameter, DType::F32));
    let mut writer = WeightWriter::create_adapter(folder, tensors.collect()).unwrap();
    for parameter in parameters {
        assert_eq!(adapter.dtype(&parameter.name).unwrap(), DType::F32);
        let mut elements = vec![0.0; parameter.elements() as usize];
        adapter.read_f32(&parameter.name, 0..elements.len() as u64, &mut elements).unwrap();
        writer.append_parameter(parameter, &to_stored_layout(parameter, elements)).unwrap();
    }
    writer.finish().unwrap();
    serde_json::from_str(&text).unwrap()
}

#[test]
fn adapters_of_experts_are_read_and_written_as_peft_does() {
    let attention = ["k_proj", "o_proj", "q_proj", "v_proj"];
    for (case, projections) in [
        ("qwen3-moe-normalized", ["gate_proj", "up_proj", "down_proj"]),
        ("mixtral-no-window", ["w1", "w3", "w2"]),
    ] {
        let base = table(&ModelConfig::from_folder(&golden().join("moe").join(case)).unwrap());
        for (targets, ours) in [
            ("all", LoraTargets::AllLinear),
            (
                "all",
                LoraTargets::Named(
                    [&attention[..], &projections, &["gate"]]
                        .concat()
                        .iter()
                        .map(|n| (*n).to_owned())
                        .collect(),
                ),
            ),
            (
                "qv-experts",
                LoraTargets::Named(
                    [&["q_proj", "v_proj"][..], &projections]
                        .concat()
                        .iter()
                        .map(|n| (*n).to_owned())
                        .collect(),
                ),
            ),
            (
                "qv-experts",
                LoraTargets::Pattern(format!(r".*\.(q_proj|v_proj|experts\.({}))", projections.join("|"))),
            ),
        ] {
            let folder = golden().join(format!("moe/lora/{case}-{targets}"));
            let adapter = Adapter::open(&folder, &base).unwrap();
            assert_eq!(adapter.notes(), [""; 0], "{case}");
            let ours = Lora { targets: ours, ..adapter.lora().clone() };
            assert_eq!(adapter.table(), &lora_table(&base, &ours).unwrap(), "{case} {targets}");
            let written = TempDir::new().unwrap();
            let keys = write_again(&adapter, &ours, &base, written.path());
            let read = |folder: &Path, file: &str| fs::read(folder.join(file)).unwrap();
            assert!(
                read(written.path(), ADAPTER_WEIGHTS) == read(&folder, ADAPTER_WEIGHTS),
                "{case} {targets}: other bytes than PEFT's"
            );
            let theirs: Map<String, Value> = serde_json::from_slice(&read(&folder, ADAPTER_CONFIG)).unwrap();
            for key in
                ["target_modules", "target_parameters", "rank_pattern", "alpha_pattern", "r", "lora_alpha"]
            {
                assert_eq!(keys[key], theirs[key], "{case} {targets}: {key}");
            }
            assert_eq!(Adapter::open(written.path(), &base).unwrap().table(), adapter.table(), "{case}");
        }
    }
}

/// The table of a small qwen3_moe with a dense block.
fn moe_table() -> ParameterTable {
    let config = json!({
        "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 5, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6, "mlp_only_layers": [0],
    });
    table(&ModelConfig::from_json(&config.to_string(), "config.json").unwrap())
}

#[test]
fn a_matrix_for_each_expert_is_not_yet_read() {
    let folder = TempDir::new().unwrap();
    let mut map = plain();
    map.insert("target_modules".to_owned(), json!(["gate_proj", "up_proj", "down_proj"]));
    fs::write(folder.path().join(ADAPTER_CONFIG), Value::Object(map).to_string()).unwrap();
    let name = "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_A.weight";
    made::write(&folder.path().join(ADAPTER_WEIGHTS), &[(name.to_owned(), vec![2, 6], 0.5)]);
    let error = Adapter::open(folder.path(), &moe_table()).unwrap_err().to_string();
    assert!(error.contains(name) && error.contains("convert it once with PEFT 0.21"), "{error}");
}

#[test]
fn targets_of_experts_are_whole_and_without_dropout() {
    let base = moe_table();
    let lora = |names: &[&str], dropout: f64| Lora {
        rank: 2,
        dropout,
        targets: LoraTargets::Named(names.iter().map(|name| (*name).to_owned()).collect()),
        ..Lora::default()
    };
    let names = |lora: &Lora| -> Vec<String> {
        lora_table(&base, lora).unwrap().iter().map(|p| p.name.clone()).collect()
    };
    // As PEFT resolves it: the names of the dense block's projections stand for those of the experts.
    let all = names(&Lora { targets: LoraTargets::AllLinear, ..lora(&[], 0.0) });
    assert!(!all.iter().any(|name| name.contains("layers.0.mlp")), "{all:?}");
    assert!(all.iter().any(|name| name.ends_with("layers.1.mlp.gate.lora_A.weight")), "{all:?}");
    // Only one of the two: PEFT then has one wrapper.
    let down = lora_table(&base, &lora(&["down_proj"], 0.0)).unwrap();
    let stored: Vec<&str> = down.iter().flat_map(|p| &p.parts).map(|part| part.name.as_str()).collect();
    let of_peft = ["A", "B"].map(|x| format!("base_model.model.model.layers.1.mlp.experts.lora_{x}.weight"));
    assert_eq!(stored, of_peft);
    let refused = |lora: &Lora| add_adapters(&base, lora).unwrap_err().to_string();
    assert!(
        refused(&lora(&["gate_proj", "down_proj"], 0.0))
            .contains("`gate_proj` of experts is one matrix with up_proj")
    );
    for targets in [&["gate_proj", "up_proj"][..], &["gate"], &["down_proj", "q_proj"]] {
        assert!(
            refused(&lora(targets, 0.05))
                .contains("a LoRA dropout of 0.05 is not possible on experts and routers")
        );
    }
    assert!(add_adapters(&base, &lora(&["q_proj"], 0.05)).is_ok());
    let dense = refused(&lora(&["layers.0.mlp.down_proj"], 0.0));
    assert!(dense.contains("dense feed-forward parts only"), "{dense}");
    let unknown = refused(&lora(&["gate_prj"], 0.0));
    assert!(unknown.contains("did you mean `gate_proj`?"), "{unknown}");
    assert!(
        refused(&Lora { rank: 7, ..lora(&["gate_up_proj"], 0.0) })
            .contains("a LoRA rank of 14 is larger than")
    );
}

#[test]
fn writing_an_adapter_leaves_a_model_in_the_folder_alone() {
    let folder = TempDir::new().unwrap();
    let (base, model) = (made::tiny_table(true), folder.path().join("model.safetensors"));
    made::write(&model, &made::filled(&base));
    let before = fs::read(&model).unwrap();
    let adapters = lora_table(&base, &config(&plain()).unwrap().lora()).unwrap();
    let parameters: Vec<&Parameter> = adapter_parameters(&adapters);
    let tensors = parameters.iter().flat_map(|parameter| NewTensor::all_of(parameter, DType::F32));
    let mut writer = WeightWriter::create_adapter(folder.path(), tensors.collect()).unwrap();
    for parameter in parameters {
        writer.append_parameter(parameter, &vec![0.5; parameter.elements() as usize]).unwrap();
    }
    let written = writer.finish().unwrap();
    assert_eq!(written.files, [folder.path().join(ADAPTER_WEIGHTS)]);
    assert_eq!(fs::read(&model).unwrap(), before);
}

/// The least that a config says.
fn plain() -> Map<String, Value> {
    let plain = json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"],
        "base_model_name_or_path": "base", "task_type": "CAUSAL_LM", "peft_version": "0.17.0",
    });
    plain.as_object().unwrap().clone()
}

fn config(map: &Map<String, Value>) -> Result<AdapterConfig, String> {
    AdapterConfig::from_map(map).map_err(|error| error.to_string())
}

fn with(key: &str, value: Value) -> Map<String, Value> {
    let mut map = plain();
    map.insert(key.to_owned(), value);
    map
}

#[test]
fn configs_that_mean_something_else_are_refused_by_key() {
    for (key, value, words) in [
        ("use_dora", json!(true), "DoRA is not yet built"),
        ("modules_to_save", json!(["lm_head"]), "not yet built"),
        ("bias", json!("all"), "not yet built"),
        ("lora_bias", json!(true), "not yet built"),
        ("rank_pattern", json!({"q_proj": 8}), "ranks by module are not yet built"),
        ("alpha_pattern", json!({"q_proj": 8}), "not yet built"),
        ("layers_to_transform", json!([0]), "not yet built"),
        ("layers_to_transform", json!(0), "not yet built"),
        ("use_qalora", json!(true), "not yet built"),
        ("init_lora_weights", json!("pissa"), "changes the base"),
        ("init_lora_weights", json!("pissa_niter_4"), "changes the base"),
        ("init_lora_weights", json!("OLoRA"), "changes the base"),
        ("init_lora_weights", json!("loftq"), "changes the base"),
        ("peft_type", json!("IA3"), "not yet read"),
        ("peft_type", json!(null), "missing"),
        ("fan_in_fan_out", json!(true), "not yet built"),
        ("exclude_modules", json!("lm_head"), "not yet built"),
        ("target_parameters", json!("gate_up_proj"), "a list of parameter names"),
        ("trainable_token_indices", json!([5]), "not yet built"),
        ("layer_replication", json!([[0, 1]]), "not yet built"),
        ("r", json!(0), "from 1 to"),
        ("r", json!("8"), "whole number"),
        ("r", json!(1_000_000_000), "from 1 to"),
        ("r", json!(1e9), "whole number"),
        ("r", json!(-4), "from 1 to"),
        ("r", json!(null), "missing"),
        ("lora_alpha", json!("nan"), "a number"),
        ("lora_alpha", json!(0), "above zero"),
        ("lora_alpha", json!(-1.5), "above zero"),
        ("lora_alpha", json!(1e300), "fp32"),
        ("lora_dropout", json!(1), "below 1"),
        ("lora_dropout", json!(-0.1), "at least zero"),
        ("use_rslora", json!("yes"), "true or false"),
        ("target_modules", json!([]), "must be named"),
        ("target_modules", json!(null), "missing"),
        ("target_modules", json!([1, 2]), "list of module names"),
        ("target_modules", json!({"q_proj": 1}), "list of module names"),
        ("task_type", json!(3), "a text"),
    ] {
        let error = config(&with(key, value.clone())).unwrap_err();
        assert!(error.contains(&format!("`{key}`")) && error.contains(words), "{key} {value}: {error}");
    }
}

#[test]
fn adapters_of_gate_and_up_have_twice_the_rank() {
    let mut map = with("target_parameters", json!(["mlp.experts.gate_up_proj"]));
    let error = config(&map).unwrap_err();
    assert!(error.contains("`rank_pattern` is not given") && error.contains("not yet built"), "{error}");
    map.insert("rank_pattern".to_owned(), json!({r".*\.gate_up_proj": 4}));
    map.insert("alpha_pattern".to_owned(), json!({r".*\.gate_up_proj": 4}));
    assert!(config(&map).unwrap_err().contains("`alpha_pattern`"));
    map.insert("alpha_pattern".to_owned(), json!({r".*\.gate_up_proj": 8}));
    let names = ["q_proj", "down_proj", "mlp.experts.gate_up_proj"].map(str::to_owned).to_vec();
    assert_eq!(config(&map).unwrap().targets, LoraTargets::Named(names));
    map.insert("target_modules".to_owned(), json!("all-linear"));
    assert!(config(&map).unwrap_err().contains("not yet read"));
}

#[test]
fn harmless_keys_are_passed_over_and_unknown_ones_noted() {
    assert_eq!(config(&plain()).unwrap().notes, [""; 0]);
    for (key, value) in [
        ("use_dora", json!(false)),
        ("modules_to_save", json!([])),
        ("rank_pattern", json!({})),
        ("init_lora_weights", json!("gaussian")),
        ("megatron_core", json!("megatron.core")),
        ("some_new_switch", json!(false)),
    ] {
        assert_eq!(config(&with(key, value)).unwrap().notes, [""; 0], "{key}");
    }
    let notes = config(&with("some_new_switch", json!(7))).unwrap().notes;
    assert!(matches!(notes.as_slice(), [note] if note.contains("`some_new_switch`")), "{notes:?}");
    let notes = config(&with("task_type", json!("SEQ_CLS"))).unwrap().notes;
    assert!(matches!(notes.as_slice(), [note] if note.contains("SEQ_CLS")), "{notes:?}");
    let all = config(&with("target_modules", json!("All-Linear"))).unwrap();
    assert_eq!(all.targets, LoraTargets::AllLinear);
    let pattern = config(&with("target_modules", json!(r".*\.q_proj"))).unwrap();
    assert_eq!(pattern.targets, LoraTargets::Pattern(r".*\.q_proj".to_owned()));
}

/// A folder with this config and the matrices that `change` makes of the right ones.
fn folder(map: &Map<String, Value>, change: impl FnOnce(&mut Vec<Filled>)) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join(ADAPTER_CONFIG), Value::Object(map.clone()).to_string()).unwrap();
    let mut tensors =
        made::filled(&lora_table(&made::tiny_table(true), &config(&plain()).unwrap().lora()).unwrap());
    change(&mut tensors);
    made::write(&folder.path().join(ADAPTER_WEIGHTS), &tensors);
    folder
}

fn open(folder: &TempDir) -> Result<Adapter, AdapterError> {
    Adapter::open(folder.path(), &made::tiny_table(true))
}

const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj";

#[test]
fn matrices_that_do_not_fit_are_named() {
    open(&folder(&plain(), |_| ())).unwrap();
    let refused = |folder: &TempDir, words: &[&str]| {
        let error = open(folder).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word}: {error}");
        }
    };
    let lacking =
        folder(&plain(), |tensors| tensors.retain(|(name, ..)| name != &format!("{Q}.lora_A.weight")));
    refused(&lacking, &[&format!("`{Q}.lora_A.weight` is missing"), "the other matrix"]);
    let other_base = folder(&plain(), |tensors| tensors[0].1 = vec![2, 64]);
    refused(&other_base, &[&format!("`{Q}.lora_A.weight`"), "[2, 64]", "[2, 2]"]);
    refused(&folder(&with("r", json!(1)), |_| ()), &["[2, 2]", "[1, 2]", "[2, 1]", "down_proj"]);
    let extra = folder(&plain(), |tensors| {
        tensors.push((format!("{Q}.lora_magnitude_vector"), vec![2], 0.0));
        tensors[1].0 = tensors[1].0.replace("q_proj", "q_prof");
    });
    refused(&extra, &["lora_magnitude_vector", "names no module", "q_prof", "did you mean", "is missing"]);

    // Targets of another family are passed over beside good ones; alone, those that exist are listed.
    let some = folder(&with("target_modules", json!(["q_proj", "c_attn", "down_proj"])), |_| ());
    assert!(open(&some).unwrap().notes()[0].contains("c_attn"));
    refused(
        &folder(&with("target_modules", json!(["c_attn"])), |_| ()),
        &["`c_attn`", "q_proj", "gate_proj"],
    );
    refused(&folder(&with("target_modules", json!("(")), |_| ()), &["regular expression"]);
    refused(&folder(&with("target_modules", json!(["embed_tokens"])), |_| ()), &["not a linear map"]);
    refused(&folder(&with("target_modules", json!(["lm_head"])), |_| ()), &["tied"]);
    refused(&folder(&with("r", json!(64)), |_| ()), &["rank of 64"]);
}

#[test]
fn damaged_and_foreign_folders_are_refused_with_what_to_do() {
    let good = folder(&plain(), |_| ());
    let path = good.path().join(ADAPTER_WEIGHTS);
    let refused = |words: &str| {
        let error = open(&good).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    };
    let bytes = fs::read(&path).unwrap();
    for length in [0, 7, 8, 60, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        refused(ADAPTER_WEIGHTS);
    }
    let mut integers = bytes.clone();
    let dtype = integers.windows(5).position(|window| window == b"\"F32\"").unwrap();
    integers[dtype + 1] = b'I';
    fs::write(&path, integers).unwrap();
    refused("stored as I32");
    fs::remove_file(&path).unwrap();
    refused("copy the whole folder");
    fs::write(good.path().join("adapter_model.bin"), b"PK").unwrap();
    refused("save_pretrained(NEW_DIR)");
    fs::create_dir(&path).unwrap();
    refused(ADAPTER_WEIGHTS);
    for (text, words) in [
        ("{", "EOF"),
        ("[]", "a list"),
        (r#"{"r": NaN}"#, "line 1 column 7"),
        (r#"{"peft_type": "LORA", "r": 1e999}"#, "out of range"),
        ("{}", "`peft_type` is missing"),
    ] {
        fs::write(good.path().join(ADAPTER_CONFIG), text).unwrap();
        refused(words);
    }
    fs::create_dir(good.path().join("model")).unwrap();
    fs::rename(good.path().join(ADAPTER_CONFIG), good.path().join("model").join(ADAPTER_CONFIG)).unwrap();
    refused("model is one");
    let nowhere = Adapter::open(&good.path().join("nowhere"), &made::tiny_table(true)).unwrap_err();
    assert!(nowhere.to_string().contains("there is no adapter folder"), "{nowhere}");
}
