//! The adapters of a run: as asked for, else those of an adapter folder, else the defaults.

use std::path::{Path, PathBuf};

use zeroth_model::{
    Adapter, AdapterError, Lora, LoraError, LoraInit, LoraTargets, ParameterTable, adapts_experts,
    add_adapters,
};
use zeroth_train::LoraJob;

/// The adapters that are asked for. `None` leaves a value to the adapter that the run starts from, or to its default.
#[derive(Debug, Clone, Default)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct LoraRequest {
    pub rank: Option<u64>,
    /// The scale is alpha / rank.
    pub alpha: Option<f64>,
    /// The scale is alpha / √rank instead.
    pub rslora: Option<bool>,
    /// Dropout on the input of the adapters.
    pub dropout: Option<f64>,
    /// The modules that get an adapter.
    pub targets: Option<LoraTargets>,
    /// How new adapters are drawn.
    pub init: Option<LoraInit>,
    /// The adapter folder to start from.
    pub adapter: Option<PathBuf>,
    /// Whether that adapter may have been trained over another base.
    pub allows_other_base: bool,
    /// Whether the frozen linear layers are kept in 4 bits.
    pub quantized: bool,
}

/// Adapters that cannot be trained.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum LoraRequestError {
    #[error("--adapter: {0}")]
    Adapter(AdapterError),
    #[error(
        "--adapter {} continues an adapter, with its own shape and scale: {}; leave these flags out, or --adapter",
        folder.display(),
        differences.join("; ")
    )]
    OtherShape { folder: PathBuf, differences: Vec<String> },
    #[error(
        "--adapter {} continues an adapter, with its own targets: it has {own} matrices, and --target-modules asks for \
         {here}{}; leave --target-modules out, or --adapter",
        folder.display(),
        missing.as_ref().map(|name| format!(" without `{name}`")).unwrap_or_default()
    )]
    OtherTargets {
        folder: PathBuf,
        own: usize,
        here: usize,
        /// One of the adapter's that is not asked for.
        missing: Option<String>,
    },
    #[error(transparent)]
    Lora(#[from] LoraError),
}

/// Resolved adapters.
#[derive(Debug)]
pub struct ResolvedLora {
    /// Rank, scale, dropout and targets.
    pub lora: Lora,
    /// The model's table with the adapters, its linear layers in 4 bits where that is asked for.
    pub table: ParameterTable,
    /// What was decided, and what has no effect.
    pub notes: Vec<String>,
}

impl LoraRequest {
    /// The adapters of a model with this table.
    pub fn resolve(&self, base: &ParameterTable) -> Result<ResolvedLora, LoraRequestError> {
        let mut notes = Vec::new();
        let adapter = self.adapter.as_deref().map(|folder| Adapter::open(folder, base)).transpose();
        let adapter = adapter.map_err(LoraRequestError::Adapter)?;
        if self.allows_other_base && adapter.is_none() {
            notes.push("--allow-other-base has no effect without --adapter".to_owned());
        }
        let mut lora = self.lora(adapter.as_ref().map(Adapter::lora))?;
        if self.dropout.is_none() && lora.dropout > 0.0 && adapts_experts(base, &lora)? {
            lora.dropout = 0.0;
            notes.push("LoRA dropout is 0: adapters of experts and routers have none".to_owned());
        }
        let mut table = add_adapters(base, &lora)?;
        if self.quantized {
            table.quantize();
        }
        if let Some(adapter) = &adapter {
            self.check_targets(adapter, &table)?;
            if self.init.is_some() {
                notes.push(
                    "--init-lora-weights has no effect with --adapter, whose weights are the first"
                        .to_owned(),
                );
            }
        }
        Ok(ResolvedLora { lora, table, notes })
    }

    /// What a run with these adapters trains. `model` is the base as it was named, in this folder.
    pub fn job(&self, lora: Lora, model: &str, folder: &Path, random_base: bool) -> LoraJob {
        LoraJob {
            lora,
            init: self.init.unwrap_or_default(),
            adapter: self.adapter.clone(),
            base: base_name(model, folder),
            random_base,
            quantized: self.quantized,
            allows_other_base: self.allows_other_base,
        }
    }

    /// Values asked for, else those of the adapter, else the defaults. Contradictions are refused, all at once.
    fn lora(&self, adapter: Option<&Lora>) -> Result<Lora, LoraRequestError> {
        if let (Some(folder), Some(found)) = (&self.adapter, adapter) {
            let mut differences = Vec::new();
            let mut compare = |flag: &str, typed: Option<String>, found: String| {
                if let Some(typed) = typed.filter(|typed| *typed != found) {
                    differences.push(format!("{flag} is {typed}, that of the adapter {found}"));
                }
            };
            compare("--lora-rank", self.rank.map(|rank| rank.to_string()), found.rank.to_string());
            compare("--lora-alpha", self.alpha.map(|alpha| alpha.to_string()), found.alpha.to_string());
            compare("--use-rslora", self.rslora.map(|on| on.to_string()), found.rslora.to_string());
            if !differences.is_empty() {
                return Err(LoraRequestError::OtherShape { folder: folder.clone(), differences });
            }
        }
        let start = adapter.cloned().unwrap_or_default();
        Ok(Lora {
            rank: self.rank.unwrap_or(start.rank),
            alpha: self.alpha.unwrap_or(start.alpha),
            rslora: self.rslora.unwrap_or(start.rslora),
            dropout: self.dropout.unwrap_or(start.dropout),
            targets: self.targets.clone().unwrap_or(start.targets),
        })
    }

    /// Refuses targets that differ from the modules of the adapter.
    fn check_targets(&self, adapter: &Adapter, table: &ParameterTable) -> Result<(), LoraRequestError> {
        let known = table.by_name();
        let (own, here) = (adapter.table().iter().count(), table.iter().filter(|p| p.trained).count());
        let missing = adapter.table().iter().find(|parameter| !known.contains_key(parameter.name.as_str()));
        if missing.is_none() && own == here {
            return Ok(());
        }
        let missing = missing.map(|parameter| parameter.name.clone());
        let folder = self.adapter.clone().unwrap_or_default();
        Err(LoraRequestError::OtherTargets { folder, own, here, missing })
    }
}

/// What `adapter_config.json` calls the base: a folder by its full path, which holds from any working directory, else its
/// Hub name.
fn base_name(given: &str, folder: &Path) -> String {
    match Path::new(given).canonicalize() {
        Ok(path) if path.is_dir() => path.display().to_string(),
        Ok(_) => folder.display().to_string(),
        Err(_) => given.to_owned(),
    }
}
