//! What templates expect of Python: `json.dumps` and methods of strings.
//!
//! minijinja's `pycompat` has most methods; here are those that it lacks, or where Python's idea of white space counts.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// The deepest value that `tojson` writes: deeper ones would overflow the stack. Rows are read to a depth of 128.
const DEPTH: usize = 256;
/// What a template did whose value is deeper.
pub(super) const TOO_DEEP: &str = "gave `tojson` a value nested more than 256 deep";

/// `json.dumps` as transformers gives it to templates: no HTML escapes, and characters as they are.
#[allow(clippy::needless_pass_by_value, reason = "minijinja hands these over by value")]
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let given = |name| Ok::<_, Error>(options.get::<Option<Value>>(name)?.filter(|value| !value.is_none()));
    let indent =
        match indent.filter(|indent| !indent.is_none()).map_or_else(|| given("indent"), |v| Ok(Some(v)))? {
            Some(indent) => Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(usize::try_from(indent)?),
            }),
            None => None,
        };
    let separators = match given("separators")? {
        Some(given) => (given.get_item_by_index(0)?.to_string(), given.get_item_by_index(1)?.to_string()),
        _ => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let flag = |name| Ok::<_, Error>(given(name)?.is_some_and(|value| value.is_true()));
    let dump = Dump {
        indent,
        item: separators.0,
        key: separators.1,
        ascii: ensure_ascii.map_or_else(|| flag("ensure_ascii"), Ok)?,
        sorted: flag("sort_keys")?,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    dump.value(value, 0, &mut out)?;
    Ok(out)
}

/// How `json.dumps` writes.
struct Dump {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sorted: bool,
}

impl Dump {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, TOO_DEEP));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(out, "{value}");
            }
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    let mut text = String::new();
                    self.value(&item, depth + 1, &mut text)?;
                    items.push(text);
                }
                self.list(['[', ']'], &items, depth, out);
            }
            ValueKind::Map => {
                let pairs = value.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
                let mut pairs: Vec<(String, Value)> =
                    pairs.into_iter().flatten().map(|(key, value)| (key.to_string(), value)).collect();
                if self.sorted {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                let mut items = Vec::new();
                for (key, item) in pairs {
                    let mut text = String::new();
                    self.text(&key, &mut text);
                    text.push_str(&self.key);
                    self.value(&item, depth + 1, &mut text)?;
                    items.push(text);
                }
                self.list(['{', '}'], &items, depth, out);
            }
            other => {
                let message = format!("a value of type {other} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn list(&self, edges: [char; 2], items: &[String], depth: usize, out: &mut String) {
        out.push(edges[0]);
        let break_line = |out: &mut String, depth| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item);
            }
            break_line(out, depth + 1);
            out.push_str(item);
        }
        if !items.is_empty() {
            break_line(out, depth);
        }
        out.push(edges[1]);
    }

    fn text(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                other if (other as u32) < 0x20 || (self.ascii && !other.is_ascii()) => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

/// A float as Python's `repr` writes it, and JSON's names for what is not finite.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("an exponent is a whole number");
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = number.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// White space to Python: Unicode's, and four separators of ASCII.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// The filter `trim`: Python's `str(value).strip()`.
pub(super) fn trim(value: &Value, characters: Option<String>) -> String {
    let text = value.to_string();
    match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    }
}

/// The test `iterable`: nothing is no sequence to Python.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Methods of Python's values.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    };
    let three = |parts: [&str; 3]| Value::from(Tuple::from(parts.map(Value::from).to_vec()));
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(args)?;
            let strips =
                |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
            Value::from(match name {
                "strip" => text.trim_matches(strips),
                "lstrip" => text.trim_start_matches(strips),
                _ => text.trim_end_matches(strips),
            })
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (by,): (&str,) = from_args(args)?;
            three(text.split_once(by).map_or([text, "", ""], |(before, after)| [before, by, after]))
        }
        "rpartition" => {
            let (by,): (&str,) = from_args(args)?;
            three(text.rsplit_once(by).map_or(["", "", text], |(before, after)| [before, by, after]))
        }
        "rsplit" => {
            let (by, most): (&str, Option<i64>) = from_args(args)?;
            let most = most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most + 1);
            let mut parts: Vec<Value> = text.rsplitn(most, by).map(Value::from).collect();
            parts.reverse();
            Value::from(parts)
        }
        _ => return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        // Each as CPython 3.12 prints it.
        for (number, text) in [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (0.0, "0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e-7, "1e-07"),
            (1.25e300, "1.25e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float(number), text);
        }
    }
}
