//! T5 and mT5: an encoder and a decoder over one embedding, with learned biases for relative positions. v1.1 and mT5
//! have a gated feed-forward part and a head of their own.

use crate::architecture::EncoderDecoder;
use crate::config::{Activation, ModelConfig, Positions};
use crate::error::FieldError;
use crate::family::Family;
use crate::fields::{Fields, check_attention_width, read_dtype};
use crate::init::INITIALIZER_RANGE;
use crate::limits::{MAX_BLOCKS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH};
use crate::table::{Parameter, ParameterKind, ParameterTable, Unit, UnitName};

/// How `feed_forward_proj` is written, whether it has a gate, and its function. `gated-gelu` has always meant the
/// tanh approximation.
const FEED_FORWARDS: [(&str, (bool, Activation)); 8] = [
    ("relu", (false, Activation::Relu)),
    ("gelu", (false, Activation::Gelu)),
    ("gelu_new", (false, Activation::GeluTanh)),
    ("silu", (false, Activation::Silu)),
    ("gated-relu", (true, Activation::Relu)),
    ("gated-gelu", (true, Activation::GeluTanh)),
    ("gated-gelu_new", (true, Activation::GeluTanh)),
    ("gated-silu", (true, Activation::Silu)),
];

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
        vocab: fields.size("vocab_size", MAX_VOCAB)?,
        tied_head,
        // transformers 4 scaled where the head is tied; 5 writes down whether it does, and never scales mT5.
        scaled_head: stacks.scales_head && fields.flag("scale_decoder_outputs")?.unwrap_or(tied_head),
        norm_eps: fields.positive("layer_norm_epsilon")?.unwrap_or(1e-6),
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; blocks as usize],
        positions: Positions::Relative {
            buckets: fields.size_or("relative_attention_num_buckets", MAX_WIDTH, 32)?,
            max_distance: fields.size_or("relative_attention_max_distance", MAX_POSITIONS, 128)?,
        },
        max_positions: None,
        experts: None,
        initializer_range: INITIALIZER_RANGE,
        attention_dropout: 0.0,
        dtype: read_dtype(fields)?,
    })
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
        attention(&mut unit, config, &format!("encoder.block.{index}.layer.0"), "SelfAttention");
        feed_forward(&mut unit, config, &format!("encoder.block.{index}.layer.1"));
        unit
    }));
    let mut encoder_norm = Unit::new(UnitName::EncoderNorm);
    encoder_norm.push_norm("encoder.final_layer_norm", config.hidden);
    units.push(encoder_norm);

    units.extend(position_biases(config, UnitName::DecoderPositions, "decoder"));
    units.extend((0..config.blocks).map(|index| {
        let mut unit = Unit::new(UnitName::Block(index));
        attention(&mut unit, config, &format!("decoder.block.{index}.layer.0"), "SelfAttention");
        attention(&mut unit, config, &format!("decoder.block.{index}.layer.1"), "EncDecAttention");
        feed_forward(&mut unit, config, &format!("decoder.block.{index}.layer.2"));
        unit
    }));
    let mut head = Unit::new(UnitName::Head);
    head.push_norm("decoder.final_layer_norm", config.hidden);
    if !config.tied_head {
        head.push_linear("lm_head", ParameterKind::Head, [config.vocab, config.hidden], false);
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

fn attention(unit: &mut Unit, config: &ModelConfig, at: &str, name: &str) {
    let (hidden, width) = (config.hidden, config.attention_width());
    unit.push_norm(&format!("{at}.layer_norm"), hidden);
    for (part, shape) in
        [("q", [width, hidden]), ("k", [width, hidden]), ("v", [width, hidden]), ("o", [hidden, width])]
    {
        unit.push_linear(&format!("{at}.{name}.{part}"), ParameterKind::Linear, shape, false);
    }
}

fn feed_forward(unit: &mut Unit, config: &ModelConfig, at: &str) {
    unit.push_norm(&format!("{at}.layer_norm"), config.hidden);
    let inputs: &[&str] = if config.gated { &["wi_0", "wi_1"] } else { &["wi"] };
    for part in inputs {
        let module = format!("{at}.DenseReluDense.{part}");
        unit.push_linear(&module, ParameterKind::Linear, [config.ffn, config.hidden], false);
    }
    let module = format!("{at}.DenseReluDense.wo");
    unit.push_linear(&module, ParameterKind::Linear, [config.hidden, config.ffn], false);
}
