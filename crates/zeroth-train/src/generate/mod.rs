//! Text generation with a trained model, token by token.
//!
//! The program has two sections. Prefill runs whole prompts and stores the keys (after the rotary embedding) and values
//! of every layer in a cache that the memory plan places. Decode runs one row per sequence: the cost of a token grows
//! with its prefix in attention alone. A cache row is one token of one sequence; a sequence reserves consecutive rows for
//! its prompt and all new tokens.
//!
//! Sequences end at the model's last position. Dynamic rotary scaling, which would change cached keys, starts only
//! beyond it.

mod answers;
mod batch;
mod beams;
mod reuse;
mod sample;
mod slots;
mod stops;

use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};

use zeroth_base::{DType, counted};
use zeroth_engine::{Engine, NewToken, RankSetup, RunError, StreamRows};
use zeroth_kernel::{Device, Recipe, Target};
use zeroth_model::{
    Adapter, AdapterError, BatchTokens, ForwardError, Lora, LoraError, ModelConfig, ModelError, Parameter,
    ParameterTable, WeightFiles, WeightsError, add_adapters, forward, has_weights, table,
};
use zeroth_program::{CompileError, Compiled};

use crate::RowSizes;
use crate::job::base_table;
use crate::weights::sample_of;

pub use self::batch::BatchSize;
pub use self::beams::{BeamSettings, EarlyStopping};
pub use self::stops::{begin_id, stop_ids};

/// Sampling parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// Maximum number of new tokens.
    pub max_new_tokens: u64,
    /// Divisor of the logits; 0 decodes greedily, taking the lowest id among equal logits.
    pub temperature: f64,
    /// Sample only from this many of the largest logits.
    pub top_k: Option<u64>,
    /// Sample only from the smallest set of most likely tokens whose probabilities sum to at least this (nucleus
    /// sampling).
    pub top_p: Option<f64>,
    /// Sample only from tokens that are at least this fraction as likely as the most likely one.
    pub min_p: Option<f64>,
    /// Divides positive logits, and multiplies negative ones, of tokens in the prompt or the text so far; 1 changes
    /// nothing.
    pub repetition_penalty: f64,
    /// Seed; a token's random number depends on the seed, the index of its sequence in the request, and its position.
    pub seed: u64,
    /// Token ids that end the text.
    pub stops: Vec<i32>,
}

/// Generated tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// New tokens, including the one that ended the text.
    pub ids: Vec<i32>,
    /// The reason it ended.
    pub end: End,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// `max_new_tokens` were generated.
    Length,
    /// An end-of-text token was generated.
    Stop(i32),
    /// The model's context is full.
    Positions,
    /// The caller ended it.
    Stopped,
}

/// An error generating text.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum GenerateError {
    #[error("the prompt has no tokens: give at least one")]
    EmptyPrompt,
    #[error(
        "token {place} of the prompt is {id}, outside the model's vocabulary of 0 to {}: does the tokenizer belong to the model?",
        vocab - 1
    )]
    BeyondVocabulary { place: usize, id: i32, vocab: u64 },
    #[error("the prompt has {}, but the model has {}: shorten it", counted(*tokens as u64, "token"), counted(*positions, "position"))]
    PromptTooLong { tokens: usize, positions: u64 },
    #[error("{name} is {value}: it must be {range}")]
    Setting { name: &'static str, value: f64, range: &'static str },
    #[error("{} has no *.safetensors: generating text needs trained weights, such as model/ in a run folder", folder.display())]
    NoWeights { folder: PathBuf },
    #[error(
        "the logits of position {position} are not finite: the weights are not finite, or overflow in {run}"
    )]
    NotFinite { position: usize, run: DType },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("--adapter: {0}")]
    Adapter(#[from] AdapterError),
    #[error("--adapter: {0}")]
    Lora(#[from] LoraError),
    #[error("cannot generate text: {0}")]
    Forward(#[from] ForwardError),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Run(Box<RunError>),
}

impl From<RunError> for GenerateError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

/// A model folder opened for inference, with an adapter beside it or without.
pub struct Inference {
    model: ModelConfig,
    table: ParameterTable,
    weights: WeightFiles,
    adapter: Option<Adapter>,
    /// The dtype of the stored weights.
    stored: DType,
}

impl Inference {
    /// Reads the config and locates the weights.
    pub fn open(folder: &Path) -> Result<Self, GenerateError> {
        Self::open_with(folder, None)
    }

    /// As [`Self::open`], with the PEFT adapter of another folder, whose products are added as the model runs.
    pub fn open_with(folder: &Path, adapter: Option<&Path>) -> Result<Self, GenerateError> {
        let mut model = ModelConfig::from_folder(folder)?;
        // It trains routers, and here nothing is trained.
        model.aux_loss = None;
        let base = table(&model);
        if !has_weights(folder)? {
            return Err(GenerateError::NoWeights { folder: folder.to_owned() });
        }
        let weights = WeightFiles::open(folder, &base)?;
        let first = base.iter().next().map(|parameter| weights.dtype(&parameter.name)).transpose()?;
        let stored = first.unwrap_or(DType::F32);
        let adapter = adapter.map(|folder| Adapter::open(folder, &base)).transpose()?;
        let table = match &adapter {
            // Dropout is for training.
            Some(adapter) => add_adapters(&base, &Lora { dropout: 0.0, ..adapter.lora().clone() })?,
            None => base,
        };
        Ok(Self { model, table, weights, adapter, stored })
    }

    /// The model's config.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The dtype of the stored weights.
    pub fn stored(&self) -> DType {
        self.stored
    }

    /// The hash of the first elements of each tensor, without those of the adapter.
    pub fn sample(&self) -> Result<String, WeightsError> {
        let read = |parameter: &Parameter, range, out: &mut [f32]| {
            self.weights.read_f32(&parameter.name, range, out)
        };
        sample_of(&base_table(&self.table), &read)
    }

    /// Warnings about the weights and the adapter.
    pub fn warnings(&self) -> Vec<String> {
        let of_adapter = self.adapter.iter().flat_map(|adapter| adapter.notes().iter().cloned());
        self.weights.warnings().iter().map(ToString::to_string).chain(of_adapter).collect()
    }

    /// Compiles the inference program for a prompt plus `max_new_tokens`, computing in `run`.
    pub fn compile(
        &self,
        prompt: &[i32],
        max_new_tokens: u64,
        run: DType,
        target: &'static dyn Target,
    ) -> Result<Compiled, GenerateError> {
        self.check(prompt)?;
        let size = ProgramSize {
            prefill: prompt.len() as u64,
            sequences: 1,
            cached: self.cached_tokens(prompt, max_new_tokens),
        };
        self.compile_size(size, run, target)
    }

    /// Maximum tokens of a prompt and its new tokens whose keys and values are cached.
    fn cached_tokens(&self, prompt: &[i32], max_new_tokens: u64) -> u64 {
        let tokens = (prompt.len() as u64).saturating_add(max_new_tokens);
        // The last token is sampled but never fed back.
        let largest = self.model.max_positions.map_or(tokens, |most| tokens.min(most)).max(2) - 1;
        largest.max(prompt.len() as u64)
    }

    fn compile_size(
        &self,
        size: ProgramSize,
        run: DType,
        target: &'static dyn Target,
    ) -> Result<Compiled, GenerateError> {
        // Decode runs one row per sequence.
        let rows = RowSizes::new(size.prefill.max(size.sequences));
        let sizes: Vec<u64> = rows.all().iter().map(|size| *size as u64).collect();
        let graph =
            forward(&self.model, &self.table, BatchTokens::of_tokens(sizes.last().copied().unwrap_or(1)))?;
        Ok(Compiled::inference(graph, run, size.sequences, size.cached, target, sizes)?)
    }

    fn check(&self, prompt: &[i32]) -> Result<(), GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let vocab = self.model.vocab;
        let is_known = |id: &i32| u64::try_from(*id).is_ok_and(|id| id < vocab);
        if let Some(place) = prompt.iter().position(|id| !is_known(id)) {
            return Err(GenerateError::BeyondVocabulary { place, id: prompt[place], vocab });
        }
        match self.model.max_positions {
            Some(positions) if prompt.len() as u64 > positions => {
                Err(GenerateError::PromptTooLong { tokens: prompt.len(), positions })
            }
            _ => Ok(()),
        }
    }

    /// Loads the weights onto a device whose arenas have the program's sizes.
    pub fn start<'c>(
        &'c self,
        compiled: &'c Compiled,
        device: Box<dyn Device>,
    ) -> Result<Generator<'c>, GenerateError> {
        let rank = RankSetup { comm: None, device, recipe: Recipe::default(), decayed: &|_| false, seed: 0 };
        let mut engine = Engine::new(compiled, rank)?;
        let names: Vec<String> = compiled.graph.params.iter().map(|param| param.spec.name.clone()).collect();
        let known = self.table.by_name();
        let found: Vec<&Parameter> =
            names.iter().filter_map(|name| known.get(name.as_str()).copied()).collect();
        engine.load(&mut |param, range, elements| {
            let parameter = found[param.index()];
            match &self.adapter {
                Some(adapter) if parameter.is_adapter() => {
                    adapter.read_f32(&parameter.name, range, elements)?;
                }
                _ => self.weights.read_f32(&parameter.name, range, elements)?,
            }
            Ok(())
        })?;
        Ok(Generator { model: self, engine, compiled, cached: Vec::new() })
    }
}

/// What a program is compiled for.
#[derive(Debug, Clone, Copy)]
struct ProgramSize {
    /// Most tokens of the prompts of one prefill.
    prefill: u64,
    /// Most sequences at a time.
    sequences: u64,
    /// Tokens of all sequences in the cache.
    cached: u64,
}

/// A sequence that is being generated.
struct SequenceState {
    /// Index of its prompt in the request.
    prompt: usize,
    /// Prompt and generated tokens.
    ids: Vec<i32>,
    /// The cache rows it reserves.
    rows: Range<u64>,
    /// How many of its tokens are in the cache: none before its prefill, later all but the newest.
    cached: usize,
    /// Whether the caller has ended it.
    is_stopped: bool,
}

/// A model with its weights on a device.
pub struct Generator<'c> {
    model: &'c Inference,
    engine: Engine<'c>,
    compiled: &'c Compiled,
    /// The tokens whose keys and values the last single sequence left in the first cache rows.
    cached: Vec<i32>,
}

impl Generator<'_> {
    /// The logits of the token after `ids`, which are no more than the prompts that the program was compiled for.
    pub fn logits(&mut self, ids: &[i32]) -> Result<Vec<f32>, GenerateError> {
        self.model.check(ids)?;
        let prompts = Prompts::new(std::iter::once(ids));
        let logits = self.engine.logits(&prompts.batch())?;
        self.check_finite(&logits, std::iter::once(ids.len()))?;
        Ok(logits)
    }

    /// Next-token logits `[sequences, vocab]`: by decode of those whose prefix is cached, which come first, and by prefill
    /// of the others.
    fn next_logits(&mut self, sequences: &mut [SequenceState]) -> Result<Vec<f32>, GenerateError> {
        let new = sequences.partition_point(|sequence| sequence.cached > 0);
        let (decoded, prefilled) = sequences.split_at(new);
        let mut logits = Vec::new();
        if !decoded.is_empty() {
            let token = |sequence: &SequenceState| NewToken {
                id: sequence.ids[sequence.cached],
                position: sequence.cached as u32,
                first_row: sequence.rows.start as u32,
            };
            logits = self.engine.decode(&decoded.iter().map(token).collect::<Vec<_>>())?;
        }
        if !prefilled.is_empty() {
            let prompts = Prompts::new(prefilled.iter().map(|sequence| &sequence.ids[..]));
            let first_rows: Vec<u32> = prefilled.iter().map(|sequence| sequence.rows.start as u32).collect();
            logits.extend(self.engine.prefill(&prompts.batch(), &first_rows)?);
        }
        self.check_finite(&logits, sequences.iter().map(|sequence| sequence.ids.len()))?;
        for sequence in sequences {
            sequence.cached = sequence.ids.len();
        }
        Ok(logits)
    }

    /// `lengths` are the tokens of each sequence.
    fn check_finite(
        &self,
        logits: &[f32],
        mut lengths: impl Iterator<Item = usize>,
    ) -> Result<(), GenerateError> {
        let Some(place) = logits.iter().position(|logit| !logit.is_finite()) else { return Ok(()) };
        let position = lengths.nth(place / self.model.model.vocab as usize).unwrap_or(0);
        Err(GenerateError::NotFinite { position, run: self.compiled.program.types.compute })
    }

    /// Continues a prompt; `each` is called with every new token, and may end the text.
    pub fn generate(
        &mut self,
        prompt: &[i32],
        generation: &Generation,
        each: &mut dyn FnMut(i32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        self.cached.clear();
        self.generate_reusing(prompt, 0, generation, each)
    }

    /// Continues a sequence of the first cache rows until it ends.
    fn continue_sequence(
        &mut self,
        sequence: &mut SequenceState,
        generation: &Generation,
        each: &mut dyn FnMut(i32) -> ControlFlow<()>,
    ) -> Result<End, GenerateError> {
        let positions = self.model.model.max_positions.unwrap_or(u64::MAX);
        for _ in 0..generation.max_new_tokens {
            if sequence.ids.len() as u64 >= positions {
                return Ok(End::Positions);
            }
            let logits = self.next_logits(std::slice::from_mut(sequence))?;
            let id = sample::choose(&logits, generation, sequence.prompt, &sequence.ids);
            sequence.ids.push(id);
            let is_stopped = each(id).is_break();
            if generation.stops.contains(&id) {
                return Ok(End::Stop(id));
            }
            if is_stopped {
                return Ok(End::Stopped);
            }
        }
        Ok(End::Length)
    }
}

/// Whole sequences end to end, as a micro-batch.
struct Prompts {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    starts: Vec<u32>,
}

impl Prompts {
    fn new<'a>(sequences: impl Iterator<Item = &'a [i32]>) -> Self {
        let mut prompts =
            Self { ids: Vec::new(), labels: Vec::new(), positions: Vec::new(), starts: vec![0] };
        for sequence in sequences {
            prompts.ids.extend_from_slice(sequence);
            prompts.positions.extend(0..sequence.len() as i32);
            prompts.starts.push(prompts.ids.len() as u32);
        }
        // Nothing is trained.
        prompts.labels = vec![-100; prompts.ids.len()];
        prompts
    }

    fn batch(&self) -> StreamRows<'_> {
        let Self { ids, labels, positions, starts } = self;
        StreamRows { ids, labels, positions, starts, keys: &[] }
    }
}

impl Generation {
    fn check(&self) -> Result<(), GenerateError> {
        let refuse = |name, value, range| Err(GenerateError::Setting { name, value, range });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse("temperature", self.temperature, "a finite number of at least 0");
        }
        if self.top_k == Some(0) {
            return refuse("top_k", 0.0, "at least 1");
        }
        if let Some(min_p) = self.min_p.filter(|min_p| !(0.0..=1.0).contains(min_p)) {
            return refuse("min_p", min_p, "from 0 to 1");
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return refuse("repetition_penalty", self.repetition_penalty, "a finite number above 0");
        }
        match self.top_p {
            Some(top_p) if !(top_p > 0.0 && top_p <= 1.0) => refuse("top_p", top_p, "above 0 and at most 1"),
            _ => Ok(()),
        }
    }
}
