//! Damaged files given to the real binary: it ends with an exit code of its own, in time and in 8 GB of addresses.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::formats::{self, Format};
use crate::cases;
use crate::inject::{Ended, ended};
use crate::job::Job;

/// Address space of a process, in KiB: threads reserve some, and files of some kilobytes need no more.
const ADDRESSES: &str = "8388608";

/// `zeroth` with little address space.
fn zeroth(words: &[&str], cache: &Path) -> Ended {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {ADDRESSES}; exec \"$@\"");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_zeroth")]).args(words);
    ended(&mut command, cache)
}

/// The commands that read a file of a format.
struct Commands<'a> {
    format: Format,
    words: Vec<Vec<&'a str>>,
}

#[test]
fn damaged_files_through_the_binary() {
    let each = cases(2, 40);
    let job = Job::new();
    let (model, data) = (job.path("model"), job.path("rows.jsonl"));
    let cache = job.cache("binary");
    let [jsonl, parquet, safetensors, config, tokenizer, manifest, deepspeed] = [
        formats::jsonl(),
        formats::parquet(),
        formats::safetensors(),
        formats::config_json(),
        formats::tokenizer_json(),
        formats::manifest(),
        formats::deepspeed_json(),
    ];
    let run = job.path("run");
    let tokenizer_model = crate_root().join("examples/gsm8k/tiny-qwen3");
    let golden = crate_root().join("tests/golden/qwen3-tied");
    // A folder with a damaged tokenizer or damaged weights needs a config beside it.
    for format in [&safetensors, &tokenizer] {
        fs::copy(golden.join("config.json"), format.file.with_file_name("config.json")).unwrap();
    }
    let text = |path: &Path| path.to_str().expect("paths of this test are UTF-8").to_owned();
    let folder = |format: &Format| text(format.file.parent().expect("it is in a folder"));
    let (jsonl_file, parquet_file, deepspeed_file) =
        (text(&jsonl.file), text(&parquet.file), text(&deepspeed.file));
    let [weights_in, config_in, tokenizer_in, checkpoint] =
        [&safetensors, &config, &tokenizer, &manifest].map(folder);
    let (model, data, run_folder) = (text(&model), text(&data), text(&run));
    let (tokenizer_model, golden_data) = (text(&tokenizer_model), text(&golden.join("data.jsonl")));
    let exported = text(&job.path("exported"));
    let train = ["train", "--device", "cpu", "--output", &run_folder, "--max-steps", "1"];
    // A token cache has its name from what it was made of: the run itself makes the one that is damaged.
    let words = [&train[..], &["--model", &model, "--data", &data]].concat();
    let ended = zeroth(&words, &cache);
    assert_eq!(ended.code, 0, "{}", ended.said);
    let tokens = fs::read_dir(cache.join("tokens")).unwrap().next().unwrap().unwrap().path();
    let token_cache = formats::token_cache().of(tokens);
    let all = [
        Commands { words: vec![words], format: token_cache },
        Commands {
            words: vec![vec!["data", "preview", "--model", &tokenizer_model, "--data", &jsonl_file]],
            format: jsonl,
        },
        Commands {
            words: vec![vec!["data", "preview", "--model", &tokenizer_model, "--data", &parquet_file]],
            format: parquet,
        },
        Commands {
            words: vec![[&train[..], &["--model", &weights_in, "--data", &golden_data]].concat()],
            format: safetensors,
        },
        Commands {
            words: vec![
                vec!["plan", "--model", &config_in, "--ranks", "2", "--device-memory", "44GB"],
                [&train[..], &["--model", &config_in, "--data", &data, "--dry-run", "--host-memory", "1GB"]]
                    .concat(),
            ],
            format: config,
        },
        Commands {
            words: vec![vec!["data", "preview", "--model", &tokenizer_in, "--data", &golden_data]],
            format: tokenizer,
        },
        Commands {
            words: vec![
                vec!["checkpoint", "inspect", &checkpoint],
                vec!["checkpoint", "verify", &checkpoint],
                vec!["checkpoint", "export", &checkpoint, "--output", &exported],
                [&train[..], &["--model", &model, "--data", &data, "--resume", &checkpoint]].concat(),
            ],
            format: manifest,
        },
        Commands {
            words: vec![
                vec!["config", "check", &deepspeed_file],
                [&train[..], &["--model", &model, "--data", &data, "--deepspeed", &deepspeed_file]].concat(),
            ],
            format: deepspeed,
        },
    ];
    let mut codes = BTreeMap::new();
    let mut failures = Vec::new();
    let mut count = 0;
    for Commands { format, words } in &all {
        for case in 0..each {
            let bytes = format.damaged(case);
            fs::write(&format.file, &bytes).unwrap();
            if format.name == "manifest" {
                fs::write(format.file.with_file_name("SHA256SUMS"), formats::sums(&bytes)).unwrap();
            }
            for words in words {
                for path in [&run, &job.path("exported")] {
                    let _ = fs::remove_dir_all(path);
                }
                let ended = zeroth(words, &cache);
                count += 1;
                *codes.entry(ended.code).or_insert(0) += 1;
                if ended.hung || ended.crashed() || !(0..=4).contains(&ended.code) {
                    let kept = super::kept(format.name, case);
                    fs::write(&kept, &bytes).unwrap();
                    let last = ended.said.lines().last().unwrap_or_default();
                    let how = if ended.hung { "hangs" } else { "crashes" };
                    failures.push(format!(
                        "{} {how} at {} (exit code {}): {last}",
                        words[..2].join(" "),
                        kept.display(),
                        ended.code
                    ));
                }
            }
        }
    }
    println!("{count} commands on damaged files, exit codes {codes:?}");
    assert!(failures.is_empty(), "{} of {count}:\n{}", failures.len(), failures.join("\n"));
}

fn crate_root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
