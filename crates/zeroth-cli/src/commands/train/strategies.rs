//! When a run evaluates, saves and logs, and what it does with its best evaluation.

use serde_json::{Value, json};
use zeroth::job::{DEFAULT_STEPS, Every, LOGGING_STEPS, StepCount, StrategyRequest};
use zeroth::train::{BestMetric, BestPolicy, Interval};

use crate::cli::TrainArgs;
use crate::evaluation_args::{EvaluationArgs, MetricArg, SaveStrategyArg, StrategyArg};

/// When the run shall evaluate, save and log.
pub(crate) fn request(arguments: &TrainArgs) -> StrategyRequest {
    let EvaluationArgs { eval_strategy, save_strategy, logging_strategy, .. } = arguments.evaluation;
    let steps = |typed: Option<StepCount>, default| Every::Steps(typed.unwrap_or(StepCount::Count(default)));
    let every = |strategy: Option<StrategyArg>, typed, default| match strategy {
        Some(StrategyArg::No) => Every::Never,
        Some(StrategyArg::Epoch) => Every::Epoch,
        Some(StrategyArg::Steps) | None => steps(typed, default),
    };
    StrategyRequest {
        evaluation: every(eval_strategy, arguments.eval_steps, DEFAULT_STEPS),
        saving: match save_strategy {
            Some(SaveStrategyArg::No | SaveStrategyArg::Best) => Every::Never,
            Some(SaveStrategyArg::Epoch) => Every::Epoch,
            Some(SaveStrategyArg::Steps) | None => steps(arguments.save_steps, DEFAULT_STEPS),
        },
        saves_best: save_strategy == Some(SaveStrategyArg::Best),
        logging: every(logging_strategy, arguments.logging_steps, LOGGING_STEPS),
        best: best_policy(arguments),
    }
}

/// An interval as the ranks compare it.
pub(super) fn interval_json(interval: Interval) -> Value {
    match interval {
        Interval::Never => json!("no"),
        Interval::Steps(steps) => json!(steps),
        Interval::Epoch => json!("epoch"),
    }
}

/// Whether the run evaluates at all.
pub(crate) fn evaluates(arguments: &TrainArgs) -> bool {
    has_evaluation_data(arguments) && arguments.evaluation.eval_strategy != Some(StrategyArg::No)
}

fn has_evaluation_data(arguments: &TrainArgs) -> bool {
    !arguments.eval_data.is_empty() || arguments.evaluation.split_ratio().is_some()
}

/// How evaluations are compared, if a flag asks for it.
fn best_policy(arguments: &TrainArgs) -> Option<BestPolicy> {
    let EvaluationArgs {
        save_strategy,
        load_best_model_at_end,
        metric_for_best_model,
        greater_is_better,
        early_stopping_patience,
        early_stopping_threshold,
        ..
    } = arguments.evaluation;
    let is_wanted = load_best_model_at_end
        || metric_for_best_model.is_some()
        || greater_is_better.is_some()
        || early_stopping_patience.is_some()
        || save_strategy == Some(SaveStrategyArg::Best);
    is_wanted.then(|| BestPolicy {
        metric: metric_for_best_model.map_or(BestMetric::EvalLoss, MetricArg::metric),
        greater_is_better: greater_is_better.unwrap_or(false),
        load_at_end: load_best_model_at_end,
        patience: early_stopping_patience,
        threshold: early_stopping_threshold.unwrap_or(0.0),
    })
}

/// Refuses flags that contradict each other, all at once.
pub(crate) fn check(arguments: &TrainArgs) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    without_evaluations(arguments, &mut wrong);
    best_model(arguments, &mut wrong);
    let flags = &arguments.evaluation;
    if flags.split_ratio().is_some() && !arguments.eval_data.is_empty() {
        wrong.push(
            "--split-dataset-ratio and --eval-data both give evaluation data: leave one of them out"
                .to_owned(),
        );
    }
    if flags.early_stopping_threshold.is_some() && flags.early_stopping_patience.is_none() {
        wrong.push(
            "--early-stopping-threshold has no effect without --early-stopping-patience: give both"
                .to_owned(),
        );
    }
    if flags.save_only_model && arguments.max_restarts > 0 {
        wrong.push(format!(
            "--max-restarts {} needs checkpoints to restart from, and those of --save-only-model have no optimizer \
             state: leave one of them out",
            arguments.max_restarts
        ));
    }
    match wrong.as_slice() {
        [] => Ok(()),
        [one] => anyhow::bail!("{one}"),
        several => anyhow::bail!("flags contradict each other:\n  {}", several.join("\n  ")),
    }
}

/// Notes flags that have no effect with the others: Hugging Face's Trainer ignores them, and many scripts have them.
pub(crate) fn idle_flags(arguments: &TrainArgs) -> Vec<String> {
    let EvaluationArgs { eval_strategy, save_strategy, logging_strategy, .. } = arguments.evaluation;
    let word = |strategy: StrategyArg| match strategy {
        StrategyArg::No => Some("no"),
        StrategyArg::Epoch => Some("epoch"),
        StrategyArg::Steps => None,
    };
    let saving = save_strategy.and_then(|strategy| match strategy {
        SaveStrategyArg::No => Some("no"),
        SaveStrategyArg::Epoch => Some("epoch"),
        SaveStrategyArg::Best => Some("best"),
        SaveStrategyArg::Steps => None,
    });
    let mut notes = Vec::new();
    for (name, strategy, steps) in [
        ("eval", eval_strategy.and_then(word), arguments.eval_steps),
        ("save", saving, arguments.save_steps),
        ("logging", logging_strategy.and_then(word), arguments.logging_steps),
    ] {
        if let (Some(strategy), Some(_)) = (strategy, steps) {
            notes.push(format!(
                "--{name}-steps has no effect: --{name}-strategy {strategy} does not count steps"
            ));
        }
    }
    if !evaluates(arguments) {
        let is_off = eval_strategy == Some(StrategyArg::No);
        let why = if is_off {
            "--eval-strategy is no"
        } else {
            "there is no evaluation data (--eval-data, --split-dataset-ratio)"
        };
        if arguments.eval_steps.is_some() && !is_off {
            notes.push(format!("--eval-steps has no effect: {why}"));
        }
        if arguments.evaluation.per_device_eval_batch_size.is_some() {
            notes.push(format!("--per-device-eval-batch-size has no effect: {why}"));
        }
    }
    notes
}

/// Flags about evaluations in a run that has none.
fn without_evaluations(arguments: &TrainArgs, wrong: &mut Vec<String>) {
    if evaluates(arguments) {
        return;
    }
    let flags = &arguments.evaluation;
    let is_off = flags.eval_strategy == Some(StrategyArg::No);
    let asks = [
        ("--eval-strategy", flags.eval_strategy.is_some() && !is_off),
        ("--load-best-model-at-end", flags.load_best_model_at_end),
        ("--metric-for-best-model", flags.metric_for_best_model.is_some()),
        ("--greater-is-better", flags.greater_is_better.is_some()),
        ("--early-stopping-patience", flags.early_stopping_patience.is_some()),
        ("--save-strategy best", flags.save_strategy == Some(SaveStrategyArg::Best)),
        ("--split-dataset-ratio", flags.split_ratio().is_some()),
    ];
    let asking: Vec<&str> = asks.into_iter().filter(|(_, asks)| *asks).map(|(flag, _)| flag).collect();
    if asking.is_empty() {
        return;
    }
    let (flags, needs) = (asking.join(", "), if asking.len() == 1 { "needs" } else { "need" });
    wrong.push(if is_off {
        format!("{flags} {needs} evaluations, but --eval-strategy is no: give steps or epoch, or leave the others out")
    } else {
        format!("{flags} {needs} evaluation data: give --eval-data FILE, or --split-dataset-ratio to hold rows of --data out")
    });
}

/// Hugging Face's rule: the best model is one of the checkpoints, so that each has to have been evaluated.
fn best_model(arguments: &TrainArgs, wrong: &mut Vec<String>) {
    let flags = &arguments.evaluation;
    let saving = match flags.save_strategy.unwrap_or(SaveStrategyArg::Steps) {
        SaveStrategyArg::Best => return,
        SaveStrategyArg::No => StrategyArg::No,
        SaveStrategyArg::Steps => StrategyArg::Steps,
        SaveStrategyArg::Epoch => StrategyArg::Epoch,
    };
    if !flags.load_best_model_at_end || !evaluates(arguments) {
        return;
    }
    let evaluating = flags.eval_strategy.unwrap_or(StrategyArg::Steps);
    if saving != evaluating {
        let word = |strategy| match strategy {
            StrategyArg::No => "no",
            StrategyArg::Steps => "steps",
            StrategyArg::Epoch => "epoch",
        };
        wrong.push(format!(
            "--load-best-model-at-end takes the model from a checkpoint that was evaluated: --save-strategy {} and \
             --eval-strategy {} must be the same, or --save-strategy best",
            word(saving),
            word(evaluating)
        ));
        return;
    }
    let default = StepCount::Count(DEFAULT_STEPS);
    let [save, eval] = [arguments.save_steps, arguments.eval_steps].map(|steps| steps.unwrap_or(default));
    let is_multiple = match (save, eval) {
        (StepCount::Count(save), StepCount::Count(eval)) => save > 0 && save.is_multiple_of(eval),
        (StepCount::Share(save), StepCount::Share(eval)) => {
            let times = save / eval;
            times > 0.5 && (times - times.round()).abs() < 1e-6
        }
        _ => false,
    };
    if saving == StrategyArg::Steps && !is_multiple {
        let origin = |typed: Option<StepCount>| if typed.is_none() { " (the default)" } else { "" };
        wrong.push(format!(
            "--load-best-model-at-end takes the model from a checkpoint that was evaluated: --save-steps {save}{} must be a \
             multiple of --eval-steps {eval}{}",
            origin(arguments.save_steps),
            origin(arguments.eval_steps)
        ));
    }
}
