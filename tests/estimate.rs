//! `zeroth plan --params`: a closed-form estimate that accounts for gathering the largest layer.

use crate::common::{model, zeroth, zeroth_json};
use serde_json::Value;

fn row<'a>(plan: &'a Value, preset: &str) -> &'a Value {
    plan["rows"].as_array().unwrap().iter().find(|row| row["preset"] == preset).unwrap()
}

fn plan(more: &[&str]) -> (i32, Value) {
    zeroth_json(&[&["plan", "--params", "70B", "--ranks", "1"], more].concat())
}

#[test]
fn seventy_billion_parameters_do_not_fit_a_gigabyte() {
    let (code, refused) = plan(&["--device-memory", "1GB"]);
    assert_eq!(code, 3, "{}", refused["reason"]);
    assert_eq!(refused["recommended"], Value::Null);
    let offloaded = row(&refused, "zero3_offload");
    assert_eq!(offloaded["fits"], false);
    // A block of a Llama of this size has 856M parameters, 1.7 GB in 16 bits.
    let layer = offloaded["gathered_layer"].as_u64().unwrap();
    assert!((1_500_000_000..2_500_000_000).contains(&layer), "{layer}");
    assert_eq!(offloaded["device_bytes"]["total"], 0, "totals are the closed form's");
    // The missing memory is what the layer exceeds the budget by, and the suggested change fits.
    let change =
        refused["changes"].as_array().unwrap().iter().find(|c| c["change"] == "device_memory").unwrap();
    assert_eq!(change["to"].as_u64(), Some(layer), "{change}");
    let (code, fits) = plan(&["--device-memory", &layer.to_string()]);
    assert_eq!((code, &fits["recommended"]), (0, &"zero3_offload".into()));
    let short = (layer - 1).to_string();
    assert_eq!(plan(&["--device-memory", &short]).0, 3);
}

#[test]
fn largest_layer_overrides_the_default() {
    let (code, small) = plan(&["--device-memory", "1GB", "--largest-layer", "100M"]);
    assert_eq!(code, 0, "{}", small["reason"]);
    assert_eq!(row(&small, "zero3_offload")["gathered_layer"], 200_000_000);
    // The gathered layer and its gradient are buffers, counted once.
    assert_eq!(row(&small, "zero3_offload")["device_bytes"]["buffers"], 400_000_000);
    assert_eq!(plan(&["--device-memory", "400MB", "--largest-layer", "100M"]).0, 0);
    assert_eq!(plan(&["--device-memory", "399MB", "--largest-layer", "100M"]).0, 3);
}

#[test]
fn only_stage_3_gathers() {
    let (_, plan) = zeroth_json(&["plan", "--params", "8B", "--ranks", "4", "--device-memory", "80GB"]);
    for preset in ["zero0", "zero1", "zero2", "zero2_offload"] {
        assert_eq!(row(&plan, preset)["gathered_layer"], 0, "{preset}");
    }
    for preset in ["zero3", "zero3_offload"] {
        assert!(row(&plan, preset)["gathered_layer"].as_u64().unwrap() > 300_000_000, "{preset}");
    }
    // With a model, the layer is its own largest, and among the buffers.
    let (_, plan) = zeroth_json(&["plan", "--model", &model("Qwen3-8B"), "--ranks", "4", "--device", "cuda"]);
    let zero3 = row(&plan, "zero3");
    let layer = zero3["gathered_layer"].as_u64().unwrap();
    assert!(layer > 0 && layer <= zero3["device_bytes"]["buffers"].as_u64().unwrap(), "{zero3}");
}

#[test]
fn plans_without_a_model_are_labelled_estimates() {
    let (_, estimate) = zeroth_json(&["plan", "--params", "8B", "--ranks", "5"]);
    assert_eq!(estimate["estimate"], true);
    let (_, counted) = zeroth_json(&["plan", "--model", &model("Qwen3-0.6B"), "--ranks", "5"]);
    assert_eq!(counted["estimate"], false);
    let text = zeroth(&["plan", "--params", "8B", "--ranks", "5"]).stdout;
    assert!(text.lines().next().unwrap().contains("estimate"), "{text}");
}

#[test]
fn sizes_without_a_unit_are_refused_before_anything_is_planned() {
    for (flag, typed) in [("--device-memory", "44"), ("--host-memory", "512")] {
        let refused = zeroth(&["plan", "--params", "8B", "--ranks", "5", flag, typed]);
        assert_eq!((refused.code, &refused.stdout[..]), (2, ""), "{}", refused.stderr);
        let hint = format!("is {typed} bytes: a unit is missing, did you mean {typed}GB?");
        assert!(refused.stderr.contains(flag) && refused.stderr.contains(&hint), "{}", refused.stderr);
    }
    let (code, meant) = zeroth_json(&["plan", "--params", "8B", "--ranks", "5", "--device-memory", "44GB"]);
    assert_eq!(code, 0, "{meant}");
    let none = zeroth(&["plan", "--params", "0"]);
    assert_eq!((none.code, &none.stdout[..]), (2, ""), "{}", none.stderr);
    assert!(none.stderr.contains("--params") && none.stderr.contains("at least 1"), "{}", none.stderr);
}
