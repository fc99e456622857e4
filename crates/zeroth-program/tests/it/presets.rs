//! A preset equals its bare stage: on CPU `--deepspeed zero3` and `{"zero_optimization": {"stage": 3}}` compile to one
//! program with the same buffers. Keys that a preset sets besides are listed here, with the reason why they change
//! nothing, or what they change.

use serde_json::{Value, json};
use zeroth_config::check::check;
use zeroth_config::preset::PRESETS;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, Resolved, resolve};
use zeroth_config::schema::{Effect, Key};
use zeroth_cpu::CpuTarget;
use zeroth_cuda::CudaTarget;
use zeroth_kernel::{Target, Tier};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};
use zeroth_program::Compiled;
use zeroth_program::{Buffer, Gather, Instruction, PlacedBuffer, Program, Settings};

const TOKENS: u64 = 512;
const HIDDEN: u64 = 1024;
const BLOCKS: u64 = 8;
const CPU: &dyn Target = &CpuTarget { threads: 1 };

/// A preset beside the least that asks for the same stage and offload.
struct Pair {
    preset: &'static str,
    /// `zero_optimization` of the bare config.
    bare: &'static str,
    /// Keys whose value differs from the bare config's, and why the program does not.
    same: &'static [(&'static str, &'static str)],
    /// Keys whose value differs and moves instructions, and which; arenas take the same bytes.
    moves: &'static [(&'static str, &'static str)],
}

const REDUCE_BUCKET: (&str, &str) =
    ("zero_optimization.reduce_bucket_size", "2e8 and 5e8 both hold every unit of this model");
const GATHER_BUCKET: (&str, &str) =
    ("zero_optimization.allgather_bucket_size", "2e8 and 5e8 both hold every unit of this model");
const PERSISTENCE: (&str, &str) = (
    "zero_optimization.stage3_param_persistence_threshold",
    "\"auto\" is 10 times the hidden size: norms stay gathered, as with 100,000; no other parameter is as small",
);
const OVERLAP: (&str, &str) = (
    "zero_optimization.overlap_comm",
    "presets overlap at every stage, DeepSpeed's default only at stage 3: collectives stand on a queue of their own, \
     which a CPU runs in the same order, and saving a gradient is put off behind the next unit's backward",
);

const PAIRS: [Pair; 6] = [
    Pair {
        preset: "zero0",
        bare: r#"{"stage": 0}"#,
        same: &[REDUCE_BUCKET, GATHER_BUCKET],
        moves: &[OVERLAP],
    },
    Pair {
        preset: "zero1",
        bare: r#"{"stage": 1}"#,
        same: &[REDUCE_BUCKET, GATHER_BUCKET],
        moves: &[OVERLAP],
    },
    Pair {
        preset: "zero2",
        bare: r#"{"stage": 2}"#,
        same: &[REDUCE_BUCKET, GATHER_BUCKET],
        moves: &[OVERLAP],
    },
    Pair {
        preset: "zero2_offload",
        bare: r#"{"stage": 2, "offload_optimizer": {"device": "cpu"}}"#,
        same: &[REDUCE_BUCKET, GATHER_BUCKET],
        moves: &[OVERLAP],
    },
    Pair {
        preset: "zero3",
        bare: r#"{"stage": 3}"#,
        same: &[
            (
                "zero_optimization.reduce_bucket_size",
                "\"auto\" is the hidden size squared; gradients that are added up in place move in no bucket",
            ),
            (
                "zero_optimization.stage3_prefetch_bucket_size",
                "\"auto\" is 0.9 of that; shards that are read in place are not fetched",
            ),
            PERSISTENCE,
        ],
        moves: &[],
    },
    Pair {
        preset: "zero3_offload",
        bare: r#"{"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}"#,
        same: &[PERSISTENCE],
        moves: &[
            (
                "zero_optimization.reduce_bucket_size",
                "\"auto\" is the hidden size squared; gradients go to host memory in pieces of a bucket",
            ),
            (
                "zero_optimization.stage3_prefetch_bucket_size",
                "\"auto\" is 0.9 of that; parameters from host memory are gathered by copy, one unit ahead and not four",
            ),
        ],
    },
];

impl Pair {
    fn preset(&self) -> &'static str {
        PRESETS.iter().find(|preset| preset.name == self.preset).unwrap().text
    }

    fn bare(&self) -> String {
        format!(r#"{{"zero_optimization": {}}}"#, self.bare)
    }

    /// The bare config with the preset's values of the keys that move instructions.
    fn bare_that_moves(&self) -> String {
        let (preset, mut config): (Value, Value) =
            (serde_json::from_str(self.preset()).unwrap(), serde_json::from_str(&self.bare()).unwrap());
        for (key, _) in self.moves {
            let pointer = format!("/{}", key.replace('.', "/"));
            let name = key.rsplit('.').next().unwrap();
            config["zero_optimization"][name] = preset.pointer(&pointer).unwrap().clone();
        }
        config.to_string()
    }
}

fn resolved(text: &str, ranks: u64) -> Resolved {
    let document = parse(ConfigSource::from_text("ds.json", text)).unwrap();
    let report = check(&document);
    assert!(report.is_ok(false), "{text}: {:?}", report.verdicts);
    let model = Some(ModelFacts { hidden_size: Some(HIDDEN), blocks: Some(BLOCKS) });
    let flags = Flags::default();
    resolve(&ResolveRequest { file: &report.values, flags: &flags, ranks, model, steps: Some(100) }).unwrap()
}

fn settings(text: &str, ranks: u64) -> Settings {
    Settings::from_config(&resolved(text, ranks))
}

fn compiled(settings: &Settings, ranks: u64, target: &'static dyn Target) -> Compiled {
    let config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": BLOCKS, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 32_000,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_tokens(TOKENS)).unwrap();
    Compiled::new(graph, ranks, settings, target, vec![TOKENS]).unwrap()
}

fn on_cpu(text: &str, ranks: u64) -> Compiled {
    compiled(&settings(text, ranks), ranks, CPU)
}

/// The first difference of two programs, instruction by instruction, and of everything that is not one.
fn difference(one: &Program, other: &Program) -> Option<String> {
    for (a, b) in one.sections.iter().zip(&other.sections) {
        let (a_list, b_list) = (&a.instructions, &b.instructions);
        let at = a_list.iter().zip(b_list).position(|(a, b)| a != b);
        let at = at.or((a_list.len() != b_list.len()).then(|| a_list.len().min(b_list.len())));
        if let Some(at) = at {
            return Some(format!("{:?}, {at}: {:?} and {:?}", a.kind, a_list.get(at), b_list.get(at)));
        }
    }
    (one != other).then(|| "the programs differ, and no instruction does".to_owned())
}

/// Every buffer with its place, in the order of sections.
fn buffers(compiled: &Compiled) -> Vec<(Buffer, u64)> {
    let sections = compiled.memory.sections.iter().flat_map(|section| &section.buffers);
    let placed = |placed: &PlacedBuffer| (placed.buffer, placed.at);
    compiled.memory.static_buffers.iter().chain(sections).map(placed).collect()
}

/// Whether a key decides what a program is; the others print and save, or are always so.
fn decides(key: &Key) -> bool {
    key.reader.decides_training() && matches!(key.effect, Effect::Works | Effect::WhileEnabled)
}

#[test]
fn a_preset_sets_the_keys_that_are_named_here_and_no_other() {
    for pair in &PAIRS {
        let (preset, bare) = (resolved(pair.preset(), 2), resolved(&pair.bare(), 2));
        let differs =
            |path: &str| preset.get(path).map(|set| &set.value) != bare.get(path).map(|set| &set.value);
        let paths = preset.settings().iter().chain(bare.settings()).filter(|setting| decides(setting.key));
        let mut found: Vec<&str> = paths.map(|set| set.key.path).filter(|path| differs(path)).collect();
        let mut named: Vec<&str> = pair.same.iter().chain(pair.moves).map(|(path, _)| *path).collect();
        found.sort_unstable();
        found.dedup();
        named.sort_unstable();
        assert_eq!(found, named, "{}", pair.preset);
    }
}

#[test]
fn a_preset_is_the_program_of_its_bare_stage() {
    for pair in &PAIRS {
        for ranks in [1, 2] {
            let preset = on_cpu(pair.preset(), ranks);
            let bare = on_cpu(&pair.bare_that_moves(), ranks);
            let what = format!("{}, {ranks} ranks", pair.preset);
            assert_eq!(difference(&preset.program, &bare.program), None, "{what}");
            assert!(buffers(&preset) == buffers(&bare), "{what}: buffers differ");
            assert_eq!(preset.memory.views, bare.memory.views, "{what}");
        }
    }
}

#[test]
fn a_preset_takes_the_bytes_of_its_bare_stage() {
    for pair in &PAIRS {
        for ranks in [1, 2] {
            let [preset, bare] = [on_cpu(pair.preset(), ranks), on_cpu(&pair.bare(), ranks)];
            for tier in Tier::ALL {
                let [preset, bare] = [&preset, &bare].map(|compiled| compiled.memory.arena(tier));
                assert_eq!(preset, bare, "{}, {ranks} ranks, {tier:?}", pair.preset);
            }
        }
    }
}

/// Queues aside, overlap alone moves nothing where nothing is offloaded.
#[test]
fn stages_0_to_2_run_the_same_list_with_overlap_and_without() {
    for pair in PAIRS.iter().filter(|pair| ["zero0", "zero1", "zero2"].contains(&pair.preset)) {
        for ranks in [1, 2] {
            let [mut preset, mut bare] =
                [on_cpu(pair.preset(), ranks), on_cpu(&pair.bare(), ranks)].map(|compiled| compiled.program);
            let sections = preset.sections.iter_mut().chain(&mut bare.sections);
            let all = sections.flat_map(|section| &mut section.instructions);
            all.for_each(|instruction: &mut Instruction| {
                instruction.queue = zeroth_kernel::Queue::Compute;
            });
            assert_eq!(difference(&preset, &bare), None, "{}, {ranks} ranks", pair.preset);
        }
    }
}

#[test]
fn bounds_of_gathers_change_nothing_where_shards_are_read_in_place() {
    let bare = on_cpu(r#"{"zero_optimization": {"stage": 3}}"#, 2);
    assert!(bare.program.zero_copy_gather);
    for typed in [
        r#""stage3_max_live_parameters": 1e9"#,
        r#""stage3_max_live_parameters": 0"#,
        r#""stage3_max_reuse_distance": 1e9"#,
        r#""stage3_max_reuse_distance": 0"#,
        r#""stage3_prefetch_bucket_size": 5e7"#,
        r#""stage3_prefetch_bucket_size": 0"#,
        r#""memory_efficient_linear": true"#,
        r#""memory_efficient_linear": false"#,
    ] {
        let found = on_cpu(&format!(r#"{{"zero_optimization": {{"stage": 3, {typed}}}}}"#), 2);
        assert_eq!(difference(&bare.program, &found.program), None, "{typed}");
        assert!(buffers(&bare) == buffers(&found), "{typed}");
        // Only what is persistent is there beside the shards, whatever the bound is.
        assert_eq!(found.program.check(0).unwrap().most_live, found.program.layout.persistent_elements());
    }
}

#[test]
fn copies_are_gathered_where_the_config_asks_for_them_and_on_gpus() {
    let text = |gather: &str| {
        format!(r#"{{"zero_optimization": {{"stage": 3}}, "zeroth": {{"gather": "{gather}"}}}}"#)
    };
    let [view, copy] = ["view", "copy"].map(|gather| on_cpu(&text(gather), 2));
    assert!(view.program.zero_copy_gather && !copy.program.zero_copy_gather);
    assert_eq!(
        (copy.memory.views.1, view.program.live_limit(0)),
        (0, view.program.layout.persistent_elements())
    );
    // All blocks and the head are there when the loss is taken.
    let gathered = 2 * copy.program.check(1_000_000_000).unwrap().most_live;
    let [view, copy] = [&view, &copy].map(|compiled| compiled.memory.arena(Tier::Device));
    assert!(view + gathered / 3 < copy && copy < view + gathered, "{view} {copy} {gathered}");
    let asked = settings(r#"{"zero_optimization": {"stage": 3}}"#, 2);
    assert_eq!(asked.gather, None);
    assert!(!compiled(&asked, 2, &CudaTarget).program.zero_copy_gather);
    assert_eq!(asked.for_target(CPU).gather, Some(Gather::View));
}

#[test]
fn a_view_is_refused_on_gpus() {
    let settings = settings(r#"{"zero_optimization": {"stage": 3}, "zeroth": {"gather": "view"}}"#, 2);
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "vocab_size": 64,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = || forward(&config, &table(&config), BatchTokens::of_tokens(16)).unwrap();
    let error = Compiled::new(graph(), 2, &settings, &CudaTarget, vec![16]).unwrap_err();
    assert!(error.to_string().contains("leave the key out, or write \"copy\""), "{error}");
    // At stages that gather nothing the key has no effect.
    let whole = Settings { stage: 2, ..settings };
    assert!(Compiled::new(graph(), 2, &whole, &CudaTarget, vec![16]).is_ok());
}
