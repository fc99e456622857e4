//! Every optimizer against PyTorch over 2,000 steps, and moments in 16 bits. The numbers are written by
//! `make_optimizers.py`.
#![allow(clippy::many_single_char_names, reason = "names of the formulas: p, m, v, g and t")]

use half::bf16;
use serde_json::Value;
use zeroth_cpu::*;
use zeroth_kernel::{
    Element, MOMENTS, Moment, Optimizer, Recipe, Rounding, StepNumbers, canonical_master, join_low_bits,
    low_bits,
};

const COUNT: usize = 6;

fn start(i: usize) -> f32 {
    (2.0 + 0.5 * (1.0 + i as f64).sin()) as f32
}

fn gradient(t: u64, i: usize) -> f32 {
    let (t, place) = (t as f64, i as f64);
    let waves = (0.7 * t + 1.3 * place).sin() + 0.4 * (0.013 * t * (place + 1.0)).sin() + 0.05;
    (waves * 10f64.powi(-(i as i32 % 3))) as f32
}

fn recipe(case: &Value) -> (Optimizer, Recipe) {
    let settings = &case["settings"];
    let number = |name: &str, default: f64| settings[name].as_f64().unwrap_or(default);
    let name = case["optimizer"].as_str().unwrap();
    let optimizer = match name {
        "AdamW" | "Uncorrected" => Optimizer::AdamW,
        "Adam" => Optimizer::Adam,
        "SGD" => Optimizer::Sgd,
        "Lion" => Optimizer::Lion,
        "Adagrad" => Optimizer::Adagrad,
        "AdEMAMix" => Optimizer::AdEmaMix,
        other => panic!("{other}"),
    };
    let recipe = Recipe {
        beta1: settings["betas"][0].as_f64().unwrap_or(0.0),
        beta2: settings["betas"][1].as_f64().unwrap_or(0.0),
        eps: number("eps", 0.0),
        weight_decay: [number("weight_decay", 0.0), 0.0],
        momentum: number("momentum", 0.0),
        dampening: number("dampening", 0.0),
        nesterov: u32::from(settings["nesterov"] == true),
        lr_decay: number("lr_decay", 0.0),
        initial_accumulator: number("initial_accumulator_value", 0.0),
        beta3: settings["betas"][2].as_f64().unwrap_or(0.0),
        alpha: number("alpha", 0.0),
        t_alpha: settings["t_alpha"].as_u64().unwrap_or(0),
        t_beta3: settings["t_beta3"].as_u64().unwrap_or(0),
        bias_correction: u32::from(name != "Uncorrected"),
        ..Recipe::default()
    };
    (optimizer, recipe)
}

#[test]
fn two_thousand_steps_of_every_optimizer_agree_with_pytorch() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../optimizers.json")).unwrap();
    assert_eq!(cases.len(), 15);
    let pool = Pool::new(1);
    for case in &cases {
        let (optimizer, recipe) = recipe(case);
        let rate = case["settings"]["lr"].as_f64().unwrap();
        let mut p: Vec<f32> = (0..COUNT).map(start).collect();
        let mut moments = Moment::ALL.map(|moment| vec![recipe.initial(optimizer, moment); COUNT]);
        let (mut t, mut worst) = (0, 0.0f64);
        for (step, weights) in
            case["steps"].as_array().unwrap().iter().zip(case["weights"].as_array().unwrap())
        {
            while t < step.as_u64().unwrap() {
                t += 1;
                let grads: Vec<f32> = (0..COUNT).map(|i| gradient(t, i)).collect();
                let numbers = StepNumbers::new(&recipe, 0, t, rate, 1.0, 1.0);
                let buffers = moments.each_mut().map(|moment| Some(&mut moment[..]));
                let moments = Moments { buffers, rounding: None };
                optimize::<f32, f32, f32>(
                    &pool,
                    optimizer,
                    &numbers,
                    &grads,
                    Master::F32(&mut p),
                    moments,
                    None,
                );
            }
            for (found, expected) in p.iter().zip(weights.as_array().unwrap()) {
                let expected = expected.as_f64().unwrap();
                worst = worst.max((f64::from(*found) - expected).abs() / expected.abs());
            }
        }
        let named = format!("{} {}", case["optimizer"], case["settings"]);
        assert!(worst <= 1e-5, "{named}: {worst:.1e}; PyTorch's float32 is {} off", case["float32"]);
    }
}

/// One step of SGD with velocities in bf16 from gradients: the first step stores the gradient itself.
fn stored(pool: &Pool, grads: &[f32], rounding: Option<(Rounding, u64)>) -> Vec<bf16> {
    let recipe = Recipe { momentum: 0.9, ..Recipe::default() };
    let mut first = vec![bf16::ZERO; grads.len()];
    let numbers = StepNumbers::new(&recipe, 0, 1, 0.0, 1.0, 1.0);
    let moments = Moments { buffers: [Some(&mut first), None, None], rounding };
    let mut master = vec![0.0; grads.len()];
    optimize::<f32, bf16, f32>(
        pool,
        Optimizer::Sgd,
        &numbers,
        grads,
        Master::F32(&mut master),
        moments,
        None,
    );
    first
}

const CHANCE: Rounding = Rounding { seed: 0x1234_5678_9abc, flat: 7, first: 0 };

#[test]
fn stochastic_rounding_keeps_the_mean_and_rounding_to_nearest_does_not() {
    let (pool, count) = (Pool::new(2), 200_000);
    // 1 and 1 + 1/128 are neighbours in bf16.
    for part in [0.1, 0.25, 0.5, 0.9] {
        let value = 1.0 + part / 128.0;
        let found = stored(&pool, &vec![value as f32; count], Some((CHANCE, 1)));
        let up = found.iter().filter(|&&found| found == bf16::from_f32(1.0 + 1.0 / 128.0)).count();
        let down = found.iter().filter(|&&found| found == bf16::ONE).count();
        assert_eq!(up + down, count, "only the two neighbours");
        let deviation = (part * (1.0 - part) / count as f64).sqrt();
        let share = up as f64 / count as f64;
        assert!((share - part).abs() < 4.0 * deviation, "{share} of {part}");
        let nearest = stored(&pool, &vec![value as f32; count], None);
        assert!(nearest.iter().all(|&found| found == bf16::from_f32(value as f32)));
    }
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -2.5, f32::from_bits(0x7fff_ffff)];
    let found = stored(&pool, &special, Some((CHANCE, 1)));
    assert!(found[0].is_nan() && found[5].is_nan());
    assert_eq!(found[1..5], [f32::INFINITY, f32::NEG_INFINITY, 0.0, -2.5].map(bf16::from_f32));
}

#[test]
fn stochastic_rounding_does_not_depend_on_the_shard() {
    let grads: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.37).sin()).collect();
    let whole = stored(&Pool::new(1), &grads, Some((CHANCE, 3)));
    assert_eq!(stored(&Pool::new(3), &grads, Some((CHANCE, 3))), whole);
    for cut in [1, 255, 8192, 20_001] {
        let rest = Rounding { first: cut as u64, ..CHANCE };
        let head = stored(&Pool::new(2), &grads[..cut], Some((CHANCE, 3)));
        let tail = stored(&Pool::new(2), &grads[cut..], Some((rest, 3)));
        assert!([head, tail].concat() == whole, "cut at {cut}");
    }
    for other in [
        (Rounding { flat: 8, ..CHANCE }, 3),
        (Rounding { seed: 1, ..CHANCE }, 3),
        (Rounding { first: 1, ..CHANCE }, 3),
        (CHANCE, 4),
    ] {
        let found = stored(&Pool::new(2), &grads, Some(other));
        let same = found.iter().zip(&whole).filter(|(found, whole)| found == whole).count();
        assert!((20_000..36_000).contains(&same), "{other:?}: {same} of 40,000 alike");
    }
}

#[test]
fn both_moments_round_with_their_own_philox_words() {
    let recipe = Recipe { beta1: 0.0, beta2: 0.0, ..Recipe::default() };
    let grads: Vec<f32> = (0..1000).map(|i| 1.0 + (i as f32 * 0.7).sin() * 0.3).collect();
    let (mut first, mut second) = (vec![bf16::ZERO; 1000], vec![bf16::ZERO; 1000]);
    let rounding = Rounding { seed: 0xfeed_0000_beef, flat: 3, first: (1 << 32) - 500 };
    let moments =
        Moments { buffers: [Some(&mut first), Some(&mut second), None], rounding: Some((rounding, 11)) };
    let numbers = StepNumbers::new(&recipe, 0, 11, 1e-3, 1.0, 1.0);
    let (pool, mut master) = (Pool::new(2), vec![0.0; 1000]);
    optimize::<f32, bf16, f32>(
        &pool,
        Optimizer::AdamW,
        &numbers,
        &grads,
        Master::F32(&mut master),
        moments,
        None,
    );
    for (i, &g) in grads.iter().enumerate() {
        let place = rounding.first + i as u64;
        let counter = [11, 3, place as u32, (place >> 32) as u32];
        let words = zeroth_base::philox4x32(counter, [0x0000_beef, 0xfeed]);
        let expected =
            |value: f32, word: u32| bf16::from_bits(((value.to_bits() + (word >> 16)) >> 16) as u16);
        assert_eq!([first[i], second[i]], [expected(g, words[0]), expected(g * g, words[1])], "element {i}");
    }
}

#[test]
fn small_updates_survive_in_bf16_only_with_stochastic_rounding() {
    let (pool, count) = (Pool::new(2), 2000);
    let recipe = Recipe { beta2: 0.999, ..Recipe::default() };
    let reached = |by_chance: bool| {
        let (mut first, mut second) = (vec![bf16::ZERO; count], vec![bf16::ZERO; count]);
        let mut master = vec![0.0; count];
        for t in 1..=4000 {
            let numbers = StepNumbers::new(&recipe, 0, t, 1e-3, 1.0, 1.0);
            let rounding = by_chance.then_some((CHANCE, t));
            let moments = Moments { buffers: [Some(&mut first), Some(&mut second), None], rounding };
            let grads = vec![0.5f32; count];
            optimize::<f32, bf16, f32>(
                &pool,
                Optimizer::AdamW,
                &numbers,
                &grads,
                Master::F32(&mut master),
                moments,
                None,
            );
        }
        second.iter().map(|v| v.to_f64()).sum::<f64>() / count as f64
    };
    let exact = 0.25 * (1.0 - 0.999f64.powi(4000));
    assert!((reached(true) / exact - 1.0).abs() < 0.01, "{} of {exact}", reached(true));
    assert!(reached(false) < 0.5 * exact, "{} of {exact}: each step is lost in the rounding", reached(false));
}

#[test]
#[should_panic(
    expected = "Lion needs the moments [First]; given, of first, second and third: [false, false, false]"
)]
fn a_missing_moment_panics_with_its_optimizer() {
    let numbers = StepNumbers::new(&Recipe::default(), 0, 1, 1e-3, 1.0, 1.0);
    let moments = Moments::<f32> { buffers: [None, None, None], rounding: None };
    optimize::<f32, f32, f32>(
        &Pool::new(1),
        Optimizer::Lion,
        &numbers,
        &[1.0],
        Master::F32(&mut [1.0]),
        moments,
        None,
    );
}

#[test]
fn sgd_without_momentum_neither_needs_nor_changes_a_momentum_buffer() {
    let recipe = Recipe { weight_decay: [0.5, 0.0], ..Recipe::default() };
    let numbers = StepNumbers::new(&recipe, 0, 4, 0.25, 0.5, 1.0);
    let pool = Pool::new(1);
    let mut without = [2.0f32, -1.0];
    let moments = Moments::<f32> { buffers: [None, None, None], rounding: None };
    optimize::<f32, f32, f32>(
        &pool,
        Optimizer::Sgd,
        &numbers,
        &[4.0, 8.0],
        Master::F32(&mut without),
        moments,
        None,
    );
    // p - 0.25 (0.5 g + 0.5 p)
    assert_eq!(without, [1.25, -1.875]);
    let (mut with, mut velocity) = ([2.0f32, -1.0], [f32::NAN; 2]);
    let moments = Moments { buffers: [Some(&mut velocity), None, None], rounding: None };
    optimize::<f32, f32, f32>(
        &pool,
        Optimizer::Sgd,
        &numbers,
        &[4.0, 8.0],
        Master::F32(&mut with),
        moments,
        None,
    );
    assert_eq!(with, without);
    assert!(velocity.iter().all(|v| v.is_nan()));
}

#[test]
fn adamw_has_the_same_bits_on_every_isa_with_and_without_non_temporal_stores() {
    // Weights of more than 4 MiB, and a length that ends within a line.
    let count = (2 << 20) + 1234;
    let recipe = Recipe {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: [0.1, 0.0],
        bias_correction: 1,
        ..Recipe::default()
    };
    let value = |i: usize, factor: f32| (i as f32 * factor).sin();
    // What is no number, infinite, zero and very small stands among the others.
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-30, f32::from_bits(1), f32::MAX];
    let gradients: Vec<bf16> = (0..count)
        .map(|i| bf16::from_f32(if i % 97 == 0 { odd[i / 97 % odd.len()] } else { value(i, 0.37) }))
        .collect();
    let mut expected = None;
    for &path in Isa::available() {
        let pool = Pool::on_isa(2, path).unwrap();
        let mut master: Vec<f32> = (0..count).map(|i| value(i, 0.11)).collect();
        let (mut first, mut second) = (vec![0.0f32; count], vec![0.0f32; count]);
        let mut weights = vec![bf16::ZERO; count];
        for t in [1, 2] {
            let step = StepNumbers::new(&recipe, 0, t, 1e-2, 1.0, 0.7);
            let moments = Moments { buffers: [Some(&mut first), Some(&mut second), None], rounding: None };
            optimize(
                &pool,
                Optimizer::AdamW,
                &step,
                &gradients,
                Master::F32(&mut master),
                moments,
                Some(&mut weights),
            );
        }
        let number = |value: &f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
        let bits: Vec<u32> = [&master, &first, &second].into_iter().flatten().map(number).collect();
        assert!(
            master
                .iter()
                .zip(&weights)
                .all(|(p, w)| number(&bf16::from_f32(*p).to_f32()) == number(&w.to_f32()))
        );
        assert!(bits.contains(&u32::MAX), "a gradient that is no number reaches the weight");
        let expected = expected.get_or_insert_with(|| bits.clone());
        assert!(*expected == bits, "{path:?}");
    }
}

/// Weights and moments after two steps: bits, but that what is no number is one number.
fn after_two_steps<M: Element>(pool: &Pool, optimizer: Optimizer, is_whole: bool) -> Vec<u32> {
    // Not a multiple of what is near, and more than a task of two threads.
    let count = 40_000 + 77;
    let value = |i: usize, factor: f32| (i as f32 * factor).sin();
    let odd = [f32::NAN, f32::INFINITY, f32::MAX, 0.0, f32::from_bits(1)];
    let gradients: Vec<f32> =
        (0..count).map(|i| if i % 997 == 0 { odd[i / 997 % odd.len()] } else { value(i, 0.37) }).collect();
    // Among them many that lie halfway between two weights.
    let halfway = |i: usize, p: f32| {
        f32::from_bits(p.to_bits() & 0xffff_0000 | if i.is_multiple_of(3) { 0x8000 } else { 0x1234 })
    };
    let given: Vec<f32> = (0..count).map(|i| canonical_master(halfway(i, value(i, 0.11)))).collect();
    let mut weights: Vec<bf16> = given.iter().map(|p| bf16::from_f32(*p)).collect();
    let mut low_bits_of: Vec<i16> = given.iter().zip(&weights).map(|(p, w)| low_bits(*p, *w)).collect();
    let mut master = given;
    let moment = |i: usize| M::from_f32(value(i, 0.05).abs());
    let mut moments: [Vec<M>; MOMENTS] = Moment::ALL.map(|_| (0..count).map(moment).collect());
    let recipe = Recipe { momentum: 0.9, weight_decay: [0.1; 2], ..Recipe::default() };
    for t in [1, 2] {
        // A rate so small that many weights stay and only what they lack changes.
        let numbers = StepNumbers::new(&recipe, 0, t, [1e-2, 1e-6][t as usize - 1], 1.0, 0.7);
        let rounding = Some((Rounding { seed: 5, flat: 1, first: 3 }, t));
        let buffers = moments.each_mut().map(|moment| Some(&mut moment[..]));
        let moments = Moments { buffers, rounding };
        let master = if is_whole { Master::F32(&mut master) } else { Master::LowBits(&mut low_bits_of) };
        optimize(pool, optimizer, &numbers, &gradients, master, moments, Some(&mut weights));
    }
    if !is_whole {
        master = weights.iter().zip(&low_bits_of).map(|(w, rest)| join_low_bits(*w, *rest)).collect();
    }
    let weights = weights.iter().map(|w| w.to_f32());
    let moments = moments.iter().flatten().map(|m| m.to_f32());
    let all = master.into_iter().chain(weights).chain(moments);
    all.map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

#[test]
fn low_bits_and_f32_master_weights_agree_for_every_optimizer_and_isa() {
    for &optimizer in Optimizer::ALL {
        let expected = after_two_steps::<f32>(&Pool::on_isa(1, Isa::Portable).unwrap(), optimizer, true);
        for &path in Isa::available() {
            let pool = Pool::on_isa(2, path).unwrap();
            for is_whole in [true, false] {
                let found = after_two_steps::<f32>(&pool, optimizer, is_whole);
                assert!(found == expected, "{optimizer:?}, {path:?}, whole: {is_whole}");
            }
            let [whole, low] = [true, false].map(|whole| after_two_steps::<bf16>(&pool, optimizer, whole));
            assert!(whole == low, "{optimizer:?}, {path:?}, moments in bf16");
        }
    }
}

#[test]
#[should_panic(expected = "low-order bits of master weights need bf16 weights")]
fn low_bits_without_bf16_weights_panic() {
    let numbers = StepNumbers::new(&Recipe::default(), 0, 1, 1e-2, 1.0, 1.0);
    let moments = Moments::<f32> { buffers: [None, None, None], rounding: None };
    let low_bits_of = Master::LowBits(&mut [1]);
    optimize::<f32, f32, bf16>(&Pool::new(1), Optimizer::Sgd, &numbers, &[1.0], low_bits_of, moments, None);
}
