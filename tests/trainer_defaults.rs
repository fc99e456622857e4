//! Defaults of other trainers: the table in docs/coming-from.md is that of the code (`ZEROTH_BLESS=1` writes it), its column
//! of ours is what `train` does, and a run says which differ.

use zeroth::config::trainer_defaults::{FLAG_DEFAULTS, ForeignTrainer};

use crate::common::{root, zeroth, zeroth_json};

const PAGE: &str = "docs/coming-from.md";
/// The lines around the generated table.
const MARKS: [&str; 2] = ["<!-- defaults: generated -->", "<!-- end of defaults -->"];

fn table() -> String {
    let names = ForeignTrainer::ALL.map(ForeignTrainer::name).join(" | ");
    let mut table = format!("| flag | here | {names} |\n|---|---|---|---|---|---|---|\n");
    for row in FLAG_DEFAULTS {
        let run = match row.lora {
            Some(true) => " (LoRA)",
            Some(false) => " (full)",
            None => "",
        };
        let theirs = ForeignTrainer::ALL.map(|trainer| row.of(trainer).unwrap_or("–")).join(" | ");
        table.push_str(&format!("| `--{}`{run} | {} | {theirs} |\n", row.flag, row.here));
    }
    table
}

#[test]
fn the_page_lists_every_default_that_differs() {
    let path = root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).unwrap();
    let (shown, after) = rest.split_once(MARKS[1]).unwrap();
    let table = table();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        let [begin, end] = MARKS;
        std::fs::write(&path, format!("{before}{begin}\n\n{table}\n{end}{after}")).unwrap();
        return;
    }
    assert_eq!(shown.trim(), table.trim(), "{PAGE} is stale: run this test with ZEROTH_BLESS=1");
}

/// The help of a flag, on one line.
fn help_of(flag: &str, help: &str) -> String {
    let mut lines = help.lines().skip_while(|line| {
        let begin = line.trim_start().trim_start_matches("-o, ");
        !begin.strip_prefix(flag).is_some_and(|rest| rest.starts_with([' ', '[']))
    });
    let first = lines.next().unwrap_or_else(|| panic!("no {flag} in the help"));
    let more = lines.take_while(|line| !line.trim_start().trim_start_matches("-o, ").starts_with("--"));
    let words = std::iter::once(first).chain(more).flat_map(str::split_whitespace);
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_column_of_ours_is_what_train_does() {
    let help = zeroth(&["train", "--help"]).stdout;
    for row in FLAG_DEFAULTS {
        let text = help_of(&format!("--{}", row.flag), &help);
        let said = text.split("[default: ").nth(1).unwrap_or_else(|| panic!("no default in: {text}"));
        let of_lora = row.lora == Some(true) && said.contains(&format!("LoRA {}", row.here));
        assert!(said.starts_with(row.here) || of_lora, "--{}: {} in: {text}", row.flag, row.here);
    }
    // Those of a config, resolved.
    for (train_type, lora) in [("full", false), ("lora", true)] {
        let flags = ["--ranks", "2", "--max-steps", "9", "--train-type", train_type, "--all"];
        let resolve = ["config", "resolve", "zero2", "--model", "tests/golden/qwen3-tied"];
        let (code, resolved) = zeroth_json(&[&resolve[..], &flags].concat());
        assert_eq!(code, 0, "{resolved}");
        let here = |flag: &str| {
            let is_it = |row: &&zeroth::config::trainer_defaults::FlagDefault| {
                row.flag == flag && row.lora.is_none_or(|of| of == lora)
            };
            FLAG_DEFAULTS.iter().find(is_it).unwrap().here.parse::<f64>().unwrap()
        };
        let config = &resolved["config"];
        let params = &config["optimizer"]["params"];
        assert_eq!(
            config["gradient_accumulation_steps"].as_f64().unwrap(),
            here("gradient-accumulation-steps")
        );
        assert_eq!(
            config["train_micro_batch_size_per_gpu"].as_f64().unwrap(),
            here("per-device-train-batch-size")
        );
        assert_eq!(params["lr"].as_f64().unwrap(), here("learning-rate"));
        assert_eq!(params["weight_decay"].as_f64().unwrap(), here("weight-decay"));
        assert_eq!(params["betas"][1].as_f64().unwrap(), here("adam-beta2"));
    }
}

#[test]
fn a_run_with_flags_of_one_trainer_says_which_defaults_differ() {
    let dry = |more: &[&str]| {
        let base = [
            "train",
            "--model",
            "tests/golden/qwen3-tied",
            "--output",
            "target/never-made",
            "--device",
            "cpu",
        ];
        let ended = zeroth(&[&base[..], &["--dry-run", "--ranks", "2"], more].concat());
        assert_eq!(ended.code, 0, "{more:?}: {}", ended.stderr);
        let differing = ended.stderr.lines().filter(|line| line.contains("whose defaults differ"));
        differing.map(str::to_owned).collect::<Vec<_>>()
    };
    let data = "tests/golden/qwen3-tied/data.jsonl";
    let swift = ["--train_type", "full", "--dataset", data, "--torch_dtype", "bfloat16"];
    let [note] = &dry(&swift)[..] else { panic!("{:?}", dry(&swift)) };
    assert!(note.starts_with("note: --dataset with --train-type are of ms-swift"), "{note}");
    assert!(note.contains("--gradient-accumulation-steps 1 (ms-swift: 8)"), "{note}");
    assert!(!note.contains("--bf16") && !note.contains("--train-type full"), "{note}");
    // `config verify` counts with the same.
    let command = ["NPROC_PER_NODE=2", "swift", "sft", "--train_type", "full", "--deepspeed", "zero2"];
    let verified = zeroth(&[&["config", "verify", "zero2", "--"][..], &command].concat());
    assert!(verified.stdout.contains("16 = 1 × 8 × 2"), "{}{}", verified.stdout, verified.stderr);
    // What is typed, or said by the file, does not differ.
    let typed = [&swift[..], &["--gradient_accumulation_steps", "8", "--max_length", "64"]].concat();
    let [note] = &dry(&typed)[..] else { panic!("{:?}", dry(&typed)) };
    assert!(!note.contains("accumulation") && !note.contains("--max-length"), "{note}");
    let file = r#"{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}"#;
    assert!(!dry(&[&swift[..], &["--deepspeed", file]].concat())[0].contains("accumulation"));
    let factory = dry(&["--dataset", data, "--cutoff_len", "64", "--finetuning_type", "full"]);
    assert!(factory[0].contains("LLaMA-Factory: 5e-5"), "{factory:?}");
    assert_eq!(dry(&["--data", data, "--train-type", "full", "--bf16"]), [""; 0]);
}
