//! `config check`: a verdict on every key of a file.
//!
//! Three steps: `walk` matches the file's keys against the schema and reads their values; `verdict` decides the
//! effect of each, given the others; `rules` finds values that contradict each other.

mod coerce;
mod finding;
mod rules;
mod unknown;
mod verdict;
mod walk;

use crate::file_values::FileValues;
use crate::read::Document;
use crate::schema::KeyType;
use crate::view::ConfigView;

pub use verdict::{KeyStatus, Severity, Verdict};
pub(crate) use verdict::{effect, unsupported_switch};

/// The verdicts on a file, and its values.
#[derive(Debug, Clone)]
pub struct CheckReport {
    /// One verdict for every key, in file order.
    pub verdicts: Vec<Verdict>,
    /// The values of well-formed keys.
    pub values: FileValues,
}

impl CheckReport {
    /// The verdicts of at least this severity.
    pub fn at_least(&self, severity: Severity) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(move |verdict| verdict.severity() >= severity)
    }

    /// Whether the file has no errors; with `strict`, no warnings either.
    pub fn is_ok(&self, strict: bool) -> bool {
        self.at_least(if strict { Severity::Warning } else { Severity::Error }).next().is_none()
    }

    /// The verdicts on keys proper, without those on sections.
    pub fn of_keys(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter().filter(|verdict| verdict.key.is_none_or(|key| key.kind != KeyType::Section))
    }

    /// How many keys have this status, sections not counted.
    pub fn count(&self, status: KeyStatus) -> usize {
        self.of_keys().filter(|verdict| verdict.status == status).count()
    }
}

/// Checks every key of a file.
pub fn check(document: &Document) -> CheckReport {
    let (findings, values) = walk::walk(document);
    let view = ConfigView::new(&values);
    let mut verdicts: Vec<Verdict> =
        findings.into_iter().map(|finding| verdict::decide(finding, view)).collect();
    rules::apply(view, &mut verdicts);
    CheckReport { verdicts, values }
}
