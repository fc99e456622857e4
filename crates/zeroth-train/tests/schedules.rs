//! Learning rates beside those of transformers and DeepSpeed: `schedules.json`, made by `make_schedules.py`.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use std::path::Path;

use serde_json::Value;
use zeroth_train::{
    HuggingFace, HuggingFaceShape, LrRangeTest, Momentum, OneCycle, Schedule, Warmup, WarmupCosineLr,
    WarmupDecayLr, WarmupLr, WarmupShape,
};

fn read(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The steps, of 2,000, whose rates are in the file.
fn kept(made: &Value) -> Vec<u64> {
    let kept: Vec<u64> = made["kept"].as_array().unwrap().iter().map(|step| step.as_u64().unwrap()).collect();
    assert_eq!(kept.last(), Some(&1999));
    kept
}

/// Every rate within 1e-12 of its own size; where a rate is (nearly) 0, of the learning rate's.
fn assert_rates(schedule: &Schedule, kept: &[u64], rates: &[f64], scale: f64, what: &Value) {
    schedule.check().unwrap();
    assert_eq!(kept.len(), rates.len());
    for (&applied, &expected) in kept.iter().zip(rates) {
        let found = schedule.rate(applied);
        let allowed = 1e-12 * expected.abs().max(1e-4 * scale);
        assert!((found - expected).abs() <= allowed, "{what}: after {applied}: {found}, expected {expected}");
    }
}

fn hugging_face(entry: &Value, learning_rate: f64) -> Schedule {
    let keyword = |key: &str| entry["keywords"][key].as_f64();
    let shape = match HuggingFaceShape::named(entry["name"].as_str().unwrap()).unwrap() {
        HuggingFaceShape::CosineWithRestarts { cycles } => {
            HuggingFaceShape::CosineWithRestarts { cycles: keyword("num_cycles").unwrap_or(cycles) }
        }
        HuggingFaceShape::Polynomial { power, end } => HuggingFaceShape::Polynomial {
            power: keyword("power").unwrap_or(power),
            end: keyword("lr_end").unwrap_or(end),
        },
        HuggingFaceShape::InverseSqrt { .. } => {
            HuggingFaceShape::InverseSqrt { timescale: entry["keywords"]["timescale"].as_u64() }
        }
        shape => shape,
    };
    let whole = |key: &str| entry[key].as_u64().unwrap();
    Schedule::HuggingFace(HuggingFace {
        shape,
        learning_rate,
        warmup_steps: whole("warmup_steps"),
        total_steps: whole("total_steps"),
    })
}

fn deepspeed(entry: &Value, learning_rate: f64) -> Schedule {
    let params = &entry["params"];
    let float = |key: &str, default: f64| params[key].as_f64().unwrap_or(default);
    let whole = |key: &str, default: u64| params[key].as_u64().unwrap_or(default);
    let warmup = Warmup {
        steps: whole("warmup_num_steps", 1000),
        shape: if params["warmup_type"] == "linear" { WarmupShape::Linear } else { WarmupShape::Log },
    };
    let rise =
        |max: f64| WarmupLr { min: float("warmup_min_lr", 0.0), max: float("warmup_max_lr", max), warmup };
    let total_steps = whole("total_num_steps", 0);
    match entry["name"].as_str().unwrap() {
        "WarmupLR" => Schedule::WarmupLr(rise(learning_rate)),
        "WarmupDecayLR" => Schedule::WarmupDecayLr(WarmupDecayLr { rise: rise(0.001), total_steps }),
        "WarmupCosineLR" => Schedule::WarmupCosineLr(WarmupCosineLr {
            learning_rate,
            warmup_min_ratio: float("warmup_min_ratio", 0.0),
            cos_min_ratio: float("cos_min_ratio", 1e-4),
            warmup,
            total_steps,
        }),
        "OneCycle" => {
            let rising_steps = whole("cycle_first_step_size", 2000);
            let rising_stairs = whole("cycle_first_stair_count", 0);
            Schedule::OneCycle(OneCycle {
                min: float("cycle_min_lr", f64::NAN),
                max: float("cycle_max_lr", f64::NAN),
                decay_rate: float("decay_lr_rate", 0.0),
                rising_steps,
                falling_steps: whole("cycle_second_step_size", rising_steps),
                rising_stairs,
                falling_stairs: whole("cycle_second_stair_count", rising_stairs),
                decay_steps: whole("decay_step_size", 0),
                momentum: params["cycle_momentum"].as_bool().unwrap_or(true).then(|| Momentum {
                    min: float("cycle_min_mom", 0.8),
                    max: float("cycle_max_mom", 0.9),
                    decay_rate: float("decay_mom_rate", 0.0),
                }),
            })
        }
        "LRRangeTest" => Schedule::LrRangeTest(LrRangeTest {
            min: float("lr_range_test_min_lr", 1e-3),
            step_size: whole("lr_range_test_step_size", 2000),
            step_rate: float("lr_range_test_step_rate", 1.0),
            staircase: params["lr_range_test_staircase"].as_bool().unwrap_or(false),
        }),
        other => panic!("{other}"),
    }
}

#[test]
fn rates_match_transformers() {
    let made = read("tests/schedules.json");
    let learning_rate = made["learning_rate"].as_f64().unwrap();
    let entries = made["hugging_face"].as_array().unwrap();
    assert!(entries.len() >= 16);
    for entry in entries {
        let rates = numbers(&entry["rates"]);
        assert_rates(&hugging_face(entry, learning_rate), &kept(&made), &rates, learning_rate, entry);
    }
}

#[test]
fn rates_and_betas_match_deepspeed() {
    let made = read("tests/schedules.json");
    let learning_rate = made["learning_rate"].as_f64().unwrap();
    let entries = made["deepspeed"].as_array().unwrap();
    assert!(entries.len() >= 15);
    for entry in entries {
        let schedule = deepspeed(entry, learning_rate);
        assert_rates(&schedule, &kept(&made), &numbers(&entry["rates"]), learning_rate, entry);
        let betas = entry.get("betas").map(|betas| betas.as_array().unwrap());
        for (place, applied) in kept(&made).into_iter().enumerate() {
            let found = schedule.betas(applied);
            let expected = betas.map(|betas| numbers(&betas[place]));
            assert_eq!(found.is_some(), expected.is_some(), "{entry}");
            for (found, expected) in found.into_iter().flatten().zip(expected.into_iter().flatten()) {
                assert!(
                    (found - expected).abs() <= 1e-12,
                    "{entry}: after {applied}: {found}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn rates_match_the_golden_runs() {
    let steps = read("../../tests/golden/llama-dynamic/steps.json");
    let learning_rate = steps["recipe"]["learning_rate"].as_f64().unwrap();
    for run in steps["runs"].as_array().unwrap() {
        let schedule = Schedule::HuggingFace(HuggingFace {
            shape: HuggingFaceShape::named(run["schedule"].as_str().unwrap()).unwrap(),
            learning_rate,
            warmup_steps: run["warmup_steps"].as_u64().unwrap(),
            total_steps: steps["recipe"]["steps"].as_u64().unwrap(),
        });
        let rates = numbers(&run["lr"]);
        let kept: Vec<u64> = (0..rates.len() as u64).collect();
        assert_rates(&schedule, &kept, &rates, learning_rate, &run["name"]);
    }
}
