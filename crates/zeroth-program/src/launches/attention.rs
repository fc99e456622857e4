//! Lowering of attention, its position biases and its caches.

use zeroth_graph::{AttentionSpec, GradNode, GradWrite, Node, Op, Value};
use zeroth_kernel::{
    AttentionContext, AttentionDims, AttentionDropout, BiasGrad, CacheRange, Kernel, PositionBiasDims,
    RowKey, StoreRowsDims,
};

use super::{At, Span};
use crate::BufferId;
use crate::streams::{is_cross, stream_of};

/// The spec of an attention node.
fn spec(op: Op) -> AttentionSpec {
    let Op::Attention(spec) = op else { unreachable!("attention's own lowering") };
    spec
}

impl At<'_> {
    fn attention_dims(&self, spec: AttentionSpec, [q, k]: [Value; 2]) -> AttentionDims {
        let (heads, kv_heads) = (spec.heads as usize, spec.kv_heads as usize);
        let head_dim = self.width(q) / heads;
        AttentionDims {
            rows: self.rows(q) as usize,
            kv_rows: self.rows(k) as usize,
            heads,
            kv_heads,
            head_dim,
            q_stride: self.row_stride(heads * head_dim),
            kv_stride: self.row_stride(kv_heads * head_dim),
            causal: spec.causal,
            window: spec.window.map(|window| window as usize),
            scale: spec.scale as f32,
            max_distance: spec.max_distance.map(|most| most as usize),
        }
    }

    /// What an attention node and its gradient read besides q, k and v.
    fn attention_context(&self, node: &Node) -> AttentionContext {
        let graph = &self.source.graph;
        let [q, k] = [0, 1].map(|place| stream_of(graph, node.inputs[place]));
        let spec = spec(node.op);
        // Only training drops weights.
        let dropout = spec.dropout.filter(|_| self.section.is_micro_batch());
        AttentionContext {
            starts: self.starts_of(q),
            kv_starts: (k != q).then(|| self.starts_of(k)),
            bias: spec.max_distance.map(|_| self.value(node.inputs[3])),
            dropout: dropout.map(|dropout| AttentionDropout {
                probability: dropout.probability as f32,
                seed: self.binding.seed,
                op: dropout.salt,
                keys: self.part(BufferId::Keys(q), 0, self.rows(node.inputs[0]), size_of::<RowKey>() as u64),
            }),
        }
    }

    pub(super) fn attention(&self, node: &Node) -> Kernel {
        let [q, k, v] = [0, 1, 2].map(|place| node.inputs[place]);
        Kernel::Attention {
            dims: self.attention_dims(spec(node.op), [q, k]),
            context: self.attention_context(node),
            q: self.value(q),
            k: self.value(k),
            v: self.value(v),
            y: self.value(node.outputs[0]),
            lse: self.value(node.outputs[1]),
        }
    }

    pub(super) fn attention_backward(&self, node: &GradNode, of: &Node) -> Kernel {
        // Behind q, k, v and the biases.
        let input = |place: usize| self.value(node.inputs[place]);
        let [y, lse, dy] = [0, 1, 2].map(|place| input(of.inputs.len() + place));
        let [dq, dk, dv] = [0, 1, 2].map(|place| self.value(node.outputs[place].0));
        let dbias = node
            .outputs
            .get(3)
            .map(|(table, write)| BiasGrad { to: self.value(*table), add: *write == GradWrite::Add });
        Kernel::AttentionBackward {
            dims: self.attention_dims(spec(of.op), [of.inputs[0], of.inputs[1]]),
            context: self.attention_context(of),
            q: input(0),
            k: input(1),
            v: input(2),
            y,
            lse,
            dy,
            dq,
            dk,
            dv,
            dbias,
        }
    }

    fn position_bias_dims(&self, of: &Node) -> PositionBiasDims {
        let Op::PositionBias(buckets) = of.op else { unreachable!("a position bias's own dims") };
        let [_, heads] = self.shape(of.params[0]);
        PositionBiasDims { buckets, heads }
    }

    pub(super) fn position_bias(&self, node: &Node) -> Kernel {
        let dims = self.position_bias_dims(node);
        Kernel::PositionBias { dims, w: self.param(node.params[0]), table: self.value(node.outputs[0]) }
    }

    pub(super) fn position_bias_backward(&self, node: &GradNode, of: &Node) -> Kernel {
        Kernel::PositionBiasBackward {
            dims: self.position_bias_dims(of),
            dtable: self.value(node.inputs[0]),
            dw: self.gradient(of.params[0]),
        }
    }

    /// Cache rows of every row of `value`: of its sequence, or of its sequence's source.
    fn cache_ranges(&self, id: BufferId, value: Value) -> Span {
        self.part(id, 0, self.rows(value), size_of::<CacheRange>() as u64)
    }

    /// The rows of an attention node's cache.
    fn cached_rows(&self, node: &Node) -> u64 {
        let program = self.program();
        if is_cross(self.source.graph, node) { program.cached_source_tokens } else { program.cached_tokens }
    }

    /// A cache of an attention node, with rows of the stride of `value`.
    fn cache(&self, id: BufferId, node: &Node, value: Value) -> Span {
        self.part(id, 0, self.cached_rows(node), self.source.row_bytes(value.index()))
    }

    /// Copies of the keys and values of an attention node to its cache.
    pub(super) fn store_kv(&self, at: usize) -> [Kernel; 2] {
        let node = &self.source.graph.nodes[at];
        [(node.inputs[1], BufferId::CachedKeys(at)), (node.inputs[2], BufferId::CachedValues(at))].map(
            |(value, id)| {
                let (rows, width) = (self.rows(value) as usize, self.width(value));
                let (cached, row_stride) = (self.cached_rows(node) as usize, self.row_stride(width));
                Kernel::StoreRows {
                    dims: StoreRowsDims { rows, width, cached, row_stride },
                    ranges: self.cache_ranges(BufferId::CacheRanges, value),
                    x: self.value(value),
                    cache: self.cache(id, node, value),
                }
            },
        )
    }

    /// An attention node over its cache.
    pub(super) fn cached_attention(&self, at: usize) -> Kernel {
        let node = &self.source.graph.nodes[at];
        let [q, k, v] = [0, 1, 2].map(|place| node.inputs[place]);
        let spec = spec(node.op);
        let ranges =
            if is_cross(self.source.graph, node) { BufferId::SourceRanges } else { BufferId::CacheRanges };
        Kernel::CachedAttention {
            dims: self.attention_dims(spec, [q, k]),
            cached: self.cached_rows(node) as usize,
            ranges: self.cache_ranges(ranges, q),
            bias: spec.max_distance.map(|_| self.value(node.inputs[3])),
            q: self.value(q),
            k: self.cache(BufferId::CachedKeys(at), node, k),
            v: self.cache(BufferId::CachedValues(at), node, v),
            y: self.value(node.outputs[0]),
        }
    }
}
