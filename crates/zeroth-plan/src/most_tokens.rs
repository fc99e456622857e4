//! The largest micro-batch that fits the budgets.

use zeroth_kernel::Tier;
use zeroth_program::Bytes;

use crate::row::{Footprint, least_footprint};
use crate::sizing::EarlierSteps;
use crate::{Placement, PlanError, PlanRequest, PlannedRows};

/// Rows of a micro-batch are padded to a multiple of this many tokens.
const TILE: u64 = 16;

/// The most tokens tried, in tiles.
const MOST: u64 = 1 << 20;

/// The most tokens of a micro-batch (of an encoder-decoder, of its sources, with targets in proportion) that are within
/// the budgets, in whole tiles; `None` without a budget or a model. What a run leaves open is chosen to fit.
///
/// Bytes are nearly linear in tokens, so the limit is found by interpolation and kept between what fits and what does
/// not: within a fiftieth, and exactly where it decides on another row of the micro-batch. `asked` is the footprint of
/// the request itself.
pub(crate) fn most_tokens(
    request: &PlanRequest,
    placement: &Placement,
    asked: &Footprint,
) -> Result<Option<u64>, PlanError> {
    let Some(rows) = request.rows else { return Ok(None) };
    if request.device_memory.is_none() && request.host_memory.is_none() {
        return Ok(None);
    }
    let mut earlier = EarlierSteps::default();
    let needs = |tiles: u64| {
        let rows = PlannedRows { micro_batch: 1, ..rows.scaled_to(TILE * tiles) };
        let needs =
            least_footprint(&PlanRequest { rows: Some(rows), ..request.clone() }, placement, &mut earlier)?;
        let transient = transient(&needs);
        Ok(Point { tiles, excess: excess(request, &needs), transient })
    };
    let start = rows.micro_batch.saturating_mul(rows.max_length).div_ceil(TILE).clamp(1, MOST);
    let bracket = Bracket::new(if asked.fits(request) == Some(true) { start } else { 0 });
    // Where states alone are too much, one tile is as well.
    let transient = transient(asked);
    let is_hopeless = bracket.fits == 0 && excess(request, asked) > i128::from(transient);
    let first = if is_hopeless { 1 } else { start };
    Ok(Some(TILE * most_tiles(bracket, first, rows.max_length, needs)?))
}

/// The most tiles that fit, found from a first point on, for rows of `row` tokens.
fn most_tiles(
    mut bracket: Bracket,
    first: u64,
    row: u64,
    mut needs: impl FnMut(u64) -> Result<Point, PlanError>,
) -> Result<u64, PlanError> {
    let mut next = first;
    loop {
        bracket.add(needs(next)?);
        let Bracket { fits, exceeds, .. } = bracket;
        let is_close = exceeds.saturating_sub(fits) <= 1 + fits / 50;
        // Another row of the micro-batch that may fit: the middle one of them.
        let tiles_of = |rows: u64| rows.saturating_mul(row).div_ceil(TILE);
        let (rows, most_rows) = (TILE * fits / row, (TILE * exceeds).div_ceil(row));
        let other_row = tiles_of(rows.midpoint(most_rows).max(rows + 1));
        if exceeds <= fits || (is_close && (other_row >= exceeds || other_row <= fits)) {
            return Ok(fits);
        }
        let guess = if is_close { other_row } else { bracket.guess() };
        next = guess.clamp(fits + 1, exceeds - 1);
    }
}

/// What fits, and what does not, in tiles.
#[derive(Clone, Copy)]
struct Bracket {
    fits: u64,
    exceeds: u64,
    /// The two largest points that fit, the larger one last.
    below: [Option<Point>; 2],
    /// The smallest point that does not fit.
    above: Option<Point>,
    /// Steps in a row that left more than three quarters of the bracket.
    slow: u32,
}

impl Bracket {
    fn new(fits: u64) -> Self {
        Self { fits, exceeds: MOST + 1, below: [None; 2], above: None, slow: 0 }
    }

    fn add(&mut self, point: Point) {
        let width = self.width();
        if point.excess <= 0 {
            self.fits = self.fits.max(point.tiles);
            self.below = [self.below[1], Some(point)];
        } else {
            self.exceeds = self.exceeds.min(point.tiles);
            self.above = Some(point);
        }
        let is_slow = self.above.is_some() && 4 * self.width() > 3 * width;
        self.slow = if is_slow { self.slow + 1 } else { 0 };
    }

    fn width(&self) -> u64 {
        self.exceeds.saturating_sub(self.fits)
    }

    /// Where to look next: just below the crossing of the line through two points, and once that fits just above it. Where
    /// lines lead nowhere, the middle.
    fn guess(&self) -> u64 {
        let above_fit = self.fits + self.fits.div_ceil(60);
        let just_below = |crossing: u64| {
            let below = crossing - crossing.div_ceil(200);
            if below > self.fits { below } else { above_fit }
        };
        match (self.below, self.above) {
            ([before, Some(last)], None) => {
                let crossing = crossing(before, last).unwrap_or(MOST);
                // A line through two points of a flat stretch leads far beyond.
                just_below(crossing).clamp(above_fit.min(MOST), last.tiles.saturating_mul(8).min(MOST))
            }
            ([_, Some(below)], Some(above)) if self.slow < 2 => {
                crossing(Some(below), above).map_or(self.fits.midpoint(self.exceeds), just_below)
            }
            _ if self.exceeds / 4 > self.fits => (self.fits.max(1) * self.exceeds).isqrt(),
            _ => self.fits.midpoint(self.exceeds),
        }
    }
}

/// A point of the curve of bytes over tokens.
#[derive(Clone, Copy)]
struct Point {
    tiles: u64,
    /// Bytes beyond the budgets; negative where they leave some free.
    excess: i128,
    /// Bytes of activations and buffers, most of which rise with the tokens.
    transient: u64,
}

/// Where the line through two points crosses 0, rounded down; of one point, the line that activations and buffers rise
/// by. `None` where it does not rise.
fn crossing(before: Option<Point>, last: Point) -> Option<u64> {
    let (rise, run) = match before {
        Some(before) => {
            let run = i128::from(last.tiles) - i128::from(before.tiles);
            ((last.excess - before.excess) * run.signum(), run.abs())
        }
        None => (i128::from(last.transient), i128::from(last.tiles)),
    };
    if rise <= 0 {
        return None;
    }
    let at = i128::from(last.tiles) + (-last.excess * run).div_euclid(rise);
    u64::try_from(at.clamp(0, i128::from(MOST))).ok()
}

/// Bytes of a device that grow with the tokens.
fn transient(needs: &Footprint) -> u64 {
    let Bytes { activations, buffers, .. } = needs.bytes[Tier::Device];
    activations.saturating_add(buffers)
}

/// Bytes beyond the budgets; negative where they leave some free.
fn excess(request: &PlanRequest, needs: &Footprint) -> i128 {
    let device = needs.device_needs();
    let host = request.host_needs(device, needs.host_needs());
    let beyond = |need: u64, budget: Option<u64>| Some(i128::from(need) - i128::from(budget?));
    let [device, host] = [beyond(device, request.device_memory), beyond(host, request.host_memory)];
    device.max(host).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The limit of a curve of bytes over tiles, and how many points it took.
    fn limit(budget: u64, bytes: impl Fn(u64) -> u64) -> (u64, u32) {
        let steps = Cell::new(0);
        let needs = |tiles: u64| {
            steps.set(steps.get() + 1);
            let (excess, transient) = (i128::from(bytes(tiles)) - i128::from(budget), bytes(tiles) / 3);
            Ok(Point { tiles, excess, transient })
        };
        let fits = if bytes(128) <= budget { 128 } else { 0 };
        (most_tiles(Bracket::new(fits), 128, 2048, needs).unwrap(), steps.get())
    }

    #[test]
    fn limits_are_found_within_a_fiftieth_in_a_few_points() {
        let line = |tiles: u64| 10_000_000 + 5_000 * tiles;
        // As where activations lie in the memory of gradients until they outgrow it.
        let bent = |tiles: u64| if tiles < 600 { 42_000_000 + tiles } else { 45_000_000 + 5_000 * tiles };
        let steps = |tiles: u64| 10_000_000 + 640_000 * tiles.div_ceil(128);
        for budget in [9_000_000, 10_100_000, 11_000_000, 44_000_000, 90_000_000, 4_000_000_000] {
            for (name, curve) in [("line", &line as &dyn Fn(u64) -> u64), ("bent", &bent), ("steps", &steps)]
            {
                let (most, points) = limit(budget, curve);
                assert!(most == 0 || curve(most) <= budget, "{name} {budget}: {most}");
                assert!(curve(most + 1 + most / 50) > budget, "{name} {budget}: {most}");
                assert!(points <= 16, "{name} {budget}: {points} points");
            }
        }
        assert_eq!(limit(10_640_000, line).0, 128);
        assert!(limit(44_000_000, line).1 <= 6);
    }
}
