//! Renders chat templates in worker processes, which bounds their memory and CPU time.
//!
//! A template is a program. Its steps can be counted, but a single step can double a string, compare values with 2^60
//! leaves, or drop a list nested too deeply for the stack, and minijinja has no hook for these. In Rust, a failed
//! allocation or a stack overflow aborts the process. So templates run in another process: this program, started
//! again with rlimits on address space and CPU time. It reads conversations from stdin and answers with text. If it
//! dies, the row is reported and this process continues.
//!
//! Each rendering thread has its own worker and waits for it, so no more CPUs are busy than without workers.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chat_template::{
    CompiledTemplate, OUTPUT_BYTES, RenderError, Rendered, Sources, TemplateContext, TemplateProperties,
};
use super::date::Date;

/// Lowers a resource limit; never raises it.
fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    let current = Some(maximum.map_or(value, |maximum| value.min(maximum)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}

/// Address space for rendering in bytes.
const MEMORY: u64 = 512 << 20;
/// CPU seconds per render.
const SECONDS: u64 = 5;
/// Largest message: every byte of the output may become six in JSON.
const LONGEST_FRAME: usize = 8 * OUTPUT_BYTES;

/// The command line of a worker.
#[derive(Debug, Clone)]
pub(super) struct Worker {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

/// A folder's templates, rendered in workers.
pub(super) struct TemplateProcesses {
    worker: Worker,
    setup: Vec<u8>,
    properties: TemplateProperties,
    /// Workers not in use.
    idle: Mutex<Vec<TemplateProcess>>,
}

/// Everything that templates are compiled from.
#[derive(Serialize, Deserialize)]
struct Setup {
    sources: Sources,
    special: Vec<(String, String)>,
    variables: Map<String, Value>,
    date: String,
}

#[derive(Serialize)]
struct Request<'a> {
    messages: &'a [Map<String, Value>],
    tools: Option<&'a Value>,
    add_generation_prompt: bool,
}

#[derive(Deserialize)]
struct OwnedRequest {
    messages: Vec<Map<String, Value>>,
    tools: Option<Value>,
    add_generation_prompt: bool,
}

impl TemplateProcesses {
    /// Starts a worker, which compiles the templates.
    pub(super) fn start(
        worker: &Worker,
        sources: &Sources,
        context: &TemplateContext,
    ) -> Result<Self, RenderError> {
        let setup = Setup {
            sources: sources.clone(),
            special: context.special.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
            variables: context.variables.clone(),
            date: context.date.strftime("%F"),
        };
        let setup = encoded(&setup)?;
        let (process, properties) = TemplateProcess::start(worker, &setup)?;
        Ok(Self { worker: worker.clone(), setup, properties, idle: Mutex::new(vec![process]) })
    }

    /// Properties of the templates.
    pub(super) fn properties(&self) -> TemplateProperties {
        self.properties
    }

    /// Renders in an idle worker, or in a new one.
    pub(super) fn render(
        &self,
        messages: &[Map<String, Value>],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Rendered, RenderError> {
        let request = encoded(&Request { messages, tools, add_generation_prompt })?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut process = match idle {
            Some(process) => process,
            None => TemplateProcess::start(&self.worker, &self.setup)?.0,
        };
        let answer = process.ask::<Result<Rendered, RenderError>>(&request)?;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        answer
    }
}

/// A worker process.
struct TemplateProcess {
    child: Child,
    /// `None` once the process is to exit.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl TemplateProcess {
    fn start(worker: &Worker, setup: &[u8]) -> Result<(Self, TemplateProperties), RenderError> {
        let started = Command::new(&worker.program)
            .args(&worker.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal goes to this process, which ends the worker.
            .process_group(0)
            .spawn();
        let failed = |error: io::Error| {
            RenderError::Failed(format!(
                "{} cannot be started to render it: {error}",
                worker.program.display()
            ))
        };
        let mut child = started.map_err(failed)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let mut process = Self { child, input, output: BufReader::new(output) };
        let properties = process.ask::<Result<TemplateProperties, RenderError>>(setup)??;
        Ok((process, properties))
    }

    /// Sends a message and waits for the answer; the error describes how the worker died.
    fn ask<T: DeserializeOwned>(&mut self, message: &[u8]) -> Result<T, RenderError> {
        let Self { input, output, .. } = self;
        let answer = match input {
            Some(input) => write_frame(input, message).and_then(|()| read_frame(output)),
            None => Ok(None),
        };
        match answer {
            Ok(Some(bytes)) => decoded(&bytes),
            Ok(None) => Err(self.ended()),
            Err(_) => {
                // It may be alive and still writing.
                let _ = self.child.kill();
                Err(self.ended())
            }
        }
    }

    /// Describes how the worker died.
    fn ended(&mut self) -> RenderError {
        self.input = None;
        let mut said = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            let _ = stderr.take(1 << 16).read_to_string(&mut said);
        }
        let status = match self.child.wait() {
            Ok(status) => status,
            Err(error) => {
                return RenderError::Failed(format!("the process that renders it was lost: {error}"));
            }
        };
        let is = |signal: Signal| status.signal() == Some(signal.as_raw());
        RenderError::LimitExceeded(if is(Signal::XCPU) {
            format!("took more than {SECONDS} s of CPU time")
        } else if said.contains("memory allocation") {
            format!("took more than {} MiB of memory", MEMORY >> 20)
        } else if said.contains("overflowed its stack") {
            "nested values too deeply for its stack".to_owned()
        } else {
            format!("ended the process that renders it ({status}) {}", said.trim())
        })
    }
}

impl Drop for TemplateProcess {
    fn drop(&mut self) {
        // EOF on stdin ends the worker.
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Renders conversations from stdin until EOF: the main function of a worker started by
/// [`Encoder::rendering_in`](super::Encoder::rendering_in).
pub fn render_templates() -> io::Result<()> {
    let mut input = BufReader::new(io::stdin().lock());
    let mut output = BufWriter::new(io::stdout().lock());
    // An expected death leaves no core file.
    limit(Resource::Core, 0)?;
    limit(Resource::As, address_space()? + MEMORY)?;
    let mut cpu_time = CpuTimeLimit::new()?;

    let Some(setup) = read_frame(&mut input)? else { return Ok(()) };
    let template = cpu_time.bound(|| compiled(&setup))?;
    let properties = template.as_ref().map(CompiledTemplate::properties);
    answer(&mut output, &properties)?;
    let Ok(template) = template else { return Ok(()) };
    while let Some(request) = read_frame(&mut input)? {
        let rendered = cpu_time.bound(|| {
            let OwnedRequest { messages, tools, add_generation_prompt } = decoded(&request)?;
            template.render(&messages, tools.as_ref(), add_generation_prompt)
        })?;
        answer(&mut output, &rendered)?;
    }
    Ok(())
}

fn compiled(setup: &[u8]) -> Result<CompiledTemplate, RenderError> {
    let Setup { sources, special, variables, date } = decoded(setup)?;
    let date: Date = date.parse().map_err(|error| RenderError::Failed(format!("{error}")))?;
    let special: Vec<(&str, String)> = special.iter().map(|(name, text)| (&name[..], text.clone())).collect();
    CompiledTemplate::new(&sources, &TemplateContext { special: &special, variables: &variables, date })
}

/// Keeps the CPU limit ahead of the time used. A single thread's CPU time is at most its wall time, so the limit is
/// derived from a clock and only moves once a second.
struct CpuTimeLimit {
    busy: Duration,
    limit: u64,
}

impl CpuTimeLimit {
    fn new() -> io::Result<Self> {
        let mut cpu_time = Self { busy: Duration::ZERO, limit: 0 };
        cpu_time.move_limit()?;
        Ok(cpu_time)
    }

    fn move_limit(&mut self) -> io::Result<()> {
        // One second for process start-up.
        let limit = self.busy.as_secs() + 1 + SECONDS;
        if limit != self.limit {
            self::limit(Resource::Cpu, limit)?;
            self.limit = limit;
        }
        Ok(())
    }

    fn bound<T>(&mut self, work: impl FnOnce() -> T) -> io::Result<T> {
        self.move_limit()?;
        let begun = Instant::now();
        let done = work();
        self.busy += begun.elapsed();
        Ok(done)
    }
}

/// Current address space in bytes.
fn address_space() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let unknown = || io::Error::other("/proc/self/status has no VmSize in kB");
    Ok(kibibytes.ok_or_else(unknown)? << 10)
}

fn answer<T: Serialize, E: Serialize>(output: &mut impl Write, answer: &Result<T, E>) -> io::Result<()> {
    write_frame(output, &serde_json::to_vec(answer)?)
}

fn encoded(message: &impl Serialize) -> Result<Vec<u8>, RenderError> {
    serde_json::to_vec(message).map_err(|error| RenderError::Failed(error.to_string()))
}

fn decoded<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RenderError> {
    serde_json::from_slice(bytes).map_err(|error| RenderError::Failed(error.to_string()))
}

/// Writes a length in 4 bytes, then the bytes.
fn write_frame(output: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    output.write_all(&length.to_le_bytes())?;
    output.write_all(bytes)?;
    output.flush()
}

/// Reads the next frame; `None` at EOF.
fn read_frame(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST_FRAME {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut bytes = vec![0; length];
    input.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}
