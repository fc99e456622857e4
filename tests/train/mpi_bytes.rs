//! Bytes that cross between hosts over MPI are those that the program counts, as their network cards saw them.

use std::path::Path;

use super::mpi_jobs::{LAUNCHERS, arguments, command, run};
use super::{json, new_data, new_model, number, text, written};
use crate::namespaces::Hosts;

/// Bytes that the second of two hosts with four ranks receives in a step: as its card counts, and as the program does.
fn bytes(hosts: &Hosts, launcher: &str, zero: &str, group: Option<u64>, micro_batches: u64) -> [f64; 2] {
    let folder = tempfile::tempdir().unwrap();
    let model = new_model(folder.path(), 256, 4, 512, 512);
    let data = new_data(folder.path(), 64, 16, 512);
    let group = group.map_or(String::new(), |group| format!(r#", "zeroth": {{"sum_group": {group}}}"#));
    let config = written(
        folder.path(),
        "config.json",
        &[format!(r#"{{"zero_optimization": {zero}, "bf16": {{"enabled": true}}{group}}}"#)],
    );
    let micro_batches = micro_batches.to_string();
    let output = |steps: u64| folder.path().join(format!("run-{steps}"));
    let received = |steps: u64| {
        let before = hosts.bytes(2)[0];
        let max_steps = steps.to_string();
        let flags = [
            ["--deepspeed", text(&config)],
            ["--max-steps", &max_steps],
            ["--gradient-accumulation-steps", &micro_batches],
            ["--per-device-train-batch-size", "1"],
            ["--save-strategy", "no"],
        ];
        let job = arguments(&model, &data, &output(steps), &flags.concat());
        run(folder.path(), command(hosts, launcher, "4,4", &job));
        hosts.bytes(2)[0] - before
    };
    // What start-up and the export send is the same in both.
    let (few, many) = (2, 7);
    let measured = (received(many) as f64 - received(few) as f64) / (many - few) as f64;
    [measured, counted(&output(few))]
}

fn counted(run: &Path) -> f64 {
    number(&json(&run.join("plan.json"))["bytes_between_hosts_per_step"])
}

#[test]
fn the_network_carries_what_the_program_counts() {
    let launchers = if super::is_full() { &LAUNCHERS[..] } else { &LAUNCHERS[1..] };
    for launcher in launchers {
        let Some(hosts) = Hosts::up(2, &[launcher]) else { continue };
        let hpz = r#"{"stage": 3, "zero_hpz_partition_size": 4}"#;
        let [flat, two_levels, plain, hpz] = [
            (r#"{"stage": 2}"#, Some(1), 1),
            (r#"{"stage": 2}"#, None, 1),
            (r#"{"stage": 3}"#, None, 8),
            (hpz, None, 8),
        ]
        .map(|(zero, group, micro_batches)| bytes(&hosts, launcher, zero, group, micro_batches));
        for (name, [measured, counted]) in
            [("flat", flat), ("two levels", two_levels), ("stage 3", plain), ("hpZ", hpz)]
        {
            println!("{launcher}, {name}: {measured:.0} bytes into a host a step, {counted:.0} counted");
            assert!((measured / counted - 1.0).abs() < 0.03, "{launcher}, {name}: {measured} {counted}");
        }
        assert!(two_levels[0] < 0.6 * flat[0], "{launcher}: {two_levels:?} {flat:?}");
        assert!(6.0 * hpz[0] <= plain[0], "{launcher}: {hpz:?} {plain:?}");
    }
}
