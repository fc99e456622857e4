//! The peers of a rank on a GPU, behind one interface for all transports.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use super::arenas::Arenas;
use super::driver::{Address, Driver, Handle};
use super::ipc::{Ipc, TOKEN};
use super::loss::Loss;
use super::nccl::Nccl;
use zeroth_kernel::{DeviceError, Exchange, IpcHandles, Transport};

/// Connections to all ranks along an axis.
pub(super) enum Peers {
    Ipc(Ipc),
    Nccl(Nccl),
}

impl Peers {
    /// Connects to all ranks along an axis.
    pub(super) fn open(
        gpu: (&Driver, Handle),
        arena: (Address, u64),
        handles: &IpcHandles<'_>,
        stream: Handle,
        loss: &Arc<Loss>,
    ) -> Result<Self, DeviceError> {
        match handles.transport {
            Transport::Ipc => Ipc::open(gpu.0, arena, handles, stream).map(Self::Ipc),
            Transport::Nccl => Nccl::open(gpu, handles, loss).map(Self::Nccl),
            Transport::Host => Err(host_is_no_device_transport()),
        }
    }

    /// Enqueues an exchange.
    pub(super) fn exchange(
        &self,
        driver: &Driver,
        arenas: Arenas,
        exchange: &Exchange<'_>,
        points: [u32; 2],
        stream: Handle,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Ipc(ipc) => ipc.exchange(driver, arenas, exchange, points, stream),
            Self::Nccl(nccl) => nccl.exchange(arenas, exchange, stream),
        }
    }

    /// Whether another rank uses the same GPU.
    pub(super) const fn share_gpu(&self) -> bool {
        match self {
            Self::Ipc(ipc) => ipc.shares_gpu(),
            Self::Nccl(_) => false,
        }
    }

    /// Ends waits of this rank's streams for peers, because they took too long.
    pub(super) fn release(&self) {
        match self {
            Self::Ipc(ipc) => ipc.release(),
            Self::Nccl(nccl) => nccl.abort(),
        }
    }

    /// Why exchanges do not work any more, where that is so.
    pub(super) fn failure(&self) -> Option<DeviceError> {
        match self {
            Self::Ipc(_) => None,
            Self::Nccl(nccl) => nccl.failure(),
        }
    }

    /// Disconnects. All streams must be idle.
    pub(super) fn close(self, driver: &Driver) {
        match self {
            Self::Ipc(mut ipc) => ipc.close(driver),
            Self::Nccl(nccl) => nccl.close(),
        }
    }
}

pub(super) fn host_is_no_device_transport() -> DeviceError {
    let problem = "the host transport does not connect GPUs".to_owned();
    DeviceError::Operands { what: "exchange", problem }
}

/// Random bytes, unique to this call.
pub(super) fn token() -> [u8; TOKEN] {
    let mut token = [0; TOKEN];
    for half in token.as_chunks_mut::<8>().0 {
        // Every `RandomState` has its own keys, derived from the system's random numbers.
        *half = RandomState::new().build_hasher().finish().to_le_bytes();
    }
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_unique() {
        assert_ne!(token(), token());
    }
}
