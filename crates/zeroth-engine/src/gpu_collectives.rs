//! Collectives between cards: which way they go, and meetings that are enqueued like kernels, for which no host waits.

use zeroth_comm::{Comm, CommError, DeviceBarrier, OpName};
use zeroth_kernel::{BarrierCounters, Device, DeviceError, Exchange, IpcHandles, Queue, Transport};

use super::meet::Meeting;
use zeroth_program::Collective;

/// Bytes in which a rank tells the others its door, or why it has none.
const NOTE: usize = 512;

/// The cards of all ranks, which reach each other.
pub(super) struct Cards {
    way: Transport,
    crossing: DeviceBarrier,
}

impl Cards {
    /// Opens the first way that works for all ranks, or says why none does. A way that was asked for by name and does not
    /// work is an error. The arena holds nothing yet.
    pub(super) fn open(
        asked: Option<Transport>,
        device: &mut dyn Device,
        comm: &dyn Comm,
    ) -> Result<Result<Self, String>, Meeting> {
        let ways: &[Transport] = match asked {
            None => &[Transport::Ipc, Transport::Nccl],
            Some(Transport::Ipc) => &[Transport::Ipc],
            Some(Transport::Nccl) => &[Transport::Nccl],
            Some(Transport::Host) => return Ok(Err("asked for by ZEROTH_GPU_COLLECTIVES".to_owned())),
        };
        let crossing = comm.device_barrier();
        let there = if crossing.is_some() { Ok(Vec::new()) } else { Err("no place to meet".to_owned()) };
        let together = tell(comm, "find a place to meet", &there)?;
        let mut reasons = Vec::new();
        if let (Ok(_), Some(crossing)) = (&together, crossing) {
            for way in ways {
                match reach(*way, device, comm, &crossing)? {
                    Ok(()) => {
                        if let Some(abort) = device.abort() {
                            crossing.on_lost(abort);
                        }
                        return Ok(Ok(Self { way: *way, crossing }));
                    }
                    Err(reason) => reasons.push(format!("{}: {reason}", way.name())),
                }
            }
        } else {
            reasons.extend(together.err());
        }
        let reasons = reasons.join("; ");
        match asked {
            Some(way) => Err(Meeting::Device(way.refused(&reasons))),
            None => Ok(Err(reasons)),
        }
    }

    /// How, in words.
    pub(super) fn describe(&self) -> String {
        match self.way {
            Transport::Ipc => "from card to card (CUDA IPC)".to_owned(),
            Transport::Nccl => "from card to card (NCCL)".to_owned(),
            Transport::Host => unreachable!("no way from card to card"),
        }
    }

    /// Enqueues a collective.
    pub(super) fn meet(
        &self,
        name: OpName,
        exchange: &Exchange<'_>,
        device: &mut dyn Device,
        queue: Queue,
    ) -> Result<(), Meeting> {
        let points = self.crossing.next(name).map_err(Meeting::Comm)?;
        device.exchange(queue, exchange, points).map_err(Meeting::Device)
    }

    /// The rank that was lost, if one was: then what the device holds is worth nothing.
    pub(super) fn check(&self, name: OpName) -> Result<(), CommError> {
        self.crossing.check(name)
    }
}

/// A collective that moves bytes and adds nothing.
pub(super) fn exchange(collective: &Collective) -> Option<Exchange<'_>> {
    Some(match collective {
        Collective::AllGather { send, recv, counts } => {
            Exchange::AllGather { send: *send, recv: *recv, counts }
        }
        Collective::InPlace { buffer, starts, counts } => {
            Exchange::InPlace { buffer: *buffer, starts, counts }
        }
        Collective::Broadcast { root, buffer } => Exchange::Broadcast { root: *root, buffer: *buffer },
        Collective::AllToAll { send, recv, counts } => {
            Exchange::AllToAll { send: *send, recv: *recv, counts }
        }
        Collective::Reduce { .. } => return None,
    })
}

/// All ranks try a way; what one of them cannot, all do without.
fn reach(
    way: Transport,
    device: &mut dyn Device,
    comm: &dyn Comm,
    crossing: &DeviceBarrier,
) -> Result<Result<(), String>, Meeting> {
    let door = device.ipc_handle(way, comm.rank()).map_err(|error| error.to_string());
    let doors = match tell(comm, "show doors", &door)? {
        Ok(doors) => doors,
        Err(reason) => return Ok(Err(reason)),
    };
    let (file, at, bytes) = crossing.counters();
    let words = BarrierCounters { file, at, bytes, stride: DeviceBarrier::STRIDE };
    let opened = device.open_ipc_handles(&IpcHandles {
        transport: way,
        rank: comm.rank(),
        handles: &doors,
        counters: words,
    });
    let opened = opened.map(|()| Vec::new()).map_err(|error: DeviceError| error.to_string());
    let reached = tell(comm, "open doors", &opened)?;
    if reached.is_err() {
        device.close_ipc_handles();
    }
    Ok(reached.map(|_| ()))
}

/// What every rank says, in rank order; or the first rank that has nothing to say, and why.
fn tell(
    comm: &dyn Comm,
    name: &'static str,
    own: &Result<Vec<u8>, String>,
) -> Result<Result<Vec<Vec<u8>>, String>, Meeting> {
    const HEAD: usize = 3;
    let (is_well, bytes) = match own {
        Ok(bytes) => (1, bytes.as_slice()),
        Err(reason) => (0, reason.as_bytes()),
    };
    let kept = bytes.len().min(NOTE - HEAD);
    debug_assert!(own.is_err() || kept == bytes.len(), "a door that does not fit");
    let mut note = [0; NOTE];
    note[0] = is_well;
    note[1..HEAD].copy_from_slice(&(kept as u16).to_le_bytes());
    note[HEAD..HEAD + kept].copy_from_slice(&bytes[..kept]);
    let mut all = vec![[0; NOTE]; comm.world()];
    let counts = vec![NOTE; comm.world()];
    let met = comm.all_gather(OpName::new(0, name, 0), &note, all.as_flattened_mut(), &counts);
    met.and_then(zeroth_comm::Handle::wait).map_err(Meeting::Comm)?;
    let said = |note: &[u8; NOTE]| {
        let length = usize::from(u16::from_le_bytes([note[1], note[2]]));
        note[HEAD..HEAD + length].to_vec()
    };
    if let Some(rank) = all.iter().position(|note| note[0] == 0) {
        return Ok(Err(format!("rank {rank}: {}", String::from_utf8_lossy(&said(&all[rank])))));
    }
    Ok(Ok(all.iter().map(said).collect()))
}

#[cfg(test)]
mod tests {
    use zeroth_comm::local::{Job, LocalComm, Options};
    use zeroth_cpu::CpuDevice;
    use zeroth_kernel::Span;

    use super::*;

    fn on_two_ranks<R: Send>(rank: impl Fn(&LocalComm) -> R + Sync) -> Vec<R> {
        let job = Job::create(2, 4096).unwrap();
        std::thread::scope(|scope| {
            let start = |number| {
                let comm = job.join(number, &Options::default()).unwrap();
                let rank = &rank;
                scope.spawn(move || rank(&comm))
            };
            let threads: Vec<_> = (0..2).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn devices_that_do_not_reach_each_other_say_so_and_go_through_the_host() {
        for reasons in on_two_ranks(|comm| {
            let mut device = CpuDevice::new(1, 4096, 0).unwrap();
            let Ok(Err(reasons)) = Cards::open(None, &mut device, comm) else { panic!("no card is here") };
            reasons
        }) {
            assert!(reasons.contains("ipc: rank 0: ") && reasons.contains("nccl: rank 0: "), "{reasons}");
        }
    }

    #[test]
    fn a_way_that_was_asked_for_and_is_not_there_is_an_error_on_every_rank() {
        for error in on_two_ranks(|comm| {
            let mut device = CpuDevice::new(1, 4096, 0).unwrap();
            let Err(Meeting::Device(error)) = Cards::open(Some(Transport::Nccl), &mut device, comm) else {
                panic!("no card is here")
            };
            error.to_string()
        }) {
            assert!(error.contains("ZEROTH_GPU_COLLECTIVES=nccl") && error.contains("write host"), "{error}");
        }
    }

    #[test]
    fn the_host_is_taken_without_a_question_where_it_is_asked_for() {
        for taken in on_two_ranks(|comm| {
            let mut device = CpuDevice::new(1, 4096, 0).unwrap();
            matches!(Cards::open(Some(Transport::Host), &mut device, comm), Ok(Err(_)))
        }) {
            assert!(taken);
        }
    }

    #[test]
    fn the_first_rank_that_has_nothing_to_say_is_named_with_its_reason() {
        let told = on_two_ranks(|comm| {
            let own = if comm.rank() == 1 { Err("x".repeat(2 * NOTE)) } else { Ok(vec![7]) };
            let first = tell(comm, "a", &own).ok().unwrap();
            (first, tell(comm, "b", &Ok(vec![comm.rank() as u8; 3])).ok().unwrap())
        });
        for (first, second) in told {
            let reason = first.unwrap_err();
            assert!(reason.starts_with("rank 1: xxx") && reason.len() < NOTE + 10, "{reason}");
            assert_eq!(second.unwrap(), [[0; 3], [1; 3]]);
        }
    }

    #[test]
    fn what_adds_is_no_exchange() {
        let (send, to) = (Span::device(0, 8), Span::device(8, 8));
        let counts = vec![4, 4];
        let gather = Collective::AllGather { send, recv: to, counts: counts.clone() };
        assert!(exchange(&gather).is_some_and(|exchange| exchange.name() == "all_gather"));
        let starts = vec![0, 4];
        let (from_type, to_type) = (zeroth_base::DType::F32, zeroth_base::DType::F32);
        assert!(
            exchange(&Collective::Reduce {
                send,
                starts,
                counts,
                from_type,
                to,
                to_type,
                add: false,
                squares: None
            })
            .is_none()
        );
    }
}
