//! Environment variables of DeepSpeed, PyTorch, CUDA and zeroth, and the effect of each.
//!
//! One table, like the keys of a config. A variable that nothing reads yet is "not yet", never "honoured".

mod allocator;
mod table;
mod variable;

use std::fmt::Write;

use serde_json::{Value, json};
use zeroth_base::nearest;

pub use variable::{EnvVerdict, Variable};

/// The verdict on a variable that is set.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Judgement {
    pub name: String,
    /// Its value; `(hidden)` where the name says that it is a secret.
    pub value: String,
    pub verdict: EnvVerdict,
    /// The reason, and what to do instead.
    pub message: String,
}

impl Judgement {
    /// The object that `--format json` prints.
    pub fn to_json(&self) -> Value {
        json!({"name": self.name, "value": self.value, "verdict": self.verdict.word(), "message": self.message})
    }
}

/// All variables of the table.
pub fn variables() -> impl Iterator<Item = &'static Variable> {
    table::GROUPS.iter().flat_map(|(_, variables)| variables.iter())
}

/// The verdict on a variable and its value; `None` where it is not ours to judge, as with `PATH`.
pub fn judge(name: &str, value: &str) -> Option<Judgement> {
    let (verdict, message) = match find(name) {
        Some(variable) => by_value(variable, value),
        None => (EnvVerdict::Unknown, unknown(name)?),
    };
    let value = if is_secret(name) { "(hidden)" } else { value };
    Some(Judgement { name: name.to_owned(), value: value.to_owned(), verdict, message })
}

/// The verdicts on an environment, by name; variables that are not ours to judge are left out.
pub fn judge_all(variables: impl Iterator<Item = (String, String)>) -> Vec<Judgement> {
    let mut judgements: Vec<Judgement> = variables.filter_map(|(name, value)| judge(&name, &value)).collect();
    judgements.sort_by(|a, b| a.name.cmp(&b.name));
    judgements
}

/// A name of its own before a pattern, a longer pattern before a shorter one.
fn find(name: &str) -> Option<&'static Variable> {
    let prefix = |variable: &Variable| {
        variable.name.strip_suffix('*').filter(|prefix| name.starts_with(prefix)).map(str::len)
    };
    variables().find(|variable| variable.name == name).or_else(|| {
        variables().filter(|variable| prefix(variable).is_some()).max_by_key(|variable| prefix(variable))
    })
}

/// Where the value changes the verdict or says more.
fn by_value(variable: &'static Variable, value: &str) -> (EnvVerdict, String) {
    let said = variable.message.to_owned();
    match variable.name {
        "CUDA_VISIBLE_DEVICES" => {
            let seen = match visible_devices(value) {
                0 => "no GPU".to_owned(),
                1 => "1 GPU".to_owned(),
                count => format!("{count} GPUs at most"),
            };
            (variable.verdict, format!("{said}; `{value}` leaves {seen}"))
        }
        "NO_COLOR" if value.is_empty() => {
            (EnvVerdict::NoEffect, "it is empty, which counts as not set".to_owned())
        }
        "PYTORCH_CUDA_ALLOC_CONF" | "PYTORCH_ALLOC_CONF" | "PYTORCH_HIP_ALLOC_CONF" => {
            (variable.verdict, format!("{said}{}", allocator::explain(value)))
        }
        "CUDA_LAUNCH_BLOCKING" if value == "0" => {
            (EnvVerdict::NoEffect, "0 is what counts without it".to_owned())
        }
        _ => (variable.verdict, said),
    }
}

/// What to say of a name that is in no table; `None` where it is not of our kind.
fn unknown(name: &str) -> Option<String> {
    let whose = [("DS_", "DeepSpeed's"), ("DEEPSPEED_", "DeepSpeed's"), ("ZEROTH_", "zeroth's")];
    let (_, whose) = whose.into_iter().find(|(prefix, _)| name.starts_with(prefix))?;
    let names = variables().map(|variable| variable.name).filter(|name| !name.ends_with('*'));
    Some(match nearest(name, names) {
        Some(near) => format!("no variable of {whose} is known by this name; did you mean `{near}`?"),
        None => format!("no variable of {whose} is known by this name, and nothing here reads it"),
    })
}

/// How many GPUs a list for `CUDA_VISIBLE_DEVICES` names: what stands before the first entry that is none.
pub(crate) fn visible_devices(list: &str) -> u64 {
    let is_device =
        |entry: &&str| entry.parse::<u32>().is_ok() || entry.starts_with("GPU-") || entry.starts_with("MIG-");
    list.split(',').map(str::trim).take_while(is_device).count() as u64
}

/// What a report must not repeat.
fn is_secret(name: &str) -> bool {
    ["KEY", "TOKEN", "SECRET", "PASSWORD"].iter().any(|word| name.contains(word))
}

const HEAD: &str = "\
# Environment variables

This page is written from the table in `crates/zeroth-config/src/environment/`; a test fails when it is stale
(`ZEROTH_BLESS=1 cargo test -p zeroth-config --test it environment_page::` writes it anew). `zeroth doctor` says the
same of the variables that are set on a machine.

**Here** says what becomes of a variable: honoured; not yet (the part that reads it is not built); no effect here, with
the reason; unknown (no such variable exists, here or in DeepSpeed). `*` stands for any ending. Other variables that
begin with `DS_`, `DEEPSPEED_` or `ZEROTH_` are reported as unknown, with the known name nearest to them.
";

/// The page `docs/environment.md`.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for (title, variables) in table::GROUPS {
        // Writing to a String cannot fail.
        let _ = write!(
            page,
            "\n## {title}\n\n| variable | what it does | here | why, and what instead |\n|---|---|---|---|\n"
        );
        for variable in *variables {
            let Variable { name, does, verdict, message } = variable;
            let cells =
                [format!("`{name}`"), (*does).to_owned(), verdict.title().to_owned(), (*message).to_owned()];
            let _ = writeln!(page, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
        }
    }
    let _ = write!(page, "\n{}", allocator::section());
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(name: &str, value: &str) -> (EnvVerdict, String) {
        let judgement = judge(name, value).unwrap_or_else(|| panic!("{name} is judged"));
        (judgement.verdict, judgement.message)
    }

    #[test]
    fn the_seed_s_exports_each_get_a_verdict() {
        for (name, value, verdict, said) in [
            ("CUDA_DEVICE_MAX_CONNECTIONS", "1", EnvVerdict::Honoured, "--device cuda"),
            ("CUDA_AUTO_BOOST", "0", EnvVerdict::NoEffect, "nvidia-smi"),
            ("DS_PIPE_RESERVE", "10", EnvVerdict::Unknown, "never had"),
            ("DS_SKIP_UNUSED_PARAMETERS", "true", EnvVerdict::Unknown, "ignore_unused_parameters"),
            ("DS_REUSE_BUFFERS", "1", EnvVerdict::Unknown, "never had"),
            ("DS_USE_CUDA_TILING", "1", EnvVerdict::Unknown, "TiledLinear"),
            ("TORCH_DISTRIBUTED_DEBUG", "OFF", EnvVerdict::NoEffect, "PyTorch"),
            (
                "PYTORCH_CUDA_ALLOC_CONF",
                "max_split_size_mb:128,garbage_collection_threshold:0.9",
                EnvVerdict::NoEffect,
                "max_split_size_mb 128",
            ),
        ] {
            let (found, message) = judged(name, value);
            assert_eq!(found, verdict, "{name}");
            assert!(message.contains(said), "{name}: {message}");
        }
    }

    #[test]
    fn a_name_of_its_own_comes_before_a_pattern() {
        assert_eq!(find("NCCL_DEBUG").map(|variable| variable.name), Some("NCCL_DEBUG"));
        assert_eq!(find("NCCL_ALGO").map(|variable| variable.name), Some("NCCL_*"));
        assert_eq!(find("TORCH_NCCL_TRACE_BUFFER_SIZE").map(|variable| variable.name), Some("TORCH_NCCL_*"));
        assert_eq!(find("DS_BUILD_CPU_ADAM").map(|variable| variable.name), Some("DS_BUILD_*"));
        assert_eq!(find("SLURM_PROCID").map(|variable| variable.name), Some("SLURM_*"));
    }

    #[test]
    fn unknown_names_of_our_kind_get_the_nearest_and_others_none() {
        let (verdict, message) = judged("DS_ACELERATOR", "cpu");
        assert_eq!(verdict, EnvVerdict::Unknown);
        assert!(message.contains("did you mean `DS_ACCELERATOR`?"), "{message}");
        assert!(judged("ZEROTH_CPUS", "1").1.contains("did you mean `ZEROTH_CPU`?"));
        assert!(judged("DS_SOMETHING_QUITE_OTHER", "1").1.contains("nothing here reads it"));
        for name in ["PATH", "HOME", "LANG", "DSTAT", "nccl_debug", ""] {
            assert_eq!(judge(name, "x"), None, "{name}");
        }
    }

    #[test]
    fn visible_devices_end_at_the_first_that_is_none() {
        // NVIDIA's own example: 0,2,-1,1 shows the devices 0 and 2.
        for (list, count) in
            [("0,2,-1,1", 2), ("", 0), ("-1", 0), ("GPU-8932f937", 1), ("0, 1 ,2", 3), ("x,0", 0)]
        {
            assert_eq!(visible_devices(list), count, "{list}");
        }
        assert!(judged("CUDA_VISIBLE_DEVICES", "").1.ends_with("`` leaves no GPU"));
        assert_eq!(judged("CUDA_VISIBLE_DEVICES", "0,1").0, EnvVerdict::Honoured);
    }

    #[test]
    fn values_matter_where_they_do() {
        assert_eq!(judged("NO_COLOR", "1").0, EnvVerdict::Honoured);
        assert_eq!(judged("NO_COLOR", "").0, EnvVerdict::NoEffect);
        assert_eq!(judged("CUDA_LAUNCH_BLOCKING", "0").0, EnvVerdict::NoEffect);
        assert_eq!(judged("CUDA_LAUNCH_BLOCKING", "1").0, EnvVerdict::Honoured);
    }

    #[test]
    fn secrets_are_not_repeated() {
        let judgement = judge("WANDB_API_KEY", "abc123").unwrap();
        assert_eq!(judgement.value, "(hidden)");
        assert!(!judgement.to_json().to_string().contains("abc123"));
    }

    #[test]
    fn an_environment_is_judged_by_name() {
        let set = [("RANK", "0"), ("PATH", "/bin"), ("HF_HOME", "/data"), ("DS_X", "1")];
        let judgements = judge_all(set.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        let names: Vec<&str> = judgements.iter().map(|judgement| judgement.name.as_str()).collect();
        assert_eq!(names, ["DS_X", "HF_HOME", "RANK"]);
        assert_eq!(judgements[1].to_json()["verdict"], "honoured");
    }

    #[test]
    fn every_entry_has_a_name_of_its_own_and_two_sentences() {
        let mut names: Vec<&str> = variables().map(|variable| variable.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a name is there twice");
        for variable in variables() {
            assert!(!variable.does.is_empty() && !variable.message.is_empty(), "{}", variable.name);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_variable_is_judged_without_panic(name in "(DS_|ZEROTH_|NCCL_|PYTORCH_)?.{0,12}", value in ".{0,24}") {
            let _ = judge(&name, &value);
            let _ = judge("PYTORCH_CUDA_ALLOC_CONF", &value);
            let _ = judge("CUDA_VISIBLE_DEVICES", &value);
        }
    }
}
