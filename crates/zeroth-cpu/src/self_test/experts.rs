//! The kernels of routing and experts against their references.

use zeroth_base::ActivationFn;
use zeroth_graph::reference;
use zeroth_kernel::{BalanceDims, Element, ExpertRowsDims, GatedRowsDims, GroupedLinearDims, RouteDims};

use super::{SelfTester, wide};
use crate::{
    BalanceSlices, RoutedSlices, balance_loss, balance_loss_backward, combine_rows, gated_rows,
    gated_rows_backward, gated_rows_scratch, gather_rows, grouped_linear, grouped_linear_add,
    grouped_linear_dw, grouped_linear_dw_rounded, grouped_linear_dx, grouped_linear_scratch, route,
    route_backward, route_backward_scratch, route_scratch,
};

/// Rows, of which the last are padding.
const ROWS: usize = 90;
const ROUTED: usize = 83;
const STARTS: [u32; 3] = [0, 40, ROUTED as u32];

fn indices(numbers: &[i32]) -> Vec<usize> {
    numbers.iter().map(|number| *number as usize).collect()
}

impl<T: Element> SelfTester<'_, T> {
    /// A few experts of each row, one of each, and all.
    pub(super) fn experts(&mut self) {
        for (experts, k, normalized) in [(9, 2, true), (130, 1, false), (4, 4, true)] {
            self.mixture(RouteDims::new(ROWS, experts, k, normalized));
        }
    }

    fn mixture(&mut self, dims: RouteDims) {
        let RouteDims { experts: count, k, normalized, .. } = dims;
        let (slots, case) = (dims.slots(), format!("{k} of {count}"));
        let logits = self.random(ROWS * count);
        let [mut experts, mut order, mut places] = [(); 3].map(|()| vec![-1i32; slots]);
        let (mut weights, mut offsets) = (vec![f32::NAN; slots], vec![-1i32; count + 1]);
        let (before, mut after) = (vec![0.5f32; 2 * count], vec![f32::NAN; 2 * count]);
        let routed = RoutedSlices {
            experts: &mut experts,
            weights: &mut weights,
            order: &mut order,
            places: &mut places,
            offsets: &mut offsets,
        };
        let balance = Some(BalanceSlices { before: Some(&before), after: &mut after });
        let mut scratch = vec![f32::NAN; route_scratch(dims, self.pool.threads())];
        route(self.pool, dims, Some(&STARTS), &logits, routed, balance, &mut scratch);
        let expected = reference::route(&wide(&logits), count, k, normalized, ROUTED);
        let found = [&experts, &order, &places, &offsets].map(|found| indices(found)).concat();
        let numbers = [&expected.experts, &expected.order, &expected.places, &expected.offsets]
            .map(|numbers| &numbers[..])
            .concat();
        let same = f32::from(u8::from(found == numbers));
        self.compare(&format!("route {case} indices"), &[same], &[1.0]);
        self.compare(&format!("route {case} weights"), &weights, &expected.weights);
        let sums: Vec<f64> = expected.balance.iter().map(|sum| sum + 0.5).collect();
        self.compare(&format!("route {case} balance"), &after, &sums);

        let (dweights, slopes) = (wide32(&self.random(slots)), wide32(&self.random(2 * count)));
        let mut dlogits = vec![T::from_f32(f32::NAN); logits.len()];
        let mut scratch = vec![f32::NAN; route_backward_scratch(dims, self.pool.threads())];
        route_backward(
            self.pool,
            dims,
            Some(&STARTS),
            &logits,
            &experts,
            &weights,
            Some(&dweights),
            Some(&slopes),
            &mut dlogits,
            &mut scratch,
        );
        let (of_weights, of_sums) = (wide(&dweights), wide(&slopes[count..]));
        let expected =
            reference::route_backward(&wide(&logits), count, &expected, normalized, &of_weights, &of_sums);
        self.compare(&format!("route {case} dlogits"), &dlogits, &expected);
        self.expert_rows(&case, ExpertRowsDims::new(ROWS, count, k, 50), [&order, &places], &offsets);
        self.gated_rows(&case, GatedRowsDims::new(ROWS, count, k, 37), [&order, &offsets], &weights);
        for (inputs, outputs) in [(70, 45), (5, 100)] {
            self.grouped(&case, GroupedLinearDims::new(slots, count, inputs, outputs), &offsets);
        }
        self.balance(&case, BalanceDims { rows: ROWS, experts: count, layers: 2 }, &after);
    }

    fn expert_rows(
        &mut self,
        case: &str,
        dims: ExpertRowsDims,
        [order, places]: [&[i32]; 2],
        offsets: &[i32],
    ) {
        let ExpertRowsDims { k, width, .. } = dims;
        let (x, routed) = (self.random(ROWS * width), offsets[dims.experts] as usize);
        // Rows of padding keep what they hold.
        let mut gathered = vec![T::default(); dims.slots() * width];
        gather_rows(self.pool, dims, order, offsets, &x, &mut gathered);
        let expected = reference::gather_rows(&wide(&x), width, &indices(order), k, routed);
        self.compare(&format!("gather_rows {case}"), &gathered, &expected);
        let x = self.random(dims.slots() * width);
        let mut combined = vec![T::from_f32(f32::NAN); ROWS * width];
        combine_rows(self.pool, dims, places, offsets, &x, &mut combined);
        let expected = reference::combine_rows(&wide(&x), width, &indices(places), k, routed);
        self.compare(&format!("combine_rows {case}"), &combined, &expected);
    }

    fn gated_rows(
        &mut self,
        case: &str,
        dims: GatedRowsDims,
        [order, offsets]: [&[i32]; 2],
        weights: &[f32],
    ) {
        let (slots, width) = (dims.slots(), dims.width);
        let (gate_up, dy) = (self.random(slots * 2 * width), self.random(slots * width));
        let (places, routed) = (indices(order), offsets[dims.experts] as usize);
        let [gate_up64, dy64] = [&gate_up, &dy].map(|values| wide(values));
        for activation in ActivationFn::ALL {
            let name = format!("gated_rows {} {case}", activation.name());
            let mut y = vec![T::default(); slots * width];
            gated_rows(self.pool, activation, dims, order, offsets, weights, &gate_up, &mut y);
            let expected = reference::gated_rows(activation, &gate_up64, &wide(weights), &places, routed);
            self.compare(&name, &y, &expected);
            let (mut dgate_up, mut dweights) = (vec![T::default(); gate_up.len()], vec![f32::NAN; slots]);
            let mut scratch = vec![f32::NAN; gated_rows_scratch(dims)];
            gated_rows_backward(
                self.pool,
                activation,
                dims,
                order,
                offsets,
                weights,
                &gate_up,
                &dy,
                &mut dgate_up,
                Some(&mut dweights),
                &mut scratch,
            );
            let weights = wide(weights);
            let [expected, of_weights] =
                reference::gated_rows_backward(activation, &gate_up64, &dy64, &weights, &places, routed);
            self.compare(&format!("{name} dgate_up"), &dgate_up, &expected);
            self.compare(&format!("{name} dweights"), &dweights, &of_weights);
        }
    }

    fn grouped(&mut self, case: &str, dims: GroupedLinearDims, offsets: &[i32]) {
        let GroupedLinearDims { slots, experts, inputs, outputs, .. } = dims;
        let case = format!("{case} {inputs} to {outputs}");
        let (x, dy) = (self.random(slots * inputs), self.random(slots * outputs));
        let (w, scale) = (self.random(experts * outputs * inputs), 0.3f32);
        let mut scratch = vec![f32::NAN; grouped_linear_scratch(dims, self.pool.threads())];
        let mut y = vec![T::default(); dy.len()];
        grouped_linear(self.pool, dims, offsets, &x, &w, &mut y, &mut scratch);
        let groups = indices(offsets);
        let product = reference::grouped_linear(&wide(&x), &wide(&w), &groups, inputs);
        self.compare(&format!("grouped_linear {case}"), &y, &product);
        let plus = |before: &[f64], product: &[f64]| {
            before.iter().zip(product).map(|(a, b)| a + f64::from(scale) * b).collect::<Vec<f64>>()
        };
        let mut y = dy.clone();
        grouped_linear_add(self.pool, dims, scale, offsets, &x, &w, &mut y, &mut scratch);
        self.compare(&format!("grouped_linear_add {case}"), &y, &plus(&wide(&dy), &product));
        let [dx64, dw64] =
            reference::grouped_linear_backward(&wide(&x), &wide(&w), &wide(&dy), &groups, inputs);
        for add in [false, true] {
            let before = if add { x.clone() } else { vec![T::default(); x.len()] };
            let mut dx = before.clone();
            grouped_linear_dx(self.pool, dims, scale, offsets, &dy, &w, &mut dx, add, &mut scratch);
            self.compare(&format!("grouped_linear dx {case}, add {add}"), &dx, &plus(&wide(&before), &dx64));
        }
        let mut dw = vec![0.5f32; w.len()];
        grouped_linear_dw(self.pool, dims, scale, offsets, &dy, &x, &mut dw, &mut scratch);
        self.compare(&format!("grouped_linear dw {case}"), &dw, &plus(&vec![0.5; w.len()], &dw64));
        let (mut wide_dw, mut own_dw) = (vec![f32::NAN; w.len()], vec![T::from_f32(f32::NAN); w.len()]);
        grouped_linear_dw_rounded(self.pool, dims, scale, offsets, &dy, &x, &mut wide_dw, &mut scratch);
        grouped_linear_dw_rounded(self.pool, dims, scale, offsets, &dy, &x, &mut own_dw, &mut scratch);
        let expected = plus(&vec![0.0; w.len()], &dw64);
        self.compare(&format!("grouped_linear dw written {case}"), &wide_dw, &expected);
        self.compare(&format!("grouped_linear dw rounded {case}"), &own_dw, &expected);
    }

    fn balance(&mut self, case: &str, dims: BalanceDims, balance: &[f32]) {
        let label = |row: usize| if row.is_multiple_of(3) || row >= ROUTED { -100 } else { 7 };
        let labels: Vec<i32> = (0..ROWS).map(label).collect();
        let trained = labels.iter().filter(|label| **label >= 0).count();
        let mut slopes = vec![f32::NAN; 2 * dims.experts];
        let losses = [
            balance_loss(dims, &STARTS, balance, &labels) as f32,
            balance_loss_backward(dims, &STARTS, balance, &labels, 0.25, &mut slopes) as f32,
        ];
        let (loss, expected) = reference::balance_loss(&wide(balance), dims.layers, ROUTED, trained, 0.25);
        self.compare(&format!("balance_loss {case}"), &losses, &[loss, loss]);
        self.compare(&format!("balance_loss {case} slopes"), &slopes, &expected);
    }
}

/// Random numbers in f32.
fn wide32<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}
