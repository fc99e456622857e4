//! Prints what this machine offers as JSON: `cargo run -p zeroth-device --example probe`.

use std::io::{self, Write};
use std::time::Instant;

fn main() -> io::Result<()> {
    let start = Instant::now();
    let machine = zeroth_device::probe();
    let took = start.elapsed();
    let mut output = io::stdout().lock();
    serde_json::to_writer_pretty(&mut output, &machine)?;
    writeln!(output)?;
    writeln!(io::stderr(), "took {:.1} ms", took.as_secs_f64() * 1e3)
}
