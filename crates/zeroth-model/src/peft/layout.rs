//! The layout of adapters of experts. PEFT keeps the outer matrices of all experts as one [out, rank · experts] whose columns are
//! rank-major; here they are [experts, out, rank].

use std::ops::Range;

use crate::safetensors::WeightsError;
use crate::table::{Parameter, ParameterKind};

/// [experts, out, rank] of the outer matrices of experts' adapters; `None` for what is stored as it is here.
fn sides(parameter: &Parameter) -> Option<[usize; 3]> {
    let sides: [u64; 3] = parameter.shape.as_slice().try_into().ok()?;
    (parameter.kind == ParameterKind::LoraB).then_some(sides.map(|side| side as usize))
}

/// The elements of a whole parameter as they are stored: in another order for the outer matrices of experts' adapters.
pub fn to_stored_layout(parameter: &Parameter, elements: Vec<f32>) -> Vec<f32> {
    let Some([experts, out, rank]) = sides(parameter) else { return elements };
    let mut stored = vec![0.0; elements.len()];
    for (place, element) in elements.iter().enumerate() {
        let (expert, row, column) = (place / (out * rank), place / rank % out, place % rank);
        stored[(row * rank + column) * experts + expert] = *element;
    }
    stored
}

/// Reads a range of a parameter's elements with `read`, which reads them as they are stored.
pub(super) fn read_range(
    parameter: &Parameter,
    elements: Range<u64>,
    out: &mut [f32],
    read: impl Fn(Range<u64>, &mut [f32]) -> Result<(), WeightsError>,
) -> Result<(), WeightsError> {
    let Some([experts, rows, rank]) = sides(parameter) else { return read(elements, out) };
    if elements.is_empty() || elements.end > parameter.elements() {
        return read(elements, out);
    }
    let (first, last) = (elements.start as usize, elements.end as usize - 1);
    // Within one expert only its rows are read; else all of them are.
    let needed = if first / (rows * rank) == last / (rows * rank) {
        first / rank % rows..last / rank % rows + 1
    } else {
        0..rows
    };
    let width = rank * experts;
    let mut stored = vec![0.0; needed.len() * width];
    read((needed.start * width) as u64..(needed.end * width) as u64, &mut stored)?;
    for (place, element) in (first..).zip(out) {
        let (expert, row, column) = (place / (rows * rank), place / rank % rows, place % rank);
        *element = stored[(row - needed.start) * width + column * experts + expert];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outer_matrices_of_experts_are_read_as_they_were_written() {
        // [experts, out, rank]
        let parameter = Parameter::new("b".to_owned(), vec![3, 4, 2], ParameterKind::LoraB);
        let elements: Vec<f32> = (0..24).map(|place| place as f32).collect();
        let stored = to_stored_layout(&parameter, elements.clone());
        // Row 0 of the file: rank 0 of experts 0, 1 and 2, then rank 1 of each.
        assert_eq!(stored[..6], [0.0, 8.0, 16.0, 1.0, 9.0, 17.0]);
        let read = |range: Range<u64>, out: &mut [f32]| {
            out.copy_from_slice(&stored[range.start as usize..range.end as usize]);
            Ok(())
        };
        for range in [0..24, 3..7, 8..16, 10..11, 5..20, 23..24, 4..4_usize] {
            let mut out = vec![f32::NAN; range.len()];
            read_range(&parameter, range.start as u64..range.end as u64, &mut out, read).unwrap();
            assert_eq!(out, elements[range]);
        }
        // A plain adapter is stored as it is.
        let plain = Parameter::new("b".to_owned(), vec![4, 6], ParameterKind::LoraB);
        assert_eq!(to_stored_layout(&plain, elements.clone()), elements);
    }
}
