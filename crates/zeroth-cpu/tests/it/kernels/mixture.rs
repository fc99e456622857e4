//! A layer of experts, forward and backward: for the tests that ask something of all kernels.

use zeroth_base::{ActivationFn, name_key};
use zeroth_cpu::*;
use zeroth_kernel::*;

use super::everything::MOST_THREADS;

const ROWS: usize = 110;
/// The last rows are padding.
const STARTS: [u32; 3] = [0, 7, 101];
const EXPERTS: usize = 20;
const K: usize = 3;
const SLOTS: usize = ROWS * K;
const WIDTH: usize = 70;
const INNER: usize = 37;

const ROUTE: RouteDims = RouteDims::new(ROWS, EXPERTS, K, true);
const EXPERT_ROWS: ExpertRowsDims = ExpertRowsDims::new(ROWS, EXPERTS, K, WIDTH);
const GATE_UP: GroupedLinearDims = GroupedLinearDims::new(SLOTS, EXPERTS, WIDTH, 2 * INNER);
const ADAPTER: GroupedLinearDims = GroupedLinearDims::new(SLOTS, EXPERTS, 3, 2 * INNER);
const GATED: GatedRowsDims = GatedRowsDims::new(ROWS, EXPERTS, K, INNER);
const BALANCE: BalanceDims = BalanceDims { rows: ROWS, experts: EXPERTS, layers: 1 };

/// Inputs, outputs and scratch of the kernels.
pub(crate) struct Mixture<T> {
    logits: Vec<T>,
    x: Vec<T>,
    w: Vec<T>,
    /// Indices: experts, order, places, offsets.
    indices: [Vec<i32>; 4],
    /// Gathered rows, gate and up, gated rows, their gradients, combined rows, dlogits, the gradient of w.
    narrow: [Vec<T>; 8],
    /// Weights, balance, their gradients, the gradient of w.
    wide: [Vec<f32>; 5],
    scratch: Vec<f32>,
}

impl<T: Element> Mixture<T> {
    pub(crate) fn new() -> Self {
        let random = |name: &str, count: usize| {
            let mut values = vec![T::default(); count];
            normal(&Pool::new(1), 5, name_key(name), 0, 1.0, &mut values);
            values
        };
        let scratch = [
            route_scratch(ROUTE, MOST_THREADS),
            route_backward_scratch(ROUTE, MOST_THREADS),
            grouped_linear_scratch(GATE_UP, MOST_THREADS),
            grouped_linear_scratch(ADAPTER, MOST_THREADS),
            gated_rows_scratch(GATED),
        ];
        let weights = EXPERTS * 2 * INNER * WIDTH;
        Self {
            logits: random("logits", ROWS * EXPERTS),
            x: random("rows", ROWS * WIDTH),
            w: random("experts", weights),
            indices: [SLOTS, SLOTS, SLOTS, EXPERTS + 1].map(|count| vec![0; count]),
            narrow: [
                SLOTS * WIDTH,
                SLOTS * 2 * INNER,
                SLOTS * INNER,
                SLOTS * 2 * INNER,
                SLOTS * WIDTH,
                ROWS * WIDTH,
                ROWS * EXPERTS,
                weights,
            ]
            .map(|count| vec![T::default(); count]),
            wide: [SLOTS, 2 * EXPERTS, SLOTS, 2 * EXPERTS, weights].map(|count| vec![0.0; count]),
            scratch: vec![0.0; scratch.into_iter().max().expect("there are five")],
        }
    }

    /// Calls every kernel. Scratch holds NaN before, so that a kernel that reads what it did not write is found.
    pub(crate) fn run(&mut self, pool: &Pool) {
        let Self { logits, x, w, indices, narrow, wide, scratch: s } = self;
        let [experts, order, places, offsets] = indices;
        let [gathered, gate_up, gated, dgate_up, drows, combined, dlogits, rounded] = narrow;
        let [weights, after, dweights, slopes, dw] = wide;
        let labels = [1; ROWS];
        s.fill(f32::NAN);
        dw.fill(0.5);
        let routed = RoutedSlices { experts, weights, order, places, offsets };
        route(pool, ROUTE, Some(&STARTS), logits, routed, Some(BalanceSlices { before: None, after }), s);
        let [experts, order, places, offsets] = indices.each_ref().map(|numbers| &numbers[..]);
        gather_rows(pool, EXPERT_ROWS, order, offsets, x, gathered);
        grouped_linear(pool, GATE_UP, offsets, gathered, w, gate_up, s);
        let (u, b) = (&gathered[..SLOTS * 3], &w[..EXPERTS * 2 * INNER * 3]);
        grouped_linear_add(pool, ADAPTER, 0.3, offsets, u, b, gate_up, s);
        gated_rows(pool, ActivationFn::Silu, GATED, order, offsets, weights, gate_up, gated);
        let dy = &gathered[..SLOTS * INNER];
        let of_weights = Some(&mut dweights[..]);
        let silu = ActivationFn::Silu;
        gated_rows_backward(pool, silu, GATED, order, offsets, weights, gate_up, dy, dgate_up, of_weights, s);
        grouped_linear_dx(pool, GATE_UP, 1.0, offsets, dgate_up, w, drows, false, s);
        grouped_linear_dx(pool, GATE_UP, 0.5, offsets, dgate_up, w, drows, true, s);
        grouped_linear_dw(pool, GATE_UP, 0.1, offsets, dgate_up, gathered, dw, s);
        grouped_linear_dw_rounded(pool, GATE_UP, 0.1, offsets, dgate_up, gathered, rounded, s);
        combine_rows(pool, EXPERT_ROWS, places, offsets, drows, combined);
        balance_loss_backward(BALANCE, &STARTS, after, &labels, 0.5, slopes);
        let (dweights, slopes) = (Some(&dweights[..]), Some(&slopes[..]));
        route_backward(pool, ROUTE, Some(&STARTS), logits, experts, weights, dweights, slopes, dlogits, s);
    }

    /// The bits of all outputs.
    pub(crate) fn bits(&self) -> impl Iterator<Item = Vec<u64>> {
        let indices =
            self.indices.iter().map(|numbers| numbers.iter().map(|number| *number as u64).collect());
        let narrow = self.narrow.iter().map(|values| bits(values));
        indices.chain(narrow).chain(self.wide.iter().map(|values| bits(values)))
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| u64::from(value.to_f32().to_bits())).collect()
}
