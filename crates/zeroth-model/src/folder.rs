//! Locates a model: a folder, the `config.json` in it, or a name of the Hugging Face Hub that is in the local
//! cache. Nothing is fetched from a network.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zeroth_base::nearest;

use crate::builtin::{builtin_config, near_builtin};
use crate::fields::kind;
use crate::peft::ADAPTER_CONFIG;
use crate::{ModelError, ModelOfRun, Needs};

const CONFIG: &str = "config.json";

/// The folder of a model named on the command line: a folder, a path to its `config.json`, or a Hub name such as
/// `Qwen/Qwen3-8B` that is in the local cache. What exists on disk goes before the cache.
pub fn locate(name_or_path: &str) -> Result<PathBuf, ModelError> {
    HubCache::from_environment().locate(name_or_path)
}

/// A model's `config.json` and where it is from.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedConfig {
    /// The fields.
    pub map: Map<String, Value>,
    /// What messages call it.
    pub origin: String,
    /// The model's folder; `None` for a built-in config.
    pub folder: Option<PathBuf>,
}

/// The `config.json` of a model named on the command line, for what reads no more of it: that of [`locate`], or a
/// built-in one where neither a folder nor the cache has the name.
pub fn named_config(name_or_path: &str) -> Result<NamedConfig, ModelError> {
    match locate(name_or_path) {
        Ok(folder) => {
            let (map, origin) = read_config(&folder)?;
            Ok(NamedConfig { map, origin, folder: Some(folder) })
        }
        Err(ModelError::NotInCache { name, cache, near, .. }) => {
            if let Some(map) = builtin_config(&name) {
                let origin = format!("the built-in config of {name}");
                return Ok(NamedConfig { map, origin, folder: None });
            }
            let near = near.or_else(|| near_builtin(&name).map(str::to_owned));
            Err(ModelError::NotInCache { name, cache, near, needs: Needs::Config })
        }
        Err(other) => Err(other),
    }
}

/// The local cache of the Hugging Face Hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubCache {
    folder: PathBuf,
}

impl HubCache {
    /// The cache in a given folder, as `HF_HUB_CACHE` would name it.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The cache that Hugging Face's own tools use: `HF_HUB_CACHE`, else `HF_HOME/hub`, else
    /// `~/.cache/huggingface/hub` (or the place that `XDG_CACHE_HOME` gives it).
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// The same, from any source of variables.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let home = variable("HOME").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let folder = |name: &str| {
            let path = PathBuf::from(variable(name).filter(|value| !value.is_empty())?);
            Some(path.strip_prefix("~").map(|rest| home.join(rest)).unwrap_or(path))
        };
        // The second name is the one that older versions of the Hub's library read.
        if let Some(folder) = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE")) {
            return Self { folder };
        }
        let hugging_face = folder("HF_HOME").unwrap_or_else(|| {
            folder("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache")).join("huggingface")
        });
        Self { folder: hugging_face.join("hub") }
    }

    /// [`locate`] with this cache.
    pub fn locate(&self, name_or_path: &str) -> Result<PathBuf, ModelError> {
        let path = Path::new(name_or_path);
        match model_folder(path) {
            Err(ModelError::NoSuchFolder { .. }) if is_hub_name(name_or_path) => self.find(name_or_path),
            found => found,
        }
    }

    /// The snapshot of a Hub name.
    fn find(&self, name: &str) -> Result<PathBuf, ModelError> {
        let place = self.folder.join(format!("models--{}", name.replace('/', "--")));
        if !place.is_dir() {
            let near = self.near(name);
            return Err(ModelError::NotInCache {
                name: name.to_owned(),
                cache: self.folder.clone(),
                near,
                needs: Needs::Folder,
            });
        }
        let broken =
            |problem| ModelError::BrokenCache { name: name.to_owned(), place: place.clone(), problem };
        let snapshots = place.join("snapshots");
        let snapshot = match fs::read_to_string(place.join("refs").join("main")) {
            Ok(revision) => snapshots.join(revision.trim()),
            // Fetched by revision, not by branch: clear only where there is one.
            Err(_) => only_folder(&snapshots)
                .ok_or_else(|| broken("has no refs/main that says which snapshot is meant"))?,
        };
        // `snapshots` itself is what an empty reference leads to, and other parents what a forged one does.
        if snapshot.parent() != Some(&snapshots) || !snapshot.is_dir() {
            return Err(broken("its refs/main names a snapshot that is not there"));
        }
        if snapshot.join(CONFIG).is_file() {
            Ok(snapshot)
        } else {
            Err(broken("its snapshot has no config.json"))
        }
    }

    fn near(&self, name: &str) -> Option<String> {
        let entries = fs::read_dir(&self.folder).ok()?;
        let mut names: Vec<String> = entries
            .filter_map(|entry| {
                Some(entry.ok()?.file_name().to_str()?.strip_prefix("models--")?.replace("--", "/"))
            })
            .collect();
        names.sort();
        nearest(name, names.iter().map(String::as_str)).map(str::to_owned)
    }
}

/// Whether a text is written like a Hub name: `name` or `owner/name`.
fn is_hub_name(text: &str) -> bool {
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    match text.split_once('/') {
        Some((owner, name)) => part(owner) && part(name),
        None => part(text),
    }
}

fn only_folder(folder: &Path) -> Option<PathBuf> {
    let mut folders =
        fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(|p| p.is_dir());
    let first = folders.next()?;
    folders.next().is_none().then_some(first)
}

/// The model folder at a path: a folder with a `config.json`, or the path of that file.
pub(crate) fn model_folder(path: &Path) -> Result<PathBuf, ModelError> {
    // What a config.json lies in, whether or not it is there.
    let around = path.parent().filter(|_| path.file_name().is_some_and(|name| name == CONFIG));
    let around = around.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
    let found = match (metadata(path)?, around) {
        (Some(found), _) => found,
        (None, Some(folder)) if folder.is_dir() => {
            return Err(ModelError::NoConfig { folder: folder.to_owned() });
        }
        (None, _) => return Err(ModelError::NoSuchFolder { path: path.to_owned() }),
    };
    if !found.is_dir() {
        return around.map(Path::to_owned).ok_or_else(|| ModelError::NotAFolder { path: path.to_owned() });
    }
    let has_config = metadata(&path.join(CONFIG))?.is_some_and(|config| config.is_file());
    match not_a_model(path, has_config) {
        Some(error) => Err(error),
        None if has_config => Ok(path.to_owned()),
        None => Err(ModelError::NoConfig { folder: path.to_owned() }),
    }
}

/// A run's folder and a checkpoint's are taken for a model's easily: what was meant instead.
fn not_a_model(folder: &Path, has_config: bool) -> Option<ModelError> {
    let has = |name: &str| folder.join(name).is_file();
    if !has_config && has("manifest.json") && has("SHA256SUMS") {
        return Some(ModelError::IsACheckpoint { folder: folder.to_owned() });
    }
    // Some trainers put the base's config.json beside an adapter: weights make a folder a model's.
    if has(ADAPTER_CONFIG) && !has("model.safetensors") && !has("model.safetensors.index.json") {
        return Some(ModelError::IsAnAdapter { folder: folder.to_owned(), base: base_of_adapter(folder) });
    }
    // A run's config.json is the DeepSpeed config, which has no model_type.
    let is_model = has_config && {
        let config = json_object(&folder.join(CONFIG));
        config.is_none_or(|config| config.contains_key("model_type") || config.contains_key("architectures"))
    };
    if is_model {
        return None;
    }
    let holds_steps = |folder: &Path| {
        let mut entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.any(|entry| entry.path().join("manifest.json").is_file())
    };
    let run = if has("origin.json") || has("metrics.jsonl") || holds_steps(&folder.join("checkpoints")) {
        folder
    } else if folder.file_name().is_some_and(|name| name == "checkpoints") && holds_steps(folder) {
        folder.parent()?
    } else {
        return None;
    };
    Some(ModelError::IsARun { folder: folder.to_owned(), run: run.to_owned(), model: model_of_run(run) })
}

/// What a run has trained.
fn model_of_run(run: &Path) -> ModelOfRun {
    let model = run.join("model");
    if model.join(ADAPTER_CONFIG).is_file() {
        let base = base_of_adapter(&model);
        return ModelOfRun::Adapter { folder: Some(model), base };
    }
    if model.join(CONFIG).is_file() {
        return ModelOfRun::Written(model);
    }
    let mut steps = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    let has_adapters = |step: fs::DirEntry| {
        json_object(&step.path().join("manifest.json"))
            .is_some_and(|manifest| manifest.get("lora").is_some_and(Value::is_object))
    };
    if steps.any(has_adapters) {
        ModelOfRun::Adapter { folder: None, base: None }
    } else {
        ModelOfRun::Unsupported
    }
}

/// The base that an adapter names.
fn base_of_adapter(folder: &Path) -> Option<String> {
    let config = json_object(&folder.join(ADAPTER_CONFIG))?;
    Some(config.get("base_model_name_or_path")?.as_str()?.to_owned())
}

/// An object in a file; `None` where there is none, or it is too large for one of ours.
fn json_object(path: &Path) -> Option<Map<String, Value>> {
    const LARGEST: u64 = 64 << 20;
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(LARGEST).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// The kind of file at a path; `None` if there is none.
fn metadata(path: &Path) -> Result<Option<fs::Metadata>, ModelError> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(source) => Err(ModelError::Read { path: path.to_owned(), source }),
    }
}

/// The `config.json` of a model folder (or at that very path) as JSON, of any architecture, with the name to
/// call it by.
pub fn read_config(path: &Path) -> Result<(Map<String, Value>, String), ModelError> {
    let path = model_folder(path)?.join(CONFIG);
    let origin = path.display().to_string();
    let bytes = fs::read(&path).map_err(|source| ModelError::Read { path, source })?;
    Ok((parse(&bytes, &origin)?, origin))
}

pub(crate) fn parse(bytes: &[u8], origin: &str) -> Result<Map<String, Value>, ModelError> {
    let value = serde_json::from_slice(bytes).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let place = format!(" at line {line} column {column}");
        let problem = text.strip_suffix(&place).unwrap_or(&text).to_owned();
        ModelError::Json { origin: origin.to_owned(), line, column, problem }
    })?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(ModelError::NotAnObject { origin: origin.to_owned(), found: kind(&other) }),
    }
}
