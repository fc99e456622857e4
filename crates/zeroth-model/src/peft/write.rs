//! What an adapter folder is written from.

use zeroth_base::DType;

use serde_json::{Value, json};

use crate::lora::{Lora, LoraTargets};
use crate::safetensors::NewTensor;
use crate::table::{ParameterKind, ParameterTable};

/// The `adapter_config.json` of a trained adapter, as PEFT 0.10 and later load it; `base_name` is the base's folder or
/// Hub name.
///
/// Keys are sorted and lists too, so equal adapters have equal files. Only keys that PEFT 0.10 knew are written: older
/// versions refuse a file with others.
pub fn adapter_config_json(lora: &Lora, base: &ParameterTable, base_name: &str) -> String {
    let targets: Value = match &lora.targets {
        LoraTargets::AllLinear => {
            let linears = base.iter().filter(|p| p.kind.is_linear() && p.kind != ParameterKind::Head);
            let last = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
            sorted(linears.map(|parameter| last(parameter.module())).collect())
        }
        LoraTargets::Named(names) => sorted(names.clone()),
        LoraTargets::Pattern(pattern) => pattern.as_str().into(),
    };
    // PEFT declares alpha as a whole number; others load too.
    let alpha: Value = if lora.alpha.fract() == 0.0 && lora.alpha < 1e15 {
        (lora.alpha as u64).into()
    } else {
        lora.alpha.into()
    };
    let config = json!({
        "alpha_pattern": {},
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
        "rank_pattern": {},
        "revision": null,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": lora.rslora,
    });
    format!("{config:#}\n")
}

fn sorted(mut names: Vec<String>) -> Value {
    names.sort();
    names.dedup();
    names.into()
}

/// The tensors of `adapter_model.safetensors`, f32, in the order that PEFT writes them (by name); `table` may hold the
/// base's parameters too.
pub fn adapter_tensors(table: &ParameterTable) -> Vec<NewTensor> {
    let matrices = table.iter().filter(|p| matches!(p.kind, ParameterKind::LoraA | ParameterKind::LoraB));
    let mut tensors: Vec<NewTensor> =
        matrices.map(|parameter| NewTensor::of(parameter, DType::F32)).collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}
