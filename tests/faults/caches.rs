//! Damaged teacher caches: a run over all of their records ends with an error, or the cache is the one that was made.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::cases;
use super::chance::Chance;
use super::fuzz::mutate;
use super::inject::zeroth;
use super::job::Job;

const AUDIT: u32 = 20;
const FILES: [&str; 3] = ["manifest.json", "checksums.bin", "records.bin"];

/// The damage of a case to a file: to its bytes, its JSON, or records that stay plausible ones.
fn damaged(name: &str, bytes: &[u8], chance: &mut Chance) -> (&'static str, Vec<u8>) {
    let record = 160;
    let records = bytes.len() / record;
    match (name, chance.below(3)) {
        ("manifest.json", 0 | 1) => ("fields", mutate::text(bytes, chance)),
        ("records.bin", 0) => {
            // Ids of one record in the place of those of another.
            let (from, to) = (chance.below(records) * record, chance.below(records) * record);
            let mut other = bytes.to_vec();
            other.copy_within(from..from + record / 2, to);
            ("ids of another token", other)
        }
        ("records.bin", 1) => {
            let mut other = bytes.to_vec();
            other.rotate_left(record * (1 + chance.below(records - 1)));
            ("shifted records", other)
        }
        _ => ("bytes", mutate::binary(bytes, chance)),
    }
}

#[test]
fn no_damaged_teacher_cache_trains() {
    let job = Job::new();
    let (cache, tokens) = (job.path("teacher-cache"), job.cache("caches"));
    let (model, data) = (job.path("model"), job.path("rows.jsonl"));
    let text = |path: &Path| path.to_str().expect("paths of this test are UTF-8").to_owned();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let making = [
        "distill",
        "cache",
        "--device",
        "cpu",
        "--teacher",
        &text(&model),
        "--data",
        &text(&data),
        "--top-k",
        "20",
        "--max-length",
        "40",
        "--fp32",
        "--output",
        &text(&cache),
    ];
    let made = zeroth(&words(&making), &tokens);
    assert_eq!(made.code, 0, "{}", made.said);
    let run = job.path("run");
    // All 40 rows, once.
    let training = [
        "train",
        "--device",
        "cpu",
        "--model",
        &text(&model),
        "--data",
        &text(&data),
        "--kd-cache",
        &text(&cache),
        "--output",
        &text(&run),
        "--overwrite-output-dir",
        "--max-length",
        "40",
        "--fp32",
        "--num-train-epochs",
        "1",
        "--per-device-train-batch-size",
        "4",
        "--threads-per-rank",
        "1",
        "--save-steps",
        "0",
    ];
    let training = words(&training);
    let whole = zeroth(&training, &tokens);
    assert_eq!(whole.code, 0, "{}", whole.said);
    let good = FILES.map(|name| fs::read(cache.join(name)).unwrap());

    let count = cases(30, 300);
    let mut codes: BTreeMap<(&str, &str, i32), u32> = BTreeMap::new();
    let (mut faults, mut unchanged) = (Vec::new(), 0);
    for case in 0..count {
        let mut chance = Chance::of(AUDIT, case);
        let file = chance.below(FILES.len());
        let (how, bytes) = damaged(FILES[file], &good[file], &mut chance);
        if bytes == good[file] {
            unchanged += 1;
            continue;
        }
        let path = cache.join(FILES[file]);
        fs::write(&path, &bytes).unwrap();
        let ended = zeroth(&training, &tokens);
        *codes.entry((FILES[file], how, ended.code)).or_default() += 1;
        if ended.hung || ended.crashed() || ![1, 2].contains(&ended.code) {
            faults
                .push(format!("case {case}, {how} of {}: code {}: {}", FILES[file], ended.code, ended.said));
        } else if !ended.said.contains(&text(&cache)) {
            faults.push(format!(
                "case {case}, {how} of {}: the cache is not named: {}",
                FILES[file], ended.said
            ));
        }
        fs::write(&path, &good[file]).unwrap();
    }
    println!(
        "{count} damaged teacher caches, {unchanged} of them unchanged, {} faults; exit codes:",
        faults.len()
    );
    for ((file, how, code), times) in &codes {
        println!("  {times} times {code}: {how} of {file}");
    }
    assert!(unchanged * 4 < count, "{unchanged} of {count} files were not damaged");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
