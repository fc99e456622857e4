//! Decoder-only families: one stack of blocks with rotary positions, grouped-query attention and a gated MLP. How they
//! differ is data: [`DecoderFamily`].

mod block;

use serde_json::Value;
use zeroth_base::counted;
use zeroth_graph::NormOptions;

use self::block::{BlockOfConfig, ExpertsOfConfig};
use crate::architecture::{Bias, DecoderFamily, MixtureConfig, WindowedLayers};
use crate::config::ModelConfig;
use crate::error::FieldError;
use crate::family::Family;
use crate::fields::{Fields, Given, check_attention_width, read_dtype};
use crate::init::INITIALIZER_RANGE;
use crate::layer::{ACTIVATION_WORDS, Layer, NormModule};
use crate::limits::{
    MAX_BLOCKS, MAX_EXPERTS, MAX_EXPERTS_OF_ALL_BLOCKS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH,
};
use crate::rope;
use crate::table::{ExpertRouting, Parameter, ParameterKind, ParameterTable, ParameterUnit, UnitName};

/// `sliding_window` where a config of a family with windows has none.
const DEFAULT_WINDOW: u64 = 4096;

/// `router_aux_loss_coef` where a config has none.
pub(crate) const AUX_LOSS_COEFFICIENT: f64 = 0.001;

pub(crate) fn read(
    family: Family,
    decoder: &DecoderFamily,
    fields: &Fields<'_>,
) -> Result<ModelConfig, FieldError> {
    let hidden = fields.size("hidden_size", MAX_WIDTH)?;
    let blocks = fields.size("num_hidden_layers", MAX_BLOCKS)?;
    let heads = fields.size("num_attention_heads", MAX_WIDTH)?;
    let (kv_heads, defaulted) = match fields.size_in("num_key_value_heads", 1, MAX_WIDTH)? {
        Given::Value(kv_heads) => (kv_heads, false),
        Given::Null => (heads, false),
        Given::Absent => (decoder.kv_heads.unwrap_or(heads), true),
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(FieldError::KvHeads { heads, kv_heads, defaulted });
    }
    let head_dim = match fields.size_in("head_dim", 1, MAX_WIDTH)?.value().or(decoder.head_dim) {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(FieldError::HeadDim { hidden, heads }),
    };
    check_attention_width(fields, ("num_attention_heads", heads), ("head_dim", head_dim))?;
    if !head_dim.is_multiple_of(2) {
        let why = "rotary positions turn pairs of numbers, so a head must be even".to_owned();
        return Err(FieldError::Unsupported {
            field: "head_dim".to_owned(),
            found: head_dim.to_string(),
            why,
        });
    }
    let score_width = fields.size_in(decoder.score_width, 1, MAX_WIDTH)?.value().unwrap_or(head_dim);
    let max_positions = fields.size_or("max_position_embeddings", MAX_POSITIONS, decoder.max_positions)?;
    let bias = |bias: Bias| match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Field(field) => Ok(fields.flag(field)?.unwrap_or(false)),
    };
    let ffn = fields.size("intermediate_size", MAX_WIDTH)?;
    let activation = fields.word("hidden_act", &ACTIVATION_WORDS, "silu")?;
    let vocab = fields.size("vocab_size", MAX_VOCAB)?;
    let tied_head = fields.flag("tie_word_embeddings")?.unwrap_or(false);
    let eps = fields.positive("rms_norm_eps")?.unwrap_or(decoder.norm.eps);
    let norm = NormOptions { eps, ..decoder.norm };
    let (qkv_bias, output_bias) = (bias(decoder.qkv_bias)?, bias(decoder.output_bias)?);
    let mlp_bias = bias(decoder.mlp_bias)?;
    let windows = windows(decoder.windows, fields, blocks)?;
    let rope = rope::read(fields, max_positions, decoder.rope_theta)?;
    let mixture = match decoder.mixture {
        Some(mixture) => experts(mixture.config, fields, blocks)?.map(|sizes| (mixture, sizes)),
        None => None,
    };

    let block = BlockOfConfig {
        hidden,
        heads,
        kv_heads,
        head_dim,
        score_width,
        qkv_bias,
        output_bias,
        qk_norm: decoder.qk_norm,
        rope,
        ffn,
        mlp_bias,
        activation,
        norm,
        mixture,
    };
    Ok(ModelConfig {
        family,
        hidden,
        layers: windows.into_iter().enumerate().map(|(index, window)| block.layer(index, window)).collect(),
        encoder_layers: Vec::new(),
        ffn,
        vocab,
        tied_head,
        scaled_head: false,
        norm,
        max_positions: Some(max_positions),
        aux_loss: block.mixture.and_then(|(_, experts)| experts.aux_loss),
        initializer_range: fields.not_negative("initializer_range")?.unwrap_or(INITIALIZER_RANGE),
        initializer_factor: 1.0,
        attention_dropout: fields.number("attention_dropout")?.unwrap_or(0.0),
        dropout_rate: 0.0,
        target_tokens: None,
        dtype: read_dtype(fields)?,
    })
}

/// The attention window of each block.
fn windows(
    windows: WindowedLayers,
    fields: &Fields<'_>,
    blocks: u64,
) -> Result<Vec<Option<u64>>, FieldError> {
    let everywhere = |window| vec![window; blocks as usize];
    if windows == WindowedLayers::None {
        return Ok(everywhere(None));
    }
    let mut window = match fields.size_in("sliding_window", 1, MAX_POSITIONS)? {
        Given::Value(window) => Some(window),
        Given::Null => None,
        Given::Absent => (windows != WindowedLayers::Given).then_some(DEFAULT_WINDOW),
    };
    if matches!(windows, WindowedLayers::Switched | WindowedLayers::SwitchedLayerTypes) {
        let is_used = fields.flag("use_sliding_window")?.unwrap_or(false);
        window = window.filter(|_| is_used);
    }
    if matches!(windows, WindowedLayers::All | WindowedLayers::Given | WindowedLayers::Switched) {
        return Ok(everywhere(window));
    }
    match fields.list("layer_types", "a list of texts", Value::as_str)? {
        None if windows == WindowedLayers::LayerTypes => Ok(everywhere(window)),
        None => {
            let first = fields.size_in("max_window_layers", 0, u64::MAX)?.value().unwrap_or(28);
            Ok((0..blocks).map(|block| window.filter(|_| block >= first)).collect())
        }
        Some(types) if types.len() as u64 != blocks => Err(FieldError::Unsupported {
            field: "layer_types".to_owned(),
            found: format!("a list of {}", types.len()),
            why: format!("the model has {} (`num_hidden_layers`)", counted(blocks, "layer")),
        }),
        Some(types) => types.iter().map(|layer_type| layer_window(fields, layer_type, window)).collect(),
    }
}

fn layer_window(
    fields: &Fields<'_>,
    layer_type: &str,
    window: Option<u64>,
) -> Result<Option<u64>, FieldError> {
    match layer_type {
        "sliding_attention" => Ok(window),
        "full_attention" => Ok(None),
        other => Err(fields.unknown_name(
            "layer_types",
            other,
            ["full_attention", "sliding_attention"].into_iter(),
        )),
    }
}

fn experts(
    config: MixtureConfig,
    fields: &Fields<'_>,
    blocks: u64,
) -> Result<Option<ExpertsOfConfig>, FieldError> {
    // For qwen3_moe transformers 5 writes `num_local_experts`, 4 wrote `num_experts`.
    let names = match config {
        MixtureConfig::Qwen => ["num_local_experts", "num_experts"],
        MixtureConfig::Mixtral => ["num_local_experts"; 2],
    };
    let mut found = None;
    for field in names {
        let count = fields.size_in(field, 0, MAX_EXPERTS)?.value();
        found = found.or(count.map(|count| (field, count)));
    }
    let (field, count) = found.ok_or_else(|| fields.missing(names[1]))?;
    if count == 0 && config == MixtureConfig::Qwen {
        return Ok(None);
    }
    if count == 0 || blocks * count > MAX_EXPERTS_OF_ALL_BLOCKS {
        return Err(FieldError::OutOfRange {
            field: format!("num_hidden_layers × {field}"),
            value: (blocks * count).to_string(),
            least: 1,
            most: MAX_EXPERTS_OF_ALL_BLOCKS,
        });
    }
    let per_token = fields.size("num_experts_per_tok", MAX_EXPERTS)?;
    if per_token > count {
        return Err(FieldError::Unsupported {
            field: "num_experts_per_tok".to_owned(),
            found: per_token.to_string(),
            why: format!(
                "a block has {} (`{field}`), and a token goes to at most all of them",
                counted(count, "expert")
            ),
        });
    }
    if let Some(noise) = fields.not_negative("router_jitter_noise")?.filter(|noise| *noise > 0.0) {
        return Err(FieldError::Unsupported {
            field: "router_jitter_noise".to_owned(),
            found: noise.to_string(),
            why: "random noise on the input of routers is not yet built: set it to 0".to_owned(),
        });
    }
    let coefficient = fields.not_negative("router_aux_loss_coef")?.unwrap_or(AUX_LOSS_COEFFICIENT);
    let is_used = fields.flag("output_router_logits")?.unwrap_or(false) && coefficient > 0.0;
    let (width, normalized, in_block) = match config {
        MixtureConfig::Qwen => {
            let step = fields.size_or("decoder_sparse_step", u64::MAX, 1)?;
            let dense = fields.list("mlp_only_layers", "a list of layer numbers", Value::as_u64)?;
            let dense = dense.unwrap_or_default();
            let has_experts = |block: u64| (block + 1).is_multiple_of(step) && !dense.contains(&block);
            let normalized = fields.flag("norm_topk_prob")?.unwrap_or(false);
            let width = fields.size("moe_intermediate_size", MAX_WIDTH)?;
            (width, normalized, (0..blocks).map(has_experts).collect())
        }
        MixtureConfig::Mixtral => {
            (fields.size("intermediate_size", MAX_WIDTH)?, true, vec![true; blocks as usize])
        }
    };
    let aux_loss = (is_used && in_block.contains(&true)).then_some(coefficient);
    Ok(Some(ExpertsOfConfig { count, per_token, width, normalized, aux_loss, in_block }))
}

/// The parameter table: embedding, blocks, head; the experts of a block are a unit of their own. A tied embedding is a unit of its own, and the head keeps its norm.
pub(crate) fn table(config: &ModelConfig) -> ParameterTable {
    let mut units = Vec::with_capacity(2 * config.layers.len() + 2);
    let (name, aliases): (_, &[_]) =
        if config.tied_head { (UnitName::Tied, &["lm_head.weight"]) } else { (UnitName::Embedding, &[]) };
    let shape = vec![config.vocab, config.hidden];
    let mut embedding = ParameterUnit::new(name);
    embedding.push(Parameter {
        aliases,
        ..Parameter::new("model.embed_tokens.weight".to_owned(), shape, ParameterKind::Embedding)
    });
    units.push(embedding);
    for (index, layer) in (0..).zip(&config.layers) {
        units.push(layer.unit(UnitName::Block(index)));
        units.extend(layer.experts().map(|experts| experts.unit(UnitName::Experts(index))));
    }
    let mut head = ParameterUnit::new(UnitName::Head);
    let (name, width, options) = ("model.norm".to_owned(), config.hidden, config.norm);
    head.push_norm(&NormModule { name, width, options });
    if !config.tied_head {
        head.push_head("lm_head", [config.vocab, config.hidden]);
    }
    units.push(head);
    let experts = config.layers.iter().find_map(Layer::experts);
    let routing =
        experts.map(|experts| ExpertRouting { experts: experts.count, per_token: experts.per_token });
    ParameterTable { units, routing, adapters: None }
}
