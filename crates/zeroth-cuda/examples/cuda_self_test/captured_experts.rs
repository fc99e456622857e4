//! A layer of experts as one captured graph, launched with routings other than the captured one.
//!
//! Capturing fails where a launch waits for the device, and a graph replays what the host decided when it was captured: equal bits
//! for every routing show that the split of rows over experts is known on the device alone.

use bytemuck::cast_slice;
use zeroth_base::{ActivationFn, DType};
use zeroth_kernel::{
    Device, DeviceError, ExpertRowsDims, GatedRowsDims, GradStore, GroupedLinearDims, Kernel, Launch, Queue,
    RouteDims, Span,
};

use crate::harness::{Harness, Outcome, POISON, to_bytes};

const ROWS: usize = 300;
/// Rows before padding.
const ROUTED: u32 = 290;
const EXPERTS: usize = 16;
const K: usize = 4;
const SLOTS: usize = ROWS * K;
const HIDDEN: usize = 264;
const WIDTH: usize = 136;

/// The launches of a layer, its logits and its results: y, the gradient of `gate_up_proj`, and the order of slots.
struct Layer {
    launches: Vec<Launch>,
    logits: Span,
    results: [Span; 3],
}

impl Harness {
    pub(crate) fn captured_experts(&mut self) -> Outcome {
        let layer = self.layer_of_experts()?;
        let mut routings = vec![self.random(ROWS * EXPERTS), self.random(ROWS * EXPERTS)];
        // All rows to the last experts, so that the others are empty.
        routings.push((0..ROWS * EXPERTS).map(|at| (at % EXPERTS) as f64).collect());
        let routings: Vec<Vec<u8>> = routings.iter().map(|logits| to_bytes(self.dtype, logits)).collect();
        let mut expected = Vec::new();
        for logits in &routings {
            self.device.upload(Queue::Compute, logits, layer.logits)?;
            for launch in &layer.launches {
                self.device.enqueue(Queue::Compute, launch)?;
            }
            expected.push(self.results_of(&layer)?);
        }
        let name = format!("experts {} as a graph of {} launches", self.dtype, layer.launches.len());
        let Some(graph) = self.device.capture_graph(Queue::Compute, &mut layer.launches.iter())? else {
            println!("{name}: FAILED: not captured");
            self.failures += 1;
            return Ok(());
        };
        for (number, (logits, expected)) in routings.iter().zip(&expected).enumerate() {
            for result in layer.results {
                self.device.upload(Queue::Compute, &vec![POISON; result.bytes as usize], result)?;
            }
            self.device.upload(Queue::Compute, logits, layer.logits)?;
            self.device.launch_graph(Queue::Compute, graph)?;
            let same = self.results_of(&layer)? == *expected;
            self.failures += usize::from(!same);
            println!(
                "{name}, routing {number}: {}",
                if same { "ok" } else { "FAILED: other bits than launch by launch" }
            );
        }
        self.next = 0;
        Ok(())
    }

    fn layer_of_experts(&mut self) -> Result<Layer, DeviceError> {
        let bytes = self.dtype.bytes() as usize;
        let [x, gate_up_proj, down_proj] =
            [ROWS * HIDDEN, EXPERTS * 2 * WIDTH * HIDDEN, EXPERTS * HIDDEN * WIDTH].map(|count| {
                let values = self.random(count);
                self.upload_values(&values)
            });
        let (x, gate_up_proj, down_proj) = (x?, gate_up_proj?, down_proj?);
        let starts = self.upload(cast_slice(&[2u32, 0, ROUTED]))?;
        let logits = self.allocate(ROWS * EXPERTS * bytes);
        let [experts, weights, order, places] = [SLOTS; 4].map(|words| self.allocate(4 * words));
        let offsets = self.allocate(4 * (EXPERTS + 1));
        let [gathered, down] = [SLOTS * HIDDEN; 2].map(|count| self.allocate(count * bytes));
        let (gate_up, gated) =
            (self.allocate(SLOTS * 2 * WIDTH * bytes), self.allocate(SLOTS * WIDTH * bytes));
        let (y, dw) = (self.allocate(ROWS * HIDDEN * bytes), self.allocate(EXPERTS * 2 * WIDTH * HIDDEN * 4));
        let rows = ExpertRowsDims::new(ROWS, EXPERTS, K, HIDDEN);
        let up = GroupedLinearDims::new(SLOTS, EXPERTS, HIDDEN, 2 * WIDTH);
        let kernels = [
            Kernel::Route {
                dims: RouteDims::new(ROWS, EXPERTS, K, true),
                starts: Some(starts),
                logits,
                experts,
                weights,
                order,
                places,
                offsets,
                balance: None,
            },
            Kernel::GatherRows { dims: rows, order, offsets, x, y: gathered },
            Kernel::GroupedLinear { dims: up, offsets, x: gathered, w: gate_up_proj, y: gate_up },
            Kernel::GatedRows {
                activation: ActivationFn::Silu,
                dims: GatedRowsDims::new(ROWS, EXPERTS, K, WIDTH),
                order,
                offsets,
                weights,
                gate_up,
                y: gated,
            },
            Kernel::GroupedLinear {
                dims: GroupedLinearDims::new(SLOTS, EXPERTS, WIDTH, HIDDEN),
                offsets,
                x: gated,
                w: down_proj,
                y: down,
            },
            Kernel::CombineRows { dims: rows, places, offsets, x: down, y },
            // Any gradient of gate_up will do: the activations have its shape.
            Kernel::GroupedLinearDw {
                dims: up,
                scale: 1.0,
                offsets,
                dy: gate_up,
                x: gathered,
                dw,
                store: GradStore::Write,
            },
            Kernel::GroupedLinearDx {
                dims: up,
                scale: 1.0,
                offsets,
                dy: gate_up,
                w: gate_up_proj,
                dx: down,
                add: false,
            },
        ];
        let dtype: DType = self.dtype;
        let launches = kernels.map(|kernel| {
            let scratch = self.allocate(zeroth_cuda::scratch_bytes(&kernel, dtype) as usize);
            Launch { kernel, dtype, scratch }
        });
        Ok(Layer { launches: launches.into(), logits, results: [y, dw, order] })
    }

    fn results_of(&mut self, layer: &Layer) -> Result<Vec<Vec<u8>>, DeviceError> {
        self.device.synchronise()?;
        let mut results = Vec::new();
        for span in layer.results {
            let mut bytes = vec![0; span.bytes as usize];
            self.device.download(Queue::Compute, span, &mut bytes)?;
            results.push(bytes);
        }
        Ok(results)
    }
}
