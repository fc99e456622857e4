//! A gradient that is not finite, anywhere, skips the step everywhere: at every stage, in every precision. In fp16 the loss
//! scale follows DeepSpeed's state machine.

use zeroth_base::DType;
use zeroth_kernel::Recipe;
use zeroth_program::{Offload, Settings, Types};

use crate::job::{BF16, F32, Golden, ROOMY, Setup};

const F16: Types = Types { compute: DType::F16, communication: DType::F16 };

fn model() -> Golden {
    Golden::synthetic(&serde_json::json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "vocab_size": 23,
        "tie_word_embeddings": false, "max_position_embeddings": 64,
    }))
}

/// Rows of rank 1 of 2 in these steps: with one row a micro-batch, step s has rows 2s and 2s + 1.
fn poisoned(steps: &[usize]) -> Golden {
    let mut golden = model();
    golden.poison(&steps.iter().map(|step| 2 * step + 1).collect::<Vec<_>>());
    golden
}

fn bits(weights: &[Vec<f32>]) -> Vec<u32> {
    weights.iter().flatten().map(|weight| weight.to_bits()).collect()
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_at_every_stage() {
    let golden = poisoned(&[0, 1, 2]);
    let offload = Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), ..Offload::NOTHING };
    for types in [F32, BF16, F16] {
        for stage in [0, 1, 2, 3] {
            for offload in [Offload::NOTHING, offload] {
                let settings = Settings { stage, types, offload, overlap: true, prefetch: 1, ..ROOMY };
                let recipe = Recipe { tolerated: 5, ..golden.recipe() };
                let setup = Setup { ranks: 2, steps: 3, settings, scaling: Some(recipe), ..Setup::default() };
                let what = format!("stage {stage}, {types:?}");
                let outcome = golden.train(&setup);
                for (step, record) in outcome.records.iter().enumerate() {
                    assert_eq!((record.apply, record.applied), (0, 0), "{what} {offload:?} {record:?}");
                    assert_eq!(record.skipped, step as u64 + 1, "{what}");
                    assert_eq!((record.halted, record.nonfinite_rank), (0, 1), "{what}");
                    assert!(record.norm.is_nan(), "{what}");
                }
                let rounded: Vec<Vec<f32>> = golden.weights.clone();
                assert!(bits(&outcome.weights) == bits(&rounded), "{what}: weights have changed");
            }
        }
    }
}

#[test]
fn a_rank_of_a_mesh_is_named_by_its_number_among_all() {
    for (poisoned, group) in [(1, 2), (2, 2), (3, 2), (2, 1), (2, 4)] {
        let mut golden = model();
        golden.poison(&[poisoned]);
        let settings = Settings { stage: 3, group: Some(group), types: BF16, ..ROOMY };
        let recipe = Recipe { tolerated: 5, ..golden.recipe() };
        let setup = Setup { ranks: 4, steps: 1, settings, scaling: Some(recipe), ..Setup::default() };
        let records = golden.train(&setup).records;
        assert_eq!((records[0].apply, records[0].nonfinite_rank), (0, poisoned as i64), "groups of {group}");
    }
}

#[test]
fn beyond_what_is_tolerated_nothing_is_applied_any_more() {
    let golden = poisoned(&[1]);
    for stage in [0, 3] {
        let settings = Settings { stage, types: BF16, ..ROOMY };
        let setup = Setup { ranks: 2, steps: 4, settings, ..Setup::default() };
        let records = golden.train(&setup).records;
        let applied: Vec<u32> = records.iter().map(|record| record.apply).collect();
        assert_eq!(
            applied,
            [1, 0, 0, 0],
            "stage {stage}: the steps after the broken one are finite, and wait"
        );
        assert_eq!(records.iter().map(|record| record.halted).collect::<Vec<_>>(), [0, 1, 1, 1]);
        assert_eq!((records[1].nonfinite_rank, records[2].nonfinite_rank), (1, -1));
    }
}

/// DeepSpeed's dynamic loss scaler (`DynamicLossScaler.update_scale`), as its source states it.
fn scales(overflows: &[bool], recipe: &Recipe) -> Vec<f64> {
    let (mut scale, mut left, mut last) = (recipe.loss_scale, recipe.hysteresis, -1i64);
    let mut used = Vec::new();
    for (iteration, overflow) in overflows.iter().enumerate() {
        used.push(scale);
        let iteration = iteration as i64;
        if *overflow {
            if recipe.hysteresis == 1 || left == 1 {
                scale = (scale / 2.0).max(recipe.min_scale);
            } else {
                left -= 1;
            }
            last = iteration;
        } else {
            if recipe.consecutive_hysteresis != 0 {
                left = recipe.hysteresis;
            }
            let since = iteration - last - 1;
            if since > 0 && since % recipe.scale_window as i64 == 0 {
                if recipe.consecutive_hysteresis == 0 {
                    left = recipe.hysteresis;
                }
                scale *= 2.0;
            }
        }
    }
    used
}

#[test]
fn the_loss_scale_of_fp16_follows_deepspeed_step_by_step() {
    let broken = [1, 2, 6, 7, 8];
    let golden = poisoned(&broken);
    let overflows: Vec<bool> = (0..14).map(|step| broken.contains(&step)).collect();
    for (hysteresis, consecutive_hysteresis, scale_window) in [(1, 0, 2), (2, 0, 2), (2, 1, 3), (3, 0, 2)] {
        let recipe = Recipe {
            dynamic: 1,
            loss_scale: 256.0,
            min_scale: 1.0,
            hysteresis,
            consecutive_hysteresis,
            scale_window,
            ..golden.recipe()
        };
        let expected = scales(&overflows, &recipe);
        for stage in [0, 2, 3] {
            let settings = Settings { stage, types: F16, ..ROOMY };
            let setup = Setup { ranks: 2, steps: 14, settings, scaling: Some(recipe), ..Setup::default() };
            let records = golden.train(&setup).records;
            let found: Vec<f64> = records.iter().map(|record| record.loss_scale).collect();
            assert_eq!(found, expected, "stage {stage}, hysteresis {hysteresis}");
            let applied: Vec<bool> = records.iter().map(|record| record.apply == 0).collect();
            assert_eq!(applied, overflows);
            assert!(records.iter().all(|record| record.halted == 0));
        }
    }
}

#[test]
fn fp16_with_a_loss_scale_follows_fp32() {
    let golden = Golden::named("qwen3-tied");
    let recipe = Recipe { dynamic: 1, loss_scale: 1024.0, ..golden.recipe() };
    let setup = |types, scaling| Setup {
        micro_batch: 4,
        settings: Settings { types, ..ROOMY },
        scaling,
        ..Setup::default()
    };
    let (wide, narrow) = (golden.train(&setup(F32, None)), golden.train(&setup(F16, Some(recipe))));
    for (wide, narrow) in wide.records.iter().zip(&narrow.records) {
        assert!((wide.loss - narrow.loss).abs() < 0.005 * wide.loss, "{} {}", wide.loss, narrow.loss);
        assert!((wide.norm - narrow.norm).abs() < 0.02 * wide.norm, "{} {}", wide.norm, narrow.norm);
        assert_ne!(wide.loss, narrow.loss);
    }
}
