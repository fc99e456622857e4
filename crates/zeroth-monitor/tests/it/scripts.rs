//! The page's scripts, run by Node.js where it is installed.

#![allow(clippy::print_stdout, reason = "a test that is skipped says so")]

use std::path::Path;
use std::process::Command;

#[test]
fn axes_have_ticks_over_any_range() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut node = Command::new("node");
    let ended = node.arg(here.join("tests/scripts/ticks.js")).arg(here.join("src/web/chart.js")).output();
    match ended {
        Ok(ended) => {
            let [out, err] = [ended.stdout, ended.stderr].map(|text| String::from_utf8(text).unwrap());
            assert!(ended.status.success() && out.contains("ranges"), "{out}{err}");
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: Node.js is not installed");
        }
        Err(error) => panic!("node: {error}"),
    }
}
