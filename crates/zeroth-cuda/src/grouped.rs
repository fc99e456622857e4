//! Matmuls with a matrix for each expert. Only the device knows how rows are split over experts, so grids are made for the most
//! tiles that there can be. On Hopper by wgmma and bulk copies where sizes allow, else by a kernel for any size.

use zeroth_base::DType;

use super::driver::Address;
use super::gpu_kernel::{NO_SCRATCH, cuda_kernel};
use super::grouped_functions::{
    HOPPER_ROWS, HopperFunctions, MAX_EXPERTS, NARROW, PANEL, WIDE, hopper_shared,
};
use super::launch::to_type;
use super::launch_context::{LaunchContext, THREADS, aligned16, float};
use super::tensor_map::Tensor;
use zeroth_kernel::{DeviceError, GradStore, GroupedLinearDims, Span};

/// Threads of a block on Hopper: two warpgroups that multiply and one that copies.
const HOPPER_THREADS: u32 = 384;
/// Side of an output tile of the kernels for any size (`TileSize` in grouped.cu).
const fn tile_side(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 64,
        DType::Bf16 | DType::F16 => 128,
    }
}

/// Which of the three matmuls of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// a is x and b is w.
    Forward,
    /// a is dy and b is w.
    Dx,
    /// a is dy and b is x.
    Dw,
}

/// A matmul, of checked operands.
struct GroupedMatmul {
    kind: Kind,
    dims: GroupedLinearDims,
    a: Address,
    b: Address,
    to: Address,
    to_type: DType,
    offsets: Address,
    scale: f32,
    add: bool,
    /// 0: not checked.
    found_inf: Address,
}

impl GroupedMatmul {
    /// Rows of `dw` per expert, columns of the result, and length of the sums of the other two.
    const fn size(&self) -> [usize; 3] {
        let GroupedLinearDims { inputs, outputs, .. } = self.dims;
        match self.kind {
            Kind::Forward => [0, outputs, inputs],
            Kind::Dx => [0, inputs, outputs],
            Kind::Dw => [outputs, inputs, 0],
        }
    }

    /// Elements between rows of a, b and the result.
    const fn strides(&self) -> [usize; 3] {
        let GroupedLinearDims { inputs, x_stride, y_stride, .. } = self.dims;
        match self.kind {
            Kind::Forward => [x_stride, inputs, y_stride],
            Kind::Dx => [y_stride, inputs, x_stride],
            Kind::Dw => [y_stride, x_stride, inputs],
        }
    }

    /// The most row tiles that any split over experts has.
    const fn row_tiles(&self, side: usize) -> usize {
        let GroupedLinearDims { slots, experts, outputs, .. } = self.dims;
        match self.kind {
            Kind::Forward | Kind::Dx => slots / side + experts,
            Kind::Dw => experts * outputs.div_ceil(side),
        }
    }

    /// Position among the portable functions; twice that among those for Hopper.
    fn index(&self, dtype: DType) -> usize {
        match self.kind {
            Kind::Forward => 0,
            Kind::Dx => 1,
            Kind::Dw => 2 + usize::from(self.to_type != dtype),
        }
    }

    /// Whether bulk copies and 16-byte stores can access all operands.
    fn fits_hopper(&self, dtype: DType) -> bool {
        let GroupedLinearDims { slots, experts, inputs, outputs, x_stride, y_stride } = self.dims;
        let aligned = [inputs, outputs, x_stride, y_stride].iter().all(|size| size.is_multiple_of(8));
        dtype != DType::F32
            && aligned
            && [slots, inputs, outputs].iter().all(|size| (1..i32::MAX as usize).contains(size))
            && experts <= MAX_EXPERTS
            && aligned16(&[self.a, self.b, self.to])
    }

    fn enqueue(&self, cx: &LaunchContext) -> Result<(), DeviceError> {
        let dtype = cx.dtype;
        if self.to_type != dtype && self.to_type != DType::F32 {
            return Err(cx.invalid(format!("its result is {}; {dtype} or f32 is supported", self.to_type)));
        }
        if self.fits_hopper(dtype)
            && let Some(functions) = cx.modules.grouped_hopper(cx.driver, dtype)?
        {
            return self.enqueue_hopper(cx, functions);
        }
        let (side, [m, n, k]) = (tile_side(dtype), self.size());
        let [a_stride, b_stride, to_stride] = self.strides();
        // Contiguous elements of a and b that belong to one line.
        let [a_line, b_line] = match self.kind {
            Kind::Forward => [k, k],
            Kind::Dx => [k, n],
            Kind::Dw => [m, n],
        };
        let vectorized = |at: Address, line: usize, stride: usize| {
            u64::from(line.is_multiple_of(8) && stride.is_multiple_of(8) && aligned16(&[at]))
        };
        let arguments = [
            self.a,
            a_stride as u64,
            self.b,
            b_stride as u64,
            self.to,
            to_stride as u64,
            self.offsets,
            self.dims.experts as u64,
            m as u64,
            n as u64,
            k as u64,
            float(self.scale),
            u64::from(self.add),
            self.found_inf,
            vectorized(self.a, a_line, a_stride),
            vectorized(self.b, b_line, b_stride),
        ];
        let function = cx.modules.grouped(cx.driver, dtype)?[self.index(dtype)];
        cx.launch(function, [self.row_tiles(side), n.div_ceil(side), 1], THREADS, 0, &arguments)
    }

    fn enqueue_hopper(&self, cx: &LaunchContext, functions: &HopperFunctions) -> Result<(), DeviceError> {
        let GroupedLinearDims { slots, experts, inputs, outputs, x_stride, y_stride } = self.dims;
        let ([m, n, k], [.., to_stride]) = (self.size(), self.strides());
        let narrow = n <= NARROW[0];
        let [columns, _] = if narrow { NARROW } else { WIDE };
        let panel = PANEL as u32;
        let rows = |at, width, stride| Tensor {
            at,
            size: [width, slots],
            stride: [1, stride],
            copied: [panel, panel],
        };
        let weights = |at, lines| Tensor {
            at,
            size: [inputs, outputs, experts],
            stride: [1, inputs, outputs * inputs],
            copied: [panel, lines, 1],
        };
        let encoder = &functions.tensor_maps;
        let encode = |tensor: &Tensor<2>| encoder.encode(cx.driver, cx.dtype, tensor);
        let maps = match self.kind {
            Kind::Forward => [
                encode(&rows(self.a, inputs, x_stride))?,
                encoder.encode(cx.driver, cx.dtype, &weights(self.b, columns as u32))?,
            ],
            Kind::Dx => [
                encode(&rows(self.a, outputs, y_stride))?,
                encoder.encode(cx.driver, cx.dtype, &weights(self.b, panel))?,
            ],
            Kind::Dw => [encode(&rows(self.a, outputs, y_stride))?, encode(&rows(self.b, inputs, x_stride))?],
        };
        let arguments = [
            self.to,
            to_stride as u64,
            self.offsets,
            experts as u64,
            m as u64,
            n as u64,
            k as u64,
            float(self.scale),
            u64::from(self.add),
            self.found_inf,
        ];
        let function = functions.all[2 * self.index(cx.dtype) + usize::from(narrow)];
        let tiles = self.row_tiles(HOPPER_ROWS) * n.div_ceil(columns);
        let grid = [tiles.min(functions.multiprocessors as usize), 1, 1];
        let shared = hopper_shared(narrow, experts);
        cx.launch_with_maps(function, grid, HOPPER_THREADS, shared, &maps, &arguments)
    }
}

/// The product with each expert's weight, which is added to y where `add`.
pub(super) fn linear(
    cx: &LaunchContext,
    dims: GroupedLinearDims,
    [offsets, x, w, y]: [Span; 4],
    scale: f32,
    add: bool,
) -> Result<(), DeviceError> {
    let matmul = GroupedMatmul {
        kind: Kind::Forward,
        dims,
        a: cx.typed("x", x, dims.slots * dims.x_stride)?,
        b: cx.typed("w", w, dims.experts * dims.outputs * dims.inputs)?,
        to: cx.typed("y", y, dims.slots * dims.y_stride)?,
        to_type: cx.dtype,
        offsets: cx.words("offsets", offsets, dims.experts + 1)?,
        scale,
        add,
        found_inf: 0,
    };
    matmul.enqueue(cx)
}

pub(super) fn linear_dx(
    cx: &LaunchContext,
    dims: GroupedLinearDims,
    [offsets, dy, w, dx]: [Span; 4],
    scale: f32,
    add: bool,
) -> Result<(), DeviceError> {
    let matmul = GroupedMatmul {
        kind: Kind::Dx,
        dims,
        a: cx.typed("dy", dy, dims.slots * dims.y_stride)?,
        b: cx.typed("w", w, dims.experts * dims.outputs * dims.inputs)?,
        to: cx.typed("dx", dx, dims.slots * dims.x_stride)?,
        to_type: cx.dtype,
        offsets: cx.words("offsets", offsets, dims.experts + 1)?,
        scale,
        add,
        found_inf: 0,
    };
    matmul.enqueue(cx)
}

pub(super) fn linear_dw(
    cx: &LaunchContext,
    dims: GroupedLinearDims,
    [offsets, dy, x, dw]: [Span; 4],
    scale: f32,
    store: GradStore,
) -> Result<(), DeviceError> {
    let (to_type, elements) = (to_type(store), dims.experts * dims.outputs * dims.inputs);
    let found_inf = match store {
        GradStore::Add | GradStore::Write => 0,
        GradStore::Round { found_inf, .. } => cx.structure::<u64>("found_inf", found_inf)?,
    };
    let matmul = GroupedMatmul {
        kind: Kind::Dw,
        dims,
        a: cx.typed("dy", dy, dims.slots * dims.y_stride)?,
        b: cx.typed("x", x, dims.slots * dims.x_stride)?,
        to: cx.sized("dw", dw, elements, to_type.bytes())?,
        to_type,
        offsets: cx.words("offsets", offsets, dims.experts + 1)?,
        scale,
        add: store == GradStore::Add,
        found_inf,
    };
    matmul.enqueue(cx)
}

cuda_kernel!(GroupedLinear { dims, offsets, x, w, y }, |_| NO_SCRATCH, |cx| linear(
    cx,
    dims,
    [offsets, x, w, y],
    1.0,
    false
));

cuda_kernel!(GroupedLinearAdd { dims, scale, offsets, x, w, y }, |_| NO_SCRATCH, |cx| linear(
    cx,
    dims,
    [offsets, x, w, y],
    scale,
    true
));

cuda_kernel!(GroupedLinearDx { dims, scale, add, offsets, dy, w, dx }, |_| NO_SCRATCH, |cx| linear_dx(
    cx,
    dims,
    [offsets, dy, w, dx],
    scale,
    add
));

cuda_kernel!(GroupedLinearDw { dims, scale, offsets, dy, x, dw, store }, |_| NO_SCRATCH, |cx| linear_dw(
    cx,
    dims,
    [offsets, dy, x, dw],
    scale,
    store
));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_split_over_experts() {
        let dims = GroupedLinearDims::new(1000, 3, 64, 300);
        let of = |kind| GroupedMatmul {
            kind,
            dims,
            a: 0,
            b: 0,
            to: 0,
            to_type: DType::Bf16,
            offsets: 0,
            scale: 1.0,
            add: false,
            found_inf: 0,
        };
        for split in [[1000, 0, 0], [1, 998, 1], [333, 333, 334], [129, 257, 614]] {
            let tiles: usize = split.iter().map(|rows: &usize| rows.div_ceil(128)).sum();
            assert!(tiles <= of(Kind::Forward).row_tiles(128));
        }
        assert_eq!(of(Kind::Dw).row_tiles(128), 9);
        assert!(of(Kind::Dw).fits_hopper(DType::F16) == dims.outputs.is_multiple_of(8));
        let odd = GroupedLinearDims::new(1000, 3, 4, 304);
        assert!(!GroupedMatmul { dims: odd, ..of(Kind::Dx) }.fits_hopper(DType::Bf16), "rank 4");
    }
}
