//! A rank alone that meets itself: both ways from card to card, each opened, used and shut. What two ranks do to each other
//! is in `zeroth-engine/examples/ranks_on_one_gpu.rs`.

use std::os::fd::AsFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{BarrierCounters, Device, Exchange, IpcHandles, Queue, Span, Transport};

use super::bench::{Bench, Outcome};

/// Bytes of a page that holds one word.
const PAGE: usize = 4096;
/// Bytes that are exchanged; no multiple of anything.
const BYTES: usize = 300_001;

impl Bench {
    pub(super) fn ranks(&mut self) -> Outcome {
        self.alone(Transport::Ipc)?;
        match CudaDevice::nccl_version() {
            Ok(version) => {
                println!("NCCL {version}");
                self.alone(Transport::Nccl)?;
            }
            Err(error) => println!("skipped: a rank alone by nccl: {error}"),
        }
        Ok(())
    }

    fn alone(&mut self, way: Transport) -> Outcome {
        let file = memfd_create("words", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, PAGE as u64).expect("a page of it");
        let words = BarrierCounters { file: file.as_fd(), at: 0, bytes: PAGE, stride: 64 };
        let door = self.device.ipc_handle(way, 0)?;
        self.device.open_ipc_handles(&IpcHandles {
            transport: way,
            rank: 0,
            handles: &[door],
            counters: words,
        })?;
        let values: Vec<u8> = (0..BYTES).map(|at| (at * 31 % 251) as u8).collect();
        let from = self.given(&values)?;
        self.device.synchronise()?;
        let counts = [BYTES];
        let mut points = [1, 2];
        for name in ["all_gather", "all_gather_in_place", "broadcast", "all_to_all"] {
            let to = self.given(&vec![0xa5; BYTES])?;
            self.device.synchronise()?;
            let (exchange, found_at): (Exchange<'_>, Span) = match name {
                "all_gather" => (Exchange::AllGather { send: from, recv: to, counts: &counts }, to),
                "all_to_all" => (Exchange::AllToAll { send: from, recv: to, counts: &counts }, to),
                "broadcast" => (Exchange::Broadcast { root: 0, buffer: from }, from),
                _ => (Exchange::InPlace { buffer: from, starts: &[0], counts: &counts }, from),
            };
            self.device.exchange(Queue::Comm, &exchange, points)?;
            let mut found = vec![0; BYTES];
            self.device.download(Queue::Comm, found_at, &mut found)?;
            let is_right = found == values;
            self.wrong += usize::from(!is_right);
            let verdict = if is_right { "ok" } else { "FAILED" };
            println!("a rank alone by {}, {name} of {BYTES} bytes: {verdict}", way.name());
            points = points.map(|point| point + 2);
        }
        if let Some(abort) = self.device.abort() {
            abort();
            let exchange = Exchange::Broadcast { root: 0, buffer: from };
            let is_refused = self.device.exchange(Queue::Comm, &exchange, points).is_err();
            self.wrong += usize::from(!is_refused);
            println!("{} given up: {}", way.name(), if is_refused { "ok" } else { "FAILED" });
        }
        self.device.close_ipc_handles();
        self.next = 0;
        Ok(())
    }
}
