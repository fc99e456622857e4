//! `plan` equals the memory of a run to the byte: for every golden model, preset and a few numbers of ranks.

use std::path::{Path, PathBuf};

use zeroth::base::DType;
use zeroth::config::check::check;
use zeroth::config::preset::PRESETS;
use zeroth::config::read::parse;
use zeroth::config::resolve::{Flags, ModelFacts, ResolveRequest, Resolved, resolve};
use zeroth::cpu::CpuTarget;
use zeroth::cuda::CudaTarget;
use zeroth::data::SamplesBuilder;
use zeroth::kernel::{Target, Tier};
use zeroth::machine::DeviceKind;
use zeroth::model::{ModelConfig, named_config, table};
use zeroth::plan::{
    Basis, Placement, PlanDevice, PlanRequest, PlannedRows, Row, Sizing, States, TrainableModel, plan,
};
use zeroth::planning;
use zeroth::program::{Bytes, Compiled, Settings};
use zeroth::train::{BatchShape, Budget, Freedom, Job, ModelFiles, SampleOrder, from_config};

/// Tokens of every row, and rows of a micro-batch.
const ROW: u64 = 37;
const MICRO_BATCH: u64 = 3;
const CPUS: usize = 4;

fn golden_models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.join("config.json").is_file()).collect();
    folders.sort();
    folders
        .extend(["qwen3-moe-normalized", "mixtral-aux-3-layers"].map(|name| folder.join("moe").join(name)));
    assert!(folders.len() >= 8, "{folders:?}");
    folders
}

fn resolved(preset: usize, model: &ModelConfig, ranks: u64, flags: Flags) -> Resolved {
    let file = check(&parse(PRESETS[preset].source()).unwrap()).values;
    let facts = ModelFacts { hidden_size: Some(model.hidden), blocks: Some(model.blocks()) };
    let flags = Flags { per_device_train_batch_size: Some(MICRO_BATCH), ..flags };
    resolve(&ResolveRequest { file: &file, flags: &flags, ranks, model: Some(facts), steps: Some(2) })
        .unwrap()
}

/// The program that a run of this config trains with.
fn trained(folder: &Path, config: &Resolved, ranks: u64, target: &'static dyn Target) -> Compiled {
    let model = ModelConfig::from_folder(folder).unwrap();
    let mut samples = SamplesBuilder::new(u64::MAX);
    let row: Vec<i32> = (0..ROW as i32).collect();
    (0..64).for_each(|_| samples.push(&row, &row));
    let samples = samples.finish().unwrap();
    let top_level = &config.values.top_level;
    let mut job = Job {
        folder: folder.to_owned(),
        files: ModelFiles::read(folder).unwrap(),
        table: table(&model),
        model,
        order: SampleOrder::new(samples.count(), None),
        samples,
        shape: BatchShape {
            micro_batch: top_level.train_micro_batch_size_per_gpu,
            accumulation: top_level.gradient_accumulation_steps,
            ranks,
        },
        steps: 2,
        decoder_start: None,
        row_sizes: Vec::new().into(),
        settings: Settings::from_config(config),
        recipe: from_config::recipe(config, 0),
        schedule: from_config::schedule(config, 2).unwrap(),
        decays_all: false,
        seed: 1,
        data_seed: 1,
        evaluation: None,
        lora: None,
        objective: zeroth::train::JobObjective::CrossEntropy,
        save_dtype: None,
    };
    job.size_rows();
    let (compiled, choices) = job.fit(target, Budget::default(), Freedom::default()).unwrap().unwrap();
    assert!(choices.is_empty(), "{choices:?}");
    compiled
}

fn rows(micro_batch: u64, max_length: u64) -> PlannedRows {
    PlannedRows { micro_batch, max_length, max_target_length: 0, recompute: false }
}

fn planned(folder: &Path, configs: &[(String, Resolved)], ranks: u64, device: PlanDevice) -> Vec<Row> {
    let model = ModelConfig::from_folder(folder).unwrap();
    let table = table(&model);
    let placements: Vec<Placement> =
        configs.iter().map(|(name, config)| planning::placement(name, config).unwrap()).collect();
    let request = PlanRequest {
        states: States::Run,
        accumulation: configs[0].1.values.top_level.gradient_accumulation_steps,
        rows: Some(rows(MICRO_BATCH, ROW)),
        model: Some(TrainableModel::new(model, table.clone(), None, device).unwrap()),
        ..PlanRequest::new(table.total(), ranks)
    };
    plan(&request, &placements).unwrap().rows
}

fn assert_equal(row: &Row, compiled: &Compiled, ranks: u64, what: &str) {
    let [device, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.by_category(tier));
    assert_eq!(row.basis, Basis::Program, "{what}");
    assert_eq!(row.bytes[Tier::Device], device, "{what}");
    assert_eq!(row.bytes[Tier::Device].total, compiled.memory.arena(Tier::Device), "{what}");
    let Bytes { parameters, gradients, optimizer, activations, buffers, total } = row.bytes[Tier::Host];
    let all = [parameters, gradients, optimizer, activations, buffers, total].map(|bytes| bytes / ranks);
    let Bytes { parameters, gradients, optimizer, activations, buffers, .. } = host;
    let arena = compiled.memory.arena(Tier::Host);
    assert_eq!(all, [parameters, gradients, optimizer, activations, buffers, arena], "{what}");
    assert_eq!(row.bytes[Tier::Host].total, ranks * arena, "{what}");
    assert_eq!(row.comm_bytes_per_step, compiled.program.bytes_sent_per_step(), "{what}");
}

#[test]
fn plan_equals_the_arena_for_all_golden_models_presets_and_ranks() {
    for folder in golden_models() {
        let model = ModelConfig::from_folder(&folder).unwrap();
        for (ranks, device) in [1, 2, 5].into_iter().flat_map(|ranks| {
            [
                PlanDevice { kind: DeviceKind::Cpu, cpus: CPUS, threads: None },
                PlanDevice { kind: DeviceKind::Cuda, cpus: 1, threads: None },
            ]
            .map(|device| (ranks, device))
        }) {
            let config = |preset: usize| {
                (PRESETS[preset].name.to_owned(), resolved(preset, &model, ranks, Flags::default()))
            };
            let configs: Vec<(String, Resolved)> = (0..PRESETS.len()).map(config).collect();
            let rows = planned(&folder, &configs, ranks, device);
            for ((name, config), row) in configs.iter().zip(&rows) {
                let compiled = trained(&folder, config, ranks, device.target(ranks));
                let what = format!("{} {name} on {ranks} ranks, {device:?}", folder.display());
                assert_equal(row, &compiled, ranks, &what);
            }
        }
    }
}

#[test]
fn precision_accumulation_and_recomputation_are_planned_as_they_run() {
    let folder = &golden_models()[0];
    let model = ModelConfig::from_folder(folder).unwrap();
    for flags in [
        Flags { precision: Some(DType::F32), ..Flags::default() },
        Flags { precision: Some(DType::F16), ..Flags::default() },
        Flags { gradient_accumulation_steps: Some(3), ..Flags::default() },
        Flags { gradient_checkpointing: Some(true), ..Flags::default() },
    ] {
        for (place, preset) in PRESETS.iter().enumerate() {
            let config = resolved(place, &model, 2, flags.clone());
            let configs = [(preset.name.to_owned(), config)];
            let row =
                planned(folder, &configs, 2, PlanDevice { kind: DeviceKind::Cuda, cpus: 1, threads: None })
                    .remove(0);
            let compiled = trained(folder, &configs[0].1, 2, &CudaTarget);
            assert_equal(&row, &compiled, 2, &format!("{} {flags:?}", preset.name));
        }
    }
}

/// Section 7 of the ZeRO paper: stages 1 and 2 send 2Ψ, stage 3 at most 3Ψ; padding to whole blocks adds little.
#[test]
fn collectives_send_what_the_zero_paper_counts() {
    let model = ModelConfig::from_named(&named_config("Qwen/Qwen3-0.6B").unwrap()).unwrap();
    let (table, ranks) = (table(&model), 4);
    let config =
        |preset: usize| (PRESETS[preset].name.to_owned(), resolved(preset, &model, ranks, Flags::default()));
    let placements: Vec<Placement> = (0..PRESETS.len())
        .map(config)
        .map(|(name, config)| planning::placement(&name, &config).unwrap())
        .collect();
    let request = PlanRequest {
        rows: Some(rows(1, 64)),
        model: Some(
            TrainableModel::new(
                model.clone(),
                table.clone(),
                None,
                PlanDevice { kind: DeviceKind::Cuda, cpus: 1, threads: None },
            )
            .unwrap(),
        ),
        ..PlanRequest::new(table.total(), ranks)
    };
    let rows = plan(&request, &placements).unwrap().rows;
    // 2 bytes for each of Ψ elements, (N - 1) / N of them sent.
    let once = (2 * table.total()) as f64 * 3.0 / 4.0;
    let sent = |preset: &str| {
        let row = rows.iter().find(|row| row.preset == preset).unwrap();
        row.comm_bytes_per_step as f64 / once
    };
    for preset in ["zero1", "zero2", "zero2_offload"] {
        assert!((1.999..2.01).contains(&sent(preset)), "{preset} sends {}Ψ", sent(preset));
    }
    for preset in ["zero3", "zero3_offload"] {
        assert!((2.0..3.01).contains(&sent(preset)), "{preset} sends {}Ψ", sent(preset));
    }
}

/// An auxiliary loss balances the experts of every micro-batch, so memory must not choose another one.
#[test]
fn an_auxiliary_loss_keeps_its_micro_batch() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/moe");
    for (name, is_free) in [("mixtral-no-window", true), ("mixtral-aux-3-layers", false)] {
        let model = ModelConfig::from_folder(&golden.join(name)).unwrap();
        let (table, target) = (table(&model), &CpuTarget { threads: 1 });
        let settings = Settings::from_config(&resolved(0, &model, 1, Flags::default()));
        let shape = BatchShape { micro_batch: 64, accumulation: 1, ranks: 1 };
        let largest = |shape: BatchShape| [shape.micro_batch * ROW, 0];
        let mut sizing = Sizing::new(&model, &table, target, shape, settings, &largest);
        let needed = sizing.compile().unwrap().memory.arena(Tier::Device);
        let budget = Budget::of_device(needed - 1);
        let freedom = Freedom { micro_batch: true, ..Freedom::default() };
        let fitted = sizing.fit(budget, freedom).unwrap();
        assert_eq!(fitted.is_ok(), is_free, "{name}");
        assert_eq!(sizing.shape.micro_batch, if is_free { 32 } else { 64 }, "{name}");
        if let Err(misfit) = fitted {
            let remedy = "gradient_accumulation_steps 64 (balances experts in smaller batches)";
            assert!(misfit.to_string().contains(remedy), "{misfit}");
        }
    }
}
