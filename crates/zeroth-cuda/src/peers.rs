//! The other ranks as a card reaches them: one way or another, behind the same few functions.
#![allow(unsafe_code, reason = "asks the driver which card this is")]

use std::ffi::c_int;
use std::hash::{BuildHasher, Hasher, RandomState};

use super::driver::{Address, Driver, Handle};
use super::ipc::{Ipc, TOKEN};
use super::library::Library;
use super::line::Arenas;
use super::nccl::Nccl;
use zeroth_kernel::{DeviceError, Exchange, IpcHandles, Transport};

/// Which card, wherever it is seen from.
pub(super) type Card = [u8; 16];

/// The ranks that a card exchanges bytes with.
pub(super) enum Peers {
    Ipc(Ipc),
    Nccl(Nccl),
}

impl Peers {
    /// Reaches all ranks.
    pub(super) fn open(
        driver: &Driver,
        arena: (Address, u64),
        doors: &IpcHandles<'_>,
        stream: Handle,
    ) -> Result<Self, DeviceError> {
        match doors.transport {
            Transport::Ipc => Ipc::open(driver, arena, doors, stream).map(Self::Ipc),
            Transport::Nccl => Nccl::open(doors.rank, doors.handles).map(Self::Nccl),
            Transport::Host => Err(not_on_cards()),
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

    /// Whether another rank is on this rank's card.
    pub(super) const fn share_a_card(&self) -> bool {
        match self {
            Self::Ipc(ipc) => ipc.shares_its_card(),
            Self::Nccl(_) => false,
        }
    }

    /// What ends the waiting for a lost rank from another thread; none where the ranks' words do.
    pub(super) fn abort(&self) -> Option<Box<dyn Fn() + Send>> {
        match self {
            Self::Ipc(_) => None,
            Self::Nccl(nccl) => Some(nccl.abort()),
        }
    }

    /// Lets go of everything. All queues are empty.
    pub(super) fn close(self, driver: &Driver) {
        match self {
            Self::Ipc(mut ipc) => ipc.close(driver),
            Self::Nccl(nccl) => nccl.close(),
        }
    }
}

pub(super) fn not_on_cards() -> DeviceError {
    let problem = "through the host's memory is no way from card to card".to_owned();
    DeviceError::Operands { what: "exchange", problem }
}

/// Bytes that nobody else has drawn.
pub(super) fn token() -> [u8; TOKEN] {
    let mut token = [0; TOKEN];
    for half in token.as_chunks_mut::<8>().0 {
        // Each state of the standard library's maps has keys of its own, from the system's random numbers.
        *half = RandomState::new().build_hasher().finish().to_le_bytes();
    }
    token
}

/// Which card a device is.
pub(super) fn card(driver: &Driver, device: c_int) -> Result<Card, DeviceError> {
    let library = Library::open(&["libcuda.so.1"], "Install NVIDIA's driver")?;
    // SAFETY: the type that cuda.h declares for it.
    let identify: unsafe extern "C" fn(*mut Card, c_int) -> c_int =
        unsafe { library.function("cuDeviceGetUuid_v2")? };
    let mut card = Card::default();
    // SAFETY: writes 16 bytes.
    driver.check("cuDeviceGetUuid", unsafe { identify(&raw mut card, device) })?;
    Ok(card)
}

/// Two ranks on the same card, where there are any.
pub(super) fn on_one_card(cards: &[Card]) -> Option<(usize, usize)> {
    let before = |at: usize| cards[..at].iter().position(|card| *card == cards[at]);
    (0..cards.len()).find_map(|at| before(at).map(|first| (first, at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_card_are_found() {
        let card = |number: u8| [number; 16];
        assert_eq!(on_one_card(&[card(1), card(2), card(3)]), None);
        assert_eq!(on_one_card(&[card(1), card(2), card(1)]), Some((0, 2)));
        assert_eq!(on_one_card(&[]), None);
    }

    #[test]
    fn tokens_differ() {
        assert_ne!(token(), token());
    }
}
