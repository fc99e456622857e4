//! nf4 against bitsandbytes, byte for byte. The file is written by `tests/golden/make_golden_nf4.py`.

use std::path::Path;

use bytemuck::Zeroable;
use half::bf16;
use serde_json::Value;
use zeroth_cpu::*;
use zeroth_kernel::{Element, NF4_BLOCK, Nf4Record};

const CASES: [&str; 10] = [
    "normal",
    "heavy_tails",
    "midpoints",
    "denormal",
    "one_sided",
    "short",
    "odd",
    "one",
    "short_zeros",
    "short_denormal",
];

struct Golden {
    header: Value,
    data: Vec<u8>,
}

impl Golden {
    fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/nf4/cases.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        assert_eq!(header["__metadata__"]["backend"], "cpu");
        assert_eq!(header.as_object().unwrap().len(), 1 + CASES.len() * 2 * 4, "every tensor is compared");
        Self { header, data: bytes[8 + length..].to_vec() }
    }

    fn bytes(&self, tensor: &str, dtype: &str) -> &[u8] {
        let entry = &self.header[tensor];
        assert_eq!(entry["dtype"], dtype, "{tensor}");
        let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        &self.data[at(0)..at(1)]
    }
}

/// Elements of stored bytes, which need not be aligned.
fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn compare<T: Element>(golden: &Golden, case: &str, dtype: &str) {
    let weights: Vec<T> = elements(golden.bytes(&format!("{case}.elements"), dtype));
    let codes = golden.bytes(&format!("{case}.codes"), "U8");
    let scales: Vec<f32> = elements(golden.bytes(&format!("{case}.scales"), "F32"));
    assert_eq!(codes.len(), weights.len().div_ceil(2), "{case}");
    for &isa in Isa::available() {
        let pool = Pool::on_isa(2, isa).unwrap();
        let mut records = vec![Nf4Record::zeroed(); weights.len().div_ceil(Nf4Record::ELEMENTS)];
        quantize_nf4(&pool, &weights, &mut records);
        let found: Vec<u8> = records.iter().flat_map(|record| record.codes).collect();
        assert!(found[..codes.len()] == *codes, "{case} on {isa:?}: codes");
        let found: Vec<f32> = records.iter().flat_map(|record| record.scales).collect();
        let bits = |scales: &[f32]| scales.iter().map(|scale| scale.to_bits()).collect::<Vec<_>>();
        assert_eq!(scales.len(), weights.len().div_ceil(NF4_BLOCK), "{case}");
        assert_eq!(bits(&found[..scales.len()]), bits(&scales), "{case} on {isa:?}: scales");
        let mut unpacked = vec![T::default(); weights.len()];
        unpack_nf4(&pool, &records, &mut unpacked);
        let expected: Vec<T> = elements(golden.bytes(&format!("{case}.unpacked"), dtype));
        // With AVX-512, bitsandbytes stores subnormal bf16 as 0; its other kernels, and a short last block, do not.
        let is_same = |(found, expected): (&T, &T)| {
            let [found, expected] = [found, expected].map(|element| element.to_f32());
            let is_flushed = dtype == "BF16" && found.is_subnormal() && expected == 0.0;
            is_flushed || found.to_bits() == expected.to_bits()
        };
        assert_eq!(unpacked.len(), expected.len(), "{case}");
        assert!(unpacked.iter().zip(&expected).all(is_same), "{case} on {isa:?}: unpacked");
    }
}

#[test]
fn codes_scales_and_unpacked_weights_are_those_of_bitsandbytes() {
    let golden = Golden::read();
    for case in CASES {
        compare::<f32>(&golden, &format!("{case}.f32"), "F32");
        compare::<bf16>(&golden, &format!("{case}.bf16"), "BF16");
    }
}

#[test]
fn a_tensor_has_the_same_records_in_pieces() {
    let pool = Pool::new(2);
    let count = 5 * Nf4Record::ELEMENTS + 777;
    let mut weights = vec![0.0f32; count];
    normal(&pool, 3, 5, 0, 0.02, &mut weights);
    let records = |weights: &[f32]| {
        let mut records = vec![Nf4Record::zeroed(); weights.len().div_ceil(Nf4Record::ELEMENTS)];
        quantize_nf4(&pool, weights, &mut records);
        records
    };
    let whole = records(&weights);
    let pieces: Vec<Nf4Record> = weights.chunks(2 * Nf4Record::ELEMENTS).flat_map(records).collect();
    assert!(whole == pieces);
    let mut tail = vec![0.0f32; 777];
    unpack_nf4(&pool, &whole[5..], &mut tail);
    let mut all = vec![0.0f32; count];
    unpack_nf4(&pool, &whole, &mut all);
    assert!(all[5 * Nf4Record::ELEMENTS..] == tail);
}

/// A NaN does not vanish: bitsandbytes makes its whole block NaN.
#[test]
fn a_weight_that_is_not_a_number_stays_visible() {
    let pool = Pool::new(1);
    let mut weights = vec![0.5f32; 2 * NF4_BLOCK];
    weights[70] = f32::NAN;
    let mut records = [Nf4Record::zeroed()];
    quantize_nf4(&pool, &weights, &mut records);
    unpack_nf4(&pool, &records, &mut weights);
    assert!(weights[..64].iter().all(|weight| *weight == 0.5) && weights[64..].iter().all(|w| w.is_nan()));
}
