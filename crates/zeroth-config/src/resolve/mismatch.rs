//! Contradictions between file and command line, in the words that Hugging Face's users search for.

use std::fmt;

use serde_json::Value;

use crate::read::Location;

/// One contradiction.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// The key in the file.
    pub path: String,
    /// What the file says.
    pub file_value: Value,
    /// Where it says so.
    pub location: Option<Location>,
    /// Hugging Face's name of what the command line says.
    pub hf: &'static str,
    /// What the command line says.
    pub flag_value: Value,
    /// The flag that says so.
    pub flag: &'static str,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "- ds {}={} vs hf {}={} ({}",
            self.path,
            python(&self.file_value),
            self.hf,
            python(&self.flag_value),
            kind(&self.file_value)
        )?;
        if let Some(location) = self.location {
            write!(f, " at {location}")?;
        }
        write!(f, "; {} from {})", kind(&self.flag_value), self.flag)
    }
}

/// All contradictions in one message.
pub(super) fn listing(mismatches: &[Mismatch]) -> String {
    let lines: Vec<String> = mismatches.iter().map(Mismatch::to_string).collect();
    format!(
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:\n{}\nThe \
         easiest method is to set these DeepSpeed config values to 'auto'.",
        lines.join("\n")
    )
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a truth value",
        Value::Number(number) if number.is_f64() => "a number",
        Value::Number(_) => "a whole number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value as Python prints it: `5e-05`, `True`, `[0.9, 0.95]`.
pub(crate) fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => match (number.is_f64(), number.as_f64()) {
            (true, Some(float)) => python_float(float),
            _ => number.to_string(),
        },
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(_) => value.to_string(),
    }
}

/// Python writes floats below 1e-4 and from 1e16 on with an exponent of at least two digits.
fn python_float(float: f64) -> String {
    let magnitude = float.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{float:e}");
        if let Some((mantissa, exponent)) = text.split_once('e') {
            let (sign, digits) = exponent.strip_prefix('-').map_or(("+", exponent), |digits| ("-", digits));
            return format!("{mantissa}e{sign}{digits:0>2}");
        }
    }
    format!("{float:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_look_as_python_prints_them() {
        for (value, text) in [
            (json!(5e-5), "5e-05"),
            (json!(1e-4), "0.0001"),
            (json!(1.0), "1.0"),
            (json!(1e16), "1e+16"),
            (json!(8), "8"),
            (json!([0.9, 0.95]), "[0.9, 0.95]"),
            (json!(true), "True"),
            (json!(null), "None"),
            (json!(1.25e-7), "1.25e-07"),
        ] {
            assert_eq!(python(&value), text);
        }
    }
}
