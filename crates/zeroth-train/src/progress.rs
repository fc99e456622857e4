//! What a run says of itself, as text: a line now and then, and its losses as a row of blocks at the end.

use std::time::Duration;

use zeroth_base::{format_bytes, grouped};

use crate::report::figures::Rate;

/// Where a run stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// The last step's.
    pub loss: f64,
    /// The last step's, before clipping.
    pub grad_norm: f64,
    /// The last step's.
    pub lr: f64,
    /// Of the steps since the last line.
    pub tokens_per_second: f64,
    /// How fast all devices compute, over the same steps; none where the model's arithmetic is not known.
    pub rate: Option<Rate>,
    /// The most that a rank has held; 0 where the device's memory is the host's.
    pub device_bytes: u64,
    /// The most that a rank has held.
    pub host_bytes: u64,
    /// Time of the steps since the last line, each.
    pub step_time: Duration,
}

impl Progress {
    /// How long the steps to come take at the present rate.
    pub fn time_left(&self) -> Duration {
        let seconds = self.step_time.as_secs_f64() * self.total_steps.saturating_sub(self.step) as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    fn joined(&self, step: &str, tokens: &str, memory: &str) -> String {
        let mut parts = vec![
            step.to_owned(),
            format!("loss {:.4}", self.loss),
            format!("norm {}", figures(self.grad_norm)),
            format!("lr {:.2e}", self.lr),
            format!("{} {tokens}", grouped(self.tokens_per_second.max(0.0).round() as u64)),
        ];
        parts.extend(self.rate.as_ref().map(Rate::text));
        parts.push(memory.to_owned());
        parts.push(if self.step >= self.total_steps {
            "done".to_owned()
        } else {
            format!("{} left", duration(self.time_left()))
        });
        parts.join(" · ")
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
    now.joined(&step, "tokens/s", &memory)
}

/// The same for a terminal, with a bar and shorter words: within [`COLUMNS`] unless numbers are extreme.
pub fn bar_line(now: &Progress) -> String {
    let memory = match (now.device_bytes, now.host_bytes) {
        (0, host) => format_bytes(host),
        (device, host) => format!("{} + {}", format_bytes(device), format_bytes(host)),
    };
    let text = now.joined(&format!("{}/{}", now.step, now.total_steps), "tok/s", &memory);
    let room = COLUMNS.saturating_sub(text.chars().count() + 1).clamp(LEAST_BAR, MOST_BAR);
    format!("{} {text}", bar(now.step, now.total_steps, room))
}

/// What a line on a terminal keeps within.
pub const COLUMNS: usize = 120;
const LEAST_BAR: usize = 4;
const MOST_BAR: usize = 20;

fn bar(step: u64, total: u64, width: usize) -> String {
    let done = u128::from(step.min(total)) * width as u128 / u128::from(total.max(1));
    let full = done as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(width - full))
}

/// Three figures, whatever the size: norms range from 1e-3 to 1e4.
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

/// Losses as a row of at most `width` blocks, the mean of neighbours where there are more; a blank where none is finite.
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
        // Losses that are all equal are a flat line at the bottom.
        let height = if most > least { (mean - least) / (most - least) } else { 0.0 };
        BLOCKS[((height * 8.0) as usize).min(7)]
    };
    means.iter().map(|mean| mean.map_or(' ', block)).collect()
}

/// `count` things in at most `width` neighbourhoods of nearly equal size.
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
        grad_norm: 1.234,
        lr: 1e-5,
        tokens_per_second: 12_345.4,
        rate: None,
        device_bytes: 3_500_000_000,
        host_bytes: 1_200_000_000,
        step_time: Duration::from_millis(750),
    };

    #[test]
    fn a_line_tells_all_of_it() {
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
    fn a_line_on_a_terminal_has_a_bar_and_keeps_within_its_columns() {
        let peak = Rate { flops: 408.5e12, peak: Some(989e12) };
        let now = Progress { rate: Some(peak), ..NOW };
        let shown = bar_line(&now);
        assert_eq!(
            shown,
            "█░░░░░░ 40/200 · loss 2.3457 · norm 1.23 · lr 1.00e-5 · 12,345 tok/s · MFU 41.3% of 989T · 3.5 GB + 1.2 GB · \
             2m 00s left"
        );
        assert!(shown.chars().count() <= COLUMNS);
        let small = Progress { rate: Some(Rate { flops: 45.6e9, peak: None }), device_bytes: 0, ..NOW };
        assert_eq!(
            bar_line(&small),
            "████░░░░░░░░░░░░░░░░ 40/200 · loss 2.3457 · norm 1.23 · lr 1.00e-5 · 12,345 tok/s · 45.6 GFLOP/s · 1.2 GB · \
             2m 00s left"
        );
        assert!(bar_line(&Progress { step: 300, ..NOW }).starts_with(&"█".repeat(20)));
    }

    #[test]
    fn figures_keep_three_of_them() {
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
        let endless = Progress { step_time: Duration::MAX, ..NOW };
        assert_eq!(duration(endless.time_left()), "years");
    }

    #[test]
    fn blocks_follow_the_losses() {
        assert_eq!(sparkline(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8), "█▇▆▅▄▃▂▁");
        assert_eq!(sparkline(&[4.0, 4.0, 1.0, 1.0, 4.0, 2.0], 3), "█▁▆");
        assert_eq!(sparkline(&[1.0, f64::NAN, 0.0], 10), "█ ▁");
        assert_eq!(sparkline(&[2.0, 2.0], 10), "▁▁");
        assert_eq!(sparkline(&[], 10), "");
        assert_eq!(sparkline(&[1.0], 0), "");
        assert_eq!(sparkline(&[1.0; 1000], 40).chars().count(), 40);
    }
}
