//! One rank of a run: a device, the other ranks, and the program lowered for them.

use bytemuck::{Zeroable, bytes_of, cast_slice};
use zeroth_comm::{Comm, OpName};
use zeroth_graph::ParamId;
use zeroth_kernel::{Control, Device, DeviceError, Queue, RATES, READBACKS, Recipe, Record, StepInput};

use super::chaos::{Chaos, Until};
use super::early::{Early, awaited, early};
use super::feed::{Feed, Listed};
use super::meet::{Meeting, Meetings};
use super::replay::Replays;
use super::seat::seat;
use super::{MicroBatch, MicroBatches, RunError, Timed, Trace};
use zeroth_program::Compiled;
use zeroth_program::{Binding, Content, Lowering, SectionKind, Work, vocabulary};

/// What makes a rank one of many.
pub struct Rank<'a> {
    /// The other ranks; none where there is only one.
    pub comm: Option<Box<dyn Comm>>,
    /// The device, with an arena of at least the plan's size.
    pub device: Box<dyn Device>,
    /// The optimizer's numbers.
    pub recipe: Recipe,
    /// Whether a parameter is decayed.
    pub decayed: &'a dyn Fn(ParamId) -> bool,
    /// The run's seed.
    pub seed: u64,
}

/// What a step came to.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Loss, norm, rate, and what was decided.
    pub head: Record,
    /// The gradient norm of every flat.
    pub norms: Vec<f64>,
}

/// The first mark of those that each queue sets at the end of a step's last micro-batch; those before it are for joins.
const LAST_MICRO_BATCH: usize = Queue::ALL.len();

/// A section lowered for one number of rows.
type Lowered = Vec<Work>;

/// One rank of a run.
pub struct Engine<'c> {
    pub(super) compiled: &'c Compiled,
    /// Dropped before the device: what others see of its memory is given back before it leaves the arena, and is counted as
    /// nobody else's for a moment.
    comm: Option<Box<dyn Comm>>,
    pub(super) device: Box<dyn Device>,
    pub(super) rank: u64,
    /// By size of rows, by section.
    lowered: Vec<Vec<Lowered>>,
    /// For each section and instruction, whether another queue waits for it.
    awaited: Vec<Vec<bool>>,
    /// The number of the first mark of each section.
    first_mark: Vec<usize>,
    /// Whether the update runs on beside the next step's first micro-batch.
    runs_on: bool,
    /// The update's section, and those of its instructions that are enqueued beside the last micro-batch.
    update: usize,
    early: Vec<Early>,
    replays: Replays,
    feed: Feed,
    pub(super) meetings: Meetings,
    pub(super) step: u64,
    pub(super) recipe: Recipe,
    pub(super) chaos: Option<Chaos>,
    pub(super) trace: Option<Trace>,
}

impl<'c> Engine<'c> {
    /// A rank that is ready to load weights: its program is lowered, and all ranks have agreed on the collectives.
    pub fn new(compiled: &'c Compiled, rank: Rank<'_>) -> Result<Self, RunError> {
        let Rank { comm, mut device, recipe, decayed, seed } = rank;
        let number = comm.as_ref().map_or(0, |comm| comm.rank() as u64);
        if let Some(comm) = &comm {
            let agreed = comm.agree(OpName::new(0, "agree on the program", 0), compiled.program.agreement());
            agreed.map_err(|source| RunError::Comm { step: 0, op: "start".to_owned(), source })?;
        }
        let lowering = Lowering::new(&compiled.program, &compiled.graph, &compiled.backward, compiled.target);
        let binding = Binding { rank: number, seed, decayed };
        let of_section = |section: usize, rows: u64| {
            let spans = compiled.spans(section);
            let span = |content: Content| spans[&content];
            let scratch = |at| spans.get(&Content::Scratch(at)).copied();
            lowering.lower(&compiled.program.sections[section], &span, &scratch, binding, rows)
        };
        let sections = compiled.program.sections.len();
        let lowered: Vec<Vec<Lowered>> = compiled
            .row_sizes
            .iter()
            .map(|rows| (0..sections).map(|section| of_section(section, *rows)).collect())
            .collect();
        let mut first_mark = Vec::with_capacity(sections);
        let mut marks = 2 * Queue::ALL.len();
        for section in &compiled.program.sections {
            first_mark.push(marks);
            marks += section.instructions.len();
        }
        let failed = |error: Meeting| match error {
            Meeting::Device(source) => RunError::device(0, "start")(source),
            Meeting::Comm(source) => RunError::Comm { step: 0, op: "start".to_owned(), source },
        };
        // Before anything lies in the arena: parts of it move to where other ranks see them.
        let works = lowered.iter().flatten().flatten();
        let meetings =
            Meetings::new(works, device.as_mut(), comm.as_deref(), compiled.memory.views).map_err(failed)?;
        let update = compiled.program.sections.iter().position(|section| section.kind == SectionKind::Update);
        let update = update.unwrap_or(sections);
        let early = early(compiled, update);
        let runs_on = compiled.memory.sections.iter().any(|section| !section.across.is_empty());
        let seat = seat(comm.as_deref()).map_err(|source| failed(Meeting::Comm(source)))?;
        device.pin_and_prefault(seat);
        let started = RunError::device(0, "start");
        (|| {
            device.reserve_events(marks)?;
            let size = size_of::<Recipe>() as u64;
            device.upload(
                Queue::Compute,
                bytes_of(&recipe),
                compiled.span(0, Content::Recipe).part(0, 1, size),
            )?;
            let size = size_of::<Control>() as u64;
            let control = compiled.span(0, Content::Control).part(0, 1, size);
            device.upload(Queue::Compute, bytes_of(&Control::start(&recipe)), control)
        })()
        .map_err(started)?;
        Ok(Self {
            feed: Feed::new(&compiled.graph, *compiled.row_sizes.last().unwrap_or(&0)),
            awaited: awaited(compiled, &early),
            replays: Replays::new(compiled, &lowered, runs_on),
            runs_on,
            update,
            early,
            compiled,
            device,
            comm,
            rank: number,
            lowered,
            first_mark,
            meetings,
            step: 0,
            recipe,
            chaos: None,
            trace: None,
        })
    }

    /// From now on instructions run in any order that queues and waits allow, freed memory is poisoned, and the bytes
    /// behind buffers are watched.
    pub fn unleash(&mut self, seed: u64) {
        self.chaos = Some(Chaos::new(seed));
    }

    /// From now on every instruction is timed.
    pub fn record_trace(&mut self) {
        self.trace = Some(Trace::new(self.rank));
    }

    /// The times of the instructions since the last call; none where nothing is recorded. Unless the timeline is to
    /// `keep` them, they are forgotten.
    pub fn take_times(&mut self, keep: bool) -> Result<Vec<Timed>, RunError> {
        self.settle_times()?;
        Ok(self.trace.as_mut().map_or_else(Vec::new, |trace| trace.take_times(keep)))
    }

    fn settle_times(&mut self) -> Result<(), RunError> {
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let stamps = self.device.take_timestamps().map_err(RunError::device(self.step, "reading times"))?;
        trace.settle(&stamps);
        Ok(())
    }

    /// What was timed so far.
    pub fn take_trace(&mut self) -> Result<Option<Trace>, RunError> {
        self.settle_times()?;
        Ok(self.trace.take())
    }

    /// This rank's number.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// What it runs.
    pub fn compiled(&self) -> &Compiled {
        self.compiled
    }

    /// The parameters, by their places in the graph.
    pub fn params(&self) -> Vec<ParamId> {
        let units = self.compiled.graph.units.iter();
        let mut params: Vec<ParamId> = units.flat_map(|unit| unit.params.iter().copied()).collect();
        params.sort_unstable();
        params
    }

    /// The other ranks.
    pub fn comm(&self) -> Option<&dyn Comm> {
        self.comm.as_deref()
    }

    /// How ranks on cards meet, in words, or why ranks on processors that should read in place do not; else none.
    pub fn how_ranks_meet(&self) -> Option<&str> {
        self.meetings.how()
    }

    /// Enqueues a step: its micro-batches in order, then the update. `trained` counts the trained tokens of the whole
    /// step over all ranks; `rates[i]` is the learning rate of the update after `first_rate + i` applied ones.
    pub fn step(
        &mut self,
        batches: &[MicroBatch<'_>],
        trained: u64,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), RunError> {
        if batches.len() as u64 != self.compiled.program.accumulation {
            let (found, expected) = (batches.len(), self.compiled.program.accumulation);
            return Err(RunError::MicroBatches { found, expected });
        }
        self.step_from(&mut Listed(batches.iter()), trained, first_rate, rates)
    }

    /// As [`Self::step`], with micro-batches that are made as they are needed.
    pub fn step_from<B: MicroBatches>(
        &mut self,
        batches: &mut B,
        trained: u64,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), B::Error> {
        self.step += 1;
        let mut input = StepInput { first_rate, ..StepInput::zeroed() };
        // A step without a trained token has no loss, and its gradients are zero whatever they are divided by.
        input.loss_weight = 1.0 / trained.max(1) as f64;
        for (place, rate) in input.rates.iter_mut().enumerate() {
            *rate = rates[place.min(rates.len() - 1)];
        }
        debug_assert!(rates.len() <= RATES, "more rates than an input holds");
        let at = self.compiled.span(0, Content::Input).part(0, 1, size_of::<StepInput>() as u64);
        let step = self.step;
        self.device
            .upload(Queue::Compute, bytes_of(&input), at)
            .map_err(RunError::device(step, "upload of the step's input"))?;
        for section in self.compiled.program.in_order() {
            let kind = self.compiled.program.sections[section].kind;
            let is_micro_batch = self.compiled.program.sections[section].is_micro_batch();
            let size = if is_micro_batch { self.feed(&batches.next()?)? } else { 0 };
            if !self.runs_on {
                self.run_section(section, size)?;
                self.join(section)?;
                continue;
            }
            // The update's lines run on beside the next micro-batch; what was before it has ended by then.
            if matches!(kind, SectionKind::Only | SectionKind::First) {
                self.each_line(|engine, queue| engine.wait_for_all(queue, LAST_MICRO_BATCH))?;
            }
            self.run_section(section, size)?;
            match kind {
                SectionKind::Only | SectionKind::Last => {
                    self.each_line(|engine, queue| {
                        engine.device.record_event(queue, LAST_MICRO_BATCH + queue as usize)
                    })?;
                }
                SectionKind::Update => {}
                _ => self.join(section)?,
            }
        }
        if self.chaos.is_some() {
            Chaos::check_always(self.compiled, self.device.as_mut(), self.step)?;
        }
        let flats = self.compiled.program.layout.flats.len() as u64;
        let record =
            self.compiled.span(0, Content::Record).part(0, size_of::<Record>() as u64 + 8 * flats, 1);
        let noted = self.device.start_readback(Queue::Compute, record, self.step as usize % READBACKS);
        Ok(noted.map_err(RunError::device(step, "note of the record"))?)
    }

    /// The sum of the losses of a micro-batch's trained tokens on this rank, without gradients.
    pub fn evaluate(&mut self, batch: &MicroBatch<'_>) -> Result<f64, RunError> {
        self.drain()?;
        let size = self.feed(batch)?;
        let Some(section) = self.compiled.program.eval() else { return Ok(0.0) };
        self.run_section(section, size)?;
        self.join(section)?;
        // Whoever goes on may change its parameters, or leave: not before everybody has read them.
        if let Some(comm) = self.comm.as_deref().filter(|_| self.meetings.sees()) {
            let op = OpName::new(self.step, "end of an evaluation", 0);
            let met = comm.barrier(op).and_then(zeroth_comm::Handle::wait);
            met.map_err(|source| RunError::Comm { step: self.step, op: op.to_string(), source })?;
        }
        let mut loss = 0.0f64;
        let at = self.compiled.span(0, Content::Report).part(0, 1, 8);
        let step = self.step;
        let downloaded = self.device.download(Queue::Compute, at, bytemuck::bytes_of_mut(&mut loss));
        self.meetings.seen(step, "download of the loss", downloaded)?;
        Ok(loss)
    }

    /// Next-token logits `[sequences, vocab]` of a micro-batch's sequences, in a program that was compiled for inference.
    pub fn logits(&mut self, batch: &MicroBatch<'_>) -> Result<Vec<f32>, RunError> {
        let Some((section, most)) = self.compiled.program.logits() else { return Err(RunError::NoLogits) };
        let found = batch.starts.len().saturating_sub(1);
        if found as u64 > most {
            return Err(RunError::Sequences { found, most });
        }
        let size = self.feed(batch)?;
        self.run_section(section, size)?;
        self.join(section)?;
        let all = self.compiled.span(section, Content::Logits);
        let mut logits = vec![0.0f32; found * vocabulary(&self.compiled.graph) as usize];
        let from = all.part(0, logits.len() as u64, 4);
        let step = self.step;
        let downloaded = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(&mut logits));
        self.meetings.seen(step, "download of logits", downloaded)?;
        Ok(logits)
    }

    /// Waits for the last step and reads what it came to.
    pub fn record(&mut self) -> Result<StepRecord, RunError> {
        let flats = self.compiled.program.layout.flats.len();
        let mut record = StepRecord { head: Record::zeroed(), norms: vec![0.0; flats] };
        self.read_record(&mut record)?;
        Ok(record)
    }

    /// As [`Self::record`], into a record that is there.
    pub fn read_record(&mut self, record: &mut StepRecord) -> Result<(), RunError> {
        let (flats, head) = (record.norms.len() as u64, size_of::<Record>() as u64);
        let at = self.compiled.span(0, Content::Record);
        let step = self.step;
        let downloaded = (|| {
            self.device.download(
                Queue::Compute,
                at.part(0, 1, head),
                bytemuck::bytes_of_mut(&mut record.head),
            )?;
            let norms = bytemuck::cast_slice_mut(&mut record.norms);
            self.device.download(Queue::Compute, at.part(head / 8, flats, 8), norms)
        })();
        self.meetings.seen(step, "download of the record", downloaded)
    }

    /// Waits for a step that is one of the last two and reads what it came to; a step after it goes on meanwhile.
    pub fn read_record_of(&mut self, step: u64, record: &mut StepRecord) -> Result<(), RunError> {
        debug_assert!(step <= self.step && step + READBACKS as u64 > self.step, "the note is there no more");
        let noted = self.device.finish_readback(step as usize % READBACKS);
        let bytes = self.meetings.seen(step, "download of the record", noted)?;
        let (head, norms) = bytes.split_at(size_of::<Record>());
        bytemuck::bytes_of_mut(&mut record.head).copy_from_slice(head);
        bytemuck::cast_slice_mut(&mut record.norms).copy_from_slice(norms);
        Ok(())
    }

    /// The number of steps so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Uploads a micro-batch; gives the place of its size among the row sizes.
    fn feed(&mut self, batch: &MicroBatch<'_>) -> Result<usize, RunError> {
        let rows = batch.ids.len();
        let sizes = &self.compiled.row_sizes;
        let Some(size) = sizes.iter().position(|size| *size >= rows as u64) else {
            return Err(RunError::Rows { rows, most: sizes.last().copied().unwrap_or(0) });
        };
        let rows = sizes[size] as usize;
        self.feed.fill(batch, rows)?;
        self.device.equal_sequences(self.feed.length);
        let (feed, compiled, step) = (&self.feed, self.compiled, self.step);
        let pairs = compiled.graph.rotary.frequencies.len();
        let inputs = &compiled.graph.inputs;
        let parts: [(Option<Content>, &[u8]); 7] = [
            (Some(Content::Value(inputs[0].index())), cast_slice(&feed.ids[..rows])),
            (Some(Content::Value(inputs[1].index())), cast_slice(&feed.labels[..rows])),
            (Some(Content::Value(inputs[2].index())), cast_slice(&feed.positions[..rows])),
            (Some(Content::Starts), cast_slice(&feed.starts)),
            (compiled.find(0, Content::Keys).map(|_| Content::Keys), cast_slice(&feed.keys[..rows])),
            ((pairs > 0).then_some(Content::Cosines), cast_slice(&feed.cosines[..rows * pairs])),
            ((pairs > 0).then_some(Content::Sines), cast_slice(&feed.sines[..rows * pairs])),
        ];
        for (content, bytes) in parts {
            let Some(content) = content else { continue };
            let to = compiled.span(0, content).part(0, bytes.len() as u64, 1);
            let uploaded = self.device.upload(Queue::Compute, bytes, to);
            uploaded.map_err(RunError::device(step, "upload of a micro-batch"))?;
        }
        Ok(size)
    }

    /// Runs a section's instructions, in the order of the list or, unleashed, in any that is allowed.
    fn run_section(&mut self, section: usize, size: usize) -> Result<(), RunError> {
        if self.chaos.is_some() {
            let until = match self.compiled.program.sections[section].kind {
                SectionKind::Only | SectionKind::Last if self.runs_on => Until::Any,
                SectionKind::Update if self.runs_on => Until::Seen,
                _ => Until::End,
            };
            self.run_wildly(section, size, until)?;
        } else if !self.replays_section(section, size)? {
            let is_last = self.compiled.program.sections[section].kind.is_last();
            let mut next = 0;
            for at in 0..self.compiled.program.sections[section].instructions.len() {
                while is_last && self.early.get(next).is_some_and(|early| early.before == at) {
                    self.begin_update(section, size, next)?;
                    next += 1;
                }
                if section != self.update || !self.early.iter().any(|early| early.instruction == at) {
                    self.run_instruction(section, size, at)?;
                }
            }
            while is_last && next < self.early.len() {
                self.begin_update(section, size, next)?;
                next += 1;
            }
        }
        Ok(())
    }

    /// Whether the device enqueues a section as a whole.
    fn replays_section(&mut self, section: usize, size: usize) -> Result<bool, RunError> {
        if self.trace.is_some() {
            return Ok(false);
        }
        let works = &self.lowered[size][section];
        let replayed = self.replays.run(self.device.as_mut(), [size, section], self.feed.length, works);
        replayed.map_err(RunError::device(self.step, "a section as a whole"))
    }

    /// Enqueues one of the update's first loads beside a micro-batch.
    fn begin_update(&mut self, section: usize, size: usize, place: usize) -> Result<(), RunError> {
        let Early { instruction, behind, .. } = self.early[place];
        if let Some(behind) = behind {
            let waited = self.device.wait_event(Queue::Load, self.first_mark[section] + behind);
            waited.map_err(RunError::device(self.step, "beginning the update"))?;
        }
        self.run_instruction(self.update, size, instruction)
    }

    pub(super) fn run_instruction(&mut self, section: usize, size: usize, at: usize) -> Result<(), RunError> {
        let compiled = self.compiled;
        let instruction = &compiled.program.sections[section].instructions[at];
        let (queue, step) = (instruction.queue, self.step);
        let begun = self.trace.as_ref().map(Trace::now);
        let failed = |source| RunError::Device { step, op: compiled.describe(instruction), source };
        for earlier in &compiled.memory.sections[section].waits[at] {
            self.device.wait_event(queue, self.first_mark[section] + earlier).map_err(failed)?;
        }
        if self.runs_on {
            for (earlier, place) in &compiled.memory.sections[section].across[at] {
                self.device.wait_event(queue, self.first_mark[*earlier] + place).map_err(failed)?;
            }
        }
        if begun.is_some() {
            self.device.record_timestamp(queue).map_err(failed)?;
        }
        match &self.lowered[size][section][at] {
            Work::Nothing => {}
            Work::Launches(launches) => {
                for launch in launches {
                    self.device.enqueue(queue, launch).map_err(failed)?;
                }
            }
            Work::Collective(collective) => {
                let index = (self.first_mark[section] + at) as u32;
                let name = OpName::new(step, instruction.action.name(), index);
                let comm = self.comm.as_deref().expect("collectives are compiled for several ranks");
                self.meetings.meet(comm, name, collective, self.device.as_mut(), queue).map_err(|error| {
                    match error {
                        Meeting::Device(source) => failed(source),
                        Meeting::Comm(source) => {
                            RunError::Comm { step, op: compiled.describe(instruction), source }
                        }
                    }
                })?;
            }
        }
        if self.awaited[section][at] {
            self.device.record_event(queue, self.first_mark[section] + at).map_err(failed)?;
        }
        if let (Some(trace), Some(begun)) = (&mut self.trace, begun) {
            self.device.record_timestamp(queue).map_err(failed)?;
            trace.add((section, at), queue, compiled.describe(instruction), begun);
        }
        Ok(())
    }

    /// All queues wait for each other: sections run one after the other.
    fn join(&mut self, section: usize) -> Result<(), RunError> {
        let used = |queue: &Queue| {
            let instructions = &self.compiled.program.sections[section].instructions;
            instructions.iter().any(|instruction| instruction.queue == *queue)
        };
        let step = self.step;
        if Queue::ALL.iter().filter(|queue| used(queue)).count() < 2 {
            return Ok(());
        }
        for queue in Queue::ALL {
            self.device
                .record_event(queue, queue as usize)
                .map_err(RunError::device(step, "joining queues"))?;
        }
        self.each_line(|engine, queue| engine.wait_for_all(queue, 0))
    }

    /// A queue waits for the marks of all others, the first of which is `first`.
    fn wait_for_all(&mut self, queue: Queue, first: usize) -> Result<(), DeviceError> {
        let others = Queue::ALL.into_iter().filter(|other| *other != queue);
        others.into_iter().try_for_each(|other| self.device.wait_event(queue, first + other as usize))
    }

    fn each_line(
        &mut self,
        visit: impl Fn(&mut Self, Queue) -> Result<(), DeviceError>,
    ) -> Result<(), RunError> {
        let step = self.step;
        Queue::ALL
            .into_iter()
            .try_for_each(|queue| visit(self, queue))
            .map_err(RunError::device(step, "joining queues"))
    }

    /// Waits for all that is under way, updates that run on beside the next step included: before anything that is no
    /// step looks at what the device holds, or changes it.
    pub(super) fn drain(&mut self) -> Result<(), RunError> {
        self.finish_wildly()?;
        let settled = self.device.synchronise();
        self.meetings.seen(self.step, "waiting for the last step", settled)
    }
}

impl Drop for Engine<'_> {
    fn drop(&mut self) {
        if self.meetings.run_on() {
            // A rank leaves the others after its device has come past all meetings. Whatever went wrong was said before.
            let _ = self.device.synchronise();
        }
    }
}
