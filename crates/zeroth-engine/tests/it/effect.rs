//! What a key of the config does to a program, in figures: a config's text becomes a program of an 8-layer model, and
//! figures are read off it.

mod page;

use serde_json::{Value, json};
use zeroth_base::Axis;
use zeroth_config::check::check;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, Resolved, resolve};
use zeroth_config::unsupported::unsupported_keys;
use zeroth_cpu::CpuTarget;
use zeroth_graph::{Backward, Graph};
use zeroth_kernel::{Queue, Tier};
use zeroth_model::{BatchTokens, ModelConfig, forward, table};
use zeroth_program::{
    Action, BufferId, Category, Chunk, Gather, GatherStats, Memory, Program, Settings, compile, plan_memory,
};

pub(crate) use page::{keys_page, memory_table, offloaded};

pub(crate) const BLOCKS: u64 = 8;
/// Elements of the embedding.
pub(crate) const EMBEDDING: u64 = 32_000 * 1024;
/// Elements of a block: q and o, k and v, three maps of the feed-forward part, two norms.
pub(crate) const BLOCK: u64 = 1024 * (2 * 1024 + 2 * 256 + 3 * 2816 + 2);
/// Elements of the head and its norm.
pub(crate) const HEAD: u64 = EMBEDDING + 1024;
pub(crate) const TOKENS: u64 = 512;

/// One key with settings to compare, everything else equal.
pub(crate) struct Key {
    /// Its path.
    pub(crate) path: &'static str,
    /// What the figures show, in one sentence.
    pub(crate) shows: &'static str,
    pub(crate) ranks: u64,
    /// The config without the key, as JSON.
    pub(crate) base: &'static str,
    /// The settings, as JSON.
    pub(crate) settings: &'static [&'static str],
    pub(crate) figures: &'static [Figure],
    /// Where order is the effect: the action whose first instructions the page lists.
    pub(crate) timeline: Option<&'static str>,
}

/// A number read off a program.
#[derive(Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) is_bytes: bool,
    pub(crate) of: fn(&Compiled) -> u64,
}

const fn count(name: &'static str, of: fn(&Compiled) -> u64) -> Figure {
    Figure { name, is_bytes: false, of }
}

const fn size(name: &'static str, of: fn(&Compiled) -> u64) -> Figure {
    Figure { name, is_bytes: true, of }
}

pub(crate) const MOST_LIVE: Figure = count("most elements gathered", |c| c.residency.most_live);
pub(crate) const GATHERS: Figure = count("gathers a micro-batch", |c| c.residency.gathers as u64);
pub(crate) const GATHERED: Figure = count("elements gathered in a step", |c| {
    c.sum(|action| match action {
        Action::AllGather(flat, _) => c.program.layout.flats[*flat].elements(),
        _ => 0,
    })
});
pub(crate) const PERSISTENT: Figure =
    count("elements that stay gathered", |c| c.program.layout.persistent_elements());
pub(crate) const AHEAD: Figure =
    count("instructions from a gather to its first reader, at most", Compiled::ahead);
pub(crate) const BESIDE: Figure = count("collectives on a queue of their own", |c| {
    c.step().filter(|i| i.action.is_collective() && i.queue == Queue::Comm).count() as u64
});
pub(crate) const COLLECTIVES: Figure =
    count("collectives a step", |c| c.step().filter(|i| i.action.is_collective()).count() as u64);
pub(crate) const EXCHANGES: Figure = count("all-to-alls per step", |c| c.named("all_to_all"));
pub(crate) const LARGEST_EXCHANGE: Figure =
    count("elements of the largest exchange", Compiled::largest_exchange);
pub(crate) const SENT: Figure =
    size("largest message a rank sends", |c| c.largest_exchange() * c.program.types.communication.bytes());
pub(crate) const RECEIVED: Figure =
    size("largest message a rank receives", |c| c.widest(|id| matches!(id, BufferId::RecvChunk(_))));
pub(crate) const WEIGHT_GATHERS: Figure =
    count("all-gathers after the update", |c| c.named("all_gather_weights"));
pub(crate) const LARGEST_WEIGHT_GATHER: Figure = count("elements of the largest of them", |c| {
    c.largest(|action| match action {
        Action::AllGatherWeights(chunk, _) => Some(chunk),
        _ => None,
    })
});
pub(crate) const BROADCASTS: Figure = count("broadcasts after the update", |c| c.named("broadcast_weights"));
pub(crate) const IN_GROUPS: Figure =
    size("sent within groups a step", |c| c.program.bytes_sent_per_step_along(Axis::Group));
pub(crate) const BETWEEN_GROUPS: Figure =
    size("sent between groups a step", |c| c.program.bytes_sent_per_step_along(Axis::Rail));
pub(crate) const UPDATES: Figure = count("updates a step", |c| c.named("update"));
pub(crate) const UPLOADS: Figure = count("copies to the device a step", |c| c.named("upload_shard"));
pub(crate) const STAGES: Figure = count("copies to staging a step", |c| c.named("stage_shard"));
pub(crate) const RECOMPUTES: Figure = count("operations recomputed", |c| c.named("recompute"));
pub(crate) const OFFLOADS: Figure =
    count("activations offloaded per step", |c| c.named("offload_activation"));
pub(crate) const STAGING: Figure = size("host: staging", |c| c.memory.peak(Tier::Host, Category::Buffers));
pub(crate) const PARAMETERS: Figure =
    size("device: parameters", |c| c.memory.peak(Tier::Device, Category::Parameters));
pub(crate) const HOST_PARAMETERS: Figure =
    size("host: parameters", |c| c.memory.peak(Tier::Host, Category::Parameters));
pub(crate) const GRADIENTS: Figure =
    size("device: gradients", |c| c.memory.peak(Tier::Device, Category::Gradients));
pub(crate) const OPTIMIZER: Figure =
    size("device: optimizer", |c| c.memory.peak(Tier::Device, Category::Optimizer));
pub(crate) const HOST_OPTIMIZER: Figure =
    size("host: optimizer", |c| c.memory.peak(Tier::Host, Category::Optimizer));
pub(crate) const ACTIVATIONS: Figure =
    size("device: activations", |c| c.memory.peak(Tier::Device, Category::Activations));
pub(crate) const HOST_ACTIVATIONS: Figure =
    size("host: activations", |c| c.memory.peak(Tier::Host, Category::Activations));
pub(crate) const BUFFERS: Figure =
    size("device: buffers at their peak", |c| c.memory.peak(Tier::Device, Category::Buffers));
pub(crate) const DEVICE: Figure = size("device: in all", |c| c.memory.arena(Tier::Device));

/// A program and what it needs.
pub(crate) struct Compiled {
    pub(crate) program: Program,
    pub(crate) memory: Memory,
    pub(crate) residency: GatherStats,
}

fn model() -> (Graph, Backward) {
    let config = json!({
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": BLOCKS, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 32_000,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), BatchTokens::of_tokens(TOKENS)).unwrap();
    let backward = graph.backward().unwrap();
    (graph, backward)
}

pub(crate) fn resolved(text: &str, ranks: u64) -> Resolved {
    let document =
        parse(ConfigSource::from_text("ds.json", text)).unwrap_or_else(|error| panic!("{text}\n{error}"));
    let report = check(&document);
    assert!(report.is_ok(false), "{text}: {:?}", report.verdicts);
    let request = ResolveRequest {
        file: &report.values,
        flags: &Flags::default(),
        ranks,
        model: Some(ModelFacts { hidden_size: Some(1024), blocks: Some(BLOCKS) }),
        steps: Some(100),
    };
    let config = resolve(&request).unwrap_or_else(|error| panic!("{text}\n{error}"));
    assert!(unsupported_keys(&config).refused.is_empty(), "{text}: {:?}", unsupported_keys(&config));
    config
}

impl Compiled {
    /// The program of a config's text.
    pub(crate) fn new(text: &str, ranks: u64) -> Self {
        // Parameters are gathered by copy, so that the keys of stage 3 show. And the head's gradient lands in f32, whatever the
        // rows are.
        let asked = Settings::from_config(&resolved(text, ranks));
        let settings = Settings { gather: Some(Gather::Copy), head_rounds: false, ..asked };
        let (graph, backward) = model();
        let program = compile(&graph, &backward, settings.world(ranks), &settings).unwrap();
        let memory =
            plan_memory(&program, &graph, &backward, &CpuTarget { threads: 2 }, &vec![TOKENS].into());
        let residency = program.check(settings.max_live).unwrap();
        Self { program, memory, residency }
    }

    pub(crate) fn get(&self, figure: Figure) -> u64 {
        (figure.of)(self)
    }

    /// The instructions of one step.
    fn step(&self) -> impl Iterator<Item = &zeroth_program::Instruction> {
        self.program.in_order().flat_map(|section| &self.program.sections[section].instructions)
    }

    fn sum(&self, of: impl Fn(&Action) -> u64) -> u64 {
        self.step().map(|instruction| of(&instruction.action)).sum()
    }

    fn named(&self, name: &str) -> u64 {
        self.sum(|action| u64::from(action.name() == name))
    }

    /// Elements of the largest chunk that a collective moves, of all ranks together.
    fn largest(&self, chunk: impl Fn(&Action) -> Option<&Chunk>) -> u64 {
        let chunks = self.step().filter_map(|instruction| chunk(&instruction.action));
        let elements = chunks.map(|chunk| chunk.range.end - chunk.range.start);
        elements.max().unwrap_or(0) * self.program.layout.ranks()
    }

    fn largest_exchange(&self) -> u64 {
        self.largest(|action| match action {
            Action::AllToAll(chunk, _) => Some(chunk),
            _ => None,
        })
    }

    /// Bytes of the largest buffer of a kind.
    fn widest(&self, is: impl Fn(&BufferId) -> bool) -> u64 {
        let buffers = self.memory.sections.iter().flat_map(|section| &section.buffers);
        let of_kind = buffers.filter(|placed| is(&placed.buffer.id));
        of_kind.map(|placed| placed.buffer.bytes).max().unwrap_or(0)
    }

    /// How many instructions stand between a gather and the first that reads its flat, the most of a micro-batch.
    fn ahead(&self) -> u64 {
        let instructions = &self.program.micro_batches().next().unwrap().instructions;
        let distance = |(at, instruction): (usize, &zeroth_program::Instruction)| match instruction.action {
            Action::AllGather(flat, _) => {
                instructions[at..].iter().position(|reader| reader.reads.contains(&flat))
            }
            _ => None,
        };
        instructions.iter().enumerate().filter_map(distance).max().unwrap_or(0) as u64
    }
}

impl Key {
    /// The config with one of the settings.
    pub(crate) fn config(&self, setting: &str) -> String {
        let mut config: Value = serde_json::from_str(self.base).unwrap();
        let pointed = self.path.split('.').fold(&mut config, |section, name| &mut section[name]);
        *pointed = serde_json::from_str(setting).unwrap();
        config.to_string()
    }

    /// The programs of its settings.
    pub(crate) fn compiled(&self) -> Vec<Compiled> {
        self.settings.iter().map(|setting| Compiled::new(&self.config(setting), self.ranks)).collect()
    }
}
