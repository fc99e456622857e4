//! Chat templates rendered in a process of their own, which is what bounds their memory and time.
//!
//! A template is a program. Its steps can be counted, but one step can double a string or a list, compare two values
//! with 2^60 leaves, or drop a list that is nested too deeply for the stack, and minijinja has no hook at any of these.
//! In Rust a failed allocation and an overflowed stack end the process. So the process that may end is another one: this
//! program, started again, with limits of the system on its address space and its processor time. It gets conversations
//! on standard input and answers with texts. Where it ends instead, the row is at fault and this process is not.
//!
//! Each thread that renders has a process; it waits while its process works, so no more processors are busy than before.

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
    CompiledTemplate, NotRendered, OUTPUT_BYTES, Rendered, Sources, Surroundings, TemplateFacts,
};
use super::day::Day;

/// Lowers a limit; one that is lower already stays.
fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    let current = Some(maximum.map_or(value, |maximum| value.min(maximum)));
    Ok(setrlimit(resource, Rlimit { current, maximum })?)
}

/// Bytes of address space that rendering may take.
const MEMORY: u64 = 512 << 20;
/// Seconds of processor time that one render may take.
const SECONDS: u64 = 5;
/// The longest message: every byte of the longest text may become six in JSON.
const LONGEST_FRAME: usize = 8 * OUTPUT_BYTES;

/// How this program is started as a process that renders.
#[derive(Debug, Clone)]
pub(super) struct Worker {
    pub(super) program: PathBuf,
    pub(super) arguments: Vec<String>,
}

/// The templates of a folder, rendered in other processes.
pub(super) struct TemplateProcesses {
    worker: Worker,
    setup: Vec<u8>,
    facts: TemplateFacts,
    /// Processes that nobody waits for.
    idle: Mutex<Vec<TemplateProcess>>,
}

/// All that templates are compiled from.
#[derive(Serialize, Deserialize)]
struct Setup {
    sources: Sources,
    special: Vec<(String, String)>,
    variables: Map<String, Value>,
    day: String,
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
    /// Starts a process and has it compile the templates.
    pub(super) fn start(
        worker: &Worker,
        sources: &Sources,
        around: &Surroundings,
    ) -> Result<Self, NotRendered> {
        let setup = Setup {
            sources: sources.clone(),
            special: around.special.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
            variables: around.variables.clone(),
            day: around.day.strftime("%F"),
        };
        let setup = encoded(&setup)?;
        let (process, facts) = TemplateProcess::start(worker, &setup)?;
        Ok(Self { worker: worker.clone(), setup, facts, idle: Mutex::new(vec![process]) })
    }

    /// What is known of the templates.
    pub(super) fn facts(&self) -> TemplateFacts {
        self.facts
    }

    /// Renders in a process that nobody waits for, or in a new one.
    pub(super) fn render(
        &self,
        messages: &[Map<String, Value>],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Rendered, NotRendered> {
        let request = encoded(&Request { messages, tools, add_generation_prompt })?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut process = match idle {
            Some(process) => process,
            None => TemplateProcess::start(&self.worker, &self.setup)?.0,
        };
        let answer = process.ask::<Result<Rendered, NotRendered>>(&request)?;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        answer
    }
}

/// One process, ready for a conversation.
struct TemplateProcess {
    child: Child,
    /// Taken where the process is to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl TemplateProcess {
    fn start(worker: &Worker, setup: &[u8]) -> Result<(Self, TemplateFacts), NotRendered> {
        let started = Command::new(&worker.program)
            .args(&worker.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C at a terminal is for this process, which then ends that one.
            .process_group(0)
            .spawn();
        let failed = |error: io::Error| {
            NotRendered::Refused(format!(
                "{} cannot be started to render it: {error}",
                worker.program.display()
            ))
        };
        let mut child = started.map_err(failed)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let mut process = Self { child, input, output: BufReader::new(output) };
        let facts = process.ask::<Result<TemplateFacts, NotRendered>>(setup)??;
        Ok((process, facts))
    }

    /// Hands a message over and waits for the answer, or says how the process ended.
    fn ask<T: DeserializeOwned>(&mut self, message: &[u8]) -> Result<T, NotRendered> {
        let Self { input, output, .. } = self;
        let answer = match input {
            Some(input) => write_frame(input, message).and_then(|()| read_frame(output)),
            None => Ok(None),
        };
        match answer {
            Ok(Some(bytes)) => decoded(&bytes),
            Ok(None) => Err(self.ended()),
            Err(_) => {
                // It may be alive and write on.
                let _ = self.child.kill();
                Err(self.ended())
            }
        }
    }

    /// How the process ended.
    fn ended(&mut self) -> NotRendered {
        self.input = None;
        let mut said = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            let _ = stderr.take(1 << 16).read_to_string(&mut said);
        }
        let status = match self.child.wait() {
            Ok(status) => status,
            Err(error) => {
                return NotRendered::Refused(format!("the process that renders it was lost: {error}"));
            }
        };
        let is = |signal: Signal| status.signal() == Some(signal.as_raw());
        NotRendered::Stopped(if is(Signal::XCPU) {
            format!("took more than {SECONDS} s of processor time")
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
        // The end of its input ends the process.
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Renders conversations from standard input until it ends: what a process started by
/// [`Encoder::rendering_in`](super::Encoder::rendering_in) does.
pub fn render_templates() -> io::Result<()> {
    let mut input = BufReader::new(io::stdin().lock());
    let mut output = BufWriter::new(io::stdout().lock());
    // A process that ends as it should leaves no core file.
    limit(Resource::Core, 0)?;
    limit(Resource::As, address_space()? + MEMORY)?;
    let mut processor = ProcessorTime::new()?;

    let Some(setup) = read_frame(&mut input)? else { return Ok(()) };
    let template = processor.bound(|| compiled(&setup))?;
    let facts = template.as_ref().map(CompiledTemplate::facts);
    answer(&mut output, &facts)?;
    let Ok(template) = template else { return Ok(()) };
    while let Some(request) = read_frame(&mut input)? {
        let rendered = processor.bound(|| {
            let OwnedRequest { messages, tools, add_generation_prompt } = decoded(&request)?;
            template.render(&messages, tools.as_ref(), add_generation_prompt)
        })?;
        answer(&mut output, &rendered)?;
    }
    Ok(())
}

fn compiled(setup: &[u8]) -> Result<CompiledTemplate, NotRendered> {
    let Setup { sources, special, variables, day } = decoded(setup)?;
    let day: Day = day.parse().map_err(|error| NotRendered::Refused(format!("{error}")))?;
    let special: Vec<(&str, String)> = special.iter().map(|(name, text)| (&name[..], text.clone())).collect();
    CompiledTemplate::new(&sources, &Surroundings { special: &special, variables: &variables, day })
}

/// Keeps the limit on processor time ahead of the time that was used. What a single thread has used is at most the time
/// that it was at work, so the clock need not be asked of the system each time, and the limit moves once a second.
struct ProcessorTime {
    busy: Duration,
    limit: u64,
}

impl ProcessorTime {
    fn new() -> io::Result<Self> {
        let mut processor = Self { busy: Duration::ZERO, limit: 0 };
        processor.move_limit()?;
        Ok(processor)
    }

    fn move_limit(&mut self) -> io::Result<()> {
        // One second for the start of the process.
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

/// Bytes of address space that this process has now.
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

fn encoded(message: &impl Serialize) -> Result<Vec<u8>, NotRendered> {
    serde_json::to_vec(message).map_err(|error| NotRendered::Refused(error.to_string()))
}

fn decoded<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, NotRendered> {
    serde_json::from_slice(bytes).map_err(|error| NotRendered::Refused(error.to_string()))
}

/// A length in 4 bytes, and so many bytes.
fn write_frame(output: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    output.write_all(&length.to_le_bytes())?;
    output.write_all(bytes)?;
    output.flush()
}

/// The next frame; `None` where there is none.
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
