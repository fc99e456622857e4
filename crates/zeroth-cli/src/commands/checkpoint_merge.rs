//! `checkpoint export --merge`: writes a model with LoRA adapters merged into its weights.

use anyhow::Context as _;
use serde_json::json;
use zeroth::base::{DType, counted, format_bytes, grouped};
use zeroth::model::{Adapter, AdapterConfig, is_adapter_folder, locate};
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::{ExportDestination, ExportError, GivenBase, MergeBase, MergeOutput, check_adapter_base};

use super::checkpoint::{open_verified, refused};
use crate::cli::CheckpointExportArgs;
use crate::exit::Exit;
use crate::output::{self, Output};

pub(super) fn run(arguments: &CheckpointExportArgs, output: &Output) -> anyhow::Result<Exit> {
    let dir = &arguments.dir;
    let checkpoint = if is_adapter_folder(dir) {
        None
    } else {
        match open_verified(dir)? {
            Ok(checkpoint) => Some(checkpoint),
            Err(error) => return Ok(refused(&error)),
        }
    };
    let base = open_base(arguments, checkpoint.as_ref())?;
    let dtype = arguments.dtype.map(DType::from);
    let to = MergeOutput {
        folder: &arguments.output,
        destination: if arguments.overwrite { ExportDestination::Overwrite } else { ExportDestination::New },
        dtype,
        shard_bytes: arguments.max_shard_size,
        allows_other_base: arguments.allow_other_base,
    };
    let written = if let Some(checkpoint) = &checkpoint {
        base.merge_checkpoint(checkpoint, to)
    } else {
        let adapter = Adapter::open(dir, base.table())?;
        let folder = base.folder();
        let name = arguments.model.clone().unwrap_or_else(|| folder.display().to_string());
        let given = GivenBase { name: &name, folder };
        let note = check_adapter_base(dir, given, arguments.allow_other_base, || base.sample())?;
        for note in adapter.notes().iter().chain(&note) {
            output::note(&format!("note: {note}"));
        }
        base.merge_adapter(&adapter, dir, to)
    };
    let written = match written {
        Ok(written) => written,
        Err(error) if is_mistake(&error) => return Err(error.into()),
        Err(error) => {
            output::error(&error.to_string());
            let is_small_disk = matches!(error, ExportError::NoSpace { .. });
            return Ok(if is_small_disk { Exit::DoesNotFit } else { Exit::Failed });
        }
    };
    let dtype = dtype.map_or_else(|| base.dtype(), Ok)?;
    let (model_type, params) = (base.model().family.model_type(), base.table().total());
    if output.is_json() {
        output::json(&json!({
            "path": arguments.output,
            "adapter": dir,
            "base": base.folder(),
            "step": checkpoint.as_ref().map(|checkpoint| checkpoint.manifest().step),
            "model_type": model_type,
            "params": params,
            "dtype": dtype.to_string(),
            "bytes": written.bytes,
            "files": written.files,
        }))?;
    } else {
        let steps = checkpoint.as_ref().map(|found| counted(found.manifest().step, "step"));
        output::text(&format!(
            "{model_type} with {} parameters and the adapters of {}{}, {} of weights in {dtype}\nmodel saved to {}\n",
            grouped(params),
            dir.display(),
            steps.map(|steps| format!(" after {steps}")).unwrap_or_default(),
            format_bytes(written.bytes),
            arguments.output.display()
        ));
    }
    Ok(Exit::Done)
}

/// The base: that of `--model`, else the one that the adapters name.
fn open_base(arguments: &CheckpointExportArgs, checkpoint: Option<&Checkpoint>) -> anyhow::Result<MergeBase> {
    if let Some(name) = &arguments.model {
        return Ok(MergeBase::open(&locate(name)?)?);
    }
    let dir = arguments.dir.display();
    let named = match checkpoint {
        Some(checkpoint) => {
            let Some(lora) = &checkpoint.manifest().lora else {
                let checkpoint = checkpoint.folder().to_owned();
                return Err(ExportError::NoAdapters { checkpoint }.into());
            };
            Some(lora.base.name.clone())
        }
        None => AdapterConfig::read(&arguments.dir)?.base,
    };
    let named = named.with_context(|| format!("{dir} does not name its base: give it with --model"))?;
    let base = locate(&named).map_err(anyhow::Error::from).and_then(|folder| Ok(MergeBase::open(&folder)?));
    base.map_err(|error| {
        anyhow::anyhow!("{error}. {dir} names it as its base: give another place of it with --model")
    })
}

/// Whether what was given is wrong, and not the work that failed.
fn is_mistake(error: &ExportError) -> bool {
    matches!(
        error,
        ExportError::NotEmpty { .. }
            | ExportError::Lock(_)
            | ExportError::HoldsARun { .. }
            | ExportError::InsideCheckpoint { .. }
            | ExportError::InsideInput { .. }
            | ExportError::OutOfRange { .. }
            | ExportError::NoAdapters { .. }
            | ExportError::AnotherBase { .. }
            | ExportError::Adapters(_)
            | ExportError::Checkpoint(_)
    )
}
