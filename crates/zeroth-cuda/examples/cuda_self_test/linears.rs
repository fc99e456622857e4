//! Linear layers, their gradients, and scaled ones as of low-rank adapters.

use zeroth_base::DType;
use zeroth_cpu::reference;
use zeroth_kernel::{GradStore, Kernel, LinearDims};

use crate::harness::{Harness, Outcome, add, to_bytes};

/// Rows, inputs and outputs of linears; the last ones have the inputs of a low-rank adapter.
const LINEARS: [(usize, usize, usize); 10] = [
    (1, 20, 36),
    (5, 36, 20),
    (33, 21, 37),
    (200, 300, 275),
    (64, 128, 256),
    (4200, 72, 64),
    (200, 3, 77),
    (70, 5, 128),
    (33, 8, 40),
    (300, 16, 264),
];

impl Harness {
    pub(crate) fn linears(&mut self) -> Outcome {
        for (rows, inputs, outputs) in LINEARS {
            for own in [false, true] {
                self.device.use_own_matmuls(own);
                let by = if own { "own kernel" } else { "cuBLASLt" };
                self.linear(LinearDims::new(rows, inputs, outputs), by)?;
            }
            self.device.use_own_matmuls(false);
        }
        Ok(())
    }

    pub(crate) fn linear(&mut self, dims: LinearDims, by: &str) -> Outcome {
        let LinearDims { rows, inputs, outputs, .. } = dims;
        let shape = format!("{rows}x{inputs}x{outputs} by {by}");
        let (x, w) = (self.random(rows * inputs), self.random(outputs * inputs));
        let (bias, dy) = (self.random(outputs), self.random(rows * outputs));
        let [dx, dw, db] = reference::linear_backward(dims, &x, &w, &dy);
        for with in [false, true] {
            let y = self.overwritten(reference::linear(dims, &x, &w, with.then_some(bias.as_slice())));
            let kernel = Kernel::Linear {
                dims,
                x: self.upload_values(&x)?,
                w: self.upload_values(&w)?,
                bias: if with { Some(self.upload_values(&bias)?) } else { None },
                y: y.span,
            };
            self.case(&format!("{shape}, bias {with}"), kernel, &[y])?;
            let before = self.random(rows * inputs);
            let mut output = self.overwritten(if with { add(&before, &dx) } else { dx.clone() });
            if with {
                output.before = to_bytes(self.dtype, &before);
            }
            let (dy, w) = (self.upload_values(&dy)?, self.upload_values(&w)?);
            let kernel = Kernel::LinearDx { dims, scale: 1.0, dy, w, dx: output.span, add: with };
            self.case(&format!("{shape}, add {with}"), kernel, &[output])?;
        }
        self.scaled_linear(dims, &shape, [&x, &w, &dy])?;
        for form in ["added", "written", "rounded"] {
            let output = match form {
                "added" => self.accumulated(&dw, 1.0),
                "written" => self.stored(DType::F32, dw.clone(), 1.0),
                _ => self.overwritten(dw.clone()),
            };
            let flag = self.exact(vec![0; 8], vec![0; 8]);
            let store = match form {
                "added" => GradStore::Add,
                "written" => GradStore::Write,
                _ => GradStore::Round { to: self.dtype, found_inf: flag.span },
            };
            let (dy, x, dw) = (self.upload_values(&dy)?, self.upload_values(&x)?, output.span);
            let kernel = Kernel::LinearDw { dims, scale: 1.0, dy, x, dw, store };
            self.case(&format!("{shape}, {form}"), kernel, &[output, flag])?;
        }
        let mut found_inf = dy.clone();
        found_inf[0] = f64::INFINITY;
        let flag = self.exact(vec![0; 8], 1u64.to_ne_bytes().to_vec());
        let (store, dw) = (
            GradStore::Round { to: self.dtype, found_inf: flag.span },
            self.allocate(outputs * inputs * self.dtype.bytes() as usize),
        );
        let (dy_span, x) = (self.upload_values(&found_inf)?, self.upload_values(&x)?);
        let kernel = Kernel::LinearDw { dims, scale: 1.0, dy: dy_span, x, dw, store };
        self.case(&format!("{shape}, not finite"), kernel, &[flag])?;
        let output = self.accumulated(&db, 1.0);
        let dy = self.upload_values(&dy)?;
        self.case(&shape, Kernel::LinearDb { dims, dy, db: output.span }, &[output])
    }

    /// The matmuls of a low-rank adapter: y plus the scaled product, and the scaled gradients.
    fn scaled_linear(&mut self, dims: LinearDims, shape: &str, [x, w, dy]: [&Vec<f64>; 3]) -> Outcome {
        let scale = 0.3f32;
        let times = |values: Vec<f64>| -> Vec<f64> {
            values.into_iter().map(|value| f64::from(scale) * value).collect()
        };
        let shape = format!("{shape}, scaled");
        let before = self.random(dy.len());
        let mut y = self.overwritten(add(&before, &times(reference::linear(dims, x, w, None))));
        y.before = to_bytes(self.dtype, &before);
        let (x_span, w_span) = (self.upload_values(x)?, self.upload_values(w)?);
        let kernel = Kernel::LinearAdd { dims, scale, x: x_span, w: w_span, y: y.span };
        self.case(&shape, kernel, &[y])?;
        let [dx, dw, _] = reference::linear_backward(dims, x, w, dy);
        let output = self.overwritten(times(dx));
        let (dy_span, w_span) = (self.upload_values(dy)?, self.upload_values(w)?);
        let kernel = Kernel::LinearDx { dims, scale, dy: dy_span, w: w_span, dx: output.span, add: false };
        self.case(&shape, kernel, &[output])?;
        let dw = times(dw);
        for store in [GradStore::Add, GradStore::Write] {
            let output = match store {
                GradStore::Add => self.accumulated(&dw, 1.0),
                _ => self.stored(DType::F32, dw.clone(), 1.0),
            };
            let (dy, x) = (self.upload_values(dy)?, self.upload_values(x)?);
            let kernel = Kernel::LinearDw { dims, scale, dy, x, dw: output.span, store };
            self.case(&format!("{shape}, {store:?}"), kernel, &[output])?;
        }
        Ok(())
    }
}
