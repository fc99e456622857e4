//! The largest micro-batch that fits the budgets.

use crate::row::{Footprint, least_footprint};
use crate::{Placement, PlanError, PlanRequest, Shape};

/// Rows of a micro-batch are padded to a multiple of this many tokens.
const TILE: u64 = 16;

/// The most tokens tried, in tiles.
const MOST: u64 = 1 << 20;

/// The most tokens of a micro-batch (of an encoder-decoder, of its sources, with targets in proportion) that are within
/// the budgets, in whole tiles; `None` without a budget or a shape. What a run leaves open is chosen to fit.
///
/// Bytes are nearly linear in tokens, so the limit is found by interpolation and kept between what fits and what does
/// not: within a fiftieth, and exactly where it decides on another row of the micro-batch. `asked` is the footprint of
/// the request itself.
pub(crate) fn most_tokens(
    request: &PlanRequest,
    placement: &Placement,
    asked: &Footprint,
) -> Result<Option<u64>, PlanError> {
    let Some(shape) = &request.shape else { return Ok(None) };
    if request.device_memory.is_none() && request.host_memory.is_none() {
        return Ok(None);
    }
    let needs = |tiles: u64| {
        let shape = Shape { micro_batch: 1, ..shape.scaled_to(TILE * tiles) };
        let needs = least_footprint(&PlanRequest { shape: Some(shape), ..request.clone() }, placement)?;
        let transient = needs.device.activations.saturating_add(needs.device.buffers);
        Ok(Point { tiles, excess: excess(request, &needs), transient })
    };
    let start = shape.micro_batch.saturating_mul(shape.max_length).div_ceil(TILE).clamp(1, MOST);
    // What fits, and what does not.
    let mut fits = if asked.fits(request) == Some(true) { start } else { 0 };
    let mut exceeds = MOST + 1;
    // Where states alone are too much, one tile is as well.
    let transient = asked.device.activations.saturating_add(asked.device.buffers);
    let is_hopeless = fits == 0 && excess(request, asked) > i128::from(transient);
    let (mut before, mut last) = (None, needs(if is_hopeless { 1 } else { start })?);
    for step in 1_u32.. {
        if last.excess <= 0 {
            fits = fits.max(last.tiles);
        } else {
            exceeds = exceeds.min(last.tiles);
        }
        let next_row = (TILE * fits / shape.max_length + 1).saturating_mul(shape.max_length).div_ceil(TILE);
        let is_close = exceeds - fits <= 1 + fits / 50;
        if exceeds <= fits || (is_close && next_row >= exceeds) {
            break;
        }
        // Every fifth step halves, whatever the curve is like.
        let root = if step % 5 == 0 { None } else { root(before, last) };
        let next = match root {
            _ if is_close => next_row,
            // Just below the root, and once that fits just above: two steps bracket it.
            Some(root) => {
                let below = root - root.div_ceil(200);
                if below > fits { below } else { fits + fits.div_ceil(60) }
            }
            None if exceeds > MOST => 2 * fits,
            None => fits.midpoint(exceeds),
        };
        before = Some(last);
        last = needs(next.clamp(fits + 1, exceeds - 1))?;
    }
    Ok(Some(TILE * fits))
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

/// Where the line through the two latest points crosses 0, rounded down; after one point, the line that activations
/// and buffers rise by. `None` where it does not rise.
fn root(before: Option<Point>, last: Point) -> Option<u64> {
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

/// Bytes beyond the budgets; negative where they leave some free.
fn excess(request: &PlanRequest, needs: &Footprint) -> i128 {
    let device = needs.device_needs();
    let host = request.host_needs(device, needs.host_needs());
    let beyond = |need: u64, budget: Option<u64>| Some(i128::from(need) - i128::from(budget?));
    let [device, host] = [beyond(device, request.device_memory), beyond(host, request.host_memory)];
    device.max(host).unwrap_or(0)
}
