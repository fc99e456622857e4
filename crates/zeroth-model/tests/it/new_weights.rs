//! New weights: their distribution, their bits, and that they do not depend on how they are cut. New folders: what they
//! hold, and what they are made from.

use std::fs;
use std::path::Path;

use half::bf16;
use proptest::prelude::*;
use serde_json::Value;
use zeroth_base::DType;
use zeroth_model::{
    Branch, ExpertSizes, Family, INITIALIZER_RANGE, Lora, ModelConfig, ModelSizes, NewFolder, NewFolderError,
    NewValues, Parameter, ParameterKind, Positions, TargetTokens, WeightFiles, fill_new, lora_table,
    new_folder, table,
};

fn parameter(name: &str, shape: &[u64]) -> Parameter {
    Parameter {
        name: name.to_owned(),
        shape: shape.to_vec(),
        kind: ParameterKind::Linear,
        role: None,
        adapts: None,
        aliases: &[],
        parts: Vec::new(),
        trained: true,
        quantized: false,
    }
}

fn values(seed: u64, name: &str, range: std::ops::Range<u64>) -> Vec<f32> {
    let mut out = vec![0.0; (range.end - range.start) as usize];
    fill_new(seed, NewValues::Normal(1.0), &parameter(name, &[u64::MAX]), range, &mut out);
    out
}

fn sizes(family: Family) -> ModelSizes {
    ModelSizes {
        family,
        hidden: 64,
        blocks: 2,
        heads: 4,
        kv_heads: Some(2),
        head_dim: Some(16),
        ffn: 128,
        vocab: 512,
        tied: false,
        max_positions: Some(256),
        rope_theta: Some(5e5),
        experts: matches!(family, Family::Qwen3Moe | Family::Mixtral).then_some(ExpertSizes {
            count: 5,
            per_token: 2,
            width: (family == Family::Qwen3Moe).then_some(48),
        }),
    }
}

/// Once written down these bits stay: a seed names the same model for ever. The figures beside them are from numpy in
/// f64, by the definition (`check_folder.py`), rounded to 7 places.
#[test]
fn the_first_values_of_a_seed_and_a_name_stay_what_they_are() {
    for (seed, name, bits, figures) in GOLDEN {
        let found = values(seed, name, 0..8);
        assert_eq!(found.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), bits, "{seed}, {name}: {found:?}");
        for (value, figure) in found.iter().zip(figures) {
            assert!((f64::from(*value) - figure).abs() < 2e-6, "{seed}, {name}: {value}, {figure}");
        }
    }
}

const GOLDEN: [(u64, &str, [u32; 8], [f64; 8]); 3] = [
    (
        42,
        "model.embed_tokens.weight",
        [
            0xbf47_0056,
            0x3e74_ef63,
            0xbf87_4a8a,
            0xbebf_a94a,
            0x3f93_68c4,
            0x3f54_f73b,
            0x3f64_4a48,
            0x3f7b_92cb,
        ],
        [
            -0.777_348_9,
            0.239_194_4,
            -1.056_962_2,
            -0.374_338_4,
            1.151_634_7,
            0.831_897_4,
            0.891_758_4,
            0.982_708_6,
        ],
    ),
    (
        42,
        "model.layers.0.mlp.down_proj.weight",
        [
            0xbfe3_03bd,
            0xbf39_f8f8,
            0x3f04_9435,
            0xbf74_fe9a,
            0x3efd_3b56,
            0xbf2b_c011,
            0xbf13_9727,
            0xc00e_dbaf,
        ],
        [
            -1.773_551_5,
            -0.726_455_2,
            0.517_886_5,
            -0.957_009_9,
            0.494_593_3,
            -0.670_899_5,
            -0.576_525_1,
            -2.232_158_4,
        ],
    ),
    (
        u64::MAX,
        "lm_head.weight",
        [
            0x3f2e_1c28,
            0xbe76_a41e,
            0xbfaf_c9a7,
            0xbf33_06ea,
            0xbf2d_a48c,
            0xbe49_5d56,
            0xbf72_af65,
            0xbea1_227d,
        ],
        [
            0.680_117_1,
            -0.240_860_4,
            -1.373_341_5,
            -0.699_324_2,
            -0.678_292_0,
            -0.196_645_1,
            -0.947_988_8,
            -0.314_716_2,
        ],
    ),
];

#[test]
fn normal_numbers_have_the_moments_and_tails_of_the_normal_distribution() {
    for seed in [0, 42, u64::MAX] {
        let sample = values(seed, "model.layers.0.mlp.up_proj.weight", 0..1_000_000);
        let count = sample.len() as f64;
        let moment = |power: i32| sample.iter().map(|v| f64::from(*v).powi(power)).sum::<f64>() / count;
        // Five standard errors: √(var / n) of each moment's estimate.
        assert!(moment(1).abs() < 5e-3, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 5.0 * 2_f64.sqrt() * 1e-3, "variance {}", moment(2));
        assert!(moment(3).abs() < 5.0 * 15_f64.sqrt() * 1e-3, "third moment {}", moment(3));
        assert!((moment(4) - 3.0).abs() < 5.0 * 96_f64.sqrt() * 1e-3, "fourth moment {}", moment(4));
        for (limit, share) in [(1.0, 0.317_310_5), (2.0, 0.045_500_26), (3.0, 0.002_699_796)] {
            let beyond = sample.iter().filter(|v| v.abs() > limit).count() as f64 / count;
            let error = 5.0 * f64::sqrt(share * (1.0 - share) / count);
            assert!((beyond - share).abs() < error, "{beyond} beyond {limit}, not {share}");
        }
        assert!(sample.iter().all(|v| v.abs() < 6.8));
        // Neighbours, and the two numbers of one pair, have nothing to do with each other.
        for lag in [1, 2, 4] {
            let product: f64 =
                sample.iter().zip(&sample[lag..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((product / count).abs() < 5e-3, "lag {lag}: {}", product / count);
        }
    }
}

#[test]
fn seeds_and_names_give_numbers_of_their_own() {
    let sample = |seed, name| values(seed, name, 0..100_000);
    let first = sample(1, "a");
    // Seeds that differ in the upper half only are different seeds.
    for other in [sample(2, "a"), sample(1 << 32 | 1, "a"), sample(1, "b"), sample(1, "a.b")] {
        let product: f64 = first.iter().zip(&other).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((product / 1e5).abs() < 5.0 / 1e5_f64.sqrt(), "{}", product / 1e5);
    }
    assert_eq!(first, sample(1, "a"));
}

proptest! {
    #[test]
    fn a_range_has_the_same_bits_whatever_the_cuts(
        seed in any::<u64>(),
        // Beyond 2^34 elements the counter's second word counts.
        start in prop_oneof![0..100_u64, (1_u64 << 34) - 50..(1 << 34) + 50],
        lengths in prop::collection::vec(0..40_u64, 1..8),
    ) {
        let end = start + lengths.iter().sum::<u64>();
        let whole = values(seed, "w", start..end);
        let mut pieces = Vec::new();
        let mut at = start;
        for length in lengths {
            pieces.extend(values(seed, "w", at..at + length));
            at += length;
        }
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        prop_assert_eq!(bits(pieces), bits(whole));
    }

    #[test]
    fn any_sizes_make_a_model_or_a_message(
        family in prop::sample::select(Family::ALL.to_vec()),
        (hidden, blocks, heads, vocab) in (0..40_u64, 0..4_u64, 0..9_u64, 0..40_u64),
        (kv_heads, head_dim) in any::<(Option<u8>, Option<u8>)>(),
        (ffn, max_positions) in (prop_oneof![0..40_u64, Just(u64::MAX)], any::<Option<u64>>()),
        (tied, rope_theta) in any::<(bool, Option<f64>)>(),
        experts in prop::option::of((0..6_u64, 0..4_u64, prop::option::of(0..40_u64))),
    ) {
        let (kv_heads, head_dim) = (kv_heads.map(u64::from), head_dim.map(u64::from));
        let sizes = ModelSizes {
            family, hidden, blocks, heads, kv_heads, head_dim, ffn, vocab, tied, max_positions, rope_theta,
            experts: experts.map(|(count, per_token, width)| ExpertSizes { count, per_token, width }),
        };
        if let Ok(config) = ModelConfig::from_sizes(&sizes) {
            let again = ModelConfig::from_map(&config.to_json().unwrap(), "config.json").unwrap();
            prop_assert_eq!(again, config);
        }
    }
}

#[test]
fn a_new_folder_holds_every_parameter_with_the_right_distribution() {
    let folder = tempfile::tempdir().unwrap();
    for (family, tied) in [
        (Family::Llama, true),
        (Family::Mistral, false),
        (Family::Qwen2, false),
        (Family::Qwen3, true),
        (Family::Qwen3Moe, false),
        (Family::Mixtral, true),
    ] {
        let folder = folder.path().join(family.to_string());
        let config = ModelConfig::from_sizes(&ModelSizes { tied, ..sizes(family) }).unwrap();
        let new = NewFolder { dtype: DType::F32, shard_bytes: 200_000, ..NewFolder::default() };
        let written = new_folder(&config, &new, &folder).unwrap();
        let again = ModelConfig::from_folder(&folder).unwrap();
        assert_eq!(again, ModelConfig { dtype: Some(DType::F32), ..config.clone() });
        let table = table(&config);
        assert_eq!(written.bytes, 4 * table.total());
        assert!(written.files.len() > 3, "shards, an index and config.json: {:?}", written.files);
        let files = WeightFiles::open(&folder, &table).unwrap();
        assert_eq!(files.warnings(), []);
        for parameter in table.iter() {
            let mut values = vec![f32::NAN; parameter.elements() as usize];
            files.read_f32(&parameter.name, 0..parameter.elements(), &mut values).unwrap();
            match parameter.kind {
                ParameterKind::Norm => assert!(values.iter().all(|v| *v == 1.0), "{parameter:?}"),
                ParameterKind::Bias => assert!(values.iter().all(|v| *v == 0.0), "{parameter:?}"),
                _ => {
                    let count = values.len() as f64;
                    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
                    let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / count;
                    let error = 5.0 * INITIALIZER_RANGE / count.sqrt();
                    assert!(mean.abs() < error, "{}: mean {mean}", parameter.name);
                    assert!(
                        (square.sqrt() - INITIALIZER_RANGE).abs() < error,
                        "{}: {square}",
                        parameter.name
                    );
                }
            }
        }
    }
}

/// Its `_init_weights` (5.23.0), with `initializer_factor` 1.5, `d_model` 64, `d_kv` 16, `d_ff` 128 and 4 heads. Version 5 draws
/// no head of its own; version 4 draws it as the embedding.
#[test]
fn new_encoder_decoders_have_the_distributions_of_transformers() {
    for (family, tied) in [(Family::T5, true), (Family::T5, false), (Family::Mt5, false)] {
        let none = ModelSizes { kv_heads: None, max_positions: None, rope_theta: None, ..sizes(family) };
        let config = ModelConfig::from_sizes(&ModelSizes { tied, ..none }).unwrap();
        let gated = config.layers[0].feed_forward().unwrap().gate.is_some();
        assert_eq!((gated, config.scaled_head, config.dropout_rate), (!tied, tied, 0.1));
        assert_eq!(config.target_tokens, Some(TargetTokens { start: 0, pad: Some(0), eos: Some(1) }));
        let config = ModelConfig { initializer_factor: 1.5, ..config };
        let folder = tempfile::tempdir().unwrap();
        new_folder(&config, &NewFolder { dtype: DType::F32, ..NewFolder::default() }, folder.path()).unwrap();
        let again = ModelConfig::from_folder(folder.path()).unwrap();
        assert_eq!(again, ModelConfig { dtype: Some(DType::F32), ..config.clone() });
        let table = table(&config);
        let files = WeightFiles::open(folder.path(), &table).unwrap();
        for parameter in table.iter() {
            let mut values = vec![f32::NAN; parameter.elements() as usize];
            files.read_f32(&parameter.name, 0..parameter.elements(), &mut values).unwrap();
            let name = parameter.name.as_str();
            let ends = |end: &str| name.ends_with(end);
            let deviation = if ends(".q.weight") {
                0.046_875 // 1.5 / √(64 · 16)
            } else if ends(".wo.weight") {
                0.132_582_5 // 1.5 / √128
            } else if ends("shared.weight") || ends("lm_head.weight") {
                1.5
            } else if ends("norm.weight") {
                assert!(values.iter().all(|value| *value == 1.5), "{name}");
                continue;
            } else {
                0.1875 // 1.5 / √64
            };
            let count = values.len() as f64;
            let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / count;
            let error = 5.0 * deviation / (2.0 * count).sqrt();
            assert!((square.sqrt() - deviation).abs() < error, "{name}: {} {deviation}", square.sqrt());
        }
    }
}

#[test]
fn stored_in_bf16_a_value_is_the_rounded_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig::from_sizes(&sizes(Family::Qwen3)).unwrap();
    let (half, full) = (folder.path().join("bf16"), folder.path().join("fp32"));
    new_folder(&config, &NewFolder::default(), &half).unwrap();
    new_folder(&config, &NewFolder { dtype: DType::F32, ..NewFolder::default() }, &full).unwrap();
    let table = table(&config);
    let (half, full) = (WeightFiles::open(&half, &table).unwrap(), WeightFiles::open(&full, &table).unwrap());
    for parameter in table.iter() {
        let elements = parameter.elements();
        let (mut a, mut b) = (vec![0.0; elements as usize], vec![1.0; elements as usize]);
        half.read_f32(&parameter.name, 0..elements, &mut a).unwrap();
        full.read_f32(&parameter.name, 0..elements, &mut b).unwrap();
        let rounded: Vec<f32> = b.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect();
        assert_eq!(a, rounded, "{}", parameter.name);
    }
}

#[test]
fn a_folder_with_something_in_it_is_refused_unless_it_may_be_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig::from_sizes(&sizes(Family::Llama)).unwrap();
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    let error = new_folder(&config, &NewFolder::default(), folder.path()).unwrap_err();
    assert!(matches!(error, NewFolderError::NotEmpty { .. }));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

    let over = NewFolder { overwrite: true, shard_bytes: 50_000, ..NewFolder::default() };
    new_folder(&config, &over, folder.path()).unwrap();
    new_folder(&config, &NewFolder { overwrite: true, ..NewFolder::default() }, folder.path()).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "notes.txt"]);
}

#[test]
fn adapters_begin_as_peft_begins_them() {
    let base = table(&ModelConfig::from_sizes(&sizes(Family::Llama)).unwrap());
    let adapters = lora_table(&base, &Lora::default()).unwrap();
    for parameter in adapters.iter() {
        let mut values = vec![f32::NAN; parameter.elements() as usize];
        fill_new(3, NewValues::of(parameter, 0.02), parameter, 0..parameter.elements(), &mut values);
        if parameter.kind == ParameterKind::LoraB {
            assert!(values.iter().all(|v| *v == 0.0));
            continue;
        }
        // Uniform from -1/√in to 1/√in has the variance 1 / (3 in).
        let width = parameter.shape[1] as f64;
        assert!(values.iter().all(|v| f64::from(*v).abs() <= 1.0 / width.sqrt() + 1e-7));
        let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64;
        assert!((3.0 * width * square - 1.0).abs() < 0.25, "{}: {square}", parameter.name);
    }
}

#[test]
fn every_config_is_written_so_that_it_reads_the_same() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let mut compared = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let config = ModelConfig::from_folder(&path).unwrap();
        let text = Value::Object(config.to_json().unwrap()).to_string();
        let again = ModelConfig::from_json(&text, "config.json").unwrap();
        assert_eq!(again, config, "{}", path.display());
        compared += 1;
    }
    assert!(compared >= 35, "only {compared} configs were compared");
}

#[test]
fn what_a_config_json_cannot_say_is_refused_by_name() {
    let config = ModelConfig::from_sizes(&sizes(Family::Mistral)).unwrap();
    let mut odd = config;
    let Branch::Attention(attention) = &mut odd.layers[0].parts[0].branch else { panic!("attention") };
    attention.window = Some(8);
    attention.q.bias = true;
    assert_eq!(
        odd.to_json().unwrap_err().to_string(),
        "a config.json of the family mistral cannot say this model's qkv_bias, windows: it would be read as another \
             model"
    );
}

#[test]
fn sizes_that_make_no_model_are_refused() {
    let refused = |sizes: ModelSizes| ModelConfig::from_sizes(&sizes).unwrap_err().to_string();
    let base = || sizes(Family::Qwen3);
    assert!(refused(ModelSizes { kv_heads: Some(3), ..base() }).contains("is not a multiple of"));
    assert!(refused(ModelSizes { heads: 0, head_dim: None, ..base() }).contains("how wide a head is"));
    assert!(refused(ModelSizes { heads: 5, head_dim: None, ..base() }).contains("how wide a head is"));
    assert!(refused(ModelSizes { head_dim: Some(15), ..base() }).contains("must be even"));
    assert!(refused(ModelSizes { hidden: 0, ..base() }).contains("`hidden_size` is 0"));
    assert!(refused(ModelSizes { rope_theta: Some(f64::NAN), ..base() }).contains("`rope_theta` is NaN"));
    assert!(refused(ModelSizes { rope_theta: Some(-1.0), ..base() }).contains("above zero"));
    let encoder =
        || ModelSizes { kv_heads: None, max_positions: None, rope_theta: None, ..sizes(Family::T5) };
    for (sizes, words) in [
        (
            ModelSizes { kv_heads: Some(2), ..encoder() },
            "`num_key_value_heads` is 2: models of the family t5 have",
        ),
        (ModelSizes { max_positions: Some(99), ..encoder() }, "`max_position_embeddings` is 99: models of"),
        (
            ModelSizes { rope_theta: Some(1e4), ..encoder() },
            "`rope_theta` is 10000: models of the family t5 have none",
        ),
        (ModelSizes { hidden: 0, ..encoder() }, "`d_model` is 0"),
        (
            ModelSizes { experts: Some(ExpertSizes { count: 2, per_token: 1, width: None }), ..encoder() },
            "have no experts",
        ),
    ] {
        assert!(refused(sizes.clone()).contains(words), "{}", refused(sizes));
    }
    assert!(ModelConfig::from_sizes(&ModelSizes { kv_heads: Some(4), ..encoder() }).is_ok());
}

#[test]
fn sizes_left_out_are_derived() {
    let config = ModelConfig::from_sizes(&ModelSizes {
        kv_heads: None,
        head_dim: None,
        rope_theta: None,
        ..sizes(Family::Qwen3)
    })
    .unwrap();
    let attention = config.first_attention();
    assert_eq!((attention.kv_heads, attention.head_dim), (4, 16));
    assert_eq!(config.windows(), [None, None]);
    let Some(Positions::Rope(rope)) = &attention.positions else { panic!("rotary positions") };
    assert_eq!(rope.theta, 10_000.0);
}
