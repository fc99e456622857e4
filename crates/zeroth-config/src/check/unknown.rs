//! Messages for keys that are not in the schema: the key likely meant, or the section it belongs to.

use zeroth_base::{Optimizer, nearest};

use super::finding::MatchOutcome;
use crate::schema::{self, Effect, Key};

pub(super) fn explain(section: &str, name: &str, type_name: Option<&str>) -> MatchOutcome {
    let location = if section.is_empty() { "the top level".to_owned() } else { format!("`{section}`") };
    let near_miss = |hint: String| MatchOutcome::Unknown {
        message: format!("{location} has no key `{name}`; {hint}"),
        near: true,
    };
    if name.contains('.') && keys_at(section, name).next().is_some() {
        return near_miss(format!("a path is no key: write {}", nested(name)));
    }
    if let Some(outcome) = of_a_type(section, name, type_name) {
        return outcome;
    }
    // Names of this optimizer or schedule before those of others.
    let of_type = || names_for(section, move |key| key.is_of(type_name));
    let of_any = || names_for(section, |_| true);
    if let Some(near) = nearest(name, of_type()).or_else(|| nearest(name, of_any())) {
        return near_miss(suggestion(section, near, type_name));
    }
    if let Some(hint) = homes(name) {
        return near_miss(hint);
    }
    if let Some(near) = by_words(name, of_type()).or_else(|| by_words(name, of_any())) {
        return near_miss(suggestion(section, near, type_name));
    }
    if let Some(hint) = nearest(name, schema::keys().map(Key::name)).and_then(homes) {
        return near_miss(hint);
    }
    let message = format!(
        "neither DeepSpeed nor zeroth has a key `{name}` in {location}, so it does nothing; a name that begins with \
         `_` is a comment"
    );
    MatchOutcome::Unknown { message, near: false }
}

fn keys_at(section: &str, name: &str) -> impl Iterator<Item = &'static Key> + use<> {
    let path = if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
    schema::find(&path).collect::<Vec<_>>().into_iter()
}

/// The names of a section that may be written there.
fn names_for(section: &str, wanted: impl Fn(&Key) -> bool) -> impl Iterator<Item = &'static str> {
    schema::names_in(section).filter(move |name| {
        keys_at(section, name).any(|key| !matches!(key.effect, Effect::Refused(_)) && wanted(key))
    })
}

/// A path as nested objects: `{"fp16": {"enabled": …}}`.
fn nested(path: &str) -> String {
    path.rsplit('.').fold("…".to_owned(), |inner, part| format!("{{\"{part}\": {inner}}}"))
}

fn suggestion(section: &str, near: &str, type_name: Option<&str>) -> String {
    let keys: Vec<&Key> = keys_at(section, near).collect();
    if keys.iter().any(|key| key.is_of(type_name)) {
        return format!("did you mean `{near}`?");
    }
    let owners: Vec<&str> = keys.iter().flat_map(|key| key.types).copied().collect();
    format!("did you mean `{near}`, a parameter of {}?", owners.join(", "))
}

/// The name that has all words of the typed one and the fewest others: a word was left out.
fn by_words<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let words: Vec<&str> = name.split('_').collect();
    let holds_all =
        |candidate: &&str| words.iter().all(|word| candidate.split('_').any(|other| other == *word));
    (words.len() > 1)
        .then(|| candidates.filter(holds_all).min_by_key(|candidate| candidate.split('_').count()))
        .flatten()
}

/// Where a key of exactly this name lies, if it lies in few places.
fn homes(name: &str) -> Option<String> {
    let mut paths: Vec<&str> = schema::keys()
        .filter(|key| !matches!(key.effect, Effect::Refused(_) | Effect::Deprecated(_)))
        .filter(|key| key.name() == name || key.other_names.contains(&name))
        .map(|key| key.path)
        .collect();
    paths.dedup();
    match paths.as_slice() {
        [] => None,
        [path] if !path.contains('.') => Some(format!("did you mean `{path}` at the top level?")),
        [_] | [_, _] | [_, _, _] => {
            let quoted: Vec<String> = paths.iter().map(|path| format!("`{path}`")).collect();
            Some(format!("did you mean {}?", quoted.join(" or ")))
        }
        _ => Some(format!("{} other sections have one, and this has none", paths.len())),
    }
}

/// Parameters of an optimizer or scheduler: another type may have them, or the type itself may be foreign.
fn of_a_type(section: &str, name: &str, type_name: Option<&str>) -> Option<MatchOutcome> {
    let owner = section.strip_suffix(".params")?;
    let (known, foreign) = match owner {
        "optimizer" => (Optimizer::NAMES, schema::FOREIGN_OPTIMIZERS),
        "scheduler" => (schema::SCHEDULERS, schema::FOREIGN_SCHEDULERS),
        _ => return None,
    };
    let Some(type_name) = type_name else {
        let message = format!("which parameters there are depends on {owner}.type, which is missing");
        return Some(MatchOutcome::Wrong { key: None, message, at: None });
    };
    let is = |list: &[&str]| list.iter().any(|known| known.eq_ignore_ascii_case(type_name));
    if is(foreign) || !is(known) {
        let message = format!("a parameter of {type_name}, which zeroth does not have");
        return Some(MatchOutcome::OfForeignType { message });
    }
    let mut types: Vec<&str> =
        schema::find(&format!("{section}.{name}")).flat_map(|key| key.types.iter().copied()).collect();
    if types.is_empty() {
        return None;
    }
    types.dedup();
    let message = format!("a parameter of {}; {type_name} has none of that name", types.join(", "));
    Some(MatchOutcome::Wrong { key: None, message, at: None })
}
