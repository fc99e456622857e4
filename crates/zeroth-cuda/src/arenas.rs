//! The memory of a device: an arena of each tier, on the GPU and in pinned host memory.

use super::driver::Address;
use zeroth_kernel::{ByTier, DeviceError, Span};

/// Address and bytes of each arena.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arenas(pub(super) ByTier<(Address, u64)>);

impl Arenas {
    /// The address of a span, which must be within its arena.
    pub(super) fn find(&self, what: &'static str, span: Span) -> Result<Address, DeviceError> {
        let (base, bytes) = self.0[span.tier];
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
    use zeroth_kernel::Tier;

    #[test]
    fn a_span_outside_its_arena_is_rejected() {
        let arenas = Arenas(ByTier::on_device((4096, 100)));
        assert_eq!(arenas.find("sum", Span::device(60, 40)), Ok(4156));
        assert!(arenas.find("sum", Span::device(61, 40)).is_err());
        assert!(arenas.find("sum", Span::device(u64::MAX, 2)).is_err());
        assert!(arenas.find("sum", Span { tier: Tier::Host, at: 0, bytes: 1 }).is_err());
    }
}
