//! Passes, seen in the dumps of the programs they make: whole golden dumps, and properties of some.

use std::fs;
use std::path::Path;

use serde_json::json;
use zeroth_base::{Axis, DType};
use zeroth_cpu::CpuTarget;
use zeroth_cuda::CudaTarget;
use zeroth_kernel::{Optimizer, Target};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};
use zeroth_program::{
    Compiled, FrozenPlacement, Gather, Offload, Recompute, Settings, TeacherPlacement, Types, World,
};

use crate::file_check::file_check;

const TOKENS: u64 = 5;
const CPU: &dyn Target = &CpuTarget { threads: 1 };
pub(crate) const CUDA: &dyn Target = &CudaTarget;
pub(crate) const SETTINGS: Settings = Settings {
    stage: 3,
    group: None,
    hpz: false,
    accumulation: 1,
    types: Types { compute: DType::Bf16, communication: DType::Bf16 },
    persistence: 0,
    model_persistence: u64::MAX,
    reduce_bucket: u64::MAX / 4,
    max_live: u64::MAX / 4,
    max_reuse: 0,
    prefetch: 0,
    overlap: true,
    optimizer: Optimizer::AdamW,
    moment_dtype: DType::F32,
    stochastic_rounding: false,
    grad_accum_dtype: DType::F32,
    recompute: Recompute::Nothing,
    offload: Offload::NOTHING,
    reduce_scatter: true,
    allgather_bucket: u64::MAX / 4,
    allgather_partitions: true,
    memory_efficient_linear: true,
    gather: Some(Gather::Copy),
    frozen: FrozenPlacement::ByStage,
    teacher: TeacherPlacement::WHOLE,
    head_rounds: true,
};

/// A tiny qwen3 on two ranks.
fn compiled(settings: &Settings, target: &'static dyn Target, blocks: u64) -> Compiled {
    compiled_for(World::from(2), settings, target, blocks)
}

pub(crate) fn compiled_for(
    world: World,
    settings: &Settings,
    target: &'static dyn Target,
    blocks: u64,
) -> Compiled {
    let config = json!({
        "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": blocks, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "vocab_size": 11,
        "tie_word_embeddings": false, "max_position_embeddings": 64,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_tokens(TOKENS)).unwrap();
    Compiled::new(graph, world, settings, target, vec![TOKENS]).unwrap()
}

/// The lines of the first section of a dump.
fn first_section(dump: &str) -> Vec<&str> {
    let lines = dump.lines().skip_while(|line| !line.starts_with("section"));
    lines.skip(1).take_while(|line| !line.is_empty()).collect()
}

#[test]
fn dumps_are_the_golden_ones() {
    let offload = Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), ..Offload::NOTHING };
    let cases = [
        ("stage0", Settings { stage: 0, ..SETTINGS }, CPU),
        ("stage3", SETTINGS, CPU),
        ("stage3_view", Settings { gather: Some(Gather::View), ..SETTINGS }, CPU),
        ("stage3_offload_cuda", Settings { offload, ..SETTINGS }, CUDA),
    ];
    for (name, settings, target) in cases {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/dumps/{name}.txt"));
        let dump = compiled(&settings, target, 1).to_string();
        if std::env::var_os("ZEROTH_BLESS").is_some() {
            fs::write(&path, &dump).unwrap();
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        let differs = dump.lines().zip(golden.lines()).position(|(found, golden)| found != golden);
        let at = differs.unwrap_or_else(|| dump.lines().count().min(golden.lines().count()));
        assert!(
            dump == golden,
            "line {} of tests/dumps/{name}.txt differs:\n  golden {:?}\n  found  {:?}\n\
             ZEROTH_BLESS=1 cargo test -p zeroth-program --test it dumps:: writes it anew",
            at + 1,
            golden.lines().nth(at),
            dump.lines().nth(at)
        );
    }
}

#[test]
fn stage_3_gathers_a_unit_before_it_reads_it_and_releases_it_after() {
    file_check(
        &compiled(&SETTINGS, CPU, 1).to_string(),
        "
        CHECK: section only:
        CHECK: = all_gather flat0 reads(weights0) writes(gathered0.0) [comm]
        NEXT: = forward embedding reads(v0, gathered0.0) writes(v3) [compute]
        NEXT: = release flat0 [compute]
        CHECK: = all_gather flat1 reads(weights1) writes(gathered1.0) [comm]
        NEXT: = forward rms_norm {{*}}gathered1.0) writes
        NOT: = all_gather flat0
        CHECK: = all_gather flat1 reads(weights1) writes(gathered1.1) [comm]
        CHECK: = backward linear_input {{*}}gathered1.1) writes
        CHECK: = reduce_scatter flat1{{*}} reads(comm_grad1) writes(reduced_grad1, report) [comm]
        CHECK: section update:
        NOT: = all_gather flat
        ",
    );
}

#[test]
fn a_large_reuse_distance_keeps_what_a_small_one_releases() {
    let gathers = |max_reuse| {
        let dump = compiled(&Settings { max_reuse, ..SETTINGS }, CPU, 2).to_string();
        first_section(&dump).iter().filter(|line| line.contains("= all_gather flat")).count()
    };
    // Four units: the embedding is gathered once (its gradient needs no weights), the head once, blocks twice.
    assert_eq!(gathers(0), 1 + 2 * 2 + 1);
    assert_eq!(gathers(u64::MAX), 4);
}

#[test]
fn attention_is_recomputed_right_after_its_queries_and_keys() {
    let settings = Settings { recompute: Recompute::Attention, ..SETTINGS };
    let dump = compiled(&settings, CPU, 2).to_string();
    // Were they apart, q and k would stay until then, and would be recomputed again for nothing.
    let block = "
        CHECK: = recompute head_norm_rope
        NEXT: = recompute head_norm_rope
        NEXT: = recompute attention
        CHECK: = backward attention
        NOT: = recompute head_norm_rope
        ";
    file_check(
        &dump,
        &format!("CHECK: section only:{block}CHECK: = backward add_rms_norm\n{block}CHECK: section"),
    );
}

#[test]
fn a_prefetched_gather_precedes_the_unit_before_its_own() {
    // The largest number of instructions from an all-gather to the first read of its flat.
    let ahead = |prefetch| {
        let dump = compiled(&Settings { prefetch, ..SETTINGS }, CPU, 4).to_string();
        let lines = first_section(&dump);
        let distance = |(at, line): (usize, &&str)| {
            let list = |line: &'_ str, name: &str| -> Vec<String> {
                let (_, list) = line.split_once(name).unwrap_or_default();
                list.split(')').next().unwrap_or_default().split(", ").map(str::to_owned).collect()
            };
            let gathered = list(line.split_once("= all_gather ")?.1, "writes(");
            lines[at..].iter().position(|line| list(line, "reads(").contains(&gathered[0]))
        };
        lines.iter().enumerate().filter_map(distance).max().unwrap()
    };
    assert_eq!(ahead(0), 1);
    // One unit ahead: a block has 14 instructions of forward and 25 of backward.
    assert!((10..40).contains(&ahead(1)), "{}", ahead(1));
    assert!(ahead(u64::MAX / 4) > 60, "{}", ahead(u64::MAX / 4));
}

#[test]
fn ranks_map_each_others_memory_within_a_group_only() {
    let settings = Settings { gather: Some(Gather::View), ..SETTINGS };
    let on = |group, hpz| compiled_for(World { ranks: 4, group }, &Settings { hpz, ..settings }, CPU, 1);
    let (one_group, two_groups, hpz) = (on(4, false), on(2, false), on(2, true));
    assert!(one_group.memory.views.1 > 0);
    // Without hpZ what a group holds is gathered along the rail first.
    assert_eq!(two_groups.memory.views.1, 0);
    assert_eq!(hpz.memory.views.1, one_group.memory.views.1);
    let reductions = |compiled: &Compiled| -> Vec<(&'static str, Axis)> {
        let sections = compiled.program.sections.iter();
        let actions = sections.flat_map(|section| &section.instructions).map(|one| &one.action);
        let axes = actions.filter_map(|action| Some((action.name(), action.collective_axis()?)));
        axes.filter(|(name, _)| ["reduce_scatter", "all_to_all"].contains(name)).collect()
    };
    assert!(reductions(&one_group).iter().all(|found| *found == ("reduce_scatter", Axis::Group)));
    for two_levels in [&two_groups, &hpz] {
        let found = reductions(two_levels);
        let pairs = [("reduce_scatter", Axis::Group), ("all_to_all", Axis::Rail)];
        for pair in pairs {
            assert_eq!(found.iter().filter(|found| **found == pair).count(), found.len() / 2, "{found:?}");
        }
    }
    // Groups of one rank have rails only: the sums of one group, over another transport.
    let found = reductions(&on(1, false));
    assert!(!found.is_empty() && found.iter().all(|found| *found == ("all_to_all", Axis::Rail)), "{found:?}");
}
