//! Running ahead: steps enqueued before the previous one is read back give the same run.

use std::cell::Cell;
use std::path::Path;

use zeroth_cpu::{CpuDevice, CpuTarget};
use zeroth_train::{
    CheckpointOptions, ControlRequest, Interval, Job, StepMetrics, TrainEvent, TrainHooks, TrainOptions,
    train,
};

use crate::small_job::{STEPS, job};

/// The events of a run: steps without their times, evaluations, checkpoints, and whether it stopped early.
#[derive(Debug, Default, PartialEq)]
struct History {
    steps: Vec<StepMetrics>,
    evaluations: Vec<(u64, f64)>,
    saved: Vec<u64>,
    timelines: Vec<u64>,
    stopped: bool,
}

/// Trains, with a control request at the n-th poll.
fn run(job: &Job, folder: &Path, run_ahead: bool, request: Option<(u64, ControlRequest)>) -> History {
    let compiled = job.compile(&CpuTarget { threads: 1 }).unwrap();
    let arenas = compiled.memory.arenas();
    let device = Box::new(CpuDevice::new(1, arenas).unwrap());
    let checkpoints = CheckpointOptions {
        folder: folder.to_owned(),
        interval: Interval::steps(3),
        on_best: false,
        weights_only: false,
        limit: None,
        decoupled: false,
        manifest: job.manifest_template(serde_json::Value::Null),
        model: job.files.clone(),
    };
    let polls = Cell::new(0);
    let control = || {
        polls.set(polls.get() + 1);
        request.filter(|(at, _)| *at == polls.get()).map_or(ControlRequest::Continue, |(_, request)| request)
    };
    let options = TrainOptions {
        export_to: None,
        trace: false,
        profile: false,
        run_ahead,
        rss_interval: 100,
        checkpoints: Some(&checkpoints),
        resume_from: None,
    };
    let mut history = History::default();
    let mut on_event = |event: TrainEvent<'_>| {
        match event {
            TrainEvent::Step(line) => {
                history.steps.push(StepMetrics { step_ms: 0.0, host_bytes_peak: 0, ..*line });
            }
            TrainEvent::Eval(line, _) => history.evaluations.push((line.step, line.eval_loss)),
            TrainEvent::CheckpointSaved { step, .. } => history.saved.push(step),
            TrainEvent::Timeline { step, lines } => {
                let events: serde_json::Value = serde_json::from_str(&format!("[{lines}]")).unwrap();
                assert!(events.as_array().unwrap().iter().any(|event| event["ph"] == "X"));
                history.timelines.push(step);
            }
            TrainEvent::TimelineComplete(step) => assert_eq!(history.timelines.last(), Some(&step)),
            TrainEvent::EvalStarting
            | TrainEvent::Exporting
            | TrainEvent::TransportChosen(_)
            | TrainEvent::Loading { .. }
            | TrainEvent::Loaded
            | TrainEvent::Note(_)
            | TrainEvent::CheckpointStarting(_)
            | TrainEvent::StepProfile(_) => {}
        }
        Ok(())
    };
    let hooks = TrainHooks { on_event: &mut on_event, control: &control };
    let outcome = train(job, &compiled, device, None, &options, hooks);
    history.stopped = outcome.unwrap().stopped;
    history
}

#[test]
fn running_ahead_gives_the_same_history() {
    let model = tempfile::tempdir().unwrap();
    let job = job(model.path());
    let folders = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let plain = run(&job, folders[0].path(), false, None);
    let ahead = run(&job, folders[1].path(), true, None);
    assert_eq!(plain, ahead);
    assert_eq!(plain.steps.len() as u64, STEPS);
    assert_eq!(plain.saved, [3, 6, 9]);
    assert_eq!(plain.evaluations.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 8, 9]);
    // Checkpoints are identical.
    for step in &plain.saved {
        let names = std::fs::read_dir(folders[0].path()).unwrap().map(|entry| entry.unwrap().file_name());
        let name =
            names.into_iter().find(|name| name.to_string_lossy().ends_with(&step.to_string())).unwrap();
        let weights = |folder: &Path| {
            let mut files: Vec<_> = std::fs::read_dir(folder.join(&name))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
                .collect();
            files.sort();
            files.iter().map(|file| std::fs::read(file).unwrap()).collect::<Vec<_>>()
        };
        assert!(!weights(folders[0].path()).is_empty());
        assert_eq!(weights(folders[0].path()), weights(folders[1].path()), "step {step}");
    }
}

#[test]
fn a_timeline_is_of_one_step_and_changes_nothing() {
    let model = tempfile::tempdir().unwrap();
    let job = job(model.path());
    let folders = [0, 1, 2].map(|_| tempfile::tempdir().unwrap());
    let plain = run(&job, folders[0].path(), false, None);
    // Requested after step 1: the next step, or the one after that in flight.
    for (folder, run_ahead, traced) in [(1, false, 2), (2, true, 3)] {
        let request = Some((1, ControlRequest::Trace));
        let traced_run = run(&job, folders[folder].path(), run_ahead, request);
        assert_eq!(traced_run.timelines, [traced]);
        assert_eq!(History { timelines: Vec::new(), ..traced_run }, plain);
    }
}

#[test]
fn requests_wait_only_for_the_step_in_flight() {
    let model = tempfile::tempdir().unwrap();
    let job = job(model.path());
    let folders = [0, 1, 2].map(|_| tempfile::tempdir().unwrap());
    let whole = run(&job, folders[0].path(), true, None);
    // An evaluation follows step 4, so step 5 is not enqueued yet; after step 1, step 2 is in flight.
    for (folder, at, last) in [(1, 4, 4), (2, 1, 2)] {
        let stopped = run(&job, folders[folder].path(), true, Some((at, ControlRequest::Stop)));
        assert!(stopped.stopped);
        assert_eq!(stopped.steps, whole.steps[..last]);
        assert_eq!(stopped.saved.last(), Some(&(last as u64)));
    }
}
