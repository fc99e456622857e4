//! Text from a model: one token after the other, each chosen from the logits of all tokens before it.
//!
//! A plain loop: the whole prefix is computed again for every token, in a program compiled for inference, rounded up to
//! one of a few numbers of rows. Nothing is cached between tokens, so a text of n tokens costs about n²/2 rows: meant to
//! look at what was trained, not to serve it.

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

use crate::{RowSizes, Weights};

pub use self::batch::BatchSize;
pub use self::stops::{begin_id, stop_ids};

/// How tokens are chosen, and how many.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The most tokens there will be.
    pub max_new_tokens: u64,
    /// What logits are divided by; 0 takes the largest, the lowest id where several are.
    pub temperature: f64,
    /// Only so many of the largest logits are chosen from.
    pub top_k: Option<u64>,
    /// Only the fewest most likely tokens that together are this likely are chosen from.
    pub top_p: Option<f64>,
    /// Where chance comes from: a token's random number is a function of this and of its position.
    pub seed: u64,
    /// Tokens that end the text.
    pub stops: Vec<i32>,
}

/// What came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// New tokens, the one that ended the text included.
    pub ids: Vec<i32>,
    /// Why there are no more.
    pub end: End,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// As many tokens came as were asked for.
    Length,
    /// A token that ends texts came.
    Stop(i32),
    /// The model has no more positions.
    Positions,
}

/// A text that cannot be generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// There is nothing to go on from.
    #[error("the prompt has no tokens: there must be at least one to go on from")]
    EmptyPrompt,
    /// A token that the model does not know.
    #[error(
        "token {place} of the prompt is {id}, and the model's vocabulary is 0 to {}: does the tokenizer belong to the model?",
        vocab - 1
    )]
    BeyondVocabulary {
        /// Its place in the prompt, from 0.
        place: usize,
        /// The token.
        id: i32,
        /// Tokens of the vocabulary.
        vocab: u64,
    },
    /// A prompt that the model has too few positions for.
    #[error("the prompt has {}, and the model has {}: shorten it", counted(*tokens as u64, "token"), counted(*positions, "position"))]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of the model.
        positions: u64,
    },
    /// A setting outside of its range.
    #[error("{name} is {value}: it must be {range}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// What it is.
        value: f64,
        /// What it may be.
        range: &'static str,
    },
    /// A folder with a config and no weights.
    #[error("{} has no *.safetensors: text needs trained weights, such as the model/ of a run's folder", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// Logits that cannot be chosen from.
    #[error(
        "the logits of position {position} are not finite: the weights are broken, or too large for {run}"
    )]
    NotFinite {
        /// Tokens before it.
        position: usize,
        /// The type it was computed in.
        run: DType,
    },
    /// The model could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Weights could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The model has parts whose ops are not built.
    #[error("no text can be generated: {0}")]
    Forward(#[from] ForwardError),
    /// The program cannot be made.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The program failed.
    #[error(transparent)]
    Run(Box<RunError>),
}

impl From<RunError> for GenerateError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

/// A model folder that text is to come from.
pub struct Inference {
    model: ModelConfig,
    table: ParameterTable,
    weights: Weights,
    /// The type the weights are stored in.
    stored: DType,
}

impl Inference {
    /// Reads a folder's config and finds its weights.
    pub fn open(folder: &Path) -> Result<Self, GenerateError> {
        let model = ModelConfig::from_folder(folder)?;
        let table = table(&model);
        let weights = Weights::open(folder, &model, &table, 0)?;
        let Weights::Files(files) = &weights else {
            return Err(GenerateError::NoWeights { folder: folder.to_owned() });
        };
        let first = table.iter().next().map(|parameter| files.dtype(&parameter.name)).transpose()?;
        let stored = first.unwrap_or(DType::F32);
        Ok(Self { model, table, weights, stored })
    }

    /// The model.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// The type the weights are stored in.
    pub fn stored(&self) -> DType {
        self.stored
    }

    /// What is worth knowing about the weights.
    pub fn warnings(&self) -> Vec<String> {
        self.weights.notes()
    }

    /// The program that goes on from a prompt for up to so many tokens, its numbers stored in `run`.
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

    /// The most rows that a forward pass takes for a prompt and the tokens after it.
    fn rows_of(&self, prompt: &[i32], max_new_tokens: u64) -> u64 {
        let tokens = (prompt.len() as u64).saturating_add(max_new_tokens);
        // The last token is chosen and never computed with.
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

    /// Loads the weights to a device whose arenas are as large as the program's.
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
    /// The logits of the token after these.
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

    /// Goes on from a prompt; `each` is called with every new token as it comes.
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
