//! Benchmarks of a step's collectives over the same kind of memory, one at a time.

use zeroth_base::{Axis, DType};
use zeroth_comm::{Comm, OpName};
use zeroth_cpu::CpuDevice;
use zeroth_kernel::{ByTier, Device, DeviceError, Queue, Span};

use super::RunError;
use super::collectives::Collectives;
use super::cpu_share::cpu_share;
use super::error::CollectiveError;
use zeroth_program::{Collective, Work};

/// A collective of a CPU program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchedCollective {
    /// All-gather of parameters at stage 3, into a buffer of their own.
    Gather,
    /// In-place all-gather of updated parameters at stages 1 and 2.
    GatherInPlace,
    /// Reduce-scatter of bf16 gradients, summed in f32.
    Reduce,
}

/// The arena spans of the benchmarked collectives.
struct Stage {
    shard: Span,
    gathered: Span,
    gradients: Span,
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
        Self { shard: place(part), gathered: place(all), gradients: place(all), sums: place(2 * part) }
    }

    fn collective(&self, what: BenchedCollective, ranks: usize) -> Collective {
        let part = self.shard.bytes as usize;
        let counts = vec![part; ranks];
        let starts = (0..ranks).map(|rank| rank * part).collect();
        match what {
            BenchedCollective::Gather => {
                Collective::AllGather { send: self.shard, recv: self.gathered, counts }
            }
            BenchedCollective::GatherInPlace => Collective::InPlace { buffer: self.gathered, starts, counts },
            BenchedCollective::Reduce => Collective::Reduce {
                send: self.gradients,
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

/// One rank of a benchmark of collectives.
pub struct CollectiveBench {
    /// Dropped before the device, as in an engine.
    comm: Box<dyn Comm>,
    device: CpuDevice,
    collectives: Collectives,
    stage: Stage,
    works: Vec<(BenchedCollective, Work)>,
    met: u32,
}

impl CollectiveBench {
    /// Creates a rank with `threads` threads whose part of every collective has `part` bytes, a multiple of 4.
    pub fn new(comm: Box<dyn Comm>, part: u64, threads: usize) -> Result<Self, RunError> {
        let ranks = comm.world();
        let stage = Stage::new(part, ranks as u64);
        let all = [BenchedCollective::Gather, BenchedCollective::GatherInPlace, BenchedCollective::Reduce];
        let works: Vec<(BenchedCollective, Work)> =
            all.map(|what| (what, Work::Collective(Axis::Group, stage.collective(what, ranks)))).into();
        let mut device = CpuDevice::new(threads, ByTier::on_device(stage.sums.end()))
            .map_err(RunError::device(0, "start"))?;
        let failed = failed(0, "start");
        let collectives =
            Collectives::new(works.iter().map(|(_, work)| work), &mut device, Some(comm.as_ref()), (0, 0))
                .map_err(&failed)?;
        let share = cpu_share(Some(comm.as_ref())).map_err(|source| failed(CollectiveError::Comm(source)))?;
        device.pin_and_prefault(share);
        Ok(Self { comm, device, collectives, stage, works, met: 0 })
    }

    /// Runs a collective; every rank calls it with the same one.
    pub fn run(&mut self, what: BenchedCollective) -> Result<(), RunError> {
        let found = self.works.iter().find(|(other, _)| *other == what);
        let Some((_, Work::Collective(axis, collective))) = found else {
            unreachable!("each of them was made")
        };
        self.met += 1;
        let name = OpName::new(1, "collective benchmark", self.met);
        let met = self.collectives.run(
            self.comm.as_ref(),
            *axis,
            name,
            collective,
            &mut self.device,
            Queue::Compute,
        );
        met.map_err(failed(1, "collective benchmark"))
    }

    /// The communicator.
    pub fn comm(&self) -> &dyn Comm {
        self.comm.as_ref()
    }

    /// This rank's shard of the parameters.
    pub fn shard(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.shard)
    }

    /// All shards; for the in-place all-gather, this rank's part is set before.
    pub fn gathered(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.gathered)
    }

    /// This rank's bf16 gradients of all parts.
    pub fn gradients(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.gradients)
    }

    /// The sums of this rank's part, in f32.
    pub fn sums(&mut self) -> Result<&mut [u8], RunError> {
        self.bytes(self.stage.sums)
    }

    fn bytes(&mut self, span: Span) -> Result<&mut [u8], RunError> {
        let found: Result<_, DeviceError> = self.device.direct_mut(span);
        let found = found.map_err(RunError::device(1, "collective benchmark"))?;
        Ok(found.expect("the host sees the processor's arena"))
    }
}

fn failed(step: u64, op: &str) -> impl Fn(CollectiveError) -> RunError + '_ {
    move |error| match error {
        CollectiveError::Device(source) => RunError::Device { step, op: op.to_owned(), source },
        CollectiveError::Comm(source) => RunError::Comm { step, op: op.to_owned(), source },
    }
}
