//! Golden models trained by the engine: ranks are threads, each with its own device and arena.

#![allow(dead_code, reason = "the test of allocations and the example use parts of it")]

pub(crate) mod distill;
pub(crate) mod lora;
mod rows;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::Value;
use zeroth_base::DType;
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, JoinOptions};
use zeroth_cpu::{CpuDevice, CpuTarget};
use zeroth_cuda::CudaTarget;
use zeroth_engine::{Engine, RankSetup, StateKind, StreamRows};
use zeroth_graph::Graph;
use zeroth_graph::reference::{Data, Interpreter};
use zeroth_kernel::{Optimizer, Recipe, Record, Target};
use zeroth_model::{
    BatchTokens, ModelConfig, ParameterTable, TEACHER_PREFIX, WeightFiles, forward_training, table,
};
use zeroth_program::Compiled;
use zeroth_program::{Offload, Recompute, Settings, StreamSizes, Types, World, compile, plan_memory};

use distill::{TeacherSource, Teaching};
use rows::{Packed, PairBatches, Row};

pub(crate) const F32: Types = Types { compute: DType::F32, communication: DType::F32 };
pub(crate) const BF16: Types = Types { compute: DType::Bf16, communication: DType::Bf16 };
pub(crate) const ROOMY: Settings = Settings {
    stage: 3,
    accumulation: 1,
    types: F32,
    persistence: 0,
    reduce_bucket: u64::MAX / 4,
    max_live: u64::MAX / 4,
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
    gather: None,
    head_rounds: true,
    ..Settings::inference(DType::F32)
};

/// Whether all of a large matrix of tests is run, and not only a diagonal.
pub(crate) fn is_full() -> bool {
    std::env::var_os("ZEROTH_FULL").is_some()
}

/// A golden model: its folder, its weights and its rows.
pub(crate) struct Golden {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) config: ModelConfig,
    pub(crate) table: ParameterTable,
    /// Each parameter's elements, in the order of the table.
    pub(crate) weights: Vec<Vec<f32>>,
    pub(crate) rows: Vec<Row>,
    pub(crate) steps: Value,
    /// The parameters that are not trained.
    pub(crate) frozen: Vec<String>,
    /// What it is distilled from.
    pub(crate) teacher: Option<Teaching>,
}

/// How a golden model is trained.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) ranks: u64,
    pub(crate) micro_batch: u64,
    pub(crate) threads: usize,
    pub(crate) settings: Settings,
    pub(crate) steps: usize,
    /// The seed of the chaos executor.
    pub(crate) chaos: Option<u64>,
    /// The number of row sizes that micro-batches are padded to.
    pub(crate) sizes: u64,
    /// The recipe of fp16: loss scale, and steps that may be skipped.
    pub(crate) scaling: Option<Recipe>,
    /// Ranks reduce by all-to-all and sum, as GPUs do, instead of reading each other's memory.
    pub(crate) exchanges: bool,
    /// It runs on the first GPU instead of the CPU.
    pub(crate) cuda: bool,
}

impl Default for Setup {
    fn default() -> Self {
        let (chaos, scaling) = (None, None);
        let (sizes, exchanges) = (1, false);
        Self {
            ranks: 1,
            micro_batch: 1,
            threads: 1,
            settings: ROOMY,
            steps: 20,
            chaos,
            sizes,
            scaling,
            exchanges,
            cuda: false,
        }
    }
}

impl Setup {
    /// The mesh that it trains on.
    pub(crate) fn world(&self) -> World {
        self.settings.world(self.ranks)
    }
}

/// The outcome of a training: records by step, gradients of step 1 and final weights, each in table order.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) records: Vec<Record>,
    /// The parts of the loss of each step.
    pub(crate) losses: Vec<Vec<f64>>,
    pub(crate) gradients: Vec<Vec<f32>>,
    pub(crate) weights: Vec<Vec<f32>>,
}

pub(crate) fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

pub(crate) fn goldens() -> Vec<Golden> {
    goldens_in(&golden_folder(), 8)
}

/// Models with a mixture of experts.
pub(crate) fn moe_goldens() -> Vec<Golden> {
    goldens_in(&golden_folder().join("moe"), 8)
}

/// Encoder-decoders.
pub(crate) fn t5_goldens() -> Vec<Golden> {
    goldens_in(&golden_folder().join("t5"), 5)
}

fn goldens_in(folder: &Path, least: usize) -> Vec<Golden> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("steps.json").is_file())
        .collect();
    folders.sort();
    assert!(folders.len() >= least, "{folders:?}");
    folders.iter().map(|folder| Golden::read(folder)).collect()
}

/// Deterministic numbers around 0.
fn numbers(count: u64, salt: usize) -> Vec<f32> {
    (0..count).map(|i| ((i as f64 * 29.0 + salt as f64 * 71.0 + 5.0) * 0.811).sin() as f32 * 0.5).collect()
}

impl Golden {
    /// An engine on a single CPU rank, loaded with the golden weights.
    pub(crate) fn single_rank_engine<'c>(&self, compiled: &'c Compiled) -> Engine<'c> {
        let arenas = compiled.memory.arenas();
        let rank = RankSetup {
            comm: None,
            device: Box::new(CpuDevice::new(2, arenas).unwrap()),
            recipe: Recipe::default(),
            decayed: &|_| true,
            seed: 1,
        };
        let mut engine = Engine::new(compiled, rank).unwrap();
        let names: Vec<&str> = compiled.graph.params.iter().map(|param| param.spec.name.as_str()).collect();
        engine
            .load(&mut |param, range, elements| {
                let place = self.table.iter().position(|known| known.name == names[param.index()]).unwrap();
                elements.copy_from_slice(&self.weights[place][range.start as usize..range.end as usize]);
                Ok(())
            })
            .unwrap();
        engine
    }

    /// A model of this config.json with made-up weights and 30 short rows, and no golden numbers.
    pub(crate) fn synthetic(config: &Value) -> Self {
        let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
        let table = table(&config);
        let weights =
            table.iter().enumerate().map(|(salt, parameter)| numbers(parameter.elements(), salt)).collect();
        let token = |at: usize| (at * 7 + 3) as i32 % config.vocab as i32;
        let row = |at: usize| Row {
            source: None,
            ids: (0..2 + at % 4).map(|i| token(at * 5 + i)).collect(),
            labels: (0..2 + at % 4).map(|i| if i == 1 { -100 } else { token(at + 2 * i) }).collect(),
        };
        let recipe = serde_json::json!({
            "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0,
            "undecayed": ["model.norm.weight"],
        });
        let steps = serde_json::json!({ "recipe": recipe, "runs": [] });
        let (name, folder) = ("synthetic".to_owned(), PathBuf::new());
        let rows = (0..30).map(row).collect();
        Self { name, folder, weights, rows, steps, frozen: Vec::new(), config, table, teacher: None }
    }

    /// Makes these rows start with a token whose embedding is NaN; no other row has it.
    pub(crate) fn poison(&mut self, places: &[usize]) {
        let (width, last) = (self.config.hidden as usize, self.config.vocab as usize - 1);
        for row in &mut self.rows {
            for id in row.ids.iter_mut().filter(|id| **id == last as i32) {
                *id = 0;
            }
        }
        for place in places {
            self.rows[*place].ids[0] = last as i32;
        }
        let embedding = self.table.iter().position(|parameter| parameter.name.contains("embed")).unwrap();
        self.weights[embedding][last * width..(last + 1) * width].fill(f32::NAN);
    }

    pub(crate) fn named(name: &str) -> Self {
        Self::read(&golden_folder().join(name))
    }

    fn read(folder: &Path) -> Self {
        let steps = std::fs::read_to_string(folder.join("steps.json")).unwrap();
        let rows = std::fs::read_to_string(folder.join("data.jsonl")).unwrap();
        Self::of(folder, &rows, serde_json::from_str(&steps).unwrap())
    }

    /// The model of a folder, with rows and numbers from elsewhere.
    fn of(folder: &Path, rows: &str, steps: Value) -> Self {
        let config = ModelConfig::from_folder(folder).unwrap();
        let table = table(&config);
        let files = WeightFiles::open(folder, &table).unwrap();
        let weights = table.iter().map(|parameter| {
            let mut elements = vec![0f32; parameter.elements() as usize];
            files.read_f32(&parameter.name, 0..parameter.elements(), &mut elements).unwrap();
            elements
        });
        let frozen = steps["frozen"].as_array().into_iter().flatten();
        Self {
            name: folder.file_name().unwrap().to_string_lossy().into_owned(),
            folder: folder.to_owned(),
            weights: weights.collect(),
            rows: rows.lines().map(|line| Row::read(line, &config)).collect(),
            frozen: frozen.map(|name| name.as_str().unwrap().to_owned()).collect(),
            steps,
            config,
            table,
            teacher: None,
        }
    }

    /// The golden run with `batch` samples per step and the cosine schedule.
    pub(crate) fn run(&self, batch: u64) -> &Value {
        let runs = self.steps["runs"].as_array().unwrap();
        let is = |run: &&Value| run["batch"] == batch && run["name"].as_str().unwrap().ends_with("cosine");
        runs.iter().find(is).unwrap()
    }

    pub(crate) fn recipe(&self) -> Recipe {
        let of = |key: &str| self.steps["recipe"][key].as_f64().unwrap();
        Recipe {
            beta1: of("adam_beta1"),
            beta2: of("adam_beta2"),
            eps: of("adam_epsilon"),
            weight_decay: [of("weight_decay"), 0.0],
            max_norm: of("max_grad_norm"),
            ..Recipe::default()
        }
    }

    /// The mean loss of the first `count` rows and its gradients, each in the order of the table, by the reference machine;
    /// parameters are rounded to `dtype` before.
    pub(crate) fn reference(&self, count: u64, dtype: DType) -> (f64, Vec<Vec<f64>>) {
        let data = |packed: &Packed| Data {
            ids: packed.ids.iter().map(|id| *id as usize).collect(),
            labels: packed.labels.iter().map(|label| i64::from(*label)).collect(),
            positions: packed.positions.iter().map(|position| *position as usize).collect(),
            starts: packed.starts[..count as usize].iter().map(|start| *start as usize).collect(),
        };
        let data: Vec<Data> = self.streams(0, count).iter().map(data).collect();
        let graph = self.graph_of(&data.iter().map(|data| data.ids.len() as u64).collect::<Vec<_>>());
        let place = |name: &str| self.table.iter().position(|parameter| parameter.name == name).unwrap();
        let rounded = |weight: &f32| match dtype {
            DType::Bf16 => half::bf16::from_f32(*weight).to_f64(),
            DType::F16 => half::f16::from_f32(*weight).to_f64(),
            DType::F32 => f64::from(*weight),
        };
        let places: Vec<usize> = graph.params.iter().map(|param| place(&param.spec.name)).collect();
        let weights = places.iter().map(|place| self.weights[*place].iter().map(rounded).collect());
        let mut machine = Interpreter::new(&graph, &data, weights.collect());
        let loss = machine.train(&graph.backward().unwrap());
        let labels = data.last().unwrap().labels.iter();
        let trained = labels.filter(|label| **label >= 0).count() as f64;
        let mut gradients = vec![Vec::new(); self.weights.len()];
        let trained_params = graph.units.iter().flat_map(|unit| &unit.params);
        for param in trained_params.filter(|param| graph.param(**param).spec.trainable) {
            gradients[places[param.index()]] =
                machine.gradient(*param).iter().map(|gradient| gradient / trained).collect();
        }
        (loss / trained, gradients)
    }

    /// The graph of micro-batches with so many tokens of the only stream.
    pub(crate) fn graph(&self, tokens: u64) -> Graph {
        self.graph_of(&[tokens])
    }

    /// The graph of micro-batches with so many tokens of each stream.
    fn graph_of(&self, tokens: &[u64]) -> Graph {
        if let Some(teaching) = &self.teacher {
            return teaching.graph(self, tokens[0]);
        }
        let batch = match *tokens {
            [tokens] => BatchTokens::of_tokens(tokens),
            [source, target] => BatchTokens::of_pairs(source, target),
            _ => panic!("a model has one stream or two"),
        };
        let is_trained = |parameter: &zeroth_model::Parameter| !self.is_frozen(&parameter.name);
        forward_training(&self.config, &self.table, batch, is_trained).unwrap()
    }

    pub(crate) fn is_frozen(&self, name: &str) -> bool {
        self.frozen.iter().any(|frozen| frozen == name)
    }

    /// Compiles a program for the largest micro-batch there can be.
    pub(crate) fn compile(&self, setup: &Setup) -> Compiled {
        let longest = |of: &dyn Fn(&Row) -> Option<usize>| self.rows.iter().filter_map(of).max();
        let source = longest(&|row| row.source.as_ref().map(Vec::len));
        let target = longest(&|row| Some(row.ids.len()));
        let most: Vec<u64> =
            source.into_iter().chain(target).map(|longest| longest as u64 * setup.micro_batch).collect();
        let of_size = |size| most.iter().map(|most| most * size / setup.sizes).collect();
        let sizes = StreamSizes::of_streams((1..=setup.sizes).map(of_size).collect());
        let guard = if setup.chaos.is_some() { 256 } else { 0 };
        let target: &'static dyn Target = if setup.cuda { &CudaTarget } else { CpuTarget::of(setup.threads) };
        let graph = self.graph_of(&most);
        if setup.exchanges {
            let backward = graph.backward().unwrap();
            let program = compile(&graph, &backward, setup.world(), &setup.settings).unwrap();
            let row_sizes = sizes;
            let memory = plan_memory(&program, &graph, &backward, target, &row_sizes);
            return Compiled {
                graph,
                backward,
                program,
                memory,
                row_sizes,
                decode_sizes: Vec::new().into(),
                target,
            };
        }
        Compiled::guarded(graph, setup.world(), &setup.settings, target, sizes, guard).unwrap()
    }

    /// Trains with ranks as threads.
    pub(crate) fn train(&self, setup: &Setup) -> Outcome {
        let compiled = self.compile(setup);
        compiled.program.check(setup.settings.max_live).unwrap();
        let weights: Vec<_> = self.weights.iter().map(|weight| vec![f32::NAN; weight.len()]).collect();
        let mut gradients = weights.clone();
        for (parameter, gradient) in self.table.iter().zip(&mut gradients) {
            // A frozen parameter has no gradient.
            if self.is_frozen(&parameter.name) {
                gradient.clear();
            }
        }
        let (records, losses) = (Vec::new(), Vec::new());
        let outcome = Mutex::new(Outcome { records, losses, gradients, weights });
        on_ranks(setup.world(), &|comm| self.rank(setup, &compiled, comm, &outcome));
        outcome.into_inner().unwrap()
    }

    /// An engine with this model's weights.
    pub(crate) fn engine<'c>(
        &self,
        compiled: &'c Compiled,
        threads: usize,
        comm: Option<Box<dyn Comm>>,
    ) -> Engine<'c> {
        self.engine_with(compiled, threads, comm, None)
    }

    fn engine_with<'c>(
        &self,
        compiled: &'c Compiled,
        threads: usize,
        comm: Option<Box<dyn Comm>>,
        scaling: Option<Recipe>,
    ) -> Engine<'c> {
        let undecayed = self.steps["recipe"]["undecayed"].as_array();
        let name = |param: zeroth_graph::ParamId| &compiled.graph.param(param).spec.name;
        let decayed =
            |param| !undecayed.into_iter().flatten().any(|other| other.as_str() == Some(name(param)));
        let arenas = compiled.memory.arenas();
        let target: &dyn Target =
            if compiled.target.is_host() { &CpuTarget { threads } } else { &CudaTarget };
        let device = target.open(0, arenas).unwrap();
        let rank = RankSetup {
            comm,
            device,
            recipe: scaling.unwrap_or_else(|| self.recipe()),
            decayed: &decayed,
            seed: 7,
        };
        let mut engine = Engine::new(compiled, rank).unwrap();
        engine
            .load(&mut |param, range, elements| {
                let weight = self.weights_of(&compiled.graph.param(param).spec.name);
                elements.copy_from_slice(&weight[range.start as usize..range.end as usize]);
                Ok(())
            })
            .unwrap();
        engine
    }

    /// The weights of a parameter of the graph, its teacher's included.
    fn weights_of(&self, name: &str) -> &[f32] {
        let place = |golden: &Self, name: &str| golden.table.iter().position(|known| known.name == name);
        match (name.strip_prefix(TEACHER_PREFIX), self.teacher.as_ref().and_then(Teaching::model)) {
            (Some(name), Some(teacher)) => &teacher.weights[place(teacher, name).unwrap()],
            _ => &self.weights[place(self, name).unwrap()],
        }
    }

    /// For each parameter of the graph its place in the table; a teacher's have none.
    fn places(&self, compiled: &Compiled) -> Vec<Option<usize>> {
        let place = |name: &str| self.table.iter().position(|parameter| parameter.name == name);
        compiled.graph.params.iter().map(|param| place(&param.spec.name)).collect()
    }

    fn rank(
        &self,
        setup: &Setup,
        compiled: &Compiled,
        comm: Option<Box<dyn Comm>>,
        outcome: &Mutex<Outcome>,
    ) {
        let mut engine = self.engine_with(compiled, setup.threads, comm, setup.scaling);
        if let Some(seed) = setup.chaos {
            engine.enable_chaos(seed + engine.rank());
        }
        let batch = setup.ranks * setup.settings.accumulation * setup.micro_batch;
        let rates: Vec<f64> = match self.steps["runs"].as_array() {
            Some(runs) if runs.is_empty() => vec![1e-2; setup.steps],
            _ => {
                self.run(batch)["lr"].as_array().unwrap().iter().map(|rate| rate.as_f64().unwrap()).collect()
            }
        };
        let places = self.places(compiled);
        let mut applied = 0;
        for step in 0..setup.steps as u64 {
            let micro = |micro: u64| {
                let place = (step * setup.settings.accumulation + micro) * setup.ranks + engine.rank();
                self.streams(place * setup.micro_batch, setup.micro_batch)
            };
            let packed: Vec<Vec<Packed>> = (0..setup.settings.accumulation).map(micro).collect();
            let targets = packed.iter().map(|streams| streams.last().unwrap());
            let batches: Vec<StreamRows<'_>> = targets.clone().map(Packed::view).collect();
            let whole = self.packed(step * batch, batch);
            let trained = whole.labels.iter().filter(|label| **label >= 0).count() as u64;
            let first = step.min(rates.len() as u64 - 1) as usize;
            if let Some(Teaching { source: TeacherSource::Cache(cache), .. }) = &self.teacher {
                let rows = targets.map(|packed| packed.keys.as_slice());
                let mut cached = cache.batches(&batches, rows);
                engine.step_from(&mut cached, trained, applied, &rates[first..]).unwrap();
            } else if packed[0].len() == 1 {
                engine.step(&batches, trained, applied, &rates[first..]).unwrap();
            } else {
                let mut pairs = PairBatches(packed.iter());
                engine.step_from(&mut pairs, trained, applied, &rates[first..]).unwrap();
            }
            let record = engine.record().unwrap();
            applied = record.head.applied;
            if engine.rank() == 0 {
                let mut outcome = outcome.lock().unwrap();
                outcome.records.push(record.head);
                outcome.losses.push(record.losses);
            }
            if step == 0 {
                collect(&mut engine, StateKind::Gradient, &places, &|| outcome, &|outcome| {
                    &mut outcome.gradients
                });
            }
        }
        collect(&mut engine, StateKind::Weights, &places, &|| outcome, &|outcome| &mut outcome.weights);
    }
}

/// Runs ranks as threads.
pub(crate) fn on_ranks(world: World, run: &(dyn Fn(Option<Box<dyn Comm>>) + Sync)) {
    if world.ranks == 1 {
        return run(None);
    }
    let job = LocalJob::create(world.ranks as usize, 1 << 16).unwrap();
    let options = JoinOptions::default().group(world.group as usize);
    std::thread::scope(|scope| {
        for rank in 0..world.ranks as usize {
            let comm = job.join(rank, &options).unwrap();
            scope.spawn(move || run(Some(comm)));
        }
    });
}

/// A tensor of a safetensors file: a header of JSON with the byte ranges of f32 data.
pub(crate) fn tensor(file: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let table: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = |place: usize| 8 + header + table[name]["data_offsets"][place].as_u64().unwrap() as usize;
    bytes[at(0)..at(1)].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn collect<'o>(
    engine: &mut Engine<'_>,
    state: StateKind,
    places: &[Option<usize>],
    outcome: &dyn Fn() -> &'o Mutex<Outcome>,
    of: &dyn Fn(&mut Outcome) -> &mut Vec<Vec<f32>>,
) {
    engine
        .read(state, &mut |param, range, elements| {
            let Some(place) = places[param.index()] else { return Ok(()) };
            let mut outcome = outcome().lock().unwrap();
            let into = &mut of(&mut outcome)[place];
            into[range.start as usize..range.end as usize].copy_from_slice(elements);
            Ok(())
        })
        .unwrap();
}
