//! Headers that lie. Each is refused with its sentence; none panics or takes memory that the file does not have.

use std::fs;

use proptest::prelude::*;
use zeroth_model::WeightFiles;

use super::made::{file, filled, tiny_table, write};

/// The complaint about a folder whose only file has these bytes.
fn complaint(bytes: &[u8]) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    WeightFiles::open(folder.path(), &tiny_table(false)).err().map(|error| error.to_string())
}

/// A header of one tensor `x`.
fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"x": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
}

/// A header of two tensors of one f32 each.
fn two(a: &str, b: &str) -> String {
    let tensor =
        |name, offsets| format!(r#""{name}": {{"dtype": "F32", "shape": [1], "data_offsets": {offsets}}}"#);
    format!("{{{}, {}}}", tensor("x", a), tensor("y", b))
}

#[test]
fn every_lie_of_a_header_has_its_sentence() {
    let huge = |length: u64| length.to_le_bytes().to_vec();
    let max = u64::MAX;
    for (bytes, phrase) in [
        (vec![], "it has 0 bytes"),
        (vec![1, 2, 3], "it has 3 bytes"),
        (huge(u64::MAX), "the format allows 100,000,000"),
        (huge(100_000_001), "its header would have 100,000,001 bytes"),
        (huge(100_000_000), "but only 0 follow"),
        ([huge(50), vec![b'{'; 10]].concat(), "50 bytes by its own count, but only 10 follow"),
        (file("", &[]), "not one of a safetensors file"),
        (file("[]", &[]), "an object of tensors"),
        (file("{\"x\": 5}", &[]), "`x`: invalid type"),
        (file("\u{feff}{}", &[]), "not one of a safetensors file"),
        (file(&"[".repeat(100_000), &[]), "not one of a safetensors file"),
        (file(&format!("{{\"x\": {}", "[".repeat(100_000)), &[]), "not one of a safetensors file"),
        (file(r#"{"__metadata__": {"format": 5}}"#, &[]), "not one of a safetensors file"),
        (file(r#"{"x": {"dtype": "F32", "shape": [1]}}"#, &[0; 4]), "`x`: missing field `data_offsets`"),
        (file(&one("F32", "[-1]", "[0, 4]"), &[0; 4]), "`x`: invalid value"),
        (file(&one("F32", "[1.5]", "[0, 4]"), &[0; 4]), "`x`: invalid type"),
        (file(&one("F32", "[1]", "[0, 4, 8]"), &[0; 4]), "not one of a safetensors file"),
        (file(&one("Q4_K", "[1]", "[0, 4]"), &[0; 4]), "`x` has the type `Q4_K`"),
        (file(&one("F32", "[1]", "[4, 0]"), &[0; 4]), "`x` lies in bytes 4 to 0"),
        (file(&one("F32", "[2]", "[0, 4]"), &[0; 4]), "its shape and type need 8 bytes"),
        (file(&one("F32", "[0]", "[0, 4]"), &[0; 4]), "its shape and type need 0 bytes"),
        (file(&one("F4", "[3]", "[0, 1]"), &[0; 1]), "not a number of bytes that a file can hold"),
        (file(&one("F32", &format!("[{max}, {max}]"), "[0, 4]"), &[0; 4]), "not a number of bytes"),
        (file(&one("F32", "[4611686018427387904]", "[0, 0]"), &[]), "not a number of bytes"),
        (
            file(&one("U8", &format!("[{}]", max / 8), &format!("[0, {}]", max / 8)), &[0; 4]),
            "it is cut short: `x`",
        ),
        (
            file(&one("F32", "[2]", "[0, 8]"), &[0; 4]),
            "`x` ends at byte 8 of the data, and the file has 4 bytes",
        ),
        (
            file(&one("F32", "[1]", "[0, 4]"), &[0; 9]),
            "5 bytes of the data, from byte 4, belong to no tensor",
        ),
        (file("{}", &[0; 3]), "3 bytes of the data, from byte 0, belong to no tensor"),
        (file(&two("[0, 4]", "[0, 4]"), &[0; 4]), "inside of"),
        (
            file(&two("[0, 4]", "[2, 6]"), &[0; 6]),
            "`y` begins at byte 2 of the data, inside of `x`, which ends at 4",
        ),
        (file(&two("[0, 4]", "[6, 10]"), &[0; 10]), "2 bytes of the data, from byte 4"),
        (file(&two("[4, 8]", "[0, 4]"), &[0; 6]), "it is cut short: `x`"),
        (file(&two("[0, 4]", "[4, 8]").replace("\"y\"", "\"x\""), &[0; 8]), "its header has `x` twice"),
    ] {
        let message = complaint(&bytes).unwrap_or_else(|| panic!("accepted: {phrase}"));
        assert!(message.contains(phrase), "should say `{phrase}`:\n{message}");
        assert!(message.contains("model.safetensors"), "the file is not named: {message}");
    }
}

#[test]
fn a_parameter_in_a_type_that_is_no_weight_is_named() {
    let header = r#"{"lm_head.weight": {"dtype": "I8", "shape": [5, 2], "data_offsets": [0, 10]}}"#;
    let message = complaint(&file(header, &[0; 10])).unwrap();
    assert!(
        message.contains("`lm_head.weight` is stored as I8 in model.safetensors: F32, BF16 and F16 are read")
    );
}

/// A good file's bytes.
fn good() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &filled(&tiny_table(false)));
    fs::read(path).unwrap()
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let good = good();
    assert_eq!(complaint(&good), None);
    for length in 0..good.len() {
        assert!(complaint(&good[..length]).is_some(), "cut to {length} of {} bytes", good.len());
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(complaint(&bytes).is_some(), "no file of random bytes holds the model");
    }

    #[test]
    fn any_text_as_a_header_is_read_or_refused(text in r"\PC{0,200}", data in 0_usize..20) {
        let _ = complaint(&file(&text, &vec![0; data]));
    }

    /// Digits of a good header become others: sizes, offsets and shapes that no longer fit each other.
    #[test]
    fn a_good_header_with_other_digits_is_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..4),
    ) {
        let mut bytes = good();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let digits: Vec<usize> = (8..8 + length).filter(|at| bytes[*at].is_ascii_digit()).collect();
        for (at, digit) in changes {
            bytes[*at.get(&digits)] = digit;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        if let Ok(files) = WeightFiles::open(folder.path(), &tiny_table(false)) {
            for parameter in tiny_table(false).iter() {
                let mut values = vec![0.0; parameter.elements() as usize];
                files.read_f32(&parameter.name, 0..parameter.elements(), &mut values).unwrap();
            }
        }
    }
}
