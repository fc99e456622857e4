//! `fp16`, `bf16`, `data_types` and the casts of PyTorch: which numbers are stored and added.

use zeroth_base::DType;

use super::conditions;
use super::key::{AutoRule, Key, KeyType, ReadBy};

const TYPES: KeyType = KeyType::OneOf(&["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]);

section! {
    /// Values of `fp16`.
    FP16_KEYS: Fp16 {
        Key::section("fp16").does("Trains in fp16 with a loss scale.").set("bf16 instead, where the GPU has it").read_by(ReadBy::Update),
        Key::bool("fp16.enabled", false)
            .does("Stores weights and activations in fp16, with fp32 master weights and a loss scale.")
            .set("\"auto\"; bf16 needs no loss scale, so prefer it on GPUs that have it (compute capability 8.0)")
            .read_by(ReadBy::Update)
            .auto(AutoRule::Fp16)
            => enabled: bool,
        Key::float("fp16.loss_scale", 0.0)
            .or_float(0.0)
            .does("A fixed loss scale; 0 lets it move.")
            .set("0")
            .read_by(ReadBy::Update)
            .idle_if(conditions::fp16_is_off)
            => loss_scale: f64,
        Key::int("fp16.initial_scale_power", 0)
            .at_most(126.0)
            .or_int(16)
            .in_("power of 2")
            .does("The loss scale starts at 2 to this power.")
            .set("16; 12 skips fewer steps at the start")
            .read_by(ReadBy::Update)
            .idle_if(conditions::loss_scale_is_fixed)
            => initial_scale_power: u64,
        Key::int("fp16.loss_scale_window", 0)
            .or_int(1000)
            .in_("steps")
            .does("A moving loss scale doubles after this many steps without overflow, at least 1.")
            .set("1000")
            .read_by(ReadBy::Update)
            .idle_if(conditions::loss_scale_is_fixed)
            => loss_scale_window: u64,
        Key::int("fp16.hysteresis", 1)
            .or_int(2)
            .in_("overflows")
            .does("The loss scale halves at this many overflows, not before.")
            .set("2")
            .read_by(ReadBy::Update)
            .idle_if(conditions::loss_scale_is_fixed)
            => hysteresis: u64,
        Key::bool("fp16.consecutive_hysteresis", false)
            .does("Counts only overflows in a row: a clean step sets the count back.")
            .set("false")
            .read_by(ReadBy::Update)
            .idle_if(conditions::loss_scale_is_fixed)
            => consecutive_hysteresis: bool,
        Key::float("fp16.min_loss_scale", 0.0)
            .or_float(1.0)
            .does("A moving loss scale does not fall below this, which is above 0; an overflow there stops the run.")
            .set("1")
            .read_by(ReadBy::Update)
            .idle_if(conditions::loss_scale_is_fixed)
            => min_loss_scale: f64,
        Key::bool("fp16.auto_cast", false)
            .does("Casts a model's inputs to fp16.")
            .nothing("inputs are token numbers; there is nothing to cast"),
        Key::bool("fp16.fp16_master_weights_and_grads", false)
            .does("Keeps master weights and gradients in fp16 too.")
            .unsupported_if_on("master weights are always fp32")
            .idle_if(conditions::fp16_is_off),
    }
}

section! {
    /// Values of `bf16`.
    BF16_KEYS: Bf16 {
        Key::section("bf16").named(&["bfloat16"]).does("Trains in bf16.").set("{\"enabled\": \"auto\"}").read_by(ReadBy::Update),
        Key::bool("bf16.enabled", false)
            .does("Stores weights and activations in bf16, with fp32 master weights.")
            .set("\"auto\", or true; refused on a GPU without bf16, where fp16 is the advice")
            .read_by(ReadBy::Update)
            .auto(AutoRule::Bf16)
            => enabled: bool,
        Key::bool("bf16.check_grad_overflow", true)
            .does("Stops before the update when a gradient is not finite, at every stage (DeepSpeed: stages 1 and 2 only).")
            .built_in("a non-finite gradient never reaches the weights, in any precision, at any stage"),
        Key::bool("bf16.immediate_grad_update", false)
            .does("Adds a gradient to its fp32 copy as soon as it is there.")
            .built_in("gradients are added as they arrive"),
        Key::bool("bf16.bf16_master_weights_and_grads", false)
            .does("Keeps master weights and gradients in bf16 too.")
            .unsupported_if_on("master weights are always fp32")
            .idle_if(conditions::bf16_is_off),
        Key::bool("bf16.bf16_optimizer_states", false)
            .does("Keeps the moments in bf16.")
            .unsupported_if_on("zeroth.moments says it: write \"zeroth\": {\"moments\": \"bf16\"}")
            .read_by(ReadBy::Update)
            .idle_if(conditions::bf16_is_off),
    }
}

section! {
    /// Values of `data_types`.
    DATA_TYPES_KEYS: DataTypes {
        Key::section("data_types").does("The types of gradients while they add up, and of parameters.").read_by(ReadBy::Reduce),
        Key::new("data_types.grad_accum_dtype", TYPES)
            .or_text("fp32")
            .does("The type in which shards of gradients add up, over ranks and micro-batches. Arithmetic is in f32, and rounded once a sum.")
            .set("leave it out; \"bf16\" halves the gradients (DeepSpeed's own choice in bf16), and rounds every sum")
            .read_by(ReadBy::Reduce)
            .only(&["fp32", "float32", "bf16", "bfloat16"], "write \"fp32\" or \"bf16\": sums in fp16 would overflow")
            .idle_if(conditions::gradients_add_whole)
            => grad_accum_dtype: DType,
        Key::new("data_types.param_dtype", TYPES)
            .or_rule("the type of the run")
            .does("The type of parameters.")
            .nothing("fp16.enabled and bf16.enabled say it already"),
        Key::new("data_types.buffer_dtype", TYPES)
            .does("The type of a model's buffers.")
            .nothing("models have no buffers here; positions are computed"),
        Key::new("data_types.keep_in_fp32_modules", KeyType::Texts)
            .does("Modules whose buffers stay in fp32.")
            .nothing("models have no buffers here; positions are computed in f32"),
    }
}

pub(super) const AUTOCAST_KEYS: &[Key] = &[
    Key::section("torch_autocast")
        .does("PyTorch's casts of single operations.")
        .nothing("operations have one fixed type each; there is no autocast"),
    Key::bool("torch_autocast.enabled", false).does("Turns autocast on.").as_section(),
    Key::new("torch_autocast.dtype", KeyType::Text)
        .or_text("bfloat16")
        .does("The type cast to.")
        .as_section(),
    Key::new("torch_autocast.lower_precision_safe_modules", KeyType::Texts)
        .does("The modules cast.")
        .as_section(),
    Key::without_effect(
        "amp",
        "NVIDIA Apex's mixed precision.",
        "Apex is a PyTorch extension; use bf16 or fp16",
    ),
];
