//! The forward of a distillation: the teacher's units, the student's, and the loss that compares them.

use zeroth_graph::{Builder, DistillSpec, Graph, Teacher};

use crate::forward::{DecoderForward, ForwardError};
use crate::{BatchTokens, ModelConfig, ParameterTable};

/// What the names of a teacher's parameters begin with.
pub const TEACHER_PREFIX: &str = "teacher.";

/// A student's distillation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distilled<'a> {
    /// Where the teacher's distributions come from.
    pub teacher: TeacherForward<'a>,
    /// The divergence and what shapes it.
    pub spec: DistillSpec,
    /// The divergence's share of the loss; the cross-entropy has the remainder.
    pub alpha: f64,
}

/// Where a teacher's distributions come from.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum TeacherForward<'a> {
    /// The teacher itself, computed with the student.
    Weights { config: &'a ModelConfig, table: &'a ParameterTable },
    /// Two inputs for each token: the teacher's `k` most probable ids, and their log-probabilities.
    TopK {
        /// Ids of a token.
        k: u64,
        vocab: u64,
        /// Whether the missing mass is one more bucket; else both distributions are renormalised over the k ids.
        tail: bool,
    },
}

/// The forward of a student with its teacher. No parameter of the teacher is trained, and the auxiliary loss of its routers does not
/// count.
pub(crate) fn forward_distilled(
    config: &ModelConfig,
    table: &ParameterTable,
    Distilled { teacher, spec, alpha }: Distilled<'_>,
    batch: BatchTokens,
) -> Result<Graph, ForwardError> {
    refuse_encoder("the student", config)?;
    let mut b = Builder::new(&[batch.tokens]);
    let student = DecoderForward::new(config, table);
    let teacher = match teacher {
        TeacherForward::Weights { config, table } => {
            refuse_encoder("the teacher", config)?;
            let output = DecoderForward::teacher(config, table).add(&mut b, &|_| false)?;
            Teacher::Hidden { x: output.normed, weight: output.head }
        }
        TeacherForward::TopK { k, vocab, tail } => {
            let ids = b.input(0, k); // [T, k]
            let log_probs = b.statistic_input(0, k); // [T, k]
            Teacher::TopK { ids, log_probs, vocab, tail }
        }
    };
    let output = student.add(&mut b, &|parameter| parameter.trained)?;
    b.distill_loss(output.normed, output.head, teacher, spec, alpha)?;
    output.aux_loss(&mut b, config)?;
    Ok(b.finish()?)
}

fn refuse_encoder(who: &'static str, config: &ModelConfig) -> Result<(), ForwardError> {
    if config.family.is_encoder_decoder() {
        return Err(ForwardError::DistilledEncoder { who, family: config.family });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use zeroth_graph::{Group, Op};

    use super::*;
    use crate::table;

    fn model(extra: &str) -> (ModelConfig, ParameterTable) {
        let json = format!(
            r#"{{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 16, "max_position_embeddings": 8,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": true{extra}}}"#
        );
        let config = ModelConfig::from_json(&json, "config.json").unwrap();
        let table = table(&config);
        (config, table)
    }

    const SPEC: DistillSpec = DistillSpec { beta: 0.0, temperature: 2.0, squared: true };

    #[test]
    fn the_teacher_comes_first_is_frozen_and_has_a_rotary_table_of_its_own() {
        let (student, own) = model("");
        let (config, table) = model(r#", "rope_theta": 1000.0, "num_hidden_layers": 1"#);
        let distilled = Distilled {
            teacher: TeacherForward::Weights { config: &config, table: &table },
            spec: SPEC,
            alpha: 0.3,
        };
        let graph = forward_distilled(&student, &own, distilled, BatchTokens::of_tokens(4)).unwrap();
        let of_teacher = |group| graph.units.iter().filter(|unit| unit.group == group).count();
        assert_eq!(of_teacher(Group::Teacher), table.units.len());
        assert_eq!(of_teacher(Group::Model), own.units.len());
        assert_eq!(graph.units[0].group, Group::Teacher);
        for param in &graph.params {
            let is_teacher = param.spec.name.starts_with(TEACHER_PREFIX);
            assert_eq!(param.spec.trainable, !is_teacher, "{}", param.spec.name);
        }
        assert_eq!(graph.rotaries.len(), 2);
        let parts: Vec<(&str, f64)> = graph.loss_parts.iter().map(|part| (part.name, part.weight)).collect();
        assert_eq!(parts, [("ce_loss", 0.7), ("kd_loss", 0.3)]);
        let plain = graph.evaluated();
        assert!(plain.nodes.iter().all(|node| !matches!(node.op, Op::DistillLoss { .. })));
    }

    #[test]
    fn a_cache_is_two_inputs_and_no_weights() {
        let (student, own) = model("");
        let teacher = TeacherForward::TopK { k: 3, vocab: 20, tail: true };
        let distilled = Distilled { teacher, spec: SPEC, alpha: 1.0 };
        let graph = forward_distilled(&student, &own, distilled, BatchTokens::of_tokens(4)).unwrap();
        assert_eq!(graph.params.len(), own.iter().count());
        let widths: Vec<u64> = graph.inputs.iter().map(|input| graph.info(*input).width).collect();
        assert_eq!(widths, [1, 1, 1, 3, 3]);
    }
}
