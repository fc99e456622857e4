//! The values of a config file by canonical path, each with its location.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::read::Location;
use crate::schema;
use crate::view::{Lookup, Switch};

/// One value of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct FileValue {
    /// The value in its key's type; `"auto"` stays that word.
    pub value: Value,
    /// The path as the file spells it.
    pub spelled: String,
    /// The location of its key.
    pub location: Location,
}

/// All values of a file, by canonical path.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FileValues {
    values: BTreeMap<&'static str, FileValue>,
    sections: BTreeSet<&'static str>,
}

impl FileValues {
    /// The value at a canonical path.
    pub fn get(&self, path: &str) -> Option<&FileValue> {
        self.values.get(path)
    }

    /// All values in the order of their paths.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &FileValue)> {
        self.values.iter().map(|(path, value)| (*path, value))
    }

    /// Whether the file has this section, empty or not.
    pub fn has_section(&self, section: &str) -> bool {
        self.sections.contains(section)
    }

    pub(crate) fn insert_section(&mut self, section: &'static str) {
        self.sections.insert(section);
    }

    pub(crate) fn insert(&mut self, path: &'static str, value: FileValue) -> Option<FileValue> {
        self.values.insert(path, value)
    }

    pub(crate) fn remove(&mut self, path: &str) {
        self.values.remove(path);
    }
}

impl Lookup for FileValues {
    fn value(&self, path: &str) -> Option<&Value> {
        debug_assert!(schema::has(path), "no key of the schema is called {path}");
        self.get(path).map(|found| &found.value)
    }

    fn has_section(&self, section: &str) -> bool {
        self.has_section(section)
    }

    fn absent_switch(&self, path: &str) -> Switch {
        schema::absent_switch(path)
    }
}
