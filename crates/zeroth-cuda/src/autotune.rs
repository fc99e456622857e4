//! Autotuning of cuBLASLt algorithms: picks the fastest of those that are bitwise equal to the library's first choice.
//!
//! cuBLASLt orders its algorithms by an estimate. A few are benchmarked once, on random data in temporary memory. A candidate must
//! match the first algorithm bit by bit on a whole random matmul, so neither timing noise nor a lack of free memory changes
//! results, only speed.
#![allow(unsafe_code, reason = "enqueues matmuls over memory allocated here")]

use std::time::Instant;

use zeroth_base::DType;

use super::cublaslt::{CublasLt, Factors, MatmulProblem, MatrixLayout, Plan, Pointers};
use super::driver::Address;
use super::entry_points::EntryPoint;
use super::launch_context::LaunchContext;
use super::scratch::WORKSPACE;
use zeroth_kernel::DeviceError;

/// Smallest matmul worth autotuning, in FLOPs.
const MIN_FLOPS: u64 = 1 << 31;
/// Memory limit of autotuning one matmul.
const MAX_BYTES: u64 = 4 << 30;
/// Rounds of a timing, and runs per round.
const ROUNDS: usize = 5;
const RUNS: u32 = 3;
/// Another algorithm must take less than this fraction of the first one's time.
const MAX_TIME_RATIO: f64 = 0.97;

const ALIGNMENT: u64 = 256;

fn bytes(layout: &MatrixLayout) -> u64 {
    (layout.leading_dimension * layout.columns * dtype(layout).bytes()).next_multiple_of(ALIGNMENT)
}

const fn dtype(layout: &MatrixLayout) -> DType {
    match layout.dtype {
        0 => DType::F32,
        1 => DType::Bf16,
        _ => DType::F16,
    }
}

/// The memory needed to autotune a problem; `None` if it is not worth it.
fn trial_bytes(problem: &MatmulProblem) -> Option<u64> {
    let MatmulProblem { a, b, d, .. } = problem;
    let k = if a.transposed { a.rows } else { a.columns };
    // A flag, the bias, both operands and two results.
    let all = 2 * ALIGNMENT + bias_bytes(problem) + bytes(a) + bytes(b) + 2 * bytes(d);
    let worth = 2 * d.rows * d.columns * k >= MIN_FLOPS && all <= MAX_BYTES;
    worth.then_some(all)
}

const fn bias_bytes(problem: &MatmulProblem) -> u64 {
    (4 * problem.d.rows).next_multiple_of(ALIGNMENT)
}

/// Selects the algorithm of a plan. `workspace` has [`WORKSPACE`] bytes; autotuning allocates at most `max_bytes`.
pub(super) fn autotune(
    cx: &LaunchContext,
    library: &CublasLt,
    plan: &mut Plan,
    problem: &MatmulProblem,
    factors: Factors,
    workspace: Address,
    max_bytes: Option<u64>,
) -> Result<(), DeviceError> {
    let worth = trial_bytes(problem).filter(|_| plan.algorithms() > 1);
    let Some(bytes) = worth.filter(|bytes| max_bytes.is_none_or(|max| *bytes <= max)) else { return Ok(()) };
    // Without free memory the first algorithm stays.
    let Ok(memory) = cx.driver.allocate(bytes) else { return Ok(()) };
    let trial = Trial::new(cx, library, problem, factors, workspace, memory);
    let chosen = trial.and_then(|trial| trial.fastest(plan));
    let synchronised = cx.driver.synchronise(cx.stream);
    cx.driver.free(memory);
    synchronised?;
    plan.choose(chosen?);
    Ok(())
}

/// Buffers of a trial, filled with random data.
struct Trial<'a> {
    cx: &'a LaunchContext<'a>,
    library: &'a CublasLt,
    factors: Factors,
    pointers: Pointers,
    /// Two results with their size and type, and a mismatch flag.
    results: [Address; 2],
    result_bytes: u64,
    result_type: DType,
    mismatch: Address,
}

impl<'a> Trial<'a> {
    fn new(
        cx: &'a LaunchContext<'a>,
        library: &'a CublasLt,
        problem: &MatmulProblem,
        factors: Factors,
        workspace: Address,
        memory: Address,
    ) -> Result<Self, DeviceError> {
        let MatmulProblem { a, b, d, bias, .. } = problem;
        let mut next = memory;
        let mut take = |bytes: u64| {
            let at = next;
            next += bytes;
            at
        };
        let mismatch = take(ALIGNMENT);
        let bias_at = take(bias_bytes(problem));
        let (a_at, b_at) = (take(bytes(a)), take(bytes(b)));
        let results = [take(bytes(d)), take(bytes(d))];
        fill_random(cx, a_at, bytes(a), dtype(a), 1)?;
        fill_random(cx, b_at, bytes(b), dtype(b), 2)?;
        fill_random(cx, bias_at, bias_bytes(problem), dtype(d), 3)?;
        let pointers =
            Pointers { a: a_at, b: b_at, d: results[0], bias: (*bias != 0).then_some(bias_at), workspace };
        let (result_bytes, result_type) = (bytes(d), dtype(d));
        Ok(Self { cx, library, factors, pointers, results, result_bytes, result_type, mismatch })
    }

    /// Index of the fastest algorithm.
    fn fastest(&self, plan: &Plan) -> Result<usize, DeviceError> {
        let mut candidates = vec![0];
        self.result(plan, 0, self.results[0])?;
        for algorithm in 1..plan.algorithms() {
            // An algorithm that fails is not a candidate.
            if self.result(plan, algorithm, self.results[1]).is_ok() && self.results_are_equal()? {
                candidates.push(algorithm);
            }
        }
        let mut seconds = vec![f64::INFINITY; candidates.len()];
        for _ in 0..ROUNDS {
            for (best, &algorithm) in seconds.iter_mut().zip(&candidates) {
                let begin = Instant::now();
                for _ in 0..RUNS {
                    self.matmul(plan, algorithm, self.results[1])?;
                }
                self.cx.driver.synchronise(self.cx.stream)?;
                *best = best.min(begin.elapsed().as_secs_f64());
            }
        }
        let first = seconds[0];
        let best = (0..candidates.len()).min_by(|&one, &other| seconds[one].total_cmp(&seconds[other]));
        Ok(best.filter(|&best| seconds[best] < MAX_TIME_RATIO * first).map_or(0, |best| candidates[best]))
    }

    /// Runs a matmul into a buffer with fixed initial contents.
    fn result(&self, plan: &Plan, algorithm: usize, to: Address) -> Result<(), DeviceError> {
        fill_random(self.cx, to, self.result_bytes, self.result_type, 4)?;
        self.matmul(plan, algorithm, to)?;
        self.cx.driver.synchronise(self.cx.stream)
    }

    fn matmul(&self, plan: &Plan, algorithm: usize, to: Address) -> Result<(), DeviceError> {
        let pointers = Pointers { d: to, ..self.pointers };
        // SAFETY: buffers of the trial, sized for the matrices of the planned problem.
        unsafe { self.library.matmul(plan, algorithm, &pointers, self.factors, WORKSPACE, self.cx.stream) }
    }

    fn results_are_equal(&self) -> Result<bool, DeviceError> {
        let ([one, other], words) = (self.results, self.result_bytes / 4);
        self.cx.driver.set_bytes(self.mismatch, 0, 8, self.cx.stream)?;
        self.cx.run_elementwise(
            EntryPoint::CompareWords,
            &[],
            words as usize,
            &[one, other, words, self.mismatch],
        )?;
        let mut found = [0; 8];
        self.cx.driver.copy_to_host(&mut found, self.mismatch, self.cx.stream)?;
        Ok(u64::from_ne_bytes(found) == 0)
    }
}

fn fill_random(
    cx: &LaunchContext,
    at: Address,
    bytes: u64,
    dtype: DType,
    seed: u64,
) -> Result<(), DeviceError> {
    let count = bytes / dtype.bytes();
    cx.run_elementwise(EntryPoint::FillRandom, &[dtype], count.div_ceil(4) as usize, &[at, count, seed])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_or_memory_hungry_matmuls_are_not_autotuned() {
        let layout = |rows, columns| MatrixLayout {
            dtype: 1,
            rows,
            columns,
            leading_dimension: rows,
            transposed: false,
            alignment: 16,
        };
        let problem = |m, n, k| MatmulProblem {
            a: layout(m, k),
            b: layout(k, n),
            d: layout(m, n),
            bias: 0,
            workspace: WORKSPACE,
        };
        assert_eq!(trial_bytes(&problem(128, 128, 128)), None);
        assert_eq!(trial_bytes(&problem(1 << 18, 1 << 14, 64)), None);
        let all = trial_bytes(&problem(4096, 1024, 1024)).unwrap();
        assert_eq!(all, 512 + 16_384 + 2 * (4096 * 1024 + 1024 * 1024 + 2 * 4096 * 1024));
    }
}
