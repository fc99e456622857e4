//! Conditions of keys: each returns why a key has no effect with the other values of the file, or a note on one that has.
//! A condition is named for what it finds; `None` means that it does not hold.

use crate::view::{ConfigView, Switch};

const PARAM: &str = "zero_optimization.offload_param";
const OPTIMIZER: &str = "zero_optimization.offload_optimizer";

pub(super) fn state_is_replicated(view: ConfigView<'_>) -> Option<String> {
    (view.stage() == 0).then(|| "stage 0 shards nothing: every rank holds and updates all of it".to_owned())
}

pub(super) fn gradients_add_whole(view: ConfigView<'_>) -> Option<String> {
    let (stage, asked) = (view.stage(), view.text("data_types.grad_accum_dtype")?);
    (stage < 2 && !["fp32", "float32"].contains(&asked)).then(|| {
        format!(
            "only stages 2 and 3 keep shards of gradients; at stage {stage} they add up in fp32, where backward puts them"
        )
    })
}

pub(super) fn nothing_is_gathered_after_update(view: ConfigView<'_>) -> Option<String> {
    match view.stage() {
        0 => Some("stage 0 gathers nothing: every rank updates all parameters itself".to_owned()),
        3 if view.integer("zero_optimization.stage3_param_persistence_threshold") == Some(0) => Some(
            "stage 3 gathers after the update only what stays gathered, and stage3_param_persistence_threshold 0 keeps \
             nothing so"
                .to_owned(),
        ),
        _ => None,
    }
}

pub(super) fn shards_are_sent_whole(view: ConfigView<'_>) -> Option<String> {
    let is_sent_whole = view.switch("zero_optimization.allgather_partitions") == Switch::Off;
    nothing_is_gathered_after_update(view).or_else(|| {
        is_sent_whole.then(|| "allgather_partitions is false, so each rank's shard is sent whole".to_owned())
    })
}

pub(super) fn parameters_are_replicated(view: ConfigView<'_>) -> Option<String> {
    let stage = view.stage();
    (stage < 3).then(|| {
        format!("only stage 3 shards parameters and gathers them; at stage {stage} they are replicated")
    })
}

pub(super) fn parameters_are_replicated_in_groups(view: ConfigView<'_>) -> Option<String> {
    let stage = view.stage();
    (stage < 3).then(|| {
        format!(
            "only stage 3 shards parameters; at stage {stage} every rank has all of them, and there is nothing to shard \
             within groups (zeroth.sum_group says which ranks add up gradients first)"
        )
    })
}

pub(super) fn gathers_stay_at_their_use(view: ConfigView<'_>) -> Option<String> {
    let stays = view.switch("zero_optimization.overlap_comm") == Switch::Off;
    parameters_are_replicated(view).or_else(|| {
        stays.then(|| "overlap_comm is false, so a unit is gathered at the moment of its use".to_owned())
    })
}

pub(super) fn governs_copies_only(view: ConfigView<'_>) -> Option<String> {
    (view.text("zeroth.gather") != Some("copy")).then(|| {
        "it governs gathers by copy: on GPUs, with offload_param, or with zeroth.gather \"copy\"; on CPU ranks read each \
         other's shards in place and gather nothing, which satisfies any bound"
            .to_owned()
    })
}

pub(super) fn views_need_a_cpu(view: ConfigView<'_>) -> Option<String> {
    (view.text("zeroth.gather") == Some("view")).then(|| {
        "on CPU only: a run on GPUs refuses it, and gathers by copy where the key is left out".to_owned()
    })
}

pub(super) fn decay_without_its_end(view: ConfigView<'_>) -> Option<String> {
    let name = view.text("scheduler.type")?;
    let decays = ["WarmupDecayLR", "WarmupCosineLR"].iter().any(|known| known.eq_ignore_ascii_case(name));
    (decays && !view.contains("scheduler.params.total_num_steps")).then(|| {
        "scheduler.params.total_num_steps is absent: here it is the number of steps of the run; DeepSpeed fails without it, \
         so write it (\"auto\" with Hugging Face) where DeepSpeed reads this file too"
            .to_owned()
    })
}

pub(super) fn no_block_is_recomputed(view: ConfigView<'_>) -> Option<String> {
    match view.text("zeroth.recompute")? {
        "block" => None,
        "none" => Some("zeroth.recompute is \"none\", so nothing is recomputed".to_owned()),
        finer => Some(format!("zeroth.recompute is \"{finer}\", so no block is recomputed as a whole")),
    }
}

pub(super) fn momentum_is_fixed(view: ConfigView<'_>) -> Option<String> {
    (view.switch("scheduler.params.cycle_momentum") == Switch::Off)
        .then(|| "cycle_momentum is false, so the first beta stays what it is".to_owned())
}

pub(super) fn params_are_not_sharded(view: ConfigView<'_>) -> Option<String> {
    let stage = view.stage();
    (stage < 3).then(|| {
        format!("only stage 3 shards parameters, so only stage 3 can move them; the stage here is {stage}")
    })
}

pub(super) fn params_are_not_offloaded(view: ConfigView<'_>) -> Option<String> {
    params_are_not_sharded(view).or_else(|| not_offloaded(view, PARAM))
}

pub(super) fn nothing_is_staged(view: ConfigView<'_>) -> Option<String> {
    let is_locked = view.switch("zero_optimization.offload_param.pin_memory") != Switch::Off;
    params_are_not_offloaded(view).or_else(|| {
        is_locked.then(|| {
            "pin_memory is true, so pieces are copied straight to their place and none is staged".to_owned()
        })
    })
}

pub(super) fn params_are_not_on_disk(view: ConfigView<'_>) -> Option<String> {
    params_are_not_sharded(view).or_else(|| not_on_disk(view, PARAM))
}

pub(super) fn optimizer_is_not_offloaded(view: ConfigView<'_>) -> Option<String> {
    state_is_replicated(view).or_else(|| not_offloaded(view, OPTIMIZER))
}

pub(super) fn host_cannot_update(view: ConfigView<'_>) -> Option<String> {
    let is_off = |key| view.switch(key) == Switch::Off;
    optimizer_is_not_offloaded(view).or_else(|| {
        (is_off("bf16.enabled") && is_off("fp16.enabled")).then(|| {
            "neither bf16 nor fp16 is on: in fp32 there are no master weights in host memory, and state passes through the GPU"
                .to_owned()
        })
    })
}

pub(super) fn updates_stay(view: ConfigView<'_>) -> Option<String> {
    params_are_not_offloaded(view).and_then(|_| optimizer_is_not_offloaded(view))
}

pub(super) fn optimizer_is_not_on_disk(view: ConfigView<'_>) -> Option<String> {
    state_is_replicated(view).or_else(|| not_on_disk(view, OPTIMIZER))
}

fn not_offloaded(view: ConfigView<'_>, section: &str) -> Option<String> {
    (view.device(section) == "none").then(|| format!("{section}.device is \"none\", so nothing is moved"))
}

fn not_on_disk(view: ConfigView<'_>, section: &str) -> Option<String> {
    let device = view.device(section);
    (device != "nvme").then(|| format!("it governs the disk, and {section}.device is \"{device}\""))
}

pub(super) fn nothing_is_on_disk(view: ConfigView<'_>) -> Option<String> {
    let on_disk = (view.stage() >= 1 && view.device(OPTIMIZER) == "nvme")
        || (view.stage() == 3 && view.device(PARAM) == "nvme");
    (!on_disk).then(|| {
        "it governs the disk, and no offload device that counts at this stage is \"nvme\"".to_owned()
    })
}

pub(super) fn fp16_is_off(view: ConfigView<'_>) -> Option<String> {
    (view.switch("fp16.enabled") == Switch::Off).then(|| "fp16.enabled is false".to_owned())
}

pub(super) fn loss_scale_is_fixed(view: ConfigView<'_>) -> Option<String> {
    fp16_is_off(view).or_else(|| {
        let fixed = view.number("fp16.loss_scale").filter(|scale| *scale > 0.0)?;
        Some(format!("fp16.loss_scale {fixed} is a fixed scale; only a dynamic one (0) moves"))
    })
}

pub(super) fn bf16_is_off(view: ConfigView<'_>) -> Option<String> {
    (view.switch("bf16.enabled") == Switch::Off).then(|| "bf16.enabled is false".to_owned())
}

pub(super) fn file_has_a_scheduler(view: ConfigView<'_>) -> Option<String> {
    view.has_section("scheduler").then(|| "the scheduler section says what the learning rate does".to_owned())
}

pub(super) fn weights_are_whole(view: ConfigView<'_>) -> Option<String> {
    let stage = view.stage();
    (stage < 3).then(|| format!("at stage {stage} weights are whole, and the model is always written"))
}

pub(super) fn moments_are_fp32(view: ConfigView<'_>) -> Option<String> {
    (view.text("zeroth.moments") != Some("bf16"))
        .then(|| "zeroth.moments is fp32, which needs no stochastic rounding".to_owned())
}
