//! A small model, values for its states, and checkpoints of it with arbitrary shards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use half::bf16;
use serde_json::json;
use zeroth_base::{DType, ProcessOwner};
use zeroth_engine::StateKind;
use zeroth_kernel::Moment;
use zeroth_model::{Family, ModelConfig, ModelSizes, NewFolder, ParameterTable, new_folder, table};
use zeroth_train::ModelFiles;
use zeroth_train::checkpoint::{
    BatchEntry, BestEntry, Checkpoint, CheckpointError, ControlState, DataEntry, Evaluated, FORMAT_VERSION,
    Manifest, ModelEntry, SAVED_STATES, ShardPiece, ShardWriter, UnfinishedCheckpoint, ZEROTH_VERSION,
    state_name,
};

/// A loss scale that 15 decimal digits cannot represent.
pub(crate) const LOSS_SCALE: f64 = 65_536.000_000_000_02;

/// A model folder with config and tokenizer files, and its parameter table.
pub(crate) struct Model {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) table: ParameterTable,
}

impl Model {
    pub(crate) fn new() -> Self {
        Self::of_width(8)
    }

    pub(crate) fn of_width(hidden: u64) -> Self {
        let config = ModelConfig::from_sizes(&ModelSizes {
            family: Family::Qwen3,
            hidden,
            blocks: 1,
            heads: 2,
            kv_heads: Some(1),
            head_dim: Some(4),
            ffn: 12,
            vocab: 30,
            tied: true,
            max_positions: None,
            rope_theta: None,
            experts: None,
        })
        .unwrap();
        let folder = tempfile::tempdir().unwrap();
        new_folder(&config, &NewFolder::default(), folder.path()).unwrap();
        fs::write(folder.path().join("tokenizer.json"), "{\"version\": \"1.0\"}\n").unwrap();
        fs::write(folder.path().join("chat_template.jinja"), "{{ messages }}\n").unwrap();
        fs::write(folder.path().join("README.md"), "not part of a model\n").unwrap();
        Self { folder, table: table(&config) }
    }

    /// The files included in a checkpoint.
    pub(crate) fn files(&self) -> ModelFiles {
        ModelFiles::read(self.folder.path()).unwrap()
    }

    /// Saves a checkpoint of one rank.
    pub(crate) fn save(&self, checkpoints: &Path, step: u64) -> PathBuf {
        self.save_cut(checkpoints, step, &[], usize::MAX).unwrap()
    }

    /// Saves a checkpoint whose shards are split at `cuts`, streamed in chunks.
    pub(crate) fn save_cut(
        &self,
        checkpoints: &Path,
        step: u64,
        cuts: &[u64],
        chunk: usize,
    ) -> Result<PathBuf, CheckpointError> {
        let mut cuts = cuts.to_vec();
        cuts.extend([0, self.table.total()]);
        cuts.sort_unstable();
        let unfinished = UnfinishedCheckpoint::begin(checkpoints, step)?;
        let ranks = cuts.len() as u64 - 1;
        let mut manifest = self.manifest(step, ranks);
        // The last rank first: file order must not matter.
        for (rank, cut) in cuts.windows(2).enumerate().rev() {
            let pieces = self.pieces(cut[0]..cut[1]);
            let numbers: Vec<f32> = pieces.iter().flat_map(|piece| numbers_of(step, piece)).collect();
            let mut part = ShardWriter::create(unfinished.path(), rank as u64, ranks, pieces)?;
            for chunk in numbers.chunks(chunk.min(numbers.len().max(1))) {
                part.append_f32(chunk)?;
            }
            let written = part.finish()?;
            written.sync()?;
            manifest.files.push(written.entry().clone());
        }
        unfinished.commit(manifest, &self.files())
    }

    /// The pieces of all states for a range of the concatenated parameters.
    pub(crate) fn pieces(&self, owned: std::ops::Range<u64>) -> Vec<ShardPiece> {
        let mut pieces = Vec::new();
        for state in SAVED_STATES {
            let mut begin = 0;
            for parameter in self.table.iter() {
                let end = begin + parameter.elements();
                let (first, last) = (owned.start.clamp(begin, end), owned.end.clamp(begin, end));
                pieces.push(ShardPiece {
                    state,
                    name: parameter.name.clone(),
                    first: first - begin,
                    count: last - first,
                    dtype: dtype_of(state),
                });
                begin = end;
            }
        }
        pieces
    }

    pub(crate) fn manifest(&self, step: u64, ranks: u64) -> Manifest {
        let best = |step| BestEntry {
            metric: "eval_loss".to_owned(),
            greater_is_better: false,
            evaluated: Some(Evaluated { step, value: 0.1 }),
            saved: Some(Evaluated { step, value: 0.1 }),
            stale: 0,
            data: Some("00ff".to_owned()),
        };
        Manifest {
            format_version: FORMAT_VERSION,
            zeroth_version: ZEROTH_VERSION.to_owned(),
            created: 1_700_000_000,
            step,
            samples_seen: 12 * ranks * step,
            loss: Some(2.5),
            control: ControlState {
                applied: step,
                skipped: 0,
                loss_scale: LOSS_SCALE,
                iteration: step,
                last_overflow: -1,
                hysteresis_left: 2,
            },
            seed: u64::MAX,
            data: DataEntry { hash: "00ff".to_owned(), samples: 100, shuffle: true, seed: None },
            batch: BatchEntry { train_batch_size: 12 * ranks, micro_batch: 1, accumulation: 12 },
            group: None,
            ranks,
            stage: 3,
            dtype: DType::Bf16,
            optimizer: "AdamW".to_owned(),
            moments: DType::Bf16,
            model: ModelEntry::of("qwen3", &self.table, |_| true),
            states: SAVED_STATES.to_vec(),
            weights_only: false,
            best: (step > 0).then(|| best(step)),
            lora: None,
            distillation: None,
            config: json!({"train_batch_size": 12, "optimizer": {"params": {"lr": 1e-5}}}),
            flags: [("--max-skipped-steps".to_owned(), "3".to_owned())].into(),
            files: Vec::new(),
        }
    }

    /// Checks the values of a step, read in ranges of `stride` elements.
    pub(crate) fn is_held_by(&self, checkpoint: &Checkpoint, stride: u64) -> bool {
        let step = checkpoint.manifest().step;
        SAVED_STATES.into_iter().all(|state| {
            self.table.iter().all(|parameter| {
                (0..parameter.elements()).step_by(stride as usize).all(|first| {
                    let range = first..(first + stride).min(parameter.elements());
                    let mut found = vec![f32::NAN; (range.end - range.start) as usize];
                    checkpoint.read_f32(state, &parameter.name, range.clone(), &mut found).unwrap();
                    range.zip(found).all(|(element, found)| {
                        found.to_bits() == number(step, state, &parameter.name, element).to_bits()
                    })
                })
            })
        })
    }
}

/// The dtype of a state; one of them has 16 bits.
pub(crate) fn dtype_of(state: StateKind) -> DType {
    if state == StateKind::Moment(Moment::First) { DType::Bf16 } else { DType::F32 }
}

/// An element of a state: an arbitrary value representable in its dtype.
pub(crate) fn number(step: u64, state: StateKind, name: &str, element: u64) -> f32 {
    let text = format!("{step} {} {name} {element}", state_name(state).unwrap());
    // FNV-1a.
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let number = (hash >> 40) as f32 / (1 << 24) as f32 - 0.5;
    if dtype_of(state) == DType::Bf16 { bf16::from_f32(number).to_f32() } else { number }
}

pub(crate) fn numbers_of(step: u64, piece: &ShardPiece) -> Vec<f32> {
    (piece.first..piece.first + piece.count)
        .map(|element| number(step, piece.state, &piece.name, element))
        .collect()
}

/// All files of a folder and of folders in it.
pub(crate) fn files_in(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(files_in(&path)) } else { files.push(path) }
    }
    files.sort_unstable();
    files
}

/// The names in a folder.
pub(crate) fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

/// A process of this host that has ended.
pub(crate) fn gone() -> ProcessOwner {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let owner = ProcessOwner::of(child.id()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    owner
}
