//! Files written by transformers. `make_golden_weights.py` wrote them and says what is in them.

use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::Value;
use zeroth_base::DType;
use zeroth_model::{ModelConfig, ParameterTable, WeightFiles, table};

pub(crate) fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    let hash = bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    format!("{hash:016x}")
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/weights").join(name)
}

fn open(name: &str) -> (WeightFiles, ParameterTable) {
    let table = table(&ModelConfig::from_folder(&folder(name)).unwrap());
    (WeightFiles::open(&folder(name), &table).unwrap(), table)
}

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/weights.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A number of the golden file; infinite ones are texts there.
fn number(value: &Value) -> f32 {
    value.as_f64().map_or_else(|| value.as_str().unwrap().parse().unwrap(), |number| number as f32)
}

fn read(files: &WeightFiles, name: &str, elements: u64) -> Vec<f32> {
    let mut values = vec![0.0; elements as usize];
    files.read_f32(name, 0..elements, &mut values).unwrap();
    values
}

#[test]
fn files_of_transformers_read_as_torch_reads_them() {
    let golden = golden();
    let folders = golden["folders"].as_object().unwrap();
    assert_eq!(folders.len(), 5);
    for (name, expected) in folders {
        let (files, table) = open(name);
        assert_eq!(files.warnings(), []);
        let tensors = expected["tensors"].as_object().unwrap();
        assert_eq!(table.iter().count(), tensors.len(), "{name}");
        for parameter in table.iter() {
            let (label, expected) = (format!("{name}, {}", parameter.name), &tensors[&parameter.name]);
            let values = read(&files, &parameter.name, parameter.elements());
            let first: Vec<f32> = expected["first"].as_array().unwrap().iter().map(number).collect();
            let last: Vec<f32> = expected["last"].as_array().unwrap().iter().map(number).collect();
            assert_eq!(values[..4], first, "{label}");
            assert_eq!(values[values.len() - 2..], last, "{label}");
            let sum: f64 = values.iter().copied().filter(|v| v.is_finite()).map(f64::from).sum();
            let true_sum = expected["sum"].as_f64().unwrap();
            assert!((sum - true_sum).abs() <= 1e-9 * true_sum.abs().max(1.0), "{label}: {sum}, {true_sum}");
            assert_eq!(fnv(values.iter().flat_map(|v| v.to_le_bytes())), expected["f32"], "{label}");

            let as_bf16 = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes());
            assert_eq!(fnv(as_bf16), expected["bf16"], "{label} as bf16");
        }
        let dtype = DType::from_name(expected["dtype"].as_str().unwrap()).unwrap();
        assert!(table.iter().all(|parameter| files.dtype(&parameter.name).unwrap() == dtype), "{name}");
    }
}

#[test]
fn any_range_reads_what_the_whole_has_there() {
    for name in ["one-f32", "one-f16", "sharded-bf16"] {
        let (files, table) = open(name);
        for parameter in table.iter() {
            let elements = parameter.elements();
            let whole = read(&files, &parameter.name, elements);
            for (start, end) in
                [(0, 0), (0, 1), (1, elements), (elements / 3, elements - 1), (elements, elements)]
            {
                let mut part = vec![f32::NAN; (end - start) as usize];
                files.read_f32(&parameter.name, start..end, &mut part).unwrap();
                assert_eq!(part, whole[start as usize..end as usize], "{name}, {}", parameter.name);
            }
        }
    }
}

#[test]
fn ranges_and_names_that_are_not_there_are_refused() {
    let (files, _) = open("one-bf16");
    let mut out = [0.0; 8];
    let error = files.read_f32("model.norm.weight", 4..12, &mut out).unwrap_err().to_string();
    assert_eq!(
        error,
        "elements 4 to 12 of `model.norm.weight` were asked for a buffer of 8: the tensor has 8 elements"
    );
    assert!(files.read_f32("model.norm.weight", 0..4, &mut out).is_err(), "a buffer of another length");
    #[expect(clippy::reversed_empty_ranges, reason = "that is the mistake")]
    let backwards = files.read_f32("model.norm.weight", 4..2, &mut []);
    assert!(backwards.is_err());
    let error = files.read_f32("model.norm.weights", 0..8, &mut out).unwrap_err().to_string();
    assert!(error.ends_with("did you mean `model.norm.weight`?"), "{error}");
}
