//! LoRA runs: the adapters of a job, and its table split into base and adapters.

use std::path::PathBuf;

use zeroth_base::format_count;
use zeroth_model::{Lora, LoraInit, Parameter, ParameterTable, ParameterUnit};

/// The adapters of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraJob {
    /// Rank, scale, dropout and targets.
    pub lora: Lora,
    /// How new adapters are drawn.
    pub init: LoraInit,
    /// The adapter folder that the run starts from.
    pub adapter: Option<PathBuf>,
    /// The base's folder or Hub name, for `adapter_config.json`.
    pub base: String,
    /// Whether a base without weights is drawn from the seed.
    pub random_base: bool,
    /// Whether the base's linear layers are kept in nf4.
    pub quantized: bool,
    /// Whether the adapter that the run starts from may have been trained over another base.
    pub allows_other_base: bool,
}

/// The parameters of an adapted table that are the base's.
pub fn base_table(table: &ParameterTable) -> ParameterTable {
    ParameterTable { adapters: None, ..filtered(table, |parameter| !parameter.is_adapter()) }
}

/// The parameters of an adapted table that are adapters'. Units without any are left out.
pub fn adapter_table(table: &ParameterTable) -> ParameterTable {
    let mut adapters = filtered(table, Parameter::is_adapter);
    adapters.units.retain(|unit| !unit.parameters.is_empty());
    adapters
}

fn filtered(table: &ParameterTable, keep: impl Fn(&Parameter) -> bool) -> ParameterTable {
    let unit = |unit: &ParameterUnit| ParameterUnit {
        name: unit.name,
        parameters: unit.parameters.iter().filter(|parameter| keep(parameter)).cloned().collect(),
    };
    ParameterTable { units: table.units.iter().map(unit).collect(), ..table.clone() }
}

/// The last parts of the names of the adapted modules, each once, in order: `q_proj, v_proj`.
pub fn adapted_modules(table: &ParameterTable) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for module in table.iter().filter_map(|parameter| Some(parameter.adapts.as_ref()?.module())) {
        let name = module.rsplit_once('.').map_or(module, |(_, last)| last);
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// `LoRA r 8 on q_proj, v_proj: 1.2M of 600M parameters are trained (0.20 %)`.
pub fn describe(lora: &Lora, table: &ParameterTable) -> String {
    let (trained, all) = (table.trained(), table.total());
    format!(
        "LoRA r {} on {}: {} of {} parameters are trained ({:.2} %)",
        lora.rank,
        adapted_modules(table).join(", "),
        format_count(trained),
        format_count(all),
        100.0 * trained as f64 / all as f64
    )
}

#[cfg(test)]
mod tests {
    use zeroth_model::{LoraTargets, ModelConfig, add_adapters, table};

    use super::*;

    fn model() -> ParameterTable {
        let json = r#"{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 16, "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
        table(&ModelConfig::from_json(json, "config.json").unwrap())
    }

    #[test]
    fn a_table_splits_into_base_and_adapters() {
        let base = model();
        let targets = LoraTargets::Named(vec!["q_proj".to_owned(), "down_proj".to_owned()]);
        let lora = Lora { rank: 2, targets, ..Lora::default() };
        let adapted = add_adapters(&base, &lora).unwrap();
        assert_eq!(
            base_table(&adapted).iter().map(|p| &p.name).collect::<Vec<_>>(),
            base.iter().map(|p| &p.name).collect::<Vec<_>>()
        );
        let adapters = adapter_table(&adapted);
        assert_eq!(adapters.iter().count(), 8);
        // q_proj 2·(8 + 8) and down_proj 2·(12 + 8), in each of two blocks.
        assert_eq!(adapters.total(), 2 * (32 + 40));
        assert_eq!(adapted_modules(&adapted), ["q_proj", "down_proj"]);
        let share = 100.0 * 144.0 / (base.total() + 144) as f64;
        let words = describe(&lora, &adapted);
        assert!(words.starts_with("LoRA r 2 on q_proj, down_proj: 144 of "), "{words}");
        assert!(words.ends_with(&format!("are trained ({share:.2} %)")), "{words}");
    }
}
