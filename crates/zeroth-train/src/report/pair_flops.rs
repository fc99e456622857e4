//! FLOPs of an encoder-decoder's steps, whose samples have a source and a target. Counted as [`ModelFlops`] counts: matmul
//! weights by the tokens of the stream that they see, and attention's two matmuls over the pairs of tokens that attend
//! to each other. The encoder's are a full square, those of cross attention source × target.
//!
//! [`ModelFlops`]: super::flops::ModelFlops

use zeroth_model::{Layer, ModelConfig, Parameter, ParameterKind, ParameterRole, ParameterTable, UnitName};

use super::flops::{is_matmul, pairs_of};

/// FLOPs of an encoder-decoder's steps.
#[derive(Debug, Clone, PartialEq)]
pub struct PairFlops {
    /// FLOPs of forward and backward per token of each stream, without attention.
    per_token: [u64; 2],
    /// The width of all heads of all blocks of the encoder, and of the decoder in each of its two attentions.
    attention_widths: [u64; 2],
}

impl PairFlops {
    /// The FLOPs of a model. `None` for decoder-only models.
    pub fn of(model: &ModelConfig, table: &ParameterTable) -> Option<Self> {
        if !model.family.is_encoder_decoder() {
            return None;
        }
        let mut per_token = [0; 2];
        for unit in &table.units {
            let in_encoder = matches!(unit.name, UnitName::EncoderBlock(_));
            for parameter in unit.parameters.iter().filter(|parameter| is_matmul(parameter)) {
                let stream = usize::from(!in_encoder && !reads_encoder(parameter));
                per_token[stream] += if parameter.trained { 6 } else { 4 } * parameter.elements();
            }
        }
        if model.tied_head {
            let is_trained = table.iter().any(|p| p.kind == ParameterKind::Embedding && p.trained);
            per_token[1] += if is_trained { 6 } else { 4 } * model.vocab * model.hidden;
        }
        let width = |layers: &[Layer]| {
            layers.iter().filter_map(Layer::attention).map(|attention| attention.q.out).sum()
        };
        Some(Self {
            per_token,
            attention_widths: [&model.encoder_layers, &model.layers].map(|layers| width(layers)),
        })
    }

    /// FLOPs of forward and backward over pairs of these lengths.
    pub fn step(&self, lengths: impl IntoIterator<Item = [u64; 2]>) -> f64 {
        let [encoder, decoder] = self.attention_widths.map(|width| width as f64);
        let (mut tokens, mut attended) = ([0; 2], 0.0);
        for [source, target] in lengths {
            tokens = [tokens[0] + source, tokens[1] + target];
            let (from, to) = (source as f64, target as f64);
            attended += encoder * from * from;
            attended += decoder * (pairs_of(target, None) + from * to);
        }
        let weights: f64 =
            tokens.iter().zip(self.per_token).map(|(tokens, each)| *tokens as f64 * each as f64).sum();
        weights + 12.0 * attended
    }
}

/// Whether it maps the encoder's output, in a block of the decoder.
const fn reads_encoder(parameter: &Parameter) -> bool {
    matches!(parameter.role, Some(ParameterRole::CrossKey | ParameterRole::CrossValue))
}

#[cfg(test)]
mod tests {
    use zeroth_model::{Lora, LoraTargets, add_adapters, table};

    use super::*;

    #[test]
    fn weights_count_for_the_stream_that_they_see() {
        // Width 16, feed-forward of 10, 2 heads of 4, 2 encoder blocks, 1 decoder block, 18 tokens, a tied head.
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../zeroth-model/tests/configs/tiny-t5-tied");
        let model = ModelConfig::from_folder(&folder).unwrap();
        let flops = PairFlops::of(&model, &table(&model)).unwrap();
        let (projection, feed_forward) = (16 * 8, 2 * 16 * 10);
        let source = 2 * (4 * projection + feed_forward) + 2 * projection;
        let target = (4 + 2) * projection + feed_forward + 18 * 16;
        assert_eq!(flops.per_token, [6 * source, 6 * target]);
        // A frozen base, and 2 · (16 + 8) of each q: of 2 attentions in the encoder, and of 2 in the decoder.
        let lora = Lora { rank: 2, targets: LoraTargets::Named(vec!["q".to_owned()]), ..Lora::default() };
        let adapted = PairFlops::of(&model, &add_adapters(&table(&model), &lora).unwrap()).unwrap();
        assert_eq!(adapted.per_token, [source, target].map(|weights| 4 * weights + 6 * 2 * 48));
        let attention = 12.0 * 8.0 * (2.0 * 25.0 + (3.0 * 3.0 / 2.0 + 15.0));
        assert_eq!(flops.step([[5, 3]]), (6 * (5 * source + 3 * target)) as f64 + attention);
        let llama = folder.join("../tiny-llama-biases");
        let llama = ModelConfig::from_folder(&llama).unwrap();
        assert_eq!(PairFlops::of(&llama, &table(&llama)), None);
    }
}
