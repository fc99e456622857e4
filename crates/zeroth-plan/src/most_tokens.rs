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
        Ok(excess(request, &needs))
    };
    let start = shape.micro_batch.saturating_mul(shape.max_length).div_ceil(TILE).clamp(1, MOST);
    // What fits, and what does not.
    let (mut fits, mut exceeds) = (0, MOST + 1);
    // The two latest points of the curve. That of the request is on it if nothing was chosen for it.
    let (mut before, mut last) = (None, (1, needs(1)?));
    for step in 1_u32.. {
        *(if last.1 <= 0 { &mut fits } else { &mut exceeds }) = last.0;
        if asked.fits(request) == Some(true) {
            fits = fits.max(start);
        }
        let next_row = (TILE * fits / shape.max_length + 1).saturating_mul(shape.max_length).div_ceil(TILE);
        let is_close = exceeds - fits <= 1 + fits / 50;
        if is_close && next_row >= exceeds {
            break;
        }
        let middle = match (fits, exceeds) {
            (0, _) => 1,
            (fits, exceeds) if exceeds > MOST => (2 * fits).min(MOST),
            _ => fits.midpoint(exceeds),
        };
        // Every fourth step halves, whatever the curve is like.
        let root = before.filter(|_| step % 4 > 0).and_then(|before| root(before, last));
        let next = match root {
            _ if is_close => next_row,
            // Far from the first tile, the line through two distant points is a better guess than doubling.
            None if before.is_none() => start.max(2),
            root => root.unwrap_or(middle),
        };
        before = Some(last);
        let next = next.clamp(fits + 1, exceeds - 1);
        last = (next, needs(next)?);
    }
    Ok(Some(TILE * fits))
}

/// Bytes beyond the budgets; negative where they leave some free.
fn excess(request: &PlanRequest, needs: &Footprint) -> i128 {
    let device = needs.device_needs();
    let host = request.host_needs(device, needs.host_needs());
    let beyond = |need: u64, budget: Option<u64>| Some(i128::from(need) - i128::from(budget?));
    let [device, host] = [beyond(device, request.device_memory), beyond(host, request.host_memory)];
    device.max(host).unwrap_or(0)
}

/// Where the line through two points crosses 0, rounded down; `None` where it does not rise.
fn root((x0, y0): (u64, i128), (x1, y1): (u64, i128)) -> Option<u64> {
    let (x0, x1) = (i128::from(x0), i128::from(x1));
    let slope = (y1 - y0) * (x1 - x0).signum();
    if slope <= 0 {
        return None;
    }
    let at = x1 + (-y1 * (x1 - x0).abs()).div_euclid(slope);
    u64::try_from(at.max(0)).ok()
}
