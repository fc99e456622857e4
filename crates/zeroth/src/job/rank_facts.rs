//! What ranks may differ in and still train together: CPU threads, instructions, GPUs, and the libraries that their kernels come
//! from. Their programs and the layouts of their memory are the same; results may differ in their last bits.

use serde_json::{Map, Value};
use zeroth_cpu::Isa;
use zeroth_machine::{DeviceKind, Gpus, LibraryState, Machine};

/// Libraries that choose or are kernels.
const LIBRARIES: [&str; 3] = ["cublasLt", "cudnn", "nvrtc"];
/// Variables that choose kernels.
const VARIABLES: [&str; 2] = ["ZEROTH_GPU_ATTENTION", "ZEROTH_GPU_GRAPHS"];

/// The facts of a machine's ranks.
#[derive(Debug, Clone, Default)]
pub struct RankFacts {
    /// Those of every rank of this process.
    all: Map<String, Value>,
    /// Its GPUs, which its ranks share.
    gpus: Vec<String>,
}

const THREADS: &str = "the number of CPU threads (--threads-per-rank)";
const INSTRUCTIONS: &str = "the CPU's instructions (ZEROTH_CPU)";
const GPU: &str = "the GPU";

impl RankFacts {
    /// What was found on this machine.
    pub fn of(machine: &Machine, device: DeviceKind, threads: usize) -> Self {
        let mut facts = Self::default();
        let mut add = |name: &str, value: Value| _ = facts.all.insert(name.to_owned(), value);
        // A variable that names none was refused before.
        let isa = Isa::chosen().unwrap_or_else(|_| Isa::detect());
        add(INSTRUCTIONS, isa.name().into());
        if device == DeviceKind::Cpu {
            add(THREADS, threads.into());
            return facts;
        }
        if let Gpus::Found { driver_version, devices } = &machine.gpus {
            add("the CUDA version of the driver", driver_version.as_str().into());
            let named = |gpu: &zeroth_machine::Gpu| {
                let (name, capability) = (&gpu.name, gpu.compute_capability);
                format!("{name} (compute capability {capability})")
            };
            facts.gpus = devices.iter().map(named).collect();
        }
        let mut add = |name: &str, value: Value| _ = facts.all.insert(name.to_owned(), value);
        for library in machine.software.iter().filter(|library| LIBRARIES.contains(&library.name)) {
            let found = match &library.state {
                LibraryState::Opened { at, version } => version.as_ref().unwrap_or(at).as_str(),
                _ => "missing",
            };
            add(&format!("the library {}", library.name), found.into());
        }
        for variable in VARIABLES {
            add(variable, std::env::var(variable).ok().into());
        }
        facts
    }

    /// Those of one rank of this host.
    pub fn of_rank(&self, local_rank: usize) -> Map<String, Value> {
        let mut facts = self.all.clone();
        if !self.gpus.is_empty() {
            facts.insert(GPU.to_owned(), self.gpus[local_rank % self.gpus.len()].as_str().into());
        }
        facts
    }
}

/// The transport that this process asks for, which all ranks have to share; `None` on CPUs, which have one.
pub fn collectives_asked(device: DeviceKind) -> Option<String> {
    (device == DeviceKind::Cuda).then(|| std::env::var("ZEROTH_GPU_COLLECTIVES").ok()).flatten()
}

/// A note for each fact that ranks differ in, of all ranks' facts in rank order.
pub fn differences(all: &[&Map<String, Value>]) -> Vec<String> {
    let mut names: Vec<&String> = all.iter().flat_map(|facts| facts.keys()).collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter().filter_map(|name| difference(name, all)).collect()
}

fn difference(name: &str, all: &[&Map<String, Value>]) -> Option<String> {
    let mut values: Vec<(String, Vec<String>)> = Vec::new();
    for (rank, facts) in all.iter().enumerate() {
        let value = match facts.get(name) {
            None | Some(Value::Null) => "not set".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        match values.iter_mut().find(|(known, _)| *known == value) {
            Some((_, ranks)) => ranks.push(rank.to_string()),
            None => values.push((value, vec![rank.to_string()])),
        }
    }
    if values.len() < 2 {
        return None;
    }
    let shown: Vec<String> = values
        .iter()
        .map(|(value, ranks)| {
            let word = if ranks.len() == 1 { "rank" } else { "ranks" };
            format!("{value} on {word} {}", ranks.join(", "))
        })
        .collect();
    let effect = match name {
        THREADS => {
            "memory is planned for those of rank 0, no rank uses more, and all wait for the slowest; the numbers are those of \
             equal ranks"
        }
        INSTRUCTIONS => {
            "results may differ from those of equal ranks in their last bits; set ZEROTH_CPU to a common one"
        }
        _ => "results may differ from those of equal ranks in their last bits, and all wait for the slowest",
    };
    Some(format!("ranks differ in {name}: {}: {effect}", shown.join("; ")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_difference_is_noted_once_with_all_ranks() {
        let facts = |gpu: &str, threads: u64| match json!({ GPU: gpu, THREADS: threads, "cudnn": null }) {
            Value::Object(map) => map,
            _ => unreachable!("an object"),
        };
        let [one, other] = [facts("H200", 2), facts("A100", 1)];
        assert_eq!(differences(&[&one, &one]), Vec::<String>::new());
        let notes = differences(&[&one, &other, &one]);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("the GPU: H200 on ranks 0, 2; A100 on rank 1: "), "{notes:?}");
        assert!(notes[1].contains(": 2 on ranks 0, 2; 1 on rank 1: memory is planned"), "{notes:?}");
    }
}
