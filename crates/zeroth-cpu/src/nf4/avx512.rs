//! Unpacks nf4 with AVX-512: the values of a block's 16 codes fill a register, and a permutation looks up 32 16-bit or 16
//! 32-bit elements at once.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi256_si512,
    _mm512_cvtepu8_epi32, _mm512_cvtepu8_epi64, _mm512_loadu_si512, _mm512_or_si512,
    _mm512_permutexvar_epi16, _mm512_permutexvar_epi32, _mm512_set1_epi32, _mm512_set1_epi64,
    _mm512_slli_epi32, _mm512_slli_epi64, _mm512_srli_epi32, _mm512_srli_epi64, _mm512_storeu_si512,
};

use zeroth_kernel::{Element, NF4_BLOCK, Nf4Record};

use super::{unpack_block, values};

/// The elements of records, or of their beginning.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn unpack<T: Element>(records: &[Nf4Record], to: &mut [T]) {
    for (record, to) in records.iter().zip(to.chunks_mut(Nf4Record::ELEMENTS)) {
        let blocks = record.codes.as_chunks::<{ NF4_BLOCK / 2 }>().0.iter().zip(record.scales);
        for (to, (codes, scale)) in to.chunks_mut(NF4_BLOCK).zip(blocks) {
            let values = values(scale);
            match to.as_mut_array::<NF4_BLOCK>() {
                Some(to) if size_of::<T>() == 2 => halves(codes, &values, to),
                Some(to) if size_of::<T>() == 4 => words(codes, &values, to),
                _ => unpack_block(codes, &values, to),
            }
        }
    }
}

/// A block of 16-bit elements: of each pair the first is in the low half of a 32-bit lane.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn halves<T: Element>(codes: &[u8; NF4_BLOCK / 2], values: &[T; 16], to: &mut [T; NF4_BLOCK]) {
    debug_assert!(size_of::<T>() == 2);
    // SAFETY: 16 values of 2 bytes.
    let table = unsafe { _mm512_castsi256_si512(_mm256_loadu_si256(values.as_ptr().cast())) };
    for half in 0..2 {
        // SAFETY: 16 of 32 codes.
        let pairs = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().add(16 * half).cast()) });
        let second = _mm512_and_si512(_mm512_slli_epi32::<16>(pairs), _mm512_set1_epi32(15 << 16));
        let places = _mm512_or_si512(_mm512_srli_epi32::<4>(pairs), second);
        let found: __m512i = _mm512_permutexvar_epi16(places, table);
        // SAFETY: 32 of 64 elements of 2 bytes.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(32 * half).cast(), found) };
    }
}

/// A block of 32-bit elements: of each pair the first is in the low half of a 64-bit lane.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn words<T: Element>(codes: &[u8; NF4_BLOCK / 2], values: &[T; 16], to: &mut [T; NF4_BLOCK]) {
    debug_assert!(size_of::<T>() == 4);
    // SAFETY: 16 values of 4 bytes.
    let table = unsafe { _mm512_loadu_si512(values.as_ptr().cast()) };
    for quarter in 0..4 {
        // SAFETY: 8 of 32 codes.
        let pairs = _mm512_cvtepu8_epi64(unsafe { _mm_loadl_epi64(codes.as_ptr().add(8 * quarter).cast()) });
        let second = _mm512_and_si512(_mm512_slli_epi64::<32>(pairs), _mm512_set1_epi64(15 << 32));
        let places = _mm512_or_si512(_mm512_srli_epi64::<4>(pairs), second);
        let found: __m512i = _mm512_permutexvar_epi32(places, table);
        // SAFETY: 16 of 64 elements of 4 bytes.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(16 * quarter).cast(), found) };
    }
}
