//! Micro-batches are assembled one at a time: memory does not grow with gradient accumulation.

use std::path::Path;

use super::{metrics, new_data, new_model, train_on};

/// Rows of a micro-batch and their tokens: many short ones, as attention is the slowest part.
const ROWS: u64 = 8;
const TOKENS: u64 = 32;

/// Resident memory of a run of this name with this accumulation.
fn resident(folder: &Path, name: &str, accumulation: u64) -> u64 {
    let model = new_model(folder, 16, 1, 16, 32);
    let data = new_data(folder, ROWS, TOKENS, 32);
    let run = folder.join(name);
    let [accumulation, rows] = [accumulation, ROWS].map(|number| number.to_string());
    let flags = [
        ["--max-steps", "1"],
        ["--threads-per-rank", "1"],
        ["--per-device-train-batch-size", &rows],
        ["--gradient-accumulation-steps", &accumulation],
    ];
    let flags = flags.concat();
    train_on(&model, &data, &run, &flags).assert_done();
    metrics(&run)[0]["host_bytes_peak"].as_u64().unwrap()
}

#[test]
fn memory_does_not_grow_with_accumulation() {
    let folder = tempfile::tempdir().unwrap();
    // The first run fills the token cache, as tokenizing takes memory too. The pages of the binary count less while other
    // processes map them, so the small run is measured on both sides of the large one.
    let runs = [("first", 2), ("before", 3), ("many", 4000), ("after", 3)];
    let [_, before, many, after] =
        runs.map(|(name, accumulation)| resident(folder.path(), name, accumulation));
    let few = before.max(after);
    // Held at once, tokens, labels and positions alone would take 12 MB; the binary's pages are worth up to 5.
    assert!(many < few + (8 << 20), "{few} bytes with 3 micro-batches, {many} with 4,000");
}
