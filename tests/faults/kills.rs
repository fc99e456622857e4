//! SIGKILL of the launcher, one rank, or all processes, in every phase of a run and at random times, for every kind of run. A
//! run resumed with `--resume auto` after each kill ends with the bits of an undisturbed one.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::cases;
use super::chance::Chance;
use super::inject::{Ended, Injection, LEFT_BEHIND, LIMIT, tool, zeroth, zeroth_with};
use super::job::{Job, Left, STEPS};
use super::kinds::{Kind, TRAINED};

const AUDIT: u32 = 1;
const VICTIMS: [&str; 3] = ["kill-launcher", "kill-rank", "kill-all"];

/// A part of a run, known by its system calls.
struct Phase {
    name: &'static str,
    calls: &'static str,
    below: Vec<PathBuf>,
}

fn phases(job: &Job, kind: Kind, run: &Path, cache: &Path) -> Vec<Phase> {
    let phase = |name, calls, below: &[PathBuf]| Phase { name, calls, below: below.to_vec() };
    let start = phase(
        "start",
        "open,read,write,rename,mkdir,sync",
        &[job.path("model"), job.path("rows.jsonl"), cache.to_owned()],
    );
    if kind == Kind::MakingCache {
        return vec![start, phase("records", "open,write,mkdir,sync,rename,unlink", &[run.to_owned()])];
    }
    if kind.is_export() {
        let read = phase("read", "open,read", &[job.path(TRAINED), job.path("model")]);
        return vec![read, phase("export", "open,write,mkdir,sync,rename,unlink", &[run.to_owned()])];
    }
    let checkpoints = run.join("checkpoints");
    vec![
        start,
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

/// A job, what it leaves without a kill, and how long it takes.
struct Audit<'a> {
    job: &'a Job,
    kind: Kind,
    /// Without the tool all kills come at a moment of their own.
    tool: Option<&'static Path>,
    expected: Left,
    takes: Duration,
    /// Calls that an unbroken run makes in a phase.
    calls: RefCell<BTreeMap<&'static str, u64>>,
}

/// The kills of an audit, by phase and victim.
#[derive(Default)]
struct Tally {
    killed: u32,
    runs: u32,
    kills: BTreeMap<(&'static str, &'static str), u32>,
}

impl<'a> Audit<'a> {
    /// Runs the job without a kill, in the folder `whole`, which stays.
    fn of(job: &'a Job, kind: Kind) -> Self {
        let (whole, cache) = (job.path("whole"), job.cache("whole"));
        let begun = Instant::now();
        let ended = zeroth(&kind.arguments(job, &whole), &cache);
        assert_eq!(ended.code, 0, "{}", ended.said);
        let takes = begun.elapsed();
        kind.check(&whole);
        Self {
            job,
            kind,
            tool: tool(),
            expected: kind.left(&whole).unwrap(),
            takes,
            calls: RefCell::default(),
        }
    }

    /// How many calls of a phase an unbroken run makes.
    fn calls_of(&self, tool: &Path, phase: usize) -> u64 {
        let (run, cache) = (self.job.path("counted"), self.job.cache("counted"));
        let phase = &phases(self.job, self.kind, &run, &cache)[phase];
        if let Some(calls) = self.calls.borrow().get(phase.name) {
            return *calls;
        }
        let (ended, _, calls) =
            kill_at(tool, phase, 0, "count", &self.kind.arguments(self.job, &run), &cache);
        assert!(ended.code == 0 && calls > 0, "{}: {calls} calls: {}", phase.name, ended.said);
        for folder in [run, cache] {
            fs::remove_dir_all(folder).unwrap();
        }
        self.calls.borrow_mut().insert(phase.name, calls);
        calls
    }

    /// Kills runs until there were `wanted` kills, and compares each that has ended with an unbroken one. Phases take turns,
    /// from the `first` on.
    fn kill(&self, wanted: u32, first: u32) -> Tally {
        let mut tally = Tally::default();
        let mut case = first;
        while tally.killed < wanted {
            tally.runs += 1;
            let name = format!("run-{}", tally.runs);
            let (run, cache) = (self.job.path(&name), self.job.cache(&name));
            while !self.attempt(&run, &cache, case, wanted, &mut tally) {
                case += 1;
                assert!(case < first + 20 * (wanted + 1), "{} kills in {case} attempts", tally.killed);
            }
            case += 1;
            let left = self
                .kind
                .left(&run)
                .unwrap_or_else(|problem| panic!("after {} kills: {problem}", tally.killed));
            let difference = left.difference(&self.expected);
            assert_eq!(difference, None, "after {} kills in {}", tally.killed, run.display());
            fs::remove_dir_all(&run).unwrap();
        }
        tally
    }

    /// Starts or resumes a run, and kills it unless enough were killed; true once it has ended by itself.
    fn attempt(&self, run: &Path, cache: &Path, case: u32, wanted: u32, tally: &mut Tally) -> bool {
        let arguments = self.kind.arguments(self.job, run);
        let mut chance = Chance::of(AUDIT + 100 * self.kind as u32, case);
        let victim = chance.one_of(&VICTIMS);
        let phases = phases(self.job, self.kind, run, cache);
        let place = case as usize % (phases.len() + 1);
        let phase = phases.get(place).filter(|_| self.tool.is_some());
        let (ended, hit, name) = match (phase, self.tool) {
            _ if tally.killed >= wanted => (zeroth(&arguments, cache), false, "none"),
            (Some(phase), Some(tool)) => {
                // A run that goes on makes fewer calls than one from the beginning.
                let most = self.calls_of(tool, place) as usize / (1 + chance.below(4)) + 1;
                let at = 1 + chance.below(most) as u64;
                let (ended, hit, _) = kill_at(tool, phase, at, victim, &arguments, cache);
                (ended, hit, phase.name)
            }
            _ => {
                let delay = self.takes.mul_f64(chance.below(1000) as f64 / 1000.0);
                let (ended, hit) = kill_after(delay, victim, &arguments, cache);
                (ended, hit, "any moment")
            }
        };
        let place = format!("kill {} ({victim}, {name}), case {case}", tally.killed);
        assert!(!ended.hung, "{place}: it hangs: {}", ended.said);
        assert!(ended.code != LEFT_BEHIND, "{place}: a process is left behind: {}", ended.said);
        assert!(!ended.crashed() && !ended.said.contains("was skipped"), "{place}: {}", ended.said);
        assert_eq!(Job::damaged(run), Vec::<String>::new(), "{place}");
        if hit {
            tally.killed += 1;
            *tally.kills.entry((name, victim)).or_default() += 1;
        }
        // A kill may come after everything is done.
        let is_complete = self.kind.is_export() && ended.code == 2 && ended.said.contains("is not empty");
        let is_done = ended.code == 0 || is_complete;
        assert!(hit || is_done, "{place}: it failed by itself: {}", ended.said);
        is_done
    }
}

impl Tally {
    fn print(&self, kind: Kind) {
        let Self { killed, runs, kills } = self;
        println!("{kind:?}: {killed} kills in {runs} runs, each with the bits of an unbroken one");
        for ((phase, victim), count) in kills {
            println!("  {phase:<10} {victim:<13} {count}");
        }
    }
}

#[test]
fn repeated_kills_end_with_the_same_bits() {
    let job = Job::new();
    let audit = Audit::of(&job, Kind::Full);
    let (whole, exported) = (job.path("whole"), job.path("exported"));
    let last = whole.join(format!("checkpoints/step-{STEPS}"));
    let export = ["checkpoint", "export", last.to_str().unwrap(), "--output", exported.to_str().unwrap()];
    let ended = zeroth(&export.map(str::to_owned), &job.cache("whole"));
    assert_eq!(ended.code, 0, "{}", ended.said);
    assert!(
        fs::read(exported.join("model.safetensors")).unwrap() == audit.expected.model(),
        "model/ is not that of step {STEPS}"
    );
    audit.kill(cases(12, 200), 0).print(Kind::Full);
}

/// 200 kills in all; a small audit kills each kind once, in another phase than its neighbours, and exports, which take no time,
/// four times.
fn kills_of(kind: Kind) {
    let (number, kinds) = (kind as u32, Kind::OTHERS);
    let share = 200 * number / kinds - 200 * (number - 1) / kinds;
    let job = kind.job();
    Audit::of(&job, kind).kill(cases(if kind.is_export() { 4 } else { 1 }, share), number).print(kind);
}

macro_rules! kills_of {
    ($($name:ident: $kind:ident,)*) => { $(
        #[test]
        fn $name() {
            kills_of(Kind::$kind);
        }
    )* };
}

kills_of! {
    lora: Lora,
    qlora: QLora,
    experts: Experts,
    distillation: Distillation,
    training_from_a_teacher_cache: FromCache,
    making_a_teacher_cache: MakingCache,
    encoder_decoder: EncoderDecoder,
    best_model: BestModel,
    early_stopping: EarlyStopping,
    exporting_a_checkpoint: Export,
    merging_an_adapter: Merge,
}
