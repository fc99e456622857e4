//! `init`: creates a model folder from an architecture and sizes.

use serde_json::json;
use zeroth::base::{format_bytes, grouped};
use zeroth::model::{ExpertSizes, ModelConfig, ModelSizes, NewFolder, new_folder, table};

use crate::cli::InitArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::Signals;

pub(super) fn run(arguments: &InitArgs, output: &Output) -> anyhow::Result<Exit> {
    let experts = arguments.num_experts.zip(arguments.num_experts_per_tok);
    let experts = experts.map(|(count, per_token)| ExpertSizes {
        count,
        per_token,
        width: arguments.moe_intermediate_size,
    });
    let config = ModelConfig::from_sizes(&ModelSizes {
        family: arguments.family.into(),
        hidden: arguments.hidden,
        blocks: arguments.layers,
        heads: arguments.heads,
        kv_heads: arguments.kv_heads,
        head_dim: arguments.head_dim,
        ffn: arguments.intermediate_size,
        vocab: arguments.vocab_size,
        tied: arguments.tied,
        max_positions: arguments.max_positions,
        rope_theta: arguments.rope_theta,
        experts,
    })?;
    let new = NewFolder {
        seed: arguments.seed,
        dtype: arguments.dtype.into(),
        shard_bytes: arguments.max_shard_size,
        overwrite: arguments.overwrite_output_dir,
    };
    Signals::install_for_model_folder()?;
    let written = new_folder(&config, &new, &arguments.output)?;
    let params = table(&config).total();
    if output.is_json() {
        output::json(&json!({
            "path": arguments.output,
            "family": config.family.model_type(),
            "params": params,
            "dtype": new.dtype.to_string(),
            "seed": new.seed,
            "bytes": written.bytes,
            "files": written.files,
        }))?;
    } else {
        output::text(&format!(
            "{} with {} parameters, {} of weights in {}, seed {}\nmodel saved to {}\n",
            config.family,
            grouped(params),
            format_bytes(written.bytes),
            new.dtype,
            new.seed,
            arguments.output.display()
        ));
    }
    Ok(Exit::Done)
}
