//! The memory of a device: one arena on the GPU, one in pinned host memory.

use super::driver::Address;
use zeroth_kernel::{DeviceError, Span, Tier};

/// Base addresses and sizes of a device's arenas.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arenas {
    /// Address and bytes of the device arena.
    pub(super) device: (Address, u64),
    /// Address and bytes of the pinned host arena.
    pub(super) host: (Address, u64),
}

impl Arenas {
    /// The address of a span, which must be within its arena.
    pub(super) fn find(&self, what: &'static str, span: Span) -> Result<Address, DeviceError> {
        let (base, bytes) = match span.tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
        };
        if span.at.checked_add(span.bytes).is_none_or(|end| end > bytes) {
            let problem = format!("{span:?} is not within the arena's {bytes} bytes");
            return Err(DeviceError::Operands { what, problem });
        }
        Ok(base + span.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_outside_its_arena_is_rejected() {
        let arenas = Arenas { device: (4096, 100), host: (0, 0) };
        assert_eq!(arenas.find("sum", Span::device(60, 40)), Ok(4156));
        assert!(arenas.find("sum", Span::device(61, 40)).is_err());
        assert!(arenas.find("sum", Span::device(u64::MAX, 2)).is_err());
        assert!(arenas.find("sum", Span { tier: Tier::Host, at: 0, bytes: 1 }).is_err());
    }
}
