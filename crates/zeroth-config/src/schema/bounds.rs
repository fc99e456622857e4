//! The range of a key's numbers.

/// The range of a key's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Inclusive minimum.
    pub least: Option<f64>,
    /// Exclusive minimum.
    pub above: Option<f64>,
    /// Inclusive maximum.
    pub most: Option<f64>,
    /// Exclusive maximum.
    pub below: Option<f64>,
}

/// Bounds of numbers that stay positive and finite in fp32.
pub(super) const FP32_LEAST: f64 = 1e-37;
pub(super) const FP32_MOST: f64 = 1e38;

impl Bounds {
    pub(super) const NONE: Self = Self { least: None, above: None, most: None, below: None };

    /// Whether the number is within.
    pub fn allow(&self, number: f64) -> bool {
        self.least.is_none_or(|least| number >= least)
            && self.above.is_none_or(|above| number > above)
            && self.most.is_none_or(|most| number <= most)
            && self.below.is_none_or(|below| number < below)
    }

    /// The bounds in words: `at least 1`, `above 0`, `at least 0 and at most 3`.
    pub fn in_words(&self) -> Option<String> {
        let shown = |bound: f64| match bound.abs() {
            size if size > 0.0 && !(1e-6..1e16).contains(&size) => format!("{bound:e}"),
            _ => bound.to_string(),
        };
        // "above 0" says more than "at least 0", and both come from the same number line.
        let low = match (self.above, self.least) {
            (Some(above), _) => Some(format!("above {}", shown(above))),
            (None, Some(least)) => Some(format!("at least {}", shown(least))),
            (None, None) => None,
        };
        let high = match (self.below, self.most) {
            (Some(below), _) => Some(format!("below {}", shown(below))),
            (None, Some(most)) => Some(format!("at most {}", shown(most))),
            (None, None) => None,
        };
        match (low, high) {
            (Some(low), Some(high)) => Some(format!("{low} and {high}")),
            (low, high) => low.or(high),
        }
    }
}
