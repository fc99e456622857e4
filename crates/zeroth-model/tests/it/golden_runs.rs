//! The forwards of all families and their derived gradients against PyTorch: the golden runs of `tests/golden`, carried
//! out by the reference machine in f64 with AdamW written down plainly.

use std::path::{Path, PathBuf};

use serde_json::Value;
use zeroth_graph::Graph;
use zeroth_graph::reference::{Data, Interpreter};
use zeroth_model::{
    Adapter, BatchTokens, ModelConfig, Parameter, ParameterTable, WeightFiles, add_adapters,
    forward_training, table,
};

/// A golden model: its folder, its weights and its rows.
struct Golden {
    name: String,
    config: ModelConfig,
    table: ParameterTable,
    /// Each parameter's elements, in the order of the table.
    weights: Vec<Vec<f64>>,
    rows: Vec<Row>,
    steps: Value,
}

/// The tokens of a row; source and target, of an encoder-decoder.
struct Row {
    streams: Vec<Tokens>,
}

struct Tokens {
    ids: Vec<usize>,
    /// What each token should predict.
    labels: Vec<i64>,
}

fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn goldens() -> Vec<Golden> {
    goldens_in(&golden_folder())
}

/// Models with a mixture of experts.
fn moe_goldens() -> Vec<Golden> {
    goldens_in(&golden_folder().join("moe"))
}

/// Encoder-decoders.
fn t5_goldens() -> Vec<Golden> {
    let mut goldens = goldens_in(&golden_folder().join("t5"));
    goldens.extend(["t5-relu-tied-all", "t5-relu-tied-qv"].map(|case| Golden::lora("t5/lora", case)));
    goldens
}

fn goldens_in(folder: &Path) -> Vec<Golden> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("steps.json").is_file())
        .collect();
    folders.sort();
    assert!(folders.len() >= 5, "{folders:?}");
    folders.iter().map(|folder| Golden::read(folder)).collect()
}

impl Golden {
    fn read(folder: &Path) -> Self {
        let config = ModelConfig::from_folder(folder).unwrap();
        let table = table(&config);
        let files = WeightFiles::open(folder, &table).unwrap();
        let weights = table.iter().map(|parameter| {
            let mut elements = vec![0f32; parameter.elements() as usize];
            files.read_f32(&parameter.name, 0..parameter.elements(), &mut elements).unwrap();
            elements.into_iter().map(f64::from).collect()
        });
        let rows = std::fs::read_to_string(folder.join("data.jsonl")).unwrap();
        Self {
            name: folder.file_name().unwrap().to_string_lossy().into_owned(),
            weights: weights.collect(),
            rows: rows.lines().map(|line| Row::read(line, &config)).collect(),
            steps: serde_json::from_str(&std::fs::read_to_string(folder.join("steps.json")).unwrap())
                .unwrap(),
            config,
            table,
        }
    }

    fn graph(&self, data: &[Data]) -> Graph {
        let rows = |stream: usize| data[stream].ids.len() as u64;
        let batch = if data.len() == 1 {
            BatchTokens::of_tokens(rows(0))
        } else {
            BatchTokens::of_pairs(rows(0), rows(1))
        };
        forward_training(&self.config, &self.table, batch, |parameter| !self.is_frozen(parameter)).unwrap()
    }

    fn is_frozen(&self, parameter: &Parameter) -> bool {
        let mut frozen = self.steps["frozen"].as_array().into_iter().flatten();
        frozen.any(|name| name == parameter.name.as_str())
    }

    /// A golden LoRA run.
    fn lora(folder: &str, case: &str) -> Self {
        let folder = golden_folder().join(folder).join(case);
        let steps = std::fs::read_to_string(folder.join("steps.json")).unwrap();
        let steps: Value = serde_json::from_str(&steps).unwrap();
        let base = Self::read(&golden_folder().join(steps["base"].as_str().unwrap()));
        let adapter = Adapter::open(&folder, &base.table).unwrap();
        let table = add_adapters(&base.table, adapter.lora()).unwrap();
        let mut of_base = base.weights.iter();
        let weights = table.iter().map(|parameter| {
            if !parameter.trained {
                return of_base.next().unwrap().clone();
            }
            let mut elements = vec![0f32; parameter.elements() as usize];
            adapter.read_f32(&parameter.name, 0..parameter.elements(), &mut elements).unwrap();
            elements.into_iter().map(f64::from).collect()
        });
        let weights = weights.collect();
        let steps = serde_json::json!({
            "frozen": base.table.iter().map(|parameter| &parameter.name).collect::<Vec<_>>(),
            "gradients_of_step_1": steps["gradients_of_step_1"],
            "runs": steps["runs"],
        });
        Self { name: case.to_owned(), weights, table, steps, ..base }
    }

    /// The summed loss of a step's rows, and the summed gradients of all parameters: of each row by itself, or of one
    /// micro-batch where a loss is one of the micro-batch.
    fn step(&self, weights: &[Vec<f64>], rows: &[&Row]) -> (f64, Vec<Vec<f64>>) {
        if self.config.aux_loss.is_none() {
            return self.row_by_row(weights, rows);
        }
        let data = pack(rows);
        run(&self.graph(&data), &data, weights)
    }

    /// The summed loss of some rows, and the summed gradients of all parameters, each row by itself.
    fn row_by_row(&self, weights: &[Vec<f64>], rows: &[&Row]) -> (f64, Vec<Vec<f64>>) {
        let mut loss = 0.0;
        let mut gradients: Vec<Vec<f64>> = weights.iter().map(|weight| vec![0.0; weight.len()]).collect();
        for row in rows {
            let data = pack(&[row]);
            let (row_loss, row_gradients) = run(&self.graph(&data), &data, weights);
            loss += row_loss;
            for (sum, gradient) in gradients.iter_mut().flatten().zip(row_gradients.iter().flatten()) {
                *sum += gradient;
            }
        }
        (loss, gradients)
    }
}

impl Row {
    fn read(line: &str, config: &ModelConfig) -> Self {
        let row: Value = serde_json::from_str(line).unwrap();
        let numbers = |key: &str| row[key].as_array().unwrap().iter().map(|n| n.as_i64().unwrap());
        let ids: Vec<usize> = numbers("input_ids").map(|id| id as usize).collect();
        let Some(tokens) = config.target_tokens else {
            // The shift by one: a token predicts the next one's label, and the last predicts nothing.
            let labels = numbers("labels").skip(1).chain([-100]).collect();
            return Self { streams: vec![Tokens { ids, labels }] };
        };
        let source = Tokens { labels: vec![-100; ids.len()], ids };
        let labels: Vec<i64> = numbers("labels").collect();
        // The decoder reads the label before.
        let read = |label: &i64| u64::try_from(*label).unwrap_or_else(|_| tokens.pad.unwrap());
        let before = labels[..labels.len() - 1].iter().map(read);
        let ids = std::iter::once(tokens.start).chain(before).map(|id| id as usize).collect();
        Self { streams: vec![source, Tokens { ids, labels }] }
    }

    fn trained(&self) -> usize {
        let labels = self.streams.iter().flat_map(|tokens| &tokens.labels);
        labels.filter(|label| **label >= 0).count()
    }
}

/// The streams of rows end to end.
fn pack(rows: &[&Row]) -> Vec<Data> {
    let pack_stream = |stream: usize| {
        let mut data =
            Data { ids: Vec::new(), labels: Vec::new(), positions: Vec::new(), starts: Vec::new() };
        for tokens in rows.iter().map(|row| &row.streams[stream]) {
            data.starts.push(data.ids.len());
            data.positions.extend(0..tokens.ids.len());
            data.ids.extend(&tokens.ids);
            data.labels.extend(&tokens.labels);
        }
        data
    };
    (0..rows[0].streams.len()).map(pack_stream).collect()
}

fn run(graph: &Graph, data: &[Data], weights: &[Vec<f64>]) -> (f64, Vec<Vec<f64>>) {
    let backward = graph.backward().unwrap();
    let mut machine = Interpreter::new(graph, data, weights.to_vec());
    let loss = machine.train(&backward);
    let params = graph.units.iter().flat_map(|unit| &unit.params);
    (loss, params.map(|param| machine.gradient(*param).to_vec()).collect())
}

fn norm(elements: &[f64]) -> f64 {
    elements.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn gradients_of_step_1_agree_with_pytorch() {
    gradients_agree(goldens());
}

#[test]
fn gradients_of_experts_agree_with_pytorch_and_peft() {
    let cases = ["qwen3-moe-normalized-all", "mixtral-no-window-all", "mixtral-no-window-qv-experts"];
    gradients_agree(
        moe_goldens().into_iter().chain(cases.map(|case| Golden::lora("moe/lora", case))).collect(),
    );
}

#[test]
fn gradients_of_encoder_decoders_agree_with_pytorch_and_peft() {
    gradients_agree(t5_goldens());
}

fn gradients_agree(goldens: Vec<Golden>) {
    for golden in goldens {
        let expected = &golden.steps["gradients_of_step_1"];
        let run = golden.steps["runs"]
            .as_array()
            .unwrap()
            .iter()
            .find(|run| run["name"] == expected["run"])
            .unwrap();
        let batch = run["batch"].as_u64().unwrap() as usize;
        let rows: Vec<&Row> = golden.rows.iter().take(batch).collect();
        let trained = rows.iter().map(|row| row.trained()).sum::<usize>() as f64;
        let (loss, gradients) = golden.step(&golden.weights, &rows);
        let said = run["loss"][0].as_f64().unwrap();
        assert!(
            (loss / trained - said).abs() < 1e-5 * said,
            "{}: loss {} {said}",
            golden.name,
            loss / trained
        );
        for (parameter, gradient) in golden.table.iter().zip(gradients) {
            if golden.is_frozen(parameter) {
                assert!(
                    gradient.iter().all(|gradient| *gradient == 0.0),
                    "{} {}",
                    golden.name,
                    parameter.name
                );
                continue;
            }
            let gradient: Vec<f64> = gradient.iter().map(|g| g / trained).collect();
            let name = format!("{} {}", golden.name, parameter.name);
            let written = parameter.name.strip_prefix("base_model.model.").unwrap_or(&parameter.name);
            let said = &expected["parameters"][written];
            let (found, length) = (norm(&gradient), said["norm"].as_f64().unwrap());
            assert!((found - length).abs() <= 1e-5 * length.max(1e-6), "{name}: norm {found} {length}");
            let places = numbers(&said["places"]);
            for (place, value) in places.iter().zip(numbers(&said["values"])) {
                let found = gradient[*place as usize];
                assert!((found - value).abs() <= 1e-5 * length, "{name}[{place}]: {found} {value}");
            }
        }
    }
}

#[test]
fn packed_rows_compute_what_they_compute_alone() {
    let of_rows = |golden: &Golden| golden.config.aux_loss.is_none();
    let of_experts = moe_goldens().into_iter().filter(of_rows).take(2);
    for golden in goldens().into_iter().chain(of_experts).chain(t5_goldens()) {
        let rows: Vec<&Row> = golden.rows.iter().take(4).collect();
        let data = pack(&rows);
        let (packed, packed_gradients) = run(&golden.graph(&data), &data, &golden.weights);
        let (alone, alone_gradients) = golden.row_by_row(&golden.weights, &rows);
        assert!((packed - alone).abs() < 1e-9, "{}: {packed} {alone}", golden.name);
        for (a, b) in packed_gradients.iter().flatten().zip(alone_gradients.iter().flatten()) {
            assert!((a - b).abs() < 1e-9, "{}: {a} {b}", golden.name);
        }
    }
}

#[test]
fn losses_and_norms_of_20_steps_agree_with_pytorch() {
    let is_aux = |golden: &Golden| golden.name == "mixtral-aux-3-layers";
    let of_encoders = goldens_in(&golden_folder().join("t5"));
    for golden in goldens().into_iter().chain(moe_goldens().into_iter().filter(is_aux)).chain(of_encoders) {
        let recipe = &golden.steps["recipe"];
        let of = |key: &str| recipe[key].as_f64().unwrap();
        let undecayed: Vec<&str> =
            recipe["undecayed"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        let run = &golden.steps["runs"][0];
        let batch = run["batch"].as_u64().unwrap() as usize;
        let (losses, norms, rates) = (numbers(&run["loss"]), numbers(&run["grad_norm"]), numbers(&run["lr"]));
        let mut weights = golden.weights.clone();
        let mut moments: Vec<Vec<[f64; 2]>> =
            weights.iter().map(|weight| vec![[0.0; 2]; weight.len()]).collect();
        for step in 0..losses.len() {
            let rows: Vec<&Row> =
                (0..batch).map(|place| &golden.rows[(step * batch + place) % golden.rows.len()]).collect();
            let trained = rows.iter().map(|row| row.trained()).sum::<usize>() as f64;
            let (loss, gradients) = golden.step(&weights, &rows);
            let at = format!("{} step {}", golden.name, step + 1);
            assert!(
                (loss / trained - losses[step]).abs() < 1e-4,
                "{at}: loss {} {}",
                loss / trained,
                losses[step]
            );
            let length = norm(&gradients.concat()) / trained;
            assert!(
                (length - norms[step]).abs() < 5e-4 * norms[step].max(1.0),
                "{at}: norm {length} {}",
                norms[step]
            );

            let clip = (of("max_grad_norm") / (length + 1e-6)).min(1.0) / trained;
            let (beta1, beta2, t) = (of("adam_beta1"), of("adam_beta2"), step as i32 + 1);
            let trained =
                golden.table.iter().enumerate().filter(|(_, parameter)| !golden.is_frozen(parameter));
            for (index, parameter) in trained {
                let decays = !undecayed.contains(&parameter.name.as_str());
                let decay = if decays { of("weight_decay") } else { 0.0 };
                for (element, weight) in weights[index].iter_mut().enumerate() {
                    let g = gradients[index][element] * clip;
                    let [m, v] = &mut moments[index][element];
                    *m = beta1 * *m + (1.0 - beta1) * g;
                    *v = beta2 * *v + (1.0 - beta2) * g * g;
                    let denominator = (*v / (1.0 - beta2.powi(t))).sqrt() + of("adam_epsilon");
                    *weight -= rates[step] * decay * *weight;
                    *weight -= rates[step] * (*m / (1.0 - beta1.powi(t))) / denominator;
                }
            }
        }
    }
}
