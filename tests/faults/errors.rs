//! Failing system calls, one per run: the run succeeds with the same results or reports what failed. Earlier checkpoints
//! stay valid, and `--resume auto` ends with the bits of an undisturbed run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::cases;
use super::chance::Chance;
use super::inject::{Ended, Injection, LEFT_BEHIND, tool, zeroth, zeroth_with};
use super::job::{Job, Left};

const AUDIT: u32 = 2;

/// An errno, and words of which one must occur in the message.
type Fault = (u32, &'static [&'static str]);
const EIO: Fault = (5, &["Input/output error"]);
const EINTR: Fault = (4, &["Interrupted system call"]);
const EAGAIN: Fault = (11, &["Resource temporarily unavailable"]);
const ENOMEM: Fault = (12, &["Cannot allocate memory", "Out of memory"]);
const EACCES: Fault = (13, &["Permission denied"]);
const EINVAL: Fault = (22, &["Invalid argument"]);
const EMFILE: Fault = (24, &["Too many open files"]);
const ENOSPC: Fault = (28, &["No space left on device", "disk full"]);

/// Classes of calls, as in `inject.c`, and their possible errors.
const CALLS: [(&str, &[Fault]); 13] = [
    ("open", &[EIO, EMFILE, EACCES, EINTR, ENOMEM, ENOSPC]),
    ("read", &[EIO, EINTR, EINVAL, ENOMEM]),
    ("write", &[EIO, ENOSPC, EINTR, EINVAL]),
    ("sync", &[EIO, ENOSPC, EINVAL, EINTR]),
    ("rename", &[EIO, ENOSPC, EACCES, EINVAL, ENOMEM]),
    ("mkdir", &[EIO, ENOSPC, EACCES, ENOMEM]),
    ("unlink", &[EIO, EACCES, ENOMEM]),
    ("list", &[EIO, ENOMEM, EINVAL]),
    ("map", &[ENOMEM, EACCES, EINVAL]),
    ("truncate", &[EIO, ENOSPC, EINTR, EINVAL]),
    ("stat", &[EIO, EACCES, ENOMEM]),
    ("close", &[EIO, EINTR]),
    ("thread", &[EAGAIN]),
];

/// The starting state of a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Start {
    Nothing,
    /// A run killed halfway, with checkpoints to read and stale files.
    Halfway,
}

#[test]
fn failing_system_calls_give_errors_or_the_same_bits() {
    let Some(tool) = tool() else { return };
    let wanted = cases(26, 300);
    let job = Job::new();
    let (whole, cache) = (job.path("whole"), job.cache("whole"));
    let ended = zeroth(&job.arguments(&whole, &[]), &cache);
    assert_eq!(ended.code, 0, "{}", ended.said);
    let expected = Job::left(&whole).unwrap();
    let halfway = job.path("halfway");
    let metrics = halfway.join("metrics.jsonl");
    let kill = Injection { calls: "write", at: 7, action: "kill-all", below: &[&metrics] };
    let killed = zeroth_with(tool, &kill, &job.arguments(&halfway, &[]), &cache);
    assert!(killed.hit.is_some(), "{}", killed.ended.said);

    let audit = Audit { job: &job, tool, expected: &expected, halfway: &halfway, halfway_cache: &cache };
    let mut calls = BTreeMap::new();
    let (mut hits, mut codes, mut failures) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    let (mut done, mut case) = (0, 0);
    while done < wanted {
        let mut chance = Chance::of(AUDIT, case);
        let (class, faults) = CALLS[case as usize % CALLS.len()];
        let start =
            if (case as usize / CALLS.len()).is_multiple_of(2) { Start::Nothing } else { Start::Halfway };
        let most = *calls.entry((class, start)).or_insert_with(|| audit.count(class, start));
        let fault = faults[chance.below(faults.len())];
        let at = 1 + chance.below(most.max(1) as usize) as u64;
        case += 1;
        assert!(case < 3 * wanted, "{done} calls failed in {case} attempts");
        let found = audit.fail(class, fault, at, start);
        if let Some(hit) = found.hit {
            done += 1;
            *hits.entry(class).or_insert(0) += 1;
            *codes.entry(found.code).or_insert(0) += 1;
            failures.extend(found.problems.iter().map(|problem| {
                format!("{class} {at} of {most} with errno {} ({hit}), case {}: {problem}", fault.0, case - 1)
            }));
        }
    }
    println!("{done} system calls failed; calls by class: {hits:?}; exit codes: {codes:?}");
    assert!(failures.is_empty(), "{} of {done}:\n{}", failures.len(), failures.join("\n"));
}

/// Like file systems without fsync of folders.
#[test]
fn unsupported_folder_sync_is_tolerated() {
    let Some(tool) = tool() else { return };
    let job = Job::new();
    let (run, cache) = (job.path("run"), job.cache("run"));
    let below = [&run, &run.join("checkpoints"), &run.join("model"), &cache.join("tokens")]
        .map(|folder| PathBuf::from(format!("={}", folder.display())));
    let below: Vec<&Path> = below.iter().map(PathBuf::as_path).collect();
    let every = Injection { calls: "sync", at: 0, action: "22", below: &below };
    let injected = zeroth_with(tool, &every, &job.arguments(&run, &[]), &cache);
    assert!(
        injected.ended.code == 0 && injected.calls > 3,
        "{} calls: {}",
        injected.calls,
        injected.ended.said
    );
    Job::left(&run).unwrap();
}

/// An inaccessible optional file is not treated as absent.
#[test]
fn inaccessible_files_are_reported() {
    let Some(tool) = tool() else { return };
    let job = Job::new();
    let (run, cache) = (job.path("run"), job.cache("run"));
    for name in ["generation_config.json", "model.safetensors", "config.json"] {
        let path = job.path("model").join(name);
        let exactly = PathBuf::from(format!("={}", path.display()));
        let every = Injection { calls: "stat", at: 0, action: "5", below: &[&exactly] };
        let injected = zeroth_with(tool, &every, &job.arguments(&run, &[]), &cache);
        let ended = &injected.ended;
        assert!(injected.calls > 0 && [1, 2].contains(&ended.code), "{name}: {}: {}", ended.code, ended.said);
        let hit = format!("stat of {}", path.display());
        assert!(ended.said.contains(EIO.1[0]) && names_cause(&ended.said, &hit, &[]), "{}", ended.said);
    }
}

/// Like a machine at its process limit.
#[test]
fn thread_creation_failures_are_reported() {
    let Some(tool) = tool() else { return };
    let job = Job::new();
    let (run, cache) = (job.path("run"), job.cache("run"));
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/gsm8k/tiny-qwen3");
    let (folder, new) =
        (tokenizer.to_str().unwrap().to_owned(), job.path("new").to_str().unwrap().to_owned());
    let rows = job.path("rows.jsonl").to_str().unwrap().to_owned();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<String>>();
    let commands = [
        job.arguments(&run, &[]),
        job.arguments(&run, &["--ranks", "1"]),
        words(&["data", "preview", "--model", &folder, "--data", &rows]),
        words(&["doctor"]),
    ];
    let every = Injection { calls: "thread", at: 0, action: "11", below: &[Path::new("/")] };
    for command in &commands {
        let ended = zeroth_with(tool, &every, command, &cache).ended;
        assert!(
            !ended.crashed() && !ended.hung && [1, 2].contains(&ended.code),
            "{}: {}",
            ended.code,
            ended.said
        );
        assert!(ended.said.contains("thread") && names_cause(&ended.said, "", EAGAIN.1), "{}", ended.said);
    }
    // If other threads can do the work, they do.
    let sizes = [
        "--hidden",
        "256",
        "--layers",
        "2",
        "--heads",
        "4",
        "--intermediate-size",
        "1024",
        "--vocab-size",
        "4096",
    ];
    let init = words(&[&["init", "--family", "llama", "--output", &new][..], &sizes].concat());
    let ended = zeroth_with(tool, &every, &init, &cache).ended;
    assert_eq!(ended.code, 0, "{}", ended.said);
}

struct Audit<'a> {
    job: &'a Job,
    tool: &'a Path,
    expected: &'a Left,
    halfway: &'a Path,
    halfway_cache: &'a Path,
}

struct Found {
    code: i32,
    hit: Option<String>,
    problems: Vec<String>,
}

impl Audit<'_> {
    /// Prepares a run folder and token cache for `start`.
    fn prepare(&self, start: Start) -> (PathBuf, PathBuf) {
        let (run, cache) = (self.job.path("run"), self.job.cache("run"));
        for path in [&run, &cache] {
            let _ = fs::remove_dir_all(path);
        }
        if start == Start::Halfway {
            copy(self.halfway, &run);
            copy(self.halfway_cache, &cache);
        }
        (run, cache)
    }

    fn below(&self, run: &Path, cache: &Path) -> [PathBuf; 4] {
        [run.to_owned(), cache.to_owned(), self.job.path("model"), self.job.path("rows.jsonl")]
    }

    /// The number of calls of a class in such a run.
    fn count(&self, class: &str, start: Start) -> u64 {
        let (run, cache) = self.prepare(start);
        let below = self.below(&run, &cache);
        let below: Vec<&Path> = below.iter().map(PathBuf::as_path).collect();
        let counted = zeroth_with(
            self.tool,
            &Injection { calls: class, at: 0, action: "count", below: &below },
            &self.job.arguments(&run, &[]),
            &cache,
        );
        assert_eq!(counted.ended.code, 0, "{}", counted.ended.said);
        counted.calls
    }

    fn fail(&self, class: &str, (error, words): Fault, at: u64, start: Start) -> Found {
        let (run, cache) = self.prepare(start);
        let below = self.below(&run, &cache);
        let below: Vec<&Path> = below.iter().map(PathBuf::as_path).collect();
        let injection = Injection { calls: class, at, action: &error.to_string(), below: &below };
        let arguments = self.job.arguments(&run, &[]);
        let injected = zeroth_with(self.tool, &injection, &arguments, &cache);
        let mut problems = Vec::new();
        let mut is_wrong = |wrong: bool, what: &str, ended: &Ended| {
            if wrong {
                problems.push(format!("{what} (exit code {}): {}", ended.code, last_words(&ended.said)));
            }
        };
        let ended = &injected.ended;
        is_wrong(ended.hung, "it hangs", ended);
        is_wrong(ended.crashed(), "it crashes", ended);
        is_wrong(ended.code == LEFT_BEHIND, "a process is left behind", ended);
        is_wrong(!(0..=3).contains(&ended.code), "another exit code than 0 to 3", ended);
        if let (1..=3, Some(hit)) = (ended.code, &injected.hit) {
            is_wrong(!names_cause(&ended.said, hit, words), "the error names neither path nor cause", ended);
        }
        if ended.code == 0 {
            is_wrong(self.difference(&run).is_some(), "exit code 0 with other results", ended);
        }
        let damaged = Job::damaged(&run);
        is_wrong(!damaged.is_empty(), &format!("damaged checkpoints {damaged:?}"), ended);
        let again = zeroth(&arguments, &cache);
        is_wrong(again.code != 0, "--resume auto fails afterwards", &again);
        if again.code == 0
            && let Some(difference) = self.difference(&run)
        {
            is_wrong(true, &format!("--resume auto ends otherwise: {difference}"), &again);
        }
        Found { code: injected.ended.code, hit: injected.hit, problems }
    }

    fn difference(&self, run: &Path) -> Option<String> {
        Job::left(run).map_or_else(Some, |left| left.difference(self.expected))
    }
}

/// Whether an error names the path or the system's error message.
fn names_cause(said: &str, hit: &str, words: &[&str]) -> bool {
    let Some((_, error)) = said.split_once("error: ") else { return false };
    let path = hit.split_once(" of ").map(|(_, path)| path);
    path.is_some_and(|path| error.contains(path)) || words.iter().any(|words| error.contains(words))
}

/// The end of stderr.
fn last_words(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    lines[lines.len().saturating_sub(4)..].join(" | ")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
