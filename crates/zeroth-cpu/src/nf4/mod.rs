//! nf4 weights ([`Nf4Record`]): quantised as they are loaded, unpacked right before an op reads them.

#[cfg(target_arch = "x86_64")]
mod avx512;

use zeroth_kernel::{Element, NF4_BLOCK, NF4_CODEBOOK, NF4_MIDPOINTS, NF4_ZERO, Nf4Record};

use super::check_len;
use super::isa::{Isa, each_isa};
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::work_partition::Chunks;

/// Records per task.
const RECORDS: usize = 8;
/// Elements per task.
const PIECE: usize = RECORDS * Nf4Record::ELEMENTS;
/// The least divisor of bitsandbytes: a block of zeros is divided by it.
const LEAST_SCALE: f32 = 1e-38;
/// Two codes of 0.
const ZEROS: u8 = NF4_ZERO << 4 | NF4_ZERO;

/// records = the elements of a tensor, or a piece of it that begins at a record, quantised as bitsandbytes does on the CPU.
pub fn quantize_nf4<T: Element>(pool: &Pool, elements: &[T], records: &mut [Nf4Record]) {
    check_len("records", records.len(), elements.len().div_ceil(Nf4Record::ELEMENTS));
    pool.each(Chunks::new(records, RECORDS), |task, records| {
        let first = task * PIECE;
        let end = elements.len().min(first + PIECE);
        quantize_piece(pool.isa(), &elements[first..end], records);
    });
}

each_isa! {
    fn quantize_piece<T>(elements: &[T], records: &mut [Nf4Record]) {
        for (elements, record) in elements.chunks(Nf4Record::ELEMENTS).zip(records) {
            *record = Nf4Record { codes: [ZEROS; _], scales: [0.0; _] };
            let blocks = record.codes.chunks_exact_mut(NF4_BLOCK / 2).zip(&mut record.scales);
            for (elements, (codes, scale)) in elements.chunks(NF4_BLOCK).zip(blocks) {
                let mut block = [0.0f32; NF4_BLOCK];
                for (to, from) in block.iter_mut().zip(elements) {
                    *to = from.to_f32();
                }
                // As integers, magnitudes compare as numbers do, and a NaN is larger than all of them.
                let most = block.iter().fold(0, |most, element| (element.to_bits() & !(1 << 31)).max(most));
                let most = f32::from_bits(most);
                let divisor = if most < LEAST_SCALE { LEAST_SCALE } else { most };
                // bitsandbytes multiplies whole blocks by the reciprocal and divides a short one, whose scale is never 0.
                if elements.len() == NF4_BLOCK {
                    *scale = most;
                    let factor = 1.0 / divisor;
                    for element in &mut block {
                        *element *= factor;
                    }
                } else {
                    *scale = divisor;
                    for element in &mut block {
                        *element /= divisor;
                    }
                }
                let mut numbers = [0u32; NF4_BLOCK];
                for (number, element) in numbers.iter_mut().zip(&block) {
                    // A NaN has no midpoint above it: code 15.
                    let above = NF4_MIDPOINTS.map(|midpoint| u32::from(midpoint >= *element));
                    *number = 15 - above.iter().sum::<u32>();
                }
                for (code, pair) in codes.iter_mut().zip(numbers.chunks_exact(2)) {
                    *code = (pair[0] << 4 | pair[1]) as u8;
                }
            }
        }
    }
}

/// to = the elements of records, of which the last may have more than `to`: codebook · scale in f32, then rounded to T.
pub fn unpack_nf4<T: Element>(pool: &Pool, records: &[Nf4Record], to: &mut [T]) {
    check_len("records", records.len(), to.len().div_ceil(Nf4Record::ELEMENTS));
    pool.each(Chunks::new(to, PIECE), |task, to| {
        let records = &records[task * RECORDS..];
        match pool.isa() {
            #[cfg(target_arch = "x86_64")]
            #[allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]
            // SAFETY: these instruction sets are available only with AVX-512.
            Isa::Avx512 | Isa::Amx => unsafe { avx512::unpack(records, to) },
            isa => unpack_piece(isa, records, to),
        }
    });
}

/// The values of a block's codes.
#[inline(always)]
fn values<T: Element>(scale: f32) -> [T; 16] {
    NF4_CODEBOOK.map(|value| T::from_f32(value * scale))
}

/// The elements of a block, or of its beginning.
#[inline(always)]
fn unpack_block<T: Element>(codes: &[u8], values: &[T; 16], to: &mut [T]) {
    for (to, pair) in to.chunks_mut(2).zip(codes) {
        to[0] = values[usize::from(pair >> 4)];
        if let Some(second) = to.get_mut(1) {
            *second = values[usize::from(pair & 15)];
        }
    }
}

each_isa! {
    fn unpack_piece<T>(records: &[Nf4Record], to: &mut [T]) {
        for (record, to) in records.iter().zip(to.chunks_mut(Nf4Record::ELEMENTS)) {
            let blocks = record.codes.chunks_exact(NF4_BLOCK / 2).zip(record.scales);
            for (to, (codes, scale)) in to.chunks_mut(NF4_BLOCK).zip(blocks) {
                unpack_block(codes, &values(scale), to);
            }
        }
    }
}

cpu_kernel!(Unpack { records, y }, |_| 0, |cx| unpack_nf4::<T>(cx.pool, cx.read(records)?, cx.write(y)?));

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn every_isa_unpacks_what_was_quantised<T: Element + PartialEq>() {
        let count = 3 * PIECE + 2 * Nf4Record::ELEMENTS + 131;
        let elements: Vec<T> = (0..count).map(|i| T::from_f32((i as f32 * 0.37).sin() * 0.02)).collect();
        for &isa in Isa::available() {
            let pool = Pool::on_isa(2, isa).unwrap();
            let mut records = vec![bytemuck::Zeroable::zeroed(); count.div_ceil(Nf4Record::ELEMENTS)];
            quantize_nf4(&pool, &elements, &mut records);
            let mut found = vec![T::default(); count];
            unpack_nf4(&pool, &records, &mut found);
            for (place, (found, element)) in found.iter().zip(&elements).enumerate() {
                let record = &records[place / Nf4Record::ELEMENTS];
                let expected = record.element(place % Nf4Record::ELEMENTS);
                assert!(*found == T::from_f32(expected), "{isa:?}, element {place}");
                // Half the widest gap between values is 0.152.
                assert!((expected - element.to_f32()).abs() < 0.16 * 0.02, "{isa:?}, element {place}");
            }
            let last = records.last().unwrap();
            assert!(last.codes[66..].iter().all(|pair| *pair == ZEROS) && last.scales[3..] == [0.0; 29]);
        }
    }

    #[test]
    fn every_isa_unpacks_what_was_quantised_in_every_dtype() {
        every_isa_unpacks_what_was_quantised::<f32>();
        every_isa_unpacks_what_was_quantised::<bf16>();
        every_isa_unpacks_what_was_quantised::<f16>();
    }
}
