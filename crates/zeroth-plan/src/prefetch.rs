//! Whether a block with experts is gathered while the block before it computes.

use zeroth_program::{Compiled, FlatKind, Program, Settings};

/// What it takes to gather a whole block while the one before it is in use, where the settings do not allow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchLimit {
    /// Elements of the two largest consecutive blocks, with those that stay gathered.
    pub live: u64,
    /// Elements of the largest block.
    pub block: u64,
    max_live: u64,
    bucket: u64,
}

impl PrefetchLimit {
    /// The limit of a program; `None` where blocks have no experts of their own unit, where blocks are prefetched, or where
    /// prefetching is off.
    pub fn of(compiled: &Compiled, settings: &Settings) -> Option<Self> {
        let Compiled { graph, program, .. } = compiled;
        let blocks: Vec<_> = graph.blocks().collect();
        let has_parts = blocks.iter().any(|units| units.len() > 1);
        if !has_parts || !settings.overlap || settings.prefetch == 0 {
            return None;
        }
        let elements: Vec<u64> =
            blocks.iter().map(|units| units.iter().map(|unit| gathered(program, *unit)).sum()).collect();
        let block = elements.iter().copied().max().unwrap_or(0);
        let pair = elements.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(0);
        let live = pair + program.layout.persistent_elements();
        let (max_live, bucket) = (settings.max_live, settings.prefetch);
        let is_limited = block > 0 && (live > max_live || block > bucket);
        is_limited.then_some(Self { live, block, max_live, bucket })
    }
}

/// Elements that are copied to gather a unit.
fn gathered(program: &Program, of: zeroth_graph::UnitId) -> u64 {
    let flats = program.layout.flats.iter().enumerate().filter(|(flat, laid)| {
        let is_of_unit = match laid.kind {
            FlatKind::Trained(unit) | FlatKind::Frozen(unit) | FlatKind::Quantized(unit) => unit == of,
            FlatKind::Persistent => false,
        };
        is_of_unit && program.is_sharded(*flat) && !program.is_viewed(*flat)
    });
    flats.map(|(_, laid)| laid.elements()).sum()
}

impl std::fmt::Display for PrefetchLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { live, block, max_live, bucket } = *self;
        let mut limits = Vec::new();
        if live > max_live {
            limits.push(format!("stage3_max_live_parameters {}", rounded_up(live)));
        }
        if block > bucket {
            limits.push(format!("stage3_prefetch_bucket_size {}", rounded_up(block)));
        }
        write!(
            f,
            "the experts of a block are gathered during its own attention, and not before: two blocks are {} elements; {} \
             would gather them during the block before, for as much more memory",
            rounded_up(live),
            limits.join(" with ")
        )
    }
}

/// A number rounded up to two digits, as configs write it.
fn rounded_up(number: u64) -> String {
    let unit = 10u64.pow(number.max(1).ilog10().saturating_sub(1));
    format!("{:e}", number.div_ceil(unit) * unit)
}

#[cfg(test)]
mod tests {
    use super::rounded_up;

    #[test]
    fn numbers_are_rounded_up_to_two_digits() {
        let cases = [
            (0, "0e0"),
            (7, "7e0"),
            (99, "9.9e1"),
            (101, "1.1e2"),
            (1_246_000_000, "1.3e9"),
            (1_300_000_000, "1.3e9"),
        ];
        for (number, expected) in cases {
            assert_eq!(rounded_up(number), expected);
        }
    }
}
