//! Fills every key: from the file, a given flag, an `"auto"` rule, or its default.

use serde_json::{Value, json};
use zeroth_base::{DType, Optimizer};

use super::batch::{self, BatchSizes};
use super::flags::{self, WarmupLength};
use super::mismatch::Mismatch;
use super::request::{ResolveError, ResolveRequest};
use super::resolved::{Origin, Resolved, ResolvedSetting};
use crate::file_values::FileValue;
use crate::schema::{self, AutoRule, DefaultValue, Derivation, Effect, Key, KeyType};
use crate::view::{ConfigView, Switch};

pub(super) struct Filler<'a> {
    request: &'a ResolveRequest<'a>,
    view: ConfigView<'a>,
    precision: DType,
    batch: Option<BatchSizes>,
    mismatches: Vec<Mismatch>,
    missing_hidden: Vec<&'static str>,
    notes: Vec<String>,
    settings: Vec<ResolvedSetting>,
}

impl<'a> Filler<'a> {
    pub(super) fn new(request: &'a ResolveRequest<'a>) -> Self {
        let view = ConfigView::new(request.file);
        Self {
            request,
            view,
            precision: precision(view, request.flags.precision),
            batch: None,
            mismatches: Vec::new(),
            missing_hidden: Vec::new(),
            notes: Vec::new(),
            settings: Vec::new(),
        }
    }

    pub(super) fn fill(mut self) -> Result<Resolved, ResolveError> {
        let batch = self.batch();
        self.batch = batch.as_ref().ok().copied();
        for key in schema::keys() {
            if let Some(setting) = self.setting(key) {
                self.settings.push(setting);
            }
        }
        self.compare_schedule_flags();
        self.note_idle_flags();
        // Contradictions first: they explain a batch that does not fit.
        if !self.mismatches.is_empty() {
            return Err(ResolveError::Mismatch(self.mismatches));
        }
        batch?;
        if !self.missing_hidden.is_empty() {
            let no_model = self.request.model.is_none();
            return Err(ResolveError::HiddenSize { keys: self.missing_hidden, no_model });
        }
        let resolved = Resolved::new(self.settings, self.notes);
        resolved.check_groups(self.request.ranks)?;
        Ok(resolved)
    }

    /// Fills the keys that wait for the number of steps. The others are as they were resolved.
    pub(super) fn fill_steps(mut self, resolved: &mut Resolved) -> Result<(), ResolveError> {
        for key in schema::keys().filter(|key| waits_for_steps(key)) {
            if let Some(setting) = self.setting(key) {
                self.settings.push(setting);
            }
        }
        self.fill_own_schedule();
        if !self.mismatches.is_empty() {
            return Err(ResolveError::Mismatch(self.mismatches));
        }
        resolved.notes.retain(|note| self.settings.iter().all(|setting| *note != unknown_steps(setting.key)));
        for ResolvedSetting { key, value, origin } in self.settings {
            resolved.set(key.path, value, origin);
        }
        Ok(())
    }

    /// The batch sizes from the file, where it names them, and from given flags; what is left is computed.
    fn batch(&mut self) -> Result<BatchSizes, ResolveError> {
        let flags = self.request.flags;
        let given = |path: &str| self.view.integer(path).and_then(|value| u64::try_from(value).ok());
        let train = given("train_batch_size");
        let micro = given("train_micro_batch_size_per_gpu").or(flags.per_device_train_batch_size);
        let accumulation = given("gradient_accumulation_steps").or(flags.gradient_accumulation_steps);
        let ranks = self.request.ranks;
        // Both halves are given and the file's whole is another: Hugging Face's own line for it.
        if let (Some(train), Some(micro), Some(accumulation)) =
            (train, flags.per_device_train_batch_size, flags.gradient_accumulation_steps)
        {
            let calculated = micro.saturating_mul(accumulation).saturating_mul(ranks);
            if calculated != train {
                self.mismatches.push(Mismatch {
                    path: "train_batch_size".to_owned(),
                    file_value: train.into(),
                    location: self.request.file.get("train_batch_size").map(|given| given.location),
                    hf: "train_batch_size (calculated)",
                    flag_value: calculated.into(),
                    flag: "--per-device-train-batch-size × --gradient-accumulation-steps × ranks",
                });
            }
        }
        let micro = if train.is_none() { micro.or(Some(flags.micro_batch())) } else { micro };
        let accumulation =
            if train.is_none() { accumulation.or(Some(flags.accumulation())) } else { accumulation };
        Ok(batch::triangulate(train, micro, accumulation, ranks)?)
    }

    fn setting(&mut self, key: &'static Key) -> Option<ResolvedSetting> {
        if key.kind == KeyType::Section || matches!(key.effect, Effect::Deprecated(_) | Effect::Refused(_)) {
            return None;
        }
        if !key.types.is_empty() && !self.is_of_the_type(key) {
            return None;
        }
        let given = self.request.file.get(key.path);
        if let Some(forced) = self.forced(key, given) {
            return Some(forced);
        }
        let is_auto = given.is_some_and(|given| given.value == json!("auto"));
        match given {
            Some(given)
                if !is_auto || matches!(key.kind, KeyType::OneOf(words) if words.contains(&"auto")) =>
            {
                self.compare(key, given);
                self.compare_direct(key, given);
                Some(ResolvedSetting {
                    key,
                    value: given.value.clone(),
                    origin: Origin::File(given.location),
                })
            }
            _ => match self.request.flags.direct(key.path) {
                Some((value, flag, _)) => Some(ResolvedSetting { key, value, origin: Origin::Flag(flag) }),
                None => self.open(key, is_auto),
            },
        }
    }

    /// The optimizer's type: the file's, else --optim, else AdamW.
    fn optimizer_type(&self) -> &'a str {
        let by_flag = self.request.flags.optimizer.map(Optimizer::name);
        self.view.text("optimizer.type").or(by_flag).unwrap_or("AdamW")
    }

    /// A flag of a key without a rule against the file's value.
    fn compare_direct(&mut self, key: &'static Key, given: &FileValue) {
        let Some((flag_value, flag, hf)) = self.request.flags.direct(key.path) else { return };
        // DeepSpeed's Adam is AdamW unless adam_w_mode is false.
        let is_adamw = key.path == "optimizer.type"
            && given.value == "Adam"
            && flag_value == "AdamW"
            && self.view.value("optimizer.params.adam_w_mode") != Some(&Value::Bool(false));
        if !is_adamw && !equal(&given.value, &flag_value) {
            self.mismatches.push(Mismatch {
                path: key.path.to_owned(),
                file_value: given.value.clone(),
                location: Some(given.location),
                hf,
                flag_value,
                flag,
            });
        }
    }

    /// Whether a parameter given by a flag belongs to the optimizer or scheduler of this run.
    fn is_of_the_type(&self, key: &Key) -> bool {
        if key.path.starts_with("optimizer.") {
            return key.is_of(Some(self.optimizer_type()));
        }
        key.is_of(self.view.text("scheduler.type"))
    }

    /// Two keys that Hugging Face's Trainer always overwrites.
    fn forced(&mut self, key: &'static Key, given: Option<&FileValue>) -> Option<ResolvedSetting> {
        let origin = match key.auto? {
            AutoRule::NodeLocal if self.request.flags.save_on_each_node == Some(true) => {
                Origin::Flag("--save-on-each-node")
            }
            AutoRule::UntestedOptimizer if !self.request.file.has_section("optimizer") => {
                Origin::Auto("the file has no optimizer section".to_owned())
            }
            _ => return None,
        };
        if let Some(given) = given.filter(|given| given.value != Value::Bool(true)) {
            self.notes.push(format!("{}: the file's {} is overwritten ({origin})", key.path, given.value));
        }
        Some(ResolvedSetting { key, value: true.into(), origin })
    }

    /// A given flag against the file's value.
    fn compare(&mut self, key: &'static Key, given: &FileValue) {
        let Some(rule) = key.auto else { return };
        let Some(rule_flag) =
            flags::rule_flag(rule, self.request.flags).filter(|rule_flag| rule_flag.is_given)
        else {
            return;
        };
        let (Some(hf), Some((flag_value, _))) = (rule_flag.hf, self.by_rule(rule)) else { return };
        if !equal(&given.value, &flag_value) {
            self.mismatches.push(Mismatch {
                path: key.path.to_owned(),
                file_value: given.value.clone(),
                location: Some(given.location),
                hf,
                flag_value,
                flag: rule_flag.flag,
            });
        }
    }

    /// A key that the file leaves open: `explicit` where it says `"auto"`, else it is absent.
    fn open(&mut self, key: &'static Key, explicit: bool) -> Option<ResolvedSetting> {
        if let Some(rule) = key.auto {
            let rule_flag = flags::rule_flag(rule, self.request.flags);
            let by_flag = rule_flag.is_some_and(|rule_flag| rule_flag.is_given);
            if by_flag || explicit || self.fills_absent(key, rule) {
                if is_hidden_rule(rule) && self.stage_uses(key) && self.hidden().is_none() {
                    self.missing_hidden.push(key.path);
                    return None;
                }
                if let Some((value, said)) = self.by_rule(rule).filter(|_| self.stage_uses(key)) {
                    let origin = match rule_flag {
                        Some(rule_flag) if rule_flag.is_given => Origin::Flag(rule_flag.flag),
                        _ => Origin::Auto(said),
                    };
                    return Some(ResolvedSetting { key, value, origin });
                }
                if waits_for_steps(key) {
                    self.notes.push(unknown_steps(key));
                    let origin = Origin::Auto("known once the data is read".to_owned());
                    return Some(ResolvedSetting { key, value: "auto".into(), origin });
                }
            }
        }
        if explicit && key.auto != Some(AutoRule::Group) {
            self.notes.push(format!("{}: nothing fills \"auto\" here, so its default counts", key.path));
        } else if is_silent(key) || (key.parent() == "activation_checkpointing" && !self.recomputes()) {
            // The section's presence turns checkpointing on: its defaults must not.
            return None;
        }
        let value = self.default(key)?;
        let origin = match key.path {
            "zeroth.recompute" if self.recomputes() => self.why_recomputed(),
            _ => Origin::Default,
        };
        Some(ResolvedSetting { key, value, origin })
    }

    /// Whether an absent key is filled by its rule even though no flag was given. A section in the file wins over
    /// flags that are not given: what is absent inside it has the optimizer's or scheduler's own default.
    fn fills_absent(&self, key: &Key, rule: AutoRule) -> bool {
        match rule {
            AutoRule::MicroBatch
            | AutoRule::Accumulation
            | AutoRule::TrainBatch
            | AutoRule::Clipping
            | AutoRule::Fp16
            | AutoRule::Bf16
            | AutoRule::TotalSteps => true,
            AutoRule::LearningRate | AutoRule::Betas | AutoRule::Epsilon | AutoRule::WeightDecay => {
                key.path.starts_with("optimizer.") && !self.request.file.has_section("optimizer")
            }
            AutoRule::Blocks => self.recomputes(),
            _ => false,
        }
    }

    /// The stage-3 keys are filled at stage 3 only; below it their default is as good.
    fn stage_uses(&self, key: &Key) -> bool {
        !key.name().starts_with("stage3_") || self.view.stage() == 3
    }

    fn hidden(&self) -> Option<u64> {
        self.request.model.and_then(|model| model.hidden_size)
    }

    fn steps(&self) -> Option<u64> {
        self.request.flags.max_steps.or(self.request.steps)
    }

    fn recomputes(&self) -> bool {
        self.request.file.has_section("activation_checkpointing")
            || self.request.flags.gradient_checkpointing == Some(true)
    }

    fn why_recomputed(&self) -> Origin {
        if self.request.flags.gradient_checkpointing == Some(true) {
            return Origin::Flag("--gradient-checkpointing");
        }
        Origin::Auto("the file has the section activation_checkpointing".to_owned())
    }

    /// The value of a rule, and the rule in words; `None` where an input is unknown.
    fn by_rule(&self, rule: AutoRule) -> Option<(Value, String)> {
        let flags = self.request.flags;
        let said = |text: &str| text.to_owned();
        Some(match rule {
            AutoRule::MicroBatch => match flags.per_device_train_batch_size {
                Some(by_flag) => (by_flag.into(), said("--per-device-train-batch-size")),
                None => (self.batch?.micro.into(), said("from the other batch sizes")),
            },
            AutoRule::Accumulation => match flags.gradient_accumulation_steps {
                Some(by_flag) => (by_flag.into(), said("--gradient-accumulation-steps")),
                None => (self.batch?.accumulation.into(), said("from the other batch sizes")),
            },
            AutoRule::TrainBatch => (self.batch?.train.into(), said("ranks × micro-batch × accumulation")),
            AutoRule::Clipping => (flags.max_grad_norm().into(), said("max_grad_norm")),
            AutoRule::LearningRate => (flags.learning_rate().into(), said("learning_rate")),
            AutoRule::WarmupMaxLr => (self.base_learning_rate().into(), said("learning_rate")),
            AutoRule::Betas => (json!(flags.betas()), said("adam_beta1, adam_beta2")),
            AutoRule::Epsilon => (flags.epsilon().into(), said("adam_epsilon")),
            AutoRule::WeightDecay => (flags.weight_decay().into(), said("weight_decay")),
            AutoRule::WarmupMinLr => (json!(0.0), said("0")),
            AutoRule::Fp16 => ((self.precision == DType::F16).into(), said("the run's precision")),
            AutoRule::Bf16 => ((self.precision == DType::Bf16).into(), said("the run's precision")),
            AutoRule::HiddenSquared => (self.hidden_squared()?.into(), said("hidden_size²")),
            AutoRule::NineTenthsHiddenSquared => {
                // In integers: 0.9 · h² as a float is the fraction that DeepSpeed then refuses.
                (
                    (self.hidden_squared()? / 10 * 9 + self.hidden_squared()? % 10 * 9 / 10).into(),
                    said("0.9 · hidden_size²"),
                )
            }
            AutoRule::TenHidden => (self.hidden()?.saturating_mul(10).into(), said("10 · hidden_size")),
            AutoRule::TotalSteps => (self.steps()?.into(), said("the steps of the run")),
            AutoRule::WarmupSteps => (flags.warmup().steps(self.steps())?.into(), said("warmup_steps")),
            AutoRule::Blocks => {
                (self.request.model.and_then(|model| model.blocks)?.into(), said("the number of blocks"))
            }
            // Known once ranks are placed on hosts.
            AutoRule::Group | AutoRule::NodeLocal | AutoRule::UntestedOptimizer => return None,
        })
    }

    fn hidden_squared(&self) -> Option<u64> {
        self.hidden().map(|hidden| hidden.saturating_mul(hidden))
    }

    /// The optimizer's learning rate: a schedule without its own follows it.
    fn base_learning_rate(&self) -> f64 {
        let by_flag = self.request.flags.learning_rate;
        by_flag
            .or_else(|| self.view.number("optimizer.params.lr"))
            .unwrap_or_else(|| self.request.flags.learning_rate())
    }

    fn default(&self, key: &'static Key) -> Option<Value> {
        let DefaultValue::Derived(derivation, _) = key.default else { return key.default.to_json() };
        let follows = |path: &str| {
            self.view
                .given(path)
                .cloned()
                .or_else(|| schema::find(path).next().and_then(|key| key.default.to_json()))
        };
        match derivation {
            Derivation::OverlapAtStage3 => Some((self.view.stage() == 3).into()),
            Derivation::RunPrecision => Some(self.precision.to_string().into()),
            Derivation::Checkpointing => Some(if self.recomputes() { "block" } else { "none" }.into()),
            Derivation::LearningRate => Some(self.base_learning_rate().into()),
            Derivation::FirstStepSize => follows("scheduler.params.cycle_first_step_size"),
            Derivation::FirstStairCount => follows("scheduler.params.cycle_first_stair_count"),
        }
    }

    /// --lr-scheduler-type and --gradient-checkpointing meet keys that no "auto" fills.
    fn compare_schedule_flags(&mut self) {
        let flags = self.request.flags;
        if let (Some(by_flag), Some(given)) =
            (&flags.lr_scheduler_type, self.request.file.get("scheduler.type"))
        {
            let same = match given.value.as_str().unwrap_or("").to_ascii_lowercase().as_str() {
                "warmuplr" => by_flag == "constant_with_warmup",
                "warmupdecaylr" => by_flag == "linear",
                "warmupcosinelr" => by_flag == "cosine",
                _ => false,
            };
            if !same {
                self.mismatches.push(Mismatch {
                    path: "scheduler.type".to_owned(),
                    file_value: given.value.clone(),
                    location: Some(given.location),
                    hf: "lr_scheduler_type",
                    flag_value: by_flag.as_str().into(),
                    flag: "--lr-scheduler-type",
                });
            }
        }
        let recompute =
            self.request.file.get("zeroth.recompute").filter(|given| given.value == json!("none"));
        if let (Some(true), Some(given)) = (flags.gradient_checkpointing, recompute) {
            self.mismatches.push(Mismatch {
                path: "zeroth.recompute".to_owned(),
                file_value: given.value.clone(),
                location: Some(given.location),
                hf: "gradient_checkpointing",
                flag_value: true.into(),
                flag: "--gradient-checkpointing",
            });
        }
        self.fill_own_schedule();
    }

    /// Notes flags that were given and set no key.
    fn note_idle_flags(&mut self) {
        let rules = [
            AutoRule::Betas,
            AutoRule::Epsilon,
            AutoRule::WeightDecay,
            AutoRule::WarmupSteps,
            AutoRule::LearningRate,
        ];
        for rule in rules {
            let Some(rule_flag) =
                flags::rule_flag(rule, self.request.flags).filter(|rule_flag| rule_flag.is_given)
            else {
                continue;
            };
            let is_set = self.settings.iter().any(|setting| setting.key.auto == Some(rule));
            let by_own_schedule =
                rule == AutoRule::WarmupSteps && !self.request.file.has_section("scheduler");
            if !is_set && !by_own_schedule {
                let name = match rule {
                    AutoRule::WarmupSteps => self.view.text("scheduler.type").unwrap_or("the schedule"),
                    _ => self.optimizer_type(),
                };
                self.notes
                    .push(format!("{} sets nothing here: {name} has no such parameter", rule_flag.flag));
            }
        }
    }

    /// Without a scheduler section the schedule is Hugging Face's, from the flags, in the block `zeroth`.
    fn fill_own_schedule(&mut self) {
        let flags = self.request.flags;
        if self.request.file.has_section("scheduler") {
            self.settings.retain(|setting| {
                let path = setting.key.path;
                !matches!(path, "zeroth.lr_scheduler_type" | OWN_WARMUP)
                    && !path.starts_with("zeroth.lr_scheduler_kwargs.")
            });
            if !flags.lr_scheduler_kwargs.is_empty() {
                self.notes.push(
                    "--lr-scheduler-kwargs sets nothing here: the file's scheduler section has parameters of its own"
                        .to_owned(),
                );
            }
            return;
        }
        let is_given = flags.warmup_steps.is_some() || flags.warmup_ratio.is_some();
        let warmup = match flags.warmup() {
            WarmupLength::Steps(steps) => Value::from(steps),
            // From 1 on the key counts steps.
            WarmupLength::Ratio(ratio) if ratio < 1.0 => Value::from(ratio),
            WarmupLength::Ratio(_) => {
                self.steps().map_or_else(|| "auto".into(), |steps| (steps as f64).into())
            }
        };
        let by_flag = [
            (
                "zeroth.lr_scheduler_type",
                flags.lr_scheduler_type.as_deref().map(Value::from),
                "lr_scheduler_type",
                "--lr-scheduler-type",
            ),
            (OWN_WARMUP, is_given.then_some(warmup), "warmup_steps", flags.warmup().flag()),
        ];
        for (path, value, hf, flag) in by_flag {
            let Some(value) = value else { continue };
            let Some(setting) = self.settings.iter_mut().find(|setting| setting.key.path == path) else {
                continue;
            };
            if let Origin::File(location) = setting.origin {
                if !equal(&setting.value, &value) {
                    self.mismatches.push(Mismatch {
                        path: path.to_owned(),
                        file_value: setting.value.clone(),
                        location: Some(location),
                        hf,
                        flag_value: value,
                        flag,
                    });
                }
            } else {
                *setting = ResolvedSetting { key: setting.key, value, origin: Origin::Flag(flag) };
            }
        }
    }
}

/// The warm-up of a config without a scheduler section.
const OWN_WARMUP: &str = "zeroth.warmup_steps";

/// Whether a key may depend on the number of steps.
fn waits_for_steps(key: &Key) -> bool {
    matches!(key.auto, Some(AutoRule::TotalSteps | AutoRule::WarmupSteps)) || key.path == OWN_WARMUP
}

/// The note on a key that waits for the number of steps.
fn unknown_steps(key: &Key) -> String {
    format!("{} is known once the data is: --max-steps says it now", key.path)
}

/// The precision of the run: what was given, else what the file turns on, else bf16 where the file leaves it open.
fn precision(view: ConfigView<'_>, by_flag: Option<DType>) -> DType {
    let open = |path: &str| view.switch(path) == Switch::Open;
    match by_flag {
        Some(precision) => precision,
        None if view.switch("bf16.enabled") == Switch::On => DType::Bf16,
        None if view.switch("fp16.enabled") == Switch::On => DType::F16,
        None if open("bf16.enabled") => DType::Bf16,
        None => DType::F32,
    }
}

fn is_hidden_rule(rule: AutoRule) -> bool {
    matches!(rule, AutoRule::HiddenSquared | AutoRule::NineTenthsHiddenSquared | AutoRule::TenHidden)
}

/// Keys that change nothing here are listed only where the file names them, so that a resolved config holds what
/// counts, and DeepSpeed can read it too.
fn is_silent(key: &Key) -> bool {
    match key.effect {
        Effect::Nothing(_) | Effect::AsSection | Effect::Unsupported(_) | Effect::BuiltIn(_) => true,
        _ => key.kind == KeyType::Opaque,
    }
}

/// Equal values, numbers by value: 1 and 1.0 are the same.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        _ => match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => a == b,
        },
    }
}
