//! Numbers, times and bytes as text, for the views.

use std::time::{SystemTime, UNIX_EPOCH};

use zeroth_base::format_bytes;

/// Four significant digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "–".to_owned(),
        0.0 => "0".to_owned(),
        size if !(1e-3..1e6).contains(&size) => format!("{value:.2e}"),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 10.0 => format!("{value:.2}"),
        size if size >= 1.0 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

/// A value of a curve, in its unit.
pub(crate) fn of_curve(name: &str, value: f64) -> String {
    match name {
        "mfu" => format!("{:.1}%", 100.0 * value),
        "lr" => format!("{value:.2e}"),
        _ if name.ends_with("_bytes_peak") => bytes(value.max(0.0) as u64),
        _ => number(value),
    }
}

pub(crate) fn bytes(bytes: u64) -> String {
    format_bytes(bytes)
}

/// `8s`, `2m 03s`, `5h 07m`, `3d 04h`.
pub(crate) fn duration(seconds: f64) -> String {
    if !(0.0..1e9).contains(&seconds) {
        return "years".to_owned();
    }
    let seconds = seconds.round() as u64;
    match (seconds / 86_400, seconds / 3600, seconds / 60) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m {:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h {:02}m", minutes % 60),
        (days, hours, _) => format!("{days}d {:02}h", hours % 24),
    }
}

/// How long ago a time is.
pub(crate) fn ago(time: f64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
    if time <= 0.0 { "–".to_owned() } else { format!("{} ago", duration((now - time).max(0.0))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let shown = [0.0, 1.234_56, 12.3456, 1234.5, 0.012_345, 1e-5, 1e9, f64::NAN].map(number);
        assert_eq!(shown, ["0", "1.235", "12.35", "1234", "0.0123", "1.00e-5", "1.00e9", "–"]);
        assert_eq!(of_curve("mfu", 0.4132), "41.3%");
        assert_eq!(
            [8.0, 123.0, 18_420.0, 273_600.0, -1.0].map(duration),
            ["8s", "2m 03s", "5h 07m", "3d 04h", "years"]
        );
    }
}
