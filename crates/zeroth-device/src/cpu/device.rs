//! The processor as a device: kernels run where they are enqueued, on the caller's thread and its pool.
//!
//! Queues are one line of work here, in the order of the calls, so a wait has nothing to do. Before a kernel runs, its
//! operands are checked: inside their arenas, and nothing that is written overlaps anything else it touches. That makes
//! every launch safe, whatever a program says.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use bytemuck::{Pod, Zeroable};
use half::bf16;
use zeroth_base::DType;

use super::Arena;
use super::attention::{attention, attention_scratch};
use super::attention_backward::{AttentionSaved, attention_backward, attention_backward_scratch};
use super::convert::{convert, copy, fill, sum, sum_ranks};
use super::dropout::{Dropout, RowKey, dropout};
use super::element::Element;
use super::embedding::{embedding, embedding_backward};
use super::head_loss::{head_loss, head_loss_backward, head_loss_scratch};
use super::linear::{linear, linear_db, linear_dw, linear_dx, linear_scratch};
use super::norm::{BLOCK, ExactSum, block_squares};
use super::optimizer::adamw;
use super::pool::Pool;
use super::rms_norm::{rms_norm, rms_norm_backward, rms_norm_residual, rms_norm_scratch};
use super::rope::{rope, rope_backward};
use super::swiglu::{swiglu, swiglu_backward};
use crate::control::decide;
use crate::{
    Access, Control, Device, DeviceError, Kernel, Launch, Queue, ReadWrite, Recipe, Record, Report, Span,
    StepInput, Tier,
};

/// The most operands a kernel has, scratch included.
const OPERANDS: usize = 13;

/// The processor with its arenas.
pub struct CpuDevice {
    pool: Pool,
    device: Arena,
    host: Arena,
}

impl CpuDevice {
    /// A device with a pool of `threads` and arenas of these sizes.
    pub fn new(threads: usize, device_bytes: u64, host_bytes: u64) -> Result<Self, DeviceError> {
        Self::on_pool(Pool::new(threads), device_bytes, host_bytes)
    }

    /// A device that computes on a pool with its own path.
    pub fn on_pool(pool: Pool, device_bytes: u64, host_bytes: u64) -> Result<Self, DeviceError> {
        Ok(Self { pool, device: Arena::new("device", device_bytes)?, host: Arena::new("host", host_bytes)? })
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

    /// Refuses a launch in which something written overlaps another operand.
    fn check(launch: &Launch) -> Result<(), DeviceError> {
        let mut operands = [(launch.scratch, Access::Write); OPERANDS];
        let mut count = 1;
        launch.kernel.operands(|span, access| {
            operands[count] = (span, access);
            count += 1;
        });
        for (at, (span, access)) in operands[..count].iter().enumerate() {
            for (other, other_access) in &operands[at + 1..count] {
                if (*access == Access::Write || *other_access == Access::Write) && span.meets(*other) {
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
        // SAFETY: nothing that the launch writes overlaps it, and nobody else uses the arena: `enqueue` borrows it.
        unsafe { self.arena(span.tier).slice(span) }
    }

    /// # Safety
    /// The launch has been checked, and `span` is one of its operands that it writes, taken once.
    unsafe fn write<'a, T: Pod>(&self, span: Span) -> Result<&'a mut [T], DeviceError> {
        // SAFETY: no other operand of the launch overlaps it, and nobody else uses the arena: `enqueue` borrows it.
        unsafe { self.arena(span.tier).slice_mut(span) }
    }

    /// # Safety
    /// As [`Self::read`], for one struct.
    unsafe fn read_one<'a, T: Pod>(&self, span: Span) -> Result<&'a T, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.read::<T>(span) }?.first().ok_or_else(|| nothing_at(span))
    }

    /// # Safety
    /// As [`Self::write`], for one struct.
    unsafe fn write_one<'a, T: Pod>(&self, span: Span) -> Result<&'a mut T, DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.write::<T>(span) }?.first_mut().ok_or_else(|| nothing_at(span))
    }

    /// # Safety
    /// The launch has been checked.
    #[allow(clippy::many_single_char_names, reason = "operands have the names of the formulas")]
    unsafe fn run<T: Element + Pod>(&self, launch: &Launch) -> Result<(), DeviceError> {
        let pool = &self.pool;
        // SAFETY: the launch has been checked, and each operand below is taken once, as its kernel says it touches it
        // (`Kernel::operands` is the list the check read; a kernel's arm here takes the same operands).
        unsafe {
            let scratch = || self.write::<f32>(launch.scratch);
            match launch.kernel {
                Kernel::Embedding { dims, rows, ids, table, y } => {
                    let ids: &[i32] = self.read(ids)?;
                    embedding(pool, dims, &ids[..rows], self.read::<T>(table)?, self.write(y)?);
                }
                Kernel::EmbeddingBackward { dims, rows, ids, dy, dtable } => {
                    let ids: &[i32] = self.read(ids)?;
                    embedding_backward(pool, dims, &ids[..rows], self.read::<T>(dy)?, self.write(dtable)?);
                }
                Kernel::Linear { dims, x, w, bias, y } => {
                    let bias = bias.map(|bias| self.read::<T>(bias)).transpose()?;
                    linear(pool, dims, self.read(x)?, self.read(w)?, bias, self.write(y)?, scratch()?);
                }
                Kernel::LinearDx { dims, dy, w, dx, add } => {
                    linear_dx::<T>(
                        pool,
                        dims,
                        self.read(dy)?,
                        self.read(w)?,
                        self.write(dx)?,
                        add,
                        scratch()?,
                    );
                }
                Kernel::LinearDw { dims, dy, x, dw } => {
                    linear_dw::<T>(pool, dims, self.read(dy)?, self.read(x)?, self.write(dw)?, scratch()?);
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
                        self.write(dh)?,
                        self.write(dw)?,
                        scratch()?,
                    );
                }
                Kernel::Rope { dims, cos, sin, x, y, back } => {
                    let y: &mut [T] = self.write(y)?;
                    copy(pool, self.read(x)?, y);
                    let turn = if back { rope_backward } else { rope };
                    turn(pool, dims, self.read(cos)?, self.read(sin)?, y);
                }
                Kernel::Attention { ref dims, starts, q, k, v, y, lse } => attention::<T>(
                    pool,
                    dims,
                    self.starts(starts)?,
                    self.read(q)?,
                    self.read(k)?,
                    self.read(v)?,
                    self.write(y)?,
                    self.write(lse)?,
                    scratch()?,
                ),
                Kernel::AttentionBackward { ref dims, starts, q, k, v, y, lse, dy, dq, dk, dv } => {
                    let saved = AttentionSaved {
                        q: self.read::<T>(q)?,
                        k: self.read(k)?,
                        v: self.read(v)?,
                        out: self.read(y)?,
                        lse: self.read(lse)?,
                    };
                    let (starts, dy) = (self.starts(starts)?, self.read(dy)?);
                    let (dq, dk, dv) = (self.write(dq)?, self.write(dk)?, self.write(dv)?);
                    attention_backward(pool, dims, starts, saved, dy, dq, dk, dv, scratch()?);
                }
                Kernel::SwiGlu { gate, up, y } => {
                    swiglu::<T>(pool, self.read(gate)?, self.read(up)?, self.write(y)?);
                }
                Kernel::SwiGluBackward { dy, gate, up, dgate, dup } => {
                    let (dgate, dup) = (self.write(dgate)?, self.write(dup)?);
                    swiglu_backward::<T>(pool, self.read(dy)?, self.read(gate)?, self.read(up)?, dgate, dup);
                }
                Kernel::Dropout { probability, seed, op, width, keys, x, y } => {
                    let keys = self.read::<RowKey>(keys)?;
                    dropout::<T>(
                        pool,
                        Dropout { probability, seed, op },
                        keys,
                        width,
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
                Kernel::HeadLossBackward { dims, x, w, labels, loss, input, control, dx, dw } => {
                    let weight = self.read_one::<StepInput>(input)?.loss_weight;
                    let scale = (weight * self.read_one::<Control>(control)?.loss_scale) as f32;
                    let (x, w, labels) = (self.read::<T>(x)?, self.read(w)?, self.read(labels)?);
                    let (dx, dw) = (self.write(dx)?, self.write(dw)?);
                    let sum = head_loss_backward(pool, dims, x, w, labels, scale, dx, dw, scratch()?);
                    *self.write_one::<f64>(loss)? += sum;
                }
                Kernel::Sum { a, b, y } => sum::<T>(pool, self.read(a)?, self.read(b)?, self.write(y)?),
                Kernel::Zero { to } => fill(pool, 0u8, self.write(to)?),
                Kernel::Convert { from, from_type, to, to_type } => match (from_type, to_type) {
                    (DType::F32, DType::F32) => copy::<f32>(pool, self.read(from)?, self.write(to)?),
                    (DType::F32, DType::Bf16) => {
                        convert::<f32, bf16>(pool, self.read(from)?, self.write(to)?);
                    }
                    (DType::Bf16, DType::F32) => {
                        convert::<bf16, f32>(pool, self.read(from)?, self.write(to)?);
                    }
                    (DType::Bf16, DType::Bf16) => copy::<u16>(pool, self.read(from)?, self.write(to)?),
                    _ => return Err(no_kernel(launch, DType::F16)),
                },
                Kernel::SumRanks { parts, from_type, to, add, .. } => {
                    let to: &mut [f32] = self.write(to)?;
                    match from_type {
                        DType::F32 => sum_ranks::<f32, f32>(pool, self.read(parts)?, to, add),
                        DType::Bf16 => sum_ranks::<bf16, f32>(pool, self.read(parts)?, to, add),
                        DType::F16 => return Err(no_kernel(launch, from_type)),
                    }
                }
                Kernel::Squares { values, value_type, sum } => {
                    let blocks = (values.bytes / value_type.bytes()).div_ceil(BLOCK as u64);
                    let sums = self.write::<f64>(launch.scratch.part(0, blocks, 8))?;
                    match value_type {
                        DType::F32 => block_squares::<f32>(pool, self.read(values)?, sums),
                        DType::Bf16 => block_squares::<bf16>(pool, self.read(values)?, sums),
                        DType::F16 => return Err(no_kernel(launch, value_type)),
                    }
                    let total = self.write_one::<ExactSum>(sum)?;
                    *total = ExactSum::zeroed();
                    for sum in sums {
                        total.add(*sum);
                    }
                }
                Kernel::Control { ranks, flats, recipe, input, reports, control, record } => {
                    let size = (size_of::<Report>() + flats * size_of::<ExactSum>()) as u64;
                    assert_eq!(reports.bytes, size * ranks as u64, "a report and {flats} sums for each rank");
                    let all = self.read::<u8>(reports)?;
                    let reports = all.chunks_exact(size as usize).map(|report| {
                        let (report, sums) = report.split_at(size_of::<Report>());
                        (bytemuck::from_bytes(report), bytemuck::cast_slice(sums))
                    });
                    let head = size_of::<Record>() as u64;
                    let norms = self.write(record.part(head / 8, flats as u64, 8))?;
                    let (recipe, input) = (self.read_one::<Recipe>(recipe)?, self.read_one(input)?);
                    let decided = decide(recipe, input, &reports, self.write_one(control)?, norms);
                    *self.write_one(record.part(0, 1, head))? = decided;
                }
                Kernel::AdamW { group, control, grads, grad_type, master, first, second, weights } => {
                    let control = self.read_one::<Control>(control)?;
                    if control.apply == 0 {
                        return Ok(());
                    }
                    let (numbers, master) = (control.numbers[group], self.write(master)?);
                    let (first, second) = (self.write(first)?, self.write(second)?);
                    let weights = weights.map(|weights| self.write::<T>(weights)).transpose()?;
                    match grad_type {
                        DType::F32 => {
                            adamw::<f32, T>(pool, numbers, self.read(grads)?, master, first, second, weights);
                        }
                        DType::Bf16 => {
                            adamw::<bf16, T>(
                                pool,
                                numbers,
                                self.read(grads)?,
                                master,
                                first,
                                second,
                                weights,
                            );
                        }
                        DType::F16 => return Err(no_kernel(launch, grad_type)),
                    }
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::read`]: a table of where sequences begin, its number of entries first.
    unsafe fn starts<'a>(&self, span: Span) -> Result<&'a [u32], DeviceError> {
        // SAFETY: the caller's promise.
        let table: &[u32] = unsafe { self.read(span) }?;
        let entries = table.split_first().and_then(|(count, starts)| starts.get(..*count as usize));
        entries.ok_or_else(|| DeviceError::Operands {
            what: "attention",
            problem: format!("the table of sequences at {span:?} says it has more entries than it holds"),
        })
    }
}

fn nothing_at(span: Span) -> DeviceError {
    DeviceError::Operands { what: "arena", problem: format!("{span:?} is empty") }
}

fn no_kernel(launch: &Launch, dtype: DType) -> DeviceError {
    let problem = format!("has no kernel for {dtype} on the processor yet: use bf16 or fp32");
    DeviceError::Operands { what: launch.kernel.name(), problem }
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu, {:?}, {} thread(s)", self.pool.path(), self.pool.threads())
    }

    fn enqueue(&mut self, _queue: Queue, launch: &Launch) -> Result<(), DeviceError> {
        Self::check(launch)?;
        // SAFETY: checked just now, and this call borrows the arenas alone.
        unsafe {
            match launch.dtype {
                DType::F32 => self.run::<f32>(launch),
                DType::Bf16 => self.run::<bf16>(launch),
                DType::F16 => Err(no_kernel(launch, DType::F16)),
            }
        }
    }

    fn upload(&mut self, _queue: Queue, from: &[u8], to: Span) -> Result<(), DeviceError> {
        let bytes = self.arena_mut(to.tier).bytes_mut(to)?;
        same_length("upload", from.len(), bytes.len())?;
        bytes.copy_from_slice(from);
        Ok(())
    }

    fn download(&mut self, _queue: Queue, from: Span, to: &mut [u8]) -> Result<(), DeviceError> {
        let bytes = self.arena_mut(from.tier).bytes_mut(from)?;
        same_length("download", bytes.len(), to.len())?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn mark(&mut self, _queue: Queue, _mark: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait(&mut self, _queue: Queue, _mark: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn marks(&mut self, _count: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn synchronise(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn direct(&mut self, read: Span, write: Span) -> Result<Option<ReadWrite<'_>>, DeviceError> {
        if read.meets(write) {
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
}

fn same_length(what: &'static str, from: usize, to: usize) -> Result<(), DeviceError> {
    if from == to {
        return Ok(());
    }
    Err(DeviceError::Operands { what, problem: format!("{from} bytes do not fill a place of {to}") })
}

/// Bytes of scratch that a kernel needs with a pool of `threads`.
pub(crate) fn scratch_bytes(kernel: &Kernel, threads: usize) -> u64 {
    let floats = |elements: usize| 4 * elements as u64;
    match kernel {
        Kernel::Linear { dims, .. } | Kernel::LinearDx { dims, .. } | Kernel::LinearDw { dims, .. } => {
            floats(linear_scratch(*dims, threads))
        }
        Kernel::LinearDb { dims, .. } => floats(linear_scratch(*dims, threads)),
        Kernel::RmsNormBackward { dims, .. } => floats(rms_norm_scratch(*dims)),
        Kernel::Attention { dims, .. } => floats(attention_scratch(dims, threads)),
        Kernel::AttentionBackward { dims, .. } => floats(attention_backward_scratch(dims, threads)),
        Kernel::HeadLoss { dims, .. } | Kernel::HeadLossBackward { dims, .. } => {
            floats(head_loss_scratch(*dims, threads))
        }
        Kernel::Squares { values, value_type, .. } => {
            8 * (values.bytes / value_type.bytes()).div_ceil(BLOCK as u64)
        }
        _ => 0,
    }
}
