//! Reads one line of metrics: an object of numbers. A million of them are read when a long run is opened, so the usual
//! line is scanned in place; others are left to serde_json.

use serde_json::{Map, Value};

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum JsonField {
    /// A finite number.
    Number(f64),
    /// `null`: a number that is not finite.
    Null,
    /// Anything else.
    Other,
}

/// Calls `field` for every field that `wants` names, in order. False for what is not a JSON object.
pub(crate) fn fields(
    line: &[u8],
    wants: impl Fn(&str) -> bool,
    mut field: impl FnMut(&str, JsonField),
) -> bool {
    let mut found: [(&str, JsonField); 32] = [("", JsonField::Other); 32];
    if let Some(count) = scan(line, &wants, &mut found) {
        for (name, value) in &found[..count] {
            field(name, *value);
        }
        return true;
    }
    let Ok(object) = serde_json::from_slice::<Map<String, Value>>(line) else { return false };
    for (name, value) in object.iter().filter(|(name, _)| wants(name)).take(found.len()) {
        let value = match value {
            Value::Number(number) => number.as_f64().map_or(JsonField::Other, JsonField::Number),
            Value::Null => JsonField::Null,
            _ => JsonField::Other,
        };
        field(name, value);
    }
    true
}

/// Scans an object without nesting and without escapes; `None` where it is something else.
fn scan<'a>(
    line: &'a [u8],
    wants: &impl Fn(&str) -> bool,
    found: &mut [(&'a str, JsonField)],
) -> Option<usize> {
    let mut rest = space(line).strip_prefix(b"{")?;
    let mut count = 0;
    if let Some(end) = space(rest).strip_prefix(b"}") {
        return space(end).is_empty().then_some(0);
    }
    loop {
        rest = space(rest).strip_prefix(b"\"")?;
        let end = memchr::memchr2(b'"', b'\\', rest)?;
        let name = str::from_utf8(&rest[..end]).ok()?;
        rest = space(rest[end..].strip_prefix(b"\"")?).strip_prefix(b":")?;
        rest = space(rest);
        let end = rest.iter().position(|byte| matches!(byte, b',' | b'}' | b' ' | b'\t' | b'\r'))?;
        let (text, after) = rest.split_at(end);
        if wants(name) {
            *found.get_mut(count)? = (name, value(text)?);
            count += 1;
        } else {
            // Checked as far as it is cheap: no text, no nesting.
            text.iter()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'+'))
                .then_some(())?;
        }
        rest = space(after);
        match rest.split_first()? {
            (b',', after) => rest = after,
            (b'}', after) => return space(after).is_empty().then_some(count),
            _ => return None,
        }
    }
}

fn value(text: &[u8]) -> Option<JsonField> {
    match text {
        b"null" => Some(JsonField::Null),
        b"true" | b"false" => Some(JsonField::Other),
        [b'0'..=b'9' | b'-', ..] => {
            let number: f64 = str::from_utf8(text).ok()?.parse().ok()?;
            number.is_finite().then_some(JsonField::Number(number))
        }
        _ => None,
    }
}

fn space(bytes: &[u8]) -> &[u8] {
    let count = bytes.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\r' | b'\n')).count();
    &bytes[count..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Option<Vec<(String, JsonField)>> {
        let mut all = Vec::new();
        fields(line.as_bytes(), |name| name != "skipped", |name, value| all.push((name.to_owned(), value)))
            .then_some(all)
    }

    #[test]
    fn objects_are_read_and_anything_else_is_garbage() {
        let line = r#"{"step":3,"loss":-1.5e-3, "lr" : null ,"skipped":false}"#;
        let expected = vec![
            ("step".to_owned(), JsonField::Number(3.0)),
            ("loss".to_owned(), JsonField::Number(-1.5e-3)),
            ("lr".to_owned(), JsonField::Null),
        ];
        assert_eq!(read(line), Some(expected));
        assert_eq!(read("{}"), Some(Vec::new()));
        // Left to serde_json: text, nesting, escapes.
        assert_eq!(
            read(r#"{"note":"a, b}","x":{"y":[1]},"z\u0041":2}"#).unwrap()[2],
            ("zA".to_owned(), JsonField::Number(2.0))
        );
        for garbage in [
            "",
            "{",
            "[1]",
            "{\"step\":}",
            "{\"step\":1",
            "{\"step\":1}x",
            "{\"a\":1,}",
            "\u{1}\u{2}",
            "{\"a\":1e999}",
        ] {
            assert_eq!(read(garbage), None, "{garbage}");
        }
    }
}
