//! SIGKILL of the launcher, one rank, or all processes, in every phase of a run and at random times. A run resumed with
//! `--resume auto` after each kill ends with the bits of an undisturbed one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::cases;
use super::chance::Chance;
use super::inject::{Ended, Injection, LEFT_BEHIND, LIMIT, tool, zeroth, zeroth_with};
use super::job::{Job, STEPS};

const AUDIT: u32 = 1;
const VICTIMS: [&str; 3] = ["kill-launcher", "kill-rank", "kill-all"];

/// A part of a run, known by its system calls.
struct Phase {
    name: &'static str,
    calls: &'static str,
    below: Vec<PathBuf>,
    /// How many such calls an unbroken run makes.
    most: u64,
}

fn phases(job: &Job, run: &Path, cache: &Path) -> Vec<Phase> {
    let phase = |name, calls, below: &[PathBuf]| Phase { name, calls, below: below.to_vec(), most: 0 };
    let checkpoints = run.join("checkpoints");
    vec![
        phase(
            "start",
            "open,read,write,rename,mkdir,sync",
            &[job.path("model"), job.path("rows.jsonl"), cache.to_owned()],
        ),
        phase("step", "write", &[run.join("metrics.jsonl")]),
        phase("save", "open,write,mkdir,sync,rename", std::slice::from_ref(&checkpoints)),
        phase("removal", "unlink,rename", &[checkpoints]),
        phase("export", "open,write,mkdir,sync,rename,unlink", &[run.join("model")]),
    ]
}

/// A run under the tool, which kills at a call of a phase.
fn kill_at(
    tool: &Path,
    phase: &Phase,
    at: u64,
    action: &str,
    arguments: &[String],
    cache: &Path,
) -> (Ended, bool, u64) {
    let below: Vec<&Path> = phase.below.iter().map(PathBuf::as_path).collect();
    let injection = Injection { calls: phase.calls, at, action, below: &below };
    let injected = zeroth_with(tool, &injection, arguments, cache);
    (injected.ended, injected.hit.is_some(), injected.calls)
}

/// A run that is killed after some time, whatever it does then.
fn kill_after(delay: Duration, victim: &str, arguments: &[String], cache: &Path) -> (Ended, bool) {
    let said = cache.with_extension("said");
    fs::create_dir_all(cache).unwrap();
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(arguments)
        .env("NO_COLOR", "1")
        .env("ZEROTH_CACHE", cache)
        .env("TMPDIR", cache)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&said).unwrap())
        .spawn()
        .unwrap();
    std::thread::sleep(delay);
    let ranks = children(launcher.id());
    let has_ended = launcher.try_wait().unwrap().is_some();
    let victims: Vec<u32> = match victim {
        "kill-launcher" => vec![launcher.id()],
        "kill-rank" => ranks.first().copied().into_iter().collect(),
        _ => ranks.iter().copied().chain([launcher.id()]).collect(),
    };
    let kills = !has_ended && !victims.is_empty();
    if kills {
        let victims: Vec<String> = victims.iter().map(ToString::to_string).collect();
        // One that has just ended is no failure of the others.
        let _ = Command::new("kill").arg("-KILL").args(&victims).stderr(Stdio::null()).status().unwrap();
    }
    let ended = wait(&mut launcher, &ranks);
    let text = String::from_utf8_lossy(&fs::read(&said).unwrap()).into_owned();
    (Ended { said: text, ..ended }, kills)
}

/// Waits for the launcher, and for its ranks after it.
fn wait(launcher: &mut Child, ranks: &[u32]) -> Ended {
    let begun = Instant::now();
    let code = loop {
        match launcher.try_wait().unwrap() {
            Some(status) => break status.code().unwrap_or(137),
            None if begun.elapsed() > LIMIT => {
                launcher.kill().unwrap();
                launcher.wait().unwrap();
                return Ended { code: 137, said: String::new(), hung: true };
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let ended = Instant::now();
    while ranks.iter().any(|rank| is_alive(*rank)) {
        if ended.elapsed() > Duration::from_secs(10) {
            return Ended { code: LEFT_BEHIND, said: String::new(), hung: false };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ended { code, said: String::new(), hung: false }
}

fn children(process: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Whether it is there, and more than an entry that nobody has collected yet.
fn is_alive(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains("(zombie)"))
}

#[test]
fn repeated_kills_end_with_the_same_bits() {
    let wanted = cases(12, 200);
    let job = Job::new();
    let (whole, cache) = (job.path("whole"), job.cache("whole"));
    let begun = Instant::now();
    let ended = zeroth(&job.arguments(&whole, &[]), &cache);
    assert_eq!(ended.code, 0, "{}", ended.said);
    let takes = begun.elapsed();
    let expected = Job::left(&whole).unwrap();
    let exported = job.path("exported");
    let last = whole.join(format!("checkpoints/step-{STEPS}"));
    let export = ["checkpoint", "export", last.to_str().unwrap(), "--output", exported.to_str().unwrap()];
    let ended = zeroth(&export.map(str::to_owned), &cache);
    assert_eq!(ended.code, 0, "{}", ended.said);
    assert!(
        fs::read(exported.join("model.safetensors")).unwrap() == expected.model(),
        "model/ is not that of step {STEPS}"
    );
    fs::remove_dir_all(&whole).unwrap();

    // Without the tool all kills come at a moment of their own.
    let tool = tool();
    let mut most = BTreeMap::new();
    for phase in tool.iter().flat_map(|_| phases(&job, &whole, &cache)) {
        let _ = fs::remove_dir_all(&whole);
        let _ = fs::remove_dir_all(&cache);
        let (ended, _, calls) =
            kill_at(tool.unwrap(), &phase, 0, "count", &job.arguments(&whole, &[]), &cache);
        assert!(ended.code == 0 && calls > 0, "{}: {calls} calls: {}", phase.name, ended.said);
        most.insert(phase.name, calls);
    }

    let mut kills: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    let (mut killed, mut case, mut runs) = (0, 0, 0);
    while killed < wanted {
        runs += 1;
        let (run, cache) = (job.path(&format!("run-{runs}")), job.cache(&format!("run-{runs}")));
        let arguments = job.arguments(&run, &[]);
        let mut phases = phases(&job, &run, &cache);
        for phase in &mut phases {
            phase.most = most.get(phase.name).copied().unwrap_or(0);
        }
        loop {
            let mut chance = Chance::of(AUDIT, case);
            let victim = chance.one_of(&VICTIMS);
            let phase = phases.get(case as usize % (phases.len() + 1)).filter(|_| tool.is_some());
            case += 1;
            assert!(case < 20 * wanted, "{killed} kills in {case} attempts");
            let (ended, hit, name) = match (phase, tool) {
                (Some(phase), Some(tool)) if killed < wanted => {
                    // A run that goes on makes fewer calls than one from the beginning.
                    let most = phase.most as usize / (1 + chance.below(4)) + 1;
                    let at = 1 + chance.below(most) as u64;
                    let (ended, hit, _) = kill_at(tool, phase, at, victim, &arguments, &cache);
                    (ended, hit, phase.name)
                }
                _ if killed < wanted => {
                    let delay = takes.mul_f64(chance.below(1000) as f64 / 1000.0);
                    let (ended, hit) = kill_after(delay, victim, &arguments, &cache);
                    (ended, hit, "any moment")
                }
                _ => (zeroth(&arguments, &cache), false, "none"),
            };
            let place = format!("kill {killed} ({victim}, {name}), case {}", case - 1);
            assert!(!ended.hung, "{place}: it hangs: {}", ended.said);
            assert!(ended.code != LEFT_BEHIND, "{place}: a process is left behind: {}", ended.said);
            assert!(!ended.crashed() && !ended.said.contains("was skipped"), "{place}: {}", ended.said);
            assert_eq!(Job::damaged(&run), Vec::<String>::new(), "{place}");
            if hit {
                killed += 1;
                *kills.entry((name, victim)).or_default() += 1;
            }
            if ended.code == 0 {
                break;
            }
            assert!(hit, "{place}: it failed by itself: {}", ended.said);
        }
        let left = Job::left(&run).unwrap_or_else(|problem| panic!("after {killed} kills: {problem}"));
        assert_eq!(left.difference(&expected), None, "after {killed} kills in {}", run.display());
        fs::remove_dir_all(&run).unwrap();
    }
    println!(
        "{killed} kills in {runs} runs, each run with the same losses, weights and optimizer state as an unbroken one"
    );
    for ((phase, victim), count) in kills {
        println!("  {phase:<10} {victim:<13} {count}");
    }
}
