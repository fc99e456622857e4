//! Curves in a terminal.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType};

use super::theme::Theme;
use crate::figures::of_curve;
use crate::run::Run;
use crate::series::Series;

/// Curves beside the loss.
const SMALL: [(&str, &str); 4] =
    [("lr", "lr"), ("grad_norm", "grad norm"), ("tokens_per_second", "tokens/s"), ("mfu", "MFU")];

struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    style: Style,
    marker: Marker,
}

/// Loss of all runs, or loss, evaluation and parts of the only one.
pub(super) fn loss(frame: &mut Frame<'_>, area: Rect, runs: &[Run], selected: usize, theme: Theme) {
    let mut curves = Vec::new();
    if let [run] = runs {
        let parts = run.curves.series.iter().map(|(name, _)| name.as_str());
        let parts = parts.filter(|name| name.ends_with("_loss") && *name != "eval_loss");
        for name in ["loss", "eval_loss"].into_iter().chain(parts).take(6) {
            curves.extend(curve(run, name, name, curves.len(), area, theme));
        }
    } else {
        for (at, run) in runs.iter().enumerate().take(6) {
            curves.extend(curve(run, "loss", &run.name, at, area, theme));
        }
    }
    let seams: Vec<u64> = runs.get(selected).map_or_else(Vec::new, |run| run.seams().collect());
    show(frame, area, "loss", "loss", &curves, &seams, theme);
}

/// The other curves, side by side.
pub(super) fn small(
    frame: &mut Frame<'_>,
    area: Rect,
    runs: &[Run],
    selected: usize,
    most: usize,
    theme: Theme,
) {
    let Some(run) = runs.get(selected) else { return };
    let shown: Vec<&(&str, &str)> =
        SMALL.iter().filter(|(name, _)| run.curves.get(name).is_some()).take(most).collect();
    let areas = Layout::horizontal(vec![Constraint::Fill(1); shown.len()]).split(area);
    for ((name, title), area) in shown.into_iter().zip(areas.iter()) {
        let curves: Vec<Curve> = curve(run, name, title, 0, *area, theme).into_iter().collect();
        show(frame, *area, name, title, &curves, &[], theme);
    }
}

fn curve(run: &Run, name: &str, label: &str, number: usize, area: Rect, theme: Theme) -> Option<Curve> {
    let series: &Series = run.curves.get(name)?;
    // Two dots a column: minimum and maximum.
    let buckets = series.buckets(usize::from(area.width.max(2)));
    let points = buckets.iter().flat_map(|bucket| {
        let (first, last) = (bucket.first as f64, bucket.last as f64);
        let extremes = [(first, bucket.min), (last, bucket.max)];
        extremes.into_iter().take(if bucket.first == bucket.last { 1 } else { 2 })
    });
    let value = series.last().map(|(_, value)| of_curve(name, value)).unwrap_or_default();
    let points: Vec<(f64, f64)> = points.collect();
    let name = format!("{label} {value}");
    (!points.is_empty()).then(|| Curve {
        name,
        points,
        style: theme.curve(number),
        marker: theme.marker(number),
    })
}

fn show(
    frame: &mut Frame<'_>,
    area: Rect,
    curve: &str,
    title: &str,
    curves: &[Curve],
    seams: &[u64],
    theme: Theme,
) {
    let title = match curves {
        [only] => only.name.clone(),
        _ => title.to_owned(),
    };
    let title: String = title.chars().take(usize::from(area.width.saturating_sub(4))).collect();
    let block =
        Block::bordered().border_style(theme.dim()).title(Line::styled(format!(" {title} "), Theme::TITLE));
    let all = || curves.iter().flat_map(|curve| &curve.points);
    if all().next().is_none() || area.height < 4 {
        let inner = block.inner(area);
        frame.render_widget(block, area);
        frame.render_widget(Line::styled("no steps yet", theme.dim()), inner);
        return;
    }
    let span = |of: fn(&(f64, f64)) -> f64| {
        let (low, high) =
            all().map(of).fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
        // A flat curve is in the middle.
        if high > low {
            (low, high)
        } else {
            (low - low.abs().max(1.0) * 0.1, high + high.abs().max(1.0) * 0.1)
        }
    };
    let (x, y) = (span(|point| point.0), span(|point| point.1));
    let seams: Vec<Vec<(f64, f64)>> = seams
        .iter()
        .map(|step| *step as f64)
        .filter(|step| (x.0..x.1).contains(step))
        .map(|step| (0..=20).map(|part| (step, y.0 + (y.1 - y.0) * f64::from(part) / 20.0)).collect())
        .collect();
    let mut sets: Vec<Dataset<'_>> = seams
        .iter()
        .map(|points| Dataset::default().data(points).marker(Marker::Dot).style(theme.dim()))
        .collect();
    let is_single = curves.len() == 1;
    sets.extend(curves.iter().map(|curve| {
        let set = Dataset::default().data(&curve.points).marker(curve.marker).style(curve.style);
        let set = set.graph_type(if curve.points.len() > 1 { GraphType::Line } else { GraphType::Scatter });
        if is_single { set } else { set.name(curve.name.as_str()) }
    }));
    let label = |value: f64| of_curve(curve, value);
    let steps: Vec<String> = [x.0, x.1].map(|step| format!("{}", step.max(0.0) as u64)).to_vec();
    let axis = |bounds: (f64, f64)| Axis::default().style(theme.dim()).bounds([bounds.0, bounds.1]);
    let chart = Chart::new(sets)
        .block(block)
        .x_axis(axis(x).labels(steps).labels_alignment(Alignment::Right))
        .y_axis(axis(y).labels([label(y.0), label(f64::midpoint(y.0, y.1)), label(y.1)]))
        .hidden_legend_constraints((Constraint::Ratio(3, 4), Constraint::Ratio(1, 2)));
    frame.render_widget(chart, area);
}
