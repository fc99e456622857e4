//! Weights in nf4: quantised while they are loaded, and read back as the values that compute sees.

use bytemuck::Zeroable;
use half::{bf16, f16};
use zeroth_base::DType;
use zeroth_cpu::{Pool, convert, quantize_nf4};
use zeroth_kernel::{Element, Nf4Record, Queue, Span};
use zeroth_program::{BufferId, Storage};

use super::{Engine, RunError};

/// Threads that quantise: more outrun every disk.
const MOST_THREADS: usize = 16;

/// Quantises pieces of parameters.
pub(super) struct Quantizer {
    pool: Pool,
    records: Vec<Nf4Record>,
    /// Elements in a 16-bit compute dtype.
    halves: Vec<u16>,
}

impl Engine<'_> {
    /// What quantises this rank's weights; `None` where none are in nf4.
    pub(super) fn quantizer(&self) -> Result<Option<Quantizer>, RunError> {
        let layout = &self.compiled.program.layout;
        if layout.flats.iter().all(|flat| flat.storage != Storage::Nf4) {
            return Ok(None);
        }
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cpus / layout.ranks() as usize).clamp(1, MOST_THREADS);
        let pool = Pool::start(threads).map_err(RunError::device(self.step, "start of threads"))?;
        Ok(Some(Quantizer { pool, records: Vec::new(), halves: Vec::new() }))
    }

    /// Quantises a piece of a parameter in the compute dtype and writes it from element `first` of the buffer on. A piece
    /// begins at a record and ends at one or with its parameter.
    pub(super) fn put_nf4(
        &mut self,
        quantizer: &mut Quantizer,
        id: BufferId,
        first: u64,
        elements: &[f32],
    ) -> Result<(), RunError> {
        let Quantizer { pool, records, halves } = quantizer;
        records.resize(elements.len().div_ceil(Nf4Record::ELEMENTS), Nf4Record::zeroed());
        match self.compiled.program.types.compute {
            DType::F32 => quantize_nf4(pool, elements, records),
            DType::Bf16 => quantize_nf4(pool, rounded::<bf16>(pool, elements, halves), records),
            DType::F16 => quantize_nf4(pool, rounded::<f16>(pool, elements, halves), records),
        }
        let to = self.records(id, first, records.len());
        let done = self.device.upload(Queue::Compute, bytemuck::cast_slice(records), to);
        done.map_err(RunError::device(self.step, "upload of weights"))
    }

    /// Reads elements from `first` of the buffer on, as an op gets them.
    pub(super) fn get_nf4(&mut self, id: BufferId, first: u64, elements: &mut [f32]) -> Result<(), RunError> {
        let skipped = first as usize % Nf4Record::ELEMENTS;
        let mut records = vec![Nf4Record::zeroed(); (skipped + elements.len()).div_ceil(Nf4Record::ELEMENTS)];
        let from = self.records(id, first - skipped as u64, records.len());
        let read = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(&mut records));
        read.map_err(RunError::device(self.step, "download of weights"))?;
        let rounded: fn(f32) -> f32 = match self.compiled.program.types.compute {
            DType::F32 => |value| value,
            DType::Bf16 => |value| <bf16 as Element>::from_f32(value).to_f32(),
            DType::F16 => |value| <f16 as Element>::from_f32(value).to_f32(),
        };
        for (place, element) in (skipped..).zip(elements) {
            let record = &records[place / Nf4Record::ELEMENTS];
            *element = rounded(record.element(place % Nf4Record::ELEMENTS));
        }
        Ok(())
    }

    fn records(&self, id: BufferId, first: u64, count: usize) -> Span {
        let elements = (count * Nf4Record::ELEMENTS) as u64;
        let [at, bytes] = [first, elements].map(|elements| Storage::Nf4.bytes(elements));
        self.compiled.span(0, id).part(at, bytes, 1)
    }
}

/// The elements cast to a 16-bit dtype.
fn rounded<'h, T: Element>(pool: &Pool, elements: &[f32], halves: &'h mut Vec<u16>) -> &'h [T] {
    halves.resize(elements.len(), 0);
    let to: &mut [T] = bytemuck::cast_slice_mut(halves);
    convert(pool, elements, to);
    to
}
