//! Renders the loss curve as a self-contained SVG that reads well on light and dark pages.
//!
//! Colours are presentation attributes and the picture has its own background: many viewers support neither CSS
//! variables nor `prefers-color-scheme`.

use zeroth_base::grouped;

use super::progress::bins;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
/// Margins for axis labels: left, top, right, bottom.
const MARGIN: [f64; 4] = [64.0, 40.0, 16.0, 48.0];
/// Points beyond this many cannot be distinguished at that width; neighbours are averaged.
const POINTS: usize = 600;
/// Width of the widest digit in the fonts that viewers use.
const DIGIT: f64 = 8.0;
/// Above this many, dots overlap.
const DOTS: usize = 60;
const BACKGROUND: &str = "#ffffff";
const INK: &str = "#24292f";
const GRID: &str = "#d0d7de";
/// Training and evaluation: blue and orange, distinguishable by colour-blind readers, and by dashes in print.
const SERIES: [LossSeries; 2] = [
    LossSeries { class: "loss", colour: "#0969da", dashes: "" },
    LossSeries { class: "eval", colour: "#bc4c00", dashes: " stroke-dasharray=\"5 3\"" },
];

struct LossSeries {
    class: &'static str,
    colour: &'static str,
    dashes: &'static str,
}

impl LossSeries {
    /// The stroke attributes of its line.
    fn stroke(&self) -> String {
        let Self { colour, dashes, .. } = self;
        format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-linejoin=\"round\"{dashes}")
    }
}

/// The training loss by step as an SVG. Non-finite losses are skipped.
pub fn loss_curve(losses: &[(u64, f64)], title: &str) -> String {
    loss_curves(losses, &[], title)
}

/// The training loss and, if not empty, the evaluation loss as a second line with a dot per evaluation.
pub fn loss_curves(trained: &[(u64, f64)], evaluated: &[(u64, f64)], title: &str) -> String {
    let series = [points(trained), points(evaluated)];
    let all = || series.iter().flatten();
    let steps = ChartAxis::over(all().map(|point| point.0), 8, 1.0);
    let values = ChartAxis::over(all().map(|point| point.1), 6, 0.0);
    let x = |step: f64| MARGIN[0] + steps.share(step) * (WIDTH - MARGIN[0] - MARGIN[2]);
    let y = |loss: f64| HEIGHT - MARGIN[3] - values.share(loss) * (HEIGHT - MARGIN[1] - MARGIN[3]);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         role=\"img\" aria-label=\"{title}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"{INK}\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"{BACKGROUND}\"/>\n\
         <text x=\"{}\" y=\"22\" font-size=\"14\" font-weight=\"600\">{title}</text>\n",
        MARGIN[0],
        title = escaped(title),
    );
    svg += &axes(&steps, &values, x, y);
    if series.iter().all(Vec::is_empty) {
        svg += &format!("<text x=\"{}\" y=\"{}\">no finite loss</text>\n", WIDTH / 2.0, HEIGHT / 2.0);
    }
    for (points, look) in series.iter().zip(&SERIES) {
        let LossSeries { class, colour, .. } = *look;
        let at = |&(step, loss): &(f64, f64)| (x(step), y(loss));
        if points.len() > 1 {
            let line: Vec<String> = points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let points = line.join(" ");
            svg += &format!("<polyline class=\"{class}\" points=\"{points}\" {}/>\n", look.stroke());
        }
        // A polyline of one point is invisible, and evaluations are few enough to mark each.
        if points.len() == 1 || (class == "eval" && points.len() <= DOTS) {
            for (x, y) in points.iter().map(at) {
                svg += &format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>\n");
            }
        }
    }
    if !series[1].is_empty() {
        svg += &legend();
    }
    svg + "</svg>\n"
}

/// Reduces losses to at most [`POINTS`] points.
fn points(losses: &[(u64, f64)]) -> Vec<(f64, f64)> {
    let finite: Vec<(u64, f64)> = losses.iter().copied().filter(|(_, loss)| loss.is_finite()).collect();
    let mean = |range: std::ops::Range<usize>| {
        let part = &finite[range];
        let count = part.len() as f64;
        let step = part.iter().map(|(step, _)| *step as f64).sum::<f64>() / count;
        (step, part.iter().map(|(_, loss)| loss).sum::<f64>() / count)
    };
    bins(finite.len(), POINTS).map(mean).collect()
}

fn axes(steps: &ChartAxis, values: &ChartAxis, x: impl Fn(f64) -> f64, y: impl Fn(f64) -> f64) -> String {
    let mut svg = String::new();
    for value in values.ticks() {
        let at = y(value);
        svg += &format!(
            "<line x1=\"{}\" y1=\"{at:.1}\" x2=\"{}\" y2=\"{at:.1}\" stroke=\"{GRID}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            MARGIN[0],
            WIDTH - MARGIN[2],
            MARGIN[0] - 8.0,
            at + 4.0,
            values.label(value),
        );
    }
    let foot = HEIGHT - MARGIN[3];
    for step in steps.ticks() {
        let (at, label) = (x(step), grouped(step as u64));
        // A long label at the right edge would be clipped.
        let is_cut = at + DIGIT / 2.0 * label.len() as f64 > WIDTH;
        let (label_at, anchor) = if is_cut { (WIDTH - 2.0, "end") } else { (at, "middle") };
        svg += &format!(
            "<line x1=\"{at:.1}\" y1=\"{foot}\" x2=\"{at:.1}\" y2=\"{}\" stroke=\"{GRID}\"/>\
             <text x=\"{label_at:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{label}</text>\n",
            foot + 5.0,
            foot + 19.0,
        );
    }
    svg + &format!(
        "<text x=\"{}\" y=\"22\" text-anchor=\"end\">loss</text>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"end\">step</text>\n",
        MARGIN[0] - 8.0,
        WIDTH - MARGIN[2],
        HEIGHT - 8.0
    )
}

/// The legend, right of the title.
fn legend() -> String {
    let entry = |at: f64, look: &LossSeries, text: &str| {
        format!(
            "<line x1=\"{at}\" y1=\"18\" x2=\"{}\" y2=\"18\" {}/><text x=\"{}\" y=\"22\">{text}</text>\n",
            at + 24.0,
            look.stroke(),
            at + 30.0
        )
    };
    let right = WIDTH - MARGIN[2];
    let [training, evaluation] = &SERIES;
    entry(right - 210.0, training, "training") + &entry(right - 100.0, evaluation, "evaluation")
}

/// An axis range and its tick distance: 1, 2 or 5 times a power of ten.
struct ChartAxis {
    least: f64,
    most: f64,
    tick: f64,
}

impl ChartAxis {
    /// An axis that covers all `values`, with about `ticks` ticks at least `closest` apart.
    fn over(values: impl Iterator<Item = f64> + Clone, ticks: u32, closest: f64) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(f64::NEG_INFINITY, f64::max);
        let (least, most) = if least > most {
            (0.0, 1.0)
        } else if least == most {
            // A single value gets a range around it.
            let around = 0.5 * least.abs().max(1.0);
            (least - around, most + around)
        } else {
            (least, most)
        };
        let rough = (most - least) / f64::from(ticks);
        let power = 10_f64.powf(rough.log10().floor());
        let tick = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|tick| *tick >= rough);
        Self { least, most, tick: tick.unwrap_or(rough).max(closest) }
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.least) / (self.most - self.least)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (first, last) = ((self.least / self.tick).ceil() as i64, (self.most / self.tick).floor() as i64);
        let tick = self.tick;
        (first..=last).map(move |index| index as f64 * tick)
    }

    /// Labels with as many decimals as the tick distance has.
    fn label(&self, value: f64) -> String {
        let digits = (-self.tick.log10().floor()).clamp(0.0, 9.0) as usize;
        format!("{value:.digits$}")
    }
}

/// Escapes text for XML, which cannot represent control characters.
fn escaped(text: &str) -> String {
    let text: String =
        text.chars().map(|found| if found.is_control() { '\u{fffd}' } else { found }).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute<'a>(svg: &'a str, before: &str) -> &'a str {
        svg.split_once(before).unwrap().1.split_once('"').unwrap().0
    }

    #[test]
    fn extreme_points_touch_the_axis_ends() {
        let svg = loss_curve(&[(1, 4.0), (2, 3.0), (3, 2.0)], "loss");
        assert_eq!(attribute(&svg, "polyline class=\"loss\" points=\""), "64.0,40.0 384.0,176.0 704.0,312.0");
    }

    #[test]
    fn svg_uses_only_presentation_attributes() {
        let losses = [(1, 4.0), (2, 3.0), (3, 2.0)];
        let svg = loss_curves(&losses, &losses, "a \u{1b}[31m title");
        for fancy in ["<style", "var(", "@media", "currentColor", "\u{1b}"] {
            assert!(!svg.contains(fancy), "{fancy}\n{svg}");
        }
        // Behind everything else.
        assert_eq!(
            svg.lines().nth(1),
            Some("<rect width=\"720\" height=\"360\" fill=\"#ffffff\"/>"),
            "{svg}"
        );
        let drawn =
            svg.lines().filter(|line| ["<line", "<polyline"].iter().any(|name| line.starts_with(name)));
        for line in drawn {
            assert!(line.contains("stroke=\"#"), "{line}");
        }
    }

    #[test]
    fn evaluations_are_a_second_line_on_the_same_axes() {
        let svg = loss_curves(&[(1, 4.0), (2, 3.0), (3, 2.0)], &[(2, 3.0), (3, 2.5), (4, f64::NAN)], "loss");
        assert_eq!(attribute(&svg, "polyline class=\"loss\" points=\""), "64.0,40.0 384.0,176.0 704.0,312.0");
        assert_eq!(attribute(&svg, "polyline class=\"eval\" points=\""), "384.0,176.0 704.0,244.0");
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
        for word in [">training<", ">evaluation<", ">loss<", ">step<"] {
            assert_eq!(svg.matches(word).count(), if word == ">loss<" { 2 } else { 1 }, "{word}\n{svg}");
        }
        // A higher evaluation loss extends the axis.
        let above = loss_curves(&[(1, 1.0), (2, 1.0)], &[(2, 2.0)], "loss");
        assert!(above.contains("<circle cx=\"704.0\" cy=\"40.0\""), "{above}");
        let many: Vec<(u64, f64)> = (1..=100).map(|step| (step, 1.0 / step as f64)).collect();
        assert!(!loss_curves(&many, &many, "loss").contains("<circle"));
        assert!(!loss_curve(&many, "loss").contains("evaluation"));
    }

    #[test]
    fn axes_have_round_numbers() {
        let svg = loss_curve(&[(1, 2.9), (2000, 1.1)], "loss");
        for number in [">1.5<", ">2.0<", ">2.5<", ">500<", ">1,000<", ">2,000<"] {
            assert!(svg.contains(number), "{number}\n{svg}");
        }
        // The last label is anchored at its end.
        assert!(svg.contains("<text x=\"718.0\" y=\"331\" text-anchor=\"end\">2,000<"), "{svg}");
        // Ticks between whole steps would have equal labels.
        let short = loss_curve(&[(1, 2.9), (3, 1.1)], "loss");
        assert_eq!(short.matches(">2</text>").count(), 1, "{short}");
    }

    #[test]
    fn long_runs_are_downsampled_and_degenerate_ones_drawn() {
        let long: Vec<(u64, f64)> = (1..=1_000_000).map(|step| (step, 1.0 / step as f64)).collect();
        let svg = loss_curve(&long, "long");
        assert!(svg.len() < 16_000, "{}", svg.len());
        assert_eq!(attribute(&svg, "points=\"").split(' ').count(), POINTS);
        assert!(loss_curve(&[], "none").contains("no finite loss"));
        assert!(loss_curve(&[(1, f64::NAN)], "none").contains("no finite loss"));
        assert!(loss_curve(&[(7, 2.0)], "one").contains("<circle cx=\"384.0\" cy=\"176.0\""));
        for odd in
            [loss_curve(&[(1, 2.0), (2, 2.0)], "flat"), loss_curve(&[(0, -1.0), (1, 0.0)], "a<b & \"c\"")]
        {
            assert!(odd.ends_with("</svg>\n") && !odd.contains("NaN") && !odd.contains("inf"), "{odd}");
            assert!(!odd.contains("a<b"), "{odd}");
        }
    }
}
