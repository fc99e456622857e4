//! The shared-memory segment of a job: a memory file that every rank maps, its layout, and the word that ends a job.
//!
//! ```text
//! header | slot of rank 0 | slot of rank 1 | … | to a page | counter of rank 0 | … | to a page | of other lanes
//!        | region of rank 0 | region of rank 1 | … | regions of other lanes | to a huge page | window of rank 0 | window of rank 1 | …
//! ```
//!
//! Counters (`device_barrier.rs`) are on pages of their own, for each lane (`lane.rs`): devices write to them. A region has
//! two halves, used in turn, and a rank has one in every lane. Windows (`mapped_window.rs`) are places for more than any rank
//! has: only what is touched takes memory, and each is mapped apart. The file has no name in any folder: it is gone with the
//! last process that holds or maps it. It is sealed against changing its size, so a mapping stays valid for as long as it
//! lives.
#![allow(unsafe_code, reason = "maps memory that other processes map too; each block says why it is sound")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use rustix::rand::{GetRandomFlags, getrandom};

use super::copy;
use super::host_words::HostWords;
use super::lane::Lane;
use super::rank_slot::{DeviceCounter, RankSlot};
use super::wait;
use crate::error::{CommError, JoinError, LostReason, RankLost};
use crate::op_name::OpName;
use crate::place::own_name;

/// The maximum number of ranks on one machine.
pub(crate) const MOST_RANKS: usize = 1024;
/// Parts that different ranks write are aligned to cache lines.
pub(crate) const LINE: usize = 64;
const PAGE: usize = 4096;
/// Windows are aligned to huge pages.
const HUGE_PAGE: u64 = 2 << 20;
/// Bytes of the file reserved for a rank's window.
pub(crate) const WINDOW: u64 = 1 << 40;
const MAGIC: u64 = u64::from_le_bytes(*b"zerothjb");
const VERSION: u32 = 9;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// 128 random bits that identify a job. A rank with another job's token is rejected.
#[derive(Clone, Copy, Eq)]
pub struct JobToken([u64; 2]);

impl PartialEq for JobToken {
    /// In constant time: how long it takes tells nothing of where two tokens differ.
    fn eq(&self, other: &Self) -> bool {
        std::hint::black_box((self.0[0] ^ other.0[0]) | (self.0[1] ^ other.0[1])) == 0
    }
}

impl JobToken {
    /// Draws a token.
    pub fn random() -> Result<Self, JoinError> {
        let mut bytes = [0_u8; 16];
        // 16 bytes are never short: only requests above 256 can be interrupted.
        getrandom(&mut bytes, GetRandomFlags::empty()).map_err(JoinError::system("draw a job token"))?;
        let number = u128::from_le_bytes(bytes);
        Ok(Self([number as u64, (number >> 64) as u64]))
    }

    /// Its bits, as a key.
    pub(crate) fn bytes(self) -> [u8; 16] {
        (u128::from(self.0[1]) << 64 | u128::from(self.0[0])).to_le_bytes()
    }
}

impl fmt::Display for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[1], self.0[0])
    }
}

/// A token is a secret between hosts (on one machine a weak one), and does not belong in logs.
impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl FromStr for JobToken {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("is not a job token of 32 hexadecimal digits");
        }
        let number = u128::from_str_radix(text, 16).map_err(|_| "is not a job token")?;
        Ok(Self([number as u64, (number >> 64) as u64]))
    }
}

#[repr(C, align(64))]
pub(crate) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    world: AtomicU32,
    half: AtomicU64,
    token: [AtomicU64; 2],
    /// 0 while the job lives; see [`SharedSegment::end`].
    ended: AtomicU64,
    /// Whether the first step has begun; see [`crate::JobControl::begin_first_step`].
    pub(crate) first_step: AtomicU32,
    /// Not 0 once ranks are asked to stop, and how often they were asked to save; see [`crate::JobControl`].
    pub(crate) stop_requested: AtomicU32,
    pub(crate) save_requests: AtomicU32,
    /// What concerns other hosts.
    pub(crate) hosts: HostWords,
}

/// What ended a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndedBy {
    /// A rank of this segment, by its slot.
    Slot(usize, LostReason),
    /// A rank of another host: see [`HostWords::elsewhere`].
    Elsewhere,
}

/// Offsets within the segment, from the number of ranks and the region size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentLayout {
    pub(crate) world: usize,
    /// Bytes of each half of a region: a multiple of a line, and at least a line for each rank.
    pub(crate) half: usize,
    /// Where the device counters begin, and where they end and the regions begin.
    counters: usize,
    control: usize,
    len: usize,
}

impl SegmentLayout {
    /// Regions of at least `region` bytes for `world` ranks.
    pub(crate) fn new(world: usize, region: usize) -> Result<Self, JoinError> {
        let half = region.div_ceil(2).max(LINE.saturating_mul(world));
        half.checked_next_multiple_of(LINE).and_then(|half| Self::of(world, half)).ok_or(JoinError::Size {
            world,
            region,
            most: MOST_RANKS,
        })
    }

    fn of(world: usize, half: usize) -> Option<Self> {
        if !(1..=MOST_RANKS).contains(&world) || !half.is_multiple_of(LINE) || half < LINE * world {
            return None;
        }
        let counters = (size_of::<Header>() + world * size_of::<RankSlot>()).next_multiple_of(PAGE);
        let control = counters + Lane::COUNT * Self::lane_counters(world);
        let len = half.checked_mul(2 * Lane::COUNT)?.checked_mul(world)?.checked_add(control)?;
        isize::try_from(len).ok()?;
        Some(Self { world, half, counters, control, len })
    }

    /// Bytes of the device counters of a lane, in whole pages: devices map them.
    const fn lane_counters(world: usize) -> usize {
        (world * size_of::<DeviceCounter>()).next_multiple_of(PAGE)
    }

    /// Where the device counters of a lane begin.
    fn counters_of(self, lane: usize) -> usize {
        assert!(lane < Lane::COUNT, "lane {lane}");
        self.counters + lane * Self::lane_counters(self.world)
    }

    /// The file offset of a rank's window.
    fn window(self, rank: usize) -> u64 {
        (self.len as u64).next_multiple_of(HUGE_PAGE) + rank as u64 * WINDOW
    }

    /// Bytes of the file, with or without windows.
    fn file(self, windows: bool) -> u64 {
        if windows { self.window(self.world) } else { self.len as u64 }
    }
}

/// A mapping of a job's segment.
pub(crate) struct SharedSegment {
    base: NonNull<u8>,
    pub(crate) layout: SegmentLayout,
    file: OwnedFd,
    has_windows: bool,
}

// SAFETY: the mapping belongs to no thread; control pages are atomics, regions are reached through `write` and
// `read`, whose callers wait for their turn.
unsafe impl Send for SharedSegment {}
// SAFETY: as above.
unsafe impl Sync for SharedSegment {}

impl SharedSegment {
    /// Creates a segment, and the file that others map.
    pub(crate) fn create(layout: SegmentLayout, token: JobToken) -> Result<(OwnedFd, Self), JoinError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("zeroth-job", flags | MemfdFlags::NOEXEC_SEAL)
            // Kernels before 6.3 lack that flag.
            .or_else(|_| rustix::fs::memfd_create("zeroth-job", flags))
            .map_err(JoinError::system("make the shared segment"))?;
        // Without windows where RLIMIT_FSIZE is too small: exceeding it would raise SIGXFSZ.
        let most = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
        let has_windows = layout.file(true) <= most;
        rustix::fs::ftruncate(&file, layout.file(has_windows))
            .map_err(JoinError::system("give the shared segment its size"))?;
        rustix::fs::fcntl_add_seals(&file, SEALS).map_err(JoinError::system("seal the shared segment"))?;
        let segment = Self::map(file.as_fd(), layout, has_windows)?;
        // Relaxed: starting the thread or process that receives the file orders these stores before everything the new
        // rank does.
        let header = segment.header();
        header.version.store(VERSION, Ordering::Relaxed);
        header.world.store(layout.world as u32, Ordering::Relaxed);
        header.half.store(layout.half as u64, Ordering::Relaxed);
        header.token[0].store(token.0[0], Ordering::Relaxed);
        header.token[1].store(token.0[1], Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Relaxed);
        Ok((file, segment))
    }

    /// Validates and maps a received segment.
    pub(crate) fn open(file: BorrowedFd<'_>, token: JobToken) -> Result<Self, JoinError> {
        let not = |why: String| JoinError::NotASegment { why };
        // Seals first: a file that can shrink could invalidate the mapping.
        let seals = rustix::fs::fcntl_get_seals(file)
            .map_err(|errno| not(format!("it is no memory file ({})", io::Error::from(errno))))?;
        if !seals.contains(SEALS) {
            return Err(not("its size is not sealed".to_owned()));
        }
        let size = rustix::fs::fstat(file).map_err(JoinError::system("look at the shared segment"))?.st_size;
        let size = u64::try_from(size).unwrap_or(0);
        let smallest = SegmentLayout::new(1, 0)?;
        if size < smallest.len as u64 {
            return Err(not(format!("it has {size} bytes, the smallest has {}", smallest.len)));
        }
        // The header, mapped through the smallest layout, gives the size to map.
        let layout = {
            let start = Self::map(file, smallest, false)?;
            let header = start.header();
            let (magic, version) =
                (header.magic.load(Ordering::Relaxed), header.version.load(Ordering::Relaxed));
            if magic != MAGIC || version != VERSION {
                return Err(not(format!(
                    "version {VERSION} is expected, its mark is {magic:016x}.{version}"
                )));
            }
            if JobToken([0, 1].map(|at: usize| header.token[at].load(Ordering::Relaxed))) != token {
                return Err(JoinError::Token);
            }
            let (world, half) = (header.world.load(Ordering::Relaxed), header.half.load(Ordering::Relaxed));
            let fits =
                |layout: &SegmentLayout| [false, true].map(|windows| layout.file(windows)).contains(&size);
            SegmentLayout::of(world as usize, half as usize).filter(fits).ok_or_else(|| {
                not(format!("{size} bytes do not fit {world} rank(s) with 2 × {half} bytes"))
            })?
        };
        Self::map(file, layout, size > layout.len as u64)
    }

    fn map(file: BorrowedFd<'_>, layout: SegmentLayout, has_windows: bool) -> Result<Self, JoinError> {
        let own =
            rustix::io::fcntl_dupfd_cloexec(file, 0).map_err(JoinError::system("keep the shared segment"))?;
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours. Both callers know
        // that the file is sealed and has at least `len` bytes, so every byte stays backed.
        let base = unsafe {
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), layout.len, rights, MapFlags::SHARED, file, 0)
        }
        .map_err(JoinError::system("map the shared segment"))?;
        let base = NonNull::new(base.cast()).expect("a mapping the system chooses is not at address 0");
        Ok(Self { base, layout, file: own, has_windows })
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with the header (page-aligned, long enough, any bytes are valid atomics) and
        // lives as long as `self`.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// The file and the offset of a rank's window; `None` where the file has no windows.
    pub(crate) fn window(&self, rank: usize) -> Option<(BorrowedFd<'_>, u64)> {
        self.has_windows.then(|| (self.file.as_fd(), self.layout.window(rank)))
    }

    /// A rank's slot. Panics for an invalid rank, which callers check first.
    pub(crate) fn slot(&self, rank: usize) -> &RankSlot {
        assert!(rank < self.layout.world, "rank {rank} of {}", self.layout.world);
        // SAFETY: the slots follow the header, inside the control pages; offset and base are multiples of 64, which
        // is the alignment of a slot; any bytes are valid atomics.
        unsafe { self.base.add(size_of::<Header>()).cast::<RankSlot>().add(rank).as_ref() }
    }

    /// How far a rank's device is in a lane. Panics where there is no such rank or lane.
    pub(crate) fn counter(&self, lane: usize, rank: usize) -> &DeviceCounter {
        assert!(rank < self.layout.world, "rank {rank} of {}", self.layout.world);
        let start = self.layout.counters_of(lane);
        // SAFETY: the counters lie inside the control pages, by the layout; they begin with a page, and a counter is as long as
        // its alignment; any bytes are valid atomics.
        unsafe { self.base.add(start).cast::<DeviceCounter>().add(rank).as_ref() }
    }

    /// The file, where in it the counters of a lane begin, and how many bytes their pages have.
    pub(crate) fn counters(&self, lane: usize) -> (BorrowedFd<'_>, u64, usize) {
        let SegmentLayout { world, .. } = self.layout;
        (self.file.as_fd(), self.layout.counters_of(lane) as u64, SegmentLayout::lane_counters(world))
    }

    /// Where `len` bytes begin in a half of a rank's region in a lane.
    fn region(&self, [lane, rank, parity]: [usize; 3], offset: usize, len: usize) -> NonNull<u8> {
        let SegmentLayout { world, half, control, .. } = self.layout;
        assert!(lane < Lane::COUNT && rank < world && parity < 2, "no region");
        assert!(offset <= half && len <= half - offset, "outside a region");
        // SAFETY: inside the mapping, by the assertions and the length in `SegmentLayout::of`.
        unsafe { self.base.add(control + (2 * (lane * world + rank) + parity) * half + offset) }
    }

    /// Copies `bytes` into a half of a region: its lane, rank and parity.
    ///
    /// # Safety
    /// It is the caller's turn: no other thread or process reads or writes these bytes meanwhile.
    pub(crate) unsafe fn write(&self, half: [usize; 3], offset: usize, bytes: &[u8]) {
        let to = self.region(half, offset, bytes.len());
        // SAFETY: `to` has room for them (`region` asserts it), a slice of ours is never inside the mapping (no
        // reference into a region is ever made), and nobody else touches them (the caller's promise).
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) }
    }

    /// Copies from a half of a region, with non-temporal stores where `past` is set.
    ///
    /// # Safety
    /// It is the caller's turn: no other thread or process writes these bytes meanwhile.
    pub(crate) unsafe fn read(&self, half: [usize; 3], offset: usize, into: &mut [u8], past: bool) {
        let from = self.region(half, offset, into.len());
        // SAFETY: as in `write`.
        unsafe { copy::copy_from(from.as_ptr(), into, past) }
    }

    /// Ends the job for all ranks because the rank of a slot is lost. Only the first report counts; it is returned.
    ///
    /// The report is one word, so a rank that dies while reporting leaves nothing half-written.
    pub(crate) fn end(&self, slot: usize, reason: LostReason) -> EndedBy {
        self.end_by(EndedBy::Slot(slot, reason))
    }

    /// Ends the job for all ranks because a rank of another host is lost. Only for the holder of the control connection.
    pub(crate) fn end_elsewhere(&self, lost: &RankLost) {
        // Written once: a second verdict would tear the text that readers of the first one read.
        if self.ended().is_none() {
            self.header().hosts.set_elsewhere(lost);
            self.end_by(EndedBy::Elsewhere);
        }
    }

    fn end_by(&self, ended: EndedBy) -> EndedBy {
        // Release and acquire, for the words of a verdict elsewhere. Others carry their own meaning; what is read beside
        // them (a place) has its own lock.
        let _ = self.header().ended.compare_exchange(0, pack(ended), Ordering::Release, Ordering::Relaxed);
        self.wake_all();
        self.ended().unwrap_or(ended)
    }

    /// What ended the job.
    pub(crate) fn ended(&self) -> Option<EndedBy> {
        let ended = unpack(self.header().ended.load(Ordering::Acquire))?;
        let is_valid = !matches!(ended, EndedBy::Slot(slot, _) if slot >= self.layout.world);
        is_valid.then_some(ended)
    }

    /// The rank of a slot among all ranks of the job.
    pub(crate) fn rank_of(&self, slot: usize) -> usize {
        self.header().hosts.first() + slot
    }

    /// What is known about the lost rank.
    pub(crate) fn describe(&self, ended: EndedBy) -> RankLost {
        let EndedBy::Slot(number, reason) = ended else { return self.header().hosts.elsewhere() };
        let slot = self.slot(number);
        let reason = match reason {
            LostReason::Differs { from } => LostReason::Differs { from: self.rank_of(from) },
            other => other,
        };
        RankLost {
            rank: self.rank_of(number),
            host: self.header().hosts.name().unwrap_or_else(own_name),
            pid: slot.process().0,
            reason,
            last: slot.last_op(),
            by: None,
            waiting_in: None,
        }
    }

    /// The error of the rank of slot `by`, which is in `op`.
    pub(crate) fn lost_on(&self, by: usize, op: OpName, ended: EndedBy) -> CommError {
        let by = Some(self.rank_of(by));
        Box::new(RankLost { by, waiting_in: Some(op), ..self.describe(ended) }).into()
    }

    /// Wakes every waiting rank.
    pub(crate) fn wake_all(&self) {
        for rank in 0..self.layout.world {
            for rounds in &self.slot(rank).rounds {
                wait::wake(&rounds.published.0.rounds);
                wait::wake(&rounds.consumed.0);
            }
        }
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone to unmap, and references into it live no longer than `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping that was made");
    }
}

/// The kind of a verdict elsewhere in the word; those of slots are smaller.
const ELSEWHERE: u64 = 0xff;

/// Kind, slot and detail in 8, 24 and 32 bits; never 0.
fn pack(ended: EndedBy) -> u64 {
    let EndedBy::Slot(slot, reason) = ended else { return ELSEWHERE << 56 };
    let (kind, detail) = reason.to_numbers();
    u64::from(kind) << 56 | (slot as u64) << 32 | u64::from(detail)
}

fn unpack(word: u64) -> Option<EndedBy> {
    if word >> 56 == ELSEWHERE {
        return Some(EndedBy::Elsewhere);
    }
    let reason = LostReason::of_numbers((word >> 56) as u8, word as u32)?;
    Some(EndedBy::Slot((word >> 32 & 0xff_ffff) as usize, reason))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_segment_opens_with_its_token_only() {
        let token = JobToken::random().unwrap();
        let (file, _first) = SharedSegment::create(SegmentLayout::new(3, 1000).unwrap(), token).unwrap();
        let second = SharedSegment::open(file.as_fd(), token).unwrap();
        assert_eq!(second.layout, SegmentLayout::new(3, 1000).unwrap());
        let other = JobToken::random().unwrap();
        assert_ne!(other, token);
        assert!(matches!(SharedSegment::open(file.as_fd(), other), Err(JoinError::Token)));
        assert_eq!(token.to_string().parse::<JobToken>(), Ok(token));
        assert!(
            "12".parse::<JobToken>().is_err() && format!("+{}", "0".repeat(31)).parse::<JobToken>().is_err()
        );
    }

    #[test]
    fn files_that_are_not_segments_are_refused_with_the_reason() {
        let token = JobToken::random().unwrap();
        let refused = |file: &OwnedFd| match SharedSegment::open(file.as_fd(), token) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("accepted"),
        };
        let plain: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(refused(&plain).contains("memory file") || refused(&plain).contains("sealed"));
        let unsealed = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(refused(&unsealed).contains("not sealed"));
        rustix::fs::fcntl_add_seals(&unsealed, SEALS).unwrap();
        assert!(refused(&unsealed).contains("0 bytes"));
        let zeros = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&zeros, 1 << 16).unwrap();
        rustix::fs::fcntl_add_seals(&zeros, SEALS).unwrap();
        assert!(refused(&zeros).contains(&format!("version {VERSION} is expected")));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(matches!(SegmentLayout::new(0, 1), Err(JoinError::Size { .. })));
        assert!(matches!(SegmentLayout::new(MOST_RANKS + 1, 1), Err(JoinError::Size { .. })));
        assert!(matches!(SegmentLayout::new(2, usize::MAX), Err(JoinError::Size { .. })));
        assert!(matches!(SegmentLayout::new(usize::MAX, 1), Err(JoinError::Size { .. })));
        assert_eq!(SegmentLayout::new(5, 0).unwrap().half, 5 * LINE);
    }

    #[test]
    fn the_first_report_ends_the_job_and_every_reason_survives_its_packing() {
        let token = JobToken::random().unwrap();
        let (_file, segment) = SharedSegment::create(SegmentLayout::new(3, 0).unwrap(), token).unwrap();
        assert_eq!(segment.ended(), None);
        let first = EndedBy::Slot(2, LostReason::Stopped { seconds: 5 });
        assert_eq!(segment.end(2, LostReason::Stopped { seconds: 5 }), first);
        assert_eq!(segment.end(1, LostReason::Dead), first);
        let (seconds, from) = (7, 1023);
        for reason in [
            LostReason::Dead,
            LostReason::Stopped { seconds },
            LostReason::Left,
            LostReason::GaveUp,
            LostReason::NeverJoined { seconds },
            LostReason::Differs { from },
            LostReason::HostSilent { seconds },
            LostReason::BadFrame,
        ] {
            let ended = EndedBy::Slot(1000, reason);
            assert_eq!(unpack(pack(ended)), Some(ended));
        }
        assert_eq!(unpack(pack(EndedBy::Elsewhere)), Some(EndedBy::Elsewhere));
        assert_eq!(unpack(0), None);
    }

    #[test]
    fn a_segment_of_one_of_several_hosts_names_ranks_of_the_job_and_the_lost_ones_of_other_hosts() {
        let token = JobToken::random().unwrap();
        let new = || SharedSegment::create(SegmentLayout::new(3, 0).unwrap(), token).unwrap().1;
        let segment = new();
        segment.header().hosts.set(8, 16, "n2");
        segment.end(1, LostReason::Differs { from: 2 });
        let here = segment.describe(segment.ended().unwrap());
        assert_eq!((here.rank, here.host.as_str(), here.reason), (9, "n2", LostReason::Differs { from: 10 }));
        let op = OpName::new(3, "gather", 1);
        assert!(
            segment.lost_on(0, op, segment.ended().unwrap()).to_string().contains("; rank 8 was in step 3")
        );

        let segment = new();
        segment.header().hosts.set(8, 16, "n2");
        let last = Some(crate::LastOp { step: 7, name: "reduce".to_owned(), index: 4, inside: true });
        let reason = LostReason::HostSilent { seconds: 5 };
        let host = "x".repeat(255);
        let verdict = RankLost { rank: 15, host, pid: 77, reason, last, by: None, waiting_in: None };
        segment.end_elsewhere(&verdict);
        segment.end(0, LostReason::Dead);
        segment.end_elsewhere(&RankLost { rank: 14, ..verdict.clone() });
        assert_eq!(segment.describe(segment.ended().unwrap()), verdict);
    }
}
