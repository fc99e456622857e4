//! Compares the file with the command.

use serde_json::Value;
use zeroth_base::DType;

use super::batch::{BatchOutcome, Sizes};
use super::command::TrainingCommand;
use super::finding::Disagreement;
use super::script::Trainer;
use crate::check::Severity;
use crate::file_values::FileValues;
use crate::read::Location;
use crate::resolve::{BatchSizes, Flags, Mismatch, ResolveError, ResolveRequest, resolve};
use crate::schema::{self, DefaultValue, KeyType};
use crate::view::{ConfigView, Switch};

const BATCH_KEYS: [&str; 3] =
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

pub(super) struct Comparison<'a> {
    file: &'a FileValues,
    pub(super) view: ConfigView<'a>,
    pub(super) file_name: &'a str,
    pub(super) command: &'a TrainingCommand,
    findings: Vec<Disagreement>,
    pub(super) compared: Vec<String>,
}

impl<'a> Comparison<'a> {
    pub(super) fn new(file: &'a FileValues, file_name: &'a str, command: &'a TrainingCommand) -> Self {
        let view = ConfigView::new(file);
        Self { file, view, file_name, command, findings: Vec::new(), compared: Vec::new() }
    }

    /// Returns the values that agree, and the findings, errors first.
    pub(super) fn run(mut self) -> (Vec<String>, Vec<Disagreement>) {
        if self.command.is_empty {
            let message =
                "the command starts no training, so there is nothing to compare the file with".to_owned();
            let fix =
                "write it after `--`: zeroth config verify FILE -- torchrun --nproc_per_node 4 train.py …"
                    .to_owned();
            self.push(Severity::Error, None, message, fix);
            return (self.compared, self.findings);
        }
        self.unreadable();
        self.settings_file();
        self.named_config();
        self.flags();
        self.precision_of_weights();
        self.unfilled_autos();
        self.checkpointing();
        self.accelerate();
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        (self.compared, self.findings)
    }

    pub(super) fn push(&mut self, severity: Severity, key: Option<&str>, message: String, fix: String) {
        let location = key.and_then(|key| self.file.get(key)).map(|value| value.location);
        self.push_at(severity, key, location, message, fix);
    }

    fn push_at(
        &mut self,
        severity: Severity,
        key: Option<&str>,
        location: Option<Location>,
        message: String,
        fix: String,
    ) {
        let key = key.and_then(|key| schema::find(key).next()).map(|key| key.path);
        self.findings.push(Disagreement { severity, key, location, message, fix });
    }

    fn unreadable(&mut self) {
        for (flag, text, wants) in &self.command.script.unreadable {
            let said = if text.is_empty() { "nothing".to_owned() } else { format!("`{text}`") };
            let message =
                format!("the command's {flag} is {said}, which is not {wants}, and was not compared");
            self.push(Severity::Warning, None, message, format!("write {wants} after {flag}"));
        }
    }

    fn settings_file(&mut self) {
        if let Some(file) = &self.command.script.settings_file {
            let message = format!("the command reads settings from {file}, which were not compared");
            let fix = format!("write the flags of {file} that meet keys of the config into the command");
            self.push(Severity::Warning, None, message, fix);
        }
    }

    /// Compares the command's flags, and the trainer's defaults for flags that are not given, with the file's keys.
    fn flags(&mut self) {
        let given = self.given_flags();
        let ranks = self.command.world.size;
        let with_defaults = match self.command.script.settings_file {
            // Other flags may be set in the settings file, which is not read here.
            Some(_) => None,
            None => self.command.trainer.with_defaults(&given, ranks.unwrap_or(1)),
        };
        let sizes = Sizes::new(self.file, self.command);
        let BatchOutcome { finding, batch, covers_micro } =
            sizes.compare(match (&with_defaults, self.command.trainer) {
                (Some(flags), _) => (flags.per_device_train_batch_size, flags.gradient_accumulation_steps),
                (None, Trainer::Zeroth) => (Some(1), Some(1)),
                (None, _) => (None, None),
            });
        let has_batch_finding = finding.is_some();
        self.findings.extend(finding);
        self.findings.extend(sizes.own_word());

        let contradictions: Vec<Mismatch> = self
            .mismatches(&given)
            .into_iter()
            .filter(|found| !(covers_micro && found.path == "train_micro_batch_size_per_gpu"))
            .collect();
        for found in &contradictions {
            self.contradiction(found);
        }
        if let Some(flags) = with_defaults {
            let explains = |found: &Mismatch| BATCH_KEYS.contains(&found.path.as_str());
            let explained = has_batch_finding || contradictions.iter().any(explains);
            let not_given: Vec<Mismatch> = self
                .mismatches(&flags)
                .into_iter()
                .filter(|found| !contradictions.iter().any(|given| given.path == found.path))
                .filter(|found| !(explained && explains(found)))
                .collect();
            for found in &not_given {
                self.not_given(found);
            }
        }
        self.agreeing(&given, batch);
    }

    /// The mismatches that `resolve` reports for these flags. The product of the batch sizes has a separate finding.
    fn mismatches(&self, flags: &Flags) -> Vec<Mismatch> {
        let ranks = self.command.world.size.unwrap_or(1);
        let request = ResolveRequest { file: self.file, flags, ranks, model: None, steps: None };
        let found = match resolve(&request) {
            Err(ResolveError::Mismatch(found)) => found,
            // The batch is compared separately, and a missing hidden size contradicts nothing.
            Ok(_)
            | Err(ResolveError::Batch(_) | ResolveError::Groups(_) | ResolveError::HiddenSize { .. }) => {
                return Vec::new();
            }
        };
        let is_ours = |path: &str| path.starts_with("zeroth.") && self.command.trainer != Trainer::Zeroth;
        found.into_iter().filter(|found| found.path != "train_batch_size" && !is_ours(&found.path)).collect()
    }

    /// The script's flags, with the precision they imply, and with both betas if one is given.
    fn given_flags(&mut self) -> Flags {
        let mut flags = self.command.script.flags.clone();
        flags.precision = self.given_precision();
        let defaults = self.command.trainer.with_defaults(&flags, 1);
        let betas =
            self.view.given("optimizer.params.betas").and_then(Value::as_array).cloned().unwrap_or_default();
        // The other beta is the trainer's default or else the file's, which contradicts nothing.
        let other = |index: usize, default: Option<f64>| default.or_else(|| betas.get(index)?.as_f64());
        match (flags.adam_beta1, flags.adam_beta2) {
            (None, Some(_)) => flags.adam_beta1 = other(0, defaults.and_then(|flags| flags.adam_beta1)),
            (Some(_), None) => flags.adam_beta2 = other(1, defaults.and_then(|flags| flags.adam_beta2)),
            _ => {}
        }
        flags
    }

    fn given_precision(&mut self) -> Option<DType> {
        let script = &self.command.script;
        let precisions: Vec<DType> =
            [(script.bf16, DType::Bf16), (script.fp16, DType::F16), (script.fp32, DType::F32)]
                .into_iter()
                .filter_map(|(on, precision)| (on == Some(true)).then_some(precision))
                .collect();
        if precisions.len() > 1 {
            let names: Vec<String> = precisions.iter().map(|precision| format!("--{precision}")).collect();
            let message = format!("the command has {}, and a run has one precision", names.join(" and "));
            self.push(Severity::Error, None, message, "keep one of them".to_owned());
        }
        if let Some(precision) = precisions.first() {
            return Some(*precision);
        }
        let off =
            |given: Option<bool>, path: &str| given == Some(false) && self.view.switch(path) == Switch::On;
        let both_off = script.bf16 == Some(false) && script.fp16 == Some(false);
        if both_off || off(script.bf16, "bf16.enabled") || off(script.fp16, "fp16.enabled") {
            return Some(DType::F32);
        }
        // ms-swift trains in the dtype of the loaded weights.
        if self.command.trainer == Trainer::Swift { script.dtype } else { None }
    }

    /// Reports a flag that contradicts the file.
    fn contradiction(&mut self, found: &Mismatch) {
        let line = found.to_string();
        let line = line.trim_start_matches("- ");
        let trainer = self.command.trainer;
        let is_schedule = found.path == "scheduler.type" && trainer != Trainer::Zeroth;
        let (severity, then) = if is_schedule {
            (Severity::Warning, "the file's schedule counts, and nobody says so".to_owned())
        } else if trainer.compares() {
            (Severity::Error, format!("{} stops at this", trainer.name()))
        } else if self.command.accelerate.is_some() {
            (Severity::Warning, "accelerate takes the file's".to_owned())
        } else {
            (Severity::Warning, "which of the two counts is up to the script".to_owned())
        };
        let fix = if is_schedule {
            format!("remove {} or the scheduler section", found.flag)
        } else if trainer.compares() {
            format!("write \"auto\" for {} in the file, or remove {}", found.path, found.flag)
        } else {
            format!("write {} in both places", shown(&found.file_value))
        };
        self.push_at(severity, Some(&found.path), found.location, format!("{line}: {then}"), fix);
    }

    /// Reports a flag that is not given, but whose default the trainer compares with the file.
    fn not_given(&mut self, found: &Mismatch) {
        let trainer = self.command.trainer.name();
        let line = Mismatch { flag: "the default, as it is not typed", ..found.clone() }.to_string();
        let line = line.trim_start_matches("- ");
        let message = format!("{line}: {trainer} stops at this, unless the script changes the default");
        let fix = match found.hf {
            "bf16|bf16_full_eval" => "add --bf16 to the command, or write \"auto\"".to_owned(),
            "fp16|fp16_full_eval" => "add --fp16 to the command, or write \"auto\"".to_owned(),
            "adam_beta1+adam_beta2" => "type both betas as the file has them, or write \"auto\"".to_owned(),
            name => format!("add --{name} {} to the command, or write \"auto\"", shown(&found.file_value)),
        };
        self.push_at(Severity::Warning, Some(&found.path), found.location, message, fix);
    }

    /// Collects values that both sides agree on, or that only one side gives.
    fn agreeing(&mut self, given: &Flags, batch: Option<BatchSizes>) {
        let contradicted = |path: &str| self.findings.iter().any(|finding| finding.key == Some(path));
        let mut compared = Vec::new();
        let fits = !BATCH_KEYS.iter().any(|path| contradicted(path));
        if let (Some(BatchSizes { train, micro, accumulation }), Some(ranks)) =
            (batch.filter(|_| fits), self.command.world.size)
        {
            let noun = if ranks == 1 { "rank" } else { "ranks" };
            compared.push(format!("batch {train} = {micro} × {accumulation} × {ranks} {noun}"));
        }
        let on = |path: &str| self.view.switch(path) == Switch::On;
        let precision = given.precision.or_else(|| {
            let of = |path: &str, precision: DType| on(path).then_some(precision);
            of("bf16.enabled", DType::Bf16).or(of("fp16.enabled", DType::F16))
        });
        if let Some(precision) =
            precision.filter(|_| !contradicted("bf16.enabled") && !contradicted("fp16.enabled"))
        {
            compared.push(precision.to_string());
        }
        let clipping = self.view.number("gradient_clipping").or(given.max_grad_norm);
        if let Some(clipping) = clipping.filter(|_| !contradicted("gradient_clipping")) {
            compared.push(format!("clipping {}", shown(&clipping.into())));
        }
        let rate = "optimizer.params.lr";
        if let Some(lr) =
            given.learning_rate.filter(|_| self.view.number(rate).is_some() && !contradicted(rate))
        {
            compared.push(format!("learning rate {}", shown(&lr.into())));
        }
        self.compared.extend(compared);
    }

    /// Warns about weights that are loaded in one half precision and trained in the other.
    fn precision_of_weights(&mut self) {
        let (Some(dtype), false) = (self.command.script.dtype, self.command.trainer == Trainer::Swift) else {
            return;
        };
        let trained = [("bf16.enabled", DType::Bf16), ("fp16.enabled", DType::F16)];
        let other = trained.into_iter().find(|(path, trained)| {
            // Loading in fp32 loses nothing; only loading in the other half precision does.
            dtype != DType::F32 && *trained != dtype && self.view.switch(path) == Switch::On
        });
        if let Some((path, trained)) = other {
            let message =
                format!("the file trains in {trained}, and the command loads the weights in {dtype}");
            self.push(Severity::Warning, Some(path), message, "name one type in both places".to_owned());
        }
    }

    /// Warns about `"auto"` values that nothing fills; DeepSpeed itself does not fill them.
    fn unfilled_autos(&mut self) {
        let fills = self.command.trainer.compares()
            || self.command.accelerate.is_some()
            || self.command.script.settings_file.is_some();
        if fills {
            return;
        }
        let is_open = |path: &str| {
            let key = schema::find(path).next();
            // These keys have "auto" as a regular value.
            let knows_auto = key.is_some_and(|key| {
                matches!(key.kind, KeyType::OneOf(words) if words.contains(&"auto"))
                    || key.default == DefaultValue::Text("auto")
            });
            self.file.get(path).is_some_and(|value| value.value == "auto") && !knows_auto
        };
        let open: Vec<&'static str> =
            self.file.iter().map(|(path, _)| path).filter(|path| is_open(path)).collect();
        let (inside, top): (Vec<&str>, Vec<&str>) = open.into_iter().partition(|path| path.contains('.'));
        let fix = "write the numbers, or start the run with something that fills \"auto\": Hugging Face's Trainer, \
                   ms-swift or `zeroth train`";
        if let Some(first) = top.first() {
            let message = format!(
                "{} {} \"auto\", and nothing in this command fills that: unless the script does, DeepSpeed keeps the word and fails",
                top.join(", "),
                if top.len() == 1 { "is" } else { "are" }
            );
            self.push(Severity::Warning, Some(first), message, fix.to_owned());
        }
        if let Some(first) = inside.first() {
            let defaults: Vec<String> = inside.iter().map(|path| with_default(path)).collect();
            let message = format!(
                "{} {} \"auto\", and nothing in this command fills that: DeepSpeed takes the defaults without a word",
                defaults.join(", "),
                if inside.len() == 1 { "is" } else { "are" }
            );
            self.push(Severity::Warning, Some(first), message, fix.to_owned());
        }
    }

    /// Warns about `activation_checkpointing`, which needs a call that Hugging Face's Trainer does not make.
    fn checkpointing(&mut self) {
        let section = "activation_checkpointing";
        let trainer = self.command.trainer;
        if !self.file.has_section(section) || !matches!(trainer, Trainer::HuggingFace | Trainer::Swift) {
            return;
        }
        let inside = self.file.iter().find(|(path, _)| path.starts_with("activation_checkpointing."));
        let location = inside.map(|(_, file)| file.location);
        let given = self.command.script.flags.gradient_checkpointing;
        // ms-swift recomputes by default.
        let recomputes = given.unwrap_or(trainer == Trainer::Swift);
        let (message, fix) = if recomputes {
            (
                format!(
                    "{} recomputes in its own way and reads nothing of activation_checkpointing; `zeroth train` does",
                    trainer.name()
                ),
                "remove the section, or train with zeroth",
            )
        } else {
            (
                format!(
                    "{} reads nothing of activation_checkpointing, and without --gradient_checkpointing nothing is \
                     recomputed; `zeroth train` honours the section by itself",
                    trainer.name()
                ),
                "add --gradient_checkpointing to the command",
            )
        };
        self.push_at(Severity::Warning, Some(section), location, message, fix.to_owned());
    }
}

/// Formats a value as in the file, but without quotes.
pub(super) fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn with_default(path: &str) -> String {
    let default = schema::find(path).next().and_then(|key| key.default.to_json());
    match default {
        Some(value) => format!("{path} (default {})", shown(&value)),
        None => path.to_owned(),
    }
}
