//! The pages agree with the binary and the repository: flags, refusals, counts, links, and what is not built.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use zeroth::config::schema;

use crate::common::{model, root, zeroth};

/// Every command with flags of its own, and its heading in docs/cli.md.
const COMMANDS: [(&[&str], &str); 17] = [
    (&["train"], "## zeroth train"),
    (&["data", "preview"], "## zeroth data preview"),
    (&["distill", "cache"], "## zeroth distill cache"),
    (&["generate"], "## zeroth generate"),
    (&["plan"], "## zeroth plan"),
    (&["config", "check"], "## zeroth config"),
    (&["config", "resolve"], "## zeroth config"),
    (&["config", "new"], "## zeroth config"),
    (&["config", "tiers"], "## zeroth config"),
    (&["config", "presets"], "## zeroth config"),
    (&["config", "verify"], "## zeroth config"),
    (&["checkpoint", "inspect"], "## zeroth checkpoint"),
    (&["checkpoint", "verify"], "## zeroth checkpoint"),
    (&["checkpoint", "export"], "## zeroth checkpoint"),
    (&["init"], "## zeroth init"),
    (&["bench"], "## zeroth bench"),
    (&["monitor"], "## zeroth monitor"),
];

/// Heading of the flags that docs/cli.md describes once, for `train`.
const TRAINING_FLAGS: &str = "Training flags, with Hugging Face's names:";

/// The long flags that the help of a command lists.
fn flags_of(command: &[&str], with_training_flags: bool) -> Vec<String> {
    let help = zeroth(&[command, &["--help"]].concat()).stdout;
    // Lines of an example may begin with a flag too.
    let help = help.split("\nExample").next().unwrap();
    let (own, training) = help.split_once(TRAINING_FLAGS).unwrap_or((help, ""));
    let training = if with_training_flags { training } else { "" };
    let begins = |line: &str| {
        let line = line.trim_start();
        let long = line.split_once("--").filter(|(before, _)| before.is_empty() || *before == "-o, ")?.1;
        let end = long.find(|c: char| c != '-' && !c.is_ascii_alphanumeric()).unwrap_or(long.len());
        Some(format!("--{}", &long[..end]))
    };
    let lines = own.lines().chain(training.lines());
    lines.filter_map(begins).filter(|flag| flag != "--help" && flag != "--format").collect()
}

/// A section of docs/cli.md, from its heading to the next one.
fn section_of_the_page(heading: &str) -> String {
    let page = std::fs::read_to_string(root().join("docs/cli.md")).unwrap();
    let (_, rest) = page.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}"));
    rest.split("\n## ").next().unwrap().to_owned()
}

fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| c != '-' && c != '_' && !c.is_ascii_alphanumeric()).collect()
}

#[test]
fn docs_cli_md_has_every_flag_of_every_command() {
    for (command, heading) in COMMANDS {
        let page = section_of_the_page(heading);
        let words = words(&page);
        let flags = flags_of(command, command == ["train"]);
        let missing: Vec<_> = flags.iter().filter(|flag| !words.contains(&flag.as_str())).collect();
        assert!(missing.is_empty(), "docs/cli.md does not describe {missing:?} of {command:?}");
    }
    assert!(flags_of(&["train"], true).len() > 40);
}

#[test]
fn docs_cli_md_has_no_flag_that_no_command_has() {
    for (_, heading) in COMMANDS {
        let page = section_of_the_page(heading);
        let commands: Vec<_> = COMMANDS.iter().filter(|(_, other)| *other == heading).collect();
        let mut flags = words(&page);
        flags
            .retain(|word| word.strip_prefix("--").is_some_and(|name| name.starts_with(char::is_alphabetic)));
        for flag in flags {
            // Aliases are not in the help, so the parser decides whether a flag is known.
            let is_known = commands.iter().any(|(command, _)| {
                let ended = zeroth(&[command, &[flag, "--help"][..]].concat());
                !ended.stderr.contains("has no flag") && !ended.stderr.contains("not yet built")
            });
            assert!(is_known, "{heading} of docs/cli.md has {flag}, which no such command has");
        }
    }
}

/// The change that a line of advice proposes, without its figures.
fn label(line: &str) -> Option<&str> {
    line.strip_prefix("  ")?.split_once(": ").map(|(label, _)| label)
}

#[test]
fn docs_cli_md_shows_the_refusal_of_the_binary() {
    let page = section_of_the_page("## zeroth train").replace("\\\n", " ");
    let (_, block) = page.split_once("$ zeroth train --model").unwrap();
    let (line, printed) = block.split_once('\n').unwrap();
    let printed = printed.split("```").next().unwrap();
    let (config, line) = {
        let mut parts = line.split('\'');
        let (before, config, after) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
        (config, format!("{before}CONFIG{}", after.split('#').next().unwrap()))
    };
    let typed = line.split_whitespace().map(|word| if word == "CONFIG" { config } else { word });
    let ended = zeroth(&["train", "--model"].into_iter().chain(typed).collect::<Vec<_>>());
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    let advised: Vec<&str> = ended.stderr.lines().filter_map(label).collect();
    let shown: Vec<&str> = printed.lines().filter_map(label).collect();
    assert!(shown.len() >= 2, "{printed}");
    // Figures depend on the CPU; the proposed changes hardly do.
    assert!(shown.iter().all(|label| advised.contains(label)), "{shown:?}\n{}", ended.stderr);
}

#[test]
fn pages_count_the_compared_conversations() {
    let golden = root().join("crates/zeroth-data/tests/golden/chat_templates.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    let count = golden["conversations"].as_array().unwrap().len();
    assert_eq!(golden["templates"].as_object().unwrap().len(), 8, "both pages have eight");
    for page in ["docs/testing.md", "docs/data.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains(&format!("{count} conversations each")), "{page}: there are {count}");
    }
}

/// Pages that a test of the crate that owns their table regenerates; their contents are checked there.
const GENERATED: [&str; 6] = [
    "docs/claims.md",
    "docs/config.md",
    "docs/environment.md",
    "docs/keys.md",
    "docs/memory.md",
    "docs/verdicts.md",
];

/// Path and text of README.md, ARCHITECTURE.md, CONTRIBUTING.md and every page of docs/.
fn pages() -> BTreeMap<String, String> {
    let docs = std::fs::read_dir(root().join("docs")).unwrap();
    let docs = docs.map(|entry| PathBuf::from(entry.unwrap().file_name()));
    let docs = docs.filter(|name| name.extension().is_some_and(|extension| extension == "md"));
    let docs = docs.map(|name| format!("docs/{}", name.display()));
    let top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(str::to_owned);
    let text = |path: &String| std::fs::read_to_string(root().join(path)).unwrap();
    top.into_iter().chain(docs).map(|path| (path.clone(), text(&path))).collect()
}

/// The lines of a page outside code blocks, with their numbers.
fn prose(page: &str) -> Vec<(usize, &str)> {
    let (mut is_fenced, mut lines) = (false, Vec::new());
    for (number, line) in (1..).zip(page.lines()) {
        is_fenced ^= line.starts_with("```");
        if !is_fenced && !line.starts_with("```") && !line.starts_with("    ") {
            lines.push((number, line));
        }
    }
    lines
}

/// The sentences of a page: paragraphs and list items joined to one line, table rows as they are.
fn sentences(page: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    for (_, line) in prose(page) {
        let starts = line.trim_start();
        if line.is_empty() || starts.starts_with(['|', '#']) || starts.starts_with("- ") {
            blocks.push(String::new());
        }
        let block = blocks.last_mut().unwrap();
        block.push_str(starts);
        block.push(' ');
    }
    blocks.iter().flat_map(|block| block.split(". ")).map(str::to_owned).collect()
}

/// The code spans of a sentence, and the sentence without them.
fn code_spans(sentence: &str) -> (Vec<&str>, String) {
    let parts: Vec<&str> = sentence.split('`').collect();
    let text = parts.iter().step_by(2).copied().collect();
    (parts.into_iter().skip(1).step_by(2).collect(), text)
}

/// Whether a code span names a command, flag, model type or key that is not built. `None` if it names none of these.
fn is_unbuilt(span: &str) -> Option<bool> {
    let is_refused = |arguments: &[&str], reason: &str| {
        let ended = zeroth(arguments);
        let is_refused = ended.code == 2 && ended.stderr.contains(reason);
        if !is_refused {
            println!("{arguments:?} ends with {}: {}", ended.code, ended.stderr);
        }
        is_refused
    };
    if let Some(command) = span.strip_prefix("zeroth ") {
        return Some(is_refused(&command.split(' ').collect::<Vec<_>>(), "not yet built"));
    }
    // Ready tokens, because configs of the tests have no tokenizer.
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (data, output) = (folder.join("docs-tokens.jsonl"), folder.join("docs-unbuilt"));
    std::fs::write(&data, "{\"input_ids\": [1, 2, 3]}\n").unwrap();
    let (data, output) = (data.to_str().unwrap(), output.to_str().unwrap());
    let train = |model: &str| {
        ["train", "--dry-run", "--device", "cpu", "--data", data, "--output", output, "--model", model]
            .map(str::to_owned)
            .to_vec()
    };
    if span.starts_with("--") {
        let mut arguments = train("examples/gsm8k/tiny-qwen3");
        arguments.extend(span.split(' ').map(str::to_owned));
        return Some(is_refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), "not yet built"));
    }
    let (key, value) = span.split_once(": ").unwrap_or((span, ""));
    if key == "model_type" {
        let arguments = match value {
            "t5" => train(&model("tiny-t5-tied")),
            "gpt_oss" | "deepseek_v2" | "deepseek_v3" => {
                // Refused by its name, before any other field is read.
                let config = folder.join(format!("docs-{value}"));
                std::fs::create_dir_all(&config).unwrap();
                std::fs::write(config.join("config.json"), format!("{{\"model_type\": \"{value}\"}}"))
                    .unwrap();
                train(config.to_str().unwrap())
            }
            other => panic!("add a config of {other} here"),
        };
        return Some(is_refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), value));
    }
    let key = schema::find(key).next()?;
    Some(!key.supports(&Value::String(value.to_owned())))
}

#[test]
fn everything_the_pages_call_not_yet_built_is_refused() {
    let mut checked = 0;
    for (path, page) in pages().iter().filter(|(path, _)| !GENERATED.contains(&path.as_str())) {
        for sentence in sentences(page) {
            let (spans, text) = code_spans(&sentence);
            if !text.to_lowercase().contains("not yet") {
                continue;
            }
            let verdicts: Vec<_> = spans.iter().filter_map(|span| Some((span, is_unbuilt(span)?))).collect();
            assert!(!verdicts.is_empty(), "{path}: name the key, flag or command in code: {sentence}");
            for (span, is_unbuilt) in verdicts {
                assert!(is_unbuilt, "{path}: `{span}` is built: {sentence}");
                checked += 1;
            }
        }
    }
    assert!(checked > 8, "{checked}");
}

#[test]
fn readme_lists_only_unbuilt_commands_as_planned() {
    let page = std::fs::read_to_string(root().join("README.md")).unwrap();
    let row = page.lines().find(|line| line.starts_with("| other commands |")).unwrap();
    let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
    let (built, planned) = (code_spans(cells[1]).0, code_spans(cells[2]).0);
    assert!(built.len() > 4 && !planned.is_empty(), "{row}");
    assert!(planned.iter().all(|command| is_unbuilt(&format!("zeroth {command}")) == Some(true)), "{row}");
    assert!(built.iter().all(|command| zeroth(&[command, "--help"]).code == 0), "{row}");
}

#[test]
fn docs_have_no_line_over_120_characters_outside_tables_and_code() {
    let mut long = Vec::new();
    for (path, page) in pages().iter().filter(|(path, _)| path.starts_with("docs/")) {
        let lines = prose(page).into_iter().filter(|(_, line)| !line.starts_with(['|', '<']));
        long.extend(lines.filter(|(_, line)| line.chars().count() > 120).map(|(n, _)| format!("{path}:{n}")));
    }
    assert!(long.is_empty(), "over 120 characters: {long:?}");
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_and_paths_of_pages_exist() {
    let pages = pages();
    let mut broken = Vec::new();
    for (path, page) in &pages {
        let folder = root().join(path).parent().unwrap().to_owned();
        for (number, line) in prose(page) {
            let links = line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
            for link in links.filter(|link| !link.contains("://")) {
                let (file, heading) = link.split_once('#').unwrap_or((link, ""));
                let target = if file.is_empty() { root().join(path) } else { folder.join(file) };
                let text = std::fs::read_to_string(&target).unwrap_or_default();
                let has_heading =
                    || text.lines().any(|line| line.starts_with('#') && anchor(line) == heading);
                if !target.exists() || !heading.is_empty() && !has_heading() {
                    broken.push(format!("{path}:{number}: {link}"));
                }
            }
            let (spans, _) = code_spans(line);
            let paths = spans.into_iter().filter(|span| span.starts_with("crates/") && !span.contains(' '));
            broken.extend(
                paths
                    .filter(|span| !root().join(span).exists())
                    .map(|span| format!("{path}:{number}: {span}")),
            );
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn cargo_commands_of_pages_name_existing_targets() {
    let mut missing = Vec::new();
    for (path, page) in pages() {
        let commands = page.split("-p zeroth").skip(1).map(|rest| rest.split(['`', '\n']).next().unwrap());
        for command in commands {
            let mut words = command.split_whitespace();
            let name =
                format!("zeroth{}", words.next().filter(|_| !command.starts_with(' ')).unwrap_or_default());
            let folder = root().join("crates").join(&name);
            let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
            let (kind, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let exists = match kind {
                "--test" if target == "it" => {
                    let module =
                        words.next().and_then(|filter| filter.split_once("::")).map_or("main", |it| it.0);
                    let files = folder.join("tests/it");
                    files.join(format!("{module}.rs")).exists() || files.join(module).join("mod.rs").exists()
                }
                "--test" | "--example" => {
                    let files = folder.join(format!("{}s", kind.trim_start_matches("--")));
                    files.join(format!("{target}.rs")).exists()
                        || files.join(target).join("main.rs").exists()
                        || manifest.contains(&format!("name = \"{target}\""))
                }
                _ => !manifest.is_empty(),
            };
            if !exists {
                missing.push(format!("{path}: -p {name} {kind} {target}"));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
