//! A curve of any length in bounded memory: buckets of steps with minimum and maximum, doubled in width when there are
//! too many, and the newest points as they are.

use std::collections::VecDeque;

use serde::Serialize;

/// Buckets kept, at most: several for each column of the widest screen.
const BUCKETS: usize = 4096;
/// Newest points kept.
const RECENT: usize = 4096;

/// The values of a range of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Bucket {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// The value of the last step.
    pub(crate) end: f64,
}

impl Bucket {
    fn of(step: u64, value: f64) -> Self {
        Self { first: step, last: step, min: value, max: value, end: value }
    }

    fn add(&mut self, later: &Self) {
        self.last = later.last;
        self.min = self.min.min(later.min);
        self.max = self.max.max(later.max);
        self.end = later.end;
    }
}

/// A curve over steps.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    buckets: Vec<Bucket>,
    /// Steps of a bucket.
    width: u64,
    /// The first step after the last bucket.
    end: u64,
    recent: VecDeque<(u64, f64)>,
    /// Points that were not finite.
    pub(crate) gaps: u64,
}

impl Default for Series {
    fn default() -> Self {
        Self { buckets: Vec::new(), width: 1, end: 0, recent: VecDeque::new(), gaps: 0 }
    }
}

impl Series {
    /// Adds a point. One at or before the last step replaces everything from there on, as a resumed run does.
    pub(crate) fn push(&mut self, step: u64, value: f64) {
        if self.buckets.last().is_some_and(|last| last.last >= step) {
            self.truncate(step);
        }
        let point = Bucket::of(step, value);
        match self.buckets.last_mut() {
            Some(last) if step < self.end => last.add(&point),
            _ => {
                self.buckets.push(point);
                self.find_end();
            }
        }
        while self.buckets.len() > BUCKETS {
            self.widen();
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((step, value));
    }

    fn find_end(&mut self) {
        let last = self.buckets.last().map_or(0, |last| last.first);
        self.end = (last / self.width + 1).saturating_mul(self.width);
    }

    fn truncate(&mut self, step: u64) {
        let kept = self.buckets.partition_point(|bucket| bucket.first < step);
        self.buckets.truncate(kept);
        if let Some(last) = self.buckets.last_mut() {
            last.last = last.last.min(step - 1);
        }
        self.find_end();
        while self.recent.back().is_some_and(|(last, _)| *last >= step) {
            self.recent.pop_back();
        }
    }

    fn widen(&mut self) {
        self.width = self.width.saturating_mul(2);
        let width = self.width;
        let mut wide: Vec<Bucket> = Vec::with_capacity(self.buckets.len() / 2 + 1);
        for bucket in &self.buckets {
            match wide.last_mut() {
                Some(last) if last.first / width == bucket.first / width => last.add(bucket),
                _ => wide.push(*bucket),
            }
        }
        self.buckets = wide;
        self.find_end();
    }

    pub(crate) fn last(&self) -> Option<(u64, f64)> {
        self.buckets.last().map(|bucket| (bucket.last, bucket.end))
    }

    /// The points after a step, if none of them is forgotten.
    pub(crate) fn since(&self, step: u64) -> Option<Vec<(u64, f64)>> {
        let first = self.buckets.first().map_or(u64::MAX, |bucket| bucket.first);
        let is_whole = self
            .recent
            .front()
            .is_none_or(|(oldest, _)| *oldest <= step.saturating_add(1) || *oldest == first);
        let from = self.recent.partition_point(|(at, _)| *at <= step);
        is_whole.then(|| self.recent.range(from..).copied().collect())
    }

    /// All of it in at most `count` buckets.
    pub(crate) fn buckets(&self, count: usize) -> Vec<Bucket> {
        let Some((first, last)) = self.buckets.first().zip(self.buckets.last()) else { return Vec::new() };
        if self.buckets.len() <= count {
            return self.buckets.clone();
        }
        let (origin, width) = (first.first, (last.last - first.first) / count.max(1) as u64 + 1);
        let mut few: Vec<Bucket> = Vec::with_capacity(count);
        for bucket in &self.buckets {
            match few.last_mut() {
                Some(last) if (last.first - origin) / width == (bucket.first - origin) / width => {
                    last.add(bucket);
                }
                _ => few.push(*bucket),
            }
        }
        few
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_points_keep_their_extremes() {
        let mut series = Series::default();
        for step in 1..=1_000_000_u64 {
            let value = if step == 123_457 { 1e6 } else { (step % 1000) as f64 };
            series.push(step, value);
        }
        assert!(series.buckets.len() <= BUCKETS && series.recent.len() == RECENT);
        for count in [5000, 100, 7, 1] {
            let buckets = series.buckets(count);
            assert!(buckets.len() <= count);
            assert_eq!((buckets[0].first, buckets.last().unwrap().last), (1, 1_000_000));
            assert!(buckets.windows(2).all(|pair| pair[0].last < pair[1].first));
            let peak = buckets.iter().find(|bucket| bucket.max == 1e6).unwrap();
            assert!((peak.first..=peak.last).contains(&123_457));
            assert!(buckets.iter().any(|bucket| bucket.min == 0.0));
        }
        assert_eq!(series.last(), Some((1_000_000, 0.0)));
    }

    #[test]
    fn a_step_again_replaces_what_follows() {
        let mut series = Series::default();
        (1..=10).for_each(|step| series.push(step, step as f64));
        series.push(6, -6.0);
        assert_eq!(series.last(), Some((6, -6.0)));
        assert_eq!(series.since(4), Some(vec![(5, 5.0), (6, -6.0)]));
        // A damaged number does not hide what follows it.
        series.push(1 << 60, 1.0);
        series.push(7, 7.0);
        assert_eq!(series.last(), Some((7, 7.0)));
    }

    #[test]
    fn points_since_a_step_are_whole_or_none() {
        let mut series = Series::default();
        (10..10_010).for_each(|step| series.push(step, 0.0));
        assert_eq!(series.since(10_000).unwrap().len(), 9);
        assert_eq!(series.since(100), None);
        let mut short = Series::default();
        (10..20).for_each(|step| short.push(step, 0.0));
        assert_eq!(short.since(0).unwrap().len(), 10);
    }
}
