//! Our tables against what transformers and peft build from the same `config.json` files. `make_golden.py` wrote the
//! expected values; see there for what each one is.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zeroth_model::{
    Lora, LoraTargets, ModelConfig, Parameter, ParameterTable, Positions, Rope, RopeScaling, UnitName,
    hidden_size_for_auto, lora_table, read_config, table,
};

fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn folder(name: &str) -> PathBuf {
    tests_folder().join("configs").join(name)
}

fn config(name: &str) -> ModelConfig {
    ModelConfig::from_folder(&folder(name)).unwrap()
}

fn facts(version: u32) -> Map<String, Value> {
    let path = tests_folder().join(format!("golden/transformers-{version}.json"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Every model of both versions: (label, folder name, expected values).
fn all() -> Vec<(String, String, Value)> {
    let models = |version: u32| {
        let Value::Object(models) = facts(version)["models"].take() else { panic!("models is an object") };
        models
            .into_iter()
            .map(move |(name, expected)| (format!("{name}, transformers {version}"), name, expected))
    };
    models(4).chain(models(5)).collect()
}

fn lines(table: &ParameterTable) -> Vec<String> {
    let stored = |p: &Parameter| match p.parts.as_slice() {
        [] => vec![format!("{} {:?}", p.name, p.shape)],
        parts => parts.iter().map(|part| format!("{} {:?}", part.name, part.shape)).collect(),
    };
    let mut lines: Vec<String> = table.iter().flat_map(stored).collect();
    lines.sort();
    lines
}

fn fnv(lines: &[String]) -> String {
    let bytes = lines.iter().flat_map(|line| line.bytes().chain([b'\n']));
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    format!("{hash:016x}")
}

#[test]
fn names_and_shapes_are_those_on_disk() {
    let mut compared = 0;
    for (label, name, expected) in all() {
        let lines = lines(&table(&config(&name)));
        if let Some(list) = expected["list"].as_array() {
            assert_eq!(lines, list.iter().map(|line| line.as_str().unwrap()).collect::<Vec<_>>(), "{label}");
        }
        if let Some(hash) = expected["fnv"].as_str() {
            assert_eq!(lines.len() as u64, expected["tensors"].as_u64().unwrap(), "{label}");
            assert_eq!(fnv(&lines), hash, "{label}");
            compared += 1;
        }
    }
    assert!(compared >= 50, "only {compared} models have a hash");
}

#[test]
fn counts_are_exact() {
    for (label, name, expected) in all() {
        let table = table(&config(&name));
        assert_eq!(table.total(), expected["parameters"].as_u64().unwrap(), "{label}");
        let decayed: u64 = table.iter().filter(|p| p.kind.decays()).map(Parameter::elements).sum();
        assert_eq!(decayed, expected["decayed"].as_u64().unwrap(), "{label}: decayed");
        if let Some(largest) = expected["largest_module"].as_u64() {
            assert_eq!(table.largest_module().unwrap().1, largest, "{label}: largest module");
        }
        if let Some(active) = expected["active"].as_u64() {
            assert_eq!(table.active_per_token(), active, "{label}: active");
        }
    }
}

#[test]
fn published_counts_are_met() {
    for (name, parameters) in [
        ("Qwen3-8B", 8_190_735_360),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("t5-3b", 2_851_598_336),
    ] {
        assert_eq!(table(&config(name)).total(), parameters, "{name}");
    }
    let t5 = table(&config("t5-3b"));
    assert_eq!(t5.largest_module(), Some(("shared", 32_899_072)));
    // The model card says 3.3B activated.
    assert_eq!(table(&config("Qwen3-30B-A3B")).active_per_token(), 3_353_032_704);
}

#[test]
fn both_versions_of_transformers_write_the_same_model() {
    for name in ["Qwen3-8B", "Llama-3.2-1B", "Qwen3-30B-A3B", "t5-small", "tiny-qwen3-biases"] {
        assert_eq!(config(name), config(&format!("{name}.transformers-5")), "{name}");
    }
}

#[test]
fn windows_are_those_of_each_block() {
    for (label, name, expected) in all() {
        if let Some(windows) = expected["windows"].as_array() {
            let windows: Vec<Option<u64>> = windows.iter().map(Value::as_u64).collect();
            assert_eq!(config(&name).windows(), windows, "{label}");
        }
    }
}

/// A rope in the words of transformers 5; what it leaves at its default is left out.
fn rope_as_json(rope: &Rope) -> Value {
    let theta = rope.theta;
    match rope.scaling.clone() {
        RopeScaling::Default => serde_json::json!({"rope_type": "default", "rope_theta": theta}),
        RopeScaling::Linear { factor } => {
            serde_json::json!({"rope_type": "linear", "rope_theta": theta, "factor": factor})
        }
        RopeScaling::Dynamic { factor } => {
            serde_json::json!({"rope_type": "dynamic", "rope_theta": theta, "factor": factor})
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            serde_json::json!({
                "rope_type": "llama3", "rope_theta": theta, "factor": factor,
                "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_positions,
            })
        }
        RopeScaling::Yarn { factor, original_max_positions, beta_fast, .. } => serde_json::json!({
            "rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_fast": beta_fast,
            "original_max_position_embeddings": original_max_positions,
        }),
    }
}

#[test]
fn ropes_are_as_transformers_5_normalizes_them() {
    let mut kinds = Vec::new();
    for (label, name, mut expected) in all() {
        let Some(expected) = expected["rope"].as_object_mut() else { continue };
        // The old name of `rope_type`, kept beside the new one.
        expected.shift_remove("type");
        let theta = expected["rope_theta"].as_f64().unwrap();
        expected.insert("rope_theta".to_owned(), theta.into());
        let config = config(&name);
        let Some(Positions::Rope(rope)) = &config.first_attention().positions else {
            panic!("{label} has no rope")
        };
        assert_eq!(rope_as_json(rope), Value::Object(expected.clone()), "{label}");
        kinds.push(expected["rope_type"].as_str().unwrap().to_owned());
    }
    for kind in ["default", "linear", "dynamic", "llama3", "yarn"] {
        assert!(kinds.iter().any(|found| found == kind), "no config has {kind}");
    }
}

#[test]
fn adapters_are_those_of_peft() {
    let rank = facts(4)["lora_rank"].as_u64().unwrap();
    let mut compared = 0;
    for (label, name, expected) in all() {
        let Some(cases) = expected["lora"].as_object() else { continue };
        let base = table(&config(&name));
        for (case, expected) in cases {
            let names: Vec<String> = match &expected["targets"] {
                Value::String(name) => vec![name.clone()],
                names => names.as_array().unwrap().iter().map(|n| n.as_str().unwrap().to_owned()).collect(),
            };
            let is_all = names == ["all-linear"];
            let targets = if is_all { LoraTargets::AllLinear } else { LoraTargets::Named(names) };
            let adapters = lora_table(&base, &Lora { rank, targets, ..Lora::default() }).unwrap();
            assert_eq!(adapters.total(), expected["parameters"].as_u64().unwrap(), "{label}: {case}");
            assert_eq!(fnv(&lines(&adapters)), expected["fnv"].as_str().unwrap(), "{label}: {case}");
            compared += 1;
        }
    }
    assert!(compared >= 20, "only {compared} cases");
}

#[test]
fn auto_reads_the_hidden_size_that_the_trainer_reads() {
    for (label, name, expected) in all() {
        let (json, _) = read_config(&folder(&name)).unwrap();
        assert_eq!(hidden_size_for_auto(&json), expected["hidden_size"].as_u64(), "{label}");
    }
    for (model_type, expected) in facts(4)["auto"].as_object().unwrap() {
        let json = expected["config"].as_object().unwrap();
        assert_eq!(hidden_size_for_auto(json), expected["hidden_size"].as_u64(), "{model_type}");
    }
}

#[test]
fn units_follow_the_forward_pass() {
    use UnitName::{
        Block, DecoderPositions, Embedding, EncoderBlock, EncoderNorm, EncoderPositions, Experts, Head, Tied,
    };
    let names = |name: &str| {
        let table = table(&config(name));
        table.units.iter().map(|unit| unit.name).collect::<Vec<_>>()
    };
    assert_eq!(names("tiny-mistral-defaults"), [Embedding, Block(0), Block(1), Head]);
    assert_eq!(names("tiny-llama-biases"), [Tied, Block(0), Block(1), Block(2), Head]);
    // Experts in every second block, but not in block 3.
    assert_eq!(
        names("tiny-qwen3-moe-mixed"),
        [Embedding, Block(0), Block(1), Experts(1), Block(2), Block(3), Block(4), Block(5), Experts(5), Head]
    );
    assert_eq!(
        names("tiny-t5-tied"),
        [
            Tied,
            EncoderPositions,
            EncoderBlock(0),
            EncoderBlock(1),
            EncoderNorm,
            DecoderPositions,
            Block(0),
            Head
        ]
    );
}
