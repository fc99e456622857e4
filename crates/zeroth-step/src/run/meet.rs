//! Collectives over places in an arena: in the arena itself where the host sees it, else through host memory.

use zeroth_comm::{Comm, CommError, OpName, Transfer};
use zeroth_device::{Device, DeviceError, Queue, Span, Tier};

use crate::program::{Collective, Work};

/// Why a collective failed.
pub(super) enum Meeting {
    Device(DeviceError),
    Comm(CommError),
}

/// Host memory that the largest collective goes through; none where the host sees the arena.
pub(super) struct Staging {
    send: Vec<u8>,
    receive: Vec<u8>,
}

impl Staging {
    pub(super) fn new<'w>(all: impl Iterator<Item = &'w Work>, device: &mut dyn Device) -> Self {
        if matches!(device.direct_mut(Span { tier: Tier::Device, at: 0, bytes: 0 }), Ok(Some(_))) {
            return Self { send: Vec::new(), receive: Vec::new() };
        }
        let (mut send, mut receive) = (0, 0);
        for work in all {
            match work {
                Work::Collective(
                    Collective::AllGather { send: s, recv, .. } | Collective::AllToAll { send: s, recv, .. },
                ) => (send, receive) = (send.max(s.bytes), receive.max(recv.bytes)),
                Work::Collective(
                    Collective::InPlace { buffer, .. } | Collective::Broadcast { buffer, .. },
                ) => receive = receive.max(buffer.bytes),
                Work::Nothing | Work::Launches(_) => {}
            }
        }
        Self { send: vec![0; send as usize], receive: vec![0; receive as usize] }
    }

    /// Carries a collective out.
    pub(super) fn meet(
        &mut self,
        comm: &dyn Comm,
        name: OpName,
        collective: &Collective,
        device: &mut dyn Device,
        queue: Queue,
    ) -> Result<(), Meeting> {
        let go = |transfer: Transfer<'_>| {
            comm.start(name, transfer).and_then(zeroth_comm::Handle::wait).map_err(Meeting::Comm)
        };
        let on_device = Meeting::Device;
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
        }
    }
}

fn transfer<'a>(all_gather: bool, send: &'a [u8], recv: &'a mut [u8], counts: &'a [usize]) -> Transfer<'a> {
    if all_gather {
        Transfer::AllGather { send, recv, counts }
    } else {
        Transfer::AllToAll { send, recv, counts }
    }
}
