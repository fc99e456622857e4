//! Checks how the experts of a model are stored: all of them fused, one tensor for a block's, or each expert apart.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::error::WeightProblem;
use crate::{Parameter, ParameterKind, ParameterTable};

/// The problems found, and the beginnings of the names of experts that are reported as too few.
#[derive(Debug, Default)]
pub(super) struct ExpertLayout {
    pub(super) problems: Vec<WeightProblem>,
    pub(super) too_few: Vec<String>,
}

impl ExpertLayout {
    /// Checks the parameters with parts of a table against the names of all stored tensors.
    pub(super) fn check(table: &ParameterTable, stored: &BTreeSet<&str>) -> Self {
        let mut layout = Self::default();
        let (mut fused, mut split) = (None, None);
        let experts = |parameter: &&Parameter| parameter.kind == ParameterKind::Expert;
        for parameter in table.iter().filter(|parameter| !parameter.parts.is_empty()) {
            let whole = parameter.names().find(|name| stored.contains(name));
            let part =
                parameter.parts.iter().map(|part| part.name.as_str()).find(|name| stored.contains(name));
            if let Some((whole, part)) = whole.zip(part) {
                let [whole, part] = [whole, part].map(str::to_owned);
                layout.problems.push(WeightProblem::WholeAndPart { whole, part });
            } else if experts(&parameter) {
                fused = fused.or(whole);
                split = split.or(part);
            }
        }
        if let Some((fused, split)) = fused.zip(split) {
            let [fused, split] = [fused, split].map(str::to_owned);
            layout.problems.push(WeightProblem::MixedExperts { fused, split });
        }
        for unit in &table.units {
            // All of a unit's experts are as many as its first.
            if let Some(first) = unit.parameters.iter().find(experts) {
                layout.check_count(first, stored);
            }
        }
        layout
    }

    fn check_count(&mut self, parameter: &Parameter, stored: &BTreeSet<&str>) {
        // MODULE.EXPERT.PROJECTION.weight
        let module = parameter.parts.first().and_then(|part| part.name.rsplitn(4, '.').nth(3));
        let Some(begin) = module.map(|module| format!("{module}.")) else { return };
        let named = stored.range::<str, _>((Bound::Included(begin.as_str()), Bound::Unbounded));
        let number = |name: &str| name.split('.').next()?.parse::<u64>().ok();
        let numbers: BTreeSet<u64> =
            named.map_while(|name| name.strip_prefix(begin.as_str())).filter_map(number).collect();
        let (Some(last), expected) = (numbers.last(), parameter.shape[0]) else { return };
        let (found, is_gapless) = (last.saturating_add(1), numbers.len() as u64 == last.saturating_add(1));
        if found > expected || (found < expected && is_gapless) {
            if found < expected {
                self.too_few.push(begin.clone());
            }
            self.problems.push(WeightProblem::ExpertCount { begin, found, expected });
        }
    }
}
