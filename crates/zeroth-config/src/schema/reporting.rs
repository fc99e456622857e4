//! What a run reports and saves: monitors, profiler, checkpoints.

use super::key::{AutoRule, Key, KeyType, ReadBy};

const NO_SERVICE: &str =
    "a run speaks to no service; metrics.jsonl, TensorBoard files and CSV hold the same numbers";
const OWN_WRITER: &str = "checkpoints have one writer here: streamed, synced, complete by rename";

section! {
    /// Values of `tensorboard`.
    TENSORBOARD_KEYS: Tensorboard {
        Key::section("tensorboard")
            .does("Writes DeepSpeed's events (train_loss, lr, loss_scale by samples) for TensorBoard.")
            .set("{\"enabled\": true}; --report-to tensorboard writes more, by steps, into the run folder")
            .read_by(ReadBy::Metrics),
        Key::bool("tensorboard.enabled", false)
            .does("Writes event files that TensorBoard reads.")
            .set("true")
            .read_by(ReadBy::Metrics)
            => enabled: bool,
        Key::new("tensorboard.output_path", KeyType::Text)
            .or_text("")
            .does("The folder in which the folder of that name lies; empty is the run folder.")
            .set("leave it out")
            .read_by(ReadBy::Metrics)
            .while_enabled()
            => output_path: String,
        Key::new("tensorboard.job_name", KeyType::Text)
            .or_text("DeepSpeedJobName")
            .does("The folder of the event files: the name of the run in TensorBoard.")
            .set("a name you will know again")
            .read_by(ReadBy::Metrics)
            .while_enabled()
            => job_name: String,
    }
}

section! {
    /// Values of `csv_monitor`.
    CSV_MONITOR_KEYS: CsvMonitor {
        Key::section("csv_monitor")
            .does("Writes DeepSpeed's events as CSV, a file for each: train_loss, lr, loss_scale by samples.")
            .set("{\"enabled\": true}; --report-to csv writes all metrics as one table, metrics.csv")
            .read_by(ReadBy::Metrics),
        Key::bool("csv_monitor.enabled", false)
            .does("Writes CSV files as DeepSpeed's monitor does.")
            .set("true")
            .read_by(ReadBy::Metrics)
            => enabled: bool,
        Key::new("csv_monitor.output_path", KeyType::Text)
            .or_text("")
            .does("The folder in which the folder of that name lies; empty is the run folder.")
            .set("leave it out")
            .read_by(ReadBy::Metrics)
            .while_enabled()
            => output_path: String,
        Key::new("csv_monitor.job_name", KeyType::Text)
            .or_text("DeepSpeedJobName")
            .does("The folder of the CSV files.")
            .set("a name you will know again")
            .read_by(ReadBy::Metrics)
            .while_enabled()
            => job_name: String,
    }
}

pub(super) const SERVICE_KEYS: &[Key] = &[
    Key::section("wandb").does("Sends metrics to Weights & Biases.").nothing(NO_SERVICE),
    Key::bool("wandb.enabled", false).does("Turns it on.").as_section(),
    Key::new("wandb.group", KeyType::Text).does("The group there.").as_section(),
    Key::new("wandb.team", KeyType::Text).does("The team there.").as_section(),
    Key::new("wandb.project", KeyType::Text).or_text("deepspeed").does("The project there.").as_section(),
    Key::section("comet").does("Sends metrics to Comet.").nothing(NO_SERVICE),
    Key::bool("comet.enabled", false).does("Turns it on.").as_section(),
    Key::int("comet.samples_log_interval", 1)
        .or_int(100)
        .in_("samples")
        .does("How often metrics are sent.")
        .as_section(),
    Key::new("comet.project", KeyType::Text).does("The project there.").as_section(),
    Key::new("comet.workspace", KeyType::Text).does("The workspace there.").as_section(),
    Key::new("comet.api_key", KeyType::Text)
        .does("The key of the account; better kept out of a file.")
        .as_section(),
    Key::new("comet.experiment_name", KeyType::Text).does("The name there.").as_section(),
    Key::new("comet.experiment_key", KeyType::Text).does("The experiment to continue.").as_section(),
    Key::bool("comet.online", true).does("Sends at once or later.").as_section(),
    Key::new("comet.mode", KeyType::Text).does("How an experiment is begun.").as_section(),
    Key::without_effect("monitor_config", "Settings of a cluster's monitoring.", NO_SERVICE),
];

section! {
    /// Values of `flops_profiler`.
    FLOPS_PROFILER_KEYS: FlopsProfiler {
        Key::section("flops_profiler")
            .does("Prints the floating-point work and the time of one step, unit by unit and op by op.")
            .set("{\"enabled\": true}")
            .read_by(ReadBy::Loop),
        Key::bool("flops_profiler.enabled", false)
            .does("Turns the profile on.")
            .set("true when looking for time")
            .read_by(ReadBy::Loop)
            => enabled: bool,
        Key::float("flops_profiler.recompute_fwd_factor", 0.0)
            .or_float(0.0)
            .does("Counts recomputed work by this factor.")
            .built_in("recomputed work is counted from the program, not from a factor"),
        Key::int("flops_profiler.profile_step", 1)
            .or_int(1)
            .in_("steps")
            .does("The step to profile.")
            .set("5, when the first steps are over")
            .read_by(ReadBy::Loop)
            .while_enabled()
            => profile_step: u64,
        Key::int("flops_profiler.module_depth", -1)
            .or_int(-1)
            .does("How deep the profile goes: 0 is the model, 1 its units, 2 their ops, -1 all.")
            .set("-1")
            .read_by(ReadBy::Loop)
            .while_enabled()
            => module_depth: i64,
        Key::int("flops_profiler.top_modules", 1)
            .or_int(1)
            .does("How many units and ops are named above the table, by parameters, work and time.")
            .set("3")
            .read_by(ReadBy::Loop)
            .while_enabled()
            => top_modules: u64,
        Key::bool("flops_profiler.detailed", true)
            .does("Prints the table of all units and ops, not only the top ones.")
            .set("true")
            .read_by(ReadBy::Loop)
            .while_enabled()
            => detailed: bool,
        Key::new("flops_profiler.output_file", KeyType::Text)
            .does("The file to print to; absent is the log.")
            .set("leave it out")
            .read_by(ReadBy::Loop)
            .while_enabled()
            => output_file: Option<String>,
    }
}

pub(super) const COMMS_LOGGER_KEYS: &[Key] = &[
    Key::section("comms_logger")
        .does("Logs collectives as they run.")
        .nothing("--trace FILE shows every collective with its bytes and time"),
    Key::bool("comms_logger.enabled", false).does("Turns the log on.").as_section(),
    Key::bool("comms_logger.verbose", false).does("Logs each call.").as_section(),
    Key::bool("comms_logger.prof_all", true).does("Logs all kinds.").as_section(),
    Key::bool("comms_logger.debug", false).does("Adds the caller.").as_section(),
    Key::new("comms_logger.prof_ops", KeyType::Texts).does("The kinds to log.").as_section(),
];

section! {
    /// Values of `checkpoint` and `checkpoint.writer`.
    CHECKPOINT_KEYS: Checkpoint {
        Key::section("checkpoint").does("How checkpoints are written.").read_by(ReadBy::Save),
        Key::new("checkpoint.tag_validation", KeyType::OneOf(&["warn", "ignore", "fail"]))
            .or_text("warn")
            .does("Compares the ranks' names for a checkpoint.")
            .built_in("rank 0 names a checkpoint once, for all ranks"),
        Key::bool("checkpoint.load_universal", false)
            .does("Loads DeepSpeed's converted checkpoints.")
            .built_in("every checkpoint loads at any number of ranks, without conversion"),
        Key::bool("checkpoint.use_node_local_storage", false)
            .auto(AutoRule::NodeLocal)
            .does("Writes each node's shards to its own disk.")
            .unsupported_if_on("a checkpoint is one folder that all ranks see")
            .read_by(ReadBy::Save),
        Key::bool("checkpoint.checkpoint_serialization", true)
            .does("Writes in PyTorch's new file format.")
            .nothing(OWN_WRITER),
        Key::section("checkpoint.parallel_write").does("Who writes what.").nothing(OWN_WRITER),
        Key::bool("checkpoint.parallel_write.pipeline_stage", false)
            .does("Each pipeline stage writes its part.")
            .as_section(),
        Key::section("checkpoint.writer").does("How files of checkpoints reach the disk.").read_by(ReadBy::Save),
        Key::new("checkpoint.writer.type", KeyType::OneOf(&["fast", "python", "mock"]))
            .does("Which writer.")
            .nothing(OWN_WRITER),
        Key::int("checkpoint.writer.io_buffer_size", 1)
            .or_int(67_108_864)
            .in_("bytes")
            .does("The writer's buffer.")
            .nothing(OWN_WRITER),
        Key::bool("checkpoint.writer.io_buffer_double", true).does("Two of them.").nothing(OWN_WRITER),
        Key::bool("checkpoint.writer.show_statistics", false).does("Prints rates.").nothing(OWN_WRITER),
        Key::new("checkpoint.writer.data_parallel", KeyType::OneOf(&["replica", "socket", "machine"]))
            .does("Who shares the writing.")
            .nothing(OWN_WRITER),
        Key::bool("checkpoint.writer.decoupled", false)
            .does("Lets training go on while the files of a checkpoint are on their way to the disk; results stay the same.")
            .set("true where the disk is slow")
            .read_by(ReadBy::Save)
            => writer_decoupled: bool,
        Key::int("checkpoint.writer.io_multiplier", 1).or_int(1).does("Writers a rank.").nothing(OWN_WRITER),
        Key::without_effect("nebula", "Azure's asynchronous checkpoints.", OWN_WRITER),
        Key::without_effect("datastates_ckpt", "DataStates' asynchronous checkpoints.", OWN_WRITER),
    }
}
