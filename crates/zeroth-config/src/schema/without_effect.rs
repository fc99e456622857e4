//! Parts of DeepSpeed besides ZeRO that zeroth does not have: elasticity, compilation, other parallelism.

use super::key::{Key, KeyType};

const COMPILED: &str = "the whole step is one compiled program already; there is no Python graph to compile";
const ELASTIC: &str = "a run resumes at any number of ranks with the same global batch; --resume and --max-restarts do what this asks for";

pub(super) const KEYS: &[Key] = &[
    Key::section("elasticity")
        .does("Chooses batch sizes that many numbers of GPUs can share.")
        .set("leave it out")
        .nothing(ELASTIC),
    Key::bool("elasticity.enabled", false).does("Turns it on.").as_section(),
    Key::int("elasticity.max_train_batch_size", 1)
        .in_("samples")
        .does("The largest global batch.")
        .as_section(),
    Key::new("elasticity.micro_batch_sizes", KeyType::Ints)
        .in_("samples")
        .does("The micro-batches to choose from.")
        .as_section(),
    Key::int("elasticity.min_gpus", 1).or_int(1).does("The fewest GPUs.").as_section(),
    Key::int("elasticity.max_gpus", 1).or_int(10_000).does("The most GPUs.").as_section(),
    Key::int("elasticity.min_time", 0)
        .or_int(0)
        .in_("minutes")
        .does("The least time between changes.")
        .as_section(),
    Key::bool("elasticity.prefer_larger_batch", true).does("Takes the larger of two batches.").as_section(),
    Key::bool("elasticity.ignore_non_elastic_batch_info", false)
        .does("Overrides the batch keys.")
        .as_section(),
    Key::float("elasticity.version", 0.0).or_float(0.2).does("The version of the rule.").as_section(),
    Key::int("elasticity.model_parallel_size", 1).or_int(1).does("Ranks that share a model.").as_section(),
    Key::int("elasticity.num_gpus_per_node", 1).or_int(1).does("GPUs in a machine.").as_section(),
    Key::section("compile").does("DeepSpeed's use of torch.compile.").set("leave it out").nothing(COMPILED),
    Key::bool("compile.deepcompile", false).does("Compiles ZeRO into the graph.").as_section(),
    Key::bool("compile.free_activation", false).does("Frees activations early.").as_section(),
    Key::int("compile.free_activation_threshold", 0)
        .or_int(10_485_760)
        .in_("bytes")
        .does("The least size freed early.")
        .as_section(),
    Key::bool("compile.offload_activation", false).does("Moves activations to the host.").as_section(),
    Key::bool("compile.offload_activation_pin_memory", true).does("Locks that memory.").as_section(),
    Key::bool("compile.offload_opt_states", false).does("Moves optimizer state to the host.").as_section(),
    Key::bool("compile.offload_parameters", false).does("Moves parameters to the host.").as_section(),
    Key::bool("compile.double_buffer", true).does("Uses two gather buffers.").as_section(),
    Key::bool("compile.symmetric_memory", false).does("Uses symmetric memory for gathers.").as_section(),
    Key::bool("compile.debug_log", false).does("Logs the compilation.").as_section(),
    Key::bool("compile.sync_before_reduce", false).does("Waits before a reduction.").as_section(),
    Key::bool("compile.sync_after_reduce", false).does("Waits after a reduction.").as_section(),
    Key::bool("compile.sync_before_allgather", false).does("Waits before a gather.").as_section(),
    Key::bool("compile.sync_after_allgather", false).does("Waits after a gather.").as_section(),
    Key::bool("compile.keep_int_input_tensors", true).does("Keeps inputs of whole numbers.").as_section(),
    Key::bool("compile.keep_all_input_tensors", false).does("Keeps all inputs.").as_section(),
    Key::bool("compile.autoep_non_moe", false)
        .does("Applies expert parallelism's pass to dense models.")
        .as_section(),
    Key::new("compile.passes", KeyType::Texts).does("The passes to run.").as_section(),
    Key::without_effect(
        "autotuning",
        "Runs the job many times to find faster settings.",
        "`zeroth plan` computes what fits without running the job",
    ),
    Key::without_effect(
        "tensor_parallel",
        "Cuts single matrices over ranks.",
        "there is no tensor parallelism; stage 3 holds the same memory",
    ),
    Key::without_effect(
        "expert_parallel",
        "Gives ranks different experts.",
        "experts are sharded like all parameters; there is no expert parallelism",
    ),
    Key::without_effect(
        "pipeline",
        "Gives ranks different blocks.",
        "there is no pipeline parallelism; stage 3 holds the same memory",
    ),
    Key::without_effect(
        "sequence_parallel_size",
        "Gives ranks parts of a sequence.",
        "there is no sequence parallelism",
    ),
    Key::without_effect(
        "hybrid_engine",
        "Switches between training and generation for RLHF.",
        "zeroth trains; it has no generation inside the loop",
    ),
    Key::without_effect(
        "data_efficiency",
        "Chooses and shortens samples while training.",
        "samples are taken in the order of the seed; choose and shorten them in the data file",
    ),
    Key::without_effect(
        "curriculum_learning",
        "Lengthens sequences while training.",
        "sequences are taken as they are; sort the data file and use --shuffle false",
    ),
    Key::without_effect(
        "progressive_layer_drop",
        "Leaves out blocks at random.",
        "every block runs in every step",
    ),
    Key::without_effect(
        "compression_training",
        "Prunes and quantises while training.",
        "zeroth has no compression of models",
    ),
    Key::without_effect("quantize_training", "Quantises while training.", "zeroth has no quantised training"),
    Key::without_effect(
        "weight_quantization",
        "Quantises weights for inference.",
        "zeroth trains; it has no quantised inference",
    ),
    Key::without_effect(
        "sparse_attention",
        "Attends to a pattern of places.",
        "attention is whole, windowed or by segments, as the model says",
    ),
    Key::without_effect(
        "eigenvalue",
        "Estimates curvature for quantisation.",
        "zeroth has no quantised training",
    ),
];
