//! Mixtures of experts: what a run reports of its routers.

use super::{golden, metrics, number, text, train, train_on, written};

#[test]
fn metrics_have_the_load_of_routers_and_the_auxiliary_loss() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let flags = ["--ranks", "2", "--max-steps", "3", "--deepspeed", "zero3"];
    let ended = train("moe/mixtral-aux-3-layers", &run, &flags);
    ended.assert_done();
    for line in metrics(&run) {
        let [busiest, idlest, entropy] =
            ["router_busiest", "router_idlest", "router_entropy"].map(|key| number(&line[key]));
        // 8 experts, of which every token has 2: no expert has more than half of a layer's rows.
        assert!((0.0..=0.125).contains(&idlest) && (0.125..=0.5).contains(&busiest), "{line}");
        assert!(entropy > 0.3 && entropy <= 1.0, "{line}");
        let parts = number(&line["ce_loss"]) + 0.02 * number(&line["aux_loss"]);
        assert!((number(&line["loss"]) - parts).abs() < 1e-9, "{line}");
    }
    // The auxiliary loss is of a micro-batch, so memory must not choose another one.
    let words = "the micro-batch is not chosen by memory: the auxiliary loss";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
    let run = folder.path().join("dense");
    train("qwen3-tied", &run, &["--max-steps", "1"]).assert_done();
    assert!(metrics(&run)[0].get("router_entropy").is_none());
}

#[test]
fn collapsed_experts_are_reported_once() {
    let folder = tempfile::tempdir().unwrap();
    // One token only: every row of every layer goes to the experts of that token.
    let data = written(folder.path(), "rows.jsonl", &[r#"{"input_ids": [5, 5, 5, 5, 5, 5]}"#; 2]);
    let run = folder.path().join("run");
    let flags = ["--max-steps", "12", "--learning-rate", "0", "--num-train-epochs", "12"];
    let ended = train_on(&golden("moe/mixtral-no-window"), &data, &run, &flags);
    ended.assert_done();
    assert_eq!(
        ended.stderr.matches("the experts of block 0 collapse (step 10)").count(),
        1,
        "{}",
        ended.stderr
    );
    let lines = metrics(&run);
    assert!(lines.iter().all(|line| number(&line["router_idlest"]) == 0.0), "{}", text(&run));
}
