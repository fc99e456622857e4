//! Counter-based random numbers: case `n` of an audit draws the same ones in every run.

use zeroth::base::philox4x32;

/// The random numbers of one case.
pub(crate) struct Chance {
    key: [u32; 2],
    counter: [u32; 4],
    drawn: Vec<u32>,
}

impl Chance {
    /// Case `case` of the audit with this number.
    pub(crate) fn of(audit: u32, case: u32) -> Self {
        Self { key: [0x5EED, audit], counter: [case, 0, 0, 0], drawn: Vec::new() }
    }

    pub(crate) fn next(&mut self) -> u32 {
        if self.drawn.is_empty() {
            self.drawn = philox4x32(self.counter, self.key).to_vec();
            self.counter[1] += 1;
        }
        self.drawn.pop().expect("four were just drawn")
    }

    /// A number below `most`, which must not be 0.
    pub(crate) fn below(&mut self, most: usize) -> usize {
        let wide = u64::from(self.next()) << 32 | u64::from(self.next());
        (wide % most as u64) as usize
    }

    /// A random element.
    pub(crate) fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}
