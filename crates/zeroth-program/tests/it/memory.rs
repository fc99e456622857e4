//! What a program needs: the figures follow ZeRO's formulas, cell by cell of docs/memory.md.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use zeroth_base::{DType, format_bytes, grouped};
use zeroth_cpu::CpuTarget;
use zeroth_cuda::CudaTarget;
use zeroth_graph::{Backward, Graph};
use zeroth_kernel::{Optimizer, Target, Tier};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};
use zeroth_program::{
    Category, Compiled, Gather, Memory, Offload, Recompute, Settings, StateStream, Types, compile, in_place,
    plan_memory,
};

const BF16: Types = Types { compute: DType::Bf16, communication: DType::Bf16 };
pub(crate) const SETTINGS: Settings = Settings {
    stage: 3,
    group: None,
    hpz: false,
    accumulation: 1,
    types: BF16,
    persistence: 0,
    reduce_bucket: 200_000_000,
    max_live: 1_000_000_000,
    max_reuse: 0,
    prefetch: 0,
    overlap: false,
    optimizer: Optimizer::AdamW,
    moment_dtype: DType::F32,
    stochastic_rounding: false,
    grad_accum_dtype: DType::F32,
    recompute: Recompute::Nothing,
    offload: Offload::NOTHING,
    reduce_scatter: true,
    allgather_bucket: u64::MAX / 4,
    allgather_partitions: true,
    gather: Some(Gather::Copy),
    head_rounds: false,
    ..Settings::inference(DType::Bf16)
};

/// A llama of these sizes: (hidden, feed-forward, heads, kv heads, head_dim, blocks, vocabulary).
pub(crate) fn model(sizes: [u64; 7], tokens: u64) -> (Graph, Backward) {
    let [hidden, ffn, heads, kv_heads, head_dim, blocks, vocab] = sizes;
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": ffn, "vocab_size": vocab,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_tokens(tokens)).unwrap();
    let backward = graph.backward().unwrap();
    (graph, backward)
}

pub(crate) fn memory(graph: &Graph, backward: &Backward, ranks: u64, settings: Settings) -> Memory {
    let target = &CpuTarget { threads: 2 };
    let program = compile(graph, backward, settings.world(ranks), &settings).unwrap();
    let program = in_place(program, graph, backward, target);
    plan_memory(&program, graph, backward, target, &graph.stream_rows().into())
}

pub(crate) fn elements(graph: &Graph) -> u64 {
    graph.params.iter().map(zeroth_graph::Param::elements).sum()
}

/// About 160M parameters, all of whose matrices are whole blocks.
pub(crate) const MIDDLE: [u64; 7] = [1024, 2816, 16, 4, 64, 8, 32_000];

#[test]
fn states_take_14_bytes_a_parameter_on_one_rank_and_16_on_many() {
    let (graph, backward) = model(MIDDLE, 512);
    // Norms of 1,024 elements take a block each, and shards are whole blocks: padding is below a percent.
    let parameters = elements(&graph);
    let per_parameter = |ranks: u64, settings: Settings| {
        let memory = memory(&graph, &backward, ranks, settings);
        memory.states(Tier::Device) as f64 / parameters as f64
    };
    let stage = |stage, accumulation| Settings { stage, accumulation, ..SETTINGS };
    for (ranks, settings, expected) in [
        (1, stage(0, 1), 14.0),
        (1, stage(3, 1), 14.0),
        (1, stage(0, 4), 16.0),
        (2, stage(0, 1), 16.0),
        (2, stage(3, 1), 8.0),
        (5, stage(3, 1), 3.2),
        (8, stage(3, 4), 2.0),
        (64, stage(3, 1), 0.25),
    ] {
        let found = per_parameter(ranks, settings);
        assert!((found / expected - 1.0).abs() < 0.01, "{ranks} ranks, {settings:?}: {found} {expected}");
    }
}

#[test]
fn fp32_keeps_no_master_copy() {
    let (graph, backward) = model(MIDDLE, 512);
    let types = Types { compute: DType::F32, communication: DType::F32 };
    let memory = memory(&graph, &backward, 1, Settings { stage: 0, types, ..SETTINGS });
    let found = memory.states(Tier::Device) as f64 / elements(&graph) as f64;
    assert!((found / 16.0 - 1.0).abs() < 0.005, "4 + 4 + 8 bytes: {found}");
}

#[test]
fn activations_are_what_the_closed_form_counts() {
    // trainers' closed form for a llama block: 2h · 4 + q and o 2qw · 2 + kv 4kvw + gate, up 4f + silu·up 2f + lse 4a.
    // The program keeps besides: q and k before rope and gradients on their way; rstd, 4 bytes a norm.
    let tokens = 512;
    let (graph, backward) = model(MIDDLE, tokens);
    let found = memory(&graph, &backward, 2, SETTINGS).peak(Tier::Device, Category::Activations);
    let [hidden, ffn, heads, kv_heads, head_dim, blocks, _] = MIDDLE;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let block = 8 * hidden + 4 * q + 4 * kv + 6 * ffn + 4 * heads + 8;
    let closed = tokens * block * blocks;
    assert!(found >= closed, "{found} {closed}");
    assert!((found as f64) < 1.1 * closed as f64, "{found} {closed}");
}

#[test]
fn gradients_of_one_micro_batch_lie_where_activations_were() {
    let (graph, backward) = model(MIDDLE, 2048);
    let of = |accumulation| memory(&graph, &backward, 2, Settings { accumulation, ..SETTINGS });
    let (one, several) = (of(1), of(2));
    let gradients = one.peak(Tier::Device, Category::Gradients);
    assert_eq!(gradients, several.peak(Tier::Device, Category::Gradients));
    // Buffers are placed otherwise, and may leave some room between them.
    let (found, expected) = (one.arena(Tier::Device) + gradients, several.arena(Tier::Device));
    assert!(found as f64 <= 1.01 * expected as f64, "{found} {expected}");
    let bytes = one.by_category(Tier::Device);
    let states = bytes.parameters + bytes.gradients + bytes.optimizer;
    assert_eq!(states + bytes.activations + bytes.buffers, bytes.total);
}

#[test]
fn zero_copy_gathers_need_no_memory_beyond_the_shards() {
    let (graph, backward) = model(MIDDLE, 2048);
    let settings = Settings { max_reuse: u64::MAX / 4, ..SETTINGS };
    let of = |gather| memory(&graph, &backward, 2, Settings { gather: Some(gather), ..settings });
    let (copied, seen) = (of(Gather::Copy), of(Gather::View));
    assert_eq!(copied.views.1, 0);
    assert!(seen.views.1 >= 2 * elements(&graph), "every flat is seen whole");
    assert_eq!(copied.states(Tier::Device), seen.states(Tier::Device));
    // Of copies all blocks and the head's are there when the loss is taken.
    let head = 2 * 32_000 * 1024;
    let [copied, seen] = [&copied, &seen].map(|memory| memory.arena(Tier::Device));
    assert!(seen + 2 * head <= copied, "{seen} {copied}");
}

/// The cells of the table: stage, ranks, accumulation.
fn cells() -> Vec<(u8, u64, u64)> {
    let alone = (0..4).map(|stage| (stage, 1, 1));
    let accumulating = (0..4).map(|stage| (stage, 1, 4));
    let company = (0..4).flat_map(|stage| [2, 4, 8, 64].map(|ranks| (stage, ranks, 1)));
    alone.chain(accumulating).chain(company).collect()
}

/// Bytes a parameter of parameters, gradients and optimizer, as the ZeRO paper sums them: 2 for the weights, 8 for AdamW's
/// moments. Of the paper's 4 for a master copy 2 are the weights' own. Gradients are summed in 4; one rank that sums nothing keeps them in the 2 they come in.
fn formula(stage: u8, ranks: u64, accumulation: u64) -> [f64; 3] {
    let share = |from: u8| if stage >= from { ranks as f64 } else { 1.0 };
    let gradient = if ranks == 1 && accumulation == 1 { 2.0 } else { 4.0 };
    [2.0 / share(3), gradient / share(2), 10.0 / share(1)]
}

#[test]
fn every_stage_and_number_of_ranks_follows_zeros_formulas() {
    let (graph, backward) = model(MIDDLE, 512);
    let parameters = elements(&graph) as f64;
    for (stage, ranks, accumulation) in cells() {
        let settings = Settings { stage, accumulation, ..SETTINGS };
        let found = memory(&graph, &backward, ranks, settings).by_category(Tier::Device);
        let expected = formula(stage, ranks, accumulation);
        let found =
            [found.parameters, found.gradients, found.optimizer].map(|bytes| bytes as f64 / parameters);
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.01;
        assert!(
            found.iter().zip(&expected).all(|(found, expected)| near(*found, *expected))
                && near(found.iter().sum(), expected.iter().sum()),
            "stage {stage}, {ranks} ranks, accumulation {accumulation}: {found:?} and not {expected:?}"
        );
    }
}

const SEVENTY_BILLION: [u64; 7] = [8192, 28_672, 64, 8, 128, 80, 128_256];

/// A line of /proc/self/status in bytes.
fn of_this_process(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    1024 * line.trim_start_matches(':').trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
}

/// In a process of its own: memory of concurrent tests would be counted.
#[test]
fn seventy_billion_on_1024_ranks_are_counted_without_a_byte_of_them() {
    const NAME: &str = "memory::seventy_billion_on_1024_ranks_are_counted_without_a_byte_of_them";
    const ALONE: &str = "ZEROTH_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return count_seventy_billion();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    assert!(said.contains("1 passed"), "{said}");
}

fn count_seventy_billion() {
    let before = of_this_process("VmRSS");
    let (graph, backward) = model(SEVENTY_BILLION, 4096);
    let parameters = elements(&graph);
    assert_eq!(parameters, 70_553_706_496);
    let memory = memory(&graph, &backward, 1024, SETTINGS);
    let states = memory.states(Tier::Device) as f64 / parameters as f64;
    assert!((states / (16.0 / 1024.0) - 1.0).abs() < 0.01, "{states}");
    // Two gathered blocks are never there at once without prefetch: the largest flat is the embedding.
    assert!(memory.peak(Tier::Device, Category::Buffers) < 2 * 4 * 128_256 * 8192);
    let most = of_this_process("VmHWM");
    assert!(most < before + 100_000_000, "counting took {} bytes", most - before);
}

/// The page docs/memory.md.
fn memory_page() -> String {
    let row = |stage: u8, ranks: u64, accumulation: u64, parameters: u64, memory: &Memory| {
        let bytes = memory.by_category(Tier::Device);
        let alone = if accumulation > 1 { format!(", {accumulation} micro-batches") } else { String::new() };
        let cells = [
            bytes.parameters,
            bytes.gradients,
            bytes.optimizer,
            memory.states(Tier::Device),
            bytes.activations,
            bytes.buffers,
            bytes.total,
        ];
        format!(
            "| {stage} | {}{alone} | {} | {:.4} | {:.4} |\n",
            grouped(ranks),
            cells.map(format_bytes).join(" | "),
            memory.states(Tier::Device) as f64 / parameters as f64,
            formula(stage, ranks, accumulation).iter().sum::<f64>()
        )
    };
    let head = "| stage | ranks | parameters | gradients | optimizer | states | activations | buffers | total | states a \
                parameter | formula |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n";
    let (graph, backward) = model(MIDDLE, 512);
    let parameters = elements(&graph);
    let mut page = format!(
        "# Memory of a rank\n\n\
         Device memory of one rank, counted from the program before it runs. A test writes this page and fails when it \
         is\nstale. To regenerate it:\n\n    ZEROTH_BLESS=1 cargo test -p zeroth-program --test it memory::\n\n\
         A row is a stage on a number of ranks, in bf16 with AdamW; 1 GB is 10^9 bytes. States are parameters, \
         gradients and\noptimizer state. ZeRO shards them: stage 1 the optimizer state (10 bytes per parameter: moments \
         and the 16 low-order\nbits of the master weight), stage 2 also the gradients (4), stage 3 also the parameters \
         (2). The last two columns are\nbytes of states per parameter, counted and by that formula; they differ by \
         padding to whole blocks. A single rank\nwithout accumulation keeps gradients in 2 bytes: 14 in all, else 16. \
         States in host memory have whole master weights,\n2 bytes more.\n\n\
         Activations are those of one micro-batch at their peak, with padded rows. Buffers are gathered parameters, \
         gradients\nin flight and scratch of kernels, minus what shares memory with others. The total is what a run \
         takes, to the byte.\nPersistence and prefetch are 0, and parameters are gathered by copy (`zeroth.gather: \
         copy`), as on GPUs; CPU ranks\nread each other's shards in place and need none of these buffers. Kernels are \
         those of a CPU with 2 threads.\n\n\
         A llama with {} parameters, micro-batches of 512 tokens:\n\n{head}",
        grouped(parameters)
    );
    for (stage, ranks, accumulation) in cells() {
        let settings = Settings { stage, accumulation, ..SETTINGS };
        let memory = memory(&graph, &backward, ranks, settings);
        page += &row(stage, ranks, accumulation, parameters, &memory);
    }
    let (graph, backward) = model(SEVENTY_BILLION, 4096);
    let parameters = elements(&graph);
    page += &format!(
        "\nA llama with {} parameters, micro-batches of 4,096 tokens:\n\n{head}",
        grouped(parameters)
    );
    page += &row(3, 1024, 1, parameters, &memory(&graph, &backward, 1024, SETTINGS));
    page + &hpz_table()
}

/// What ranks hold with `zero_hpz_partition_size`.
fn hpz_table() -> String {
    let (graph, backward) = model(MIDDLE, 512);
    let parameters = elements(&graph);
    let mut table = "\nWith `zero_hpz_partition_size` parameters are sharded within a group only (2 bytes, by the ranks of a \
                     group) and the\nrest over all ranks. With several micro-batches the sums of a group wait for the last one: 4 \
                     bytes more, by the ranks of\na group, or 2 with `grad_accum_dtype` bf16. The same model at stage 3:\n\n\
                     | ranks | group | micro-batches | parameters | gradients | optimizer | states a parameter | formula |\n\
                     |--:|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for (ranks, group, accumulation) in hpz_cells() {
        let settings = Settings { group: Some(group), hpz: true, accumulation, ..SETTINGS };
        let memory = memory(&graph, &backward, ranks, settings);
        let bytes = memory.by_category(Tier::Device);
        let cells = [bytes.parameters, bytes.gradients, bytes.optimizer].map(format_bytes).join(" | ");
        table += &format!(
            "| {ranks} | {group} | {accumulation} | {cells} | {:.4} | {:.4} |\n",
            memory.states(Tier::Device) as f64 / parameters as f64,
            hpz_formula(ranks, group, accumulation, 4.0).iter().sum::<f64>()
        );
    }
    table
}

/// (ranks, ranks of a group, micro-batches)
fn hpz_cells() -> Vec<(u64, u64, u64)> {
    vec![(4, 2, 1), (4, 2, 4), (16, 8, 1), (16, 8, 4), (64, 8, 1), (64, 8, 4)]
}

/// Bytes a parameter: parameters, gradients, and optimizer state.
fn hpz_formula(ranks: u64, group: u64, accumulation: u64, sums: f64) -> [f64; 3] {
    let (ranks, group) = (ranks as f64, group as f64);
    let waiting = if accumulation > 1 { sums / group } else { 0.0 };
    [2.0 / group, sums / ranks + waiting, 10.0 / ranks]
}

#[test]
fn hpz_takes_the_bytes_of_its_formula() {
    let (graph, backward) = model(MIDDLE, 512);
    let parameters = elements(&graph) as f64;
    for (ranks, group, accumulation) in hpz_cells() {
        for (grad_accum_dtype, sums) in [(DType::F32, 4.0), (DType::Bf16, 2.0)] {
            let settings =
                Settings { group: Some(group), hpz: true, accumulation, grad_accum_dtype, ..SETTINGS };
            let found = memory(&graph, &backward, ranks, settings).by_category(Tier::Device);
            let found =
                [found.parameters, found.gradients, found.optimizer].map(|bytes| bytes as f64 / parameters);
            let expected = hpz_formula(ranks, group, accumulation, sums);
            let near = |(found, expected): (&f64, &f64)| (found / expected - 1.0).abs() < 0.01;
            assert!(found.iter().zip(&expected).all(near), "{settings:?}: {found:?} {expected:?}");
            // The same ranks without: parameters over all of them, and nothing waits.
            let without = memory(&graph, &backward, ranks, Settings { hpz: false, ..settings })
                .by_category(Tier::Device);
            let without = [without.parameters, without.gradients].map(|bytes| bytes as f64 / parameters);
            let expected = [2.0 / ranks as f64, sums / ranks as f64];
            assert!(without.iter().zip(&expected).all(near), "{settings:?}: {without:?} {expected:?}");
        }
    }
}

#[test]
fn docs_memory_md_has_these_figures() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/memory.md");
    let page = memory_page();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/memory.md is stale: ZEROTH_BLESS=1 cargo test -p zeroth-program --test it memory:: writes it anew"
    );
}

#[test]
fn recomputation_stores_less_and_offload_moves_it_to_the_host() {
    let (graph, backward) = model(MIDDLE, 512);
    let peaks = |recompute| {
        let memory = memory(&graph, &backward, 2, Settings { recompute, ..SETTINGS });
        [Tier::Device, Tier::Host].map(|tier| memory.peak(tier, Category::Activations))
    };
    let [all, none] = peaks(Recompute::Nothing);
    assert_eq!(none, 0);
    let [cheap, _] = peaks(Recompute::NormSwiGlu);
    let [attention, _] = peaks(Recompute::Attention);
    let [block, _] = peaks(Recompute::Block { blocks: None, checkpoints: None, offloaded: false });
    assert!(all > cheap && cheap > attention && attention > block, "{all} {cheap} {attention} {block}");
    // Some blocks: between what the finer policy keeps and what is kept of none.
    let [three, five] = [3, 5].map(|blocks| {
        peaks(Recompute::Block { blocks: Some(blocks), checkpoints: None, offloaded: false })[0]
    });
    assert!(cheap > three && three > five && five > block, "{cheap} {three} {five} {block}");
    // A block keeps its input, the sum and the branch of 2 bytes each, and its own values while it is recomputed.
    let [hidden, _, _, _, _, blocks, _] = MIDDLE;
    let entering = 512 * 2 * 2 * hidden * blocks;
    assert!(block > entering && block < entering + all / blocks * 2, "{block} {entering}");
    // Two checkpoints: runs of four blocks, two inputs kept, four blocks' values at a time.
    let [runs, _] = peaks(Recompute::Block { blocks: None, checkpoints: Some(2), offloaded: false });
    assert!(runs > block && runs < all * 2 / 3, "{runs} {block} {all}");
    let [device, host] = peaks(Recompute::Block { blocks: None, checkpoints: None, offloaded: true });
    assert!(device < block, "{device} {block}");
    assert!((entering * 3 / 4..=entering).contains(&host), "{host} {entering}");
}

#[test]
fn steps_of_other_sizes_are_those_that_are_compiled_for_them() {
    // Rows of one slice of the head, and of several: then another op writes the gradient of its weight.
    let sizes: [Vec<u64>; 4] = [vec![64], vec![32, 512], vec![512, 6000], vec![16, 48]];
    let [cpu, cuda]: [&'static dyn Target; 2] = [&CpuTarget { threads: 2 }, &CudaTarget];
    let streamed = |window, gradients| Offload {
        optimizer: Some(1.0),
        update_window: window,
        stream: Some(StateStream { window: window.unwrap_or(0), gradients }),
        ..Offload::NOTHING
    };
    let block = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };
    let mut producers = std::collections::BTreeSet::new();
    for (target, settings) in [
        (cpu, Settings { stage: 0, head_rounds: true, ..SETTINGS }),
        (cpu, Settings { stage: 2, accumulation: 3, head_rounds: true, ..SETTINGS }),
        (cpu, Settings { gather: None, recompute: Recompute::NormSwiGlu, ..SETTINGS }),
        (cuda, Settings { recompute: block, overlap: true, prefetch: 1_000_000, ..SETTINGS }),
        (cuda, Settings { stage: 2, offload: streamed(None, Tier::Device), ..SETTINGS }),
        (cuda, Settings { stage: 2, offload: streamed(Some(3 << 20), Tier::Host), ..SETTINGS }),
    ] {
        let compiled = |rows: &[u64]| {
            let (graph, _) = model([64, 192, 4, 2, 16, 3, 8000], rows[rows.len() - 1]);
            Compiled::for_bytes(graph, 2, &settings, target, rows.to_vec()).unwrap()
        };
        let mut step = compiled(&sizes[3]);
        for rows in &sizes {
            step = step.resized(2, &settings, rows.clone()).unwrap();
            let expected = compiled(rows);
            assert!(step.program == expected.program, "{settings:?} {rows:?}");
            assert_eq!(step.memory, expected.memory, "{settings:?} {rows:?}");
            assert_eq!(step.row_sizes, expected.row_sizes);
            producers.insert(format!("{:?}", step.program.grad_producers));
        }
    }
    assert!(producers.len() > 1, "no size changed who writes a gradient");
}
