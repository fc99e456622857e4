//! Experts on disk: a tensor for each, or fused as transformers 5 writes them on request.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use zeroth_base::DType;
use zeroth_model::{ModelConfig, NewTensor, ParameterTable, WeightFiles, WeightWriter, table};

use super::made::{Filled, write};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/moe").join(name)
}

fn table_of(folder: &Path) -> ParameterTable {
    table(&ModelConfig::from_folder(folder).unwrap())
}

/// All elements of all parameters.
fn read(folder: &Path) -> Vec<Vec<f32>> {
    let table = table_of(folder);
    let files = WeightFiles::open(folder, &table).unwrap();
    assert_eq!(files.warnings(), [], "{}", folder.display());
    let elements = table.iter().map(|parameter| {
        let mut elements = vec![f32::NAN; parameter.elements() as usize];
        files.read_f32(&parameter.name, 0..parameter.elements(), &mut elements).unwrap();
        elements
    });
    elements.collect()
}

#[test]
fn fused_and_single_experts_are_the_same_model_and_are_written_one_by_one() {
    for name in ["qwen3-moe-normalized", "mixtral-no-window"] {
        let (single, fused) = (golden(name), golden(&format!("{name}-fused")));
        let table = table_of(&single);
        let weights = read(&fused);
        assert_eq!(weights, read(&single), "{name}");
        // A range across experts, of both.
        for folder in [&single, &fused] {
            let files = WeightFiles::open(folder, &table).unwrap();
            let gate_up = table.iter().position(|p| p.name.ends_with("gate_up_proj")).unwrap();
            let parameter = table.iter().nth(gate_up).unwrap();
            let (start, end) = (13, parameter.elements() - 7);
            let mut part = vec![f32::NAN; (end - start) as usize];
            files.read_f32(&parameter.name, start..end, &mut part).unwrap();
            assert_eq!(part, weights[gate_up][start as usize..end as usize]);
        }
        let written = TempDir::new().unwrap();
        let tensors = table.iter().flat_map(|parameter| NewTensor::all_of(parameter, DType::F32)).collect();
        let mut writer = WeightWriter::create(written.path(), tensors, 20_000).unwrap();
        for (parameter, elements) in table.iter().zip(&weights) {
            // Pieces end anywhere.
            for piece in elements.chunks(97) {
                writer.append_parameter(parameter, piece).unwrap();
            }
        }
        writer.finish().unwrap();
        fs::copy(single.join("config.json"), written.path().join("config.json")).unwrap();
        assert_eq!(read(written.path()), weights, "{name}");
        let index = fs::read_to_string(written.path().join("model.safetensors.index.json")).unwrap();
        let single_name = if name.starts_with("mixtral") {
            "model.layers.1.block_sparse_moe.experts.7.w3.weight"
        } else {
            "model.layers.1.mlp.experts.7.up_proj.weight"
        };
        assert!(index.contains(single_name) && !index.contains("gate_up_proj"), "{index}");
    }
}

fn config(experts: u64) -> String {
    serde_json::json!({
        "model_type": "mixtral", "hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 2,
        "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 5, "num_local_experts": experts,
        "num_experts_per_tok": 1,
    })
    .to_string()
}

/// The tensors of a model with this many experts, one by one, or fused in the blocks that `is_fused` names.
fn tensors(experts: u64, is_fused: impl Fn(&str) -> bool) -> Vec<Filled> {
    let table = table(&ModelConfig::from_json(&config(experts), "config.json").unwrap());
    let stored = table.iter().flat_map(|parameter| {
        if is_fused(&parameter.name) || parameter.parts.is_empty() {
            return vec![(parameter.name.clone(), parameter.shape.clone(), 1.0)];
        }
        parameter.parts.iter().map(|part| (part.name.clone(), part.shape.clone(), 1.0)).collect()
    });
    stored.collect()
}

/// What is said of these tensors for a model of three experts.
fn complaint(tensors: &[Filled]) -> Vec<String> {
    let folder = TempDir::new().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    let table = table(&ModelConfig::from_json(&config(3), "config.json").unwrap());
    let message = WeightFiles::open(folder.path(), &table).unwrap_err().to_string();
    message.lines().skip(1).map(|line| line.trim().to_owned()).collect()
}

#[test]
fn experts_that_are_missing_doubled_or_mixed_are_named() {
    let never = |_: &str| false;
    let gone = "model.layers.1.block_sparse_moe.experts.1.w3.weight";
    let mut missing = tensors(3, never);
    missing.retain(|tensor| tensor.0 != gone);
    assert_eq!(complaint(&missing), [format!("`{gone}` is missing")]);

    let mut doubled = tensors(3, never);
    doubled.push(("model.layers.0.mlp.experts.down_proj".to_owned(), vec![3, 2, 3], 1.0));
    assert_eq!(
        complaint(&doubled),
        ["`model.layers.0.mlp.experts.down_proj` is stored beside \
          `model.layers.0.block_sparse_moe.experts.0.w2.weight`, which is a part of it: remove one of the two"]
    );

    let mixed = complaint(&tensors(3, |name| name.contains("layers.1.mlp.experts")));
    assert_eq!(mixed.len(), 1, "{mixed:?}");
    assert!(
        mixed[0].contains("`model.layers.1.mlp.experts.gate_up_proj` holds all experts of its block"),
        "{mixed:?}"
    );
    assert!(
        mixed[0].contains("`model.layers.0.block_sparse_moe.experts.0.w1.weight` is one expert's"),
        "{mixed:?}"
    );
}

#[test]
fn another_number_of_experts_is_said_as_one() {
    for found in [2, 4] {
        let block = |index: u64| {
            let begin = format!("model.layers.{index}.block_sparse_moe.experts.");
            format!(
                "the files have {found} experts (`{begin}0` to `{begin}{}`): config.json asks for 3",
                found - 1
            )
        };
        let lines = complaint(&tensors(found, |_| false));
        for index in 0..2 {
            assert!(lines.contains(&block(index)), "{lines:?}");
        }
        // Beside them, the two routers have another shape.
        assert_eq!(lines.len(), 4, "{lines:?}");
    }
    let fused = complaint(&tensors(4, |_| true));
    assert!(
        fused[0].contains("has the shape [4, 2] in model.safetensors: config.json asks for [3, 2]"),
        "{fused:?}"
    );
    assert!(
        fused[1].contains("has the shape [4, 6, 2] in model.safetensors: config.json asks for [3, 6, 2]"),
        "{fused:?}"
    );
}
