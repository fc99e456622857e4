//! Known GPUs, to plan for machines that are not at hand.
//!
//! Figures are from NVIDIA's datasheets. Memory is the nominal size in units of 10^9 bytes; the driver reports a few percent
//! more or less. Peaks are without sparsity, with f32 accumulation.

use serde::Serialize;
use zeroth_base::nearest;

/// A GPU of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KnownGpu {
    /// Its name, as `--card` takes it.
    pub name: &'static str,
    /// Nominal memory in bytes.
    pub memory: u64,
    /// Peak of bf16 matmuls in TFLOP/s, without sparsity. `None`: no bf16.
    pub bf16_tflops: Option<f64>,
    /// The word that must be in a name.
    #[serde(skip)]
    word: &'static str,
    /// A word that distinguishes it from an earlier GPU with the same word.
    #[serde(skip)]
    variant: Option<&'static str>,
    /// Other words that may be in a name. Any further word means another GPU.
    #[serde(skip)]
    also: &'static [&'static str],
}

impl KnownGpu {
    /// Whether tensor cores support bf16.
    pub fn supports_bf16(&self) -> bool {
        self.bf16_tflops.is_some()
    }
}

/// A GPU that is not in the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no figures for the GPU `{name}`{}; known: {}", suggestion(*nearest), known())]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct UnknownGpu {
    pub name: String,
    /// The nearest known name, if any.
    pub nearest: Option<&'static str>,
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
}

fn known() -> String {
    KNOWN.iter().map(|gpu| gpu.name).collect::<Vec<_>>().join(", ")
}

const GB: u64 = 1_000_000_000;

/// A name without a variant means the first GPU of its word: of two memory sizes the smaller, so that a plan fits both.
#[rustfmt::skip]
static KNOWN: &[KnownGpu] = &[
    KnownGpu { name: "H200",       memory: 141 * GB, bf16_tflops: Some(989.0), word: "h200", variant: None,         also: &["sxm", "sxm5", "141"] },
    KnownGpu { name: "H100 SXM",   memory: 80 * GB,  bf16_tflops: Some(989.0), word: "h100", variant: None,         also: &["sxm", "sxm5", "80"] },
    KnownGpu { name: "H100 PCIe",  memory: 80 * GB,  bf16_tflops: Some(756.0), word: "h100", variant: Some("pcie"), also: &["80"] },
    KnownGpu { name: "A100 40GB",  memory: 40 * GB,  bf16_tflops: Some(312.0), word: "a100", variant: None,         also: &["sxm", "sxm4", "pcie", "pg509", "40"] },
    KnownGpu { name: "A100 80GB",  memory: 80 * GB,  bf16_tflops: Some(312.0), word: "a100", variant: Some("80"),   also: &["sxm", "sxm4", "pcie"] },
    KnownGpu { name: "A10",        memory: 24 * GB,  bf16_tflops: Some(125.0), word: "a10",  variant: None,         also: &["pcie", "24"] },
    KnownGpu { name: "L4",         memory: 24 * GB,  bf16_tflops: Some(121.0), word: "l4",   variant: None,         also: &["pcie", "24"] },
    KnownGpu { name: "L40S",       memory: 48 * GB,  bf16_tflops: Some(362.0), word: "l40s", variant: None,         also: &["pcie", "48"] },
    KnownGpu { name: "RTX 4090",   memory: 24 * GB,  bf16_tflops: Some(165.0), word: "4090", variant: None,         also: &["rtx", "geforce", "24"] },
    KnownGpu { name: "RTX 3090",   memory: 24 * GB,  bf16_tflops: Some(71.0),  word: "3090", variant: None,         also: &["rtx", "geforce", "24"] },
    KnownGpu { name: "V100 16GB",  memory: 16 * GB,  bf16_tflops: None,        word: "v100", variant: None,         also: &["sxm2", "pcie", "fhhl", "16"] },
    KnownGpu { name: "V100 32GB",  memory: 32 * GB,  bf16_tflops: None,        word: "v100", variant: Some("32"),   also: &["sxm2", "sxm3", "pcie"] },
    KnownGpu { name: "T4",         memory: 16 * GB,  bf16_tflops: None,        word: "t4",   variant: None,         also: &["pcie", "16"] },
];

/// All known GPUs, the newest generation first.
pub fn known_gpus() -> &'static [KnownGpu] {
    KNOWN
}

/// The GPU of a typed name (`V100`, `a100-80gb`, `rtx4090`) or a driver's (`NVIDIA A100-SXM4-80GB`, `Tesla T4`).
///
/// A name with an unknown word is refused: an H100 NVL is not an H100 SXM.
pub fn known_gpu(name: &str) -> Result<&'static KnownGpu, UnknownGpu> {
    let words = words(name);
    let fits = |gpu: &&KnownGpu| {
        let has = |word: &str| words.iter().any(|given| given == word);
        has(gpu.word)
            && gpu.variant.is_none_or(has)
            && words.iter().all(|word| {
                word == gpu.word || gpu.variant == Some(word) || gpu.also.contains(&word.as_str())
            })
    };
    KNOWN
        .iter()
        .find(fits)
        .ok_or_else(|| UnknownGpu { name: name.to_owned(), nearest: nearest_gpu(name, &words) })
}

/// The GPUs of the same name with another memory size, where a name does not say which: an A100 has 40 or 80 GB.
pub fn other_sizes(name: &str) -> Vec<&'static KnownGpu> {
    let Ok(gpu) = known_gpu(name) else { return Vec::new() };
    let is_size = |word: &String| word != gpu.word && word.bytes().all(|byte| byte.is_ascii_digit());
    if words(name).iter().any(is_size) {
        return Vec::new();
    }
    KNOWN.iter().filter(|other| other.word == gpu.word && other.memory != gpu.memory).collect()
}

/// The nearest by the whole name, else by one of its words: `H100 NVL` is near `H100 SXM`.
fn nearest_gpu(name: &str, words: &[String]) -> Option<&'static str> {
    let by_word = |given: &String| {
        let word = nearest(given, KNOWN.iter().map(|gpu| gpu.word))?;
        KNOWN.iter().find(|gpu| gpu.word == word).map(|gpu| gpu.name)
    };
    nearest(name, KNOWN.iter().map(|gpu| gpu.name)).or_else(|| words.iter().find_map(by_word))
}

/// The lower-case words of a name, without vendor and memory type; sizes without their unit.
fn words(name: &str) -> Vec<String> {
    const IGNORED: [&str; 9] = ["nvidia", "tesla", "gpu", "tensor", "core", "gb", "gib", "hbm2", "hbm3"];
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut words = Vec::new();
    for word in name.to_ascii_lowercase().split(|c: char| !c.is_ascii_alphanumeric()) {
        let size =
            ["gib", "gb", "g"].iter().find_map(|unit| word.strip_suffix(unit)).filter(|size| number(size));
        if let Some(series) = word.strip_prefix("rtx").filter(|series| number(series)) {
            words.push(series.to_owned());
        } else if let Some(size) = size {
            words.push(size.to_owned());
        } else if !word.is_empty() && !IGNORED.contains(&word) {
            words.push(word.to_owned());
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(name: &str) -> Option<&'static str> {
        known_gpu(name).ok().map(|gpu| gpu.name)
    }

    #[test]
    fn driver_names_find_their_gpu() {
        // As nvidia-smi prints them.
        for (driver, name) in [
            ("NVIDIA H200", "H200"),
            ("NVIDIA H100 80GB HBM3", "H100 SXM"),
            ("NVIDIA H100 PCIe", "H100 PCIe"),
            ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
            ("NVIDIA A100 80GB PCIe", "A100 80GB"),
            ("A100-PCIE-40GB", "A100 40GB"),
            ("NVIDIA A10", "A10"),
            ("NVIDIA L4", "L4"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("NVIDIA GeForce RTX 3090", "RTX 3090"),
            ("Tesla V100-SXM2-16GB", "V100 16GB"),
            ("Tesla V100-PCIE-32GB", "V100 32GB"),
            ("Tesla T4", "T4"),
        ] {
            assert_eq!(name_of(driver), Some(name), "{driver}");
        }
    }

    #[test]
    fn typed_names_find_their_gpu() {
        for (typed, name) in [
            ("V100", "V100 16GB"),
            ("v100 32g", "V100 32GB"),
            ("a100-80gb", "A100 80GB"),
            ("A100 80 GB", "A100 80GB"),
            ("a100", "A100 40GB"),
            ("H100", "H100 SXM"),
            ("h100_pcie", "H100 PCIe"),
            ("rtx4090", "RTX 4090"),
            ("4090", "RTX 4090"),
        ] {
            assert_eq!(name_of(typed), Some(name), "{typed}");
        }
        for known in known_gpus() {
            assert_eq!(name_of(known.name), Some(known.name));
        }
    }

    #[test]
    fn names_without_a_size_may_mean_another() {
        let others = |name: &str| other_sizes(name).into_iter().map(|gpu| gpu.name).collect::<Vec<_>>();
        assert_eq!(others("A100"), ["A100 80GB"]);
        assert_eq!(others("V100-SXM2"), ["V100 32GB"]);
        for clear in ["A100 40GB", "a100-80gb", "H100", "RTX 4090", "H100 PCIe", "T4", "A1000"] {
            assert!(others(clear).is_empty(), "{clear}");
        }
    }

    #[test]
    fn related_models_are_not_confused_with_known_ones() {
        for other in [
            "NVIDIA H100 NVL",
            "NVIDIA GH200 480GB",
            "NVIDIA A10G",
            "NVIDIA L40",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 3090 Ti",
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "V100 24GB",
            "",
        ] {
            assert_eq!(name_of(other), None, "{other}");
        }
    }

    #[test]
    fn an_unknown_gpu_is_refused_with_a_suggestion_and_the_list() {
        let error = known_gpu("H1000").unwrap_err();
        assert_eq!(error.nearest, Some("H100 SXM"));
        let message = error.to_string();
        assert!(
            message.starts_with("no figures for the GPU `H1000` (did you mean `H100 SXM`?); known: H200, "),
            "{message}"
        );
        assert_eq!(known_gpu("A10G").unwrap_err().nearest, Some("A10"));
        assert_eq!(known_gpu("NVIDIA H100 NVL").unwrap_err().nearest, Some("H100 SXM"));
        assert_eq!(known_gpu("RTX 4080").unwrap_err().nearest, Some("RTX 4090"));
        assert_eq!(known_gpu("Instinct MI300X").unwrap_err().nearest, None);
    }

    #[test]
    fn bf16_begins_with_ampere() {
        let without: Vec<&str> =
            known_gpus().iter().filter(|gpu| !gpu.supports_bf16()).map(|gpu| gpu.name).collect();
        assert_eq!(without, ["V100 16GB", "V100 32GB", "T4"]);
        assert_eq!(known_gpu("H200").unwrap().memory, 141_000_000_000);
    }
}
