//! T5 and mT5: an encoder and a decoder over one embedding, with learned biases for relative positions. v1.1 and mT5
//! have a gated feed-forward part and a head of their own.

use serde_json::{Value, json};

use crate::architecture::EncoderDecoder;
use crate::config::{Activation, ModelConfig, Positions, TargetTokens};
use crate::error::FieldError;
use crate::family::Family;
use crate::fields::{Fields, Given, check_attention_width, read_dtype};
use crate::init::INITIALIZER_RANGE;
use crate::limits::{MAX_BLOCKS, MAX_VOCAB, MAX_WIDTH};
use crate::table::{Parameter, ParameterKind, ParameterRole, ParameterTable, Unit, UnitName};

/// How `feed_forward_proj` is written, whether it has a gate, and its function. `gated-gelu` has always meant the
/// tanh approximation.
pub(crate) const FEED_FORWARDS: [(&str, (bool, Activation)); 8] = [
    ("relu", (false, Activation::Relu)),
    ("gelu", (false, Activation::Gelu)),
    ("gelu_new", (false, Activation::GeluTanh)),
    ("silu", (false, Activation::Silu)),
    ("gated-relu", (true, Activation::Relu)),
    ("gated-gelu", (true, Activation::GeluTanh)),
    ("gated-gelu_new", (true, Activation::GeluTanh)),
    ("gated-silu", (true, Activation::Silu)),
];

/// `dropout_rate` where a config has none.
const DROPOUT_RATE: f64 = 0.1;

pub(crate) fn read(
    family: Family,
    stacks: &EncoderDecoder,
    fields: &Fields<'_>,
) -> Result<ModelConfig, FieldError> {
    let heads = fields.size("num_heads", MAX_WIDTH)?;
    let head_dim = fields.size("d_kv", MAX_WIDTH)?;
    check_attention_width(fields, ("num_heads", heads), ("d_kv", head_dim))?;
    let encoder_blocks = fields.size("num_layers", MAX_BLOCKS)?;
    let blocks = fields.size_or("num_decoder_layers", MAX_BLOCKS, encoder_blocks)?;
    let (gated, activation) = fields.word("feed_forward_proj", &FEED_FORWARDS, stacks.feed_forward)?;
    let tied_head = fields.flag("tie_word_embeddings")?.unwrap_or(true);
    let vocab = fields.size("vocab_size", MAX_VOCAB)?;
    Ok(ModelConfig {
        family,
        hidden: fields.size("d_model", MAX_WIDTH)?,
        blocks,
        encoder_blocks,
        heads,
        kv_heads: heads,
        head_dim,
        ffn: fields.size("d_ff", MAX_WIDTH)?,
        gated,
        activation,
        vocab,
        tied_head,
        // transformers 4 scaled where the head is tied; 5 writes down whether it does, and never scales mT5.
        scaled_head: stacks.scales_head && fields.flag("scale_decoder_outputs")?.unwrap_or(tied_head),
        norm_eps: fields.positive("layer_norm_epsilon")?.unwrap_or(1e-6),
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; blocks as usize],
        positions: positions(fields)?,
        max_positions: None,
        experts: None,
        initializer_range: INITIALIZER_RANGE,
        initializer_factor: fields.not_negative("initializer_factor")?.unwrap_or(1.0),
        attention_dropout: 0.0,
        dropout_rate: dropout_rate(fields)?,
        target_tokens: Some(target_tokens(family, fields, vocab)?),
        dtype: read_dtype(fields)?,
    })
}

/// Relative positions: a bucket for each of the short distances, and others for the longer ones.
fn positions(fields: &Fields<'_>) -> Result<Positions, FieldError> {
    let buckets = fields.size_in("relative_attention_num_buckets", 4, MAX_WIDTH)?.value().unwrap_or(32);
    let max_distance = fields.size_or("relative_attention_max_distance", MAX_WIDTH, 128)?;
    if max_distance <= buckets / 2 {
        return Err(FieldError::Unsupported {
            field: "relative_attention_max_distance".to_owned(),
            found: max_distance.to_string(),
            why: format!(
                "{} distances have a bucket of their own (half of `relative_attention_num_buckets`), and the others share \
                 buckets up to this one: it must be larger",
                buckets / 2
            ),
        });
    }
    Ok(Positions::Relative { buckets, max_distance })
}

fn dropout_rate(fields: &Fields<'_>) -> Result<f64, FieldError> {
    let rate = fields.number("dropout_rate")?.unwrap_or(DROPOUT_RATE);
    if (0.0..1.0).contains(&rate) {
        return Ok(rate);
    }
    let (field, found) = ("dropout_rate".to_owned(), rate.to_string());
    Err(FieldError::WrongType { field, found, expected: "a number of at least 0 and below 1" })
}

/// The tokens around targets, with the defaults of transformers: padding is 0 and the end is 1. It starts mT5 with 0 and refuses to
/// train a T5 without a start; what it advises for those, the padding, is taken here.
fn target_tokens(family: Family, fields: &Fields<'_>, vocab: u64) -> Result<TargetTokens, FieldError> {
    let in_vocab = |token: u64| (token < vocab).then_some(token);
    let pad = match fields.size_in("pad_token_id", 0, vocab - 1)? {
        Given::Absent => Some(0),
        given => given.value(),
    };
    let eos = match fields.first_size_in("eos_token_id", 0, vocab - 1)? {
        Given::Absent => in_vocab(1),
        given => given.value(),
    };
    let start = fields.size_in("decoder_start_token_id", 0, vocab - 1)?;
    let default = (start == Given::Absent && family == Family::Mt5).then_some(0);
    let start = start.value().or(default).or(pad).ok_or_else(|| FieldError::Unsupported {
        field: "decoder_start_token_id".to_owned(),
        found: "not given".to_owned(),
        why: "the decoder begins with it, and `pad_token_id`, which could stand in, is null: set it to the token that \
              targets were trained behind, 0 in all published T5 and mT5 models"
            .to_owned(),
    })?;
    Ok(TargetTokens { start, pad, eos })
}

/// The standard deviation of a parameter's new values, the value of its norms: those of transformers.
pub(crate) fn initial_deviation(config: &ModelConfig, parameter: &Parameter) -> f64 {
    use ParameterRole::{AttentionOutput, FeedForwardOutput, Query};
    let inverse_root = |width: u64| (width as f64).powf(-0.5);
    let relative = match (parameter.kind, parameter.role) {
        // The scale of attention is in q.
        (ParameterKind::Linear, Some(Query)) => inverse_root(config.hidden * config.head_dim),
        (ParameterKind::Linear, Some(AttentionOutput)) => inverse_root(config.attention_width()),
        (ParameterKind::Linear, Some(FeedForwardOutput)) => inverse_root(config.ffn),
        (ParameterKind::Linear | ParameterKind::PositionBias, _) => inverse_root(config.hidden),
        _ => 1.0,
    };
    config.initializer_factor * relative
}

/// The `config.json` of a model, as transformers writes it.
pub(crate) fn fields(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    let Positions::Relative { buckets, max_distance } = config.positions else { return Vec::new() };
    let word = FEED_FORWARDS.iter().find(|(_, meaning)| *meaning == (config.gated, config.activation));
    let TargetTokens { start, pad, eos } =
        config.target_tokens.unwrap_or(TargetTokens { start: 0, pad: None, eos: None });
    vec![
        ("vocab_size", json!(config.vocab)),
        ("d_model", json!(config.hidden)),
        ("d_kv", json!(config.head_dim)),
        ("d_ff", json!(config.ffn)),
        ("num_layers", json!(config.encoder_blocks)),
        ("num_decoder_layers", json!(config.blocks)),
        ("num_heads", json!(config.heads)),
        ("relative_attention_num_buckets", json!(buckets)),
        ("relative_attention_max_distance", json!(max_distance)),
        ("feed_forward_proj", json!(word.map(|(word, _)| *word))),
        ("dropout_rate", json!(config.dropout_rate)),
        ("layer_norm_epsilon", json!(config.norm_eps)),
        ("initializer_factor", json!(config.initializer_factor)),
        ("is_encoder_decoder", json!(true)),
        ("tie_word_embeddings", json!(config.tied_head)),
        ("scale_decoder_outputs", json!(config.scaled_head)),
        ("decoder_start_token_id", json!(start)),
        ("pad_token_id", json!(pad)),
        ("eos_token_id", json!(eos)),
    ]
}

/// The parameter table. The embedding serves encoder and decoder (and the head, if tied); the position biases lie in
/// each stack's first block on disk but serve all of its blocks: each is a unit of its own.
pub(crate) fn table(config: &ModelConfig) -> ParameterTable {
    let mut units = Vec::with_capacity((config.encoder_blocks + config.blocks) as usize + 5);
    let mut shared = Unit::new(UnitName::Tied);
    shared.push(Parameter {
        aliases: if config.tied_head {
            &["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
        } else {
            &["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        },
        ..Parameter::new(
            "shared.weight".to_owned(),
            vec![config.vocab, config.hidden],
            ParameterKind::Embedding,
        )
    });
    units.push(shared);

    units.extend(position_biases(config, UnitName::EncoderPositions, "encoder"));
    units.extend((0..config.encoder_blocks).map(|index| {
        let mut unit = Unit::new(UnitName::EncoderBlock(index));
        attention(&mut unit, config, &format!("encoder.block.{index}.layer.0"), OWN);
        feed_forward(&mut unit, config, &format!("encoder.block.{index}.layer.1"));
        unit
    }));
    let mut encoder_norm = Unit::new(UnitName::EncoderNorm);
    encoder_norm.push_norm("encoder.final_layer_norm", config.hidden);
    units.push(encoder_norm);

    units.extend(position_biases(config, UnitName::DecoderPositions, "decoder"));
    units.extend((0..config.blocks).map(|index| {
        let mut unit = Unit::new(UnitName::Block(index));
        attention(&mut unit, config, &format!("decoder.block.{index}.layer.0"), OWN);
        attention(&mut unit, config, &format!("decoder.block.{index}.layer.1"), CROSS);
        feed_forward(&mut unit, config, &format!("decoder.block.{index}.layer.2"));
        unit
    }));
    let mut head = Unit::new(UnitName::Head);
    head.push_norm("decoder.final_layer_norm", config.hidden);
    if !config.tied_head {
        head.push_head("lm_head", [config.vocab, config.hidden]);
    }
    units.push(head);
    ParameterTable { units, routing: None, adapters: None }
}

/// The unit of one stack's position biases.
fn position_biases(config: &ModelConfig, name: UnitName, stack: &str) -> Option<Unit> {
    let Positions::Relative { buckets, .. } = config.positions else { return None };
    let mut unit = Unit::new(name);
    unit.push(Parameter::new(
        format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        vec![buckets, config.heads],
        ParameterKind::PositionBias,
    ));
    Some(unit)
}

/// The module of an attention, and the roles of its keys and values.
const OWN: (&str, [ParameterRole; 2]) = ("SelfAttention", [ParameterRole::Key, ParameterRole::Value]);
const CROSS: (&str, [ParameterRole; 2]) =
    ("EncDecAttention", [ParameterRole::CrossKey, ParameterRole::CrossValue]);

fn attention(
    unit: &mut Unit,
    config: &ModelConfig,
    at: &str,
    (name, [key, value]): (&str, [ParameterRole; 2]),
) {
    let (hidden, width) = (config.hidden, config.attention_width());
    unit.push_norm(&format!("{at}.layer_norm"), hidden);
    for (part, role, shape) in [
        ("q", ParameterRole::Query, [width, hidden]),
        ("k", key, [width, hidden]),
        ("v", value, [width, hidden]),
        ("o", ParameterRole::AttentionOutput, [hidden, width]),
    ] {
        unit.push_linear(&format!("{at}.{name}.{part}"), role, shape, false);
    }
}

fn feed_forward(unit: &mut Unit, config: &ModelConfig, at: &str) {
    unit.push_norm(&format!("{at}.layer_norm"), config.hidden);
    let inputs: &[&str] = if config.gated { &["wi_0", "wi_1"] } else { &["wi"] };
    for part in inputs {
        let module = format!("{at}.DenseReluDense.{part}");
        unit.push_linear(&module, ParameterRole::FeedForwardInput, [config.ffn, config.hidden], false);
    }
    let module = format!("{at}.DenseReluDense.wo");
    unit.push_linear(&module, ParameterRole::FeedForwardOutput, [config.hidden, config.ffn], false);
}
