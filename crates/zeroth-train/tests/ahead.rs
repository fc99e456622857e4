//! Steps that are enqueued before the host has looked at the one before them: the same run, whatever comes between.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use std::cell::Cell;
use std::path::Path;

use zeroth_config::check::check;
use zeroth_config::read::{Source, parse};
use zeroth_config::resolve::{Flags, ModelFacts, Request, resolve};
use zeroth_device::cpu::CpuDevice;
use zeroth_device::{Recipe, Target, Tier};
use zeroth_model::{ModelConfig, table};
use zeroth_step::program::Settings;
use zeroth_train::data::{Samples, SamplesBuilder};
use zeroth_train::{
    BatchShape, Chores, Done, Evaluation, HuggingFace, HuggingFaceShape, Job, Order, Saves, Schedule,
    StepLine, Wish, train,
};

const STEPS: u64 = 9;

/// What a run told: steps without their times, evaluations, what was saved, and whether it stopped early.
#[derive(Debug, Default, PartialEq)]
struct Story {
    steps: Vec<StepLine>,
    evaluations: Vec<(u64, f64)>,
    saved: Vec<u64>,
    stopped: bool,
}

fn samples(count: usize) -> Samples {
    let mut builder = SamplesBuilder::new(u64::MAX);
    for sample in 0..count {
        let ids: Vec<i32> = (0..5 + sample % 7).map(|at| ((sample * 31 + at * 17) % 256) as i32).collect();
        builder.push(&ids, &ids);
    }
    builder.finish().unwrap()
}

/// A job whose model's folder is this one.
fn job(folder: &Path) -> Job {
    let text = r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}"#;
    let asked = check(&parse(Source::from_text("ds.json", text)).unwrap()).asked;
    let model = Some(ModelFacts { hidden_size: Some(32), blocks: Some(2) });
    let flags = Flags::default();
    let request = Request { asked: &asked, flags: &flags, ranks: 1, model, steps: Some(STEPS) };
    let resolved = resolve(&request).unwrap();
    let json = r#"{"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "vocab_size": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"}"#;
    std::fs::write(folder.join("config.json"), json).unwrap();
    let model = ModelConfig::from_json(json, "config.json").unwrap();
    let samples_of_job = samples(40);
    let mut job = Job {
        folder: folder.to_owned(),
        table: table(&model),
        model,
        order: Order::new(samples_of_job.count(), Some(3)),
        samples: samples_of_job,
        shape: BatchShape { micro_batch: 2, accumulation: 1, ranks: 1 },
        steps: STEPS,
        row_sizes: Vec::new(),
        settings: Settings::from_config(&resolved),
        recipe: Recipe { max_norm: 1.0, ..Recipe::default() },
        schedule: Schedule::HuggingFace(HuggingFace {
            shape: HuggingFaceShape::Linear,
            learning_rate: 1e-2,
            warmup_steps: 3,
            total_steps: STEPS,
        }),
        decays_all: false,
        seed: 7,
        evaluation: Some(Evaluation { samples: samples(6), every: 4 }),
    };
    job.size_rows();
    job
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
        model: job.folder.clone(),
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
            Done::Saving(_) | Done::Times(_) => {}
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
