//! Generation with the golden models: logits and greedy text of transformers, and refused input.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zeroth_base::DType;
use zeroth_cpu::{CpuDevice, CpuTarget};
use zeroth_kernel::Target;
use zeroth_program::Compiled;
use zeroth_train::{
    BatchSize, BeamSettings, End, GenerateError, Generated, Generation, Generator, Inference,
};

const TARGET: &dyn Target = &CpuTarget { threads: 1 };
const GREEDY: Generation = Generation {
    max_new_tokens: 8,
    temperature: 0.0,
    top_k: None,
    top_p: None,
    min_p: None,
    repetition_penalty: 1.0,
    seed: 42,
    stops: Vec::new(),
};

fn on(_: i32) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn start<'c>(model: &'c Inference, compiled: &'c Compiled) -> Generator<'c> {
    let arenas = compiled.memory.arenas();
    model.start(compiled, Box::new(CpuDevice::new(1, arenas).unwrap())).unwrap()
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

fn generate(name: &str, prompt: &[i32], generation: &Generation) -> Generated {
    let model = Inference::open(&golden().join(name)).unwrap();
    let compiled = model.compile(prompt, generation.max_new_tokens, DType::F32, TARGET).unwrap();
    let mut seen = Vec::new();
    let mut each = |id| {
        seen.push(id);
        ControlFlow::Continue(())
    };
    let generated = start(&model, &compiled).generate(prompt, generation, &mut each).unwrap();
    assert_eq!(seen, generated.ids, "tokens are told as they come");
    generated
}

/// Compares logits and greedy text with those of a golden prompt.
fn check_case(generator: &mut Generator<'_>, case: &Value, name: &str) {
    let prompt = ids(&case["prompt"]);
    let logits = generator.logits(&prompt).unwrap();
    let expected: Vec<f64> =
        case["logits"].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap()).collect();
    assert_eq!(logits.len(), expected.len());
    for (found, expected) in logits.iter().zip(&expected) {
        assert!((f64::from(*found) - expected).abs() < 1e-5, "{name} {prompt:?}: {found} {expected}");
    }
    let generated = generator.generate(&prompt, &GREEDY, &mut on).unwrap();
    assert_eq!((generated.ids, generated.end), (ids(&case["greedy"]), End::Length), "{name} {prompt:?}");
}

#[test]
fn adapters_give_the_logits_and_text_of_peft() {
    let lora = golden().join("lora");
    let text = std::fs::read_to_string(lora.join("adapters.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.as_object().unwrap().len(), 12);
    for (name, adapter) in cases.as_object().unwrap() {
        let base = golden().join(adapter["base"].as_str().unwrap());
        let model = Inference::open_with(&base, Some(&lora.join(name))).unwrap();
        assert_eq!((model.stored(), model.warnings().len()), (DType::F32, 0));
        for case in adapter["prompts"].as_array().unwrap() {
            let compiled = model.compile(&ids(&case["prompt"]), 8, DType::F32, TARGET).unwrap();
            check_case(&mut start(&model, &compiled), case, name);
        }
    }
    let other = Inference::open_with(&golden().join("llama-dynamic"), Some(&lora.join("qwen3-tied-qv")));
    let Err(error) = other else { panic!("an adapter of another base was taken") };
    let error = error.to_string();
    assert!(
        error.starts_with("--adapter: ") && error.contains("[4, 24]") && error.contains("[4, 30]"),
        "{error}"
    );
}

#[test]
fn logits_and_greedy_text_match_transformers() {
    let text = std::fs::read_to_string(golden().join("next_tokens.json")).unwrap();
    let models: Value = serde_json::from_str(&text).unwrap();
    let folders = std::fs::read_dir(golden()).unwrap();
    let folders = folders.filter(|entry| entry.as_ref().unwrap().path().join("config.json").exists());
    assert_eq!(models.as_object().unwrap().len(), folders.count());
    for (name, cases) in models.as_object().unwrap() {
        let model = Inference::open(&golden().join(name)).unwrap();
        assert_eq!(model.stored(), DType::F32);
        for case in cases.as_array().unwrap() {
            let prompt = ids(&case["prompt"]);
            let compiled = model.compile(&prompt, 8, DType::F32, TARGET).unwrap();
            let mut generator = start(&model, &compiled);
            check_case(&mut generator, case, name);
        }
    }
}

#[test]
fn generation_ends_at_stop_tokens_or_full_context() {
    let whole = generate("qwen3-tied", &[1, 2, 3], &GREEDY);
    let stop = whole.ids[2];
    let first = whole.ids.iter().position(|id| *id == stop).unwrap();
    let stopped = generate("qwen3-tied", &[1, 2, 3], &Generation { stops: vec![stop], ..GREEDY });
    assert_eq!((&stopped.ids[..], stopped.end), (&whole.ids[..=first], End::Stop(stop)));

    let model = Inference::open(&golden().join("qwen3-tied")).unwrap();
    let positions = model.model().max_positions.unwrap() as usize;
    let prompt = vec![1; positions - 2];
    let filled = generate("qwen3-tied", &prompt, &GREEDY);
    assert_eq!((filled.ids.len(), filled.end), (2, End::Positions));
    let full = generate("qwen3-tied", &vec![1; positions], &GREEDY);
    assert_eq!((full.ids.len(), full.end), (0, End::Positions));
}

#[test]
fn a_conversation_is_continued_as_if_it_were_new() {
    let model = Inference::open(&golden().join("qwen3-tied")).unwrap();
    let compiled = model.compile_context(10_000, DType::F32, TARGET).unwrap();
    let positions = model.model().max_positions.unwrap();
    assert_eq!(compiled.program.cached_tokens, positions);
    let mut chat = start(&model, &compiled);
    let mut text: Vec<i32> = (1..positions as i32 / 2).collect();
    // Few new tokens, the same prompt again, another beginning, another end.
    for turn in 0..5 {
        match turn {
            1 => text.push(9),
            3 => text[0] = 3,
            4 => {
                text.pop();
                text.push(4);
            }
            _ => {}
        }
        let found = chat.generate_reusing(&text, turn, &GREEDY, &mut on).unwrap();
        assert_eq!(found, generate("qwen3-tied", &text, &GREEDY), "turn {turn}");
        text.extend(&found.ids[..2]);
    }
    let mut left = 3;
    let mut three = |_| {
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let stopped = chat.generate_reusing(&text, 5, &GREEDY, &mut three).unwrap();
    assert_eq!((stopped.ids.len(), stopped.end), (3, End::Stopped));
    let without = generate("qwen3-tied", &[1, 2, 3], &GREEDY);
    let never_again = Generation { repetition_penalty: 1e6, ..GREEDY };
    let penalised = generate("qwen3-tied", &[1, 2, 3], &never_again);
    let all: std::collections::HashSet<i32> = penalised.ids.iter().copied().chain([1, 2, 3]).collect();
    assert_eq!(all.len(), 11, "no token occurs twice: {penalised:?}");
    assert_ne!(without.ids, penalised.ids);
}

#[test]
fn sampling_is_reproducible_by_seed() {
    let warm = |seed| Generation { temperature: 1.5, max_new_tokens: 24, seed, ..GREEDY };
    let text = |seed| generate("llama-one-kv-head", &[5, 6], &warm(seed)).ids;
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn invalid_prompts_are_refused() {
    let model = Inference::open(&golden().join("qwen3-tied")).unwrap();
    let (vocab, positions) = (model.model().vocab, model.model().max_positions.unwrap() as usize);
    let refused = |prompt: &[i32]| model.compile(prompt, 8, DType::F32, TARGET).unwrap_err();
    assert!(matches!(refused(&[]), GenerateError::EmptyPrompt));
    let beyond = refused(&[1, vocab as i32]);
    assert!(matches!(beyond, GenerateError::BeyondVocabulary { place: 1, .. }), "{beyond}");
    assert!(beyond.to_string().contains(&format!("0 to {}", vocab - 1)), "{beyond}");
    assert!(matches!(refused(&[-1]), GenerateError::BeyondVocabulary { place: 0, id: -1, .. }));
    let long = refused(&vec![1; positions + 1]);
    assert!(matches!(long, GenerateError::PromptTooLong { .. }), "{long}");

    let compiled = model.compile(&[1], 8, DType::F32, TARGET).unwrap();
    let mut generator = start(&model, &compiled);
    for (wrong, name) in [
        (Generation { temperature: -1.0, ..GREEDY }, "temperature"),
        (Generation { top_k: Some(0), ..GREEDY }, "top_k"),
        (Generation { top_p: Some(1.5), ..GREEDY }, "top_p"),
        (Generation { min_p: Some(-0.1), ..GREEDY }, "min_p"),
        (Generation { repetition_penalty: 0.0, ..GREEDY }, "repetition_penalty"),
    ] {
        let error = generator.generate(&[1], &wrong, &mut on).unwrap_err();
        assert!(error.to_string().starts_with(name), "{error}");
    }

    let bare = tempfile::tempdir().unwrap();
    std::fs::copy(golden().join("qwen3-tied/config.json"), bare.path().join("config.json")).unwrap();
    assert!(matches!(Inference::open(bare.path()), Err(GenerateError::NoWeights { .. })));
}

#[test]
fn a_batch_gives_what_each_prompt_gives_alone() {
    let model = Inference::open(&golden().join("qwen3-tied")).unwrap();
    let positions = model.model().max_positions.unwrap() as usize;
    let lengths = [3, 7, 1, positions - 2, 5, 2, 11, positions, 4];
    let prompts: Vec<Vec<i32>> = lengths
        .iter()
        .enumerate()
        .map(|(number, length)| (0..*length).map(|place| ((7 * number + 3 * place) % 30) as i32).collect())
        .collect();
    let stop = generate("qwen3-tied", &prompts[0], &GREEDY).ids[2];
    let generation = Generation { stops: vec![stop], ..GREEDY };
    let alone: Vec<Generated> =
        prompts.iter().map(|prompt| generate("qwen3-tied", prompt, &generation)).collect();
    // Some sequences wait for others, all go together, or each goes alone.
    for (sequences, tokens) in [(3, 40), (64, 4096), (1, 1)] {
        let size = BatchSize { sequences, tokens };
        let compiled = model.compile_batch(&prompts, 8, size, DType::F32, TARGET).unwrap();
        let mut found: Vec<Option<Generated>> = vec![None; prompts.len()];
        let mut take = |place: usize, generated| assert!(found[place].replace(generated).is_none());
        start(&model, &compiled)
            .generate_batch(&prompts, &generation, &mut |_, id| on(id), &mut take)
            .unwrap();
        assert_eq!(found.into_iter().collect::<Option<Vec<_>>>().as_ref(), Some(&alone), "{size:?}");
    }
    let empty = [vec![1], vec![]];
    let refused = model.compile_batch(&empty, 8, BatchSize::default(), DType::F32, TARGET);
    assert!(matches!(refused, Err(GenerateError::EmptyPrompt)));
}

/// Samples equal prompts in batches of a size.
fn sampled(name: &str, prompts: &[Vec<i32>], seed: u64, size: BatchSize) -> Vec<Vec<i32>> {
    let generation = Generation { temperature: 1.5, max_new_tokens: 12, seed, ..GREEDY };
    let model = Inference::open(&golden().join(name)).unwrap();
    let mut found = vec![Vec::new(); prompts.len()];
    let mut take = |place: usize, generated: Generated| found[place] = generated.ids;
    let compiled = if model.is_encoder_decoder() {
        let target = (DType::F32, TARGET);
        model.compile_answers(prompts, 12, BeamSettings::default(), size, target).unwrap()
    } else {
        model.compile_batch(prompts, 12, size, DType::F32, TARGET).unwrap()
    };
    let mut generator = start(&model, &compiled);
    let each = &mut |_, id| on(id);
    if model.is_encoder_decoder() {
        let beams = BeamSettings::default();
        generator.answer((prompts, 0), &generation, beams, each, &mut take).unwrap();
    } else {
        generator.generate_batch(prompts, &generation, each, &mut take).unwrap();
    }
    found
}

#[test]
fn equal_prompts_are_sampled_differently_and_alike_in_every_batch() {
    for name in ["qwen3-tied", "t5/t5-relu-tied"] {
        let prompts = vec![vec![3, 1, 4, 1, 5]; 8];
        let alone = sampled(name, &prompts, 42, BatchSize { sequences: 1, tokens: 1 });
        let mut distinct = alone.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), prompts.len(), "{name}: {alone:?}");
        for size in [BatchSize { sequences: 4, tokens: 64 }, BatchSize::default()] {
            assert_eq!(sampled(name, &prompts, 42, size), alone, "{name}, {size:?}");
        }
        // More sequences add to the first ones, and change none of them.
        assert_eq!(sampled(name, &prompts[..3], 42, BatchSize::default()), alone[..3], "{name}");
        assert_ne!(sampled(name, &prompts[..3], 43, BatchSize::default()), alone[..3], "{name}");
    }
    let first = Generation { temperature: 1.5, max_new_tokens: 12, ..GREEDY };
    let single = generate("qwen3-tied", &[3, 1, 4, 1, 5], &first).ids;
    let batch = sampled("qwen3-tied", &[vec![3, 1, 4, 1, 5]], 42, BatchSize::default());
    assert_eq!(single, batch[0], "a single prompt is the first of a batch");
}

#[test]
fn the_caller_ends_one_text_of_a_batch() {
    let model = Inference::open(&golden().join("qwen3-tied")).unwrap();
    let prompts = vec![vec![1, 2, 3]; 3];
    let compiled = model.compile_batch(&prompts, 8, BatchSize::default(), DType::F32, TARGET).unwrap();
    let mut found = vec![None; 3];
    let mut seen = 0;
    let mut each = |place: usize, _| {
        seen += usize::from(place == 1);
        if place == 1 && seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let mut take = |place: usize, generated: Generated| found[place] = Some(generated);
    start(&model, &compiled).generate_batch(&prompts, &GREEDY, &mut each, &mut take).unwrap();
    let ends: Vec<(usize, End)> = found.iter().flatten().map(|one| (one.ids.len(), one.end)).collect();
    assert_eq!(ends, [(8, End::Length), (2, End::Stopped), (8, End::Length)]);
}
