//! Trains a custom model with ZeRO-3 on two ranks: `cargo run --release -p zeroth --example own_model`.
//!
//! It predicts the next byte of this file. Each rank holds half of every unit's weights, gradients and moments.
#![allow(clippy::print_stdout, clippy::many_single_char_names, reason = "an example prints; q, k, v")]

use std::num::NonZeroU64;

use zeroth::Session;
use zeroth::graph::{Builder, Graph, GraphError, ParamSpec, Role, Rotary};
use zeroth::train::{EpochSample, TokenBatch};

const HIDDEN: u64 = 64;
const LENGTH: usize = 96;

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100, "overlap_comm": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10}}
}"#;

/// Two blocks of attention and a gated feed-forward layer, and a head over the 256 bytes.
fn model(tokens: u64) -> Result<Graph, GraphError> {
    let param = |name: String, shape: &[u64]| ParamSpec {
        name,
        shape: shape.to_vec(),
        trainable: true,
        quantized: false,
    };
    let mut b = Builder::new(&[tokens]);
    b.rotary(Rotary { frequencies: (0..8).map(|i| 0.1f64.powi(i)).collect(), scale: 1.0, dynamic: None });
    b.unit("bytes", Role::Embedding, vec![param("bytes".to_owned(), &[256, HIDDEN])])?;
    let (ids, table) = (b.ids(), b.param("bytes")?);
    let mut x = b.embedding(ids, table)?;
    for block in 0..2 {
        let name = |part: &str| format!("block{block}.{part}");
        let square = |part: &str| param(name(part), &[HIDDEN, HIDDEN]);
        let mut params: Vec<ParamSpec> = ["q", "k", "v", "o", "gate", "up", "down"].map(square).into();
        params.extend(["norm1", "norm2"].map(|part| param(name(part), &[HIDDEN])));
        b.unit(format!("block {block}"), Role::Block(block), params)?;
        let linear = |b: &mut Builder, x, part: &str| b.linear(x, b.param(&name(part))?, None);
        let normed = b.rms_norm(x, b.param(&name("norm1"))?, 1e-6)?;
        let [q, k, v] =
            [linear(&mut b, normed, "q")?, linear(&mut b, normed, "k")?, linear(&mut b, normed, "v")?];
        let (q, k) = (b.rope(q, 4)?, b.rope(k, 4)?);
        let attended = b.attention([q, k, v], 4, 4, None, 0.25)?;
        let attended = linear(&mut b, attended, "o")?;
        let (_, normed) = b.add_rms_norm(x, attended, b.param(&name("norm2"))?, 1e-6)?;
        let (gate, up) = (linear(&mut b, normed, "gate")?, linear(&mut b, normed, "up")?);
        let inner = b.swiglu(gate, up)?;
        x = linear(&mut b, inner, "down")?;
    }
    b.unit("head", Role::Head, vec![param("head".to_owned(), &[256, HIDDEN])])?;
    b.head_loss(x, b.param("head")?)?;
    b.finish()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steps = NonZeroU64::new(150).expect("not zero");
    let session = Session::new(model(4 * LENGTH as u64)?, CONFIG, 2, steps)?;
    println!("a rank needs {} bytes", session.bytes());
    let text: Vec<i32> = include_bytes!("own_model.rs").iter().map(|byte| i32::from(*byte)).collect();
    session.run(|rank| {
        for step in 0..steps.get() {
            let mut batch = TokenBatch::default();
            for sample in (0..4).map(|place| (step * 2 + rank.rank()) * 4 + place) {
                let at = sample as usize * 37 % (text.len() - LENGTH);
                let row = &text[at..at + LENGTH];
                batch.push(row, row, EpochSample { epoch: 0, sample });
            }
            let trained = 2 * 4 * (LENGTH as u64 - 1);
            let record = rank.step(&[batch.view()], trained)?;
            if rank.rank() == 0 && (step % 25 == 0 || step + 1 == steps.get()) {
                println!("step {:>3}  loss {:.3}  norm {:.2}", step + 1, record.loss, record.norm);
            }
        }
        Ok(())
    })?;
    Ok(())
}
