//! Writing a `config.json` that transformers 4 and 5 both read.
//!
//! Both forms of a field that was renamed are written: `rope_theta` and `rope_scaling` for transformers 4, which does
//! not look at `rope_parameters`; `rope_parameters` for 5, which also takes the older two; `torch_dtype` for 4 before
//! 4.56, `dtype` since. What is written is read back before it is given out: it says the same model, or it is refused.

use serde_json::{Map, Value, json};
use zeroth_base::{ActivationFn, DType};

use crate::architecture::{Bias, DecoderFamily, FamilyStacks, MixtureConfig, WindowedLayers};
use crate::config::ModelConfig;
use crate::decoder::AUX_LOSS_COEFFICIENT;
use crate::family::Family;
use crate::layer::{ACTIVATION_WORDS, AttentionModule, ExpertsModule, Layer, Positions};
use crate::rope::{Rope, RopeScaling};
use crate::t5;

/// A model that no `config.json` written here describes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum UnwritableConfig {
    #[error(
        "a config.json of the family {family} cannot say this model's {fields}: it would be read as another model"
    )]
    Fields { family: Family, fields: String },
}

impl ModelConfig {
    /// The model's `config.json`.
    pub fn to_json(&self) -> Result<Map<String, Value>, UnwritableConfig> {
        let (family, map) = (self.family, self.to_map());
        let refused = |fields: String| UnwritableConfig::Fields { family, fields };
        let again = Self::from_map(&map, "config.json").map_err(|error| refused(error.to_string()))?;
        if again == *self { Ok(map) } else { Err(refused(differences(self, &again).join(", "))) }
    }

    /// The resolved fields, as far as the family's configs have them.
    pub(crate) fn to_map(&self) -> Map<String, Value> {
        match &self.family.architecture().stack {
            FamilyStacks::Decoder(decoder) => self.fields(decoder),
            FamilyStacks::EncoderDecoder(_) => self.encoder_decoder_fields(),
        }
    }

    /// The fields of all families.
    fn shared_fields(&self) -> Map<String, Value> {
        let mut fields = vec![
            ("architectures", json!([self.family.class()])),
            ("model_type", json!(self.family.model_type())),
            ("use_cache", json!(true)),
        ];
        if let Some(dtype) = self.dtype {
            fields.extend(["dtype", "torch_dtype"].map(|field| (field, json!(torch_name(dtype)))));
        }
        owned(fields)
    }

    fn encoder_decoder_fields(&self) -> Map<String, Value> {
        let mut map = self.shared_fields();
        map.extend(owned(t5::fields(self)));
        map
    }

    fn fields(&self, decoder: &DecoderFamily) -> Map<String, Value> {
        let attention = self.first_attention();
        let mut map = self.shared_fields();
        let mut set = |field: &str, value: Value| {
            map.insert(field.to_owned(), value);
        };
        set("vocab_size", json!(self.vocab));
        set("hidden_size", json!(self.hidden));
        set("intermediate_size", json!(self.ffn));
        set("num_hidden_layers", json!(self.layers.len()));
        set("num_attention_heads", json!(attention.heads));
        set("num_key_value_heads", json!(attention.kv_heads));
        set(decoder.score_width, json!(attention.score_width));
        set("head_dim", json!(attention.head_dim));
        set("hidden_act", json!(activation(self).map(activation_word)));
        set("max_position_embeddings", json!(self.max_positions));
        set("rms_norm_eps", json!(self.norm.eps));
        set("tie_word_embeddings", json!(self.tied_head));
        let biases =
            [(decoder.qkv_bias, attention.q.bias), (decoder.mlp_bias, mlp_biases(self).contains(&true))];
        for (bias, value) in biases {
            if let Bias::Field(field) = bias {
                set(field, json!(value));
            }
        }
        set("attention_dropout", json!(self.attention_dropout));
        set("initializer_range", json!(self.initializer_range));
        self.window_fields(decoder.windows, &mut set);
        let experts = self.layers.iter().find_map(Layer::experts);
        if let Some((experts, mixture)) = experts.zip(decoder.mixture) {
            self.expert_fields(experts, mixture.config, &mut set);
        } else if decoder.mixture.is_some() {
            set("num_experts", json!(0));
        }
        if let Some(Positions::Rope(rope)) = &attention.positions {
            let scaling = rope_scaling(rope);
            let mut parameters = Map::from_iter([("rope_theta".to_owned(), json!(rope.theta))]);
            parameters.extend(scaling.clone());
            set("rope_theta", json!(rope.theta));
            let stretched = rope.scaling != RopeScaling::Default;
            set("rope_scaling", if stretched { Value::Object(scaling) } else { Value::Null });
            set("rope_parameters", Value::Object(parameters));
        }
        map
    }

    fn window_fields(&self, windows: WindowedLayers, set: &mut impl FnMut(&str, Value)) {
        let by_block = self.windows();
        let window = by_block.iter().copied().find_map(|window| window);
        let types = || {
            let name = |window: &Option<u64>| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            json!(by_block.iter().map(name).collect::<Vec<_>>())
        };
        match windows {
            WindowedLayers::None => {}
            WindowedLayers::All | WindowedLayers::Given => set("sliding_window", json!(window)),
            WindowedLayers::LayerTypes => {
                set("sliding_window", json!(window));
                set("layer_types", types());
            }
            WindowedLayers::Switched | WindowedLayers::SwitchedLayerTypes => {
                let first = by_block.iter().position(Option::is_some).unwrap_or(by_block.len());
                set("use_sliding_window", json!(window.is_some()));
                set("sliding_window", json!(window));
                // What transformers before 4.53 reads instead of the list.
                set("max_window_layers", json!(first));
                set("layer_types", types());
            }
        }
    }

    fn expert_fields(
        &self,
        experts: &ExpertsModule,
        config: MixtureConfig,
        set: &mut impl FnMut(&str, Value),
    ) {
        match config {
            MixtureConfig::Qwen => {
                let dense = (0_u64..).zip(&self.layers).filter(|(_, layer)| layer.experts().is_none());
                set("num_experts", json!(experts.count));
                set("moe_intermediate_size", json!(experts.width));
                set("norm_topk_prob", json!(experts.normalized));
                set("decoder_sparse_step", json!(1));
                set("mlp_only_layers", json!(dense.map(|(block, _)| block).collect::<Vec<_>>()));
            }
            MixtureConfig::Mixtral => {
                set("num_local_experts", json!(experts.count));
                set("router_jitter_noise", json!(0.0));
            }
        }
        set("num_experts_per_tok", json!(experts.per_token));
        set("output_router_logits", json!(self.aux_loss.is_some()));
        set("router_aux_loss_coef", json!(self.aux_loss.unwrap_or(AUX_LOSS_COEFFICIENT)));
    }
}

fn owned(fields: Vec<(&str, Value)>) -> Map<String, Value> {
    fields.into_iter().map(|(field, value)| (field.to_owned(), value)).collect()
}

fn activation_word(activation: ActivationFn) -> &'static str {
    let word = ACTIVATION_WORDS.iter().find(|(_, meaning)| *meaning == activation);
    word.map(|(word, _)| *word).expect("every activation has a word: it is read by it")
}

const fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
    }
}

/// The fields of `rope_scaling`.
fn rope_scaling(rope: &Rope) -> Map<String, Value> {
    let mut fields: Vec<(&str, Value)> = Vec::new();
    let kind = match &rope.scaling {
        RopeScaling::Default => "default",
        RopeScaling::Linear { factor } => {
            fields.push(("factor", json!(factor)));
            "linear"
        }
        RopeScaling::Dynamic { factor } => {
            fields.push(("factor", json!(factor)));
            "dynamic"
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            fields.extend([
                ("factor", json!(factor)),
                ("low_freq_factor", json!(low_freq_factor)),
                ("high_freq_factor", json!(high_freq_factor)),
                ("original_max_position_embeddings", json!(original_max_positions)),
            ]);
            "llama3"
        }
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            attention_factor,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            truncate,
        } => {
            fields.extend([
                ("factor", json!(factor)),
                ("original_max_position_embeddings", json!(original_max_positions)),
                ("beta_fast", json!(beta_fast)),
                ("beta_slow", json!(beta_slow)),
                ("truncate", json!(truncate)),
            ]);
            let optional = [
                ("attention_factor", attention_factor),
                ("mscale", mscale),
                ("mscale_all_dim", mscale_all_dim),
            ];
            fields.extend(optional.into_iter().filter_map(|(field, value)| Some((field, json!((*value)?)))));
            "yarn"
        }
    };
    fields.push(("rope_type", json!(kind)));
    owned(fields)
}

/// The function between the matrices of feed-forward parts.
fn activation(model: &ModelConfig) -> Option<ActivationFn> {
    let of_layer = |layer: &Layer| {
        let of_dense = layer.feed_forward().map(|feed_forward| feed_forward.activation);
        of_dense.or_else(|| layer.experts().map(|experts| experts.activation))
    };
    model.layers.iter().find_map(of_layer)
}

/// Whether the dense feed-forward parts have biases.
fn mlp_biases(model: &ModelConfig) -> Vec<bool> {
    model.all_layers().filter_map(|layer| Some(layer.feed_forward()?.up.bias)).collect()
}

/// The names of what two descriptions of one model disagree on.
fn differences(a: &ModelConfig, b: &ModelConfig) -> Vec<&'static str> {
    fn differ<T: PartialEq>(a: &ModelConfig, b: &ModelConfig, fact: impl Fn(&AttentionModule) -> T) -> bool {
        let facts = |model: &ModelConfig| -> Vec<T> {
            model.all_layers().flat_map(Layer::attentions).map(&fact).collect()
        };
        facts(a) != facts(b)
    }
    let gates = |model: &ModelConfig| -> Vec<bool> {
        model.all_layers().filter_map(|layer| Some(layer.feed_forward()?.gate.is_some())).collect()
    };
    let experts = |model: &ModelConfig| -> Vec<Option<ExpertsModule>> {
        model.layers.iter().map(|layer| layer.experts().cloned()).collect()
    };
    [
        ("encoder_blocks", a.encoder_layers.len() != b.encoder_layers.len()),
        ("kv_heads", differ(a, b, |attention| attention.kv_heads)),
        ("activation", activation(a) != activation(b)),
        ("gated", gates(a) != gates(b)),
        ("scaled_head", a.scaled_head != b.scaled_head),
        ("norm_eps", a.norm != b.norm),
        ("qkv_bias", differ(a, b, |attention| attention.q.bias)),
        ("output_bias", differ(a, b, |attention| attention.o.bias)),
        ("mlp_bias", mlp_biases(a) != mlp_biases(b)),
        ("qk_norm", differ(a, b, |attention| attention.head_norms.is_some())),
        ("score_width", differ(a, b, |attention| attention.score_width)),
        ("windows", differ(a, b, |attention| attention.window)),
        ("positions", differ(a, b, |attention| attention.positions.clone())),
        ("max_positions", a.max_positions != b.max_positions),
        ("experts", experts(a) != experts(b) || a.aux_loss != b.aux_loss),
        ("initializer_range", a.initializer_range != b.initializer_range),
        ("initializer_factor", a.initializer_factor != b.initializer_factor),
        ("attention_dropout", a.attention_dropout != b.attention_dropout),
        ("dropout_rate", a.dropout_rate != b.dropout_rate),
        ("target_tokens", a.target_tokens != b.target_tokens),
    ]
    .into_iter()
    .filter_map(|(field, differ)| differ.then_some(field))
    .collect()
}
