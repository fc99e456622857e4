//! `zero_optimization`: stages, buckets and the fine-grained keys of stage 3.

use super::conditions;
use super::key::{AutoRule, Derivation, Key, KeyType, ReadBy};

section! {
    /// Values of `zero_optimization`, without its sections.
    KEYS: Zero {
        Key::section("zero_optimization")
            .does("Which parts of the training state are sharded across ranks, and where they live.")
            .set("an object with at least `stage`; `true` is DeepSpeed's old way to write stage 1")
            .read_by(ReadBy::Lower),
        Key::int("zero_optimization.stage", 0)
            .at_most(3.0)
            .or_int(0)
            .does("0 shards nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well.")
            .set("2 where it fits, else 3; `zeroth plan` says which")
            .read_by(ReadBy::Lower)
            => stage: u8,
        Key::bool("zero_optimization.overlap_comm", false)
            .or_derived(Derivation::OverlapAtStage3, "true at stage 3, else false")
            .does("Collectives run on a queue of their own: gathers are hoisted before their use, sums of exchanged gradients put off behind the next exchange; the results are the same bits with and without.")
            .set("true")
            .read_by(ReadBy::Overlap)
            => overlap_comm: bool,
        Key::bool("zero_optimization.reduce_scatter", true)
            .does("Sends each rank its part of every rank's gradients; false sends every rank all of them, and each takes its slice: as many times the traffic as there are ranks, the same bits.")
            .set("true")
            .read_by(ReadBy::Reduce)
            => reduce_scatter: bool,
        Key::int("zero_optimization.reduce_bucket_size", 0)
            .or_int(500_000_000)
            .in_("elements")
            .does("The most gradient elements of a unit that one reduction moves: whole blocks of 2,048 elements are grouped up to it, at least one a rank. CPU ranks that add up each other's gradients in place move none, and reduce a unit at once.")
            .set("\"auto\" (hidden_size²), or 2e8")
            .read_by(ReadBy::Reduce)
            .auto(AutoRule::HiddenSquared)
            => reduce_bucket_size: u64,
        Key::int("zero_optimization.allgather_bucket_size", 0)
            .or_int(500_000_000)
            .in_("elements")
            .does("The most parameter elements of a unit that one gather after the update moves, in whole blocks of 2,048, at least one a rank: all units at stages 1 and 2, persistent parameters at stage 3.")
            .set("2e8")
            .read_by(ReadBy::Update)
            .idle_if(conditions::shards_are_sent_whole)
            => allgather_bucket_size: u64,
        Key::bool("zero_optimization.allgather_partitions", true)
            .does("Gathers updated parameters that stay whole with all-gather; false broadcasts one rank's shard after the other.")
            .set("true")
            .read_by(ReadBy::Update)
            .idle_if(conditions::nothing_is_gathered_after_update)
            => allgather_partitions: bool,
        Key::bool("zero_optimization.contiguous_gradients", true)
            .does("Gradients lie end to end in one buffer.")
            .built_in("gradients land in the unit's flat gradient buffer as they are computed"),
        Key::bool("zero_optimization.round_robin_gradients", false)
            .does("Spreads the work on gradients evenly over ranks.")
            .built_in("every unit is sharded evenly over all ranks, so no rank waits for another's share"),
        Key::bool("zero_optimization.memory_efficient_linear", true)
            .also_at(&["memory_efficient_linear"])
            .does("Lets stage3_max_reuse_distance decide what stays gathered; false keeps every unit with linear maps gathered from forward to backward, as far as stage3_max_live_parameters allows. Where shards are read in place (zeroth.gather), none is gathered.")
            .set("true")
            .read_by(ReadBy::Gather)
            .idle_if(conditions::parameters_are_replicated)
            .noting(conditions::governs_copies_only)
            => memory_efficient_linear: bool,
        Key::int("zero_optimization.sub_group_size", 0)
            .or_int(1_000_000_000)
            .in_("elements")
            .does("The optimizer updates what a rank owns of a unit in tiles of this many elements, whole blocks of 2,048.")
            .set("1e9; smaller bounds what an offloaded update stages at a time")
            .read_by(ReadBy::Offload)
            => sub_group_size: u64,
        Key::int("zero_optimization.stage3_prefetch_bucket_size", 0)
            .named(&["prefetch_bucket_size"])
            .or_int(50_000_000)
            .in_("elements")
            .does("How many parameter elements may be gathered ahead of their use. A unit is fetched whole, so any size above 0 allows the next unit to be fetched ahead; 0 gathers at the moment of use. Where shards are read in place (zeroth.gather), none is gathered.")
            .set("\"auto\" (0.9 · hidden_size²)")
            .read_by(ReadBy::Overlap)
            .auto(AutoRule::NineTenthsHiddenSquared)
            .idle_if(conditions::gathers_stay_at_their_use)
            .noting(conditions::governs_copies_only)
            => stage3_prefetch_bucket_size: u64,
        Key::int("zero_optimization.stage3_param_persistence_threshold", 0)
            .named(&["param_persistence_threshold"])
            .or_int(100_000)
            .in_("elements")
            .does("Parameters of at most this many elements stay gathered on every rank, together in one flat parameter; 0 keeps none.")
            .set("\"auto\" (10 · hidden_size): norms and biases stay")
            .read_by(ReadBy::Gather)
            .auto(AutoRule::TenHidden)
            .idle_if(conditions::parameters_are_replicated)
            => stage3_param_persistence_threshold: u64,
        Key::int("zero_optimization.stage3_model_persistence_threshold", 0)
            .named(&["model_persistence_threshold"])
            .or_int(i64::MAX)
            .in_("elements")
            .does("The most elements that stay gathered in all: parameters up to stage3_param_persistence_threshold stay in forward order, each that still fits.")
            .set("leave it out; stage3_param_persistence_threshold bounds them")
            .read_by(ReadBy::Gather)
            .idle_if(conditions::parameters_are_replicated)
            => stage3_model_persistence_threshold: u64,
        Key::int("zero_optimization.stage3_max_live_parameters", 0)
            .named(&["max_live_parameters"])
            .or_int(1_000_000_000)
            .in_("elements")
            .does("The most elements gathered at any time, without padding, persistent ones included; raised to what one instruction needs if below. Where shards are read in place (zeroth.gather), none is gathered.")
            .set("1e9, or lower to bound memory: unlike DeepSpeed's, this bound holds")
            .read_by(ReadBy::Gather)
            .idle_if(conditions::parameters_are_replicated)
            .noting(conditions::governs_copies_only)
            => stage3_max_live_parameters: u64,
        Key::int("zero_optimization.stage3_max_reuse_distance", 0)
            .named(&["max_reuse_distance"])
            .or_int(1_000_000_000)
            .in_("elements")
            .does("A unit read again within this many elements of other units stays gathered; 0 releases it after its last read in forward and gathers it again for backward. Where shards are read in place (zeroth.gather), none is gathered.")
            .set("1e9 keeps what max_live allows; 0 holds the fewest")
            .read_by(ReadBy::Gather)
            .idle_if(conditions::parameters_are_replicated)
            .noting(conditions::governs_copies_only)
            => stage3_max_reuse_distance: u64,
        Key::bool("zero_optimization.stage3_gather_16bit_weights_on_model_save", true)
            .named(&["gather_16bit_weights_on_model_save"])
            .does("Writes the trained model as a Hugging Face folder at the end; false writes none and prints the export command.")
            .set("true")
            .read_by(ReadBy::Save)
            .idle_if(conditions::weights_are_whole)
            => stage3_gather_16bit_weights_on_model_save: bool,
        Key::bool("zero_optimization.stage3_gather_fp16_weights_on_model_save", false)
            .does("The name of stage3_gather_16bit_weights_on_model_save before bf16.")
            .deprecated("zero_optimization.stage3_gather_16bit_weights_on_model_save"),
        Key::int("zero_optimization.stage3_module_granularity_threshold", 0)
            .named(&["module_granularity_threshold"])
            .or_int(0)
            .does("Joins small modules into one unit.")
            .nothing("units are whole blocks of the model already; there are no small modules to join"),
        Key::bool("zero_optimization.stage3_use_all_reduce_for_fetch_params", false)
            .named(&["use_all_reduce_for_fetch_params"])
            .does("Gathers parameters by an all-reduce.")
            .nothing("gathers always move each element once; an all-reduce would move it twice"),
        Key::bool("zero_optimization.stage3_allgather_sequential", false)
            .named(&["allgather_sequential"])
            .does("Gathers parameter by parameter, without a joined buffer.")
            .nothing("a gather lands in its place: there is no joined buffer to save"),
        Key::bool("zero_optimization.use_multi_rank_bucket_allreduce", true)
            .does("Chooses between an all-reduce and a reduce for each rank, in stages 1 and 2.")
            .nothing("stages 1 to 3 use one true reduce-scatter, half the traffic of either"),
        Key::bool("zero_optimization.compute_grad_norm", true)
            .does("Computes the norm of the gradients.")
            .built_in("the norm falls out of the reduction and is always reported"),
        Key::bool("zero_optimization.parameter_alignment", false)
            .does("Lets each parameter begin at an aligned place.")
            .built_in("every parameter begins on a block of 2,048 elements"),
        Key::section("zero_optimization.offload_param")
            .does("Keeps parameter shards in host memory or on disk (stage 3).")
            .set("{\"device\": \"cpu\"} when stage 3 alone does not fit")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::params_are_not_sharded),
        Key::section("zero_optimization.offload_optimizer")
            .does("Keeps optimizer state in host memory or on disk.")
            .set("{\"device\": \"cpu\"} when the state does not fit the device")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::state_is_replicated),
        Key::bool("zero_optimization.cpu_offload", false)
            .does("The old way to ask for offload_optimizer to host memory.")
            .deprecated("zero_optimization.offload_optimizer: {\"device\": \"cpu\"}"),
        Key::bool("zero_optimization.cpu_offload_params", false)
            .named(&["cpu_offload_param"])
            .does("The old way to ask for offload_param to host memory.")
            .deprecated("zero_optimization.offload_param: {\"device\": \"cpu\"}"),
        Key::bool("zero_optimization.cpu_offload_use_pin_memory", false)
            .does("The old place of pin_memory; DeepSpeed itself ignores it.")
            .deprecated("pin_memory inside offload_optimizer and offload_param"),
        Key::bool("zero_optimization.ignore_unused_parameters", true)
            .does("Tolerates parameters that a step does not use.")
            .nothing("the program knows before it starts which parameters a step uses"),
        Key::bool("zero_optimization.load_from_fp32_weights", true)
            .does("Starts the optimizer from the checkpoint's fp32 weights.")
            .built_in("checkpoints hold the fp32 weights, and resuming starts from them")
            .unsupported(),
        Key::bool("zero_optimization.elastic_checkpoint", false)
            .does("Saves so that another number of ranks can load.")
            .built_in("every checkpoint loads at any number of ranks")
            .unsupported(),
        Key::bool("zero_optimization.pipeline_loading_checkpoint", false)
            .does("Loads a checkpoint rank after rank, to save host memory.")
            .built_in("each rank reads only the bytes of its own shard")
            .unsupported(),
        Key::bool("zero_optimization.override_module_apply", true)
            .does("Patches a function of PyTorch's modules.")
            .nothing("there are no PyTorch modules here"),
        Key::bool("zero_optimization.log_trace_cache_warnings", false)
            .does("Prints when a recorded trace becomes invalid.")
            .nothing("the order of gathers is compiled, not recorded: there is nothing to become invalid"),
        Key::bool("zero_optimization.enable_sanity_checks", false)
            .does("Compares the ranks' order of collectives while running.")
            .built_in("ranks compare a hash of all their collectives before the first step"),
        Key::bool("zero_optimization.save_muon_momentum_buffer_in_memory", false)
            .does("Keeps the momentum of the Muon optimizer in memory.")
            .nothing("the Muon optimizer is not part of zeroth"),
        Key::bool("zero_optimization.legacy_stage1", false)
            .does("DeepSpeed's first stage 1, which it has removed.")
            .unsupported_if_on("DeepSpeed has removed this way of stage 1 and refuses `true`"),
        Key::int("zero_optimization.zero_hpz_partition_size", 1)
            .or_int(1)
            .in_("ranks")
            .does("ZeRO++: shards the 16-bit parameters within groups of this many ranks only, optimizer state over all ranks. Parameters cross between groups once a step, however many micro-batches it has; with several, gradients do, too, added up in the group first. There is no second copy. 1 is off.")
            .set("the ranks of a host, where a group has room for the parameters and, with several micro-batches, for a gradient of them")
            .read_by(ReadBy::Gather)
            .idle_if(conditions::parameters_are_replicated_in_groups)
            => zero_hpz_partition_size: u64,
        Key::bool("zero_optimization.zero_quantized_weights", false)
            .does("ZeRO++: gathers parameters in int8.")
            .unsupported_if_on("quantised gathers are not built"),
        Key::bool("zero_optimization.zero_quantized_nontrainable_weights", false)
            .does("ZeRO++: stores frozen parameters quantised.")
            .unsupported_if_on("8-bit frozen weights are not built; LoRA with --quantize nf4 keeps them in 4 bits"),
        Key::bool("zero_optimization.zero_quantized_gradients", false)
            .does("ZeRO++: reduces gradients in int4.")
            .unsupported_if_on("quantised reductions are not built"),
        Key::without_effect(
            "zero_optimization.zeropp_loco_param",
            "ZeRO++: error feedback for quantised gradients.",
            "gradients are not quantised here, so there is no error to feed back",
        ),
        Key::int("zero_optimization.mics_shard_size", -1)
            .or_int(-1)
            .in_("ranks")
            .does("MiCS: shards within groups of this many ranks and copies across groups.")
            .unsupported_if_on("state is sharded over all ranks; zero_hpz_partition_size shards the 16-bit parameters within groups"),
        Key::bool("zero_optimization.mics_hierarchical_params_gather", false)
            .does("MiCS: gathers in two levels.")
            .unsupported_if_on("gathers between groups take two levels without it (zeroth.sum_group)"),
        Key::new("zero_optimization.leaf_module", KeyType::Opaque)
            .does("Names modules to gather as a whole.")
            .built_in("the experts of a block are always gathered as a whole, and no collective depends on routing"),
        Key::section("zero_optimization.zenflow")
            .does("Updates the largest gradients at once and the rest late, to hide the host's work.")
            .set("leave it out")
            .nothing("every gradient is updated in its own step, wherever its state lives: nothing is stale here"),
        Key::float("zero_optimization.zenflow.topk_ratio", 0.0)
            .at_most(1.0)
            .or_float(0.1)
            .does("The share of gradient columns that is updated at once.")
            .as_section(),
        Key::new("zero_optimization.zenflow.select_strategy", KeyType::OneOf(&["auto", "step", "epoch"]))
            .or_text("auto")
            .does("When the columns are chosen anew.")
            .as_section(),
        Key::int("zero_optimization.zenflow.select_interval", 1)
            .or_text("auto")
            .does("How often the columns are chosen anew.")
            .as_section(),
        Key::int("zero_optimization.zenflow.update_interval", 1)
            .or_text("auto")
            .in_("steps")
            .does("How late the rest is updated.")
            .as_section(),
        Key::bool("zero_optimization.zenflow.overlap_step", false)
            .does("Runs the late update while the next step computes.")
            .as_section(),
        Key::bool("zero_optimization.zenflow.offload", false).does("Keeps the chosen columns' state on the host.").as_section(),
        Key::float("zero_optimization.zenflow.auto_ratio", 0.0)
            .at_most(1.0)
            .or_float(0.99)
            .does("The share of the norm that decides an automatic update.")
            .as_section(),
        Key::int("zero_optimization.zenflow.full_warm_up_rounds", 0)
            .or_int(0)
            .in_("steps")
            .does("Steps at the start that update everything.")
            .as_section(),
        Key::int("zero_optimization.zenflow.steps_per_epoch", 1)
            .in_("steps")
            .does("Steps of an epoch, for a choice of columns once an epoch.")
            .as_section(),
        Key::float("zero_optimization.zenflow.pt_reserved_cores_perc", 0.0)
            .at_most(1.0)
            .or_float(0.5)
            .does("The share of cores left to PyTorch.")
            .as_section(),
        Key::refused(
            "zero_optimization.grad_hooks",
            "Documented by DeepSpeed, but no key of it.",
            "DeepSpeed documents it and refuses it: leave it out",
        ),
        Key::int("zero_optimization.allgather_size", 0)
            .also_at(&["allgather_size"])
            .does("The bucket of the old form `\"zero_optimization\": true`.")
            .deprecated("zero_optimization.allgather_bucket_size"),
    }
}
