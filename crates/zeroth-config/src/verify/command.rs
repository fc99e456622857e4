//! Parses a training command, from the outermost launcher to the script.

use std::collections::BTreeMap;

use zeroth_base::DType;

use super::launcher::{self, Environment, LauncherOptions, PYTHON_VALUES, Size};
use super::script::{ScriptFlags, Trainer, precision, trainer_by_flags};
use super::words::{Arguments, assignment, is_flag, is_python_file, words};
use crate::read::Number;

/// The program that starts the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LauncherProgram {
    /// DeepSpeed's runner.
    DeepSpeed,
    /// torchrun, or `python -m torch.distributed.run`.
    Torchrun,
    /// `accelerate launch`.
    Accelerate,
    /// ms-swift, which starts torchrun itself.
    Swift,
    /// zeroth.
    Zeroth,
    /// Plain Python: one process.
    Python,
    /// mpirun or mpiexec.
    Mpirun,
    /// SLURM's srun.
    Srun,
    /// An unknown program, or none.
    Other,
}

impl LauncherProgram {
    /// The launcher's name; `None` for [`LauncherProgram::Other`].
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::DeepSpeed => Some("deepspeed"),
            Self::Torchrun => Some("torchrun"),
            Self::Accelerate => Some("accelerate"),
            Self::Swift => Some("swift"),
            Self::Zeroth => Some("zeroth"),
            Self::Python => Some("python"),
            Self::Mpirun => Some("mpirun"),
            Self::Srun => Some("srun"),
            Self::Other => None,
        }
    }
}

/// The number of ranks, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankCount {
    /// The number of ranks, if the command gives it.
    pub size: Option<u64>,
    /// Where the number comes from, or would come from.
    pub from: String,
}

impl RankCount {
    fn new(size: Size) -> Self {
        match size {
            Ok((0, from)) => Self { size: None, from: format!("{from}, which starts none") },
            Ok((size, from)) => Self { size: Some(size), from },
            Err(from) => Self { size: None, from },
        }
    }
}

/// The DeepSpeed flags of `accelerate launch`.
#[derive(Debug, Clone, Default)]
pub(super) struct Accelerate {
    pub(super) mixed_precision: Option<DType>,
    pub(super) config_file: Option<String>,
    /// Flags that correspond to keys of the file: flag, key path, value.
    pub(super) settings: Vec<(&'static str, &'static str, String)>,
}

/// accelerate's flags, and the keys they set in the config that accelerate generates.
const ACCELERATE_KEYS: [(&str, &str); 5] = [
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_clipping", "gradient_clipping"),
    ("zero_stage", "zero_optimization.stage"),
    ("offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ("offload_param_device", "zero_optimization.offload_param.device"),
];

/// A parsed training command.
#[derive(Debug, Clone)]
pub(super) struct TrainingCommand {
    pub(super) launcher: LauncherProgram,
    pub(super) world: RankCount,
    pub(super) trainer: Trainer,
    pub(super) script: ScriptFlags,
    pub(super) accelerate: Option<Accelerate>,
    /// Whether the command starts nothing, or only launchers.
    pub(super) is_empty: bool,
}

/// The program named by the first word of a command, with the words after it and its subcommand.
enum Program<'a> {
    DeepSpeed(&'a [String]),
    Torchrun(&'a [String]),
    Accelerate(&'a [String]),
    Mpirun(&'a [String]),
    Srun(&'a [String]),
    Swift(&'a [String]),
    Zeroth(&'a [String]),
    /// Python; the words start at its script or module.
    Python(&'a [String]),
    /// A Python script or module.
    Script(&'a [String]),
    /// Any other program.
    Other(&'a [String]),
}

impl TrainingCommand {
    pub(super) fn read(command: &[String]) -> Self {
        let words = words(command);
        let mut reading = Reading::default();
        let mut rest: &[String] = &words;
        loop {
            rest = reading.strip(rest);
            let Some((word, after)) = rest.split_first() else { break };
            let script = match program(word, after) {
                Program::DeepSpeed(after) => {
                    let (options, script) = launcher::split(after, launcher::DEEPSPEED);
                    let size = launcher::deepspeed(&options, &reading.environment);
                    reading.start(LauncherProgram::DeepSpeed, size);
                    script
                }
                Program::Torchrun(after) => {
                    let (options, script) = launcher::split(after, launcher::TORCHRUN);
                    let size = launcher::torchrun(&options, &reading.environment);
                    reading.start(LauncherProgram::Torchrun, size);
                    script
                }
                Program::Accelerate(after) => {
                    let (options, script) = launcher::split(after, launcher::ACCELERATE);
                    reading.start(LauncherProgram::Accelerate, launcher::accelerate(&options));
                    reading.accelerate(&options);
                    script
                }
                Program::Mpirun(after) => {
                    let (options, script) = launcher::split(after, launcher::MPIRUN);
                    reading.start(LauncherProgram::Mpirun, launcher::mpirun(&options));
                    script
                }
                Program::Srun(after) => {
                    let (options, script) = launcher::split(after, launcher::SRUN);
                    let size = launcher::srun(&options, &reading.environment);
                    reading.start(LauncherProgram::Srun, size);
                    script
                }
                Program::Python(script) => {
                    reading.in_python = true;
                    script
                }
                program => return reading.finish(&program, word),
            };
            // The launched program may be another launcher or the script.
            rest = script;
        }
        Self { is_empty: true, ..reading.finish(&Program::Other(&[]), "nothing") }
    }
}

/// What was parsed before the script.
#[derive(Debug, Default)]
struct Reading {
    environment: Environment,
    in_python: bool,
    started: Option<(LauncherProgram, RankCount)>,
    accelerate: Option<Accelerate>,
    configs: Vec<(String, String)>,
}

impl Reading {
    /// Strips leading assignments and wrappers such as `env` and `nohup`.
    fn strip<'a>(&mut self, mut words: &'a [String]) -> &'a [String] {
        while let Some((word, after)) = words.split_first() {
            if let Some((name, value)) = assignment(word) {
                self.environment.insert(name.to_owned(), value.to_owned());
            } else if !matches!(word.as_str(), "env" | "exec" | "nohup" | "time" | "sudo") {
                break;
            }
            words = after;
        }
        words
    }

    /// Records a launcher. The innermost one wins, because its ranks are the ones that communicate.
    fn start(&mut self, launcher: LauncherProgram, size: Size) {
        self.started = Some((launcher, RankCount::new(size)));
    }

    fn accelerate(&mut self, options: &LauncherOptions) {
        let config = options.text(&["deepspeed_config_file"]);
        self.configs.extend(config.map(|path| ("--deepspeed_config_file".to_owned(), path.to_owned())));
        let settings = ACCELERATE_KEYS
            .iter()
            .filter_map(|(flag, key)| Some((*flag, *key, options.text(&[flag])?.to_owned())));
        self.accelerate = Some(Accelerate {
            mixed_precision: options.text(&["mixed_precision"]).and_then(precision),
            config_file: options.text(&["config_file"]).map(str::to_owned),
            settings: settings.collect(),
        });
    }

    fn finish(self, program: &Program<'_>, named: &str) -> TrainingCommand {
        let (trainer, arguments) = match *program {
            Program::Swift(after) => (Some(Trainer::Swift), after),
            Program::Zeroth(after) => (Some(Trainer::Zeroth), after),
            Program::Script(after) | Program::Other(after) => (None, after),
            _ => (None, &[][..]),
        };
        let mut arguments = Arguments::read(arguments);
        let (launcher, world) = self.world(program, named, &mut arguments);
        let trainer = trainer.unwrap_or_else(|| trainer_by_flags(&arguments));
        let mut script = ScriptFlags::read(&mut arguments, trainer);
        script.configs.splice(0..0, self.configs);
        TrainingCommand { launcher, world, trainer, script, accelerate: self.accelerate, is_empty: false }
    }

    /// The launcher that was found, or how the program runs without one.
    fn world(
        &self,
        program: &Program<'_>,
        named: &str,
        arguments: &mut Arguments,
    ) -> (LauncherProgram, RankCount) {
        let by_swift = match program {
            Program::Swift(_) => launcher::swift(&self.environment),
            _ => None,
        };
        if let Some(size) = by_swift {
            return (LauncherProgram::Swift, RankCount::new(size));
        }
        if let Some((launcher, world)) = &self.started {
            return (*launcher, world.clone());
        }
        let (launcher, size) = match program {
            Program::Swift(_) => {
                let from = "one process: swift starts more where NPROC_PER_NODE is set".to_owned();
                (LauncherProgram::Swift, Ok((1, from)))
            }
            Program::Zeroth(_) => (LauncherProgram::Zeroth, zeroth(arguments)),
            Program::Script(_) => (LauncherProgram::Python, python(&self.environment)),
            _ if self.in_python => (LauncherProgram::Python, python(&self.environment)),
            _ => (LauncherProgram::Other, Err(format!("what `{named}` starts"))),
        };
        (launcher, RankCount::new(size))
    }
}

/// Classifies the first word of a command.
fn program<'a>(word: &str, after: &'a [String]) -> Program<'a> {
    let name = word.rsplit('/').next().unwrap_or(word);
    let subcommand = after.first().map(String::as_str);
    let after_subcommand = || after.split_first().map_or(after, |(_, after)| after);
    match name {
        "deepspeed" | "ds" | "deepspeed.launcher.runner" => Program::DeepSpeed(after),
        "torchrun" | "torch.distributed.run" | "torch.distributed.launch" => Program::Torchrun(after),
        "accelerate" if subcommand == Some("launch") => Program::Accelerate(after_subcommand()),
        "accelerate-launch" | "accelerate.commands.launch" => Program::Accelerate(after),
        "mpirun" | "mpiexec" | "mpiexec.hydra" | "orterun" | "prterun" => Program::Mpirun(after),
        "srun" => Program::Srun(after),
        "swift" => Program::Swift(after_subcommand()),
        "zeroth" => Program::Zeroth(after_subcommand()),
        _ if is_swift_file(word) => Program::Swift(after),
        _ if is_python(name) => Program::Python(after_python_flags(after)),
        _ if is_python_file(name) || is_module(word) => Program::Script(after),
        _ => Program::Other(after),
    }
}

fn is_python(name: &str) -> bool {
    name.strip_prefix("python").is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// Whether a word is a module name, as in `python -m package.module`.
fn is_module(word: &str) -> bool {
    word.contains('.') && word.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_'))
}

/// Whether a word is an entry point of ms-swift, such as `swift/cli/sft.py` or `swift.cli.sft`.
fn is_swift_file(word: &str) -> bool {
    let module = word.strip_suffix(".py").unwrap_or(word).replace('/', ".");
    ["sft", "pt", "rlhf"].iter().any(|name| module.ends_with(&format!("swift.cli.{name}")))
}

/// Skips the flags of the Python interpreter, up to the script or module.
fn after_python_flags(mut words: &[String]) -> &[String] {
    while let Some((word, after)) = words.split_first().filter(|(word, _)| is_flag(word)) {
        words = if PYTHON_VALUES.contains(&word.as_str()) { after.get(1..).unwrap_or(after) } else { after };
        if word == "-m" {
            break;
        }
    }
    words
}

/// `WORLD_SIZE` if a launcher sets it, else one process.
fn python(environment: &BTreeMap<String, String>) -> Size {
    match environment.get("WORLD_SIZE") {
        Some(size) => match Number::from_text(size).and_then(|size| u64::try_from(size.as_whole()?).ok()) {
            Some(size) => Ok((size, "WORLD_SIZE".to_owned())),
            None => Err(format!("WORLD_SIZE `{size}`, which is no number")),
        },
        None => Ok((1, "one process, without a launcher".to_owned())),
    }
}

fn zeroth(arguments: &mut Arguments) -> Size {
    match arguments.whole(&["ranks", "num_gpus", "nproc_per_node"]) {
        Some(ranks) => Ok((ranks, format!("--ranks {ranks}"))),
        None => Err("the GPUs found, because --ranks is not given".to_owned()),
    }
}
