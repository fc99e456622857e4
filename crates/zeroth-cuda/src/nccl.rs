//! NVIDIA's library of collectives (libnccl), opened at run time: for ranks on cards that do not see each other's memory.
//!
//! It moves bytes and never adds: a sum is our own, in the order of ranks, whatever the way.
#![allow(unsafe_code, reason = "calls into the library; signatures are those of nccl.h")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Address, Handle};
use super::library::{Library, text};
use super::line::Arenas;
use super::peers::{Card, on_one_card};
use zeroth_kernel::bytes_before;
use zeroth_kernel::{DeviceError, Exchange, Span};

const HOW_TO_GET: &str =
    "Install NCCL (libnccl2 of NVIDIA's packages, nccl of conda-forge, or nvidia-nccl-cu13 of pip)";
const ID: usize = 128;
/// Bytes, as the library numbers types.
const UINT8: c_int = 1;

/// What ranks of one communicator share; passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; ID]);

type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Communicator, Handle) -> c_int;
type Spread =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Handle) -> c_int;
type SendCall = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Communicator, Handle) -> c_int;
type ReceiveCall = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Communicator, Handle) -> c_int;

/// An address that only the library looks into.
type Communicator = usize;

/// The library with the functions in use.
#[derive(Clone, Copy)]
struct Calls {
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Communicator) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Communicator, c_int, UniqueId, c_int) -> c_int,
    destroy: unsafe extern "C" fn(Communicator) -> c_int,
    abort: unsafe extern "C" fn(Communicator) -> c_int,
    async_error: unsafe extern "C" fn(Communicator, *mut c_int) -> c_int,
    all_gather: Gather,
    broadcast: Spread,
    send: SendCall,
    receive: ReceiveCall,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
}

impl Calls {
    fn open() -> Result<Self, DeviceError> {
        let library = Library::open(&["libnccl.so.2"], HOW_TO_GET)?;
        // SAFETY: each field has the type that nccl.h declares for its function.
        unsafe {
            Ok(Self {
                version: library.function("ncclGetVersion")?,
                error_string: library.function("ncclGetErrorString")?,
                last_error: library.function("ncclGetLastError")?,
                unique_id: library.function("ncclGetUniqueId")?,
                init: library.function("ncclCommInitRank")?,
                destroy: library.function("ncclCommDestroy")?,
                abort: library.function("ncclCommAbort")?,
                async_error: library.function("ncclCommGetAsyncError")?,
                all_gather: library.function("ncclAllGather")?,
                broadcast: library.function("ncclBroadcast")?,
                send: library.function("ncclSend")?,
                receive: library.function("ncclRecv")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
            })
        }
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both give a constant text, or the last message of the library, which ends with zero.
        let (what, more) = unsafe { (text((self.error_string)(code)), text((self.last_error)(0))) };
        let reason = format!("error {code}: {what}{}{more}", if more.is_empty() { "" } else { ": " });
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }
}

/// The library's version, as people write it.
pub(super) fn version() -> Result<String, DeviceError> {
    let (calls, mut version) = (Calls::open()?, 0);
    // SAFETY: writes one int.
    calls.check("ncclGetVersion", unsafe { (calls.version)(&raw mut version) })?;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// A rank's door: its card, and from rank 0 what makes ranks one communicator.
pub(super) fn ipc_handle(card: Card, rank: usize) -> Result<Vec<u8>, DeviceError> {
    let (calls, mut id) = (Calls::open()?, UniqueId([0; ID]));
    if rank == 0 {
        // SAFETY: writes one id.
        calls.check("ncclGetUniqueId", unsafe { (calls.unique_id)(&raw mut id) })?;
    }
    Ok(card.into_iter().chain(id.0).collect())
}

/// The cards of all ranks, and the id of rank 0.
fn read_doors(doors: &[Vec<u8>]) -> Result<(Vec<Card>, UniqueId), DeviceError> {
    let read = |door: &Vec<u8>| {
        let (card, id) = door.split_first_chunk::<{ size_of::<Card>() }>()?;
        Some((*card, UniqueId(id.try_into().ok()?)))
    };
    let all: Option<Vec<(Card, UniqueId)>> = doors.iter().map(read).collect();
    let refused = |problem: String| DeviceError::Operands { what: "NCCL", problem };
    let all = all.filter(|all| !all.is_empty());
    let all = all.ok_or_else(|| refused("a rank's door is not one of NCCL's".to_owned()))?;
    let cards: Vec<Card> = all.iter().map(|(card, _)| *card).collect();
    if let Some((first, second)) = on_one_card(&cards) {
        let problem =
            format!("ranks {first} and {second} are on the same card, and NCCL takes one rank a card");
        return Err(refused(problem));
    }
    Ok((cards, all[0].1))
}

/// A communicator of all ranks.
pub(super) struct Nccl {
    calls: Calls,
    rank: usize,
    world: usize,
    /// None after it was given up.
    communicator: Arc<Mutex<Option<Communicator>>>,
}

impl Nccl {
    /// Joins the other ranks; waits for all of them. The context of the card is current.
    pub(super) fn open(rank: usize, doors: &[Vec<u8>]) -> Result<Self, DeviceError> {
        let (cards, id) = read_doors(doors)?;
        let (calls, world) = (Calls::open()?, cards.len());
        let mut communicator = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (calls.init)(&raw mut communicator, world as c_int, id, rank as c_int) };
        calls.check("ncclCommInitRank", code)?;
        Ok(Self { calls, rank, world, communicator: Arc::new(Mutex::new(Some(communicator))) })
    }

    /// Enqueues an exchange.
    pub(super) fn exchange(
        &self,
        arenas: Arenas,
        exchange: &Exchange<'_>,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        let held = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = || DeviceError::Operands {
            what: exchange.name(),
            problem: "the communicator was given up, because a rank was lost".to_owned(),
        };
        let line = Line { calls: &self.calls, communicator: held.ok_or_else(gone)?, stream };
        let mut failed = 0;
        // SAFETY: writes one code.
        let code = unsafe { (self.calls.async_error)(line.communicator, &raw mut failed) };
        self.calls.check("ncclCommGetAsyncError", code)?;
        self.calls.check("an exchange before this one", failed)?;
        let find = |span: Span| arenas.find(exchange.name(), span);
        match *exchange {
            Exchange::AllGather { send, recv, counts } => {
                let (from, to) = (find(send)?, find(recv)?);
                if let Some(count) = equal(counts) {
                    return line.all_gather(from, to, count);
                }
                let part = |rank: usize| {
                    let to = to + bytes_before(counts, rank);
                    (if rank == self.rank { from } else { to }, to, counts[rank])
                };
                line.grouped(|| (0..self.world).try_for_each(|rank| line.broadcast(rank, part(rank))))
            }
            Exchange::AllGatherInPlace { buffer, starts, counts } => {
                let all = find(buffer)?;
                let parts = starts.iter().zip(counts).map(|(start, count)| {
                    find(buffer.part(*start as u64, *count as u64, 1)).map(|at| (at, at, *count))
                });
                let parts: Vec<(Address, Address, usize)> = parts.collect::<Result<_, _>>()?;
                let touch =
                    |count: &usize| (0..self.world).all(|rank| starts[rank] == starts[0] + rank * count);
                if let Some(count) = equal(counts).filter(touch) {
                    return line.all_gather(parts[self.rank].0, all + starts[0] as u64, count);
                }
                line.grouped(|| (0..self.world).try_for_each(|rank| line.broadcast(rank, parts[rank])))
            }
            Exchange::Broadcast { root, buffer } => {
                let at = find(buffer)?;
                line.broadcast(root, (at, at, buffer.bytes as usize))
            }
            Exchange::AllToAll { send, recv, counts } => {
                let (from, to, own) = (find(send)?, find(recv)?, counts[self.rank]);
                line.grouped(|| {
                    (0..self.world).try_for_each(|rank| {
                        line.send(rank, from + bytes_before(counts, rank), counts[rank])?;
                        line.receive(rank, to + (rank * own) as u64, own)
                    })
                })
            }
        }
    }

    /// Gives the communicator up, from any thread: whatever waits in it ends.
    pub(super) fn abort(&self) -> Box<dyn Fn() + Send> {
        let (communicator, abort) = (Arc::clone(&self.communicator), self.calls.abort);
        Box::new(move || {
            if let Some(communicator) = communicator.lock().unwrap_or_else(PoisonError::into_inner).take() {
                // SAFETY: taken out, so that nobody else has it. What the library says at the end changes nothing.
                unsafe { abort(communicator) };
            }
        })
    }

    /// Leaves the other ranks. All queues are empty.
    pub(super) fn close(self) {
        if let Some(communicator) = self.communicator.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // SAFETY: taken out, so that nobody else has it. What the library says at the end changes nothing.
            unsafe { (self.calls.destroy)(communicator) };
        }
    }
}

/// The count of all, where it is the same.
fn equal(counts: &[usize]) -> Option<usize> {
    counts.iter().all(|count| *count == counts[0]).then(|| counts[0])
}

/// One exchange on its way to a queue. Addresses lie within arenas, which live until the queues are empty.
struct Line<'a> {
    calls: &'a Calls,
    communicator: Communicator,
    stream: Handle,
}

impl Line<'_> {
    fn all_gather(&self, from: Address, to: Address, count: usize) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: `count` bytes to send, as many times the world to receive; callers have checked both.
        let code = unsafe { (self.calls.all_gather)(from, to, count, UINT8, self.communicator, self.stream) };
        self.calls.check("ncclAllGather", code)
    }

    /// From, to and bytes; `from` counts on `root` alone.
    fn broadcast(&self, root: usize, part: (Address, Address, usize)) -> Result<(), DeviceError> {
        let (from, to, count) = (part.0 as *const c_void, part.1 as *mut c_void, part.2);
        if count == 0 {
            return Ok(());
        }
        let root = root as c_int;
        // SAFETY: `count` bytes at both places; callers have checked both.
        let code =
            unsafe { (self.calls.broadcast)(from, to, count, UINT8, root, self.communicator, self.stream) };
        self.calls.check("ncclBroadcast", code)
    }

    fn send(&self, to: usize, from: Address, count: usize) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let (from, to) = (from as *const c_void, to as c_int);
        // SAFETY: `count` bytes, which callers have checked.
        let code = unsafe { (self.calls.send)(from, count, UINT8, to, self.communicator, self.stream) };
        self.calls.check("ncclSend", code)
    }

    fn receive(&self, from: usize, to: Address, count: usize) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let (to, from) = (to as *mut c_void, from as c_int);
        // SAFETY: room for `count` bytes, which callers have checked.
        let code = unsafe { (self.calls.receive)(to, count, UINT8, from, self.communicator, self.stream) };
        self.calls.check("ncclRecv", code)
    }

    /// Calls that go on together. A group that was begun is ended whatever happens.
    fn grouped(&self, calls: impl Fn() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        // SAFETY: no arguments.
        self.calls.check("ncclGroupStart", unsafe { (self.calls.group_start)() })?;
        let outcome = calls();
        // SAFETY: no arguments; a group was begun.
        let ended = self.calls.check("ncclGroupEnd", unsafe { (self.calls.group_end)() });
        outcome.and(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door_of(card: u8, id: u8) -> Vec<u8> {
        [vec![card; 16], vec![id; ID]].concat()
    }

    #[test]
    fn two_ranks_on_one_card_are_refused_before_anybody_waits_for_anybody() {
        let problem = read_doors(&[door_of(1, 5), door_of(2, 0), door_of(2, 0)]).err().unwrap().to_string();
        assert!(problem.contains("ranks 1 and 2 are on the same card"), "{problem}");
        let (cards, id) = read_doors(&[door_of(1, 5), door_of(2, 0)]).unwrap();
        assert_eq!((cards.len(), id.0), (2, [5; ID]));
        assert!(read_doors(&[door_of(1, 5), vec![0; 3]]).is_err());
        assert!(read_doors(&[]).is_err());
    }

    #[test]
    fn without_the_library_it_is_said_how_to_get_it() {
        match version() {
            Ok(version) => assert!(version.starts_with("2."), "{version}"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("libnccl.so.2") && error.contains("nvidia-nccl-cu13"), "{error}");
            }
        }
    }
}
