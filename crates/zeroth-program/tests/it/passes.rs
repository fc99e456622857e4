//! What `config explain` says about passes is true of the passes there are.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use zeroth_config::{explain, schema};

/// The passes: each is one file.
fn passes() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/passes");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let names = files.map(|file| file.file_stem().unwrap().to_string_lossy().into_owned());
    names.filter(|name| name != "mod").collect()
}

#[test]
fn every_pass_that_an_explanation_names_exists() {
    let passes = passes();
    assert!(passes.len() >= 8, "{passes:?}");
    let mut named = BTreeSet::new();
    for key in schema::keys() {
        let text = explain::text(key);
        for rest in text.split("pass `").skip(1) {
            let name = rest.split('`').next().unwrap();
            assert!(passes.contains(name), "{}: there is no pass `{name}`, but {passes:?}", key.path);
            named.insert(name.to_owned());
        }
    }
    // All but those for which there is no key: the device decides, operands follow from the final order, rails from the groups of
    // `reduce`, and --quantize is a flag.
    let unnamed: Vec<&String> = passes.difference(&named).collect();
    assert_eq!(unnamed, ["in_place", "operands", "rails", "unpack"]);
}
