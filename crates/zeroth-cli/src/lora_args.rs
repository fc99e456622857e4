//! Flags of `train` for LoRA and QLoRA, with the names of PEFT, ms-swift, TRL, LLaMA-Factory and axolotl.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use zeroth::job::LoraRequest;
use zeroth::model::{LoraInit, LoraTargets};

use crate::value_args::{TrainTypeArg, whole};

/// What axolotl's `adapter:` says instead of naming a folder.
const KINDS_OF_ADAPTER: [(&str, bool); 2] = [("lora", false), ("qlora", true)];

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "LoRA, with the names of PEFT and ms-swift")]
pub(crate) struct LoraArgs {
    /// Train all parameters, or LoRA adapters beside the frozen model [default: full]
    #[arg(long, aliases = ["tuner-type", "sft-type", "finetuning-type"], value_enum, value_name = "TYPE")]
    pub(crate) train_type: Option<TrainTypeArg>,
    /// Rank of the adapters [default: 8]
    #[arg(long, alias = "lora-r", value_name = "N", value_parser = whole(0..))]
    pub(crate) lora_rank: Option<u64>,
    /// Adapters are scaled by alpha / rank [default: 32]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = alpha)]
    pub(crate) lora_alpha: Option<f64>,
    /// Dropout on the input of the adapters [default: 0.05, 0 with adapters of experts or routers]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = dropout)]
    pub(crate) lora_dropout: Option<f64>,
    /// Linear layers that get an adapter: all-linear, names (q_proj v_proj, or q_proj,v_proj), or a regular expression over
    /// the whole module name [default: all-linear]
    #[arg(long, aliases = ["lora-target", "lora-target-modules"], value_name = "NAME|REGEX", num_args = 1..)]
    pub(crate) target_modules: Vec<String>,
    /// The same as --target-modules all-linear, as axolotl writes it
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) lora_target_linear: Option<bool>,
    /// Scale adapters by alpha / √rank instead
    #[arg(long, alias = "peft-use-rslora", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) use_rslora: Option<bool>,
    /// How the inner matrices are drawn: true (as PEFT: Kaiming's uniform) or gaussian; the outer ones are 0 [default: true]
    #[arg(long, alias = "init-weights", value_name = "HOW", value_parser = init)]
    pub(crate) init_lora_weights: Option<LoraInit>,
    /// Start from an adapter folder that zeroth or PEFT wrote; its rank, alpha and targets hold
    #[arg(long, aliases = ["adapters", "adapter-name-or-path", "lora-model-dir"], value_name = "DIR")]
    pub(crate) adapter: Option<String>,
    /// Start from an --adapter that was trained over another base
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) allow_other_base: bool,
    /// Keep the frozen linear layers in 4 bits (QLoRA)
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) quantize: Option<QuantizeArg>,
    /// Draw the frozen weights, or the teacher's, from --seed where the folder has none, for measuring
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) random_weights: bool,
    /// The same as --train-type lora, as TRL writes it
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) use_peft: Option<bool>,
    /// The same as --quantize nf4, as TRL and axolotl write it
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) load_in_4bit: Option<bool>,
    /// bnb, as ms-swift and LLaMA-Factory write it; with --quant-bits 4 the same as --quantize nf4
    #[arg(long, alias = "quantization-method", value_name = "NAME", value_parser = quant_method)]
    pub(crate) quant_method: Option<String>,
    /// 4: the same as --quantize nf4
    #[arg(long, alias = "quantization-bit", value_name = "N", value_parser = quant_bits)]
    pub(crate) quant_bits: Option<u64>,
}

/// How frozen weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizeArg {
    /// 4-bit normal floats in blocks of 64, as bitsandbytes has them
    Nf4,
}

fn alpha(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        Ok(_) => Err("must be a finite number above 0: it scales the adapters".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

fn dropout(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..1.0).contains(&number) => Ok(number),
        Ok(_) => Err("must be at least 0 and below 1".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

fn init(text: &str) -> Result<LoraInit, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" => Ok(LoraInit::Kaiming),
        "gaussian" => Ok(LoraInit::Gaussian),
        _ => Err("not yet built: true and gaussian are".to_owned()),
    }
}

fn quant_method(text: &str) -> Result<String, String> {
    match text {
        "bnb" | "bitsandbytes" => Ok(text.to_owned()),
        _ => Err("not yet built: bnb is, with --quant-bits 4".to_owned()),
    }
}

fn quant_bits(text: &str) -> Result<u64, String> {
    match text {
        "4" => Ok(4),
        _ => Err("not yet built: 4 is".to_owned()),
    }
}

impl LoraArgs {
    /// Full training or LoRA, by whichever trainer's flag says it. LoRA's flags without either are refused.
    pub(crate) fn train_type(&self) -> anyhow::Result<TrainTypeArg> {
        let train_type = self.train_type_or_full()?;
        // `--use-peft false` says full as clearly as `--train-type full` does.
        if let (TrainTypeArg::Full, None, None, Some(flag)) =
            (train_type, self.train_type, self.use_peft, self.typed().next())
        {
            anyhow::bail!(
                "{flag} asks for LoRA, and without --train-type lora all parameters are trained: add --train-type lora, or \
                 leave {flag} out"
            );
        }
        Ok(train_type)
    }

    /// The same of a plan, for which LoRA's flags also describe the LoRA run that it may suggest.
    pub(crate) fn train_type_or_full(&self) -> anyhow::Result<TrainTypeArg> {
        let by_adapter = self.kind_of_adapter().map(|(kind, _)| ("--adapter", kind));
        let by_peft = self.use_peft.filter(|on| *on).map(|_| ("--use-peft", "true"));
        match (self.train_type, by_adapter.or(by_peft)) {
            (Some(TrainTypeArg::Full), Some((flag, value))) => anyhow::bail!(
                "--train-type full and {flag} {value} contradict each other: leave one of them out"
            ),
            (Some(TrainTypeArg::Lora), _) | (None, Some(_)) => Ok(TrainTypeArg::Lora),
            (Some(TrainTypeArg::Full) | None, None) => Ok(TrainTypeArg::Full),
        }
    }

    /// Notes on LoRA flags that have no effect because all parameters are trained. What would train something else is
    /// refused.
    pub(crate) fn notes_of_full(&self) -> anyhow::Result<Vec<String>> {
        self.check_full()?;
        let typed: Vec<&str> = self.typed().collect();
        let plural = if typed.len() == 1 { "has" } else { "have" };
        let note = (!typed.is_empty())
            .then(|| format!("{} {plural} no effect with --train-type full", typed.join(", ")));
        Ok(note.into_iter().collect())
    }

    /// Refuses what full training cannot do.
    pub(crate) fn check_full(&self) -> anyhow::Result<()> {
        if self.quantizes()? {
            anyhow::bail!(
                "--quantize nf4 needs --train-type lora: 4-bit weights cannot take the small updates of full training, and only \
                 frozen ones are kept in 4 bits"
            );
        }
        if let Some(folder) = &self.adapter {
            anyhow::bail!(
                "--adapter {folder} needs --train-type lora: full training has no adapters; `zeroth checkpoint export --merge` \
                 makes a model of base and adapter"
            );
        }
        Ok(())
    }

    /// The LoRA flags that were given.
    pub(crate) fn typed(&self) -> impl Iterator<Item = &'static str> {
        let typed = [
            ("--lora-rank", self.lora_rank.is_some()),
            ("--lora-alpha", self.lora_alpha.is_some()),
            ("--lora-dropout", self.lora_dropout.is_some()),
            ("--target-modules", !self.target_modules.is_empty()),
            ("--lora-target-linear", self.lora_target_linear.is_some()),
            ("--use-rslora", self.use_rslora.is_some()),
            ("--init-lora-weights", self.init_lora_weights.is_some()),
            ("--allow-other-base", self.allow_other_base),
        ];
        typed.into_iter().filter_map(|(flag, is_typed)| is_typed.then_some(flag))
    }

    /// Whether the frozen linear layers are kept in 4 bits.
    pub(crate) fn quantizes(&self) -> anyhow::Result<bool> {
        anyhow::ensure!(
            self.quant_method.is_none() || self.quant_bits.is_some(),
            "--quant-method bnb needs --quant-bits 4 beside it; --quantize nf4 says both"
        );
        let by_flag = self.quantize.is_some() || self.load_in_4bit == Some(true) || self.quant_bits.is_some();
        Ok(by_flag || self.kind_of_adapter().is_some_and(|(_, quantizes)| quantizes))
    }

    /// The folder of `--adapter`.
    pub(crate) fn adapter_folder(&self) -> Option<&str> {
        self.adapter.as_deref().filter(|_| self.kind_of_adapter().is_none())
    }

    fn kind_of_adapter(&self) -> Option<(&'static str, bool)> {
        let given = self.adapter.as_deref()?;
        let kind = KINDS_OF_ADAPTER.into_iter().find(|(kind, _)| *kind == given)?;
        // A folder of that name is a folder.
        (!std::path::Path::new(given).exists()).then_some(kind)
    }

    /// The adapters that the flags ask for.
    pub(crate) fn request(&self) -> anyhow::Result<LoraRequest> {
        Ok(LoraRequest {
            rank: self.lora_rank,
            alpha: self.lora_alpha,
            rslora: self.use_rslora,
            dropout: self.lora_dropout,
            targets: self.targets()?,
            init: self.init_lora_weights,
            adapter: self.adapter_folder().map(PathBuf::from),
            allows_other_base: self.allow_other_base,
            quantized: self.quantizes()?,
        })
    }

    /// The targets that were given; `None` without any.
    fn targets(&self) -> anyhow::Result<Option<LoraTargets>> {
        let typed = parse_targets(&self.target_modules)?;
        if self.lora_target_linear != Some(true) {
            return Ok(typed);
        }
        anyhow::ensure!(
            typed.as_ref().is_none_or(|typed| *typed == LoraTargets::AllLinear),
            "--lora-target-linear and --target-modules {} contradict each other: leave one of them out",
            self.target_modules.join(" ")
        );
        Ok(Some(LoraTargets::AllLinear))
    }
}

/// Names, separate or joined by commas; or one regular expression, which is whatever is not a name. LLaMA-Factory's `all`
/// is PEFT's `all-linear`.
fn parse_targets(given: &[String]) -> anyhow::Result<Option<LoraTargets>> {
    let is_name = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    let mut names: Vec<String> = Vec::new();
    for value in given {
        // A list as Python, JSON or YAML writes it is its names.
        let list = value.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let parts = list.unwrap_or(value).split(',').map(str::trim).filter(|part| !part.is_empty());
        let parts: Vec<&str> = parts.map(|part| if list.is_some() { unquoted(part) } else { part }).collect();
        if parts.iter().all(|part| is_name(part)) {
            names.extend(parts.into_iter().map(str::to_owned));
            continue;
        }
        anyhow::ensure!(
            given.len() == 1,
            "--target-modules {value} is a regular expression, which stands alone: write the other names into it, as in \
             '.*\\.(q_proj|v_proj)'"
        );
        let pattern = match parts[..] {
            [pattern] if list.is_some() => pattern,
            _ => value,
        };
        return Ok(Some(LoraTargets::Pattern(pattern.to_owned())));
    }
    let is_all = |name: &String| matches!(name.as_str(), "all-linear" | "all");
    Ok(match names.iter().find(|name| is_all(name)) {
        Some(all) => {
            anyhow::ensure!(
                names.len() == 1,
                "--target-modules {all} stands alone: it already includes the others"
            );
            Some(LoraTargets::AllLinear)
        }
        None if given.is_empty() => None,
        None => Some(LoraTargets::Named(names)),
    })
}

fn unquoted(text: &str) -> &str {
    let inside = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    inside('\'').or_else(|| inside('"')).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(given: &[&str]) -> Result<Option<LoraTargets>, String> {
        let given: Vec<String> = given.iter().map(|text| (*text).to_owned()).collect();
        parse_targets(&given).map_err(|error| error.to_string())
    }

    #[test]
    fn targets_are_names_or_one_pattern() {
        let named = |names: &[&str]| {
            Ok(Some(LoraTargets::Named(names.iter().map(|name| (*name).to_owned()).collect())))
        };
        assert_eq!(targets(&[]), Ok(None));
        assert_eq!(targets(&["all-linear"]), Ok(Some(LoraTargets::AllLinear)));
        assert_eq!(targets(&["all"]), Ok(Some(LoraTargets::AllLinear)));
        assert_eq!(targets(&["q_proj", "v_proj"]), named(&["q_proj", "v_proj"]));
        assert_eq!(
            targets(&["q_proj, v_proj", "self_attn.o_proj"]),
            named(&["q_proj", "v_proj", "self_attn.o_proj"])
        );
        for list in ["['q_proj','v_proj']", "[\"q_proj\", \"v_proj\"]", "[q_proj, v_proj]"] {
            assert_eq!(targets(&[list]), named(&["q_proj", "v_proj"]), "{list}");
        }
        let pattern = r"model\.layers\.[0-9]{1,2}\.self_attn\.(q|v)_proj";
        assert_eq!(targets(&[pattern]), Ok(Some(LoraTargets::Pattern(pattern.to_owned()))));
        assert!(targets(&["q_proj", ".*v"]).unwrap_err().contains("stands alone"));
        assert!(targets(&["q_proj,all-linear"]).unwrap_err().contains("stands alone"));
    }

    #[test]
    fn every_trainers_words_for_lora_are_understood() {
        let full = LoraArgs::default();
        assert_eq!(full.train_type().unwrap(), TrainTypeArg::Full);
        let peft = LoraArgs { use_peft: Some(true), ..full.clone() };
        assert_eq!(peft.train_type().unwrap(), TrainTypeArg::Lora);
        let qlora = LoraArgs { adapter: Some("qlora".to_owned()), ..full.clone() };
        assert_eq!((qlora.train_type().unwrap(), qlora.quantizes().unwrap()), (TrainTypeArg::Lora, true));
        assert_eq!(qlora.adapter_folder(), None);
        let against = LoraArgs { train_type: Some(TrainTypeArg::Full), ..peft };
        assert!(against.train_type().unwrap_err().to_string().contains("contradict"));
        let silent = LoraArgs { lora_alpha: Some(16.0), ..full.clone() };
        assert!(silent.train_type().unwrap_err().to_string().contains("--lora-alpha asks for LoRA"));
        let declined = LoraArgs { use_peft: Some(false), ..silent };
        assert_eq!(declined.train_type().unwrap(), TrainTypeArg::Full);
        assert_eq!(declined.notes_of_full().unwrap(), ["--lora-alpha has no effect with --train-type full"]);
        let half = LoraArgs { quant_method: Some("bnb".to_owned()), ..full };
        assert!(half.quantizes().unwrap_err().to_string().contains("--quant-bits 4"));
    }
}
