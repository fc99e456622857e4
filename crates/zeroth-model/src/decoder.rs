//! Decoder-only families: one stack of blocks with rotary positions, grouped-query attention and a gated MLP. How they
//! differ is data: [`Decoder`].

use serde_json::Value;
use zeroth_base::counted;

use crate::architecture::{Bias, Decoder, Mixture, MixtureConfig, Windows};
use crate::config::{Activation, Experts, ModelConfig, Positions};
use crate::error::FieldError;
use crate::family::Family;
use crate::fields::{Fields, Given, check_attention_width, read_dtype};
use crate::init::INITIALIZER_RANGE;
use crate::limits::{
    MAX_BLOCKS, MAX_EXPERTS, MAX_EXPERTS_OF_ALL_BLOCKS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH,
};
use crate::rope;
use crate::table::{Parameter, ParameterKind, ParameterRole, ParameterTable, Part, Routing, Unit, UnitName};

/// `sliding_window` where a config of a family with windows has none.
const DEFAULT_WINDOW: u64 = 4096;

/// `router_aux_loss_coef` where a config has none.
pub(crate) const AUX_LOSS_COEFFICIENT: f64 = 0.001;

pub(crate) fn read(
    family: Family,
    decoder: &Decoder,
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
    let max_positions = fields.size_or("max_position_embeddings", MAX_POSITIONS, decoder.max_positions)?;
    let bias = |bias: Bias| match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Field(field) => Ok(fields.flag(field)?.unwrap_or(false)),
    };
    Ok(ModelConfig {
        family,
        hidden,
        blocks,
        encoder_blocks: 0,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size("intermediate_size", MAX_WIDTH)?,
        gated: true,
        activation: fields.word("hidden_act", &Activation::WORDS, "silu")?,
        vocab: fields.size("vocab_size", MAX_VOCAB)?,
        tied_head: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        scaled_head: false,
        norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(decoder.norm_eps),
        qkv_bias: bias(decoder.qkv_bias)?,
        output_bias: bias(decoder.output_bias)?,
        mlp_bias: bias(decoder.mlp_bias)?,
        qk_norm: decoder.qk_norm,
        windows: windows(decoder.windows, fields, blocks)?,
        positions: Positions::Rope(rope::read(fields, max_positions, decoder.rope_theta)?),
        max_positions: Some(max_positions),
        experts: match decoder.mixture {
            Some(mixture) => experts(mixture.config, fields, blocks)?,
            None => None,
        },
        initializer_range: fields.not_negative("initializer_range")?.unwrap_or(INITIALIZER_RANGE),
        initializer_factor: 1.0,
        attention_dropout: fields.number("attention_dropout")?.unwrap_or(0.0),
        dropout_rate: 0.0,
        target_tokens: None,
        dtype: read_dtype(fields)?,
    })
}

/// The attention window of each block.
fn windows(windows: Windows, fields: &Fields<'_>, blocks: u64) -> Result<Vec<Option<u64>>, FieldError> {
    let everywhere = |window| vec![window; blocks as usize];
    if windows == Windows::None {
        return Ok(everywhere(None));
    }
    let mut window = match fields.size_in("sliding_window", 1, MAX_POSITIONS)? {
        Given::Value(window) => Some(window),
        Given::Null => None,
        Given::Absent => (windows != Windows::Given).then_some(DEFAULT_WINDOW),
    };
    if matches!(windows, Windows::Switched | Windows::SwitchedLayerTypes) {
        let is_used = fields.flag("use_sliding_window")?.unwrap_or(false);
        window = window.filter(|_| is_used);
    }
    if matches!(windows, Windows::All | Windows::Given | Windows::Switched) {
        return Ok(everywhere(window));
    }
    match fields.list("layer_types", "a list of texts", Value::as_str)? {
        None if windows == Windows::LayerTypes => Ok(everywhere(window)),
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

fn experts(config: MixtureConfig, fields: &Fields<'_>, blocks: u64) -> Result<Option<Experts>, FieldError> {
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
    let aux_loss = is_used.then_some(coefficient);
    Ok(Some(Experts { count, per_token, width, normalized, aux_loss, in_block }))
}

/// The parameter table: embedding, blocks, head; the experts of a block are a unit of their own. A tied embedding is a unit of its own, and the head keeps its norm.
pub(crate) fn table(config: &ModelConfig) -> ParameterTable {
    let mut units = Vec::with_capacity(config.blocks as usize + 2);
    let (name, aliases): (_, &[_]) =
        if config.tied_head { (UnitName::Tied, &["lm_head.weight"]) } else { (UnitName::Embedding, &[]) };
    let shape = vec![config.vocab, config.hidden];
    let mut embedding = Unit::new(name);
    embedding.push(Parameter {
        aliases,
        ..Parameter::new("model.embed_tokens.weight".to_owned(), shape, ParameterKind::Embedding)
    });
    units.push(embedding);
    for index in 0..config.blocks {
        units.push(block(config, index));
        if let Some((experts, mixture)) = config.experts.as_ref().zip(config.family.mixture())
            && config.has_experts(index)
        {
            units.push(experts_unit(config.hidden, experts, mixture, index));
        }
    }
    let mut head = Unit::new(UnitName::Head);
    head.push_norm("model.norm", config.hidden);
    if !config.tied_head {
        head.push_head("lm_head", [config.vocab, config.hidden]);
    }
    units.push(head);
    let routing = config.experts.as_ref().map(|e| Routing { experts: e.count, per_token: e.per_token });
    ParameterTable { units, routing, adapters: None }
}

fn block(config: &ModelConfig, index: u64) -> Unit {
    use ParameterRole::{AttentionOutput, FeedForwardInput, FeedForwardOutput, Key, Query, Router, Value};
    let (hidden, q, kv) = (config.hidden, config.attention_width(), config.kv_width());
    let mut unit = Unit::new(UnitName::Block(index));
    let at = |part: &str| format!("model.layers.{index}.{part}");

    unit.push_norm(&at("input_layernorm"), hidden);
    unit.push_linear(&at("self_attn.q_proj"), Query, [q, hidden], config.qkv_bias);
    unit.push_linear(&at("self_attn.k_proj"), Key, [kv, hidden], config.qkv_bias);
    unit.push_linear(&at("self_attn.v_proj"), Value, [kv, hidden], config.qkv_bias);
    if config.qk_norm {
        unit.push_norm(&at("self_attn.q_norm"), config.head_dim);
        unit.push_norm(&at("self_attn.k_norm"), config.head_dim);
    }
    unit.push_linear(&at("self_attn.o_proj"), AttentionOutput, [hidden, q], config.output_bias);

    unit.push_norm(&at("post_attention_layernorm"), hidden);
    match config.experts.as_ref().zip(config.family.mixture()) {
        Some((experts, mixture)) if config.has_experts(index) => {
            let shape = vec![experts.count, hidden];
            let stored = Part::whole(at(&format!("{}.gate.weight", mixture.module)), shape.clone());
            let router = Parameter::new(at("mlp.gate.weight"), shape, ParameterKind::Router);
            let mut router = Parameter { role: Some(Router), ..router };
            if stored.name != router.name {
                router.parts = vec![stored];
            }
            unit.push(router);
        }
        _ => {
            unit.push_linear(&at("mlp.gate_proj"), FeedForwardInput, [config.ffn, hidden], config.mlp_bias);
            unit.push_linear(&at("mlp.up_proj"), FeedForwardInput, [config.ffn, hidden], config.mlp_bias);
            unit.push_linear(&at("mlp.down_proj"), FeedForwardOutput, [hidden, config.ffn], config.mlp_bias);
        }
    }
    unit
}

/// The experts of a block: one parameter for what goes in, with gate and up of an expert behind each other, and one for
/// what comes out. Names and shapes are those of transformers 5; the parts are the tensors of a folder per expert.
fn experts_unit(hidden: u64, experts: &Experts, mixture: Mixture, index: u64) -> Unit {
    let Experts { count, width, .. } = *experts;
    let [gate, up, down] = mixture.projections;
    let part = |expert: u64, projection: &str, shape: [u64; 2]| {
        let name = format!("model.layers.{index}.{}.experts.{expert}.{projection}.weight", mixture.module);
        Part::whole(name, shape.to_vec())
    };
    let parameter = |name: &str, role: ParameterRole, [out, input]: [u64; 2], parts: Vec<Part>| {
        let name = format!("model.layers.{index}.mlp.experts.{name}");
        let experts = Parameter::new(name, vec![count, out, input], ParameterKind::Expert);
        Parameter { role: Some(role), parts, ..experts }
    };
    let into = |expert| [gate, up].map(|projection| part(expert, projection, [width, hidden]));
    let mut unit = Unit::new(UnitName::Experts(index));
    let parts = (0..count).flat_map(into).collect();
    unit.push(parameter("gate_up_proj", ParameterRole::FeedForwardInput, [2 * width, hidden], parts));
    let out = |expert| part(expert, down, [hidden, width]);
    let parts = (0..count).map(out).collect();
    unit.push(parameter("down_proj", ParameterRole::FeedForwardOutput, [hidden, width], parts));
    unit
}
