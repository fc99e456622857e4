//! Times reading and checking a config of 200 keys inside one process; prints best and median as one JSON line.
//!
//! `benches/config-check/run.py` compares it with DeepSpeed's own parsing of the same file.

use std::hint::black_box;
use std::time::Instant;

use zeroth_config::check::check;
use zeroth_config::read::{ConfigSource, parse};

const ROUNDS: usize = 2000;

#[expect(clippy::print_stdout, reason = "this program prints its result")]
fn main() {
    let text = include_str!("config-200.json");
    let mut micros: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            let document = parse(ConfigSource::from_text("config-200.json", black_box(text)))
                .expect("the file is valid");
            black_box(check(&document));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    println!("{{\"best_us\": {:.1}, \"median_us\": {:.1}}}", micros[0], micros[ROUNDS / 2]);
}
