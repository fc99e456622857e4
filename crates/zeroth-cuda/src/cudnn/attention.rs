//! Attention forward by cuDNN, for micro-batches whose sequences all have the same length, where it is faster than our kernel.
//!
//! The backend affects the last bits of a result, so the choice depends on shapes, the GPU and the presence of the library, never on
//! a timing. Backward always uses our kernel: cuDNN's deterministic backward needs workspace quadratic in the sequence length, and
//! is no faster with the workspace that a plan has.
#![allow(unsafe_code, reason = "enqueues plans over addresses checked by callers")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use zeroth_base::DType;

use super::graph::{ALIGNMENT, DataType, Graph, Plan, PointwiseMode, Reduction, Tensor};
use super::library::{Attribute, AttributeType, Cudnn, Descriptor, DescriptorType};
use crate::driver::{Address, Handle};
use zeroth_kernel::AttentionDims;
use zeroth_kernel::DeviceError;

/// Workspace limit of a plan. Plans have needed 256 bytes so far.
const WORKSPACE: u64 = 64 << 10;

/// The environment variable that selects the backend.
const VARIABLE: &str = "ZEROTH_GPU_ATTENTION";

/// Head dimensions supported by cuDNN's kernels.
const HEAD_DIMS: std::ops::RangeInclusive<usize> = 8..=128;

/// Rows over all heads from which cuDNN is faster.
const MIN_ROWS: usize = 1 << 18;

/// Bytes of workspace reserved for a launch of attention forward.
pub(crate) fn workspace(dims: &AttentionDims, dtype: DType) -> u64 {
    if is_supported(dims, dtype) { WORKSPACE } else { 0 }
}

/// Whether cuDNN supports the shape.
fn is_supported(dims: &AttentionDims, dtype: DType) -> bool {
    let head = HEAD_DIMS.contains(&dims.head_dim) && dims.head_dim.is_multiple_of(8);
    dtype != DType::F32 && head && dims.window.is_none() && dims.scale > 0.0
}

/// Backend of attention forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    /// The faster one for the shape.
    Auto,
    /// cuDNN wherever it is supported.
    Cudnn,
    /// Our own kernel.
    Own,
}

fn parse_backend(value: &str) -> Result<Backend, DeviceError> {
    match value {
        "" => Ok(Backend::Auto),
        "cudnn" => Ok(Backend::Cudnn),
        "own" => Ok(Backend::Own),
        other => Err(DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!("it is `{other}`; write cudnn or own, or unset it"),
        }),
    }
}

/// Shape of a micro-batch whose sequences all have the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    batch: usize,
    length: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    is_bf16: bool,
}

impl Shape {
    /// Whether cuDNN is faster than our kernel, as measured on an H200 (docs/performance.md): for these head dimensions, and with
    /// enough rows to amortize the first and last wave of blocks.
    const fn is_faster(&self, hopper: bool) -> bool {
        let measured = matches!(self.head_dim, 64 | 128);
        hopper && measured && self.batch * self.heads * self.length >= MIN_ROWS
    }
}

/// Device pointers of one launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) q: Address,
    pub(crate) k: Address,
    pub(crate) v: Address,
    pub(crate) y: Address,
    pub(crate) lse: Address,
    pub(crate) workspace: Address,
}

/// cuDNN's fused attention: the library, opened on demand, and its plans.
pub(crate) struct FusedAttention {
    backend: Backend,
    hopper: bool,
    /// The common length of all sequences in the next launches, if there is one.
    pub(crate) length: Option<usize>,
    /// `None` if not opened yet, or not available.
    library: Option<Arc<Cudnn>>,
    is_missing: bool,
    plans: BTreeMap<Shape, Option<ForwardPlan>>,
}

/// A plan of attention forward with the ids of its tensors.
struct ForwardPlan {
    plan: Plan,
    /// q, k, v, y, lse, scale, and the value of masked scores.
    ids: [i64; 7],
}

impl FusedAttention {
    pub(crate) fn new(hopper: bool) -> Result<Self, DeviceError> {
        let value = std::env::var_os(VARIABLE).unwrap_or_default();
        let backend = parse_backend(&value.to_string_lossy())?;
        Ok(Self { backend, hopper, length: None, library: None, is_missing: false, plans: BTreeMap::new() })
    }

    /// Uses cuDNN wherever it is supported, or always our own kernel.
    pub(crate) fn force(&mut self, cudnn: bool) {
        self.backend = if cudnn { Backend::Cudnn } else { Backend::Own };
    }

    /// Enqueues attention forward; false if our own kernel must run instead. `operands.workspace` has [`workspace`] bytes.
    pub(crate) fn forward(
        &mut self,
        dims: &AttentionDims,
        dtype: DType,
        operands: &Operands,
        stream: Handle,
    ) -> Result<bool, DeviceError> {
        let AttentionDims { rows, heads, kv_heads, head_dim, scale, .. } = *dims;
        let fitting =
            |length: &usize| *length > 0 && rows.is_multiple_of(*length) && is_supported(dims, dtype);
        let Some(length) = self.length.filter(fitting) else { return Ok(false) };
        let Operands { q, k, v, y, lse, .. } = *operands;
        let aligned = [q, k, v, y, lse].iter().all(|at| at.is_multiple_of(ALIGNMENT));
        let is_bf16 = dtype == DType::Bf16;
        let shape = Shape { batch: rows / length, length, heads, kv_heads, head_dim, is_bf16 };
        let wanted = match self.backend {
            Backend::Own => false,
            Backend::Cudnn => true,
            Backend::Auto => shape.is_faster(self.hopper),
        };
        if !wanted || !aligned || !self.ensure_open()? {
            return Ok(false);
        }
        let Some(library) = &self.library else { return Ok(false) };
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => entry.insert(match ForwardPlan::new(library, &shape) {
                // Not requested explicitly: fall back to our kernel.
                Err(_) if self.backend == Backend::Auto => None,
                made => made?,
            }),
        };
        let Some(plan) = plan else { return Ok(false) };
        plan.enqueue(operands, scale, stream)?;
        Ok(true)
    }

    /// Opens the library at the first call. A missing library is an error only if cuDNN was requested explicitly.
    fn ensure_open(&mut self) -> Result<bool, DeviceError> {
        if self.library.is_none() && !self.is_missing {
            match Cudnn::open() {
                Ok(library) => self.library = Some(library),
                Err(error) if self.backend == Backend::Cudnn => return Err(error),
                Err(_) => self.is_missing = true,
            }
        }
        Ok(self.library.is_some())
    }

    /// Number of shapes with a plan.
    pub(crate) fn plans(&self) -> usize {
        self.plans.values().flatten().count()
    }

    /// Destroys all plans and closes the library.
    pub(crate) fn close(&mut self) {
        self.plans.clear();
        self.library = None;
    }
}

impl ForwardPlan {
    /// y = softmax(causal_mask(q · kᵀ · scale)) · v, and lse.
    fn new(library: &Arc<Cudnn>, shape: &Shape) -> Result<Option<Self>, DeviceError> {
        let Shape { batch, length, heads, kv_heads, head_dim, is_bf16 } = *shape;
        let [batch, length, heads, kv_heads, head] =
            [batch, length, heads, kv_heads, head_dim].map(|size| size as i64);
        let dtype = if is_bf16 { DataType::Bf16 } else { DataType::F16 };
        let mut graph = Graph::new(library);
        // [batch, heads, length, head_dim], stored as [batch, length, heads, head_dim].
        let layout =
            |heads: i64| ([batch, heads, length, head], [length * heads * head, head, heads * head, 1]);
        let ((q_sizes, q_strides), (kv_sizes, kv_strides)) = (layout(heads), layout(kv_heads));
        let q = graph.device_tensor(q_sizes, q_strides, dtype)?;
        // cuDNN takes kᵀ: the same memory with the last two dimensions swapped.
        let transposed = |[batch, heads, rows, columns]: [i64; 4]| [batch, heads, columns, rows];
        let k = graph.device_tensor(transposed(kv_sizes), transposed(kv_strides), dtype)?;
        let v = graph.device_tensor(kv_sizes, kv_strides, dtype)?;
        let y = graph.device_tensor(q_sizes, q_strides, dtype)?;
        // Stored as [heads, batch * length].
        let lse =
            graph.device_tensor([batch, heads, length, 1], [length, batch * length, 1, 1], DataType::F32)?;
        let (scale, masked) = (graph.scalar()?, graph.scalar()?);

        let scores = graph.virtual_tensor([batch, heads, length, length], DataType::F32)?;
        graph.matmul(q, k, scores)?;
        let scores = graph.pointwise(PointwiseMode::Mul, scores, Some(scale))?;
        let scores = graph.causal_mask(scores, masked)?;
        let maximum = graph.reduce(Reduction::Max, scores)?;
        let scores = graph.pointwise(PointwiseMode::Sub, scores, Some(maximum))?;
        let exps = graph.pointwise(PointwiseMode::Exp, scores, None)?;
        let sums = graph.reduce(Reduction::Add, exps)?;
        let logs = graph.pointwise(PointwiseMode::Log, sums, None)?;
        graph.pointwise_into(PointwiseMode::Add, maximum, Some(logs), lse)?;
        let weights = graph.virtual_tensor([batch, heads, length, length], dtype)?;
        graph.pointwise_into(PointwiseMode::Div, exps, Some(sums), weights)?;
        graph.matmul(weights, v, y)?;
        let ids = [q, k, v, y, lse, scale, masked].map(Tensor::id);
        Ok(graph.plan(WORKSPACE)?.map(|plan| Self { plan, ids }))
    }

    fn enqueue(&self, operands: &Operands, scale: f32, stream: Handle) -> Result<(), DeviceError> {
        let Operands { q, k, v, y, lse, workspace } = *operands;
        let masked = f32::NEG_INFINITY;
        let [scale, masked] = [&raw const scale, &raw const masked].map(|value| value as Address);
        let pack = Descriptor::new(self.plan.library(), DescriptorType::VariantPack)?;
        pack.set(Attribute::VariantPackIds, AttributeType::Int64, &self.ids)?;
        pack.set(Attribute::VariantPackPointers, AttributeType::VoidPtr, &[q, k, v, y, lse, scale, masked])?;
        pack.set(Attribute::VariantPackWorkspace, AttributeType::VoidPtr, &[workspace])?;
        let pack = pack.finalize()?;
        // SAFETY: the caller's pointers hold tensors of the planned shape, the workspace has the size of the plan's limit, and
        // both scalars are read before the call returns.
        unsafe { self.plan.library().execute(self.plan.descriptor(), &pack, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(head_dim: usize, window: Option<usize>) -> AttentionDims {
        AttentionDims::new(64, 4, 2, head_dim, window, 0.1)
    }

    #[test]
    fn backends_are_parsed_and_unknown_ones_rejected() {
        assert_eq!(parse_backend(""), Ok(Backend::Auto));
        assert_eq!((parse_backend("cudnn"), parse_backend("own")), (Ok(Backend::Cudnn), Ok(Backend::Own)));
        let error = parse_backend("flash").unwrap_err().to_string();
        assert!(
            error.contains("ZEROTH_GPU_ATTENTION") && error.contains("`flash`; write cudnn or own"),
            "{error}"
        );
    }

    #[test]
    fn only_supported_shapes_have_a_workspace() {
        assert_eq!(workspace(&dims(128, None), DType::Bf16), WORKSPACE);
        assert_eq!(workspace(&dims(128, Some(16)), DType::Bf16), 0, "a window");
        assert_eq!(workspace(&dims(256, None), DType::F16), 0, "head_dim too large");
        assert_eq!(workspace(&dims(36, None), DType::F16), 0, "head_dim not a multiple of 16 bytes");
        assert_eq!(workspace(&dims(128, None), DType::F32), 0, "f32");
    }

    #[test]
    fn the_backend_follows_the_measured_rule() {
        let shape = |batch, length, head_dim| Shape {
            batch,
            length,
            heads: 16,
            kv_heads: 8,
            head_dim,
            is_bf16: true,
        };
        assert!(shape(8, 2048, 128).is_faster(true) && shape(16, 1024, 64).is_faster(true));
        assert!(!shape(8, 2048, 128).is_faster(false), "another GPU generation");
        assert!(!shape(16, 2048, 96).is_faster(true), "head_dim not measured");
        assert!(!shape(1, 4096, 128).is_faster(true), "too few rows");
    }
}
