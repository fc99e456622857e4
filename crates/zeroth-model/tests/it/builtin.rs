//! The built-in configs: every one is read, and counts the parameters that its model card or its files have.

use zeroth_model::{ModelConfig, builtin_names, named_config, table};

/// Published counts: sums over the tensors of the safetensors files.
const TOTALS: [(&str, u64); 39] = [
    ("Qwen/Qwen3-0.6B", 596_049_920),
    ("Qwen/Qwen3-1.7B", 1_720_574_976),
    ("Qwen/Qwen3-4B", 4_022_468_096),
    ("Qwen/Qwen3-8B", 8_190_735_360),
    ("Qwen/Qwen3-14B", 14_768_307_200),
    ("Qwen/Qwen3-32B", 32_762_123_264),
    ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
    ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    ("mistralai/Mixtral-8x22B-v0.1", 140_620_634_112),
    ("Qwen/Qwen2.5-0.5B", 494_032_768),
    ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
    ("Qwen/Qwen2.5-3B", 3_085_938_688),
    ("Qwen/Qwen2.5-7B", 7_615_616_512),
    ("Qwen/Qwen2.5-14B", 14_770_033_664),
    ("Qwen/Qwen2.5-32B", 32_763_876_352),
    ("Qwen/Qwen2.5-72B", 72_706_203_648),
    ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
    ("meta-llama/Llama-2-13b-hf", 13_015_864_320),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ("meta-llama/Llama-3.1-70B", 70_553_706_496),
    ("meta-llama/Llama-3.2-1B", 1_235_814_400),
    ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
    ("t5-small", 60_506_624),
    ("t5-base", 222_903_552),
    ("t5-large", 737_668_096),
    ("t5-3b", 2_851_598_336),
    ("t5-11b", 11_307_321_344),
    ("google/t5-v1_1-base", 247_577_856),
    ("google/flan-t5-large", 783_150_080),
    ("google/flan-t5-xxl", 11_135_332_352),
    ("google/mt5-small", 300_176_768),
    ("google/mt5-base", 582_401_280),
    ("google/mt5-large", 1_229_581_312),
    ("google/mt5-xl", 3_742_619_648),
    ("google/mt5-xxl", 12_921_057_280),
    ("google/flan-t5-small", 76_961_152),
    ("google/flan-t5-xl", 2_849_757_184),
];

#[test]
fn built_in_configs_count_the_published_parameters() {
    for (name, total) in TOTALS {
        let config = ModelConfig::from_named(&named_config(name).unwrap()).unwrap();
        assert_eq!(table(&config).total(), total, "{name}");
    }
}

#[test]
fn every_built_in_config_is_read_and_names_are_unique() {
    let mut names: Vec<&str> = builtin_names().collect();
    for name in &names {
        let config = named_config(name).unwrap();
        assert!(ModelConfig::from_named(&config).is_ok(), "{name}");
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// The configs of the Hub that this crate's tests hold agree with the built-in ones.
#[test]
fn built_in_configs_are_those_of_the_hub() {
    for (name, folder) in [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B"),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7b-hf"),
        ("meta-llama/Llama-3.1-70B", "Llama-3.1-70B"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        ("mistralai/Mistral-7B-v0.3", "Mistral-7B-v0.3"),
        ("t5-base", "t5-base"),
        ("google/flan-t5-small", "flan-t5-small"),
        ("google/mt5-small", "mt5-small"),
        ("t5-small", "t5-small"),
    ] {
        let builtin = ModelConfig::from_named(&named_config(name).unwrap()).unwrap();
        let folder = format!("{}/tests/configs/{folder}", env!("CARGO_MANIFEST_DIR"));
        let found = ModelConfig::from_folder(folder.as_ref()).unwrap();
        assert_eq!(builtin, ModelConfig { dtype: builtin.dtype, ..found }, "{name}");
    }
}

#[test]
fn unknown_names_are_refused_with_the_nearest_built_in_one() {
    let error = named_config("Qwen/Qwen3-8b").unwrap_err().to_string();
    assert!(error.contains("Qwen/Qwen3-8B"), "{error}");
}
