//! Folders whose files do not hold the model: everything wrong is said at once.

use std::fs;
use std::path::Path;

use zeroth_model::{
    Parameter, ParameterTable, StoredPart, WeightFiles, WeightWarning, WeightsError, has_weights,
};

use super::made::{Filled, filled, tiny_table, write, write_index};

fn complaint(folder: &Path, tied: bool) -> String {
    WeightFiles::open(folder, &tiny_table(tied)).unwrap_err().to_string()
}

fn without<'a>(tensors: &'a [Filled], name: &'a str) -> impl Iterator<Item = Filled> + 'a {
    tensors.iter().filter(move |tensor| tensor.0 != name).cloned()
}

#[test]
fn all_that_is_wrong_is_said_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = filled(&tiny_table(false));
    tensors[1].0 = "model.layers.0.input_layernorm.weigth".to_owned();
    tensors[2].1 = vec![2, 3];
    tensors.pop();
    write(&folder.path().join("model.safetensors"), &tensors);
    let message = complaint(folder.path(), false);
    let lines: Vec<&str> = message.lines().skip(1).map(str::trim).collect();
    assert_eq!(
        lines,
        [
            "`model.layers.0.input_layernorm.weight` is missing; did you mean `model.layers.0.input_layernorm.weigth`?",
            "`model.layers.0.self_attn.q_proj.weight` has the shape [2, 3] in model.safetensors: config.json asks for \
             [2, 2]",
            "`lm_head.weight` is missing",
        ]
    );
}

#[test]
fn a_long_list_of_problems_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("config.json"),
        r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 9, "num_attention_heads": 1, "vocab_size": 5}"#,
    )
    .unwrap();
    write(&folder.path().join("model.safetensors"), &[]);
    let table = zeroth_model::table(&zeroth_model::ModelConfig::from_folder(folder.path()).unwrap());
    let message = WeightFiles::open(folder.path(), &table).unwrap_err().to_string();
    assert_eq!(message.lines().count(), 22, "{message}");
    assert!(message.ends_with("and 64 more"), "{message}");
}

#[test]
fn tensors_that_the_model_does_not_know_are_warned_about() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = filled(&tiny_table(false));
    tensors.push(("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), vec![1], 0.5));
    write(&folder.path().join("model.safetensors"), &tensors);
    let files = WeightFiles::open(folder.path(), &tiny_table(false)).unwrap();
    let [warning] = files.warnings() else { panic!("{:?}", files.warnings()) };
    assert_eq!(
        warning.to_string(),
        "`model.layers.0.self_attn.rotary_emb.inv_freq` in model.safetensors is not a parameter of the model"
    );
}

#[test]
fn a_parameter_is_read_from_the_parts_of_tensors_it_is_made_of() {
    let folder = tempfile::tempdir().unwrap();
    let mut table = tiny_table(false);
    let mut stored = filled(&table);
    // [q; k; v] in one tensor, as some files fuse them, and an up projection in two halves.
    let place = |table: &ParameterTable, end: &str| table.iter().position(|p| p.name.ends_with(end)).unwrap();
    let [q, k, v] = ["q_proj.weight", "k_proj.weight", "v_proj.weight"].map(|end| place(&table, end));
    let (up, gate) = (place(&table, "up_proj.weight"), place(&table, "gate_proj.weight"));
    stored.push(("fused".to_owned(), vec![2, 6], 7.5));
    stored.push(("half".to_owned(), vec![3], -1.0));
    let mut gone: Vec<usize> = vec![q, k, v, up];
    gone.sort_unstable();
    for place in gone.iter().rev() {
        stored.remove(*place);
    }
    write(&folder.path().join("model.safetensors"), &stored);
    let gate_name = table.iter().nth(gate).unwrap().name.clone();
    let mut parameters: Vec<&mut Parameter> =
        table.units.iter_mut().flat_map(|u| &mut u.parameters).collect();
    let part = |name: &str, shape: &[u64], elements| StoredPart {
        name: name.to_owned(),
        shape: shape.to_vec(),
        elements,
    };
    for (index, place) in [q, k, v].into_iter().enumerate() {
        parameters[place].parts = vec![part("fused", &[2, 6], 4 * index as u64..4 * index as u64 + 4)];
    }
    parameters[up].parts = vec![part("half", &[3], 0..3), part(&gate_name, &[3, 2], 3..6)];
    let up_name = parameters[up].name.clone();
    let files = WeightFiles::open(folder.path(), &table).unwrap();
    assert_eq!(files.warnings(), []);
    let mut elements = [0.0f32; 6];
    files.read_f32(&up_name, 0..6, &mut elements).unwrap();
    assert_eq!(elements, [-1.0, -1.0, -1.0, gate as f32, gate as f32, gate as f32]);
    let mut middle = [0.0f32; 2];
    files.read_f32(&up_name, 2..4, &mut middle).unwrap();
    assert_eq!(middle, [-1.0, gate as f32]);
    let error = files.read_f32(&up_name, 2..7, &mut [0.0; 5]).unwrap_err().to_string();
    assert!(error.contains("the tensor has 6 elements"), "{error}");
    // A part of a tensor of another shape, and one of a tensor that is not there.
    let mut parameters: Vec<&mut Parameter> =
        table.units.iter_mut().flat_map(|u| &mut u.parameters).collect();
    parameters[q].parts = vec![part("fused", &[3, 6], 9..13)];
    parameters[k].parts = vec![part("elsewhere", &[4], 0..4)];
    let error = WeightFiles::open(folder.path(), &table).unwrap_err().to_string();
    assert!(
        error.contains("`fused` has the shape [2, 6] in model.safetensors: config.json asks for [3, 6]"),
        "{error}"
    );
    assert!(error.contains("`elsewhere` is missing"), "{error}");
}

#[test]
fn a_tied_head_may_lie_there_under_either_name_or_twice_with_equal_values() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (table, mut tensors) = (tiny_table(true), filled(&tiny_table(true)));
    let read = || {
        let files = WeightFiles::open(folder.path(), &table).unwrap();
        let mut values = [f32::NAN; 10];
        files.read_f32("model.embed_tokens.weight", 0..10, &mut values).unwrap();
        (values, files.warnings().to_vec())
    };
    write(&path, &tensors);
    assert_eq!(read(), ([0.0; 10], vec![]));

    "lm_head.weight".clone_into(&mut tensors[0].0);
    tensors[0].2 = 7.0;
    write(&path, &tensors);
    assert_eq!(read(), ([7.0; 10], vec![]));

    tensors.push(("model.embed_tokens.weight".to_owned(), vec![5, 2], 7.0));
    write(&path, &tensors);
    let (name, alias) = ("model.embed_tokens.weight".to_owned(), "lm_head.weight".to_owned());
    assert_eq!(read(), ([7.0; 10], vec![WeightWarning::StoredTwice { name, alias }]));

    tensors[0].2 = 8.0;
    write(&path, &tensors);
    assert!(complaint(folder.path(), true).contains("differs from it, but config.json ties them"));
}

#[test]
fn the_index_and_its_files_must_agree() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = filled(&tiny_table(false));
    let (norm, head) = ("model.norm.weight", "lm_head.weight");
    let (a, b) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let indexed = |entries: &[(&str, &str)]| {
        let mut all: Vec<(&str, &str)> = tensors.iter().map(|tensor| (tensor.0.as_str(), a)).collect();
        for (name, file) in entries {
            all.iter_mut().find(|entry| entry.0 == *name).unwrap().1 = file;
        }
        write_index(folder.path(), &all);
    };
    let rest: Vec<Filled> = without(&tensors, head).collect();
    let last: Vec<Filled> = tensors.iter().filter(|tensor| tensor.0 == head).cloned().collect();
    indexed(&[(head, b)]);
    write(&folder.path().join(a), &rest);
    write(&folder.path().join(b), &last);
    WeightFiles::open(folder.path(), &tiny_table(false)).unwrap();

    // Said to be in the second file, and in the first.
    indexed(&[(head, b), (norm, b)]);
    assert!(
        complaint(folder.path(), false)
            .ends_with(&format!("the index says that `{norm}` is in {b}, and it is not there"))
    );

    write(&folder.path().join(b), &[&last[..], &rest[..1]].concat());
    indexed(&[(head, b)]);
    assert!(
        complaint(folder.path(), false)
            .ends_with(&format!("`model.embed_tokens.weight` is in two files, {a} and {b}"))
    );

    // What a broken file would hold is not reported as missing.
    fs::write(folder.path().join(b), b"1234567").unwrap();
    let message = complaint(folder.path(), false);
    assert_eq!(message.lines().count(), 2, "{message}");
    assert!(message.contains(b) && message.contains("it has 7 bytes"), "{message}");
    fs::remove_file(folder.path().join(b)).unwrap();
    let message = complaint(folder.path(), false);
    assert!(message.lines().count() == 2 && message.contains(b), "{message}");
}

#[test]
fn an_index_must_be_one_and_stay_in_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    for (text, phrase) in [
        ("{", "it is not JSON"),
        ("[]", "no object `weight_map`"),
        (r#"{"weight_map": {}}"#, "is empty"),
        (r#"{"weight_map": {"a": 5}}"#, "gives `a` the file 5"),
        (r#"{"weight_map": {"a": "../b.safetensors"}}"#, "a name in the same folder"),
        (r#"{"weight_map": {"a": "/b.safetensors"}}"#, "a name in the same folder"),
        (r#"{"weight_map": {"a": "sub/b.safetensors"}}"#, "a name in the same folder"),
        (r#"{"weight_map": {"a": ""}}"#, "a name in the same folder"),
    ] {
        fs::write(&index, text).unwrap();
        let message = complaint(folder.path(), false);
        assert!(message.contains("index.json") && message.contains(phrase), "{text}: {message}");
    }
}

#[test]
fn a_folder_without_weights_says_so_and_names_weights_of_another_format() {
    let folder = tempfile::tempdir().unwrap();
    assert!(complaint(folder.path(), false).contains("has no weights"));
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert!(
        complaint(folder.path(), false).contains("pytorch_model.bin is there: save the model as safetensors")
    );
}

#[test]
fn a_file_that_shrinks_while_it_is_open_is_named_with_its_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &filled(&tiny_table(false)));
    let files = WeightFiles::open(folder.path(), &tiny_table(false)).unwrap();
    let length = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
    let error = files.read_f32("lm_head.weight", 9..10, &mut [0.0]).unwrap_err();
    assert!(matches!(error, WeightsError::Read { .. }));
    let message = error.to_string();
    assert!(message.contains("`lm_head.weight`") && message.contains("model.safetensors"), "{message}");
    assert!(message.ends_with("the file has become shorter since it was opened"), "{message}");
}

#[test]
fn a_folder_that_cannot_be_listed_is_an_error_and_not_one_without_weights() {
    let folder = tempfile::tempdir().unwrap();
    assert!(!has_weights(folder.path()).unwrap());
    let file = folder.path().join("config.json");
    fs::write(&file, "{}").unwrap();
    let message = has_weights(&file).unwrap_err().to_string();
    assert!(message.starts_with(&format!("cannot look for weights in {}: ", file.display())), "{message}");
}
