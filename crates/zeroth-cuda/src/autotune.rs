//! Which of the library's algorithms computes a product: the fastest of those that give the bits of its first choice.
//!
//! The library orders its algorithms by an estimate. A few are tried once, on numbers of our own in memory that is given
//! back. What is chosen gives the same bits as the first on all of a large random product, so neither noise in a timing
//! nor a card without free memory changes a result: only how fast it comes.
#![allow(unsafe_code, reason = "enqueues products over memory that is taken here")]

use std::time::Instant;

use zeroth_base::DType;

use super::cublaslt::{CublasLt, Operand, Places, Plan, Question};
use super::driver::Address;
use super::line::Line;
use super::programs::Entry;
use super::scratch::WORKSPACE;
use zeroth_kernel::DeviceError;

/// Operations of a product that is worth the trial.
const LEAST: u64 = 1 << 31;
/// The most memory that a trial takes.
const MOST_BYTES: u64 = 4 << 30;
/// Rounds of a timing, and runs of each.
const ROUNDS: usize = 5;
const RUNS: u32 = 3;
/// Another algorithm must need less than this part of the first one's time.
const GAIN: f64 = 0.97;

const ALIGNMENT: u64 = 256;

fn bytes(operand: &Operand) -> u64 {
    (operand.pitch * operand.columns * dtype(operand).bytes()).next_multiple_of(ALIGNMENT)
}

const fn dtype(operand: &Operand) -> DType {
    match operand.dtype {
        0 => DType::F32,
        1 => DType::Bf16,
        _ => DType::F16,
    }
}

/// Whether a question is worth a trial, and how many bytes that takes.
fn trial_bytes(question: &Question) -> Option<u64> {
    let Question { a, b, d, .. } = question;
    let along = if a.transposed { a.rows } else { a.columns };
    // A flag, a bias, both sides, and two results.
    let all = 2 * ALIGNMENT + bias_bytes(question) + bytes(a) + bytes(b) + 2 * bytes(d);
    let worth = 2 * d.rows * d.columns * along >= LEAST && all <= MOST_BYTES;
    worth.then_some(all)
}

const fn bias_bytes(question: &Question) -> u64 {
    (4 * question.d.rows).next_multiple_of(ALIGNMENT)
}

/// Gives a plan its algorithm. `workspace` holds [`WORKSPACE`] bytes; a trial takes no more memory than `spare`.
pub(super) fn choose(
    line: &Line,
    library: &CublasLt,
    plan: &mut Plan,
    question: &Question,
    beta: f32,
    workspace: Address,
    spare: Option<u64>,
) -> Result<(), DeviceError> {
    let worth = trial_bytes(question).filter(|_| plan.algorithms() > 1);
    let Some(bytes) = worth.filter(|bytes| spare.is_none_or(|spare| *bytes <= spare)) else { return Ok(()) };
    // Without free memory the first choice stays.
    let Ok(memory) = line.driver.allocate(bytes) else { return Ok(()) };
    let trial = Trial::new(line, library, question, beta, workspace, memory);
    let chosen = trial.and_then(|trial| trial.fastest(plan));
    let settled = line.driver.synchronise(line.stream);
    line.driver.free(memory);
    settled?;
    plan.choose(chosen?);
    Ok(())
}

/// Memory of a trial, filled.
struct Trial<'a> {
    line: &'a Line<'a>,
    library: &'a CublasLt,
    beta: f32,
    places: Places,
    /// Two results, their bytes and type, and a flag.
    results: [Address; 2],
    result_bytes: u64,
    result_type: DType,
    flag: Address,
}

impl<'a> Trial<'a> {
    fn new(
        line: &'a Line<'a>,
        library: &'a CublasLt,
        question: &Question,
        beta: f32,
        workspace: Address,
        memory: Address,
    ) -> Result<Self, DeviceError> {
        let Question { a, b, d, bias, .. } = question;
        let mut next = memory;
        let mut take = |bytes: u64| {
            let at = next;
            next += bytes;
            at
        };
        let flag = take(ALIGNMENT);
        let bias_at = take(bias_bytes(question));
        let (a_at, b_at) = (take(bytes(a)), take(bytes(b)));
        let results = [take(bytes(d)), take(bytes(d))];
        noise(line, a_at, bytes(a), dtype(a), 1)?;
        noise(line, b_at, bytes(b), dtype(b), 2)?;
        noise(line, bias_at, bias_bytes(question), dtype(d), 3)?;
        let places =
            Places { a: a_at, b: b_at, d: results[0], bias: (*bias != 0).then_some(bias_at), workspace };
        let (result_bytes, result_type) = (bytes(d), dtype(d));
        Ok(Self { line, library, beta, places, results, result_bytes, result_type, flag })
    }

    /// The place of the algorithm to take.
    fn fastest(&self, plan: &Plan) -> Result<usize, DeviceError> {
        let mut same = vec![0];
        self.result(plan, 0, self.results[0])?;
        for algorithm in 1..plan.algorithms() {
            // One that fails is none to choose.
            if self.result(plan, algorithm, self.results[1]).is_ok() && self.equal()? {
                same.push(algorithm);
            }
        }
        let mut seconds = vec![f64::INFINITY; same.len()];
        for _ in 0..ROUNDS {
            for (best, &algorithm) in seconds.iter_mut().zip(&same) {
                let begin = Instant::now();
                for _ in 0..RUNS {
                    self.multiply(plan, algorithm, self.results[1])?;
                }
                self.line.driver.synchronise(self.line.stream)?;
                *best = best.min(begin.elapsed().as_secs_f64());
            }
        }
        let first = seconds[0];
        let best = (0..same.len()).min_by(|&one, &other| seconds[one].total_cmp(&seconds[other]));
        Ok(best.filter(|&best| seconds[best] < GAIN * first).map_or(0, |best| same[best]))
    }

    /// A product into a place that held the same noise before.
    fn result(&self, plan: &Plan, algorithm: usize, to: Address) -> Result<(), DeviceError> {
        noise(self.line, to, self.result_bytes, self.result_type, 4)?;
        self.multiply(plan, algorithm, to)?;
        self.line.driver.synchronise(self.line.stream)
    }

    fn multiply(&self, plan: &Plan, algorithm: usize, to: Address) -> Result<(), DeviceError> {
        let places = Places { d: to, ..self.places };
        // SAFETY: memory of the trial, with room for the matrices of the plan's question.
        unsafe { self.library.multiply(plan, algorithm, &places, self.beta, WORKSPACE, self.line.stream) }
    }

    fn equal(&self) -> Result<bool, DeviceError> {
        let ([one, other], words) = (self.results, self.result_bytes / 4);
        self.line.driver.set_bytes(self.flag, 0, 8, self.line.stream)?;
        self.line.each(Entry::Differ, &[], words as usize, &[one, other, words, self.flag])?;
        let mut found = [0; 8];
        self.line.driver.copy_to_host(&mut found, self.flag, self.line.stream)?;
        Ok(u64::from_ne_bytes(found) == 0)
    }
}

fn noise(line: &Line, at: Address, bytes: u64, dtype: DType, seed: u64) -> Result<(), DeviceError> {
    let count = bytes / dtype.bytes();
    line.each(Entry::Noise, &[dtype], count.div_ceil(4) as usize, &[at, count, seed])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_products_and_large_memory_are_not_tried() {
        let operand = |rows, columns| Operand {
            dtype: 1,
            rows,
            columns,
            pitch: rows,
            transposed: false,
            alignment: 16,
        };
        let question = |m, n, k| Question {
            a: operand(m, k),
            b: operand(k, n),
            d: operand(m, n),
            bias: 0,
            workspace: WORKSPACE,
        };
        assert_eq!(trial_bytes(&question(128, 128, 128)), None);
        assert_eq!(trial_bytes(&question(1 << 18, 1 << 14, 64)), None);
        let all = trial_bytes(&question(4096, 1024, 1024)).unwrap();
        assert_eq!(all, 512 + 16_384 + 2 * (4096 * 1024 + 1024 * 1024 + 2 * 4096 * 1024));
    }
}
