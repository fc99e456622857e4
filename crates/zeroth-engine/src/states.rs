//! Access to a rank's states by parameter: loading weights, and reading back what it updated.

use std::ops::Range;

use half::{bf16, f16};
use zeroth_base::DType;
use zeroth_graph::ParamId;
use zeroth_kernel::{
    Control, MasterForm, Moment, Optimizer, Queue, Span, canonical_master, join_low_bits, low_bits,
};

use super::{Engine, RunError};
use zeroth_program::{BufferId, Storage};

/// Elements per transfer.
const PIECE: u64 = 1 << 19;

/// 16-bit elements per transfer: small, so that no second large buffer is needed.
const HALVES: usize = 1 << 16;

/// A kind of per-parameter state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// Weights in f32: the master weights where they exist. Of weights in nf4, the values that ops get.
    Weights,
    /// A moment of the optimizer.
    Moment(Moment),
    /// The gradient of the last update, valid until the next micro-batch or evaluation.
    Gradient,
}

impl StateKind {
    /// The states that persist between steps, weights first.
    pub fn of_optimizer(optimizer: Optimizer) -> impl Iterator<Item = Self> {
        std::iter::once(Self::Weights).chain(optimizer.moments().iter().copied().map(Self::Moment))
    }
}

/// Provides elements of a parameter.
pub type StateSource<'a> = &'a mut dyn FnMut(
    ParamId,
    Range<u64>,
    &mut [f32],
) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Receives elements of a parameter.
pub type Sink<'a> =
    &'a mut dyn FnMut(ParamId, Range<u64>, &[f32]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Called with an engine, a parameter, a range of its elements, their offset in the flat, and a buffer for them.
type Visit<'a, E> = &'a mut dyn FnMut(&mut E, ParamId, Range<u64>, u64, &mut [f32]) -> Result<(), RunError>;

impl Engine<'_> {
    /// Loads this rank's part of every parameter. Parameters in nf4 are quantised from their values in the compute dtype.
    pub fn load(&mut self, source: StateSource<'_>) -> Result<(), RunError> {
        self.drain()?;
        let program = &self.compiled.program;
        let mut elements = vec![0.0f32; PIECE as usize];
        let mut quantizer = self.quantizer()?;
        for (flat, held) in program.layout.flats.iter().enumerate() {
            let weights = program.held_range(flat, self.rank);
            let (has_master, updated) = (program.has_master(flat), program.update_range(flat, self.rank));
            // Where both cover the same elements, the source is read once.
            let are_alike = has_master && updated == weights;
            self.each_piece(flat, &weights, &mut elements, &mut |engine, param, range, at, elements| {
                source(param, range, elements).map_err(RunError::Weights)?;
                if are_alike {
                    engine.put_master(flat, at - updated.start, elements)?;
                }
                let (id, first) = (BufferId::Weights(flat), at - weights.start);
                match (held.storage, &mut quantizer) {
                    (Storage::Nf4, Some(quantizer)) => engine.put_nf4(quantizer, id, first, elements),
                    (Storage::Nf4, None) => unreachable!("a layout with nf4 has a quantizer"),
                    (Storage::Dense(dtype), _) => engine.put(id, dtype, first, elements),
                }
            })?;
            if has_master && !are_alike {
                self.each_piece(flat, &updated, &mut elements, &mut |engine, param, range, at, elements| {
                    source(param, range, elements).map_err(RunError::Weights)?;
                    engine.put_master(flat, at - updated.start, elements)
                })?;
            }
            self.begin_moments(flat, &mut elements)?;
        }
        Ok(())
    }

    /// Writes the initial moments that are not 0; the arena starts as zeros.
    fn begin_moments(&mut self, flat: usize, elements: &mut [f32]) -> Result<(), RunError> {
        let program = &self.compiled.program;
        let (optimizer, dtype) = (program.optimizer, program.moment_dtype);
        let updated = program.update_range(flat, self.rank);
        let is_trained = program.is_trained(flat);
        for &moment in optimizer.moments() {
            let initial = self.recipe.initial(optimizer, moment);
            if initial == 0.0 || !is_trained {
                continue;
            }
            self.each_piece(flat, &updated, elements, &mut |engine, _, _, at, elements| {
                elements.fill(initial);
                engine.put(BufferId::Moment(moment, flat), dtype, at - updated.start, elements)
            })?;
        }
        Ok(())
    }

    /// The states that persist between steps, weights first.
    pub fn states(&self) -> Vec<StateKind> {
        StateKind::of_optimizer(self.compiled.program.optimizer).collect()
    }

    /// This rank's part of a state in the order of [`Self::read`], and its dtype.
    pub fn owned(&self, state: StateKind) -> Vec<(ParamId, Range<u64>, DType)> {
        let program = &self.compiled.program;
        let mut owned = Vec::new();
        for (flat, held) in program.layout.flats.iter().enumerate() {
            if !program.is_trained(flat) && state != StateKind::Weights {
                continue;
            }
            let (_, dtype, _) = self.place_of(flat, state);
            let shard = program.layout.shard(flat, self.rank);
            owned.extend(held.pieces(shard).map(|piece| (piece.param, piece.elements, dtype)));
        }
        owned
    }

    /// [`Self::owned`] of trained parameters only.
    pub fn owned_trained(&self, state: StateKind) -> Vec<(ParamId, Range<u64>, DType)> {
        let program = &self.compiled.program;
        let is_trained = |param: ParamId| program.is_trained(program.layout.place(param).0);
        self.owned(state).into_iter().filter(|(param, ..)| is_trained(*param)).collect()
    }

    /// The step counters on the device: applied steps, and the loss scale with its history.
    pub fn control(&mut self) -> Result<Control, RunError> {
        let (at, step) = (self.control_span(), self.step);
        let mut control = Control::new(1.0);
        let read = self.device.download(Queue::Compute, at, bytemuck::bytes_of_mut(&mut control));
        let read = read.and_then(|()| self.device.synchronise());
        self.collectives.checked(step, "download of the control", read)?;
        Ok(control)
    }

    /// Resumes after `steps` steps from a saved [`Self::control`].
    pub fn resume_at(&mut self, steps: u64, control: &Control) -> Result<(), RunError> {
        self.drain()?;
        self.step = steps;
        let at = self.control_span();
        let written = self.device.upload(Queue::Compute, bytemuck::bytes_of(control), at);
        written.map_err(RunError::device(steps, "upload of the control"))
    }

    fn control_span(&self) -> Span {
        self.compiled.span(0, BufferId::Control).part(0, 1, size_of::<Control>() as u64)
    }

    /// Reads this rank's part of a state, parameter by parameter: all ranks together read every element once.
    pub fn read(&mut self, state: StateKind, sink: Sink<'_>) -> Result<(), RunError> {
        self.read_of(state, state != StateKind::Weights, sink)
    }

    /// [`Self::read`] of trained parameters only.
    pub fn read_trained(&mut self, state: StateKind, sink: Sink<'_>) -> Result<(), RunError> {
        self.read_of(state, true, sink)
    }

    fn read_of(&mut self, state: StateKind, only_trained: bool, sink: Sink<'_>) -> Result<(), RunError> {
        self.drain()?;
        let program = &self.compiled.program;
        let mut elements = vec![0.0f32; PIECE as usize];
        for flat in 0..program.layout.flats.len() {
            if only_trained && !program.is_trained(flat) {
                continue;
            }
            let shard = program.layout.shard(flat, self.rank);
            self.each_piece(flat, &shard, &mut elements, &mut |engine, param, range, at, elements| {
                engine.get_state(flat, state, at, elements)?;
                sink(param, range, elements).map_err(RunError::Weights)
            })?;
        }
        Ok(())
    }

    /// Restores a moment that [`Self::read`] returned on any number of ranks. Weights are restored by [`Self::load`].
    pub fn restore(&mut self, state: StateKind, source: StateSource<'_>) -> Result<(), RunError> {
        self.drain()?;
        let program = &self.compiled.program;
        let mut elements = vec![0.0f32; PIECE as usize];
        for flat in (0..program.layout.flats.len()).filter(|flat| program.is_trained(*flat)) {
            let updated = program.update_range(flat, self.rank);
            let (id, dtype, first) = self.place_of(flat, state);
            self.each_piece(flat, &updated, &mut elements, &mut |engine, param, range, at, elements| {
                source(param, range, elements).map_err(RunError::Weights)?;
                engine.put(id, dtype, at - first, elements)
            })?;
        }
        Ok(())
    }

    /// Gathers a range of a parameter's state to `into` on rank 0; other ranks leave theirs unchanged. All ranks call
    /// it with the same parameter and range.
    pub fn gather(
        &mut self,
        state: StateKind,
        param: ParamId,
        range: Range<u64>,
        into: &mut [f32],
    ) -> Result<(), RunError> {
        self.drain()?;
        let layout = &self.compiled.program.layout;
        let (flat, slot) = layout.place(param);
        let wanted = slot.start + range.start..slot.start + range.end;
        let owned = |rank: u64| {
            let shard = layout.shard(flat, rank);
            let start = shard.start.clamp(wanted.start, wanted.end);
            start..shard.end.clamp(start, wanted.end)
        };
        let counts: Vec<usize> =
            (0..layout.ranks()).map(owned).map(|part| 4 * (part.end - part.start) as usize).collect();
        let own = owned(self.rank);
        let mut elements = vec![0.0f32; (own.end - own.start) as usize];
        if !elements.is_empty() {
            self.get_state(flat, state, own.start, &mut elements)?;
        }
        let Some(comm) = self.comm() else {
            into.copy_from_slice(&elements);
            return Ok(());
        };
        // Parts arrive in rank order, which is that of the flat in one group.
        let in_order = layout.world.groups() == 1;
        let mut received = vec![0.0f32; if in_order || self.rank > 0 { 0 } else { into.len() }];
        let receive: &mut [u8] = match (self.rank, in_order) {
            (0, true) => bytemuck::cast_slice_mut(into),
            _ => bytemuck::cast_slice_mut(&mut received),
        };
        let name = zeroth_comm::OpName::new(self.step, "gather of weights", param.index() as u32);
        let met = comm.gather(name, 0, bytemuck::cast_slice(&elements), receive, &counts);
        let (step, op) = (self.step, "gather of weights".to_owned());
        let met = met.and_then(zeroth_comm::Handle::wait);
        met.map_err(|source| RunError::Comm { step, op, source })?;
        let mut rest = received.as_slice();
        for part in (0..layout.ranks()).map(owned).filter(|_| !received.is_empty()) {
            let [first, end] = [part.start, part.end].map(|at| (at - wanted.start) as usize);
            let from;
            (from, rest) = rest.split_at(end - first);
            into[first..end].copy_from_slice(from);
        }
        Ok(())
    }

    /// The buffer of a state, its dtype, and the flat element it starts at.
    fn place_of(&self, flat: usize, state: StateKind) -> (BufferId, DType, u64) {
        let program = &self.compiled.program;
        let updated = program.update_range(flat, self.rank).start;
        match state {
            StateKind::Weights if !program.has_master(flat) => self.place_of_weights(flat),
            StateKind::Weights => (BufferId::Master(flat), DType::F32, updated),
            StateKind::Moment(moment) => (BufferId::Moment(moment, flat), program.moment_dtype, updated),
            StateKind::Gradient => program.reduced_gradient(flat, self.rank),
        }
    }

    /// The buffer of the compute weights, as [`Self::place_of`]; of weights in nf4, with the dtype that ops read.
    fn place_of_weights(&self, flat: usize) -> (BufferId, DType, u64) {
        let program = &self.compiled.program;
        let first = program.held_range(flat, self.rank).start;
        let dtype = match program.layout.flats[flat].storage {
            Storage::Dense(dtype) => dtype,
            Storage::Nf4 => program.types.compute,
        };
        (BufferId::Weights(flat), dtype, first)
    }

    /// Reads a state from element `at` of its flat.
    fn get_state(
        &mut self,
        flat: usize,
        state: StateKind,
        at: u64,
        elements: &mut [f32],
    ) -> Result<(), RunError> {
        let (id, dtype, first) = self.place_of(flat, state);
        let program = &self.compiled.program;
        if state == StateKind::Weights && program.layout.flats[flat].storage == Storage::Nf4 {
            return self.get_nf4(id, at - first, elements);
        }
        if !matches!(id, BufferId::Master(_)) || program.master_form(flat) == MasterForm::F32 {
            return self.get(id, dtype, at - first, elements);
        }
        let (weights, run, first_weight) = self.place_of_weights(flat);
        self.get(weights, run, at - first_weight, elements)?;
        self.get_halves(id, at - first, elements, |weight, rest| {
            join_low_bits(bf16::from_f32(weight), rest.cast_signed())
        })
    }

    /// Loads master weights from element `first` of this rank's part. The compute weights are loaded separately.
    fn put_master(&mut self, flat: usize, first: u64, elements: &mut [f32]) -> Result<(), RunError> {
        let program = &self.compiled.program;
        let (form, id) = (program.master_form(flat), BufferId::Master(flat));
        if program.layout.flats[flat].storage == Storage::Dense(DType::Bf16) {
            for element in elements.iter_mut() {
                *element = canonical_master(*element);
            }
        }
        if form == MasterForm::F32 {
            return self.put(id, DType::F32, first, elements);
        }
        self.put_halves(id, first, elements, |element| {
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

    fn part(&self, id: BufferId, dtype: DType, first: u64, count: usize) -> Span {
        self.compiled.span(0, id).part(first, count as u64, dtype.bytes())
    }

    fn put(&mut self, id: BufferId, dtype: DType, first: u64, elements: &[f32]) -> Result<(), RunError> {
        match dtype {
            DType::F32 => {
                let (to, step) = (self.part(id, dtype, first, elements.len()), self.step);
                let done = self.device.upload(Queue::Compute, bytemuck::cast_slice(elements), to);
                done.map_err(RunError::device(step, "upload of weights"))
            }
            DType::Bf16 => self.put_halves(id, first, elements, |e| bf16::from_f32(e).to_bits()),
            DType::F16 => self.put_halves(id, first, elements, |e| f16::from_f32(e).to_bits()),
        }
    }

    fn get(&mut self, id: BufferId, dtype: DType, first: u64, elements: &mut [f32]) -> Result<(), RunError> {
        match dtype {
            DType::F32 => {
                let (from, step) = (self.part(id, dtype, first, elements.len()), self.step);
                let read = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(elements));
                read.map_err(RunError::device(step, "download of weights"))
            }
            DType::Bf16 => self.get_halves(id, first, elements, |_, bits| bf16::from_bits(bits).to_f32()),
            DType::F16 => self.get_halves(id, first, elements, |_, bits| f16::from_bits(bits).to_f32()),
        }
    }

    /// Writes 16 bits for each element.
    fn put_halves(
        &mut self,
        id: BufferId,
        first: u64,
        elements: &[f32],
        half: impl Fn(f32) -> u16,
    ) -> Result<(), RunError> {
        let mut halves: Vec<u16> = Vec::with_capacity(HALVES.min(elements.len()));
        for (number, elements) in elements.chunks(HALVES).enumerate() {
            halves.clear();
            halves.extend(elements.iter().map(|element| half(*element)));
            let to = self.part(id, DType::Bf16, first + (number * HALVES) as u64, halves.len());
            let done = self.device.upload(Queue::Compute, bytemuck::cast_slice(&halves), to);
            done.map_err(RunError::device(self.step, "upload of weights"))?;
        }
        Ok(())
    }

    /// Combines each element with the 16 bits stored for it.
    fn get_halves(
        &mut self,
        id: BufferId,
        first: u64,
        elements: &mut [f32],
        whole: impl Fn(f32, u16) -> f32,
    ) -> Result<(), RunError> {
        let mut halves = vec![0u16; HALVES.min(elements.len())];
        for (number, elements) in elements.chunks_mut(HALVES).enumerate() {
            let halves = &mut halves[..elements.len()];
            let from = self.part(id, DType::Bf16, first + (number * HALVES) as u64, halves.len());
            let read = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(halves));
            read.map_err(RunError::device(self.step, "download of weights"))?;
            for (element, half) in elements.iter_mut().zip(halves) {
                *element = whole(*element, *half);
            }
        }
        Ok(())
    }
}
