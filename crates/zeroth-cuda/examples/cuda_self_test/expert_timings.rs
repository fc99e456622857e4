//! Timings of mixtures of experts, with the shapes of Qwen3-30B-A3B and 4,096 tokens.

use zeroth_base::{ActivationFn, DType};
use zeroth_kernel::{
    Balance, ExpertRowsDims, GatedRowsDims, GradStore, GroupedLinearDims, Kernel, RouteDims,
};

use crate::harness::{Harness, Outcome, Work};

const TOKENS: usize = 4096;
const EXPERTS: usize = 128;
const K: usize = 8;
const SLOTS: usize = TOKENS * K;
const HIDDEN: usize = 2048;
/// Gate and up of an expert.
const WIDTH: usize = 1536;

/// Offsets of experts: equal shares, or shares of 1, 1/2, 1/3 and so on, the remainder to the first.
fn offsets(zipf: bool) -> Vec<i32> {
    let share = |expert: usize| if zipf { 1.0 / (expert + 1) as f64 } else { 1.0 };
    let total: f64 = (0..EXPERTS).map(share).sum();
    let mut rows: Vec<usize> =
        (0..EXPERTS).map(|expert| (share(expert) / total * SLOTS as f64) as usize).collect();
    rows[0] += SLOTS - rows.iter().sum::<usize>();
    let mut offsets = vec![0];
    for rows in rows {
        offsets.push(offsets[offsets.len() - 1] + rows as i32);
    }
    offsets
}

impl Harness {
    /// The matmuls of the gate and up projections.
    pub(crate) fn time_grouped(&mut self) -> Outcome {
        let bf16 = DType::Bf16;
        let flops = || Work::Flops(2.0 * (SLOTS * WIDTH) as f64 * HIDDEN as f64);
        for (name, zipf) in [("uniform", false), ("zipf", true)] {
            let dims = GroupedLinearDims::new(SLOTS, EXPERTS, HIDDEN, WIDTH);
            let offsets = self.upload(bytemuck::cast_slice(&offsets(zipf)))?;
            let (x, y) = (self.filled(bf16, SLOTS * HIDDEN)?, self.filled(bf16, SLOTS * WIDTH)?);
            let start = self.next;
            let w = self.filled(bf16, EXPERTS * WIDTH * HIDDEN)?;
            let dx = self.allocate(2 * SLOTS * HIDDEN);
            let kernel = Kernel::GroupedLinearDx { dims, scale: 1.0, offsets, dy: y, w, dx, add: false };
            self.time(name, flops(), kernel)?;
            self.time(name, flops(), Kernel::GroupedLinear { dims, offsets, x, w, y })?;
            self.next = start;
            let dy = self.filled(bf16, SLOTS * WIDTH)?;
            let (found_inf, dw) = (self.allocate(8), self.allocate(4 * EXPERTS * WIDTH * HIDDEN));
            for (form, store) in [
                ("bf16", GradStore::Round { to: bf16, found_inf }),
                ("f32", GradStore::Write),
                ("f32 added", GradStore::Add),
            ] {
                let size = if form == "bf16" { 2 } else { 4 };
                let dw = dw.part(0, (size * EXPERTS * WIDTH * HIDDEN) as u64, 1);
                let kernel = Kernel::GroupedLinearDw { dims, scale: 1.0, offsets, dy, x, dw, store };
                self.time(&format!("{name} {form}"), flops(), kernel)?;
            }
            self.next = 0;
        }
        self.time_grouped_adapters()
    }

    /// The matmuls of a low-rank adapter of the gate and up projections: by bytes, because the rank is small.
    fn time_grouped_adapters(&mut self) -> Outcome {
        let (bf16, scale) = (DType::Bf16, 2.0);
        for rank in [8, 16, 64, 4] {
            let dims = GroupedLinearDims::new(SLOTS, EXPERTS, rank, WIDTH);
            let offsets = self.upload(bytemuck::cast_slice(&offsets(false)))?;
            let (x, w) = (self.filled(bf16, SLOTS * rank)?, self.filled(bf16, EXPERTS * WIDTH * rank)?);
            let (y, dw) = (self.filled(bf16, SLOTS * WIDTH)?, self.filled(bf16, EXPERTS * WIDTH * rank)?);
            let dx = self.allocate(2 * SLOTS * rank);
            let store = GradStore::Round { to: bf16, found_inf: self.allocate(8) };
            let (shape, bytes) = (format!("rank {rank}"), (2 * SLOTS * WIDTH) as f64);
            let kernel = Kernel::GroupedLinearAdd { dims, scale, offsets, x, w, y };
            self.time(&shape, Work::Bytes(2.0 * bytes), kernel)?;
            let kernel = Kernel::GroupedLinearDx { dims, scale, offsets, dy: y, w, dx, add: false };
            self.time(&shape, Work::Bytes(bytes), kernel)?;
            let kernel = Kernel::GroupedLinearDw { dims, scale, offsets, dy: y, x, dw, store };
            self.time(&shape, Work::Bytes(bytes), kernel)?;
            let dims = GroupedLinearDims::new(SLOTS, EXPERTS, WIDTH, rank);
            self.time(&shape, Work::Bytes(bytes), Kernel::GroupedLinear { dims, offsets, x: y, w, y: dx })?;
            self.next = 0;
        }
        Ok(())
    }

    /// Routing, and the rows around the matmuls.
    pub(crate) fn time_experts(&mut self) -> Outcome {
        let bf16 = DType::Bf16;
        let logits = self.filled(bf16, TOKENS * EXPERTS)?;
        let [experts, weights, order, places, dweights] = [4 * SLOTS; 5].map(|bytes| self.allocate(bytes));
        let offsets = self.allocate(4 * (EXPERTS + 1));
        let (after, dlogits) = (self.allocate(8 * EXPERTS), self.allocate(2 * TOKENS * EXPERTS));
        let dims = RouteDims::new(TOKENS, EXPERTS, K, true);
        let (starts, bytes) = (None, (2 * TOKENS * EXPERTS + 16 * SLOTS) as f64);
        for balance in [None, Some(Balance { before: None, after })] {
            let kernel =
                Kernel::Route { dims, starts, logits, experts, weights, order, places, offsets, balance };
            let shape = format!("{TOKENS} rows, balance {}", balance.is_some());
            self.time(&shape, Work::Bytes(bytes), kernel)?;
        }
        let (dweights_in, slopes) = (Some(self.filled(DType::F32, SLOTS)?), None);
        let kernel = Kernel::RouteBackward {
            dims,
            starts,
            logits,
            experts,
            weights,
            dweights: dweights_in,
            slopes,
            dlogits,
        };
        self.time("", Work::Bytes(bytes), kernel)?;
        let dims = ExpertRowsDims::new(TOKENS, EXPERTS, K, HIDDEN);
        let (x, y) = (self.filled(bf16, TOKENS * HIDDEN)?, self.filled(bf16, SLOTS * HIDDEN)?);
        let bytes = (2 * (TOKENS + SLOTS) * HIDDEN) as f64;
        self.time("", Work::Bytes(bytes), Kernel::GatherRows { dims, order, offsets, x, y })?;
        let kernel = Kernel::CombineRows { dims, places, offsets, x: y, y: x };
        self.time("", Work::Bytes(bytes), kernel)?;
        let dims = GatedRowsDims::new(TOKENS, EXPERTS, K, WIDTH / 2);
        let (gate_up, activation) = (self.filled(bf16, SLOTS * WIDTH)?, ActivationFn::Silu);
        let (y, dgate_up) = (self.filled(bf16, SLOTS * WIDTH / 2)?, self.allocate(2 * SLOTS * WIDTH));
        let bytes = (3 * SLOTS * WIDTH) as f64;
        let kernel = Kernel::GatedRowsBackward {
            activation,
            dims,
            order,
            offsets,
            weights,
            gate_up,
            dy: y,
            dgate_up,
            dweights: Some(dweights),
        };
        self.time("", Work::Bytes(bytes + (2 * SLOTS * WIDTH) as f64), kernel)?;
        let kernel = Kernel::GatedRows { activation, dims, order, offsets, weights, gate_up, y };
        self.time("", Work::Bytes(bytes), kernel)
    }
}
