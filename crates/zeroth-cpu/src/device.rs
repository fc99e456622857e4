//! The CPU as a [`Device`]: kernels run synchronously when they are enqueued, on the caller's thread and its pool.
//!
//! All queues execute in the order of the calls, so that events are no-ops. Before a kernel runs, its operands are checked: they
//! are inside their arenas, and no written operand overlaps another. That makes every launch memory-safe.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use zeroth_base::DType;
use zeroth_kernel::{
    Access, ByTier, CpuShare, Device, DeviceError, ExactSum, Kernel, Launch, PeerMapping, Queue, READBACKS,
    RankSum, ReadWrite, Shared, Span, Tier, with_operands,
};

use super::Arena;
use super::convert::copy;
use super::isa::Isa;
use super::launch::{CpuKernel, CpuLaunch, typed};
use super::pool::Pool;
use super::rank_sum::sum_parts;

/// Most operands of a kernel, scratch included.
const OPERANDS: usize = 16;

/// Bytes of scratch of a kernel on a pool of `threads`: a memory plan is exact before a run.
pub(super) fn scratch_bytes(kernel: &Kernel, threads: usize) -> u64 {
    with_operands!(*kernel, operands => operands.scratch_bytes(threads))
}

/// The CPU with its arenas.
pub struct CpuDevice {
    pool: Pool,
    arenas: ByTier<Arena>,
    readbacks: [Vec<u8>; READBACKS],
}

impl CpuDevice {
    /// A device with a pool of `threads` and arenas of these sizes.
    pub fn new(threads: usize, arenas: ByTier<u64>) -> Result<Self, DeviceError> {
        Isa::chosen()?;
        Self::on_pool(Pool::start(threads)?, arenas)
    }

    /// A device on an existing pool.
    pub fn on_pool(pool: Pool, arenas: ByTier<u64>) -> Result<Self, DeviceError> {
        let arenas = ByTier::try_new(|tier| Arena::new(tier.name(), arenas[tier]))?;
        Ok(Self { pool, arenas, readbacks: std::array::from_fn(|_| Vec::new()) })
    }

    /// Address and bytes of an arena's mapping.
    pub fn mapping(&self, tier: Tier) -> (usize, usize) {
        self.arenas[tier].mapping()
    }

    /// Checks that no written operand overlaps another.
    fn check(launch: &Launch) -> Result<(), DeviceError> {
        let mut operands = [(launch.scratch, Access::Write); OPERANDS];
        let mut count = 1;
        launch.kernel.operands(|span, access| {
            operands[count] = (span, access);
            count += 1;
        });
        for (at, (span, access)) in operands[..count].iter().enumerate() {
            for (other, other_access) in &operands[at + 1..count] {
                if (*access == Access::Write || *other_access == Access::Write) && span.overlaps(*other) {
                    let problem = format!("{span:?} and {other:?} overlap, and one of them is written");
                    return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
                }
            }
        }
        Ok(())
    }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu, {}, {} thread(s)", self.pool.isa(), self.pool.threads())
    }

    fn scratch_bytes(&self, kernel: &Kernel, _: DType) -> u64 {
        scratch_bytes(kernel, self.pool.threads())
    }

    fn enqueue(&mut self, _queue: Queue, launch: &Launch) -> Result<(), DeviceError> {
        Self::check(launch)?;
        let what = launch.kernel.name();
        let cx = CpuLaunch { arenas: &self.arenas, pool: &self.pool, what, scratch: launch.scratch };
        with_operands!(launch.kernel, operands => {
            // SAFETY: checked just now, and this call borrows the arenas exclusively.
            unsafe { typed!(launch.dtype, T => operands.run::<T>(&cx)) }
        })
    }

    fn upload(&mut self, _queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError> {
        // SAFETY: the arena is borrowed for as long as the slice is.
        let bytes = unsafe { self.arenas[to.tier].slice_mut::<u8>(to)? };
        same_length("upload", from.len(), bytes.len())?;
        copy(&self.pool, from, bytes);
        Ok(())
    }

    fn download(&mut self, _queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError> {
        let bytes = self.arenas[from.tier].bytes_mut(from)?;
        same_length("download", bytes.len(), to.len())?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn start_readback(&mut self, _queue: Queue, from: Span, number: usize) -> Result<(), DeviceError> {
        let bytes = self.arenas[from.tier].bytes_mut(from)?;
        self.readbacks[number].clear();
        self.readbacks[number].extend_from_slice(bytes);
        Ok(())
    }

    fn finish_readback(&mut self, number: usize) -> Result<&[u8], DeviceError> {
        Ok(&self.readbacks[number])
    }

    fn record_event(&mut self, _queue: Queue, _event: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait_event(&mut self, _queue: Queue, _event: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn reserve_events(&mut self, _count: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn synchronise(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn direct(&mut self, read: Span, write: Span) -> Result<Option<ReadWrite<'_>>, DeviceError> {
        if read.overlaps(write) {
            let problem = format!("{read:?} and {write:?} overlap, and one of them is written");
            return Err(DeviceError::Operands { what: "direct", problem });
        }
        // SAFETY: they do not overlap, and the arenas are borrowed for as long as the slices are.
        unsafe { Ok(Some((self.arenas[read.tier].slice(read)?, self.arenas[write.tier].slice_mut(write)?))) }
    }

    fn direct_mut(&mut self, span: Span) -> Result<Option<&mut [u8]>, DeviceError> {
        self.arenas[span.tier].bytes_mut(span).map(Some)
    }

    fn capacity(&self, tier: Tier) -> u64 {
        self.arenas[tier].capacity()
    }

    fn share(&mut self, shared: &Shared<'_>) -> Result<bool, DeviceError> {
        self.arenas[Tier::Device].share(shared).map(|()| true)
    }

    fn map_peers(
        &mut self,
        at: u64,
        bytes: u64,
        peer_mappings: &[PeerMapping<'_>],
    ) -> Result<bool, DeviceError> {
        self.arenas[Tier::Device].map_peers(at, bytes, peer_mappings)
    }

    fn pin_and_prefault(&mut self, share: Option<CpuShare>) {
        if let Some(share) = share {
            self.pool.pin(share);
        }
        self.arenas.values_mut().for_each(|arena| arena.prefault(&self.pool));
    }

    fn sum_ranks(&mut self, _queue: Queue, sum: &RankSum<'_>) -> Result<(), DeviceError> {
        let pairs = [(sum.own, Some(sum.to)), (sum.own, sum.squares), (sum.to, sum.squares)];
        for (one, other) in pairs.into_iter().filter_map(|(one, other)| Some((one, other?))) {
            if one.overlaps(other) {
                let problem = format!("{one:?} and {other:?} overlap, and one of them is written");
                return Err(DeviceError::Operands { what: "sum over ranks", problem });
            }
        }
        typed!(sum.from_type, A => typed!(sum.to_type, B => {
            // SAFETY: they do not overlap, and this call borrows the arenas exclusively.
            let (own, to) = unsafe {
                (self.arenas[sum.own.tier].slice::<A>(sum.own)?, self.arenas[sum.to.tier].slice_mut::<B>(sum.to)?)
            };
            let part = |rank: usize| {
                if rank == sum.rank { own } else { bytemuck::cast_slice((sum.other)(rank)) }
            };
            let squares = match sum.squares {
                // SAFETY: as above.
                Some(span) => unsafe { self.arenas[span.tier].slice_mut::<ExactSum>(span)? }.first_mut(),
                None => None,
            };
            sum_parts(&self.pool, sum.ranks, part, to, sum.add, squares);
        }));
        Ok(())
    }
}

fn same_length(what: &'static str, from: usize, to: usize) -> Result<(), DeviceError> {
    if from == to {
        return Ok(());
    }
    Err(DeviceError::Operands { what, problem: format!("{from} bytes do not fill a span of {to}") })
}
