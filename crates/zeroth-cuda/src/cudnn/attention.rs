//! Attention forward by the library, where all sequences of a micro-batch are of one length and it is faster than our kernel.
//!
//! Who computes decides about the last bits of a result, so it follows from sizes, the card and the library's being there,
//! never from a timing. Backward is always ours: of the library's, the one whose results are the same at every run needs
//! memory that grows with the square of the length, and is no faster within what a plan has.
#![allow(unsafe_code, reason = "enqueues plans over addresses that callers have checked")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use zeroth_base::DType;

use super::graph::{ALIGNMENT, Fold, Graph, Mode, Number, Plan, Tensor};
use super::library::{Cudnn, Descriptor, Kind, Name, Type};
use crate::driver::{Address, Handle};
use zeroth_kernel::AttentionDims;
use zeroth_kernel::DeviceError;

/// The most workspace that a plan may ask for; it has asked for 256 bytes.
const WORKSPACE: u64 = 64 << 10;

/// The variable that says who computes.
const VARIABLE: &str = "ZEROTH_GPU_ATTENTION";

/// Heads that the library's kernels for this generation take.
const HEADS: std::ops::RangeInclusive<usize> = 8..=128;

/// Rows of all heads from which the library is faster.
const BUSY: usize = 1 << 18;

/// Bytes of workspace that a launch of attention in this type has.
pub(crate) fn workspace(dims: &AttentionDims, dtype: DType) -> u64 {
    if fits(dims, dtype) { WORKSPACE } else { 0 }
}

/// Whether sizes are such that the library may compute it.
fn fits(dims: &AttentionDims, dtype: DType) -> bool {
    let head = HEADS.contains(&dims.head_dim) && dims.head_dim.is_multiple_of(8);
    dtype != DType::F32 && head && dims.window.is_none() && dims.scale > 0.0
}

/// Who computes attention forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    /// Whoever is faster, by the sizes.
    Faster,
    /// The library, wherever it can.
    Library,
    /// Our own kernel.
    Own,
}

fn asked_for(asked: &str) -> Result<Who, DeviceError> {
    match asked {
        "" => Ok(Who::Faster),
        "cudnn" => Ok(Who::Library),
        "own" => Ok(Who::Own),
        other => Err(DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!("it is `{other}`; write cudnn or own, or unset it"),
        }),
    }
}

/// Sizes of a micro-batch whose sequences are of one length.
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
    /// Where the library's kernel is faster than ours, by measurements on an H200 (docs/performance.md): heads of these
    /// lengths, and enough rows of heads to keep the card busy for longer than a few blocks take to begin and end.
    const fn is_faster(&self, hopper: bool) -> bool {
        let measured = matches!(self.head_dim, 64 | 128);
        hopper && measured && self.batch * self.heads * self.length >= BUSY
    }
}

/// Addresses of one launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) q: Address,
    pub(crate) k: Address,
    pub(crate) v: Address,
    pub(crate) y: Address,
    pub(crate) lse: Address,
    pub(crate) workspace: Address,
}

/// The library where it was asked for, its plans, and what is known of the sequences that come.
pub(crate) struct Fused {
    who: Who,
    hopper: bool,
    /// The length of all sequences of the next launches, where it is one.
    pub(crate) length: Option<usize>,
    /// None: not opened yet, or not to be had.
    library: Option<Arc<Cudnn>>,
    is_missing: bool,
    plans: BTreeMap<Shape, Option<Forward>>,
}

/// A plan of attention forward with the numbers of its tensors.
struct Forward {
    plan: Plan,
    /// q, k, v, y, lse, scale, and what hidden scores become.
    ids: [i64; 7],
}

impl Fused {
    pub(crate) fn new(hopper: bool) -> Result<Self, DeviceError> {
        let asked = std::env::var_os(VARIABLE).unwrap_or_default();
        let who = asked_for(&asked.to_string_lossy())?;
        Ok(Self { who, hopper, length: None, library: None, is_missing: false, plans: BTreeMap::new() })
    }

    /// The library wherever it can from now on, or our own kernel always.
    pub(crate) fn by_library(&mut self, library: bool) {
        self.who = if library { Who::Library } else { Who::Own };
    }

    /// Enqueues attention forward; false where our own kernel is to do it. `operands.workspace` has as many bytes as
    /// [`workspace`] says.
    pub(crate) fn forward(
        &mut self,
        dims: &AttentionDims,
        dtype: DType,
        operands: &Operands,
        stream: Handle,
    ) -> Result<bool, DeviceError> {
        let AttentionDims { rows, heads, kv_heads, head_dim, scale, .. } = *dims;
        let fitting = |length: &usize| *length > 0 && rows.is_multiple_of(*length) && fits(dims, dtype);
        let Some(length) = self.length.filter(fitting) else { return Ok(false) };
        let Operands { q, k, v, y, lse, .. } = *operands;
        let aligned = [q, k, v, y, lse].iter().all(|at| at.is_multiple_of(ALIGNMENT));
        let is_bf16 = dtype == DType::Bf16;
        let shape = Shape { batch: rows / length, length, heads, kv_heads, head_dim, is_bf16 };
        let wanted = match self.who {
            Who::Own => false,
            Who::Library => true,
            Who::Faster => shape.is_faster(self.hopper),
        };
        if !wanted || !aligned || !self.is_open()? {
            return Ok(false);
        }
        let Some(library) = &self.library else { return Ok(false) };
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(match Forward::new(library, &shape) {
                // Nobody insists on it, and our kernel can do it.
                Err(_) if self.who == Who::Faster => None,
                made => made?,
            }),
        };
        let Some(plan) = plan else { return Ok(false) };
        plan.enqueue(operands, scale, stream)?;
        Ok(true)
    }

    /// Opens the library at the first call. Where nobody insists on it, one that is not there is no error.
    fn is_open(&mut self) -> Result<bool, DeviceError> {
        if self.library.is_none() && !self.is_missing {
            match Cudnn::open() {
                Ok(library) => self.library = Some(library),
                Err(error) if self.who == Who::Library => return Err(error),
                Err(_) => self.is_missing = true,
            }
        }
        Ok(self.library.is_some())
    }

    /// Plans that were made for shapes so far.
    pub(crate) fn plans(&self) -> usize {
        self.plans.values().flatten().count()
    }

    /// Gives everything back.
    pub(crate) fn close(&mut self) {
        self.plans.clear();
        self.library = None;
    }
}

impl Forward {
    /// softmax(q · kᵀ · scale, below the diagonal) · v, and the logarithms of the rows' sums.
    fn new(library: &Arc<Cudnn>, shape: &Shape) -> Result<Option<Self>, DeviceError> {
        let Shape { batch, length, heads, kv_heads, head_dim, is_bf16 } = *shape;
        let [batch, length, heads, kv_heads, head] =
            [batch, length, heads, kv_heads, head_dim].map(|size| size as i64);
        let number = if is_bf16 { Number::Bf16 } else { Number::F16 };
        let mut graph = Graph::new(library);
        // [batch, heads, length, head] of memory that lies as [batch, length, heads, head].
        let of_rows =
            |heads: i64| ([batch, heads, length, head], [length * heads * head, head, heads * head, 1]);
        let ((wide, wide_strides), (narrow, narrow_strides)) = (of_rows(heads), of_rows(kv_heads));
        let q = graph.given(wide, wide_strides, number)?;
        // The library wants kᵀ: the same memory with its last two dimensions exchanged.
        let turned = |[batch, heads, rows, columns]: [i64; 4]| [batch, heads, columns, rows];
        let k = graph.given(turned(narrow), turned(narrow_strides), number)?;
        let v = graph.given(narrow, narrow_strides, number)?;
        let y = graph.given(wide, wide_strides, number)?;
        // Ours lies as [heads, rows of all sequences].
        let lse = graph.given([batch, heads, length, 1], [length, batch * length, 1, 1], Number::F32)?;
        let (scale, hidden) = (graph.value()?, graph.value()?);

        let scores = graph.between([batch, heads, length, length], Number::F32)?;
        graph.multiply(q, k, scores)?;
        let scores = graph.each(Mode::Multiply, scores, Some(scale))?;
        let scores = graph.below_diagonal(scores, hidden)?;
        let largest = graph.fold(Fold::Largest, scores)?;
        let scores = graph.each(Mode::Subtract, scores, Some(largest))?;
        let powers = graph.each(Mode::Exponential, scores, None)?;
        let sums = graph.fold(Fold::Sum, powers)?;
        let logarithms = graph.each(Mode::Logarithm, sums, None)?;
        graph.each_to(Mode::Add, largest, Some(logarithms), lse)?;
        let shares = graph.between([batch, heads, length, length], number)?;
        graph.each_to(Mode::Divide, powers, Some(sums), shares)?;
        graph.multiply(shares, v, y)?;
        let ids = [q, k, v, y, lse, scale, hidden].map(Tensor::id);
        Ok(graph.plan(WORKSPACE)?.map(|plan| Self { plan, ids }))
    }

    fn enqueue(&self, operands: &Operands, scale: f32, stream: Handle) -> Result<(), DeviceError> {
        let Operands { q, k, v, y, lse, workspace } = *operands;
        let hidden = f32::NEG_INFINITY;
        let [scale, hidden] = [&raw const scale, &raw const hidden].map(|value| value as Address);
        let pack = Descriptor::new(self.plan.library(), Kind::VariantPack)?;
        pack.set(Name::PackIds, Type::Int64, &self.ids)?;
        pack.set(Name::PackPointers, Type::Pointer, &[q, k, v, y, lse, scale, hidden])?;
        pack.set(Name::PackWorkspace, Type::Pointer, &[workspace])?;
        let pack = pack.finish()?;
        // SAFETY: the caller's addresses hold tensors of the shape that the plan is for, the workspace is as long as the plan
        // may ask for, and both values are read before the call returns.
        unsafe { self.plan.library().execute(self.plan.descriptor(), &pack, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(head_dim: usize, window: Option<usize>) -> AttentionDims {
        AttentionDims { rows: 64, heads: 4, kv_heads: 2, head_dim, window, scale: 0.1 }
    }

    #[test]
    fn who_computes_is_named_or_refused() {
        assert_eq!(asked_for(""), Ok(Who::Faster));
        assert_eq!((asked_for("cudnn"), asked_for("own")), (Ok(Who::Library), Ok(Who::Own)));
        let error = asked_for("flash").unwrap_err().to_string();
        assert!(
            error.contains("ZEROTH_GPU_ATTENTION") && error.contains("`flash`; write cudnn or own"),
            "{error}"
        );
    }

    #[test]
    fn only_what_the_library_can_compute_has_a_workspace() {
        assert_eq!(workspace(&dims(128, None), DType::Bf16), WORKSPACE);
        assert_eq!(workspace(&dims(128, Some(16)), DType::Bf16), 0, "a window");
        assert_eq!(workspace(&dims(256, None), DType::F16), 0, "a head that is too long");
        assert_eq!(workspace(&dims(36, None), DType::F16), 0, "a head that is no multiple of 16 bytes");
        assert_eq!(workspace(&dims(128, None), DType::F32), 0, "f32");
    }

    #[test]
    fn sequences_of_one_length_have_the_rule_that_was_measured() {
        let shape = |batch, length, head_dim| Shape {
            batch,
            length,
            heads: 16,
            kv_heads: 8,
            head_dim,
            is_bf16: true,
        };
        assert!(shape(8, 2048, 128).is_faster(true) && shape(16, 1024, 64).is_faster(true));
        assert!(!shape(8, 2048, 128).is_faster(false), "another generation of cards");
        assert!(!shape(16, 2048, 96).is_faster(true), "a head that was not measured");
        assert!(!shape(1, 4096, 128).is_faster(true), "too little to keep the card busy");
    }
}
