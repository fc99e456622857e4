//! Attention forward by cuDNN against its reference, if cuDNN is installed.

use bytemuck::cast_slice;
use zeroth_base::DType;
use zeroth_cpu::reference;
use zeroth_kernel::{AttentionContext, AttentionDims};
use zeroth_kernel::{Device, Kernel};

use crate::harness::{Harness, Outcome};

/// Sequences, their length, heads, kv heads, and head_dim.
const CASES: [[usize; 5]; 5] =
    [[1, 64, 2, 1, 64], [3, 200, 4, 2, 128], [2, 333, 2, 2, 64], [5, 128, 4, 4, 128], [2, 1024, 4, 1, 128]];

impl Harness {
    /// Runs each shape and checks that cuDNN computed it.
    pub(crate) fn cudnn_attentions(&mut self) -> Outcome {
        if self.dtype == DType::F32 {
            return Ok(());
        }
        if let Err(error) = self.device.check_cudnn() {
            println!("skipped: attention by cuDNN: {error}");
            return Ok(());
        }
        for [sequences, length, heads, kv_heads, head_dim] in CASES {
            let rows = sequences * length;
            let scale = 0.8 / (head_dim as f32).sqrt();
            let dims = AttentionDims::new(rows, heads, kv_heads, head_dim, None, scale);
            let shape = format!("{sequences}x{length}, {heads}/{kv_heads} heads of {head_dim} by cuDNN");
            let starts: Vec<u32> = (0..=sequences).map(|sequence| (sequence * length) as u32).collect();
            let table = [[starts.len() as u32].as_slice(), &starts].concat();
            let q = self.random(rows * heads * head_dim);
            let (k, v) = (self.random(rows * kv_heads * head_dim), self.random(rows * kv_heads * head_dim));
            let [y, lse] = reference::attention(&dims, &starts, &q, &k, &v);
            let outputs = [self.stored(self.dtype, y, 2.0), self.stored(DType::F32, lse, 2.0)];
            let kernel = Kernel::Attention {
                dims,
                context: AttentionContext::new(self.upload(cast_slice(&table))?),
                q: self.upload_values(&q)?,
                k: self.upload_values(&k)?,
                v: self.upload_values(&v)?,
                y: outputs[0].span,
                lse: outputs[1].span,
            };
            let before = self.device.cudnn_plans();
            self.device.use_cudnn_attention(true);
            self.device.equal_sequences(Some(length));
            self.case(&shape, kernel, &outputs)?;
            self.device.equal_sequences(None);
            self.device.use_cudnn_attention(false);
            if self.device.cudnn_plans() != before + 1 {
                println!("{shape}: FAILED: cuDNN has no plan for it");
                self.failures += 1;
            }
        }
        Ok(())
    }
}
