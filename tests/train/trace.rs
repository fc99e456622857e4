//! `--trace`: a timeline in Chrome's trace format, which Perfetto reads.

use std::collections::BTreeSet;
use std::fs;

use super::{json, number, text, train};

#[test]
fn the_timeline_has_every_rank_its_queues_and_its_instructions() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in [1u64, 2] {
        let run = folder.path().join(ranks.to_string());
        let file = folder.path().join(format!("{ranks}.json"));
        let count = ranks.to_string();
        let flags = ["--trace", text(&file), "--ranks", &count, "--deepspeed", "zero3", "--max-steps", "3"];
        train("qwen3-tied", &run, &flags).assert_done();
        let trace = json(&file);
        let events = trace["traceEvents"].as_array().unwrap();
        for rank in 0..ranks {
            let own = || events.iter().filter(|event| event["pid"] == rank);
            let named = |what: &str| -> BTreeSet<&str> {
                own()
                    .filter(|event| event["ph"] == "M" && event["name"] == what)
                    .map(|event| event["args"]["name"].as_str().unwrap())
                    .collect()
            };
            assert_eq!(named("process_name"), BTreeSet::from([format!("rank {rank}").as_str()]));
            let queues = ["comm", "compute", "download", "load", "store", "upload"];
            assert_eq!(named("thread_name"), BTreeSet::from(queues));
            let spans: Vec<_> = own().filter(|event| event["ph"] == "X").collect();
            assert!(spans.iter().all(|event| number(&event["ts"]) >= 0.0 && number(&event["dur"]) >= 0.0));
            let times = |name: &str| spans.iter().filter(|event| event["name"] == name).count();
            assert_eq!(
                times("head_loss backward of head"),
                3,
                "one a step: the head computes its loss with its gradient"
            );
            let head = spans.iter().find(|event| event["name"] == "head_loss backward of head").unwrap();
            let lists = |list: &str, buffer: &str| {
                head["args"][list].as_array().unwrap().iter().any(|name| name == buffer)
            };
            assert!(lists("reads", "input") && lists("writes", "report"), "{head}");
            assert!(times("linear of block 0") > 0 && times("linear backward of block 1") > 0);
            let gathers =
                spans.iter().filter(|event| event["name"].as_str().unwrap().starts_with("all_gather of "));
            assert_eq!(gathers.filter(|event| event["cat"] == "comm").count() > 0, ranks > 1);
        }
        if ranks > 1 {
            let logs = fs::read_dir(run.join("logs")).unwrap();
            let mut names: Vec<_> = logs.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, ["rank-0.log", "rank-1.log"], "no parts are left");
        }
    }
}
