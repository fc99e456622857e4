//! Ranks on cards that copy out of each other's arenas, which the driver opens from process to process.
//!
//! They meet at words in host memory that all of them have mapped: a queue writes its own word and waits for the others',
//! and the host does neither. What the words mean: `zeroth_comm::DeviceBarrier`.
#![allow(unsafe_code, reason = "calls into the driver; maps a file that other processes map too")]

use std::ffi::{c_int, c_uint, c_void};

use rustix::mm::{MapFlags, ProtFlags};

use super::driver::{Address, Driver, Handle};
use super::library::Library;
use super::line::Arenas;
use super::peers::{Card, card};
use zeroth_kernel::{BarrierCounters, DeviceError, Exchange, IpcHandles};

/// Bytes that a rank writes to the beginning of its arena, which holds nothing yet, for others to find there.
pub(super) const TOKEN: usize = 16;
const HANDLE: usize = 64;
const DOOR: usize = HANDLE + size_of::<Card>() + 8 + TOKEN;

/// Opens memory of another card too, where the cards can.
const LAZY_PEER_ACCESS: c_uint = 1;
/// Pinned for all contexts, and seen by the device.
const PORTABLE_AND_MAPPED: c_uint = 3;
/// Waits until the word is at least the value, modulo 2³².
const AT_LEAST: c_uint = 0;

/// A name of memory for other processes; passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct MemoryHandle([u8; HANDLE]);

/// Functions of the driver that nothing else needs: an old driver that lacks one runs all else.
struct Calls {
    export: unsafe extern "C" fn(*mut MemoryHandle, Address) -> c_int,
    open: unsafe extern "C" fn(*mut Address, MemoryHandle, c_uint) -> c_int,
    close: unsafe extern "C" fn(Address) -> c_int,
    register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    as_device_sees: unsafe extern "C" fn(*mut Address, *mut c_void, c_uint) -> c_int,
    write: unsafe extern "C" fn(Handle, Address, u32, c_uint) -> c_int,
    wait: unsafe extern "C" fn(Handle, Address, u32, c_uint) -> c_int,
}

impl Calls {
    fn find() -> Result<Self, DeviceError> {
        let library = Library::open(&["libcuda.so.1"], "Install NVIDIA's driver")?;
        // SAFETY: each field has the type that cuda.h declares for its function.
        unsafe {
            Ok(Self {
                export: library.function("cuIpcGetMemHandle")?,
                open: library.function("cuIpcOpenMemHandle_v2")?,
                close: library.function("cuIpcCloseMemHandle")?,
                register: library.function("cuMemHostRegister_v2")?,
                as_device_sees: library.function("cuMemHostGetDevicePointer_v2")?,
                write: library.function("cuStreamWriteValue32_v2")?,
                wait: library.function("cuStreamWaitValue32_v2")?,
            })
        }
    }
}

/// A rank's door: how others reach its arena, whose first bytes are `token`.
pub(super) fn ipc_handle(
    driver: &Driver,
    device: c_int,
    arena: (Address, u64),
    token: [u8; TOKEN],
) -> Result<Vec<u8>, DeviceError> {
    let mut handle = MemoryHandle([0; HANDLE]);
    // SAFETY: writes one handle; the address is the first one of an allocation.
    let code = unsafe { (Calls::find()?.export)(&raw mut handle, arena.0) };
    driver.check("cuIpcGetMemHandle", code)?;
    let mut door = handle.0.to_vec();
    door.extend(card(driver, device)?);
    door.extend(arena.1.to_le_bytes());
    door.extend(token);
    Ok(door)
}

/// A door of another rank, read.
struct Door {
    handle: MemoryHandle,
    card: Card,
    bytes: u64,
    token: [u8; TOKEN],
}

impl Door {
    fn read(door: &[u8]) -> Option<Self> {
        let (handle, rest) = door.split_first_chunk::<HANDLE>()?;
        let (card, rest) = rest.split_first_chunk::<{ size_of::<Card>() }>()?;
        let (bytes, rest) = rest.split_first_chunk::<8>()?;
        let token = *rest.first_chunk::<TOKEN>()?;
        (door.len() == DOOR).then_some(Self {
            handle: MemoryHandle(*handle),
            card: *card,
            bytes: u64::from_le_bytes(*bytes),
            token,
        })
    }
}

/// Every rank's arena and word, as this rank's device sees them.
pub(super) struct Ipc {
    calls: Calls,
    rank: usize,
    arenas: Vec<Address>,
    /// Bytes of every arena.
    bytes: u64,
    words: Mapped,
    stride: u64,
    shares_its_card: bool,
}

/// The ranks' words, mapped and pinned.
struct Mapped {
    start: *mut c_void,
    bytes: usize,
    /// The first one as the device sees it; 0 while they are not pinned.
    address: Address,
}

// SAFETY: the mapping belongs to no thread, and only devices write to it.
unsafe impl Send for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `Ipc::open`, which nothing refers to any more.
        let _ = unsafe { rustix::mm::munmap(self.start, self.bytes) };
    }
}

impl Ipc {
    /// Opens the other ranks' arenas and finds their tokens there. `stream` is tried with the words.
    pub(super) fn open(
        driver: &Driver,
        own: (Address, u64),
        doors: &IpcHandles<'_>,
        stream: Handle,
    ) -> Result<Self, DeviceError> {
        let calls = Calls::find()?;
        let BarrierCounters { stride, bytes, .. } = doors.counters;
        if !stride.is_multiple_of(size_of::<u32>()) || doors.handles.len() * stride > bytes {
            let problem = format!("{} ranks' words, {stride} bytes apart, in {bytes}", doors.handles.len());
            return Err(DeviceError::Operands { what: "exchange", problem });
        }
        let words = map(driver, &doors.counters)?;
        let (rank, stride) = (doors.rank, stride as u64);
        let cards: Vec<Option<Card>> =
            doors.handles.iter().map(|door| Some(Door::read(door)?.card)).collect();
        let shares_its_card = cards.iter().filter(|card| **card == cards[rank]).count() > 1;
        let (arenas, bytes) = (Vec::new(), own.1);
        let mut opened = Self { calls, rank, arenas, bytes, words, stride, shares_its_card };
        let outcome = opened.pin(driver).and_then(|()| opened.reach_all(driver, own.0, doors, stream));
        if let Err(error) = outcome {
            opened.close(driver);
            return Err(error);
        }
        Ok(opened)
    }

    fn pin(&mut self, driver: &Driver) -> Result<(), DeviceError> {
        let Mapped { start, bytes, .. } = self.words;
        // SAFETY: a mapping that stays until `close` has let go of it.
        let code = unsafe { (self.calls.register)(start, bytes, PORTABLE_AND_MAPPED) };
        driver.check("cuMemHostRegister", code)?;
        let mut address = 0;
        // SAFETY: writes one address; the memory was pinned by the call above.
        let code = unsafe { (self.calls.as_device_sees)(&raw mut address, start, 0) };
        let seen = driver.check("cuMemHostGetDevicePointer", code);
        if seen.is_err() {
            driver.unregister_host(start.expose_provenance());
        }
        seen?;
        self.words.address = address;
        Ok(())
    }

    fn reach_all(
        &mut self,
        driver: &Driver,
        own: Address,
        doors: &IpcHandles<'_>,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        for (rank, door) in doors.handles.iter().enumerate() {
            let arena = if rank == self.rank { own } else { self.reach(driver, rank, door, stream)? };
            self.arenas.push(arena);
        }
        // SAFETY: a word within the mapping, by the check in `open`, aligned by its stride. Nobody writes to it: its device
        // is this one, and is idle.
        let now = unsafe {
            let words = self.words.start.cast::<u32>();
            words.add(self.rank * self.stride as usize / size_of::<u32>()).read_volatile()
        };
        self.write(driver, now, stream)?;
        self.wait(driver, self.rank, now, stream)?;
        driver.synchronise(stream)
    }

    fn reach(
        &self,
        driver: &Driver,
        rank: usize,
        door: &[u8],
        stream: Handle,
    ) -> Result<Address, DeviceError> {
        let failed = |reason: String| driver.failed(&format!("opening the memory of rank {rank}"), reason);
        let door = Door::read(door).ok_or_else(|| failed(format!("a door of {} bytes", door.len())))?;
        if door.bytes != self.bytes {
            let reason = format!("its arena has {} bytes, this rank's {}", door.bytes, self.bytes);
            return Err(failed(reason));
        }
        let mut arena = 0;
        // SAFETY: writes one address; a handle that another process made.
        let code = unsafe { (self.calls.open)(&raw mut arena, door.handle, LAZY_PEER_ACCESS) };
        driver.check("cuIpcOpenMemHandle", code)?;
        let mut found = [0; TOKEN];
        let read = driver.copy_to_host(&mut found, arena, stream);
        if read.is_ok() && found == door.token {
            return Ok(arena);
        }
        // SAFETY: what the call above opened, closed once.
        unsafe { (self.calls.close)(arena) };
        read?;
        Err(failed("what it wrote there is not what is read".to_owned()))
    }

    /// Whether another rank is on this rank's card.
    pub(super) const fn shares_its_card(&self) -> bool {
        self.shares_its_card
    }

    /// Enqueues an exchange between the two points of a meeting.
    pub(super) fn exchange(
        &self,
        driver: &Driver,
        arenas: Arenas,
        exchange: &Exchange<'_>,
        points: [u32; 2],
        stream: Handle,
    ) -> Result<(), DeviceError> {
        let world = self.arenas.len();
        let others = || (0..world).filter(|rank| *rank != self.rank);
        // All places are checked before anybody is told that this rank has come.
        for take in exchange.takes(self.rank, world) {
            arenas.find(exchange.name(), take.to)?;
            arenas.find(exchange.name(), take.place)?;
        }
        self.write(driver, points[0], stream)?;
        others().try_for_each(|rank| self.wait(driver, rank, points[0], stream))?;
        for take in exchange.takes(self.rank, world) {
            let to = arenas.find(exchange.name(), take.to)?;
            let from = self.arenas[take.from] + take.place.at;
            // SAFETY: `to` lies within this rank's arena and `from` within another's, which is as long; both are open until
            // `close`, before which the device waits for its queues.
            unsafe { driver.copy(to, from, take.to.bytes, stream)? };
        }
        self.write(driver, points[1], stream)?;
        others().try_for_each(|rank| self.wait(driver, rank, points[1], stream))
    }

    fn word(&self, rank: usize) -> Address {
        self.words.address + rank as u64 * self.stride
    }

    /// Enqueues a write to this rank's word, behind all that the queue has written to memory.
    fn write(&self, driver: &Driver, value: u32, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: a pinned word.
        let code = unsafe { (self.calls.write)(stream, self.word(self.rank), value, 0) };
        driver.check("cuStreamWriteValue32", code)
    }

    /// The queue waits until a rank's word is at least `value`.
    fn wait(&self, driver: &Driver, rank: usize, value: u32, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: a pinned word.
        let code = unsafe { (self.calls.wait)(stream, self.word(rank), value, AT_LEAST) };
        driver.check("cuStreamWaitValue32", code)
    }

    /// Lets go of everything. All queues are empty.
    pub(super) fn close(&mut self, driver: &Driver) {
        for (rank, arena) in std::mem::take(&mut self.arenas).into_iter().enumerate() {
            if rank != self.rank {
                // SAFETY: what `reach` opened, closed once. What the driver says at the end changes nothing.
                unsafe { (self.calls.close)(arena) };
            }
        }
        if std::mem::take(&mut self.words.address) != 0 {
            driver.unregister_host(self.words.start.expose_provenance());
        }
    }
}

fn map(driver: &Driver, words: &BarrierCounters<'_>) -> Result<Mapped, DeviceError> {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at a place of the system's choice touches nothing that exists.
    let start = unsafe {
        let none = std::ptr::null_mut();
        rustix::mm::mmap(none, words.bytes, rights, MapFlags::SHARED, words.file, words.at)
    };
    let start = start.map_err(|error| driver.failed("mapping the ranks' words", error.to_string()))?;
    Ok(Mapped { start, bytes: words.bytes, address: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_is_read_as_it_was_written_and_one_of_another_length_is_none() {
        let mut bytes = vec![7; HANDLE];
        bytes.extend([1; size_of::<Card>()]);
        bytes.extend(4096u64.to_le_bytes());
        bytes.extend([9; TOKEN]);
        let door = Door::read(&bytes).unwrap();
        assert_eq!((door.handle.0, door.bytes, door.token), ([7; HANDLE], 4096, [9; TOKEN]));
        assert_eq!(door.card, [1; size_of::<Card>()]);
        assert!(Door::read(&bytes[1..]).is_none());
        bytes.push(0);
        assert!(Door::read(&bytes).is_none());
    }
}
