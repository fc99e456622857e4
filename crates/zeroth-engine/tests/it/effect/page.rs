//! The page docs/keys.md: a table for each key, and where order is the effect the instructions themselves.

use serde_json::{Value, json};
use zeroth_base::{format_bytes, grouped};
use zeroth_config::docs::wrap;
use zeroth_kernel::{Queue, Tier};
use zeroth_program::{Action, Chunk, Instruction};

use super::Compiled;
use super::Key;

/// Lines of a timeline.
const LINES: usize = 12;

/// The part of the page about keys.
pub(crate) fn keys_page(keys: &[Key]) -> String {
    keys.iter().map(section).collect()
}

fn section(key: &Key) -> String {
    let compiled = key.compiled();
    let ranks = if key.ranks == 1 { "one rank".to_owned() } else { format!("{} ranks", key.ranks) };
    let shows = wrap(&format!("{} On {ranks}, with `{}`:", key.shows, without_braces(key.base)), "");
    let mut text = format!("\n## `{}`\n\n{shows}\n\n", key.path);
    let names: Vec<&str> = key.figures.iter().map(|figure| figure.name).collect();
    text += &format!("| setting | {} |\n|---|{}\n", names.join(" | "), "--:|".repeat(names.len()));
    for (setting, compiled) in key.settings.iter().zip(&compiled) {
        let figure = |figure: &super::Figure| {
            let found = compiled.get(*figure);
            if figure.is_bytes { format_bytes(found) } else { grouped(found) }
        };
        let figures: Vec<String> = key.figures.iter().map(figure).collect();
        text += &format!("| `{setting}` | {} |\n", figures.join(" | "));
    }
    if let Some(from) = key.timeline {
        for (setting, compiled) in key.settings.iter().zip(&compiled) {
            text += &format!(
                "\nWith `{setting}`, from the first {from}:\n\n```text\n{}```\n",
                timeline(compiled, from)
            );
        }
    }
    text
}

/// What is inside a JSON object's braces.
fn without_braces(text: &str) -> &str {
    text.trim().trim_start_matches('{').strip_suffix('}').unwrap_or(text)
}

/// The instructions from the first of a kind on, a column for each queue; operations in a row are one line.
fn timeline(compiled: &Compiled, from: &str) -> String {
    let is_first = |instruction: &Instruction| instruction.action.name() == from;
    let sections = &compiled.program.sections;
    let section = sections.iter().find(|section| section.instructions.iter().any(is_first)).unwrap();
    let first = section.instructions.iter().position(is_first).unwrap();
    let mut lines: Vec<(Queue, String)> = Vec::new();
    let mut row: Option<(&str, usize, usize)> = None;
    for instruction in &section.instructions[first..] {
        let name = instruction.action.name();
        if let Action::Forward(node) | Action::Backward(node) | Action::Recompute { node, .. } =
            instruction.action
        {
            let begun = row.filter(|(other, ..)| *other == name).map(|(_, begun, _)| begun);
            if begun.is_some() {
                lines.pop();
            }
            let begun = begun.unwrap_or(node);
            row = Some((name, begun, node));
            let text =
                if begun == node { format!("{name} {node}") } else { format!("{name} {begun} to {node}") };
            lines.push((instruction.queue, text));
        } else {
            row = None;
            lines.push((instruction.queue, in_words(&instruction.action)));
        }
        if lines.len() > LINES {
            lines.pop();
            break;
        }
    }
    let mut queues: Vec<Queue> = lines.iter().map(|(queue, _)| *queue).collect();
    queues.sort_unstable();
    queues.dedup();
    let columns = |cells: Vec<String>| {
        let padded: Vec<String> = cells.iter().map(|cell| format!("{cell:<26}")).collect();
        format!("{}\n", padded.concat().trim_end())
    };
    let head = columns(queues.iter().map(|queue| format!("{queue:?}").to_lowercase()).collect());
    let line = |(of, text): &(Queue, String)| {
        let cell = |queue: &Queue| if queue == of { text.clone() } else { String::new() };
        columns(queues.iter().map(cell).collect())
    };
    head + &lines.iter().map(line).collect::<String>()
}

fn in_words(action: &Action) -> String {
    let chunk = |chunk: &Chunk| format!("{} {}", chunk.flat, grouped(chunk.range.start));
    let about = match action {
        Action::PackGrad(of)
        | Action::CastAndPackGrad(of)
        | Action::AllToAll(of, _)
        | Action::SumRanks(of, ..)
        | Action::ReduceScatter(of, ..)
        | Action::OffloadGrad(of, _)
        | Action::StageShard(of)
        | Action::UploadShard(of)
        | Action::Update(of)
        | Action::WriteBack(of)
        | Action::AllGatherWeights(of, _) => chunk(of),
        Action::BroadcastWeights { flat, root, .. } => format!("{flat} of rank {root}"),
        Action::OffloadActivation(value) | Action::ReloadActivation(value) => format!("value {value}"),
        other => other.flat().map(|flat| flat.to_string()).unwrap_or_default(),
    };
    format!("{} {about}", action.name()).trim_end().to_owned()
}

/// The part of the page with every stage, offload and number of ranks.
pub(crate) fn memory_table() -> String {
    let categories = ["parameters", "gradients", "optimizer", "activations", "buffers", "total"];
    let heads: Vec<String> =
        ["device", "host"].iter().flat_map(|tier| categories.map(|name| format!("{tier}: {name}"))).collect();
    let mut text = format!(
        "| stage | offload | ranks | {} |\n|--:|---|--:|{}\n",
        heads.join(" | "),
        "--:|".repeat(heads.len())
    );
    for stage in 0..4 {
        for offload in ["none", "optimizer", "both"] {
            for ranks in [1, 2, 4] {
                let compiled = Compiled::new(&offloaded(stage, offload).to_string(), ranks);
                let cells = [Tier::Device, Tier::Host].map(|tier| {
                    let bytes = compiled.memory.by_category(tier);
                    let all = [
                        bytes.parameters,
                        bytes.gradients,
                        bytes.optimizer,
                        bytes.activations,
                        bytes.buffers,
                        bytes.total,
                    ];
                    all.map(format_bytes).join(" | ")
                });
                text += &format!("| {stage} | {offload} | {ranks} | {} |\n", cells.join(" | "));
            }
        }
    }
    text
}

/// A config of a stage with this offloaded.
pub(crate) fn offloaded(stage: u8, offload: &str) -> Value {
    let device = |is_away: bool| json!({"device": if is_away { "cpu" } else { "none" }});
    json!({"zero_optimization": {
        "stage": stage, "overlap_comm": false, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "sub_group_size": 1e6,
        "offload_optimizer": device(offload != "none"), "offload_param": device(offload == "both"),
    }})
}
