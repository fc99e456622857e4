//! Encoder-decoders: what their configs say, the graph of their forward, and adapters in all of their attentions.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use zeroth_base::ActivationFn;
use zeroth_graph::{DistillSpec, Graph, Op, Role, Rows};
use zeroth_model::{
    BatchTokens, Branch, Distilled, ForwardError, Lora, LoraTargets, ModelConfig, Objective, ParameterKind,
    ParameterTable, TargetTokens, TeacherForward, add_adapters, forward, lora_table, table,
};

/// A T5 with two encoder and three decoder blocks, with these changes.
fn read(changes: &Value) -> Result<ModelConfig, String> {
    let mut config = json!({
        "model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 3,
        "num_heads": 2, "vocab_size": 16, "dropout_rate": 0.1,
    });
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    ModelConfig::from_json(&config.to_string(), "config.json").map_err(|error| error.to_string())
}

fn model(changes: &Value) -> (ModelConfig, ParameterTable) {
    let config = read(changes).unwrap();
    let table = table(&config);
    (config, table)
}

fn v1_1() -> Value {
    json!({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": false})
}

#[test]
fn tokens_of_targets_have_the_defaults_of_transformers() {
    let tokens = |changes: Value| read(&changes).unwrap().target_tokens.unwrap();
    let usual = TargetTokens { start: 0, pad: Some(0), eos: Some(1) };
    assert_eq!(tokens(json!({})), usual);
    assert_eq!(
        tokens(json!({"model_type": "mt5", "pad_token_id": null})),
        TargetTokens { pad: None, ..usual }
    );
    assert_eq!(tokens(json!({"pad_token_id": 3})), TargetTokens { start: 3, pad: Some(3), ..usual });
    assert_eq!(
        tokens(json!({"decoder_start_token_id": 2, "pad_token_id": null, "eos_token_id": [5, 1]})),
        TargetTokens { start: 2, pad: None, eos: Some(5) }
    );
    assert_eq!(tokens(json!({"eos_token_id": null})).eos, None);
    assert_eq!(read(&json!({"dropout_rate": null})).unwrap().dropout_rate, 0.1);
    assert_eq!(read(&json!({"dropout_rate": 0})).unwrap().dropout_rate, 0.0);
}

#[test]
fn configs_without_a_forward_are_refused() {
    for (changes, words) in [
        (
            json!({"pad_token_id": null}),
            "`decoder_start_token_id` is not given: the decoder begins with it, and `pad_token_id`, which could stand in, is null",
        ),
        (json!({"decoder_start_token_id": 16}), "`decoder_start_token_id` is 16: it must be from 0 to 15"),
        (json!({"eos_token_id": [16]}), "`eos_token_id` is 16: it must be from 0 to 15"),
        (json!({"eos_token_id": ["a"]}), "`eos_token_id` is the text \"a\": it must be a whole number"),
        (json!({"dropout_rate": 1.0}), "`dropout_rate` is 1: it must be a number of at least 0 and below 1"),
        (
            json!({"dropout_rate": -0.5}),
            "`dropout_rate` is -0.5: it must be a number of at least 0 and below 1",
        ),
        (json!({"relative_attention_num_buckets": 3}), "it must be from 4 to 1048576"),
        (
            json!({"relative_attention_max_distance": 16}),
            "`relative_attention_max_distance` is 16: 16 distances have a bucket of their own (half of \
             `relative_attention_num_buckets`), and the others share buckets up to this one: it must be larger",
        ),
        (json!({"initializer_factor": -1}), "`initializer_factor` is -1"),
    ] {
        let error = read(&changes).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_config_that_has_no_word_for_its_feed_forward_part_is_not_written() {
    let mut config = read(&v1_1()).unwrap();
    for layer in config.encoder_layers.iter_mut().chain(&mut config.layers) {
        let Branch::FeedForward(last) = &mut layer.parts.last_mut().unwrap().branch else { panic!("dense") };
        last.activation = ActivationFn::Gelu;
    }
    let error = config.to_json().unwrap_err().to_string();
    assert!(error.starts_with("a config.json of the family t5 cannot say this model's"), "{error}");
}

fn graph(changes: &Value) -> Graph {
    let (config, table) = model(changes);
    forward(&config, &table, BatchTokens::of_pairs(7, 5)).unwrap()
}

fn count(graph: &Graph, is: impl Fn(Op) -> bool) -> usize {
    graph.nodes.iter().filter(|node| is(node.op)).count()
}

#[test]
fn blocks_of_both_stacks_are_numbered_in_the_order_of_execution() {
    let graph = graph(&json!({}));
    let units: Vec<(&str, Role)> = graph.units.iter().map(|unit| (unit.name.as_str(), unit.role)).collect();
    let expected = [
        ("tied embedding", Role::Embedding),
        ("encoder positions", Role::Other),
        ("encoder block 0", Role::Block(0)),
        ("encoder block 1", Role::Block(1)),
        ("encoder norm", Role::Other),
        ("decoder positions", Role::Other),
        ("block 0", Role::Block(2)),
        ("block 1", Role::Block(3)),
        ("block 2", Role::Block(4)),
        ("head", Role::Head),
    ];
    assert_eq!(units, expected);
    assert_eq!(graph.stream_rows(), [7, 5]);
    let loss = graph.losses().next().unwrap();
    assert_eq!(graph.nodes[loss].inputs[1], graph.streams[1].labels);
}

#[test]
fn attentions_and_dropouts_are_where_transformers_has_them() {
    let graph = graph(&json!({}));
    let attentions = graph.nodes.iter().filter_map(|node| match node.op {
        Op::Attention(spec) => {
            let rows = [0, 1].map(|input| graph.info(node.inputs[input]).rows);
            Some((rows, spec.causal, spec.max_distance, spec.scale))
        }
        _ => None,
    });
    let [source, target] = [Rows::Stream(0), Rows::Stream(1)];
    let encoder = ([source, source], false, Some(128), 1.0);
    let decoder = [([target, target], true, Some(128), 1.0), ([target, source], false, None, 1.0)];
    let expected: Vec<_> = [encoder; 2].into_iter().chain([decoder; 3].concat()).collect();
    assert_eq!(attentions.collect::<Vec<_>>(), expected);

    // Both embeddings, both last norms; in a block the result of each part, and the feed-forward part's inner values.
    assert_eq!(count(&graph, |op| matches!(op, Op::Dropout { .. })), 4 + 2 * 3 + 3 * 4);
    let salt = |op: Op| match op {
        Op::Dropout { salt, probability } => Some((salt, probability)),
        Op::Attention(spec) => spec.dropout.map(|dropout| (dropout.salt, dropout.probability)),
        _ => None,
    };
    let dropouts: Vec<(u32, f64)> = graph.nodes.iter().filter_map(|node| salt(node.op)).collect();
    assert_eq!(dropouts.len(), 22 + 8);
    assert_eq!(dropouts.iter().map(|(salt, _)| salt).collect::<BTreeSet<_>>().len(), 30, "each its own salt");
    assert!(dropouts.iter().all(|(_, probability)| *probability == 0.1));
    assert_eq!(count(&graph, |op| matches!(op, Op::AddRmsNorm { clamp: false, .. })), 0);

    let none = self::graph(&json!({"dropout_rate": 0}));
    assert!(none.nodes.iter().all(|node| salt(node.op).is_none()));
}

#[test]
fn heads_and_feed_forward_parts_are_those_of_the_config() {
    let scales = |graph: &Graph| count(graph, |op| matches!(op, Op::Scale { .. }));
    let tied = graph(&json!({}));
    assert_eq!((scales(&tied), count(&tied, |op| matches!(op, Op::Activation(_)))), (1, 5));
    let own = graph(&v1_1());
    assert_eq!((scales(&own), count(&own, |op| matches!(op, Op::GatedActivation(_)))), (0, 5));
    let mt5 = graph(&json!({"model_type": "mt5", "tie_word_embeddings": true}));
    assert_eq!(scales(&mt5), 0, "mt5 never scales");
}

fn named(names: &[&str]) -> Lora {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    Lora { rank: 2, targets: LoraTargets::Named(names), ..Lora::default() }
}

#[test]
fn adapters_stand_in_both_stacks_and_in_cross_attention() {
    let (config, base) = model(&json!({}));
    let adapters = lora_table(&base, &named(&["q", "v"])).unwrap();
    let names: Vec<&str> = adapters.iter().map(|parameter| parameter.name.as_str()).collect();
    // Two matrices of q and of v, in 2 encoder attentions and 6 of the decoder.
    assert_eq!(names.len(), 2 * 2 * (2 + 6));
    for name in [
        "base_model.model.encoder.block.1.layer.0.SelfAttention.q.lora_A.weight",
        "base_model.model.decoder.block.2.layer.1.EncDecAttention.v.lora_B.weight",
    ] {
        assert!(names.contains(&name), "{name}");
    }
    let cross = lora_table(&base, &named(&["EncDecAttention.k"])).unwrap();
    assert_eq!(cross.iter().count(), 2 * 3);
    let adapted = add_adapters(&base, &named(&["q", "v"])).unwrap();
    let graph = forward(&config, &adapted, BatchTokens::of_pairs(7, 5)).unwrap();
    assert_eq!(count(&graph, |op| matches!(op, Op::LinearAdd { .. })), 2 * (2 + 6));
    let backward = graph.backward().unwrap();
    let trained: BTreeSet<usize> =
        backward.nodes.iter().flat_map(|node| &node.accumulates_into).map(|param| param.index()).collect();
    assert_eq!(trained.len(), names.len(), "adapters and nothing else have gradients");

    for kind in [ParameterKind::LoraA, ParameterKind::LoraB] {
        let mut halves = adapted.clone();
        for unit in &mut halves.units {
            unit.parameters.retain(|parameter| parameter.kind != kind);
        }
        let error = forward(&config, &halves, BatchTokens::of_pairs(7, 5)).unwrap_err().to_string();
        assert!(error.contains("and not the other matrix of its adapter"), "{error}");
    }

    let all = Lora { rank: 2, targets: LoraTargets::AllLinear, ..Lora::default() };
    // q, k, v, o of 8 attentions; wi and wo of 5 feed-forward parts.
    assert_eq!(lora_table(&base, &all).unwrap().iter().count(), 2 * (8 * 4 + 5 * 2));
    let (_, gated) = model(&v1_1());
    assert_eq!(lora_table(&gated, &all).unwrap().iter().count(), 2 * (8 * 4 + 5 * 3));
}

#[test]
fn targets_that_a_model_does_not_have_are_answered_with_those_it_has() {
    let (tied, own) = (model(&json!({})).1, model(&v1_1()).1);
    let refused =
        |base: &ParameterTable, name: &str| add_adapters(base, &named(&[name])).unwrap_err().to_string();
    for (error, words) in [
        (refused(&tied, "q_proj"), "matches no module of this model (q, k, v, o, wi, wo)"),
        (refused(&own, "wi"), "matches no module of this model (q, k, v, o, wi_0, wi_1, wo, lm_head)"),
        (refused(&tied, "lm_head"), "is tied to shared.weight"),
        (refused(&own, "lm_head"), "LoRA on the output projection (lm_head) is not yet built"),
        (refused(&tied, "relative_attention_bias"), "is not a linear map"),
        (
            refused(&tied, "layer_norm"),
            "is not a linear map (encoder.block.0.layer.0.layer_norm); those are q, k, v, o, wi, wo",
        ),
    ] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn nf4_keeps_the_matrices_of_blocks_alone() {
    let (_, base) = model(&v1_1());
    let mut table = add_adapters(&base, &named(&["q"])).unwrap();
    table.quantize();
    for parameter in table.iter() {
        assert_eq!(parameter.quantized, parameter.kind == ParameterKind::Linear, "{}", parameter.name);
    }
    assert_eq!(table.iter().filter(|parameter| parameter.quantized).count(), 8 * 4 + 5 * 3);
}

#[test]
fn distillation_of_an_encoder_decoder_is_refused() {
    let (config, table) = model(&json!({}));
    let spec = DistillSpec { beta: 0.0, temperature: 1.0, squared: false };
    let teacher = TeacherForward::TopK { k: 2, vocab: 16, tail: false };
    let objective = Objective::Distillation(Distilled { teacher, spec, alpha: 1.0 });
    let error = objective.forward(&config, &table, BatchTokens::of_tokens(4));
    assert_eq!(
        error.unwrap_err(),
        ForwardError::DistilledEncoder { who: "the student", family: config.family }
    );
    let student = ModelConfig::from_json(
        r#"{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 12, "vocab_size": 16}"#,
        "config.json",
    )
    .unwrap();
    let own = zeroth_model::table(&student);
    let teacher = TeacherForward::Weights { config: &config, table: &table };
    let objective = Objective::Distillation(Distilled { teacher, spec, alpha: 1.0 });
    let error = objective.forward(&student, &own, BatchTokens::of_tokens(4));
    assert_eq!(
        error.unwrap_err(),
        ForwardError::DistilledEncoder { who: "the teacher", family: config.family }
    );
    // The table of another model.
    let error = forward(&config, &own, BatchTokens::of_tokens(4)).unwrap_err().to_string();
    assert_eq!(
        error,
        "the parameter table does not fit the config, which is of the family t5: units in the order of execution expected"
    );
}
