//! Detects sizes that were likely given without a unit.

/// No budget is smaller than this many bytes, so a smaller number lacks its unit.
const LEAST: u64 = 10_000;

/// Hints for budgets that lack their unit.
pub(crate) fn hints(budgets: &[(&str, Option<u64>)]) -> Vec<String> {
    let lacking =
        budgets.iter().filter_map(|(flag, given)| Some((flag, given.filter(|given| *given < LEAST)?)));
    lacking.map(|(flag, given)| format!("{flag} {given} is {given} bytes: did you mean {given}GB?")).collect()
}
