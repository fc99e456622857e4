//! `--optim`: Hugging Face's names of optimizers.

use zeroth::base::Optimizer;
use zeroth::base::nearest;

/// Names that stand for an optimizer of zeroth. The variants of AdamW differ in PyTorch's kernels only.
const NAMES: [(&str, Optimizer); 10] = [
    ("adamw_torch", Optimizer::AdamW),
    ("adamw_torch_fused", Optimizer::AdamW),
    ("adamw_apex_fused", Optimizer::AdamW),
    ("adamw_hf", Optimizer::AdamW),
    ("adamw", Optimizer::AdamW),
    ("lion_32bit", Optimizer::Lion),
    ("lion", Optimizer::Lion),
    ("ademamix", Optimizer::AdEmaMix),
    ("sgd", Optimizer::Sgd),
    ("adagrad", Optimizer::Adagrad),
];

/// Families of names that Hugging Face has and zeroth has not.
const OTHERS: [&str; 12] = [
    "adafactor",
    "rmsprop",
    "galore",
    "lomo",
    "adalomo",
    "grokadamw",
    "schedule_free",
    "apollo",
    "stable_adamw",
    "muon",
    "adamw_anyprecision",
    "adamw_torch_4bit",
];

/// Parses a name. The error says what to write instead.
pub(crate) fn optimizer(text: &str) -> Result<Optimizer, String> {
    let name = text.to_ascii_lowercase();
    if let Some((_, optimizer)) = NAMES.iter().find(|(known, _)| *known == name) {
        return Ok(*optimizer);
    }
    let known: Vec<&str> = NAMES.iter().map(|(known, _)| *known).collect();
    if name.starts_with("paged_") {
        return Err(
            "paged optimizers are not yet built: --deepspeed zero2_offload keeps the optimizer's state in \
                    host memory"
                .to_owned(),
        );
    }
    if name.contains("8bit") {
        return Err(
            "8-bit optimizer state is not yet built: \"zeroth\": {\"moments\": \"bf16\"} in the file of \
                    --deepspeed halves it"
                .to_owned(),
        );
    }
    if OTHERS.iter().any(|other| name.starts_with(other)) {
        return Err(format!("this optimizer is not yet built; there are {}", known.join(", ")));
    }
    let near = nearest(&name, known.iter().copied());
    let near = near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default();
    Err(format!("unknown optimizer{near}; there are {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_refused_with_a_remedy_or_suggested() {
        assert_eq!(optimizer("adamw_torch_fused"), Ok(Optimizer::AdamW));
        assert_eq!(optimizer("AdEMAMix"), Ok(Optimizer::AdEmaMix));
        for (name, word) in [
            ("adafactor", "not yet built; there are adamw_torch"),
            ("adamw_bnb_8bit", "halves it"),
            ("paged_adamw_32bit", "zero2_offload"),
            ("paged_adamw_8bit", "zero2_offload"),
            ("galore_adamw_layerwise", "not yet built"),
            ("adamw_torhc", "did you mean `adamw_torch`?"),
            ("x", "unknown optimizer; there are"),
        ] {
            let error = optimizer(name).unwrap_err();
            assert!(error.contains(word), "{name}: {error}");
        }
    }
}
