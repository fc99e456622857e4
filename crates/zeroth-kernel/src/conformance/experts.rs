//! The cases of routing and experts.

use bytemuck::{bytes_of, cast_slice};
use zeroth_base::{ActivationFn, DType};

use super::{Output, Pair, ROWS, encode};
use crate::{
    Balance, BalanceDims, Control, DeviceError, ExpertRowsDims, GatedRowsDims, GradStore, GroupedLinearDims,
    Kernel, RouteDims, Span,
};

/// Rows that are no padding.
const ROUTED: usize = 70;
/// Experts, and those of a row.
const EXPERTS: usize = 11;
const K: usize = 3;
const SLOTS: usize = ROWS * K;

/// A routing: the slot at each place, the place of each slot, and the first place of each expert.
struct Routing {
    order: Vec<i32>,
    places: Vec<i32>,
    offsets: Vec<i32>,
}

impl Routing {
    /// Sorts the slots by the expert of each; padding comes last.
    fn new(expert_of: impl Fn(usize) -> usize) -> Self {
        let mut order: Vec<i32> = (0..SLOTS as i32).collect();
        let expert =
            |slot: i32| if (slot as usize) < ROUTED * K { expert_of(slot as usize) } else { EXPERTS };
        order.sort_by_key(|slot| expert(*slot));
        let mut places = vec![0; SLOTS];
        for (place, slot) in order.iter().enumerate() {
            places[*slot as usize] = place as i32;
        }
        let before = |of: usize| order.partition_point(|slot| expert(*slot) < of) as i32;
        let offsets = (0..=EXPERTS).map(before).collect();
        Self { order, places, offsets }
    }

    /// Uneven groups, some of them empty; all slots in one group; and a few slots in each.
    fn all() -> [Self; 3] {
        [Self::new(|slot| slot * slot % 7 + slot % 2), Self::new(|_| 4), Self::new(|slot| slot % EXPERTS)]
    }
}

/// Logits that every dtype holds, and with ties. Others are so far apart that no rounding chooses another expert.
fn logit(at: usize) -> f32 {
    ((at * 7919 % 61) as f32 - 30.0) / 8.0
}

/// Experts of each row and their weights; rows from `end` on are padding.
fn chosen(dims: RouteDims, end: usize) -> (Vec<i32>, Vec<f32>) {
    let RouteDims { rows, experts, k, normalized, .. } = dims;
    let (mut chosen, mut weights) = (vec![experts as i32; rows * k], vec![0.0; rows * k]);
    for row in 0..end {
        let power = |expert: usize| f64::from(logit(row * experts + expert)).exp();
        let own: Vec<usize> = (0..k).map(|j| (3 * row + j) % experts).collect();
        let total: f64 = if normalized {
            own.iter().map(|expert| power(*expert)).sum()
        } else {
            (0..experts).map(power).sum()
        };
        for (j, expert) in own.into_iter().enumerate() {
            chosen[row * k + j] = expert as i32;
            weights[row * k + j] = (power(expert) / total) as f32;
        }
    }
    (chosen, weights)
}

impl Pair<'_> {
    pub(super) fn experts(&mut self) -> Result<(), DeviceError> {
        self.routes()?;
        for routing in Routing::all() {
            self.expert_rows(&routing)?;
            self.gated_rows(&routing)?;
            // Outputs of whole tiles and others, and an adapter.
            for (inputs, outputs) in [(72, 104), (64, 3), (5, 96)] {
                self.grouped_linears(&routing, inputs, outputs)?;
            }
        }
        self.balance_losses()
    }

    fn starts(&mut self) -> Span {
        self.given(cast_slice(&[4u32, 0, 20, 21, ROUTED as u32]))
    }

    fn logits(&mut self, dims: RouteDims) -> Span {
        let values: Vec<f32> = (0..dims.rows * dims.experts).map(logit).collect();
        let bytes = encode(self.dtype, &values);
        self.given(&bytes)
    }

    fn routes(&mut self) -> Result<(), DeviceError> {
        let dtype = self.dtype;
        for (experts, k, normalized, has_starts, has_before) in [
            (EXPERTS, K, true, true, false),
            (128, 8, false, true, true),
            (5, 5, true, false, true),
            (7, 1, false, false, false),
        ] {
            let dims = RouteDims::new(ROWS, experts, k, normalized);
            let starts = has_starts.then(|| self.starts());
            let logits = self.logits(dims);
            let before = has_before.then(|| self.words(2 * experts));
            let [experts_at, weights, order, places] = [0; 4].map(|_| self.empty(4 * dims.slots()));
            let offsets = self.empty(4 * (experts + 1));
            let balance = Some(Balance { before, after: self.empty(4 * 2 * experts) });
            let kernel = Kernel::Route {
                dims,
                starts,
                logits,
                experts: experts_at,
                weights,
                order,
                places,
                offsets,
                balance,
            };
            let (exact, rounded) = (Output::Exact, Output::Rounded(DType::F32));
            self.compare(kernel, &[exact, rounded, exact, exact, exact, rounded])?;
            for (has_weights, has_slopes) in [(true, false), (false, true), (true, true)] {
                let starts = has_starts.then(|| self.starts());
                let logits = self.logits(dims);
                let (chosen, weights) = chosen(dims, if has_starts { ROUTED } else { ROWS });
                let kernel = Kernel::RouteBackward {
                    dims,
                    starts,
                    logits,
                    experts: self.given(cast_slice(&chosen)),
                    weights: self.given(cast_slice(&weights)),
                    dweights: has_weights.then(|| self.words(dims.slots())),
                    slopes: has_slopes.then(|| self.words(2 * experts)),
                    dlogits: self.empty(ROWS * experts * dtype.bytes() as usize),
                };
                self.compare(kernel, &[Output::Rounded(dtype)])?;
            }
        }
        Ok(())
    }

    fn expert_rows(&mut self, routing: &Routing) -> Result<(), DeviceError> {
        let (width, dtype) = (72, self.dtype);
        let dims = ExpertRowsDims::new(ROWS, EXPERTS, K, width);
        let (order, offsets) =
            (self.given(cast_slice(&routing.order)), self.given(cast_slice(&routing.offsets)));
        let (x, y) = (self.random(ROWS * width), self.random(SLOTS * width));
        self.compare(Kernel::GatherRows { dims, order, offsets, x, y }, &[Output::Exact])?;
        let (places, offsets) =
            (self.given(cast_slice(&routing.places)), self.given(cast_slice(&routing.offsets)));
        let (x, y) = (self.random(SLOTS * width), self.empty(ROWS * width * dtype.bytes() as usize));
        self.compare(Kernel::CombineRows { dims, places, offsets, x, y }, &[Output::Exact])
    }

    fn gated_rows(&mut self, routing: &Routing) -> Result<(), DeviceError> {
        let (width, dtype) = (40, self.dtype);
        let dims = GatedRowsDims::new(ROWS, EXPERTS, K, width);
        for activation in ActivationFn::ALL {
            let operands = |pair: &mut Self| {
                let (order, offsets) = (cast_slice(&routing.order), cast_slice(&routing.offsets));
                let (order, offsets) = (pair.given(order), pair.given(offsets));
                [order, offsets, pair.words(SLOTS), pair.random(SLOTS * 2 * width)]
            };
            let [order, offsets, weights, gate_up] = operands(self);
            let y = self.random(SLOTS * width);
            let kernel = Kernel::GatedRows { activation, dims, order, offsets, weights, gate_up, y };
            self.compare(kernel, &[Output::Rounded(dtype)])?;
            for wanted in [true, false] {
                let [order, offsets, weights, gate_up] = operands(self);
                let (dy, dgate_up) = (self.random(SLOTS * width), self.random(SLOTS * 2 * width));
                let dweights = wanted.then(|| self.empty(4 * SLOTS));
                let kernel = Kernel::GatedRowsBackward {
                    activation,
                    dims,
                    order,
                    offsets,
                    weights,
                    gate_up,
                    dy,
                    dgate_up,
                    dweights,
                };
                let outputs = [Output::Rounded(dtype), Output::Rounded(DType::F32)];
                self.compare(kernel, &outputs[..=usize::from(wanted)])?;
            }
        }
        Ok(())
    }

    fn grouped_linears(
        &mut self,
        routing: &Routing,
        inputs: usize,
        outputs: usize,
    ) -> Result<(), DeviceError> {
        let (dims, dtype) = (GroupedLinearDims::new(SLOTS, EXPERTS, inputs, outputs), self.dtype);
        let (scale, weights) = (0.3, EXPERTS * outputs * inputs);
        let rounded = [Output::Rounded(dtype)];
        let offsets = |pair: &mut Self| pair.given(cast_slice(&routing.offsets));
        // Rows of padding keep what they hold.
        let (at, x, w, y) =
            (offsets(self), self.random(SLOTS * inputs), self.random(weights), self.random(SLOTS * outputs));
        self.compare(Kernel::GroupedLinear { dims, offsets: at, x, w, y }, &rounded)?;
        let (at, x, w, y) =
            (offsets(self), self.random(SLOTS * inputs), self.random(weights), self.random(SLOTS * outputs));
        self.compare(Kernel::GroupedLinearAdd { dims, scale, offsets: at, x, w, y }, &rounded)?;
        for add in [false, true] {
            let (dy, w) = (self.random(SLOTS * outputs), self.random(weights));
            let (offsets, dx) = (offsets(self), self.random(SLOTS * inputs));
            self.compare(Kernel::GroupedLinearDx { dims, scale, offsets, dy, w, dx, add }, &rounded)?;
        }
        for store in [GradStore::Add, GradStore::Write] {
            let (dy, x) = (self.random(SLOTS * outputs), self.random(SLOTS * inputs));
            let (offsets, dw) = (offsets(self), self.words(weights));
            let kernel = Kernel::GroupedLinearDw { dims, scale, offsets, dy, x, dw, store };
            self.compare(kernel, &[Output::Rounded(DType::F32)])?;
        }
        let (dy, x) = (self.random(SLOTS * outputs), self.random(SLOTS * inputs));
        let (offsets, dw) = (offsets(self), self.empty(weights * dtype.bytes() as usize));
        let store = GradStore::Round { to: dtype, found_inf: self.given(bytes_of(&0u64)) };
        let kernel = Kernel::GroupedLinearDw { dims, scale, offsets, dy, x, dw, store };
        self.compare(kernel, &[Output::Rounded(dtype), Output::Exact])
    }

    fn balance_losses(&mut self) -> Result<(), DeviceError> {
        let dims = BalanceDims { rows: ROWS, experts: EXPERTS, layers: 3 };
        let operands = |pair: &mut Self| {
            let balance: Vec<f32> = (0..2 * EXPERTS).map(|at| 2.5 + (at * 5 % 9) as f32).collect();
            let label = |row: usize| if row % 5 == 2 || row >= ROUTED { -100 } else { row as i32 };
            let labels: Vec<i32> = (0..ROWS).map(label).collect();
            let (starts, balance) = (pair.starts(), pair.given(cast_slice(&balance)));
            [starts, balance, pair.given(cast_slice(&labels)), pair.given(bytes_of(&1.5f64))]
        };
        let [starts, balance, labels, loss] = operands(self);
        self.compare(Kernel::BalanceLoss { dims, starts, balance, labels, loss }, &[Output::F64])?;
        let [starts, balance, labels, loss] = operands(self);
        let kernel = Kernel::BalanceLossBackward {
            dims,
            starts,
            balance,
            labels,
            loss,
            loss_weight: self.given(bytes_of(&0.01f64)),
            control: self.given(bytes_of(&Control::new(64.0))),
            slopes: self.empty(4 * 2 * EXPERTS),
        };
        self.compare(kernel, &[Output::F64, Output::Rounded(DType::F32)])
    }
}
