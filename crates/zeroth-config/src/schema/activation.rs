//! `activation_checkpointing`, and the block `zeroth` for what DeepSpeed's keys cannot say.

use zeroth_base::DType;

use super::conditions;
use super::key::{AutoRule, Derivation, Key, KeyType, ReadBy};
use super::recompute::Recompute;

/// Hugging Face's schedules, by --lr-scheduler-type or `zeroth.lr_scheduler_type`.
pub const HF_SCHEDULES: &[&str] = &[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
];

words! {
    /// How a rank accesses other ranks' parameter shards (`zeroth.gather`).
    Gather {
        /// Zero-copy: every rank maps the other ranks' shards read-only. CPU only.
        View = "view",
        /// Shards are gathered into a buffer.
        Copy = "copy",
    }
}

words! {
    /// Whether frozen parameters (LoRA's base model) are sharded across ranks (`zeroth.frozen`). Trained ones are at stage 3.
    FrozenPlacement {
        /// As trained parameters: at stage 3. A fit chooses between the others.
        ByStage = "auto",
        /// At every stage.
        Sharded = "sharded",
        /// Never: every rank holds all of them.
        Whole = "whole",
    }
}

words! {
    /// Where offloaded optimizer states are updated (`zeroth.update`).
    UpdatedBy {
        /// On the device, through which states are streamed.
        Device = "device",
        /// On the CPU, overlapping the device's work.
        Host = "host",
    }
}

words! {
    /// The parameters that weight decay applies to.
    DecayedParameters {
        /// Matrices, as in Hugging Face's Trainer.
        Matrices = "matrices",
        /// All, as in DeepSpeed.
        All = "all",
    }
}

section! {
    /// Values of `activation_checkpointing`.
    KEYS: ActivationCheckpointing {
        Key::section("activation_checkpointing")
            .does("Keeps few activations from forward to backward and recomputes the others; the section alone turns it on.")
            .set("{} turns it on for every block; zeroth.recompute chooses finer")
            .read_by(ReadBy::Checkpoint)
            .idle_if(conditions::no_block_is_recomputed),
        Key::bool("activation_checkpointing.partition_activations", false)
            .does("Shards kept activations across model-parallel ranks.")
            .nothing("data-parallel ranks hold activations of different samples: there is nothing equal to shard, and nothing is saved"),
        Key::bool("activation_checkpointing.cpu_checkpointing", false)
            .does("Offloads the kept inputs of blocks to host memory, from forward's last use to backward's first.")
            .set("true when recomputing alone does not fit")
            .read_by(ReadBy::Checkpoint)
            .idle_if(conditions::no_block_is_recomputed)
            => cpu_checkpointing: bool,
        Key::bool("activation_checkpointing.contiguous_memory_optimization", false)
            .does("Puts kept activations end to end.")
            .built_in("every buffer has a planned place in one arena; there is no fragmentation"),
        Key::int("activation_checkpointing.number_checkpoints", 1)
            .or_rule("the number of blocks")
            .in_("checkpoints")
            .does("How many inputs of blocks are kept, at most: blocks are recomputed in runs of (blocks / this, rounded up), from the input of each run.")
            .set("leave it out (one a block)")
            .read_by(ReadBy::Checkpoint)
            .auto(AutoRule::Blocks)
            .idle_if(conditions::no_block_is_recomputed)
            => number_checkpoints: Option<u64>,
        Key::bool("activation_checkpointing.synchronize_checkpoint_boundary", false)
            .does("Waits for the device at each checkpoint.")
            .nothing("operations wait for exactly what they need"),
        Key::bool("activation_checkpointing.profile", false)
            .does("Times each checkpoint.")
            .nothing("--trace FILE shows every operation, recomputed ones included"),
    }
}

section! {
    /// Values of `zeroth`.
    ZEROTH_KEYS: Zeroth {
        Key::section("zeroth").does("What DeepSpeed's keys cannot say; DeepSpeed ignores the block.").read_by(ReadBy::Lower),
        Key::new("zeroth.recompute", KeyType::OneOf(Recompute::WORDS))
            .or_derived(Derivation::Checkpointing, "block with activation_checkpointing or --gradient-checkpointing, else none")
            .does("What backward recomputes: nothing, norms and swiglu (cheap), attention as well, or the whole block.")
            .set("norm_swiglu first: it saves a part for almost no time; block saves most")
            .read_by(ReadBy::Checkpoint)
            => recompute: Recompute,
        Key::int("zeroth.recompute_blocks", 1)
            .or_rule("all blocks")
            .in_("blocks")
            .does("How many blocks, from the first on, backward recomputes as a whole; of the others norms and swiglu.")
            .set("leave both out: where memory is short, as few blocks are chosen as fit")
            .read_by(ReadBy::Checkpoint)
            .idle_if(conditions::no_block_is_recomputed)
            => recompute_blocks: Option<u64>,
        Key::new("zeroth.gather", KeyType::OneOf(Gather::WORDS))
            .or_rule("view on CPU, copy on GPUs")
            .does(
                "How a rank gets parameters that other ranks hold. view (CPU only): it reads their shards in place, and nothing \
                 is gathered; copy: units are gathered by all-gather, within the bounds of the stage3_* keys.",
            )
            .set("leave it out")
            .read_by(ReadBy::Gather)
            .idle_if(conditions::parameters_are_replicated)
            .noting(conditions::views_need_a_cpu)
            => gather: Option<Gather>,
        Key::new("zeroth.frozen", KeyType::OneOf(FrozenPlacement::WORDS))
            .or_text("auto")
            .does(
                "Whether parameters that are not trained (LoRA's base model) are sharded across ranks, at any stage. auto: whole \
                 where every rank has room for them, else sharded; the run says which. With offload_param they are sharded.",
            )
            .set("leave it out; sharded to leave room for larger micro-batches")
            .read_by(ReadBy::Gather)
            => frozen: FrozenPlacement,
        Key::new("zeroth.collectives", KeyType::OneOf(&["exact", "fast"]))
            .or_text("exact")
            .does("exact adds in rank order, so that results do not depend on buckets; fast uses the library's own reduction.")
            .set("exact, or fast with hundreds of ranks")
            .read_by(ReadBy::Collectives)
            .only(&["exact"], "write \"exact\""),
        Key::int("zeroth.sum_group", 1)
            .or_rule("the ranks of a host where hosts have equally many, else 1; on one host all ranks")
            .in_("ranks")
            .does(
                "Ranks whose gradients are added up first, in fp32, before their sums are exchanged with those of other groups: rank \
                 r is in group r div G. Few bytes then cross between hosts. It must divide the ranks. Another number is another \
                 order of additions, and so other bits.",
            )
            .set("leave it out; on one host a number for the bits of several")
            .read_by(ReadBy::Reduce)
            .auto(AutoRule::Group)
            => sum_group: Option<u64>,
        Key::int("zeroth.stall_seconds", 5)
            .or_int(30)
            .in_("seconds")
            .does("How long ranks wait for one that shows no sign of life (stopped, or starved of CPU time) before the run ends without a save.")
            .set("30; more where ranks are suspended and continued, as by a debugger or a scheduler that preempts")
            .read_by(ReadBy::Loop)
            => stall_seconds: u64,
        Key::new("zeroth.moments", KeyType::OneOf(&["fp32", "bf16"]))
            .or_text("fp32")
            .does("The type of the optimizer's moments.")
            .set("fp32; bf16 saves 4 bytes a parameter with Adam's two moments")
            .read_by(ReadBy::Update)
            => moments: DType,
        Key::bool("zeroth.stochastic_rounding", true)
            .does("Rounds bf16 moments stochastically, so that small changes are not lost.")
            .set("true")
            .read_by(ReadBy::Update)
            .idle_if(conditions::moments_are_fp32)
            => stochastic_rounding: bool,
        Key::new("zeroth.update", KeyType::OneOf(UpdatedBy::WORDS))
            .or_rule("the faster one on this machine, by measurement")
            .does(
                "With the optimizer in host memory and a GPU: who computes the update. device: state passes through the GPU; \
                 host: the CPU updates it in place, while the GPU runs the next forward.",
            )
            .set("leave it out")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::host_cannot_update)
            => update: Option<UpdatedBy>,
        Key::int("zeroth.update_window", 0)
            .or_rule("what the device has free")
            .in_("bytes")
            .does(
                "With the optimizer in host memory and a GPU: device memory for state on its way through the GPU, ahead of the \
                 update during backward and behind it during the next forward. Without it state passes through what \
                 activations leave behind.",
            )
            .set("leave it out")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::optimizer_is_not_offloaded)
            => update_window: Option<u64>,
        Key::new("zeroth.decay", KeyType::OneOf(DecayedParameters::WORDS))
            .or_text("matrices")
            .does("Which parameters decay: matrices only, as Hugging Face does, or all, as DeepSpeed does.")
            .set("matrices")
            .read_by(ReadBy::Update)
            => decay: DecayedParameters,
        Key::new("zeroth.lr_scheduler_type", KeyType::OneOf(HF_SCHEDULES))
            .or_text("cosine")
            .does("Hugging Face's schedule, where the file has no scheduler section; --lr-scheduler-type says the same.")
            .set("cosine")
            .read_by(ReadBy::Schedule)
            .idle_if(conditions::file_has_a_scheduler)
            => lr_scheduler_type: String,
        Key::float("zeroth.warmup_steps", 0.0)
            .or_float(0.0)
            .in_("steps, or a share of all below 1")
            .does("Warm-up of that schedule; --warmup-steps says the same.")
            .set("0.03 of the run, or some hundred steps")
            .read_by(ReadBy::Schedule)
            .idle_if(conditions::file_has_a_scheduler)
            => warmup_steps: f64,
    }
}
