//! Text panels: the head line of a run, figures, ranks, memory, events, checkpoints, config.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Wrap};
use zeroth_base::counted;

use super::theme::Theme;
use crate::figures::{ago, bytes, duration, of_curve};
use crate::run::{Run, RunSetting};

/// `● name · training · 120/2000 ████░░ · 2m 03s left`.
pub(super) fn head(
    run: &Run,
    number: usize,
    count: usize,
    is_selected: bool,
    width: u16,
    theme: Theme,
) -> Line<'static> {
    let state = run.state().to_owned();
    let mark = if count > 1 { if is_selected { "▶ " } else { "  " } } else { "" };
    let longest = usize::from(width / 3).max(8);
    let name: String = run.name.chars().take(longest).collect();
    let name_style = if count > 1 { theme.curve(number) } else { Theme::TITLE };
    let mut spans = vec![
        Span::styled(mark, Theme::TITLE),
        Span::styled(name, name_style),
        Span::raw(" "),
        Span::styled(state.clone(), theme.state(&state)),
    ];
    let steps =
        if run.steps() > 0 { format!(" {}/{}", run.step(), run.steps()) } else { format!(" {}", run.step()) };
    spans.push(Span::raw(steps));
    let left = run.seconds_left().map(|seconds| format!(" {} left", duration(seconds))).unwrap_or_default();
    let bad = run.garbage();
    let bad = if bad > 0 { format!(" {}", counted(bad, "bad line")) } else { String::new() };
    let used: usize = spans.iter().map(Span::width).sum::<usize>() + left.len() + bad.len();
    let room = usize::from(width).saturating_sub(used + 2).min(24);
    if run.steps() > 0 && room >= 6 {
        let full = (run.step().min(run.steps()) as f64 / run.steps() as f64 * room as f64) as usize;
        spans.push(Span::styled(format!(" {}", "█".repeat(full)), theme.bar()));
        spans.push(Span::styled("░".repeat(room - full), theme.dim()));
    }
    spans.push(Span::styled(left, theme.dim()));
    spans.push(Span::styled(bad, theme.warning()));
    Line::from(spans)
}

/// The last values, on as many lines as they need.
pub(super) fn figures(run: &Run, width: u16, theme: Theme) -> Vec<Line<'static>> {
    let shown = [
        ("loss", "loss"),
        ("eval_loss", "eval"),
        ("lr", "lr"),
        ("grad_norm", "norm"),
        ("tokens_per_second", "tok/s"),
        ("mfu", "MFU"),
    ];
    let mut lines = Vec::new();
    let (mut spans, mut used) = (Vec::new(), 0);
    for (curve, name) in shown {
        let Some(value) = run.last(curve) else { continue };
        let value = of_curve(curve, value);
        let size = name.len() + value.chars().count() + 3;
        if used > 0 && used + size > usize::from(width) {
            lines.push(Line::from(std::mem::take(&mut spans)));
            used = 0;
        }
        spans.push(Span::styled(format!(" {name} "), theme.dim()));
        spans.push(Span::styled(format!("{value} "), Theme::TITLE));
        used += size;
    }
    lines.push(Line::from(spans));
    lines
}

fn panel(frame: &mut Frame<'_>, area: Rect, title: String, lines: Vec<Line<'_>>, scroll: u16, theme: Theme) {
    let block = Block::bordered().border_style(theme.dim()).title(Line::styled(title, Theme::TITLE));
    frame.render_widget(Paragraph::new(lines).scroll((scroll, 0)).block(block), area);
}

pub(super) fn ranks(frame: &mut Frame<'_>, area: Rect, run: &Run, scroll: u16, theme: Theme) {
    let ranks = run.ranks();
    let is_wide = area.width >= 60;
    let line = |rank: &crate::status::MonitoredRank| {
        let (mark, style) = theme.health(rank.health);
        let age = rank.heartbeat_age.filter(|_| !run.has_ended());
        let age = age.map(|age| format!("{age:.1}s")).unwrap_or_default();
        let memory = rank.gpu_bytes.or(rank.pss_bytes).map(bytes).unwrap_or_default();
        let mut spans = vec![
            Span::styled(format!("{mark} {:>3} {:<8}", rank.rank, rank.health.name()), style),
            Span::raw(format!(" {:>7}", rank.step)),
            Span::raw(format!(" {age:>6} {memory:>8}")),
        ];
        if is_wide {
            let pid = rank.pid.map(|pid| pid.to_string()).unwrap_or_default();
            spans.push(Span::styled(format!("  {pid:>8} {:<12}", rank.host), theme.dim()));
            spans.push(Span::styled(rank.op.clone().unwrap_or_default(), theme.dim()));
        }
        Line::from(spans)
    };
    // Those that need attention first, where not all fit.
    let mut ordered: Vec<&crate::status::MonitoredRank> = ranks.iter().collect();
    if ranks.len() > usize::from(area.height.saturating_sub(3)) {
        ordered.sort_by_key(|rank| (!rank.health.is_bad(), rank.rank));
    }
    let header = format!("  {:>3} {:<8} {:>7} {:>6} {:>8}", "", "state", "step", "beat", "memory");
    let mut lines = vec![Line::styled(header, theme.dim())];
    lines.extend(ordered.into_iter().map(line));
    let bad = ranks.iter().filter(|rank| rank.health.is_bad()).count();
    let title = if bad > 0 {
        format!(" ranks: {bad} of {} lost ", ranks.len())
    } else {
        format!(" {} ", counted(ranks.len() as u64, "rank"))
    };
    panel(frame, area, title, lines, scroll, theme);
}

/// Memory of a rank beside the plan: measured peaks, and planned bytes by tier and category.
pub(super) fn memory(frame: &mut Frame<'_>, area: Rect, run: &Run, theme: Theme) {
    let ranks = run.ranks();
    let most = |of: fn(&crate::status::MonitoredRank) -> Option<u64>| ranks.iter().filter_map(of).max();
    let (pss, gpu) = (most(|rank| rank.pss_bytes), most(|rank| rank.gpu_bytes));
    let tiers = run.planned();
    // On a CPU the device's memory is the host's.
    let is_cpu = run.model().1 != Some("cuda");
    let overhead = run.overhead().unwrap_or(0);
    let of = |name: &str| tiers.iter().find(|tier| tier.tier == name).map_or(0, |tier| tier.total);
    let host = of("host") + overhead + if is_cpu { of("device") } else { 0 };
    let mut lines = Vec::new();
    let width = usize::from(area.width.saturating_sub(2));
    let mut row = |name: &str, used: Option<u64>, planned: u64| {
        if planned == 0 && used.is_none() {
            return;
        }
        let text = format!("{} of {}", used.map_or_else(|| "–".to_owned(), bytes), bytes(planned));
        let room = width.saturating_sub(name.len() + text.chars().count() + 3).min(20);
        let share = used.map_or(0.0, |used| used as f64 / planned.max(1) as f64);
        let full = ((share * room as f64) as usize).min(room);
        let style = if share > 1.05 { theme.warning() } else { theme.bar() };
        lines.push(Line::from(vec![
            Span::raw(format!("{name} ")),
            Span::styled("█".repeat(full), style),
            Span::styled("░".repeat(room - full), theme.dim()),
            Span::raw(format!(" {text}")),
        ]));
    };
    if !is_cpu {
        row("GPU ", gpu, of("device"));
    }
    row("host", pss, host);
    for tier in &tiers {
        let parts = tier.categories.iter().filter(|(_, size)| *size > 0);
        let parts: Vec<String> =
            parts.map(|(name, size)| format!("{} {}", short(name), bytes(*size))).collect();
        lines.push(Line::styled(format!("{}: {}", tier.tier, parts.join(", ")), theme.dim()));
    }
    if overhead > 0 {
        lines.push(Line::styled(format!("overhead {}", bytes(overhead)), theme.dim()));
    }
    let title = Line::styled(" memory per rank, of plan ", Theme::TITLE);
    let block = Block::bordered().border_style(theme.dim()).title(title);
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }).block(block), area);
}

fn short(category: &str) -> &str {
    match category {
        "parameters" => "params",
        "gradients" => "grads",
        "activations" => "acts",
        other => other,
    }
}

pub(super) fn events(frame: &mut Frame<'_>, area: Rect, run: &Run, scroll: u16, theme: Theme) {
    let line = |event: &crate::event_history::HistoryEvent| {
        let style = if event.event == "rank_lost" { theme.bad() } else { Theme::TITLE };
        Line::from(vec![
            Span::styled(format!("{:>11} ", ago(event.time)), theme.dim()),
            Span::styled(event.event.clone(), style),
            Span::raw(event.step.map(|step| format!(" {step}")).unwrap_or_default()),
            Span::styled(format!(" {}", event.detail), theme.dim()),
        ])
    };
    let mut lines: Vec<Line<'_>> = run.events().rev().map(line).collect();
    if let Some(problem) = run.problem() {
        lines.insert(0, Line::styled(problem.to_owned(), theme.bad()));
    }
    panel(frame, area, " events ".to_owned(), lines, scroll, theme);
}

pub(super) fn checkpoints(frame: &mut Frame<'_>, area: Rect, run: &Run, theme: Theme) {
    let line = |entry: &crate::run::ListedCheckpoint| {
        Line::raw(format!("step {:>8}  {:>9}  {}", entry.step, bytes(entry.bytes), ago(entry.time)))
    };
    let mut lines: Vec<Line<'_>> = run.checkpoints().iter().map(line).collect();
    if lines.is_empty() {
        lines.push(Line::styled("none yet; a file save-now in the run folder asks for one", theme.dim()));
    }
    panel(frame, area, " checkpoints ".to_owned(), lines, 0, theme);
}

pub(super) fn config(frame: &mut Frame<'_>, area: Rect, run: &Run, scroll: &mut u16, theme: Theme) {
    let settings = run.settings();
    let shown = |setting: &RunSetting| setting.origin != "default";
    let (mut set, defaults): (Vec<_>, Vec<_>) = settings.into_iter().partition(shown);
    set.extend(defaults);
    let [width, height] = [area.width, area.height].map(|size| size.saturating_sub(2));
    let width = usize::from(width).max(1);
    // As wide as the longest key, where that leaves room for values.
    let longest = set.iter().map(|setting| setting.key.chars().count()).max().unwrap_or(0);
    let column = longest.min(width * 3 / 5);
    let lines: Vec<Line<'_>> =
        set.iter().flat_map(|setting| setting_lines(setting, column, width, theme)).collect();
    *scroll = (*scroll).min(u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(height));
    let title = " config, what differs from defaults first ".to_owned();
    panel(frame, area, title, lines, *scroll, theme);
}

/// A setting on one line, or, where it is too long, its key above its value. Nothing is cut off.
fn setting_lines(setting: &RunSetting, column: usize, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let RunSetting { key, value, origin } = setting;
    let style = if origin == "default" { theme.dim() } else { Theme::TITLE };
    let length = |text: &str| text.chars().count();
    if length(key).max(column) + length(value) + length(origin) + 3 <= width {
        return vec![Line::from(vec![
            Span::styled(format!("{key:<column$} "), style),
            Span::raw(value.clone()),
            Span::styled(format!("  {origin}"), theme.dim()),
        ])];
    }
    let keys = wrapped(key, width).into_iter().map(|part| Line::styled(part, style));
    let room = width.saturating_sub(2).max(1);
    let mut rest: Vec<Line<'static>> =
        wrapped(value, room).into_iter().map(|part| Line::raw(format!("  {part}"))).collect();
    if let Some(last) = rest.last_mut().filter(|last| last.width() + 2 + length(origin) <= width) {
        last.push_span(Span::styled(format!("  {origin}"), theme.dim()));
    } else {
        let parts = wrapped(origin, room).into_iter();
        rest.extend(parts.map(|part| Line::styled(format!("  {part}"), theme.dim())));
    }
    keys.chain(rest).collect()
}

/// A text in pieces of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    characters.chunks(width).map(|part| part.iter().collect()).collect()
}
