//! Prints what our reader reads of a model folder: one JSON line a parameter with its name, type, shape, and the FNV-1a
//! hash of its values as f32. `tests/check_folder.py` compares it with what torch reads.
//!
//!     cargo run -p zeroth-model --example read_weights -- DIR

use std::error::Error;
use std::io::Write as _;
use std::path::PathBuf;

use zeroth_model::{ModelConfig, WeightFiles, table};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("which model folder?")?);
    let table = table(&ModelConfig::from_folder(&folder)?);
    let files = WeightFiles::open(&folder, &table)?;
    let mut out = std::io::stdout().lock();
    for parameter in table.iter() {
        let mut values = vec![0.0_f32; parameter.elements() as usize];
        files.read_f32(&parameter.name, 0..parameter.elements(), &mut values)?;
        let hash = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
        let line = serde_json::json!({
            "name": parameter.name,
            "dtype": files.dtype(&parameter.name)?.to_string(),
            "shape": parameter.shape,
            "f32": format!("{hash:016x}"),
        });
        writeln!(out, "{line}")?;
    }
    Ok(())
}
