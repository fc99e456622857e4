//! `config explain`: the documentation of a key, from its row of the schema.

use std::fmt::Write;

use zeroth_base::{grouped, nearest};

use crate::schema::{self, AutoRule, DefaultValue, Effect, Key, Kind, Support};

/// No key has that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no key is called `{name}`{}", near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default())]
pub struct UnknownKey {
    /// The name given.
    pub name: String,
    /// The key likely meant.
    pub near: Option<&'static str>,
}

/// The keys of a path, or else all keys of a name.
pub fn find(name: &str) -> Result<Vec<&'static Key>, UnknownKey> {
    let by_path: Vec<&Key> = schema::find(name).collect();
    if !by_path.is_empty() {
        return Ok(by_path);
    }
    let by_name: Vec<&Key> =
        schema::keys().filter(|key| key.name() == name || key.other_names.contains(&name)).collect();
    if !by_name.is_empty() {
        return Ok(by_name);
    }
    let last = name.rsplit('.').next().unwrap_or(name);
    let near = nearest(name, schema::keys().map(|key| key.path))
        .or_else(|| nearest(last, schema::keys().map(Key::name)))
        .and_then(|near| schema::keys().find(|key| key.path == near || key.name() == near))
        .map(|key| key.path);
    Err(UnknownKey { name: name.to_owned(), near })
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
        Kind::Bool => "true or false".to_owned(),
        Kind::Int => format!("a whole number{bounds}"),
        Kind::Float => format!("a number{bounds}"),
        Kind::Text => "text".to_owned(),
        Kind::OneOf(words) => words.join(", "),
        Kind::Floats(count) => format!("{count} numbers{bounds}"),
        Kind::Ints => format!("whole numbers{bounds}"),
        Kind::Texts => "texts".to_owned(),
        Kind::Section => "a section".to_owned(),
        Kind::Opaque => "anything".to_owned(),
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
        Effect::Lacking(what) => format!("off is honoured; on is not yet: {what}"),
        Effect::Deprecated(instead) => format!("deprecated: write {instead}"),
        Effect::Refused(instead) => format!("refused: {instead}"),
    }
}

/// Which values are what `word` says, and which are not yet.
fn built(key: &Key, word: &str) -> String {
    let section_switch = schema::switch_of(key).filter(|_| key.kind == Kind::Section);
    if let Some((switch, Support::Only { values, .. })) =
        section_switch.map(|switch| (switch, switch.support))
    {
        return format!("not yet, but for `{}`: {}", switch.name(), written(switch, values));
    }
    match key.support {
        Support::None => "not yet".to_owned(),
        Support::Only { values, .. } => {
            let rest: Vec<&str> = match key.kind {
                Kind::Bool => ["true", "false"].into_iter().filter(|value| !values.contains(value)).collect(),
                Kind::OneOf(words) => words.iter().copied().filter(|word| !values.contains(word)).collect(),
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
        Kind::Text | Kind::OneOf(_) => format!("\"{value}\""),
        Kind::Int if value.parse() == Ok(i64::MAX) => "no limit".to_owned(),
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
        assert_eq!(error.near, Some("zero_optimization.stage3_max_reuse_distance"));
    }
}
