//! Progress of loading weights.

use zeroth_graph::Param;
use zeroth_program::Compiled;

/// Tracks loaded elements. Parameters count as if concatenated; a rank reads only its shard of each, so the last
/// report may fall short of the total.
pub(crate) struct LoadProgress<'a> {
    /// Offset of each parameter, by its index in the program.
    starts: Vec<u64>,
    each: u64,
    total: u64,
    /// Elements of the completed states.
    before: u64,
    furthest: u64,
    report: &'a mut dyn FnMut(u64, u64),
}

impl<'a> LoadProgress<'a> {
    /// Tracks the parameters of a program in `states` states each; `report` is called with loaded and total elements.
    pub(crate) fn new(compiled: &Compiled, states: usize, report: &'a mut dyn FnMut(u64, u64)) -> Self {
        Self::of_sizes(compiled.graph.params.iter().map(Param::elements), states, report)
    }

    fn of_sizes(
        sizes: impl Iterator<Item = u64>,
        states: usize,
        report: &'a mut dyn FnMut(u64, u64),
    ) -> Self {
        let mut each = 0;
        let start = |size: u64| {
            let start = each;
            each += size;
            start
        };
        let starts = sizes.map(start).collect();
        Self { starts, each, total: each * states as u64, before: 0, furthest: 0, report }
    }

    /// Reports that a parameter is loaded up to element `end`.
    pub(crate) fn loaded(&mut self, parameter: usize, end: u64) {
        let at = self.before + self.starts.get(parameter).map_or(0, |start| start + end);
        // Parameters may be loaded out of order.
        self.furthest = self.furthest.max(at).min(self.total);
        (self.report)(self.furthest, self.total);
    }

    /// Starts the next state.
    pub(crate) fn next_state(&mut self) {
        self.before += self.each;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_monotonic_and_ends_at_the_total() {
        let sizes = [16, 8, 64, 24];
        let mut reports = Vec::new();
        let mut report = |done, total| reports.push((done, total));
        let mut progress = LoadProgress::of_sizes(sizes.into_iter(), 2, &mut report);
        for state in 0..2 {
            if state > 0 {
                progress.next_state();
            }
            // The first parameter is loaded last, like a tied embedding.
            for parameter in (1..sizes.len()).chain([0]) {
                progress.loaded(parameter, sizes[parameter]);
            }
        }
        assert!(reports.is_sorted(), "{reports:?}");
        let total = 2 * sizes.iter().sum::<u64>();
        assert_eq!(reports.last(), Some(&(total, total)));
    }
}
