//! `distill cache` and `train --kd-cache`: equal to the teacher itself, kills, refusals.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::distillation::{computed, copied, data, distil, teacher};
use super::running::{Running, signal};
use super::{is_full, json, number, text, written};
use crate::common::{Ended, zeroth, zeroth_json};

/// Caches the golden teacher's distributions over the golden rows.
fn cache(output: &Path, more: &[&str]) -> Ended {
    let (teacher, rows) = (teacher(), data());
    let flags = [
        "distill",
        "cache",
        "--teacher",
        text(&teacher),
        "--data",
        text(&rows),
        "--max-length",
        "40",
        "--fp32",
        "--device",
        "cpu",
        "--output",
        text(output),
    ];
    let ended = zeroth(&[&flags[..], more].concat());
    assert!(ended.is_orderly(), "{}", ended.stderr);
    ended
}

fn difference(one: &Path, other: &Path) -> f64 {
    let (one, other) = (computed(one), computed(other));
    assert_eq!(one.len(), other.len());
    let of = |line: &[serde_json::Value; 6]| line[3].as_f64().unwrap_or(0.0);
    one.iter().zip(&other).map(|(one, other)| (of(one) - of(other)).abs()).fold(0.0, f64::max)
}

#[test]
fn a_cache_of_the_whole_vocabulary_equals_the_teacher() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let whole = at("whole");
    let ended = cache(&whole, &["--top-k", "53", "--kd-temperature", "1.5"]);
    ended.assert_done();
    assert!(ended.stdout.contains("the 53 most probable tokens"), "{}", ended.stdout);
    let teacher = teacher();
    let online = ["--teacher", text(&teacher), "--kd-temperature", "1.5"];
    let offline = ["--kd-cache", text(&whole)];
    // Packed, shuffled over more than an epoch, partly held out, on two ranks.
    let ways: [(&str, &[&str]); 3] = [
        ("plain", &["--max-steps", "3"]),
        ("packed", &["--max-steps", "3", "--packing", "--shuffle", "true", "--split-dataset-ratio", "0.2"]),
        (
            "ranks",
            &[
                "--max-steps",
                "7",
                "--shuffle",
                "true",
                "--deepspeed",
                "zero3",
                "--ranks",
                "2",
                "--per-device-train-batch-size",
                "8",
            ],
        ),
    ];
    for (name, flags) in ways {
        let [one, other] = ["online", "offline"].map(|way| at(&format!("{name}-{way}")));
        distil(&one, &[&online, flags].concat()).assert_done();
        distil(&other, &[&offline, flags].concat()).assert_done();
        let found = difference(&one, &other);
        assert!(found < 1e-5, "{name}: {found}");
    }
    // Resumed from a cache: the same bits.
    let (one, parts) = (at("uninterrupted"), at("parts"));
    let flags = ["--kd-cache", text(&whole), "--lr-scheduler-type", "constant", "--save-steps", "2"];
    distil(&one, &[&flags[..], &["--max-steps", "4"]].concat()).assert_done();
    distil(&parts, &[&flags[..], &["--max-steps", "2"]].concat()).assert_done();
    let resume = ["--max-steps", "4", "--resume", "auto"];
    let tail = distil(&parts, &[&flags[..], &resume, &["--kd-tail", "renormalize"]].concat());
    assert!(tail.code == 2 && tail.stderr.contains("--kd-cache is of k 53"), "{}", tail.stderr);
    distil(&parts, &[&flags[..], &resume].concat()).assert_done();
    assert_eq!(computed(&one), computed(&parts));

    // Of 20 of 53 tokens both tails differ from the teacher, and from each other.
    let few = at("few");
    cache(&few, &["--kd-temperature", "1.5"]).assert_done();
    let online = at("plain-online");
    for (tail, most) in [("bucket", 0.5), ("renormalize", 1.0)] {
        let run = at(tail);
        distil(&run, &["--kd-cache", text(&few), "--kd-tail", tail, "--max-steps", "3"]).assert_done();
        let found = difference(&online, &run);
        println!("k = 20, {tail}: kd_loss differs by up to {found:.2e} from the teacher's");
        assert!(found > 1e-6 && found < most, "{tail}: {found}");
    }
    // Merging tokens into a bucket never increases a divergence.
    let first = |run: &Path| number(&computed(run)[0][3]);
    assert!(first(&at("bucket")) < first(&online));
}

#[test]
fn caches_of_something_else_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let usual = at("cache");
    cache(&usual, &["--top-k", "5"]).assert_done();
    let manifest = json(&usual.join("manifest.json"));
    assert_eq!(manifest["tokens_done"], manifest["data"]["tokens"]);
    let bytes = fs::metadata(usual.join("records.bin")).unwrap().len();
    assert_eq!(bytes, manifest["data"]["tokens"].as_u64().unwrap() * 5 * 8);
    // Complete: nothing is done again.
    let (code, found) = zeroth_json(&[
        "distill",
        "cache",
        "--teacher",
        text(&teacher()),
        "--data",
        text(&data()),
        "--max-length",
        "40",
        "--fp32",
        "--device",
        "cpu",
        "--top-k",
        "5",
        "--output",
        text(&usual),
    ]);
    assert_eq!((code, &found["computed_tokens"], &found["bytes"]), (0, &0.into(), &bytes.into()));

    let other = copied(&teacher(), &at("other"));
    let path = other.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let first = super::tensors(&file)[0].bytes.start;
    file[first] ^= 1;
    fs::write(&path, file).unwrap();
    let refused = |ended: Ended, parts: &[&str]| {
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        assert!(parts.iter().all(|part| ended.stderr.contains(part)), "{parts:?}: {}", ended.stderr);
    };
    // By `distill cache`.
    refused(cache(&usual, &["--top-k", "6"]), &["--top-k is 6, that of the cache 5", "another --output"]);
    refused(
        cache(&usual, &["--top-k", "5", "--kd-temperature", "1"]),
        &["--kd-temperature is 1, that of the cache 2"],
    );
    refused(cache(&usual, &["--top-k", "5", "--teacher", text(&other)]), &["has other weights"]);
    refused(cache(&usual, &["--top-k", "5", "--max-length", "20"]), &["the data is"]);
    refused(cache(&usual, &["--top-k", "5", "--teacher-quantize", "nf4"]), &["--teacher-quantize is nf4"]);
    refused(cache(&at("none"), &["--top-k", "54"]), &["vocabulary of 53"]);
    refused(cache(&at("none"), &["--kd-temperature", "0"]), &["above 0"]);
    refused(cache(&at("none"), &["--max-length", "400"]), &["positions"]);
    let occupied = at("occupied");
    fs::create_dir_all(&occupied).unwrap();
    fs::write(occupied.join("thesis.txt"), "mine").unwrap();
    refused(cache(&occupied, &[]), &["holds something else (thesis.txt)"]);
    refused(cache(&other.join("config.json"), &[]), &["config.json"]);
    // A run folder has a manifest.json of another kind below it, and files of its own.
    assert_eq!(fs::read_to_string(occupied.join("thesis.txt")).unwrap(), "mine");

    // By `train`.
    let train = |more: &[&str]| distil(&at("run"), &[&["--max-steps", "1"], more].concat());
    let with = |more: &[&str]| train(&[&["--kd-cache", text(&usual)], more].concat());
    refused(with(&["--kd-temperature", "3"]), &["--kd-temperature is 3, that of the cache 2"]);
    refused(with(&["--max-length", "20"]), &["the data is", "zeroth distill cache"]);
    refused(with(&["--max-train-samples", "5"]), &["the data is 5 samples"]);
    refused(with(&["--teacher", text(&other)]), &["has other weights"]);
    refused(train(&["--kd-cache", text(&occupied)]), &["is no teacher cache"]);
    refused(train(&["--kd-cache", text(&at("missing"))]), &["is no teacher cache"]);
    with(&["--teacher", text(&teacher()), "--teacher-deepspeed", "zero3"]).assert_done();

    // Numbers of a manifest that are no cache's, by a version that had no checksums.
    let damaged = at("damaged");
    let damage = |what: &str| {
        let _ = fs::remove_dir_all(&damaged);
        fs::create_dir_all(&damaged).unwrap();
        let mut bytes = fs::read(usual.join("records.bin")).unwrap();
        let mut manifest = json(&usual.join("manifest.json"));
        manifest["format_version"] = 1.into();
        for field in ["checksums", "crc32c"] {
            manifest.as_object_mut().unwrap().remove(field).unwrap();
        }
        match what {
            "short" => bytes.truncate(100),
            "id" => bytes[..4].copy_from_slice(&53_i32.to_le_bytes()),
            "nan" => bytes[20..24].copy_from_slice(&f32::NAN.to_le_bytes()),
            "incomplete" => manifest["tokens_done"] = 0.into(),
            "huge" => manifest["k"] = u64::MAX.into(),
            _ => manifest["data"]["tokens"] = u64::MAX.into(),
        }
        fs::write(damaged.join("records.bin"), bytes).unwrap();
        fs::write(damaged.join("manifest.json"), manifest.to_string()).unwrap();
        let _ = fs::remove_dir_all(at("run"));
        distil(&at("run"), &["--max-steps", "1", "--kd-cache", text(&damaged)])
    };
    refused(damage("short"), &["damaged", "100 bytes"]);
    refused(damage("incomplete"), &["has 0 of", "continues it"]);
    refused(damage("huge"), &["damaged"]);
    refused(damage("tokens"), &["damaged"]);
    for what in ["id", "nan"] {
        let ended = damage(what);
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        assert!(ended.stderr.contains("the record of token 0"), "{}", ended.stderr);
    }
}

/// Rows that take a while.
pub(super) fn many_rows(folder: &Path, rows: u64) -> PathBuf {
    let row = |row: u64| {
        let ids: Vec<u64> = (0..30).map(|at| (row * 37 + at * 11 + at * at) % 53).collect();
        serde_json::json!({ "input_ids": ids }).to_string()
    };
    let lines: Vec<String> = (0..rows).map(row).collect();
    written(folder, "many.jsonl", &lines)
}

/// The command of a cache over many rows.
pub(super) fn long_cache<'a>(teacher: &'a Path, rows: &'a Path, output: &'a Path) -> Vec<&'a str> {
    vec![
        "distill",
        "cache",
        "--teacher",
        text(teacher),
        "--data",
        text(rows),
        "--max-length",
        "40",
        "--fp32",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--top-k",
        "4",
        "--output",
        text(output),
    ]
}

/// Tokens that a cache has committed.
pub(super) fn done(cache: &Path) -> u64 {
    fs::read_to_string(cache.join("manifest.json"))
        .ok()
        .and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
        .map_or(0, |manifest| number(&manifest["tokens_done"]) as u64)
}

#[test]
fn a_cache_that_was_killed_or_stopped_ends_with_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let teacher = teacher();
    let rows = many_rows(folder.path(), 6_000);
    let whole = folder.path().join("whole");
    assert_eq!(zeroth(&long_cache(&teacher, &rows, &whole)).code, 0);
    let tokens = done(&whole);
    let files = |cache: &Path| {
        ["manifest.json", "checksums.bin", "records.bin"].map(|name| fs::read(cache.join(name)).unwrap())
    };

    let parts = folder.path().join("parts");
    let kills = if is_full() { 12 } else { 2 };
    let mut before = 0;
    for kill in 0..kills {
        let mut running = Running::start(folder.path(), &long_cache(&teacher, &rows, &parts));
        // Once at the start, then after more was committed.
        let records = parts.join("records.bin");
        running.wait_until(Duration::from_mins(1), "it writes", || match kill {
            0 => records.metadata().is_ok_and(|found| found.len() > 0),
            _ => done(&parts) > before,
        });
        let _ = running.launcher.kill();
        let _ = running.launcher.wait();
        before = done(&parts);
        if before == tokens {
            break;
        }
    }
    // A second writer is refused; Ctrl-C keeps what is done.
    let mut running = Running::start(folder.path(), &long_cache(&teacher, &rows, &parts));
    running.wait_until(Duration::from_mins(1), "it continues", || done(&parts) > before);
    // Stopped, so that it does not end meanwhile.
    signal(running.launcher.id(), "STOP");
    let other = zeroth(&long_cache(&teacher, &rows, &parts));
    assert!(other.code == 2 && other.stderr.contains("written by another process"), "{}", other.stderr);
    signal(running.launcher.id(), "INT");
    signal(running.launcher.id(), "CONT");
    let code = running.launcher.wait().unwrap().code();
    assert!(code == Some(130), "{code:?}: {}", running.said());
    for words in ["finishing the batch and saving what is cached", "the same command continues"] {
        assert!(running.said().contains(words), "{words}: {}", running.said());
    }
    assert!(!running.said().contains("checkpoint"), "{}", running.said());
    assert!(done(&parts) >= before && done(&parts) < tokens);
    let ended = zeroth(&long_cache(&teacher, &rows, &parts));
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stderr.contains("continuing after"), "{}", ended.stderr);
    assert!(files(&whole) == files(&parts), "the same bytes");
}
