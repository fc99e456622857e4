//! `config explain`: the documentation of a key, from its row of the schema.

use std::fmt::Write;

use zeroth_base::{grouped, nearest};

use crate::schema::{self, AutoRule, DefaultValue, Effect, Key, KeyType, Support};

/// No key has that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no key is called `{name}`; {}", advice(near))]
pub struct UnknownKey {
    /// The name as it was typed.
    pub name: String,
    /// The keys likely meant, the likeliest first.
    pub near: Vec<&'static str>,
}

fn advice(near: &[&str]) -> String {
    let quoted: Vec<String> = near.iter().map(|path| format!("`{path}`")).collect();
    match quoted.split_last() {
        None => "`zeroth config schema` has all keys".to_owned(),
        Some((only, [])) => format!("did you mean {only}?"),
        Some((last, others)) => format!("did you mean {} or {last}?", others.join(", ")),
    }
}

/// The most keys that are suggested.
const MOST_NEAR: usize = 5;

/// The keys of a path, or else all keys of a name, sections whose name begins with it first (`offload`).
pub fn find(name: &str) -> Result<Vec<&'static Key>, UnknownKey> {
    let by_path: Vec<&Key> = schema::find(name).collect();
    if !by_path.is_empty() {
        return Ok(by_path);
    }
    let begins = |key: &Key| {
        key.kind == KeyType::Section
            && key.name().strip_prefix(name).is_some_and(|rest| rest.starts_with('_'))
    };
    let is_it = |key: &Key| key.name() == name || key.other_names.contains(&name);
    let sections = schema::keys().filter(|key| begins(key));
    let found: Vec<&Key> = sections.chain(schema::keys().filter(|key| is_it(key))).collect();
    if found.is_empty() { Err(UnknownKey { name: name.to_owned(), near: near(name) }) } else { Ok(found) }
}

/// The key that a slip most likely means, else keys whose names share a word with it.
fn near(name: &str) -> Vec<&'static str> {
    let last = name.rsplit('.').next().unwrap_or(name);
    let slip = nearest(name, schema::keys().map(|key| key.path))
        .or_else(|| nearest(last, schema::keys().map(Key::name)))
        .and_then(|near| find(near).ok());
    if let Some(keys) = slip {
        return keys.into_iter().map(|key| key.path).take(MOST_NEAR).collect();
    }
    let words = |text: &str| -> Vec<String> {
        // Shorter words are in too many names.
        let words = text.split(['_', '-', '.', ' ']).filter(|word| word.len() >= 4);
        words.map(str::to_ascii_lowercase).collect()
    };
    let given = words(last);
    let shared = |text: &str| {
        let words = words(text);
        let alike = |given: &&String| words.iter().any(|word| same_word(word, given));
        given.iter().filter(alike).count()
    };
    // By the name, else by the sentence.
    let mut scored: Vec<(usize, &'static str)> = schema::keys()
        .filter(|key| !matches!(key.effect, Effect::Refused(_) | Effect::Deprecated(_)))
        .map(|key| (2 * shared(key.name()) + shared(key.does), key.path))
        .filter(|(score, _)| *score > 0)
        .collect();
    scored.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    scored.dedup_by_key(|(_, path)| *path);
    scored.into_iter().take(MOST_NEAR).map(|(_, path)| path).collect()
}

/// Whether two words have one stem: `offloading` and `offload`, `clip` and `clipping`.
fn same_word(one: &str, other: &str) -> bool {
    let (short, long) = if one.len() < other.len() { (one, other) } else { (other, one) };
    long.starts_with(short) && long.len() - short.len() <= 4
}

/// The human-readable explanation of one key.
pub fn text(key: &Key) -> String {
    let mut text = format!("{}\n  {}\n", key.path, key.does);
    let mut row = |title: &str, value: &str| {
        if !value.is_empty() {
            let _ = writeln!(text, "  {title:<12} {value}"); // writing to a String cannot fail
        }
    };
    row("holds", &holds(key));
    row("default", &default(key));
    row("unit", key.unit);
    row("set it to", key.set);
    row("auto", key.auto.map_or("", auto));
    row("read by", key.reader.name());
    row("here", &here(key));
    row("types", &key.types.join(", "));
    let others: Vec<String> = schema::spellings(key).skip(1).collect();
    row("also", &others.join(", "));
    text
}

/// The values of a key, in words.
pub fn holds(key: &Key) -> String {
    let bounds = key.bounds.in_words().map(|words| format!(", {words}")).unwrap_or_default();
    match key.kind {
        KeyType::Bool => "true or false".to_owned(),
        KeyType::Int => format!("a whole number{bounds}"),
        KeyType::Float => format!("a number{bounds}"),
        KeyType::Text => "text".to_owned(),
        KeyType::OneOf(words) => words.join(", "),
        KeyType::Floats(count) => format!("{count} numbers{bounds}"),
        KeyType::Ints => format!("whole numbers{bounds}"),
        KeyType::Texts => "texts".to_owned(),
        KeyType::Section => "a section".to_owned(),
        KeyType::Opaque => "anything".to_owned(),
    }
}

/// A default in words; empty where there is none.
pub fn default(key: &Key) -> String {
    match key.default {
        DefaultValue::Absent => String::new(),
        DefaultValue::Bool(value) => value.to_string(),
        DefaultValue::Int(i64::MAX) => "no limit".to_owned(),
        DefaultValue::Int(value) => u64::try_from(value).map_or_else(|_| value.to_string(), grouped),
        DefaultValue::Float(value) => format!("{value:?}"),
        DefaultValue::Text(value) => format!("\"{value}\""),
        DefaultValue::Floats(values) => format!("{values:?}"),
        DefaultValue::Derived(_, rule) | DefaultValue::Rule(rule) => rule.to_owned(),
    }
}

/// The effect of the key, in words.
pub fn here(key: &Key) -> String {
    match key.effect {
        Effect::Works | Effect::WhileEnabled if key.support == Support::None => "not yet".to_owned(),
        Effect::Works | Effect::WhileEnabled => {
            let when = match (key.effect, key.idle) {
                (Effect::WhileEnabled, _) => ", while its section is enabled",
                (_, Some(_)) => ", where the other values let it",
                _ => "",
            };
            format!("{}{when}", built(key, "honoured"))
        }
        Effect::BuiltIn(why) if key.support == Support::None => format!("not yet; then built in: {why}"),
        Effect::BuiltIn(why) => format!("{}: {why}", built(key, "built in")),
        Effect::Nothing(because) => format!("no effect: {because}"),
        Effect::AsSection => schema::find(key.parent()).next().map(here).unwrap_or_default(),
        Effect::Unsupported(what) => format!("off is honoured; on is not yet: {what}"),
        Effect::Deprecated(instead) => format!("deprecated: write {instead}"),
        Effect::Refused(instead) => format!("refused: {instead}"),
    }
}

/// Which values are what `word` says, and which are not yet.
fn built(key: &Key, word: &str) -> String {
    let section_switch = schema::switch_of(key).filter(|_| key.kind == KeyType::Section);
    if let Some((switch, Support::Only { values, .. })) =
        section_switch.map(|switch| (switch, switch.support))
    {
        return format!("not yet, but for `{}`: {}", switch.name(), written(switch, values));
    }
    match key.support {
        Support::None => "not yet".to_owned(),
        Support::Only { values, .. } => {
            let rest: Vec<&str> = match key.kind {
                KeyType::Bool => {
                    ["true", "false"].into_iter().filter(|value| !values.contains(value)).collect()
                }
                KeyType::OneOf(words) => {
                    words.iter().copied().filter(|word| !values.contains(word)).collect()
                }
                _ => Vec::new(),
            };
            let rest = if rest.is_empty() { "another".to_owned() } else { written(key, &rest) };
            format!("{word} for {}, not yet for {rest}", written(key, values))
        }
        Support::Full => word.to_owned(),
    }
}

/// Values as a file writes them.
fn written(key: &Key, values: &[&str]) -> String {
    let written = |value: &&str| match key.kind {
        KeyType::Text | KeyType::OneOf(_) => format!("\"{value}\""),
        KeyType::Int if value.parse() == Ok(i64::MAX) => "no limit".to_owned(),
        _ => (*value).to_owned(),
    };
    values.iter().map(written).collect::<Vec<_>>().join(", ")
}

/// How "auto" is filled, in words.
pub const fn auto(rule: AutoRule) -> &'static str {
    match rule {
        AutoRule::MicroBatch => "--per-device-train-batch-size, or from the other batch sizes",
        AutoRule::Accumulation => "--gradient-accumulation-steps, or from the other batch sizes",
        AutoRule::TrainBatch => "ranks × micro-batch × accumulation",
        AutoRule::Clipping => "--max-grad-norm",
        AutoRule::LearningRate | AutoRule::WarmupMaxLr => "--learning-rate",
        AutoRule::Betas => "--adam-beta1, --adam-beta2",
        AutoRule::Epsilon => "--adam-epsilon",
        AutoRule::WeightDecay => "--weight-decay",
        AutoRule::WarmupMinLr => "0",
        AutoRule::Fp16 => "--fp16",
        AutoRule::Bf16 => "--bf16 (the default)",
        AutoRule::HiddenSquared => "hidden_size²",
        AutoRule::NineTenthsHiddenSquared => "0.9 · hidden_size², rounded down (stage 3)",
        AutoRule::TenHidden => "10 · hidden_size (stage 3)",
        AutoRule::TotalSteps => "the steps of the run",
        AutoRule::WarmupSteps => "--warmup-steps; below 1 that share of all steps, rounded up",
        AutoRule::Blocks => "the number of blocks",
        AutoRule::Group => "the ranks of a host where hosts have equally many, else 1",
        AutoRule::NodeLocal => "--save-on-each-node",
        AutoRule::UntestedOptimizer => "true where the file has no optimizer section",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_an_alias_and_a_path_find_the_same_key() {
        for name in [
            "zero_optimization.stage3_max_reuse_distance",
            "stage3_max_reuse_distance",
            "max_reuse_distance",
            "zero_optimization.max_reuse_distance",
        ] {
            let keys = find(name).unwrap();
            assert_eq!(keys[0].path, "zero_optimization.stage3_max_reuse_distance", "{name}");
        }
        assert!(find("enabled").unwrap().len() > 3, "a name of many keys gives all of them");
    }

    #[test]
    fn a_slip_gets_a_suggestion() {
        let error = find("stage3_max_resue_distance").unwrap_err();
        assert_eq!(error.near, ["zero_optimization.stage3_max_reuse_distance"]);
        for (name, first) in [
            ("offloading", "zero_optimization.offload_param"),
            ("clip_gradients", "gradient_clipping"),
            ("zero_optimization.offloading", "zero_optimization.offload_param"),
            ("prefetch", "zero_optimization.stage3_prefetch_bucket_size"),
        ] {
            let error = find(name).unwrap_err();
            assert!(error.near.len() <= MOST_NEAR && error.near[0] == first, "{name}: {:?}", error.near);
            assert!(error.to_string().contains(&format!("did you mean `{first}`")), "{error}");
        }
        let error = find("xyzzy").unwrap_err().to_string();
        assert!(error.ends_with("`zeroth config schema` has all keys"), "{error}");
    }

    #[test]
    fn a_word_finds_the_sections_that_begin_with_it() {
        let paths: Vec<&str> = find("offload").unwrap().into_iter().map(|key| key.path).collect();
        let [first, second, ..] = paths[..] else { panic!("{paths:?}") };
        assert_eq!(first, "zero_optimization.offload_param");
        assert_eq!(second, "zero_optimization.offload_optimizer");
        assert!(find("zero").unwrap().iter().any(|key| key.path == "zero_optimization"));
    }
}
