//! A small job with an offloaded optimizer and no files but its config.json.

use std::path::Path;

use zeroth_config::check::check;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, resolve};
use zeroth_data::{Samples, SamplesBuilder};
use zeroth_kernel::Recipe;
use zeroth_model::{ModelConfig, table};
use zeroth_program::Settings;
use zeroth_train::{
    BatchShape, Evaluation, HuggingFace, HuggingFaceShape, Interval, Job, JobObjective, ModelFiles,
    SampleOrder, Schedule,
};

pub(crate) const STEPS: u64 = 9;

fn samples(count: usize) -> Samples {
    let mut builder = SamplesBuilder::new(u64::MAX);
    for sample in 0..count {
        let ids: Vec<i32> = (0..5 + sample % 7).map(|at| ((sample * 31 + at * 17) % 256) as i32).collect();
        builder.push(&ids, &ids);
    }
    builder.finish().unwrap()
}

/// A job with this model folder.
pub(crate) fn job(folder: &Path) -> Job {
    let text = r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}"#;
    let asked = check(&parse(ConfigSource::from_text("ds.json", text)).unwrap()).values;
    let model = Some(ModelFacts { hidden_size: Some(32), blocks: Some(2) });
    let flags = Flags::default();
    let request = ResolveRequest { file: &asked, flags: &flags, ranks: 1, model, steps: Some(STEPS) };
    let resolved = resolve(&request).unwrap();
    let json = r#"{"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "vocab_size": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"}"#;
    std::fs::write(folder.join("config.json"), json).unwrap();
    let model = ModelConfig::from_json(json, "config.json").unwrap();
    let samples_of_job = samples(40);
    let mut job = Job {
        folder: folder.to_owned(),
        files: ModelFiles::read(folder).unwrap(),
        table: table(&model),
        model,
        order: SampleOrder::new(samples_of_job.count(), Some(3)),
        samples: samples_of_job,
        decoder_start: None,
        shape: BatchShape { micro_batch: 2, accumulation: 1, ranks: 1 },
        steps: STEPS,
        row_sizes: Vec::new().into(),
        settings: Settings::from_config(&resolved),
        recipe: Recipe { max_norm: 1.0, ..Recipe::default() },
        schedule: Schedule::HuggingFace(HuggingFace {
            shape: HuggingFaceShape::Linear,
            learning_rate: 1e-2,
            warmup_steps: 3,
            total_steps: STEPS,
        }),
        decays_all: false,
        seed: 7,
        data_seed: 3,
        evaluation: Some(Evaluation {
            samples: samples(6),
            interval: Interval::steps(4),
            micro_batch: None,
            best: None,
        }),
        lora: None,
        objective: JobObjective::CrossEntropy,
        save_dtype: None,
    };
    job.size_rows();
    job
}
