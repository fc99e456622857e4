//! A line of a report: something that runs in short bursts, and the line that limits it.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use zeroth_kernel::DeviceError;

/// What a rate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// 10^9 multiplications and additions a second.
    #[serde(rename = "GFLOP/s")]
    Gflops,
    /// 10^9 bytes a second, read and written.
    #[serde(rename = "GB/s")]
    Gigabytes,
    /// Tokens a second.
    #[serde(rename = "tokens/s")]
    Tokens,
}

impl Unit {
    /// As it is printed.
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
pub struct Rate {
    /// The largest.
    pub best: f64,
    /// The middle one; of an even number the upper of both.
    pub median: f64,
}

impl Rate {
    /// Of these rates, in any order; zero where there are none.
    pub fn of(mut rates: Vec<f64>) -> Self {
        rates.sort_by(f64::total_cmp);
        Self {
            best: rates.last().copied().unwrap_or(0.0),
            median: rates.get(rates.len() / 2).copied().unwrap_or(0.0),
        }
    }

    /// In percent of a limit: best of best, median of median.
    #[must_use]
    pub fn percent_of(self, limit: Self) -> Self {
        Self { best: 100.0 * self.best / limit.best, median: 100.0 * self.median / limit.median }
    }
}

/// What stops a measurement.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Memory, or a kernel of a card.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The file that is written and read.
    #[error("cannot measure the disk with {}: {source}; --dir names another folder", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder without room for that file.
    #[error("{} has {free} bytes free and the measurement writes {needed}; --dir names another folder", folder.display())]
    NoRoom {
        /// The folder.
        folder: PathBuf,
        /// Bytes free.
        free: u64,
        /// Bytes needed.
        needed: u64,
    },
}

type Burst = Box<dyn FnMut() -> Result<f64, BenchError>>;

/// Something that is measured.
pub struct Benchmark {
    name: String,
    threads: usize,
    unit: Unit,
    limit: Option<String>,
    burst: Burst,
}

impl Benchmark {
    /// A line whose `burst` gives the rate that it ran at.
    pub fn new(
        name: impl Into<String>,
        threads: usize,
        unit: Unit,
        burst: impl FnMut() -> Result<f64, BenchError> + 'static,
    ) -> Self {
        Self { name: name.into(), threads, unit, limit: None, burst: Box::new(burst) }
    }

    /// A line whose `burst` does `amount` operations or bytes, and gives the seconds it took.
    pub fn of_seconds(
        name: impl Into<String>,
        threads: usize,
        unit: Unit,
        amount: f64,
        mut burst: impl FnMut() -> Result<f64, BenchError> + 'static,
    ) -> Self {
        Self::new(name, threads, unit, move || Ok(amount / burst()? / 1e9))
    }

    /// The same, limited by the line of that name and as many threads.
    #[must_use]
    pub fn limited_by(mut self, limit: impl Into<String>) -> Self {
        self.limit = Some(limit.into());
        self
    }
}

/// The limit that a line is set beside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LimitRate {
    /// The limit's line.
    pub name: String,
    /// Its best burst.
    pub best: f64,
    /// Its median.
    pub median: f64,
}

/// What a line came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchResult {
    /// What ran.
    pub name: String,
    /// On how many threads, or ranks.
    pub threads: usize,
    /// What the rates count.
    pub unit: Unit,
    /// The best burst.
    pub best: f64,
    /// The median.
    pub median: f64,
    /// What limits it; none for a limit itself.
    pub limit: Option<LimitRate>,
    /// Best and median in percent of the limit's.
    pub percent: Option<Rate>,
}

impl BenchResult {
    /// A line of this rate, beside a limit.
    pub fn new(
        name: impl Into<String>,
        threads: usize,
        unit: Unit,
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

/// Measures all lines in turns, `rounds` bursts each after one that does not count. `told` hears of every round.
pub fn measure(
    mut lines: Vec<Benchmark>,
    rounds: usize,
    told: &mut dyn FnMut(usize),
) -> Result<Vec<BenchResult>, BenchError> {
    let mut rates = vec![Vec::with_capacity(rounds); lines.len()];
    for round in 0..=rounds {
        told(round);
        for (line, rates) in lines.iter_mut().zip(&mut rates) {
            let rate = (line.burst)()?;
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    let rates: Vec<Rate> = rates.into_iter().map(Rate::of).collect();
    let find = |name: &str, threads: usize| {
        let place = lines.iter().position(|line| line.name == name && line.threads == threads);
        place.map(|place| rates[place])
    };
    let measured = |(line, rate): (&Benchmark, &Rate)| {
        let limit = line.limit.as_deref().and_then(|name| Some((name, find(name, line.threads)?)));
        BenchResult::new(line.name.as_str(), line.threads, line.unit, *rate, limit)
    };
    Ok(lines.iter().zip(&rates).map(measured).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_and_median_are_those_of_the_bursts_that_count() {
        let mut next = [100.0, 3.0, 1.0, 2.0].into_iter();
        let line = Benchmark::new("x", 1, Unit::Gflops, move || Ok(next.next().expect("one burst a round")));
        let limit = Benchmark::new("limit", 1, Unit::Gflops, || Ok(4.0));
        let other = Benchmark::new("limit", 2, Unit::Gflops, || Ok(9.0));
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
        let error = measure(vec![Benchmark::new("x", 1, Unit::Gigabytes, missing)], 3, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
    }

    #[test]
    fn amounts_over_seconds_are_rates() {
        let line = Benchmark::of_seconds("x", 1, Unit::Gigabytes, 6e9, || Ok(2.0));
        assert_eq!(measure(vec![line], 1, &mut |_| {}).unwrap()[0].best, 3.0);
    }
}
