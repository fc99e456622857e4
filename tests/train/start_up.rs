//! What a run says before its first step.

use super::{json, train};

/// The keys of the origin table.
fn keys(said: &str) -> Vec<&str> {
    let table = said.lines().skip_while(|line| !line.starts_with("key "));
    table.skip(1).take_while(|line| !line.is_empty()).filter_map(|line| line.split("  ").next()).collect()
}

#[test]
fn the_origin_table_leaves_out_blocks_that_are_off() {
    let folder = tempfile::tempdir().unwrap();
    for (flag, on, off) in [("--bf16", "bf16", "fp16"), ("--fp16", "fp16", "bf16")] {
        let run = folder.path().join(on);
        let ended = train("qwen3-tied", &run, &["--deepspeed", "zero3", "--max-steps", "1", flag]);
        ended.assert_done();
        let keys = keys(&ended.stderr);
        let has = |section: &str| keys.iter().any(|key| key.starts_with(&format!("{section}.")));
        assert!(keys.contains(&"zero_optimization.stage") && has(on), "{keys:?}");
        assert!(!has(off), "{keys:?}");
        assert!(!has("zero_optimization.offload_param"), "{keys:?}");
        assert!(!has("zero_optimization.offload_optimizer"), "{keys:?}");
        // The file has them all.
        let origin = json(&run.join("origin.json"));
        for key in ["fp16.enabled", "bf16.enabled", "zero_optimization.offload_param.device"] {
            assert!(origin[key].is_object(), "{key}");
        }
    }
    let offload =
        train("qwen3-tied", &folder.path().join("offload"), &["--deepspeed", "zero3_offload", "--dry-run"]);
    assert!(
        keys(&offload.stderr).contains(&"zero_optimization.offload_optimizer.device"),
        "{}",
        offload.stderr
    );
}
