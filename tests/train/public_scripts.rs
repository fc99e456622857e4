//! Public training scripts of ms-swift, Hugging Face's Trainer, TRL and LLaMA-Factory: how many of their flags act, are
//! noted, or are refused. The table in docs/coming-from.md is generated: `ZEROTH_BLESS=1` writes it.

use std::path::Path;

use super::{new_data, new_model, text};
use crate::common::{root, zeroth};

const SCRIPTS: &str = include_str!("public_scripts.txt");
const PAGE: &str = "docs/coming-from.md";
/// The lines around the generated table.
const MARKS: [&str; 2] = ["<!-- scripts: generated -->", "<!-- end of scripts -->"];

/// A flag of a script, and its value.
#[derive(Debug, Clone, PartialEq)]
struct Flag {
    name: String,
    value: Option<String>,
}

struct Script {
    name: &'static str,
    flags: Vec<Flag>,
}

fn scripts() -> Vec<Script> {
    let mut scripts: Vec<Script> = Vec::new();
    for line in SCRIPTS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[') {
            scripts.push(Script { name: name.trim_end_matches(']'), flags: Vec::new() });
            continue;
        }
        let (name, value) = line.split_once(' ').map_or((line, None), |(name, value)| (name, Some(value)));
        let value = value.map(|value| value.trim_matches('"').to_owned());
        scripts.last_mut().unwrap().flags.push(Flag { name: name.to_owned(), value });
    }
    scripts
}

/// A refused flag, and why.
struct Refusal {
    flag: String,
    why: &'static str,
}

struct Outcome {
    acting: usize,
    noted: usize,
    refused: Vec<Refusal>,
}

fn dashed(text: &str) -> String {
    text.replace('_', "-")
}

/// Where a message names a flag.
fn named_at(message: &str, flag: &str) -> Option<usize> {
    let (message, flag) = (dashed(message), dashed(flag));
    let ends =
        |at: &usize| !message[at + flag.len()..].starts_with(|c: char| c == '-' || c.is_alphanumeric());
    message.match_indices(&flag).map(|(at, _)| at).find(ends)
}

/// The name that messages have for a flag.
fn own_name(flag: &Flag) -> &str {
    if flag.name == "--evaluation_strategy" { "--eval_strategy" } else { &flag.name }
}

/// Dry-runs a script without the flags that are refused, until none is.
fn outcome(script: &Script, folder: &Path, model: &str, data: &str) -> Outcome {
    let output = folder.join("run");
    let place = |value: &str| match value {
        "MODEL" => model.to_owned(),
        "DATA" | "EVAL" => data.to_owned(),
        "OUTPUT" => text(&output).to_owned(),
        other => other.to_owned(),
    };
    let mut flags = script.flags.clone();
    let mut refused = Vec::new();
    loop {
        // The tiny model has no weights, which only LoRA would want.
        let mut arguments =
            ["train", "--device", "cpu", "--dry-run", "--random-weights"].map(str::to_owned).to_vec();
        let has = |names: &[&str]| flags.iter().any(|flag| names.contains(&flag.name.as_str()));
        for (names, value) in [
            (&["--model", "--model_name_or_path"][..], "MODEL"),
            (&["--dataset", "--data_path"], "DATA"),
            (&["--output_dir"], "OUTPUT"),
        ] {
            if !has(names) {
                arguments.extend([dashed(names[0]), place(value)]);
            }
        }
        for flag in &flags {
            arguments.push(flag.name.clone());
            arguments.extend(flag.value.as_deref().map(place));
        }
        let ended = zeroth(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(ended.is_orderly(), "{}: {}", script.name, ended.stderr);
        if ended.code == 0 {
            let is_noted = |flag: &&Flag| {
                ended.stderr.contains(&format!("note: {} has no effect: ", dashed(&flag.name)))
            };
            let noted = flags.iter().filter(is_noted).count();
            return Outcome { acting: flags.len() - noted, noted, refused };
        }
        assert_eq!(ended.code, 2, "{}: {}", script.name, ended.stderr);
        let before = flags.len();
        for message in ended.stderr.lines().filter(|line| line.starts_with("error: ")) {
            let found = flags
                .iter()
                .enumerate()
                .filter_map(|(at, flag)| Some((named_at(message, own_name(flag))?, at)));
            let Some((_, at)) = found.min() else { continue };
            let why = match message {
                message if message.contains("not yet built") => "not built",
                message if message.contains("has no flag") => "no such flag",
                _ => "another way",
            };
            refused.push(Refusal { flag: flags.remove(at).name, why });
        }
        assert!(flags.len() < before, "{}: no flag of it is named: {}", script.name, ended.stderr);
    }
}

/// The refused flags, by reason.
fn refusals(refused: &[Refusal]) -> String {
    let of = |why: &str| {
        let flags: Vec<String> = refused
            .iter()
            .filter(|refusal| refusal.why == why)
            .map(|refusal| format!("`{}`", refusal.flag))
            .collect();
        (!flags.is_empty()).then(|| format!("{why}: {}", flags.join(", ")))
    };
    let reasons: Vec<String> =
        ["not built", "another way", "no such flag"].into_iter().filter_map(of).collect();
    if reasons.is_empty() { "none".to_owned() } else { reasons.join("; ") }
}

#[test]
fn flags_of_public_scripts_act_are_noted_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    // Wide enough for the rank of 256 that one of them asks for.
    let model = new_model(folder.path(), 256, 1, 256, 32);
    let data = new_data(folder.path(), 8, 6, 32);
    let all = scripts();
    assert!(all.len() >= 10);
    let mut table = "| script | flags | act | noted | refused |\n|---|--:|--:|--:|---|\n".to_owned();
    for script in &all {
        let Outcome { acting, noted, refused } = outcome(script, folder.path(), text(&model), text(&data));
        assert_eq!(acting + noted + refused.len(), script.flags.len(), "{}", script.name);
        table.push_str(&format!(
            "| {} | {} | {acting} | {noted} | {} |\n",
            script.name,
            script.flags.len(),
            refusals(&refused)
        ));
    }
    let path = root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).unwrap();
    let (shown, after) = rest.split_once(MARKS[1]).unwrap();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        let [begin, end] = MARKS;
        std::fs::write(&path, format!("{before}{begin}\n\n{table}\n{end}{after}")).unwrap();
        return;
    }
    assert_eq!(shown.trim(), table.trim(), "{PAGE} is stale: run this test with ZEROTH_BLESS=1");
}
