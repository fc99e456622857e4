//! Memory tiers.

use std::ops::{Index, IndexMut};

/// The memory an arena lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Device memory, where kernels compute.
    Device,
    /// Host memory.
    Host,
}

impl Tier {
    /// All tiers, nearest to the device first.
    pub const ALL: [Self; 2] = [Self::Device, Self::Host];

    /// Its name in messages, reports and dumps.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }

    /// Whether data must be copied to the device before a kernel reads it there.
    pub const fn is_offloaded(self) -> bool {
        !matches!(self, Self::Device)
    }

    /// What a message calls its memory.
    pub const fn memory(self) -> &'static str {
        match self {
            Self::Device => "device memory",
            Self::Host => "host memory",
        }
    }

    /// The alignment of buffers in this tier, in bytes.
    pub const fn alignment(self) -> u64 {
        match self {
            // A cache line pair of the CPU, and what CUDA's vector loads and cuDNN need.
            Self::Device | Self::Host => 256,
        }
    }
}

/// A value for each tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct ByTier<T>([T; Tier::ALL.len()]);

impl<T> ByTier<T> {
    /// The values that a function gives for the tiers.
    pub fn new(value: impl FnMut(Tier) -> T) -> Self {
        Self(Tier::ALL.map(value))
    }

    /// As [`Self::new`], unless one of them fails.
    pub fn try_new<E>(mut value: impl FnMut(Tier) -> Result<T, E>) -> Result<Self, E> {
        let mut all = Vec::with_capacity(Tier::ALL.len());
        for tier in Tier::ALL {
            all.push(value(tier)?);
        }
        let all = <[T; Tier::ALL.len()]>::try_from(all);
        Ok(Self(all.unwrap_or_else(|_| unreachable!("a value of each tier"))))
    }

    /// These values, with another one of a tier.
    #[must_use]
    pub fn with(mut self, tier: Tier, value: T) -> Self {
        self[tier] = value;
        self
    }

    /// Each tier with its value.
    pub fn iter(&self) -> impl Iterator<Item = (Tier, &T)> {
        Tier::ALL.into_iter().zip(&self.0)
    }

    /// The values, in the order of [`Tier::ALL`].
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut()
    }
}

impl<T: Default> ByTier<T> {
    /// A value of the device, and the default of all others.
    pub fn on_device(value: T) -> Self {
        Self::new(|_| T::default()).with(Tier::Device, value)
    }
}

impl ByTier<u64> {
    /// The bytes of all tiers together.
    pub fn sum(self) -> u64 {
        self.0.iter().sum()
    }
}

impl<T> Index<Tier> for ByTier<T> {
    type Output = T;

    fn index(&self, tier: Tier) -> &T {
        &self.0[tier as usize]
    }
}

impl<T> IndexMut<Tier> for ByTier<T> {
    fn index_mut(&mut self, tier: Tier) -> &mut T {
        &mut self.0[tier as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_their_tier() {
        let mut names = ByTier::new(|tier| tier.name().to_owned());
        for tier in Tier::ALL {
            assert_eq!(names[tier], tier.name());
        }
        names[Tier::Host].push('!');
        assert_eq!(names[Tier::Host], "host!");
        assert!(names.iter().map(|(tier, _)| tier).eq(Tier::ALL));
        let failing = ByTier::try_new(|tier| if tier.is_offloaded() { Err(tier) } else { Ok(()) });
        assert_eq!(failing, Err(Tier::Host));
    }

    #[test]
    fn bytes_of_all_tiers_are_summed() {
        let bytes = ByTier::on_device(3).with(Tier::Host, 4);
        assert_eq!((bytes[Tier::Device], bytes.sum()), (3, 7));
    }
}
