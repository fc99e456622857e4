//! Any damage is detected and reported, and affects no other checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use zeroth_train::checkpoint::{
    Checkpoint, CheckpointError, ShardWriter, UnfinishedCheckpoint, Verified, newest_valid, verify_folder,
};

use super::sample::{Model, files_in, numbers_of};

/// Opens and verifies, as loading does.
fn load(folder: &Path) -> Result<Verified, CheckpointError> {
    Checkpoint::open(folder)?.verify()
}

/// A run with two checkpoints, the newer one written by two ranks.
fn two() -> (Model, tempfile::TempDir, PathBuf) {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    model.save(folder.path(), 5);
    let newer = model.save_cut(folder.path(), 10, &[777], 1000).unwrap();
    (model, folder, newer)
}

#[test]
fn any_flipped_bit_is_detected() {
    let (model, folder, newer) = two();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let files = files_in(&newer);
    assert_eq!(files.len(), 7, "two parts, three files of the model, the manifest, SHA256SUMS");
    for path in files {
        let whole = fs::read(&path).unwrap();
        let last = whole.len() - 1;
        let mut places = vec![0, 9, last / 2, last];
        // Testing every byte of headers, manifest and small files would take too long: many random ones.
        for _ in 0..60 {
            let place = (0..=last).new_tree(&mut runner).unwrap();
            places.push(proptest::strategy::ValueTree::current(&place));
        }
        for (turn, place) in places.into_iter().enumerate() {
            let mut flipped = whole.clone();
            flipped[place] ^= 1 << (turn % 8);
            fs::write(&path, &flipped).unwrap();
            let error = load(&newer).unwrap_err();
            assert!(!verify_folder(&newer).unwrap_err().is_empty(), "{} byte {place}", path.display());
            assert!(error.to_string().contains("resume from an older checkpoint"), "{error}");
        }
        let newest = newest_valid(folder.path()).unwrap();
        assert!(model.is_held_by(&newest.found.unwrap(), 100), "the older one is the newest good one");
        assert_eq!(newest.refused.len(), 1);
        fs::write(&path, &whole).unwrap();
        load(&newer).unwrap();
    }
}

#[test]
fn missing_and_resized_files_are_reported() {
    let (_model, _folder, newer) = two();
    for path in files_in(&newer) {
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let error = load(&newer).unwrap_err();
        let is_manifest = path.ends_with("manifest.json");
        assert!(
            matches!(&error, CheckpointError::Missing { path: missing } if *missing == path)
                || (is_manifest && matches!(&error, CheckpointError::NotACheckpoint { .. })),
            "{error}"
        );
        for bytes in [&whole[..whole.len() / 2], &[&whole[..], b"\n"].concat()[..], b""] {
            fs::write(&path, bytes).unwrap();
            let error = load(&newer).unwrap_err();
            let in_sums = is_manifest || path.ends_with("SHA256SUMS");
            assert!(
                matches!(&error, CheckpointError::Size { expected, found, .. }
                    if (*expected, *found) == (whole.len() as u64, bytes.len() as u64))
                    || (in_sums && matches!(&error, CheckpointError::Manifest { .. })),
                "{error}"
            );
        }
        fs::write(&path, &whole).unwrap();
    }
}

#[test]
fn all_damaged_files_are_reported() {
    let (_model, _folder, newer) = two();
    fs::remove_file(newer.join("model/config.json")).unwrap();
    for rank in 0..2 {
        let path = newer.join(format!("rank-0000{rank}-of-00002.safetensors"));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let found: Vec<String> = verify_folder(&newer).unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].contains("config.json is listed in the manifest but missing"), "{}", found[0]);
    assert!(found[1].contains("rank-00000-of-00002.safetensors is damaged: its SHA-256 is "), "{}", found[1]);
}

/// Writes two shards with these elements, and tries to commit them.
fn commit_parts(owned: [std::ops::Range<u64>; 2]) -> CheckpointError {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let unfinished = UnfinishedCheckpoint::begin(folder.path(), 1).unwrap();
    let mut manifest = model.manifest(1, 2);
    for (rank, owned) in owned.into_iter().enumerate() {
        let pieces = model.pieces(owned);
        let numbers: Vec<f32> = pieces.iter().flat_map(|piece| numbers_of(1, piece)).collect();
        let mut part = ShardWriter::create(unfinished.path(), rank as u64, 2, pieces).unwrap();
        part.append_f32(&numbers).unwrap();
        manifest.files.push(part.finish().unwrap().entry().clone());
    }
    let error = unfinished.commit(manifest, &model.files()).unwrap_err();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing of it is left");
    error
}

#[test]
fn gaps_and_overlaps_are_refused() {
    let total = Model::new().table.total();
    // The embedding is the first parameter: 30 × 8.
    let gap = commit_parts([0..100, 103..total]).to_string();
    assert!(
        gap.contains("elements 100 to 103 of first/model.embed_tokens.weight are missing from its files"),
        "{gap}"
    );
    let overlap = commit_parts([0..100, 98..total]).to_string();
    assert!(
        overlap
            .contains("elements 98 to 100 of first/model.embed_tokens.weight are stored twice in its files"),
        "{overlap}"
    );
    let end = commit_parts([0..100, 100..total - 1]).to_string();
    assert!(end.contains("are missing from its files"), "{end}");
}

#[test]
fn saves_use_the_snapshotted_model_files() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let (files, total) = (model.files(), model.table.total());
    let config = fs::read(model.folder.path().join("config.json")).unwrap();
    fs::remove_dir_all(model.folder.path()).unwrap();
    let unfinished = UnfinishedCheckpoint::begin(folder.path(), 2).unwrap();
    let (pieces, mut manifest) = (model.pieces(0..total), model.manifest(2, 1));
    let numbers: Vec<f32> = pieces.iter().flat_map(|piece| numbers_of(2, piece)).collect();
    let mut part = ShardWriter::create(unfinished.path(), 0, 1, pieces).unwrap();
    part.append_f32(&numbers).unwrap();
    let written = part.finish().unwrap();
    written.sync().unwrap();
    manifest.files.push(written.entry().clone());
    let saved = unfinished.commit(manifest, &files).unwrap();
    assert_eq!(fs::read(saved.join("model/config.json")).unwrap(), config);
    Checkpoint::open(&saved).unwrap().verify().unwrap();
}

#[test]
fn other_formats_and_escaping_paths_are_refused() {
    let (_model, _folder, newer) = two();
    let path = newer.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let sums = fs::read_to_string(newer.join("SHA256SUMS")).unwrap();
    // With the checksums that another version, or a forger, would write.
    let write = |text: &str, sums: &str| {
        fs::write(&path, text).unwrap();
        let output = std::process::Command::new("sha256sum").arg(&path).output().unwrap();
        let hash = &String::from_utf8(output.stdout).unwrap()[..64];
        fs::write(newer.join("SHA256SUMS"), format!("{hash}{}", &sums[64..])).unwrap();
    };
    write(&text.replace("\"format_version\": 1", "\"format_version\": 2"), &sums);
    let message = load(&newer).unwrap_err().to_string();
    assert!(message.contains("has format 2, but this version of zeroth reads format 1"), "{message}");

    let forged = text.replace("\"model/config.json\"", "\"../../latest\"");
    assert_ne!(forged, text);
    write(&forged, &sums.replace("  model/config.json", "  ../../latest"));
    let message = load(&newer).unwrap_err().to_string();
    assert!(message.contains("`../../latest`, which is outside its folder"), "{message}");
}

#[test]
fn checkpoints_of_other_models_are_refused() {
    let (_model, _folder, newer) = two();
    let checkpoint = Checkpoint::open(&newer).unwrap();
    let wider = Model::of_width(16);
    let message = checkpoint.check_model("qwen3", &wider.table).unwrap_err().to_string();
    assert!(
        message.contains(
            "`model.embed_tokens.weight` has shape [30, 8] in the checkpoint and [30, 16] in the model"
        ),
        "{message}"
    );
    assert!(message.contains("and 8 more") && message.contains("another model (qwen3 with "), "{message}");

    let mut renamed = Model::new().table;
    renamed.units[0].parameters[0].name = "embed.weight".to_owned();
    let message = checkpoint.check_model("qwen3", &renamed).unwrap_err().to_string();
    assert!(
        message.contains("it lacks `embed.weight`; the model has no `model.embed_tokens.weight`"),
        "{message}"
    );

    let message = checkpoint.check_model("llama", &Model::new().table).unwrap_err().to_string();
    assert!(message.contains("(qwen3 with ") && message.contains("--model is llama with "), "{message}");
}
