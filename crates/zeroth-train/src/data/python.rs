//! What templates expect of Python: `json.dumps`, methods of strings, and today's date.
//!
//! minijinja's `pycompat` has most methods; here are those that it lacks, or where Python's idea of white space counts.

use std::fmt::Write as _;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

#[allow(clippy::needless_pass_by_value, reason = "minijinja hands these over by value")]
/// `json.dumps` as transformers gives it to templates: no HTML escapes, and characters as they are.
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

/// The day that a template's `strftime_now` shows, at midnight.
///
/// It is an input, so that a run that is resumed tomorrow has the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Day {
    year: i64,
    month: u8,
    of_month: u8,
}

/// A text that is no day.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{found}` is no day: write year-month-day, as in 2024-07-26")]
pub struct DayError {
    /// As given.
    found: String,
}

impl FromStr for Day {
    type Err = DayError;

    fn from_str(text: &str) -> Result<Self, DayError> {
        let read = || {
            let mut parts = text.splitn(3, '-');
            let day = Self {
                year: parts.next()?.parse().ok()?,
                month: parts.next()?.parse().ok()?,
                of_month: parts.next()?.parse().ok()?,
            };
            // A day that does not exist does not come back from the calendar.
            let real = (1..=9999).contains(&day.year) && (1..=12).contains(&day.month) && day.of_month >= 1;
            (real && Self::after_epoch(day.since_epoch()) == day).then_some(day)
        };
        read().ok_or_else(|| DayError { found: text.to_owned() })
    }
}

impl Day {
    /// The day it is, in UTC.
    pub fn today() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self::after_epoch((seconds / 86_400) as i64)
    }

    /// Howard Hinnant's calendar: years begin in March, so that a leap day is the last one.
    fn after_epoch(days: i64) -> Self {
        let days = days + 719_468;
        let era = days.div_euclid(146_097);
        let of_era = days.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month: month as u8,
            of_month: (of_year - (153 * from_march + 2) / 5 + 1) as u8,
        }
    }

    fn since_epoch(self) -> i64 {
        let year = self.year - i64::from(self.month <= 2);
        let era = year.div_euclid(400);
        let year_of_era = year.rem_euclid(400);
        let from_march = (i64::from(self.month) + 9) % 12;
        let of_year = (153 * from_march + 2) / 5 + i64::from(self.of_month) - 1;
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
    }

    /// `strftime`, for what a date can say; the time is midnight.
    pub(super) fn strftime(self, format: &str) -> String {
        const MONTHS: [&str; 12] = [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ];
        const DAYS: [&str; 7] =
            ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
        let month = MONTHS[usize::from(self.month) - 1];
        let weekday = DAYS[self.since_epoch().rem_euclid(7) as usize];
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let Self { year, month: number, of_month: day } = self;
            match characters.next() {
                Some('Y') => out.push_str(&year.to_string()),
                Some('y') => out.push_str(&format!("{:02}", year % 100)),
                Some('m') => out.push_str(&format!("{number:02}")),
                Some('B') => out.push_str(month),
                Some('b' | 'h') => out.push_str(&month[..3]),
                Some('d') => out.push_str(&format!("{day:02}")),
                Some('e') => out.push_str(&format!("{day:2}")),
                Some('A') => out.push_str(weekday),
                Some('a') => out.push_str(&weekday[..3]),
                Some('j') => {
                    let first = Self { month: 1, of_month: 1, ..self };
                    out.push_str(&format!("{:03}", self.since_epoch() - first.since_epoch() + 1));
                }
                Some('F') => out.push_str(&format!("{year}-{number:02}-{day:02}")),
                Some('H' | 'M' | 'S') => out.push_str("00"),
                Some('I') => out.push_str("12"),
                Some('p') => out.push_str("AM"),
                Some('T') => out.push_str("00:00:00"),
                Some('%') | None => out.push('%'),
                // `%-d`: without the leading zero.
                Some('-') => {
                    let code = characters.next().map_or_else(String::new, |code| format!("%{code}"));
                    let padded = self.strftime(&code);
                    let bare = padded.trim_start_matches('0');
                    out.push_str(if bare.is_empty() && !padded.is_empty() { "0" } else { bare });
                }
                Some(other) => out.extend(['%', other]),
            }
        }
        out
    }
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

    #[test]
    fn days_are_read_and_shown_as_python_shows_them() {
        // Each as `datetime.date(...).strftime` gives it.
        let all = "%d %b %Y|%A, %B %-d|%a %e %m/%y|%j|%F %H:%M:%S %I%p %%";
        for (day, shown) in [
            ("2024-07-26", "26 Jul 2024|Friday, July 26|Fri 26 07/24|208|2024-07-26 00:00:00 12AM %"),
            ("2024-02-29", "29 Feb 2024|Thursday, February 29|Thu 29 02/24|060|2024-02-29 00:00:00 12AM %"),
            ("1969-01-05", "05 Jan 1969|Sunday, January 5|Sun  5 01/69|005|1969-01-05 00:00:00 12AM %"),
        ] {
            assert_eq!(day.parse::<Day>().unwrap().strftime(all), shown);
        }
        for wrong in ["2023-02-29", "2024-13-01", "2024-00-01", "2024-01-00", "today", "", "2024-1"] {
            let error = wrong.parse::<Day>().unwrap_err().to_string();
            assert_eq!(error, format!("`{wrong}` is no day: write year-month-day, as in 2024-07-26"));
        }
        assert!(Day::today() > "2024-01-01".parse().unwrap());
    }
}
