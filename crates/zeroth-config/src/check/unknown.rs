//! What to say of a key that is not in the table: what was likely meant, or where it belongs.

use zeroth_base::nearest;

use super::walk::Outcome;
use crate::schema::{self, Effect};

pub(super) fn explain(section: &str, name: &str, type_name: Option<&str>) -> Outcome {
    if let Some(outcome) = of_a_type(section, name, type_name) {
        return outcome;
    }
    let place = if section.is_empty() { "the top level".to_owned() } else { format!("`{section}`") };
    if let Some(near) = nearest(name, schema::names_in(section)) {
        return near_miss(format!("{place} has no key `{name}`; did you mean `{near}`?"));
    }
    if let Some(home) = home_of(name) {
        return near_miss(format!("{place} has no key `{name}`; did you mean `{home}`?"));
    }
    let everywhere = schema::keys().map(schema::Key::name);
    if let Some(home) = nearest(name, everywhere).and_then(home_of) {
        return near_miss(format!("{place} has no key `{name}`; did you mean `{home}`?"));
    }
    let message = format!(
        "neither DeepSpeed nor zeroth has a key `{name}` in {place}, so it does nothing; a name that begins with \
         `_` is a comment"
    );
    Outcome::Unknown { message, near: false }
}

fn near_miss(message: String) -> Outcome {
    Outcome::Unknown { message, near: true }
}

/// The path of the key of exactly this name, wherever it lies.
fn home_of(name: &str) -> Option<&'static str> {
    schema::keys()
        .filter(|key| !matches!(key.effect, Effect::Refused(_) | Effect::Deprecated(_)))
        .find(|key| key.name() == name || key.names.contains(&name))
        .map(|key| key.path)
}

/// Parameters of an optimizer or scheduler: another type may have them, or the type itself may be foreign.
fn of_a_type(section: &str, name: &str, type_name: Option<&str>) -> Option<Outcome> {
    let owner = section.strip_suffix(".params")?;
    let (known, foreign) = match owner {
        "optimizer" => (schema::OPTIMIZERS, schema::FOREIGN_OPTIMIZERS),
        "scheduler" => (schema::SCHEDULERS, schema::FOREIGN_SCHEDULERS),
        _ => return None,
    };
    let Some(type_name) = type_name else {
        let message = format!("which parameters there are depends on {owner}.type, which is missing");
        return Some(Outcome::Wrong { key: None, message, at: None });
    };
    let is = |list: &[&str]| list.iter().any(|known| known.eq_ignore_ascii_case(type_name));
    if is(foreign) || !is(known) {
        let message = format!("a parameter of {type_name}, which zeroth does not have");
        return Some(Outcome::OfForeignType { message });
    }
    let mut types: Vec<&str> =
        schema::find(&format!("{section}.{name}")).flat_map(|key| key.types.iter().copied()).collect();
    if types.is_empty() {
        return None;
    }
    types.dedup();
    let message = format!("a parameter of {}; {type_name} has none of that name", types.join(", "));
    Some(Outcome::Wrong { key: None, message, at: None })
}
