//! Both device transports with a single rank: opened, used and closed. For two ranks see
//! `zeroth-engine/examples/ranks_on_one_gpu.rs`.

use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zeroth_base::Axis;
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{BarrierCounters, Device, Exchange, IpcHandles, PeerPlace, Queue, Span, Transport};

use super::harness::{Harness, Outcome};

/// Bytes of the page that holds the counter.
const PAGE: usize = 4096;
/// Bytes to exchange, not a multiple of any alignment.
const BYTES: usize = 300_001;

impl Harness {
    pub(super) fn ranks(&mut self) -> Outcome {
        self.single_rank(Transport::Ipc)?;
        match CudaDevice::nccl_version() {
            Ok(version) => {
                println!("NCCL {version}");
                self.single_rank(Transport::Nccl)?;
                self.lost_rank()?;
            }
            Err(error) => println!("skipped: a single rank by nccl: {error}"),
        }
        Ok(())
    }

    /// After a loss no communicator of the device works any more: this is the last of its tests.
    fn lost_rank(&mut self) -> Outcome {
        self.connect(Transport::Nccl, None)?;
        let buffer = self.upload(&[0; 4])?;
        self.device.synchronise()?;
        self.device.abort().expect("a GPU waits for its peers")();
        let exchange = Exchange::Broadcast { root: 0, buffer };
        let is_rejected = self.device.exchange(Axis::Group, Queue::Comm, &exchange, [1, 2]).is_err();
        self.failures += usize::from(!is_rejected);
        println!("nccl aborted: {}", if is_rejected { "ok" } else { "FAILED" });
        self.device.close_ipc_handles(Axis::Group);
        self.next = 0;
        Ok(())
    }

    /// Connects this rank to itself.
    fn connect(&mut self, transport: Transport, counters: Option<BarrierCounters<'_>>) -> Outcome {
        let handle = self.device.ipc_handle(Axis::Group, transport, PeerPlace { rank: 0, one_host: true })?;
        let limit = Transport::connect_limit()?;
        let handles = IpcHandles { transport, rank: 0, handles: &[handle], counters, limit };
        self.device.open_ipc_handles(Axis::Group, &handles)
    }

    fn single_rank(&mut self, transport: Transport) -> Outcome {
        let file = memfd_create("counters", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, PAGE as u64).expect("a page of it");
        let counters = BarrierCounters { file: file.as_fd(), at: 0, bytes: PAGE, first: 0, stride: 64 };
        self.connect(transport, Some(counters))?;
        let values: Vec<u8> = (0..BYTES).map(|at| (at * 31 % 251) as u8).collect();
        let from = self.upload(&values)?;
        self.device.synchronise()?;
        let counts = [BYTES];
        let mut points = [1, 2];
        for name in ["all_gather", "all_gather_in_place", "broadcast", "all_to_all"] {
            let to = self.upload(&vec![0xa5; BYTES])?;
            self.device.synchronise()?;
            let (exchange, found_at): (Exchange<'_>, Span) = match name {
                "all_gather" => (Exchange::AllGather { send: from, recv: to, counts: &counts }, to),
                "all_to_all" => (Exchange::AllToAll { send: from, recv: to, counts: &counts }, to),
                "broadcast" => (Exchange::Broadcast { root: 0, buffer: from }, from),
                _ => (Exchange::AllGatherInPlace { buffer: from, starts: &[0], counts: &counts }, from),
            };
            self.device.exchange(Axis::Group, Queue::Comm, &exchange, points)?;
            let mut found = vec![0; BYTES];
            self.device.download(Queue::Comm, found_at, &mut found)?;
            let is_right = found == values;
            self.failures += usize::from(!is_right);
            let verdict = if is_right { "ok" } else { "FAILED" };
            println!("a single rank by {}, {name} of {BYTES} bytes: {verdict}", transport.name());
            points = points.map(|point| point + 2);
        }
        self.device.close_ipc_handles(Axis::Group);
        self.next = 0;
        Ok(())
    }
}
