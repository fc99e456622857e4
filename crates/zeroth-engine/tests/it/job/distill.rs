//! Golden distillations: a student, and its teacher or a cache of it.

use zeroth_cpu::CpuTarget;
use zeroth_engine::{Feed, FurtherInput, MicroBatches, RunError, StreamBatch, StreamRows};
use zeroth_graph::{DistillSpec, Graph};
use zeroth_kernel::RowKey;
use zeroth_model::{BatchTokens, Distilled, Objective, TeacherForward, forward};
use zeroth_program::{Compiled, Settings, TopLogProbs};

use super::{Golden, Setup, golden_folder};

/// What a golden model is distilled from, and how.
pub(crate) struct Teaching {
    pub(crate) spec: DistillSpec,
    pub(crate) alpha: f64,
    pub(crate) source: TeacherSource,
}

pub(crate) enum TeacherSource {
    Model(Box<Golden>),
    Cache(Cache),
}

/// The most probable tokens of a teacher at every token of every row.
pub(crate) struct Cache {
    pub(crate) k: u64,
    pub(crate) vocab: u64,
    pub(crate) tail: bool,
    /// By row: ids and log-probabilities [tokens, k].
    pub(crate) rows: Vec<(Vec<i32>, Vec<f32>)>,
}

/// The names of all golden distillations.
pub(crate) fn distillations() -> Vec<String> {
    let folders = std::fs::read_dir(golden_folder().join("kd")).unwrap();
    let mut names: Vec<String> = folders
        .map(Result::unwrap)
        .filter(|entry| entry.path().join("steps.json").is_file())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 12, "{names:?}");
    names
}

impl Golden {
    /// A golden distillation. Where it is offline, its cache is computed by the engine.
    pub(crate) fn distilled(name: &str) -> Self {
        let folder = golden_folder().join("kd");
        let steps = std::fs::read_to_string(folder.join(name).join("steps.json")).unwrap();
        let steps: serde_json::Value = serde_json::from_str(&steps).unwrap();
        let rows = std::fs::read_to_string(folder.join("student/data.jsonl")).unwrap();
        let how = steps["distillation"].clone();
        let number = |key: &str| how[key].as_f64().unwrap();
        let spec = DistillSpec {
            beta: number("beta"),
            temperature: number("temperature"),
            squared: how["squared"].as_bool().unwrap(),
        };
        let teacher = Self::of(&folder.join(how["teacher"].as_str().unwrap()), &rows, steps.clone());
        let source = match how["top_k"].as_u64() {
            None => TeacherSource::Model(Box::new(teacher)),
            Some(k) => {
                let top = TopLogProbs { k, temperature: spec.temperature };
                let cache = teacher.cache(&Setup::default(), top);
                TeacherSource::Cache(Cache { tail: how["tail"].as_bool().unwrap(), ..cache })
            }
        };
        let mut student = Self::of(&folder.join("student"), &rows, steps);
        (student.name, student.folder) = (name.to_owned(), folder.join(name));
        student.teacher = Some(Teaching { spec, alpha: number("alpha"), source });
        student
    }

    /// The same distillation from a cache of `k` tokens.
    pub(crate) fn offline(mut self, k: u64, setup: &Setup) -> Self {
        let Teaching { spec, alpha, source } = self.teacher.take().unwrap();
        let TeacherSource::Model(teacher) = source else { panic!("it is offline") };
        let cache = teacher.cache(setup, TopLogProbs { k, temperature: spec.temperature });
        self.teacher = Some(Teaching { spec, alpha, source: TeacherSource::Cache(cache) });
        self
    }

    /// The most probable tokens at every token of every row, with the tail as a bucket. Rows are divided among the ranks.
    pub(crate) fn cache(&self, setup: &Setup, top: TopLogProbs) -> Cache {
        let longest = self.rows.iter().map(|row| row.ids.len()).max().unwrap() as u64;
        let tokens = longest * setup.micro_batch;
        let graph = forward(&self.config, &self.table, BatchTokens::of_tokens(tokens)).unwrap();
        let target = CpuTarget::of(setup.threads);
        let sizes = vec![tokens.div_ceil(2), tokens];
        let settings = Settings { prefetch: 2000, overlap: true, ..setup.settings };
        let compiled = Compiled::top_log_probs(graph, setup.world(), &settings, target, sizes, top).unwrap();
        compiled.program.check(settings.max_live).unwrap();
        let rows = std::sync::Mutex::new(vec![(Vec::new(), Vec::new()); self.rows.len()]);
        super::on_ranks(setup.world(), &|comm| {
            let mut engine = self.engine(&compiled, setup.threads, comm);
            if let Some(seed) = setup.chaos {
                engine.enable_chaos(seed + engine.rank());
            }
            let (mut ids, mut log_probs) = (Vec::new(), Vec::new());
            let batches = self.rows.len() as u64 / setup.micro_batch + 1;
            for turn in 0..batches.div_ceil(setup.ranks) {
                // The last rank of the last turn may have no rows.
                let first =
                    ((turn * setup.ranks + engine.rank()) * setup.micro_batch).min(self.rows.len() as u64);
                let count = setup.micro_batch.min(self.rows.len() as u64 - first);
                let packed = self.packed(first, count);
                engine.top_log_probs(&packed.view(), &mut ids, &mut log_probs).unwrap();
                for (row, ends) in (first as usize..).zip(packed.starts.windows(2)) {
                    let range = ends[0] as usize * top.k as usize..ends[1] as usize * top.k as usize;
                    rows.lock().unwrap()[row] = (ids[range.clone()].to_vec(), log_probs[range].to_vec());
                }
            }
        });
        Cache { k: top.k, vocab: self.config.vocab, tail: true, rows: rows.into_inner().unwrap() }
    }
}

impl Teaching {
    pub(super) fn graph(&self, student: &Golden, tokens: u64) -> Graph {
        let teacher = match &self.source {
            TeacherSource::Model(teacher) => {
                TeacherForward::Weights { config: &teacher.config, table: &teacher.table }
            }
            TeacherSource::Cache(Cache { k, vocab, tail, .. }) => {
                TeacherForward::TopK { k: *k, vocab: *vocab, tail: *tail }
            }
        };
        let objective = Objective::Distillation(Distilled { teacher, spec: self.spec, alpha: self.alpha });
        objective.forward(&student.config, &student.table, BatchTokens::of_tokens(tokens)).unwrap()
    }

    pub(crate) fn model(&self) -> Option<&Golden> {
        match &self.source {
            TeacherSource::Model(teacher) => Some(teacher),
            TeacherSource::Cache(_) => None,
        }
    }
}

impl Cache {
    /// Micro-batches with what is cached of the samples of their rows.
    pub(crate) fn batches<'a>(
        &self,
        batches: &'a [StreamRows<'a>],
        keys: impl Iterator<Item = &'a [RowKey]>,
    ) -> CachedBatches<'a> {
        let of_rows = |keys: &[RowKey]| {
            let (mut ids, mut log_probs) = (Vec::new(), Vec::new());
            for key in keys {
                let (all_ids, all_log_probs) = &self.rows[key.sample as usize];
                let range =
                    key.position as usize * self.k as usize..(key.position as usize + 1) * self.k as usize;
                ids.extend_from_slice(&all_ids[range.clone()]);
                log_probs.extend_from_slice(&all_log_probs[range]);
            }
            (ids, log_probs)
        };
        CachedBatches { batches: batches.iter(), cached: keys.map(of_rows).collect(), next: 0 }
    }
}

/// Micro-batches with their cached teacher.
pub(crate) struct CachedBatches<'a> {
    batches: std::slice::Iter<'a, StreamRows<'a>>,
    cached: Vec<(Vec<i32>, Vec<f32>)>,
    next: usize,
}

impl MicroBatches for CachedBatches<'_> {
    type Error = RunError;

    fn next(&mut self, feed: Feed<'_>) -> Result<(), RunError> {
        let (ids, log_probs) = &self.cached[self.next];
        self.next += 1;
        let inputs = [FurtherInput::Indices(ids), FurtherInput::Statistics(log_probs)];
        feed(&StreamBatch { streams: &[*self.batches.next().unwrap()], inputs: &inputs })
    }
}
