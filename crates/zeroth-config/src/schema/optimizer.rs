//! `optimizer`: its types and the parameters of each.

use serde_json::Value;
use zeroth_base::Optimizer;

use super::field::{FieldType, ReadField};
use super::key::{AutoRule, DefaultValue, Key, KeyType, ReadBy};

/// Optimizers that DeepSpeed takes, itself or from torch.optim, and zeroth does not have.
pub const FOREIGN_OPTIMIZERS: &[&str] = &[
    "Lamb",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Muon",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
];

const ADAM: &[&str] = &["Adam", "AdamW"];
const ADAM_AND_LION: &[&str] = &["Adam", "AdamW", "Lion"];

section! {
    /// Values of `optimizer` and `optimizer.params`.
    KEYS: OptimizerParams {
        Key::section("optimizer")
            .does("The optimizer. Without it: AdamW from --learning-rate, --adam-beta1, --adam-beta2, --adam-epsilon, --weight-decay.")
            .set("leave it out, or {\"type\": \"AdamW\", \"params\": {…}}")
            .read_by(ReadBy::Update),
        Key::new("optimizer.type", KeyType::Text)
            .or_text("AdamW")
            .does("Adam, AdamW, SGD, Lion, Adagrad or AdEMAMix (which DeepSpeed does not have).")
            .set("AdamW")
            .read_by(ReadBy::Update)
            => name: Optimizer,
        Key::section("optimizer.params").does("The parameters of the optimizer.").read_by(ReadBy::Update),
        Key::bool("optimizer.legacy_fusion", false)
            .does("DeepSpeed's old fused 16-bit optimizer.")
            .nothing("the update is always one fused pass"),
        Key::float("optimizer.params.lr", 0.0)
            .in_fp32()
            .or_float(1e-3)
            .does("The learning rate.")
            .set("\"auto\" (--learning-rate)")
            .read_by(ReadBy::Update)
            .auto(AutoRule::LearningRate)
            .of(&["Adam", "AdamW", "SGD", "Lion", "AdEMAMix"])
            => lr: f64,
        Key::float("optimizer.params.lr", 0.0)
            .in_fp32()
            .or_float(1e-2)
            .does("The learning rate.")
            .set("\"auto\" (--learning-rate)")
            .read_by(ReadBy::Update)
            .auto(AutoRule::LearningRate)
            .of(&["Adagrad"]),
        Key::new("optimizer.params.betas", KeyType::Floats(2))
            .or(DefaultValue::Floats(&[0.9, 0.999]))
            .at_least(0.0)
            .below(1.0)
            .does("How slowly the two moments forget.")
            .set("\"auto\" (--adam-beta1, --adam-beta2); [0.9, 0.95] for language models, Lion [0.9, 0.99]")
            .read_by(ReadBy::Update)
            .auto(AutoRule::Betas)
            .of(ADAM_AND_LION)
            => betas: [f64; 2],
        Key::new("optimizer.params.betas", KeyType::Floats(3))
            .or(DefaultValue::Floats(&[0.9, 0.999, 0.9999]))
            .at_least(0.0)
            .below(1.0)
            .does("How slowly the fast average, the squares and the slow average forget.")
            .set("[0.9, 0.999, 0.9999]")
            .read_by(ReadBy::Update)
            .of(&["AdEMAMix"])
            => betas_of_three: [f64; 3],
        Key::float("optimizer.params.alpha", 0.0)
            .in_fp32()
            .or_float(5.0)
            .does("Weight of the slow average, which is added to the fast one.")
            .set("5; 2 to 10")
            .read_by(ReadBy::Update)
            .of(&["AdEMAMix"])
            => alpha: f64,
        Key::int("optimizer.params.t_alpha", 1)
            .does("Steps over which alpha rises from 0. Without it: none.")
            .set("the number of steps of the run")
            .read_by(ReadBy::Update)
            .of(&["AdEMAMix"])
            => t_alpha: Option<u64>,
        Key::int("optimizer.params.t_beta3", 1)
            .does("Steps over which the third beta rises from the first. Without it: none.")
            .set("the number of steps of the run")
            .read_by(ReadBy::Update)
            .of(&["AdEMAMix"])
            => t_beta3: Option<u64>,
        Key::float("optimizer.params.eps", 0.0)
            .positive_in_fp32()
            .or_float(1e-8)
            .does("Added to the root of the second moment.")
            .set("\"auto\" (--adam-epsilon)")
            .read_by(ReadBy::Update)
            .auto(AutoRule::Epsilon)
            .of(&["Adam", "AdamW", "AdEMAMix"])
            => eps: f64,
        Key::float("optimizer.params.eps", 0.0)
            .positive_in_fp32()
            .or_float(1e-10)
            .does("Added to the root of the sum of squares.")
            .set("1e-10")
            .read_by(ReadBy::Update)
            .of(&["Adagrad"]),
        Key::float("optimizer.params.weight_decay", 0.0)
            .in_fp32()
            .or_float(0.0)
            .does("How strongly weights are drawn to zero; norms and biases are left out unless zeroth.decay is \"all\".")
            .set("\"auto\" (--weight-decay)")
            .read_by(ReadBy::Update)
            .auto(AutoRule::WeightDecay)
            .of(Optimizer::NAMES)
            => weight_decay: f64,
        Key::float("optimizer.params.momentum", 0.0)
            .at_most(1.0)
            .or_float(0.0)
            .does("How slowly the velocity forgets.")
            .set("0.9")
            .read_by(ReadBy::Update)
            .of(&["SGD"])
            => momentum: f64,
        Key::float("optimizer.params.dampening", 0.0)
            .at_most(1.0)
            .or_float(0.0)
            .does("Weakens the newest gradient in the velocity.")
            .set("0")
            .read_by(ReadBy::Update)
            .of(&["SGD"])
            => dampening: f64,
        Key::bool("optimizer.params.nesterov", false)
            .does("Looks ahead along the velocity.")
            .set("false")
            .read_by(ReadBy::Update)
            .of(&["SGD"])
            => nesterov: bool,
        Key::float("optimizer.params.lr_decay", 0.0)
            .in_fp32()
            .or_float(0.0)
            .does("Divides the learning rate by 1 + this × steps done.")
            .set("0")
            .read_by(ReadBy::Update)
            .of(&["Adagrad"])
            => lr_decay: f64,
        Key::float("optimizer.params.initial_accumulator_value", 0.0)
            .in_fp32()
            .or_float(0.0)
            .does("What the sums of squares start with.")
            .set("0")
            .read_by(ReadBy::Update)
            .of(&["Adagrad"])
            => initial_accumulator_value: f64,
        Key::bool("optimizer.params.bias_correction", true)
            .does("Corrects the moments for starting at zero.")
            .set("true")
            .read_by(ReadBy::Update)
            .of(ADAM)
            => bias_correction: bool,
        Key::bool("optimizer.params.adam_w_mode", true)
            .does("Decays weights apart from the gradient (AdamW), as DeepSpeed does unless told not to; false adds the decay to the gradient.")
            .set("true")
            .read_by(ReadBy::Update)
            .of(&["Adam"])
            => adam_w_mode: bool,
        Key::bool("optimizer.params.adam_w_mode", true)
            .does("Decays weights apart from the gradient.")
            .built_in("AdamW always does; type \"Adam\" with adam_w_mode false adds the decay to the gradient")
            .of(&["AdamW"]),
        Key::bool("optimizer.params.amsgrad", false)
            .does("Keeps the largest second moment seen.")
            .unsupported_if_on("amsgrad is not built (DeepSpeed accepts it on the host and never carries it out)")
            .of(ADAM),
        Key::bool("optimizer.params.torch_adam", false)
            .does("Uses PyTorch's Adam.")
            .nothing("there is no PyTorch here; our Adam computes the same")
            .of(ADAM),
        Key::bool("optimizer.params.fp32_optimizer_states", true)
            .does("Keeps the moments in fp32 on the host.")
            .nothing("zeroth.moments says it for every tier")
            .of(ADAM),
        Key::bool("optimizer.params.fused", false)
            .does("Uses PyTorch's fused kernels.")
            .built_in("the update is always one fused pass")
            .of(ADAM),
        Key::bool("optimizer.params.foreach", false)
            .does("Uses PyTorch's multi-tensor kernels.")
            .built_in("the update is always one fused pass")
            .of(ADAM),
        Key::refused(
            "optimizer.params.max_grad_norm",
            "Clipping, in the wrong place.",
            "DeepSpeed refuses it here: write gradient_clipping at the top level",
        ),
        Key::bool("optimizer.params.use_triton", false)
            .does("Uses Triton kernels.")
            .nothing("kernels are our own")
            .of(&["Lion"]),
    }
}

impl ReadField for Optimizer {
    const TYPE: FieldType = FieldType::Word;

    fn read(value: Option<&Value>) -> Option<Self> {
        let name = value?.as_str()?;
        Self::ALL.iter().copied().find(|optimizer| optimizer.name() == name)
    }
}
