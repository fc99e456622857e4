//! What a launcher hands over to its ranks.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use zeroth_comm::launch::{OutputLine, RankLauncher, RankOutput, inherited, sealed};

#[test]
fn every_rank_gets_all_of_it_and_cannot_change_it() {
    // More than the value of a variable may have.
    let file = sealed(|file| file.write_all(&vec![b'x'; 300_000])).unwrap();
    let number = file.as_raw_fd().to_string();
    let script =
        "wc -c < /proc/self/fd/$HANDED; (echo y > /proc/self/fd/$HANDED) 2> /dev/null || echo sealed";
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let keep = Arc::clone(&lines);
    let output =
        RankOutput::Lines(Arc::new(move |line: OutputLine| keep.lock().unwrap().push(line.to_string())));
    let launch = RankLauncher::new("/bin/sh", 2, 0).arguments(["-c", script]).output(output);
    let report = launch.variable("HANDED", number).inherit(file).run().unwrap();
    assert!(report.success(), "{report}");
    let mut lines = lines.lock().unwrap().clone();
    lines.sort();
    assert_eq!(lines, ["[rank 0] 300000", "[rank 0] sealed", "[rank 1] 300000", "[rank 1] sealed"]);
}

#[test]
fn each_reader_begins_at_the_beginning() {
    let file = sealed(|file| file.write_all(b"all of it")).unwrap();
    for _ in 0..2 {
        let mut text = String::new();
        inherited(file.as_raw_fd().unsigned_abs()).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "all of it");
    }
    assert!(inherited(u32::MAX).is_err());
}
