//! What the pages say is what the binary does: flags, the example of a refusal, counts.

use serde_json::Value;

use crate::common::{root, zeroth};

/// Every command with flags of its own, and the heading of docs/cli.md that it is described under.
const COMMANDS: [(&[&str], &str); 15] = [
    (&["train"], "## zeroth train"),
    (&["data", "preview"], "## zeroth data preview"),
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
];

/// Flags that docs/cli.md describes once, for `train`.
const TRAINING_FLAGS: &str = "Training flags, as Hugging Face names them:";

/// The long flags that stand in front of a line of the help.
fn flags_of(command: &[&str], with_training_flags: bool) -> Vec<String> {
    let help = zeroth(&[command, &["--help"]].concat()).stdout;
    // Lines of an example may begin with a flag, too.
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
        assert!(missing.is_empty(), "docs/cli.md says nothing of {missing:?} of {command:?}");
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
            // An alias is not in the help: what tells it apart from an unknown flag is the parser.
            let is_known = commands.iter().any(|(command, _)| {
                let ended = zeroth(&[command, &[flag, "--help"][..]].concat());
                !ended.stderr.contains("has no flag") && !ended.stderr.contains("not yet built")
            });
            assert!(is_known, "{heading} of docs/cli.md names {flag}, and no such command has it");
        }
    }
}

/// The part before the figures of a line of advice.
fn label(line: &str) -> Option<&str> {
    line.strip_prefix("  ")?.split_once(": ").map(|(label, _)| label)
}

#[test]
fn the_refusal_that_docs_cli_md_shows_is_the_binarys() {
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
    // Figures depend on the processor, the changes that would do hardly.
    assert!(shown.iter().all(|label| advised.contains(label)), "{shown:?}\n{}", ended.stderr);
}

#[test]
fn the_pages_count_the_conversations_that_are_compared() {
    let golden = root().join("crates/zeroth-data/tests/golden/chat_templates.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    let count = golden["conversations"].as_array().unwrap().len();
    assert_eq!(golden["templates"].as_object().unwrap().len(), 8, "both pages say eight");
    for page in ["docs/testing.md", "docs/data.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains(&format!("{count} conversations each")), "{page}: there are {count}");
    }
}
