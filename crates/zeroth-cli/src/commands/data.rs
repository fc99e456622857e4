//! `data preview`: shows rows as a model sees them.

use std::path::PathBuf;

use serde_json::{Value, json};
use zeroth::data::{Encoder, FirstRow, LengthBucket, RowLocation, Survey, TRAINED_MARKERS, preview, survey};
use zeroth::job::Reading;
use zeroth::model::{ModelConfig, locate, read_config};

use super::data_inputs;
use crate::cli::DataCommand;
use crate::exit::Exit;
use crate::output::{self, Colour, Output};

pub(super) fn run(command: &DataCommand, output: &Output) -> anyhow::Result<Exit> {
    let DataCommand::Preview(arguments) = command;
    let folder = locate(&arguments.model)?;
    let (map, origin) = read_config(&folder)?;
    let model = ModelConfig::from_map(&map, &origin)?;
    let reading = Reading::new(&arguments.reading.request(&arguments.pairs), &model, &folder)?;
    if let Some(note) = reading.note() {
        output::note(&format!("note: {note}"));
    }
    let encoder = reading.encoder()?;
    let options = reading.options(arguments.max_train_samples, false);
    let files = data_inputs::files(&arguments.data)?;
    let found = survey(&files, &encoder, &options, arguments.rows)?;
    if output.is_json() {
        output::json(&as_json(&found, &files))?;
    } else {
        let text = |ids: &[i32]| with_special(&encoder, ids);
        let green = output.around(Colour::Green);
        let marks = green.as_ref().map_or(TRAINED_MARKERS, |[before, after]| [before, after]);
        output::text(&preview(&found, &files, reading.max_length(), marks, &text));
    }
    Ok(if found.problems.count > 0 { Exit::Problems } else { Exit::Done })
}

/// Decodes tokens including special ones, whose labels matter most to readers.
fn with_special(encoder: &Encoder, ids: &[i32]) -> String {
    let runs = ids.chunk_by(|one, next| !encoder.is_special(*one) && !encoder.is_special(*next));
    let text = |run: &[i32]| match run {
        [id] if encoder.is_special(*id) => encoder.token_text(*id).unwrap_or_default(),
        _ => encoder.decode(run),
    };
    runs.map(text).collect()
}

fn as_json(found: &Survey, files: &[PathBuf]) -> Value {
    let place = |place: &RowLocation| data_inputs::place(place, files);
    let totals = &found.totals;
    let buckets = |buckets: &[LengthBucket]| -> Value {
        let bucket = |bucket: &LengthBucket| {
            json!({
                "from": bucket.from, "to": bucket.to, "rows": bucket.rows, "tokens": bucket.tokens,
                "trained_tokens": bucket.trained_tokens,
            })
        };
        buckets.iter().map(bucket).collect()
    };
    let first = |first: &FirstRow| {
        let mut row =
            json!({"place": place(&first.place), "input_ids": first.row.ids, "labels": first.row.labels});
        if let Some(pairs) = &found.pairs {
            row["decoder_input_ids"] = json!(pairs.start.inputs(&first.row.labels));
        }
        row
    };
    let mut json = json!({
        "rows": found.rows,
        "samples": totals.samples,
        "tokens": totals.tokens,
        "trained_tokens": totals.trained_tokens,
        "longest": totals.longest,
        "lengths": buckets(&found.lengths),
        "first": found.first.iter().map(first).collect::<Vec<_>>(),
        "problems": {
            "count": found.problems.count,
            "first": found.problems.first.iter().map(|problem| json!({
                "place": place(&problem.place), "message": problem.message,
            })).collect::<Vec<_>>(),
        },
        "too_long": {"count": found.too_long.count, "first": found.too_long.first.iter().map(place).collect::<Vec<_>>()},
        "untrained": {"count": found.untrained.count, "first": found.untrained.first.iter().map(place).collect::<Vec<_>>()},
    });
    if let Some(targets) = totals.targets {
        json["longest_target"] = targets.longest.into();
        json["truncated"] = totals.truncated.into();
        json["target_lengths"] = buckets(&found.target_lengths);
    }
    json
}
