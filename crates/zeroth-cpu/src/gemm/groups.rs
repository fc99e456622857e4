//! Matmuls of groups, as those of experts: each group has its own operands and rows of C, and their sizes are known when
//! the kernel runs.
//!
//! Groups are split into tasks in proportion to their work, so that all threads are busy whether one group has all rows or
//! hundreds have a few. The summation order depends on k alone, so the split changes no bit.

use std::ops::Range;

use super::MatrixView;
use super::blocking::{Blocking, EXCHANGED_ROWS, SHORT_K, TILE, scratch_up_to};
#[cfg(target_arch = "x86_64")]
use super::driver::amx_supports;
use super::driver::with_kernel;
use super::epilogue::Epilogue;
use super::micro_kernel::{MicroKernel, Operands};
use super::portable::PortableKernel;
use crate::check_scratch;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::work_partition::{GroupedGrid, RowGroup};
use zeroth_kernel::Element;

/// Tasks per thread to aim for: the last ones even out the threads.
const TASKS_PER_THREAD: usize = 4;

/// Panels of columns of a task that is not split further while rows can be.
const PANELS: usize = 4;

/// One matmul of a group: a[m, k] · b[k, n] into `rows`, m rows of C.
pub(crate) struct GroupMatmul<'a, T> {
    /// Its rows of C. Groups are ascending and do not overlap. A group without rows is skipped.
    pub(crate) rows: Range<usize>,
    /// Terms of a sum; without any, the results are zeros.
    pub(crate) k: usize,
    pub(crate) a: MatrixView<'a, T>,
    pub(crate) b: MatrixView<'a, T>,
}

/// f32 elements of scratch that [`gemm_groups`] needs for groups of at most `m` rows, n columns and at most `k` terms.
pub(crate) fn group_scratch(groups: usize, [m, n, k]: [usize; 3], threads: usize) -> usize {
    // A transposed C tile for each thread.
    let exchanged = scratch_up_to(n, m.min(EXCHANGED_ROWS), k, threads) + threads * TILE;
    RowGroup::WORDS * groups + scratch_up_to(m, n, k, threads).max(exchanged)
}

/// Computes the matmul of every group and passes each row of each C tile to `epilogue`. C has `n` columns, and its rows are
/// `row_stride` apart in `out`. `largest` bounds [m, k] of every group.
pub(crate) fn gemm_groups<'a, T: Element, O: Send>(
    pool: &Pool,
    groups: usize,
    group: impl Fn(usize) -> GroupMatmul<'a, T> + Sync,
    largest: [usize; 2],
    out: &mut [O],
    [n, row_stride]: [usize; 2],
    scratch: &mut [f32],
    epilogue: &(impl Epilogue<O> + Sync),
) {
    check_scratch(scratch.len(), group_scratch(groups, [largest[0], n, largest[1]], pool.threads()));
    let (table, scratch) = scratch.split_at_mut(RowGroup::WORDS * groups);
    let table = RowGroup::table(table);
    let work = |group: &GroupMatmul<'_, T>| group.rows.len() as u128 * group.k.max(1) as u128;
    let all: u128 = (0..groups).map(|index| work(&group(index))).sum();
    let wanted = (TASKS_PER_THREAD * pool.threads()) as u128;
    with_kernel!(pool.isa(), T, T, K => {
        for (index, entry) in table.iter_mut().enumerate() {
            let group = group(index);
            let [m, k] = [group.rows.len(), group.k];
            assert!(m <= largest[0] && k <= largest[1], "a group of {m} rows and {k} terms exceeds {largest:?}");
            let tasks = (work(&group) * wanted).div_ceil(all.max(1)) as usize;
            let blocking = K::BLOCKING.for_layout(group.a.is_transposed());
            let tile = if exchanges::<K, T>(&group, n) {
                split_exchanged(&blocking, [m, n, k], tasks)
            } else {
                split(&blocking, [m, n, k], tasks)
            };
            *entry = RowGroup::new(group.rows, tile);
        }
        let grid = GroupedGrid::new(out, [n, row_stride], table);
        pool.each_with(grid, scratch, |_, (index, tile), scratch| {
            let group = group(index);
            let exchanged = exchanges::<K, T>(&group, n);
            let GroupMatmul { k, a, b, .. } = group;
            if exchanged {
                K::run_exchanged_task(Operands { k, a, b }, tile, scratch, epilogue);
            } else {
                K::run_task(Operands { k, a, b }, tile, scratch, epilogue);
            }
        });
    });
}

/// Whether the operands of a group are exchanged: B is column-major and the larger one.
fn exchanges<K: MicroKernel, T>(group: &GroupMatmul<'_, T>, n: usize) -> bool {
    let GroupMatmul { ref rows, k, a, b } = *group;
    let few = rows.len() <= K::EXCHANGED_ROWS && rows.len() < n;
    few && k > SHORT_K && b.is_transposed() && !a.is_transposed()
}

/// [`split`] for exchanged operands: the rows of a task are packed again for each part of the columns, which are read in place.
fn split_exchanged(blocking: &Blocking, [m, n, k]: [usize; 3], tasks: usize) -> [usize; 2] {
    let [columns, rows] = blocking.cache_block(k);
    let down = m.div_ceil(rows).max(1);
    let across = n.div_ceil(columns).max(tasks.div_ceil(down).min(n.div_ceil(PANELS * blocking.mr)));
    [part(m, blocking.nr, down).min(rows), part(n, blocking.mr, across).min(columns)]
}

/// Rows and columns of the tasks of a group: its cache blocks, split until there are `tasks` of them. Columns are split
/// first, as long as a task has a few panels: rows are packed again for each of their tasks, or read in place, while a panel of
/// columns is always packed, and is the larger operand where a group has few rows.
fn split(blocking: &Blocking, [m, n, k]: [usize; 3], tasks: usize) -> [usize; 2] {
    let [rows, columns] = blocking.cache_block(k);
    let (mut down, mut across) = (m.div_ceil(rows), n.div_ceil(columns));
    let most = |length: usize, unit: usize, parts: usize| parts.min(length.div_ceil(unit)).max(1);
    across = across.max(most(n, PANELS * blocking.nr, tasks.div_ceil(down.max(1))));
    down = down.max(most(m, blocking.mr, tasks.div_ceil(across.max(1))));
    across = across.max(most(n, blocking.nr, tasks.div_ceil(down.max(1))));
    [part(m, blocking.mr, down).min(rows), part(n, blocking.nr, across).min(columns)]
}

/// Rows or columns of one of `parts` parts, in whole panels of `unit`.
fn part(length: usize, unit: usize, parts: usize) -> usize {
    length.div_ceil(parts.max(1)).next_multiple_of(unit)
}
