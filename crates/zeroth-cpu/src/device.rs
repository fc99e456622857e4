//! The CPU as a [`Device`]: kernels run synchronously when they are enqueued, on the caller's thread and its pool.
//!
//! All queues execute in the order of the calls, so that events are no-ops. Before a kernel runs, its operands are checked: they
//! are inside their arenas, and no written operand overlaps another. That makes every launch memory-safe.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

mod attention;
mod distill;
mod experts;
mod head_loss;
mod optimize;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use zeroth_base::DType;

use super::Arena;
use super::activation::{activation as run_activation, activation_backward, scale};
use super::convert::{check_finite, convert, convert_and_check_finite, copy, fill, sum, sum_ranks};
use super::dropout::{Dropout, dropout};
use super::embedding::{embedding, embedding_backward, embedding_backward_tied};
use super::gated_activation::{gated_activation, gated_activation_backward};
use super::head_loss::head_loss;
use super::head_norm_rope::{head_norm_rope, head_norm_rope_backward};
use super::isa::Isa;
use super::linear::{linear, linear_add, linear_db, linear_dw, linear_dw_rounded, linear_dx};
use super::logits::logits;
use super::nf4::unpack_nf4;
use super::norm::block_squares;
use super::pool::Pool;
use super::rank_sum::sum_parts;
use super::rms_norm::{rms_norm, rms_norm_backward, rms_norm_residual};
use super::rope::rope_from;
use zeroth_kernel::Element;
use zeroth_kernel::READBACKS;
use zeroth_kernel::RowKey;
use zeroth_kernel::{
    Access, CpuShare, Device, DeviceError, GradStore, Kernel, Launch, PeerMapping, Queue, RankSum, ReadWrite,
    Recipe, Record, Shared, Span, TiedRowsIn, Tier,
};
use zeroth_kernel::{BLOCK, ExactSum};
use zeroth_kernel::{RankReport, decide};

/// Most operands of a kernel, scratch included.
const OPERANDS: usize = 16;

/// Evaluates an expression with the Rust type of a dtype.
macro_rules! typed {
    ($dtype:expr, $name:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $name = f32;
                $body
            }
            DType::Bf16 => {
                type $name = bf16;
                $body
            }
            DType::F16 => {
                type $name = f16;
                $body
            }
        }
    };
}

/// The CPU with its arenas.
pub struct CpuDevice {
    pool: Pool,
    device: Arena,
    host: Arena,
    readbacks: [Vec<u8>; READBACKS],
}

impl CpuDevice {
    /// A device with a pool of `threads` and arenas of these sizes.
    pub fn new(threads: usize, device_bytes: u64, host_bytes: u64) -> Result<Self, DeviceError> {
        Isa::chosen()?;
        Self::on_pool(Pool::start(threads)?, device_bytes, host_bytes)
    }

    /// A device on an existing pool.
    pub fn on_pool(pool: Pool, device_bytes: u64, host_bytes: u64) -> Result<Self, DeviceError> {
        let (device, host) = (Arena::new("device", device_bytes)?, Arena::new("host", host_bytes)?);
        Ok(Self { pool, device, host, readbacks: std::array::from_fn(|_| Vec::new()) })
    }

    /// Address and bytes of an arena's mapping.
    pub fn mapping(&self, tier: Tier) -> (usize, usize) {
        self.arena(tier).mapping()
    }

    fn arena(&self, tier: Tier) -> &Arena {
        match tier {
            Tier::Device => &self.device,
            Tier::Host => &self.host,
        }
    }

    fn arena_mut(&mut self, tier: Tier) -> &mut Arena {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
        }
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

    /// # Safety
    /// The launch has been checked, and `span` is one of its operands that it reads.
    unsafe fn read<'a, T: Pod>(&self, span: Span) -> Result<&'a [T], DeviceError> {
        // SAFETY: no written operand of the launch overlaps it, and `enqueue` borrows the arena exclusively.
        unsafe { self.arena(span.tier).slice(span) }
    }

    /// # Safety
    /// The launch has been checked, and `span` is one of its operands that it writes, taken once.
    unsafe fn write<'a, T: Pod>(&self, span: Span) -> Result<&'a mut [T], DeviceError> {
        // SAFETY: no other operand of the launch overlaps it, and `enqueue` borrows the arena exclusively.
        unsafe { self.arena(span.tier).slice_mut(span) }
    }

    /// # Safety
    /// As [`Self::read`], for one struct.
    unsafe fn read_one<'a, T: Pod>(&self, span: Span) -> Result<&'a T, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.read::<T>(span) }?.first().ok_or_else(|| empty_span(span))
    }

    /// # Safety
    /// As [`Self::write`], for one struct.
    unsafe fn write_one<'a, T: Pod>(&self, span: Span) -> Result<&'a mut T, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.write::<T>(span) }?.first_mut().ok_or_else(|| empty_span(span))
    }

    /// # Safety
    /// The launch has been checked.
    #[allow(clippy::many_single_char_names, reason = "operands have the names of the formulas")]
    unsafe fn run<T: Element + Pod>(&self, launch: &Launch) -> Result<(), DeviceError> {
        let pool = &self.pool;
        // SAFETY: the launch has been checked, and each operand below is taken once, with the access that `Kernel::operands`
        // lists.
        unsafe {
            let scratch = || self.write::<f32>(launch.scratch);
            match launch.kernel {
                Kernel::Embedding { dims, rows, ids, table, y } => {
                    let ids: &[i32] = self.read(ids)?;
                    embedding(pool, dims, &ids[..rows], self.read::<T>(table)?, self.write(y)?);
                }
                Kernel::EmbeddingBackward { dims, rows, ids, dy, dtable, tied_rows } => {
                    let ids: &[i32] = self.read(ids)?;
                    let (ids, dy) = (&ids[..rows], self.read::<T>(dy)?);
                    match tied_rows {
                        None => embedding_backward(pool, dims, ids, dy, self.write(dtable)?),
                        Some(TiedRowsIn { rows, found_inf }) => {
                            let (rows, dtable) = (self.write(rows)?, self.write(dtable)?);
                            if embedding_backward_tied(pool, dims, ids, dy, rows, dtable) {
                                *self.write_one::<u64>(found_inf)? = 1;
                            }
                        }
                    }
                }
                Kernel::Linear { dims, x, w, bias, y } => {
                    let bias = bias.map(|bias| self.read::<T>(bias)).transpose()?;
                    linear(pool, dims, self.read(x)?, self.read(w)?, bias, self.write(y)?, scratch()?);
                }
                Kernel::LinearAdd { dims, scale, x, w, y } => {
                    let (x, w) = (self.read::<T>(x)?, self.read(w)?);
                    linear_add(pool, dims, scale, x, w, self.write(y)?, scratch()?);
                }
                Kernel::LinearDx { dims, scale, dy, w, dx, add } => {
                    let (dy, w) = (self.read::<T>(dy)?, self.read(w)?);
                    linear_dx(pool, dims, scale, dy, w, self.write(dx)?, add, scratch()?);
                }
                Kernel::LinearDw { dims, scale, dy, x, dw, store } => {
                    let (dy, x, s) = (self.read::<T>(dy)?, self.read(x)?, scratch()?);
                    match store {
                        GradStore::Add => linear_dw(pool, dims, scale, dy, x, self.write(dw)?, s),
                        GradStore::Write => {
                            linear_dw_rounded::<T, f32>(pool, dims, scale, dy, x, self.write(dw)?, s);
                        }
                        GradStore::Round { to, found_inf } => {
                            let found = if to == DType::F32 {
                                linear_dw_rounded::<T, f32>(pool, dims, scale, dy, x, self.write(dw)?, s)
                            } else if to == T::DTYPE {
                                linear_dw_rounded::<T, T>(pool, dims, scale, dy, x, self.write(dw)?, s)
                            } else {
                                let problem = format!("matmuls of {} are not rounded to {to}", T::DTYPE);
                                return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
                            };
                            if found {
                                *self.write_one::<u64>(found_inf)? = 1;
                            }
                        }
                    }
                }
                Kernel::LinearDb { dims, dy, db } => {
                    linear_db::<T>(pool, dims, self.read(dy)?, self.write(db)?, scratch()?);
                }
                Kernel::RmsNorm { dims, x, w, y, rstd } => {
                    rms_norm::<T>(
                        pool,
                        dims,
                        self.read(x)?,
                        self.read(w)?,
                        self.write(y)?,
                        self.write(rstd)?,
                    );
                }
                Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd } => rms_norm_residual::<T>(
                    pool,
                    dims,
                    self.read(x)?,
                    self.read(residual)?,
                    self.read(w)?,
                    self.write(h)?,
                    self.write(y)?,
                    self.write(rstd)?,
                ),
                Kernel::RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw } => {
                    let residual = residual.map(|residual| self.read::<T>(residual)).transpose()?;
                    rms_norm_backward(
                        pool,
                        dims,
                        self.read(dy)?,
                        self.read(h)?,
                        self.read(rstd)?,
                        self.read(w)?,
                        residual,
                        dh.map(|dh| self.write(dh)).transpose()?,
                        dw.map(|dw| self.write(dw)).transpose()?,
                        scratch()?,
                    );
                }
                Kernel::HeadNormRope { dims, x, w, cos, sin, y, rstd } => {
                    let (x, w, cos, sin) =
                        (self.read::<T>(x)?, self.read(w)?, self.read(cos)?, self.read(sin)?);
                    head_norm_rope(pool, dims, x, w, cos, sin, self.write(y)?, self.write(rstd)?);
                }
                Kernel::HeadNormRopeBackward { dims, dy, h, rstd, w, cos, sin, dh, dw } => {
                    let (dy, h, rstd, w) =
                        (self.read::<T>(dy)?, self.read(h)?, self.read(rstd)?, self.read(w)?);
                    let (cos, sin) = (self.read(cos)?, self.read(sin)?);
                    let dh = dh.map(|dh| self.write(dh)).transpose()?;
                    let dw = dw.map(|dw| self.write(dw)).transpose()?;
                    head_norm_rope_backward(pool, dims, dy, h, rstd, w, cos, sin, dh, dw, scratch()?);
                }
                Kernel::Rope { dims, cos, sin, x, y, back } => {
                    let (cos, sin) = (self.read(cos)?, self.read(sin)?);
                    rope_from::<T>(pool, dims, cos, sin, back, self.read(x)?, self.write(y)?);
                }
                Kernel::Attention { .. }
                | Kernel::AttentionBackward { .. }
                | Kernel::PositionBias { .. }
                | Kernel::PositionBiasBackward { .. }
                | Kernel::StoreRows { .. }
                | Kernel::CachedAttention { .. } => self.run_attention::<T>(launch)?,
                Kernel::Activation { activation, x, y } => {
                    run_activation::<T>(pool, activation, self.read(x)?, self.write(y)?);
                }
                Kernel::ActivationBackward { activation, dy, x, dx } => {
                    let (dy, x) = (self.read(dy)?, self.read(x)?);
                    activation_backward::<T>(pool, activation, dy, x, self.write(dx)?);
                }
                Kernel::Scale { factor, x, y } => {
                    scale::<T>(pool, factor, self.read(x)?, self.write(y)?);
                }
                Kernel::GatedActivation { activation, gate, up, y } => {
                    let (gate, up) = (self.read(gate)?, self.read(up)?);
                    gated_activation::<T>(pool, activation, gate, up, self.write(y)?);
                }
                Kernel::GatedActivationBackward { activation, dy, gate, up, dgate, dup } => {
                    let (dy, gate, up) = (self.read(dy)?, self.read(gate)?, self.read(up)?);
                    let (dgate, dup) = (self.write(dgate)?, self.write(dup)?);
                    gated_activation_backward::<T>(pool, activation, dy, gate, up, dgate, dup);
                }
                Kernel::Dropout { probability, seed, op, width, row_stride, keys, x, y } => {
                    let keys = self.read::<RowKey>(keys)?;
                    dropout::<T>(
                        pool,
                        Dropout { probability, seed, op },
                        keys,
                        [width, row_stride],
                        self.read(x)?,
                        self.write(y)?,
                    );
                }
                Kernel::HeadLoss { dims, x, w, labels, loss } => {
                    *self.write_one::<f64>(loss)? += head_loss::<T>(
                        pool,
                        dims,
                        self.read(x)?,
                        self.read(w)?,
                        self.read(labels)?,
                        scratch()?,
                    );
                }
                Kernel::HeadLossBackward { .. } => self.run_head_loss_backward::<T>(launch)?,
                Kernel::DistillLossBackward { .. } | Kernel::TopLogProbs { .. } => {
                    self.run_distill::<T>(launch)?;
                }
                Kernel::Route { .. }
                | Kernel::RouteBackward { .. }
                | Kernel::GatherRows { .. }
                | Kernel::CombineRows { .. }
                | Kernel::GroupedLinear { .. }
                | Kernel::GroupedLinearAdd { .. }
                | Kernel::GroupedLinearDx { .. }
                | Kernel::GroupedLinearDw { .. }
                | Kernel::GatedRows { .. }
                | Kernel::GatedRowsBackward { .. }
                | Kernel::BalanceLoss { .. }
                | Kernel::BalanceLossBackward { .. } => self.run_experts::<T>(launch)?,
                Kernel::Logits { dims, starts, x, w, logits: to } => {
                    let starts = self.starts(starts)?;
                    logits::<T>(
                        pool,
                        dims,
                        starts,
                        self.read(x)?,
                        self.read(w)?,
                        self.write(to)?,
                        scratch()?,
                    );
                }
                Kernel::Sum { a, b, y } => sum::<T>(pool, self.read(a)?, self.read(b)?, self.write(y)?),
                Kernel::Zero { to } => fill(pool, 0u8, self.write(to)?),
                Kernel::Convert { from, from_type, to, to_type, found_inf: None } if from_type == to_type => {
                    copy::<u8>(pool, self.read(from)?, self.write(to)?);
                }
                Kernel::Convert { from, from_type, to, to_type, found_inf } => {
                    typed!(from_type, A => typed!(to_type, B => {
                        let (from, to) = (self.read::<A>(from)?, self.write::<B>(to)?);
                        match found_inf {
                            None => convert(pool, from, to),
                            Some(found_inf) => {
                                let found_inf = self.write_one::<u64>(found_inf)?;
                                if convert_and_check_finite(pool, from, to) {
                                    *found_inf = 1;
                                }
                            }
                        }
                    }));
                }
                Kernel::Unpack { records, y } => unpack_nf4::<T>(pool, self.read(records)?, self.write(y)?),
                Kernel::CheckFinite { values, value_type, found_inf } => typed!(value_type, A => {
                    if check_finite::<A>(pool, self.read(values)?) {
                        *self.write_one::<u64>(found_inf)? = 1;
                    }
                }),
                Kernel::SumRanks { parts, from_type, to, to_type, add, .. } => {
                    typed!(from_type, A => typed!(to_type, B => {
                        sum_ranks::<A, B>(pool, self.read(parts)?, self.write(to)?, add);
                    }));
                }
                Kernel::Squares { values, value_type, sum } => {
                    let blocks = (values.bytes / value_type.bytes()).div_ceil(BLOCK as u64);
                    let sums = self.write::<f64>(launch.scratch.part(0, blocks, 8))?;
                    typed!(value_type, A => block_squares::<A>(pool, self.read(values)?, sums));
                    let total = self.write_one::<ExactSum>(sum)?;
                    *total = ExactSum::zeroed();
                    for sum in sums {
                        total.add(*sum);
                    }
                }
                Kernel::CountTokens { experts, slots, offsets, weights, counts } => {
                    let offsets = self.read::<i32>(offsets.part(0, experts as u64 + 1, 4))?;
                    let weights = self.read::<f32>(weights.part(0, slots as u64, 4))?;
                    let counts = self.write::<u32>(counts.part(0, experts as u64 + 1, 4))?;
                    for (count, ends) in counts.iter_mut().zip(offsets.windows(2)) {
                        *count = count.wrapping_add((ends[1] - ends[0]) as u32);
                    }
                    let lost = weights.iter().filter(|weight| !weight.is_finite()).count();
                    counts[experts] = counts[experts].wrapping_add(lost as u32);
                }
                Kernel::Control { ranks, layout, recipe, input, reports, control, record } => {
                    let expected = (layout.bytes() * ranks) as u64;
                    assert_eq!(reports.bytes, expected, "{ranks} reports of {layout:?}");
                    let [sums, flags, counts] = [layout.sum(0), layout.flag(0), layout.count(0)];
                    let all = self.read::<u8>(reports)?;
                    let reports = all.chunks_exact(layout.bytes()).map(|bytes| RankReport {
                        losses: bytemuck::cast_slice(&bytes[..sums]),
                        sums: bytemuck::cast_slice(&bytes[sums..flags]),
                        flags: bytemuck::cast_slice(&bytes[flags..counts]),
                        counts: bytemuck::cast_slice(&bytes[counts..layout.count(layout.counts)]),
                    });
                    let head = size_of::<Record>() as u64;
                    let numbers = (layout.losses + layout.flats) as u64;
                    let (losses, norms) =
                        self.write(record.part(head / 8, numbers, 8))?.split_at_mut(layout.losses);
                    let first = layout.recorded_counts() as u64 / 4;
                    let counts = self.write(record.part(first, layout.counts as u64, 4))?;
                    let (recipe, input) = (self.read_one::<Recipe>(recipe)?, self.read_one(input)?);
                    let control = self.write_one(control)?;
                    let decided = decide(recipe, input, &reports, control, losses, norms, counts);
                    *self.write_one(record.part(0, 1, head))? = decided;
                }
                Kernel::Optimize { grad_type, moment_type: DType::F32, .. } => {
                    typed!(grad_type, G => self.optimize::<G, f32, T>(&launch.kernel)?);
                }
                Kernel::Optimize { grad_type, moment_type: DType::Bf16, .. } => {
                    typed!(grad_type, G => self.optimize::<G, bf16, T>(&launch.kernel)?);
                }
                Kernel::Optimize { moment_type: DType::F16, .. } => {
                    let problem = "moments are fp32 or bf16: those of fp16 would overflow".to_owned();
                    return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::read`], for a table of sequence starts with its number of entries first.
    unsafe fn starts<'a>(&self, span: Span) -> Result<&'a [u32], DeviceError> {
        // SAFETY: the caller's promise.
        let table: &[u32] = unsafe { self.read(span) }?;
        let entries = table.split_first().and_then(|(count, starts)| starts.get(..*count as usize));
        entries.ok_or_else(|| DeviceError::Operands {
            what: "starts",
            problem: format!("the table of sequence starts at {span:?} declares more entries than it holds"),
        })
    }
}

fn empty_span(span: Span) -> DeviceError {
    DeviceError::Operands { what: "arena", problem: format!("{span:?} is empty") }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu, {}, {} thread(s)", self.pool.isa(), self.pool.threads())
    }

    fn scratch_bytes(&self, kernel: &Kernel, _: DType) -> u64 {
        crate::scratch_bytes(kernel, self.pool.threads())
    }

    fn enqueue(&mut self, _queue: Queue, launch: &Launch) -> Result<(), DeviceError> {
        Self::check(launch)?;
        // SAFETY: checked just now, and this call borrows the arenas exclusively.
        unsafe { typed!(launch.dtype, T => self.run::<T>(launch)) }
    }

    fn upload(&mut self, _queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError> {
        // SAFETY: the arena is borrowed for as long as the slice is.
        let bytes = unsafe { self.arena(to.tier).slice_mut::<u8>(to)? };
        same_length("upload", from.len(), bytes.len())?;
        copy(&self.pool, from, bytes);
        Ok(())
    }

    fn download(&mut self, _queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError> {
        let bytes = self.arena_mut(from.tier).bytes_mut(from)?;
        same_length("download", bytes.len(), to.len())?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn start_readback(&mut self, _queue: Queue, from: Span, number: usize) -> Result<(), DeviceError> {
        let arena = match from.tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
        };
        let bytes = arena.bytes_mut(from)?;
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
        unsafe { Ok(Some((self.arena(read.tier).slice(read)?, self.arena(write.tier).slice_mut(write)?))) }
    }

    fn direct_mut(&mut self, span: Span) -> Result<Option<&mut [u8]>, DeviceError> {
        self.arena_mut(span.tier).bytes_mut(span).map(Some)
    }

    fn capacity(&self, tier: Tier) -> u64 {
        self.arena(tier).capacity()
    }

    fn share(&mut self, shared: &Shared<'_>) -> Result<bool, DeviceError> {
        self.device.share(shared).map(|()| true)
    }

    fn map_peers(
        &mut self,
        at: u64,
        bytes: u64,
        peer_mappings: &[PeerMapping<'_>],
    ) -> Result<bool, DeviceError> {
        self.device.map_peers(at, bytes, peer_mappings)
    }

    fn pin_and_prefault(&mut self, share: Option<CpuShare>) {
        if let Some(share) = share {
            self.pool.pin(share);
        }
        self.device.prefault(&self.pool);
        self.host.prefault(&self.pool);
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
            let (own, to) = unsafe { (self.read::<A>(sum.own)?, self.write::<B>(sum.to)?) };
            let part = |rank: usize| {
                if rank == sum.rank { own } else { bytemuck::cast_slice((sum.other)(rank)) }
            };
            // SAFETY: as above.
            let squares = sum.squares.map(|squares| unsafe { self.write_one::<ExactSum>(squares) }).transpose()?;
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
