//! Text generation with a trained model, token by token.
//!
//! There is no KV cache: every token recomputes the whole prefix with a program compiled for inference, its row count
//! rounded up to one of a few sizes. A text of n tokens costs about n²/2 rows. It is meant for inspecting a trained
//! model, not for serving.

mod batch;
mod sample;
mod stops;

use std::path::{Path, PathBuf};

use zeroth_base::{DType, counted};
use zeroth_engine::{Engine, MicroBatch, Rank, RunError};
use zeroth_kernel::{Device, Recipe};
use zeroth_model::{
    Batch, ForwardError, ModelConfig, ModelError, ParameterTable, WeightsError, forward, table,
};
use zeroth_program::Target;
use zeroth_program::{CompileError, Compiled};

use crate::{InitialWeights, RowSizes};

pub use self::batch::BatchSize;
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
    /// Seed; a token's random number depends only on the seed and its position.
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
}

/// An error generating text.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The prompt is empty.
    #[error("the prompt has no tokens: give at least one")]
    EmptyPrompt,
    /// A token outside the vocabulary.
    #[error(
        "token {place} of the prompt is {id}, outside the model's vocabulary of 0 to {}: does the tokenizer belong to the model?",
        vocab - 1
    )]
    BeyondVocabulary {
        /// Its index in the prompt.
        place: usize,
        /// The token.
        id: i32,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// The prompt exceeds the model's context.
    #[error("the prompt has {}, but the model has {}: shorten it", counted(*tokens as u64, "token"), counted(*positions, "position"))]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of the model.
        positions: u64,
    },
    /// A parameter out of range.
    #[error("{name} is {value}: it must be {range}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The accepted range.
        range: &'static str,
    },
    /// The model folder has no weights.
    #[error("{} has no *.safetensors: generating text needs trained weights, such as model/ in a run folder", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// Non-finite logits.
    #[error(
        "the logits of position {position} are not finite: the weights are not finite, or overflow in {run}"
    )]
    NotFinite {
        /// Number of tokens before it.
        position: usize,
        /// The compute dtype.
        run: DType,
    },
    /// The model could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Weights could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model uses ops that are not implemented.
    #[error("cannot generate text: {0}")]
    Forward(#[from] ForwardError),
    /// Compilation failed.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Execution failed.
    #[error(transparent)]
    Run(Box<RunError>),
}

impl From<RunError> for GenerateError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

/// A model folder opened for inference.
pub struct Inference {
    model: ModelConfig,
    table: ParameterTable,
    weights: InitialWeights,
    /// The dtype of the stored weights.
    stored: DType,
}

impl Inference {
    /// Reads the config and locates the weights.
    pub fn open(folder: &Path) -> Result<Self, GenerateError> {
        let model = ModelConfig::from_folder(folder)?;
        let table = table(&model);
        let weights = InitialWeights::open(folder, &model, &table, 0)?;
        let InitialWeights::Files(files) = &weights else {
            return Err(GenerateError::NoWeights { folder: folder.to_owned() });
        };
        let first = table.iter().next().map(|parameter| files.dtype(&parameter.name)).transpose()?;
        let stored = first.unwrap_or(DType::F32);
        Ok(Self { model, table, weights, stored })
    }

    /// The model's config.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The dtype of the stored weights.
    pub fn stored(&self) -> DType {
        self.stored
    }

    /// Warnings about the weights.
    pub fn warnings(&self) -> Vec<String> {
        self.weights.notes()
    }

    /// Compiles the inference program for a prompt plus `max_new_tokens`, computing in `run`.
    pub fn compile(
        &self,
        prompt: &[i32],
        max_new_tokens: u64,
        run: DType,
        target: Target,
    ) -> Result<Compiled, GenerateError> {
        self.check(prompt)?;
        self.compile_rows(self.rows_of(prompt, max_new_tokens), 1, run, target)
    }

    /// Maximum rows of a forward pass over a prompt and its new tokens.
    fn rows_of(&self, prompt: &[i32], max_new_tokens: u64) -> u64 {
        let tokens = (prompt.len() as u64).saturating_add(max_new_tokens);
        // The last token is sampled but never fed back.
        let largest = self.model.max_positions.map_or(tokens, |most| tokens.min(most)).max(2) - 1;
        largest.max(prompt.len() as u64)
    }

    /// The program for up to `rows` tokens of up to `sequences` sequences.
    fn compile_rows(
        &self,
        rows: u64,
        sequences: u64,
        run: DType,
        target: Target,
    ) -> Result<Compiled, GenerateError> {
        let sizes: Vec<u64> = RowSizes::new(rows).all().iter().map(|size| *size as u64).collect();
        let graph = forward(&self.model, &self.table, Batch { tokens: sizes.last().copied().unwrap_or(1) })?;
        Ok(Compiled::inference(graph, run, sequences, target, sizes)?)
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
        let rank = Rank { comm: None, device, recipe: Recipe::default(), decayed: &|_| false, seed: 0 };
        let mut engine = Engine::new(compiled, rank)?;
        let names: Vec<String> = compiled.graph.params.iter().map(|param| param.spec.name.clone()).collect();
        self.weights.load(&self.table, &mut engine, &names, &mut |_, _| ())?;
        Ok(Generator { model: self, engine, compiled })
    }
}

/// A model with its weights on a device.
pub struct Generator<'c> {
    model: &'c Inference,
    engine: Engine<'c>,
    compiled: &'c Compiled,
}

impl Generator<'_> {
    /// The logits of the token after `ids`.
    pub fn logits(&mut self, ids: &[i32]) -> Result<Vec<f32>, GenerateError> {
        self.model.check(ids)?;
        self.next_logits(&[ids])
    }

    /// Next-token logits `[sequences, vocab]`, by one forward pass.
    fn next_logits(&mut self, sequences: &[&[i32]]) -> Result<Vec<f32>, GenerateError> {
        let ids = sequences.concat();
        let positions: Vec<i32> = sequences.iter().flat_map(|sequence| 0..sequence.len() as i32).collect();
        let ends = sequences.iter().scan(0, |end, sequence| {
            *end += sequence.len() as u32;
            Some(*end)
        });
        let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
        // Nothing is trained.
        let labels = vec![-100; ids.len()];
        let batch =
            MicroBatch { ids: &ids, labels: &labels, positions: &positions, starts: &starts, keys: &[] };
        let logits = self.engine.logits(&batch)?;
        match logits.iter().position(|logit| !logit.is_finite()) {
            None => Ok(logits),
            Some(place) => {
                let position = sequences[place * sequences.len() / logits.len()].len();
                Err(GenerateError::NotFinite { position, run: self.compiled.program.types.compute })
            }
        }
    }

    /// Continues a prompt; `each` is called with every new token.
    pub fn generate(
        &mut self,
        prompt: &[i32],
        generation: &Generation,
        each: &mut dyn FnMut(i32),
    ) -> Result<Generated, GenerateError> {
        generation.check()?;
        self.model.check(prompt)?;
        let positions = self.model.model.max_positions.unwrap_or(u64::MAX);
        let mut ids = prompt.to_vec();
        let mut end = End::Length;
        for _ in 0..generation.max_new_tokens {
            if ids.len() as u64 >= positions {
                end = End::Positions;
                break;
            }
            let logits = self.logits(&ids)?;
            let id = sample::choose(&logits, generation, ids.len() as u64);
            ids.push(id);
            each(id);
            if generation.stops.contains(&id) {
                end = End::Stop(id);
                break;
            }
        }
        Ok(Generated { ids: ids.split_off(prompt.len()), end })
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
        match self.top_p {
            Some(top_p) if !(top_p > 0.0 && top_p <= 1.0) => refuse("top_p", top_p, "above 0 and at most 1"),
            _ => Ok(()),
        }
    }
}
