//! Kernels by name: the program of each and the data types of its instantiations.

use zeroth_base::DType;

/// The data types for which a kernel is instantiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Types {
    /// Not generic.
    None,
    /// Every data type.
    One,
    /// Every pair of data types.
    Two,
    /// Every data type with itself and with f32.
    Widening,
}

/// A kernel, in all its instantiations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryPoint {
    /// Its position in [`super::kernels::ENTRIES`].
    pub(super) number: usize,
    /// The program with its definition.
    pub(super) program: &'static str,
    /// Its name without type suffixes.
    pub(super) name: &'static str,
    pub(super) types: Types,
}

/// Makes a constant of [`EntryPoint`] for each row, and a list of all.
macro_rules! entries {
    ($($entry:ident: $program:literal, $name:literal, $types:ident;)*) => {
        #[derive(Clone, Copy)]
        #[allow(clippy::enum_variant_names, reason = "the names of kernels")]
        enum Position { $($entry),* }

        #[allow(non_upper_case_globals, reason = "they are used like the variants of an enum")]
        impl EntryPoint {
            $(pub(super) const $entry: Self = Self {
                number: Position::$entry as usize,
                program: $program,
                name: $name,
                types: Types::$types,
            };)*
        }

        /// The kernels that every device loads.
        pub(super) const ENTRIES: &[EntryPoint] = &[$(EntryPoint::$entry),*];
    };
}
pub(super) use entries;

/// A data type, its suffix in kernel names, and its name in CUDA.
pub(super) const TYPES: [(DType, &str, &str); 3] =
    [(DType::F32, "f32", "float"), (DType::Bf16, "bf16", "Bf16"), (DType::F16, "f16", "F16")];

pub(super) const fn dtype_index(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}

/// Index of an instantiation in the function table. A missing type counts as index 0.
pub(super) fn function_index(entry: EntryPoint, types: &[DType]) -> usize {
    let at = |number: usize| types.get(number).map_or(0, |&dtype| dtype_index(dtype));
    entry.number * 9 + at(0) * 3 + at(1)
}

impl Types {
    pub(super) fn all(self) -> Vec<(Option<DType>, Option<DType>)> {
        let each = || TYPES.iter().map(|&(dtype, ..)| Some(dtype));
        match self {
            Self::None => vec![(None, None)],
            Self::One => each().map(|dtype| (dtype, None)).collect(),
            Self::Two => each().flat_map(|first| each().map(move |second| (first, second))).collect(),
            Self::Widening => {
                let wide = each().map(|dtype| (dtype, Some(DType::F32)));
                wide.chain(each().skip(1).map(|dtype| (dtype, dtype))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::ENTRIES;

    #[test]
    fn every_instantiation_has_its_own_index() {
        let mut indices = std::collections::BTreeSet::new();
        for &entry in ENTRIES {
            for (first, second) in entry.types.all() {
                let types: Vec<DType> = [first, second].into_iter().flatten().collect();
                assert!(indices.insert(function_index(entry, &types)), "{entry:?} {types:?}");
            }
        }
        assert!(indices.last().is_some_and(|&last| last < ENTRIES.len() * 9));
    }
}
