//! Ranks whose threads, CPUs, instructions, GPUs or environment differ train the numbers of equal ranks, or say in what they
//! differ.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::unequal_ranks::Ranks;
use super::{is_full, metrics, new_model, text};

const STEPS: [&str; 8] =
    ["--device", "cpu", "--max-steps", "3", "--save-steps", "0", "--learning-rate", "0.003"];

/// What both ranks trained: the loss and the norm of every step.
fn numbers(ranks: &mut Ranks) -> Vec<[Value; 2]> {
    assert_eq!(ranks.codes(), [Some(0), Some(0)], "{}", ranks.said());
    let lines = metrics(&ranks.output());
    assert_eq!(lines.len(), 3, "{}", ranks.said());
    lines.iter().map(|line| ["loss", "grad_norm"].map(|key| line[key].clone())).collect()
}

/// Two ranks with these flags, of which `differ` changes some.
fn trained(job: &str, flags: &[&str], differ: impl Fn(usize, &mut Command)) -> (Vec<[Value; 2]>, String) {
    let folder = tempfile::tempdir().unwrap();
    let teacher = folder.path().join("teacher");
    std::fs::create_dir(&teacher).unwrap();
    let teacher = new_model(&teacher, 32, 1, 64, 256);
    let flags: Vec<&str> =
        flags.iter().map(|flag| if *flag == "TEACHER" { text(&teacher) } else { flag }).collect();
    let mut ranks = Ranks::start_each(folder, job, &[&STEPS, &flags[..]].concat(), differ);
    let numbers = numbers(&mut ranks);
    (numbers, ranks.said())
}

const KINDS: [&[&str]; 3] =
    [&[], &["--train-type", "lora", "--random-weights"], &["--teacher", "TEACHER", "--random-weights"]];

#[test]
fn ranks_with_other_threads_train_the_numbers_of_equal_ranks() {
    let threads = |count: [&'static str; 2]| {
        move |rank: usize, command: &mut Command| _ = command.args(["--threads-per-rank", count[rank]])
    };
    for (kind, flags) in KINDS.into_iter().enumerate() {
        for stage in ["zero0", "zero1", "zero2", "zero3"] {
            // A diagonal of both; all with ZEROTH_FULL.
            if !is_full() && ![[0, 0], [0, 2], [0, 3], [1, 2], [2, 3]].contains(&[kind, stage_number(stage)])
            {
                continue;
            }
            let flags = [flags, &["--deepspeed", stage]].concat();
            let (expected, said) = trained(&format!("equal-{kind}-{stage}"), &flags, threads(["1", "1"]));
            assert!(!said.contains("ranks differ"), "{said}");
            for (name, count) in [("fewer", ["1", "2"]), ("more", ["3", "1"])] {
                let job = format!("{name}-{kind}-{stage}");
                let (found, said) = trained(&job, &flags, threads(count));
                assert_eq!(found, expected, "{flags:?}, threads {count:?}: {said}");
                let [zero, one] = count;
                let note =
                    format!("(--threads-per-rank): {zero} on rank 0; {one} on rank 1: memory is planned");
                assert_eq!(said.matches(&note).count(), 1, "{note}: {said}");
            }
        }
    }
}

fn stage_number(preset: &str) -> usize {
    preset.trim_start_matches("zero").parse().unwrap()
}

#[test]
fn ranks_on_other_cpus_train_the_numbers_of_equal_ranks() {
    if Command::new("taskset").arg("--version").output().is_err() {
        println!("skipped: taskset is not installed");
        return;
    }
    // Without --threads-per-rank: each counts the CPUs that it may use.
    let (expected, _) = trained("all-cpus", &["--deepspeed", "zero2"], |_, _| {});
    for bound in [0, 1] {
        let (found, said) = trained(&format!("bound-{bound}"), &["--deepspeed", "zero2"], |rank, command| {
            if rank == bound {
                let mut on_one = Command::new("taskset");
                on_one.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
                for (name, value) in command.get_envs() {
                    on_one.env(name, value.unwrap_or_default());
                }
                let output = |stream: &str| {
                    let folder = command.get_args().skip_while(|flag| *flag != "--output").nth(1).unwrap();
                    let folder = Path::new(folder).parent().unwrap();
                    std::fs::File::create(folder.join(format!("{stream}-{rank}"))).unwrap()
                };
                on_one.stdout(output("out")).stderr(output("said"));
                *command = on_one;
            }
        });
        assert_eq!(found, expected, "{said}");
    }
}

/// The instruction sets of this machine's kernels that a rank may be told to use, best last.
fn instruction_sets() -> Vec<&'static str> {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|known| known == flag);
    let mut sets = vec!["portable"];
    sets.extend((has("avx2") && has("fma")).then_some("avx2"));
    let avx512 = ["avx512f", "avx512bw", "avx512dq", "avx512vl"];
    sets.extend(avx512.iter().all(|flag| has(flag)).then_some("avx512"));
    sets
}

#[test]
fn ranks_on_other_instructions_train_together_and_say_so_once() {
    let sets = instruction_sets();
    let Some([one, other]) = sets.last_chunk().copied() else {
        println!("skipped: this machine has one instruction set");
        return;
    };
    for stage in ["zero0", "zero2", "zero3"] {
        let on = |sets: [&'static str; 2]| {
            move |rank: usize, command: &mut Command| {
                command.args(["--threads-per-rank", "1"]).env("ZEROTH_CPU", sets[rank]);
            }
        };
        let flags = ["--deepspeed", stage];
        let (expected, said) = trained(&format!("one-{stage}"), &flags, on([one, one]));
        assert!(!said.contains("ranks differ"), "{said}");
        let (found, said) = trained(&format!("both-{stage}"), &flags, on([one, other]));
        let note = format!("(ZEROTH_CPU): {one} on rank 0; {other} on rank 1: ");
        assert_eq!(said.matches(&note).count(), 1, "{note}: {said}");
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            let [found, expected] = [found, expected].map(|number| number.as_f64().unwrap());
            assert!((found / expected - 1.0).abs() < 0.01, "{found} and {expected}: {said}");
        }
    }
}

#[test]
fn ranks_of_other_environments_train_the_numbers_of_equal_ranks() {
    let flags = ["--deepspeed", "zero2", "--threads-per-rank", "1"];
    let (expected, _) = trained("same-environment", &flags, |_, _| {});
    let caches = tempfile::tempdir().unwrap();
    let (found, said) = trained("other-environment", &flags, |rank, command| {
        if rank == 1 {
            command
                .env("ZEROTH_CACHE", caches.path())
                .envs([("RAYON_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "7"), ("CUDA_VISIBLE_DEVICES", "")])
                .envs([("LANG", "tr_TR.UTF-8"), ("TZ", "Asia/Tokyo"), ("COLUMNS", "40")]);
        }
    });
    assert_eq!(found, expected, "{said}");
    assert!(!said.contains("ranks differ"), "{said}");
}

/// As much of a driver as a probe asks for, with one GPU.
const DRIVER: &str = r#"
    #include <stddef.h>
    #include <string.h>
    int cuInit(unsigned flags) { return 0; }
    int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
    int cuDeviceGetCount(int *count) { *count = 1; return 0; }
    int cuDeviceGet(int *device, int index) { *device = index; return 0; }
    int cuDeviceGetName(char *name, int length, int device) { strncpy(name, NAME, length); return 0; }
    int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80000000000; return 0; }
    int cuDeviceGetAttribute(int *value, int attribute, int device) {
        *value = attribute == 16 ? 100 : attribute == 75 ? MAJOR : 0;
        return 0;
    }
    int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, MAJOR, 16); return 0; }
    int cuGetErrorString(int code, const char **text) { *text = "a driver that only counts"; return 0; }
"#;

/// A folder with a driver of this GPU; `None` without a C compiler.
fn driver(folder: &Path, name: &str, major: u32) -> Option<String> {
    let own = folder.join(format!("driver-{major}"));
    std::fs::create_dir(&own).unwrap();
    let source = own.join("driver.c");
    std::fs::write(&source, format!("#define NAME \"{name}\"\n#define MAJOR {major}\n{DRIVER}")).unwrap();
    let library = own.join("libcuda.so.1");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o", text(&library), text(&source)]).status();
    match built {
        Ok(status) => assert!(status.success()),
        Err(_) => return None,
    }
    Some(text(&own).to_owned())
}

#[test]
fn ranks_on_other_gpus_say_so_and_those_that_exchange_otherwise_are_refused() {
    let drivers = tempfile::tempdir().unwrap();
    let both =
        [("NVIDIA H200", 9), ("NVIDIA A100", 8)].map(|(name, major)| driver(drivers.path(), name, major));
    let [Some(hopper), Some(ampere)] = both else {
        println!("skipped: there is no C compiler");
        return;
    };
    let flags = ["--device", "cuda", "--max-steps", "1"];
    let start = |job: &str, transport: Option<&'static str>| {
        let folders = [hopper.clone(), ampere.clone()];
        let folder = tempfile::tempdir().unwrap();
        let mut ranks = Ranks::start_each(folder, job, &flags, |rank, command| {
            command.env("LD_LIBRARY_PATH", &folders[rank]);
            if let Some(transport) = transport.filter(|_| rank == 1) {
                command.env("ZEROTH_GPU_COLLECTIVES", transport);
            }
        });
        (ranks.codes(), ranks.said())
    };
    let (codes, said) = start("gpus", None);
    let note = "the GPU: NVIDIA H200 (compute capability 9.0) on rank 0; NVIDIA A100 (compute capability 8.0) on rank 1: ";
    assert_eq!(said.matches(note).count(), 1, "{said}");
    // There is no device behind this driver, and no rank says that it trained.
    assert!(codes.iter().all(|code| matches!(code, Some(1 | 2))), "{codes:?}: {said}");
    let (codes, said) = start("transports", Some("host"));
    assert_eq!(codes, [Some(2), Some(2)], "{said}");
    let refused =
        "the way GPUs exchange data (ZEROTH_GPU_COLLECTIVES) is null on rank 0 and \"host\" on rank 1";
    assert!(said.contains(refused), "{said}");
}
