//! Flags of `train` that name and seed a run, with the names of Hugging Face's Trainer.

use std::path::PathBuf;

use clap::Args;
use zeroth::job::run_name;

use crate::value_args::{DTypeArg, whole};

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct TrainerArgs {
    /// YAML or JSON file with flags of this command; typed flags take precedence, and relative paths in it start at the
    /// working directory
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Seed of the sample order [default: --seed]
    #[arg(long, value_name = "N", value_parser = whole(0..))]
    pub(crate) data_seed: Option<u64>,
    /// Name of the run: shown at start-up, kept in plan.json and when it is resumed, and the folder of its TensorBoard events
    #[arg(long, value_name = "NAME", value_parser = run_name)]
    pub(crate) run_name: Option<String>,
    /// Dtype of the trained model's weights [default: that of the run; fp32 for adapters]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) save_dtype: Option<DTypeArg>,
    /// Folder for the files of --report-to [default: the run folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) logging_dir: Option<PathBuf>,
}
