//! NCCL (libnccl), opened at run time: for ranks on GPUs that cannot map each other's memory.
//!
//! NCCL only moves bytes. Reductions are our own kernels, in rank order, so that results do not depend on the transport.

mod functions;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::arenas::Arenas;
use super::driver::{Address, Driver, Handle};
use super::gpu_uuid::{GpuOfHost, ranks_on_one_gpu};
use super::loss::Loss;
use functions::UNIQUE_ID_BYTES;
use worker::{Membership, Operation, Worker};
use zeroth_kernel::bytes_before;
use zeroth_kernel::{DeviceError, Exchange, IpcHandles, PeerPlace, Span};

#[cfg(test)]
pub(super) use functions::{Configuration, IN_PROGRESS, UINT8};
pub(super) use functions::{Functions, UniqueId};

/// Exchanges that have a deadline. Later ones may wait for the GPU, as long as its work takes.
const CONNECTING: u32 = 8;

/// The version of NCCL, such as 2.27.3.
pub(super) fn version() -> Result<String, DeviceError> {
    Functions::open()?.version()
}

/// A rank's handle: its GPU and, from the first rank, the id of the communicator.
pub(super) fn ipc_handle(gpu: GpuOfHost, place: PeerPlace) -> Result<Vec<u8>, DeviceError> {
    if place.one_host {
        functions::stay_on_this_host();
    }
    let functions = Functions::open()?;
    let id = if place.rank == 0 { functions.unique_id()? } else { UniqueId([0; UNIQUE_ID_BYTES]) };
    Ok(gpu.to_bytes().into_iter().chain(id.0).collect())
}

/// Parses the handles of all ranks into their GPUs and the id of the first rank.
fn parse_handles(handles: &[Vec<u8>]) -> Result<(Vec<GpuOfHost>, UniqueId), DeviceError> {
    let parse = |handle: &Vec<u8>| {
        let (gpu, id) = handle.split_first_chunk()?;
        Some((GpuOfHost::from_bytes(*gpu), UniqueId(id.try_into().ok()?)))
    };
    let all: Option<Vec<(GpuOfHost, UniqueId)>> = handles.iter().map(parse).collect();
    let refused = |problem: String| DeviceError::Operands { what: "NCCL", problem };
    let all = all.filter(|all| !all.is_empty());
    let all = all.ok_or_else(|| refused("a rank's handle is not one of NCCL's".to_owned()))?;
    let gpus: Vec<GpuOfHost> = all.iter().map(|(gpu, _)| *gpu).collect();
    if let Some((first, second)) = ranks_on_one_gpu(&gpus) {
        let problem =
            format!("ranks {first} and {second} are on the same GPU; NCCL supports one rank per GPU");
        return Err(refused(problem));
    }
    Ok((gpus, all[0].1))
}

/// A communicator of all ranks along an axis.
pub(super) struct Nccl {
    rank: usize,
    world: usize,
    worker: Worker,
    exchanges: AtomicU32,
    /// The time for each of the first exchanges, which connect to peers.
    limit: Duration,
}

impl Nccl {
    /// Joins the communicator; waits until all ranks have joined, or one is lost.
    pub(super) fn open(
        (driver, context): (&Driver, Handle),
        handles: &IpcHandles<'_>,
        loss: &Arc<Loss>,
    ) -> Result<Self, DeviceError> {
        let IpcHandles { rank, limit, .. } = *handles;
        let (gpus, id) = parse_handles(handles.handles)?;
        let (functions, world) = (Functions::open()?, gpus.len());
        let membership = Membership { functions, driver: driver.clone(), context, id, rank, world };
        let worker = Worker::open(membership, Arc::clone(loss), limit)?;
        Ok(Self { rank, world, worker, exchanges: AtomicU32::new(0), limit })
    }

    /// Enqueues an exchange.
    pub(super) fn exchange(
        &self,
        arenas: Arenas,
        exchange: &Exchange<'_>,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        let connects = self.exchanges.fetch_add(1, Ordering::Relaxed) < CONNECTING;
        self.worker.enqueue(stream, connects.then_some(self.limit), |operations| {
            list(operations, arenas, exchange, self.rank, self.world)
        })
    }

    /// Why exchanges do not work any more, where that is so.
    pub(super) fn failure(&self) -> Option<DeviceError> {
        self.worker.failure()
    }

    /// Ends all waits of streams for peers; no exchange works after it.
    pub(super) fn abort(&self) {
        self.worker.abort();
    }

    /// Ends the communicator. All streams must be idle.
    pub(super) fn close(self) {
        self.worker.close();
    }
}

/// Lists the operations of an exchange.
fn list(
    operations: &mut Vec<Operation>,
    arenas: Arenas,
    exchange: &Exchange<'_>,
    own: usize,
    world: usize,
) -> Result<(), DeviceError> {
    let find = |span: Span| arenas.find(exchange.name(), span);
    match *exchange {
        Exchange::AllGather { send, recv, counts } => {
            let (from, to) = (find(send)?, find(recv)?);
            if let Some(bytes) = equal(counts) {
                operations.push(Operation::AllGather { from, to, bytes });
                return Ok(());
            }
            operations.extend((0..world).map(|root| {
                let to = to + bytes_before(counts, root);
                Operation::Broadcast {
                    root,
                    from: if root == own { from } else { to },
                    to,
                    bytes: counts[root],
                }
            }));
        }
        Exchange::AllGatherInPlace { buffer, starts, counts } => {
            let all = find(buffer)?;
            let parts = starts.iter().zip(counts);
            let parts = parts.map(|(start, count)| find(buffer.part(*start as u64, *count as u64, 1)));
            let parts: Vec<Address> = parts.collect::<Result<_, _>>()?;
            let touch = |count: &usize| (0..world).all(|rank| starts[rank] == starts[0] + rank * count);
            if let Some(bytes) = equal(counts).filter(touch) {
                let (from, to) = (parts[own], all + starts[0] as u64);
                operations.push(Operation::AllGather { from, to, bytes });
                return Ok(());
            }
            let part = |(root, at): (usize, &Address)| Operation::Broadcast {
                root,
                from: *at,
                to: *at,
                bytes: counts[root],
            };
            operations.extend(parts.iter().enumerate().map(part));
        }
        Exchange::Broadcast { root, buffer } => {
            let at = find(buffer)?;
            operations.push(Operation::Broadcast { root, from: at, to: at, bytes: buffer.bytes as usize });
        }
        Exchange::AllToAll { send, recv, counts } => {
            let (from, to) = (find(send)?, find(recv)?);
            for rank in 0..world {
                let from = from + bytes_before(counts, rank);
                operations.push(Operation::Send { to: rank, from, bytes: counts[rank] });
                let to = to + (rank * counts[own]) as u64;
                operations.push(Operation::Receive { from: rank, to, bytes: counts[own] });
            }
        }
    }
    Ok(())
}

/// The common count of all ranks, if they are equal.
fn equal(counts: &[usize]) -> Option<usize> {
    counts.iter().all(|count| *count == counts[0]).then(|| counts[0])
}

#[cfg(test)]
mod tests {
    use zeroth_kernel::ByTier;

    use super::*;

    fn handle(gpu: u8, host: u64, id: u8) -> Vec<u8> {
        let gpu = GpuOfHost { host, gpu: [gpu; 16] };
        gpu.to_bytes().into_iter().chain([id; UNIQUE_ID_BYTES]).collect()
    }

    #[test]
    fn two_ranks_on_one_gpu_are_rejected_before_any_rank_joins() {
        let of_one_host = [handle(1, 9, 5), handle(2, 9, 0), handle(2, 9, 0)];
        let problem = parse_handles(&of_one_host).err().unwrap().to_string();
        assert!(problem.contains("ranks 1 and 2 are on the same GPU"), "{problem}");
        let (gpus, id) = parse_handles(&[handle(1, 9, 5), handle(2, 9, 0)]).unwrap();
        assert_eq!((gpus.len(), id.0), (2, [5; UNIQUE_ID_BYTES]));
        assert!(parse_handles(&[handle(2, 8, 5), handle(2, 9, 0)]).is_ok(), "equal UUIDs of two hosts");
        assert!(parse_handles(&[handle(1, 9, 5), vec![0; 3]]).is_err());
        assert!(parse_handles(&[]).is_err());
    }

    fn listed(exchange: &Exchange<'_>) -> Vec<Operation> {
        let mut operations = Vec::new();
        list(&mut operations, Arenas(ByTier::on_device((1000, 100))), exchange, 1, 2).unwrap();
        operations
    }

    #[test]
    fn equal_parts_are_gathered_by_one_call_and_others_by_broadcasts() {
        let (send, recv) = (Span::device(0, 4), Span::device(8, 8));
        let equal = listed(&Exchange::AllGather { send, recv, counts: &[4, 4] });
        assert_eq!(equal, [Operation::AllGather { from: 1000, to: 1008, bytes: 4 }]);
        let unequal = listed(&Exchange::AllGather { send, recv, counts: &[3, 4] });
        let first = Operation::Broadcast { root: 0, from: 1008, to: 1008, bytes: 3 };
        let second = Operation::Broadcast { root: 1, from: 1000, to: 1011, bytes: 4 };
        assert_eq!(unequal, [first, second]);
        let buffer = Span::device(20, 40);
        let touching = Exchange::AllGatherInPlace { buffer, starts: &[8, 12], counts: &[4, 4] };
        assert_eq!(listed(&touching), [Operation::AllGather { from: 1032, to: 1028, bytes: 4 }]);
        let apart = Exchange::AllGatherInPlace { buffer, starts: &[8, 16], counts: &[4, 4] };
        assert_eq!(listed(&apart).len(), 2);
    }

    /// The addresses on which this process listens, as /proc/net/tcp and tcp6 write them.
    fn listening() -> Vec<String> {
        const LISTEN: &str = "0A";
        let links = std::fs::read_dir("/proc/self/fd").unwrap();
        let own: Vec<String> = links
            .filter_map(|link| Some(std::fs::read_link(link.ok()?.path()).ok()?.to_str()?.to_owned()))
            .collect();
        let tables =
            ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
        let rows = tables.iter().flat_map(|table| table.lines().skip(1));
        let rows = rows.map(|row| row.split_whitespace().collect::<Vec<_>>());
        rows.filter(|row| row[3] == LISTEN && own.contains(&format!("socket:[{}]", row[9])))
            .map(|row| row[1].split(':').next().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn on_one_host_nccl_listens_on_loopback_only() {
        if let Err(error) = Functions::open() {
            println!("skipped: {error}");
            return;
        }
        let gpu = GpuOfHost { host: 1, gpu: [1; 16] };
        let handle = ipc_handle(gpu, PeerPlace { rank: 0, one_host: true }).unwrap();
        assert!(parse_handles(&[handle]).is_ok());
        let listening = listening();
        assert!(!listening.is_empty(), "whoever has the id connects");
        let loopback = ["0100007F", "00000000000000000000000001000000"];
        assert!(listening.iter().all(|address| loopback.contains(&address.as_str())), "{listening:?}");
    }

    #[test]
    fn a_missing_library_is_an_error_with_a_remedy() {
        match version() {
            Ok(version) => assert!(version.starts_with("2."), "{version}"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("libnccl.so.2") && error.contains("nvidia-nccl-cu13"), "{error}");
            }
        }
    }
}
