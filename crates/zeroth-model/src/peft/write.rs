//! What an adapter folder is written from.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::lora::{Lora, LoraTargets, Targets, adds_to_weights, last};
use crate::table::{Parameter, ParameterKind, ParameterRole, ParameterTable};

/// The parameter of experts that holds two of their projections, and PEFT's pattern for it.
pub(super) const FUSED: &str = "gate_up_proj";
pub(super) const FUSED_PATTERN: &str = r".*\.gate_up_proj";
/// PEFT's tasks of language models, without and with an encoder.
pub(super) const CAUSAL_LM: &str = "CAUSAL_LM";
pub(super) const SEQ_2_SEQ_LM: &str = "SEQ_2_SEQ_LM";

/// The `adapter_config.json` of a trained adapter, as PEFT 0.10 and later load it; `base_name` is the base's folder or
/// Hub name.
///
/// Keys are sorted and lists too, so equal adapters have equal files. Only keys that PEFT 0.10 knew are written: older
/// versions refuse a file with others.
///
/// Experts and routers are `target_parameters`, which PEFT has had since 0.17; rank and alpha of an adapter of gate and up,
/// which are one parameter, stand in `rank_pattern` and `alpha_pattern`, as PEFT 0.21 writes them.
pub fn adapter_config_json(lora: &Lora, base: &ParameterTable, base_name: &str) -> String {
    let adapted = Targets::find(base, lora).ok();
    let of_weights = |p: &&Parameter| adds_to_weights(p) && adapted.as_ref().is_some_and(|t| t.contain(p));
    let parameters: Vec<&Parameter> = base.iter().filter(of_weights).collect();
    let targets: Value = match (&lora.targets, &adapted) {
        (_, Some(adapted)) if !parameters.is_empty() => {
            let is_module = |p: &&Parameter| p.kind == ParameterKind::Linear;
            let all = || base.iter().filter(is_module);
            let name = |parameter: &Parameter| parameter.module().to_owned();
            sorted(shortest(all(), |p| adapted.contain(p), name, |p| last(p.module()).to_owned()))
        }
        (LoraTargets::AllLinear, _) => {
            let linears = base.iter().filter(|p| p.kind.is_linear() && p.kind != ParameterKind::Head);
            sorted(linears.map(|parameter| last(parameter.module()).to_owned()).collect())
        }
        (LoraTargets::Named(names), _) => sorted(names.clone()),
        (LoraTargets::Pattern(pattern), _) => pattern.as_str().into(),
    };
    let [rank_pattern, alpha_pattern] = if parameters.iter().any(|p| is_fused(p)) {
        [(2 * lora.rank).into(), whole(2.0 * lora.alpha)]
            .map(|value| Value::Object(Map::from_iter([(FUSED_PATTERN.to_owned(), value)])))
    } else {
        [json!({}), json!({})]
    };
    let alpha = whole(lora.alpha);
    let mut config = json!({
        "alpha_pattern": alpha_pattern,
        "auto_mapping": null,
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": rank_pattern,
        "revision": null,
        "target_modules": targets,
        "task_type": if base.has_encoder() { SEQ_2_SEQ_LM } else { CAUSAL_LM },
        "use_dora": false,
        "use_rslora": lora.rslora,
    });
    if !parameters.is_empty() {
        let all = || base.iter().filter(|p| adds_to_weights(p));
        let is_adapted = |p: &Parameter| parameters.contains(&p);
        // `gate_up_proj`, and `gate.weight`: a router's parameter is only named with its module.
        let short = |p: &Parameter| match p.kind {
            ParameterKind::Router => format!("{}.{}", last(p.module()), last(&p.name)),
            _ => last(&p.name).to_owned(),
        };
        config["target_parameters"] = sorted(shortest(all(), is_adapted, |p| p.name.clone(), short));
    }
    format!("{config:#}\n")
}

/// Whether it is gate and up of all experts, which are one parameter.
fn is_fused(parameter: &Parameter) -> bool {
    parameter.kind == ParameterKind::Expert && parameter.role == Some(ParameterRole::FeedForwardInput)
}

/// PEFT declares alpha as a whole number; others load too.
fn whole(alpha: f64) -> Value {
    if alpha.fract() == 0.0 && alpha < 1e15 { (alpha as u64).into() } else { alpha.into() }
}

/// The names of the adapted parameters among `all`: the short name where it means adapted ones only, else whole names.
fn shortest<'a>(
    all: impl Iterator<Item = &'a Parameter>,
    is_adapted: impl Fn(&Parameter) -> bool,
    name: impl Fn(&Parameter) -> String,
    short: impl Fn(&Parameter) -> String,
) -> Vec<String> {
    let (adapted, others): (Vec<&Parameter>, Vec<&Parameter>) = all.partition(|p| is_adapted(p));
    let others: BTreeSet<String> = others.into_iter().map(&short).collect();
    let chosen = |parameter: &Parameter| {
        let (whole, short) = (name(parameter), short(parameter));
        if others.contains(&short) { whole } else { short }
    };
    adapted.into_iter().map(chosen).collect()
}

fn sorted(mut names: Vec<String>) -> Value {
    names.sort();
    names.dedup();
    names.into()
}

/// The parameters of `adapter_model.safetensors`, in the order that PEFT writes them (by name); `table` may hold the
/// base's parameters too.
pub fn adapter_parameters(table: &ParameterTable) -> Vec<&Parameter> {
    let mut parameters: Vec<&Parameter> = table.iter().filter(|parameter| parameter.is_adapter()).collect();
    parameters.sort_by_key(|parameter| parameter.stored_names().next().map(str::to_owned));
    parameters
}
