//! A new model: from named sizes to a folder with a `config.json` and weights, as `zeroth init` makes it.

use std::fs;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;

use serde_json::{Map, Value, json};
use zeroth_base::{
    DType, ExclusiveFolder, ExclusiveFolderError, LockError, PublishError, publish, while_publishing,
};

use crate::architecture::MixtureConfig;
use crate::init::{NewValues, fill_new};
use crate::peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use crate::safetensors::{
    DEFAULT_SHARD_BYTES, NewTensor, WeightWriter, WeightsError, WrittenWeights, is_weight_file,
};
use crate::{Family, FieldError, ModelConfig, ModelError, Parameter, UnwritableConfig, table};

/// Elements that one thread makes at a time.
const PIECE: usize = 1 << 18;
/// Making a number costs more than writing it; beyond this many threads the disk is what is waited for.
const MOST_THREADS: usize = 16;

/// The sizes of a new model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSizes {
    /// The family. One of the family t5 is a T5 where its head is tied (relu), else a T5 v1.1 (gated-gelu).
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Blocks; of an encoder-decoder, those of each stack.
    pub blocks: u64,
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and values; as many as heads where not given, and always of an encoder-decoder.
    pub kv_heads: Option<u64>,
    /// Width of one head; the model's width shared by the heads where not given.
    pub head_dim: Option<u64>,
    /// Inner width of the feed-forward part.
    pub ffn: u64,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// The longest sequence it is meant for; the family's default where not given. An encoder-decoder has no such limit.
    pub max_positions: Option<u64>,
    /// The base of rotary frequencies; the family's default where not given. An encoder-decoder has none.
    pub rope_theta: Option<f64>,
    /// The experts of every block, for the families that have some.
    pub experts: Option<ExpertSizes>,
}

/// The experts of a new model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSizes {
    /// Experts of a block.
    pub count: u64,
    /// Experts of a token.
    pub per_token: u64,
    /// Inner width of an expert; that of the feed-forward part where not given. Mixtral has no other.
    pub width: Option<u64>,
}

impl ModelConfig {
    /// The model of these sizes, with no attention window and with the family's own biases and norms. Sizes are held
    /// to the limits of a `config.json` that is read, and complaints name its fields.
    pub fn from_sizes(sizes: &ModelSizes) -> Result<Self, ModelError> {
        Self::from_map(&fields(sizes).map_err(in_sizes)?, ORIGIN)
    }
}

/// The origin of sizes from the command line, in messages.
const ORIGIN: &str = "the sizes given";

fn fields(sizes: &ModelSizes) -> Result<Map<String, Value>, FieldError> {
    // JSON would say null, which means the default.
    if let Some(theta) = sizes.rope_theta.filter(|theta| !theta.is_finite()) {
        let (field, found) = ("rope_theta".to_owned(), theta.to_string());
        return Err(FieldError::WrongType { field, found, expected: "a number above zero" });
    }
    let head_dim = match sizes.head_dim {
        Some(head_dim) => head_dim,
        // A family's own default is for its published sizes, not for these.
        None if sizes.heads > 0 && sizes.hidden.is_multiple_of(sizes.heads) => sizes.hidden / sizes.heads,
        None => return Err(FieldError::HeadDim { hidden: sizes.hidden, heads: sizes.heads }),
    };
    if sizes.family.is_encoder_decoder() {
        return encoder_decoder_fields(sizes, head_dim);
    }
    let mut fields = vec![
        ("model_type", json!(sizes.family.model_type())),
        ("hidden_size", json!(sizes.hidden)),
        ("num_hidden_layers", json!(sizes.blocks)),
        ("num_attention_heads", json!(sizes.heads)),
        ("num_key_value_heads", json!(sizes.kv_heads.unwrap_or(sizes.heads))),
        ("head_dim", json!(head_dim)),
        ("intermediate_size", json!(sizes.ffn)),
        ("vocab_size", json!(sizes.vocab)),
        ("tie_word_embeddings", json!(sizes.tied)),
        ("max_position_embeddings", json!(sizes.max_positions)),
        ("rope_theta", json!(sizes.rope_theta)),
        ("sliding_window", Value::Null),
    ];
    fields.extend(expert_fields(sizes)?);
    Ok(fields.into_iter().map(|(field, value)| (field.to_owned(), value)).collect())
}

/// The fields of an encoder-decoder with as many blocks in each stack.
fn encoder_decoder_fields(sizes: &ModelSizes, head_dim: u64) -> Result<Map<String, Value>, FieldError> {
    let family = sizes.family;
    let without = [
        ("num_key_value_heads", sizes.kv_heads.filter(|kv_heads| *kv_heads != sizes.heads)),
        ("max_position_embeddings", sizes.max_positions),
    ];
    let without = without.into_iter().map(|(field, given)| (field, given.map(|given| given.to_string())));
    let theta = ("rope_theta", sizes.rope_theta.map(|theta| theta.to_string()));
    if let Some((field, found)) =
        without.chain([theta]).find_map(|(field, given)| Some((field.to_owned(), given?)))
    {
        let why = format!("models of the family {family} have none: leave it out");
        return Err(FieldError::Unsupported { field, found, why });
    }
    let mut fields = vec![
        ("model_type", json!(family.model_type())),
        ("d_model", json!(sizes.hidden)),
        ("d_kv", json!(head_dim)),
        ("d_ff", json!(sizes.ffn)),
        ("num_layers", json!(sizes.blocks)),
        ("num_heads", json!(sizes.heads)),
        ("vocab_size", json!(sizes.vocab)),
        ("tie_word_embeddings", json!(sizes.tied)),
        ("decoder_start_token_id", json!(0)),
    ];
    if family == Family::T5 && !sizes.tied {
        fields.push(("feed_forward_proj", json!("gated-gelu")));
    }
    fields.extend(expert_fields(sizes)?);
    Ok(fields.into_iter().map(|(field, value)| (field.to_owned(), value)).collect())
}

fn expert_fields(sizes: &ModelSizes) -> Result<Vec<(&'static str, Value)>, FieldError> {
    let unsupported = |field: &str, found: &str, why: String| FieldError::Unsupported {
        field: field.to_owned(),
        found: found.to_owned(),
        why,
    };
    let family = sizes.family;
    let (mixture, experts) = match (family.mixture(), sizes.experts) {
        (None, None) => return Ok(Vec::new()),
        (Some(mixture), Some(experts)) => (mixture, experts),
        (Some(_), None) => {
            let why =
                format!("models of the family {family} have experts: say how many, and how many of a token");
            return Err(unsupported("num_experts", "not given", why));
        }
        (None, Some(experts)) => {
            let why = format!("models of the family {family} have no experts");
            return Err(unsupported("num_experts", &experts.count.to_string(), why));
        }
    };
    let mut fields = vec![("num_experts_per_tok", json!(experts.per_token))];
    match mixture.config {
        MixtureConfig::Qwen => fields.extend([
            ("num_experts", json!(experts.count)),
            ("moe_intermediate_size", json!(experts.width.unwrap_or(sizes.ffn))),
            // As in all published models of the family.
            ("norm_topk_prob", json!(true)),
        ]),
        MixtureConfig::Mixtral => {
            if let Some(width) = experts.width.filter(|width| *width != sizes.ffn) {
                let why = "experts of mixtral are as wide as `intermediate_size`: leave it out".to_owned();
                return Err(unsupported("moe_intermediate_size", &width.to_string(), why));
            }
            fields.push(("num_local_experts", json!(experts.count)));
        }
    }
    Ok(fields)
}

fn in_sizes(source: FieldError) -> ModelError {
    ModelError::Field { origin: ORIGIN.to_owned(), source }
}

/// Options of a new model folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewFolder {
    /// Where all random numbers come from.
    pub seed: u64,
    /// The type the weights are stored in.
    pub dtype: DType,
    /// The size above which weights are split into several files.
    pub shard_bytes: u64,
    /// Whether a folder with something in it is written to: its config and weights or adapters are replaced, other files stay.
    pub overwrite: bool,
}

impl Default for NewFolder {
    fn default() -> Self {
        Self { seed: 42, dtype: DType::Bf16, shard_bytes: DEFAULT_SHARD_BYTES, overwrite: false }
    }
}

/// The file that makes a folder a model's.
const CONFIG: &str = "config.json";
/// The file of a model folder that says which state an export took its weights from.
pub const EXPORT_RECORD: &str = "export.json";

/// A folder that could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum NewFolderError {
    #[error("{} is not empty: give another folder, or replace the model in it with --overwrite-output-dir", folder.display())]
    NotEmpty { folder: PathBuf },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("cannot make the folder {}: {source}", folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    #[error(transparent)]
    Config(#[from] UnwritableConfig),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl From<ExclusiveFolderError> for NewFolderError {
    fn from(error: ExclusiveFolderError) -> Self {
        match error {
            ExclusiveFolderError::NotEmpty { folder } => Self::NotEmpty { folder },
            ExclusiveFolderError::Lock(error) => Self::Lock(error),
            ExclusiveFolderError::Io { folder, source, .. } => Self::Folder { folder, source },
        }
    }
}

/// Makes a model folder with new weights, piece by piece: memory does not grow with the model. `config.json` comes
/// last, so a folder that was not finished is not taken for a model.
pub fn new_folder(
    config: &ModelConfig,
    new: &NewFolder,
    folder: &Path,
) -> Result<WrittenWeights, NewFolderError> {
    let config = ModelConfig { dtype: Some(new.dtype), ..config.clone() };
    let json = format!("{:#}\n", Value::Object(config.to_json()?));
    let at = |source| NewFolderError::Folder { folder: folder.to_owned(), source };
    // Locked, and removed on failure if it was made.
    let locked = ExclusiveFolder::open(folder, new.overwrite, |name| name == CONFIG || is_weight_file(name))?;
    let table = table(&config);
    let tensors = table.iter().flat_map(|parameter| NewTensor::all_of(parameter, new.dtype)).collect();
    let mut writer = WeightWriter::create(folder, tensors, new.shard_bytes)?;
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
    let mut values = Vec::new();
    for parameter in table.iter() {
        let elements = parameter.elements();
        for start in (0..elements).step_by(threads * PIECE) {
            values.resize((elements - start).min((threads * PIECE) as u64) as usize, 0.0);
            fill_in_parallel(new.seed, config.new_values(parameter), parameter, start, &mut values);
            writer.append_parameter(parameter, &values)?;
        }
    }
    let _publishing = while_publishing();
    let names: Vec<String> = writer.names().map(str::to_owned).collect();
    let list = locked.announce(names.iter().map(String::as_str).chain([CONFIG])).map_err(at)?;
    let written = replace(folder, writer, &json);
    if let (Err(_), Some(list)) = (&written, list) {
        list.undo();
    }
    written
}

/// Gives the weights and then the config their names, in the place of what was there.
fn replace(folder: &Path, writer: WeightWriter, json: &str) -> Result<WrittenWeights, NewFolderError> {
    let at = |source| NewFolderError::Folder { folder: folder.to_owned(), source };
    let path = folder.join(CONFIG);
    // An adapter beside the model would be loaded with it, and the record of an export is not of this model.
    for name in [CONFIG, EXPORT_RECORD, ADAPTER_CONFIG, ADAPTER_WEIGHTS] {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(error)),
            _ => {}
        }
    }
    let mut written = writer.finish()?;
    publish(&path, json.as_bytes())?;
    written.files.push(path);
    Ok(written)
}

/// Fills `values` with new elements from `start`, a piece a thread. The cuts change no bit.
fn fill_in_parallel(seed: u64, new: NewValues, parameter: &Parameter, start: u64, values: &mut [f32]) {
    let fill = |(index, piece): (usize, &mut [f32])| {
        let start = start + (index * PIECE) as u64;
        fill_new(seed, new, parameter, start..start + piece.len() as u64, piece);
    };
    let threads = values.len().div_ceil(PIECE);
    let pieces = Mutex::new(values.chunks_mut(PIECE).enumerate());
    let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
    let fill_all = || {
        while let Some(piece) = next() {
            fill(piece);
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // Where the system gives no more threads, those that are there do all of it.
            if thread::Builder::new().spawn_scoped(scope, fill_all).is_err() {
                break;
            }
        }
        fill_all();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParameterKind;

    #[test]
    fn threads_make_the_numbers_that_one_makes() {
        let (start, length) = (7, 2 * PIECE + 5);
        let parameter = Parameter::new("w".to_owned(), vec![start + length as u64], ParameterKind::Linear);
        let (mut together, mut alone) = (vec![0.0; length], vec![1.0; length]);
        fill_in_parallel(3, NewValues::Normal(0.02), &parameter, start, &mut together);
        fill_new(3, NewValues::Normal(0.02), &parameter, start..start + length as u64, &mut alone);
        assert!(together == alone);
    }
}
