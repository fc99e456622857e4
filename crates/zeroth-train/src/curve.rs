//! The loss curve as a picture: one SVG file that needs nothing else and reads on light and dark pages.

use zeroth_base::grouped;

use crate::progress::bins;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
/// Room for the numbers of the axes: left, top, right, bottom.
const MARGIN: [f64; 4] = [64.0, 40.0, 16.0, 48.0];
/// More points than this cannot be told apart at that width; each is the mean of its neighbours.
const POINTS: usize = 600;

/// The losses by step, as an SVG. Losses that are not finite are left out.
pub fn loss_curve(losses: &[(u64, f64)], title: &str) -> String {
    let finite: Vec<(u64, f64)> = losses.iter().copied().filter(|(_, loss)| loss.is_finite()).collect();
    let points: Vec<(f64, f64)> = bins(finite.len(), POINTS)
        .map(|range| {
            let part = &finite[range];
            let count = part.len() as f64;
            let step = part.iter().map(|(step, _)| *step as f64).sum::<f64>() / count;
            (step, part.iter().map(|(_, loss)| loss).sum::<f64>() / count)
        })
        .collect();
    let steps = Axis::over(points.iter().map(|point| point.0), 8, 1.0);
    let values = Axis::over(points.iter().map(|point| point.1), 6, 0.0);
    let x = |step: f64| MARGIN[0] + steps.share(step) * (WIDTH - MARGIN[0] - MARGIN[2]);
    let y = |loss: f64| HEIGHT - MARGIN[3] - values.share(loss) * (HEIGHT - MARGIN[1] - MARGIN[3]);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n\
         <style>\
         svg{{font:12px system-ui,sans-serif;--ink:#24292f;--grid:#d0d7de;--line:#0969da}}\
         @media(prefers-color-scheme:dark){{svg{{--ink:#e6edf3;--grid:#3d444d;--line:#58a6ff}}}}\
         text{{fill:var(--ink)}}.grid{{stroke:var(--grid)}}\
         .loss{{fill:none;stroke:var(--line);stroke-width:1.8;stroke-linejoin:round}}\
         </style>\n\
         <text x=\"{}\" y=\"22\" font-size=\"14\" font-weight=\"600\">{title}</text>\n",
        MARGIN[0],
        title = escaped(title),
    );
    for value in values.ticks() {
        let at = y(value);
        svg += &format!(
            "<line class=\"grid\" x1=\"{}\" y1=\"{at:.1}\" x2=\"{}\" y2=\"{at:.1}\"/>\
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
        let at = x(step);
        svg += &format!(
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{foot}\" x2=\"{at:.1}\" y2=\"{}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
            foot + 5.0,
            foot + 19.0,
            grouped(step as u64),
        );
    }
    svg += &format!(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">step</text>\n",
        WIDTH - MARGIN[2],
        HEIGHT - 8.0
    );
    match points.as_slice() {
        [] => svg += &format!("<text x=\"{}\" y=\"{}\">no finite loss</text>\n", WIDTH / 2.0, HEIGHT / 2.0),
        [(step, loss)] => {
            svg += &format!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"var(--line)\"/>\n",
                x(*step),
                y(*loss)
            );
        }
        points => {
            let line: Vec<String> =
                points.iter().map(|&(step, loss)| format!("{:.1},{:.1}", x(step), y(loss))).collect();
            svg += &format!("<polyline class=\"loss\" points=\"{}\"/>\n", line.join(" "));
        }
    }
    svg + "</svg>\n"
}

/// A stretch of numbers, and how far apart its ticks are: 1, 2 or 5 times a power of ten.
struct Axis {
    least: f64,
    most: f64,
    tick: f64,
}

impl Axis {
    /// An axis that holds all `values`, with about `ticks` ticks, no closer than `closest`.
    fn over(values: impl Iterator<Item = f64> + Clone, ticks: u32, closest: f64) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(f64::NEG_INFINITY, f64::max);
        let (least, most) = if least > most {
            (0.0, 1.0)
        } else if least == most {
            // One value, or equal ones: an axis around them.
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

    /// As many digits as ticks differ in.
    fn label(&self, value: f64) -> String {
        let digits = (-self.tick.log10().floor()).clamp(0.0, 9.0) as usize;
        format!("{value:.digits$}")
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute<'a>(svg: &'a str, before: &str) -> &'a str {
        svg.split_once(before).unwrap().1.split_once('"').unwrap().0
    }

    #[test]
    fn the_line_goes_through_the_corners_of_the_axes() {
        let svg = loss_curve(&[(1, 4.0), (2, 3.0), (3, 2.0)], "loss");
        assert_eq!(attribute(&svg, "polyline class=\"loss\" points=\""), "64.0,40.0 384.0,176.0 704.0,312.0");
    }

    #[test]
    fn axes_have_round_numbers() {
        let svg = loss_curve(&[(1, 2.9), (2000, 1.1)], "loss");
        for number in [">1.5<", ">2.0<", ">2.5<", ">500<", ">1,000<", ">2,000<"] {
            assert!(svg.contains(number), "{number}\n{svg}");
        }
        // Ticks between whole steps would be printed twice.
        let short = loss_curve(&[(1, 2.9), (3, 1.1)], "loss");
        assert_eq!(short.matches(">2</text>").count(), 1, "{short}");
    }

    #[test]
    fn a_long_run_stays_a_small_file_and_odd_ones_are_drawn_too() {
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
