//! Context of one launch: resolves operands to checked addresses and launches kernels on a stream.

use zeroth_base::DType;

use super::arenas::Arenas;
use super::driver::{Address, Driver, Handle};
use super::entry_points::EntryPoint;
use super::modules::Modules;
use super::tensor_map::TensorMap;
use zeroth_kernel::{Access, DeviceError, Launch, Span};

/// Threads per block of most kernels.
pub(super) const THREADS: u32 = 256;
/// Threads per warp.
pub(super) const WARP: u32 = 32;
/// Elements per thread in vectorized kernels (`VEC` in prelude.cu).
pub(super) const VEC: usize = 8;

/// Alignment of every allocation in scratch.
pub(super) const ALIGNMENT: u64 = 256;

/// Everything that the launch of one kernel needs.
pub(super) struct LaunchContext<'a> {
    pub(super) driver: &'a Driver,
    pub(super) modules: &'a Modules,
    pub(super) arenas: Arenas,
    pub(super) stream: Handle,
    pub(super) what: &'static str,
    pub(super) dtype: DType,
    pub(super) scratch: Scratch,
}

impl<'a> LaunchContext<'a> {
    pub(super) fn new(
        driver: &'a Driver,
        modules: &'a Modules,
        arenas: Arenas,
        stream: Handle,
        launch: &Launch,
    ) -> Result<Self, DeviceError> {
        let what = launch.kernel.name();
        check_overlaps(launch)?;
        let scratch = Scratch::new(what, arenas.find(what, launch.scratch)?, launch.scratch.bytes);
        Ok(Self { driver, modules, arenas, stream, what, dtype: launch.dtype, scratch })
    }

    pub(super) fn invalid(&self, problem: String) -> DeviceError {
        DeviceError::Operands { what: self.what, problem }
    }

    /// The address of a buffer of `elements` elements of `size` bytes each.
    pub(super) fn sized(
        &self,
        name: &'static str,
        span: Span,
        elements: usize,
        size: u64,
    ) -> Result<Address, DeviceError> {
        let at = self.arenas.find(self.what, span)?;
        if elements as u64 * size != span.bytes {
            return Err(self.invalid(format!(
                "`{name}` has {} bytes; its shape needs {elements} elements of {size} bytes",
                span.bytes
            )));
        }
        if !at.is_multiple_of(size.min(8)) {
            return Err(self.invalid(format!("`{name}` at {} is not aligned to {size} bytes", span.at)));
        }
        Ok(at)
    }

    /// The address of a buffer of the launch's data type.
    pub(super) fn typed(
        &self,
        name: &'static str,
        span: Span,
        elements: usize,
    ) -> Result<Address, DeviceError> {
        self.sized(name, span, elements, self.dtype.bytes())
    }

    /// The address of a buffer of f32 or i32.
    pub(super) fn words(
        &self,
        name: &'static str,
        span: Span,
        elements: usize,
    ) -> Result<Address, DeviceError> {
        self.sized(name, span, elements, 4)
    }

    /// The address of a struct shared with the kernels; the span may be longer.
    pub(super) fn structure<T>(&self, name: &'static str, span: Span) -> Result<Address, DeviceError> {
        let at = self.arenas.find(self.what, span)?;
        if span.bytes < size_of::<T>() as u64 || !at.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.invalid(format!("`{name}` is {span:?}; it needs {} bytes", size_of::<T>())));
        }
        Ok(at)
    }

    /// The number of elements of a data type in a span.
    pub(super) fn count(&self, name: &'static str, span: Span, dtype: DType) -> Result<usize, DeviceError> {
        if !span.bytes.is_multiple_of(dtype.bytes()) {
            return Err(self.invalid(format!(
                "`{name}` has {} bytes, not a multiple of the size of {dtype}",
                span.bytes
            )));
        }
        Ok((span.bytes / dtype.bytes()) as usize)
    }

    /// Enqueues a copy between ranges checked by the caller.
    #[allow(unsafe_code, reason = "both ranges are within arenas")]
    pub(super) fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: arenas live as long as the device, which synchronizes its streams before it frees them.
        unsafe { self.driver.copy(to, from, bytes, self.stream) }
    }

    /// Enqueues a kernel; an empty grid is a no-op.
    pub(super) fn run(
        &self,
        entry: EntryPoint,
        types: &[DType],
        grid: [usize; 3],
        threads: u32,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.launch(self.modules.get(entry, types), grid, threads, 0, arguments)
    }

    /// Enqueues a function with `shared` bytes of dynamic shared memory per block; an empty grid is a no-op.
    pub(super) fn launch(
        &self,
        function: Handle,
        grid: [usize; 3],
        threads: u32,
        shared: u32,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.launch_with_maps(function, grid, threads, shared, &[], arguments)
    }

    /// Enqueues a function whose first parameters are tensor maps.
    #[allow(unsafe_code, reason = "callers check the buffers that a kernel accesses")]
    pub(super) fn launch_with_maps(
        &self,
        function: Handle,
        grid: [usize; 3],
        threads: u32,
        shared: u32,
        maps: &[TensorMap],
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let [x, y, z] = grid;
        if x > i32::MAX as usize || y > 65_535 || z > 65_535 {
            return Err(self.invalid(format!("the shape needs a grid of {x} × {y} × {z} blocks")));
        }
        // SAFETY: callers pass addresses of operands whose lengths they have checked against the sizes that they pass.
        unsafe {
            let grid = [x as u32, y as u32, z as u32];
            self.driver.launch(function, grid, threads, shared, (maps, arguments), self.stream)
        }
    }

    /// Enqueues a kernel with one thread per [`VEC`] elements.
    pub(super) fn run_vectorized(
        &self,
        entry: EntryPoint,
        types: &[DType],
        elements: usize,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.run_elementwise(entry, types, elements.div_ceil(VEC), arguments)
    }

    /// Enqueues a kernel with one thread per element.
    pub(super) fn run_elementwise(
        &self,
        entry: EntryPoint,
        types: &[DType],
        elements: usize,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.run(entry, types, [elements.div_ceil(THREADS as usize), 1, 1], THREADS, arguments)
    }

    /// Enqueues a kernel with one warp per row.
    pub(super) fn run_rowwise(
        &self,
        entry: EntryPoint,
        rows: usize,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        let rows_per_block = (THREADS / WARP) as usize;
        self.run(entry, &[self.dtype], [rows.div_ceil(rows_per_block), 1, 1], THREADS, arguments)
    }
}

/// Whether all addresses are 16-byte aligned, as vectorized accesses require.
pub(super) fn aligned16(addresses: &[Address]) -> bool {
    addresses.iter().all(|at| at.is_multiple_of(16))
}

/// An f32 kernel argument.
pub(super) fn float(value: f32) -> u64 {
    u64::from(value.to_bits())
}

/// A bump allocator over the scratch of one launch.
pub(super) struct Scratch {
    what: &'static str,
    next: Address,
    end: Address,
}

impl Scratch {
    pub(super) const fn new(what: &'static str, at: Address, bytes: u64) -> Self {
        Self { what, next: at, end: at + bytes }
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<Address, DeviceError> {
        let at = self.next.next_multiple_of(ALIGNMENT);
        self.next = at + bytes.next_multiple_of(ALIGNMENT);
        if self.next > self.end {
            let problem = format!("scratch is {} bytes too short", self.next - self.end);
            return Err(DeviceError::Operands { what: self.what, problem });
        }
        Ok(at)
    }
}

/// A written operand must not overlap any other operand. Kernels that touch every element once may write in place, to exactly the
/// same span.
fn check_overlaps(launch: &Launch) -> Result<(), DeviceError> {
    let in_place = launch.kernel.is_in_place();
    let mut operands = [(launch.scratch, Access::Write); 16];
    let mut count = 1;
    launch.kernel.operands(|span, access| {
        operands[count] = (span, access);
        count += 1;
    });
    let operands = &operands[..count];
    for (at, &(one, first)) in operands.iter().enumerate() {
        for &(other, second) in &operands[at + 1..] {
            let both_read = first == Access::Read && second == Access::Read;
            let both_written = first == Access::Write && second == Access::Write;
            if both_read || !one.overlaps(other) || (in_place && !both_written && one == other) {
                continue;
            }
            let problem = format!("{one:?} and {other:?} overlap, and one of them is written");
            return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use zeroth_kernel::Kernel;

    use super::*;

    fn sum(a: Span, b: Span, y: Span) -> Launch {
        Launch { kernel: Kernel::Sum { a, b, y }, dtype: DType::F32, scratch: Span::device(0, 0) }
    }

    #[test]
    fn operands_may_alias_exactly_but_not_overlap() {
        let [a, b] = [Span::device(0, 64), Span::device(64, 64)];
        assert_eq!(check_overlaps(&sum(a, b, a)), Ok(()));
        assert_eq!(check_overlaps(&sum(a, a, b)), Ok(()));
        assert!(check_overlaps(&sum(a, b, Span::device(32, 64))).is_err());
        let control = Span::device(256, 64);
        let mut two = sum(a, b, a);
        let activation = zeroth_base::ActivationFn::Silu;
        two.kernel =
            Kernel::GatedActivationBackward { activation, dy: a, gate: b, up: control, dgate: b, dup: b };
        assert!(check_overlaps(&two).is_err(), "two results in one span");
    }
}
