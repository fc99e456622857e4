//! A benchmark, its result, and the loop that measures several in turns.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use zeroth_kernel::DeviceError;

/// The unit of a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RateUnit {
    /// 10^9 floating-point operations per second.
    #[serde(rename = "GFLOP/s")]
    Gflops,
    /// 10^9 bytes per second, read and written.
    #[serde(rename = "GB/s")]
    Gigabytes,
    /// Tokens per second.
    #[serde(rename = "tokens/s")]
    Tokens,
}

impl RateUnit {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gflops => "GFLOP/s",
            Self::Gigabytes => "GB/s",
            Self::Tokens => "tokens/s",
        }
    }
}

/// The best and the median of many bursts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Rate {
    pub best: f64,
    /// The median; the upper one of an even number.
    pub median: f64,
}

impl Rate {
    /// Best and median of these rates; zero where there are none.
    pub fn of(mut rates: Vec<f64>) -> Self {
        rates.sort_by(f64::total_cmp);
        Self {
            best: rates.last().copied().unwrap_or(0.0),
            median: rates.get(rates.len() / 2).copied().unwrap_or(0.0),
        }
    }

    /// Percent of a limit: best of best, median of median.
    #[must_use]
    pub fn percent_of(self, limit: Self) -> Self {
        Self { best: 100.0 * self.best / limit.best, median: 100.0 * self.median / limit.median }
    }
}

/// An error that stops a measurement.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum BenchError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("cannot measure the disk with {}: {source}; --dir names another folder", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} has {free} bytes free and the measurement writes {needed}; --dir names another folder", folder.display())]
    NoRoom { folder: PathBuf, free: u64, needed: u64 },
}

type Burst = Box<dyn FnMut() -> Result<f64, BenchError>>;

/// Something to measure in short bursts.
pub struct Benchmark {
    name: String,
    threads: usize,
    unit: RateUnit,
    limit: Option<String>,
    burst: Burst,
}

impl Benchmark {
    /// A benchmark whose `burst` returns its rate.
    pub fn new(
        name: impl Into<String>,
        threads: usize,
        unit: RateUnit,
        burst: impl FnMut() -> Result<f64, BenchError> + 'static,
    ) -> Self {
        Self { name: name.into(), threads, unit, limit: None, burst: Box::new(burst) }
    }

    /// A benchmark whose `burst` does `amount` operations or bytes and returns its seconds.
    pub fn of_seconds(
        name: impl Into<String>,
        threads: usize,
        unit: RateUnit,
        amount: f64,
        mut burst: impl FnMut() -> Result<f64, BenchError> + 'static,
    ) -> Self {
        Self::new(name, threads, unit, move || Ok(amount / burst()? / 1e9))
    }

    /// Sets the limit: the benchmark of that name on as many threads.
    #[must_use]
    pub fn limited_by(mut self, limit: impl Into<String>) -> Self {
        self.limit = Some(limit.into());
        self
    }
}

/// The limit of a benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct LimitRate {
    /// The name of the limit.
    pub name: String,
    pub best: f64,
    pub median: f64,
}

/// The result of a benchmark: one row of a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct BenchResult {
    pub name: String,
    /// Threads or ranks.
    pub threads: usize,
    /// The unit of the rates.
    pub unit: RateUnit,
    pub best: f64,
    pub median: f64,
    /// Its limit; `None` for a limit itself.
    pub limit: Option<LimitRate>,
    /// Best and median in percent of the limit's.
    pub percent: Option<Rate>,
}

impl BenchResult {
    /// A result with its limit.
    pub fn new(
        name: impl Into<String>,
        threads: usize,
        unit: RateUnit,
        rate: Rate,
        limit: Option<(&str, Rate)>,
    ) -> Self {
        Self {
            name: name.into(),
            threads,
            unit,
            best: rate.best,
            median: rate.median,
            limit: limit.map(|(name, limit)| LimitRate {
                name: name.to_owned(),
                best: limit.best,
                median: limit.median,
            }),
            percent: limit.map(|(_, limit)| rate.percent_of(limit)),
        }
    }
}

/// Measures benchmarks in turns, `rounds` bursts each after one warm-up. `on_round` is called before every round.
pub fn measure(
    mut benchmarks: Vec<Benchmark>,
    rounds: usize,
    on_round: &mut dyn FnMut(usize),
) -> Result<Vec<BenchResult>, BenchError> {
    let mut rates = vec![Vec::with_capacity(rounds); benchmarks.len()];
    for round in 0..=rounds {
        on_round(round);
        for (benchmark, rates) in benchmarks.iter_mut().zip(&mut rates) {
            let rate = (benchmark.burst)()?;
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    let rates: Vec<Rate> = rates.into_iter().map(Rate::of).collect();
    let find = |name: &str, threads: usize| {
        let index = benchmarks.iter().position(|other| other.name == name && other.threads == threads);
        index.map(|index| rates[index])
    };
    let result = |(benchmark, rate): (&Benchmark, &Rate)| {
        let Benchmark { name, threads, unit, limit, .. } = benchmark;
        let limit = limit.as_deref().and_then(|name| Some((name, find(name, *threads)?)));
        BenchResult::new(name.as_str(), *threads, *unit, *rate, limit)
    };
    Ok(benchmarks.iter().zip(&rates).map(result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_and_median_ignore_the_warm_up() {
        let mut next = [100.0, 3.0, 1.0, 2.0].into_iter();
        let line =
            Benchmark::new("x", 1, RateUnit::Gflops, move || Ok(next.next().expect("one burst a round")));
        let limit = Benchmark::new("limit", 1, RateUnit::Gflops, || Ok(4.0));
        let other = Benchmark::new("limit", 2, RateUnit::Gflops, || Ok(9.0));
        let measured = measure(vec![other, limit, line.limited_by("limit")], 3, &mut |_| {}).unwrap();
        assert_eq!((measured[2].best, measured[2].median), (3.0, 2.0));
        assert_eq!(measured[2].limit.as_ref().map(|limit| limit.best), Some(4.0));
        assert_eq!(measured[2].percent, Some(Rate { best: 75.0, median: 50.0 }));
        assert_eq!(measured[1].percent, None);
    }

    #[test]
    fn a_burst_that_fails_ends_the_measurement() {
        let missing = || {
            Err(BenchError::File { path: "gone".into(), source: io::Error::from(io::ErrorKind::NotFound) })
        };
        let error =
            measure(vec![Benchmark::new("x", 1, RateUnit::Gigabytes, missing)], 3, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
    }

    #[test]
    fn a_rate_is_the_amount_per_second() {
        let line = Benchmark::of_seconds("x", 1, RateUnit::Gigabytes, 6e9, || Ok(2.0));
        assert_eq!(measure(vec![line], 1, &mut |_| {}).unwrap()[0].best, 3.0);
    }
}
