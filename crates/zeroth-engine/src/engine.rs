//! One rank of a run: a device, the communicator, and the program lowered for them.

use bytemuck::{Pod, Zeroable as _, bytes_of, bytes_of_mut, cast_slice_mut};
use zeroth_comm::{Comm, OpName};
use zeroth_graph::ParamId;
use zeroth_kernel::{
    Control, Device, DeviceError, LOSSES, Queue, RATES, READBACKS, Recipe, Record, ReportLayout, StepInput,
};

use super::batch_staging::BatchStaging;
use super::chaos::{Chaos, ChaosUntil};
use super::collectives::Collectives;
use super::cpu_share::cpu_share;
use super::early_loads::{EarlyLoad, awaited, early};
use super::error::CollectiveError;
use super::graph_capture::CapturedSections;
use super::loss_counts::LossCounts;
use super::lowering_check::{check_lowering, check_mesh};
use super::{InstructionTime, MicroBatches, RunError, StreamBatch, StreamRows, Trace};
use zeroth_program::{Binding, BufferId, Compiled, Lowering, SectionKind, Work};

/// What an engine is built from, besides the program.
pub struct RankSetup<'a> {
    /// The communicator; `None` on a single rank.
    pub comm: Option<Box<dyn Comm>>,
    /// The device, with an arena of at least the planned size.
    pub device: Box<dyn Device>,
    /// The hyperparameters.
    pub recipe: Recipe,
    /// Whether weight decay applies to a parameter.
    pub decayed: &'a dyn Fn(ParamId) -> bool,
    /// The run's seed.
    pub seed: u64,
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Loss, gradient norm, learning rate, and the decision.
    pub head: Record,
    /// The parts of the loss, each a mean over its count without its weight, in the order of [`zeroth_program::Program::losses`].
    pub losses: Vec<f64>,
    /// The gradient norm of every flat.
    pub norms: Vec<f64>,
    /// The counts of all routers, over all ranks and micro-batches: see [`zeroth_program::RouterCounts`].
    pub counts: Vec<u32>,
}

/// The first of the events that the queues record at the end of a step's last micro-batch; the events before it are for
/// joins.
const LAST_MICRO_BATCH: usize = Queue::ALL.len();

/// A section lowered for one row count.
type Lowered = Vec<Work>;

/// One rank of a run.
pub struct Engine<'c> {
    pub(super) compiled: &'c Compiled,
    /// Dropped before the device: peers' mappings of its memory end before the arena is freed.
    comm: Option<Box<dyn Comm>>,
    pub(super) device: Box<dyn Device>,
    pub(super) rank: u64,
    /// Indexed by row size, those of the decode section last, then section.
    lowered: Vec<Vec<Lowered>>,
    /// For each section and instruction, whether another queue waits for it.
    awaited: Vec<Vec<bool>>,
    /// The first event of each section.
    first_mark: Vec<usize>,
    /// Whether the update overlaps the next step's first micro-batch.
    overlaps_next_step: bool,
    /// The update section, and its instructions that are enqueued during the last micro-batch.
    update: usize,
    early: Vec<EarlyLoad>,
    captured: CapturedSections,
    pub(super) feed: BatchStaging,
    pub(super) collectives: Collectives,
    pub(super) step: u64,
    pub(super) recipe: Recipe,
    pub(super) chaos: Option<Chaos>,
    pub(super) trace: Option<Trace>,
}

impl<'c> Engine<'c> {
    /// Lowers the program, and checks that all ranks compiled the same one and placed its buffers alike. The engine is then
    /// ready to load weights.
    pub fn new(compiled: &'c Compiled, rank: RankSetup<'_>) -> Result<Self, RunError> {
        let RankSetup { comm, mut device, recipe, decayed, seed } = rank;
        let number = comm.as_ref().map_or(0, |comm| comm.rank() as u64);
        if let Some(comm) = &comm {
            check_mesh(compiled.program.world(), comm.as_ref())?;
            check_lowering(compiled, comm.as_ref())?;
        }
        let lowering = Lowering::new(&compiled.program, &compiled.graph, &compiled.backward, compiled.target);
        let binding = Binding { rank: number, seed, decayed };
        let of_section = |section: usize, rows: &[u64]| {
            let spans = compiled.spans(section);
            let span = |id: BufferId| spans[&id];
            let scratch = |at| spans.get(&BufferId::Scratch(at)).copied();
            lowering.lower(&compiled.program.sections[section], &span, &scratch, binding, rows)
        };
        let sections = compiled.program.sections.len();
        let decode = compiled.program.decode();
        let of_size = |rows: &[u64], decodes: bool| -> Vec<Lowered> {
            let runs = |section: usize| (Some(section) == decode) == decodes;
            let lower = |section| if runs(section) { of_section(section, rows) } else { Vec::new() };
            (0..sections).map(lower).collect()
        };
        let of_rows = compiled.row_sizes.iter().map(|rows| of_size(rows, false));
        let of_decode = compiled.decode_sizes.iter().map(|rows| of_size(rows, true));
        let lowered: Vec<Vec<Lowered>> = of_rows.chain(of_decode).collect();
        let mut first_mark = Vec::with_capacity(sections);
        let mut marks = 2 * Queue::ALL.len();
        for section in &compiled.program.sections {
            first_mark.push(marks);
            marks += section.instructions.len();
        }
        let failed = |error: CollectiveError| match error {
            CollectiveError::Device(source) => RunError::device(0, "start")(source),
            CollectiveError::Comm(source) => RunError::Comm { step: 0, op: "start".to_owned(), source },
        };
        // The arena is still empty: parts of it are remapped to memory that peers can map.
        let works = lowered.iter().flatten().flatten();
        let collectives = Collectives::new(works, device.as_mut(), comm.as_deref(), compiled.memory.views)
            .map_err(failed)?;
        let update = compiled.program.sections.iter().position(|section| section.kind == SectionKind::Update);
        let update = update.unwrap_or(sections);
        let early = early(compiled, update);
        let overlaps_next_step =
            compiled.memory.sections.iter().any(|section| !section.cross_step_waits.is_empty());
        let share = cpu_share(comm.as_deref()).map_err(|source| failed(CollectiveError::Comm(source)))?;
        device.pin_and_prefault(share);
        let started = RunError::device(0, "start");
        (|| {
            device.reserve_events(marks)?;
            let size = size_of::<Recipe>() as u64;
            device.upload(
                Queue::Compute,
                bytes_of(&recipe),
                compiled.span(0, BufferId::Recipe).part(0, 1, size),
            )?;
            let size = size_of::<Control>() as u64;
            let control = compiled.span(0, BufferId::Control).part(0, 1, size);
            device.upload(Queue::Compute, bytes_of(&Control::start(&recipe)), control)
        })()
        .map_err(started)?;
        Ok(Self {
            feed: BatchStaging::new(&compiled.graph, &compiled.program),
            awaited: awaited(compiled, &early),
            captured: CapturedSections::new(compiled, &lowered, overlaps_next_step),
            overlaps_next_step,
            update,
            early,
            compiled,
            device,
            comm,
            rank: number,
            lowered,
            first_mark,
            collectives,
            step: 0,
            recipe,
            chaos: None,
            trace: None,
        })
    }

    /// Enables the chaos executor: instructions run in any order that queues and waits allow, freed memory is poisoned,
    /// and guard bytes are checked.
    pub fn enable_chaos(&mut self, seed: u64) {
        self.chaos = Some(Chaos::new(seed));
    }

    /// Starts timing every instruction.
    pub fn record_trace(&mut self) {
        self.trace = Some(Trace::new(self.rank));
    }

    /// Returns the instruction times since the last call; empty where tracing is off. Unless `keep` is set, they are
    /// dropped from the timeline.
    pub fn take_times(&mut self, keep: bool) -> Result<Vec<InstructionTime>, RunError> {
        self.settle_times()?;
        Ok(self.trace.as_mut().map_or_else(Vec::new, |trace| trace.take_times(keep)))
    }

    /// Begins a timeline of what follows and returns its position. An ongoing trace is continued.
    pub fn begin_timeline(&mut self) -> usize {
        self.trace.get_or_insert_with(|| Trace::new(self.rank)).position()
    }

    /// Ends the timeline that began at `position` and returns its lines. A trace that is not `kept` ends too.
    pub fn end_timeline(&mut self, position: usize, kept: bool) -> Result<String, RunError> {
        self.settle_times()?;
        let lines = self.trace.as_ref().map(|trace| trace.to_json_lines_from(position));
        if !kept {
            self.trace = None;
        }
        // Names and numbers always serialise.
        Ok(lines.and_then(Result::ok).unwrap_or_default())
    }

    fn settle_times(&mut self) -> Result<(), RunError> {
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let stamps = self.device.take_timestamps().map_err(RunError::device(self.step, "reading times"))?;
        trace.settle(&stamps);
        Ok(())
    }

    /// Stops tracing and returns the trace.
    pub fn take_trace(&mut self) -> Result<Option<Trace>, RunError> {
        self.settle_times()?;
        Ok(self.trace.take())
    }

    /// This rank.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// The compiled program.
    pub fn compiled(&self) -> &Compiled {
        self.compiled
    }

    /// The parameters, in graph order.
    pub fn params(&self) -> Vec<ParamId> {
        let units = self.compiled.graph.units.iter();
        let mut params: Vec<ParamId> = units.flat_map(|unit| unit.params.iter().copied()).collect();
        params.sort_unstable();
        params
    }

    /// The communicator.
    pub fn comm(&self) -> Option<&dyn Comm> {
        self.comm.as_deref()
    }

    /// All-gathers one value per rank, in rank order. Collective; all ranks pass the same `name`.
    pub fn all_gather<T: Pod>(&self, step: u64, name: &'static str, own: &T) -> Result<Vec<T>, RunError> {
        let Some(comm) = self.comm() else { return Ok(vec![*own]) };
        let counts = vec![size_of::<T>(); comm.world()];
        let mut all = vec![T::zeroed(); comm.world()];
        let gathered =
            comm.all_gather(OpName::new(step, name, 0), bytes_of(own), cast_slice_mut(&mut all), &counts);
        let gathered = gathered.and_then(zeroth_comm::Handle::wait);
        gathered.map_err(|source| RunError::Comm { step, op: name.to_owned(), source })?;
        Ok(all)
    }

    /// A note on the transport of collectives between GPUs, or on why CPU ranks cannot map each other's memory; `None`
    /// in the usual case.
    pub fn transport_note(&self) -> Option<&str> {
        self.collectives.how()
    }

    /// Enqueues a step: its micro-batches in order, then the update. `counts` has what each part of the loss
    /// is a mean over, of the whole step over all ranks: trained tokens, if it is one number. `rates[i]` is the learning rate of
    /// the update after `first_rate + i` applied ones.
    pub fn step(
        &mut self,
        batches: &[StreamRows<'_>],
        counts: impl Into<LossCounts>,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), RunError> {
        let one = |batch| StreamBatch { streams: std::slice::from_ref(batch), inputs: &[] };
        self.step_each(batches.iter().map(one), counts.into(), first_rate, rates)
    }

    /// As [`Self::step`], for a model with several streams or further inputs.
    pub fn step_streams(
        &mut self,
        batches: &[StreamBatch<'_>],
        counts: impl Into<LossCounts>,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), RunError> {
        self.step_each(batches.iter().copied(), counts.into(), first_rate, rates)
    }

    fn step_each<'b>(
        &mut self,
        mut batches: impl ExactSizeIterator<Item = StreamBatch<'b>>,
        counts: LossCounts,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), RunError> {
        let (found, expected) = (batches.len(), self.compiled.program.accumulation);
        if found as u64 != expected {
            return Err(RunError::MicroBatches { found, expected });
        }
        let mut feed = |engine: &mut Self| match batches.next() {
            Some(batch) => engine.feed(&batch, true),
            None => Err(RunError::MicroBatches { found, expected }),
        };
        self.run_step(&mut feed, counts, first_rate, rates)
    }

    /// As [`Self::step`], with micro-batches produced on demand.
    pub fn step_from<B: MicroBatches>(
        &mut self,
        batches: &mut B,
        counts: impl Into<LossCounts>,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), B::Error> {
        let mut feed = |engine: &mut Self| {
            let mut size = 0;
            batches.next(&mut |batch| {
                size = engine.feed(batch, true)?;
                Ok(())
            })?;
            Ok(size)
        };
        self.run_step(&mut feed, counts.into(), first_rate, rates)
    }

    /// Runs a step; `feed` uploads its next micro-batch and returns the index of its size.
    fn run_step<E: From<RunError>>(
        &mut self,
        feed: &mut dyn FnMut(&mut Self) -> Result<usize, E>,
        counts: LossCounts,
        first_rate: u64,
        rates: &[f64],
    ) -> Result<(), E> {
        self.step += 1;
        let mut input = StepInput { first_rate, ..StepInput::zeroed() };
        for (place, part) in self.compiled.program.losses.iter().enumerate() {
            let mean = counts.mean(place);
            (input.loss_means[place], input.loss_weights[place]) = (mean, mean * part.weight);
        }
        for (place, rate) in input.rates.iter_mut().enumerate() {
            *rate = rates[place.min(rates.len() - 1)];
        }
        debug_assert!(rates.len() <= RATES, "more rates than an input holds");
        let at = self.compiled.span(0, BufferId::Input).part(0, 1, size_of::<StepInput>() as u64);
        let step = self.step;
        self.device
            .upload(Queue::Compute, bytes_of(&input), at)
            .map_err(RunError::device(step, "upload of the step's input"))?;
        for section in self.compiled.program.in_order() {
            let kind = self.compiled.program.sections[section].kind;
            let is_micro_batch = self.compiled.program.sections[section].is_micro_batch();
            let size = if is_micro_batch { feed(self)? } else { 0 };
            if !self.overlaps_next_step {
                self.run_section(section, size)?;
                self.join(section)?;
                continue;
            }
            // The update overlaps the next micro-batch; everything before it has finished by then.
            if matches!(kind, SectionKind::Only | SectionKind::First) {
                self.each_queue(|engine, queue| engine.wait_for_all(queue, LAST_MICRO_BATCH))?;
            }
            self.run_section(section, size)?;
            match kind {
                SectionKind::Only | SectionKind::Last => {
                    self.each_queue(|engine, queue| {
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
        let bytes = self.compiled.program.report().record_bytes() as u64;
        let record = self.compiled.span(0, BufferId::Record).part(0, bytes, 1);
        let noted = self.device.start_readback(Queue::Compute, record, self.step as usize % READBACKS);
        Ok(noted.map_err(RunError::device(step, "readback of the step record"))?)
    }

    /// The summed loss of a micro-batch's trained tokens on this rank, without gradients: the weighted sum of its parts. A model
    /// that is distilled is evaluated by its cross-entropy, without its teacher.
    pub fn evaluate(&mut self, batch: &StreamRows<'_>) -> Result<f64, RunError> {
        self.evaluate_streams(&StreamBatch { streams: &[*batch], inputs: &[] })
    }

    /// As [`Self::evaluate`], for a model with several streams or further inputs.
    pub fn evaluate_streams(&mut self, batch: &StreamBatch<'_>) -> Result<f64, RunError> {
        let sums = self.evaluate_parts(batch)?;
        let weights = &self.compiled.program.evaluated_weights;
        Ok(weights.iter().zip(sums).map(|(weight, sum)| weight * sum).sum())
    }

    /// The sums of the loss's parts, as [`Self::evaluate_streams`] adds them with the weights of
    /// [`zeroth_program::Program::evaluated_weights`].
    pub fn evaluate_parts(&mut self, batch: &StreamBatch<'_>) -> Result<[f64; LOSSES], RunError> {
        let mut sums = [0.0f64; LOSSES];
        self.drain()?;
        let size = self.feed(batch, false)?;
        let Some(section) = self.compiled.program.eval() else { return Ok(sums) };
        self.run_section(section, size)?;
        self.join(section)?;
        self.await_readers("end of an evaluation")?;
        let parts = self.compiled.program.losses.len();
        let at = self.compiled.span(0, BufferId::Report).part(0, parts as u64, 8);
        let step = self.step;
        let downloaded = self.device.download(Queue::Compute, at, cast_slice_mut(&mut sums[..parts]));
        self.collectives.checked(step, "download of the loss", downloaded)?;
        Ok(sums)
    }

    /// Waits until all ranks have read the parameters that they map of each other: a rank that continues may change its own, or
    /// leave.
    pub(super) fn await_readers(&self, what: &'static str) -> Result<(), RunError> {
        let Some(comm) = self.comm.as_deref().filter(|_| self.collectives.maps_peers()) else {
            return Ok(());
        };
        let op = OpName::new(self.step, what, 0);
        let met = comm.barrier(op).and_then(zeroth_comm::Handle::wait);
        met.map_err(|source| RunError::Comm { step: self.step, op: op.to_string(), source })
    }

    /// Waits for the last step and returns its record.
    pub fn record(&mut self) -> Result<StepRecord, RunError> {
        let ReportLayout { losses, flats, counts } = self.compiled.program.report();
        let mut record = StepRecord {
            head: Record::zeroed(),
            losses: vec![0.0; losses],
            norms: vec![0.0; flats],
            counts: vec![0; counts],
        };
        self.read_record(&mut record)?;
        Ok(record)
    }

    /// As [`Self::record`], into an existing record.
    pub fn read_record(&mut self, record: &mut StepRecord) -> Result<(), RunError> {
        let (losses, flats) = (record.losses.len() as u64, record.norms.len() as u64);
        let head = size_of::<Record>() as u64;
        let at = self.compiled.span(0, BufferId::Record);
        let step = self.step;
        let downloaded = (|| {
            self.device.download(Queue::Compute, at.part(0, 1, head), bytes_of_mut(&mut record.head))?;
            let parts = cast_slice_mut(&mut record.losses);
            self.device.download(Queue::Compute, at.part(head / 8, losses, 8), parts)?;
            let norms = cast_slice_mut(&mut record.norms);
            self.device.download(Queue::Compute, at.part(head / 8 + losses, flats, 8), norms)?;
            if record.counts.is_empty() {
                return Ok(());
            }
            let first = self.compiled.program.report().recorded_counts() as u64 / 4;
            let counts = at.part(first, record.counts.len() as u64, 4);
            self.device.download(Queue::Compute, counts, cast_slice_mut(&mut record.counts))
        })();
        self.collectives.checked(step, "download of the record", downloaded)
    }

    /// Waits for one of the last two steps and reads its record, while the following step continues.
    pub fn read_record_of(&mut self, step: u64, record: &mut StepRecord) -> Result<(), RunError> {
        debug_assert!(step <= self.step && step + READBACKS as u64 > self.step, "the note is there no more");
        let noted = self.device.finish_readback(step as usize % READBACKS);
        let bytes = self.collectives.checked(step, "download of the record", noted)?;
        let (head, numbers) = bytes.split_at(size_of::<Record>());
        let (losses, numbers) = numbers.split_at(8 * record.losses.len());
        let (norms, counts) = numbers.split_at(8 * record.norms.len());
        bytes_of_mut(&mut record.head).copy_from_slice(head);
        cast_slice_mut(&mut record.losses).copy_from_slice(losses);
        cast_slice_mut(&mut record.norms).copy_from_slice(norms);
        // Padding may follow the counts.
        let bytes = 4 * record.counts.len();
        cast_slice_mut(&mut record.counts).copy_from_slice(&counts[..bytes]);
        Ok(())
    }

    /// The number of steps so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Runs a section's instructions in program order or, with chaos, in any allowed order.
    pub(super) fn run_section(&mut self, section: usize, size: usize) -> Result<(), RunError> {
        if self.chaos.is_some() {
            let until = match self.compiled.program.sections[section].kind {
                SectionKind::Only | SectionKind::Last if self.overlaps_next_step => ChaosUntil::Any,
                SectionKind::Update if self.overlaps_next_step => ChaosUntil::Seen,
                _ => ChaosUntil::End,
            };
            self.run_chaotically(section, size, until)?;
        } else if !self.launch_captured(section, size)? {
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

    /// Launches a section as one captured graph; false where it is not captured.
    fn launch_captured(&mut self, section: usize, size: usize) -> Result<bool, RunError> {
        if self.trace.is_some() {
            return Ok(false);
        }
        let works = &self.lowered[size][section];
        let replayed = self.captured.run(self.device.as_mut(), [size, section], self.feed.length(), works);
        replayed.map_err(RunError::device(self.step, "launch of a captured section"))
    }

    /// Enqueues one of the update's early loads during a micro-batch.
    fn begin_update(&mut self, section: usize, size: usize, place: usize) -> Result<(), RunError> {
        let EarlyLoad { instruction, behind, .. } = self.early[place];
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
        if self.overlaps_next_step {
            for (earlier, place) in &compiled.memory.sections[section].cross_step_waits[at] {
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
            Work::Collective(axis, collective) => {
                let index = (self.first_mark[section] + at) as u32;
                let name = OpName::new(step, instruction.action.name(), index);
                let comm = self.comm.as_deref().expect("collectives are compiled for several ranks");
                self.collectives.run(comm, *axis, name, collective, self.device.as_mut(), queue).map_err(
                    |error| match error {
                        CollectiveError::Device(source) => failed(source),
                        CollectiveError::Comm(source) => {
                            RunError::Comm { step, op: compiled.describe(instruction), source }
                        }
                    },
                )?;
            }
        }
        if self.awaited[section][at] {
            self.device.record_event(queue, self.first_mark[section] + at).map_err(failed)?;
        }
        if let (Some(trace), Some(begun)) = (&mut self.trace, begun) {
            self.device.record_timestamp(queue).map_err(failed)?;
            trace.add((section, at), instruction, compiled.describe(instruction), begun);
        }
        Ok(())
    }

    /// Makes all queues wait for each other, so that sections run one after the other.
    pub(super) fn join(&mut self, section: usize) -> Result<(), RunError> {
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
        self.each_queue(|engine, queue| engine.wait_for_all(queue, 0))
    }

    /// Makes a queue wait for the events of all others, the first of which is `first`.
    fn wait_for_all(&mut self, queue: Queue, first: usize) -> Result<(), DeviceError> {
        let others = Queue::ALL.into_iter().filter(|other| *other != queue);
        others.into_iter().try_for_each(|other| self.device.wait_event(queue, first + other as usize))
    }

    fn each_queue(
        &mut self,
        visit: impl Fn(&mut Self, Queue) -> Result<(), DeviceError>,
    ) -> Result<(), RunError> {
        let step = self.step;
        Queue::ALL
            .into_iter()
            .try_for_each(|queue| visit(self, queue))
            .map_err(RunError::device(step, "joining queues"))
    }

    /// Waits for all enqueued work, overlapping updates included, before the host reads or writes device memory.
    pub(super) fn drain(&mut self) -> Result<(), RunError> {
        self.finish_chaotically()?;
        let settled = self.device.synchronise();
        self.collectives.checked(self.step, "waiting for the last step", settled)
    }
}

impl Drop for Engine<'_> {
    fn drop(&mut self) {
        if self.collectives.is_asynchronous() {
            // A rank leaves after its device has finished all collectives. Errors were reported before.
            let _ = self.device.synchronise();
        }
    }
}
