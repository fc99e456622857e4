//! `/metrics`: the last values in Prometheus' text format.

use zeroth_base::escape_control_characters;

use crate::run::Run;

/// Curves by their names here: name, help, curve.
const GAUGES: [(&str, &str, &str); 9] = [
    ("zeroth_loss", "Training loss of the last step.", "loss"),
    ("zeroth_eval_loss", "Loss of the last evaluation.", "eval_loss"),
    ("zeroth_learning_rate", "Learning rate of the last step.", "lr"),
    ("zeroth_grad_norm", "Gradient norm of the last step, before clipping.", "grad_norm"),
    ("zeroth_tokens_per_second", "Throughput of the last step.", "tokens_per_second"),
    ("zeroth_mfu_ratio", "Model FLOPs utilisation of the last step.", "mfu"),
    ("zeroth_loss_scale", "Loss scale.", "loss_scale"),
    ("zeroth_device_peak_bytes", "Peak device memory of a rank.", "device_bytes_peak"),
    ("zeroth_host_peak_bytes", "Peak host memory of a rank.", "host_bytes_peak"),
];

const STATES: [&str; 10] = [
    "starting",
    "loading",
    "training",
    "evaluating",
    "saving",
    "stopped",
    "failed",
    "done",
    "lost",
    "unknown",
];

/// All runs.
pub(super) fn text(runs: &[Run]) -> String {
    let mut text = String::new();
    for (name, help, curve) in GAUGES {
        let values = runs.iter().filter_map(|run| Some((labels(run), run.last(curve)?)));
        family(&mut text, name, help, values);
    }
    family(
        &mut text,
        "zeroth_step",
        "Completed steps.",
        runs.iter().map(|run| (labels(run), run.step() as f64)),
    );
    let planned = runs.iter().filter(|run| run.steps() > 0);
    family(
        &mut text,
        "zeroth_steps",
        "Steps of the run.",
        planned.map(|run| (labels(run), run.steps() as f64)),
    );
    let garbage = runs.iter().map(|run| (labels(run), run.garbage() as f64));
    family(&mut text, "zeroth_unreadable_lines", "Lines of the run's files that could not be read.", garbage);
    let states = runs.iter().flat_map(|run| {
        let state = run.state();
        STATES.map(|name| {
            (
                format!("{},state=\"{name}\"", labels(run)),
                f64::from(u8::from(state.split(' ').next() == Some(name))),
            )
        })
    });
    family(&mut text, "zeroth_state", "1 for the state of the run.", states);
    let of_ranks = |value: fn(&crate::status::MonitoredRank) -> Option<f64>| {
        runs.iter().flat_map(move |run| {
            let ranks = run.ranks().into_iter();
            ranks.filter_map(move |rank| {
                Some((format!("{},rank=\"{}\"", labels(run), rank.rank), value(&rank)?))
            })
        })
    };
    let up = of_ranks(|rank| Some(f64::from(u8::from(rank.health == crate::status::Health::Running))));
    family(&mut text, "zeroth_rank_up", "1 for a rank that runs.", up);
    let age = of_ranks(|rank| rank.heartbeat_age);
    family(&mut text, "zeroth_rank_heartbeat_age_seconds", "Time since a rank's heartbeat moved.", age);
    let pss = of_ranks(|rank| rank.pss_bytes.map(|bytes| bytes as f64));
    family(&mut text, "zeroth_rank_pss_bytes", "Proportional set size of a rank.", pss);
    let gpu = of_ranks(|rank| rank.gpu_bytes.map(|bytes| bytes as f64));
    family(&mut text, "zeroth_rank_gpu_bytes", "Memory in use on a rank's GPU, by the driver.", gpu);
    let planned = runs.iter().flat_map(|run| {
        run.planned().into_iter().flat_map(move |tier| {
            let all = tier.categories.into_iter();
            all.map(move |(category, bytes)| {
                let labels =
                    format!("{},tier=\"{}\",category=\"{}\"", labels(run), tier.tier, escaped(&category));
                (labels, bytes as f64)
            })
        })
    });
    family(&mut text, "zeroth_planned_bytes", "Planned memory of a rank.", planned);
    text
}

fn family(text: &mut String, name: &str, help: &str, values: impl Iterator<Item = (String, f64)>) {
    let mut values = values.peekable();
    if values.peek().is_none() {
        return;
    }
    text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} gauge\n"));
    for (labels, value) in values {
        text.push_str(&format!("{name}{{{labels}}} {value}\n"));
    }
}

fn labels(run: &Run) -> String {
    format!("run=\"{}\",folder=\"{}\"", escaped(&run.name), escaped(&run.folder.display().to_string()))
}

/// A label's value: control characters, backslashes and quotes are escaped.
fn escaped(text: &str) -> String {
    escape_control_characters(text).replace('\\', "\\\\").replace('"', "\\\"")
}
