//! Typed reading of a config's fields, with the field's name in every complaint.

use serde_json::{Map, Value};
use zeroth_base::{DType, nearest};

use crate::error::FieldError;
use crate::limits::MAX_WIDTH;

/// The fields of a JSON object.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The prefix of field names in messages: empty, or `rope_scaling.`.
    within: &'static str,
}

/// A field that may be absent, `null` or a value. For some fields transformers reads the first two differently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Given<T> {
    Absent,
    Null,
    Value(T),
}

impl<T> Given<T> {
    /// The value; `null` counts as absent.
    pub(crate) fn value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Absent | Self::Null => None,
        }
    }
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, within: "" }
    }

    /// Fields of an object inside the config.
    pub(crate) fn inside(map: &'a Map<String, Value>, within: &'static str) -> Self {
        Self { map, within }
    }

    /// The field's name as messages say it.
    pub(crate) fn path(&self, field: &str) -> String {
        format!("{}{field}", self.within)
    }

    fn given(&self, field: &str) -> Given<&'a Value> {
        match self.map.get(field) {
            None => Given::Absent,
            Some(Value::Null) => Given::Null,
            Some(value) => Given::Value(value),
        }
    }

    /// Reads a field with `read`; a value that `read` does not take is of the wrong type.
    fn typed<T>(
        &self,
        field: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Given<T>, FieldError> {
        match self.given(field) {
            Given::Absent => Ok(Given::Absent),
            Given::Null => Ok(Given::Null),
            Given::Value(value) => match read(value) {
                Some(read) => Ok(Given::Value(read)),
                None => {
                    Err(FieldError::WrongType { field: self.path(field), found: described(value), expected })
                }
            },
        }
    }

    /// A whole number from `least` to `most`.
    pub(crate) fn size_in(&self, field: &str, least: u64, most: u64) -> Result<Given<u64>, FieldError> {
        let given = self.typed(field, "a whole number", |value| {
            value.as_number().filter(|n| n.is_u64() || n.is_i64()).cloned()
        })?;
        match given {
            Given::Absent => Ok(Given::Absent),
            Given::Null => Ok(Given::Null),
            Given::Value(number) => match number.as_u64() {
                Some(size) if (least..=most).contains(&size) => Ok(Given::Value(size)),
                _ => {
                    let (field, value) = (self.path(field), number.to_string());
                    Err(FieldError::OutOfRange { field, value, least, most })
                }
            },
        }
    }

    /// A whole number from `least` to `most`, or the first of a list of them.
    pub(crate) fn first_size_in(&self, field: &str, least: u64, most: u64) -> Result<Given<u64>, FieldError> {
        let Some(list) = self.map.get(field).and_then(Value::as_array) else {
            return self.size_in(field, least, most);
        };
        let Some(first) = list.first() else { return Ok(Given::Null) };
        let alone = Map::from_iter([(field.to_owned(), first.clone())]);
        Fields { map: &alone, within: self.within }.size_in(field, least, most)
    }

    /// A size that must be there, from 1 to `most`.
    pub(crate) fn size(&self, field: &str, most: u64) -> Result<u64, FieldError> {
        self.size_in(field, 1, most)?.value().ok_or_else(|| self.missing(field))
    }

    /// A size from 1 to `most`, or the default.
    pub(crate) fn size_or(&self, field: &str, most: u64, default: u64) -> Result<u64, FieldError> {
        Ok(self.size_in(field, 1, most)?.value().unwrap_or(default))
    }

    /// `true` or `false`.
    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, FieldError> {
        Ok(self.typed(field, "true or false", Value::as_bool)?.value())
    }

    /// A number; never NaN or infinite, which JSON cannot say.
    pub(crate) fn number(&self, field: &str) -> Result<Option<f64>, FieldError> {
        Ok(self.typed(field, "a number", Value::as_f64)?.value())
    }

    /// A number above zero.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>, FieldError> {
        match self.number(field)? {
            Some(number) if number <= 0.0 => {
                let (field, found) = (self.path(field), number.to_string());
                Err(FieldError::WrongType { field, found, expected: "a number above zero" })
            }
            // Zero or infinite where it is computed with.
            Some(number) if !(f32::MIN_POSITIVE..=f32::MAX).contains(&(number as f32)) => {
                let (field, found) = (self.path(field), number.to_string());
                Err(FieldError::WrongType {
                    field,
                    found,
                    expected: "a number above zero that fp32 can hold",
                })
            }
            number => Ok(number),
        }
    }

    /// A number of at least zero that fp32 can hold.
    pub(crate) fn not_negative(&self, field: &str) -> Result<Option<f64>, FieldError> {
        match self.number(field)? {
            Some(number) if !(0.0..=f64::from(f32::MAX)).contains(&number) => {
                let (field, found) = (self.path(field), number.to_string());
                Err(FieldError::WrongType {
                    field,
                    found,
                    expected: "a number of at least zero that fp32 can hold",
                })
            }
            number => Ok(number),
        }
    }

    /// A number above zero that must be there.
    pub(crate) fn required_positive(&self, field: &str) -> Result<f64, FieldError> {
        self.positive(field)?.ok_or_else(|| self.missing(field))
    }

    /// A text.
    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, FieldError> {
        Ok(self.typed(field, "a text", Value::as_str)?.value())
    }

    /// An object.
    pub(crate) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, FieldError> {
        Ok(self.typed(field, "an object", Value::as_object)?.value())
    }

    /// A list whose items `read` takes one by one.
    pub(crate) fn list<T>(
        &self,
        field: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, FieldError> {
        Ok(self.typed(field, expected, |value| value.as_array()?.iter().map(&read).collect())?.value())
    }

    /// One of the known words, as its meaning.
    pub(crate) fn word<T: Copy>(
        &self,
        field: &str,
        known: &[(&'static str, T)],
        default: &'static str,
    ) -> Result<T, FieldError> {
        let found = self.text(field)?.unwrap_or(default);
        match known.iter().find(|(word, _)| *word == found) {
            Some((_, meaning)) => Ok(*meaning),
            None => Err(self.unknown_name(field, found, known.iter().map(|(word, _)| *word))),
        }
    }

    pub(crate) fn missing(&self, field: &str) -> FieldError {
        let near = nearest(field, self.map.keys().map(String::as_str)).filter(|near| *near != field);
        FieldError::Missing { field: self.path(field), near: near.map(str::to_owned) }
    }

    pub(crate) fn unknown_name(
        &self,
        field: &str,
        found: &str,
        known: impl Iterator<Item = &'static str> + Clone,
    ) -> FieldError {
        FieldError::UnknownName {
            field: self.path(field),
            found: found.to_owned(),
            near: nearest(found, known.clone()),
            known: known.collect::<Vec<_>>().join(", "),
        }
    }
}

/// The kind of a value, for messages.
pub(crate) const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value for messages: itself where it is short, else its kind.
pub(crate) fn described(value: &Value) -> String {
    match value {
        Value::Array(_) | Value::Object(_) => kind(value).to_owned(),
        Value::String(text) if text.len() > 60 => "a long text".to_owned(),
        Value::String(_) => format!("the text {value}"),
        _ => value.to_string(),
    }
}

/// The type the weights were saved in: `dtype` since transformers 4.56, `torch_dtype` before.
pub(crate) fn read_dtype(fields: &Fields<'_>) -> Result<Option<DType>, FieldError> {
    let mut field = "dtype";
    let mut name = fields.text(field)?;
    if name.is_none() {
        field = "torch_dtype";
        name = fields.text(field)?;
    }
    let Some(name) = name else { return Ok(None) };
    match DType::from_name(name) {
        Some(dtype) => Ok(Some(dtype)),
        None => Err(fields.unknown_name(field, name, ["float32", "bfloat16", "float16"].into_iter())),
    }
}

/// Refuses heads that are wider together than any model.
pub(crate) fn check_attention_width(
    fields: &Fields<'_>,
    (heads_field, heads): (&str, u64),
    (width_field, width): (&str, u64),
) -> Result<(), FieldError> {
    // Both are at most 2^20.
    let both = heads * width;
    if both <= MAX_WIDTH {
        return Ok(());
    }
    let field = format!("{} × {}", fields.path(heads_field), width_field);
    Err(FieldError::OutOfRange { field, value: both.to_string(), least: 1, most: MAX_WIDTH })
}
