//! Properties of `check`: it never panics, and gives every key one verdict, in order and with its location. A key of
//! the table with two letters swapped gets an existing name suggested.

use proptest::prelude::*;
use proptest::sample::select;
use zeroth_config::check::{KeyStatus, Severity, check};
use zeroth_config::read::{ConfigSource, Location, parse};
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, resolve};
use zeroth_config::schema::{self, Effect, Key, KeyType};
use zeroth_config::snippet;

use super::{checked, verdict};

/// A config as users may write it, possibly with duplicate keys.
#[derive(Debug, Clone)]
enum Tree {
    Leaf(String),
    List(Vec<Tree>),
    Object(Vec<(String, Tree)>),
}

/// The text written so far, and the offset of each key that needs a verdict.
#[derive(Default)]
struct Written {
    text: String,
    keys: Vec<(String, usize)>,
}

impl Written {
    fn tree(&mut self, tree: &Tree, section: Option<&str>, depth: usize) {
        match tree {
            Tree::Leaf(text) => self.text.push_str(text),
            Tree::List(items) => {
                self.text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.text.push_str(if index > 0 { ", " } else { "" });
                    self.tree(item, None, depth + 1);
                }
                self.text.push(']');
            }
            Tree::Object(members) => {
                self.text.push('{');
                for (index, (key, value)) in members.iter().enumerate() {
                    self.text.push_str(if index > 0 { "," } else { "" });
                    self.text.push('\n');
                    self.text.push_str(&"  ".repeat(depth + 1));
                    // Keys inside comments and lists need no verdict.
                    let path = section.filter(|_| !key.starts_with('_')).map(|section| match section {
                        "" => key.clone(),
                        section => format!("{section}.{key}"),
                    });
                    if let Some(path) = &path {
                        self.keys.push((path.clone(), self.text.len()));
                    }
                    self.text.push_str(&serde_json::to_string(key).expect("a text is JSON"));
                    self.text.push_str(": ");
                    self.tree(value, path.as_deref(), depth + 1);
                }
                self.text.push('}');
            }
        }
    }
}

/// Values for keys of all kinds, valid and invalid.
const COMMON: &[&str] = &[
    "null",
    "true",
    "false",
    "0",
    "1",
    "2",
    "3",
    "-1",
    "4",
    "8",
    "0.5",
    "1.5",
    "1e9",
    "5e8",
    "1e30",
    "15099494.4",
    "9223372036854775807",
    "-9223372036854775808",
    "\"auto\"",
    "\"8\"",
    "\"true\"",
    "\"\"",
    "\"cpu\"",
    "\"nvme\"",
    "\"none\"",
    "\"fp16\"",
    "\"AdamW\"",
    "\"SGD\"",
    "\"WarmupLR\"",
    "\"OneCycle\"",
    "\"cosine\"",
    "\"é, \\n\\\" 学\"",
    "[0.9, 0.95]",
    "[]",
    "[1, \"x\", null]",
    "{}",
];

fn leaf() -> impl Strategy<Value = Tree> {
    prop_oneof![
        8 => select(COMMON).prop_map(|text| Tree::Leaf(text.to_owned())),
        1 => any::<i64>().prop_map(|number| Tree::Leaf(number.to_string())),
        1 => any::<f64>().prop_filter("JSON has no other", |number| number.is_finite())
            .prop_map(|number| Tree::Leaf(format!("{number:e}"))),
        1 => any::<String>().prop_map(|text| Tree::Leaf(serde_json::to_string(&text).expect("a text is JSON"))),
    ]
}

/// A key's name: mostly one of the section, sometimes one of another section or an unknown one.
fn name(section: &str) -> impl Strategy<Value = String> + use<> {
    let mut own: Vec<&'static str> = schema::names_in(section).collect();
    if own.is_empty() {
        own = vec!["enabled", "params"];
    }
    let others: Vec<&'static str> = schema::keys().map(Key::name).collect();
    prop_oneof![
        8 => select(own).prop_map(str::to_owned),
        2 => select(others).prop_map(str::to_owned),
        1 => select(vec!["_comment", "my_notes", "", "zero_optimization.stage", "学习率"]).prop_map(str::to_owned),
        1 => "[a-z_]{1,12}",
        1 => any::<String>(),
    ]
}

/// An object for a section (`""` is the top level), including nested sections.
fn object(section: String, depth: u32) -> BoxedStrategy<Tree> {
    let member = name(&section).prop_flat_map(move |name| {
        let path = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
        let is_section =
            schema::find(&path).any(|key| matches!(key.kind, KeyType::Section | KeyType::Opaque));
        let value = match depth {
            0 => leaf().boxed(),
            _ if is_section => prop_oneof![9 => object(path, depth - 1), 1 => leaf()].boxed(),
            _ => prop_oneof![
                18 => leaf(),
                1 => object(path, depth - 1),
                1 => prop::collection::vec(object(String::new(), depth - 1), 0..3).prop_map(Tree::List),
            ]
            .boxed(),
        };
        value.prop_map(move |value| (name.clone(), value))
    });
    prop::collection::vec(member, 0..7).prop_map(Tree::Object).boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_key_has_one_verdict_and_no_config_panics(tree in object(String::new(), 3), ranks in 1u64..9) {
        let mut written = Written::default();
        written.tree(&tree, Some(""), 0);
        let source = ConfigSource::from_text("any.json", written.text.clone());
        let document = parse(source.clone()).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let report = check(&document);
        let expected: Vec<(String, Location)> =
            written.keys.into_iter().map(|(path, at)| (path, source.location(at))).collect();
        let found: Vec<(String, Location)> =
            report.verdicts.iter().map(|verdict| (verdict.path.clone(), verdict.location)).collect();
        prop_assert_eq!(found, expected);
        for verdict in &report.verdicts {
            let pointed = source.text().get(verdict.span.start..verdict.span.end);
            prop_assert!(pointed.is_some_and(|text| !text.is_empty()), "{verdict:?}");
            let shown = snippet::of_verdict("note", &source, verdict);
            let location = format!("any.json: {}", source.location(verdict.span.start));
            prop_assert!(shown.contains(&location), "{shown}");
        }
        // Resolving the values must not panic either, whether they are valid or not.
        let model = Some(ModelFacts { hidden_size: Some(4096), blocks: Some(32) });
        let _ = resolve(&ResolveRequest { file: &report.values, flags: &Flags::default(), ranks, model, steps: None });
    }
}

/// A config with one key in its section, and the type of the optimizer or scheduler if the key belongs to one.
fn config_with(key: &Key, name: &str) -> String {
    let mut text = format!("{{\"{name}\": 1}}");
    let mut sections: Vec<&str> = key.parent().split('.').filter(|part| !part.is_empty()).collect();
    while let Some(section) = sections.pop() {
        let beside = match key.types.first() {
            Some(owner) if section == "params" => format!(", \"type\": \"{owner}\""),
            _ => String::new(),
        };
        text = format!("{{\"{section}\": {text}{beside}}}");
    }
    text
}

/// The name that a message suggests.
fn suggested(message: &str) -> Option<&str> {
    message.split_once("did you mean `")?.1.split_once('`').map(|(name, _)| name)
}

#[test]
fn keys_with_two_letters_swapped_get_an_existing_name_suggested() {
    let mut tried = 0;
    let mut faults = Vec::new();
    let keys = schema::keys().filter(|key| !matches!(key.kind, KeyType::Section | KeyType::Opaque));
    for key in keys.filter(|key| !matches!(key.effect, Effect::Refused(_)) && key.name().len() >= 6) {
        let letters: Vec<char> = key.name().chars().collect();
        // Every position except the first and the last letter.
        for at in (1..letters.len() - 2).filter(|&at| letters[at] != letters[at + 1]) {
            let mut swapped = letters.clone();
            swapped.swap(at, at + 1);
            let slip: String = swapped.into_iter().collect();
            let path =
                if key.parent().is_empty() { slip.clone() } else { format!("{}.{slip}", key.parent()) };
            let report = checked(&config_with(key, &slip));
            let verdict = verdict(&report, &path);
            let real = suggested(&verdict.message).is_some_and(|name| {
                schema::names_in(key.parent()).any(|known| known == name)
                    || schema::find(name).next().is_some()
            });
            let wrong = matches!(verdict.status, KeyStatus::Unknown | KeyStatus::Invalid);
            if !(real && wrong && verdict.severity() == Severity::Error) {
                faults.push(format!("{path}: {}", verdict.message));
            }
            tried += 1;
        }
    }
    assert!(tried > 1500, "{tried} slips tried");
    assert!(faults.is_empty(), "{} of {tried}:\n{}", faults.len(), faults.join("\n"));
}
