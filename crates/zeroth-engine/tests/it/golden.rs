//! The engine against PyTorch: golden models in f32, at every stage, on 1, 2, 3 and 5 ranks, with and without
//! accumulation.

use serde_json::Value;
use zeroth_program::{Offload, Recompute, Settings};

use crate::job::distill::{TeacherSource, Teaching, distillations};
use crate::job::lora::{lora_goldens, name_in_steps};
use crate::job::{
    Golden, Outcome, ROOMY, Setup, golden_folder, goldens, is_full, moe_goldens, t5_goldens, tensor,
};

/// (ranks, accumulation, micro-batch): each product is the batch of a golden run.
const SPLITS: [(u64, u64, u64); 9] =
    [(1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 4, 2), (3, 1, 4), (3, 4, 1), (5, 1, 4), (5, 4, 1), (1, 4, 4)];

/// How far an element of the final weights may be from PyTorch's, relative to the root mean square of its tensor. Seen: 2e-6.
const FINAL_WEIGHT: f64 = 1e-5;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn length(elements: impl Iterator<Item = f64>) -> f64 {
    elements.map(|x| x * x).sum::<f64>().sqrt()
}

fn assert_golden(golden: &Golden, batch: u64, outcome: &Outcome, what: &str) {
    let run = golden.run(batch);
    let (losses, norms) = (numbers(&run["loss"]), numbers(&run["grad_norm"]));
    for (step, record) in outcome.records.iter().enumerate() {
        let at = format!("{} {what} step {}", golden.name, step + 1);
        assert!((record.loss - losses[step]).abs() < 1e-5, "{at}: loss {} {}", record.loss, losses[step]);
        assert!(
            (record.norm - norms[step]).abs() < 5e-4 * norms[step],
            "{at}: norm {} {}",
            record.norm,
            norms[step]
        );
        assert!(record.apply == 1 && record.applied == step as u64 + 1, "{at}: {record:?}");
    }
    assert_eq!(outcome.records.len(), losses.len());
    for (parameter, weights) in golden.table.iter().zip(&outcome.weights) {
        let final_norm = run["final"][name_in_steps(&parameter.name)]["norm"].as_f64();
        let Some(expected) = final_norm else {
            assert!(golden.is_frozen(&parameter.name), "{} {}", golden.name, parameter.name);
            continue;
        };
        let found = length(weights.iter().map(|weight| f64::from(*weight)));
        assert!(
            (found - expected).abs() < 1e-5 * expected,
            "{} {}: {found} {expected}",
            golden.name,
            parameter.name
        );
    }
    let parameters = golden.table.iter().zip(&golden.weights).zip(&outcome.weights);
    for ((parameter, before), after) in parameters.filter(|((p, _), _)| golden.is_frozen(&p.name)) {
        assert_eq!(after, before, "{} {what} {}: frozen", golden.name, parameter.name);
    }
    let file = golden.folder.join("final.safetensors");
    if batch == 4 && file.is_file() {
        for (parameter, weights) in golden.table.iter().zip(&outcome.weights) {
            let expected = tensor(&file, &parameter.name);
            let rms =
                length(expected.iter().map(|weight| f64::from(*weight))) / (expected.len() as f64).sqrt();
            for (place, (found, expected)) in weights.iter().zip(&expected).enumerate() {
                let apart = (f64::from(*found) - f64::from(*expected)).abs();
                assert!(
                    apart <= FINAL_WEIGHT * rms,
                    "{} {what} {}[{place}]: {found} {expected}, {:.1e} of its RMS apart",
                    golden.name,
                    parameter.name,
                    apart / rms
                );
            }
        }
    }
}

/// Gradients of step 1 belong to a step of 4 samples.
fn assert_gradients(golden: &Golden, outcome: &Outcome, what: &str) {
    let expected = &golden.steps["gradients_of_step_1"]["parameters"];
    let trained = || {
        golden
            .table
            .iter()
            .zip(&outcome.gradients)
            .filter(|(parameter, _)| !golden.is_frozen(&parameter.name))
    };
    assert_eq!(expected.as_object().unwrap().len(), trained().count(), "{}", golden.name);
    for (parameter, gradient) in trained() {
        let name = format!("{} {what} {}", golden.name, parameter.name);
        let said = &expected[name_in_steps(&parameter.name)];
        let norm = said["norm"].as_f64().unwrap();
        let found = length(gradient.iter().map(|g| f64::from(*g)));
        assert!((found - norm).abs() <= 1e-5 * norm, "{name}: norm {found} {norm}");
        for (place, value) in numbers(&said["places"]).iter().zip(numbers(&said["values"])) {
            let found = f64::from(gradient[*place as usize]);
            assert!((found - value).abs() <= 1e-5 * norm, "{name}[{place}]: {found} {value}");
        }
    }
    let file = golden.folder.join("grads.safetensors");
    if file.is_file() {
        for (parameter, gradient) in trained() {
            let whole = tensor(&file, &parameter.name);
            let apart = length(gradient.iter().zip(&whole).map(|(a, b)| f64::from(*a) - f64::from(*b)));
            let norm = length(whole.iter().map(|g| f64::from(*g)));
            assert!(apart <= 1e-5 * norm, "{} {what} {}: {apart} of {norm}", golden.name, parameter.name);
        }
    }
}

/// A third of the splits for each model, another for the next model and stage; all of them with `ZEROTH_FULL=1`.
fn trains_like_pytorch(stage: u8) {
    for (place, golden) in goldens().iter().enumerate() {
        let is_due = |at: usize| is_full() || (place + usize::from(stage) + at).is_multiple_of(3);
        for (_, split) in SPLITS.into_iter().enumerate().filter(|(at, _)| is_due(*at)) {
            assert_split(golden, stage, split);
        }
    }
}

/// Half of the splits for each model, the others for the next; all of them with `ZEROTH_FULL=1`.
#[test]
fn offload_and_recomputation_train_like_pytorch() {
    let both = Offload {
        optimizer: Some(1.0),
        parameters: Some(u64::MAX),
        sub_group_size: 4096,
        ..Offload::NOTHING
    };
    let optimizer = Offload { parameters: None, ..both };
    let splits = [(1, 1, 4), (1, 4, 1), (2, 1, 2), (3, 1, 4), (5, 4, 1)];
    for (place, golden) in goldens().iter().enumerate() {
        let is_due = |turn: usize| is_full() || (place + turn).is_multiple_of(2);
        let due = splits.into_iter().enumerate().filter(|(turn, _)| is_due(*turn));
        for (turn, (ranks, accumulation, micro_batch)) in due {
            // Over all models and splits there is every stage, place and policy.
            let stage = ((place + turn) % 4) as u8;
            let offload = [Offload::NOTHING, optimizer, both][(place + 2 * turn) % 3];
            let offloaded = (place + turn) % 2 == 0;
            let recompute = [
                Recompute::Block { blocks: None, checkpoints: None, offloaded },
                Recompute::Attention,
                Recompute::Block { blocks: None, checkpoints: Some(1), offloaded },
                Recompute::NormSwiGlu,
            ][(place + 3 * turn) % 4];
            let settings = Settings { stage, accumulation, offload, recompute, overlap: true, ..ROOMY };
            let setup = Setup { ranks, micro_batch, settings, sizes: 3, ..Setup::default() };
            let outcome = golden.train(&setup);
            assert_golden(golden, ranks * accumulation * micro_batch, &outcome, &format!("{setup:?}"));
        }
    }
}

#[test]
fn stage_0_trains_like_pytorch() {
    trains_like_pytorch(0);
}

#[test]
fn stage_1_trains_like_pytorch() {
    trains_like_pytorch(1);
}

#[test]
fn stage_2_trains_like_pytorch() {
    trains_like_pytorch(2);
}

#[test]
fn stage_3_trains_like_pytorch() {
    trains_like_pytorch(3);
}

/// One split at two stages for every model, others for the next; all of them with `ZEROTH_FULL=1`.
#[test]
fn adapters_train_like_peft() {
    let is_full = is_full();
    // LoRA runs have no batch of 16.
    let splits: Vec<_> = SPLITS.into_iter().filter(|(ranks, a, m)| ranks * a * m != 16).collect();
    for (place, name) in lora_goldens().iter().enumerate() {
        let golden = Golden::lora(name, 0.0);
        for (at, (ranks, accumulation, micro_batch)) in splits.iter().copied().enumerate() {
            let is_due =
                |stage: usize| (place + stage).is_multiple_of(2) && (place + 2 * stage) % splits.len() == at;
            for stage in (0..=3).filter(|stage| is_full || is_due(usize::from(*stage))) {
                let settings = Settings { stage, accumulation, ..ROOMY };
                let setup = Setup { ranks, micro_batch, settings, sizes: 3, ..Setup::default() };
                let what = format!("stage {stage}, {ranks} ranks, accumulation {accumulation}");
                let (outcome, batch) = (golden.train(&setup), ranks * accumulation * micro_batch);
                assert_golden(&golden, batch, &outcome, &what);
                if batch == 4 {
                    assert_gradients(&golden, &outcome, &what);
                }
            }
        }
    }
}

/// Trains with a split of a golden run and compares everything that the run has.
fn assert_split(golden: &Golden, stage: u8, (ranks, accumulation, micro_batch): (u64, u64, u64)) {
    let batch = ranks * accumulation * micro_batch;
    let settings = Settings { stage, accumulation, ..ROOMY };
    let setup = Setup { ranks, micro_batch, settings, sizes: 3, ..Setup::default() };
    let what = format!("stage {stage}, {ranks} ranks, accumulation {accumulation}");
    let outcome = golden.train(&setup);
    assert_golden(golden, batch, &outcome, &what);
    if batch == 4 {
        assert_gradients(golden, &outcome, &what);
    }
    let balance = golden.run(batch)["aux_loss"].as_array();
    for (step, expected) in balance.into_iter().flatten().enumerate() {
        let (found, expected) = (outcome.losses[step][1], expected.as_f64().unwrap());
        assert!((found - expected).abs() < 1e-5, "{} {what} step {step}: {found} {expected}", golden.name);
    }
}

/// One split at two stages for every model, others for the next; all of them with `ZEROTH_FULL=1`. An auxiliary loss is of a
/// micro-batch, so a step of its runs is one micro-batch on one rank.
#[test]
fn experts_train_like_transformers() {
    let is_full = is_full();
    let models = moe_goldens();
    assert_eq!(models.iter().filter(|golden| golden.run(4)["aux_loss"].is_array()).count(), 2);
    for (place, golden) in models.iter().enumerate() {
        let has_balance = golden.run(4)["aux_loss"].is_array();
        let splits: Vec<(u64, u64, u64)> = if has_balance {
            vec![(1, 1, 4), (1, 1, 12)]
        } else {
            SPLITS.into_iter().filter(|(ranks, a, m)| ranks * a * m != 16).collect()
        };
        for (at, split) in splits.iter().enumerate() {
            let is_due = |stage: usize| {
                (place + stage).is_multiple_of(2) && (3 * place + 2 * stage) % splits.len() == at
            };
            for stage in (0..=3).filter(|stage| is_full || is_due(usize::from(*stage))) {
                assert_split(golden, stage, *split);
            }
        }
    }
}

#[test]
fn adapters_of_experts_train_like_peft() {
    let is_full = is_full();
    let splits: Vec<_> = SPLITS.into_iter().filter(|(ranks, a, m)| ranks * a * m != 16).collect();
    let names = ["qwen3-moe-normalized", "mixtral-no-window"]
        .into_iter()
        .flat_map(|base| ["all", "qv-experts"].map(|targets| format!("{base}-{targets}")));
    for (place, name) in names.enumerate() {
        let golden = Golden::lora_of("moe", &name);
        for (at, split) in splits.iter().enumerate() {
            let is_due = |stage: usize| {
                (place + stage).is_multiple_of(2) && (3 * place + 2 * stage) % splits.len() == at
            };
            for stage in (0..=3).filter(|stage| is_full || is_due(usize::from(*stage))) {
                assert_split(&golden, stage, *split);
            }
        }
    }
}

/// One split at two stages for every model, others for the next; all of them with `ZEROTH_FULL=1`.
#[test]
fn encoder_decoders_train_like_transformers() {
    let is_full = is_full();
    for (place, golden) in t5_goldens().iter().enumerate() {
        for (at, split) in SPLITS.into_iter().enumerate() {
            let is_due = |stage: usize| (2 * place + stage) % SPLITS.len() == at;
            for stage in (0..=3).filter(|stage| is_full || is_due(usize::from(*stage))) {
                assert_split(golden, stage, split);
            }
        }
    }
}

#[test]
fn adapters_of_encoder_decoders_train_like_peft() {
    let is_full = is_full();
    let folders = std::fs::read_dir(golden_folder().join("t5/lora")).unwrap().map(Result::unwrap);
    let folders = folders.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 2, "{names:?}");
    let splits: Vec<_> = SPLITS.into_iter().filter(|(ranks, a, m)| ranks * a * m != 16).collect();
    for (place, name) in names.iter().enumerate() {
        let golden = Golden::lora_of("t5", name);
        for (at, split) in splits.iter().enumerate() {
            let is_due = |stage: usize| (4 * place + stage) % splits.len() == at;
            for stage in (0..=3).filter(|stage| is_full || is_due(usize::from(*stage))) {
                assert_split(&golden, stage, *split);
            }
        }
    }
}

/// Compares both parts of the loss of every step.
fn assert_parts(golden: &Golden, batch: u64, outcome: &Outcome, what: &str) {
    let run = golden.run(batch);
    let parts = ["ce_loss", "kd_loss"].map(|part| numbers(&run[part]));
    for (step, found) in outcome.losses.iter().enumerate() {
        for (part, found) in parts.iter().zip(found) {
            let expected = part[step];
            let at = format!("{} {what} step {}", golden.name, step + 1);
            assert!((found - expected).abs() < 1e-5, "{at}: {found} {expected}");
        }
    }
}

fn assert_distillation(golden: &Golden, stage: u8, (ranks, accumulation, micro_batch): (u64, u64, u64)) {
    let batch = ranks * accumulation * micro_batch;
    let settings = Settings { stage, accumulation, ..ROOMY };
    let setup = Setup { ranks, micro_batch, settings, sizes: 3, ..Setup::default() };
    let what = format!("stage {stage}, {ranks} ranks, accumulation {accumulation}");
    let outcome = golden.train(&setup);
    assert_golden(golden, batch, &outcome, &what);
    assert_parts(golden, batch, &outcome, &what);
    if batch == 4 {
        assert_gradients(golden, &outcome, &what);
    }
}

/// One split at one stage for every case, others for the next; all of them with `ZEROTH_FULL=1`. The caches of the offline cases are
/// the engine's own.
#[test]
fn distillations_train_like_trl() {
    let is_full = is_full();
    for (place, name) in distillations().iter().enumerate() {
        let golden = Golden::distilled(name);
        let has =
            |batch: u64| golden.steps["runs"].as_array().unwrap().iter().any(|run| run["batch"] == batch);
        let splits: Vec<_> = SPLITS.into_iter().filter(|(ranks, a, m)| has(ranks * a * m)).collect();
        let every_split = splits.len() > 3;
        for (at, split) in splits.iter().enumerate() {
            for stage in 0..=3u8 {
                let is_due =
                    (place + at) % 4 == usize::from(stage) && (every_split || at == place % splits.len());
                if is_full || is_due {
                    assert_distillation(&golden, stage, *split);
                }
            }
        }
    }
}

#[test]
fn a_cache_of_the_whole_vocabulary_trains_like_its_teacher() {
    for name in ["forward-kl-mixed", "jsd", "reverse-kl"] {
        let golden = Golden::distilled(name);
        let vocabulary = golden.config.vocab;
        let golden = golden.offline(vocabulary, &Setup { micro_batch: 3, ..Setup::default() });
        assert_distillation(&golden, 2, (2, 1, 2));
    }
}

#[test]
fn a_student_that_is_its_own_teacher_learns_nothing() {
    for name in ["forward-kl", "jsd", "reverse-kl"] {
        let mut golden = Golden::distilled(name);
        let twin = Golden::distilled(name);
        let Teaching { spec, alpha, .. } = golden.teacher.take().unwrap();
        assert_eq!(alpha, 1.0);
        let source = TeacherSource::Model(Box::new(Golden { teacher: None, ..twin }));
        golden.teacher = Some(Teaching { spec, alpha, source });
        let outcome = golden.train(&Setup { micro_batch: 4, steps: 1, ..Setup::default() });
        let [_, kd] = outcome.losses[0][..] else { panic!("{:?}", outcome.losses) };
        assert!(kd.abs() < 1e-6, "{name}: {kd}");
        assert!(outcome.records[0].norm < 1e-5, "{name}: {}", outcome.records[0].norm);
    }
}
