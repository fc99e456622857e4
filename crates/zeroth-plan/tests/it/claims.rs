//! From how many GPUs on the sentences people repeat are true. Expected numbers are solved by hand from the ZeRO paper's
//! formulas, in the comments.

use zeroth_plan::{Claim, CountedIn, claims};

fn claim(part: &str) -> Claim {
    let mut found: Vec<Claim> = claims().into_iter().filter(|claim| claim.claim.contains(part)).collect();
    assert_eq!(found.len(), 1, "{part}");
    found.remove(0)
}

fn holds(part: &str) -> (Option<u64>, Option<u64>) {
    let claim = claim(part);
    assert_eq!(claim.counted_in, CountedIn::Gpus);
    (claim.master.holds_from, claim.plain.holds_from)
}

#[test]
fn savings_of_stages_1_and_2_are_limits_and_of_stage_3_a_number_of_gpus() {
    // 16 / (4 + 12/N) stays below 4, 12 / (4 + 8/N) below 3.
    let one = claim("ZeRO-1 saves 4x");
    assert_eq!((one.master.holds_from, one.master.limit.as_str()), (None, "4x"));
    assert_eq!((one.plain.holds_from, one.plain.limit.as_str()), (None, "3x"));
    // 16 / (4 + 12/N) >= 3.5 from N = 21.
    assert!(one.note.contains("rounds to 4x from 21 GPUs on, without it never"), "{}", one.note);
    // 16 / (2 + 14/N) stays below 8, 12 / (2 + 10/N) below 6; 7.5 is reached at N = 105.
    let two = claim("ZeRO-2 saves 8x");
    assert_eq!((two.master.holds_from, two.master.limit.as_str()), (None, "8x"));
    assert_eq!((two.plain.holds_from, two.plain.limit.as_str()), (None, "6x"));
    assert!(two.note.contains("from 105 GPUs on"), "{}", two.note);
    assert_eq!(holds("ZeRO-3 saves 64x"), (Some(64), Some(64)));
    assert_eq!(holds("ZeRO-3 saves about 16x"), (Some(16), Some(16)));
    assert_eq!(holds("needs 25%"), (None, None));
    assert_eq!(holds("needs 12.5%"), (None, None));
    assert_eq!(holds("needs 1.56%"), (Some(64), Some(64)));
    // 96 / (32 + 64/3) on the 3 GPUs of the picture.
    assert!(claim("ZeRO-1 saves about 4x").note.contains("1.80x"));
}

#[test]
fn the_table_for_8b_on_5_gpus_holds_without_a_master_copy() {
    // Rounded to GB; with a master copy 32 + 96/N < 45.5 from N = 8, 16 + 112/N < 32.5 from 7, 128/N < 19.5 from 7.
    assert_eq!(holds("8B on 5 GPUs, no ZeRO: 96 GB"), (None, Some(1)));
    assert_eq!(holds("8B on 5 GPUs, ZeRO-1: 45 GB"), (Some(8), Some(5)));
    assert_eq!(holds("8B on 5 GPUs, ZeRO-2: 32 GB"), (Some(7), Some(5)));
    assert_eq!(holds("8B on 5 GPUs, ZeRO-3: 19 GB"), (Some(7), Some(5)));
    assert!(claim("ZeRO-1: 45 GB").note.contains("44.8 GB"));
}

#[test]
fn the_rows_by_gpu_need_more_gpus_than_one() {
    assert_eq!(holds("ZeRO-2 + LoRA of 7B fits 24 GB"), (Some(1), Some(1)));
    // 16 + 112/N <= 40; 16 + 80/N <= 40.
    assert_eq!(holds("ZeRO-2, all parameters of 8B fits 40 GB"), (Some(5), Some(4)));
    assert_eq!(holds("ZeRO-3 + LoRA of 30B fits 40 GB"), (Some(2), Some(2)));
    // 60 + 420/N <= 80; 60 + 300/N <= 80.
    assert_eq!(holds("ZeRO-2, all parameters of 30B fits 80 GB"), (Some(21), Some(15)));
    assert_eq!(holds("ZeRO-3 + LoRA of 70B fits 80 GB"), (Some(2), Some(2)));
}

#[test]
fn case_1_depends_on_the_accounting_and_case_2_never_holds() {
    // 16 + 112/N <= 44; 16 + 80/N <= 44. DeepSpeed: 16 + 144/5 = 44.8 GB.
    assert_eq!(holds("ZeRO-2, all parameters of 8B fits 44 GB"), (Some(4), Some(3)));
    assert!(claim("ZeRO-2, all parameters of 8B fits 44 GB").note.contains("44.8 GB as DeepSpeed estimates"));
    assert_eq!(holds("ZeRO-3, all parameters of 8B fits 44 GB"), (Some(3), Some(3)));
    assert_eq!(holds("ZeRO-2 + LoRA of Qwen3-30B-A3B fits 44 GB"), (None, None));
    assert!(claim("Qwen3-30B-A3B").note.contains("61.1 GB alone"));
}

#[test]
fn communication_grows_with_the_stage_only_when_gradients_are_accumulated() {
    let claim = claim("ZeRO-1 < ZeRO-2 < ZeRO-3");
    assert_eq!(claim.counted_in, CountedIn::MicroBatches);
    assert_eq!(claim.master.holds_from, Some(2));
    assert!(
        claim.note.contains("2Ψ and 2Ψ, ZeRO-3 3Ψ; with 16 micro-batches 2Ψ, 17Ψ and 48Ψ"),
        "{}",
        claim.note
    );
}
