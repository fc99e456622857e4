//! Collectives of a step without a step: the same meetings over the same kind of memory, one at a time. For measurements.

use zeroth_base::DType;
use zeroth_comm::{Comm, OpName};
use zeroth_cpu::CpuDevice;
use zeroth_kernel::{Device, DeviceError, Queue, Span};

use super::RunError;
use super::meet::{Meeting, Meetings};
use super::seat::seat;
use zeroth_program::{Collective, Work};

/// A collective as programs for the processor have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rehearsed {
    /// Parameters at stage 3: every rank's shard to every rank, into a buffer of their own.
    Gather,
    /// Updated parameters at stages 1 and 2: every rank's part to every rank, in place.
    GatherInPlace,
    /// Gradients: the sum in f32 of what every rank has rounded to bf16 of this rank's part.
    Reduce,
}

/// Places in a rank's arena, and the collectives between them.
struct Stage {
    shard: Span,
    gathered: Span,
    rounded: Span,
    sums: Span,
}

impl Stage {
    fn new(part: u64, ranks: u64) -> Self {
        let mut end = 0;
        let mut place = |bytes: u64| {
            let span = Span::device(end, bytes);
            end = span.end().next_multiple_of(256);
            span
        };
        let all = ranks * part;
        Self { shard: place(part), gathered: place(all), rounded: place(all), sums: place(2 * part) }
    }

    fn collective(&self, what: Rehearsed, ranks: usize) -> Collective {
        let part = self.shard.bytes as usize;
        let counts = vec![part; ranks];
        let starts = (0..ranks).map(|rank| rank * part).collect();
        match what {
            Rehearsed::Gather => Collective::AllGather { send: self.shard, recv: self.gathered, counts },
            Rehearsed::GatherInPlace => Collective::InPlace { buffer: self.gathered, starts, counts },
            Rehearsed::Reduce => Collective::Reduce {
                send: self.rounded,
                starts,
                counts,
                from_type: DType::Bf16,
                to: self.sums,
                to_type: DType::F32,
                add: false,
                squares: None,
            },
        }
    }
}

/// One rank that meets the others.
pub struct Rehearsal {
    /// Dropped before the device, as an engine's.
    comm: Box<dyn Comm>,
    device: CpuDevice,
    meetings: Meetings,
    stage: Stage,
    works: Vec<(Rehearsed, Work)>,
    met: u32,
}

impl Rehearsal {
    /// A rank on `threads` threads whose part of everything has `part` bytes, a multiple of 4.
    pub fn new(comm: Box<dyn Comm>, part: u64, threads: usize) -> Result<Self, RunError> {
        let ranks = comm.world();
        let stage = Stage::new(part, ranks as u64);
        let all = [Rehearsed::Gather, Rehearsed::GatherInPlace, Rehearsed::Reduce];
        let works: Vec<(Rehearsed, Work)> =
            all.map(|what| (what, Work::Collective(stage.collective(what, ranks)))).into();
        let mut device =
            CpuDevice::new(threads, stage.sums.end(), 0).map_err(RunError::device(0, "start"))?;
        let failed = failed(0, "start");
        let meetings =
            Meetings::new(works.iter().map(|(_, work)| work), &mut device, Some(comm.as_ref()), (0, 0))
                .map_err(&failed)?;
        let seat = seat(Some(comm.as_ref())).map_err(|source| failed(Meeting::Comm(source)))?;
        device.pin_and_prefault(seat);
        Ok(Self { comm, device, meetings, stage, works, met: 0 })
    }

    /// Meets the others, all of whom call this with the same collective.
    pub fn meet(&mut self, what: Rehearsed) -> Result<(), RunError> {
        let found = self.works.iter().find(|(other, _)| *other == what);
        let Some((_, Work::Collective(collective))) = found else { unreachable!("each of them was made") };
        self.met += 1;
        let name = OpName::new(1, "rehearsal", self.met);
        let met = self.meetings.meet(self.comm.as_ref(), name, collective, &mut self.device, Queue::Compute);
        met.map_err(failed(1, "rehearsal"))
    }

    /// The other ranks.
    pub fn comm(&self) -> &dyn Comm {
        self.comm.as_ref()
    }

    /// This rank's shard of the parameters.
    pub fn shard(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.shard)
    }

    /// All shards; in place, this rank's part lies there before.
    pub fn gathered(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.gathered)
    }

    /// The gradients of all that this rank has rounded.
    pub fn rounded(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.rounded)
    }

    /// The sums of this rank's part, in f32.
    pub fn sums(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.sums)
    }

    fn bytes(&mut self, span: Span) -> Result<&mut [u8], RunError> {
        let found: Result<_, DeviceError> = self.device.direct_mut(span);
        let found = found.map_err(RunError::device(1, "rehearsal"))?;
        Ok(found.expect("the host sees the processor's arena"))
    }
}

fn failed(step: u64, op: &str) -> impl Fn(Meeting) -> RunError + '_ {
    move |error| match error {
        Meeting::Device(source) => RunError::Device { step, op: op.to_owned(), source },
        Meeting::Comm(source) => RunError::Comm { step, op: op.to_owned(), source },
    }
}
