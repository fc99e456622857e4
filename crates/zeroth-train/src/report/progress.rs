//! Progress of a run as text: log lines, the terminal progress bar, and a sparkline of losses.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use zeroth_base::{format_bytes, grouped};

use super::flops::ComputeRate;

/// The progress of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Completed steps.
    pub step: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// Loss of the last step.
    pub loss: f64,
    /// Its cross-entropy and its divergence from the teacher, where the model is distilled.
    pub distilled: Option<[f64; 2]>,
    /// Gradient norm of the last step, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the last step.
    pub lr: f64,
    /// Throughput since the last line.
    pub tokens_per_second: f64,
    /// Compute rate of all devices since the last line; `None` if the model's FLOPs are unknown.
    pub rate: Option<ComputeRate>,
    /// Peak device memory of a rank; 0 where device memory is host memory.
    pub device_bytes: u64,
    /// Peak host memory of a rank.
    pub host_bytes: u64,
    /// Mean step time since the last line.
    pub step_time: Duration,
}

impl Progress {
    /// Estimated time to the end of the run.
    pub fn time_left(&self) -> Duration {
        let seconds = self.step_time.as_secs_f64() * self.total_steps.saturating_sub(self.step) as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    fn loss_text(&self) -> String {
        match self.distilled {
            Some([ce, kd]) => format!("loss {:.4} (ce {ce:.4}, kd {kd:.4})", self.loss),
            None => format!("loss {:.4}", self.loss),
        }
    }

    /// The fields of a line, with the order in which they are dropped on narrow terminals.
    fn fields(&self, step: String, tokens: &str, memory: String) -> Vec<ProgressField> {
        let mut fields = vec![
            ProgressField::new(0, step),
            ProgressField::new(1, self.loss_text()),
            ProgressField::new(4, format!("norm {}", figures(self.grad_norm))),
            ProgressField::new(5, format!("lr {:.2e}", self.lr)),
            ProgressField::new(
                3,
                format!("{} {tokens}", grouped(self.tokens_per_second.max(0.0).round() as u64)),
            ),
        ];
        fields.extend(self.rate.as_ref().map(|rate| ProgressField::new(6, rate.text())));
        fields.push(ProgressField::new(7, memory));
        let left = if self.step >= self.total_steps {
            "done".to_owned()
        } else {
            format!("{} left", duration(self.time_left()))
        };
        fields.push(ProgressField::new(2, left));
        fields
    }
}

/// One line for a log: `step 40/200 · loss 2.3456 · norm 1.23 · lr 1.00e-5 · 12,345 tokens/s · MFU 41.3% of 989T ·
/// 3.5 GB device, 1.2 GB host · 2m 03s left`.
pub fn line(now: &Progress) -> String {
    let total = now.total_steps.to_string();
    let memory = match (now.device_bytes, now.host_bytes) {
        (0, host) => format!("{} host", format_bytes(host)),
        (device, host) => format!("{} device, {} host", format_bytes(device), format_bytes(host)),
    };
    let step = format!("step {:>width$}/{total}", now.step, width = total.len());
    joined(&now.fields(step, "tokens/s", memory))
}

/// The terminal version, with shorter labels.
pub fn bar(now: &Progress) -> Bar {
    let memory = match (now.device_bytes, now.host_bytes) {
        (0, host) => format_bytes(host),
        (device, host) => format!("{} + {}", format_bytes(device), format_bytes(host)),
    };
    let fields = now.fields(format!("{}/{}", now.step, now.total_steps), "tok/s", memory);
    Bar { done: now.step, total: now.total_steps, fields }
}

/// A field of a progress line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressField {
    /// Drop priority: 0 is never dropped; of the others the largest goes first.
    pub order: u8,
    /// Its text.
    pub text: String,
}

impl ProgressField {
    /// A field with `text`.
    pub fn new(order: u8, text: impl Into<String>) -> Self {
        Self { order, text: text.into() }
    }
}

/// A progress bar with fields, laid out for any terminal width.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    /// Completed units.
    pub done: u64,
    /// Total units.
    pub total: u64,
    /// The fields beside the bar.
    pub fields: Vec<ProgressField>,
}

impl Bar {
    /// The fields without the bar.
    pub fn text(&self) -> String {
        joined(&self.fields)
    }

    /// The line for a terminal of `columns` columns. The last column stays free, because some terminals wrap once it
    /// is used.
    pub fn line(&self, columns: usize) -> String {
        let room = columns.saturating_sub(1);
        let mut fields = self.fields.clone();
        let width = |fields: &[ProgressField]| joined(fields).chars().count();
        while width(&fields) + 1 + LEAST_BAR > room {
            let last = (0..fields.len()).max_by_key(|&at| fields[at].order);
            match last.filter(|&at| fields[at].order > 0) {
                Some(last) => _ = fields.remove(last),
                None => break,
            }
        }
        let text = joined(&fields);
        match room.checked_sub(width(&fields) + 1).filter(|room| *room >= LEAST_BAR) {
            Some(room) => format!("{} {text}", blocks(self.done, self.total, room.min(MOST_BAR))),
            None => text.chars().take(room).collect(),
        }
    }
}

const LEAST_BAR: usize = 4;
const MOST_BAR: usize = 20;

fn joined(fields: &[ProgressField]) -> String {
    fields.iter().map(|field| field.text.as_str()).collect::<Vec<_>>().join(" · ")
}

fn blocks(done: u64, total: u64, width: usize) -> String {
    let full = u128::from(done.min(total)) * width as u128 / u128::from(total.max(1));
    let full = full as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(width - full))
}

/// Three significant digits: norms range from 1e-3 to 1e4.
fn figures(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && !(1e-3..1e5).contains(&size) && size.is_finite() => format!("{value:.2e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.2}"),
        size if size >= 0.1 => format!("{value:.3}"),
        size if size >= 0.01 => format!("{value:.4}"),
        _ => format!("{value:.5}"),
    }
}

/// `8s`, `2m 03s`, `5h 07m`, `3d 04h`.
pub fn duration(time: Duration) -> String {
    let seconds = if time.subsec_millis() >= 500 { time.as_secs().saturating_add(1) } else { time.as_secs() };
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h {:02}m", minutes % 60),
        (1..=999, _, _) => format!("{days}d {:02}h", hours % 24),
        _ => "years".to_owned(),
    }
}

/// A sparkline of at most `width` blocks, averaging neighbours; a blank where no loss is finite.
pub fn sparkline(losses: &[f64], width: usize) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let means: Vec<Option<f64>> = bins(losses.len(), width)
        .map(|range| {
            let finite: Vec<f64> = losses[range].iter().copied().filter(|loss| loss.is_finite()).collect();
            (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / finite.len() as f64)
        })
        .collect();
    let known = || means.iter().flatten().copied();
    let (least, most) = (known().fold(f64::INFINITY, f64::min), known().fold(f64::NEG_INFINITY, f64::max));
    let block = |mean: f64| {
        // Equal losses are a flat line at the bottom.
        let height = if most > least { (mean - least) / (most - least) } else { 0.0 };
        BLOCKS[((height * 8.0) as usize).min(7)]
    };
    means.iter().map(|mean| mean.map_or(' ', block)).collect()
}

/// Splits `count` items into at most `width` bins of nearly equal size.
pub(crate) fn bins(count: usize, width: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let bins = count.min(width);
    (0..bins).map(move |bin| bin * count / bins..(bin + 1) * count / bins)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Progress = Progress {
        step: 40,
        total_steps: 200,
        loss: 2.345_678,
        distilled: None,
        grad_norm: 1.234,
        lr: 1e-5,
        tokens_per_second: 12_345.4,
        rate: None,
        device_bytes: 3_500_000_000,
        host_bytes: 1_200_000_000,
        step_time: Duration::from_millis(750),
    };

    #[test]
    fn a_log_line_has_all_fields() {
        assert_eq!(
            line(&NOW),
            "step  40/200 · loss 2.3457 · norm 1.23 · lr 1.00e-5 · 12,345 tokens/s · 3.5 GB device, 1.2 GB host · \
             2m 00s left"
        );
        assert_eq!(
            line(&Progress { step: 200, device_bytes: 0, loss: f64::NAN, ..NOW }),
            "step 200/200 · loss NaN · norm 1.23 · lr 1.00e-5 · 12,345 tokens/s · 1.2 GB host · done"
        );
    }

    #[test]
    fn a_distilled_loss_has_its_parts() {
        let now = line(&Progress { distilled: Some([3.0, 0.25]), ..NOW });
        assert!(now.starts_with("step  40/200 · loss 2.3457 (ce 3.0000, kd 0.2500) · norm"), "{now}");
    }

    #[test]
    fn the_progress_bar_fits_any_width() {
        let peak = ComputeRate { flops: 408.5e12, peak: Some(989e12) };
        let now = bar(&Progress { rate: Some(peak), ..NOW });
        assert_eq!(
            now.line(120),
            "█░░░░░ 40/200 · loss 2.3457 · norm 1.23 · lr 1.00e-5 · 12,345 tok/s · MFU 41.3% of 989T · 3.5 GB + 1.2 GB · \
             2m 00s left"
        );
        let shown = [80, 60, 40, 20, 8].map(|columns| now.line(columns));
        assert_eq!(
            shown,
            [
                "░░░░ 40/200 · loss 2.3457 · norm 1.23 · lr 1.00e-5 · 12,345 tok/s · 2m 00s left",
                "█░░░░░░░░ 40/200 · loss 2.3457 · 12,345 tok/s · 2m 00s left",
                "░░░░ 40/200 · loss 2.3457 · 2m 00s left",
                "██░░░░░░░░░░ 40/200",
                "40/200",
            ]
        );
        for columns in 0..200 {
            assert!(now.line(columns).chars().count() < columns.max(1), "{columns}");
        }
        assert_eq!(now.line(400).chars().take_while(|c| "█░".contains(*c)).count(), MOST_BAR);
        assert!(bar(&Progress { step: 300, ..NOW }).line(200).starts_with(&"█".repeat(20)));
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        let shown =
            [0.0, 0.001_234, 0.0123, 0.123, 1.234, 12.34, 123.4, 12_340.0, 1.234e7, 1.2e-5].map(figures);
        assert_eq!(
            shown,
            ["0.00", "0.00123", "0.0123", "0.123", "1.23", "12.3", "123", "12340", "1.23e7", "1.20e-5"]
        );
        assert_eq!([f64::NAN, f64::INFINITY].map(figures), ["NaN", "inf"]);
    }

    #[test]
    fn durations_have_two_units() {
        let shown =
            [0, 8, 59, 60, 123, 3_600, 18_420, 86_400, 273_600].map(|s| duration(Duration::from_secs(s)));
        assert_eq!(shown, ["0s", "8s", "59s", "1m 00s", "2m 03s", "1h 00m", "5h 07m", "1d 00h", "3d 04h"]);
        assert_eq!(duration(Duration::from_millis(59_700)), "1m 00s");
        let unending = Progress { step_time: Duration::MAX, ..NOW };
        assert_eq!(duration(unending.time_left()), "years");
    }

    #[test]
    fn sparkline_follows_the_losses() {
        assert_eq!(sparkline(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8), "█▇▆▅▄▃▂▁");
        assert_eq!(sparkline(&[4.0, 4.0, 1.0, 1.0, 4.0, 2.0], 3), "█▁▆");
        assert_eq!(sparkline(&[1.0, f64::NAN, 0.0], 10), "█ ▁");
        assert_eq!(sparkline(&[2.0, 2.0], 10), "▁▁");
        assert_eq!(sparkline(&[], 10), "");
        assert_eq!(sparkline(&[1.0], 0), "");
        assert_eq!(sparkline(&[1.0; 1000], 40).chars().count(), 40);
    }
}
