//! Which streams give values their rows, and which nodes of an encoder-decoder run on which side of its cross attention.

use zeroth_graph::{Graph, Node, Op, Rows, Value};

/// The stream that gives a value of the graph its rows.
pub(super) fn stream_of(graph: &Graph, value: Value) -> usize {
    match graph.info(value).rows {
        Rows::Stream(stream) | Rows::Times(stream, _) => stream,
        Rows::Fixed(_) => unreachable!("ops that read sequences have the rows of a stream"),
    }
}

/// Whether a node is an attention.
pub(super) const fn is_attention(node: &Node) -> bool {
    matches!(node.op, Op::Attention(_))
}

/// Whether a node is an attention over the keys and values of another stream.
pub(super) fn is_cross(graph: &Graph, node: &Node) -> bool {
    is_attention(node) && stream_of(graph, node.inputs[0]) != stream_of(graph, node.inputs[1])
}

/// The streams of a cross attention's queries and of its keys, where the graph has one: those of its decoder and its encoder.
pub fn cross_streams(graph: &Graph) -> Option<[usize; 2]> {
    let cross = graph.nodes.iter().find(|node| is_cross(graph, node))?;
    Some([0, 1].map(|place| stream_of(graph, cross.inputs[place])))
}

/// The nodes of an encoder-decoder by what they are computed for.
pub(super) struct Sides {
    /// By node: whether keys and values of a cross attention follow from it.
    pub(super) encodes: Vec<bool>,
    /// By node: whether it runs for every token that is decoded, given those keys and values.
    pub(super) decodes: Vec<bool>,
}

impl Sides {
    pub(super) fn of(graph: &Graph) -> Self {
        let (mut for_cache, mut for_logits) =
            (vec![false; graph.values.len()], vec![false; graph.values.len()]);
        let (mut encodes, mut decodes) = (vec![false; graph.nodes.len()], vec![false; graph.nodes.len()]);
        for (at, node) in graph.nodes.iter().enumerate().rev() {
            let is_read = |marks: &[bool]| node.outputs.iter().any(|output| marks[output.index()]);
            let cross = is_cross(graph, node);
            encodes[at] = is_read(&for_cache);
            decodes[at] = node.op.is_loss() || is_read(&for_logits);
            for (place, input) in node.inputs.iter().enumerate() {
                let is_cached = cross && matches!(place, 1 | 2);
                for_cache[input.index()] |= encodes[at] || is_cached && decodes[at];
                for_logits[input.index()] |= decodes[at] && !is_cached;
            }
        }
        Self { encodes, decodes }
    }
}
