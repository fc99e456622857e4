//! One kernel on its way to a queue: operands become addresses, each checked, and functions are launched.

use zeroth_base::DType;

use super::driver::{Address, Driver, Handle};
use super::programs::{Entry, Functions};
use super::scratch::Scratch;
use zeroth_kernel::{Access, DeviceError, Kernel, Launch, Span, Tier};

/// Threads of a block for work that is cut by elements.
pub(super) const THREADS: u32 = 256;
/// Lanes of a warp.
pub(super) const WARP: u32 = 32;
/// Elements that a thread has at a time where memory is what counts.
pub(super) const LOT: usize = 8;

/// Where the arenas are.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arenas {
    /// First address and bytes of the device's.
    pub(super) device: (Address, u64),
    /// Of the host's.
    pub(super) host: (Address, u64),
}

impl Arenas {
    /// The address of a place, which must lie within its arena.
    pub(super) fn find(&self, what: &'static str, span: Span) -> Result<Address, DeviceError> {
        let (base, bytes) = match span.tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
        };
        if span.at.checked_add(span.bytes).is_none_or(|end| end > bytes) {
            let problem = format!("{span:?} is not within the arena's {bytes} bytes");
            return Err(DeviceError::Operands { what, problem });
        }
        Ok(base + span.at)
    }
}

/// What a launch needs at hand.
pub(super) struct Line<'a> {
    pub(super) driver: &'a Driver,
    pub(super) functions: &'a Functions,
    pub(super) arenas: Arenas,
    pub(super) stream: Handle,
    pub(super) what: &'static str,
    pub(super) dtype: DType,
    pub(super) scratch: Scratch,
}

impl<'a> Line<'a> {
    pub(super) fn new(
        driver: &'a Driver,
        functions: &'a Functions,
        arenas: Arenas,
        stream: Handle,
        launch: &Launch,
    ) -> Result<Self, DeviceError> {
        let what = launch.kernel.name();
        check_overlaps(launch)?;
        let scratch = Scratch::new(what, arenas.find(what, launch.scratch)?, launch.scratch.bytes);
        Ok(Self { driver, functions, arenas, stream, what, dtype: launch.dtype, scratch })
    }

    pub(super) fn refuse(&self, problem: String) -> DeviceError {
        DeviceError::Operands { what: self.what, problem }
    }

    /// The address of `elements` of `size` bytes each.
    pub(super) fn sized(
        &self,
        name: &'static str,
        span: Span,
        elements: usize,
        size: u64,
    ) -> Result<Address, DeviceError> {
        let at = self.arenas.find(self.what, span)?;
        if elements as u64 * size != span.bytes {
            return Err(self.refuse(format!(
                "`{name}` has {} bytes; the sizes given need {elements} elements of {size}",
                span.bytes
            )));
        }
        if !at.is_multiple_of(size.min(8)) {
            return Err(self.refuse(format!("`{name}` at {} is not aligned to {size} bytes", span.at)));
        }
        Ok(at)
    }

    /// Elements of the launch's type.
    pub(super) fn typed(
        &self,
        name: &'static str,
        span: Span,
        elements: usize,
    ) -> Result<Address, DeviceError> {
        self.sized(name, span, elements, self.dtype.bytes())
    }

    /// Elements of f32 or i32.
    pub(super) fn words(
        &self,
        name: &'static str,
        span: Span,
        elements: usize,
    ) -> Result<Address, DeviceError> {
        self.sized(name, span, elements, 4)
    }

    /// One struct that the host shares with the kernels; something may lie behind it.
    pub(super) fn one<T>(&self, name: &'static str, span: Span) -> Result<Address, DeviceError> {
        let at = self.arenas.find(self.what, span)?;
        if span.bytes < size_of::<T>() as u64 || !at.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.refuse(format!("`{name}` is {span:?}; it needs {} bytes", size_of::<T>())));
        }
        Ok(at)
    }

    /// How many elements of a type a span holds.
    pub(super) fn count(&self, name: &'static str, span: Span, dtype: DType) -> Result<usize, DeviceError> {
        if !span.bytes.is_multiple_of(dtype.bytes()) {
            return Err(
                self.refuse(format!("`{name}` has {} bytes, which is no number of {dtype}", span.bytes))
            );
        }
        Ok((span.bytes / dtype.bytes()) as usize)
    }

    /// Enqueues a copy between places that callers have checked.
    #[allow(unsafe_code, reason = "both places lie within arenas")]
    pub(super) fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: an arena lives as long as the device, which waits for its streams before it gives one back.
        unsafe { self.driver.copy(to, from, bytes, self.stream) }
    }

    /// Enqueues a function; a grid of nothing is nothing to do.
    pub(super) fn run(
        &self,
        entry: Entry,
        types: &[DType],
        grid: [usize; 3],
        threads: u32,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.launch(self.functions.get(entry, types), grid, threads, 0, arguments)
    }

    /// As `run`, of a function at hand, with so many bytes of shared memory for each block beside what it declares.
    #[allow(unsafe_code, reason = "what a kernel touches is checked by whoever asks for it")]
    pub(super) fn launch(
        &self,
        function: Handle,
        grid: [usize; 3],
        threads: u32,
        shared: u32,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let [x, y, z] = grid;
        if x > i32::MAX as usize || y > 65_535 || z > 65_535 {
            return Err(self.refuse(format!("the sizes given need a grid of {x} × {y} × {z} blocks")));
        }
        // SAFETY: callers pass addresses of operands whose lengths they have checked against the sizes that they pass.
        unsafe {
            let grid = [x as u32, y as u32, z as u32];
            self.driver.launch(function, grid, threads, shared, arguments, self.stream)
        }
    }

    /// Enqueues a function with a thread for every eight elements.
    pub(super) fn lots(
        &self,
        entry: Entry,
        types: &[DType],
        elements: usize,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.each(entry, types, elements.div_ceil(LOT), arguments)
    }

    /// Enqueues a function with a thread an element.
    pub(super) fn each(
        &self,
        entry: Entry,
        types: &[DType],
        elements: usize,
        arguments: &[u64],
    ) -> Result<(), DeviceError> {
        self.run(entry, types, [elements.div_ceil(THREADS as usize), 1, 1], THREADS, arguments)
    }

    /// Enqueues a function with a warp a row.
    pub(super) fn warps(&self, entry: Entry, rows: usize, arguments: &[u64]) -> Result<(), DeviceError> {
        let rows_of_block = (THREADS / WARP) as usize;
        self.run(entry, &[self.dtype], [rows.div_ceil(rows_of_block), 1, 1], THREADS, arguments)
    }
}

/// Whether all addresses are multiples of 16 bytes, which is what a thread moves at once.
pub(super) fn in_sixteens(addresses: &[Address]) -> bool {
    addresses.iter().all(|at| at.is_multiple_of(16))
}

/// An argument that is a number in f32.
pub(super) fn float(value: f32) -> u64 {
    u64::from(value.to_bits())
}

/// What is written may share no byte with any other operand. Kernels that have an element in hand only once may write
/// where they read, but then to the very same place.
fn check_overlaps(launch: &Launch) -> Result<(), DeviceError> {
    let in_place = matches!(
        launch.kernel,
        Kernel::Rope { .. }
            | Kernel::RmsNorm { .. }
            | Kernel::AddRmsNorm { .. }
            | Kernel::RmsNormBackward { .. }
            | Kernel::SwiGlu { .. }
            | Kernel::SwiGluBackward { .. }
            | Kernel::Dropout { .. }
            | Kernel::Sum { .. }
    );
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
            if both_read || !one.meets(other) || (in_place && !both_written && one == other) {
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
    use super::*;

    fn sum(a: Span, b: Span, y: Span) -> Launch {
        Launch { kernel: Kernel::Sum { a, b, y }, dtype: DType::F32, scratch: Span::device(0, 0) }
    }

    #[test]
    fn a_place_beyond_its_arena_is_refused() {
        let arenas = Arenas { device: (4096, 100), host: (0, 0) };
        assert_eq!(arenas.find("sum", Span::device(60, 40)), Ok(4156));
        assert!(arenas.find("sum", Span::device(61, 40)).is_err());
        assert!(arenas.find("sum", Span::device(u64::MAX, 2)).is_err());
        assert!(arenas.find("sum", Span { tier: Tier::Host, at: 0, bytes: 1 }).is_err());
    }

    #[test]
    fn an_element_may_be_written_where_it_is_read_and_nowhere_between() {
        let [a, b] = [Span::device(0, 64), Span::device(64, 64)];
        assert_eq!(check_overlaps(&sum(a, b, a)), Ok(()));
        assert_eq!(check_overlaps(&sum(a, a, b)), Ok(()));
        assert!(check_overlaps(&sum(a, b, Span::device(32, 64))).is_err());
        let control = Span::device(256, 64);
        let mut two = sum(a, b, a);
        two.kernel = Kernel::SwiGluBackward { dy: a, gate: b, up: control, dgate: b, dup: b };
        assert!(check_overlaps(&two).is_err(), "two results in one place");
    }
}
