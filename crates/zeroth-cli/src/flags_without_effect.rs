//! Flags of Hugging Face's Trainer, ms-swift and others that change nothing here. `train` accepts them with a note, so that
//! a command from elsewhere runs; values that ask for something a run does not do are refused with the reason.

use std::ops::RangeFrom;

use clap::builder::ValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

/// The values that a flag takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arity {
    /// None, or true or false.
    Switch,
    /// One.
    Value,
    /// One or more.
    Values,
}

/// The values that are accepted.
#[derive(Debug, Clone, Copy)]
enum Accepts {
    /// All: they change nothing.
    All,
    /// These; others are refused, and the text says what to do.
    Only(&'static [&'static str], &'static str),
    /// None; the text says what to do.
    Nothing(&'static str),
}

/// A flag.
#[derive(Debug)]
struct Row {
    /// Its name, without the leading dashes.
    name: &'static str,
    arity: Arity,
    accepts: Accepts,
    /// Why it changes nothing; empty where it is always refused.
    reason: &'static str,
}

const fn switch(name: &'static str, reason: &'static str) -> Row {
    Row { name, arity: Arity::Switch, accepts: Accepts::All, reason }
}

const fn value(name: &'static str, reason: &'static str) -> Row {
    Row { name, arity: Arity::Value, accepts: Accepts::All, reason }
}

/// A flag of which only some values change nothing.
const fn only(mut row: Row, values: &'static [&'static str], instead: &'static str) -> Row {
    row.accepts = Accepts::Only(values, instead);
    row
}

/// A flag that is refused, with what to write instead.
const fn refused(name: &'static str, arity: Arity, instead: &'static str) -> Row {
    Row { name, arity, accepts: Accepts::Nothing(instead), reason: "" }
}

const LOADER: &str =
    "rows are tokenised before training starts, and each rank reads its rows from the token cache";
const TOKENISER: &str = "all CPUs tokenise";
const RANKS: &str = "zeroth starts its ranks itself, or takes their places from torchrun, srun or mpirun";
const ATTENTION: &str = "attention is one fused kernel";
const NO_PYTHON: &str = "no Python code is run";
const NO_HUB: &str = "nothing is pushed to a hub";
const SELF_COGNITION: &str = "only ms-swift's self-cognition data reads it; --model names the model";
const KERNELS: &str = "the step is compiled, with fused kernels of its own";
const COLLECTIVES: &str = "gradients are reduced by ZeRO's collectives, not by DDP";
const OFF: &[&str] = &["false"];
const ON: &[&str] = &["true"];
const FSDP: &str = "FSDP is not there: leave it out, and --deepspeed zero3 shards parameters, gradients and optimizer state alike";
const HUB_DATA: &str = "datasets of a hub are not downloaded: give files with --data, as `hf download --repo-type dataset` leaves them";

const MODULES_TO_SAVE: &str = "modules_to_save (modules trained in full beside the adapters) is not yet built: leave it out, or train with --train-type full";
const LORA_PLUS: &str = "LoRA+ (another learning rate for the outer matrices) is not yet built: leave it out, and --learning-rate holds for both";
const ONE_SCALE: &str = "blocks of 4-bit weights have f32 scales";
const DOUBLE_QUANT: &str = "double quantisation of the scales is not yet built: leave it out; the scales take half a bit of 4.5 per weight";

const KD_HIDDEN: &str =
    "losses on hidden states are not yet built: leave it out, and --kd-alpha weighs the distributions";
const KD_ATTENTION: &str =
    "losses on attention maps are not yet built (they need maps of tokens × tokens): leave it out";

/// All of them, by what they concern.
const ROWS: &[Row] = &[
    // Data.
    value("dataloader-num-workers", LOADER),
    switch("dataloader-pin-memory", LOADER),
    switch("dataloader-persistent-workers", LOADER),
    value("dataloader-prefetch-factor", LOADER),
    switch(
        "dataloader-drop-last",
        "every step has train_batch_size samples; an epoch's remainder flows into the next",
    ),
    switch(
        "group-by-length",
        "micro-batches are not padded to their longest row, so the order of --shuffle stays",
    ),
    value("length-column-name", "lengths are counted, not read"),
    switch("pad-to-max-length", "rows and pairs are not padded"),
    switch("ignore-pad-token-for-loss", "rows and pairs are not padded, so no padding is in the loss"),
    value(
        "val-max-target-length",
        "targets of --eval-data are truncated as those of --data, to --max-target-length",
    ),
    refused(
        "forced-bos-token",
        Arity::Value,
        "models that need a language's token before a target (mBART, M2M-100) are not yet built: leave it out",
    ),
    only(
        switch("predict-with-generate", "evaluation computes the loss only"),
        OFF,
        "`zeroth generate --data` answers rows and counts exact matches, also by beam search",
    ),
    switch("remove-unused-columns", "only the columns of a known row format are read"),
    value("dataset-num-proc", TOKENISER),
    value("preprocessing-num-workers", TOKENISER),
    switch("lazy-tokenize", LOADER),
    switch("lazy-preprocess", LOADER),
    switch("overwrite-cache", "the token cache is keyed by the contents of data and tokenizer"),
    switch("load-from-cache-file", "the token cache is keyed by the contents of data and tokenizer"),
    switch("streaming", "files are tokenised once, into the token cache"),
    only(switch("dataset-shuffle", "--shuffle decides"), ON, "give --shuffle false"),
    only(
        switch("ignore-data-skip", "a resumed run continues at its place in the data"),
        OFF,
        "a resumed run always continues at its place in the data",
    ),
    refused("dataset-name", Arity::Value, HUB_DATA),
    refused("dataset-config-name", Arity::Value, HUB_DATA),
    refused("dataset-dir", Arity::Value, "give the files themselves with --data"),
    refused("dataset-text-field", Arity::Value, "--columns text=NAME reads rows from another column"),
    refused(
        "block-size",
        Arity::Value,
        "--packing fills sequences of --max-length, and attention does not cross rows",
    ),
    refused(
        "template",
        Arity::Value,
        "the model's own chat template is used: put another one into the model folder as chat_template.jinja",
    ),
    // Launching.
    value("ddp-timeout", "a rank that dies ends the run at once"),
    value("ddp-backend", "the transport is chosen from what the ranks share"),
    switch("ddp-find-unused-parameters", COLLECTIVES),
    value("ddp-bucket-cap-mb", COLLECTIVES),
    switch("ddp-broadcast-buffers", COLLECTIVES),
    value("local-rank", RANKS),
    value("master-port", RANKS),
    value("master-addr", RANKS),
    Row { name: "fsdp", arity: Arity::Values, accepts: Accepts::Nothing(FSDP), reason: "" },
    refused("fsdp-config", Arity::Value, FSDP),
    refused("fsdp-transformer-layer-cls-to-wrap", Arity::Values, FSDP),
    // Model.
    value("attn-impl", ATTENTION),
    value("attn-implementation", ATTENTION),
    value("flash-attn", ATTENTION),
    switch("use-flash-attn", ATTENTION),
    switch("trust-remote-code", NO_PYTHON),
    switch("use-hf", "a name is looked up in the local Hugging Face cache"),
    switch("use-fast-tokenizer", "tokenizer.json is what fast tokenizers read"),
    value("model-type", "config.json says the architecture"),
    value("model-author", SELF_COGNITION),
    value("model-name", SELF_COGNITION),
    only(
        switch("use-cache", "training keeps no key-value cache"),
        OFF,
        "training keeps no key-value cache: leave it out",
    ),
    value(
        "gradient-checkpointing-kwargs",
        "--gradient-checkpointing recomputes whole blocks; \"zeroth\": {\"recompute\": …} chooses less",
    ),
    switch("use-liger-kernel", KERNELS),
    switch("use-liger", KERNELS),
    switch("torch-compile", KERNELS),
    value("torch-compile-backend", KERNELS),
    value("torch-compile-mode", KERNELS),
    switch("tf32", "matmuls have the inputs of the run's precision and fp32 sums"),
    value("half-precision-backend", "16-bit kernels are built in"),
    value("fp16-opt-level", "16-bit kernels are built in"),
    value("fp16-backend", "16-bit kernels are built in"),
    switch("bf16-full-eval", "evaluation has the precision of training"),
    switch("full-determinism", "the same command gives the same bits"),
    only(
        value("label-smoothing-factor", "targets are not smoothed"),
        &["0", "0.0"],
        "label smoothing is not yet built: leave it out",
    ),
    refused("neftune-noise-alpha", Arity::Value, "noise on embeddings is not yet built: leave it out"),
    only(
        value("sequence-parallel-size", "sequences are not split between ranks"),
        &["1"],
        "sequence parallelism is not yet built: leave it out",
    ),
    only(
        value("stage", "train fine-tunes or pre-trains, by the rows of --data"),
        &["sft", "pt"],
        "train has no such stage: leave it out to fine-tune",
    ),
    // LoRA.
    only(
        switch("use-dora", "adapters are LoRA's"),
        OFF,
        "DoRA (weight-decomposed adapters) is not yet built: leave it out to train LoRA",
    ),
    refused("modules-to-save", Arity::Values, MODULES_TO_SAVE),
    refused("lora-modules-to-save", Arity::Values, MODULES_TO_SAVE),
    refused("additional-target", Arity::Values, MODULES_TO_SAVE),
    only(
        value("lora-bias", "biases stay frozen"),
        &["none", "false"],
        "lora_bias (trained biases) is not yet built: leave it out, and biases stay frozen",
    ),
    refused("lorap-lr-ratio", Arity::Value, LORA_PLUS),
    refused("loraplus-lr-ratio", Arity::Value, LORA_PLUS),
    refused("loraplus-lr-embedding", Arity::Value, LORA_PLUS),
    only(
        switch("lora-fan-in-fan-out", "linear layers are [out, in]"),
        OFF,
        "no model here has transposed linear layers: leave it out",
    ),
    value("lora-dtype", "adapters have fp32 master weights and compute in the run's precision"),
    only(
        value("lora-task-type", "train trains language models"),
        &["CAUSAL_LM"],
        "train trains language models: leave it out",
    ),
    only(
        switch("merge-lora", "OUTPUT/model is the adapter"),
        OFF,
        "OUTPUT/model is the adapter: leave it out, and `zeroth checkpoint export --merge` writes the merged model",
    ),
    only(
        switch("load-in-8bit", "--quantize decides"),
        OFF,
        "8-bit weights are not yet built: --quantize nf4 keeps them in 4 bits",
    ),
    only(
        value("bnb-4bit-quant-type", "4-bit weights are nf4"),
        &["nf4"],
        "fp4 is not yet built: 4-bit weights are nf4",
    ),
    value("bnb-4bit-compute-dtype", "4-bit weights are unpacked to the run's precision"),
    value("bnb-4bit-quant-storage", "4-bit weights are stored in records of their own"),
    only(switch("bnb-4bit-use-double-quant", ONE_SCALE), OFF, DOUBLE_QUANT),
    only(switch("use-bnb-nested-quant", ONE_SCALE), OFF, DOUBLE_QUANT),
    only(switch("double-quantization", ONE_SCALE), OFF, DOUBLE_QUANT),
    // Distillation.
    refused("kd-hidden", Arity::Value, KD_HIDDEN),
    refused("kd-attention", Arity::Value, KD_ATTENTION),
    only(
        value("lmbda", "rows are those of --data"),
        &["0", "0.0"],
        "distillation from the student's own generations (on-policy GKD) is not yet built: leave it out",
    ),
    only(
        switch("seq-kd", "rows are those of --data"),
        OFF,
        "sequence-level distillation is not yet built: `zeroth generate --data` writes the teacher's answers, to be trained on",
    ),
    // Saving and logging.
    only(
        switch("push-to-hub", NO_HUB),
        OFF,
        "a run connects to no service: leave it out, and `hf upload` OUTPUT/model afterwards",
    ),
    value("hub-model-id", NO_HUB),
    value("hub-strategy", NO_HUB),
    value("hub-token", NO_HUB),
    switch("hub-private-repo", NO_HUB),
    only(
        switch("save-safetensors", "files are safetensors"),
        ON,
        "files are always safetensors: leave it out",
    ),
    switch("add-version", "--output is the run folder itself"),
    switch("logging-first-step", "the first step always has a line"),
    switch("logging-nan-inf-filter", "metrics.jsonl has every step as it was"),
    value("log-level", "what stderr shows does not depend on a level"),
    value("log-level-replica", "only rank 0 prints"),
    switch("log-on-each-node", "only rank 0 prints"),
    switch("disable-tqdm", "a progress bar appears on terminals only"),
    switch("plot-loss", "loss.svg is always drawn"),
    switch("include-num-input-tokens-seen", "metrics.jsonl has the tokens of each step"),
    switch("include-tokens-per-second", "metrics.jsonl has the tokens per second of each step"),
    switch("skip-memory-metrics", "metrics.jsonl has the peak memory of each step"),
    switch("prediction-loss-only", "evaluation computes the loss only"),
    value("eval-accumulation-steps", "evaluation keeps no predictions"),
    only(
        switch("average-tokens-across-devices", "a loss is the mean over the trained tokens of all ranks"),
        ON,
        "a loss is always the mean over the trained tokens of all ranks: leave it out",
    ),
    only(switch("do-eval", "evaluation runs where --eval-data is given"), ON, "leave --eval-data out"),
    only(
        switch("do-predict", "train does not generate"),
        OFF,
        "train does not generate: `zeroth generate` does",
    ),
    only(
        switch("auto-find-batch-size", "a batch size that is not given is chosen to fit"),
        OFF,
        "leave out --per-device-train-batch-size, and one is chosen to fit --device-memory",
    ),
    only(switch("use-cpu", "--device decides"), OFF, "give --device cpu"),
    only(switch("no-cuda", "--device decides"), OFF, "give --device cpu"),
];

impl Row {
    fn arg(&'static self) -> Arg {
        let arg = Arg::new(self.name).long(self.name).hide(true).value_name("VALUE");
        let arg = arg.value_parser(ValueParser::new(move |text: &str| self.check(text)));
        match self.arity {
            Arity::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
            Arity::Value => arg.num_args(1).allow_hyphen_values(true),
            Arity::Values => arg.num_args(RangeFrom { start: 1 }),
        }
    }

    fn check(&self, text: &str) -> Result<String, String> {
        let is_truth = |text: &str| text.eq_ignore_ascii_case("true") || text.eq_ignore_ascii_case("false");
        match self.accepts {
            _ if self.arity == Arity::Switch && !is_truth(text) => Err("give true or false".to_owned()),
            Accepts::Only(values, instead)
                if !values.iter().any(|value| value.eq_ignore_ascii_case(text)) =>
            {
                Err(instead.to_owned())
            }
            Accepts::Nothing(instead) => Err(instead.to_owned()),
            Accepts::Only(..) | Accepts::All => Ok(text.to_owned()),
        }
    }
}

/// The flags of the table that were given.
#[derive(Debug, Clone, Default)]
pub(crate) struct FlagsWithoutEffect(Vec<&'static Row>);

impl FlagsWithoutEffect {
    /// A note for each.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|row| format!("--{} has no effect: {}", row.name, row.reason))
    }
}

/// The paragraph of the help that lists them.
pub(crate) fn help() -> String {
    let names = ROWS.iter().filter(|row| !row.reason.is_empty());
    let names: Vec<String> = names.map(|row| format!("--{}", row.name)).collect();
    format!("Accepted with a note, as they have no effect here: {}.", names.join(", "))
}

impl Args for FlagsWithoutEffect {
    fn augment_args(command: Command) -> Command {
        command.args(ROWS.iter().map(Row::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for FlagsWithoutEffect {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |row: &&Row| matches.value_source(row.name) == Some(ValueSource::CommandLine);
        Ok(Self(ROWS.iter().filter(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_says_why_once_and_in_one_line() {
        let mut names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ROWS.len(), "a name stands twice");
        for row in ROWS {
            let is_refused = matches!(row.accepts, Accepts::Nothing(_));
            assert_eq!(row.reason.is_empty(), is_refused, "{}", row.name);
            let instead = match row.accepts {
                Accepts::Only(_, instead) | Accepts::Nothing(instead) => instead,
                Accepts::All => "x",
            };
            assert!(!instead.is_empty() && !row.reason.contains('\n'), "{}", row.name);
            if let Accepts::Only(values, _) = row.accepts {
                assert!(values.iter().all(|value| row.check(value).is_ok()), "{}", row.name);
                assert!(row.check("something else").is_err(), "{}", row.name);
            }
        }
    }
}
