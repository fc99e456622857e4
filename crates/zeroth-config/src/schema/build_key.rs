//! Rows of the schema are built by `const fn`s: a constructor for the kind of value, then a call for each other property.

use super::bounds::{Bounds, FP32_LEAST, FP32_MOST};
use super::key::{AutoRule, Condition, DefaultValue, Derivation, Effect, Key, KeyType, ReadBy};
use super::support::Support;

impl Key {
    /// A key of this path and kind; everything else is filled by the calls that follow.
    pub(super) const fn new(path: &'static str, kind: KeyType) -> Self {
        Self {
            path,
            other_names: &[],
            other_paths: &[],
            kind,
            bounds: Bounds::NONE,
            default: DefaultValue::Absent,
            unit: "",
            does: "",
            set: "",
            reader: ReadBy::Nobody,
            effect: Effect::Works,
            support: Support::Full,
            idle: None,
            note: None,
            auto: None,
            types: &[],
        }
    }

    /// A whole number of at least `least`.
    pub(super) const fn int(path: &'static str, least: i64) -> Self {
        let mut key = Self::new(path, KeyType::Int);
        key.bounds.least = Some(least as f64);
        key
    }

    /// A number of at least `least`.
    pub(super) const fn float(path: &'static str, least: f64) -> Self {
        let mut key = Self::new(path, KeyType::Float);
        key.bounds.least = Some(least);
        key
    }

    /// true or false.
    pub(super) const fn bool(path: &'static str, default: bool) -> Self {
        Self::new(path, KeyType::Bool).or(DefaultValue::Bool(default))
    }

    /// A section of keys.
    pub(super) const fn section(path: &'static str) -> Self {
        Self::new(path, KeyType::Section)
    }

    /// A part of DeepSpeed without counterpart here; `because` says why nothing is missed.
    pub(super) const fn without_effect(
        path: &'static str,
        does: &'static str,
        because: &'static str,
    ) -> Self {
        let mut key = Self::new(path, KeyType::Opaque).does(does);
        key.effect = Effect::Nothing(because);
        key
    }

    /// A number that fp32 can hold.
    pub(super) const fn in_fp32(mut self) -> Self {
        self.bounds.most = Some(FP32_MOST);
        self
    }

    /// A number above 0 that is above 0 in fp32 too.
    pub(super) const fn positive_in_fp32(mut self) -> Self {
        self.bounds.least = Some(FP32_LEAST);
        self.in_fp32()
    }

    pub(super) const fn named(mut self, names: &'static [&'static str]) -> Self {
        self.other_names = names;
        self
    }

    pub(super) const fn also_at(mut self, places: &'static [&'static str]) -> Self {
        self.other_paths = places;
        self
    }

    pub(super) const fn at_least(mut self, bound: f64) -> Self {
        self.bounds.least = Some(bound);
        self
    }

    pub(super) const fn above(mut self, bound: f64) -> Self {
        self.bounds.above = Some(bound);
        self
    }

    pub(super) const fn at_most(mut self, bound: f64) -> Self {
        self.bounds.most = Some(bound);
        self
    }

    pub(super) const fn below(mut self, bound: f64) -> Self {
        self.bounds.below = Some(bound);
        self
    }

    pub(super) const fn or(mut self, default: DefaultValue) -> Self {
        self.default = default;
        self
    }

    pub(super) const fn or_int(self, default: i64) -> Self {
        self.or(DefaultValue::Int(default))
    }

    pub(super) const fn or_float(self, default: f64) -> Self {
        self.or(DefaultValue::Float(default))
    }

    pub(super) const fn or_text(self, default: &'static str) -> Self {
        self.or(DefaultValue::Text(default))
    }

    pub(super) const fn or_rule(self, rule: &'static str) -> Self {
        self.or(DefaultValue::Rule(rule))
    }

    pub(super) const fn or_derived(self, derivation: Derivation, rule: &'static str) -> Self {
        self.or(DefaultValue::Derived(derivation, rule))
    }

    pub(super) const fn in_(mut self, unit: &'static str) -> Self {
        self.unit = unit;
        self
    }

    pub(super) const fn does(mut self, sentence: &'static str) -> Self {
        self.does = sentence;
        self
    }

    pub(super) const fn set(mut self, advice: &'static str) -> Self {
        self.set = advice;
        self
    }

    pub(super) const fn read_by(mut self, reader: ReadBy) -> Self {
        self.reader = reader;
        self
    }

    pub(super) const fn auto(mut self, rule: AutoRule) -> Self {
        self.auto = Some(rule);
        self
    }

    pub(super) const fn built_in(mut self, why: &'static str) -> Self {
        self.effect = Effect::BuiltIn(why);
        self
    }

    pub(super) const fn nothing(mut self, because: &'static str) -> Self {
        self.effect = Effect::Nothing(because);
        self
    }

    pub(super) const fn idle_if(mut self, reason: Condition) -> Self {
        self.idle = Some(reason);
        self
    }

    pub(super) const fn noting(mut self, note: Condition) -> Self {
        self.note = Some(note);
        self
    }

    pub(super) const fn while_enabled(mut self) -> Self {
        self.effect = Effect::WhileEnabled;
        self
    }

    pub(super) const fn as_section(mut self) -> Self {
        self.effect = Effect::AsSection;
        self
    }

    pub(super) const fn unsupported_if_on(mut self, what: &'static str) -> Self {
        self.effect = Effect::Unsupported(what);
        self
    }

    pub(super) const fn deprecated(mut self, instead: &'static str) -> Self {
        self.effect = Effect::Deprecated(instead);
        self
    }

    /// A key that DeepSpeed refuses, known only to say where it belongs.
    pub(super) const fn refused(path: &'static str, does: &'static str, instead: &'static str) -> Self {
        let mut key = Self::new(path, KeyType::Opaque).does(does);
        key.effect = Effect::Refused(instead);
        key
    }

    pub(super) const fn of(mut self, types: &'static [&'static str]) -> Self {
        self.types = types;
        self
    }

    /// No part reads it yet, and nothing trained depends on it.
    pub(super) const fn unsupported(mut self) -> Self {
        self.support = Support::None;
        self
    }

    /// Only these values are built; `instead` says what to write for another.
    pub(super) const fn only(mut self, values: &'static [&'static str], instead: &'static str) -> Self {
        self.support = Support::Only { values, instead };
        self
    }
}
