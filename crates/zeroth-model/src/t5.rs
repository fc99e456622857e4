//! T5 and mT5: an encoder and a decoder over one embedding, with learned biases for relative positions. v1.1 and mT5
//! have a gated feed-forward part and a head of their own.

use serde_json::{Value, json};
use zeroth_base::ActivationFn;
use zeroth_graph::NormOptions;

use crate::architecture::EncoderDecoderFamily;
use crate::config::{ModelConfig, TargetTokens};
use crate::error::FieldError;
use crate::family::Family;
use crate::fields::{Fields, Given, check_attention_width, read_dtype};
use crate::init::INITIALIZER_RANGE;
use crate::layer::{
    AttentionModule, Branch, FeedForwardModule, Layer, LinearModule, NormModule, Positions, Sublayer,
};
use crate::limits::{MAX_BLOCKS, MAX_VOCAB, MAX_WIDTH};
use crate::table::{Parameter, ParameterKind, ParameterRole, ParameterTable, ParameterUnit, UnitName};

/// How `feed_forward_proj` is written, whether it has a gate, and its function. `gated-gelu` has always meant the
/// tanh approximation.
pub(crate) const FEED_FORWARDS: [(&str, (bool, ActivationFn)); 8] = [
    ("relu", (false, ActivationFn::Relu)),
    ("gelu", (false, ActivationFn::Gelu)),
    ("gelu_new", (false, ActivationFn::GeluTanh)),
    ("silu", (false, ActivationFn::Silu)),
    ("gated-relu", (true, ActivationFn::Relu)),
    ("gated-gelu", (true, ActivationFn::GeluTanh)),
    ("gated-gelu_new", (true, ActivationFn::GeluTanh)),
    ("gated-silu", (true, ActivationFn::Silu)),
];

/// The stacks, as the names of their modules begin.
const ENCODER: &str = "encoder";
const DECODER: &str = "decoder";

/// `dropout_rate` where a config has none.
const DROPOUT_RATE: f64 = 0.1;

pub(crate) fn read(
    family: Family,
    stacks: &EncoderDecoderFamily,
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
    let hidden = fields.size("d_model", MAX_WIDTH)?;
    let ffn = fields.size("d_ff", MAX_WIDTH)?;
    // transformers 4 scaled where the head is tied; 5 writes down whether it does, and never scales mT5.
    let scaled_head = stacks.scales_head && fields.flag("scale_decoder_outputs")?.unwrap_or(tied_head);
    let eps = fields.positive("layer_norm_epsilon")?.unwrap_or(1e-6);
    let norm = NormOptions::rms(eps).clamped();
    let positions = positions(fields)?;

    let attention = |at: &str, causal: bool, reads_encoder: bool| {
        let name = if reads_encoder { "EncDecAttention" } else { "SelfAttention" };
        let linear =
            |part: &str, role, shape| LinearModule::new(format!("{at}.{name}.{part}"), role, shape, false);
        let [key, value] = if reads_encoder {
            [ParameterRole::CrossKey, ParameterRole::CrossValue]
        } else {
            [ParameterRole::Key, ParameterRole::Value]
        };
        let width = heads * head_dim;
        Branch::Attention(Box::new(AttentionModule {
            q: linear("q", ParameterRole::Query, [width, hidden]),
            k: linear("k", key, [width, hidden]),
            v: linear("v", value, [width, hidden]),
            o: linear("o", ParameterRole::AttentionOutput, [hidden, width]),
            head_norms: None,
            heads,
            kv_heads: heads,
            head_dim,
            score_width: 1,
            window: None,
            causal,
            reads_encoder,
            positions: (!reads_encoder).then(|| positions.clone()),
        }))
    };
    let feed_forward = |at: &str| {
        let linear = |part: &str, role, shape| {
            LinearModule::new(format!("{at}.DenseReluDense.{part}"), role, shape, false)
        };
        let into = |part: &str| linear(part, ParameterRole::FeedForwardInput, [ffn, hidden]);
        Branch::FeedForward(FeedForwardModule {
            gate: gated.then(|| into("wi_0")),
            up: into(if gated { "wi_1" } else { "wi" }),
            down: linear("wo", ParameterRole::FeedForwardOutput, [hidden, ffn]),
            activation,
        })
    };
    let layer = |stack: &str, index: u64| {
        let is_decoder = stack == DECODER;
        let mut parts = Vec::new();
        let mut push = |branch: &dyn Fn(&str) -> Branch| {
            let at = format!("{stack}.block.{index}.layer.{}", parts.len());
            let norm = NormModule { name: format!("{at}.layer_norm"), width: hidden, options: norm };
            parts.push(Sublayer { norm, branch: branch(&at) });
        };
        push(&|at| attention(at, is_decoder, false));
        if is_decoder {
            push(&|at| attention(at, false, true));
        }
        push(&feed_forward);
        Layer { parts }
    };
    Ok(ModelConfig {
        family,
        hidden,
        layers: (0..blocks).map(|index| layer(DECODER, index)).collect(),
        encoder_layers: (0..encoder_blocks).map(|index| layer(ENCODER, index)).collect(),
        ffn,
        vocab,
        tied_head,
        scaled_head,
        norm,
        max_positions: None,
        aux_loss: None,
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
    let inputs = parameter.shape.last().copied().unwrap_or(1);
    let relative = match (parameter.kind, parameter.role) {
        // The scale of attention is in q.
        (ParameterKind::Linear, Some(Query)) => {
            inverse_root(config.hidden * config.first_attention().head_dim)
        }
        (ParameterKind::Linear, Some(AttentionOutput | FeedForwardOutput)) => inverse_root(inputs),
        (ParameterKind::Linear | ParameterKind::PositionBias, _) => inverse_root(config.hidden),
        _ => 1.0,
    };
    config.initializer_factor * relative
}

/// The `config.json` of a model, as transformers writes it.
pub(crate) fn fields(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    let attention = config.first_attention();
    let Some(Positions::Relative { buckets, max_distance }) = attention.positions else { return Vec::new() };
    let meaning = |f: &FeedForwardModule| (f.gate.is_some(), f.activation);
    let meaning = config.layers.first().and_then(Layer::feed_forward).map(meaning);
    let word = FEED_FORWARDS.iter().find(|(_, known)| Some(*known) == meaning);
    let TargetTokens { start, pad, eos } =
        config.target_tokens.unwrap_or(TargetTokens { start: 0, pad: None, eos: None });
    vec![
        ("vocab_size", json!(config.vocab)),
        ("d_model", json!(config.hidden)),
        ("d_kv", json!(attention.head_dim)),
        ("d_ff", json!(config.ffn)),
        ("num_layers", json!(config.encoder_layers.len())),
        ("num_decoder_layers", json!(config.layers.len())),
        ("num_heads", json!(attention.heads)),
        ("relative_attention_num_buckets", json!(buckets)),
        ("relative_attention_max_distance", json!(max_distance)),
        ("feed_forward_proj", json!(word.map(|(word, _)| *word))),
        ("dropout_rate", json!(config.dropout_rate)),
        ("layer_norm_epsilon", json!(config.norm.eps)),
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
    let mut units = Vec::with_capacity(config.blocks() as usize + 5);
    let mut shared = ParameterUnit::new(UnitName::Tied);
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

    let final_norm = |stack: &str| {
        let (name, width, options) = (format!("{stack}.final_layer_norm"), config.hidden, config.norm);
        NormModule { name, width, options }
    };
    let blocks = |layers: &[Layer], name: fn(u64) -> UnitName| -> Vec<ParameterUnit> {
        (0..).zip(layers).map(|(index, layer)| layer.unit(name(index))).collect()
    };
    units.extend(position_biases(&config.encoder_layers, UnitName::EncoderPositions, ENCODER));
    units.extend(blocks(&config.encoder_layers, UnitName::EncoderBlock));
    let mut encoder_norm = ParameterUnit::new(UnitName::EncoderNorm);
    encoder_norm.push_norm(&final_norm(ENCODER));
    units.push(encoder_norm);

    units.extend(position_biases(&config.layers, UnitName::DecoderPositions, DECODER));
    units.extend(blocks(&config.layers, UnitName::Block));
    let mut head = ParameterUnit::new(UnitName::Head);
    head.push_norm(&final_norm(DECODER));
    if !config.tied_head {
        head.push_head("lm_head", [config.vocab, config.hidden]);
    }
    units.push(head);
    ParameterTable { units, routing: None, adapters: None }
}

/// The unit of one stack's position biases.
fn position_biases(layers: &[Layer], name: UnitName, stack: &str) -> Option<ParameterUnit> {
    let attention = layers.first()?.attention()?;
    let Some(Positions::Relative { buckets, .. }) = attention.positions else { return None };
    let mut unit = ParameterUnit::new(name);
    unit.push(Parameter::new(
        format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        vec![buckets, attention.heads],
        ParameterKind::PositionBias,
    ));
    Some(unit)
}
