//! Typed values: a row of the table that ends in `=> name: Type` is also a field of its section's struct.
//!
//! Passes read `values.zero.stage`, so a misspelt key does not compile. Neither does a field whose row lacks a default
//! of the field's type: [`Key::fits`] is evaluated at compile time.

use serde_json::Value;
use zeroth_base::DType;

use super::key::{AutoRule, DefaultValue, Key, KeyType};

/// Declares a section of the table: its rows, and a struct with a field for each row that a part of zeroth reads.
macro_rules! section {
    (
        $(#[$attribute:meta])*
        $keys:ident: $section:ident { $( $key:expr $(=> $field:ident: $type:ty)? ),* $(,)? }
    ) => {
        pub(super) const $keys: &[Key] = &[$($key),*];

        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $section {
            $($(
                #[doc = concat!("The value of `", stringify!($field), "`.")]
                pub $field: $type,
            )?)*
        }

        impl $section {
            /// Reads the section; `value` finds the resolved value of a path.
            pub(super) fn read<'a>(value: &impl Fn(&str) -> Option<&'a serde_json::Value>) -> Self {
                Self {
                    $($(
                        $field: {
                            const KEY: Key = $key;
                            const { assert!(KEY.fits(&<$type as $crate::schema::field::ReadField>::TYPE), "the row has no default of its field's type") };
                            $crate::schema::field::read(&KEY, value(KEY.path))
                        },
                    )?)*
                }
            }
        }
    };
}

/// Declares an enum of the words that a key accepts.
macro_rules! words {
    (
        $(#[$attribute:meta])*
        $name:ident { $( $(#[$variant_attribute:meta])* $variant:ident = $word:literal ),* $(,)? }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $( $(#[$variant_attribute])* $variant ),*
        }

        impl $name {
            /// The words, as a file spells them.
            pub const WORDS: &'static [&'static str] = &[$($word),*];

            /// The word of this value.
            pub const fn word(self) -> &'static str {
                match self {
                    $( Self::$variant => $word ),*
                }
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        }

        impl $crate::schema::field::ReadField for $name {
            const TYPE: $crate::schema::field::FieldType = $crate::schema::field::FieldType::Word;

            fn read(value: Option<&serde_json::Value>) -> Option<Self> {
                match value?.as_str()? {
                    $( $word => Some(Self::$variant), )*
                    _ => None,
                }
            }
        }
    };
}

/// A type that a value of the config is read as.
pub(super) trait ReadField: Sized {
    /// What a row must hold to be read as this type.
    const TYPE: FieldType;

    /// The value in this type; `None` where it is absent or of another type, such as the word "auto".
    fn read(value: Option<&Value>) -> Option<Self>;
}

/// What a row must hold to be read as a field.
pub(super) enum FieldType {
    Bool,
    Unsigned,
    Signed,
    Float,
    Floats(usize),
    Text,
    Word,
    Optional(&'static FieldType),
}

/// The value of a field: what was resolved, else the row's default.
pub(super) fn read<T: ReadField>(key: &Key, resolved: Option<&Value>) -> T {
    T::read(resolved)
        .or_else(|| T::read(key.default.to_json().as_ref()))
        .expect("a field's row has a default of its type or is filled by every resolve, by Key::fits")
}

impl Key {
    /// Whether every resolved config has a value for a field of this type.
    pub(super) const fn fits(&self, field: &FieldType) -> bool {
        match field {
            FieldType::Optional(field) => self.holds(field),
            field => self.holds(field) && (self.is_always_filled() || self.has_default_of(field)),
        }
    }

    const fn holds(&self, field: &FieldType) -> bool {
        match (self.kind, field) {
            (KeyType::Floats(count), FieldType::Floats(length)) => count == *length,
            (KeyType::Bool, FieldType::Bool)
            | (KeyType::Int, FieldType::Unsigned | FieldType::Signed)
            | (KeyType::Float, FieldType::Float)
            | (KeyType::Text | KeyType::OneOf(_), FieldType::Text | FieldType::Word) => true,
            _ => false,
        }
    }

    const fn has_default_of(&self, field: &FieldType) -> bool {
        match (self.default, field) {
            (DefaultValue::Int(value), FieldType::Unsigned) => value >= 0,
            (DefaultValue::Floats(values), FieldType::Floats(length)) => values.len() == *length,
            (DefaultValue::Bool(_), FieldType::Bool)
            | (DefaultValue::Int(_), FieldType::Signed)
            | (DefaultValue::Float(_), FieldType::Float)
            | (DefaultValue::Text(_), FieldType::Text | FieldType::Word) => true,
            _ => false,
        }
    }

    /// Whether resolving gives the key a value in every config, whatever its optimizer and scheduler.
    const fn is_always_filled(&self) -> bool {
        let is_batch_size =
            matches!(self.auto, Some(AutoRule::TrainBatch | AutoRule::MicroBatch | AutoRule::Accumulation));
        is_batch_size || (matches!(self.default, DefaultValue::Derived(..)) && self.types.is_empty())
    }
}

impl ReadField for bool {
    const TYPE: FieldType = FieldType::Bool;

    fn read(value: Option<&Value>) -> Option<Self> {
        value?.as_bool()
    }
}

impl ReadField for u64 {
    const TYPE: FieldType = FieldType::Unsigned;

    fn read(value: Option<&Value>) -> Option<Self> {
        value?.as_u64()
    }
}

impl ReadField for u8 {
    const TYPE: FieldType = FieldType::Unsigned;

    fn read(value: Option<&Value>) -> Option<Self> {
        value?.as_u64()?.try_into().ok()
    }
}

impl ReadField for i64 {
    const TYPE: FieldType = FieldType::Signed;

    fn read(value: Option<&Value>) -> Option<Self> {
        value?.as_i64()
    }
}

impl ReadField for f64 {
    const TYPE: FieldType = FieldType::Float;

    fn read(value: Option<&Value>) -> Option<Self> {
        value?.as_f64()
    }
}

/// The first numbers of a list.
impl<const N: usize> ReadField for [f64; N] {
    const TYPE: FieldType = FieldType::Floats(N);

    fn read(value: Option<&Value>) -> Option<Self> {
        let numbers: Option<Vec<f64>> = value?.as_array()?.iter().take(N).map(Value::as_f64).collect();
        numbers?.try_into().ok()
    }
}

impl ReadField for String {
    const TYPE: FieldType = FieldType::Text;

    fn read(value: Option<&Value>) -> Option<Self> {
        value?.as_str().map(str::to_owned)
    }
}

impl ReadField for DType {
    const TYPE: FieldType = FieldType::Word;

    fn read(value: Option<&Value>) -> Option<Self> {
        Self::from_name(value?.as_str()?)
    }
}

impl<T: ReadField> ReadField for Option<T> {
    const TYPE: FieldType = FieldType::Optional(&T::TYPE);

    fn read(value: Option<&Value>) -> Option<Self> {
        Some(T::read(value))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use zeroth_base::Optimizer;

    use super::super::{Values, key::ReadBy};
    use super::*;

    #[test]
    fn a_field_has_the_resolved_value_or_its_rows_default() {
        let filled = [("train_batch_size", json!(8)), ("zero_optimization.stage", json!(3))]
            .into_iter()
            .chain([("train_micro_batch_size_per_gpu", json!(2)), ("gradient_accumulation_steps", json!(4))])
            .chain([("zero_optimization.overlap_comm", json!(true)), ("zeroth.recompute", json!("none"))])
            .chain([
                ("communication_data_type", json!("bf16")),
                ("scheduler.params.warmup_num_steps", json!("auto")),
            ]);
        let filled: Vec<(&str, Value)> = filled.collect();
        let values =
            Values::read(&|path| filled.iter().find(|(filled, _)| *filled == path).map(|(_, value)| value));
        assert_eq!((values.zero.stage, values.zero.reduce_bucket_size), (3, 500_000_000));
        assert_eq!(values.optimizer.name, Optimizer::AdamW);
        assert_eq!(values.optimizer.betas.map(f64::to_bits), [0.9, 0.999].map(f64::to_bits));
        assert_eq!(values.offload_param.max_in_cpu, None);
        assert_eq!(values.scheduler.warmup_num_steps, 1000, "a rule that is still open gives the default");
    }

    #[test]
    fn a_row_fits_the_type_of_its_default_alone() {
        const ROW: Key = Key::int("a", 0).or_int(5).read_by(ReadBy::Loop);
        assert!(ROW.fits(&u64::TYPE) && ROW.fits(&i64::TYPE) && ROW.fits(&Option::<u64>::TYPE));
        assert!(!ROW.fits(&f64::TYPE) && !ROW.fits(&bool::TYPE));
        assert!(!Key::int("a", 0).fits(&u64::TYPE), "no default");
        assert!(!Key::int("a", -1).or_int(-1).fits(&u64::TYPE), "a negative default");
        assert!(Key::int("a", 0).fits(&Option::<u64>::TYPE));
    }
}
