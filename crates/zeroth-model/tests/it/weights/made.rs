//! Safetensors files made by hand, byte by byte, for the other tests of weights.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use zeroth_model::{ModelConfig, Parameter, ParameterTable, table};

/// The bytes of a file: the header's length, the header, the data.
pub(crate) fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The table of the smallest llama: 12 tensors.
pub(crate) fn tiny_table(tied: bool) -> ParameterTable {
    let config = json!({
        "model_type": "llama", "hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 1,
        "num_attention_heads": 1, "vocab_size": 5, "tie_word_embeddings": tied,
    });
    table(&ModelConfig::from_json(&config.to_string(), "config.json").unwrap())
}

/// A tensor of f32: its name, its shape, and the value all its elements have.
pub(crate) type Filled = (String, Vec<u64>, f32);

/// The tensors of a table, the element's value being the tensor's number.
pub(crate) fn filled(table: &ParameterTable) -> Vec<Filled> {
    let tensor = |(index, parameter): (usize, &Parameter)| {
        (parameter.name.clone(), parameter.shape.clone(), index as f32)
    };
    table.iter().enumerate().map(tensor).collect()
}

/// Writes tensors to a file.
pub(crate) fn write(path: &Path, tensors: &[Filled]) {
    let mut header = Map::new();
    let mut data = Vec::new();
    for (name, shape, value) in tensors {
        let begin = data.len();
        let elements = shape.iter().product::<u64>() as usize;
        data.extend(std::iter::repeat_n(value.to_le_bytes(), elements).flatten());
        header.insert(
            name.clone(),
            json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    fs::write(path, file(&Value::Object(header).to_string(), &data)).unwrap();
}

/// Writes an index: a tensor's name and its file.
pub(crate) fn write_index(folder: &Path, entries: &[(&str, &str)]) {
    let map: Map<String, Value> =
        entries.iter().map(|(name, file)| ((*name).to_owned(), json!(file))).collect();
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
