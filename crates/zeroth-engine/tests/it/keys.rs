//! What keys of the config promise, in figures: each with settings that differ in nothing else, on an 8-layer model.
//! docs/keys.md shows the same figures.

use std::fs;
use std::path::Path;

use crate::effect::*;

/// A config of stage 3 that keeps nothing gathered longer than it is read, with these keys more.
macro_rules! plain {
    ($($more:literal)?) => {
        concat!(
            r#"{"zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_max_reuse_distance": 0, "#,
            r#""stage3_param_persistence_threshold": 0"#,
            $($more,)?
            "}}"
        )
    };
}

const STATE_AWAY: &str = r#"{"zero_optimization": {"stage": 2, "overlap_comm": true, "sub_group_size": 1e6, "offload_optimizer": {"device": "cpu"}}}"#;
/// Elements of a tile or piece of a million: whole blocks of 2,048.
const MILLION: u64 = 1_000_000 / 2048 * 2048;

const MAX_LIVE: Key = Key {
    path: "zero_optimization.stage3_max_live_parameters",
    shows: "At most this many elements are gathered at a time. Where all units need more, units are released before backward and gathered again.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_max_reuse_distance": 1e9, "stage3_param_persistence_threshold": 0}}"#,
    settings: &["1e9", "60e6"],
    figures: &[MOST_LIVE, GATHERS, BUFFERS, DEVICE],
    timeline: None,
};

#[test]
fn no_more_is_gathered_than_max_live_allows() {
    let [roomy, tight] = both(&MAX_LIVE);
    // Backward does not read the embedding; all else stays.
    assert_eq!((roomy.get(MOST_LIVE), roomy.get(GATHERS)), (BLOCKS * BLOCK + HEAD, BLOCKS + 2));
    // Five blocks fit, or two beside the head; the other six come twice.
    assert_eq!((tight.get(MOST_LIVE), tight.get(GATHERS)), (5 * BLOCK, BLOCKS + 2 + 6));
    assert!(tight.get(BUFFERS) + 2 * 5 * BLOCK < roomy.get(BUFFERS));
}

const MAX_REUSE: Key = Key {
    path: "zero_optimization.stage3_max_reuse_distance",
    shows: "A unit whose next use is nearer stays gathered: fewer gathers, more memory.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_param_persistence_threshold": 0}}"#,
    settings: &["0", "60e6", "1e9"],
    figures: &[MOST_LIVE, GATHERS, BUFFERS, DEVICE],
    timeline: None,
};

#[test]
fn parameters_reused_within_max_reuse_distance_stay_gathered() {
    let compiled = MAX_REUSE.compiled();
    let gathers: Vec<u64> = compiled.iter().map(|compiled| compiled.get(GATHERS)).collect();
    // Between forward and backward of the last block lies the head; of the one before also the last block, twice.
    const { assert!(HEAD + 2 * BLOCK <= 60_000_000 && HEAD + 4 * BLOCK > 60_000_000) };
    assert_eq!(gathers, [2 + 2 * BLOCKS, 2 + 2 * BLOCKS - 2, 2 + BLOCKS]);
    let live: Vec<u64> = compiled.iter().map(|compiled| compiled.get(MOST_LIVE)).collect();
    assert_eq!(live, [HEAD, HEAD + 2 * BLOCK, HEAD + BLOCKS * BLOCK]);
}

const PREFETCH: Key = Key {
    path: "zero_optimization.stage3_prefetch_bucket_size",
    shows: "Units are gathered ahead of their use, as many as the bucket holds; 0 gathers at the moment of use.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 3, "overlap_comm": true, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}}"#,
    settings: &["0", "12e6", "25e6"],
    figures: &[AHEAD, MOST_LIVE, GATHERS],
    timeline: Some("all_gather"),
};

#[test]
fn units_are_gathered_as_far_ahead_as_the_prefetch_bucket_holds() {
    let compiled = PREFETCH.compiled();
    let [none, one, two] = &compiled[..] else { panic!("three settings") };
    assert_eq!(none.get(AHEAD), 1, "right before its use");
    assert!(one.get(AHEAD) > 10 && two.get(AHEAD) > one.get(AHEAD) + 10, "a unit is some ten instructions");
    // Beside what is read: nothing, the next unit, the next two.
    let live = [none, one, two].map(|compiled| compiled.get(MOST_LIVE));
    assert_eq!(live, [HEAD, HEAD + BLOCK, HEAD + 2 * BLOCK]);
    assert_eq!(none.get(GATHERS), two.get(GATHERS));
}

const PERSISTENCE: Key = Key {
    path: "zero_optimization.stage3_param_persistence_threshold",
    shows: "Parameters of at most this many elements stay gathered on every rank and are not gathered again.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_max_reuse_distance": 0}}"#,
    settings: &["0", "10240", "300000"],
    figures: &[PERSISTENT, GATHERED, PARAMETERS],
    timeline: None,
};

#[test]
fn parameters_up_to_the_persistence_threshold_stay_gathered() {
    let compiled = PERSISTENCE.compiled();
    let (norms, keys_and_values) = ((2 * BLOCKS + 1) * 1024, 2 * BLOCKS * 256 * 1024);
    let stay: Vec<u64> = compiled.iter().map(|compiled| compiled.get(PERSISTENT)).collect();
    assert_eq!(stay, [0, norms, norms + keys_and_values]);
    let [none, _, most] = &compiled[..] else { panic!("three settings") };
    // Blocks are gathered twice a step, the head once.
    assert_eq!(none.get(GATHERED) - most.get(GATHERED), 2 * (norms + keys_and_values) - 1024);
    assert!(most.get(PARAMETERS) > none.get(PARAMETERS) + keys_and_values, "half of them, in 2 bytes");
}

const TILES: Key = Key {
    path: "zero_optimization.offload_optimizer.buffer_count",
    shows: "This many tiles of updated parameters wait in host memory for their copy to the device.",
    ranks: 2,
    base: STATE_AWAY,
    settings: &["1", "4"],
    figures: &[STAGING, UPDATES],
    timeline: Some("update"),
};

#[test]
fn as_many_updated_tiles_wait_as_the_optimizer_has_buffers() {
    let [one, four] = both(&TILES);
    assert_eq!((one.get(STAGING), four.get(STAGING)), (2 * MILLION, 4 * 2 * MILLION));
    assert_eq!(one.get(UPDATES), four.get(UPDATES));
}

const RATIO: Key = Key {
    path: "zero_optimization.offload_optimizer.ratio",
    shows: "This share of the optimizer's state lives in host memory, in whole units; the rest stays on the device.",
    ranks: 2,
    base: STATE_AWAY,
    settings: &["0.0", "0.5", "1.0"],
    figures: &[OPTIMIZER, HOST_OPTIMIZER, DEVICE],
    timeline: None,
};

#[test]
fn ratio_of_the_optimizer_state_is_offloaded() {
    let compiled = RATIO.compiled();
    // Half of each unit, in whole blocks of 2,048, of which a norm of 1,024 elements takes one.
    let share = |elements: u64| elements.div_ceil(2 * 2048) * 2048;
    let all = share(EMBEDDING) + BLOCKS * share(BLOCK + 2048) + share(EMBEDDING + 2048);
    let away: Vec<u64> = compiled.iter().map(|compiled| compiled.get(HOST_OPTIMIZER)).collect();
    let here: Vec<u64> = compiled.iter().map(|compiled| compiled.get(OPTIMIZER)).collect();
    // Moments and whole master weights there, and here only what of these the weights lack.
    let elements = here.iter().zip(&away).map(|(here, away)| here / 10 + away / 12);
    assert!(elements.into_iter().all(|elements| elements == all), "{here:?} {away:?} {all}");
    assert_eq!((away[0], here[2]), (0, 0));
    // Up to a block more than half.
    assert!(away[1] >= 6 * all && away[1] < 6 * all + 12 * share(BLOCK + 2048), "{} of {all}", away[1]);
}

const PIECES: Key = Key {
    path: "zero_optimization.offload_param.buffer_count",
    shows: "With pin_memory false, this many pieces of parameters are in staging at a time.",
    ranks: 2,
    base: plain!(r#", "offload_param": {"device": "cpu", "pin_memory": false, "buffer_size": 1e6}"#),
    settings: &["1", "4"],
    figures: &[STAGING, STAGES],
    timeline: Some("stage_shard"),
};

#[test]
fn as_many_pieces_are_staged_as_parameters_have_buffers() {
    let [one, four] = both(&PIECES);
    assert_eq!((one.get(STAGING), four.get(STAGING)), (2 * MILLION, 4 * 2 * MILLION));
    assert_eq!(one.get(STAGES), four.get(STAGES));
}

const PIECE: Key = Key {
    path: "zero_optimization.offload_param.buffer_size",
    shows: "Parameters are copied to the device in pieces of this many elements, which bounds staging.",
    ranks: 2,
    base: plain!(r#", "offload_param": {"device": "cpu", "pin_memory": false, "buffer_count": 2}"#),
    settings: &["1e6", "4e6"],
    figures: &[UPLOADS, STAGES, STAGING],
    timeline: None,
};

#[test]
fn a_copy_moves_as_many_elements_as_a_buffer_holds() {
    let [small, large] = both(&PIECE);
    let copies = |piece: u64| {
        let pieces = |elements: u64| (elements / 2).div_ceil(piece / 2048 * 2048);
        // The embedding and the head come once, blocks twice.
        2 * pieces(EMBEDDING) + 2 * BLOCKS * pieces(BLOCK)
    };
    assert_eq!((small.get(UPLOADS), large.get(UPLOADS)), (copies(1_000_000), copies(4_000_000)));
    assert_eq!((small.get(STAGES), large.get(STAGES)), (small.get(UPLOADS), large.get(UPLOADS)));
    assert_eq!(
        (small.get(STAGING), large.get(STAGING)),
        (2 * 2 * MILLION, 2 * 2 * (4_000_000 / 2048 * 2048))
    );
}

const MAX_IN_CPU: Key = Key {
    path: "zero_optimization.offload_param.max_in_cpu",
    shows: "At most this many elements of a rank's shards are in host memory; the other units stay on the device.",
    ranks: 2,
    base: plain!(r#", "offload_param": {"device": "cpu"}"#),
    settings: &["0", "30e6", "1e9"],
    figures: &[PARAMETERS, HOST_PARAMETERS, DEVICE],
    timeline: None,
};

#[test]
fn no_more_parameters_are_in_host_memory_than_max_in_cpu_allows() {
    let compiled = MAX_IN_CPU.compiled();
    let away: Vec<u64> = compiled.iter().map(|compiled| compiled.get(HOST_PARAMETERS)).collect();
    let here: Vec<u64> = compiled.iter().map(|compiled| compiled.get(PARAMETERS)).collect();
    assert_eq!((away[0], here[2]), (0, 0));
    assert!(away[1] > 2 * (30_000_000 - BLOCK / 2) && away[1] <= 2 * 30_000_000, "{away:?}");
    assert!(here.iter().zip(&away).all(|(other, away)| other + away == here[0]), "{here:?} {away:?}");
}

const PIN: Key = Key {
    path: "zero_optimization.offload_param.pin_memory",
    shows: "From pinned memory parameters are copied straight to their place; otherwise they pass through staging.",
    ranks: 2,
    base: plain!(r#", "offload_param": {"device": "cpu", "buffer_size": 1e6, "buffer_count": 2}"#),
    settings: &["true", "false"],
    figures: &[UPLOADS, STAGES, STAGING],
    timeline: None,
};

#[test]
fn locked_memory_needs_no_staging() {
    let [locked, pageable] = both(&PIN);
    assert_eq!((locked.get(STAGES), locked.get(STAGING)), (0, 0));
    assert_eq!((pageable.get(STAGES), pageable.get(STAGING)), (locked.get(UPLOADS), 2 * 2 * MILLION));
}

const TILE: Key = Key {
    path: "zero_optimization.sub_group_size",
    shows: "The optimizer updates this many elements at a time, which bounds what an offloaded update stages.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_count": 2}}}"#,
    settings: &["1e9", "1e6"],
    figures: &[UPDATES, STAGING],
    timeline: None,
};

#[test]
fn an_update_takes_as_many_elements_as_a_sub_group_has() {
    let [whole, cut] = both(&TILE);
    let tiles = |elements: u64| (elements / 2).div_ceil(MILLION);
    assert_eq!(
        (whole.get(UPDATES), cut.get(UPDATES)),
        (BLOCKS + 2, 2 * tiles(EMBEDDING) + BLOCKS * tiles(BLOCK))
    );
    // A whole shard of the head, with its norm in a block of its own; two tiles.
    assert_eq!(cut.get(STAGING), 2 * 2 * MILLION);
    assert!(whole.get(STAGING) >= EMBEDDING, "{}", whole.get(STAGING));
}

const CHECKPOINTS: Key = Key {
    path: "activation_checkpointing.number_checkpoints",
    shows: "This many inputs of blocks are kept; the blocks between two of them are recomputed together.",
    ranks: 2,
    base: plain!(),
    settings: &["8", "2"],
    figures: &[ACTIVATIONS, RECOMPUTES, DEVICE],
    timeline: None,
};

#[test]
fn fewer_checkpoints_keep_longer_runs_of_blocks_at_a_time() {
    let [every, few] = both(&CHECKPOINTS);
    // Six inputs less, of 2 values in 2 bytes, and three blocks more of at least gate, up and their product.
    let (inputs, blocks) = (6 * 2 * 2 * TOKENS * 1024, 3 * 3 * 2 * TOKENS * 2816);
    assert!(few.get(ACTIVATIONS) + inputs > every.get(ACTIVATIONS) + blocks);
    // A run does not compute its last block's output again; the others' are inputs of the next.
    assert!(few.get(RECOMPUTES) >= every.get(RECOMPUTES) && every.get(RECOMPUTES) > 8 * BLOCKS);
}

const PARKED: Key = Key {
    path: "activation_checkpointing.cpu_checkpointing",
    shows: "Kept inputs of blocks are in host memory until backward.",
    ranks: 2,
    base: plain!(),
    settings: &["false", "true"],
    figures: &[ACTIVATIONS, HOST_ACTIVATIONS, OFFLOADS],
    timeline: None,
};

#[test]
fn kept_activations_wait_in_host_memory() {
    let [here, away] = both(&PARKED);
    assert_eq!((here.get(HOST_ACTIVATIONS), here.get(OFFLOADS)), (0, 0));
    // The sum and the branch that enter a block; the first has the sum alone.
    // Rows of 2 KiB are a cache line further apart.
    let value = TOKENS * (2 * 1024 + 64);
    assert_eq!((away.get(OFFLOADS), away.get(HOST_ACTIVATIONS)), (2 * BLOCKS - 1, (2 * BLOCKS - 1) * value));
    assert!(away.get(ACTIVATIONS) + 8 * value < here.get(ACTIVATIONS));
}

const REDUCE_BUCKET: Key = Key {
    path: "zero_optimization.reduce_bucket_size",
    shows: "An exchange of gradients moves at most this many elements: smaller buckets need more exchanges and less memory.",
    ranks: 2,
    base: r#"{"communication_data_type": "fp32", "zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}}"#,
    settings: &["5e8", "1e6"],
    figures: &[EXCHANGES, LARGEST_EXCHANGE, SENT, DEVICE],
    timeline: None,
};

#[test]
fn an_exchange_moves_at_most_a_reduce_bucket() {
    let [whole, cut] = both(&REDUCE_BUCKET);
    assert_eq!(whole.get(EXCHANGES), BLOCKS + 2, "a unit at a time");
    let most = 1_000_000 / 4096 * 4096;
    assert_eq!(cut.get(LARGEST_EXCHANGE), most);
    let exchanges = 2 * EMBEDDING.div_ceil(most) + BLOCKS * BLOCK.div_ceil(most);
    assert_eq!((cut.get(EXCHANGES), cut.get(SENT)), (exchanges, 4 * most));
    assert!(cut.get(DEVICE) < whole.get(DEVICE));
}

const REDUCE_SCATTER: Key = Key {
    path: "zero_optimization.reduce_scatter",
    shows: "With false every rank receives every rank's whole gradients instead of its own part of them.",
    ranks: 4,
    base: r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 4e6}}"#,
    settings: &["true", "false"],
    figures: &[EXCHANGES, SENT, RECEIVED, DEVICE],
    timeline: None,
};

#[test]
fn without_reduce_scatter_a_rank_receives_ranks_times_as_much() {
    let [parts, all] = both(&REDUCE_SCATTER);
    assert_eq!(parts.get(RECEIVED), parts.get(SENT), "a part of each rank's");
    assert_eq!((all.get(SENT), all.get(RECEIVED)), (parts.get(SENT), 4 * parts.get(RECEIVED)));
    assert_eq!(all.get(EXCHANGES), parts.get(EXCHANGES));
}

const GATHER_BUCKET: Key = Key {
    path: "zero_optimization.allgather_bucket_size",
    shows: "A gather of updated parameters moves at most this many elements.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 1}}"#,
    settings: &["5e8", "1e6"],
    figures: &[WEIGHT_GATHERS, LARGEST_WEIGHT_GATHER],
    timeline: None,
};

#[test]
fn a_gather_after_the_update_moves_at_most_a_bucket() {
    let [whole, cut] = both(&GATHER_BUCKET);
    assert_eq!(whole.get(WEIGHT_GATHERS), BLOCKS + 2);
    let most = 1_000_000 / 4096 * 4096;
    let gathers = 2 * EMBEDDING.div_ceil(most) + BLOCKS * BLOCK.div_ceil(most);
    assert_eq!((cut.get(WEIGHT_GATHERS), cut.get(LARGEST_WEIGHT_GATHER)), (gathers, most));
}

const PARTITIONS: Key = Key {
    path: "zero_optimization.allgather_partitions",
    shows: "With false updated parameters are broadcast, one rank's shard after the other.",
    ranks: 4,
    base: r#"{"zero_optimization": {"stage": 2}}"#,
    settings: &["true", "false"],
    figures: &[WEIGHT_GATHERS, BROADCASTS],
    timeline: Some("update"),
};

#[test]
fn without_allgather_every_rank_broadcasts_its_shards() {
    let [gathered, broadcast] = both(&PARTITIONS);
    assert_eq!((gathered.get(WEIGHT_GATHERS), gathered.get(BROADCASTS)), (BLOCKS + 2, 0));
    assert_eq!((broadcast.get(WEIGHT_GATHERS), broadcast.get(BROADCASTS)), (0, 4 * (BLOCKS + 2)));
}

const LINEAR: Key = Key {
    path: "zero_optimization.memory_efficient_linear",
    shows: "With false units with linear maps stay gathered from forward to backward, whatever the reuse distance.",
    ranks: 2,
    base: plain!(),
    settings: &["true", "false"],
    figures: &[GATHERS, MOST_LIVE, DEVICE],
    timeline: None,
};

#[test]
fn without_memory_efficient_linear_blocks_stay_gathered() {
    let [again, kept] = both(&LINEAR);
    assert_eq!((again.get(GATHERS), again.get(MOST_LIVE)), (2 + 2 * BLOCKS, HEAD));
    assert_eq!((kept.get(GATHERS), kept.get(MOST_LIVE)), (2 + BLOCKS, HEAD + BLOCKS * BLOCK));
}

const OVERLAP: Key = Key {
    path: "zero_optimization.overlap_comm",
    shows: "Collectives run on a queue of their own, and gathers are enqueued ahead of their use.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 25e6, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}}"#,
    settings: &["false", "true"],
    figures: &[COLLECTIVES, BESIDE, AHEAD],
    timeline: Some("all_gather"),
};

#[test]
fn overlapped_collectives_have_their_own_queue() {
    let [serial, beside] = both(&OVERLAP);
    assert_eq!((serial.get(BESIDE), serial.get(AHEAD)), (0, 1));
    assert_eq!(beside.get(BESIDE), beside.get(COLLECTIVES));
    assert_eq!(beside.get(COLLECTIVES), serial.get(COLLECTIVES));
    assert!(beside.get(AHEAD) > 10);
}

const COMMUNICATION: Key = Key {
    path: "communication_data_type",
    shows: "Gradients travel in this type.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 4e6}}"#,
    settings: &["\"bf16\"", "\"fp16\"", "\"fp32\""],
    figures: &[EXCHANGES, SENT],
    timeline: None,
};

#[test]
fn gradients_travel_in_the_communication_type() {
    let sent: Vec<u64> = COMMUNICATION.compiled().iter().map(|compiled| compiled.get(SENT)).collect();
    let most = 4_000_000 / 4096 * 4096;
    assert_eq!(sent, [2 * most, 2 * most, 4 * most]);
}

const SUMS: Key = Key {
    path: "data_types.grad_accum_dtype",
    shows: "Shards of gradients are kept in this type.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}"#,
    settings: &["\"fp32\"", "\"bf16\""],
    figures: &[GRADIENTS, DEVICE],
    timeline: None,
};

#[test]
fn shards_of_gradients_in_16_bits_take_half() {
    let [wide, narrow] = both(&SUMS);
    assert_eq!(wide.get(GRADIENTS), 2 * narrow.get(GRADIENTS));
    assert_eq!(wide.get(DEVICE) - narrow.get(DEVICE), narrow.get(GRADIENTS));
}

const RECOMPUTE: Key = Key {
    path: "zeroth.recompute",
    shows: "The more backward recomputes, the less is kept.",
    ranks: 2,
    base: plain!(),
    settings: &["\"none\"", "\"norm_swiglu\"", "\"attention\"", "\"block\""],
    figures: &[ACTIVATIONS, RECOMPUTES, DEVICE],
    timeline: None,
};

#[test]
fn recomputed_activations_are_not_stored() {
    let compiled = RECOMPUTE.compiled();
    let kept: Vec<u64> = compiled.iter().map(|compiled| compiled.get(ACTIVATIONS)).collect();
    assert!(kept.is_sorted_by(|more, less| more > less), "{kept:?}");
    let again: Vec<u64> = compiled.iter().map(|compiled| compiled.get(RECOMPUTES)).collect();
    // Two norms and a gated activation a block and the last norm; attention as well; a block's every operation.
    assert_eq!(again[..3], [0, 3 * BLOCKS + 1, 4 * BLOCKS + 1]);
    assert!(again[3] > 8 * BLOCKS, "{again:?}");
}

const RECOMPUTE_BLOCKS: Key = Key {
    path: "zeroth.recompute_blocks",
    shows: "With \"block\": this many blocks keep only their input; the others keep all but norms and gated activations.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "zeroth": {"recompute": "block"}}"#,
    settings: &["2", "4", "8"],
    figures: &[ACTIVATIONS, RECOMPUTES, DEVICE],
    timeline: None,
};

#[test]
fn fewer_recomputed_blocks_store_more() {
    let compiled = RECOMPUTE_BLOCKS.compiled();
    let kept: Vec<u64> = compiled.iter().map(|compiled| compiled.get(ACTIVATIONS)).collect();
    assert!(kept.is_sorted_by(|more, less| more > less), "{kept:?}");
    let again: Vec<u64> = compiled.iter().map(|compiled| compiled.get(RECOMPUTES)).collect();
    assert!(again.is_sorted_by(|fewer, more| fewer < more), "{again:?}");
    // A block beyond those gives back two norms and a gated activation, and one computed as a whole more than eight.
    assert!(again[1] - again[0] > 2 * 5, "{again:?}");
}

const MOMENTS: Key = Key {
    path: "zeroth.moments",
    shows: "Moments in 16 bits take half: 4 bytes a parameter less with AdamW.",
    ranks: 2,
    base: r#"{"zero_optimization": {"stage": 1}}"#,
    settings: &["\"fp32\"", "\"bf16\""],
    figures: &[OPTIMIZER, DEVICE],
    timeline: None,
};

#[test]
fn moments_in_16_bits_take_half() {
    let [wide, narrow] = both(&MOMENTS);
    assert_eq!(wide.get(OPTIMIZER) / 10, narrow.get(OPTIMIZER) / 6);
    assert_eq!(wide.get(DEVICE) - narrow.get(DEVICE), wide.get(OPTIMIZER) - narrow.get(OPTIMIZER));
}

const SUM_GROUP: Key = Key {
    path: "zeroth.sum_group",
    shows: "Ranks of a group add up their gradients first, so that less crosses between groups; parameters are gathered there by rails and then in groups.",
    ranks: 8,
    base: plain!(),
    settings: &["8", "4", "1"],
    figures: &[IN_GROUPS, BETWEEN_GROUPS, DEVICE],
    timeline: None,
};

#[test]
fn groups_keep_most_bytes_to_themselves() {
    let compiled = SUM_GROUP.compiled();
    let bytes =
        compiled.iter().map(|compiled| [IN_GROUPS, BETWEEN_GROUPS].map(|figure| compiled.get(figure)));
    let [one_group, two_groups, rails]: [[u64; 2]; 3] = bytes.collect::<Vec<_>>().try_into().unwrap();
    assert_eq!((one_group[1], rails[0]), (0, 0));
    assert_eq!(one_group[0], rails[1], "what a group of all ranks sends, rails of all ranks do");
    // Of each gather a rank sends its shard to the other group instead of to four ranks, of gradients twice the bytes to one.
    assert!(two_groups[1] * 3 < one_group[0] && two_groups[0] < one_group[0], "{two_groups:?} {one_group:?}");
}

const HPZ: Key = Key {
    path: "zero_optimization.zero_hpz_partition_size",
    shows: "Parameters are sharded within groups and cross between them once a step, and gradients with them: more memory, fewer bytes between groups.",
    ranks: 8,
    base: r#"{"gradient_accumulation_steps": 4, "zeroth": {"sum_group": 4}, "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}}"#,
    settings: &["1", "4"],
    figures: &[IN_GROUPS, BETWEEN_GROUPS, PARAMETERS, GRADIENTS],
    timeline: Some("update"),
};

#[test]
fn with_hpz_bytes_between_groups_do_not_grow_with_micro_batches() {
    let [without, with] = both(&HPZ);
    assert_eq!(with.get(PARAMETERS), 2 * without.get(PARAMETERS), "two groups instead of one");
    // The shard in 4 bytes, and that of the group as well.
    assert_eq!(with.get(GRADIENTS), 3 * without.get(GRADIENTS));
    assert!(with.get(BETWEEN_GROUPS) * 4 < without.get(BETWEEN_GROUPS));
}

fn both(key: &Key) -> [Compiled; 2] {
    key.compiled().try_into().unwrap_or_else(|_| panic!("{} has two settings", key.path))
}

const KEYS: [Key; 26] = [
    MAX_LIVE,
    MAX_REUSE,
    PREFETCH,
    PERSISTENCE,
    LINEAR,
    OVERLAP,
    REDUCE_BUCKET,
    REDUCE_SCATTER,
    COMMUNICATION,
    SUMS,
    GATHER_BUCKET,
    PARTITIONS,
    TILE,
    RATIO,
    TILES,
    MAX_IN_CPU,
    PIN,
    PIECE,
    PIECES,
    RECOMPUTE,
    RECOMPUTE_BLOCKS,
    CHECKPOINTS,
    PARKED,
    MOMENTS,
    SUM_GROUP,
    HPZ,
];

const HEADER: &str = "# What keys do, in figures

Each table compares settings of one config key; nothing else differs. Programs are compiled for a llama with 8 blocks
and 155,730,944 parameters, micro-batches of 512 tokens, in bf16 with AdamW unless stated otherwise. Figures are read
off the program of one rank before it runs. Parameters are gathered by copy (`zeroth.gather: copy`), as on GPUs; CPU
ranks read each other's shards in place, so limits on gathers have no effect there. A test writes this page and fails
when it is stale or a key loses its effect. To regenerate it:

    ZEROTH_BLESS=1 cargo test -p zeroth-engine --test it keys::

Elements per unit: embedding 32,768,000, block 11,274,240, head 32,769,024. A timeline has one column per queue. A
column runs in order, concurrently with the others except for waits. Units are numbered from the embedding, 0, to the
head, 9; `update 1 0` is the sub-group of unit 1 that starts at element 0 of the rank's shard. 1 GB is 10^9 bytes.
";

const TABLE: &str = "
## Memory of every stage and offload

Bytes per rank, by category and tier. Offload is `none`, the `optimizer` in host memory, or `both` optimizer and
parameters. Stage 0 shards nothing, so nothing is offloaded, and only stage 3 offloads parameters: rows without an
effect are equal. Buffers exclude memory shared with activations. sub_group_size is 1e6, persistence and overlap are
off.

";

#[test]
fn offloaded_state_is_in_host_memory() {
    for stage in 0..4 {
        for ranks in [1, 2, 4] {
            let states = |offload: &str| {
                let compiled = Compiled::new(&offloaded(stage, offload).to_string(), ranks);
                [PARAMETERS, HOST_PARAMETERS, OPTIMIZER, HOST_OPTIMIZER].map(|figure| compiled.get(figure))
            };
            let [parameters, none, optimizer, nothing] = states("none");
            assert_eq!([none, nothing], [0, 0]);
            // There master weights are whole, 12 bytes with the moments, and not what weights lack of them.
            let away = if stage > 0 { [0, optimizer / 10 * 12] } else { [optimizer, 0] };
            let expected = [[parameters, 0], away].concat();
            assert_eq!(states("optimizer")[..], expected, "stage {stage}, {ranks} ranks");
            let expected = if stage == 3 { [[0, parameters], away].concat() } else { expected };
            assert_eq!(states("both")[..], expected, "stage {stage}, {ranks} ranks");
        }
    }
}

#[test]
fn docs_keys_md_has_these_figures() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/keys.md");
    let page = [HEADER, &keys_page(&KEYS), TABLE, &memory_table()].concat();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/keys.md is stale: ZEROTH_BLESS=1 cargo test -p zeroth-engine --test it keys:: writes it anew"
    );
}
