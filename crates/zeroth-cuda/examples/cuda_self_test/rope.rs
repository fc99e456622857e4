//! RoPE, alone and fused with the per-head norm.

use bytemuck::cast_slice;
use zeroth_base::DType;
use zeroth_cpu::{self, RopeTable, reference};
use zeroth_kernel::{Device, DeviceError, Kernel, Launch, Queue, Span};
use zeroth_kernel::{HeadNormRopeDims, RopeDims};

use crate::harness::{Harness, Outcome, POISON, to_bytes};

impl Harness {
    /// Cosines and sines of unordered positions.
    fn angles(&self, rows: usize, rotated: usize) -> [Vec<f32>; 2] {
        let table = RopeTable::plain(1e4, rotated);
        let positions: Vec<i32> = (0..rows as i32).map(|row| row * 11 % 4096).collect();
        let (mut cos, mut sin) = (vec![0.0; rows * rotated / 2], vec![0.0; rows * rotated / 2]);
        zeroth_cpu::rope_angles(&self.pool, &table, &positions, &mut cos, &mut sin);
        [cos, sin]
    }

    pub(crate) fn rope(&mut self) -> Outcome {
        for (rows, heads, head_dim, rotated) in
            [(1, 1, 6, 6), (33, 3, 20, 16), (200, 4, 64, 64), (65, 2, 128, 128), (40, 3, 64, 32)]
        {
            let dims = RopeDims::new(rows, heads, head_dim, rotated);
            let [cos, sin] = self.angles(rows, rotated);
            let x = self.random(rows * heads * head_dim);
            for back in [false, true] {
                let y =
                    self.overwritten(reference::rope(dims, &cos, &sin, if back { -1.0 } else { 1.0 }, &x));
                let (cos, sin) = (self.upload(cast_slice(&cos))?, self.upload(cast_slice(&sin))?);
                let x = self.upload_values(&x)?;
                let shape = format!("{rows}x{heads}x{head_dim}, {rotated} rotated, back {back}");
                self.case(&shape, Kernel::Rope { dims, cos, sin, x, y: y.span, back }, &[y])?;
            }
        }
        Ok(())
    }

    /// Shapes of the fused kernels, and others; the last one needs several blocks of the gradient.
    pub(crate) fn head_norm_rope(&mut self) -> Outcome {
        for (rows, heads, head_dim, rotated) in [
            (1, 1, 6, 6),
            (33, 3, 20, 16),
            (7, 5, 96, 96),
            (40, 3, 128, 64),
            (200, 4, 64, 64),
            (65, 5, 128, 128),
            (19, 1, 256, 256),
            (1, 1, 128, 128),
            (700, 16, 128, 128),
        ] {
            let rope = RopeDims::new(rows, heads, head_dim, rotated);
            self.norm_and_rope(HeadNormRopeDims { rope, eps: 1e-5 })?;
        }
        Ok(())
    }

    fn norm_and_rope(&mut self, dims: HeadNormRopeDims) -> Outcome {
        let RopeDims { rows, heads, head_dim, rotated, .. } = dims.rope;
        let count = rows * heads * head_dim;
        let given = [self.random(count), self.random(head_dim), self.random(count)];
        let angles = self.angles(rows, rotated);
        let ([x, w, dy], [cos, sin]) = (&given, &angles);
        let unfused = self.unfused(dims, &given, &angles)?;
        let [y, rstd] = reference::head_norm_rope(dims, x, w, cos, sin);
        let [dh, dw] = reference::head_norm_rope_backward(dims, x, w, cos, sin, dy);
        // Gradients are rounded after the inverse rotation, before they are summed into dw; y is rounded three times.
        let rounded = self.bound(self.dtype) / self.bound(DType::F32);
        for exact in [false, true] {
            let shape =
                format!("{rows}x{heads}x{head_dim}, {rotated} rotated, bitwise equal to two kernels {exact}");
            let outputs = if exact {
                [0, 1].map(|number| self.exact(vec![POISON; unfused[number].len()], unfused[number].clone()))
            } else {
                [self.stored(self.dtype, y.clone(), 3.0), self.stored(DType::F32, rstd.clone(), 1.0)]
            };
            let kernel = Kernel::HeadNormRope {
                dims,
                x: self.upload_values(x)?,
                w: self.upload_values(w)?,
                cos: self.upload(cast_slice(cos))?,
                sin: self.upload(cast_slice(sin))?,
                y: outputs[0].span,
                rstd: outputs[1].span,
            };
            self.case(&shape, kernel, &outputs)?;
            let outputs = if exact {
                let before = vec![0; 4 * head_dim];
                [
                    self.exact(vec![POISON; unfused[2].len()], unfused[2].clone()),
                    self.exact(before, unfused[3].clone()),
                ]
            } else {
                [self.stored(self.dtype, dh.clone(), 2.0), self.accumulated(&dw, rounded)]
            };
            let kernel = Kernel::HeadNormRopeBackward {
                dims,
                dy: self.upload_values(dy)?,
                h: self.upload_values(x)?,
                rstd: self.upload(&unfused[1])?,
                w: self.upload_values(w)?,
                cos: self.upload(cast_slice(cos))?,
                sin: self.upload(cast_slice(sin))?,
                dh: Some(outputs[0].span),
                dw: Some(outputs[1].span),
            };
            self.case(&shape, kernel, &outputs)?;
        }
        Ok(())
    }

    /// y, rstd, dh and dw (accumulated to zeros) by separate norm and RoPE kernels.
    fn unfused(
        &mut self,
        dims: HeadNormRopeDims,
        [x, w, dy]: &[Vec<f64>; 3],
        [cos, sin]: &[Vec<f32>; 2],
    ) -> Result<[Vec<u8>; 4], DeviceError> {
        let (norm, rope) = (dims.norm(), dims.rope);
        let (x, w, dy) = (self.upload_values(x)?, self.upload_values(w)?, self.upload_values(dy)?);
        let (cos, sin) = (self.upload(cast_slice(cos))?, self.upload(cast_slice(sin))?);
        let [normed, y, rotated_back, dh] = [(); 4].map(|()| self.allocate(x.bytes as usize));
        let rstd = self.allocate(4 * norm.rows);
        let dw = self.upload(&to_bytes(DType::F32, &vec![0.0; norm.width]))?;
        for kernel in [
            Kernel::RmsNorm { dims: norm, x, w, y: normed, rstd },
            Kernel::Rope { dims: rope, cos, sin, x: normed, y, back: false },
            Kernel::Rope { dims: rope, cos, sin, x: dy, y: rotated_back, back: true },
            Kernel::RmsNormBackward {
                dims: norm,
                dy: rotated_back,
                h: x,
                rstd,
                w,
                residual: None,
                dh: Some(dh),
                dw: Some(dw),
            },
        ] {
            let dtype = self.dtype;
            let scratch = self.allocate(zeroth_cuda::scratch_bytes(&kernel, dtype) as usize);
            self.device.enqueue(Queue::Compute, &Launch { kernel, dtype, scratch })?;
        }
        let mut found = [y, rstd, dh, dw].map(|span: Span| vec![0; span.bytes as usize]);
        for (bytes, span) in found.iter_mut().zip([y, rstd, dh, dw]) {
            self.device.download(Queue::Compute, span, bytes)?;
        }
        self.next = 0;
        Ok(found)
    }
}
