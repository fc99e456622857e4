//! Our own files: written in pieces, read back, published whole or not at all.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use zeroth_base::DType;
use zeroth_model::{NewTensor, Parameter, ParameterTable, WeightFiles, WeightWriter};

use super::made::{filled, tiny_table, write};

fn tensors(table: &ParameterTable, dtype: DType) -> Vec<NewTensor> {
    table.iter().flat_map(|parameter| NewTensor::all_of(parameter, dtype)).collect()
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Values that every type holds exactly.
fn value(element: u64) -> f32 {
    element as f32 / 4.0 - 3.0
}

fn write_all(folder: &Path, table: &ParameterTable, dtype: DType, shard_bytes: u64, piece: usize) {
    let mut writer = WeightWriter::create(folder, tensors(table, dtype), shard_bytes).unwrap();
    for parameter in table.iter() {
        let values: Vec<f32> = (0..parameter.elements()).map(value).collect();
        for piece in values.chunks(piece) {
            writer.append_f32(&parameter.name, piece).unwrap();
        }
    }
    let written = writer.finish().unwrap();
    assert_eq!(written.bytes, table.total() * dtype.bytes());
    assert!(written.files.iter().all(|file| file.exists()));
}

proptest! {
    // Each case syncs up to 12 files.
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_written_in_any_pieces_reads_back(
        dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]),
        piece in 1_usize..12,
        shard_bytes in 0_u64..200,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let table = tiny_table(false);
        write_all(folder.path(), &table, dtype, shard_bytes, piece);
        let files = WeightFiles::open(folder.path(), &table).unwrap();
        prop_assert_eq!(files.warnings(), []);
        for parameter in table.iter() {
            prop_assert_eq!(files.dtype(&parameter.name).unwrap(), dtype);
            let mut values = vec![0.0; parameter.elements() as usize];
            files.read_f32(&parameter.name, 0..parameter.elements(), &mut values).unwrap();
            prop_assert_eq!(values, (0..parameter.elements()).map(value).collect::<Vec<_>>());
        }
        for name in names_in(folder.path()).iter().filter(|name| name.ends_with(".safetensors")) {
            let bytes = fs::read(folder.path().join(name)).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            prop_assert_eq!(header % 8, 0, "the data begins at a multiple of 8");
            let data = bytes.len() as u64 - 8 - header;
            let largest = table.iter().map(Parameter::elements).max().unwrap() * dtype.bytes();
            prop_assert!(data <= shard_bytes.max(largest), "{name} has {data} bytes of data");
        }
    }
}

#[test]
fn the_same_tensors_are_the_same_bytes_whatever_the_pieces() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_all(a.path(), &tiny_table(true), DType::Bf16, 1 << 20, 1);
    write_all(b.path(), &tiny_table(true), DType::Bf16, 1 << 20, 1000);
    let read = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(read(a.path()), read(b.path()));
}

#[test]
fn a_number_that_every_dtype_holds_is_written_exactly() {
    for dtype in [DType::Bf16, DType::F32, DType::F16] {
        let folder = tempfile::tempdir().unwrap();
        let table = tiny_table(true);
        let mut writer = WeightWriter::create(folder.path(), tensors(&table, dtype), 100).unwrap();
        for parameter in table.iter() {
            writer.append_f32(&parameter.name, &vec![-5.0; parameter.elements() as usize]).unwrap();
        }
        writer.finish().unwrap();
        let files = WeightFiles::open(folder.path(), &table).unwrap();
        let mut values = [0.0; 2];
        files.read_f32("model.norm.weight", 0..2, &mut values).unwrap();
        assert_eq!(values, [-5.0; 2], "{dtype}");
    }
}

#[test]
fn nothing_appears_before_the_end_and_a_dropped_writer_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let table = tiny_table(false);
    write(&folder.path().join("model.safetensors"), &filled(&table));
    let before = fs::read(folder.path().join("model.safetensors")).unwrap();
    let mut writer = WeightWriter::create(folder.path(), tensors(&table, DType::F32), 30).unwrap();
    for parameter in table.iter().take(5) {
        writer.append_f32(&parameter.name, &vec![1.0; parameter.elements() as usize]).unwrap();
    }
    let visible = |name: &String| !name.starts_with('.');
    assert_eq!(names_in(folder.path()).into_iter().filter(visible).count(), 1);
    drop(writer);
    assert_eq!(names_in(folder.path()), ["model.safetensors"]);
    assert_eq!(fs::read(folder.path().join("model.safetensors")).unwrap(), before);
}

#[test]
fn new_weights_take_the_place_of_old_ones_in_either_form() {
    let folder = tempfile::tempdir().unwrap();
    let table = tiny_table(false);
    fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let names = |shards: usize| {
        let mut names: Vec<String> =
            (1..=shards).map(|n| format!("model-{n:05}-of-{shards:05}.safetensors")).collect();
        names.extend(["model.safetensors.index.json".to_owned(), "tokenizer.json".to_owned()]);
        names
    };
    write_all(folder.path(), &table, DType::F32, 1 << 20, 100);
    assert_eq!(names_in(folder.path()), ["model.safetensors", "tokenizer.json"]);
    write_all(folder.path(), &table, DType::F32, 100, 100);
    // 240 bytes, cut after 96 and after 96 more.
    assert_eq!(names_in(folder.path()), names(3));
    write_all(folder.path(), &table, DType::F32, 1, 100);
    assert_eq!(names_in(folder.path()), names(table.iter().count()));
    write_all(folder.path(), &table, DType::F32, 1 << 20, 100);
    assert_eq!(names_in(folder.path()), ["model.safetensors", "tokenizer.json"]);
}

#[test]
fn weights_that_cannot_take_their_names_leave_the_earlier_ones_whole() {
    let folder = tempfile::tempdir().unwrap();
    let table = tiny_table(false);
    write_all(folder.path(), &table, DType::F32, 1 << 20, 100);
    let before = fs::read(folder.path().join("model.safetensors")).unwrap();
    // A folder of the name of the second shard, then one of the index's.
    for taken in ["model-00002-of-00003.safetensors", "model.safetensors.index.json"] {
        fs::create_dir_all(folder.path().join(taken).join("mine")).unwrap();
        let mut writer = WeightWriter::create(folder.path(), tensors(&table, DType::F32), 100).unwrap();
        for parameter in table.iter() {
            writer.append_f32(&parameter.name, &vec![1.0; parameter.elements() as usize]).unwrap();
        }
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains(taken), "{error}");
        assert_eq!(fs::read(folder.path().join("model.safetensors")).unwrap(), before);
        let mut expected = [taken, "model.safetensors"];
        expected.sort_unstable();
        assert_eq!(names_in(folder.path()), expected);
        fs::remove_dir_all(folder.path().join(taken)).unwrap();
    }
}

#[test]
fn values_that_are_not_the_next_ones_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let create =
        || WeightWriter::create(folder.path(), tensors(&tiny_table(false), DType::F32), 1 << 20).unwrap();
    let mut writer = create();
    let error = writer.append_f32("lm_head.weight", &[1.0]).unwrap_err().to_string();
    assert_eq!(
        error,
        "1 elements of `lm_head.weight` were given where 10 of `model.embed_tokens.weight` come next"
    );
    assert!(writer.append_f32("model.embed_tokens.weight", &[0.0; 11]).is_err());
    writer.append_f32("model.embed_tokens.weight", &[0.0; 7]).unwrap();
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("3 of `model.embed_tokens.weight` come next"), "{error}");
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn tensors_that_no_file_can_hold_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, shape: &[u64]| NewTensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        dtype: DType::F32,
    };
    for (tensors, phrase) in [
        (vec![tensor("__metadata__", &[1])], "keeps that name for itself"),
        (vec![tensor("a", &[1]), tensor("a", &[2])], "given twice"),
        (vec![tensor("a", &[u64::MAX])], "64 bits"),
        (vec![tensor("a", &[1 << 61]), tensor("b", &[1 << 61])], "64 bits"),
    ] {
        let error = WeightWriter::create(folder.path(), tensors, 100).unwrap_err().to_string();
        assert!(error.contains(phrase), "{error}");
    }
    let error = WeightWriter::create(&folder.path().join("absent"), vec![], 100).unwrap_err().to_string();
    assert!(error.contains("absent"), "{error}");
}

#[test]
fn tensors_without_elements_and_scalars_are_written_too() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, shape: &[u64]| NewTensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        dtype: DType::F32,
    };
    let tensors = vec![tensor("none", &[0, 3]), tensor("scalar", &[]), tensor("also_none", &[0])];
    let mut writer = WeightWriter::create(folder.path(), tensors, 100).unwrap();
    writer.append_f32("scalar", &[5.0]).unwrap();
    assert_eq!(writer.finish().unwrap().bytes, 4);
}
