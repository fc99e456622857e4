//! `flops_profiler`: FLOPs and time of one step on one rank, per unit and op.
//!
//! DeepSpeed's modules map to: depth 0 the model, depth 1 its units (the embedding, each block, the head), depth 2
//! the ops of a unit. FLOPs are those of matmuls and attention, forward and backward, for actual tokens;
//! recomputation takes time but adds no FLOPs.

use std::path::PathBuf;

use zeroth_base::{counted, format_count, grouped};
use zeroth_config::resolve::Resolved;
use zeroth_engine::InstructionTime;
use zeroth_graph::{Graph, Op, Param, Rows, Value};
use zeroth_program::Action;
use zeroth_program::Compiled;

use super::flops::{pairs_of, scaled};

/// The config section `flops_profiler`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileSettings {
    /// The step to profile.
    pub step: u64,
    /// Depth of the table: 0 the model, 1 units, 2 ops.
    pub depth: u64,
    /// Entries per depth listed above the table.
    pub top: u64,
    /// Whether the table is printed.
    pub detailed: bool,
    /// Output file; `None` prints to the log.
    pub file: Option<PathBuf>,
}

impl ProfileSettings {
    /// Reads the settings; `None` if the profiler is disabled.
    pub fn from_config(resolved: &Resolved) -> Option<Self> {
        let profiler = &resolved.values.flops_profiler;
        profiler.enabled.then(|| Self {
            step: profiler.profile_step,
            // -1, which is no u64, means all levels.
            depth: profiler.module_depth.try_into().unwrap_or(2),
            top: profiler.top_modules,
            detailed: profiler.detailed,
            file: profiler.output_file.as_ref().filter(|path| !path.is_empty()).map(PathBuf::from),
        })
    }
}

/// A row of the table.
#[derive(Debug, Clone, Default, PartialEq)]
struct ProfileRow {
    name: String,
    parameters: u64,
    /// Forward and backward.
    flops: f64,
    forward: f64,
    backward: f64,
}

impl ProfileRow {
    fn seconds(&self) -> f64 {
        self.forward + self.backward
    }

    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.flops += other.flops;
        self.forward += other.forward;
        self.backward += other.backward;
    }
}

/// Profiles a step from the times of its instructions on this rank, whose sequences had these `lengths`, in a step of
/// `step_ms`.
pub fn profile(
    compiled: &Compiled,
    settings: &ProfileSettings,
    times: &[InstructionTime],
    lengths: &[Vec<u64>; 2],
    step_ms: f64,
) -> String {
    let graph = &compiled.graph;
    let ops = ops(compiled, times, lengths);
    let sum = |name: &str, rows: &[ProfileRow]| {
        let mut all = ProfileRow { name: name.to_owned(), ..ProfileRow::default() };
        for row in rows {
            all.add(row);
        }
        all
    };
    // A tied head shows the embedding's weights at its op, but the model counts them once.
    let of_unit = |unit: usize| {
        let params = graph.units[unit].params.iter().map(|id| graph.param(*id));
        ProfileRow {
            parameters: params.map(Param::elements).sum(),
            ..sum(&graph.units[unit].name, &ops[unit])
        }
    };
    let units: Vec<ProfileRow> = (0..graph.units.len()).map(of_unit).collect();
    let model = sum("model", &units);
    let on_gpu = !compiled.target.is_host();

    let tokens: u64 = lengths.iter().flatten().sum();
    let mut text = format!(
        "flops profile of step {} on one rank: {}, {} in {step_ms:.1} ms, {}\n",
        settings.step,
        counted(tokens, "token"),
        scaled(model.flops, "FLOP"),
        scaled(model.flops / (step_ms / 1e3), "FLOP/s"),
    );
    if on_gpu {
        text += "times are host times for enqueueing work, not GPU execution times\n";
    }
    if settings.depth >= 1 {
        text += &top("units", &units, settings.top);
    }
    if settings.depth >= 2 {
        text += &top("ops", &by_name(graph, &ops), settings.top);
    }
    if settings.detailed {
        let mut rows = vec![model.clone()];
        for (unit, ops) in units.into_iter().zip(ops) {
            if settings.depth >= 1 {
                rows.push(ProfileRow { name: format!("  {}", unit.name), ..unit });
            }
            if settings.depth >= 2 {
                rows.extend(ops.into_iter().map(|op| ProfileRow { name: format!("    {}", op.name), ..op }));
            }
        }
        text += &table(&rows, &model, on_gpu);
    }
    text
}

/// The ops of each unit, in execution order.
fn ops(compiled: &Compiled, times: &[InstructionTime], lengths: &[Vec<u64>; 2]) -> Vec<Vec<ProfileRow>> {
    let graph = &compiled.graph;
    let mut nodes: Vec<ProfileRow> = (0..graph.nodes.len()).map(|node| row(graph, node, lengths)).collect();
    for timed in times {
        let section = &compiled.program.sections[timed.section];
        if !section.is_micro_batch() {
            continue;
        }
        match section.instructions[timed.instruction].action {
            Action::Forward(node) => nodes[node].forward += timed.seconds,
            Action::Recompute { node, .. } => nodes[node].backward += timed.seconds,
            Action::Backward(node) => nodes[compiled.backward.nodes[node].of].backward += timed.seconds,
            _ => {}
        }
    }
    let mut units = vec![Vec::new(); graph.units.len()];
    for (row, node) in nodes.into_iter().zip(&graph.nodes) {
        units[node.unit.index()].push(row);
    }
    units
}

fn row(graph: &Graph, node: usize, lengths: &[Vec<u64>; 2]) -> ProfileRow {
    let node = &graph.nodes[node];
    // The sequences of a value's rows.
    let of = |value: Value| match graph.info(value).rows {
        Rows::Stream(stream) | Rows::Times(stream, _) => lengths.get(stream).map_or(&[][..], Vec::as_slice),
        Rows::Fixed(_) => &[],
    };
    let params = || node.params.iter().map(|id| graph.param(*id));
    let forward = match node.op {
        op if matches!(op, Op::Linear | Op::LinearAdd { .. })
            || op.loss().is_some_and(|loss| loss.head.is_some()) =>
        {
            let weight = params().next().map_or(0, Param::elements);
            2.0 * weight as f64 * of(node.inputs[0]).iter().sum::<u64>() as f64
        }
        Op::Attention(spec) => {
            let width = graph.info(node.inputs[0]).width as f64;
            let pairs = |(queries, keys): (&u64, &u64)| {
                if spec.causal { pairs_of(*queries, spec.window) } else { *queries as f64 * *keys as f64 }
            };
            4.0 * width * of(node.inputs[0]).iter().zip(of(node.inputs[1])).map(pairs).sum::<f64>()
        }
        _ => 0.0,
    };
    // The module name distinguishes several linears.
    let module = params().next().and_then(|param| param.spec.name.rsplit('.').nth(1));
    ProfileRow {
        name: module
            .map_or_else(|| node.op.name().to_owned(), |module| format!("{} {module}", node.op.name())),
        parameters: params().map(Param::elements).sum(),
        flops: 3.0 * forward,
        ..ProfileRow::default()
    }
}

/// All ops, grouped by kind.
fn by_name(graph: &Graph, ops: &[Vec<ProfileRow>]) -> Vec<ProfileRow> {
    let mut rows: Vec<ProfileRow> = Vec::new();
    let mut next: Vec<_> = ops.iter().map(|ops| ops.iter()).collect();
    for node in &graph.nodes {
        let Some(op) = next[node.unit.index()].next() else { continue };
        match rows.iter_mut().find(|row| row.name == node.op.name()) {
            Some(row) => row.add(op),
            None => rows.push(ProfileRow { name: node.op.name().to_owned(), ..op.clone() }),
        }
    }
    rows
}

fn top(what: &str, rows: &[ProfileRow], count: u64) -> String {
    let largest = |value: &dyn Fn(&ProfileRow) -> f64, text: &dyn Fn(&ProfileRow) -> String| {
        let mut sorted: Vec<&ProfileRow> = rows.iter().filter(|row| value(row) > 0.0).collect();
        // Stable, so ties keep their order.
        sorted.sort_by(|a, b| value(b).total_cmp(&value(a)));
        let named = sorted.iter().take(count as usize).map(|row| format!("{} {}", row.name, text(row)));
        named.collect::<Vec<_>>().join(", ")
    };
    let lines = [
        ("parameters", largest(&|row| row.parameters as f64, &|row| format_count(row.parameters))),
        ("operations", largest(&|row| row.flops, &|row| scaled(row.flops, "FLOP"))),
        ("time", largest(&ProfileRow::seconds, &|row| format!("{:.1} ms", 1e3 * row.seconds()))),
    ];
    let lines = lines.iter().filter(|(_, named)| !named.is_empty());
    lines.map(|(by, named)| format!("top {what} by {by}: {named}\n")).collect::<Vec<_>>().concat()
}

/// On a GPU, times are those of enqueueing, so the table shows the share of FLOPs instead of rates.
fn table(rows: &[ProfileRow], model: &ProfileRow, on_gpu: bool) -> String {
    let share =
        |part: f64, of: f64| if of > 0.0 { format!("{:.1}%", 100.0 * part / of) } else { String::new() };
    let head = ["unit or op", "parameters", "FLOP", "forward ms", "backward ms"].map(str::to_owned);
    let last = if on_gpu { vec!["share of FLOP"] } else { vec!["FLOP/s", "share of time"] };
    let mut cells = vec![[&head[..], &last.iter().map(ToString::to_string).collect::<Vec<_>>()].concat()];
    for row in rows {
        let rate = if row.flops > 0.0 && row.seconds() > 0.0 {
            scaled(row.flops / row.seconds(), "")
        } else {
            String::new()
        };
        let mut line = vec![
            row.name.clone(),
            grouped(row.parameters),
            if row.flops > 0.0 { scaled(row.flops, "").trim_end().to_owned() } else { String::new() },
            format!("{:.3}", 1e3 * row.forward),
            format!("{:.3}", 1e3 * row.backward),
        ];
        if on_gpu {
            line.push(share(row.flops, model.flops));
        } else {
            line.extend([rate.trim_end().to_owned(), share(row.seconds(), model.seconds())]);
        }
        cells.push(line);
    }
    let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..cells[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let name = format!("{:<width$}", row[0], width = widths[0]);
        let figures = row.iter().zip(&widths).skip(1).map(|(cell, width)| format!("  {cell:>width$}"));
        format!("{}\n", (name + &figures.collect::<String>()).trim_end())
    };
    cells.iter().map(line).collect()
}
