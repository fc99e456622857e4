//! What a rank holds, addressed by parameter: loading weights, and reading back what it updated.

use std::ops::Range;

use half::{bf16, f16};
use zeroth_base::DType;
use zeroth_graph::ParamId;
use zeroth_kernel::{Control, MasterForm, Queue, Span, canonical_master, join_low_bits, low_bits};

use super::{Engine, RunError};
use zeroth_program::Content;

/// Elements that are moved at once.
const PIECE: u64 = 1 << 20;

/// Elements of 16 bits that are moved at once: a small part of a piece, so that a rank holds no second one for them.
const HALVES: usize = 1 << 16;

/// A state of the optimizer, or the weights themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Weights in f32: master weights where there are any.
    Weights,
    /// First moments.
    First,
    /// Second moments.
    Second,
    /// The gradient that the last update read, until the next micro-batch or evaluation.
    Gradient,
}

/// Gives elements of a parameter.
pub type Source<'a> = &'a mut dyn FnMut(
    ParamId,
    Range<u64>,
    &mut [f32],
) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Takes elements of a parameter.
pub type Sink<'a> =
    &'a mut dyn FnMut(ParamId, Range<u64>, &[f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Called with an engine, a parameter, a range of its elements, where they begin in their flat, and room for them.
type Visit<'a, E> = &'a mut dyn FnMut(&mut E, ParamId, Range<u64>, u64, &mut [f32]) -> Result<(), RunError>;

impl Engine<'_> {
    /// Loads what this rank holds of every parameter, and only that.
    pub fn load(&mut self, source: Source<'_>) -> Result<(), RunError> {
        self.drain()?;
        let program = &self.compiled.program;
        let mut elements = vec![0.0f32; PIECE as usize];
        for (flat, held) in program.layout.flats.iter().enumerate() {
            let shard = held.shard(self.rank, program.layout.ranks);
            let weights = if program.stays_gathered(flat) { 0..held.padded() } else { shard };
            let (has_master, updated) = (program.has_master(flat), program.updated(flat, self.rank));
            // Where both are of the same elements, these are asked for once.
            let are_alike = has_master && updated == weights;
            self.each_piece(flat, &weights, &mut elements, &mut |engine, param, range, at, elements| {
                source(param, range, elements).map_err(RunError::Weights)?;
                if are_alike {
                    engine.put_master(flat, at - updated.start, elements)?;
                }
                engine.put(
                    Content::Weights(flat),
                    engine.compiled.program.types.run,
                    at - weights.start,
                    elements,
                )
            })?;
            if has_master && !are_alike {
                self.each_piece(flat, &updated, &mut elements, &mut |engine, param, range, at, elements| {
                    source(param, range, elements).map_err(RunError::Weights)?;
                    engine.put_master(flat, at - updated.start, elements)
                })?;
            }
            self.begin_sums(flat, &mut elements)?;
        }
        Ok(())
    }

    /// Adagrad's sums begin with a number of the recipe; all other moments with the zeros that the arena has.
    fn begin_sums(&mut self, flat: usize, elements: &mut [f32]) -> Result<(), RunError> {
        let program = &self.compiled.program;
        let (first, moments) = (program.optimizer.initial_second(&self.recipe), program.moments);
        if first == 0.0 || !program.is_trained(flat) {
            return Ok(());
        }
        let updated = program.updated(flat, self.rank);
        self.each_piece(flat, &updated, elements, &mut |engine, _, _, at, elements| {
            elements.fill(first);
            engine.put(Content::Second(flat), moments, at - updated.start, elements)
        })
    }

    /// The states that a run keeps from step to step, weights first.
    pub fn states(&self) -> Vec<State> {
        let [has_first, has_second] = self.compiled.program.optimizer.moments();
        let moments = [(State::First, has_first), (State::Second, has_second)];
        let kept = moments.into_iter().filter(|(_, has)| *has).map(|(state, _)| state);
        std::iter::once(State::Weights).chain(kept).collect()
    }

    /// What this rank owns of a state, in the order of [`Self::read`], and the type it is held in.
    pub fn owned(&self, state: State) -> Vec<(ParamId, Range<u64>, DType)> {
        let program = &self.compiled.program;
        let mut owned = Vec::new();
        for (flat, held) in program.layout.flats.iter().enumerate() {
            if !program.is_trained(flat) && state != State::Weights {
                continue;
            }
            let (_, dtype, _) = self.place_of(flat, state);
            let shard = held.shard(self.rank, program.layout.ranks);
            owned.extend(held.pieces(shard).map(|piece| (piece.param, piece.elements, dtype)));
        }
        owned
    }

    /// What the device remembers of the steps so far: how many were applied, and the loss scale with its history.
    pub fn control(&mut self) -> Result<Control, RunError> {
        let (at, step) = (self.control_span(), self.step);
        let mut control = Control::new(1.0);
        let read = self.device.download(Queue::Compute, at, bytemuck::bytes_of_mut(&mut control));
        let read = read.and_then(|()| self.device.synchronise());
        self.meetings.seen(step, "download of the control", read)?;
        Ok(control)
    }

    /// Goes on after `steps` steps, with what [`Self::control`] gave then.
    pub fn go_on(&mut self, steps: u64, control: &Control) -> Result<(), RunError> {
        self.drain()?;
        self.step = steps;
        let at = self.control_span();
        let written = self.device.upload(Queue::Compute, bytemuck::bytes_of(control), at);
        written.map_err(RunError::device(steps, "upload of the control"))
    }

    fn control_span(&self) -> Span {
        self.compiled.span(0, Content::Control).part(0, 1, size_of::<Control>() as u64)
    }

    /// Gives what this rank owns of a state, parameter by parameter: all ranks together give every element once.
    pub fn read(&mut self, state: State, sink: Sink<'_>) -> Result<(), RunError> {
        self.drain()?;
        let program = &self.compiled.program;
        let mut elements = vec![0.0f32; PIECE as usize];
        for (flat, held) in program.layout.flats.iter().enumerate() {
            if !program.is_trained(flat) && state != State::Weights {
                continue;
            }
            let shard = held.shard(self.rank, program.layout.ranks);
            self.each_piece(flat, &shard, &mut elements, &mut |engine, param, range, at, elements| {
                engine.get_state(flat, state, at, elements)?;
                sink(param, range, elements).map_err(RunError::Weights)
            })?;
        }
        Ok(())
    }

    /// Takes a moment back, as [`Self::read`] gave it on any number of ranks. Weights come by [`Self::load`].
    pub fn restore(&mut self, state: State, source: Source<'_>) -> Result<(), RunError> {
        self.drain()?;
        let program = &self.compiled.program;
        let mut elements = vec![0.0f32; PIECE as usize];
        for flat in (0..program.layout.flats.len()).filter(|flat| program.is_trained(*flat)) {
            let updated = program.updated(flat, self.rank);
            let (content, dtype, first) = self.place_of(flat, state);
            self.each_piece(flat, &updated, &mut elements, &mut |engine, param, range, at, elements| {
                source(param, range, elements).map_err(RunError::Weights)?;
                engine.put(content, dtype, at - first, elements)
            })?;
        }
        Ok(())
    }

    /// Brings some elements of a parameter's state together on rank 0, whose `into` receives them; on the others it is
    /// left alone. All ranks call it with the same parameter and range.
    pub fn gather(
        &mut self,
        state: State,
        param: ParamId,
        range: Range<u64>,
        into: &mut [f32],
    ) -> Result<(), RunError> {
        self.drain()?;
        let layout = &self.compiled.program.layout;
        let (flat, slot) = layout.place(param);
        let wanted = slot.start + range.start..slot.start + range.end;
        let owned = |rank: u64| {
            let shard = layout.flats[flat].shard(rank, layout.ranks);
            let start = shard.start.clamp(wanted.start, wanted.end);
            start..shard.end.clamp(start, wanted.end)
        };
        let counts: Vec<usize> =
            (0..layout.ranks).map(owned).map(|part| 4 * (part.end - part.start) as usize).collect();
        let own = owned(self.rank);
        let mut elements = vec![0.0f32; (own.end - own.start) as usize];
        if !elements.is_empty() {
            self.get_state(flat, state, own.start, &mut elements)?;
        }
        let Some(comm) = self.comm() else {
            into.copy_from_slice(&elements);
            return Ok(());
        };
        let receive: &mut [u8] = if self.rank == 0 { bytemuck::cast_slice_mut(into) } else { &mut [] };
        let name = zeroth_comm::OpName::new(self.step, "gather of weights", param.index() as u32);
        let met = comm.gather(name, 0, bytemuck::cast_slice(&elements), receive, &counts);
        let (step, op) = (self.step, "gather of weights".to_owned());
        met.and_then(zeroth_comm::Handle::wait).map_err(|source| RunError::Comm { step, op, source })
    }

    /// The buffer of a state, its type, and the element of the flat that it begins with.
    fn place_of(&self, flat: usize, state: State) -> (Content, DType, u64) {
        let program = &self.compiled.program;
        let updated = program.updated(flat, self.rank).start;
        match state {
            State::Weights if !program.has_master(flat) => self.place_of_weights(flat),
            State::Weights => (Content::Master(flat), DType::F32, updated),
            State::First => (Content::First(flat), program.moments, updated),
            State::Second => (Content::Second(flat), program.moments, updated),
            State::Gradient => program.complete_gradient(flat, self.rank),
        }
    }

    /// The buffer of the weights that are computed with, as [`Self::place_of`].
    fn place_of_weights(&self, flat: usize) -> (Content, DType, u64) {
        let program = &self.compiled.program;
        let shard = program.layout.flats[flat].shard(self.rank, program.layout.ranks).start;
        let first = if program.stays_gathered(flat) { 0 } else { shard };
        (Content::Weights(flat), program.types.run, first)
    }

    /// Reads a state from element `at` of its flat on.
    fn get_state(
        &mut self,
        flat: usize,
        state: State,
        at: u64,
        elements: &mut [f32],
    ) -> Result<(), RunError> {
        let (content, dtype, first) = self.place_of(flat, state);
        let program = &self.compiled.program;
        if !matches!(content, Content::Master(_)) || program.master_form(flat) == MasterForm::F32 {
            return self.get(content, dtype, at - first, elements);
        }
        let (weights, run, first_weight) = self.place_of_weights(flat);
        self.get(weights, run, at - first_weight, elements)?;
        self.get_halves(content, at - first, elements, |weight, rest| {
            join_low_bits(bf16::from_f32(weight), rest.cast_signed())
        })
    }

    /// Loads master weights, from element `first` of those that this rank updates on. The weights themselves are loaded
    /// besides.
    fn put_master(&mut self, flat: usize, first: u64, elements: &mut [f32]) -> Result<(), RunError> {
        let program = &self.compiled.program;
        let (run, form, content) = (program.types.run, program.master_form(flat), Content::Master(flat));
        if run == DType::Bf16 {
            for element in elements.iter_mut() {
                *element = canonical_master(*element);
            }
        }
        if form == MasterForm::F32 {
            return self.put(content, DType::F32, first, elements);
        }
        self.put_halves(content, first, elements, |element| {
            low_bits(element, bf16::from_f32(element)).cast_unsigned()
        })
    }

    fn each_piece(
        &mut self,
        flat: usize,
        range: &Range<u64>,
        elements: &mut [f32],
        visit: Visit<'_, Self>,
    ) -> Result<(), RunError> {
        let held = &self.compiled.program.layout.flats[flat];
        for first in range.clone().step_by(PIECE as usize) {
            for piece in held.pieces(first..(first + PIECE).min(range.end)) {
                let count = (piece.elements.end - piece.elements.start) as usize;
                visit(self, piece.param, piece.elements, piece.at, &mut elements[..count])?;
            }
        }
        Ok(())
    }

    fn part(&self, content: Content, dtype: DType, first: u64, count: usize) -> Span {
        self.compiled.span(0, content).part(first, count as u64, dtype.bytes())
    }

    fn put(&mut self, content: Content, dtype: DType, first: u64, elements: &[f32]) -> Result<(), RunError> {
        match dtype {
            DType::F32 => {
                let (to, step) = (self.part(content, dtype, first, elements.len()), self.step);
                let done = self.device.upload(Queue::Compute, bytemuck::cast_slice(elements), to);
                done.map_err(RunError::device(step, "upload of weights"))
            }
            DType::Bf16 => self.put_halves(content, first, elements, |e| bf16::from_f32(e).to_bits()),
            DType::F16 => self.put_halves(content, first, elements, |e| f16::from_f32(e).to_bits()),
        }
    }

    fn get(
        &mut self,
        content: Content,
        dtype: DType,
        first: u64,
        elements: &mut [f32],
    ) -> Result<(), RunError> {
        match dtype {
            DType::F32 => {
                let (from, step) = (self.part(content, dtype, first, elements.len()), self.step);
                let read = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(elements));
                read.map_err(RunError::device(step, "download of weights"))
            }
            DType::Bf16 => {
                self.get_halves(content, first, elements, |_, bits| bf16::from_bits(bits).to_f32())
            }
            DType::F16 => self.get_halves(content, first, elements, |_, bits| f16::from_bits(bits).to_f32()),
        }
    }

    /// Writes 16 bits for each element.
    fn put_halves(
        &mut self,
        content: Content,
        first: u64,
        elements: &[f32],
        half: impl Fn(f32) -> u16,
    ) -> Result<(), RunError> {
        let mut halves: Vec<u16> = Vec::with_capacity(HALVES.min(elements.len()));
        for (number, elements) in elements.chunks(HALVES).enumerate() {
            halves.clear();
            halves.extend(elements.iter().map(|element| half(*element)));
            let to = self.part(content, DType::Bf16, first + (number * HALVES) as u64, halves.len());
            let done = self.device.upload(Queue::Compute, bytemuck::cast_slice(&halves), to);
            done.map_err(RunError::device(self.step, "upload of weights"))?;
        }
        Ok(())
    }

    /// Replaces each element by what it and the 16 bits that are stored for it make.
    fn get_halves(
        &mut self,
        content: Content,
        first: u64,
        elements: &mut [f32],
        whole: impl Fn(f32, u16) -> f32,
    ) -> Result<(), RunError> {
        let mut halves = vec![0u16; HALVES.min(elements.len())];
        for (number, elements) in elements.chunks_mut(HALVES).enumerate() {
            let halves = &mut halves[..elements.len()];
            let from = self.part(content, DType::Bf16, first + (number * HALVES) as u64, halves.len());
            let read = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(halves));
            read.map_err(RunError::device(self.step, "download of weights"))?;
            for (element, half) in elements.iter_mut().zip(halves) {
                *element = whole(*element, *half);
            }
        }
        Ok(())
    }
}
