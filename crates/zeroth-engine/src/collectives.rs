//! Collectives over arena spans.
//!
//! CPU ranks of a group read each other's arenas through shared windows where they can ([`SharedWindows`]): gathers and
//! reductions copy or add straight from the peers' memory, on all threads of a rank. Without windows, and along rails, bytes
//! go through the communicator of the axis.

use std::ops::Range;

use zeroth_base::{Axis, DType};
use zeroth_comm::{Comm, OpName, PeerSlices, SharedWindows, Transfer};
use zeroth_kernel::{
    Device, DeviceError, Kernel, Launch, PeerMapping, Queue, RankSum, Shared, Span, Tier, Transport,
};

use super::RunError;
use super::error::CollectiveError;
use super::gpu_collectives::{GpuCollectives, exchange};
use zeroth_program::{Collective, Work};

/// Parts smaller than this are sent through the shared-memory regions: that takes one synchronisation instead of two.
const IN_PLACE: usize = 4096;

/// The transport of a rank's collectives along an axis.
#[derive(Default)]
struct AxisTransport {
    /// Whether the ranks' windows are open.
    in_place: bool,
    /// The GPU collectives, where the ranks' GPUs reach each other.
    gpus: Option<GpuCollectives>,
}

/// The transports of a rank's collectives.
pub(super) struct Collectives {
    group: AxisTransport,
    rail: AxisTransport,
    /// A note on the transports.
    how: Option<String>,
    /// Offsets at which all ranks' parameters are mapped; empty where they are gathered by copy.
    seen: Range<u64>,
    /// The range of each rank's window that the current collective reads.
    from: Vec<Range<usize>>,
    /// Host staging buffers for the largest collective, where one is needed.
    send: Vec<u8>,
    receive: Vec<u8>,
}

impl Collectives {
    /// Opens the windows where the ranks have them, and maps the `views` into them. The arena is still empty.
    pub(super) fn new<'w>(
        all: impl Iterator<Item = &'w Work> + Clone,
        device: &mut dyn Device,
        comm: Option<&dyn Comm>,
        views: (u64, u64),
    ) -> Result<Self, CollectiveError> {
        let (from, send, receive) = (Vec::new(), Vec::new(), Vec::new());
        let (group, rail) = (AxisTransport::default(), AxisTransport::default());
        let none = Self { group, rail, how: None, seen: 0..0, from, send, receive };
        let Some(all_ranks) = comm else { return Ok(none) };
        let seen = matches!(device.direct_mut(Span::device(0, 0)), Ok(Some(_)));
        let works = all.filter_map(|work| match work {
            Work::Collective(axis, collective) => Some((*axis, collective)),
            Work::Nothing | Work::Launches(_) => None,
        });
        let in_group = works.clone().filter(|(axis, _)| *axis == Axis::Group);
        let collectives = in_group.map(|(_, collective)| collective);
        let comm = along(all_ranks, Axis::Group);
        let mut in_place = false;
        if let Some(windows) = comm.windows().filter(|_| seen) {
            let spans = joined(collectives.clone().filter_map(|collective| shown(collective, comm.rank())));
            let (file, at) = windows.own();
            let ready = device.share(&Shared { file, at, spans: &spans }).map_err(CollectiveError::Device)?;
            let op = OpName::new(0, "open windows", 0);
            let bytes = device.capacity(Tier::Device) as usize;
            in_place = windows.open(op, bytes, ready).map_err(CollectiveError::Comm)?;
        }
        let ConnectedGpus { group: group_gpus, rail: rail_gpus, mut how } = if seen {
            ConnectedGpus::default()
        } else {
            let is_used = |asked: Axis| works.clone().any(|(axis, _)| axis == asked);
            connect_gpus(device, all_ranks, is_used)?
        };
        let mut in_view = 0..0;
        if views.1 > 0 {
            let peer_mappings = match comm.windows().filter(|_| in_place) {
                Some(windows) => peer_mappings(windows, collectives.clone(), views.0),
                None => Vec::new(),
            };
            if device.map_peers(views.0, views.1, &peer_mappings).map_err(CollectiveError::Device)? {
                in_view = views.0..views.0 + views.1;
            } else {
                how = Some(format!(
                    "by copying, because they cannot map each other's memory: parameters take up to {} a rank more than \
                     planned; zeroth.gather \"copy\" plans for copies, within the bounds of the stage3_* keys",
                    zeroth_base::format_bytes(views.1)
                ));
            }
        }
        let group = AxisTransport { in_place, gpus: group_gpus };
        let rail = AxisTransport { in_place: false, gpus: rail_gpus };
        let (mut send, mut receive) = (0, 0);
        for (axis, collective) in works {
            let AxisTransport { in_place, gpus } = if axis == Axis::Group { &group } else { &rail };
            if gpus.is_some() && exchange(collective).is_some_and(|exchange| exchange.is_on_devices()) {
                continue;
            }
            match collective {
                Collective::AllGather { send: from, recv, .. }
                | Collective::AllToAll { send: from, recv, .. }
                    if !seen =>
                {
                    (send, receive) = (send.max(from.bytes), receive.max(recv.bytes));
                }
                Collective::InPlace { buffer, .. } | Collective::Broadcast { buffer, .. } if !seen => {
                    receive = receive.max(buffer.bytes);
                }
                Collective::Reduce { counts, .. } if !*in_place => {
                    send = send.max(counts.iter().sum::<usize>() as u64);
                    receive = receive.max((counts.len() * counts[along(all_ranks, axis).rank()]) as u64);
                }
                _ => {}
            }
        }
        let (send, receive) = (vec![0; send as usize], vec![0; receive as usize]);
        Ok(Self { group, rail, how, seen: in_view, from: vec![0..0; comm.world()], send, receive })
    }

    /// Whether ranks read each other's parameters outside of collectives.
    pub(super) fn maps_peers(&self) -> bool {
        !self.seen.is_empty()
    }

    /// A note on the transport between GPUs, or on why CPU ranks cannot map each other's memory; `None` in the usual
    /// case.
    pub(super) fn how(&self) -> Option<&str> {
        self.how.as_deref()
    }

    /// Whether collectives are asynchronous: still running after they were enqueued.
    pub(super) fn is_asynchronous(&self) -> bool {
        self.gpus().next().is_some()
    }

    fn gpus(&self) -> impl Iterator<Item = &GpuCollectives> {
        self.group.gpus.iter().chain(&self.rail.gpus)
    }

    fn transport(&self, axis: Axis) -> &AxisTransport {
        match axis {
            Axis::Group => &self.group,
            Axis::Rail => &self.rail,
        }
    }

    /// Checks the result of a host wait. A lost rank takes precedence over the device's own error.
    pub(super) fn checked<T>(
        &self,
        step: u64,
        op: &'static str,
        found: Result<T, DeviceError>,
    ) -> Result<T, RunError> {
        for gpus in self.gpus() {
            let met = gpus.check(OpName::new(step, op, 0));
            met.map_err(|source| RunError::Comm { step, op: op.to_owned(), source })?;
        }
        let of_cause = || self.gpus().find(|gpus| gpus.fails_before_verdict()).or(self.gpus().next());
        found.map_err(|error| match of_cause() {
            Some(gpus) => match gpus.cause(OpName::new(step, op, 0), error) {
                CollectiveError::Device(error) => RunError::device(step, op)(error),
                CollectiveError::Comm(source) => RunError::Comm { step, op: op.to_owned(), source },
            },
            None => RunError::device(step, op)(error),
        })
    }

    /// Runs a collective along an axis, or enqueues it where the GPUs run it.
    pub(super) fn run(
        &mut self,
        comm: &dyn Comm,
        axis: Axis,
        name: OpName,
        collective: &Collective,
        device: &mut dyn Device,
        queue: Queue,
    ) -> Result<(), CollectiveError> {
        let comm = along(comm, axis);
        let AxisTransport { in_place, gpus } = self.transport(axis);
        if let Some(windows) = comm.windows().filter(|_| *in_place && is_read(collective)) {
            return self.read(windows, comm.rank(), name, collective, device, queue);
        }
        if let (Some(gpus), Some(exchange)) = (gpus, exchange(collective))
            && exchange.is_on_devices()
        {
            return gpus.enqueue(name, &exchange, device, queue);
        }
        let go = |transfer: Transfer<'_>| {
            comm.start(name, transfer).and_then(zeroth_comm::Handle::wait).map_err(CollectiveError::Comm)
        };
        let on_device = CollectiveError::Device;
        match collective {
            Collective::AllGather { send, recv, counts } | Collective::AllToAll { send, recv, counts } => {
                let all_gather = matches!(collective, Collective::AllGather { .. });
                if let Some((send, recv)) = device.direct(*send, *recv).map_err(on_device)? {
                    return go(transfer(all_gather, send, recv, counts));
                }
                let (from, to) =
                    (&mut self.send[..send.bytes as usize], &mut self.receive[..recv.bytes as usize]);
                device.download(queue, *send, from).map_err(on_device)?;
                go(transfer(all_gather, from, to, counts))?;
                device.upload(queue, to, *recv).map_err(on_device)
            }
            Collective::InPlace { buffer, starts, counts } => {
                if let Some(buffer) = device.direct_mut(*buffer).map_err(on_device)? {
                    return go(Transfer::AllGatherInPlace { buffer, starts, counts });
                }
                let all = &mut self.receive[..buffer.bytes as usize];
                device.download(queue, *buffer, all).map_err(on_device)?;
                go(Transfer::AllGatherInPlace { buffer: all, starts, counts })?;
                device.upload(queue, all, *buffer).map_err(on_device)
            }
            Collective::Broadcast { root, buffer } => {
                if let Some(buffer) = device.direct_mut(*buffer).map_err(on_device)? {
                    return go(Transfer::Broadcast { root: *root, buffer });
                }
                let all = &mut self.receive[..buffer.bytes as usize];
                device.download(queue, *buffer, all).map_err(on_device)?;
                go(Transfer::Broadcast { root: *root, buffer: all })?;
                device.upload(queue, all, *buffer).map_err(on_device)
            }
            Collective::Reduce { send, starts, counts, .. } => {
                let count = counts[comm.rank()];
                let received = &mut self.receive[..counts.len() * count];
                let own = device.direct_mut(*send).map_err(on_device)?;
                let own = own.expect("sums over ranks are compiled for devices whose arena the host sees");
                let mut end = 0;
                for (start, count) in starts.iter().zip(counts) {
                    self.send[end..end + count].copy_from_slice(&own[*start..start + count]);
                    end += count;
                }
                let send = &self.send[..end];
                go(Transfer::AllToAll { send, recv: received, counts })?;
                let other = |rank: usize| &received[rank * count..(rank + 1) * count];
                device.sum_ranks(queue, &sum(collective, comm.rank(), &other)).map_err(on_device)
            }
        }
    }

    /// Runs a collective through the windows.
    fn read(
        &mut self,
        windows: &dyn SharedWindows,
        rank: usize,
        name: OpName,
        collective: &Collective,
        device: &mut dyn Device,
        queue: Queue,
    ) -> Result<(), CollectiveError> {
        let from = &mut self.from;
        match collective {
            // All ranks have arrived, so their shards are complete and mapped already.
            Collective::AllGather { recv, .. } if self.seen.contains(&recv.at) => {
                from.fill(0..0);
                return windows.read(name, from, &mut |_| ()).map_err(CollectiveError::Comm);
            }
            Collective::AllGather { send, recv, counts } => {
                from.iter_mut().zip(counts).for_each(|(from, count)| *from = part(*send, 0, *count));
                let start = counts[..rank].iter().sum::<usize>();
                let to = recv.part(start as u64, send.bytes, 1);
                device.enqueue(queue, &copy(*send, to)).map_err(CollectiveError::Device)?;
            }
            Collective::InPlace { buffer, starts, counts } => {
                let parts = starts.iter().zip(counts);
                let parts = parts.map(|(start, count)| part(*buffer, *start, *count));
                from.iter_mut().zip(parts).for_each(|(from, part)| *from = part);
            }
            Collective::Broadcast { root, buffer } => {
                from.fill(0..0);
                from[*root] = part(*buffer, 0, buffer.bytes as usize);
            }
            Collective::AllToAll { send, recv, counts } => {
                let own = own_part(*send, counts, rank);
                from.fill(part(own, 0, own.bytes as usize));
                let to = recv.part(rank as u64 * own.bytes, own.bytes, 1);
                device.enqueue(queue, &copy(own, to)).map_err(CollectiveError::Device)?;
            }
            Collective::Reduce { send, starts, counts, .. } => {
                let own = send.part(starts[rank] as u64, counts[rank] as u64, 1);
                from.fill(part(own, 0, own.bytes as usize));
            }
        }
        let mut outcome = Ok(());
        let met =
            windows.read(name, from, &mut |peers| outcome = take(peers, rank, collective, device, queue));
        met.map_err(CollectiveError::Comm)?;
        outcome.map_err(CollectiveError::Device)
    }
}

/// The GPUs along both axes, where they reach each other, and a note on how.
#[derive(Default)]
struct ConnectedGpus {
    group: Option<GpuCollectives>,
    rail: Option<GpuCollectives>,
    how: Option<String>,
}

/// Connects the GPUs along the axes that the program uses; along the rail only in a mesh.
fn connect_gpus(
    device: &mut dyn Device,
    comm: &dyn Comm,
    is_used: impl Fn(Axis) -> bool,
) -> Result<ConnectedGpus, CollectiveError> {
    let asked = Transport::from_env().map_err(CollectiveError::Device)?;
    let is_mesh = comm.mesh().is_some();
    let (mut connected, mut notes) = (ConnectedGpus::default(), Vec::new());
    let axes = Axis::ALL.into_iter();
    for axis in axes.filter(|axis| if is_mesh { is_used(*axis) } else { *axis == Axis::Group }) {
        let ranks = along(comm, axis);
        let opened = if axis == Axis::Rail && comm.of_machine().is_some() {
            Ok(GpuCollectives::open_between_machines(asked, device, ranks)?)
        } else {
            GpuCollectives::open(asked, axis, device, ranks)?
        };
        let how = match &opened {
            Ok(open) => open.describe(),
            Err(reason) => format!("through the memory of the host ({reason})"),
        };
        let where_to = match axis {
            _ if !is_mesh => "",
            Axis::Group => "within groups ",
            Axis::Rail => "between groups ",
        };
        notes.push(format!("{where_to}{how}"));
        match axis {
            Axis::Group => connected.group = opened.ok(),
            Axis::Rail => connected.rail = opened.ok(),
        }
    }
    connected.how = Some(notes.join("; ")).filter(|how| !how.is_empty());
    Ok(connected)
}

/// The communicator along an axis. Where ranks have no mesh, all of them are on the one axis that collectives have.
pub(super) fn along(comm: &dyn Comm, axis: Axis) -> &dyn Comm {
    comm.mesh().map_or(comm, |mesh| mesh.along(axis))
}

/// The mappings of all ranks' windows that zero-copy gathers need, each once.
fn peer_mappings<'w>(
    windows: &'w dyn SharedWindows,
    collectives: impl Iterator<Item = &'w Collective>,
    views: u64,
) -> Vec<PeerMapping<'w>> {
    let mut peer_mappings: Vec<PeerMapping<'_>> = Vec::new();
    for collective in collectives {
        let Collective::AllGather { send, recv, counts } = collective else { continue };
        if recv.at < views || peer_mappings.iter().any(|sight| sight.to.at == recv.at) {
            continue;
        }
        let mut start = 0;
        for (rank, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (file, at) = windows.of(rank);
            peer_mappings.push(PeerMapping {
                to: recv.part(start, *count as u64, 1),
                file,
                at: at + send.at,
            });
            start += *count as u64;
        }
    }
    peer_mappings
}

/// Copies or sums this rank's part of a collective from the peers' windows.
fn take(
    peers: &PeerSlices<'_>,
    rank: usize,
    collective: &Collective,
    device: &mut dyn Device,
    queue: Queue,
) -> Result<(), DeviceError> {
    let mut put = |from: usize, to: Span, start: usize, count: usize| {
        if from == rank {
            return Ok(());
        }
        device.upload(queue, peers.of(from), to.part(start as u64, count as u64, 1))
    };
    match collective {
        Collective::AllGather { recv, counts, .. } => {
            let mut start = 0;
            for (from, count) in counts.iter().enumerate() {
                put(from, *recv, start, *count)?;
                start += count;
            }
            Ok(())
        }
        Collective::InPlace { buffer, starts, counts } => {
            let mut parts = starts.iter().zip(counts).enumerate();
            parts.try_for_each(|(from, (start, count))| put(from, *buffer, *start, *count))
        }
        Collective::Broadcast { root, buffer } => put(*root, *buffer, 0, buffer.bytes as usize),
        Collective::AllToAll { recv, counts, .. } => {
            let count = counts[rank];
            (0..counts.len()).try_for_each(|from| put(from, *recv, from * count, count))
        }
        Collective::Reduce { .. } => {
            device.sum_ranks(queue, &sum(collective, rank, &|other| peers.of(other)))
        }
    }
}

/// The operands of a reduction.
fn sum<'a>(
    collective: &Collective,
    rank: usize,
    other: &'a (dyn Fn(usize) -> &'a [u8] + Sync),
) -> RankSum<'a> {
    let Collective::Reduce { send, starts, counts, from_type, to, to_type, add, squares } = collective else {
        unreachable!("{collective:?} adds nothing")
    };
    let own = send.part(starts[rank] as u64, counts[rank] as u64, 1);
    let (from_type, to_type, add) = (*from_type, *to_type, *add);
    RankSum { ranks: counts.len(), rank, own, other, from_type, to: *to, to_type, add, squares: *squares }
}

/// Whether a collective goes through open windows; equal on all ranks.
fn is_read(collective: &Collective) -> bool {
    let most = |counts: &[usize]| counts.iter().copied().max().unwrap_or(0) >= IN_PLACE;
    match collective {
        Collective::AllGather { send, counts, .. } | Collective::AllToAll { send, counts, .. } => {
            send.tier == Tier::Device && most(counts)
        }
        Collective::InPlace { buffer, counts, .. } => buffer.tier == Tier::Device && most(counts),
        Collective::Broadcast { buffer, .. } => {
            buffer.tier == Tier::Device && buffer.bytes >= IN_PLACE as u64
        }
        Collective::Reduce { .. } => true,
    }
}

/// The span of this rank's arena that peers read in a collective.
fn shown(collective: &Collective, rank: usize) -> Option<Span> {
    if !is_read(collective) {
        return None;
    }
    match collective {
        Collective::AllGather { send, .. }
        | Collective::AllToAll { send, .. }
        | Collective::Reduce { send, .. } => Some(*send),
        Collective::InPlace { buffer, starts, counts } => {
            Some(buffer.part(starts[rank] as u64, counts[rank] as u64, 1))
        }
        Collective::Broadcast { root, buffer } => (*root == rank).then_some(*buffer),
    }
}

/// Sorts spans and merges those that touch or overlap.
fn joined(spans: impl Iterator<Item = Span>) -> Vec<Span> {
    let mut spans: Vec<Span> = spans.filter(|span| span.bytes > 0).collect();
    spans.sort_unstable_by_key(|span| span.at);
    spans.dedup_by(|next, before| {
        let touches = next.at <= before.end();
        if touches {
            before.bytes = next.end().max(before.end()) - before.at;
        }
        touches
    });
    spans
}

fn own_part(send: Span, counts: &[usize], rank: usize) -> Span {
    send.part(counts[..rank].iter().sum::<usize>() as u64, counts[rank] as u64, 1)
}

/// A part of a span, as a range of the arena and so of the window.
fn part(span: Span, start: usize, count: usize) -> Range<usize> {
    let first = span.at as usize + start;
    first..first + count
}

fn copy(from: Span, to: Span) -> Launch {
    let (dtype, scratch) = (DType::F32, Span::device(0, 0));
    Launch {
        kernel: Kernel::Convert { from, from_type: dtype, to, to_type: dtype, found_inf: None },
        dtype,
        scratch,
    }
}

fn transfer<'a>(all_gather: bool, send: &'a [u8], recv: &'a mut [u8], counts: &'a [usize]) -> Transfer<'a> {
    if all_gather {
        Transfer::AllGather { send, recv, counts }
    } else {
        Transfer::AllToAll { send, recv, counts }
    }
}
