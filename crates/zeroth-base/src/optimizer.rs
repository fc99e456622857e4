//! The optimizers and the moments that each keeps.

/// The most moments that an optimizer has.
pub const MOMENTS: usize = Moment::ALL.len();

/// A per-parameter state of an optimizer besides the master weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// An average of gradients, or the momentum buffer of SGD.
    First,
    /// An average or a sum of squared gradients.
    Second,
    /// A second average of gradients.
    Third,
}

impl Moment {
    /// Every moment, in the order of buffers and files.
    pub const ALL: [Self; 3] = [Self::First, Self::Second, Self::Third];

    /// Its name in messages and checkpoints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Second => "second",
            Self::Third => "third",
        }
    }
}

/// Declares the optimizers: number in the CUDA kernels, name in configs, moments.
macro_rules! optimizers {
    ($( $(#[$attribute:meta])* $optimizer:ident = $number:literal, $name:literal, [$($moment:ident),*]; )*) => {
        /// An optimizer. The discriminants are those of the CUDA kernels.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Optimizer {
            $( $(#[$attribute])* $optimizer = $number, )*
        }

        impl Optimizer {
            /// Every optimizer.
            pub const ALL: &[Self] = &[$(Self::$optimizer),*];

            /// The names of all.
            pub const NAMES: &[&str] = &[$($name),*];

            /// Its name, as configs write it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$optimizer => $name,)*
                }
            }

            /// The moments it keeps, in the order of [`Moment::ALL`].
            pub const fn moments(self) -> &'static [Moment] {
                match self {
                    $(Self::$optimizer => &[$(Moment::$moment),*],)*
                }
            }
        }
    };
}

optimizers! {
    /// Adam with weight decay added to the gradient.
    Adam = 1, "Adam", [First, Second];
    /// Adam with decoupled weight decay.
    AdamW = 0, "AdamW", [First, Second];
    /// Stochastic gradient descent. The first moment is the momentum buffer; it may be absent without momentum.
    Sgd = 2, "SGD", [First];
    /// Lion: Chen et al., "Symbolic discovery of optimization algorithms" (2023). The sign of 0 is 0, as in the paper;
    /// DeepSpeed's kernels move such a weight, up on GPUs and down on CPUs.
    Lion = 3, "Lion", [First];
    /// Adagrad.
    Adagrad = 4, "Adagrad", [Second];
    /// AdEMAMix: Pagliardini et al., "The AdEMAMix optimizer: better, faster, older" (2024). The third moment is the slow
    /// average of gradients; it has no bias correction.
    AdEmaMix = 5, "AdEMAMix", [First, Second, Third];
}

impl Optimizer {
    /// One value per moment of [`Moment::ALL`]; `None` where the optimizer does not keep it.
    pub fn each_moment<T>(self, mut value: impl FnMut(Moment) -> T) -> [Option<T>; MOMENTS] {
        Moment::ALL.map(|moment| self.moments().contains(&moment).then(|| value(moment)))
    }
}
