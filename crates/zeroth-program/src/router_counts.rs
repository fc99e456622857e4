//! The counts of a step's routers: where a rank's report and the step's record have them.

use zeroth_graph::{Graph, Group, Op, UnitId};

/// The counts of one router: the rows of each of its experts, then the weights that were infinite or NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct RouterCounts {
    /// The graph's node.
    pub node: usize,
    pub unit: UnitId,
    pub experts: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// The index of the first count among those of all routers.
    pub first: usize,
}

impl RouterCounts {
    /// The routers of a graph, in execution order. Those of a teacher are not counted.
    pub(crate) fn find(graph: &Graph) -> Vec<Self> {
        let mut first = 0;
        let of_node = |(node, of): (usize, &zeroth_graph::Node)| {
            let Op::Route { k, .. } = of.op else { return None };
            if of.group == Group::Teacher {
                return None;
            }
            let experts = graph.info(of.inputs[0]).width as usize;
            let found = Self { node, unit: of.unit, experts, per_token: k as usize, first };
            first += experts + 1;
            Some(found)
        };
        graph.nodes.iter().enumerate().filter_map(of_node).collect()
    }

    /// The number of counts of these routers.
    pub(crate) fn total(routers: &[Self]) -> usize {
        routers.last().map_or(0, |last| last.first + last.experts + 1)
    }

    /// The rows of each expert, of the counts of all routers.
    pub fn rows(self, counts: &[u32]) -> &[u32] {
        &counts[self.first..self.first + self.experts]
    }

    /// The weights that were infinite or NaN.
    pub fn nonfinite(self, counts: &[u32]) -> u32 {
        counts[self.first + self.experts]
    }
}
