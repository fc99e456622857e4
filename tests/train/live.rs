//! What a run shows of itself: status.json, events.jsonl, `trace-now`, and `zeroth monitor`.

use std::fs;
use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::running::{Long, signal};
use super::{json, new_data, new_model, text, train_on};
use crate::common::zeroth;

/// Names of the events, in order.
fn events(run: &Path) -> Vec<(String, Option<u64>)> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let event = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap();
        assert!(event["time"].as_f64().unwrap() > 1e9);
        (event["event"].as_str().unwrap().to_owned(), event["step"].as_u64())
    };
    text.lines().map(event).collect()
}

fn monitor(run: &Path) -> Value {
    let shown = zeroth(&["monitor", text(run), "--format", "json"]);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    serde_json::from_str::<Value>(&shown.stdout).unwrap()["runs"][0].clone()
}

#[test]
fn a_finished_and_a_resumed_run_are_told_by_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (new_model(folder.path(), 16, 1, 16, 32), new_data(folder.path(), 8, 6, 32));
    let run = folder.path().join("run");
    let flags = |steps: &'static str| {
        ["--ranks", "2", "--max-steps", steps, "--save-steps", "2", "--eval-steps", "3", "--eval-data"]
    };
    let named = [text(&data), "--monitor", "--run-name", "my run"];
    let first = train_on(&model, &data, &run, &[&flags("4")[..], &named].concat());
    first.assert_done();
    assert!(first.stderr.contains("--monitor needs a terminal; `zeroth monitor "), "{}", first.stderr);
    let status = json(&run.join("status.json"));
    assert_eq!((&status["state"], &status["step"], &status["steps"]), (&"done".into(), &4.into(), &4.into()));
    let ranks = status["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    assert!(ranks.iter().all(|rank| rank["state"] == "ended" && rank["pid"].as_u64().is_some()), "{ranks:?}");
    let plan = json(&run.join("plan.json"));
    assert_eq!(status["plan"]["device"], plan["device_bytes"]);
    assert_eq!(status["plan"]["overhead"], plan["overhead_bytes"]["total"]);
    let expected =
        [("start", None), ("save", Some(2)), ("eval", Some(3)), ("save", Some(4)), ("end", Some(4))];
    let owned = |events: &[(&str, Option<u64>)]| -> Vec<(String, Option<u64>)> {
        events.iter().map(|(name, step)| ((*name).to_owned(), *step)).collect()
    };
    let seen: Vec<_> =
        events(&run).into_iter().filter(|event| *event != ("eval".to_owned(), Some(4))).collect();
    assert_eq!(seen, owned(&expected));

    let before = events(&run).len();
    let resumed = [&flags("6")[..], &[text(&data), "--resume", "auto"]].concat();
    train_on(&model, &data, &run, &resumed).assert_done();
    assert_eq!(events(&run)[before..][..2], owned(&[("start", None), ("resume", Some(4))]));

    // A folder that nobody may write to is read.
    fs::set_permissions(&run, fs::Permissions::from_mode(0o555)).unwrap();
    let shown = monitor(&run);
    let printed = zeroth(&["monitor", text(&run)]);
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!((&shown["state"], &shown["step"], &shown["seams"][0]), (&"done".into(), &6.into(), &4.into()));
    assert_eq!(shown["checkpoints"][0]["step"], 6);
    assert_eq!(shown["garbage_lines"], 0);
    let curves = shown["curves"].as_array().unwrap();
    let loss = curves.iter().find(|curve| curve["name"] == "loss").unwrap();
    assert_eq!(loss["points"].as_array().unwrap().len(), 6);
    assert_eq!(shown["name"], "my run", "it keeps its name");
    // Without a status the events tell.
    fs::rename(run.join("status.json"), folder.path().join("status.json")).unwrap();
    let without = monitor(&run);
    assert_eq!(
        (&without["state"], &without["steps"], &without["ended"]),
        (&"done".into(), &6.into(), &true.into())
    );
    fs::rename(folder.path().join("status.json"), run.join("status.json")).unwrap();
    let config = shown["config"].as_array().unwrap();
    assert!(config.iter().any(|one| one["key"] == "train_batch_size" && one["origin"] != "default"));
    assert!(printed.stdout.contains("done · step 6/6"), "{}", printed.stdout);

    // What the run wrote goes with it; what it did not write stays.
    fs::write(run.join("notes.txt"), "mine").unwrap();
    let again = [&flags("2")[..], &[text(&data), "--overwrite-output-dir"]].concat();
    train_on(&model, &data, &run, &again).assert_done();
    assert_eq!(events(&run)[0], ("start".to_owned(), None));
    assert_eq!(monitor(&run)["name"], "run", "a new run has no name");
    assert!(run.join("notes.txt").exists());
}

#[test]
fn a_timeline_is_written_on_request_and_a_stopped_and_a_killed_rank_are_shown() {
    let mut long = Long::start(2, &[]);
    let output = long.output.clone();
    fs::write(output.join("trace-now"), "").unwrap();
    let timelines = || -> Vec<String> {
        let names = fs::read_dir(output.join("logs")).unwrap().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.starts_with("step-") && name.ends_with(".trace.json")).collect()
    };
    long.running.wait_until(Duration::from_mins(1), "there is a timeline", || {
        events(&output).iter().any(|(name, _)| name == "trace")
    });
    assert!(!output.join("trace-now").exists());
    let trace = json(&output.join("logs").join(&timelines()[0]));
    let spans = |rank: u64| {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        events.filter(|event| event["ph"] == "X" && event["pid"] == rank).count()
    };
    let heads = trace["traceEvents"].as_array().unwrap().iter();
    let heads = heads.filter(|event| event["name"] == "head_loss backward of head" && event["pid"] == 0);
    assert_eq!(heads.count(), 1, "one step, one micro-batch");
    assert_eq!(spans(0), spans(1));
    let step = timelines()[0].trim_start_matches("step-").trim_end_matches(".trace.json").parse().unwrap();
    assert!(events(&output).contains(&("trace".to_owned(), Some(step))));

    // The status is a second old at most.
    let is_training = || monitor(&output)["state"] == "training";
    long.running.wait_until(Duration::from_secs(20), "it is shown as training", is_training);
    let shown = monitor(&output);
    assert_eq!(
        (&shown["state"], &shown["timelines"][0]),
        (&"training".into(), &timelines()[0].as_str().into())
    );
    let rank = &shown["ranks"][1];
    assert_eq!((&rank["health"], &rank["pid"]), (&"running".into(), &long.running.ranks()[1].into()));
    assert!(rank["op"].is_string(), "{rank}");
    // Memory is read where it takes a small part of the time: on a busy machine some seconds later.
    let has_memory =
        || monitor(&output)["ranks"][1]["pss_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20);
    long.running.wait_until(Duration::from_secs(20), "its memory is shown", has_memory);

    let processes = long.running.ranks();
    signal(processes[1], "STOP");
    let health = || monitor(&output)["ranks"][1]["health"].clone();
    long.running.wait_until(Duration::from_secs(5), "it is shown as stopped", || health() == "stopped");
    signal(processes[1], "KILL");
    assert_eq!(long.running.code(), Some(1));
    let shown = monitor(&output);
    assert_eq!(
        (&shown["state"], &shown["ranks"][1]["health"]),
        (&"failed".into(), &"dead".into()),
        "{shown}"
    );
    assert_eq!(shown["ranks"][0]["health"], "ended");
    let last: Vec<String> = events(&output).into_iter().rev().take(2).map(|(name, _)| name).collect();
    assert_eq!(last, ["end", "rank_lost"]);
}

#[test]
fn what_cannot_be_watched_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("absent");
    let refused = zeroth(&["monitor", text(&missing), text(folder.path())]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("there is no folder "), "{}", refused.stderr);
    assert!(refused.stderr.contains(" contains no run: neither metrics.jsonl nor "), "{}", refused.stderr);
    fs::write(folder.path().join("metrics.jsonl"), "garbage\n{\"step\":1,\"loss\":2.5}\n").unwrap();
    let shown = zeroth(&["monitor", text(folder.path())]);
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    assert!(
        shown.stdout.contains("1 line could not be read") && shown.stdout.contains("loss 2.5"),
        "{}",
        shown.stdout
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = zeroth(&["monitor", text(folder.path()), "--web", "--port", &port]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{}", refused.stderr);
    assert_eq!(zeroth(&["monitor", text(folder.path()), "--port", &port]).code, 2, "a port without --web");

    // The page on another machine: the command is printed.
    let free = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port().to_string()
    };
    let mut page = std::process::Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(["monitor", text(folder.path()), "--web", "--port", &free])
        .env("SSH_CONNECTION", "192.0.2.1 51234 192.0.2.3 2222")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(page.stderr.take().unwrap()).lines();
    let hint = lines.map_while(Result::ok).find(|line| line.contains("ssh"));
    page.kill().unwrap();
    page.wait().unwrap();
    let expected = format!("ssh -N -L {free}:127.0.0.1:{free} -p 2222 192.0.2.3");
    assert_eq!(hint, Some(format!("from another machine, first there: {expected}")));

    // Somebody else's status.json: not a run folder.
    let theirs = tempfile::tempdir().unwrap();
    fs::write(theirs.path().join("status.json"), "{\"mine\": true}").unwrap();
    let (model, data) = (new_model(folder.path(), 16, 1, 16, 32), new_data(folder.path(), 8, 6, 32));
    let refused = train_on(&model, &data, theirs.path(), &["--max-steps", "1"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert_eq!(fs::read_to_string(theirs.path().join("status.json")).unwrap(), "{\"mine\": true}");
}
