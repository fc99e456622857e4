//! Rates that decide where offloaded optimizer state is updated: by the host's CPUs, or streamed through the device. Measured on
//! this machine with random numbers, in under a second.

use std::time::Instant;

use bytemuck::{Zeroable, bytes_of, cast_slice};
use zeroth_base::DType;

use zeroth_kernel::{ByTier, LinearDims};
use zeroth_kernel::{
    Control, Device, DeviceError, GROUPS, Kernel, Launch, MasterForm, Optimizer, Queue, Recipe, Rounding,
    Span, StepNumbers, Tier,
};

/// Measured rates, in bytes or operations per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Rates {
    /// Bytes of optimizer state that AdamW updates on the host's CPUs.
    pub update: u64,
    /// Bytes copied to the device while as many come back.
    pub bus: u64,
    /// Bytes that a device kernel reads and writes.
    pub memory: u64,
    /// Floating-point operations of device matmuls.
    #[serde(rename = "products")]
    pub matmuls: u64,
}

/// Elements of the trial: larger than the caches.
const ELEMENTS: u64 = 32 << 20;
const ROUNDS: usize = 3;
/// Rows, inputs and outputs of the matmul, and the least seconds of a timing.
const SIDE: usize = 2048;
const LEAST: f64 = 2e-3;

impl Rates {
    /// Bytes of device and host arena that a measurement needs.
    pub fn arenas() -> ByTier<u64> {
        ByTier::on_device(8 * ELEMENTS + 4096).with(Tier::Host, 16 * ELEMENTS + 4096)
    }

    /// Measures a device whose arenas have at least [`Self::arenas`] bytes, with the run's moments: stochastic rounding on CPUs
    /// takes several times as long as memory.
    pub fn measure(
        device: &mut dyn Device,
        moments: DType,
        stochastic_rounding: bool,
    ) -> Result<Self, DeviceError> {
        let host =
            |at: u64, bytes: u64| Span { tier: Tier::Host, at: at * ELEMENTS, bytes: bytes * ELEMENTS };
        // Master weights, both moments, gradients and weights.
        let master = host(0, 4);
        let [first, second] = [4, 8].map(|at| host(at, moments.bytes()));
        let [grads, weights] = [12, 14].map(|at| host(at, 2));
        let control = Span::device(8 * ELEMENTS, size_of::<Control>() as u64);
        let numbers = StepNumbers::new(&Recipe::default(), 0, 2, 1e-4, 1.0, 1.0);
        let decided = Control { apply: 1, applied: 1, numbers: [numbers; GROUPS], ..Control::zeroed() };
        device.upload(Queue::Compute, bytes_of(&decided), control)?;
        let noise: Vec<u32> = (0..1u32 << 20).map(scrambled).collect();
        for span in [master, first, second, grads, weights] {
            for at in (0..span.bytes).step_by(4 << 20) {
                device.upload(Queue::Compute, cast_slice(&noise), span.part(at, 4 << 20, 1))?;
            }
        }
        let kernel = Kernel::Optimize {
            optimizer: Optimizer::AdamW,
            group: 0,
            control,
            grads,
            grad_type: DType::Bf16,
            master,
            master_form: MasterForm::F32,
            moments: [Some(first), Some(second), None],
            moment_type: moments,
            rounding: stochastic_rounding.then_some(Rounding { seed: 1, flat: 0, first: 0 }),
            weights: Some(weights),
        };
        let update = Launch { kernel, dtype: DType::Bf16, scratch: Span::device(0, 0) };
        let copy = |from: Span, to: Span| Launch {
            kernel: Kernel::Convert { from, from_type: DType::F32, to, to_type: DType::F32, found_inf: None },
            dtype: DType::F32,
            scratch: Span::device(0, 0),
        };
        let (there, back) = (Span::device(0, 4 * ELEMENTS), Span::device(4 * ELEMENTS, 4 * ELEMENTS));
        let (up, down) = (copy(master, there), copy(back, host(4, 4)));
        let mut best = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            for (best, launches) in best
                .iter_mut()
                .zip([&[(Queue::Load, &update)][..], &[(Queue::Load, &up), (Queue::Store, &down)]])
            {
                device.synchronise()?;
                let begin = Instant::now();
                launches.iter().try_for_each(|(queue, launch)| device.enqueue(*queue, launch))?;
                device.synchronise()?;
                *best = best.min(begin.elapsed().as_secs_f64());
            }
        }
        let [update, bus] = best;
        let rate = |bytes: u64, seconds: f64| (bytes as f64 / seconds) as u64;
        let state = (4 + 2 * moments.bytes()) * ELEMENTS;
        Ok(Self {
            update: rate(state, update),
            bus: rate(4 * ELEMENTS, bus),
            memory: rate(8 * ELEMENTS, seconds(device, &copy(there, back))?),
            matmuls: rate(2 * (SIDE * SIDE * SIDE) as u64, seconds(device, &matmul())?),
        })
    }

    /// Seconds for device kernels to read and write `bytes`.
    pub fn memory_seconds(self, bytes: u64) -> f64 {
        bytes as f64 / self.memory.max(1) as f64
    }

    /// Seconds for device matmuls of `operations`.
    pub fn matmul_seconds(self, operations: u64) -> f64 {
        operations as f64 / self.matmuls.max(1) as f64
    }

    /// Seconds for the host's CPUs to update `state` bytes.
    pub fn host_update_seconds(self, state: u64) -> f64 {
        state as f64 / self.update.max(1) as f64
    }

    /// Seconds to stream `bytes` through the device.
    pub fn transfer_seconds(self, bytes: u64) -> f64 {
        bytes as f64 / self.bus.max(1) as f64
    }
}

/// A bf16 matmul over what the copies have left in the device arena.
fn matmul() -> Launch {
    let matrix = 2 * (SIDE * SIDE) as u64;
    let [x, w, y] = [0, 1, 2].map(|place| Span::device(place * matrix, matrix));
    let dims = LinearDims::new(SIDE, SIDE, SIDE);
    let kernel = Kernel::Linear { dims, x, w, bias: None, y };
    let scratch = Span::device(4 * matrix, 8 * ELEMENTS - 4 * matrix);
    Launch { kernel, dtype: DType::Bf16, scratch }
}

/// Seconds of a launch: the best of several timings, each of enough launches to hide the overhead.
fn seconds(device: &mut dyn Device, launch: &Launch) -> Result<f64, DeviceError> {
    let (mut best, mut runs) = (f64::INFINITY, 1u32);
    let mut rounds = 0;
    while rounds < ROUNDS {
        device.synchronise()?;
        let begin = Instant::now();
        (0..runs).try_for_each(|_| device.enqueue(Queue::Compute, launch))?;
        device.synchronise()?;
        let taken = begin.elapsed().as_secs_f64();
        if taken < LEAST {
            runs *= 2;
            continue;
        }
        best = best.min(taken / f64::from(runs));
        rounds += 1;
    }
    Ok(best)
}

/// Pseudo-random small numbers, as one f32 and as two bf16.
const fn scrambled(at: u32) -> u32 {
    let mixed = at.wrapping_mul(0x9E37_79B9) ^ (at >> 7).wrapping_mul(0x85EB_CA6B);
    // Exponents from 2^-7 to 1 in both halves, no sign: second moments have none.
    0x3C00_3C00 | (mixed & 0x03FF_03FF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeroth_cpu::CpuDevice;

    #[test]
    fn rates_are_measured_and_convert_bytes_to_seconds() {
        let mut device = CpuDevice::new(1, Rates::arenas()).unwrap();
        for (moments, stochastic) in [(DType::F32, false), (DType::Bf16, true)] {
            let rates = Rates::measure(&mut device, moments, stochastic).unwrap();
            assert!(rates.update > 1 << 20 && rates.bus > 1 << 20, "{rates:?}");
            assert!(rates.memory > 1 << 20 && rates.matmuls > 1 << 20, "{rates:?}");
        }
        let round = Rates { update: 4_000, bus: 2_000, memory: 16_000, matmuls: 1_000 };
        assert!((round.host_update_seconds(8_000) - 2.0).abs() < 1e-12);
        assert!((round.transfer_seconds(8_000) - 4.0).abs() < 1e-12);
        assert!(
            (round.memory_seconds(8_000) - 0.5).abs() < 1e-12
                && (round.matmul_seconds(8_000) - 8.0).abs() < 1e-12
        );
    }

    #[test]
    fn noise_is_small_and_finite() {
        for word in (0..10_000).map(scrambled) {
            let number = f32::from_bits(word).abs();
            assert!(number.is_finite() && number < 2.0 && number > 1e-3, "{number}");
            let low = f32::from_bits(word << 16).abs();
            assert!(low.is_finite() && low < 2.0 && low > 1e-3, "{low}");
        }
    }
}
