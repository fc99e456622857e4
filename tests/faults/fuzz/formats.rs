//! The formats that are read: files to begin with, how they are damaged so that the damage reaches the parser, and what reads them.

use std::fs::{self, File};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use zeroth::config::check::check;
use zeroth::config::preset::PRESETS;
use zeroth::config::read::{ConfigSource, parse};
use zeroth::config::resolve::{Flags, ModelFacts, ResolveRequest, resolve};
use zeroth::data::{
    CacheFolder, Encode, Encoded, Encoder, EncoderOptions, PrepareOptions, Samples, Truncation, prepare,
    survey,
};
use zeroth::model::{ModelConfig, ParameterTable, WeightFiles, table};
use zeroth::train::checkpoint::{Checkpoint, verify_folder};
use zeroth::train::{config_changes, redistribute_batch};

use super::guard::Reader;
use super::mutate;
use crate::chance::Chance;
use crate::inject::zeroth;
use crate::job::{Job, STEPS};

/// A format: files of it, how they are damaged, and what reads one.
pub(super) struct Format {
    pub(super) name: &'static str,
    /// The number that its random numbers are drawn under.
    pub(super) audit: u32,
    pub(super) seeds: Vec<Vec<u8>>,
    pub(super) damage: fn(&[u8], &mut Chance) -> Vec<u8>,
    pub(super) reader: Reader,
    /// Where a damaged file is put; what it needs beside it is there.
    pub(super) file: PathBuf,
    /// Kept until the audit is over.
    _folder: Arc<tempfile::TempDir>,
}

impl Format {
    /// The same with another file, whose contents are what is damaged.
    pub(super) fn of(self, file: PathBuf) -> Self {
        Self { seeds: vec![fs::read(&file).unwrap()], file, ..self }
    }
}

/// Elements that are read at a time.
const AT_ONCE: u64 = 1 << 12;
const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 512, truncation: Truncation::Drop, max_samples: None, packing: true };

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn tokenizer_folder() -> PathBuf {
    root().join("examples/gsm8k/tiny-qwen3")
}

fn folder() -> Arc<tempfile::TempDir> {
    Arc::new(tempfile::tempdir().unwrap())
}

/// Rows of every kind.
fn rows() -> Vec<Value> {
    vec![
        json!({"messages": [{"role": "system", "content": "short"}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}], "tools": [{"type": "function"}]}),
        json!({"instruction": "Add", "input": "1 2", "output": "3", "system": "s", "history": [["a", "b"]]}),
        json!({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}),
        json!({"prompt": "one ", "completion": "two"}),
        json!({"question": "how many?", "answer": "seven"}),
        json!({"text": "All happy families are alike; \u{e9}\u{1f600}"}),
        json!({"translation": {"en": "one", "de": "eins"}}),
        json!({"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}),
        json!({"input_ids": [5, 6, 7]}),
    ]
}

fn encoder() -> Encoder {
    Encoder::open(&tokenizer_folder(), EncoderOptions::new(2048)).unwrap()
}

/// Reads rows as `data preview` and `train` do.
fn rows_reader() -> Reader {
    let encoder = encoder();
    Arc::new(move |file| {
        black_box(survey(&[file.to_owned()], &encoder, &OPTIONS, 2))
            .is_ok_and(|survey| survey.totals.samples > 0)
    })
}

pub(super) fn jsonl() -> Format {
    let rows: Vec<String> = rows().iter().map(ToString::to_string).collect();
    let seeds = rows.iter().map(|row| format!("{row}\n").into_bytes());
    let folder = folder();
    Format {
        name: "JSONL",
        audit: 10,
        seeds: seeds.chain([(rows.join("\n") + "\n").into_bytes()]).collect(),
        damage: mutate::text,
        reader: rows_reader(),
        file: folder.path().join("rows.jsonl"),
        _folder: folder,
    }
}

pub(super) fn parquet() -> Format {
    let folder = folder();
    let kinds = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(parquet::basic::ZstdLevel::default()),
    ];
    let seeds = kinds
        .into_iter()
        .flat_map(|kind| [parquet_file(folder.path(), kind, true), parquet_file(folder.path(), kind, false)]);
    Format {
        name: "Parquet",
        audit: 11,
        seeds: seeds.collect(),
        damage: damage_parquet,
        reader: rows_reader(),
        file: folder.path().join("rows.parquet"),
        _folder: folder,
    }
}

fn parquet_file(folder: &Path, compression: Compression, dictionary: bool) -> Vec<u8> {
    const SCHEMA: &str = "message schema {
        required int64 id;
        optional binary text (UTF8);
        optional group more (LIST) { repeated group list { optional group element { optional binary role (UTF8); } } }
    }";
    let path = folder.join("seed.parquet");
    let properties =
        WriterProperties::builder().set_compression(compression).set_dictionary_enabled(dictionary).build();
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    let mut writer =
        SerializedFileWriter::new(File::create(&path).unwrap(), schema, Arc::new(properties)).unwrap();
    let texts = |texts: [&str; 2]| texts.map(ByteArray::from);
    for _ in 0..2 {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&[1, 2, 3], None, None).unwrap();
        column.close().unwrap();
        // Definition and repetition levels: a row without a text, and lists of two, none and one.
        let levels: [(_, &[i16], Option<&[i16]>); 2] = [
            (texts(["some words", "and others"]), &[1, 0, 1], None),
            (texts(["user", "assistant"]), &[4, 4, 0, 1], Some(&[0, 1, 0, 0])),
        ];
        for (values, defined, repeated) in levels {
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, Some(defined), repeated).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    fs::read(path).unwrap()
}

/// Damage to the footer keeps its length right, so that it is read as one; damage elsewhere is damage to pages.
fn damage_parquet(seed: &[u8], chance: &mut Chance) -> Vec<u8> {
    const TAIL: usize = 8;
    let tail = seed.len() - TAIL;
    let footer = u32::from_le_bytes(seed[tail..tail + 4].try_into().expect("four bytes")) as usize;
    let (pages, footer) = (&seed[..tail - footer], &seed[tail - footer..tail]);
    match chance.below(4) {
        0 => mutate::binary(seed, chance),
        1 => [&mutate::binary(pages, chance), footer, &seed[tail..]].concat(),
        _ => {
            let footer = mutate::binary(footer, chance);
            [pages, &footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
        }
    }
}

/// A model's folder and its parameters.
fn golden() -> (PathBuf, ParameterTable) {
    let folder = root().join("tests/golden/qwen3-tied");
    let config = ModelConfig::from_folder(&folder).unwrap();
    (folder, table(&config))
}

pub(super) fn safetensors() -> Format {
    let (model, parameters) = golden();
    let folder = folder();
    let reader = move |file: &Path| {
        let opened = WeightFiles::open(file.parent().expect("it is in a folder"), &parameters);
        let Ok(files) = opened else { return false };
        for parameter in parameters.iter() {
            let mut values = vec![0.0; parameter.elements().min(AT_ONCE) as usize];
            let _ = black_box(files.read_f32(&parameter.name, 0..values.len() as u64, &mut values));
        }
        true
    };
    Format {
        name: "safetensors",
        audit: 12,
        seeds: vec![fs::read(model.join("model.safetensors")).unwrap()],
        damage: damage_safetensors,
        reader: Arc::new(reader),
        file: folder.path().join("model.safetensors"),
        _folder: folder,
    }
}

/// Mostly damage to the header as the JSON it is, with its length set right.
fn damage_safetensors(seed: &[u8], chance: &mut Chance) -> Vec<u8> {
    let end = 8 + u64::from_le_bytes(seed[..8].try_into().expect("eight bytes")) as usize;
    match chance.below(6) {
        0 => mutate::binary(seed, chance),
        1 => {
            let mut file = seed.to_vec();
            mutate::word(&mut file, 0..8, chance);
            file
        }
        _ => {
            let header = mutate::text(&seed[8..end], chance);
            [&(header.len() as u64).to_le_bytes(), header.as_slice(), &seed[end..]].concat()
        }
    }
}

pub(super) fn config_json() -> Format {
    let configs = root().join("crates/zeroth-model/tests/configs");
    let mut files: Vec<PathBuf> =
        fs::read_dir(configs).unwrap().map(|entry| entry.unwrap().path().join("config.json")).collect();
    files.sort();
    let folder = folder();
    Format {
        name: "config.json",
        audit: 13,
        seeds: files.iter().filter_map(|file| fs::read(file).ok()).collect(),
        damage: mutate::text,
        reader: Arc::new(|file| {
            let opened = ModelConfig::from_folder(file.parent().expect("it is in a folder"));
            let Ok(config) = opened else { return false };
            let parameters = table(&config);
            black_box((
                parameters.total(),
                parameters.active_per_token(),
                parameters.largest_module().map(|(_, size)| size),
            ));
            let _ = black_box(config.to_json());
            true
        }),
        file: folder.path().join("config.json"),
        _folder: folder,
    }
}

pub(super) fn tokenizer_json() -> Format {
    let folder = folder();
    let beside = tokenizer_folder().join("tokenizer_config.json");
    fs::copy(beside, folder.path().join("tokenizer_config.json")).unwrap();
    let rows: Vec<Value> = rows();
    let reader = move |file: &Path| {
        let opened = Encoder::open(file.parent().expect("it is in a folder"), EncoderOptions::new(2048));
        let Ok(encoder) = opened else { return false };
        let mut into = Encoded::default();
        for row in rows.iter().filter_map(Value::as_object) {
            let _ = encoder.encode(row, &mut into);
        }
        into.ids.truncate(64);
        black_box(encoder.decode(&into.ids));
        true
    };
    Format {
        name: "tokenizer.json",
        audit: 14,
        seeds: tokenizers(),
        damage: mutate::text,
        reader: Arc::new(reader),
        file: folder.path().join("tokenizer.json"),
        _folder: folder,
    }
}

/// One that was trained, cut short, and small ones of every model and of most parts around it.
fn tokenizers() -> Vec<Vec<u8>> {
    let trained = fs::read(tokenizer_folder().join("tokenizer.json")).unwrap();
    let mut short: Value = serde_json::from_slice(&trained).unwrap();
    short["model"]["merges"].as_array_mut().unwrap().truncate(40);
    let added = json!([{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}]);
    let of = |model: Value,
              normalizer: Value,
              pre_tokenizer: Value,
              post_processor: Value,
              decoder: Value| {
        json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 2},
            "padding": {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": 2, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
            "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor,
            "decoder": decoder, "model": model,
        })
    };
    let vocabulary = json!({"<s>": 0, "a": 1, "b": 2, "##b": 3, "ab": 4, "[UNK]": 5});
    let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}});
    let small = [
        of(
            json!({"type": "BPE", "dropout": null, "unk_token": "[UNK]", "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary, "merges": [["a", "b"]]}),
            json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}, {"type": "Prepend", "prepend": "a"}]}),
            json!({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Isolated", "invert": false}, {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]}),
            template.clone(),
            json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}, {"type": "Fuse"}]}),
        ),
        of(
            json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocabulary}),
            json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
            json!({"type": "BertPreTokenizer"}),
            json!({"type": "BertProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0]}),
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        ),
        of(
            json!({"type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["a", -1.0], ["b", -2.0], ["ab", -1.5]], "byte_fallback": false}),
            json!({"type": "Lowercase"}),
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
            json!({"type": "RobertaProcessing", "sep": ["<s>", 0], "cls": ["<s>", 0], "trim_offsets": true, "add_prefix_space": true}),
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
        ),
        of(
            json!({"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}),
            Value::Null,
            json!({"type": "Whitespace"}),
            Value::Null,
            json!({"type": "CTC", "pad_token": "<s>", "word_delimiter_token": "|", "cleanup": true}),
        ),
    ];
    let small = small.iter().map(|tokenizer| tokenizer.to_string().into_bytes());
    // Small ones are read a hundred times faster, and have more places to damage.
    small.cycle().take(16).chain([short.to_string().into_bytes(), trained]).collect()
}

pub(super) fn manifest() -> Format {
    let job = Job::new();
    let run = job.path("run");
    let ended = zeroth(&job.arguments(&run, &[]), &job.cache("run"));
    assert_eq!(ended.code, 0, "{}", ended.said);
    let checkpoint = run.join(format!("checkpoints/step-{STEPS}"));
    let config = ModelConfig::from_folder(&job.path("model")).unwrap();
    let parameters = table(&config);
    let reader = move |file: &Path| {
        let folder = file.parent().expect("it is in a folder");
        fs::write(folder.join("SHA256SUMS"), sums(&fs::read(file).unwrap())).unwrap();
        let _ = black_box(verify_folder(folder));
        let Ok(checkpoint) = Checkpoint::open(folder) else { return false };
        let manifest = checkpoint.manifest();
        black_box((manifest.bytes(), config_changes(&manifest.config, &Value::Null)));
        let _ = black_box(redistribute_batch(
            manifest.batch.train_batch_size,
            2,
            (None, None),
            manifest.batch.micro_batch,
        ));
        let _ = black_box(checkpoint.check_model(&manifest.model.model_type, &parameters));
        for parameter in &manifest.model.parameters {
            for state in &manifest.states {
                let mut values = vec![0.0; parameter.elements().unwrap_or(0).min(AT_ONCE) as usize];
                let _ = black_box(checkpoint.read_f32(
                    *state,
                    &parameter.name,
                    0..values.len() as u64,
                    &mut values,
                ));
            }
        }
        true
    };
    Format {
        name: "manifest",
        audit: 15,
        seeds: manifests(&checkpoint),
        damage: mutate::text,
        reader: Arc::new(reader),
        file: checkpoint.join("manifest.json"),
        _folder: Arc::new(job.folder),
    }
}

/// A manifest as it was written, and one without a config: half of all numbers are in there, and nobody computes with them.
fn manifests(checkpoint: &Path) -> Vec<Vec<u8>> {
    let written = fs::read(checkpoint.join("manifest.json")).unwrap();
    let mut plain: Value = serde_json::from_slice(&written).unwrap();
    plain["config"] = json!({});
    vec![written, plain.to_string().into_bytes()]
}

/// SHA256SUMS of a manifest and of the files that it lists, so that only the parser stands against its numbers.
pub(super) fn sums(manifest: &[u8]) -> String {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half)]);
    let hash = Sha256::digest(manifest)
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(digit)
        .collect::<String>();
    let parsed: Value = serde_json::from_slice(manifest).unwrap_or_default();
    let line = |file: &Value| {
        let text = |key: &str| file[key].as_str().unwrap_or_default().to_owned();
        format!("{}  {}\n", text("sha256"), text("name"))
    };
    let files = parsed["files"].as_array().into_iter().flatten().map(line);
    std::iter::once(format!("{hash}  manifest.json\n")).chain(files).collect()
}

pub(super) fn token_cache() -> Format {
    let folder = folder();
    let data = folder.path().join("rows.jsonl");
    let row = |row: u64| {
        json!({"input_ids": (0..8 + row % 5).map(|at| row + at).collect::<Vec<_>>()}).to_string() + "\n"
    };
    fs::write(&data, (0..20).map(row).collect::<String>()).unwrap();
    let (encoder, cache) = (encoder(), CacheFolder::at(folder.path().join("cache")));
    let prepared = |packing| {
        let options = PrepareOptions { packing, max_length: 32, ..OPTIONS };
        let prepared = prepare(std::slice::from_ref(&data), &encoder, &options, &cache).unwrap();
        (prepared.path.clone(), fs::read(prepared.path).unwrap())
    };
    let ((_, plain), (path, packed)) = (prepared(false), prepared(true));
    let options = PrepareOptions { packing: true, max_length: 32, ..OPTIONS };
    let rows = data.clone();
    let reader = move |file: &Path| {
        let opened = Samples::open(file);
        if let Ok(samples) = &opened {
            touch(samples);
        }
        // As a run finds it: taken where it is whole, made again where it is not.
        let prepared = prepare(std::slice::from_ref(&rows), &encoder, &options, &cache).unwrap();
        touch(&prepared.samples);
        opened.is_ok()
    };
    Format {
        name: "token cache",
        audit: 16,
        seeds: vec![plain, packed],
        damage: damage_cache,
        reader: Arc::new(reader),
        file: path,
        _folder: folder,
    }
}

/// Reads all that a run reads of samples.
fn touch(samples: &Samples) {
    black_box((samples.totals(), samples.hash(), samples.longest(), samples.most_in_item()));
    for unit in 0..samples.count().get().min(1_000) {
        black_box((samples.length(unit), samples.trained(unit)));
        for sample in samples.members(unit).take(1_000) {
            let _ = black_box((samples.ids(sample), samples.labels(sample)));
        }
    }
}

/// The header has 256 bytes; behind magic and version its numbers, at its end the body's checksum and its own.
fn damage_cache(seed: &[u8], chance: &mut Chance) -> Vec<u8> {
    const HEADER: usize = 256;
    const SUMS: usize = 192;
    let mut file = seed.to_vec();
    match chance.below(4) {
        0 => return mutate::binary(seed, chance),
        1 => mutate::word(&mut file, 16..16 + 12 * 8, chance),
        2 => {
            let end = HEADER + (seed.len() - HEADER) / 8 * 8;
            mutate::word(&mut file, HEADER..end, chance);
        }
        _ => {
            let body = mutate::binary(&seed[HEADER..], chance);
            file.truncate(HEADER);
            file.extend(&body);
            // Its length is told by the header.
            file[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
        }
    }
    let body = Sha256::digest(&file[HEADER..]);
    file[SUMS..SUMS + 32].copy_from_slice(&body);
    let own = Sha256::digest(&file[..HEADER - 32]);
    file[HEADER - 32..HEADER].copy_from_slice(&own);
    file
}

pub(super) fn deepspeed_json() -> Format {
    let folder = folder();
    let reader = |file: &Path| {
        let bytes = fs::read(file).unwrap();
        let Ok(document) = ConfigSource::from_bytes("damaged", bytes).and_then(parse) else { return false };
        let report = check(&document);
        if !report.is_ok(false) {
            return false;
        }
        let (flags, model) =
            (Flags::default(), Some(ModelFacts { hidden_size: Some(4096), blocks: Some(32) }));
        for ranks in [1, 5, 1024] {
            let request =
                ResolveRequest { file: &report.values, flags: &flags, ranks, model, steps: Some(100) };
            let _ = black_box(resolve(&request));
        }
        true
    };
    Format {
        name: "DeepSpeed JSON",
        audit: 17,
        seeds: PRESETS.iter().map(|preset| preset.text.as_bytes().to_vec()).chain([all_keys()]).collect(),
        damage: mutate::text,
        reader: Arc::new(reader),
        file: folder.path().join("ds.json"),
        _folder: folder,
    }
}

/// A config with the sections that presets do not have.
fn all_keys() -> Vec<u8> {
    json!({
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100}},
        "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": true}, "activation_checkpointing": {"partition_activations": false, "number_checkpoints": 4},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
            "offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 1.0}, "offload_param": {"device": "none"}},
        "tensorboard": {"enabled": true, "output_path": "x", "job_name": "y"}, "csv_monitor": {"enabled": false},
        "flops_profiler": {"enabled": true, "profile_step": 1}, "steps_per_print": 10, "wall_clock_breakdown": true,
        "data_types": {"grad_accum_dtype": "fp32"}, "checkpoint": {"writer": {"type": "fast", "decoupled": true}},
    })
    .to_string()
    .into_bytes()
}
