//! Same bits whatever runs them.

use zeroth_cpu::*;
use zeroth_kernel::*;

use super::everything::{AllTypes, MOST_THREADS};

#[test]
fn every_kernel_gives_the_same_bits_on_1_2_3_and_7_threads() {
    for &path in Isa::available() {
        let mut all = AllTypes::new();
        let mut expected = None;
        for threads in [1, 2, 3, MOST_THREADS] {
            all.run(&Pool::on_isa(threads, path).unwrap());
            let found = all.bits();
            let expected = expected.get_or_insert_with(|| found.clone());
            for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                for (output, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert!(found == expected, "{path:?}, {threads} threads, type {index}, output {output}");
                }
            }
            let finite = |bits: &[Vec<u64>]| {
                let (sums, rest) = bits.split_last().unwrap();
                sums.iter().all(|&bits| f64::from_bits(bits).is_finite())
                    && rest.iter().flatten().all(|&bits| f32::from_bits(bits as u32).is_finite())
            };
            assert!(found.iter().all(|bits| finite(bits)), "scratch from before was read");
        }
        for bits in all.bits() {
            let sums = bits.last().unwrap();
            assert_eq!(sums[0], sums[1], "evaluation and training see the same loss");
        }
    }
}

#[test]
fn attention_of_a_sequence_does_not_depend_on_its_position_in_the_pack() {
    let pool = Pool::new(2);
    let run = |before: usize| {
        let rows = before + 300;
        let dims = AttentionDims::new(rows, 2, 1, 6, Some(200), 0.4);
        let starts = [0, before as u32, rows as u32];
        let random = |name: u64, width: usize| {
            let mut own = vec![0.0f32; 300 * width];
            normal(&pool, 1, name, 0, 1.0, &mut own);
            let mut values = vec![0.25; before * width];
            values.append(&mut own);
            values
        };
        let (q, k, v, dout) = (random(1, 12), random(2, 6), random(3, 6), random(4, 12));
        let (mut out, mut lse) = (vec![0.0; rows * 12], vec![0.0; rows * 2]);
        let mut scratch = vec![0.0; attention_backward_scratch(&dims, 2).max(attention_scratch(&dims, 2))];
        attention(&pool, &dims, &ContextSlices::new(&starts), &q, &k, &v, &mut out, &mut lse, &mut scratch);
        let (mut dq, mut dk, mut dv) = (vec![0.0; rows * 12], vec![0.0; rows * 6], vec![0.0; rows * 6]);
        let saved = AttentionSaved { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        attention_backward(
            &pool,
            &dims,
            &ContextSlices::new(&starts),
            saved,
            &dout,
            &mut dq,
            &mut dk,
            &mut dv,
            None,
            &mut scratch,
        );
        [
            out[before * 12..].to_vec(),
            dq[before * 12..].to_vec(),
            dk[before * 6..].to_vec(),
            dv[before * 6..].to_vec(),
        ]
    };
    let alone = run(0);
    for before in [1, 95, 128, 200] {
        assert_eq!(run(before), alone, "{before} rows before it");
    }
}
