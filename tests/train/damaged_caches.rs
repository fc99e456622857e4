//! Teacher caches: damage to any of their files is noticed when they are read, continued and verified, by ranks with copies of
//! their own too; caches of earlier versions stay usable.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::distillation::{computed, data, distil, teacher};
use super::unequal_ranks::Ranks;
use super::{json, new_data, new_model, text};
use crate::common::{Ended, zeroth, zeroth_json};

type Damage = fn(&Path);

const FILES: [&str; 3] = ["manifest.json", "checksums.bin", "records.bin"];

/// Caches a teacher's distributions over rows.
fn cache_of(teacher: &Path, rows: &Path, output: &Path, more: &[&str]) -> Ended {
    let flags = ["distill", "cache", "--teacher", text(teacher), "--data", text(rows), "--max-length", "40"];
    let more = [&["--fp32", "--device", "cpu", "--output", text(output)], more].concat();
    let ended = zeroth(&[&flags[..], &more].concat());
    assert!(ended.is_orderly(), "{}", ended.stderr);
    ended
}

/// Caches the golden teacher, with blocks of 102 tokens.
fn golden_cache(output: &Path) -> Ended {
    cache_of(&teacher(), &data(), output, &["--top-k", "20"])
}

fn copied(from: &Path, to: &Path) -> PathBuf {
    fs::create_dir_all(to).unwrap();
    for name in FILES {
        if let Err(error) = fs::copy(from.join(name), to.join(name)) {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
        }
    }
    to.to_owned()
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Exchanges the first two ids of a token's record: what is in it stays plausible.
fn swap_ids(cache: &Path, token: usize) {
    change(&cache.join("records.bin"), |bytes| {
        let record = &mut bytes[token * 160..][..8];
        record.rotate_left(4);
    });
}

/// The same cache as a version without checksums wrote it.
fn as_of_an_earlier_version(cache: &Path) {
    let path = cache.join("manifest.json");
    let mut manifest = json(&path);
    let fields = manifest.as_object_mut().unwrap();
    for field in ["checksums", "crc32c", "function"] {
        fields.remove(field);
    }
    fields["format_version"] = 1.into();
    fs::write(path, format!("{manifest:#}\n")).unwrap();
    fs::remove_file(cache.join("checksums.bin")).unwrap();
}

fn refused(ended: &Ended, code: i32, parts: &[&str]) {
    assert_eq!(ended.code, code, "{}", ended.stderr);
    assert!(parts.iter().all(|part| ended.stderr.contains(part)), "{parts:?}: {}", ended.stderr);
}

fn verify(cache: &Path) -> Ended {
    let ended = zeroth(&["checkpoint", "verify", text(cache)]);
    assert!(ended.is_orderly(), "{}", ended.stderr);
    ended
}

#[test]
fn damage_is_noticed_by_train_distill_cache_and_verify() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let whole = at("whole");
    golden_cache(&whole).assert_done();
    let (code, verified) = zeroth_json(&["checkpoint", "verify", text(&whole)]);
    let manifest = json(&whole.join("manifest.json"));
    let tokens = manifest["data"]["tokens"].as_u64().unwrap();
    assert_eq!((code, &verified["ok"]), (0, &Value::Bool(true)));
    let checksums = 4 * (tokens / 102);
    assert_eq!(fs::metadata(whole.join("checksums.bin")).unwrap().len(), checksums);
    assert_eq!(verified["cache"]["bytes"], tokens * 160 + checksums);
    assert_eq!(verified["cache"]["tokens_done"], tokens);

    let last = tokens - 1;
    let cases: [(&str, Damage, i32, &str); 7] = [
        ("swapped ids", |cache| swap_ids(cache, 3), 1, "the records of tokens 0 to 101"),
        (
            "swapped ids at the end",
            |cache| {
                let tokens = fs::metadata(cache.join("records.bin")).unwrap().len() / 160;
                swap_ids(cache, tokens as usize - 1);
            },
            1,
            &format!("to {last} is"),
        ),
        ("a cut", |cache| change(&cache.join("records.bin"), |bytes| bytes.truncate(200)), 2, "200 bytes"),
        ("a tail", |cache| change(&cache.join("records.bin"), |bytes| bytes.push(0)), 2, "its manifest says"),
        (
            "a checksum",
            |cache| change(&cache.join("checksums.bin"), |bytes| bytes[1] ^= 1),
            2,
            "checksums.bin",
        ),
        ("no checksums", |cache| fs::remove_file(cache.join("checksums.bin")).unwrap(), 2, "it is missing"),
        (
            "another temperature",
            |cache| {
                let path = cache.join("manifest.json");
                let manifest = fs::read_to_string(&path).unwrap();
                let other = manifest.replace("\"temperature\": \"2\"", "\"temperature\": \"3\"");
                assert_ne!(manifest, other);
                fs::write(path, other).unwrap();
            },
            2,
            "its last field is not the CRC32C",
        ),
    ];
    for (what, damage, code, part) in cases {
        let damaged = copied(&whole, &at(&what.replace(' ', "-")));
        damage(&damaged);
        let before: Vec<Option<Vec<u8>>> =
            FILES.iter().map(|name| fs::read(damaged.join(name)).ok()).collect();
        let run = at(&format!("run of {what}"));
        let train = ["--num-train-epochs", "1", "--save-steps", "0", "--kd-cache", text(&damaged)];
        refused(&distil(&run, &train), code, &["is damaged", part]);
        refused(&golden_cache(&damaged), 2, &["is damaged", part]);
        refused(&verify(&damaged), 4, &["is damaged", part]);
        // What is there of it stays.
        let after: Vec<Option<Vec<u8>>> =
            FILES.iter().map(|name| fs::read(damaged.join(name)).ok()).collect();
        assert!(before == after, "{what}");
    }
}

#[test]
fn caches_of_earlier_versions_train_with_a_note_and_gain_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (new, old) = (at("new"), at("old"));
    golden_cache(&new).assert_done();
    copied(&new, &old);
    as_of_an_earlier_version(&old);
    let verified = verify(&old);
    verified.assert_done();
    assert!(verified.stdout.contains("without checksums"), "{}", verified.stdout);
    for (cache, run) in [(&new, at("run-new")), (&old, at("run-old"))] {
        let ended = distil(&run, &["--max-steps", "3", "--kd-cache", text(cache)]);
        ended.assert_done();
        assert_eq!(ended.stderr.contains("has no checksums"), *cache == old, "{}", ended.stderr);
    }
    assert_eq!(computed(&at("run-new")), computed(&at("run-old")));
    // The command that made it adds them, and nothing else.
    let again = golden_cache(&old);
    again.assert_done();
    assert!(again.stderr.contains("checksums of what it holds were added"), "{}", again.stderr);
    for name in ["checksums.bin", "records.bin"] {
        assert!(fs::read(old.join(name)).unwrap() == fs::read(new.join(name)).unwrap(), "{name}");
    }
    swap_ids(&old, 5);
    refused(&verify(&old), 4, &["the records of tokens 0 to 101"]);

    // A part that an earlier version made is continued.
    let part = copied(&new, &at("part"));
    as_of_an_earlier_version(&part);
    let mut manifest = json(&part.join("manifest.json"));
    let rows = fs::read_to_string(data()).unwrap();
    let first: Value = serde_json::from_str(rows.lines().next().unwrap()).unwrap();
    manifest["tokens_done"] = first["input_ids"].as_array().unwrap().len().into();
    fs::write(part.join("manifest.json"), manifest.to_string()).unwrap();
    let half = distil(&at("half"), &["--max-steps", "1", "--kd-cache", text(&part)]);
    refused(&half, 2, &["continues it"]);
    golden_cache(&part).assert_done();
    assert!(fs::read(part.join("records.bin")).unwrap() == fs::read(new.join("records.bin")).unwrap());
    verify(&part).assert_done();
}

#[test]
fn ranks_with_different_caches_do_not_train() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let teacher = new_model(folder.path(), 64, 2, 128, 256);
    let rows = new_data(folder.path(), 50, 24, 256);
    let caches = ["0", "1"].map(|seed| {
        let output = at(&format!("cache-{seed}"));
        cache_of(&teacher, &rows, &output, &["--random-weights", "--seed", "7"]).assert_done();
        output
    });
    // Manifests that are equal in all that they say about data, teacher and settings.
    as_of_an_earlier_version(&caches[0]);
    as_of_an_earlier_version(&caches[1]);
    swap_ids(&caches[1], 30);
    let flags = ["--max-steps", "4", "--max-length", "40", "--fp32"];
    let [first, second] = caches.each_ref().map(|cache| ["--kd-cache", text(cache)]);
    let of_rank_0 = [&flags[..], &first].concat();
    let mut ranks = Ranks::start_in(folder, "caches", &of_rank_0, &second);
    assert_eq!(ranks.codes(), [Some(2), Some(2)], "{}", ranks.said());
    assert!(ranks.said().contains("the teacher cache (--kd-cache) is"), "{}", ranks.said());
}

#[test]
fn a_stopped_cache_is_verified_before_it_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    let (teacher, rows) = (teacher(), super::teacher_caches::many_rows(folder.path(), 6_000));
    let parts = folder.path().join("parts");
    let words = super::teacher_caches::long_cache(&teacher, &rows, &parts);
    let mut running = super::running::Running::start(folder.path(), &words);
    running.wait_until(std::time::Duration::from_mins(1), "it writes", || {
        super::teacher_caches::done(&parts) > 1_000
    });
    let _ = running.launcher.kill();
    let _ = running.launcher.wait();
    let verified = verify(&parts);
    verified.assert_done();
    assert!(verified.stdout.contains("continues it"), "{}", verified.stdout);
    // Of 4 ids a record has 32 bytes.
    change(&parts.join("records.bin"), |bytes| bytes[32 * 700] ^= 1);
    let ended = zeroth(&words);
    refused(&ended, 2, &["is damaged", "the records of tokens 512 to 1023"]);
}
