//! `init`: creates a model folder from an architecture and sizes.

use std::io;

use serde_json::json;
use zeroth::base::{format_bytes, grouped};
use zeroth::engine::StateKind;
use zeroth::model::{ExpertSizes, ModelConfig, ModelSizes, NewFolder, new_folder, table};
use zeroth::train::checkpoint::{free_bytes, needed_bytes};

use crate::cli::InitArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::signals::Signals;

/// What helps against a full disk.
const LARGER: &str = "free space, or give an --output on a larger disk";

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
    let table = table(&config);
    let params = table.total();
    let needed = needed_bytes(&table, &[(StateKind::Weights, new.dtype)], &arguments.output);
    // A disk that does not say what is free: writing shows.
    if let Some(free) = free_bytes(&arguments.output).ok().filter(|free| *free < needed) {
        output::error(&format!(
            "a model of {} parameters in {} needs {} in {}, but the disk has {}: nothing was written; {LARGER}",
            grouped(params),
            new.dtype,
            format_bytes(needed),
            arguments.output.display(),
            format_bytes(free)
        ));
        return Ok(Exit::DoesNotFit);
    }
    Signals::install_for_model_folder()?;
    let written = match new_folder(&config, &new, &arguments.output) {
        Err(error) if is_disk_full(&error) => {
            output::error(&format!("{error}: nothing is left of the model; {LARGER}"));
            return Ok(Exit::DoesNotFit);
        }
        written => written?,
    };
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

/// Whether an error comes from a full disk, or a quota.
fn is_disk_full(error: &(dyn std::error::Error + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}
