//! Batch sizes, accumulation, clipping, communication types and what is printed: the keys at the top level.

use zeroth_base::DType;

use super::key::{AutoRule, Derivation, Key, KeyType, ReadBy};

const COMM_TYPES: KeyType = KeyType::OneOf(&["fp16", "bf16", "fp32"]);

section! {
    /// Values of keys at the top level.
    KEYS: TopLevel {
        Key::int("train_batch_size", 1)
            .in_("samples")
            .does("Samples of one optimizer step, all ranks and micro-batches together.")
            .set("\"auto\", or micro-batch × accumulation × ranks")
            .read_by(ReadBy::Resolve)
            .auto(AutoRule::TrainBatch)
            => train_batch_size: u64,
        Key::int("train_micro_batch_size_per_gpu", 1)
            .in_("samples")
            .does("Samples that one rank computes at a time.")
            .set("\"auto\", or the most that fits")
            .read_by(ReadBy::Resolve)
            .auto(AutoRule::MicroBatch)
            => train_micro_batch_size_per_gpu: u64,
        Key::int("gradient_accumulation_steps", 1)
            .in_("micro-batches")
            .does("Micro-batches whose gradients add up before the optimizer steps.")
            .set("\"auto\", or what makes up the batch you want")
            .read_by(ReadBy::Resolve)
            .auto(AutoRule::Accumulation)
            => gradient_accumulation_steps: u64,
        Key::bool("managed_gradient_accumulation", true)
            .does("Leaves the boundary of accumulation to the program.")
            .built_in("the boundary is part of the compiled step; there is no user loop to own it"),
        Key::float("gradient_clipping", 0.0)
            .or_float(1.0)
            .in_("L2 norm")
            .does("Scales gradients down when their global norm is above this; 0 turns it off.")
            .set("1.0 (DeepSpeed's default was 0.0 before 0.19.3)")
            .read_by(ReadBy::Update)
            .auto(AutoRule::Clipping)
            => gradient_clipping: f64,
        Key::new("communication_data_type", COMM_TYPES)
            .or_derived(Derivation::RunPrecision, "the type of the run: bf16, fp16 or fp32")
            .does("The type gradients are rounded to, once, before ranks add them in f32.")
            .set("leave it out, or fp32 to round nothing")
            .read_by(ReadBy::Reduce)
            => communication_data_type: DType,
        Key::new("seq_parallel_communication_data_type", COMM_TYPES)
            .or_text("fp32")
            .does("The same among ranks that share a sequence.")
            .nothing("no sequence is shared between ranks here"),
        Key::bool("prescale_gradients", false)
            .does("Divides gradients before they are added rather than after.")
            .nothing("ranks add in f32, where the order of the division is not needed against overflow"),
        Key::float("gradient_predivide_factor", 0.0)
            .above(0.0)
            .or_float(1.0)
            .does("Divides gradients by this before they are added.")
            .nothing("ranks add in f32, where the order of the division is not needed against overflow"),
        Key::new("gradient_allreduce_op", KeyType::OneOf(&["mean", "sum"]))
            .or_text("mean")
            .does("Whether ranks' gradients are averaged or added.")
            .unsupported_if_on(
                "losses are means over the trained tokens of the whole step, so only `mean` has a meaning here",
            ),
        Key::bool("sparse_gradients", false)
            .does("Sends embedding gradients as lists of rows.")
            .nothing("DeepSpeed does so without ZeRO only; here embedding gradients are sharded like all others"),
        Key::bool("disable_allgather", false)
            .does("Nothing; DeepSpeed reads it nowhere either.")
            .nothing("DeepSpeed reads it nowhere either"),
        Key::int("steps_per_print", 1)
            .in_("steps")
            .does("Prints a line of progress every N steps.")
            .set("leave it out; --logging-steps says the same")
            .read_by(ReadBy::Loop)
            => steps_per_print: Option<u64>,
        Key::bool("wall_clock_breakdown", false)
            .does("Prints where the time of a step goes: data, forward, backward, gather, reduce, update; with every line of \
                   progress.")
            .set("true when looking for time; on a GPU, times are the host's")
            .read_by(ReadBy::Loop)
            => wall_clock_breakdown: bool,
        Key::bool("memory_breakdown", false)
            .does("Prints memory by category and phase.")
            .set("true when looking for memory; the plan at the start shows the same numbers")
            .read_by(ReadBy::Loop)
            .only(&["false"], "the plan at the start of a run has memory by category"),
        Key::bool("dump_state", false)
            .does("Prints the whole configuration once.")
            .built_in("the run folder holds the resolved config with the origin of each value"),
        Key::new("log_level", KeyType::OneOf(&["debug", "info", "warning", "warn", "error", "critical"]))
            .does("How much is logged.")
            .set("leave it out; info")
            .read_by(ReadBy::Loop)
            .unsupported(),
        Key::bool("zero_allow_untested_optimizer", false)
            .does("Lets an optimizer run that was not tested with ZeRO.")
            .auto(AutoRule::UntestedOptimizer)
            .nothing("every optimizer here is tested at every stage; there are no foreign ones"),
        Key::bool("zero_force_ds_cpu_optimizer", true)
            .does("Insists on DeepSpeed's own optimizer on the host.")
            .built_in("an offloaded update always runs in our own host kernels")
            .unsupported(),
        Key::bool("dataloader_drop_last", false)
            .does("Drops an epoch's last, incomplete batch.")
            .nothing("a step always has train_batch_size samples: an epoch's remainder flows into the next"),
        Key::int("vocabulary_size", 1)
            .does("Warns when the vocabulary is no multiple of 8.")
            .nothing("the vocabulary comes from the model, and kernels take any size"),
        Key::bool("graph_harvesting", false)
            .does("Captures a PyTorch optimizer in a CUDA graph.")
            .nothing("the step is one compiled program; there is no PyTorch optimizer to capture"),
        Key::bool("disable_python_gc", false)
            .does("Turns Python's garbage collector off while training.")
            .nothing("there is no Python here"),
        Key::bool("use_data_before_expert_parallelism", false)
            .does("The order of data and expert parallelism.")
            .nothing("experts are sharded like all parameters; there is no expert parallelism"),
        // Canonical at the top level, where DeepSpeed ignores it; inside zero_optimization DeepSpeed refuses it.
        Key::bool("use_dynamic_tiling", true)
            .also_at(&["zero_optimization.use_dynamic_tiling"])
            .does("Splits large matmuls into tiles.")
            .built_in("kernels tile matmuls by their shapes; DeepSpeed has no such key"),
        Key::section("timers")
            .does("DeepSpeed's timers.")
            .nothing("rates are measured without stopping the device"),
        Key::section("timers.throughput").does("DeepSpeed's timer of samples a second.").as_section(),
        Key::bool("timers.throughput.enabled", true).does("Measures samples a second.").as_section(),
        Key::bool("timers.throughput.synchronized", true)
            .does("Waits for the device at every step to do so.")
            .as_section(),
    }
}
