//! Run folders as they are found: growing, finished, resumed, damaged, read-only, several at once.

#![allow(clippy::print_stdout, reason = "a measurement prints its figures")]

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use zeroth_monitor::{Health, OpenError, Run, draw_once, report, snapshot};

fn line(step: u64) -> String {
    format!(
        "{{\"step\":{step},\"loss\":{},\"grad_norm\":1.5,\"lr\":1e-3,\"tokens\":512,\"tokens_per_second\":1000.5,\"step_ms\":512.0,\"skipped\":false}}\n",
        5.0 / step as f64
    )
}

fn append(path: &Path, text: &str) {
    fs::OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

/// A run of `steps` steps whose launcher and only rank are this process.
fn write_run(folder: &Path, steps: u64, state: &str) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("metrics.jsonl"), (1..=steps).map(line).collect::<String>()).unwrap();
    write_status(folder, state, std::process::id(), "running");
}

fn machine() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    format!("{} {}", boot.trim(), fs::read_link("/proc/self/ns/pid").unwrap().display())
}

fn write_status(folder: &Path, state: &str, pid: u32, rank_state: &str) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let status = json!({
        "zeroth_status": 1, "time": now, "state": state, "step": 3, "steps": 10, "model": "tiny", "device": "cpu",
        "host": "here", "machine": machine(), "pid": std::process::id(),
        "ranks": [{"rank": 0, "host": "here", "pid": pid, "state": rank_state, "step": 3, "op": "all_gather#4",
                   "heartbeat_age": 0.1, "pss_bytes": 50_000_000, "gpu_bytes": null}],
        "plan": {"device": {"parameters": 10_000_000, "gradients": 5_000_000, "total": 15_000_000},
                 "host": {"total": 0}, "overhead": 40_000_000},
    });
    fs::write(folder.join("status.json"), status.to_string()).unwrap();
}

#[test]
fn a_growing_run_is_followed_and_a_resumed_one_has_its_seam() {
    let folder = tempfile::tempdir().unwrap();
    let (metrics, events) = (folder.path().join("metrics.jsonl"), folder.path().join("events.jsonl"));
    write_run(folder.path(), 6, "training");
    let mut run = Run::open(folder.path()).unwrap();
    assert_eq!((run.state(), run.step(), run.steps()), ("training", 6, 10));
    assert_eq!(run.last("loss"), Some(5.0 / 6.0));
    assert!(!run.poll());
    append(&metrics, &(line(7) + &line(8)[..20]));
    assert!(run.poll());
    assert_eq!(run.step(), 7, "a torn line waits");
    // Resumed after step 4: later lines are cut off.
    let kept: String = (1..=4).map(line).collect();
    fs::write(&metrics, kept + &line(5).replace("loss\":1", "loss\":9")).unwrap();
    append(&events, "{\"time\":1.0,\"event\":\"resume\",\"step\":4}\n");
    assert!(run.poll());
    assert_eq!((run.step(), run.last("loss")), (5, Some(9.0)));
    assert_eq!(run.seams().collect::<Vec<_>>(), [4]);
    // Replaced by a rename.
    fs::write(folder.path().join("new"), line(1)).unwrap();
    fs::rename(folder.path().join("new"), &metrics).unwrap();
    run.poll();
    assert_eq!(run.last("loss"), Some(5.0));
}

#[test]
fn garbage_is_counted_and_bounded() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 3, "training");
    let metrics = folder.path().join("metrics.jsonl");
    append(&metrics, "garbage\n\0\0\0\n[]\n{\"step\":-1,\"loss\":1}\n{\"step\":1.5}\n{\"loss\":1}\n");
    let mut many = String::new();
    for number in 0..300 {
        write!(many, "\"x{number}\":{number},").unwrap();
    }
    append(&metrics, &format!("{{\"step\":4,{many}\"loss\":1.25}}\n"));
    append(&metrics, &line(5));
    append(
        &folder.path().join("events.jsonl"),
        &format!("nonsense\n{{\"event\":\"{}\"}}\n", "\\u001b[31m".repeat(1000)),
    );
    fs::write(folder.path().join("plan.json"), "{\"device_bytes\": [1, 2").unwrap();
    fs::create_dir(folder.path().join("origin.json")).unwrap();
    let run = Run::open(folder.path()).unwrap();
    assert_eq!((run.step(), run.garbage()), (5, 7));
    let all = snapshot(&[run]);
    assert!(all["runs"][0]["curves"].as_array().unwrap().len() <= 40);
    let event = all["runs"][0]["events"][0]["event"].as_str().unwrap();
    assert!(event.chars().count() <= 200 && !event.contains('\u{1b}'), "{event}");
}

#[test]
fn damaged_status_files_are_no_status() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 2, "training");
    for text in [
        "",
        "{",
        "[]",
        "{}",
        "{\"zeroth_status\":\"x\"}",
        "{\"zeroth_status\":1,\"ranks\":7,\"time\":\"x\",\"state\":[]}",
        "null",
    ] {
        fs::write(folder.path().join("status.json"), text).unwrap();
        let run = Run::open(folder.path()).unwrap();
        assert!(run.ranks().is_empty(), "{text}");
        assert!(report(&[run]).contains("step 2"), "{text}");
    }
}

#[test]
fn what_is_no_run_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| Run::open(path).err().unwrap();
    let missing = refused(&folder.path().join("absent"));
    assert!(
        matches!(missing, OpenError::Missing { .. }) && missing.to_string().contains("--output"),
        "{missing}"
    );
    assert!(refused(folder.path()).to_string().contains("contains no run"));
    fs::write(folder.path().join("file"), "").unwrap();
    assert!(matches!(refused(&folder.path().join("file")), OpenError::NoRun { .. }));
    write_run(&folder.path().join("runs/first"), 1, "done");
    assert!(refused(&folder.path().join("runs")).to_string().contains("runs/first"));
}

#[test]
fn ranks_are_running_stopped_dead_or_silent_as_their_processes_are() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 3, "training");
    let health = |run: &mut Run| {
        run.poll();
        run.ranks()[0].health
    };
    let mut run = Run::open(folder.path()).unwrap();
    assert_eq!(health(&mut run), Health::Running);
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let signal = |name: &str| {
        let sent = std::process::Command::new("kill").args(["-s", name, &child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    };
    write_status(folder.path(), "training", child.id(), "running");
    assert_eq!(health(&mut run), Health::Running);
    signal("STOP");
    while health(&mut run) != Health::Stopped {
        std::thread::yield_now();
    }
    signal("KILL");
    while health(&mut run) != Health::Dead {
        std::thread::yield_now();
    }
    child.wait().unwrap();
    assert!(draw_once(vec![Run::open(folder.path()).unwrap()], 80, 30).join("\n").contains("✖   0 dead"));
    // Elsewhere: the file and the heartbeat tell.
    let text = fs::read_to_string(folder.path().join("status.json")).unwrap();
    let mut status: Value = serde_json::from_str(&text).unwrap();
    status["machine"] = "elsewhere".into();
    fs::write(folder.path().join("status.json"), status.to_string()).unwrap();
    assert_eq!(health(&mut run), Health::Running);
    status["ranks"][0]["heartbeat_age"] = 5.5.into();
    status["time"] = (status["time"].as_f64().unwrap() + 1.0).into();
    fs::write(folder.path().join("status.json"), status.to_string()).unwrap();
    assert_eq!(health(&mut run), Health::Silent);
    // A file that nobody has written for long is that of a run that is gone.
    status["time"] = 1000.0.into();
    fs::write(folder.path().join("status.json"), status.to_string()).unwrap();
    let late = Run::open(folder.path()).unwrap();
    assert_eq!((late.state(), late.ranks()[0].health), ("lost", Health::Silent));
    // One that has ended is shown as it ended.
    status["state"] = "done".into();
    status["ranks"][0]["state"] = "ended".into();
    fs::write(folder.path().join("status.json"), status.to_string()).unwrap();
    let done = Run::open(folder.path()).unwrap();
    assert_eq!((done.state(), done.ranks()[0].health, done.has_ended()), ("done", Health::Ended, true));
}

#[test]
fn views_fit_any_size_and_read_only_folders_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["first", "second"].map(|name| folder.path().join(name));
    write_run(&one, 50, "training");
    write_run(&two, 80, "done");
    append(
        &one.join("events.jsonl"),
        "{\"time\":1.0,\"event\":\"start\"}\n{\"time\":2.0,\"event\":\"resume\",\"step\":20}\n",
    );
    fs::create_dir_all(one.join("checkpoints/step-20")).unwrap();
    fs::write(one.join("checkpoints/step-20/manifest.json"), "{}").unwrap();
    let entries = |folder: &Path| fs::read_dir(folder).unwrap().count();
    let before = entries(&one);
    let open = || vec![Run::open(&one).unwrap(), Run::open(&two).unwrap()];
    for (width, height) in
        [(0, 0), (1, 1), (19, 5), (20, 6), (40, 12), (40, 24), (80, 24), (160, 50), (400, 100)]
    {
        let lines = draw_once(open(), width, height);
        assert!(lines.iter().all(|line| line.chars().count() <= width.into()));
        if width >= 40 {
            let text = lines.join("\n");
            for wanted in ["first", "training", "50/10", "done", "loss"] {
                assert!(text.contains(wanted), "{width}×{height} lacks {wanted}:\n{text}");
            }
        }
    }
    let text = report(&open());
    assert!(text.contains("resumed after step 20") && text.contains("checkpoints: step 20"), "{text}");
    let all = snapshot(&open());
    assert_eq!(all["runs"].as_array().unwrap().len(), 2);
    assert_eq!(entries(&one), before, "nothing is written");
}

/// A character that steers a terminal or reorders a line.
fn steers(character: char) -> bool {
    character.is_control() || matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[test]
fn names_steer_no_view_and_fill_none() {
    const EVIL: &str = "\u{202e}sol\u{2066}\u{1b}[31m\u{9b}2J\n";
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("a\u{202e}b\u{1b}[2J");
    write_run(&run, 3, "training");
    let evil = json!({"step": 4, format!("{EVIL}_loss"): 1.5, "loss": 1.25}).to_string() + "\n";
    append(&run.join("metrics.jsonl"), &evil.replace(":4", ":5").repeat(100));
    append(&run.join("events.jsonl"), &(json!({"time": 1.0, "event": EVIL, EVIL: EVIL}).to_string() + "\n"));
    let origin = json!({EVIL: {"value": EVIL, "origin": EVIL}});
    fs::write(run.join("origin.json"), origin.to_string()).unwrap();
    let status = fs::read_to_string(run.join("status.json")).unwrap();
    let mut status: Value = serde_json::from_str(&status).unwrap();
    for key in ["model", "host", "state"] {
        status[key] = EVIL.into();
    }
    status["ranks"][0]["op"] = EVIL.into();
    status["plan"]["device"][EVIL] = 7.into();
    fs::write(run.join("status.json"), status.to_string()).unwrap();

    let open = || vec![Run::open(&run).unwrap()];
    let all = snapshot(&open());
    let curves: Vec<&str> = all["runs"][0]["curves"]
        .as_array()
        .unwrap()
        .iter()
        .map(|curve| curve["name"].as_str().unwrap())
        .collect();
    let ours = curves.iter().filter(|name| name.ends_with("_loss")).collect::<Vec<_>>();
    assert_eq!(ours, [&"\\u{202e}sol\\u{2066}\\u{1b}[31m\\u{9b}2J\\u{a}_loss"], "one curve: {curves:?}");
    for (width, height) in [(40, 24), (120, 40), (200, 60)] {
        let lines = draw_once(open(), width, height);
        assert!(!lines.iter().any(|line| line.contains(steers)), "{lines:?}");
    }
    assert!(draw_once(open(), 200, 60).join("\n").contains("\\u{202e}sol"));
    let text = report(&open());
    // The folder is the user's own; the command escapes all that it prints.
    let shown = text.replace(run.to_str().unwrap(), "");
    assert!(!shown.replace('\n', "").contains(steers) && shown.contains("\\u{202e}sol"), "{shown:?}");
    let strings = |value: &Value| -> Vec<String> {
        let mut open = vec![value];
        let mut found = Vec::new();
        while let Some(value) = open.pop() {
            match value {
                Value::String(text) => found.push(text.clone()),
                Value::Array(all) => open.extend(all),
                Value::Object(all) => {
                    found.extend(all.keys().cloned());
                    open.extend(all.values());
                }
                _ => {}
            }
        }
        found
    };
    let mut one = all["runs"][0].clone();
    one["folder"] = Value::Null;
    let steering: Vec<String> = strings(&one).into_iter().filter(|text| text.contains(steers)).collect();
    assert_eq!(steering, Vec::<String>::new());
}

#[test]
fn other_curves_displace_none_of_ours() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 1, "training");
    let mut many = String::new();
    for number in 0..20 {
        for step in 1..=3 {
            write!(many, "{{\"step\":{step}").unwrap();
            for name in 0..20 {
                write!(many, ",\"x{}\":1", number * 20 + name).unwrap();
            }
            writeln!(many, "}}").unwrap();
        }
    }
    fs::write(folder.path().join("metrics.jsonl"), many + &line(4)).unwrap();
    let run = Run::open(folder.path()).unwrap();
    assert_eq!((run.last("loss"), run.last("grad_norm")), (Some(1.25), Some(1.5)));
    assert!(snapshot(&[run])["runs"][0]["curves"].as_array().unwrap().len() <= 47);
}

#[test]
fn events_tell_how_a_run_without_a_status_ended() {
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 4, "training");
    fs::remove_file(folder.path().join("status.json")).unwrap();
    let state = || {
        let run = Run::open(folder.path()).unwrap();
        (run.state().to_owned(), run.has_ended(), run.steps())
    };
    let events = folder.path().join("events.jsonl");
    assert_eq!(state(), ("unknown".to_owned(), false, 0));
    append(&events, "{\"time\":1.0,\"event\":\"start\",\"ranks\":1,\"steps\":9,\"host\":\"h\",\"pid\":1}\n");
    assert_eq!(state(), ("unknown".to_owned(), false, 9));
    for end in ["done", "stopped", "failed"] {
        append(&events, &format!("{{\"time\":2.0,\"event\":\"end\",\"state\":\"{end}\",\"step\":4}}\n"));
        assert_eq!(state(), (end.to_owned(), true, 9));
    }
    assert!(report(&[Run::open(folder.path()).unwrap()]).contains("failed · step 4/9"));
    append(&events, "{\"time\":3.0,\"event\":\"start\",\"ranks\":1,\"steps\":12,\"host\":\"h\",\"pid\":1}\n");
    assert_eq!(state(), ("unknown".to_owned(), false, 12), "started again");
    append(&events, "{\"time\":4.0,\"event\":\"end\",\"state\":\"no such state\"}\n");
    assert_eq!(state().0, "unknown");
}

/// `ZEROTH_FULL=1` reads a million steps and prints the time and the memory it took.
#[test]
fn a_million_steps_open() {
    if std::env::var_os("ZEROTH_FULL").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    write_run(folder.path(), 1, "done");
    let mut text = String::new();
    for step in 1..=1_000_000_u64 {
        let loss = 2.0 + 8.0 / (step as f64).sqrt();
        writeln!(text, "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":{},\"lr\":{},\"tokens\":4096,\"tokens_per_second\":{},\"step_ms\":{},\"loss_scale\":1.0,\"skipped\":false,\"device_bytes_peak\":123456789,\"host_bytes_peak\":234567890,\"samples_seen\":{}}}", loss / 7.0, 1e-3 / loss, 40960.0 / loss, 100.0 * loss, step * 32).unwrap();
    }
    fs::write(folder.path().join("metrics.jsonl"), text).unwrap();
    // Time on a CPU: other processes do not count.
    let on_cpu = || -> f64 {
        let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
    };
    let (begun, before) = (Instant::now(), on_cpu());
    let run = Run::open(folder.path()).unwrap();
    let (took, on_cpu) = (begun.elapsed(), on_cpu() - before);
    assert_eq!((run.step(), run.garbage()), (1_000_000, 0));
    let peak = fs::read_to_string("/proc/self/status").unwrap();
    let peak = peak.lines().find(|line| line.starts_with("VmRSS")).unwrap().to_owned();
    println!("1,000,000 steps opened in {took:?}, {on_cpu:.2} s of it on a CPU; {peak}");
}
