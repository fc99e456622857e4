//! Kernels of mixtures of experts: routing, rows in the order of experts, and matmuls with a weight for each expert.
//!
//! Rows of padding slots are NaN in every input and must stay as they are in every output.

use bytemuck::{bytes_of, cast_slice};
use zeroth_base::{ActivationFn, DType};
use zeroth_graph::reference::{self, Routed};
use zeroth_kernel::{
    Balance, BalanceDims, Control, DeviceError, ExpertRowsDims, GatedRowsDims, GradStore, GroupedLinearDims,
    Kernel, RouteDims, Span,
};

use crate::harness::{Expected, Harness, Outcome, Output, POISON, add, to_bytes};

/// Rows, experts, k, whether weights are normalized, and the end of the last sequence, if any.
const ROUTES: [(usize, usize, usize, bool, Option<usize>); 9] = [
    (1, 4, 1, false, None),
    (5, 8, 2, true, None),
    (3, 33, 33, true, Some(2)),
    (40, 128, 8, true, Some(31)),
    (300, 33, 4, false, Some(300)),
    (257, 1, 1, true, Some(255)),
    (2500, 16, 3, true, None),
    (700, 160, 6, true, Some(1)),
    (9000, 60, 4, false, Some(8191)),
];

/// Slots of each expert. Empty experts; all slots of one; fewer slots than experts; several tiles of some.
const SPLITS: [&[usize]; 5] =
    [&[5, 0, 13, 1], &[0, 300, 0], &[1, 0, 1, 0, 0, 0, 0], &[129, 64, 0, 257, 128], &[63, 65, 1]];
/// Slots of padding after them.
const PADDING: usize = 3;

/// Inputs and outputs of grouped linears: odd ones, multiples of 8, several tiles, and the ranks of adapters.
const SIDES: [(usize, usize); 9] =
    [(20, 36), (33, 7), (64, 256), (136, 520), (264, 16), (8, 264), (4, 72), (72, 4), (200, 264)];

fn words(indices: &[usize]) -> Vec<u8> {
    indices.iter().flat_map(|index| (*index as i32).to_ne_bytes()).collect()
}

/// Values with NaN in all rows from `routed` on.
fn poisoned(values: &[f64], width: usize, routed: usize) -> Vec<f64> {
    let mut values = values.to_vec();
    values[routed * width..].fill(f64::NAN);
    values
}

/// A routing of random logits.
struct Case {
    k: usize,
    routed: usize,
    routing: Routed,
}

impl Harness {
    pub(crate) fn experts(&mut self) -> Outcome {
        for (rows, count, k, normalized, end) in ROUTES {
            let dims = RouteDims::new(rows, count, k, normalized);
            self.route(dims, end)?;
        }
        self.route_of_nan()?;
        for (rows, count, k, end, width) in [
            (1, 4, 1, 1, 8),
            (33, 8, 2, 30, 36),
            (130, 16, 8, 130, 128),
            (300, 6, 3, 280, 77),
            (65, 128, 8, 60, 1000),
        ] {
            self.expert_rows(rows, count, k, end, width)?;
        }
        self.balance_loss(5, 3, 1, 4)?;
        self.balance_loss(3000, 128, 48, 2990)
    }

    pub(crate) fn grouped_linears(&mut self) -> Outcome {
        for (inputs, outputs) in SIDES {
            for split in SPLITS {
                self.grouped_linear(split, inputs, outputs)?;
            }
        }
        // Every block of a persistent grid has several tiles.
        self.grouped_linear(&[600, 0, 700, 1, 130, 900, 333, 64, 128], 328, 1304)
    }

    fn starts(&mut self, end: Option<usize>) -> Result<Option<Span>, DeviceError> {
        // The count, the entries, and unused capacity after them.
        end.map(|end| self.upload(cast_slice(&[2u32, 0, end as u32, 7]))).transpose()
    }

    fn route(&mut self, dims: RouteDims, end: Option<usize>) -> Outcome {
        let RouteDims { rows, experts: count, k, normalized, .. } = dims;
        let routed = end.unwrap_or(rows);
        let logits = self.random(rows * count);
        let padded = poisoned(&logits, count, routed);
        let routing = reference::route(&logits, count, k, normalized, routed);
        let shape = format!("{rows} rows to {k} of {count}, normalized {normalized}, end {end:?}");
        for balance in [None, Some(false), Some(true)] {
            let exact = [&routing.experts, &routing.order, &routing.places, &routing.offsets];
            let [experts, order, places, offsets] =
                exact.map(|indices| self.exact(vec![POISON; 4 * indices.len()], words(indices)));
            let weights = self.stored(DType::F32, routing.weights.clone(), 1.0);
            let before: Vec<f64> = self.random_of(DType::F32, 2 * count).iter().map(|v| v.abs()).collect();
            let sums = match balance {
                Some(true) => add(&routing.balance, &before),
                _ => routing.balance.clone(),
            };
            let after = self.stored(DType::F32, sums, 1.0);
            let before = if balance == Some(true) { Some(self.upload_f32(&before)?) } else { None };
            let kernel = Kernel::Route {
                dims,
                starts: self.starts(end)?,
                logits: self.upload_values(&padded)?,
                experts: experts.span,
                weights: weights.span,
                order: order.span,
                places: places.span,
                offsets: offsets.span,
                balance: balance.map(|_| Balance { before, after: after.span }),
            };
            let mut outputs = vec![experts, weights, order, places, offsets];
            outputs.extend(balance.map(|_| after));
            self.case(&format!("{shape}, balance {balance:?}"), kernel, &outputs)?;
        }
        let slots = rows * k;
        let (dweights, slopes) = (self.random_of(DType::F32, slots), self.random_of(DType::F32, 2 * count));
        for (with_weights, with_slopes) in [(true, false), (false, true), (true, true)] {
            let of = |with: bool, values: &[f64]| {
                if with { values.to_vec() } else { vec![0.0; values.len()] }
            };
            let gradients = [of(with_weights, &dweights), of(with_slopes, &slopes[count..])];
            let dlogits =
                reference::route_backward(&logits, count, &routing, normalized, &gradients[0], &gradients[1]);
            let output = self.stored(self.dtype, dlogits, 2.0);
            let kernel = Kernel::RouteBackward {
                dims,
                starts: self.starts(end)?,
                logits: self.upload_values(&padded)?,
                experts: self.upload(&words(&routing.experts))?,
                weights: self.upload_f32(&routing.weights)?,
                dweights: if with_weights { Some(self.upload_f32(&dweights)?) } else { None },
                slopes: if with_slopes { Some(self.upload_f32(&slopes)?) } else { None },
                dlogits: output.span,
            };
            let name = format!("{shape}, dweights {with_weights}, slopes {with_slopes}");
            self.case(&name, kernel, &[output])?;
        }
        Ok(())
    }

    /// NaN is the smallest logit, infinity the largest; a row of NaN takes the first experts.
    fn route_of_nan(&mut self) -> Outcome {
        let (nan, inf, dims) = (f64::NAN, f64::INFINITY, RouteDims::new(4, 3, 2, true));
        let logits = [nan, nan, nan, nan, 1.0, 2.0, -inf, nan, -inf, 0.0, -0.0, inf];
        let chosen = [0, 1, 2, 1, 0, 2, 2, 0];
        let order = [0, 4, 7, 1, 3, 2, 5, 6];
        let [experts, order] = [&chosen, &order].map(|indices| self.exact(vec![POISON; 32], words(indices)));
        let offsets = self.exact(vec![POISON; 16], words(&[0, 3, 5, 8]));
        let [weights, places] = [32; 2].map(|bytes| self.allocate(bytes));
        let kernel = Kernel::Route {
            dims,
            starts: None,
            logits: self.upload_values(&logits)?,
            experts: experts.span,
            weights,
            order: order.span,
            places,
            offsets: offsets.span,
            balance: None,
        };
        self.case("NaN", kernel, &[experts, order, offsets])
    }

    /// An output whose rows from `routed` on must not be written, and the span of all of its rows.
    fn routed_output(&mut self, dtype: DType, all: &[f64], width: usize, routed: usize) -> (Output, Span) {
        let mut output = self.stored(dtype, all.to_vec(), 1.0);
        let span = output.span;
        let bytes = routed * width * dtype.bytes() as usize;
        output.span.bytes = bytes as u64;
        output.before.truncate(bytes);
        if let Expected::Near(_, values, _) = &mut output.expected {
            values.truncate(routed * width);
        }
        (output, span)
    }

    fn routing(&mut self, rows: usize, count: usize, k: usize, end: usize) -> Case {
        let logits = self.random(rows * count);
        Case { k, routed: end * k, routing: reference::route(&logits, count, k, true, end) }
    }

    fn expert_rows(&mut self, rows: usize, count: usize, k: usize, end: usize, width: usize) -> Outcome {
        let Case { k, routed, routing } = self.routing(rows, count, k, end);
        let (dims, slots) = (ExpertRowsDims::new(rows, count, k, width), rows * k);
        let shape = format!("{rows}x{width} to {k} of {count}, {end} routed");
        let x = self.random(rows * width);
        let expected = reference::gather_rows(&x, width, &routing.order, k, routed);
        let (y, whole) = self.routed_output(self.dtype, &expected, width, routed);
        let y = Output { expected: Expected::Bits(to_bytes(self.dtype, &expected[..routed * width])), ..y };
        let (order, offsets) = (self.upload(&words(&routing.order))?, self.upload(&words(&routing.offsets))?);
        let x = self.upload_values(&poisoned(&x, width, end))?;
        self.case(&shape, Kernel::GatherRows { dims, order, offsets, x, y: whole }, &[y])?;
        let x = self.random(slots * width);
        let y = self.overwritten(reference::combine_rows(&x, width, &routing.places, k, routed));
        let (places, offsets) =
            (self.upload(&words(&routing.places))?, self.upload(&words(&routing.offsets))?);
        let x = self.upload_values(&poisoned(&x, width, routed))?;
        self.case(&shape, Kernel::CombineRows { dims, places, offsets, x, y: y.span }, &[y])?;
        self.gated_rows(&shape, GatedRowsDims::new(rows, count, k, width), &routing, routed)
    }

    fn gated_rows(&mut self, shape: &str, dims: GatedRowsDims, routing: &Routed, routed: usize) -> Outcome {
        let (width, slots) = (dims.width, dims.slots());
        for activation in ActivationFn::ALL {
            let (gate_up, dy) = (self.random(2 * slots * width), self.random(slots * width));
            // What the kernel reads, in f32.
            let weights: Vec<f64> = routing.weights.iter().map(|weight| f64::from(*weight as f32)).collect();
            let y = reference::gated_rows(activation, &gate_up, &weights, &routing.order, routed);
            let (y, whole) = self.routed_output(self.dtype, &y, width, routed);
            let kernel = Kernel::GatedRows {
                activation,
                dims,
                order: self.upload(&words(&routing.order))?,
                offsets: self.upload(&words(&routing.offsets))?,
                weights: self.upload_f32(&weights)?,
                gate_up: self.upload_values(&poisoned(&gate_up, 2 * width, routed))?,
                y: whole,
            };
            self.case(&format!("{shape}, {}", activation.name()), kernel, &[y])?;
            let [dgate_up, dweights] =
                reference::gated_rows_backward(activation, &gate_up, &dy, &weights, &routing.order, routed);
            for with_weights in [true, false] {
                let (output, whole) = self.routed_output(self.dtype, &dgate_up, 2 * width, routed);
                let of_weights = self.stored(DType::F32, dweights.clone(), 2.0);
                let kernel = Kernel::GatedRowsBackward {
                    activation,
                    dims,
                    order: self.upload(&words(&routing.order))?,
                    offsets: self.upload(&words(&routing.offsets))?,
                    weights: self.upload_f32(&weights)?,
                    gate_up: self.upload_values(&poisoned(&gate_up, 2 * width, routed))?,
                    dy: self.upload_values(&poisoned(&dy, width, routed))?,
                    dgate_up: whole,
                    dweights: with_weights.then_some(of_weights.span),
                };
                let mut outputs = vec![output];
                outputs.extend(with_weights.then_some(of_weights));
                self.case(&format!("{shape}, {}", activation.name()), kernel, &outputs)?;
            }
        }
        Ok(())
    }

    fn balance_loss(&mut self, rows: usize, experts: usize, layers: usize, end: usize) -> Outcome {
        let dims = BalanceDims { rows, experts, layers };
        let labels: Vec<i32> = (0..rows as i32).map(|row| if row % 3 == 1 { -100 } else { row }).collect();
        let trained = labels.iter().filter(|label| **label >= 0).count();
        let balance: Vec<f64> =
            self.random_of(DType::F32, 2 * experts).iter().map(|value| value.abs()).collect();
        let (loss_weight, loss_scale) = (0.125, 1024.0);
        let (value, slopes) =
            reference::balance_loss(&balance, layers, end, trained, loss_weight * loss_scale);
        for backward in [false, true] {
            let loss = Output {
                span: self.allocate(8),
                before: 3.0f64.to_ne_bytes().to_vec(),
                expected: Expected::Sum(3.0 + value, 1e-12),
            };
            let slopes = self.stored(DType::F32, slopes.clone(), 1.0);
            let starts = self.upload(cast_slice(&[2u32, 0, end as u32]))?;
            let (balance, labels) = (self.upload_f32(&balance)?, self.upload(cast_slice(&labels))?);
            let shape = format!("{rows} rows, {layers} layers of {experts}");
            if !backward {
                let kernel = Kernel::BalanceLoss { dims, starts, balance, labels, loss: loss.span };
                self.case(&shape, kernel, &[loss])?;
                continue;
            }
            let kernel = Kernel::BalanceLossBackward {
                dims,
                starts,
                balance,
                labels,
                loss: loss.span,
                loss_weight: self.upload(bytes_of(&loss_weight))?,
                control: self.upload(bytes_of(&Control::new(loss_scale)))?,
                slopes: slopes.span,
            };
            self.case(&shape, kernel, &[loss, slopes])?;
        }
        Ok(())
    }

    fn grouped_linear(&mut self, split: &[usize], inputs: usize, outputs: usize) -> Outcome {
        let mut offsets = vec![0];
        for rows in split {
            offsets.push(offsets[offsets.len() - 1] + rows);
        }
        let (experts, routed) = (split.len(), offsets[split.len()]);
        let slots = routed + PADDING;
        let dims = GroupedLinearDims::new(slots, experts, inputs, outputs);
        let shape = format!("{split:?} rows x{inputs}x{outputs}");
        let (x, dy) = (self.random(slots * inputs), self.random(slots * outputs));
        let w = self.random(experts * outputs * inputs);
        let y = reference::grouped_linear(&x, &w, &offsets, inputs);
        let [dx, dw] = reference::grouped_linear_backward(&x, &w, &dy, &offsets, inputs);
        let (x, dy) = (poisoned(&x, inputs, routed), poisoned(&dy, outputs, routed));
        let scale = 0.3f32;
        let times = |values: &[f64]| -> Vec<f64> { values.iter().map(|v| f64::from(scale) * v).collect() };
        let table = words(&offsets);
        for adds in [false, true] {
            let before = self.random(slots * outputs);
            let expected = if adds { add(&before, &times(&y)) } else { y.clone() };
            let (mut output, whole) = self.routed_output(self.dtype, &expected, outputs, routed);
            let (offsets, x) = (self.upload(&table)?, self.upload_values(&x)?);
            let w_span = self.upload_values(&w)?;
            let kernel = if adds {
                output.before = to_bytes(self.dtype, &before[..routed * outputs]);
                Kernel::GroupedLinearAdd { dims, scale, offsets, x, w: w_span, y: whole }
            } else {
                Kernel::GroupedLinear { dims, offsets, x, w: w_span, y: whole }
            };
            self.case(&shape, kernel, &[output])?;
            let before = self.random(slots * inputs);
            let expected = if adds { add(&before, &times(&dx)) } else { times(&dx) };
            let (mut output, whole) = self.routed_output(self.dtype, &expected, inputs, routed);
            if adds {
                output.before = to_bytes(self.dtype, &before[..routed * inputs]);
            }
            let (offsets, dy) = (self.upload(&table)?, self.upload_values(&dy)?);
            let w = self.upload_values(&w)?;
            let kernel = Kernel::GroupedLinearDx { dims, scale, offsets, dy, w, dx: whole, add: adds };
            self.case(&format!("{shape}, add {adds}"), kernel, &[output])?;
        }
        let dw = times(&dw);
        for form in ["added", "written", "rounded", "rounded to f32", "not finite"] {
            let output = match form {
                "added" => self.accumulated(&dw, 1.0),
                "written" | "rounded to f32" => self.stored(DType::F32, dw.clone(), 1.0),
                _ => self.overwritten(dw.clone()),
            };
            let infinite = form == "not finite";
            let flag = self.exact(vec![0; 8], u64::from(infinite).to_ne_bytes().to_vec());
            let store = match form {
                "added" => GradStore::Add,
                "written" => GradStore::Write,
                "rounded to f32" => GradStore::Round { to: DType::F32, found_inf: flag.span },
                _ => GradStore::Round { to: self.dtype, found_inf: flag.span },
            };
            let mut dy = dy.clone();
            if infinite {
                dy[0] = f64::INFINITY;
            }
            let (table, dy) = (self.upload(&table)?, self.upload_values(&dy)?);
            let (x, to) = (self.upload_values(&x)?, output.span);
            let kernel = Kernel::GroupedLinearDw { dims, scale, offsets: table, dy, x, dw: to, store };
            let outputs = if infinite { vec![flag] } else { vec![output, flag] };
            self.case(&format!("{shape}, {form}"), kernel, &outputs)?;
        }
        Ok(())
    }
}
