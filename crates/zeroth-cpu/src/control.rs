//! The launch of a step's control: what the ranks report becomes what the optimizer reads.

use zeroth_kernel::{RankReport, Recipe, Record, decide};

use crate::launch::cpu_kernel;

cpu_kernel!(Control { ranks, layout, recipe, input, reports, control, record }, |_| 0, |cx| {
    let expected = (layout.bytes() * ranks) as u64;
    assert_eq!(reports.bytes, expected, "{ranks} reports of {layout:?}");
    let [sums, flags, counts] = [layout.sum(0), layout.flag(0), layout.count(0)];
    let all = cx.read::<u8>(reports)?;
    let reports = all.chunks_exact(layout.bytes()).map(|bytes| RankReport {
        losses: bytemuck::cast_slice(&bytes[..sums]),
        sums: bytemuck::cast_slice(&bytes[sums..flags]),
        flags: bytemuck::cast_slice(&bytes[flags..counts]),
        counts: bytemuck::cast_slice(&bytes[counts..layout.count(layout.counts)]),
    });
    let head = size_of::<Record>() as u64;
    let numbers = (layout.losses + layout.flats) as u64;
    let (losses, norms) = cx.write(record.part(head / 8, numbers, 8))?.split_at_mut(layout.losses);
    let first = layout.recorded_counts() as u64 / 4;
    let counts = cx.write(record.part(first, layout.counts as u64, 4))?;
    let (recipe, input) = (cx.read_one::<Recipe>(recipe)?, cx.read_one(input)?);
    let control = cx.write_one(control)?;
    let decided = decide(recipe, input, &reports, control, losses, norms, counts);
    *cx.write_one(record.part(0, 1, head))? = decided;
});
