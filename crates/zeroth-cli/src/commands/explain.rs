//! `config explain`: explains one key, or all keys with a name.

use serde_json::{Value, json};
use zeroth::config::explain;
use zeroth::config::schema::{self, Key};

use crate::exit::Exit;
use crate::output::{self, Output};

pub(super) fn run(name: &str, output: &Output) -> anyhow::Result<Exit> {
    let keys = explain::find(name)?;
    if output.is_json() {
        let keys: Vec<Value> = keys.into_iter().map(entry).collect();
        output::json(&json!({"keys": keys}))?;
    } else {
        let texts: Vec<String> = keys.into_iter().map(explain::text).collect();
        output::text(&texts.join("\n"));
    }
    Ok(Exit::Done)
}

fn entry(key: &Key) -> Value {
    json!({
        "path": key.path,
        "also": schema::spellings(key).skip(1).collect::<Vec<_>>(),
        "does": key.does,
        "holds": explain::holds(key),
        "default": key.default.to_json(),
        "default_in_words": explain::default(key),
        "unit": key.unit,
        "set_it_to": key.set,
        "auto": key.auto.map(explain::auto),
        "read_by": key.reader.name(),
        "here": explain::here(key),
        "types": key.types,
    })
}
