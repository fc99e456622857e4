//! Reads the number of ranks from the flags of each launcher.

use std::collections::BTreeMap;

use zeroth_base::counted;

use super::words::{is_flag, is_python_file, name_and_value};
use crate::environment;
use crate::read::Number;

/// Environment variables assigned before the command.
pub(super) type Environment = BTreeMap<String, String>;

/// The number of ranks and where it comes from, or else where it would come from.
pub(super) type Size = Result<(u64, String), String>;

/// The syntax of a launcher's flags. A flag that is neither a switch nor a pair takes one value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grammar {
    switches: &'static [&'static str],
    /// Flags with two values.
    pairs: &'static [&'static str],
    /// Whether `-xVALUE` means `-x VALUE` for any value; otherwise only for digits.
    attached: bool,
}

pub(super) const DEEPSPEED: Grammar = Grammar {
    switches: &[
        "module",
        "no_python",
        "no_local_rank",
        "no_ssh",
        "no_ssh_check",
        "force_multi",
        "save_pid",
        "elastic_training",
        "bind_cores_to_rank",
        "q",
        "quiet",
        "h",
        "help",
    ],
    pairs: &[],
    attached: false,
};

pub(super) const TORCHRUN: Grammar = Grammar {
    switches: &["standalone", "m", "module", "no_python", "run_path", "use_env", "h", "help"],
    pairs: &[],
    attached: false,
};

pub(super) const ACCELERATE: Grammar = Grammar {
    switches: &[
        "q",
        "quiet",
        "cpu",
        "multi_gpu",
        "tpu",
        "ipex",
        "use_deepspeed",
        "use_fsdp",
        "use_megatron_lm",
        "use_xpu",
        "use_parallelism_config",
        "same_network",
        "m",
        "module",
        "no_python",
        "tpu_cluster",
        "no_tpu_cluster",
        "tpu_use_sudo",
        "downcast_bf16",
        "enable_cpu_affinity",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
        "fp8_use_autocast_during_eval",
        "debug",
        "h",
        "help",
    ],
    pairs: &[],
    attached: false,
};

pub(super) const MPIRUN: Grammar = Grammar {
    switches: &[
        "allow_run_as_root",
        "oversubscribe",
        "nooversubscribe",
        "nolocal",
        "report_bindings",
        "display_map",
        "display_allocation",
        "tag_output",
        "timestamp_output",
        "bynode",
        "byslot",
        "bind_to_core",
        "bind_to_none",
        "enable_recovery",
        "q",
        "quiet",
        "v",
        "verbose",
        "l",
        "prepend_rank",
    ],
    pairs: &["mca", "gmca", "omca", "prtemca", "pmixmca", "env", "genv"],
    attached: false,
};

pub(super) const SRUN: Grammar = Grammar {
    switches: &[
        "l",
        "label",
        "u",
        "unbuffered",
        "v",
        "verbose",
        "Q",
        "quiet",
        "O",
        "overcommit",
        "s",
        "oversubscribe",
        "overlap",
        "exact",
        "exclusive",
        "pty",
        "K",
        "kill_on_bad_exit",
        "no_kill",
        "multi_prog",
        "E",
        "preserve_env",
        "contiguous",
        "spread_job",
    ],
    pairs: &[],
    attached: true,
};

/// The flags of the Python interpreter that take the next word as their value.
pub(super) const PYTHON_VALUES: &[&str] = &["-W", "-X"];

/// A launcher's flags, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct LauncherOptions(Vec<(String, Option<String>)>);

/// Splits a launcher's flags from the program that it starts.
pub(super) fn split(mut words: &[String], grammar: Grammar) -> (LauncherOptions, &[String]) {
    let mut options = Vec::new();
    while let Some((word, after)) = words.split_first() {
        if word == "--" {
            return (LauncherOptions(options), after);
        }
        if !is_flag(word) {
            break;
        }
        words = after;
        let (mut name, value) = name_and_value(word);
        let mut value = value.map(str::to_owned);
        if let Some((letter, rest)) = attached(word, grammar) {
            (name, value) = (letter, Some(rest));
        }
        let takes = if value.is_some() || grammar.switches.contains(&name.as_str()) {
            0
        } else if grammar.pairs.contains(&name.as_str()) {
            2
        } else {
            1
        };
        for _ in 0..takes {
            // A flag that is not in the grammar may be a switch.
            let Some((next, after)) =
                words.split_first().filter(|(next, _)| !is_flag(next) && !is_program(next))
            else {
                break;
            };
            value.get_or_insert_with(|| next.clone());
            words = after;
        }
        options.push((name, value));
    }
    (LauncherOptions(options), words)
}

/// Splits `-n4` into `n` and `4`.
fn attached(word: &str, grammar: Grammar) -> Option<(String, String)> {
    let rest = word.strip_prefix('-').filter(|rest| !rest.starts_with('-'))?;
    let letter = rest.chars().next()?;
    let value = rest.get(letter.len_utf8()..).filter(|value| !value.is_empty())?;
    let splits = grammar.attached || value.chars().all(|c| c.is_ascii_digit());
    splits.then(|| (letter.to_string(), value.trim_start_matches('=').to_owned()))
}

/// Whether a word is a program, and so not the value of a flag.
fn is_program(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    matches!(name, "python" | "python3" | "torchrun" | "deepspeed" | "accelerate" | "swift" | "zeroth")
        || is_python_file(name)
}

impl LauncherOptions {
    /// The value of the last of these flags that has one.
    pub(super) fn text(&self, names: &[&str]) -> Option<&str> {
        let found =
            self.0.iter().rev().find(|(name, value)| names.contains(&name.as_str()) && value.is_some())?;
        found.1.as_deref()
    }

    pub(super) fn has(&self, names: &[&str]) -> bool {
        self.0.iter().any(|(name, _)| names.contains(&name.as_str()))
    }

    /// The value of a flag as a whole number, or why it is not one.
    pub(super) fn whole(&self, names: &[&str]) -> Result<Option<u64>, String> {
        self.text(names).map(|text| whole(text, names[0])).transpose()
    }
}

fn whole(text: &str, name: &str) -> Result<u64, String> {
    Number::from_text(text)
        .and_then(|number| u64::try_from(number.as_whole()?).ok())
        .ok_or_else(|| format!("{name} `{text}`, which is no number"))
}

fn times(a: u64, b: u64) -> Result<u64, String> {
    a.checked_mul(b).ok_or_else(|| format!("{a} × {b}, which is more than 2^64"))
}

/// The number of GPUs in `CUDA_VISIBLE_DEVICES`, if it lists any.
fn visible_devices(environment: &Environment) -> Option<u64> {
    let list = environment.get("CUDA_VISIBLE_DEVICES")?;
    Some(environment::visible_devices(list)).filter(|count| *count > 0)
}

/// DeepSpeed's runner: `--include`, or `--num_gpus` × `--num_nodes`, or the visible GPUs of this machine.
pub(super) fn deepspeed(options: &LauncherOptions, environment: &Environment) -> Size {
    if options.has(&["elastic_training"]) {
        return Err("the nodes that join, because of --elastic_training".to_owned());
    }
    if let Some(include) = options.text(&["i", "include"]).filter(|include| !include.is_empty()) {
        let counted =
            slots(include).ok_or_else(|| format!("the slots of the hosts in --include {include}"))?;
        return Ok((counted, format!("--include {include}")));
    }
    if let Some(exclude) = options.text(&["e", "exclude"]).filter(|exclude| !exclude.is_empty()) {
        return Err(format!("the GPUs found, less --exclude {exclude}"));
    }
    // DeepSpeed treats 0 and -1 as not given.
    let given = |names: &[&str]| match options.text(names) {
        Some(text) if text.starts_with('-') => Ok(None),
        _ => options.whole(names).map(|number| number.filter(|number| *number > 0)),
    };
    let (gpus, nodes) = (given(&["num_gpus", "num_accelerators"])?, given(&["num_nodes"])?);
    match (gpus, nodes, options.text(&["H", "hostfile"])) {
        (Some(gpus), Some(nodes), _) => {
            Ok((times(gpus, nodes)?, format!("--num_gpus {gpus} on --num_nodes {nodes}")))
        }
        (Some(gpus), None, None) => Ok((gpus, format!("--num_gpus {gpus}"))),
        (None, None | Some(1), None) => match visible_devices(environment) {
            Some(count) => Ok((count, "CUDA_VISIBLE_DEVICES".to_owned())),
            None => Err("the GPUs found".to_owned()),
        },
        (_, _, Some(hostfile)) => Err(format!("the hosts in {hostfile}")),
        (None, Some(nodes), None) => Err(format!("the GPUs found on {nodes} nodes")),
    }
}

/// Counts the slots in `host:0,1@host2:2`; `None` if a host has no list, which means all of its slots.
fn slots(include: &str) -> Option<u64> {
    let mut hosts: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for node in include.split('@') {
        let (host, list) = node.split_once(':')?;
        let slots = hosts.entry(host).or_default();
        for slot in list.split(',') {
            slots.push(slot.trim().parse().ok()?);
        }
    }
    let distinct = |mut slots: Vec<u32>| {
        slots.sort_unstable();
        slots.dedup();
        slots.len() as u64
    };
    Some(hosts.into_values().map(distinct).sum())
}

/// torchrun: `--nproc_per_node` × `--nnodes`, both 1 by default.
pub(super) fn torchrun(options: &LauncherOptions, environment: &Environment) -> Size {
    // torchrun reads a flag that is not given from the environment variable PET_NAME.
    let given = |names: &[&str], variable: &str| {
        options
            .text(names)
            .or_else(|| environment.get(variable).map(String::as_str))
            .unwrap_or("1")
            .to_owned()
    };
    let processes = given(&["nproc_per_node"], "PET_NPROC_PER_NODE");
    per_node(&processes, &given(&["nnodes"], "PET_NNODES"), environment)
}

/// ms-swift, which starts torchrun if `NPROC_PER_NODE` or `NNODES` is set; `None` if neither is.
pub(super) fn swift(environment: &Environment) -> Option<Size> {
    let (processes, nodes) = (environment.get("NPROC_PER_NODE"), environment.get("NNODES"));
    if processes.is_none() && nodes.is_none() {
        return None;
    }
    let or_one = |text: Option<&String>| text.map_or("1", String::as_str).to_owned();
    Some(per_node(&or_one(processes), &or_one(nodes), environment))
}

fn per_node(processes: &str, nodes: &str, environment: &Environment) -> Size {
    let nodes = match nodes.split_once(':') {
        Some((least, most)) if least != most => {
            return Err(format!("the nodes that join, from {least} to {most}"));
        }
        Some((nodes, _)) => whole(nodes, "nnodes")?,
        None => whole(nodes, "nnodes")?,
    };
    let processes = match processes {
        "gpu" | "auto" => match visible_devices(environment) {
            Some(count) => count,
            None => return Err(format!("the GPUs found, because of nproc_per_node {processes}")),
        },
        "cpu" | "xpu" => return Err(format!("the {}s found", processes.to_uppercase())),
        number => whole(number, "nproc_per_node")?,
    };
    let from = if nodes == 1 {
        format!("nproc_per_node {processes}")
    } else {
        format!("nproc_per_node {processes} on {nodes} nodes")
    };
    Ok((times(processes, nodes)?, from))
}

/// accelerate: `--num_processes`, which counts all machines.
pub(super) fn accelerate(options: &LauncherOptions) -> Size {
    match (options.whole(&["num_processes"])?, options.text(&["config_file"])) {
        (Some(processes), _) => Ok((processes, format!("--num_processes {processes}"))),
        (None, Some(file)) => Err(format!("num_processes in accelerate's {file}")),
        (None, None) => Err("accelerate's own config file, or the GPUs found".to_owned()),
    }
}

/// mpirun: `-np`.
pub(super) fn mpirun(options: &LauncherOptions) -> Size {
    match options.whole(&["np", "n"])? {
        Some(processes) => Ok((processes, format!("-np {processes}"))),
        None => Err("the slots of the hosts, because mpirun has no -np".to_owned()),
    }
}

/// srun: `--ntasks`, or `--nodes` × `--ntasks-per-node`, or `SLURM_NTASKS` of the allocation.
pub(super) fn srun(options: &LauncherOptions, environment: &Environment) -> Size {
    if let Some(tasks) = options.whole(&["ntasks", "n"])? {
        return Ok((tasks, format!("--ntasks {tasks}")));
    }
    if let (Some(nodes), Some(tasks)) =
        (options.whole(&["nodes", "N"])?, options.whole(&["ntasks_per_node"])?)
    {
        return Ok((
            times(nodes, tasks)?,
            format!("--ntasks-per-node {tasks} on {}", counted(nodes, "node")),
        ));
    }
    match environment.get("SLURM_NTASKS") {
        Some(tasks) => Ok((whole(tasks, "SLURM_NTASKS")?, "SLURM_NTASKS".to_owned())),
        None => Err("SLURM_NTASKS of the allocation".to_owned()),
    }
}
