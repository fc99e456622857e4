//! Steps that are enqueued before the host has looked at the one before them: the same run, whatever comes between.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod small_job;

use std::cell::Cell;
use std::path::Path;

use small_job::{STEPS, job};
use zeroth_cpu::CpuDevice;
use zeroth_kernel::Tier;
use zeroth_program::Target;
use zeroth_train::{Chores, Done, Job, Saves, StepLine, Wish, train};

/// What a run told: steps without their times, evaluations, what was saved, and whether it stopped early.
#[derive(Debug, Default, PartialEq)]
struct Story {
    steps: Vec<StepLine>,
    evaluations: Vec<(u64, f64)>,
    saved: Vec<u64>,
    stopped: bool,
}

/// Trains, with a wish after so many looks.
fn story(job: &Job, folder: &Path, ahead: bool, wished: Option<(u64, Wish)>) -> Story {
    let compiled = job.compile(Target::Cpu { threads: 1 }).unwrap();
    let [device, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.arena(tier));
    let device = Box::new(CpuDevice::new(1, device, host).unwrap());
    let saves = Saves {
        folder: folder.to_owned(),
        every: 3,
        limit: None,
        decoupled: false,
        about: job.about(serde_json::Value::Null),
        model: job.files.clone(),
    };
    let looks = Cell::new(0);
    let wish = || {
        looks.set(looks.get() + 1);
        wished.filter(|(at, _)| *at == looks.get()).map_or(Wish::GoOn, |(_, wish)| wish)
    };
    let chores = Chores {
        model: None,
        trace: false,
        timed: false,
        ahead,
        look: 100,
        saves: Some(&saves),
        from: None,
        wish: &wish,
    };
    let mut story = Story::default();
    let ended = train(job, &compiled, device, None, &chores, &mut |done| {
        match done {
            Done::Step(line) => {
                story.steps.push(StepLine { step_ms: 0.0, host_bytes_peak: 0, ..*line });
            }
            Done::Evaluation(line, _) => story.evaluations.push((line.step, line.eval_loss)),
            Done::Saved(step, _) => story.saved.push(step),
            Done::Met(_)
            | Done::Loading { .. }
            | Done::Loaded
            | Done::Note(_)
            | Done::Saving(_)
            | Done::Times(_) => {}
        }
        Ok(())
    });
    story.stopped = ended.unwrap().stopped;
    story
}

#[test]
fn a_run_ahead_tells_the_same_story() {
    let model = tempfile::tempdir().unwrap();
    let job = job(model.path());
    let folders = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let plain = story(&job, folders[0].path(), false, None);
    let ahead = story(&job, folders[1].path(), true, None);
    assert_eq!(plain, ahead);
    assert_eq!(plain.steps.len() as u64, STEPS);
    assert_eq!(plain.saved, [3, 6, 9]);
    assert_eq!(plain.evaluations.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 8, 9]);
    // Checkpoints are the same files.
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
fn a_wish_waits_for_the_step_that_is_under_way_and_no_longer() {
    let model = tempfile::tempdir().unwrap();
    let job = job(model.path());
    let folders = [0, 1, 2].map(|_| tempfile::tempdir().unwrap());
    let whole = story(&job, folders[0].path(), true, None);
    // After step 4 comes an evaluation, so that 5 is not enqueued then; after step 1 step 2 is under way.
    for (folder, at, last) in [(1, 4, 4), (2, 1, 2)] {
        let stopped = story(&job, folders[folder].path(), true, Some((at, Wish::Stop)));
        assert!(stopped.stopped);
        assert_eq!(stopped.steps, whole.steps[..last]);
        assert_eq!(stopped.saved.last(), Some(&(last as u64)));
    }
}
