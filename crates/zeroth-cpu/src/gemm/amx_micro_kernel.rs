//! [`AmxKernel`] as a micro-kernel, with the drivers that run it.
#![allow(unsafe_code, reason = "the kernel writes C through a raw pointer")]

use super::amx::{AOperand, AmxKernel};
use super::amx_pack::{Operand, pack};
use super::blocking::{self, Blocking};
use super::epilogue::Epilogue;
use super::micro_kernel::{MicroKernel, NoInterleave, Operands, TileRect, store_wide_rows};
use super::{MatrixView, amx_driver, amx_short_k};
use crate::work_partition::Tile;
use zeroth_kernel::Element;

impl MicroKernel for AmxKernel {
    type Packed = u16;
    const BLOCKING: Blocking = blocking::AMX;
    const EXCHANGED_ROWS: usize = blocking::EXCHANGED_ROWS;

    fn setup() -> Self {
        Self::configured()
    }

    type PackedA<'a> = AOperand<'a>;

    fn pack_a<'a, T: Element>(
        &self,
        source: MatrixView<'a, T>,
        rows: usize,
        kc: usize,
        out: &'a mut [u16],
    ) -> AOperand<'a> {
        Self::packed_or_in_place(source, rows, kc, out)
    }

    fn pack_b<T: Element>(&self, source: MatrixView<T>, columns: usize, kc: usize, out: &mut [u16]) {
        pack(Operand::B, source, columns, kc, out);
    }

    fn multiply(
        &mut self,
        a: AOperand<'_>,
        b: &[u16],
        c: &mut [f32],
        stride: usize,
        extent: [usize; 2],
        add: bool,
    ) {
        assert!((extent[0] - 1) * stride + extent[1] <= c.len());
        // SAFETY: `c` has the extent, and is borrowed exclusively.
        unsafe { self.multiply_interleaved(a, b, c.as_mut_ptr(), stride, extent, add, &mut NoInterleave) }
    }

    #[inline(always)]
    fn store_tile<O, E: Epilogue<O>>(acc: &[f32], rect: TileRect, out: &mut Tile<O>, epilogue: &E) {
        store_wide_rows(acc, rect, out, epilogue);
    }

    fn run_task<A: Element, B: Element, O>(
        operands: Operands<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        epilogue: &impl Epilogue<O>,
    ) {
        if (1..=blocking::SHORT_K).contains(&operands.k) {
            amx_short_k::run_task(operands, out, scratch, epilogue);
        } else {
            amx_driver::run_task(operands, out, scratch, epilogue);
        }
    }

    fn run_exchanged_task<A: Element, B: Element, O>(
        operands: Operands<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        epilogue: &impl Epilogue<O>,
    ) {
        amx_driver::run_exchanged_task(operands, out, scratch, epilogue);
    }
}
