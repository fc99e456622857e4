//! Evaluation data: held out from the training data, in batches of its own size, with rows longer than any of training.

use std::fs;

use serde_json::Value;

use super::strategies::evaluated;
use super::{json, metrics, new_data, new_model, number, text, train_on, written};

fn eval_losses(run: &std::path::Path) -> Vec<f64> {
    metrics(run)
        .iter()
        .filter(|line| line.get("eval_loss").is_some())
        .map(|line| number(&line["eval_loss"]))
        .collect()
}

fn losses(run: &std::path::Path) -> Vec<Value> {
    let lines = metrics(run).into_iter().filter(|line| line.get("loss").is_some());
    lines.map(|line| line["loss"].clone()).collect()
}

#[test]
fn a_share_of_the_data_is_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = new_model(folder, 16, 1, 32, 60);
    let data = new_data(folder, 21, 8, 60);
    let flags = ["--split_dataset_ratio", "0.2", "--eval_steps", "2", "--max-steps", "4", "--fp32"];
    let train =
        |name: &str, more: &[&str]| train_on(&model, &data, &folder.join(name), &[&flags[..], more].concat());
    let ended = train("one", &["--per-device-train-batch-size", "2"]);
    ended.assert_done();
    let plan = json(&folder.join("one/plan.json"));
    assert_eq!((&plan["samples"], &plan["evaluation_samples"]), (&16.into(), &5.into()));
    assert!(ended.stderr.contains("data: 16 samples, 128 tokens"), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("evaluation: 5 samples, 40 tokens") && ended.stderr.contains("held out"),
        "{}",
        ended.stderr
    );
    assert_eq!(evaluated(&folder.join("one")), [2, 4]);
    // On any number of ranks the same rows are held out, and the others keep their order.
    train("two", &["--ranks", "2"]).assert_done();
    for (one, two) in losses(&folder.join("one")).iter().zip(losses(&folder.join("two"))) {
        assert!((number(one) - number(&two)).abs() < 1e-6, "{one} {two}");
    }
    for (one, two) in eval_losses(&folder.join("one")).iter().zip(eval_losses(&folder.join("two"))) {
        assert!((one - two).abs() < 1e-6, "{one} {two}");
    }
    // The seed chooses; resuming keeps the rows of the first start.
    train("other", &["--per-device-train-batch-size", "2", "--seed", "7"]).assert_done();
    assert_ne!(eval_losses(&folder.join("one")), eval_losses(&folder.join("other")));
    let longer =
        ["--per-device-train-batch-size", "2", "--max-steps", "6", "--resume", "auto", "--seed", "9"];
    train("one", &longer).assert_done();
    assert_eq!(evaluated(&folder.join("one")), [2, 4, 6]);
    let in_order = ["--shuffle", "false", "--data_seed", "3"];
    train("in order", &in_order).assert_done();
    train("in order", &["--resume", "auto", "--max-steps", "6", "--data_seed", "4"]).assert_done();
    assert_eq!(evaluated(&folder.join("in order")), [2, 4, 6]);
    let refused = train("one", &["--resume", "auto", "--max-steps", "8", "--split_dataset_ratio", "0.3"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("--split-dataset-ratio"), "{}", refused.stderr);
    // Packs are made of the rows that remain.
    let packed = train("packed", &["--packing", "--max-length", "32"]);
    packed.assert_done();
    assert!(packed.stderr.contains("16 samples were packed into 4 packs"), "{}", packed.stderr);
    assert_eq!(metrics(&folder.join("packed"))[0]["tokens"], 32);
    let few = written(folder, "few.jsonl", &[r#"{"input_ids": [1, 2, 3]}"#]);
    let refused = train_on(&model, &few, &folder.join("few"), &flags);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("takes 1 of 1 samples"), "{}", refused.stderr);
}

#[test]
fn long_evaluation_rows_and_batches_are_planned() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = new_model(folder, 32, 2, 64, 60);
    let data = new_data(folder, 8, 8, 60);
    let short = fs::read_to_string(&data).unwrap();
    // Seven rows: the last batch of any size is a shorter one. The longest has 16 times the tokens of a training row.
    let row =
        |tokens: u64| serde_json::json!({"input_ids": (0..tokens).map(|at| at * 7 % 60).collect::<Vec<_>>()});
    let rows: Vec<String> = [5, 128, 20, 64, 3, 90, 100].map(|tokens| row(tokens).to_string()).to_vec();
    let long = written(folder, "long.jsonl", &rows);
    let brief = written(folder, "brief.jsonl", &short.lines().take(2).collect::<Vec<_>>());
    let train = |name: &str, held_out: &std::path::Path, more: &[&str]| {
        let flags =
            ["--max-steps", "6", "--eval_steps", "3", "--fp32", "--logging-steps", "1", "--eval-data"];
        let run = folder.join(name);
        train_on(&model, &data, &run, &[&flags[..], &[text(held_out)], more].concat()).assert_done();
        run
    };
    let rows_of = |run: &std::path::Path| -> u64 {
        json(&run.join("plan.json"))["rows"].as_array().unwrap().last().unwrap().as_u64().unwrap()
    };
    let runs = [
        train("brief", &brief, &[]),
        train("long", &long, &[]),
        train("many", &long, &["--per_device_eval_batch_size", "4"]),
        train("all", &long, &["--per_device_eval_batch_size", "4294967296"]),
        train("ranks", &long, &["--ranks", "2", "--per_device_eval_batch_size", "2"]),
    ];
    // One row of 128 tokens; 5 + 128 + 20 + 64; all 410; 5 + 128 on one of two ranks.
    assert_eq!(runs.each_ref().map(|run| rows_of(run)), [16, 128, 224, 416, 144]);
    let planned =
        |run: &std::path::Path| json(&run.join("plan.json"))["device_bytes"]["total"].as_u64().unwrap();
    assert!(planned(&runs[0]) < planned(&runs[1]) && planned(&runs[1]) < planned(&runs[2]));
    for run in &runs {
        let lines = metrics(run);
        let plan = planned(run);
        let steps = lines.iter().filter(|line| line.get("loss").is_some());
        let peaks: Vec<[u64; 2]> = steps
            .map(|line| ["device_bytes_peak", "host_bytes_peak"].map(|key| line[key].as_u64().unwrap()))
            .collect();
        assert!(peaks.iter().all(|[device, _]| *device == plan), "{peaks:?} {plan}");
        let overhead = json(&run.join("plan.json"))["overhead_bytes"]["total"].as_u64().unwrap();
        assert!(peaks.iter().all(|[_, host]| *host <= plan + overhead), "{peaks:?} {plan} {overhead}");
        assert_eq!(evaluated(run), [3, 6]);
    }
    // Larger batches do not change the loss beyond rounding.
    let expected = eval_losses(&runs[1]);
    for run in &runs[2..4] {
        for (found, expected) in eval_losses(run).iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5 * expected, "{found} {expected}");
        }
    }
    // The same as the loss of these rows when the trained model is evaluated in a run of its own.
    let (longer, alone) = (runs[1].join("model"), folder.join("alone"));
    let flags = ["--learning-rate", "1e-30", "--max-steps", "1", "--fp32", "--eval-data", text(&long)];
    train_on(&longer, &data, &alone, &flags).assert_done();
    let (found, expected) = (eval_losses(&alone)[0], *expected.last().unwrap());
    assert!((found - expected).abs() < 1e-5 * expected, "{found} {expected}");
    // Training is what it is beside shorter evaluations.
    for (one, other) in losses(&runs[0]).iter().zip(losses(&runs[1])) {
        assert!((number(one) - number(&other)).abs() < 1e-6, "{one} {other}");
    }
}
