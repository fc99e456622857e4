//! Resolving values, row by row: Hugging Face's rules for `"auto"`, DeepSpeed's rules for batch sizes, precision, and
//! the general rules in `contract`.
//!
//! Values and wording are those of transformers' `HfTrainerDeepSpeedConfig` (`trainer_config_process`,
//! `trainer_config_finalize`) and DeepSpeed's `_set_batch_related_parameters`.

use serde_json::{Value as Json, json};
use zeroth_base::DType;
use zeroth_config::check::check;
use zeroth_config::file_values::FileValues;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::resolve::{
    BatchError, Flags, ModelFacts, ResolveError, ResolveRequest, Resolved, fill_steps, resolve,
};
use zeroth_config::schema::TopLevel;

mod contract;

fn file_values(text: &str) -> FileValues {
    match parse(ConfigSource::from_text("ds.json", text)) {
        Ok(document) => check(&document).values,
        Err(error) => panic!("{text}\n{error}"),
    }
}

/// A run: its flags, ranks, model and steps.
#[derive(Clone)]
struct Run {
    flags: Flags,
    ranks: u64,
    hidden_size: Option<u64>,
    steps: Option<u64>,
}

/// All values of a config with their origins, and its notes.
fn contents(resolved: &Resolved) -> (Vec<(&'static str, Json, String)>, Vec<String>) {
    let settings = resolved.settings().iter();
    let settings = settings.map(|found| (found.key.path, found.value.clone(), found.origin.to_string()));
    (settings.collect(), resolved.notes.clone())
}

impl Run {
    /// One rank, a model of hidden size 4096 and 32 blocks, no flags.
    fn plain() -> Self {
        Self { flags: Flags::default(), ranks: 1, hidden_size: Some(4096), steps: None }
    }

    fn typed(flags: Flags) -> Self {
        Self { flags, ..Self::plain() }
    }

    fn on(self, ranks: u64) -> Self {
        Self { ranks, ..self }
    }

    fn resolve(&self, text: &str) -> Result<Resolved, ResolveError> {
        let model = Some(ModelFacts { hidden_size: self.hidden_size, blocks: Some(32) });
        let (Self { flags, ranks, .. }, file) = (self, &file_values(text));
        let open = ResolveRequest { file, flags, ranks: *ranks, model, steps: None };
        let Some(steps) = self.steps else { return resolve(&open) };
        let known = resolve(&ResolveRequest { steps: Some(steps), ..open });
        // Steps that are known later make the same config.
        if let Ok(mut filled) = resolve(&open) {
            let filled = fill_steps(&open, steps, &mut filled).map(|()| filled);
            let [known, filled] = [&known, &filled].map(|found| found.as_ref().map(contents));
            assert_eq!(filled, known, "{text}");
        }
        known
    }

    fn resolved(&self, text: &str) -> Resolved {
        self.resolve(text).unwrap_or_else(|error| panic!("{text}\n{error}"))
    }

    /// The value of a key and its origin.
    fn value(&self, text: &str, path: &str) -> (Json, &'static str) {
        let resolved = self.resolved(text);
        let setting = resolved.get(path).unwrap_or_else(|| panic!("{text} resolves without {path}"));
        (setting.value.clone(), setting.origin.word())
    }

    /// The lines of the mismatch error, if there is one.
    fn mismatches(&self, text: &str) -> Vec<String> {
        match self.resolve(text) {
            Err(error @ ResolveError::Mismatch(_)) => {
                error.to_string().lines().filter(|line| line.starts_with("- ")).map(str::to_owned).collect()
            }
            Ok(_) => Vec::new(),
            Err(error) => panic!("{text}\n{error}"),
        }
    }
}

/// A row of the table: the key, the flags, what `"auto"` resolves to, and what happens to another value in the file.
struct Row {
    path: &'static str,
    /// The file, with `@` for the key's value.
    file: &'static str,
    flags: Flags,
    filled: Json,
    origin: &'static str,
    other: &'static str,
    /// The line of the mismatch; `None` if the file's value is kept.
    mismatch: Option<&'static str>,
}

fn rows() -> Vec<Row> {
    let flags = Flags::default;
    let typed = "command line";
    let row = |path, file, flags, filled, origin, other, mismatch| Row {
        path,
        file,
        flags,
        filled,
        origin,
        other,
        mismatch,
    };
    vec![
        row(
            "train_micro_batch_size_per_gpu",
            r#"{"train_micro_batch_size_per_gpu": @}"#,
            Flags { per_device_train_batch_size: Some(8), ..flags() },
            json!(8),
            typed,
            "4",
            Some("- ds train_micro_batch_size_per_gpu=4 vs hf per_device_train_batch_size=8"),
        ),
        row(
            "gradient_accumulation_steps",
            r#"{"gradient_accumulation_steps": @}"#,
            Flags { gradient_accumulation_steps: Some(16), ..flags() },
            json!(16),
            typed,
            "4",
            Some("- ds gradient_accumulation_steps=4 vs hf gradient_accumulation_steps=16"),
        ),
        row(
            "train_batch_size",
            r#"{"train_batch_size": @}"#,
            Flags { per_device_train_batch_size: Some(8), gradient_accumulation_steps: Some(4), ..flags() },
            json!(8 * 4 * 4),
            "auto",
            "8",
            Some("- ds train_batch_size=8 vs hf train_batch_size (calculated)=128"),
        ),
        row(
            "gradient_clipping",
            r#"{"gradient_clipping": @}"#,
            Flags { max_grad_norm: Some(0.5), ..flags() },
            json!(0.5),
            typed,
            "1.0",
            Some("- ds gradient_clipping=1.0 vs hf max_grad_norm=0.5"),
        ),
        row(
            "optimizer.params.lr",
            r#"{"optimizer": {"type": "AdamW", "params": {"lr": @}}}"#,
            Flags { learning_rate: Some(5e-5), ..flags() },
            json!(5e-5),
            typed,
            "1e-4",
            Some("- ds optimizer.params.lr=0.0001 vs hf learning_rate=5e-05"),
        ),
        row(
            "optimizer.params.betas",
            r#"{"optimizer": {"type": "AdamW", "params": {"betas": @}}}"#,
            Flags { adam_beta1: Some(0.9), adam_beta2: Some(0.98), ..flags() },
            json!([0.9, 0.98]),
            typed,
            "[0.9, 0.999]",
            Some("- ds optimizer.params.betas=[0.9, 0.999] vs hf adam_beta1+adam_beta2=[0.9, 0.98]"),
        ),
        row(
            "optimizer.params.eps",
            r#"{"optimizer": {"type": "AdamW", "params": {"eps": @}}}"#,
            Flags { adam_epsilon: Some(1e-6), ..flags() },
            json!(1e-6),
            typed,
            "1e-8",
            Some("- ds optimizer.params.eps=1e-08 vs hf adam_epsilon=1e-06"),
        ),
        row(
            "optimizer.params.weight_decay",
            r#"{"optimizer": {"type": "AdamW", "params": {"weight_decay": @}}}"#,
            Flags { weight_decay: Some(0.01), ..flags() },
            json!(0.01),
            typed,
            "0.1",
            Some("- ds optimizer.params.weight_decay=0.1 vs hf weight_decay=0.01"),
        ),
        row(
            "scheduler.params.warmup_min_lr",
            r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": @}}}"#,
            Flags { learning_rate: Some(5e-5), ..flags() },
            json!(0.0),
            "auto",
            "1e-6",
            None,
        ),
        row(
            "scheduler.params.warmup_max_lr",
            r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": @}}}"#,
            Flags { learning_rate: Some(5e-5), ..flags() },
            json!(5e-5),
            typed,
            "0.001",
            Some("- ds scheduler.params.warmup_max_lr=0.001 vs hf learning_rate=5e-05"),
        ),
        row(
            "fp16.enabled",
            r#"{"fp16": {"enabled": @}}"#,
            Flags { precision: Some(DType::F16), ..flags() },
            json!(true),
            typed,
            "false",
            Some("- ds fp16.enabled=False vs hf fp16|fp16_full_eval=True"),
        ),
        row(
            "bf16.enabled",
            r#"{"bf16": {"enabled": @}}"#,
            Flags { precision: Some(DType::F32), ..flags() },
            json!(false),
            typed,
            "true",
            Some("- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False"),
        ),
        row(
            "zero_optimization.reduce_bucket_size",
            r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": @}}"#,
            flags(),
            json!(16_777_216),
            "auto",
            "2e8",
            None,
        ),
        row(
            "zero_optimization.stage3_prefetch_bucket_size",
            r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": @}}"#,
            flags(),
            json!(15_099_494),
            "auto",
            "1e7",
            None,
        ),
        row(
            "zero_optimization.stage3_param_persistence_threshold",
            r#"{"zero_optimization": {"stage": 3, "param_persistence_threshold": @}}"#,
            flags(),
            json!(40_960),
            "auto",
            "1e6",
            None,
        ),
        row(
            "scheduler.params.total_num_steps",
            r#"{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": @}}}"#,
            Flags { max_steps: Some(1000), ..flags() },
            json!(1000),
            typed,
            "500",
            Some("- ds scheduler.params.total_num_steps=500 vs hf num_training_steps (calculated)=1000"),
        ),
        row(
            "scheduler.params.warmup_num_steps",
            r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": @}}}"#,
            Flags { warmup_steps: Some(100.0), ..flags() },
            json!(100),
            typed,
            "7",
            Some("- ds scheduler.params.warmup_num_steps=7 vs hf warmup_steps=100"),
        ),
    ]
}

#[test]
fn auto_is_filled_by_hugging_faces_rules() {
    for Row { path, file, flags, filled, origin, .. } in rows() {
        let found = Run::typed(flags).on(4).value(&file.replace('@', "\"auto\""), path);
        assert_eq!(found, (filled, origin), "{path}");
    }
}

#[test]
fn flags_that_differ_from_the_file_are_hugging_faces_mismatch_or_ignored() {
    for Row { path, file, flags, other, mismatch, .. } in rows() {
        let (run, text) = (Run::typed(flags).on(4), file.replace('@', other));
        let lines = run.mismatches(&text);
        if let Some(line) = mismatch {
            assert!(lines.len() == 1 && lines[0].starts_with(line), "{path}: {lines:?}");
        } else {
            assert!(lines.is_empty(), "{path} is only filled: {lines:?}");
            let (value, origin) = run.value(&text, path);
            assert_eq!((value.as_f64(), origin), (other.parse().ok(), "file"), "{path}");
        }
    }
}

#[test]
fn flags_that_agree_with_the_file_are_no_mismatch() {
    for Row { path, file, flags, filled, .. } in rows() {
        let found = Run::typed(flags).on(4).value(&file.replace('@', &filled.to_string()), path);
        assert_eq!((found.0.to_string(), found.1), (filled.to_string(), "file"), "{path}");
    }
}

#[test]
fn save_on_each_node_overrides_the_file() {
    const PATH: &str = "checkpoint.use_node_local_storage";
    let each = Run::typed(Flags { save_on_each_node: Some(true), ..Flags::default() });
    for value in ["false", "true", "\"auto\""] {
        let text = format!(r#"{{"checkpoint": {{"use_node_local_storage": {value}}}}}"#);
        assert_eq!(each.value(&text, PATH), (json!(true), "command line"), "{value}");
    }
    assert_eq!(each.value("{}", PATH), (json!(true), "command line"));
    let notes = each.resolved(r#"{"checkpoint": {"use_node_local_storage": false}}"#).notes;
    assert!(notes.iter().any(|note| note.contains(PATH) && note.contains("overwritten")), "{notes:?}");
    // Without the flag, or with false, the file's value is kept.
    let text = r#"{"checkpoint": {"use_node_local_storage": true}}"#;
    assert_eq!(Run::plain().value(text, PATH), (json!(true), "file"));
    let not = Run::typed(Flags { save_on_each_node: Some(false), ..Flags::default() });
    assert_eq!(not.value(text, PATH), (json!(true), "file"));
}

#[test]
fn untested_optimizer_is_allowed_without_an_optimizer_section() {
    const PATH: &str = "zero_allow_untested_optimizer";
    assert_eq!(Run::plain().value("{}", PATH), (json!(true), "auto"));
    assert_eq!(
        Run::plain().value(r#"{"zero_allow_untested_optimizer": false}"#, PATH),
        (json!(true), "auto")
    );
    let notes = Run::plain().resolved(r#"{"zero_allow_untested_optimizer": false}"#).notes;
    assert!(notes.iter().any(|note| note.contains(PATH) && note.contains("overwritten")), "{notes:?}");
    let with_section = r#"{"zero_allow_untested_optimizer": false, "optimizer": {"type": "AdamW"}}"#;
    assert_eq!(Run::plain().value(with_section, PATH), (json!(false), "file"));
}

#[test]
fn all_mismatches_are_reported_at_once_in_hugging_faces_words() {
    let flags = Flags {
        per_device_train_batch_size: Some(8),
        gradient_accumulation_steps: Some(4),
        learning_rate: Some(5e-5),
        ..Flags::default()
    };
    let text = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}"#;
    let said = Run::typed(flags).on(4).resolve(text).unwrap_err().to_string();
    let expected = [
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
        "- ds train_batch_size=8 vs hf train_batch_size (calculated)=128",
        "- ds optimizer.params.lr=0.0001 vs hf learning_rate=5e-05",
        "The easiest method is to set these DeepSpeed config values to 'auto'.",
    ];
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{said}");
    for (line, start) in lines.iter().zip(expected) {
        assert!(line.starts_with(start), "{line}\nis not\n{start}");
    }
    // Hugging Face omits the types, the location and the flag.
    assert!(lines[2].contains("line 1") && lines[2].contains("--learning-rate"), "{said}");
}

#[test]
fn numeric_string_in_the_file_matches_the_same_number_as_a_flag() {
    let flags = Flags { gradient_accumulation_steps: Some(8), max_grad_norm: Some(1.0), ..Flags::default() };
    let run = Run::typed(flags);
    let text = r#"{"gradient_accumulation_steps": "8", "gradient_clipping": 1}"#;
    assert_eq!(run.mismatches(text), Vec::<String>::new());
    assert_eq!(run.value(text, "gradient_accumulation_steps"), (json!(8), "file"));
}

/// The value that transformers computes: `int(0.9 * hidden_size * hidden_size)`.
#[test]
fn auto_prefetch_bucket_size_is_whole_for_every_hidden_size() {
    for hidden in
        [64, 100, 512, 768, 896, 1024, 1536, 2048, 2560, 3584, 4096, 5120, 8192, 12288, 16384, 18432]
    {
        let run = Run { hidden_size: Some(hidden), ..Run::plain() };
        let text = r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}"#;
        let (value, _) = run.value(text, "zero_optimization.stage3_prefetch_bucket_size");
        assert_eq!(value, json!((0.9 * hidden as f64 * hidden as f64) as u64), "hidden size {hidden}");
    }
}

#[test]
fn stage_3_rules_fill_auto_at_stage_3_only() {
    let text = r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}"#;
    let resolved = Run::plain().resolved(text);
    let value = |path: &str| resolved.get(path).map(|setting| (setting.value.clone(), setting.origin.word()));
    // Hugging Face leaves "auto" in place, and DeepSpeed replaces it by the default.
    assert_eq!(value("zero_optimization.stage3_prefetch_bucket_size"), Some((json!(50_000_000), "default")));
    assert_eq!(
        value("zero_optimization.stage3_param_persistence_threshold"),
        Some((json!(100_000), "default"))
    );
    assert_eq!(value("zero_optimization.reduce_bucket_size"), Some((json!(16_777_216), "auto")));
}

#[test]
fn missing_hidden_size_is_reported_with_every_key_that_needs_it() {
    let text = r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
        "prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}"#;
    let keys = ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"];
    let without_size = Run { hidden_size: None, ..Run::plain() };
    let error = without_size.resolve(text).unwrap_err().to_string();
    let words = "neither `hidden_size` nor `hidden_sizes`";
    assert!(error.contains(words) && error.contains("an integer value of your choice"), "{error}");
    for key in keys {
        assert!(error.contains(&format!("zero_optimization.{key}")), "{key} is not in: {error}");
    }
    assert!(!error.contains("--model"), "a model is named: {error}");
    let file = file_values(text);
    let request =
        ResolveRequest { file: &file, flags: &Flags::default(), ranks: 1, model: None, steps: None };
    assert!(resolve(&request).unwrap_err().to_string().contains("--model"));
    // No error if no key needs the hidden size.
    assert!(without_size.resolve(r#"{"zero_optimization": {"stage": 3}}"#).is_ok());
    let at_stage_2 = r#"{"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}}"#;
    assert!(without_size.resolve(at_stage_2).is_ok());
}

/// The given (train, micro, accumulation), the ranks, and the resolved values; `None` if they are refused.
type BatchRow = ([Option<u64>; 3], u64, Option<[u64; 3]>);

const BATCHES: [BatchRow; 14] = [
    ([Some(32), Some(16), Some(1)], 2, Some([32, 16, 1])),
    ([Some(32), Some(8), None], 2, Some([32, 8, 2])),
    ([Some(32), None, Some(2)], 2, Some([32, 8, 2])),
    ([None, Some(16), Some(2)], 2, Some([64, 16, 2])),
    ([Some(32), None, None], 2, Some([32, 16, 1])),
    ([None, Some(16), None], 2, Some([32, 16, 1])),
    // DeepSpeed requires one of the first two; here the micro-batch is 1, the default of the flag.
    ([None, None, Some(4)], 2, Some([8, 1, 4])),
    ([None, None, None], 2, Some([2, 1, 1])),
    // Refused by DeepSpeed, or divisions with a remainder.
    ([Some(33), Some(17), Some(2)], 2, None),
    ([Some(32), Some(18), Some(1)], 2, None),
    ([Some(33), Some(17), None], 2, None),
    ([Some(33), None, Some(2)], 2, None),
    ([Some(33), None, None], 2, None),
    ([Some(3), None, None], 5, None),
];

fn assert_batch(run: &Run, text: &str, expected: Option<[u64; 3]>) {
    match (run.resolve(text), expected) {
        (Ok(resolved), Some(expected)) => {
            let TopLevel {
                train_batch_size,
                train_micro_batch_size_per_gpu,
                gradient_accumulation_steps,
                ..
            } = resolved.values.top_level;
            let found = [train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps];
            assert_eq!(found, expected, "{text} on {} ranks", run.ranks);
        }
        (Err(ResolveError::Batch(BatchError::Mismatch { ranks, .. })), None) => assert_eq!(ranks, run.ranks),
        (found, expected) => panic!("{text} on {} ranks: {found:?}, expected {expected:?}", run.ranks),
    }
}

#[test]
fn batch_sizes_from_the_file_follow_deepspeeds_rules() {
    for ([train, micro, accumulation], ranks, expected) in BATCHES {
        let shown = |value: Option<u64>| value.map_or("\"auto\"".to_owned(), |value| value.to_string());
        let text = format!(
            r#"{{"train_batch_size": {}, "train_micro_batch_size_per_gpu": {}, "gradient_accumulation_steps": {}}}"#,
            shown(train),
            shown(micro),
            shown(accumulation)
        );
        assert_batch(&Run::plain().on(ranks), &text, expected);
        // Absent counts as "auto".
        let absent = text.replace("\"train_batch_size\": \"auto\", ", "");
        assert_batch(&Run::plain().on(ranks), &absent, expected);
    }
}

#[test]
fn batch_sizes_from_flags_follow_deepspeeds_rules() {
    for ([train, micro, accumulation], ranks, expected) in BATCHES {
        let flags = Flags {
            per_device_train_batch_size: micro,
            gradient_accumulation_steps: accumulation,
            ..Flags::default()
        };
        let text = train.map_or("{}".to_owned(), |train| format!(r#"{{"train_batch_size": {train}}}"#));
        let run = Run::typed(flags).on(ranks);
        // If both factors are flags, a different product is Hugging Face's mismatch.
        if expected.is_none() && micro.is_some() && accumulation.is_some() {
            let lines = run.mismatches(&text);
            assert!(
                lines.len() == 1 && lines[0].contains("vs hf train_batch_size (calculated)="),
                "{lines:?}"
            );
        } else {
            assert_batch(&run, &text, expected);
        }
    }
}

#[test]
fn batch_size_error_has_deepspeeds_words_and_a_fix() {
    let text =
        r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16}"#;
    let said = Run::plain().on(8).resolve(text).unwrap_err().to_string();
    let sentence = "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * \
                    gradient_acc_step * world_size 16 != 1 * 16 * 8";
    assert!(said.starts_with(sentence) && said.contains("write 128"), "{said}");
}

#[test]
fn precision_comes_from_the_flag_else_the_file_else_bf16() {
    let auto = r#"{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}"#;
    let cases = [
        ("{}", None, (false, true), "bf16"),
        (auto, None, (false, true), "bf16"),
        (auto, Some(DType::Bf16), (false, true), "bf16"),
        (auto, Some(DType::F16), (true, false), "fp16"),
        (auto, Some(DType::F32), (false, false), "fp32"),
        (r#"{"fp16": {"enabled": true}}"#, None, (true, false), "fp16"),
        (r#"{"bf16": {"enabled": true}}"#, None, (false, true), "bf16"),
        (r#"{"fp16": {"enabled": false}}"#, None, (false, true), "bf16"),
        (r#"{"bf16": {"enabled": false}}"#, None, (false, false), "fp32"),
        (r#"{"bfloat16": {"enabled": false}, "fp16": {"enabled": "auto"}}"#, None, (false, false), "fp32"),
        (r#"{"bf16": {"enabled": false}}"#, Some(DType::F16), (true, false), "fp16"),
    ];
    for (text, precision, enabled, communication) in cases {
        let run = Run::typed(Flags { precision, ..Flags::default() });
        let resolved = run.resolved(text);
        let found = (resolved.values.fp16.enabled, resolved.values.bf16.enabled);
        assert_eq!(found, enabled, "{text} with {precision:?}");
        let found = resolved.values.top_level.communication_data_type.to_string();
        assert_eq!(found, communication, "{text} with {precision:?}");
    }
}

#[test]
fn precision_flag_contradicts_every_switch_of_the_file_that_differs() {
    let bf16 = Run::typed(Flags { precision: Some(DType::Bf16), ..Flags::default() });
    let lines = bf16.mismatches(r#"{"fp16": {"enabled": true}, "bf16": {"enabled": false}}"#);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("- ds fp16.enabled=True vs hf fp16|fp16_full_eval=False"), "{lines:?}");
    assert!(lines[1].starts_with("- ds bf16.enabled=False vs hf bf16|bf16_full_eval=True"), "{lines:?}");
}
