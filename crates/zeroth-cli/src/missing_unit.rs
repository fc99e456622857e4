//! Sizes that were likely typed without their unit.

/// Memory and disks of fewer bytes than this do not exist: such a number lacks its unit.
const LEAST: u64 = 10_000;

/// What to say of each budget that lacks its unit.
pub(crate) fn hints(budgets: &[(&str, Option<u64>)]) -> Vec<String> {
    let lacking =
        budgets.iter().filter_map(|(flag, given)| Some((flag, given.filter(|given| *given < LEAST)?)));
    lacking.map(|(flag, given)| format!("{flag} {given} is {given} bytes: did you mean {given}GB?")).collect()
}
