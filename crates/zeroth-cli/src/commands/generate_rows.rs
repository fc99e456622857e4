//! `generate --data`: answers rows with a model and compares them with the expected answers.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};
use zeroth::base::{counted, grouped, was};
use zeroth::data::{EvalRow, eval_rows};
use zeroth::train::{End, Generated, Generation};

use super::data_inputs;
use super::generate_setup::{GenerateSetup, end_name};
use crate::exit::Exit;
use crate::generate_flags::GenerateArgs;
use crate::output::{self, Colour, Output};
use crate::terminal::Meter;

/// Maximum characters of a prompt or answer shown.
const SHOWN: usize = 200;
/// Default number of rows shown.
const ROWS: usize = 5;

/// A row with its answer.
struct Answer {
    row: EvalRow,
    generated: Generated,
    is_exact: bool,
}

pub(super) fn answer(
    setup: &GenerateSetup,
    arguments: &GenerateArgs,
    output: &Output,
) -> anyhow::Result<Exit> {
    let files = data_inputs::files(&arguments.prompt.data)?;
    let rows = eval_rows(&files, &setup.encoder, arguments.rows.max_eval_samples)?;
    let truncated: Vec<&EvalRow> = rows.iter().filter(|row| row.truncated > 0).collect();
    if let Some(longest) = truncated.iter().map(|row| row.prompt.len() + row.truncated).max() {
        let rows = truncated.len() as u64;
        output::note(&format!(
            "note: the {} of {} {} truncated to --max-source-length: the longest has {}",
            if rows == 1 { "source" } else { "sources" },
            counted(rows, "row"),
            was(rows),
            counted(longest as u64, "token")
        ));
    }
    let longest = rows.iter().map(|row| row.expected.len() as u64).max().unwrap_or(0);
    let max_new_tokens = arguments.max_new_tokens.unwrap_or(longest);
    let beyond = rows.iter().filter(|row| row.expected.len() as u64 > max_new_tokens).count() as u64;
    if beyond > 0 {
        output::note(&format!(
            "note: --max-new-tokens {max_new_tokens} is too small for the expected answers of {}: the longest has {}",
            counted(beyond, "row"),
            counted(longest, "token")
        ));
    }
    let prompts: Vec<Vec<i32>> = rows.iter().map(|row| row.prompt.clone()).collect();
    let compiled = setup.compile_batch(&prompts, max_new_tokens)?;
    let Some(mut generator) = setup.start(&compiled)? else { return Ok(Exit::DoesNotFit) };
    let generation = Generation {
        max_new_tokens,
        temperature: 0.0,
        top_k: None,
        top_p: None,
        min_p: None,
        repetition_penalty: 1.0,
        seed: 0,
        stops: setup.stops.clone(),
    };

    let mut meter = Meter::new("answering");
    let begun = Instant::now();
    let mut generated: Vec<Option<Generated>> = vec![None; rows.len()];
    let mut done = 0;
    let each = &mut |_, _| ControlFlow::Continue(());
    setup.continue_batch(&mut generator, &prompts, &generation, each, &mut |place, text| {
        generated[place] = Some(text);
        done += 1;
        meter.tell(done, prompts.len() as u64, || Some(format!("{} rows", grouped(done))));
    })?;
    drop(meter);
    let seconds = begun.elapsed().as_secs_f64();
    let answers: Vec<Answer> = rows
        .into_iter()
        .zip(generated.into_iter().flatten())
        .map(|(row, generated)| {
            let is_exact = is_exact(setup, &row, &generated);
            Answer { row, generated, is_exact }
        })
        .collect();
    let exact = answers.iter().filter(|answer| answer.is_exact).count();
    if output.is_json() {
        output::json(&as_json(setup, &files, &answers, exact))?;
        return Ok(Exit::Done);
    }
    for answer in answers.iter().take(arguments.rows.rows.unwrap_or(ROWS)) {
        output::text(&shown(setup, answer, output));
    }
    let share = 100.0 * exact as f64 / answers.len() as f64;
    let [found, all] = [exact, answers.len()].map(|count| grouped(count as u64));
    output::text(&output.bold(&format!("exact match {found}/{all} ({share:.1} %)")));
    output::text("\n");
    let tokens: usize = answers.iter().map(|answer| answer.generated.ids.len()).sum();
    output::note(&format!("{} in {seconds:.1} s", counted(tokens as u64, "token")));
    Ok(Exit::Done)
}

/// Whether the answer matches, as text or, without a tokenizer, as tokens.
fn is_exact(setup: &GenerateSetup, row: &EvalRow, generated: &Generated) -> bool {
    let expected = setup.without_stop(&row.expected);
    let answer = match generated.end {
        End::Stop(_) => setup.without_stop(&generated.ids),
        // A row without an end token does not say where the model should stop.
        _ if expected.len() == row.expected.len() => {
            &generated.ids[..expected.len().min(generated.ids.len())]
        }
        _ => return false,
    };
    answer == expected || setup.text(answer).is_some_and(|text| Some(text) == setup.text(expected))
}

/// Formats a row: prompt, answer and expected answer.
fn shown(setup: &GenerateSetup, answer: &Answer, output: &Output) -> String {
    let mark = if answer.is_exact {
        output.coloured(Colour::Green, "✓")
    } else {
        output.coloured(Colour::Red, "✗")
    };
    let text = |ids: &[i32]| shortened(&setup.encoder.decode(setup.without_stop(ids)));
    format!(
        "{mark} {}\n  answer    {}\n  expected  {}\n",
        text(&answer.row.prompt),
        text(&answer.generated.ids),
        text(&answer.row.expected)
    )
}

/// A text on one line, truncated to [`SHOWN`] characters.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn as_json(setup: &GenerateSetup, files: &[PathBuf], answers: &[Answer], exact: usize) -> Value {
    let one = |answer: &Answer| {
        let Answer { row, generated, is_exact } = answer;
        json!({
            "place": data_inputs::place(&row.place, files),
            "prompt_ids": row.prompt,
            "prompt": setup.text(&row.prompt),
            "ids": generated.ids,
            "text": setup.text(&generated.ids),
            "end": end_name(generated.end),
            "expected_ids": row.expected,
            "expected": setup.text(&row.expected),
            "exact_match": is_exact,
        })
    };
    json!({
        "answers": answers.iter().map(one).collect::<Vec<_>>(),
        "rows": answers.len(),
        "exact_matches": exact,
        "exact_match": exact as f64 / answers.len() as f64,
    })
}
