//! The case of `Unpack`.

use bytemuck::cast_slice;

use super::{Output, Pair};
use crate::{DeviceError, Kernel, NF4_BLOCK, Nf4Record};

impl Pair<'_> {
    /// Every code with scales of all sizes; the last record, and its last pair of codes, in part.
    pub(super) fn unpack(&mut self) -> Result<(), DeviceError> {
        let record = |number: usize| Nf4Record {
            codes: std::array::from_fn(|at| (at * 37 + at / 97 + number) as u8),
            scales: std::array::from_fn(|at| 0.7 * 0.1f32.powi(((at + number) % 9) as i32)),
        };
        let records: Vec<Nf4Record> = (0..5).map(record).collect();
        let whole = records.len() * Nf4Record::ELEMENTS;
        for count in [whole, whole - Nf4Record::ELEMENTS + 3 * NF4_BLOCK + 5] {
            let records = self.given(cast_slice(&records));
            let y = self.empty(count * self.dtype.bytes() as usize);
            self.compare(Kernel::Unpack { records, y }, &[Output::Exact])?;
        }
        Ok(())
    }
}
