//! What a launcher hands over to its ranks, and the program that it starts them as.
#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use std::sync::{Arc, Mutex};

use zeroth_comm::launch::{Launch, Line, Output, handed_over};

/// What the ranks of a shell script said, sorted.
fn said(launch: Launch) -> Vec<String> {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let keep = Arc::clone(&lines);
    let output = Output::Lines(Arc::new(move |line: Line| keep.lock().unwrap().push(line.to_string())));
    let report = launch.output(output).run().unwrap();
    assert!(report.success(), "{report}");
    let mut lines = lines.lock().unwrap().clone();
    lines.sort();
    lines
}

#[test]
fn every_rank_gets_all_of_it_and_cannot_change_it() {
    // More than the value of a variable may have.
    let bytes = vec![b'x'; 300_000];
    let script = "wc -c < /proc/self/fd/$HANDED; (echo y > /proc/self/fd/$HANDED) 2> /dev/null || echo sealed";
    let launch = Launch::new("/bin/sh", 2, 0).arguments(["-c", script]).hand_over("HANDED", bytes);
    assert_eq!(said(launch), ["[rank 0] 300000", "[rank 0] sealed", "[rank 1] 300000", "[rank 1] sealed"]);
}

#[test]
fn without_a_launcher_nothing_was_handed_over() {
    assert!(handed_over("ZEROTH_TEST_NOT_SET").unwrap().is_none());
}
